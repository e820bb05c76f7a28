"""Where the actors of a sweep live (Ray)."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def beside_driver() -> dict[str, Any]:
    """Options of an actor that serves the whole sweep: without a CPU, on the driver's node.

    Ray would put it on any node, one that may be taken back included, and the sweep would end with that node.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}
