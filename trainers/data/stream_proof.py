"""Is a stream's own state exact? Another instance loads it, and its samples are compared."""

import inspect
from typing import Any

from trainers.data.sample_digest import digest
from trainers.data.stream_reader import PROOF, StreamReader, as_kept
from trainers.errors import first_line

_PLACES = (1, 14)  # samples after which a state is tried: no chunk of more than one sample ends at both


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
    """Why the stream's own state is not exact; None where another instance goes on alike from states of the first."""
    try:
        states = []
        for place in _PLACES:
            first.look(place)
            states.append(as_kept(first.state()))
        first.look(PROOF)
        expected = list(map(digest, first.head))
        if len(set(expected)) == 1:
            return "its first samples are all alike, and prove nothing of its own state_dict"
        for state in states:
            twin.load(state)
            found = []
            with twin.alone():
                while twin.row < len(expected):
                    found.append(digest(twin.read()))
            for number, (one, other) in enumerate(zip(expected[-len(found) :], found, strict=True), 1):
                if other != one:
                    return f"its own state_dict is not exact (sample {number} after loading differs)"
    except Exception as error:
        return f"its own state_dict failed: {first_line(error)}"
    return None
