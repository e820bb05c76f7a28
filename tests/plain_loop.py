"""Tasks that a plain PyTorch loop trains without a thought, and that loop."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from tests.specs import ranked, whole_state
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.loop.fit import fit
from trainers.task import Task

STEPS = 9
"""Over an epoch's end, with its last step of four samples."""


def rows(split, samples=44, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return TensorDataset(
        inputs, inputs[:, :2].sin(), torch.arange(samples) % 5
    )


class Plain(Task):
    """An MLP; its kinds change one thing each."""

    def model(self):
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)
        ).double()
        return self.net

    def dataset(self, split):
        return rows(split)

    def optimizer(self, model, config):
        return SGD(
            model.parameters(),
            config.optimizer.lr,
            momentum=0.9,
            weight_decay=0.01,
        )

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1])


class Coder(nn.Sequential):
    """With a way in beside forward."""

    def encode(self, inputs):
        return self[1](self[0](inputs))


class Bypassing(Plain):
    """Calls the module that it has kept, all of it or a part, or methods and
    parts of the given one.
    """

    def __init__(self, way):
        self.way = way

    def model(self):
        self.net = Coder(*super().model())
        return self.net

    def forward(self, model, batch):
        if self.way == "kept":
            return self.net(batch[0])
        if self.way == "method":
            return model[2](model.encode(batch[0]))
        if self.way == "module":
            return getattr(model, "module", model)[2](
                self.net[1](self.net[0](batch[0]))
            )
        if self.way == "without a gradient":
            with torch.no_grad():
                target = model(batch[0])
            return self.net(batch[0]) - 0.1 * target
        if self.way == "in loss":
            return batch[0]
        if self.way == "part":
            return model(batch[0]) + self.net[2](self.net[0](batch[0]))
        return model(batch[0]) + model(-0.5 * batch[0])

    def loss(self, outputs, batch):
        return super().loss(
            self.net(outputs) if self.way == "in loss" else outputs, batch
        )


BYPASSES = (
    "kept",
    "module",
    "method",
    "without a gradient",
    "in loss",
    "part",
    "twice",
)


class Scale(nn.Module):
    """A criterion that learns the weight of each target (Kendall et al. 2018),
    and counts its calls.
    """

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, outputs, targets):
        losses = (outputs - targets).square().mean(0)
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


class Learned(Plain):
    """The optimizer has the criterion's parameters, too."""

    def __init__(self, way):
        self.way = way
        self.criterion = Scale()
        self.scales = [torch.zeros(2, dtype=torch.float64, requires_grad=True)]

    def model(self):
        if self.way == "made late":
            self.criterion = Scale()
        return super().model()

    def optimizer(self, model, config):
        others = (
            self.scales
            if self.way == "tensor"
            else [*self.criterion.parameters()]
        )
        if self.way == "two":
            return {
                "net": super().optimizer(model, config),
                "criterion": AdamW(others, 0.05),
            }
        return SGD([*model.parameters(), *others], config.optimizer.lr)

    def loss(self, outputs, batch):
        scale = self.scales[0] if self.way == "tensor" else 0.0
        return self.criterion(
            outputs * torch.exp(torch.as_tensor(scale)), batch[1]
        )


class Thawed(Plain):
    """A layer is frozen for some steps: at first, or later."""

    def __init__(self, way):
        self.way = way

    def model(self):
        model = super().model()
        model[0].requires_grad_(self.way == "frozen later")
        return model

    def optimizer(self, model, config):
        return Task.optimizer(self, model, config)

    def after_step(self, model, step):
        if step == 4:
            model[0].requires_grad_(self.way != "frozen later")
        if step == 7 and self.way == "again":
            model[0].requires_grad_(False)


class Heads(Plain):
    """A head for each kind of sample: a batch, or a microbatch of it, may need
    one alone; a third is never used.
    """

    def model(self):
        return nn.ModuleDict(
            {
                name: nn.Linear(6, 2).double()
                for name in ("zero", "other", "spare")
            }
        )

    def forward(self, model, batch):
        heads = getattr(model, "module", model)
        outputs = torch.zeros(len(batch[0]), 2, dtype=torch.float64)
        for name, chosen in (("zero", batch[2] == 0), ("other", batch[2] > 0)):
            if chosen.any():
                outputs = outputs.index_put(
                    (chosen,), heads[name](batch[0][chosen])
                )
        return outputs


class Still(Plain):
    """BatchNorm with the statistics of a pre-training, by eval() in model() or
    by the module's own train(); or a module that is put into evaluation mode
    by a step.
    """

    def __init__(self, way):
        self.way = way

    def after_step(self, model, step):
        if self.way == "later" and step == 4:
            model[1].eval()

    def model(self):
        if self.way == "later":
            return nn.Sequential(nn.Linear(6, 2), Louder()).double()
        norm = nn.BatchNorm1d(6)
        dropout = nn.Dropout(0.5)
        if self.way == "train()":
            norm = StillNorm(6)
            dropout = nn.Dropout(0.0)
        norm.running_mean.fill_(0.5)
        model = nn.Sequential(norm, dropout, nn.Linear(6, 2)).double()
        if self.way == "eval":
            model[:2].eval()
        return model.train() if self.way == "train()" else model


class Louder(nn.Module):
    """In training."""

    def forward(self, inputs):
        return inputs * (2 if self.training else 1)


class StillNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Words(Plain):
    """Embeddings with gradients of the rows that a batch has, and complex numbers."""

    def __init__(self, way):
        self.way = way

    def model(self):
        return (
            Spectrum()
            if self.way == "complex"
            else nn.Embedding(9, 2, sparse=True).double()
        )

    def forward(self, model, batch):
        return model(batch[0] if self.way == "complex" else batch[2])

    def optimizer(self, model, config):
        if self.way == "sparse adam":
            return torch.optim.SparseAdam(model.parameters(), 0.05)
        return SGD(model.parameters(), config.optimizer.lr)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(6, 2, dtype=torch.complex128) * 0.3
        )
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs):
        return (inputs.to(self.weight) @ self.weight).abs() + self.bias


class Lazy(Plain):
    """Layers without shapes, whose first forward gives them some; or a buffer of it."""

    def __init__(self, way):
        self.way = way

    def model(self):
        if self.way == "buffer":
            return Centred()
        return nn.Sequential(
            nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2)
        ).double()


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.queue = None

    def forward(self, inputs):
        if self.queue is None:
            del self.queue
            self.register_buffer("queue", torch.zeros(0, dtype=torch.float64))
        if self.training and len(self.queue) < 5:
            self.queue = torch.cat(
                [self.queue, torch.ones(1, dtype=torch.float64)]
            )
        return self.layer(inputs) + self.queue.sum().clamp(max=0)


class Bare(Plain):
    """A batch is one tensor, or an object of the task's own."""

    def model(self):
        return nn.Linear(6, 6).double()

    def dataset(self, split):
        return list(rows(split).tensors[0])

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch)


@dataclass(frozen=True)
class Case:
    """One of many small models, optimizers, losses and ways to split a step."""

    net: Literal["mlp", "conv", "words", "tied", "frozen"]
    optimizer: str
    weigh: Literal["samples", "tokens", "classes"]
    kept: bool
    """Whether forward() calls the module that the task has kept, past the one
    that it is given.
    """
    single: bool
    samples: int
    batch: int
    microbatch: int
    clip: float | None

    def config(self):
        """Five steps of it."""
        microbatch = min(self.microbatch, self.batch)
        changes = {
            "max_steps": 5,
            "global_batch_size": min(self.batch, self.samples),
        }
        return configured(
            **changes,
            microbatch_size=microbatch,
            clip_grad_norm=self.clip,
            optimizer=OPTIMIZERS["sgd"],
        )


OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": lambda parameters: SGD(
        parameters, 0.05, momentum=0.8, nesterov=True
    ),
    "adam": lambda parameters: torch.optim.Adam(
        parameters, 0.01, amsgrad=True
    ),
    "adamw": lambda parameters: AdamW(
        parameters, 0.01, weight_decay=0.1, fused=True
    ),
    "rmsprop": lambda parameters: torch.optim.RMSprop(
        parameters, 0.01, centered=True, momentum=0.5
    ),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
}


class Tied(nn.Module):
    """One weight, in two places."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 5)
        self.out = nn.Linear(5, 6)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = nn.Linear(6, 5)
        self.last = nn.Linear(5, 5)
        self.again.weight = self.into.weight

    def forward(self, inputs):
        return self.last(self.again(self.out(self.into(inputs).tanh())).tanh())


class Shared(Plain):
    """One weight in two places, also after a resume."""

    def model(self):
        return Tied().double()

    def forward(self, model, batch):
        return model(batch[0])[:, :2]


class Penalised(Plain):
    """A step of its own, with a gradient in its loss."""

    def training_step(self, model, batch, phase):
        assert phase == "train"
        inputs = batch[0].detach().requires_grad_()
        outputs = model(inputs)
        [slope] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return self.loss(outputs, batch) + slope.square().mean()


class Clamped(Plain):
    """Changes its weights after every step, as a critic of WGAN."""

    def after_step(self, model, step):
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


class Drawn(Plain):
    """A case's task."""

    table = torch.tensor([0.3, 4.0, 1.0, 9.0, 0.1])

    def __init__(self, case):
        self.case = case
        self.dtype = torch.float32 if case.single else torch.float64

    def model(self):
        nets = {
            "mlp": lambda: nn.Sequential(
                nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5)
            ),
            "conv": lambda: nn.Sequential(
                nn.Unflatten(1, (1, 6)),
                nn.Conv1d(1, 4, 3),
                nn.GroupNorm(2, 4),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16, 5),
            ),
            "words": lambda: nn.Sequential(
                nn.Embedding(5, 4), nn.Linear(4, 5)
            ),
            "tied": Tied,
            "frozen": lambda: nn.Sequential(
                nn.Linear(6, 6).requires_grad_(False),
                nn.Tanh(),
                nn.Linear(6, 5),
            ),
        }
        self.net = nets[self.case.net]().to(self.dtype)
        return self.net

    def dataset(self, split):
        return rows(split, self.case.samples, self.dtype)

    def optimizer(self, model, config):
        chosen = OPTIMIZERS[self.case.optimizer]
        return (
            Task.optimizer(self, model, config)
            if isinstance(chosen, dict)
            else chosen(model.parameters())
        )

    def forward(self, model, batch):
        return (self.net if self.case.kept else model)(
            batch[2] if self.case.net == "words" else batch[0]
        )

    def each(self, batch):
        """The weight of every sample; that of the tokens may be none."""
        if self.case.weigh == "tokens":
            return (batch[0][:, 0] * 2).round().abs()
        return (
            self.table.to(self.dtype)[batch[2]]
            if self.case.weigh == "classes"
            else torch.ones_like(batch[0][:, 0])
        )

    def loss(self, outputs, batch):
        weights = self.each(batch)
        losses = F.cross_entropy(outputs, (batch[2] + 1) % 5, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1e-3)

    def weight(self, batch):
        return self.each(batch).sum()


KINDS = {
    "plain": Plain,
    **{f"bypassing {way}": lambda way=way: Bypassing(way) for way in BYPASSES},
    **{f"learned {way}": lambda way=way: Learned(way) for way in ("module", "made late", "tensor", "two")},
    **{f"thawed {way}": lambda way=way: Thawed(way) for way in ("once", "again", "frozen later")},
    "heads": Heads,
    **{f"still {way}": lambda way=way: Still(way) for way in ("eval", "train()", "later")},
    **{f"words {way}": lambda way=way: Words(way) for way in ("sparse", "sparse adam", "complex")},
    **{f"lazy {way}": lambda way=way: Lazy(way) for way in ("layers", "buffer")},
    "bare": Bare,
    "shared": Shared,
    "clamped": Clamped,
    "penalised": Penalised,
}  # fmt: skip


def configured(**changes):
    tree = {
        "task": "x:Y",
        "max_steps": STEPS,
        "global_batch_size": 8,
        "optimizer": {"name": "adamw", "lr": 0.05},
    }
    tree |= {
        "evaluate": {"every_steps": 4},
        "checkpoint": {"every_steps": 99},
        "device": "cpu",
        "log_every_steps": 1,
    }
    return build(TrainConfig, tree | changes, "test")


def in_a_plain_loop(task, config):
    """What the task has learned, by the global batch, under the same seeds."""
    torch.manual_seed(config.seed)
    model = task.model()
    if any(map(nn.parameter.is_lazy, model.parameters())):
        model(rows("train").tensors[0][:1])
    optimizer = task.optimizer(model, config)
    optimizers = (
        [*optimizer.values()] if isinstance(optimizer, dict) else [optimizer]
    )
    data = task.dataset("train")
    step = epoch = 0
    steps = config.max_steps or 0
    size = config.global_batch_size or 0
    while step < steps:
        order = torch.randperm(
            len(data),
            generator=torch.Generator().manual_seed(config.seed + epoch),
        )
        epoch += 1
        for chosen in order.split(size)[: steps - step]:
            batch = (
                data[chosen]
                if isinstance(data, TensorDataset)
                else torch.stack([data[row] for row in chosen])
            )
            for each in optimizers:
                each.zero_grad()
            loss = task.training_step(model, batch, "train")
            loss.backward()
            if config.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(
                    model.parameters(), config.clip_grad_norm
                )
            for each in optimizers:
                each.step()
            step += 1
            with torch.no_grad():
                task.after_step(model, step)
    return learned(model.state_dict(), task)


def learned(model, task):
    found = {name: value.detach().clone() for name, value in model.items()}
    for name, value in vars(task).items():
        if name == "criterion":
            found |= {
                f"criterion.{inner}": one.detach()
                for inner, one in value.state_dict().items()
            }
        if name == "scales":
            found["scales"] = value[0].detach()
    return found


def in_the_loop(task, config, path, rank=0, world_size=1):
    """The same by `fit`, as its last checkpoint and the task have it."""
    context = ranked(rank, world_size, path)
    fit(task, config, context)
    return learned(whole_state(path, config.max_steps)["model"], task)
