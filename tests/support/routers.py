"""Routers that weigh the load of a replica otherwise than the course's."""

from helpers.cluster.routing import PrefixAware


class CacheAlone(PrefixAware):
    """Considers the cache alone."""

    weight = 0
