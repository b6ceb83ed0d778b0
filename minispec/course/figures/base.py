"""What all pictures share: colours, the matplotlib style, and the few shapes that drawings are made of.

Knows: looks. Does not know: any picture. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from xml.sax.saxutils import escape

from IPython.display import SVG
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minispec.core import TokenKind
from minispec.palette import KIND_COLORS

COLORS = {
    "prompt": "#009E73",
    "output": "#E69F00",
    "again": "#D9D9D9",  # work that was done before
    "idle": "#F4F4F4",
    "ink": "#222222",
}
OTHERS = ("#56B4E9", "#CC79A7", "#222222")  # things to tell apart that have no colour of their own
KEPT, FIX = KIND_COLORS[TokenKind.ACCEPTED], KIND_COLORS[TokenKind.CORRECTED]
STYLE = {  # of matplotlib
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 100,
}


class Picture:
    """A matplotlib figure that a notebook shows as PNG. Its text form is its title.

    rows: relative heights of panels one below the other, over one x axis.
    """

    def __init__(self, title: str, *, columns: int = 1, rows: Sequence[float] = (1,), height: float = 3.6) -> None:
        self.title = title
        self.figure = Figure(figsize=(8.5, height), layout="constrained")
        shape = {"squeeze": False, "sharex": len(rows) > 1, "height_ratios": rows}
        self.axes: list[Axes] = list(self.figure.subplots(len(rows), columns, **shape).flat)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return f"<picture: {self.title}>"


# Shapes of a drawing ----------------------------------------------------------------------------------------------

SANS, MONO = "DejaVu Sans, Verdana, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
MARGIN = 20
MAX_WIDTH = 840  # pixels: JupyterLab shows a drawing as wide as it says, and small windows have little more


def text(x: float, y: float, words: str, size: int = 12, *, font: str = SANS, fill: str = "", more: str = "") -> str:
    look = f'font-size="{size}" font-family="{font}" fill="{fill or COLORS["ink"]}" {more}'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "", more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"'
    return f'<rect {place} fill="{fill}" stroke="{stroke or COLORS["ink"]}" {more}/>'


def line(points: str, more: str = "") -> str:
    return f'<path d="{points}" fill="none" stroke="{COLORS["ink"]}" stroke-width="1.5" {more}/>'


def svg(width: float, height: float, parts: Sequence[str]) -> SVG:
    """A drawing of `width` by `height` units; one too wide for the screen is shown smaller."""
    shown = min(1, MAX_WIDTH / width)
    size = f'width="{width * shown:g}" height="{height * shown:g}" viewBox="0 0 {width:g} {height:g}"'
    paper = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'  # a dark theme would hide dark text
    return SVG("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', paper, *parts, "</svg>"]))
