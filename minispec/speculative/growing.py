"""A tree of drafts while it grows: level by level, where the draft model is surest, cut back to a budget at the end.

    depth 1    the 9 | a 4 | it 2            the topk likeliest tokens behind the text, chances in tenths
    depth 2    cat 7 2 1 | dog 3 .           each of the `topk` best of a level gets topk children
    kept       the, the cat, a, ...          the `room` best of all, best first

A node's worth is the product of the chances on the way to it, which estimates how likely it is to be kept. It is never
more than its parent's, so the best nodes are a tree, and its first n nodes are the best tree of n: whoever has room for
fewer cuts the list. A chain is the tree with topk 1.

Where children are drawn by chance, the i-th child of a node has the chance of the i-th likeliest token, whatever is
drawn. So whether a node is kept never depends on which token it became, and its q stays what it was drawn from.

Source: EAGLE-2 (Li et al. 2024), sections 4.1 (expansion) and 4.2 (reranking).
Knows: tokens, chances, slots by their place. Does not know: models. Taught in notebook 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minispec.runner import Segment
from minispec.sampling.distribution import LogitRow

if TYPE_CHECKING:
    from minispec.core import Request


class GrowingTree:
    """The drafts of one request in one step: at most `room` of them, at most `depth` in a row, `topk` to a node.

    level: nodes that get children next, -1 for the committed text; empty when the tree is done. Nodes that get children
    have a draft row, at the slots behind the committed tokens in the order of `rows`.
    """

    def __init__(self, request: Request, room: int, depth: int, topk: int) -> None:
        self.request, self.room, self.topk = request, room, topk
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.worth: list[float] = []
        self.q: list[torch.Tensor | None] = []
        self.rows: list[int] = []
        self.level = [-1] if room > 0 else []
        self.depth, self._most_depth = 0, depth
        self._rows_left, self._older = room, 0

    def add(self, parent: int, token: int, chance: float, q: torch.Tensor | None) -> None:
        """A child more for `parent`. q [V]: what it was drawn from; None: chosen without chance."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.worth.append(chance * (self.worth[parent] if parent >= 0 else 1.0))
        self.q.append(q)

    def next_level(self) -> None:
        """Of the nodes that were added since the last call, choose those that get children.

        There is a row for `room` nodes in all; each level that may come keeps one of them. How many of the others a
        level gets does not depend on what was drawn.
        """
        self.depth += 1
        deeper = self._most_depth - self.depth
        width = min(self.topk, self._rows_left - deeper + 1)
        newest = [node for node in self._ranking() if node >= self._older]
        self.level = sorted(newest[:width]) if deeper > 0 else []
        self._rows_left -= width
        self._older = len(self.tokens)
        self.rows += self.level

    def segment(self, everything: bool) -> Segment:
        """The rows of the newest level for the draft model, or of all nodes that have one."""
        new = self.rows if everything else self.level
        start = len(self.request.tokens) + len(self.rows) - len(new)
        place = {node: i for i, node in enumerate(self.rows)}
        parents = [place.get(self.parents[node], -1) for node in self.rows] if self.topk > 1 else None
        return Segment(self.request.table_row, start, [self.tokens[i] for i in new], len(self.level), parents)

    def logit_row(self, node: int) -> LogitRow:
        """What the choice of its children depends on besides the model."""
        request, draft = self.request, []
        while node >= 0:
            draft.append(self.tokens[node])
            node = self.parents[node]
        return LogitRow(request.params, request.prompt, request.output + draft[::-1], request.stop_ids)

    def best(self) -> tuple[list[int], torch.Tensor | None, list[int] | None]:
        """Tokens, q and parents of the nodes that are kept, best first; see Proposal."""
        kept = self._ranking()
        place = {node: i for i, node in enumerate(kept)}
        parents = [place.get(self.parents[node], -1) for node in kept]
        q = torch.stack([self.q[node] for node in kept]) if kept and self.q[0] is not None else None
        return [self.tokens[node] for node in kept], q, None if parents == list(range(-1, len(kept) - 1)) else parents

    def _ranking(self) -> list[int]:
        """The best nodes, as many as there is room for. Equals stay in order, so parents come first."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.worth[node])[: self.room]
