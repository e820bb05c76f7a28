"""Steps of several phases, each beside a plain PyTorch loop: GANs, gradient
penalties, and several optimizers.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from tests.unit.test_loop import Context, check_resume, config
from tests.unit.test_recipes import SEED, SETTINGS, Single, descend, order
from trainers.errors import ConfigError, DivergedError
from trainers.loop.fit import fit
from trainers.task import Task


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1)
        )
        self.double()


class Adversarial(Task):
    """The non-saturating GAN, both of its phases in every step; noise is part
    of a sample.
    """

    def model(self):
        return Gan()

    def dataset(self, split):
        if split == "val":
            return None
        generator = torch.Generator().manual_seed(5)
        sizes = (2, 3, 3, 1)
        real, noise, other_noise, share = (
            torch.randn(33, n, generator=generator).double() for n in sizes
        )
        return TensorDataset(real + 2, noise, other_noise, share.sigmoid())

    def optimizer(self, model, config):
        return {
            "critic": Adam(model.critic.parameters(), 0.02, (0.5, 0.9)),
            "generator": Adam(model.generator.parameters(), 0.01, (0.5, 0.9)),
        }

    def training_step(self, model, batch, phase):
        real, noise, other_noise, _ = batch
        if phase == "generator":
            return F.softplus(
                -model.critic(model.generator(other_noise))
            ).mean()
        fake = model.generator(noise).detach()
        return (
            F.softplus(-model.critic(real)) + F.softplus(model.critic(fake))
        ).mean()


class SingleAdversarial(Single, Adversarial):
    """In float32."""


class Wasserstein(Adversarial):
    """WGAN-GP (Gulrajani et al. 2017): five steps of the critic, each with
    samples of its own, to one of the other.
    """

    def phases(self, step):
        return ("critic", "generator") if step % 5 == 4 else ("critic",)

    def training_step(self, model, batch, phase):
        real, noise, other_noise, share = batch
        if phase == "generator":
            return -model.critic(model.generator(other_noise)).mean()
        fake = model.generator(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_()
        [slope] = torch.autograd.grad(
            model.critic(between).sum(), between, create_graph=True
        )
        return (model.critic(fake) - model.critic(real)).mean() + 10 * (
            slope.norm(dim=1) - 1
        ).square().mean()


def plain(task, due):
    """The loop of a GAN as tutorials have it."""
    torch.manual_seed(SEED)
    model = task.model()
    optimizers = task.optimizer(model, config())
    data = task.dataset("train")
    losses = {"critic": [], "generator": []}
    for step, at in enumerate(order(task)):
        batch = data[at]
        for phase in due(step):
            model.critic.requires_grad_(phase == "critic")
            model.generator.requires_grad_(phase == "generator")
            losses[phase].append(
                descend(
                    optimizers[phase], task.training_step(model, batch, phase)
                )
            )
    return losses


def by_phase(task, context):
    """The loss of each phase of each step; both of them make the loss of a step."""
    rows = [row for row, checkpoint in context.reports if checkpoint]
    losses = {"critic": [], "generator": []}
    for step, row in enumerate(rows):
        due = task.phases(step) or tuple(losses)
        for phase in due:
            losses[phase].append(row[f"train_loss_{phase}"])
        assert row["train_loss"] == pytest.approx(
            sum(row[f"train_loss_{phase}"] for phase in due), rel=1e-12
        )
    return losses


@pytest.mark.parametrize(
    ("task", "lengths", "microbatch"),
    [
        (Adversarial(), (12, 12), 1),
        (Adversarial(), (12, 12), 6),
        (Wasserstein(), (12, 2), 4),
    ],
)
def test_the_curves_are_those_of_a_plain_loop(
    task, lengths, microbatch, tmp_path
):
    wanted = plain(
        task, lambda step: task.phases(step) or ("critic", "generator")
    )
    assert (len(wanted["critic"]), len(wanted["generator"])) == lengths
    context = Context(tmp_path)
    fit(task, config(**SETTINGS, microbatch_size=microbatch), context)
    found = by_phase(task, context)
    for phase, losses in wanted.items():
        assert found[phase] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("task", "at_step"),
    [(Adversarial(), 3), (Wasserstein(), 3), (Wasserstein(), 7)],
)
def test_a_power_cut_changes_nothing(task, at_step, tmp_path):
    """Also in the middle of five steps of the critic, and with the states of
    one optimizer alone.
    """
    changes = SETTINGS | {
        "ema": {"decay": 0.9},
        "lr_schedule": {"name": "cosine"},
    }
    check_resume(tmp_path, lambda: task, at_step, **changes)


def test_a_bad_gradient_of_one_phase_ends_the_updates_of_all(tmp_path):
    class Bad(Adversarial):
        def training_step(self, model, batch, phase):
            self.calls = getattr(self, "calls", 0) + 1
            loss = super().training_step(model, batch, phase)
            return loss * (
                float("nan") if phase == "critic" and self.calls > 30 else 1.0
            )

    changes = {
        "max_steps": 40,
        "microbatch_size": 6,
        "checkpoint": {"every_steps": 10},
    }
    settings = {
        name: value for name, value in SETTINGS.items() if name != "epochs"
    }
    with pytest.raises(DivergedError, match="step-000000000010"):
        fit(Bad(), config(**settings | changes), Context(tmp_path))


def given(**methods):
    return type("Given", (Adversarial,), methods)()


def shared(self, model, config):
    return {
        "one": SGD(model.critic.parameters(), 0.1),
        "other": SGD(model.parameters(), 0.1),
    }


def frozen(self, model, config):
    model.critic.requires_grad_(False)
    return Adversarial.optimizer(self, model, config)


def apart(self, model, batch, phase):
    return model.critic(batch[0]).mean()


def _normed(self):
    model = Gan()
    model.generator.append(nn.BatchNorm1d(2, dtype=torch.float64))
    return model


REFUSED = [
    (
        {"optimizer": shared},
        {},
        r"has parameter `critic.0.weight` in both one and other",
    ),
    (
        {"optimizer": lambda self, model, config: {"one": 1}},
        {},
        "must be an optimizer, or a dict of them by name",
    ),
    (
        {"optimizer": frozen},
        {},
        "`Given.optimizer.*: .critic.` has no parameter that requires a gradient",
    ),
    (
        {"training_step": apart},
        {},
        r"training_step\(\) in phase generator.* must depend on parameters",
    ),
    (
        {"phases": lambda self, step: ["critic", "critics"]},
        {},
        r"phases\(0\).*: critic, generator",
    ),
    (
        {"phases": lambda self, step: ["critic"] if step < 2 else []},
        {},
        r"phases\(2\)",
    ),
    (
        {"dataset": lambda self, split: Adversarial.dataset(self, "train")},
        {},
        r"has no loss\(\) for the samples",
    ),
    (
        {},
        {"strategy": "fsdp"},
        r"`strategy: .fsdp.` does not work with training_step\(\) or phases\(\), which Given defines",
    ),
    ({}, {"cuda_graphs": True, "device": "auto"}, "`cuda_graphs: true`"),
    ({"model": _normed}, {"global_batch_size": 8}, "`drop_last: false`"),
]


@pytest.mark.parametrize(
    ("methods", "changes", "words"), REFUSED, ids=itertools.count()
)
def test_what_cannot_be_is_refused(methods, changes, words):
    with pytest.raises(ConfigError, match=words):
        fit(given(**methods), config(**SETTINGS | changes), Context(None))
