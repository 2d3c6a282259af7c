"""The least job of Ray on two nodes: an actor on each, which says its host name."""

from __future__ import annotations

import socket

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=2)
class Host:
    """An actor."""

    def name(self) -> str:
        """Return its host name."""
        return socket.gethostname()


ray.init(log_to_driver=False)
places = placement_group([{"CPU": 2}, {"CPU": 2}], strategy="STRICT_SPREAD")
ray.get(places.ready())
hosts = [
    Host.options(scheduling_strategy=PlacementGroupSchedulingStrategy(places, number)).remote()
    for number in range(2)
]
print(*ray.get([host.name.remote() for host in hosts]))
