"""Charts as inline SVG in matplotlib's style; colours are CSS variables."""

import html
import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Placeholders: `Canvas.figure` replaces them with the page's CSS variables.
FG = "#0a0b01"
MUTED = "#0a0b02"
BAD = "#0a0b03"
_GRID = "#0a0b04"
_CARD = "#0a0b05"
SERIES = tuple(f"#0a0c0{number}" for number in range(1, 7))
_COLORS = {
    FG: "var(--fg)",
    MUTED: "var(--muted)",
    BAD: "var(--bad)",
    _GRID: "var(--grid)",
    _CARD: "var(--card)",
} | {color: f"var(--s{number})" for number, color in enumerate(SERIES, 1)}

_SIZE_IN = (4.2, 2.7)
_LEGEND_CHARS = 52  # as many as there is room for in one row
_STYLE = {
    **dict.fromkeys(
        ["axes.facecolor", "figure.facecolor", "savefig.facecolor", "svg.fonttype"],
        "none",
    ),
    **dict.fromkeys(
        ["axes.edgecolor", "grid.color", "xtick.color", "ytick.color"], _GRID
    ),
    **dict.fromkeys(["axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"], MUTED),
    **dict.fromkeys(
        ["axes.spines.left", "axes.spines.right", "axes.spines.top", "legend.frameon"],
        False,
    ),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "font.size": 9,
    "grid.linewidth": 0.6,
    "legend.handletextpad": 0.4,
    "lines.markeredgecolor": _CARD,
    "lines.markeredgewidth": 0.8,
    "lines.markersize": 5.5,
    "svg.hashsalt": "paceline",
    "text.color": FG,
    # names come from the user's configuration: a `$` is a dollar
    "text.parse_math": False,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    title: str
    caption: str
    svg: str
    """An `<svg>` element; its ids are unique in the page.

    Of small multiples, one for each panel.
    """
    num_panels: int = 1


@contextmanager
def styled() -> Iterator[None]:
    """Set the style in which canvases are made and rendered."""
    from matplotlib import style

    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Text stays text, in the reader's fonts: it does not matter what matplotlib's
        # own lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


class Canvas:
    """One set of axes, and the hover text of its marks."""

    def __init__(self, name: str) -> None:
        from matplotlib.figure import Figure as Sheet

        self.name = name
        self.sheet = Sheet(figsize=_SIZE_IN, layout="constrained")
        self.axes = self.sheet.add_subplot()
        self.axes.grid(visible=False, axis="x")
        self.axes.locator_params(
            axis="x", nbins=5
        )  # as many as have room for six digits each
        self._tips: dict[str, str] = {}

    def tip(self, text: str) -> str:
        """Return the gid of an artist that shows `text` when the mouse is over it."""
        gid = f"tip-{len(self._tips)}"
        self._tips[gid] = text
        return gid

    def move(self, lines: Iterable[Any], steps: float) -> None:
        """Move what was drawn by small steps to the right, beside what would cover it."""
        from matplotlib.transforms import ScaledTranslation

        place = self.axes.transData + ScaledTranslation(
            5 * steps / 72, 0, self.sheet.dpi_scale_trans
        )
        for line in lines:
            line.set_transform(place)

    def mark(self, x: float, y: float, text: str, color: str, **look: Any) -> None:
        """Draw one point that shows `text` when the mouse is over it."""
        self.axes.plot([x], [y], color=color, gid=self.tip(text), **look)

    def legend(self, series: Iterable[tuple[str, str]]) -> None:
        """Write the names of what was drawn, and of further colours, above the axes."""
        for color, name in series:
            self.axes.plot([], [], color=color, linewidth=2.5, label=name)
        handles, names = self.axes.get_legend_handles_labels()
        if names:
            widths = [len(name) + 6 for name in names]
            columns = max(1, _LEGEND_CHARS // max(widths))
            if sum(widths) <= _LEGEND_CHARS:
                columns = len(names)
            self.sheet.legend(handles, names, loc="outside upper left", ncols=columns)

    def figure(self, title: str, caption: str) -> Figure:
        """Render what was drawn."""
        stream = io.StringIO()
        self.sheet.savefig(stream, format="svg", metadata={"Date": None})
        svg = re.sub(
            r"<metadata>.*?</metadata>|<style .*?</style>",
            "",
            stream.getvalue(),
            flags=re.DOTALL,
        )
        svg = svg[svg.index("<svg") :]
        head = svg[: svg.index(">")]
        box = re.search(r'viewBox="[^"]*"', head)
        assert box is not None
        body = re.sub(r"<[^>]*>", self._inlined, svg.removeprefix(head))
        label = html.escape(f"{title}. {caption}")
        return Figure(
            title,
            caption,
            f'<svg role="img" aria-label="{label}" {box[0]}{body}'.strip(),
        )

    def _inlined(self, found: re.Match[str]) -> str:
        """Return a tag with the canvas's name in its ids, and variables for colours.

        Texts are no tags and stay what they are, whatever they look like.
        """
        tag = found[0].replace("xlink:href=", "href=")
        if "#0a0" in tag:
            for color, css in _COLORS.items():
                tag = tag.replace(color, css)
        tip = re.match(r'<g id="(tip-\d+)">', tag)
        tag = re.sub(r'(?<=\sid=")|(?<=href="#)|(?<=url\(#)', f"{self.name}-", tag)
        return f"{tag}<title>{html.escape(self._tips[tip[1]])}</title>" if tip else tag
