"""The pictures of the course, in one visual language.

One colour has one meaning in every notebook (`COLORS` here, kinds of tokens in `minispec.palette`; both from the
palette of Okabe and Ito, safe for colour blindness). In greyscale the meanings differ in lightness, border or place.
Plots are PNG. Drawings are SVG text, the same on every machine, so notebook tests compare them letter by letter.

Knows: how to draw numbers that the caller took from the engine. Does not know: how to get them. Used from notebook 00
(the map) on.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
from IPython.display import SVG
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minispec.core import TokenKind
from minispec.llm import RequestOutput
from minispec.palette import KIND_COLORS, KIND_LABELS

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
    """A matplotlib figure that a notebook shows as PNG. Its text form is its title."""

    def __init__(self, title: str, *, columns: int = 1, height: float = 3.6) -> None:
        self.title = title
        self.figure = Figure(figsize=(8.5, height), layout="constrained")
        self.axes: list[Axes] = list(self.figure.subplots(1, columns, squeeze=False)[0])

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return f"<picture: {self.title}>"


# Plots -----------------------------------------------------------------------------------------------------------


def work(runs: Mapping[str, Sequence[tuple[int, int]]], prompt_len: int) -> Picture:
    """Which positions each forward computes. runs: title -> (start, end) of each forward; one panel for each run."""
    picture = Picture("rows of each forward: " + ", ".join(runs), columns=len(runs), height=4.2)
    kinds = {"prompt": "prompt, first time", "output": "output, first time", "again": "computed again"}
    colors = [COLORS[kind] for kind in kinds]
    for ax, (title, forwards) in zip(picture.axes, runs.items(), strict=True):
        cells = np.zeros((len(forwards), max(end for _, end in forwards)), dtype=int)  # 0: not computed
        for forward, (start, end) in enumerate(forwards):
            before = (cells[:forward, start:end] > 0).any(0)
            cells[forward, start:end] = np.where(before, 3, np.where(np.arange(start, end) < prompt_len, 1, 2))
        places = (np.arange(size + 1) - 0.5 for size in cells.shape[::-1])
        look = {"cmap": ListedColormap(["white", *colors]), "vmin": 0, "vmax": 3, "edgecolors": "white"}
        ax.pcolormesh(*places, cells, linewidth=20 / max(cells.shape), **look)
        ax.set(title=f"{title}: {(cells > 0).sum():,} rows", xlabel="position", ylabel="forward")
        labels = [f"{words}: {(cells == kind).sum():,}" for kind, words in enumerate(kinds.values(), start=1)]
        patches = [Patch(color=color, label=label) for color, label in zip(colors, labels, strict=True)]
        ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, -0.14), fontsize=9, ncols=3 // len(runs))
        ax.invert_yaxis()
    return picture


def roofline(read_gb_s: float, gflops: float, dots: Mapping[str, tuple[float, float]]) -> Picture:
    """What a machine can reach, and what was reached. dots: label -> (operations per byte read, GFLOP/s).

    At most four dots; the first is a decode, the others bring more rows.
    """
    picture = Picture("roofline: " + ", ".join(dots), height=4.2)
    [ax] = picture.axes
    intensity = np.geomspace(0.1, 1000, 400)
    ax.loglog(intensity, np.minimum(intensity * read_gb_s, gflops), color=COLORS["ink"], linewidth=2)
    ax.axvline(gflops / read_gb_s, color=COLORS["ink"], linestyle=":", linewidth=1)
    ax.text(0.12, read_gb_s, f"memory {read_gb_s:,.0f} GB/s", va="bottom")
    ax.text(950, 1.15 * gflops, f"arithmetic {gflops:,.0f} GFLOP/s", ha="right", va="bottom")
    for (label, (x, y)), marker in zip(dots.items(), "osD^", strict=False):
        color = COLORS["output" if marker == "o" else "prompt"]
        ax.plot(x, y, marker, color=color, markersize=10, markeredgecolor=COLORS["ink"], label=label)
    ax.set(xlabel="operations per byte read", ylabel="GFLOP/s", ylim=(0.01 * read_gb_s, 4 * gflops))
    ax.legend(loc="lower right")
    return picture


def bars(
    title: str, series: Mapping[str, Mapping[str, float]], unit: str, colors: Sequence[str] = tuple(COLORS.values())
) -> Picture:
    """Grouped bars with their values. series: label -> group -> value; "prompt" and "output" have their colours."""
    picture = Picture(title)
    [ax] = picture.axes
    _grouped(ax, series, colors)
    ax.set(title=title, ylabel=unit)
    return picture


def _grouped(ax: Axes, series: Mapping[str, Mapping[str, float]], colors: Sequence[str]) -> None:
    groups, width = list(next(iter(series.values()))), 0.8 / len(series)
    for place, (label, values) in enumerate(series.items()):
        x = np.arange(len(groups)) + (place - (len(series) - 1) / 2) * width
        drawn = ax.bar(x, [values[group] for group in groups], width * 0.92, color=colors[place], label=label)
        if len(groups) * len(series) <= 16:  # more values would run into each other
            ax.bar_label(drawn, fmt="{:,.4g}", fontsize=9)
    ax.set_xticks(range(len(groups)), groups)
    ax.margins(y=0.15)
    ax.legend()


def forwards(tokens: Mapping[str, Sequence[int]], cost: Mapping[int, float]) -> Picture:
    """What forwards bring and what they cost. tokens: text -> tokens of each forward; cost: rows -> T(rows) / T(1).

    At most three texts.
    """
    picture = Picture("tokens per forward, and the time of a forward", columns=2)
    left, right = picture.axes
    sizes = range(1, max(map(max, tokens.values())) + 1)
    _grouped(left, {text: {str(n): list(each).count(n) for n in sizes} for text, each in tokens.items()}, OTHERS)
    left.set(title="tokens per forward", xlabel="tokens that one forward wrote", ylabel="forwards")
    right.plot(list(cost), list(cost.values()), "o-", color=COLORS["ink"], label="measured")
    right.plot(list(cost), list(cost), ":", color=COLORS["ink"], label="one row after the other")
    right.set(title="time of a forward", xlabel="rows", ylabel="times the time of one row", ylim=(0, 1.1 * max(cost)))
    right.legend()
    return picture


def overlap(p: Sequence[float], q: Sequence[float]) -> Picture:
    """Two distributions over the same tokens, each cut into what both share, min(p, q), and its own rest."""
    picture = Picture("p, q, min(p, q) and the residual", columns=2)
    p, q = np.asarray(p), np.asarray(q)
    shared, edges = np.minimum(p, q), np.arange(len(p) + 1) - 0.5
    rests = {
        "q: where drafts come from": (q, COLORS["again"], "thrown away"),
        "p: what must come out": (p, FIX, "residual"),
    }
    for ax, (title, (whole, color, name)) in zip(picture.axes, rests.items(), strict=True):
        rest = whole - shared
        ax.bar(range(len(p)), shared, 1, color=KEPT, label=f"kept, min(p, q): {shared.sum():.2f}")
        ax.bar(range(len(p)), rest, 1, shared, color=color, hatch="//", label=f"{name}: {rest.sum():.2f}")
        ax.stairs(whole, edges, color=COLORS["ink"], linewidth=2)
        ax.set(title=title, xlabel="token", ylabel="probability", ylim=(0, 1.4 * max(p.max(), q.max())))
        ax.legend(loc="upper right", fontsize=9)
    return picture


def heat_maps(title: str, panels: Mapping[str, np.ndarray], rows: Sequence[int], columns: Sequence[int]) -> Picture:
    """One panel for each [batch, K] array of numbers of which less is better; the best K of each batch is framed."""
    picture = Picture(title, columns=len(panels), height=3.2)
    for ax, (name, values) in zip(picture.axes, panels.items(), strict=True):
        ax.imshow(
            values, cmap="Blues", vmin=values.min(), vmax=1.6 * values.max(), aspect="auto"
        )  # light: text is dark
        for (row, column), value in np.ndenumerate(values):
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=COLORS["ink"])
        for row, column in enumerate(values.argmin(1)):
            ax.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor=FIX, linewidth=2.5))
        ax.set(title=name, xlabel="K", xticks=range(len(columns)), yticks=range(len(rows)))
        ax.set_xticklabels(columns)
        ax.set_yticklabels(rows)
    picture.axes[0].set_ylabel("requests in the batch")
    return picture


# Drawings --------------------------------------------------------------------------------------------------------

SANS, MONO = "DejaVu Sans, Verdana, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
MARGIN = 20


def _text(x: float, y: float, words: str, size: int = 12, *, font: str = SANS, fill: str = "", more: str = "") -> str:
    look = f'font-size="{size}" font-family="{font}" fill="{fill or COLORS["ink"]}" {more}'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def _box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "", more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"'
    return f'<rect {place} fill="{fill}" stroke="{stroke or COLORS["ink"]}" {more}/>'


def _line(points: str, more: str = "") -> str:
    return f'<path d="{points}" fill="none" stroke="{COLORS["ink"]}" stroke-width="1.5" {more}/>'


def _svg(width: float, height: float, parts: Sequence[str]) -> SVG:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    paper = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'  # a dark theme would hide dark text
    return SVG("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', paper, *parts, "</svg>"]))


class Stage(NamedTuple):
    """One box of the map: what happens, where the code is (in lines), which notebooks teach it, its column and row."""

    title: str
    what: str
    modules: tuple[str, ...]
    notebooks: tuple[int, ...]
    column: int
    row: int

    @property
    def corner(self) -> tuple[int, int]:
        return MARGIN + self.column * (STAGE_W + 16), MARGIN + self.row * (STAGE_H + 64)


STAGE_W, STAGE_H = 160, 104
STAGES = (
    Stage("Ask", "text becomes token ids", ("llm.py",), (0,), 0, 0),
    Stage("Admit", "what was read before?", ("kv/radix.py",), (6, 7), 1, 0),
    Stage("Make room", "pages for keys, values", ("kv/pool.py",), (3,), 2, 0),
    Stage("Plan", "who joins, how much", ("scheduler.py",), (4, 5), 0, 1),
    Stage("Draft", "guess some tokens", ("speculative/",), (9, 10, 14), 1, 1),
    Stage("Run", "one forward for all", ("runner.py", "attention/ models/"), (1, 2), 2, 1),
    Stage("Verify", "keep or correct", ("sampling/",), (11,), 3, 1),
    Stage("Commit", "move the cursors", ("engine.py",), (8, 12), 4, 1),
    Stage("Answer", "ids become text", ("text.py",), (1,), 4, 2),
)


def request_map(folder: Path | str = ".") -> SVG:
    """A request's life, box by box. Numbers are notebooks; those that exist in `folder` are links."""
    files = {int(path.name[:2]): path.name for path in Path(folder).glob("[0-9][0-9]_*.ipynb")}
    (left, top), (right, _) = STAGES[3].corner, STAGES[7].corner
    arrow = f'<path d="M0,0 L8,4 L0,8 z" fill="{COLORS["ink"]}"/>'
    parts = [
        f'<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{arrow}</marker>',
        _box(left - 12, top - 32, right - left + STAGE_W + 24, STAGE_H + 58, COLORS["idle"], COLORS["again"]),
        _text(left + STAGE_W + 16, top - 12, "one step = one forward of the model, repeated until the request ends"),
        _text(left, STAGES[-1].corner[1] + 20, "Numbers are notebooks. A dark one exists already."),
        _text(left, STAGES[-1].corner[1] + 40, "Notebook 13 shows all parts working together."),
        _arrow(f"M{right + 40},{top + STAGE_H} v14 H{left + STAGE_W // 2} V{top + STAGE_H + 2}"),
    ]
    for before, after in zip(STAGES, STAGES[1:], strict=False):
        (x, y), (to_x, to_y) = before.corner, after.corner
        across = f"M{x + STAGE_W},{y + STAGE_H // 2} H{to_x - 2}"
        down = f"M{x + STAGE_W // 2},{y + STAGE_H} v16 H{to_x + STAGE_W // 2} V{to_y - 2}"
        parts.append(_arrow(across if y == to_y else down))
    parts += [part for stage in STAGES for part in _stage(stage, files)]
    return _svg(right + STAGE_W + MARGIN, STAGES[-1].corner[1] + STAGE_H + MARGIN, parts)


def _arrow(points: str) -> str:
    return _line(points, 'marker-end="url(#tip)"')


def _stage(stage: Stage, files: Mapping[int, str]) -> list[str]:
    x, y = stage.corner
    parts = [
        _box(x, y, STAGE_W, STAGE_H, "white"),
        _text(x + 10, y + 21, stage.title, 14, more='font-weight="bold"'),
        _text(x + 10, y + 38, stage.what, 11),
        *(_text(x + 10, y + 56 + 14 * line, module, 11, font=MONO) for line, module in enumerate(stage.modules)),
    ]
    for place, number in enumerate(stage.notebooks):
        at, fill, ink = x + 10 + 34 * place, *((COLORS["ink"], "white") if number in files else ("white", ""))
        parts += [_box(at, y + 78, 28, 18, fill), _text(at + 6, y + 91, f"{number:02}", 11, fill=ink)]
    return parts


def token_strip(output: RequestOutput, tokenizer: Any) -> SVG:
    """The answer token by token in the colours of `minispec.palette`; an underline joins what one forward wrote."""
    kinds = output.outputs[0].kinds
    words = [tokenizer.decode([t]).replace("\n", "\u21b5").replace(" ", "\u00b7") for t in output.token_ids]
    parts, x, y, line_start, width = [], MARGIN, MARGIN, MARGIN, 880
    for word, kind in zip(words, kinds, strict=True):
        box_width = 12 + 9 * len(word)
        if x + box_width > width - MARGIN:
            x, y, line_start = MARGIN, y + 44, MARGIN
        parts += [_box(x, y, box_width, 26, KIND_COLORS[kind], more=_border(kind)), _word(x + 6, y + 18, word, kind)]
        parts.append(_line(f"M{line_start},{y + 33} H{x + box_width}"))
        x += box_width + 4
        if kind is not TokenKind.ACCEPTED:  # the target's own token ends a forward
            x, line_start = x + 8, x + 8
    for place, kind in enumerate(TokenKind):
        left, top = MARGIN + 430 * (place % 2), y + 56 + 22 * (place // 2)
        parts.append(_box(left, top, 18, 14, KIND_COLORS[kind], more=_border(kind)))
        parts.append(_text(left + 26, top + 11, f"{kinds.count(kind)} {KIND_LABELS[kind]}"))
    return _svg(width, y + 110, parts)


def _border(kind: TokenKind) -> str:
    return 'stroke-width="2.5" fill-opacity="0.5"' if kind is TokenKind.CORRECTED else 'stroke-width="0.5"'


def _word(x: float, y: float, word: str, kind: TokenKind) -> str:
    return _text(x, y, word, 14, font=MONO, fill="white" if kind is TokenKind.ACCEPTED else "")


SLOT_LOOKS = {  # what a slot holds -> its colour and a letter; a slot that waits for its token has only a border
    "prompt": (COLORS["prompt"], "p"),
    "output": (COLORS["output"], "o"),
    "undone": (FIX, "x"),
    "reserved": (COLORS["idle"], ""),
    "free": ("white", ""),
}


def slots(moments: Mapping[str, Sequence[str]], page_size: int) -> SVG:
    """The slots of a small pool, one line for each moment; a gap ends each page. moments: name -> kind of each slot."""
    left, side, parts = 7 * max(map(len, moments)) + 2 * MARGIN, 22, []
    count = len(next(iter(moments.values())))
    places = [left + slot * side + slot // page_size * 8 for slot in range(count)]
    for line, (moment, kinds) in enumerate(moments.items()):
        y = MARGIN + line * 30
        parts.append(_text(MARGIN, y + 16, moment))
        for x, kind in zip(places, kinds, strict=True):
            color, letter = SLOT_LOOKS[kind]
            parts += [_box(x, y, side - 2, 22, color, "" if kind != "free" else COLORS["again"])]
            parts += [_text(x + 7, y + 15, letter, font=MONO)] * bool(letter)
    y += 44
    for place, (kind, (color, letter)) in enumerate(SLOT_LOOKS.items()):
        x = MARGIN + 120 * place
        parts.append(_box(x, y, side - 2, 22, color, "" if kind != "free" else COLORS["again"]))
        parts += [_text(x + 7, y + 15, letter, font=MONO), _text(x + 28, y + 16, kind)]
    return _svg(max(places[-1] + side, MARGIN + 600) + MARGIN, y + 42, parts)
