"""One instance of a stream, read pass after pass in one process.

Reading begins at the start or at a state of the stream's own.

`prove` tells whether that state is exact: another instance loads it, and its samples
are compared.
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
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import worker

from trainers.devices.device import seed_host
from trainers.devices.group import as_one_rank
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

MOST_MARKS = 1 << 16  # that are kept: far more than a loader's process is ahead
_PROOF = (
    32  # samples that are compared; more than the shards that are commonly interleaved
)
_PROOF_PLACES = (
    1,
    14,
)  # samples after which a state is tried: no chunk of more than one sample ends at both
END = object()
_EVERY = 1000  # samples from one recorded state to the next
# samples from one mark of the trail to the next: a digest of each would cost as much as
# its decoding
_MARK_EVERY = 32
_SEED = 0
_HOST = torch.device("cpu")

Mark = tuple[int, str]
"""How many rows were read, and what tells them from others: a digest over every 32nd of
them, and all such before.
"""


class StreamReader:
    """A process's reading of one instance of a stream, pass after pass.

    It begins at the first sample or at a state of the stream's own.

    `row` is read next; `head` has those before it that are kept.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, kept: Mapping[str, Any] | None = None
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
        """Go on from a state that the stream has given, or from the start."""
        start = kept or {
            "row": 0,
            "passes": 0,
            "in_pass": 0,
            "state": None,
            "trail": "",
        }
        self.row, self.passes, self._in_pass, self._start, self._trail = (
            start[key] for key in ("row", "passes", "in_pass", "state", "trail")
        )
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self.kept = kept
        self._loaded = kept is not None
        self._began = self.row
        self._random: dict[str, Any] | None = None
        self._samples: Iterator[Any] | None = None
        self._candidate: dict[str, Any] | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Read as the only rank, outside of any loader, with random numbers of its own.

        They are the same in every process, whatever else draws there.
        """
        info = worker._worker_info
        worker._worker_info = None
        outside = get_rng_state(_HOST)
        if self._random is None:
            seed_host(_SEED)
        else:
            set_rng_state(self._random, _HOST)
        try:
            with as_one_rank():
                yield
        finally:
            self._random = get_rng_state(_HOST)
            set_rng_state(outside, _HOST)
            worker._worker_info = info

    @property
    def goes_on(self) -> bool:
        """Whether this process may read on."""
        return self._pid == os.getpid() or (
            self.is_iterator and not hasattr(self.source, "__dict__")
        )

    def advance(self) -> Any:
        """Return the next sample of this pass, or END."""
        try:
            if self._samples is None:
                self._samples = self._begin_pass()
            sample = next(self._samples, END)
        except Exception as error:
            error.add_note(f"at row {self.row} of the stream {self._name}")
            raise
        if sample is not END:
            self.row = self.row + 1
            self._in_pass = self._in_pass + 1
        return sample

    def _begin_pass(self) -> Iterator[Any]:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.passes)
        if self._start is not None:
            self.source.load_state_dict(copy.deepcopy(self._start))
            self._start = None
        # Ray's Dataset has an __iter__ that raises.
        samples: Iterator[Any] = iter(
            self.source.iter_rows()
            if hasattr(self.source, "iter_rows")
            else self.source
        )
        self.is_iterator = samples is self.source
        return samples

    def read(self) -> Any:
        """Return the next sample, of the next pass where this one has ended."""
        if self.row % _EVERY == 0:
            self.beat()
            if self.records and self.row:
                self._record()
        while (sample := self.advance()) is END:
            if not self._in_pass:
                rule = f"ended after {self.row} samples, and gives none when it is begun again"
                fix = (
                    "give an object whose `__iter__` begins anew, or lower `max_steps`"
                )
                raise ConfigError(
                    "stream", self._name, rule if self.row else "gives no sample", fix
                )
            if self._loaded and not hasattr(self.source, "set_epoch"):
                self._recount()
                continue
            self.passes = self.passes + 1
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
        """Begin to record the stream's own state, where it can be kept.

        Else the last one that can stays.
        """
        try:
            state = self.state()
            as_kept(state)
        except Exception as error:
            if not self._is_told:
                self._is_told = True
                words = "the stream %s gives no state at row %d that can be kept (%s): the last one that can stays"
                logger.warning(words, self._name, self.row, first_line(error))
        else:
            self._candidate = state | {"next": []}

    def take_marks(self) -> list[Mark]:
        """Return the marks since the last call."""
        marks = [*self._marks]
        self._marks.clear()
        return marks

    def comes_by(self, mark: Mark) -> bool:
        """Read up to a mark, and return whether it is there.

        True where this reading began behind it.
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
        """Read again from the start up to here.

        What a pass is may follow from all before it, which no state of one pass need
        have.
        """
        words = "the stream %s has no set_epoch: to begin its next pass, its %d samples so far are read again"
        logger.info(words, self._name, self.row)
        counted = StreamReader(self._make, self._name)
        with counted.alone():
            while counted.row < self.row:
                counted.read()
            drawn = get_rng_state(_HOST)
        set_rng_state(drawn, _HOST)
        self.source = counted.source
        self.passes = counted.passes
        self._in_pass = counted._in_pass
        self._samples = counted._samples
        self._loaded = False

    def look(self, count: int) -> None:
        """Read until `count` samples are kept; fewer of a stream that has no more."""
        try:
            with self.alone():
                while len(self.head) < count:
                    self.head.append(self.read())
        except ConfigError:
            if not self.head:
                raise

    def sample(self, row: int, frees: bool) -> Any:
        """Return the sample of a row; with `frees`, those before it are dropped."""
        if row < self.row - len(self.head):
            raise IndexError(
                f"row {row} of the stream {self._name} was dropped: it is at row {self.row}"
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
        """The stream's own state here, as plain data, and where here is."""
        state = copy.deepcopy(self.source.state_dict())
        place = {"row": self.row, "passes": self.passes, "in_pass": self._in_pass}
        return {**place, "state": state, "trail": self._trail}


def as_kept(state: Mapping[str, Any]) -> Any:
    """Return a state as it comes back from a checkpoint.

    Raises what writing or reading it there would.
    """
    saved = io.BytesIO()
    torch.save(state, saved)
    try:
        return torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than tensors and plain data") from error


def missing_state(source: Any) -> str | None:
    """Why a stream has no state of its own to be used; None where it has one."""
    try:
        inspect.signature(source.state_dict).bind()
        inspect.signature(source.load_state_dict).bind({})
    except AttributeError:
        return "it has no state_dict() and load_state_dict()"
    except (TypeError, ValueError):
        return "its state_dict() or load_state_dict() takes other arguments"
    return None


def prove(first: StreamReader, twin: StreamReader) -> str | None:
    """Return why the stream's own state is not exact.

    None where another instance goes on alike from states of the first.
    """
    try:
        states = []
        for place in _PROOF_PLACES:
            first.look(place)
            states.append(as_kept(first.state()))
        first.look(_PROOF)
        expected = list(map(digest, first.head))
        if len(set(expected)) == 1:
            return "its first samples are all alike, and prove nothing of its own state_dict"
        for state in states:
            twin.load(state)
            found = []
            with twin.alone():
                while twin.row < len(expected):
                    found.append(digest(twin.read()))
            for number, (before, after) in enumerate(
                zip(expected[-len(found) :], found, strict=True), 1
            ):
                if before != after:
                    return f"its own state_dict is not exact (sample {number} after loading differs)"
    except Exception as error:
        return f"its own state_dict failed: {first_line(error)}"
    return None


def digest(value: Any) -> str:
    """Return a digest of nested tensors, arrays, plain data and objects.

    Objects count by what pickle would keep of them.

    It is the same in every process. What cannot be pickled counts by its repr, without
    addresses.
    """
    found = hashlib.blake2b(digest_size=8)
    _absorb(value, found.update)
    return found.hexdigest()


def _absorb(value: Any, update: Callable[[Any], None]) -> None:
    shown = ""
    data: Any = b""
    parts: list[Any] = []
    if isinstance(value, Tensor):
        plain = value.detach().cpu().to_dense().resolve_conj().resolve_neg().reshape(-1)
        shown = f"{value.dtype}{[*value.shape]}"
        data = plain.view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        shown = f"{value.dtype.str}{value.shape}"
        parts, data = (
            (value.tolist(), b"") if value.dtype.hasobject else ([], value.tobytes())
        )
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
        with contextlib.suppress(Exception):  # what cannot be pickled
            reduced = (
                () if hasattr(value, "__qualname__") else value.__reduce_ex__(4)
            )  # but for classes and functions
            parts = [
                [*part] if isinstance(part, Iterator) else part for part in reduced
            ]
        shown = "" if parts else re.sub(" at 0x[0-9a-f]+", "", repr(value))
    update(f"{type(value).__name__} {shown} {len(data)} {len(parts)};".encode())
    update(data)
    for part in parts:
        _absorb(part, update)
