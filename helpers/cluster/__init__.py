"""Several replicas of the engine behind one address: `python -m helpers.cluster --replicas 2`.

    routing.py           the policies: which replica gets a request
    replica_state.py     what a router knows of a replica: its outstanding tokens and its cached blocks
    dispatcher.py        which replica has which request, and how requests of a lost replica continue
    lockstep.py          replicas in one process, for exact counts
    autoscaling.py       how many replicas there should be
    lifecycle.py         which replica is started, drained or replaced next

    replica.py           an engine in a process of its own, and its reports to the front end
    connection.py        the connection between the front end and a replica, for requests and reports
    replica_client.py    the front end's side of all replicas: sends requests, resumes those of lost replicas
    replica_pool.py      starts, drains and replaces the replicas
    failure_detector.py  notices that a replica is lost
    fleet_description.py all replicas as one engine: settings, tokenizer, limits
    ray_replicas.py      replicas as Ray actors
    app.py               the single server's application with replicas behind it

The first six need neither torch nor Ray.
"""
