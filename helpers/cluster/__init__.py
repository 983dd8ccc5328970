"""Many replicas of the engine behind one address: `python -m helpers.cluster --replicas 2`.

    routing.py        the policies: which replica gets a request
    replica_state.py  what a router knows of a replica: its outstanding tokens and its cached blocks
    dispatcher.py     which replica has which request, and how requests of a lost replica continue
    lockstep.py       replicas in one process, for exact counts

Neither torch nor Ray is needed for these.
"""
