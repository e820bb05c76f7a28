"""What a step asks of the device beside the model's own work: no value is
read, no gradient's worth of memory taken.

A read waits until the device has done all that it was given; on a CPU the same
operator is seen, and costs nothing.
"""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.unit.test_step import SAMPLES, Regression, make_step, run_step

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}
WIDTH = 64


class Costs(TorchDispatchMode):
    """Counts the reads of a device's values, and the most bytes that one
    operator of a step itself has taken.
    """

    def __init__(self):
        super().__init__()
        self.reads = []
        self.own_bytes = 0
        self.in_model = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in READS:
            self.reads.append(str(func))
        if not self.in_model:
            known = {
                tensor.untyped_storage().data_ptr()
                for tensor in tree_iter((args, kwargs))
                if _is_plain(tensor)
            }
            new = [tensor for tensor in tree_iter(out) if _is_plain(tensor)]
            taken = sum(
                t.untyped_storage().nbytes()
                for t in new
                if t.untyped_storage().data_ptr() not in known
            )
            self.own_bytes = max(self.own_bytes, taken)
        return out

    @contextlib.contextmanager
    def model(self):
        self.in_model += 1
        try:
            yield
        finally:
            self.in_model -= 1


def _is_plain(value):
    return isinstance(value, Tensor) and value.layout is torch.strided


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        SAMPLES, 4, generator=generator, dtype=dtype
    ), torch.randn(SAMPLES, generator=generator)


@pytest.mark.parametrize(
    "sizes", [[SAMPLES], [4, 4, 4]], ids=["whole", "accumulated"]
)
@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clip"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_a_step_reads_nothing_and_takes_no_memory_of_its_own(
    precision, kind, clip, sizes, monkeypatch
):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 1),
    )
    if precision == "bf16-pure":
        model = model.bfloat16()
    batch = data(torch.bfloat16) if precision == "bf16-pure" else data()
    options = {"momentum": 0.9} if kind is SGD else {}
    step = make_step(
        model,
        Regression(),
        kind(model.parameters(), lr=0.01, fused=True, **options),
        precision,
        clip,
    )
    costs = Costs()
    loss = step.forward.loss
    backward = step._backward

    def in_model(function):
        def call(*args):
            with costs.model():
                return function(*args)

        return call

    monkeypatch.setattr(
        type(step.forward), "loss", lambda _, batch: in_model(loss)(batch)
    )
    monkeypatch.setattr(step, "_backward", in_model(backward))
    run_step(step, batch, sizes)  # makes the optimizer's state
    with costs:
        for _ in range(2):
            run_step(step, batch, sizes)
    assert costs.reads == []
    assert costs.own_bytes < 2 * WIDTH * WIDTH, (
        "less than the largest gradient"
    )
