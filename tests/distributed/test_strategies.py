"""ddp, fsdp, dp and none are one training: the same gradients, curves, figures
and checkpoints, in real processes.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.processes import run_processes
from tests.distributed.test_gradients import SPLITS, Tokens, gradient
from tests.specs import evaluations, losses, make, ranked, whole_state
from tests.tasks import Blobs
from trainers.config.sections import DataConfig
from trainers.data.batch import tensors_of
from trainers.devices.group import Group
from trainers.errors import ConfigError, RunFailedError
from trainers.launch.local import run_spawn
from trainers.model.precision import TABLE
from trainers.model.sharding import local, whole
from trainers.model.strategy import compile_model, place_model, share_tensors
from trainers.step.evaluation import evaluate
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep
from trainers.task import task_feed

CPU = torch.device("cpu")


class Normed(Blobs):
    """Statistics that differ between ranks while training, and a module that is frozen."""

    def model(self):
        frozen = nn.Linear(16, 16).requires_grad_(False)
        layers = nn.Sequential(
            nn.Linear(self.features, 16),
            nn.BatchNorm1d(16),
            frozen,
            nn.Tanh(),
            nn.Linear(16, 4),
        )
        return layers.to(self.dtype)


class Poisoned(Blobs):
    """The loss is finite; of its gradient the first row alone is not, which is
    rank 0's.
    """

    def model(self):
        return nn.Linear(self.features, 4, bias=False)

    def loss(self, outputs, batch):
        return (
            outputs[:, 1:].square().mean()
            + (outputs[:, 0] * 0.0).sqrt().mean()
        )


class Averaged(Blobs):
    """Keeps a running average of its weights, as a task's own state: of shards
    where the model is sharded.
    """

    def optimizer(self, model, config):
        optimizer = super().optimizer(model, config)
        live = [parameter.detach() for parameter in model.parameters()]
        self.kept = [torch.zeros_like(parameter) for parameter in live]
        optimizer.register_step_post_hook(
            lambda *_: torch._foreach_lerp_(self.kept, live, 0.1)
        )
        return optimizer

    def state_dict(self):
        return {"kept": getattr(self, "kept", [])}

    def load_state_dict(self, state):
        for ours, theirs in zip(
            getattr(self, "kept", []), state["kept"], strict=False
        ):
            ours.copy_(theirs)


class Deep(Blobs):
    """Residual blocks that repeat, with BatchNorm and dropout."""

    def model(self):
        blocks = [
            _Residual(
                nn.Linear(16, 16),
                nn.BatchNorm1d(16),
                nn.Tanh(),
                nn.Dropout(0.2),
            )
            for _ in range(3)
        ]
        return nn.Sequential(
            nn.Linear(self.features, 16),
            nn.Sequential(*blocks),
            nn.Linear(16, 4),
        ).to(self.dtype)


class _Residual(nn.Sequential):
    def forward(self, rows):
        return rows + super().forward(rows)


class Greedy(Blobs):
    """Rank 1 has room for so many samples as `fits`, and another rank for any number."""

    def forward(self, model, batch):
        room = self.fits
        self.fits = None
        try:
            if (
                room is not None
                and dist.get_rank() == 1
                and model.training
                and len(batch[0]) > room
            ):
                raise torch.OutOfMemoryError("injected: on rank 1")
            return super().forward(model, batch)
        finally:
            self.fits = room


def spec(tmp_path, name, workers, strategy, task="Blobs", **changes):
    args = {"dtype": "float64", **changes.pop("args", {})}
    where = (
        "tests.tasks"
        if task == "Blobs"
        else "tests.distributed.test_strategies"
    )
    changes = {
        "max_steps": 12,
        "microbatch_size": 5,
        "clip_grad_norm": 0.5,
        **changes,
    }
    launcher = "spawn" if workers > 1 else "local"
    return make(
        tmp_path,
        task=f"{where}:{task}",
        task_args=args,
        name=name,
        strategy=strategy,
        scaling__num_workers=workers,
        launcher=launcher,
        **changes,
    )


def execute(rank, world_size, specs):
    """One run after another in one process group; a ConfigError as its words."""
    results = []
    for each in specs:
        try:
            results.append(each.execute(ranked(rank, world_size, each.uri)))
        except ConfigError as error:
            results.append(str(error))
    return results


def run(*specs):
    """The specs, all for one number of workers: in one group of new processes,
    or in this process.
    """
    workers = specs[0].config.scaling.max_workers
    if workers == 1:
        return execute(0, 1, specs)
    return run_processes(workers, execute, specs)[0]


def same_curve(one, other, rel=1e-10):
    ours = losses(one)
    theirs = losses(other)
    assert len(ours) == one.config.max_steps
    assert ours == pytest.approx(theirs, rel=rel)
    assert len(evaluations(one)) == len(evaluations(other)) > 0
    for mine, expected in zip(
        evaluations(one), evaluations(other), strict=True
    ):
        assert mine == pytest.approx(expected, rel=rel)


# --- gradients and figures


def figures(rank, world_size):
    group = Group(rank, world_size, CPU)
    found = []
    for samples in (1, 64, 203):  # 1, 2 and 7 batches
        for task in (Tokens(samples=samples), Normed(samples=samples)):
            torch.manual_seed(0)
            model = place_model(task.model(), group, "fsdp")
            for buffer in model.buffers():
                buffer.add_(rank)
            share_tensors(list(model.buffers()), group)
            feed = task_feed(
                task.dataset("val"), task, DataConfig(), CPU, sharers=1, seed=0
            )
            forward = ForwardPass(model, task, TABLE["fp32"], CPU)
            found.append(evaluate(forward, feed, 32, group))
    return found


def steps_taken(rank, world_size):
    """Whether a step is called bad, and whether it moved this rank's part, for
    a sound and for a poisoned gradient.
    """
    found = []
    group = Group(rank, world_size, CPU)
    for fused, task in itertools.product((True, False), (Blobs(), Poisoned())):
        model = place_model(task.model(), group, "fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        train = TrainStep(
            ForwardPass(model, task, TABLE["fp32"], CPU), optimizer, group
        )
        before = [local(parameter).clone() for parameter in model.parameters()]
        feed = task_feed(
            task.dataset("train"), task, DataConfig(), CPU, sharers=1, seed=0
        )
        train(
            feed.batches([torch.arange(8)], training=True),
            [8],
            8 * world_size,
            idle=False,
        )
        same = all(
            torch.equal(local(p), value)
            for p, value in zip(model.parameters(), before, strict=True)
        )
        found.append((bool(train.bad), not same))
    return found


def measure(rank, world_size):
    tasks = [
        cls(dtype=dtype)
        for cls, dtype in (
            (Blobs, "float64"),
            (Tokens, "float64"),
            (Blobs, "float32"),
        )
    ]
    gradients = [
        gradient(task, rank, world_size, split, "fsdp")
        for task in tasks
        for split in SPLITS
    ]
    return gradients, figures(rank, world_size), steps_taken(rank, world_size)


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(2, marks=pytest.mark.campaign)]
)
def test_a_sharded_model_has_the_gradients_and_figures_of_one_process(
    world_size,
):
    torch.set_num_threads(1)
    alone, alone_figures, _ = measure(0, 1)
    ranks = run_processes(world_size, measure)
    for (expected, loss), (found, found_loss) in zip(
        alone, ranks[0][0], strict=True
    ):
        assert len(found) == len(expected) == 4
        for ours, theirs in zip(found, expected, strict=True):
            tolerance = 1e-12 if theirs.dtype == torch.float64 else 1e-6
            assert (
                ours - theirs
            ).abs().max() <= tolerance * theirs.abs().max()
        assert found_loss == pytest.approx(loss, rel=1e-6)
    for _, found_figures, taken in ranks:
        assert found_figures == alone_figures
        assert taken == [(False, True), (True, False)] * 2


# --- curves


def test_a_sharded_run_has_the_curve_of_a_replicated_one(tmp_path):
    kinds = [
        {},
        {"microbatch_size": "auto", "global_batch_size": 2},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    ]
    pairs = [
        [
            spec(tmp_path, f"{strategy}-{i}", 3, strategy, **kind)
            for strategy in ("fsdp", "ddp")
        ]
        for i, kind in enumerate(kinds)
    ]
    normed = [
        spec(
            tmp_path,
            f"{each}-normed",
            3,
            each,
            task="Normed",
            microbatch_size=8,
        )
        for each in ("fsdp", "ddp")
    ]
    halves = [
        [
            spec(
                tmp_path,
                f"{each}-{name}",
                3,
                each,
                task,
                precision=name,
                args={"dtype": "float32"},
            )
            for each in ("fsdp", "ddp")
        ]
        for name, task in (("fp16", "Blobs"), ("bf16", "Deep"))
    ]
    run(
        *[each for pair in [*pairs, normed, *halves] for each in pair],
    )
    for sharded, replicated in [*pairs, normed]:
        same_curve(sharded, replicated)
    for sharded, replicated in halves:
        same_curve(sharded, replicated, rel=2e-2)


# --- checkpoints

CHAINS = {
    "adamw": [
        ("ddp", 2),
        ("fsdp", 3),
        ("dp", 1),
        ("fsdp", 2),
        ("none", 1),
        ("ddp", 2),
    ],
    "sgd": [("none", 1), ("fsdp", 2), ("none", 1)],
}


def outline(value):
    """Names, shapes and formats of a nested state, without the values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: outline(entry) for key, entry in value.items()}
    return (
        [outline(entry) for entry in value]
        if isinstance(value, (tuple, list))
        else type(value)
    )


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adamw", marks=pytest.mark.full), "sgd"]
)
def test_a_run_moves_from_strategy_to_strategy(optimizer, tmp_path):
    chosen = (
        {"name": "adamw", "lr": 0.01}
        if optimizer == "adamw"
        else {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    )
    common = {"task": "Averaged", "optimizer": chosen, "microbatch_size": 24}
    chain = CHAINS[optimizer]
    strategy, workers = chain[0]
    unbroken = spec(
        tmp_path,
        "unbroken",
        workers,
        strategy,
        max_steps=4 * len(chain),
        **common,
    )
    run(unbroken)
    expected = whole_state(unbroken.uri, 4 * len(chain))
    for index, (strategy, workers) in enumerate(chain, 1):
        moved = spec(
            tmp_path, "moved", workers, strategy, max_steps=4 * index, **common
        )
        run(moved)
        state = whole_state(moved.uri, 4 * index)
        assert state["position"]["step"] == 4 * index
        for section in ("model", "task"):
            assert outline(state[section]) == outline(expected[section]), (
                strategy
            )
        assert outline(state["optimizer"]["state"]) == outline(
            expected["optimizer"]["state"]
        ), strategy
        assert [*state["model"]] == [
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        ]

    assert losses(moved) == pytest.approx(losses(unbroken), rel=1e-10)
    for section in ("model", "task", "optimizer"):
        pairs = zip(
            tensors_of(state[section]),
            tensors_of(expected[section]),
            strict=True,
        )
        assert all(
            torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)
            for ours, theirs in pairs
        ), section


# --- memory and compilation


def test_a_rank_without_room_for_its_shard_starts_the_group_again(tmp_path):
    adaptive = spec(
        tmp_path,
        "adaptive",
        2,
        "fsdp",
        task="Greedy",
        args={"fits": 7},
        microbatch_size="auto",
    )
    assert run_spawn(adaptive).microbatch_size == 6  # of a share of 12
    reference = spec(tmp_path, "reference", 1, "none")
    run(reference)
    same_curve(adaptive, reference)

    with pytest.raises(RunFailedError) as met:
        run_spawn(
            spec(
                tmp_path,
                "fixed",
                2,
                "fsdp",
                task="Greedy",
                args={"fits": 7},
                microbatch_size=8,
            )
        )
    assert met.value.status == "out_of_memory"


def compiled(rank, world_size, backend):
    """Gradients of a sharded model, eager and compiled without a graph break."""
    found = []
    torch.compile = functools.partial(torch.compile, backend=backend)
    group = Group(rank, world_size, CPU)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    for compiles in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
        model = place_model(
            nn.Sequential(*blocks, nn.Linear(6, 2)), group, "fsdp"
        )
        names = [*model.state_dict()]
        if compiles:
            compile_model(model, "default", fullgraph=True)
        model(inputs).square().mean().backward()
        assert (
            [*model.state_dict()]
            == names
            == [*nn.Sequential(*blocks, nn.Linear(6, 2)).state_dict()]
        )
        found.append(whole([p.grad for p in model.parameters()], group))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.campaign)],
)
def test_a_sharded_model_compiles_without_a_graph_break(backend):
    eager, fast = run_processes(2, compiled, backend)[0]
    assert len(eager) == 6
    for ours, theirs in zip(fast, eager, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_activations_that_are_computed_again_are_those_that_were(tmp_path):
    """On both ranks, below DDP and inside FSDP's units, with microbatches that
    accumulate.
    """
    modes = ("none", "selective", "full")
    short = {"max_steps": 4, "evaluate__every_steps": 4}
    specs = {
        (strategy, mode): spec(
            tmp_path,
            f"{strategy}-{mode}",
            2,
            strategy,
            "Deep",
            activation_checkpointing=mode,
            **short,
        )
        for strategy in ("ddp", "fsdp")
        for mode in modes
    }
    for result in run(*specs.values()):
        assert not isinstance(result, str), result
    for strategy in ("ddp", "fsdp"):
        whole_curve = losses(specs[strategy, "none"])
        assert len(whole_curve) == 4
        for mode in modes[1:]:
            assert losses(specs[strategy, mode]) == whole_curve
            assert evaluations(specs[strategy, mode]) == evaluations(
                specs[strategy, "none"]
            )
