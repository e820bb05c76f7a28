"""Load both splits as the task gives them, and order the training samples."""

import contextlib
import logging
from typing import Any

from trainers.context import RunContext
from trainers.data.batch import fetch
from trainers.data.batch_schedule import ENDLESS, BatchSchedule, Sizes
from trainers.data.sampler import Drawn, StepSampler, same_rows_on_ranks
from trainers.data.stream import Rereadable, Stream, digest, same_on_ranks
from trainers.devices.device import drawn_alike, seed_host
from trainers.devices.group import Group
from trainers.errors import ConfigError, counted
from trainers.task import Task, load_split

logger = logging.getLogger(__name__)


def load_data(
    task: Task, name: str, context: RunContext, group: Group
) -> tuple[Any, Any | None]:
    """Load the datasets of both splits; the second is None if nothing is evaluated.

    Raises ConfigError for an empty one. `name` is the task's, for messages.
    """
    context.enter("setup")
    if context.local_rank == 0:
        with drawn_alike(group.device):
            task.setup()
    context.enter("the barrier after setup")
    group.barrier()
    context.enter("dataset")
    train = load_split(task, "train", True, group.device)
    val = load_split(task, "val", False, group.device)
    if train is None:
        raise ConfigError(
            "task",
            name,
            'gives no data for its "train" split, and every run needs some',
            "return one from dataset() or stream()",
        )
    if isinstance(val, Rereadable):
        same_on_ranks(val, group, name)
    for split, dataset in (("train", train), ("val", val)):
        if isinstance(dataset, Stream | None):
            continue
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                "task",
                name,
                "has a dataset without length",
                "give map-style datasets (`__len__`), or return what is read forward from stream()",
            )
        if len(dataset) == 0:
            raise ConfigError(
                "task", name, f'has no sample in its "{split}" split', "check its files"
            )
        if not isinstance(dataset, Rereadable):
            same_rows_on_ranks(split, dataset, group)
    return train, val


def uncounted(key: str, value: object) -> ConfigError:
    """Return the error for a setting that counts epochs of a stream."""
    return ConfigError(
        key,
        value,
        "counts what nobody knows: a stream does not say how many samples it has",
        "count steps (`max_steps`, `every_steps`)",
    )


def look_into(
    stream: Stream, sampler: object, most: int, task: str, group: Group
) -> None:
    """Read as many samples of a stream as any throw-away pass may need.

    Steps have at most `most` samples. Raises ConfigError if the stream has a sampler,
    or differs between ranks.
    """
    if sampler is not None:
        raise ConfigError(
            "sampler",
            type(stream).__name__,
            "is for data that can be read in any order",
            "give a map-style dataset",
        )
    stream.digest(-(-most // group.world_size))
    same_on_ranks(stream, group, task)
    if group.rank == 0:
        logger.info("%s", stream.words)


def deal_out(
    train: Any,
    given: Any,
    group: Group,
    *,
    sizes: Sizes,
    seed: int,
    drop_last: bool,
    max_steps: int,
) -> StepSampler:
    """Return the sampler of training steps, in the `given` order if there is one.

    A stream is dealt out as far as `max_steps` will read it.
    """
    drawn = None
    of_stream = isinstance(train, Stream)
    if of_stream:
        train = range(BatchSchedule(sizes, ENDLESS, drop_last).samples(max_steps))
    elif given is not None:
        drawn = Drawn(given, len(train), seed, group.device)
    sampler = StepSampler(
        train,
        group.world_size,
        group.rank,
        not of_stream,
        seed,
        drop_last,
        global_batch_size=sizes,
        drawn=drawn,
    )
    sampler.of_stream = of_stream
    if drawn is not None and len(set(group.gather(sampler.name()))) > 1:
        raise ConfigError(
            "sampler",
            drawn.name,
            "gives each rank another order",
            "give the order of all samples: the ranks split each step of it",
        )
    largest = max(size for _, size in sizes)
    if largest > sampler.length and not of_stream:
        given_by = 'dataset("train")' if drawn is None else "sampler()"
        rule = f"is more than the {counted(sampler.length, 'sample')} of an epoch, which {given_by} gives"
        key = "batch_schedule" if sampler.batches.changes else "global_batch_size"
        raise ConfigError(key, largest, rule, f"set it to at most {sampler.length}")
    return sampler


def check_length(train: Any, sampler: StepSampler) -> None:
    """Raise ConfigError if the training split has changed its length.

    Epochs were divided into steps by its earlier length.
    """
    if sampler.drawn is None and sampler.known_length and sampler.length != len(train):
        raise ConfigError(
            'dataset("train")',
            type(train).__name__,
            f"has {len(train)} samples now, and had {sampler.length}, of which epochs are made",
            "keep its length; sampler() may choose among samples that are there from the start",
        )


def tell_samples(dataset: Any) -> str:
    """Return a digest of a few samples, by which a resumed run checks it has the same.

    Empty for a stream, which is checked separately, and for samples that change each
    time they are read. Call it in a `throwaway` block.
    """
    if isinstance(dataset, Stream | Rereadable):
        return ""
    told: set[str] = set()
    with contextlib.suppress(Exception):  # training says it better
        rows = sorted({0, len(dataset) // 2, len(dataset) - 1})
        for _ in range(2):
            seed_host(0)
            told.add(digest(fetch(dataset, rows, list)))
    return told.pop() if len(told) == 1 else ""
