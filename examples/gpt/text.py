"""Text of our own making whose entropy is known.

How well a language model can do on it is a number, not a guess.

Every line is drawn evenly from all combinations of the words below, so no model can
spend less than `nats_of_a_line` on one; to reach that it must copy name, thing and
colour from the first sentence into the second.
"""

from __future__ import annotations

import math
import random

# fmt: off
_NAMES = [
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Frida", "Gus", "Hana", "Ivo", "Jana", "Kurt", "Lena", "Mara", "Nils",
    "Olga", "Pavel", "Rosa", "Sven", "Tilda", "Uwe",
]
_COLOURS = [
    "red", "blue", "green", "black", "white", "yellow", "brown", "grey", "silver", "golden",
]
_THINGS = [
    "lamp", "chair", "bowl", "clock", "book", "kettle", "basket", "mirror", "coat", "drum", "kite", "ladder",
    "bucket", "candle", "bell", "spoon",
]
# fmt: on
_PLACES = [
    "on the table",
    "by the door",
    "under the stairs",
    "in the garden",
    "near the window",
    "behind the shed",
]


def draw_lines(count: int, seed: int) -> list[str]:
    """Lines, the same for the same seed."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        name, colour, thing, place = (
            rng.choice(words) for words in (_NAMES, _COLOURS, _THINGS, _PLACES)
        )
        lines.append(
            f"{name} puts the {colour} {thing} {place}. The {thing} of {name} is {colour}."
        )
    return lines


def nats_of_a_line() -> float:
    """Entropy of a line."""
    return math.log(len(_NAMES) * len(_COLOURS) * len(_THINGS) * len(_PLACES))
