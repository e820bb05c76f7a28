"""What each strategy puts around a model, and how a sharded state is taken apart; without a process group."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from trainers.config.sections import DdpConfig
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.model import strategy as parallel
from trainers.model.sharding import shard_like, shard_units, whole
from trainers.model.strategy import check_static_graph, place_model, wrap_model

CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)


class Block(nn.Module):
    """Has a Sequential of its own, as a transformer's block has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Pair(nn.Sequential):
    """A Sequential with a name: a block."""


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def names(model: nn.Module) -> list[str]:
    units = shard_units(model)
    return [name for name, module in model.named_modules() if any(module is unit for unit in units)]


def test_repeated_blocks_are_sharded_whole() -> None:
    assert names(Language()) == ["blocks.0", "blocks.1"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    stages = nn.Sequential(
        nn.Sequential(Pair(nn.Linear(2, 2), nn.Linear(2, 2)), Block()), nn.Flatten(), nn.Linear(2, 2)
    )
    assert names(stages) == ["0.0", "0.1", "2"]
    assert names(nn.Linear(2, 2)) == []
    assert names(Block()) == ["mlp.0", "mlp.2"]


def test_blocks_that_share_a_parameter_stay_with_the_root() -> None:
    tied = nn.Sequential(nn.Embedding(7, 4), Block(), nn.Linear(4, 7, bias=False))
    tied[2].weight = tied[0].weight
    assert names(tied) == ["1"]
    same = Block()
    assert names(nn.Sequential(same, Block(), same)) == ["1"]
    inside = Block()
    inside.mlp[2] = inside.mlp[0]
    assert names(nn.ModuleList([inside])) == ["0"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "none", "dp"])
def test_one_worker_without_gpus_trains_the_bare_model(strategy: str) -> None:
    model = nn.Linear(2, 2)
    assert place_model(model, ALONE, strategy) is model
    assert wrap_model(model, ALONE, strategy) is model
    assert type(model) is nn.Linear


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("trainers"), "propagate", True)
    wrap_model(nn.Linear(2, 2), ALONE, "dp")
    assert "strategy dp has 0 GPU here" in caplog.text
    wrap_model(nn.Linear(2, 2), ALONE, "ddp", DdpConfig(compression="bf16"))
    assert "`ddp` has no effect: one worker sends no gradients" in caplog.text
    caplog.clear()
    wrap_model(nn.Linear(2, 2), ALONE, "ddp", DdpConfig())
    assert caplog.text == ""


def test_dp_takes_all_gpus_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build(self: Any, module: nn.Module, device_ids: list[int]) -> None:
        nn.Module.__init__(self)
        self.module = module
        seen["ids"] = device_ids

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(DataParallel, "__init__", build)
    model = nn.Linear(2, 2)
    wrapped = wrap_model(model, Group(0, 1, torch.device("cuda", 0)), "dp")
    assert isinstance(wrapped, DataParallel)
    assert wrapped.module is model
    assert seen["ids"] == [0, 1, 2]


def test_replicas_compute_in_the_callers_format(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(nn.Module):
        def forward(self, inputs: Tensor, scale: int = 1) -> tuple[torch.dtype, float]:
            return torch.get_autocast_dtype("cuda"), float(inputs * scale)

    def in_threads(modules: Any, inputs: Any, kwargs: Any, devices: Any) -> list[Any]:
        """As torch's own does it: a thread a replica, each with the autocast format that a new thread has."""
        found: list[Any] = [None] * len(modules)

        def call(index: int) -> None:
            found[index] = modules[index](*inputs[index], **kwargs[index])

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(modules))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    monkeypatch.setattr(parallel, "parallel_apply", in_threads)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wrapped: Any = wrap_model(nn.Linear(2, 2), Group(0, 1, torch.device("cuda", 0)), "dp")
    inputs = [(torch.tensor(2.0),), (torch.tensor(3.0),)]
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = wrapped.parallel_apply([Asking(), Asking()], inputs, [{"scale": 5}, {}])
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert found == [(torch.bfloat16, 10.0), (torch.bfloat16, 3.0)]


def test_a_static_graph_cannot_accumulate() -> None:
    static, group = DdpConfig(static_graph=True), Group(0, 2, CPU)
    check_static_graph(static, group, 1, 8)
    check_static_graph(DdpConfig(), group, 3, 8)
    check_static_graph(static, ALONE, 3, 8)
    with pytest.raises(
        ConfigError, match=r"`ddp.static_graph` is true, but cannot accumulate.*microbatches of 8 make 3"
    ):
        check_static_graph(static, group, 3, 8)


def test_what_is_not_sharded_is_left_alone() -> None:
    weight = torch.ones(3)
    state = {"a": weight, "b": [weight, (1, "x")], "c": None}
    for found in (
        whole(state, Group(1, 1, CPU)),
        shard_like(state, {"a": weight, "b": [weight]}),
        shard_like(state, 3),
    ):
        assert found["a"] is weight
        assert found["b"][0] is weight
        assert found["b"][1] == (1, "x")
        assert found["c"] is None
