"""Streams, which are read forward, as datasets that are asked for rows by number.

Row n of a training stream is its n-th sample, counted on over its passes. Every rank
reads the whole stream, in one process (the worker, or its loader's), and drops the rows
of other ranks. A run that goes on loads the stream's own state where that is exact, and
else reads and drops what was trained.

A loader's process makes and begins the stream anew, whatever the worker has read
before: it would share the offsets of open files with the worker, and inherit
connections without the threads that serve them. Only a generator, or another iterator
of Python's own, goes on where the worker stopped: one that needs more than memory and
files wants `data.num_workers: 0`, or an object whose `__iter__` begins anew. No stream
sees that it is read by a loader's process (`get_worker_info()` is None): Hugging Face's
shuffle, for one, would give another order there.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from torch.utils.data import Dataset

from trainers.data.stream_reader import (
    END,
    MOST_MARKS,
    Mark,
    StreamReader,
    digest,
    missing_state,
    prove,
)
from trainers.devices.group import Group
from trainers.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

_TOLD = 32  # samples that tell one stream from another


class Stream(Dataset[Any]):
    """A training stream.

    Rows ascend (one may be repeated); those in between are read and dropped.

    `make` gives the user's iterable: once in each process that reads it, and again for
    a proof and to load a state. Where it has `set_epoch`, that is called with each
    pass's number; `iter_rows` (Ray Data) goes before `__iter__`. `load_state_dict` must
    be for the next iteration alone.

    What is read before `begin` is kept in memory, so throw-away passes may read it
    again and again. Have it read before
    them: they put back what has changed in the user's objects. Raises ConfigError for a
    stream that gives no sample, or none when it is begun again; what it raises itself
    has a note with its name and the row.
    """

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make = make
        self._name = name
        self._begun = False
        self.beat: Callable[[], None] = lambda: None
        """Called each 1,000 rows in the process that reads, also of those that are
        dropped.
        """
        self._sent: Mapping[str, Any] | None = None
        self._received: deque[Mapping[str, Any]] = deque(
            maxlen=2
        )  # what is received may be a batch ahead of training
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)  # as received
        self._kept: Mapping[str, Any] | None = None
        self._unproved: Mark | None = (
            None  # what the run before has seen, and this one has to come by
        )
        first = StreamReader(make, name)
        self._reader: StreamReader | None = first
        doubt = missing_state(first.source)
        if doubt is None and (twin := StreamReader(make, name)).source is first.source:
            doubt = (
                "it is the same object each time, which cannot be compared with itself"
            )
        elif doubt is None:
            doubt = prove(first, twin)
            self._reader = (
                None  # instances may share where they are: what trains is iterated last
            )
        self._exact = doubt is None
        how = (
            "loads its own state_dict"
            if doubt is None
            else f"reads and drops what was trained, as {doubt}"
        )
        self.words = f"a run that goes on with the stream {name} {how}"
        """How the place is found again, and why so: for the log."""

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return a sample for each row; before `begin`, a copy.

        Raises IndexError for a row that was dropped.
        """
        reader = self._here()
        with reader.alone():
            samples = [reader.sample(row, self._begun) for row in rows]
        if self._begun:
            return samples
        return list(map(_copied, samples))

    def digest(self, count: int) -> str:
        """Return what tells the first `count` samples from others, before `begin`.

        It is the same in every process.
        """
        reader = self._here()
        reader.look(count)
        return digest(list(islice(reader.head, count)))

    def begin(
        self, row: int, kept: Mapping[str, Any] | None, mark: Mark | None = None
    ) -> None:
        """Begin training at a row, in this process or one forked from it.

        `kept` and `mark` are what `state` and `mark_at` gave in the run before.

        The samples after a loaded state are compared with those that followed it then,
        and all samples up to the mark with those of the run before: a state that is not
        exact after all (a large shuffle buffer's, beyond the samples of the proof) is
        left, with a warning. Where the samples differ although they are counted from
        the start, that is said.
        """
        self._begun = True
        if mark is not None and mark[0] <= row:
            self._unproved = mark
        if kept is not None and self._exact and kept["trail"] and kept["row"] <= row:
            self._reader = None
            self._kept = kept

    def send(self) -> tuple[Mapping[str, Any] | None, list[Mark]]:
        """Return the stream's newest own state and the marks since the last call.

        The state is None where it was sent before.
        """
        kept = None if (newest := self.state()) is self._sent else newest
        self._sent = newest
        return kept, [] if self._reader is None else self._reader.take_marks()

    def receive(self, told: tuple[Mapping[str, Any] | None, list[Mark]]) -> None:
        """Take in what `send` gave in the process that reads."""
        kept, marks = told
        self._marks.extend(marks)
        if kept is not None:
            self._received.append(kept)

    def mark_at(self, row: int) -> Mark | None:
        """Return the last mark of those that lie in the first `row` rows.

        Rows must ascend.
        """
        while len(self._marks) > 1 and self._marks[1][0] <= row:
            self._marks.popleft()
        if self._marks and self._marks[0][0] <= row:
            return self._marks[0]
        return None

    def state_at(self, row: int) -> Mapping[str, Any] | None:
        """Return what a run that goes on at `row` begins with; None: it counts."""
        return next(
            (kept for kept in reversed(self._received) if kept["row"] <= row),
            self._kept,
        )

    def state(self) -> Mapping[str, Any] | None:
        """Return the stream's newest own state, as plain data.

        Its `row` is at most the rows given.

        One is recorded each 1,000 rows, in the process that reads. None: so far, or for
        want of an exact one.
        """
        if self._reader is None:
            return self._kept
        return self._reader.kept

    def _here(self) -> StreamReader:
        """The reader of this process."""
        if self._reader is None or not self._reader.goes_on:
            self._inherited = (
                self._reader
            )  # is not freed here: the threads that it may wait for are the worker's
            self._reader = self._open()
        if self._begun and self._unproved is not None:
            mark = self._unproved
            self._unproved = None
            self._reader = self._proved(self._reader, mark)
        self._reader.records = self._begun and self._exact
        self._reader.beat = self.beat
        return self._reader

    def _open(self) -> StreamReader:
        """Return a reader from an exact state of the run before, else from the start."""
        if (kept := self._kept) is not None:
            reader = StreamReader(self._make, self._name, kept)
            try:
                reader.look(len(kept["next"]))
                if list(map(digest, reader.head)) == kept["next"]:
                    return reader
                why = f"gives other samples after its state of row {kept['row']} than before"
            except Exception as error:
                words = f"{type(error).__name__}: {first_line(error)}"
                why = f"does not go on from its state of row {kept['row']} ({words})"
            self._leave_state(why)
        return StreamReader(self._make, self._name)

    def _leave_state(self, why: str) -> None:
        logger.warning("the stream %s %s: it is read from the start", self._name, why)
        self._kept = None

    def _proved(self, reader: StreamReader, mark: Mark) -> StreamReader:
        """Return the reader once it has come by the mark, or one from the start.

        If that one does not come by it either, that is said.
        """
        reader.beat = self.beat
        if reader.comes_by(mark):
            return reader
        if self._kept is not None:
            rows = f"its state of row {self._kept['row']} to row {mark[0]}"
            self._leave_state(f"gives other samples from {rows} than before")
            return self._proved(self._open(), mark)
        follows = "some may come twice, others never: let its order follow from a seed"
        words = "the stream %s gives other samples up to row %d than were trained before: %s"
        logger.warning(words, self._name, mark[0], follows)
        return reader


class Rereadable(Dataset[Any]):
    """A validation stream: one pass, counted at once, begun again for each evaluation.

    `make` is called once in each process that reads it, and where it gives an iterator,
    each time that it is begun.
    """

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make = make
        self._name = name
        self._reader = StreamReader(make, name)
        with self._reader.alone():
            while self._reader.advance() is not END:
                pass
        self._length: int = self._reader.row

    def __len__(self) -> int:
        return self._length

    def digest(self, count: int) -> str:
        """Return what tells the first `count` samples, and how many there are."""
        return digest(
            [self._length, *self.__getitems__(range(min(count, self._length)))]
        )

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return a sample for each row.

        Rows ascend (one may be repeated), or begin again.

        Raises ConfigError for a stream that ends earlier than when it was counted.
        """
        reader = self._reader
        if not reader.goes_on or min(rows, default=reader.row) < reader.row - len(
            reader.head
        ):
            again = (
                self._make
                if reader.is_iterator or not reader.goes_on
                else lambda: reader.source
            )
            self._reader = reader = StreamReader(again, self._name)
        with reader.alone():
            samples = [reader.sample(row, frees=True) for row in rows]
        if reader.passes:
            rule = f"gave {self._length} samples when it was counted, and fewer now"
            raise ConfigError(
                "stream",
                self._name,
                rule,
                "give the same ones each time that it is begun",
            )
        return samples


def same_on_ranks(stream: Stream | Rereadable, group: Group, task: str) -> None:
    """Raise ConfigError on all ranks where a stream's first samples differ.

    It names `task`.

    Every rank must call it, for a Stream before `begin`.
    """
    if len(set(group.gather(stream.digest(_TOLD)))) > 1:
        refuse_other_samples(task, _TOLD)


def refuse_other_samples(task: str, row: int) -> NoReturn:
    """Raise ConfigError for a stream whose samples before a row differ between ranks."""
    rule = f"gives each rank other samples (before row {row}), and each must see all of them: they are split here"
    fix = "do not split the stream by rank, seed what it shuffles by, read it in one thread"
    raise ConfigError("stream", task, rule, fix)


def _copied(sample: Any) -> Any:
    """A copy for a pass that is thrown away: a collate may change what it gets."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # such as a decoder over an open file
        return sample
