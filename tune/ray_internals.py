"""Parts of Ray Train and Ray Tune, beyond their public API, that tune/ uses (Ray).

The only other file that uses such parts is trainers/on_ray/internals.py.
tune/lanes and tune/ray derive classes from these classes of Ray, because Ray's
public API starts new processes for each run, whereas a lane reuses its
processes. Controllers import this file, so it must not import torch.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ray._private.dict import flatten_dict
from ray.train._internal import session
from ray.train._internal.session import get_session
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.checkpoint.sync_actor import (
    SynchronizationActor,
)
from ray.train.v2._internal.execution.context import (
    TrainContext,
    get_train_context,
    set_train_context,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.train_fn_utils import (
    TrainFnUtils,
    get_train_fn_utils,
    set_train_fn_utils,
)
from ray.train.v2._internal.execution.worker_group import (
    worker_group as group_module,
)
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.poll import (
    WorkerGroupPollStatus,
    WorkerStatus,
)
from ray.train.v2._internal.execution.worker_group.state import (
    WorkerGroupState,
    WorkerGroupStateBuilder,
)
from ray.train.v2._internal.execution.worker_group.state import (
    _shutdown_workers as shutdown_workers,
)
from ray.train.v2._internal.execution.worker_group.thread_runner import (
    ThreadRunner,
)
from ray.train.v2._internal.execution.worker_group.worker import (
    ActorMetadata,
    RayTrainWorker,
    Worker,
)
from ray.train.v2._internal.execution.worker_group.worker_group import (
    WorkerGroup,
)
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.train.v2.api.context import TrainContext as PublicContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

__all__ = [  # noqa: RUF022 # (grouped by purpose)
    # What the functions of `ray.train` and `ray.tune` call. Ray's docstring of
    # TrainFnUtils says that this class may be replaced.
    "PublicContext",
    "TrainContext",
    "TrainFnUtils",
    "get_session",
    "get_train_context",
    "get_train_fn_utils",
    "set_train_context",
    "set_train_fn_utils",
    # Ray's controller. A lane runs it in the driver; a trial of tune/ray runs
    # it in the trial's actor.
    "FixedScalingPolicy",
    "TrainController",
    # The base class of TorchTrainer, which does not import torch.
    "DataParallelTrainer",
    # The controller's worker group; in tune/ray it borrows a lane's workers.
    "ActorMetadata",
    "DefaultPlacementGroupHandle",
    "RayTrainWorker",
    "SynchronizationActor",
    "ThreadRunner",
    "Worker",
    "WorkerGroup",
    "WorkerGroupPollStatus",
    "WorkerGroupState",
    "WorkerGroupStateBuilder",
    "WorkerStatus",
    "group_module",
    "shutdown_workers",
    # Callbacks. Ray's public callback class hears only of reports and
    # failures, and some of Ray's own callbacks start actors that a lane does
    # not need.
    "ControllerCallback",
    "DatasetsCallback",
    "StateManagerCallback",
    "WorkerGroupCallback",
    # Ray's conversions of a worker's resources and of nested metrics.
    "bundle_to_remote_args",
    "flatten_dict",
]


def named_worker(words: str) -> type[RayTrainWorker]:
    """Return a class of Ray workers that Ray displays under this name.

    The name appears in `ray list actors --detail` and in the dashboard.
    """

    class NamedWorker(RayTrainWorker):
        def __repr__(self) -> str:
            return words

    NamedWorker.__name__ = NamedWorker.__qualname__ = RayTrainWorker.__name__
    return NamedWorker


def make_barrier() -> Any:
    """Return a barrier for a trial's ranks: the plain object behind Ray's actor."""
    actor: Any = SynchronizationActor
    return actor.__ray_metadata__.modified_class()


@contextlib.contextmanager
def without_tags() -> Iterator[None]:
    """Keep Ray from counting callbacks for its telemetry in this block.

    To recognize the callbacks of MLflow and W&B, Ray imports both, which takes
    two seconds.
    """
    from ray.air._internal import usage

    of_ray: Any = usage
    count = of_ray.tag_callbacks
    of_ray.tag_callbacks = lambda callbacks: False
    try:
        yield
    finally:
        of_ray.tag_callbacks = count


def set_session(found: Any) -> None:
    """Make `found` the session that `ray.tune.report` and `get_checkpoint` use."""
    of_tune: Any = session
    of_tune._session = found


def set_device(kind: str) -> None:
    """Make Ray Train use this kind of device without joining the cluster to ask.

    Imports torch.
    """
    from ray.air._internal import device_manager

    of_ray: Any = device_manager
    of_ray._torch_device_manager = (
        device_manager.get_torch_device_manager_by_device_type(kind)
    )


def watching_in_thread(callback: Any) -> Any:
    """Return a callback of Ray's controller, or its replacement without an actor.

    Ray's PreemptionCallback (since 2.57) starts an actor that watches for
    nodes that are about to be taken away. Its replacement watches in a thread
    of this process. All other callbacks are returned unchanged.
    """
    try:
        from ray.train.v2._internal.callbacks.preemption_callback import (
            PreemptionCallback,
        )
        from ray.train.v2._internal.execution.preemption import (
            PreemptionWatcher,
        )
    except ImportError:
        return callback

    class Watch(PreemptionCallback):
        _thread: PreemptionWatcher | None = None

        def after_worker_group_start(self, worker_group: Any) -> None:
            self._stop_watcher()
            ranks: dict[str, list[int]] = defaultdict(list)
            for rank, worker in enumerate(worker_group.get_workers()):
                ranks[worker.metadata.node_id].append(rank)
            actors = {
                rank: worker.actor
                for rank, worker in enumerate(worker_group.get_workers())
            }
            self._thread = PreemptionWatcher(
                ranks, self._poll_interval_s, actors
            )

        def _stop_watcher(self) -> None:
            if self._thread is not None:
                self._thread._stop_event.set()
                self._thread = None

    return Watch() if isinstance(callback, PreemptionCallback) else callback
