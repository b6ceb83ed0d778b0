"""What the controller knows: how long a forward takes by its rows, and how often drafts have been kept of late.

Both are estimates that follow what is measured and forget what is old. Knows: numbers. Does not know: requests,
drafters, decisions. Taught in notebook 12 (speculation inside the engine).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

FORGET = 0.99  # weight that a measurement keeps in the plane with each later one: about the last 100 count
FADE = 0.998  # the same of a measurement in its own bucket, with each later one in any
BUCKET_WEIGHT = 16  # most measurements that a bucket's mean stands for: it follows when the machine changes
PRIOR_ROWS = 32  # until it is measured, a forward of so many more rows is taken to last twice as long
PRIOR_WEIGHT = 4.0  # rows squared, against the variance of the rows that were measured
PRIOR_CONTEXT = 1e6  # positions squared: until it is measured, reading more K/V is taken to cost nothing
WARM_UP = 2  # first measurements that are left out: memory is touched for the first time
OUTLIER = 4.0  # a measurement this many times longer than expected counts as no longer than that


class StepCost:
    """Seconds of one forward as a function of its rows and of its context, fitted to the forwards as they come.

    Context is the number of positions whose K/V it reads: 20 rows of 4 requests cost less than 20 rows of 16. Real
    costs have steps where kernels change, so each number of rows that was measured lately has its own mean. What lies
    between is interpolated, what lies beyond goes on with the slope of a plane through all (least squares).

    >>> cost = StepCost()
    >>> for rows, context in ((1, 100), (5, 100), (5, 2000)) * 50:
    ...     cost.record(rows, 0.030 + 0.001 * rows + 0.00001 * context, context)
    >>> [round(1000 * t) for context in (100, 1100) for t in cost.seconds(np.array([1, 3, 10]), context)]
    [32, 34, 41, 42, 44, 51]
    """

    def __init__(self) -> None:
        self.count = 0
        self._moments = np.zeros((4, 4))  # sums of the products of (1, rows, context, seconds)
        self._buckets: dict[
            int, tuple[float, np.ndarray, int]
        ] = {}  # weight, mean (rows, context, seconds), last count

    @property
    def known(self) -> bool:
        """Enough was measured to predict anything."""
        return self._moments[0, 0] > 0

    def record(self, rows: float, seconds: float, context: float = 0.0) -> None:
        """Learn from one forward."""
        self.count += 1
        if self.count <= WARM_UP:
            return
        if self.known:
            seconds = min(seconds, OUTLIER * self.seconds(np.array([rows]), context)[0])
        seen = np.array([1.0, rows, context, seconds])
        self._moments = FORGET * self._moments + np.outer(seen, seen)
        weight = min(self.weight(rows) + 1, BUCKET_WEIGHT)
        mean = self._buckets[bucket(rows)][1] if bucket(rows) in self._buckets else seen[1:]
        self._buckets[bucket(rows)] = (weight, mean + (seen[1:] - mean) / weight, self.count)

    def weight(self, rows: float) -> float:
        """How many measurements of about so many rows count at present."""
        weight, _, last = self._buckets.get(bucket(rows), (0.0, None, 0))
        return weight * FADE ** (self.count - last)

    def _plane(self) -> tuple[np.ndarray, float, float]:
        """Means of (rows, context, seconds), and the seconds that a row more and a position more cost."""
        total = self._moments[0, 0]
        mean = self._moments[0, 1:] / total
        spread = self._moments[1:, 1:] - total * np.outer(mean, mean)
        by_rows = spread[0, 0] + PRIOR_WEIGHT
        joint, by_context = spread[0, 1], spread[1, 1] + PRIOR_CONTEXT
        with_rows, with_context = spread[0, 2] + PRIOR_WEIGHT * mean[2] / PRIOR_ROWS, spread[1, 2]
        per_position = (by_rows * with_context - joint * with_rows) / (by_rows * by_context - joint * joint)
        per_position = max(0.0, per_position)
        return mean, max(0.0, (with_rows - joint * per_position) / by_rows), per_position

    def seconds(self, rows: np.ndarray, context: float = 0.0) -> np.ndarray:
        """Predicted seconds [n] of forwards with these rows [n], increasing; `known` must hold.

        More rows never take less.
        """
        (x, c, y), slope, per_position = self._plane()
        knots = sorted((*mean, self.weight(mean[0])) for _, mean, _ in self._buckets.values())
        at, read, mean, weight = np.array(knots).T
        mean = mean + per_position * (context - read)
        # A mean of few measurements leans on the plane.
        expected = y + slope * (at - x) + per_position * (context - c)
        mean = np.maximum((weight * mean + expected) / (weight + 1), y / 10)
        inside = np.interp(rows, at, np.maximum.accumulate(mean))
        beyond = slope * (np.maximum(rows - at[-1], 0) - np.maximum(at[0] - rows, 0))
        return np.maximum(inside + beyond, mean.min() / 10)


def bucket(rows: float) -> int:
    """Row counts that are taken to cost alike: exact up to 16, then within a quarter of a power of two."""
    return int(rows) if rows <= 16 else 100 + int(4 * np.log2(rows))


class Acceptance:
    """How far the drafts of the last `size` verifications were kept.

    Of trees (`tree`) each draft is counted for itself, by its place in the order of the draft: first the best.

    >>> window = Acceptance(3)
    >>> for accepted in (0, 3, 1, 2):  # the first one is forgotten
    ...     window.record(3, accepted)
    >>> round(window.rate, 2), [round(chance, 2) for chance in window.chances(3, [0.5], weight=4)]
    (0.67, [0.71, 0.69, 0.63])
    """

    def __init__(self, size: int, tree: bool = False) -> None:
        self.recent: deque[tuple[int, int]] = deque()
        self.size, self.tree = size, tree
        self._paths: deque[Sequence[int]] = deque()  # of `recent`
        self._reached: list[int] = []  # verifications in which all drafts before this place were kept; of a tree, all
        self._kept: list[int] = []  # of these, those that kept this one too

    def record(self, drafted: int, accepted: int, path: Sequence[int] | None = None) -> None:
        """Count one verification; drafted > 0. path: places of the drafts that were kept; None: the first ones."""
        path = range(accepted) if path is None else path
        missing = drafted - len(self._reached)
        self._reached += [0] * missing
        self._kept += [0] * missing
        self._add(drafted, path, 1)
        self.recent.append((drafted, accepted))
        self._paths.append(path)
        if len(self.recent) > self.size:
            self._add(self.recent.popleft()[0], self._paths.popleft(), -1)

    def _add(self, drafted: int, path: Sequence[int], sign: int) -> None:
        for place in range(drafted if self.tree else min(drafted, len(path) + 1)):
            self._reached[place] += sign
            self._kept[place] += sign * (place in path)

    @property
    def rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        drafted = sum(d for d, _ in self.recent)
        return sum(a for _, a in self.recent) / drafted if drafted else 0.0

    def chances(self, length: int, prior: list[float], weight: float, bonus: float = 0.0) -> list[float]:
        """[length] chance that the draft at each place is kept if all before it were (of a tree, whatever was).

        prior: what to expect of the first places, as much as if `weight` verifications had said so; each place behind
        them is expected to be like the one before. bonus: standard errors to add, so that what was seldom tried looks
        a little better than it was found, and gets tried again.
        """
        means: list[float] = []
        chances: list[float] = []
        for place in range(length):
            expected = prior[place] if place < len(prior) else means[-1]
            reached, kept = (n[place] if place < len(n) else 0 for n in (self._reached, self._kept))
            means.append((kept + weight * expected) / (reached + weight))
            error = math.sqrt(means[-1] * (1 - means[-1]) / (reached + weight))
            chances.append(min(1.0, means[-1] + bonus * error))
        return chances
