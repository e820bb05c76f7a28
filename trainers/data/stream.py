"""Present streams, which can only be read forward, as datasets indexed by row.

Row n of a training stream is its n-th sample, counted over all passes. Every
rank reads the whole stream, in one process (the worker or its loader's), and
drops the rows of other ranks. A resumed run loads the stream's own state if
that is exact; otherwise it reads and drops the samples already trained.
"""

import contextlib
import copy
import hashlib
import inspect
import io
import logging
import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

from trainers.data.batch import as_bytes
from trainers.devices.device import (
    HOST,
    get_rng_state,
    seed_host,
    set_rng_state,
)
from trainers.devices.group import Group, as_one_rank
from trainers.errors import MISSING, ConfigError, first_line

logger = logging.getLogger(__name__)

# Marks to keep: a loader's process is never that many marks ahead.
MOST_MARKS = 1 << 16
_PROOF = 32
"""How many samples are compared: more than the usual number of interleaved shards."""
_PROOF_PLACES = (1, 14)
"""Numbers of samples after which a state is tested: chunks of more than one
sample cannot end at both.
"""
END = object()
"""Returned in place of a sample when a pass is over."""
_EVERY = 1000  # samples from one recorded state to the next
# samples from one mark to the next: a digest of every sample would cost as
# much as decoding it
_MARK_EVERY = 32
_SEED = 0

Mark = tuple[int, str]
"""A number of rows, and a digest of every 32nd sample among them."""
_TOLD = 32  # samples that tell one stream from another


class StreamReader:
    """Reads one instance of a stream in one process, pass after pass.

    It begins at the first sample, or at a state that the stream has given.

    A loader's process creates the stream again and begins at its start,
    whatever the worker has read before: otherwise it would share the offsets
    of open files with the worker, and inherit connections without the threads
    that serve them. Only a generator, or another built-in iterator of Python,
    continues where the worker stopped. If such an iterator needs more than
    memory and files, set `data.num_workers: 0`. The stream cannot see that a
    loader's process reads it (`get_worker_info()` is None): otherwise Hugging
    Face's shuffle, for example, would give a different order there.

    `row` is the next row to read; `head` holds the last samples before it.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = make()
        self.head = deque[Any]()
        self._make = make
        self._name = name
        self._pid = os.getpid()
        self.records = self.is_iterator = self._is_told = False
        self.beat: Callable[[], None] = lambda: None
        self.load(kept)

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Continue from a state that the stream has given, or from the start."""
        start = kept or {}
        self.row: int = start.get("row", 0)
        self.passes: int = start.get("passes", 0)
        self._in_pass: int = start.get("in_pass", 0)
        self._start = start.get("state")
        self._trail: str = start.get("trail", "")
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self.kept = kept
        self._loaded = kept is not None
        self._began = self.row
        self._random: dict[str, Any] | None = None
        self._samples: Iterator[Any] | None = None
        self._failed: Exception | None = None
        self._candidate: dict[str, Any] | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Read as the only rank, outside any loader, with separate random numbers.

        The random numbers are the same in every process, whatever else is
        drawn there.
        """
        info = worker._worker_info
        worker._worker_info = None
        outside = get_rng_state(HOST)
        if self._random is None:
            seed_host(_SEED)
        else:
            set_rng_state(self._random, HOST)
        try:
            with as_one_rank():
                yield
        finally:
            self._random = get_rng_state(HOST)
            set_rng_state(outside, HOST)
            worker._worker_info = info

    @property
    def goes_on(self) -> bool:
        """Whether this process may read on with this reader.

        The process that created the reader may. A fork may only if the stream
        is a built-in iterator, such as a generator.
        """
        return self._pid == os.getpid() or (
            self.is_iterator and not hasattr(self.source, "__dict__")
        )

    def advance(self) -> Any:
        """Return the next sample of this pass, or END.

        Raises the stream's own error, and repeats it in each further call:
        after an error a generator looks as if it had ended, and a throw-away
        pass may have been the first to see the error.
        """
        if self._failed is not None:
            raise self._failed
        try:
            if self._samples is None:
                self._samples = self._begin_pass()
            sample = next(self._samples, END)
        except Exception as error:
            error.add_note(f"at row {self.row} of the stream {self._name}")
            self._failed = error
            raise
        if sample is not END:
            self.row += 1
            self._in_pass += 1
        return sample

    def _begin_pass(self) -> Iterator[Any]:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.passes)
        if self._start is not None:
            self.source.load_state_dict(copy.deepcopy(self._start))
            self._start = None
        # Ray's Dataset has an __iter__ that raises.
        source = self.source
        if hasattr(source, "iter_rows"):
            source = source.iter_rows()
        samples: Iterator[Any] = iter(source)
        self.is_iterator = samples is self.source
        return samples

    def read(self) -> Any:
        """Return the next sample; begin the next pass when this one has ended."""
        if self.row % _EVERY == 0:
            self.beat()
            if self.records and self.row:
                self._record()
        is_new = False
        while (sample := self.advance()) is END:
            if is_new:
                rule = f"ended after {self.row} samples, and gives none when made again"
                fix = "check its source; return a new object in each call"
                raise ConfigError(self._name, MISSING, rule, fix)
            if not self._in_pass:  # such as a generator, after its only pass
                self.source = self._make()
                is_new = True
            elif self._loaded and not hasattr(self.source, "set_epoch"):
                self._recount()
                continue
            else:
                self.passes += 1
                self._in_pass = 0
            self._samples = None
        if self.row % _MARK_EVERY == 1:
            self._trail = digest([self._trail, sample])
            self._marks.append((self.row, self._trail))
        if self._candidate is not None:
            self._candidate["next"].append(digest(sample))
            if len(self._candidate["next"]) == _PROOF:
                self.kept = self._candidate
                self._candidate = None
        return sample

    def _record(self) -> None:
        """Begin to record the stream's own state, if a checkpoint can store it.

        Otherwise the last recorded state stays in use.
        """
        try:
            state = self.state()
            as_kept(state)
        except Exception as error:
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    "the state of stream %s at row %d cannot be saved (%s): checkpoints keep the last state that could be saved",
                    self._name,
                    self.row,
                    first_line(error),
                )
        else:
            self._candidate = state | {"next": []}

    def take_marks(self) -> list[Mark]:
        """Return the marks since the last call."""
        marks = [*self._marks]
        self._marks.clear()
        return marks

    def comes_by(self, mark: Mark) -> bool:
        """Read up to a mark; return whether the samples match it.

        Returns True if reading began at the mark or beyond it.
        """
        row, _ = mark
        if self._began >= row:
            return True
        if self.row < row:
            with self.alone():
                self.sample(row - 1, frees=True)
        found = mark in self._marks
        while self._marks and self._marks[0][0] < row:
            self._marks.popleft()
        return found

    def _recount(self) -> None:
        """Read again from the start up to the current row.

        The next pass may depend on all samples before it, which the state of
        one pass may not record.
        """
        logger.info(
            "the stream %s has no set_epoch: before its next pass, its first %d samples are read again",
            self._name,
            self.row,
        )
        counted = StreamReader(self._make, self._name)
        with counted.alone():
            while counted.row < self.row:
                counted.read()
            drawn = get_rng_state(HOST)
        set_rng_state(drawn, HOST)
        self.source = counted.source
        self.passes = counted.passes
        self._in_pass = counted._in_pass
        self._samples = counted._samples
        self._loaded = False

    def look(self, count: int) -> None:
        """Read until `count` samples are kept, or fewer if the stream has no more."""
        try:
            with self.alone():
                while len(self.head) < count:
                    self.head.append(self.read())
        except ConfigError:
            if not self.head:
                raise

    def sample(self, row: int, frees: bool) -> Any:
        """Return the sample of a row; with `frees`, drop the samples before it."""
        if row < self.row - len(self.head):
            raise IndexError(
                f"row {row} of the stream {self._name} was dropped: the stream is at row {self.row}"
            )
        while self.row <= row:
            if frees:
                self.head.clear()
            self.head.append(self.read())
        if frees:
            while len(self.head) > self.row - row:
                self.head.popleft()
        return self.head[row - self.row]

    def state(self) -> dict[str, Any]:
        """Return the stream's own state as plain data, with the current position."""
        state = copy.deepcopy(self.source.state_dict())
        place = {
            "row": self.row,
            "passes": self.passes,
            "in_pass": self._in_pass,
        }
        return {**place, "state": state, "trail": self._trail}


def as_kept(state: Mapping[str, Any]) -> Any:
    """Return a state as it would be loaded from a checkpoint.

    Raises the errors of writing it to a checkpoint or reading it again.
    """
    saved = io.BytesIO()
    torch.save(state, saved)
    try:
        return torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "it holds more than tensors and plain data"
        ) from error


def missing_state(source: Any) -> str | None:
    """Return why a stream has no usable state of its own; None if it has one."""
    try:
        inspect.signature(source.state_dict).bind()
        inspect.signature(source.load_state_dict).bind({})
    except AttributeError:
        return "the stream has no state_dict() and load_state_dict()"
    except (TypeError, ValueError):
        return "the stream's state_dict() or load_state_dict() takes other arguments"
    return None


def prove(first: StreamReader, twin: StreamReader) -> str | None:
    """Return why the stream's own state is not exact, or None if it is.

    It is exact if another instance loads the first one's states and continues
    with the same samples.
    """
    try:
        states = []
        for place in _PROOF_PLACES:
            first.look(place)
            states.append(as_kept(first.state()))
        first.look(_PROOF)
        expected = list(map(digest, first.head))
        if len(set(expected)) == 1:
            return "the stream's first samples are all equal, and cannot show whether its own state_dict is exact"
        for state in states:
            twin.load(state)
            found = []
            with twin.alone():
                while twin.row < len(expected):
                    found.append(digest(twin.read()))
            pairs = zip(expected[-len(found) :], found, strict=True)
            for number, (before, after) in enumerate(pairs, 1):
                if before != after:
                    return f"the stream's own state_dict is not exact (sample {number} after loading differs)"
    except Exception as error:
        return f"the stream's own state_dict failed: {first_line(error)}"
    return None


def digest(value: Any) -> str:
    """Return a digest of nested tensors, arrays, plain data and objects.

    It is the same in every process. Objects are represented by what pickle
    would store of them, or, if they cannot be pickled, by their repr without
    addresses.
    """
    found = hashlib.blake2b(digest_size=8)
    _absorb(value, found.update)
    return found.hexdigest()


def _reduced(value: Any) -> list[Any]:
    """Return what pickle would store of an object; empty for a class or function."""
    if hasattr(value, "__qualname__"):
        return []
    with contextlib.suppress(Exception):  # it cannot be pickled
        reduced = value.__reduce_ex__(4)
        return [
            [*part] if isinstance(part, Iterator) else part for part in reduced
        ]
    return []


def _absorb(value: Any, update: Callable[[Any], None]) -> None:
    shown = ""
    data: Any = b""
    parts: list[Any] = []
    if isinstance(value, Tensor):
        plain = value.detach().cpu().to_dense().resolve_conj().resolve_neg()
        shown = f"{value.dtype}{[*value.shape]}"
        data = as_bytes(plain).numpy()
    elif isinstance(value, np.ndarray):
        shown = f"{value.dtype.str}{value.shape}"
        parts = value.tolist() if value.dtype.hasobject else []
        data = b"" if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, (bytes, bytearray)):
        data = value
    elif isinstance(value, (str, int, float, complex, type(None))):
        shown = repr(value)
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, (list, tuple)):
        parts = [*value]
    elif isinstance(value, Set):
        parts = sorted(map(digest, value))
    else:
        parts = _reduced(value)
        if not parts:
            shown = re.sub(" at 0x[0-9a-f]+", "", repr(value))
    update(
        f"{type(value).__name__} {shown} {len(data)} {len(parts)};".encode()
    )
    update(data)
    for part in parts:
        _absorb(part, update)


class Stream(Dataset[Any]):
    """A training stream.

    Requested rows must ascend (one may be repeated); rows in between are read
    and dropped.

    `make` returns the user's iterable. It is called once in each process that
    reads, and again for a proof, to load a state, and if the iterable gives
    nothing in its next pass, as a generator does. If the iterable has
    `set_epoch`, that is called with the number of each pass; `iter_rows` (Ray
    Data) is preferred to `__iter__`. `load_state_dict` must apply to the next
    iteration only.

    Samples read before `begin` stay in memory, so that throw-away passes may
    read them repeatedly. Read them before the first throw-away pass, because
    such a pass restores the user's objects. Raises ConfigError for a stream
    that gives no sample, or none when made again; errors of the stream
    itself get a note with its name and the row.
    """

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make = make
        self._name = name
        self._begun = False
        self.beat: Callable[[], None] = lambda: None
        """Called every 1,000 rows in the process that reads, dropped rows included."""
        self._sent: Mapping[str, Any] | None = None
        # The newest state may be a batch ahead of training.
        self._received: deque[Mapping[str, Any]] = deque(maxlen=2)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)  # as received
        self._kept: Mapping[str, Any] | None = None
        # A mark of the previous run, which this run's samples must match.
        self._unproved: Mark | None = None
        first = StreamReader(make, name)
        self._reader: StreamReader | None = first
        doubt = missing_state(first.source)
        if doubt is None:
            twin = StreamReader(make, name)
            if twin.source is first.source:
                doubt = "stream() returns the same object each time, which cannot be compared with itself"
            else:
                doubt = prove(first, twin)
                # Instances may share their position, so the one for training
                # is made last.
                self._reader = None
        self._exact = doubt is None
        how = "loads its own state_dict"
        if doubt is not None:
            how = f"reads and drops the samples trained before, since {doubt}"
        self.words = f"a run that resumes with the stream {name} {how}"
        """How a resumed run finds its place, and why, for the log."""

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return a sample for each row; before `begin`, a copy of it.

        Raises IndexError for a row that was dropped.
        """
        reader = self._here()
        with reader.alone():
            samples = [reader.sample(row, self._begun) for row in rows]
        if self._begun:
            return samples
        return list(map(_copied, samples))

    def digest(self, count: int = _TOLD) -> str:
        """Return a digest of the first `count` samples; call it before `begin`."""
        reader = self._here()
        reader.look(count)
        return digest(list(islice(reader.head, count)))

    def begin(
        self,
        row: int,
        kept: Mapping[str, Any] | None,
        mark: Mark | None = None,
    ) -> None:
        """Begin training at a row, in this process or one forked from it.

        `kept` and `mark` are what `state_at` and `mark_at` returned in the
        previous run.

        The samples after a loaded state are compared with those that followed
        it in the previous run, and all samples up to the mark with that run's.
        A state that turns out to be inexact (such as that of a shuffle buffer
        larger than the first test covers) is discarded with a warning. If
        samples differ even when read from the start, a warning says so.
        """
        self._begun = True
        if mark is not None and mark[0] <= row:
            self._unproved = mark
        if (
            kept is not None
            and self._exact
            and kept["trail"]
            and kept["row"] <= row
        ):
            self._reader = None
            self._kept = kept

    def send(self) -> tuple[Mapping[str, Any] | None, list[Mark]]:
        """Return the newest state, and the marks since the last call.

        The state is None if it was already sent.
        """
        newest = self.state()
        kept = None if newest is self._sent else newest
        self._sent = newest
        return kept, [] if self._reader is None else self._reader.take_marks()

    def receive(
        self, told: tuple[Mapping[str, Any] | None, list[Mark]]
    ) -> None:
        """Store what `send` returned in the process that reads."""
        kept, marks = told
        self._marks.extend(marks)
        if kept is not None:
            self._received.append(kept)

    def mark_at(self, row: int) -> Mark | None:
        """Return the last mark within the first `row` rows.

        Rows must ascend from call to call.
        """
        while len(self._marks) > 1 and self._marks[1][0] <= row:
            self._marks.popleft()
        if self._marks and self._marks[0][0] <= row:
            return self._marks[0]
        return None

    def state_at(self, row: int) -> Mapping[str, Any] | None:
        """Return the state from which a run can resume at `row`.

        None if the run must read from the start.
        """
        fitting = (
            kept for kept in reversed(self._received) if kept["row"] <= row
        )
        return next(fitting, self._kept)

    def state(self) -> Mapping[str, Any] | None:
        """Return the stream's newest own state, as plain data.

        Its `row` is at most the number of rows read.

        A state is recorded every 1,000 rows, in the process that reads. None
        if there is none yet, or the stream has no exact one.
        """
        if self._reader is None:
            return self._kept
        return self._reader.kept

    def _here(self) -> StreamReader:
        """Return the reader of this process."""
        if self._reader is None or not self._reader.goes_on:
            # Not freed here: that may wait for threads which only the worker
            # has.
            self._inherited = self._reader
            self._reader = self._open()
        if self._begun and self._unproved is not None:
            mark = self._unproved
            self._unproved = None
            self._reader = self._proved(self._reader, mark)
        self._reader.records = self._begun and self._exact
        self._reader.beat = self.beat
        return self._reader

    def _open(self) -> StreamReader:
        """Return a reader at the previous run's state if exact, else at the start."""
        if (kept := self._kept) is not None:
            reader = StreamReader(self._make, self._name, kept)
            try:
                reader.look(len(kept["next"]))
                if list(map(digest, reader.head)) == kept["next"]:
                    return reader
                why = f"gives different samples after its state of row {kept['row']} than before"
            except Exception as error:
                words = f"{type(error).__name__}: {first_line(error)}"
                why = f"does not resume from its state of row {kept['row']} ({words})"
            self._leave_state(why)
        return StreamReader(self._make, self._name)

    def _leave_state(self, why: str) -> None:
        logger.warning(
            "the stream %s %s: it is read from the start", self._name, why
        )
        self._kept = None

    def _proved(self, reader: StreamReader, mark: Mark) -> StreamReader:
        """Return the reader if its samples match the mark, else one from the start.

        If those samples do not match either, a warning says so.
        """
        reader.beat = self.beat
        if reader.comes_by(mark):
            return reader
        if self._kept is not None:
            rows = f"its state of row {self._kept['row']} to row {mark[0]}"
            self._leave_state(
                f"gives different samples from {rows} than before"
            )
            return self._proved(self._open(), mark)
        logger.warning(
            "the stream %s gives different samples up to row %d than before: %s",
            self._name,
            mark[0],
            "some may be trained twice, others never; derive its order from a seed",
        )
        return reader


class Rereadable(Dataset[Any]):
    """A validation stream: one pass, counted at the start and repeated per evaluation.

    `make` is called once in each process that reads it; if it returns an
    iterator, once for each pass.
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

    def digest(self, count: int = _TOLD) -> str:
        """Return a digest of the first `count` samples and the stream's length."""
        return digest(
            [self._length, *self.__getitems__(range(min(count, self._length)))]
        )

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return a sample for each row.

        Rows must ascend (one may be repeated), or start over.

        Raises ConfigError if the stream now ends earlier than when it was
        counted.
        """
        reader = self._reader
        source = reader.source
        is_behind = min(rows, default=reader.row) < reader.row - len(
            reader.head
        )
        if not reader.goes_on or (is_behind and reader.is_iterator):
            reader = StreamReader(self._make, self._name)
        elif is_behind:
            reader = StreamReader(lambda: source, self._name)
        self._reader = reader
        with reader.alone():
            samples = [reader.sample(row, frees=True) for row in rows]
        if reader.passes:
            raise ConfigError(
                self._name,
                MISSING,
                f"gives fewer samples than the {self._length} that were counted before",
                "give the same samples each time it is iterated",
            )
        return samples


def same_on_ranks(
    told: object, group: Group, field: str, value: object
) -> None:
    """Raise ConfigError on all ranks if `told`, a digest of samples, differs.

    Every rank must call it.
    """
    if len(set(group.gather(told))) > 1:
        refuse_other_samples(field, value)


def refuse_other_samples(
    field: str, value: object, before: str = ""
) -> NoReturn:
    """Raise ConfigError for samples that differ between ranks."""
    raise ConfigError(
        field,
        value,
        f"gives each rank different samples{before}: every rank must see all of them, and Paceline splits them",
        "draw from a generator with its own seed, read a stream in one thread, and do not split by rank",
    )


def _copied(sample: Any) -> Any:
    """Return a copy for a throw-away pass: a collate function may change its input."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # such as a decoder over an open file
        return sample
