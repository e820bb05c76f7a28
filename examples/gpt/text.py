"""Generated text whose entropy, and so the best possible loss, is known.

Every line is drawn evenly from all combinations of the words below. So no
model can have a smaller mean loss per line than `nats_of_a_line`. To reach
that loss, a model must copy name, thing and colour from the first sentence to
the second.
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
    """Return random lines; the same seed gives the same lines."""
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
    """Return the entropy of a line, nats."""
    return math.log(len(_NAMES) * len(_COLOURS) * len(_THINGS) * len(_PLACES))
