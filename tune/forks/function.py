"""A Ray Train training function, in its own process.

The function can use Ray Train's interface (`ray.train.report`, `get_context`,
...) as in a Ray worker. Most calls go over the channel to the worker that
started this process, where Ray's own implementation answers them. The process
itself joins the cluster only when its code calls Ray (`ray.get`, `ray.data`,
actors).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.exceptions import RaySystemError

from trainers.causes import failure_of
from trainers.config.model import Tree
from trainers.devices.device import peak_memory_bytes
from trainers.launch.spec import FunctionSpec
from trainers.on_ray.internals import read_token_again
from tune.forks.assignment import Place
from tune.forks.child import (
    Channel,
    TrialStopped,
    as_error,
    imported_libraries,
    make_absolute,
)
from tune.ray_internals import (
    PublicContext,
    TrainFnUtils,
    set_device,
    set_session,
    set_train_fn_utils,
)


def _placed(name: str) -> Any:
    """Return a method that returns a number of the worker's place."""

    def number(self: ForkContext) -> Any:
        return getattr(self._place, name)

    return number


class ForkContext(PublicContext):
    """The context that `ray.train.get_context()` returns."""

    def __init__(self, place: Place, experiment: str, storage: Any) -> None:
        self._place = place
        self._experiment = experiment
        self._storage = storage

    get_world_size = _placed("world_size")
    get_world_rank = _placed("rank")
    get_local_rank = _placed("local_rank")
    get_local_world_size = _placed("local_world_size")
    get_node_rank = _placed("node_rank")

    def get_experiment_name(self) -> str:
        """Do the same as Ray's method."""
        return self._experiment

    def get_storage(self) -> Any:
        """Do the same as Ray's method."""
        return self._storage


def _asked(name: str) -> Any:
    """Return a method that forwards calls to Ray's implementation in the worker."""

    def ask(self: ForkUtils, *args: Any, **given: Any) -> Any:
        return self.channel.call(name, *args, **given)

    return ask


class ForkUtils(TrainFnUtils):
    """The implementation behind the functions of `ray.train`, such as `report`."""

    def __init__(self, channel: Channel, context: ForkContext) -> None:
        self.channel = channel
        self._context = context

    get_checkpoint = _asked("get_checkpoint")
    get_all_reported_checkpoints = _asked("get_all_reported_checkpoints")
    get_preemption_info = _asked("get_preemption_info")
    barrier = _asked("barrier")
    broadcast_from_rank_zero = _asked("broadcast_from_rank_zero")

    def report(self, *args: Any, **given: Any) -> None:
        """Do the same as Ray's method."""
        make_absolute(given.get("checkpoint"))
        self.channel.call("report", *args, **given)

    def get_dataset_shard(self, *args: Any, **given: Any) -> Any:
        """Do the same as Ray's method."""
        connect()  # a shard holds handles of actors
        return self.channel.call("get_dataset_shard", *args, **given)

    def get_context(self) -> PublicContext:
        """Do the same as Ray's method."""
        return self._context

    def is_distributed(self) -> bool:
        """Do the same as Ray's method."""
        return True


class _TuneSession:
    """The session behind `ray.tune.report` and `ray.tune.get_checkpoint`."""

    world_rank = 0  # not None: Ray then takes this for a session of Ray Train
    trial_id = trial_name = experiment_name = None
    trial_resources = trial_dir = None

    def __init__(self, utils: ForkUtils) -> None:
        self._utils = utils

    def report(self, metrics: Tree, checkpoint: Any = None) -> None:
        """Do the same as Ray's method."""
        self._utils.report(metrics, checkpoint=checkpoint)

    @property
    def loaded_checkpoint(self) -> Any:
        """Do the same as Ray's method."""
        return self._utils.get_checkpoint()


_init = ray.init


def connect() -> None:
    """Join the cluster of the worker that has started this process."""
    if not ray.is_initialized():
        _init(log_to_driver=False, logging_level=logging.ERROR)


def unpickled(function: bytes) -> Any:
    """Unpickle a function; join the cluster if it holds references to Ray's objects.

    `ray.put` returns such references; `tune.with_parameters` stores them.
    """
    try:
        return cloudpickle.loads(function)
    except RaySystemError:
        connect()
        return cloudpickle.loads(function)


def as_new_process(gpu_ids: list[str]) -> None:
    """Set the threads and the device as in a new Ray process.

    Args:
        gpu_ids: The GPU IDs that Ray has assigned to the worker.
    """
    num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    torch.set_num_threads(num_threads or torch.get_num_threads())
    # Ray Train finds the device by this function, which would join the
    # cluster.
    of_ray: Any = ray
    of_ray.get_gpu_ids = lambda: gpu_ids
    # In Ray's workers, the usual guard by `ray.is_initialized` skips this.
    of_ray.init = lambda *args, **given: connect()
    set_device("cuda" if gpu_ids else "cpu")


def run_function(
    channel: Channel,
    function: FunctionSpec | bytes,
    place: Place,
    gpu_ids: list[str],
    experiment: str,
    storage: Any,
) -> Any:
    """Call a training function, which is given by name or pickled.

    Returns:
        A mapping with a `status`. If the function returned: `returned` (its
        value, or None if it was given by name), `peak_memory_bytes`, and
        `imported`, the installed modules that it imported. If it raised an
        exception: `raised`, `traceback`, `message` and `follows`. After
        TrialStopped, the status is `stopped`.
    """
    modules = set(sys.modules)
    as_new_process(gpu_ids)
    read_token_again()  # the zygote may be older than Ray's token
    utils = ForkUtils(channel, ForkContext(place, experiment, storage))
    set_train_fn_utils(utils)
    set_session(_TuneSession(utils))
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # as Ray
    try:
        place.form_group(channel.files)
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(
            ray.train.torch.get_device()
        )
        if isinstance(function, FunctionSpec):
            call = function.load()
        else:
            call = unpickled(function)
        channel.call("begins")
        # The context sets the current GPU: the node's others are visible, too.
        with ray.train.torch.TorchConfig().train_func_context():
            returned = call()
        if isinstance(function, FunctionSpec):
            returned = None
        # A value that cannot be pickled counts as the function's error.
        cloudpickle.dumps(returned)
    except TrialStopped:
        return {"status": "stopped"}
    except BaseException as error:
        return _raised(as_error(error), place.rank)
    finally:
        _leave_group()
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    return {
        "status": "done",
        "returned": returned,
        "peak_memory_bytes": peak_memory_bytes(device),
        "imported": imported_libraries(modules),
    }


def _raised(error: BaseException, rank: int) -> Tree:
    failure = failure_of(error, rank)
    text = "".join(traceback.format_exception(error, limit=-20))
    return {
        "status": failure.status,
        "message": failure.message,
        "follows": failure.follows,
        "traceback": text,
        "raised": picklable(error),
    }


def picklable(error: BaseException) -> BaseException:
    """Return the exception; if it cannot be pickled, a RuntimeError that quotes it."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _leave_group() -> None:
    # NCCL would wait for kernels of ranks that are gone.
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
