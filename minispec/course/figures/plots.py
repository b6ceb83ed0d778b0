"""Plots of counted work, of probabilities and of costs, as PNG.

Knows: how to draw numbers that the caller took from the engine. Does not know: how to get them.
Used in notebooks 01, 02, 09, 10, 11, 12 and 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from minispec.course.figures.base import COLORS, FIX, KEPT, OTHERS, Picture


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


def token_bytes(parts: Mapping[str, float], plain: float, dots: Mapping[str, tuple[float, float]]) -> Picture:
    """Bytes read for each token over the acceptance length.

    parts: what a step with drafts reads, label -> bytes. plain: bytes of a step without drafts, which writes one token.
    dots: label -> (acceptance length, bytes per token), measured. At most three of each.
    """
    picture = Picture("bytes read for each token")
    [ax] = picture.axes
    length = np.linspace(1, 1 + max(length for length, _ in dots.values()), 100)
    bands = [size / length / 1e6 for size in parts.values()]
    ax.stackplot(length, *bands, labels=parts, colors=(COLORS["again"], OTHERS[0], KEPT), edgecolor=COLORS["ink"])
    ax.axhline(plain / 1e6, color=COLORS["ink"], linestyle="--", label="without guesses")
    for (label, (x, y)), marker in zip(dots.items(), "osD", strict=False):
        ax.plot(x, y / 1e6, marker, color=COLORS["output"], markersize=9, markeredgecolor=COLORS["ink"], label=label)
    ax.set(xlabel="acceptance length: tokens of a verification", ylabel="MB read for each token", ylim=(0, None))
    ax.legend(ncols=2, fontsize=9)
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
