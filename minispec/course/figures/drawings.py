"""Drawings of the engine: the life of a request, an answer token by token, slots. SVG text, the same everywhere.

Knows: how to draw what the caller took from the engine. Does not know: how to get it.
Used in notebooks 00, 09, 10 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from IPython.display import SVG

from minispec.core import TokenKind
from minispec.course.figures.base import COLORS, FIX, KEPT, MARGIN, MONO, OTHERS, box, line, svg, text
from minispec.llm import RequestOutput
from minispec.palette import KIND_COLORS, KIND_LABELS


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


def request_map() -> SVG:
    """A request's life, box by box. Numbers are notebooks."""
    (left, top), (right, _) = STAGES[3].corner, STAGES[7].corner
    arrow = f'<path d="M0,0 L8,4 L0,8 z" fill="{COLORS["ink"]}"/>'
    parts = [
        f'<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{arrow}</marker>',
        box(left - 12, top - 32, right - left + STAGE_W + 24, STAGE_H + 58, COLORS["idle"], COLORS["again"]),
        text(left + STAGE_W + 16, top - 12, "one step = one forward of the model, repeated until the request ends"),
        text(left, STAGES[-1].corner[1] + 20, "Numbers are notebooks."),
        text(left, STAGES[-1].corner[1] + 40, "Notebook 13 shows all parts working together."),
        _arrow(f"M{right + 40},{top + STAGE_H} v14 H{left + STAGE_W // 2} V{top + STAGE_H + 2}"),
    ]
    for before, after in zip(STAGES, STAGES[1:], strict=False):
        (x, y), (to_x, to_y) = before.corner, after.corner
        across = f"M{x + STAGE_W},{y + STAGE_H // 2} H{to_x - 2}"
        down = f"M{x + STAGE_W // 2},{y + STAGE_H} v16 H{to_x + STAGE_W // 2} V{to_y - 2}"
        parts.append(_arrow(across if y == to_y else down))
    parts += [part for stage in STAGES for part in _stage(stage)]
    return svg(right + STAGE_W + MARGIN, STAGES[-1].corner[1] + STAGE_H + MARGIN, parts)


def _arrow(points: str) -> str:
    return line(points, 'marker-end="url(#tip)"')


def _stage(stage: Stage) -> list[str]:
    x, y = stage.corner
    parts = [
        box(x, y, STAGE_W, STAGE_H, "white"),
        text(x + 10, y + 21, stage.title, 14, more='font-weight="bold"'),
        text(x + 10, y + 38, stage.what, 11),
        *(text(x + 10, y + 56 + 14 * line, module, 11, font=MONO) for line, module in enumerate(stage.modules)),
    ]
    for place, number in enumerate(stage.notebooks):
        at = x + 10 + 34 * place
        parts += [box(at, y + 78, 28, 18, COLORS["ink"]), text(at + 6, y + 91, f"{number:02}", 11, fill="white")]
    return parts


def token_strip(output: RequestOutput, tokenizer: Any, sure: Mapping[int, float] | None = None) -> SVG:
    """The answer token by token in the colours of `minispec.palette`; an underline joins what one forward wrote.

    sure: place in the answer -> the drafter's probability of its guess there. With it, two bars below each token show
    this and the target's probability of the token, for which the request must have asked (`logprobs=0`).
    """
    kinds = output.outputs[0].kinds
    words = [tokenizer.decode([t]).replace("\n", "\u21b5").replace(" ", "\u00b7") for t in output.token_ids]
    below = 0 if sure is None else BAR_H + 6
    parts, x, y, line_start, width = [], MARGIN, MARGIN, MARGIN, 880
    for place, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        box_width = 12 + 9 * len(word)
        if x + box_width > width - MARGIN:
            x, y, line_start = MARGIN, y + 44 + below, MARGIN
        parts += [box(x, y, box_width, 26, KIND_COLORS[kind], more=_border(kind)), _word(x + 6, y + 18, word, kind)]
        parts.append(line(f"M{line_start},{y + 33 + below} H{x + box_width}"))
        if sure is not None:
            parts += _bars(x, y + 30, sure.get(place, 0.0), math.exp(output.logprobs[place].logprob))
        x += box_width + 4
        if kind is not TokenKind.ACCEPTED:  # the target's own token ends a forward
            x, line_start = x + 8, x + 8
    y += below
    for place, kind in enumerate(TokenKind):
        left, top = MARGIN + 430 * (place % 2), y + 56 + 22 * (place // 2)
        parts.append(box(left, top, 18, 14, KIND_COLORS[kind], more=_border(kind)))
        parts.append(text(left + 26, top + 11, f"{kinds.count(kind)} {KIND_LABELS[kind]}"))
    if sure is not None:
        y += 32
        parts += _bars(MARGIN, y + 68, 0.6, 0.9)
        parts.append(
            text(MARGIN + 26, y + 81, "left: how likely its guess was to the drafter; right: the token to the target")
        )
    return svg(width, y + 110, parts)


BAR_H = 18


def _bars(x: float, y: float, draft: float, target: float) -> list[str]:
    """Two probabilities as bars in a frame that is 1 high."""
    parts = [box(x, y, 19, BAR_H, COLORS["idle"], COLORS["again"])]
    for left, share, color in ((x + 1, draft, OTHERS[0]), (x + 10, target, COLORS["ink"])):
        height = round(BAR_H * share)
        parts += [f'<rect x="{left:g}" y="{y + BAR_H - height:g}" width="8" height="{height}" fill="{color}"/>']
    return parts


def _border(kind: TokenKind) -> str:
    return 'stroke-width="2.5" fill-opacity="0.5"' if kind is TokenKind.CORRECTED else 'stroke-width="0.5"'


def _word(x: float, y: float, word: str, kind: TokenKind) -> str:
    return text(x, y, word, 14, font=MONO, fill="white" if kind is TokenKind.ACCEPTED else "")


SLOT_LOOKS = {  # what a slot holds -> its colour and a letter; a slot that waits for its token has only a border
    "prompt": (COLORS["prompt"], "p"),
    "output": (COLORS["output"], "o"),
    "guess": (KIND_COLORS[TokenKind.BONUS], "g"),
    "undone": (FIX, "x"),
    "reserved": (COLORS["idle"], ""),
    "free": ("white", ""),
}


def slots(moments: Mapping[str, Mapping[str, Sequence[str]]], page_size: int) -> SVG:
    """The slots of a small pool or of a request, the rows of each moment; a gap ends each page.

    moments: moment -> name of a row -> kind of each slot. "+" behind a kind: written since the moment before. A moment
    of one row needs no name for it.
    """
    rows = [(moment, name, kinds) for moment, held in moments.items() for name, kinds in held.items()]
    left, side, parts, y = 7 * max(len(name or moment) for moment, name, _ in rows) + 2 * MARGIN, 22, [], MARGIN - 30
    places = [left + slot * side + slot // page_size * 8 for slot in range(len(rows[0][2]))]
    for row, (moment, name, kinds) in enumerate(rows):
        if name and (row == 0 or moment != rows[row - 1][0]):
            parts.append(text(MARGIN, y + 46, moment, 13, more='font-weight="bold"'))
            y += 24
        y += 30
        parts.append(text(MARGIN, y + 16, name or moment))
        parts += [part for x, kind in zip(places, kinds, strict=True) for part in _slot(x, y, kind)]
    used = {kind.rstrip("+") for _, _, kinds in rows for kind in kinds}
    y += 44
    for place, kind in enumerate(kind for kind in SLOT_LOOKS if kind in used):
        parts += [*_slot(MARGIN + 120 * place, y, kind), text(MARGIN + 120 * place + 28, y + 16, kind)]
    return svg(max(places[-1] + side, MARGIN + 720) + MARGIN, y + 42, parts)


def _slot(x: float, y: float, kind: str) -> list[str]:
    color, letter = SLOT_LOOKS[kind.rstrip("+")]
    border = 'stroke-width="3"' if kind.endswith("+") else 'stroke-width="0.75"'
    drawn = box(x, y, 20, 22, color, "" if kind != "free" else COLORS["again"], border)
    return [drawn, text(x + 6, y + 15, letter, font=MONO)] if letter else [drawn]


def draft_tree(root: str, words: Sequence[str], parents: Sequence[int], kept: Sequence[int], following: str) -> SVG:
    """A tree of drafts behind the last word of the text, one column per depth, and the path that the target kept.

    words: of the drafts, parents: the draft that each one follows (-1: root), kept: numbers of the accepted path,
    following: the token that the target adds at its end. Numbers in the boxes are places in the order of the draft.
    """
    children = {node: [i for i, parent in enumerate(parents) if parent == node] for node in range(-1, len(parents))}
    lines, places = 0, {}

    def place(node: int, depth: int) -> None:
        nonlocal lines
        places[node] = depth, lines
        for rank, child in enumerate(children[node]):
            lines += rank > 0
            place(child, depth + 1)

    place(-1, 0)
    column, row = 48 + 9 * max(len(word) + 3 for word in (root, following, *words)), 38
    end, parts = (kept[-1] if kept else -1), []
    places["next"] = places[end][0] + 1, lines + 1
    corners = {node: (MARGIN + depth * column, MARGIN + line * row) for node, (depth, line) in places.items()}
    for node, parent in [*enumerate(parents), ("next", end)]:
        (x, y), (left, top) = corners[node], corners[parent]
        look = 'stroke-dasharray="4 3"' if node == "next" else f'stroke-opacity="{1 if node in kept else 0.3}"'
        parts.append(
            line(f"M{left + column - 36},{top + 13} C{x - 14},{top + 13} {x - 22},{y + 13} {x},{y + 13}", look)
        )
    bonus = not children[end]
    colors = {-1: COLORS["prompt"], "next": KIND_COLORS[TokenKind.BONUS if bonus else TokenKind.CORRECTED]}
    names = {-1: root, "next": following} | {node: f"{node} {word}" for node, word in enumerate(words)}
    for node, (x, y) in corners.items():
        color = colors.get(node, KEPT if node in kept else COLORS["again"])
        parts += [
            box(x, y, column - 36, 26, color, more='stroke-width="0.5"'),
            text(x + 8, y + 18, names[node], 13, font=MONO, fill="white" if node in kept else ""),
        ]
    width = MARGIN + max(x for x, _ in corners.values()) + column
    return svg(width, 2 * MARGIN + (lines + 2) * row, parts)
