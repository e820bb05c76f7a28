"""Keep Ray's coordinator up to date, by whose records the size of an elastic group is chosen.

It counts nodes every 20 s, and keeps what a run has reserved for 180 s: it learns late of a node that is gone, and of a
run whose driver was killed. Source: default_autoscaling_coordinator.py of ray.data (Ray 2.60).
"""

import logging
import time
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import PreemptingState, ReschedulingState, RestartingState
from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client

from trainers.on_ray.vital_signs import show_life

logger = logging.getLogger(__name__)

_ANSWER_S, _GONE_S, _MANY = 10.0, 15.0, 1000


class NodeCount(ControllerCallback):
    """Lets Ray's coordinator count the nodes before a group starts again: an elastic group that is started before the
    next count waits for the dead node until RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S.

    After a preemption notice it waits until the nodes are gone, since Ray chooses the group's size at the deadline,
    seconds before it misses them.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray in the controller's constructor."""
        show_life()
        # A busy coordinator misses a request, which is sent again: a line, not a traceback.
        logging.getLogger(autoscaling_coordinator_client.__name__).addFilter(_without_traceback)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Called by Ray in its control loop, with no other group to look after."""
        if not isinstance(current_state, (RestartingState, ReschedulingState)):
            return
        if isinstance(previous_state, PreemptingState) and isinstance(current_state, RestartingState):
            taken, deadline = set(previous_state.preemption_info.preempted_node_ids), time.monotonic() + _GONE_S
            while taken & {node["NodeID"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < deadline:
                time.sleep(0.2)
        count_nodes()


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def count_nodes() -> None:
    """Let Ray's coordinator count the nodes now; warns where it does not."""
    try:
        ray.get(_coordinator().get_reserved_resources.remote("", recompute=True), timeout=_ANSWER_S)
    except (ray.exceptions.RayError, ImportError, TypeError) as error:
        logger.warning("Ray did not count the nodes again (%s): the group may wait for a dead one", error)


def free_dead_runs() -> None:
    """Free what runs reserved whose controller is dead, as after `kill -9` of a driver: a resumed run would have to
    wait for it, or start with what is left.
    """
    try:
        from ray.train.v2._internal.state.state_actor import get_state_actor
        from ray.util.state import list_actors

        register: Any = get_state_actor()
        if register is None:  # this cluster has had no run
            return
        runs: dict[str, Any] = ray.get(register.get_train_runs.remote(), timeout=_ANSWER_S)
        filters: Any = [("class_name", "=", "TrainController"), ("state", "=", "ALIVE")]
        address = ray.get_runtime_context().gcs_address
        alive = {actor.actor_id for actor in list_actors(address, filters, limit=_MANY, timeout=int(_ANSWER_S))}
        dead = [run_id for run_id, run in runs.items() if run.controller_actor_id not in alive]
        ray.get([_coordinator().cancel_request.remote(f"train-{run_id}") for run_id in dead], timeout=_ANSWER_S)
    except Exception as error:  # a cluster without dashboard, a newer Ray: the run starts all the same
        logger.warning("Ray may hold workers of killed runs for 180 s: %s", error)


def _coordinator() -> Any:
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as ray_coordinator

    return ray_coordinator.get_or_create_autoscaling_coordinator()
