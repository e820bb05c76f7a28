"""What would be wrong without a word is refused, or said: schedulers, losses
that are no mean, taken names, NaN.
"""

import logging
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import Subset, TensorDataset

from tests.specs import error_of, whole_state
from tests.unit.test_evaluation import Weighted
from tests.unit.test_loop import (
    RARE,
    Context,
    Tiny,
    check_resume,
    config,
    train,
)
from tests.unit.test_microbatch import Hungry, choose
from trainers.causes import classify
from trainers.errors import ConfigError
from trainers.loop.fit import fit


class Scheduled(Tiny):
    """Brings a scheduler: attached at once (it steps, or not yet), made in the
    first step, or a rate set in a hook.
    """

    def __init__(self, how):
        super().__init__()
        self.how = how

    def optimizer(self, model, config):
        self.made = AdamW(model.parameters(), lr=0.01, fused=True)
        if self.how == "idle":
            self.scheduler = StepLR(self.made, step_size=1)
        if self.how == "attached":
            scheduler = StepLR(self.made, step_size=1)
            self.made.register_step_post_hook(lambda *_: scheduler.step())
        if self.how == "by hand":
            self.made.register_step_post_hook(lambda *_: self.lower())
        return self.made

    def lower(self):
        self.made.param_groups[0]["lr"] *= 0.9

    def loss(self, outputs, batch):
        if self.how == "late" and not hasattr(self, "scheduler"):
            self.scheduler = LambdaLR(self.made, lambda step: 0.5**step)
        if self.how == "late":
            self.scheduler.step()
        return super().loss(outputs, batch)


@pytest.mark.parametrize("how", ["idle", "attached", "late", "by hand"])
def test_a_scheduler_of_the_task_is_refused(how, tmp_path):
    with pytest.raises(ConfigError, match=r"schedule\(\)"):
        train(tmp_path, Scheduled(how), **RARE)
    assert not (tmp_path / "checkpoints").exists()


class Contrastive(Tiny):
    """Every sample against all others of its batch."""

    def loss(self, outputs, batch):
        features = nn.functional.normalize(outputs)
        return nn.functional.cross_entropy(
            features @ features.T, torch.arange(len(features))
        )


class Tokens(Tiny):
    """A mean over tokens, of which samples have one to five; its weight says
    so, or not.
    """

    def __init__(self, weighted):
        super().__init__()
        self.weighted = weighted

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(22, 4, generator=generator),
            torch.arange(22) % 2,
            1 + torch.arange(22) % 5,
        )

    def transform(self, batch, training):
        return batch

    loss = Weighted.loss

    def weight(self, batch):
        return batch[2].sum() if self.weighted else super().weight(batch)


class Classes(Tiny):
    """Divides by the weights of the classes in a batch."""

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(
            outputs, batch[1], weight=outputs.new_tensor([0.4, 16.7])
        )


class Summed(Tiny):
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum")


class Padded(Tokens):
    """Sequences whose padding depends on the batch, and a collate of its own:
    cannot be cut, has to be read again.
    """

    def __init__(self):
        super().__init__(weighted=True)

    def collate(self, samples):
        return [*super().collate(samples), ["a name"] * len(samples)]

    def dataset(self, split):
        tensors = super().dataset(split)
        return [tensors[index] for index in range(22)]


class Knowingly(Contrastive):
    """Says that each piece of a step is by itself."""

    def weight(self, batch):
        return torch.tensor(float(len(batch[0])))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Contrastive(), "refused"),
        (Classes(), "refused"),
        (Tokens(weighted=False), "warned"),
        (Knowingly(), "warned"),
        (Summed(), "refused"),
        (Tokens(weighted=True), ""),
        (Padded(), ""),
        (Tiny(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_loss_that_is_no_mean_is_said_where_a_step_is_split(
    task, said, precision, tmp_path, caplog
):
    changes = {"max_steps": 1, "precision": precision, **RARE}
    if said == "refused":
        with error_of("loss()"):
            train(tmp_path / "split", task, **changes)
    else:
        warnings = train(tmp_path / "split", task, **changes).warnings
        assert any(
            "loss() is not a mean over weight()" in words for words in warnings
        ) == bool(said)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "whole", task, max_steps=1, microbatch_size=5, **RARE)
    # A step that is one piece is right. An evaluation is one nowhere.
    assert (
        "so val_loss depends on the size of its batches" in caplog.text
    ) == isinstance(task, Summed)


class Named(Tiny):
    """Metrics of these names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def metrics(self, outputs, batch):
        return dict.fromkeys(self.names, outputs.argmax(1) == batch[1])


@pytest.mark.parametrize("name", ["loss", 3])
def test_a_metric_that_takes_a_name_of_ours_is_refused(name, tmp_path):
    with pytest.raises(ConfigError):
        train(tmp_path, Named("accuracy", name), max_steps=1, **RARE)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"checkpoint": {"best": "val_acuracy", "best_mode": "max"}},
            "checkpoint.best",
        ),
        ({"checkpoint": {"best": "accuracy"}}, "checkpoint.best"),
        (
            {
                "early_stopping": {
                    "metric": "val_los",
                    "mode": "min",
                    "patience": 9,
                }
            },
            "early_stopping.metric",
        ),
    ],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_misspelt_metric_ends_a_run_at_its_first_evaluation(
    changes, field, keeps, tmp_path
):
    context = Context(tmp_path if keeps else None)
    with pytest.raises(ConfigError) as raised:
        fit(Tiny(), config(evaluate={"every_steps": 1}, **changes), context)
    assert (raised.value.field, context.reports) == (field, [])
    assert raised.value.fix in (
        "did you mean `val_accuracy`?",
        "did you mean `val_loss`?",
    )


def test_no_training_data_is_said_in_its_own_words():
    class Without(Tiny):
        def dataset(self, split):
            return None if split == "train" else super().dataset(split)

    with pytest.raises(ConfigError):
        train(None, Without())


def test_a_parameter_that_is_not_trained_is_said(tmp_path, caplog):
    class Spare(Tiny):
        def model(self):
            model = super().model()
            model[0].spare = nn.Parameter(torch.ones(2))
            model[0].frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.net = model
            self.temperature = nn.Parameter(torch.ones(2))
            return model

    with caplog.at_level(logging.WARNING):
        train(tmp_path, Spare(), max_steps=2, **RARE)
    assert caplog.text.count("`0.spare`") == 1
    assert caplog.text.count("no optimizer has `temperature`:") == 1
    assert "0.frozen" not in caplog.text


class Made(Tiny):
    """Made in a way that cannot be trained."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def model(self):
        model = super().model()
        if self.way == "two":
            return model, model
        if self.way == "late":
            model.register_forward_pre_hook(_add_parameter)
        if self.way == "complex":
            model.spare = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        return model

    def optimizer(self, model, config):
        if self.way == "with its scheduler":
            return [AdamW(model.parameters())], []
        if self.way == "elsewhere":
            return AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])
        if self.way == "closure":
            return LBFGS(model.parameters())
        self.given = super().optimizer(model, config)
        if self.way == "no number":
            self.given.param_groups[0]["lr"] = None
        return self.given

    def after_step(self, model, step):
        if self.way == "replaced" and step == 2:
            model[0].bias = nn.Parameter(model[0].bias.detach().clone())
        if self.way == "given later":
            self.given.add_param_group(
                {"params": [nn.Parameter(torch.zeros(2))]}
            )


def _add_parameter(model, inputs):
    if not hasattr(model, "late"):
        model.late = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("way", "changes", "field"),
    [
        ("", {"global_batch_size": 21}, "drop_last"),
        ("", {"microbatch_size": 1}, "microbatch_size"),
        ("late", {}, "task"),
        ("replaced", {"checkpoint": {"every_steps": 99}}, "task"),
        ("two", {}, "Made.model()"),
        ("with its scheduler", {}, "Made.optimizer()"),
        ("elsewhere", {}, "Made.optimizer()"),
        ("closure", {}, "Made.optimizer()"),
        ("no number", {}, "Made.optimizer()"),
        (
            "given later",
            {"checkpoint": {"every_steps": 2}},
            "Made.optimizer()",
        ),
        ("complex", {"precision": "fp16"}, "precision"),
        ("complex", {"precision": "bf16-pure"}, "precision"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_checkpoint(
    way, changes, field, tmp_path
):
    with error_of(field):
        train(tmp_path, Made(way), **changes)
    assert not (tmp_path / "checkpoints").exists()


class Attached(Tiny):
    """Its inputs are made by a model, and were not detached."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def dataset(self, split):
        inputs, labels = super().dataset(split).tensors
        tensors = TensorDataset(inputs.clone().requires_grad_() * 2, labels)
        return (
            tensors if self.kind == "tensors" else Subset(tensors, range(20))
        )


@pytest.mark.parametrize(
    ("kind", "processes"), [("tensors", 0), ("tensors", 2), ("samples", 2)]
)
def test_samples_that_hold_a_graph_are_refused(kind, processes, tmp_path):
    data = {"num_workers": processes, "resident": False}
    with pytest.raises(Exception, match=r"detach\(\) them"):
        train(tmp_path, Attached(kind), data=data, **RARE)


class Undefined(Tiny):
    def metrics(self, outputs, batch):
        return {"odd": torch.full((len(outputs),), torch.nan)}


def test_a_figure_that_is_not_a_number_is_said(tmp_path):
    result = train(tmp_path, Undefined(), **RARE)
    assert "val_odd" not in result.metrics
    assert "val_odd is not a number" in result.warnings


class Refuses(Hungry):
    """A loss over pairs: fewer than `least` samples are an error of another kind."""

    def __init__(self, fits, least, **options):
        super().__init__(fits, "backward", **options)
        self.least = least

    def loss(self, outputs, batch):
        if len(outputs) < self.least:
            raise ValueError(f"fewer than {self.least} samples")
        return super().loss(outputs, batch)


@pytest.mark.parametrize("least", [0, 2])
def test_out_of_memory_at_every_size_that_can_be_trained_is_out_of_memory(
    least,
):
    """With 0 it is the BatchNorm in the model that refuses a single sample."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        choose(Refuses(0, least), "auto", 32)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(MemoryError) as host:
        choose(
            Refuses(0, least, error=lambda: MemoryError("no page")), "auto", 32
        )
    assert classify(host.value) == "out_of_host_memory"


def test_a_resumed_run_knows_what_was_before(tmp_path):
    stopped = train(
        tmp_path, max_steps=6, stop=lambda: True, checkpoint={"every_steps": 3}
    )
    assert stopped.status == "stopped"
    assert stopped.earlier_time_s == 0
    done = train(tmp_path, max_steps=6, checkpoint={"every_steps": 3})
    assert done.earlier_time_s == stopped.train_time_s
    assert done.train_time_s - done.earlier_time_s <= done.wall_time_s


class ScheduleFree(Optimizer):
    """The protocol of schedule-free optimizers (Defazio et al. 2024), with
    plain SGD: z is stepped, x is its average, y between the two is where
    gradients are taken.
    """

    beta = 0.9

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr, "k": 0, "train_mode": False})

    def _switch(self, train_mode):
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        weight = (
                            1 - self.beta if train_mode else 1 - 1 / self.beta
                        )
                        parameter.data.lerp_(
                            self.state[parameter]["z"], weight
                        )
                group["train_mode"] = train_mode

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError(
                    "Optimizer was not in train mode when step is called."
                )
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                x = y.lerp(z, 1 - 1 / self.beta)
                z.sub_(y.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                y.copy_(x.lerp(z, 1 - self.beta))


class Free(Tiny):
    """Keeps the weights that it is evaluated with."""

    def __init__(self):
        super().__init__()
        self.evaluated = []

    def optimizer(self, model, config):
        self.net = model
        self.made = ScheduleFree(model.parameters())
        return self.made

    def metrics(self, outputs, batch):
        if not self.net.training:
            assert (
                not self.made.param_groups[0]["train_mode"]
                or not self.made.param_groups[0]["k"]
            )
            self.evaluated = [
                parameter.detach().clone()
                for parameter in self.net.parameters()
            ]
        return super().metrics(outputs, batch)


def test_a_schedule_free_optimizer_is_evaluated_and_kept_at_its_average(
    tmp_path,
):
    task = Free()
    changes = {
        "lr_schedule": {"name": "constant"},
        "clip_grad_norm": None,
        "microbatch_size": 5,
    }
    result = train(
        tmp_path / "whole",
        task,
        epochs=2,
        checkpoint={"every_steps": 3},
        **changes,
    )
    trained = [
        parameter.detach().clone() for parameter in task.net.parameters()
    ]
    assert not all(map(torch.equal, task.evaluated, trained)), (
        "the average is not where gradients are taken"
    )
    kept = whole_state(tmp_path / "whole", result.steps)
    names = [name for name, _ in task.net.named_parameters()]
    for name, value in zip(names, task.evaluated, strict=True):
        torch.testing.assert_close(
            kept["model"][name], value
        )  # to rounding: there and back is not exact
    assert result.metrics["val_loss"] > 0

    stops = iter([False] * 3 + [True] * 99)
    broken = Free()
    train(
        tmp_path / "broken",
        broken,
        stop=lambda: next(stops),
        epochs=2,
        checkpoint={"every_steps": 3},
        **changes,
    )
    again = Free()
    train(
        tmp_path / "broken",
        again,
        epochs=2,
        checkpoint={"every_steps": 3},
        **changes,
    )
    torch.testing.assert_close(
        [parameter.detach() for parameter in again.net.parameters()], trained
    )


class Note(nn.Linear):
    """A layer with a state beside its tensors."""

    note: object = Path("words.txt")

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Holding(Tiny):
    """A model, a task or an optimizer with a state that checkpoints do not hold."""

    def __init__(self, holds):
        super().__init__()
        self.holds = holds

    def model(self):
        model = super().model()
        if self.holds == "note":
            model[4] = Note(8, 2)
        if self.holds in ("adjacency", "not kept"):
            kept = self.holds == "adjacency"
            model[0].register_buffer(
                "adjacency", torch.eye(4).to_sparse(), kept
            )
        return model

    def optimizer(self, model, config):
        made = AdamW(model.parameters(), 0.01, weight_decay=np.float64(0.1))
        if self.holds == "kind":
            made.param_groups[0]["kind"] = nn.Linear
        if self.holds == "recent":
            made.register_step_post_hook(
                lambda *_: made.state[model[0].weight].update(recent=deque())
            )
        return made

    def on_evaluate(self, metrics, step):
        self.late = {np.int64(step): [np.float64(1.0)]}
        if self.holds == "late":
            self.late[step].append(np.zeros(2))

    def schedule(self, optimizer, config):
        return LambdaLR(optimizer, lambda step: np.cos(step / 100))

    def state_dict(self):
        counts = defaultdict(int) if self.holds == "counts" else {}
        late = getattr(self, "late", {})
        return {**super().state_dict(), "counts": counts, "late": late}


@pytest.mark.parametrize(
    ("holds", "named"),
    [
        ("note", "Sequential"),
        ("adjacency", r"0\.adjacency.*persistent=False"),
        ("kind", "AdamW"),
        ("counts", "Holding"),
        ("recent", r"AdamW.*`state\.0\.recent` \(deque\)"),
        ("late", r"`checkpoint` holds `task\.late\.15\.1` \(ndarray\)"),
    ],
)
def test_a_state_that_no_checkpoint_gives_back_is_refused(
    holds, named, tmp_path
):
    with pytest.raises(ConfigError, match=named):
        train(
            tmp_path, Holding(holds), lr_schedule={"name": "constant"}, **RARE
        )
    assert not (tmp_path / "checkpoints").exists()


def test_numbers_of_numpy_come_back_from_a_checkpoint(tmp_path):
    changes = {"lr_schedule": {"name": "constant"}}
    check_resume(tmp_path, lambda: Holding("not kept"), 7, **changes)
