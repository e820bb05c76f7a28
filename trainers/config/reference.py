"""The configuration reference: each key's default and meaning, from the models."""

import textwrap
from collections.abc import Iterator
from typing import get_args, get_origin

from trainers.config.model import Settings, child_model, keys_of
from trainers.errors import show


def entries(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, depth first."""
    for name, field in keys_of(model).items():
        dotted = prefix + name
        below = child_model(model, name)
        if below is not None and get_origin(field.annotation) is not dict:
            yield from entries(below, f"{dotted}.")
            continue
        default = (
            "required"
            if field.is_required()
            else show(field.get_default(call_default_factory=True))
        )
        description = " ".join(
            (field.description or "").split()
        )  # a table's row is one line
        choices = get_args(field.annotation)
        if len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
            description += f" One of {', '.join(choices)}."
        yield dotted, default, description


def reference(model: type[Settings]) -> str:
    """All keys as text for a terminal."""
    lines = []
    for key, default, description in entries(model):
        lines.append(f"{key} ({default})")
        lines += textwrap.wrap(
            description, 100, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)


def markdown(
    title: str, model: type[Settings], above: type[Settings] | None = None
) -> str:
    """Return all keys as a section of docs/config.md.

    Keys that the model `above` has alike are only named.
    """
    known = [] if above is None else [*entries(above)]
    own = [entry for entry in entries(model) if entry not in known]
    rows = (
        f"| `{key}` | {default} | {text} |".replace("[", "\\[")
        for key, default, text in own
    )
    shared = dict.fromkeys(
        key.partition(".")[0] for key, *rest in entries(model) if (key, *rest) in known
    )
    named = (
        [f"As above: {', '.join(f'`{key}`' for key in shared)}.", ""] if shared else []
    )
    return "\n".join(
        [
            f"## {title}",
            "",
            *named,
            "| key | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )
