"""Steps of several phases on several ranks: buffers of one model, and a run
that is moved (curves: test_recipes.py).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.curves import losses
from tests.distributed.processes import run_processes
from tests.unit.test_phases import Adversarial, Gan, Wasserstein

pytestmark = pytest.mark.full


class Weighed(Wasserstein):
    """By another weight than samples, which the ranks add up in each phase."""

    def weight(self, batch):
        return batch[3].sum()

    def training_step(self, model, batch, phase):
        real, noise, other_noise, share = batch
        if phase == "generator":
            each = F.softplus(-model.critic(model.generator(other_noise)))
        else:
            each = F.softplus(-model.critic(real)) + F.softplus(
                model.critic(model.generator(noise))
            )
        return (each * share).sum() / share.sum()


class Turned(Adversarial):
    """Spectral normalisation: its vectors are buffers, and turn with every forward."""

    def model(self):
        gan = Gan()
        nn.utils.parametrizations.spectral_norm(gan.critic[0])
        return gan


class Chosen(Adversarial):
    """The critic's loss of some samples depends on another part of the model."""

    def training_step(self, model, batch, phase):
        rows = range(len(batch[0]))
        return torch.stack(
            [
                self.of_sample(
                    model, [part[row : row + 1] for part in batch], phase
                )
                for row in rows
            ]
        ).mean()

    def of_sample(self, model, batch, phase):
        if phase == "critic" and batch[2][0, 0] > 0:
            return model.critic[2](batch[2].repeat(1, 6)[:, :16]).mean()
        return super().training_step(model, batch, phase)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_other_ranks(before, after, tmp_path):
    """After step 7, the third of five of the critic, in the second epoch."""
    changes = {"microbatch_size": 2, "checkpoint": {"every_steps": 1}}
    whole = run_processes(before, losses, Wasserstein(), changes)[0]
    first = run_processes(
        before, losses, Wasserstein(), changes, tmp_path / "moved", 7
    )[0]
    last = run_processes(
        after, losses, Wasserstein(), changes, tmp_path / "moved"
    )[0]
    assert (len(first), len(last)) == (7, 5)
    assert first + last == pytest.approx(whole, rel=1e-12)


def buffers(rank, world_size):
    """What each step began with."""
    seen = []
    begun = []

    class Kept(Turned):
        def after_step(self, model, step):
            seen.extend(begun)
            begun.clear()

        def training_step(self, model, batch, phase):
            if not begun:
                begun.extend(buffer.clone() for buffer in model.buffers())
            return super().training_step(model, batch, phase)

    losses(rank, world_size, Kept(), {"microbatch_size": 1})
    return seen


def test_buffers_are_rank_0s_when_a_step_begins():
    """The last step of an epoch has three samples: one rank has a microbatch
    more, and turns them further.
    """
    one, other = run_processes(2, buffers)
    assert len(one) == 24
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(one, other, strict=True)
    )
