"""A task's model on its devices, as configured, with all that holds on to its parameters."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.devices.group import Group
from trainers.model.activations import checkpoint_activations
from trainers.model.frozen import frozen_digests
from trainers.model.joined_optimizer import join
from trainers.model.moving_average import MovingAverage
from trainers.model.optimizer import check_optimizer, set_training
from trainers.model.precision import resolve_precision
from trainers.model.strategy import place_model, sync_batchnorm
from trainers.step.forward import ForwardPass
from trainers.task import Task


@dataclass(frozen=True)
class Trained:
    """A model, neither compiled nor wrapped yet, and its optimizer."""

    forward: ForwardPass
    optimizer: Optimizer
    ema: MovingAverage | None
    frozen: dict[str, str] | None
    """Digests of the parameters that checkpoints leave out; None where they have them all."""

    @property
    def model(self) -> nn.Module:
        """The bare module."""
        return self.forward.model


def make_trained(task: Task, model: nn.Module, config: TrainConfig, group: Group) -> Trained:
    """Place or shard a task's model as configured, and make its optimizer and its moving average."""
    frozen = frozen_digests(model) if config.checkpoint.parameters == "trained" else None
    if config.ddp.sync_batchnorm:
        model = sync_batchnorm(model, group)
    spec = resolve_precision(config.precision, group.device).with_layout(config.channels_last, model, group.device)
    model = place_model(spec.convert_model(model), group, config.strategy, config.fsdp)
    checkpoint_activations(model, config.activation_checkpointing, config.compile != "off")
    model.train()
    optimizer = join(task.optimizer(model, config), model, type(task).__name__)
    check_optimizer(optimizer, type(task).__name__)
    set_training(optimizer, True)
    ema = None if config.ema.decay is None else MovingAverage(model, optimizer, config.ema, frozen or ())
    return Trained(ForwardPass(model, task, spec, group.device), optimizer, ema, frozen)
