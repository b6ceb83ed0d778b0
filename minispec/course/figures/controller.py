"""What the controller of drafts decided over time, and why, as PNG.

Knows: rows of `LLM.metrics_history()`. Does not know: how a decision is made. Used in notebook 12 (speculation inside
the engine).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minispec.core import TokenKind
from minispec.course.figures.base import COLORS, FIX, KEPT, OTHERS, Picture
from minispec.metrics import MetricsRow
from minispec.palette import KIND_COLORS

REASON_LOOKS = {  # why a request got so many drafts, see speculative/controller.py -> colour and hatching
    "gain": (KEPT, ""),
    "fixed": (KEPT, ""),
    "probe": (KIND_COLORS[TokenKind.BONUS], ""),
    "baseline": (COLORS["again"], "...."),
    "regression": (FIX, "////"),
    "fallback": (OTHERS[1], "\\\\\\\\"),
    "rejections": (OTHERS[1], "xxxx"),
    "batch": (COLORS["output"], "----"),
    "turn": (OTHERS[0], "||||"),
    "fault": (COLORS["ink"], ""),
    "no match": (COLORS["idle"], "oo"),
    "request": (COLORS["idle"], "++"),
    "room": (COLORS["idle"], ""),
}


def controller(history: Sequence[MetricsRow]) -> Picture:
    """Requests, K and acceptance over the steps; below, for which reasons the requests of each interval got their K.

    Raises ValueError for an empty history.
    """
    if not history:
        raise ValueError("the history has no rows: the run was shorter than metrics_interval")
    picture = Picture("what the controller decided", rows=(1, 1, 1, 1.2), height=6)
    batch, length, kept, why = picture.axes
    edges = np.array([history[0].step - history[0].steps, *(row.step for row in history)])
    look = {"edgecolor": COLORS["ink"], "fill": True}
    batch.stairs([row.batch for row in history], edges, facecolor=COLORS["again"], **look)
    length.stairs([row.candidate_length for row in history], edges, facecolor=KEPT, **look)
    rates = [row.acceptance_rate if row.candidate_length else np.nan for row in history]
    kept.plot((edges[:-1] + edges[1:]) / 2, rates, "o-", color=COLORS["ink"], markersize=3)
    counts = {reason: np.array([row.choices.get(reason, 0) for row in history]) for reason in REASON_LOOKS}
    total, bottom = np.maximum(sum(counts.values()), 1), np.zeros(len(history))
    for reason, (color, hatch) in REASON_LOOKS.items():
        if counts[reason].any():
            share = counts[reason] / total
            shape = {"width": np.diff(edges), "bottom": bottom, "align": "edge"}
            why.bar(edges[:-1], share, **shape, color=color, hatch=hatch, edgecolor=COLORS["ink"], lw=0, label=reason)
            bottom = bottom + share
    for ax, label in zip(picture.axes, ("requests", "K, mean", "share kept", "why"), strict=True):
        ax.set(ylabel=label, ylim=(0, None))
    kept.set_ylim(0, 1.05)
    why.set(xlabel="step", ylim=(0, 1), xlim=(edges[0], edges[-1]))
    why.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=7, handleheight=1.4)
    picture.figure.align_ylabels()
    return picture
