"""Pictures of memory and of schedules: who owns which page, who takes part in which forward, and at what price.

Drawings are SVG text, the same everywhere; plots are PNG. Knows: how to draw what the caller took from the pool and
from the engine's steps. Does not know: how to get it. Used in notebooks 03, 04 and 05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.display import SVG

from minispec.course.figures.base import COLORS, FIX, MARGIN, MONO, OTHERS, Picture, box, svg, text

WIDTH = 880
# Requests to tell apart. There are more requests than colours, so the letter in each box decides.
OWNERS = (OTHERS[0], OTHERS[1], "#B0B0B0", "#BBE0F7", "#EBC9DC", "#E3E3E3")


def pages(moments: Mapping[str, Sequence[tuple[str, float]]]) -> SVG:
    """The pages of a pool, one line for each moment: a box is filled as far as its slots are written.

    moments: name -> (owner, share of the slots that hold K/V) of each page. Owners are told apart by their last
    letter; the owner "free" has none. At most about 64 pages.
    """
    left = 7 * max(map(len, moments)) + 2 * MARGIN
    side = min(34, (WIDTH - left - MARGIN) // len(next(iter(moments.values()))))
    parts, y = [], MARGIN
    for moment, owners in moments.items():
        parts.append(text(MARGIN, y + 18, moment))
        for place, (owner, share) in enumerate(owners):
            parts += _page(left + place * side, y, side - 3, owner, share)
        y += 34
    for place, (words, owner, share) in enumerate(
        [("free", "free", 0), ("A's, half of it written", "A", 0.5), ("A's, full", "A", 1)]
    ):
        x = MARGIN + 200 * place
        parts += [*_page(x, y + 10, 24, owner, share), text(x + 34, y + 27, words)]
    return svg(WIDTH, y + 46, parts)


def _page(x: float, y: float, width: float, owner: str, share: float) -> list[str]:
    if owner == "free":
        return [box(x, y, width, 26, "white", COLORS["again"])]
    height, color = round(26 * share, 1), OWNERS[ord(owner[-1]) % len(OWNERS)]
    letter = text(x + width / 2 - 4, y + 18, owner[-1], min(12, round(width)), font=MONO)
    return [box(x, y, width, 26, "white"), box(x, y + 26 - height, width, height, color), letter]


GANTT_LOOKS = {  # what a request does in a forward -> colour, place from the top and height (for grey print), words
    "prompt": (COLORS["prompt"], 0, 18, "reads its prompt"),
    "output": (COLORS["output"], 0, 18, "writes a token"),
    "again": (COLORS["again"], 0, 18, "is computed again"),
    "idle": (FIX, 5, 8, "idle: holds a seat, brings nothing"),
    "waiting": (COLORS["again"], 7, 4, "waits"),
}


def gantt(runs: Mapping[str, Sequence[Mapping[str, str]]], costs: Mapping[str, Sequence[float]] | None = None) -> SVG:
    """Who does what in each forward, one panel for each run, one line for each request, in order of first appearance.

    runs: title -> for each forward, request -> a key of `GANTT_LOOKS`. A request waits until its first forward, and
    in gaps. costs: title -> how wide each forward is drawn; all the same by default.
    """
    costs = costs or {title: [1] * len(forwards) for title, forwards in runs.items()}
    names = list(dict.fromkeys(name for forwards in runs.values() for forward in forwards for name in forward))
    left = 8 * max(map(len, names)) + 2 * MARGIN
    scale = (WIDTH - left - MARGIN) / max(map(sum, costs.values()))
    parts, y, seen = [], MARGIN, set()
    for title, forwards in runs.items():
        lanes = {name: [forward.get(name, "waiting") for forward in forwards] for name in names}
        idle = sum(lane.count("idle") for lane in lanes.values())
        parts.append(
            text(MARGIN, y + 4, f"{title}: {len(forwards)} forwards" + f", {idle} idle seats" * (idle > 0), 13)
        )
        y += 16
        for name, lane in lanes.items():
            while lane and lane[-1] == "waiting":  # it has ended
                lane.pop()
            parts.append(text(MARGIN, y + 14, name, font=MONO))
            seen.update(lane)
            x = float(left)
            for kind, cost in zip(lane, costs[title], strict=False):
                color, top, height, _ = GANTT_LOOKS[kind]
                parts.append(box(round(x, 1), y + top, round(cost * scale, 1), height, color, "white"))
                x += cost * scale
            y += 22
        y += 18
    x = MARGIN
    for kind, (color, top, height, words) in GANTT_LOOKS.items():
        if kind in seen:
            parts += [box(x, y + top, 22, height, color, "white"), text(x + 30, y + 14, words)]
            x += 60 + 8 * len(words)
    return svg(WIDTH, y + 34, parts)


def budget(runs: Mapping[str, Sequence[tuple[int, int]]], limit: int | None = None) -> Picture:
    """Rows of each forward, stacked, one panel for each run. runs: title -> (decode rows, prompt rows) per forward."""
    picture = Picture("rows of each forward: " + ", ".join(runs), columns=len(runs))
    top = 1.1 * max([limit or 0, *(sum(forward) for forwards in runs.values() for forward in forwards)])
    for ax, (title, forwards) in zip(picture.axes, runs.items(), strict=True):
        decode, prompt = zip(*forwards, strict=True)
        places = range(1, len(forwards) + 1)
        ax.bar(places, decode, color=COLORS["output"], label=f"decode: {sum(decode)}")
        ax.bar(places, prompt, bottom=decode, color=COLORS["prompt"], hatch="//", label=f"prompt: {sum(prompt)}")
        if limit:
            ax.axhline(limit, color=COLORS["ink"], linestyle=":", label=f"budget: {limit}")
        ax.set(title=f"{title}: {len(forwards)} forwards", xlabel="forward", ylim=(0, 1.2 * top))
        ax.legend(loc="upper right", fontsize=9)
    picture.axes[0].set_ylabel("rows")
    return picture


def trade(title: str, points: Mapping[str, tuple[float, float]], x: str, y: str) -> Picture:
    """Choices on two scales, joined in their order. points: label -> (x, y); x, y: what the scales mean."""
    picture = Picture(title)
    [ax] = picture.axes
    ax.plot(*zip(*points.values(), strict=True), "o-", color=OTHERS[0], markeredgecolor=COLORS["ink"], markersize=8)
    for label, point in points.items():
        ax.annotate(label, point, (6, -14), textcoords="offset points", fontsize=10)
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.margins(0.12)
    return picture
