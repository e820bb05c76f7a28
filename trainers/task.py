"""Task: the class that a user writes.

It defines a model, its data and its loss; everything else has a default.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset, default_collate

from trainers.config import TrainConfig
from trainers.config.sections import DataConfig
from trainers.data.batch import (
    Batch,
    Collate,
    fetch,
    map_tensors,
    num_samples,
    tensors_of,
)
from trainers.data.feed import Feed
from trainers.data.sampler import check_dataset
from trainers.data.stream import Rereadable, Stream
from trainers.devices.device import drawn_alike
from trainers.devices.group import as_one_rank
from trainers.errors import ConfigError
from trainers.model.optimizer import build_optimizer

__all__ = [
    "Batch",
    "Task",
    "load_split",
    "map_tensors",
    "num_samples",
    "task_feed",
    "tensors_of",
]


class Task:
    """One learning problem.

    Shapes: in every tensor of a batch, the first dimension is B, the samples
    of one microbatch. Every worker has one instance; the constructor gets
    `task_args` and must be cheap (no data, no model).
    """

    def model(self) -> nn.Module:
        """Return a new model on the CPU; called once, under the run's seed."""
        raise _missing(self, "model")

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Return the map-style dataset of `split`: "train" or "val".

        None for "val" means that nothing is evaluated.

        Python's, numpy's and torch's global generators start each call in the
        same state, whatever the split, rank, command or seed of the run. So a
        `random_split` of one table is always the same. Random samples would be
        the same in both splits: draw them from a generator that is seeded by
        `split`.
        """
        if not overrides(self, "stream"):
            raise _missing(self, "dataset")
        return None

    def stream(self, split: str) -> Iterable[Any] | None:
        """Return an iterable of the samples of `split`, if no dataset can hold them.

        None means that `dataset` is used.
        """
        return None

    def sampler(
        self, dataset: Dataset[Any], config: TrainConfig
    ) -> Iterable[int] | None:
        """Return the order of training samples; None: random, new each epoch.

        For example, a WeightedRandomSampler. Iterating over it gives an
        epoch's sample indices; a sample may occur twice or never. Ranks share
        each step's samples. Before each epoch, generators are seeded with the
        run's seed and the epoch.
        """
        return None

    def loss(self, outputs: Any, batch: Batch) -> Tensor | None:
        """Return a scalar: the mean over the batch's weight (see `weight`).

        In evaluation (`model.training` is false), None leaves val_loss out:
        some models give losses only in training. A batch of weight 0 (all
        tokens are padding) is left out. Its loss may be NaN, but its gradient
        may not: F.cross_entropy's gradient is 0; in your own mean, divide by
        `weight.clamp(min=1)`.
        """
        raise _missing(self, "loss")

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return `model(**batch)` for a mapping, `model(batch[0])` for a tuple or list.

        For any other batch, return `model(batch)`.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def training_step(
        self, model: nn.Module, batch: Batch, phase: str
    ) -> Tensor:
        """Return the loss of a batch in a phase of a step.

        It is a scalar, the mean over the batch's weight. Define this method if
        the loss depends on the phase, or contains gradients
        (`create_graph=True`), as a critic's gradient penalty does.

        `model` is the bare model, whose parts may be called. `phase` is the
        name of the optimizer that steps in this phase ("train" if there is
        only one). During a phase, parameters of the other optimizers do not
        require a gradient.
        """
        return cast(Tensor, self.loss(self.forward(model, batch), batch))

    def phases(self, step: int) -> Sequence[str] | None:
        """Return the phases of optimizer step `step` (from 0), in order.

        None means one phase for each optimizer.

        All phases train on the step's samples. The answer must be equal on all
        ranks.
        """
        return None

    def weight(self, batch: Batch) -> Tensor:
        """Return a scalar: the number of items that the loss of `batch` is a mean of.

        By default, the number of samples; override it to count tokens, or if
        `collate` leaves samples out.
        """
        return torch.tensor(float(num_samples(batch)))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return evaluation metrics by name.

        Each is a tensor [B] with one value per sample, which is averaged
        exactly, or a torchmetrics.Metric that only this batch has updated
        (new, or kept by the task: it is reset after every batch).

        Batches may have different metrics: each is computed over the batches
        that have it.
        """
        return {}

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the columns that `predict` writes, by name: [B] or [B, ...]."""
        return (
            dict(outputs)
            if isinstance(outputs, Mapping)
            else {"output": outputs}
        )

    def transform(self, batch: Batch, training: bool) -> Batch:
        """Change the whole batch on the device: augmentation, normalisation."""
        return batch

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of a list of samples; override it if they cannot be stacked.

        A collator of transformers works unchanged: set `self.collate =
        DataCollatorWithPadding(tokenizer)` in the constructor.
        """
        return default_collate(samples)

    def optimizer(
        self, model: nn.Module, config: TrainConfig
    ) -> Optimizer | Mapping[str, Optimizer]:
        """Return the optimizer of `config.optimizer` at the scaled learning rate.

        An override may call this with a part of the model, and return several
        optimizers by name: each steps in its own phase if the task defines
        `training_step` or `phases`; otherwise all step after one backward pass
        of the loss.
        """
        return build_optimizer(model, config)

    def schedule(
        self, optimizer: Optimizer, config: TrainConfig
    ) -> LRScheduler | tuple[LRScheduler, str] | None:
        """Return a torch scheduler for `optimizer`; None: `config.lr_schedule`.

        `optimizer` is a stand-in with the groups of the run's optimizer. The
        task must not step the scheduler: the loop does, after each optimizer
        step or, for `(scheduler, "epoch")`, after each epoch. A
        ReduceLROnPlateau is stepped with each evaluation's val_loss, or with
        the metric in `(scheduler, "val_accuracy")`. Checkpoints keep the
        scheduler's state.
        """
        return None

    def worst_case_batch(self, dataset: Dataset[Any], size: int) -> Batch:
        """Return the batch of `size` samples that takes the most memory.

        By default, the first samples; override it for sequences.
        """
        length = len(dataset) if isinstance(dataset, Sized) else size
        return fetch(
            dataset,
            [index % length for index in range(size)],
            collate_of(self),
        )

    def after_step(self, model: nn.Module, step: int) -> None:
        """Act on the bare model after the optimizer's step, without autograd.

        For example, clip weights or update a target network. `step` counts
        from 1. Called on every rank, before the moving average is updated;
        never in a throw-away pass.
        """

    def on_evaluate(self, metrics: dict[str, float], step: int) -> None:
        """Called with an evaluation's figures, for example to advance a curriculum.

        The figures are equal on all ranks.
        """

    def setup(self) -> None:
        """Called once on each node, before any worker reads data.

        Override it, for example, to download or decompress data.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state (tensors and plain data), kept in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def overrides(task: Task, name: str) -> bool:
    """Return whether a task has its own `name`: a method of its class, or an attribute."""
    own = getattr(task, name)
    return getattr(own, "__func__", None) is not getattr(Task, name)


def collate_of(task: Task) -> Collate:
    """Return the task's own collate, else torch's."""
    return task.collate if overrides(task, "collate") else default_collate


def weight_of(task: Task, batch: Batch, samples: int) -> Tensor:
    """Return the weight of a batch made of `samples` samples.

    Unless the task defines weight(), that is `samples`: not every batch shows
    how many samples it has (packed sequences, graphs, lists of images).
    """
    if not overrides(task, "weight"):
        return torch.tensor(float(samples))
    given = task.weight(batch)
    weight = torch.empty(0) if given is None else torch.as_tensor(given)
    is_number = weight.numel() == 1 and not weight.is_complex()
    # On a GPU the value is not checked, as the step would wait for it.
    if is_number and weight.is_cpu:
        is_number = 0 <= float(weight) < math.inf
    if not is_number:
        rule = "must be one finite number of at least 0: how many items the batch's loss is a mean of"
        raise ConfigError(
            f"{type(task).__name__}.weight()",
            list(weight.shape) if weight.numel() > 1 else str(given),
            rule,
            "return one number, for example a mask's `.sum()`",
        )
    return weight.reshape(())


def _missing(task: Task, method: str) -> TypeError:
    return TypeError(
        f"{type(task).__name__} must define `{method}()`: see trainers/task.py for what a task is"
    )


def load_split(
    task: Task, split: str, training: bool, device: torch.device
) -> Any:
    """Return a split's dataset: from `stream` if it gives one, else from `dataset`.

    Raises ConfigError.

    Random numbers that the task draws for the split, on the host or on
    `device`, are the same in every process and run.
    """

    def stream() -> Any:
        with drawn_alike(device), as_one_rank():
            return task.stream(split)

    found = stream()
    if found is None:
        with drawn_alike(device):
            dataset: Any = task.dataset(split)
        _refuse_splits(f'dataset("{split}")', dataset)
        check_dataset(f'dataset("{split}")', dataset)
        return dataset
    _refuse_splits(f'stream("{split}")', found)
    if not any(
        hasattr(found, name)
        for name in ("__iter__", "__getitem__", "iter_rows")
    ):
        fix = "return an object with `__iter__`"
        raise ConfigError(
            f'stream("{split}")',
            type(found).__name__,
            "cannot be iterated",
            fix,
        )
    if (
        hasattr(found, "__getitem__")
        and hasattr(found, "__len__")
        and not isinstance(found, IterableDataset)
    ):
        return found
    made = [found]

    def make() -> Any:
        return made.pop() if made else stream()

    name = f'{type(task).__name__}.stream("{split}")'
    return Stream(make, name) if training else Rereadable(make, name)


def _refuse_splits(field: str, found: Any) -> None:
    """Raise ConfigError for a mapping of splits, such as `load_dataset` returns."""
    if isinstance(found, Mapping) and 0 not in found:
        rule = f"has no sample 0, only {', '.join(map(str, list(found)[:5])) or 'nothing'}"
        raise ConfigError(
            field,
            type(found).__name__,
            rule,
            "return the samples of one split",
        )


def task_feed(
    dataset: Dataset[Any],
    task: Task,
    config: DataConfig,
    device: torch.device,
    *,
    sharers: int,
    seed: int,
) -> Feed:
    """Return a feed of `dataset` that uses the task's collate and transform.

    `sharers` is as in Feed.
    """
    transform = task.transform if overrides(task, "transform") else None
    return Feed(
        dataset,
        collate_of(task),
        transform,
        config,
        device,
        sharers=sharers,
        seed=seed,
    )
