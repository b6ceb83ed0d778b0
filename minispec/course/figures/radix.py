"""Drawings of a radix tree as it changes, and hit rates over pool sizes.

Knows: how to draw a `RadixTree` and numbers that the caller counted. Does not know: where they come from.
Used in notebooks 06 (radix tree) and 07 (locks and eviction).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from IPython.display import SVG

from minispec.course.figures.base import COLORS, MARGIN, MONO, OTHERS, Picture, box, line, svg, text
from minispec.kv.radix import RadixTree

WIDTH, GAP, BOX_H, LINE_H, ROOT_W, TOP = 880, 26, 26, 14, 44, 44
MONO_W, SANS_W = 7.3, 5.4  # widths of a letter: of a label (size 12), of the line below it (size 10)
TREE_LOOKS = {  # what a node is -> fill, border, width of the border
    "cached": ("white", COLORS["ink"], 'stroke-width="1"'),
    "locked": (OTHERS[0], COLORS["ink"], 'stroke-width="1"'),
    "new": ("white", COLORS["prompt"], 'stroke-width="3.5"'),
    "evicted": (COLORS["idle"], "#777777", 'stroke-width="1" stroke-dasharray="4 3"'),
}

Prefix = tuple[int, ...]


@dataclass
class Box:
    """A node of a drawing. `path` spells the tokens from the root to its end, and its own begin at `start`."""

    path: Prefix
    start: int
    note: str = ""  # what happened to it since the frame before
    used: int = 0
    locks: int = 0
    label: tuple[str, ...] = ()  # lines
    x: float = 0
    y: float = 0
    width: float = 0

    @property
    def facts(self) -> str:
        count = len(self.path) - self.start
        tokens = f"{count} token{'s' * (count > 1)}"
        return f"{self.note + ': ' if self.note else ''}{tokens}{f', used {self.used}' if self.used else ''}"

    @property
    def looks(self) -> tuple[str, str]:
        """Keys of TREE_LOOKS: whose fill, whose border."""
        state = "evicted" if self.note == "evicted" else "locked" if self.locks else "cached"
        return state, self.note if self.note in TREE_LOOKS else state


class TreeFilm:
    """Frames of one radix tree, each marked with what changed since the frame before.

    A tree grows from left to right, so that a path reads as the prompt that it stands for. decode: token ids -> text;
    a long run shows its beginning and its end.
    """

    def __init__(self, tree: RadixTree, decode: Callable[[list[int]], str]) -> None:
        self.tree, self.decode = tree, decode
        self.frames: list[SVG] = []
        self._before: set[Prefix] = set()  # where the nodes of the last frame end

    def take(self, title: str) -> SVG:
        """Draw the tree as it is, and keep the drawing as the next frame."""
        nodes = self._nodes()
        boxes = {b.path: b for b in (*nodes, *self._evicted([b.path for b in nodes]))}
        height = self._place(boxes)
        bottom = max([TOP, *(b.y for b in boxes.values())]) + height
        counts = f"{self.tree.num_evictable} evictable, {self.tree.num_locked} locked"
        parts = [
            text(MARGIN, 24, _lines(title, 72)[0], 13, more='font-weight="bold"'),
            text(WIDTH - MARGIN, 24, counts, more='text-anchor="end"'),
            box(MARGIN, TOP, ROOT_W, height, COLORS["idle"]),
            text(MARGIN + 8, TOP + height / 2 + 4, "root", 12),
            *(part for b in boxes.values() for part in _drawn(b, boxes.get(b.path[: b.start]), height)),
            *_legend(bottom + 22, {look for b in boxes.values() for look in b.looks}),
        ]
        self._before = {b.path for b in nodes}
        self.frames.append(svg(WIDTH, bottom + 54, parts))
        return self.frames[-1]

    def _nodes(self) -> list[Box]:
        found = []
        for node in self.tree.nodes():
            path = tuple(token for part in list(node.path())[::-1] for token in part.key.tolist())
            stored = any(old[: len(path)] == path for old in self._before)
            split = stored and path not in self._before and node.children
            note = "split" if split else "" if stored else "new"
            found.append(Box(path, len(path) - len(node.key), note, node.last_access, node.locks))
        return found

    def _evicted(self, live: list[Prefix]) -> list[Box]:
        """What the frame before had and the tree has no more, cut where the tree or another evicted part ends."""
        gone = [path for path in sorted(self._before, key=len) if not any(p[: len(path)] == path for p in live)]
        ends = [*live, *gone]
        starts = [max((len(e) for e in ends if len(e) < len(path) and path[: len(e)] == e), default=0) for path in gone]
        return [Box(path, start, "evicted") for path, start in zip(gone, starts, strict=True)]

    def _place(self, boxes: Mapping[Prefix, Box]) -> float:
        """Set the labels and places; return the height of all boxes.

        A child is right of its parent, the first child in its parent's line and others below.
        """
        depth: dict[Prefix, int] = {}
        for path in sorted(boxes):  # a parent comes right before its first child
            depth[path] = 1 + depth.get(path[: boxes[path].start], 0)
        room = (WIDTH - 2 * MARGIN - ROOT_W) / max(depth.values(), default=1) - GAP
        for b in boxes.values():
            words = self.decode(list(b.path[b.start :])).strip().replace("\n", "\u21b5")
            b.label = _lines(words, int((room - 14) / MONO_W))
            b.width = min(room, 16 + max(MONO_W * max(map(len, b.label)), SANS_W * len(b.facts)))
        height = BOX_H + LINE_H * max((len(b.label) for b in boxes.values()), default=1)
        y, with_child = TOP, set()
        for path in sorted(boxes):
            b, parent = boxes[path], path[: boxes[path].start]
            y += height + LINE_H if parent in with_child else 0
            with_child.add(parent)
            b.x, b.y = GAP + (boxes[parent].x + boxes[parent].width if parent else MARGIN + ROOT_W), y
        return height


def _drawn(b: Box, parent: Box | None, height: float) -> list[str]:
    state, event = b.looks
    _, border, more = TREE_LOOKS[event]
    ink = border if b.note == "evicted" else ""
    right, from_y = (parent.x + parent.width, parent.y) if parent else (MARGIN + ROOT_W, TOP)
    parts = [
        line(f"M{right:g},{from_y + height / 2:g} h{GAP / 2:g} V{b.y + height / 2:g} H{b.x:g}"),
        box(b.x, b.y, b.width, height, TREE_LOOKS[state][0], border, more),
        *(text(b.x + 8, b.y + 17 + LINE_H * i, part, 12, font=MONO, fill=ink) for i, part in enumerate(b.label)),
        text(b.x + 8, b.y + height - 8, b.facts, 10, fill=ink),
    ]
    return parts + _lock(b.x + b.width - 9, b.y - 7, b.locks) * bool(b.locks)


def _lines(words: str, limit: int) -> tuple[str, ...]:
    """One line if it fits, else two: what is too long for them loses its middle."""
    if len(words) <= limit:
        return (words,)
    if len(words) <= 2 * limit:
        return words[:limit], words[limit:]
    return words[: limit - 1] + "\u2026", "\u2026" + words[1 - limit :]


def _lock(x: float, y: float, locks: int) -> list[str]:
    """A badge with the number of holders."""
    return [box(x, y, 18, 16, COLORS["ink"]), text(x + 5.5, y + 12, str(locks), 11, fill="white")]


def _legend(y: float, looks: Collection[str]) -> list[str]:
    words = {
        "cached": "cached",
        "locked": "held, with its number of locks",
        "new": "new",
        "evicted": "thrown away in this step",
    }
    parts, x = [], MARGIN
    for look in [look for look in words if look in looks]:
        parts += [box(x, y, 26, 16, *TREE_LOOKS[look]), text(x + 42, y + 12, words[look], 11)]
        parts += _lock(x + 17, y - 7, 1) if look == "locked" else []
        x += 72 + 6.2 * len(words[look])
    return parts


def hit_rates(curves: Mapping[str, Mapping[int, float]], best: float) -> Picture:
    """Share of prompt tokens found in the tree, over the size of the pool. curves: label -> slots -> share."""
    picture = Picture("hit rate over pool size: " + ", ".join(curves))
    [ax] = picture.axes
    ax.axhline(100 * best, color=COLORS["ink"], linestyle=":", linewidth=1)
    ax.text(min(next(iter(curves.values()))), 100 * best + 2, f"a pool without end: {best:.0%}", va="bottom")
    looks = zip((COLORS["prompt"], COLORS["output"], *OTHERS), ("-", "--", "-.", ":", "-"), "os^Dv", strict=True)
    for (label, curve), (color, dashes, marker) in zip(curves.items(), looks, strict=False):
        look = {"color": color, "linestyle": dashes, "marker": marker, "markeredgecolor": COLORS["ink"]}
        ax.plot(list(curve), [100 * share for share in curve.values()], label=label, **look)
    ax.set(xlabel="slots in the pool", ylabel="prompt tokens found, %", ylim=(0, 105))
    ax.legend(loc="lower right")
    return picture
