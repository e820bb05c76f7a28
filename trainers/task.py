"""Task: what a user writes.

It has a model, its data and its loss; everything else has a default.
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
from trainers.data.batch import Batch, fetch, map_tensors, num_samples, tensors_of
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

    Shapes: B samples of one microbatch come first in every tensor of a batch. One
    instance lives in every worker; the constructor gets `task_args` and must be cheap
    (no data, no model).
    """

    def model(self) -> nn.Module:
        """Return a new model on the CPU; called once, under the run's seed."""
        raise _missing(self, "model")

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Return the map-style dataset of `split`: "train" or "val".

        None for "val" where nothing is evaluated.

        Python's, numpy's and torch's global generators begin each call alike, whatever
        the split, rank, command or seed of the run: a `random_split` of one table is
        the same one each time. So is noise: where samples themselves are drawn, let a
        generator of their own follow from `split`.
        """
        if type(self).stream is Task.stream:
            raise _missing(self, "dataset")
        return None

    def stream(self, split: str) -> Iterable[Any] | None:
        """Return the samples of `split` where a dataset cannot hold them.

        Whatever can be iterated; None for `dataset` to say.
        """
        return None

    def sampler(
        self, dataset: Dataset[Any], config: TrainConfig
    ) -> Iterable[int] | None:
        """Return the order of training samples; None: a random one each epoch.

        Such as WeightedRandomSampler.

        Iterating it gives the samples of an epoch, in which one may come twice or
        never; all ranks get the same, and split each step of it. It is asked under a
        seed of the run and the epoch (trainers/data/sampler.py).
        """
        return None

    def loss(self, outputs: Any, batch: Batch) -> Tensor | None:
        """Return a scalar: the mean over the batch's weight (see `weight`).

        None in evaluation, where `model.training` is false, leaves val_loss out: some
        models give losses in training alone, and predictions to `metrics`. Where a
        batch may weigh nothing (all its tokens are padding), F.cross_entropy's mean is
        NaN with a gradient of zero, and is left out; a division of your own wants
        `weight.clamp(min=1)`, for its gradient is NaN, too.
        """
        raise _missing(self, "loss")

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return `model(**batch)` for a mapping, `model(batch[0])` for a tuple or list.

        Of any other batch `model(batch)`.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def training_step(self, model: nn.Module, batch: Batch, phase: str) -> Tensor:
        """Return the loss of a batch in a phase of a step.

        A scalar, the mean over the batch's weight, such as a critic's with its gradient
        penalty.

        A task that defines it says itself what a step does.

        `model` is the bare one, whose parts may be called, and gradients may be part of
        the loss (`create_graph=True`). `phase` is the name of the optimizer that takes
        a step by it, "train" where there is one; parameters of the others do not
        require a gradient meanwhile.
        """
        return cast(Tensor, self.loss(self.forward(model, batch), batch))

    def phases(self, step: int) -> Sequence[str] | None:
        """Return the phases of optimizer step `step`, in order; counted from 0.

        None: one for each optimizer.

        All of them have the samples of the step; ranks must get the same.
        """
        return None

    def weight(self, batch: Batch) -> Tensor:
        """Return a scalar: what the loss of this batch is a mean over.

        Samples as dealt out; override it for tokens, and where `collate` leaves samples
        out.
        """
        return torch.tensor(float(num_samples(batch)))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return evaluation metrics by name.

        A tensor [B] of one value a sample, which is averaged exactly, or a
        torchmetrics.Metric that this batch alone has updated (new, or the task's own:
        it is reset after every batch).

        Batches may have different ones: each is the figure of the batches that have it.
        """
        return {}

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return what `predict` writes, by column: [B] or [B, ...]."""
        return dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}

    def transform(self, batch: Batch, training: bool) -> Batch:
        """Change the whole batch on the device: augmentation, normalisation."""
        return batch

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of a list of samples; override it for what does not stack.

        A collator of transformers is one as it is: `self.collate =
        DataCollatorWithPadding(tokenizer)` in the constructor.
        """
        return default_collate(samples)

    def optimizer(
        self, model: nn.Module, config: TrainConfig
    ) -> Optimizer | Mapping[str, Optimizer]:
        """Return the optimizer of `config.optimizer` at the scaled learning rate.

        `model` may be a part of the task's own.

        Several optimizers, by name, each take a step in a phase of their own where the
        task defines `training_step` or `phases`; else all of them, after one backward
        of the loss.
        """
        return build_optimizer(model, config)

    def schedule(
        self, optimizer: Optimizer, config: TrainConfig
    ) -> LRScheduler | tuple[LRScheduler, str] | None:
        """Return a torch scheduler for `optimizer`; None: `config.lr_schedule`.

        The optimizer is a stand-in with the groups of the run's own.

        It is stepped after each step; `(scheduler, "epoch")` after each epoch, and
        ReduceLROnPlateau by each evaluation's val_loss, or by the metric in
        `(scheduler, "val_accuracy")`. Its state is kept in checkpoints: the task does
        not step it.
        """
        return None

    def worst_case_batch(self, dataset: Dataset[Any], size: int) -> Batch:
        """Return the batch of `size` samples that takes most memory.

        The first ones; override it for sequences.
        """
        length = len(dataset) if isinstance(dataset, Sized) else size
        return fetch(dataset, [index % length for index in range(size)], self.collate)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Act on the bare model after the optimizer's step, without autograd.

        Clip weights, update a target network. `step` counts from 1.

        On every rank, before a moving average takes the weights in; never in a pass
        that is thrown away.
        """

    def on_evaluate(self, metrics: dict[str, float], step: int) -> None:
        """Act on an evaluation's figures, alike on all ranks: move a curriculum on."""

    def setup(self) -> None:
        """Prepare a node, once, before any worker reads data: download, decompress."""

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state (a curriculum, a queue), kept in checkpoints.

        Tensors and plain data.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def weight_of(task: Task, batch: Batch, samples: int) -> Tensor:
    """Return the weight of a batch made of `samples` samples.

    That is the number of samples dealt out, because not every batch shows it (packed
    sequences, graphs, lists of images), unless the task defines weight().
    """
    if type(task).weight is Task.weight:
        return torch.tensor(float(samples))
    given = task.weight(batch)
    weight = torch.empty(0) if given is None else torch.as_tensor(given)
    is_number = weight.numel() == 1 and not weight.is_complex()
    # On a GPU it is not looked at, as the step would wait for it.
    if is_number and weight.is_cpu:
        is_number = 0 <= float(weight) < math.inf
    if not is_number:
        rule = (
            "must be one number from 0 on, which the loss of the batch is a mean over"
        )
        raise ConfigError(
            f"{type(task).__name__}.weight()",
            list(weight.shape) if weight.numel() > 1 else str(given),
            rule,
            "add them up: `.sum()`",
        )
    return weight.reshape(())


def _missing(task: Task, method: str) -> TypeError:
    return TypeError(
        f"{type(task).__name__} must define `{method}()`: see trainers/task.py for what a task is"
    )


def load_split(task: Task, split: str, training: bool, device: torch.device) -> Any:
    """Return the dataset of a split, with a stream made into one; None without any.

    Raises ConfigError.

    Random numbers that the task draws for it, on the host or on `device`, are the same
    in every process and run.
    """

    def stream() -> Any:
        with drawn_alike(device), as_one_rank():
            return task.stream(split)

    found = stream()
    if found is None:
        with drawn_alike(device):
            dataset: Any = task.dataset(split)
        _refuse_splits(f'dataset("{split}")', dataset)
        # A length of its own (MosaicML's and LitData's have one) may mean this rank's
        # share.
        if isinstance(dataset, IterableDataset):
            rule = f"is given by {type(task).__name__}.dataset(), which is for map-style datasets"
            raise ConfigError(
                f'dataset("{split}")',
                type(dataset).__name__,
                rule,
                "return it from stream()",
            )
        check_dataset(f'dataset("{split}")', dataset)
        return dataset
    _refuse_splits(f'stream("{split}")', found)
    if not any(
        hasattr(found, name) for name in ("__iter__", "__getitem__", "iter_rows")
    ):
        fix = "return an object with `__iter__`"
        raise ConfigError(
            f'stream("{split}")', type(found).__name__, "cannot be iterated", fix
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
        rule = (
            f"has no sample 0, but {', '.join(map(str, list(found)[:5])) or 'nothing'}"
        )
        raise ConfigError(
            field, type(found).__name__, rule, "return the samples of one split"
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
    transform = None if type(task).transform is Task.transform else task.transform
    collate = (
        default_collate
        if getattr(task.collate, "__func__", None) is Task.collate
        else task.collate
    )
    return Feed(dataset, collate, transform, config, device, sharers=sharers, seed=seed)
