"""Load both splits as the task gives them, and order the training samples."""

import contextlib
import logging
from typing import Any

from torch.utils.data import Dataset

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.data.batch import fetch
from trainers.data.batch_schedule import ENDLESS, BatchSchedule
from trainers.data.sampler import Drawn, StepSampler, same_rows_on_ranks
from trainers.data.stream import Rereadable, Stream, digest, same_on_ranks
from trainers.devices.device import drawn_alike, seed_all, seed_host
from trainers.devices.group import Group
from trainers.errors import ConfigError, counted
from trainers.loop.watchdog import enter
from trainers.task import Task, load_split

logger = logging.getLogger(__name__)


def load_data(
    task: Task, config: TrainConfig, context: RunContext, group: Group
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Load the datasets of both splits; the second is None without evaluation.

    Raises ConfigError for an empty one.
    """
    seed_all(config.seed)
    enter("setup")
    if context.local_rank == 0:
        with drawn_alike(group.device):
            task.setup()
    enter("the barrier after setup")
    group.barrier()
    enter("dataset")
    train, val = (
        load_split(task, split, split == "train", group.device)
        for split in ("train", "val")
    )
    if train is None:
        rule = 'gives no data for its "train" split, and every run needs some'
        raise ConfigError(
            "task", config.task, rule, "return one from dataset() or stream()"
        )
    if isinstance(val, Rereadable):
        same_on_ranks(val, group, config.task)
    if val is None:
        _refuse_what_evaluates(config, context)
    found = {
        split: one
        for split, one in (("train", train), ("val", val))
        if not isinstance(one, Stream | None)
    }
    if not all(hasattr(dataset, "__len__") for dataset in found.values()):
        fix = "give map-style datasets (`__len__`), or return what is read forward from stream()"
        raise ConfigError("task", config.task, "has a dataset without length", fix)
    for split, dataset in found.items():
        if len(dataset) == 0:
            raise ConfigError(
                "task",
                config.task,
                f'has no sample in its "{split}" split',
                "check its files",
            )
        if not isinstance(dataset, Rereadable):
            same_rows_on_ranks(split, dataset, group)
    return train, val


def _refuse_what_evaluates(config: TrainConfig, context: RunContext) -> None:
    """Raise ConfigError where an evaluation needs a validation split."""
    needs = [
        ("checkpoint.best", config.checkpoint.best),
        ("early_stopping.metric", config.early_stopping.metric),
    ]
    needs += [
        ("objective", name) for name in context.watches if name.startswith("val_")
    ]
    for field, metric in needs:
        if metric is not None:
            rule = 'is a figure of the validation split, and dataset("val") gives none'
            raise ConfigError(
                field,
                metric,
                rule,
                "return a few samples that are held back, or go by another metric",
            )


def make_sampler(
    train: Any, task: Task, config: TrainConfig, group: Group
) -> StepSampler:
    """Return what deals the training samples out, in the task's order if any."""
    size = config.batch_size
    drop_last = config.drop_last
    given = task.sampler(train, config)
    drawn = None
    of_stream = isinstance(train, Stream)
    if isinstance(train, Stream):
        _look_into(train, given is not None, config, group)
        batches = BatchSchedule(config.batch_sizes, ENDLESS, drop_last)
        train = range(
            batches.samples(config.max_steps or 0)
        )  # as far as this run reads it
    elif given is not None:
        drawn = Drawn(given, len(train), config.seed, group.device)
    sampler = StepSampler(
        train,
        group.world_size,
        group.rank,
        not of_stream,
        config.seed,
        drop_last,
        global_batch_size=config.batch_sizes,
        drawn=drawn,
    )
    sampler.of_stream = of_stream
    if drawn is not None and len(set(group.gather(sampler.name()))) > 1:
        fix = "give the order of all samples: the ranks split each step of it"
        raise ConfigError("sampler", drawn.name, "gives each rank another order", fix)
    if size > sampler.length and not of_stream:
        given_by = 'dataset("train")' if drawn is None else "sampler()"
        rule = f"is more than the {counted(sampler.length, 'sample')} of an epoch, which {given_by} gives"
        key = "global_batch_size" if config.batch_schedule is None else "batch_schedule"
        raise ConfigError(key, size, rule, f"set it to at most {sampler.length}")
    return sampler


def check_length(train: Any, sampler: StepSampler) -> None:
    """Raise ConfigError where the training split has changed its length.

    Its epochs were dealt out with another.
    """
    if sampler.drawn is None and sampler.known_length and sampler.length != len(train):
        rule = f"has {len(train)} samples now, and had {sampler.length}, of which epochs are made"
        fix = "keep its length; sampler() may choose among samples that are there from the start"
        raise ConfigError('dataset("train")', type(train).__name__, rule, fix)


def tell_samples(dataset: Any) -> str:
    """Return what tells a few samples from others: a resumed run must find them again.

    For a `throwaway` block.

    Nothing of a stream, which does so itself, and of samples that are others each time.
    """
    told: set[str] = set()
    with contextlib.suppress(Exception):  # training says it better
        for _ in range(0 if isinstance(dataset, Stream | Rereadable) else 2):
            seed_host(0)
            told.add(
                digest(
                    fetch(
                        dataset, sorted({0, len(dataset) // 2, len(dataset) - 1}), list
                    )
                )
            )
    return told.pop() if len(told) == 1 else ""


def steps_in_all(config: TrainConfig, batches: BatchSchedule) -> int:
    """Return the steps of a run."""
    return config.max_steps or batches.first_step(config.epochs or 0)


def _look_into(
    stream: Stream, has_sampler: bool, config: TrainConfig, group: Group
) -> None:
    """Read as much of a stream as any throw-away pass may.

    Raises ConfigError where it cannot be trained on so.
    """
    for key, value, instead in (
        ("epochs", config.epochs, "`max_steps`"),
        ("evaluate.every_epochs", config.evaluate.every_epochs, "`every_steps`"),
        (
            "checkpoint.every_epochs",
            config.checkpoint.every_epochs,
            "`every_steps` or `every_s`",
        ),
    ):
        if value is not None:
            rule = "counts what nobody knows: a stream does not say how many samples it has"
            raise ConfigError(key, value, rule, f"give {instead} in its place")
    if has_sampler:
        fix = "give a map-style dataset"
        raise ConfigError(
            "sampler",
            type(stream).__name__,
            "is for data that can be read in any order",
            fix,
        )
    stream.digest(-(-config.batch_size // group.world_size))
    same_on_ranks(stream, group, config.task)
    if group.rank == 0:
        logger.info("%s", stream.words)
        if (workers := config.data.num_workers) > 1:
            logger.warning(
                "`data.num_workers` is %d, and has the effect of 1: one process reads a stream",
                workers,
            )
