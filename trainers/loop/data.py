"""Load both splits as the task gives them, and order the training samples."""

import contextlib
import logging
from typing import Any

from trainers.context import RunContext
from trainers.data.batch import fetch
from trainers.data.batch_schedule import ENDLESS, BatchSchedule, Sizes
from trainers.data.sampler import Drawn, StepSampler, name_rows
from trainers.data.stream import Rereadable, Stream, digest, same_on_ranks
from trainers.devices.device import drawn_alike, seed_host
from trainers.devices.group import Group
from trainers.errors import MISSING, ConfigError, counted
from trainers.task import Task, load_split

logger = logging.getLogger(__name__)


def load_data(
    task: Task, name: str, context: RunContext, group: Group
) -> tuple[Any, Any | None]:
    """Load the datasets of both splits; the second is None if nothing is evaluated.

    Raises ConfigError for an empty split. `name` is the task's name, for
    messages.
    """
    context.enter("setup")
    if context.local_rank == 0:
        with drawn_alike(group.device):
            task.setup()
    context.enter("the barrier after setup")
    group.barrier()
    context.enter("dataset")
    train = load_same(task, "train", name, group, training=True)
    val = load_same(task, "val", name, group, may_lack=True)
    return train, val


def load_same(
    task: Task,
    split: str,
    name: str,
    group: Group,
    *,
    training: bool = False,
    may_lack: bool = False,
) -> Any:
    """Load a split; ConfigError if it has no samples, or if ranks have different samples.

    With `may_lack` it returns None for a task without this split. Every rank
    must call it.
    """
    found = load_split(task, split, training, group.device)
    if isinstance(found, Stream) or (found is None and may_lack):
        return found
    if isinstance(found, Rereadable):
        same_on_ranks(found.digest(), group, "stream", name)
    if not hasattr(found, "__len__") or len(found) == 0:
        raise ConfigError(
            f'dataset("{split}")',
            type(found).__name__,
            "has no sample, or no length",
            "return a map-style dataset (`__len__`) with samples, or sequential data from stream()",
        )
    if not isinstance(found, Rereadable):
        same_on_ranks(name_rows(found), group, f'dataset("{split}")', name)
    return found


def uncounted(key: str, value: object) -> ConfigError:
    """Return the error for a setting that counts epochs of a stream."""
    return ConfigError(
        key,
        value,
        "counts epochs, and a stream does not say how many samples an epoch has",
        "count steps (`max_steps`, `every_steps`)",
    )


def look_into(
    stream: Stream, sampler: object, most: int, task: str, group: Group
) -> None:
    """Read as many samples of a stream as any throw-away pass may need.

    Steps have at most `most` samples. Raises ConfigError if the stream has a
    sampler, or differs between ranks.
    """
    if sampler is not None:
        raise ConfigError(
            "sampler",
            type(sampler).__name__,
            "needs data that can be read in any order, and stream() gives a stream",
            "return None from sampler(), or give a map-style dataset",
        )
    stream.digest(-(-most // group.world_size))
    same_on_ranks(stream.digest(), group, "stream", task)
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

    For a stream, the sampler covers the samples that `max_steps` steps read.
    """
    drawn = None
    of_stream = isinstance(train, Stream)
    if of_stream:
        train = range(
            BatchSchedule(sizes, ENDLESS, drop_last).samples(max_steps)
        )
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
    if drawn is not None:
        same_on_ranks(sampler.name(), group, "sampler", drawn.name)
    largest = max(size for _, size in sizes)
    if largest > sampler.length and not of_stream:
        given_by = 'dataset("train")' if drawn is None else "sampler()"
        rule = f"is more than the {counted(sampler.length, 'sample')} of an epoch, which {given_by} gives"
        fix = f"set it to at most {sampler.length}"
        if sampler.batches.changes:
            rule = f"has the size {largest}, which {rule}"
            fix = f"set each size to at most {sampler.length}"
            raise ConfigError("batch_schedule", MISSING, rule, fix)
        raise ConfigError("global_batch_size", largest, rule, fix)
    return sampler


def check_length(train: Any, sampler: StepSampler) -> None:
    """Raise ConfigError if the training split has changed its length.

    Epochs were divided into steps by its earlier length.
    """
    if (
        sampler.drawn is None
        and sampler.known_length
        and sampler.length != len(train)
    ):
        raise ConfigError(
            'dataset("train")',
            type(train).__name__,
            f"has {len(train)} samples now, and had {sampler.length} when its epochs were planned",
            "keep its length; sampler() may choose among samples that are there from the start",
        )


def tell_samples(dataset: Any) -> str:
    """Return a digest of a few samples, to tell whether a resumed run has the same ones.

    Empty for a stream, which is checked separately, and for samples that
    change each time they are read. Call it in a `throwaway` block.
    """
    if isinstance(dataset, Stream | Rereadable):
        return ""
    told: set[str] = set()
    with contextlib.suppress(Exception):  # training reports it better
        rows = sorted({0, len(dataset) // 2, len(dataset) - 1})
        for _ in range(2):
            seed_host(0)
            told.add(digest(fetch(dataset, rows, list)))
    return told.pop() if len(told) == 1 else ""
