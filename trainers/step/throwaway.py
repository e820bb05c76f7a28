"""Take throw-away passes: training begins as if there had been none."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.data.batch import tensors_of
from trainers.devices.group import answered_locally
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.model.sharding import is_sharded
from trainers.step.forward import ForwardPass
from trainers.step.snapshot import Snapshot


class CollectiveWatch(TorchDispatchMode):
    """Notes whether anything inside sends tensors to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run every operation as it is."""
        self.seen |= func.namespace in (
            "c10d",
            "_c10d_functional",
            "_c10d_functional_autograd",
        )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def throwaway(
    forward: ForwardPass, optimizer: Optimizer | None = None, dataset: Any = None
) -> Iterator[Snapshot]:
    """Restore model, task, dataset and random state at the end, to the bit.

    All gradients are dropped.

    With `optimizer`, whose steps may be taken inside, its state and all parameters too.
    Copies are kept in host memory; the snapshot that is given may be told of more to
    keep. Collectives of a bare module's task are answered on the rank itself: it may
    fail, or be alone, and nobody waits.
    """
    task = forward.task
    device = forward.device
    called: Any = forward.model
    wrapped = isinstance(called, (DistributedDataParallel, DataParallel))
    model: nn.Module = called.module if wrapped else called
    kept = [*model.buffers()]
    if optimizer is not None:
        kept += [one for group in optimizer.param_groups for one in group["params"]]
        kept += [*model.parameters(), *tensors_of(list(optimizer.state.values()))]
    random_state = get_rng_state(device)
    snapshot = Snapshot(
        task, {"dataset": dataset, "optimizer": optimizer, "model": model}, kept
    )
    live = task.state_dict()
    for tensor in tensors_of(live):
        snapshot.keep(tensor)
    task_state = copy.deepcopy(live)
    try:
        with (
            contextlib.nullcontext()
            if wrapped or is_sharded(model)
            else answered_locally()
        ):
            yield snapshot
    finally:
        model.zero_grad(set_to_none=True)
        task.load_state_dict(task_state)  # what only the task itself can put back
        snapshot.restore()
        set_rng_state(random_state, device)
