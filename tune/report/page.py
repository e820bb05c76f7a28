"""A page from a template of this folder, with everything in it escaped."""

from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from trainers.errors import escape_controls


def source(name: str) -> str:
    """Return a file of this folder."""
    return resources.files("tune.report").joinpath(name).read_text(encoding="utf-8")


def render(template: str, **shown: Any) -> str:
    """Return a page. Everything in it but figures, which are pages too, is escaped."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(source),
    )
    page = environment.get_template(template).render(**shown)
    return escape_controls(page)
