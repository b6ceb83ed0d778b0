"""Which path of a tree of drafts stays, and which token follows it. Chains are judged faster by rejection.py.

The rows are those of rejection.py: request b owns num_drafts[b] + 1 logits rows from row_start[b] on, and its draft i
is named at its row i. What the model says after draft i is row i + 1, and row 0 is what it says before any. So the row
that judges a draft is the one after that of its parent.

    tree       7 --- 9        drafts   7   9   2   5   -1
                \\-- 2 --- 5   parents -1   0   0   2
    rows       0   1   2   3   4     judges   0   1   1   3       row 4 says what follows 7 2 5

Two rules, both exact. `match_trees` lets the target choose first, at every node, and follows the child that says the
same. `verify_trees` weighs p against q, one child after the other: a child x drawn from q is kept with probability
min(1, p(x) / q(x)); otherwise p becomes max(p - q, 0), normalised, and the next child is judged by that. Each child's
q is what it was really drawn from, which for children drawn without replacement is q without its elder siblings. When
all are rejected, the last residual is sampled. By induction over the children, what follows a node is distributed as p.

Sources: SpecInfer (Miao et al. 2024), section 4.3, for several drafts behind one token; without replacement: recursive
rejection sampling (Jeon et al. 2024), section 3, and EAGLE (Li et al. 2024), appendix A.2.

Knows: p, q, drafts, parents, uniforms. Does not know: logits, sampling parameters, slots, who drafted.
Taught in notebook 12 (speculation inside the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minispec.device import CPU, upload
from minispec.sampling.distribution import sample
from minispec.sampling.rejection import Verdict, is_distribution


@dataclass(frozen=True)
class Trees:
    """The shape of B requests' drafts over R rows, int64. Last rows, which name no draft, judge themselves.

    depth: most drafts on one path. tests: most drafts that one walk may have to judge.
    """

    row_start: Tensor  # [B]
    judge: Tensor  # [R] row that judges the draft of this row
    first_child: Tensor  # [R] row that names the first draft which this row judges
    next_sibling: Tensor  # [R] row that names the next one which the same row judges; -1, as above: there is none
    depths: np.ndarray  # [R] drafts on the way to what this row says
    ranks: np.ndarray  # [R] elder siblings of the draft of this row
    depth: int
    tests: int

    @classmethod
    def of(cls, lineages: Sequence[Sequence[int]], device: torch.device = CPU) -> Trees:
        """lineages: of each request the parent of each draft, -1 for the root, parents before children."""
        sizes = [len(parents) + 1 for parents in lineages]
        row_start = np.cumsum(sizes) - sizes
        judge, depths, ranks, tests = np.arange(sum(sizes)), *(np.zeros(sum(sizes), dtype=np.int64) for _ in range(3))
        first_child, next_sibling = (np.full(sum(sizes), -1) for _ in range(2))
        for start, parents in zip(row_start.tolist(), lineages, strict=True):
            youngest: dict[int, int] = {}
            for row, parent in enumerate(parents, start):
                by = judge[row] = start + 1 + parent
                depths[row + 1] = depths[by] + 1
                elder = youngest.get(by)
                if elder is None:
                    first_child[by] = row
                else:
                    next_sibling[elder], ranks[row] = row, ranks[elder] + 1
                youngest[by] = row
                tests[row + 1] = tests[by] + ranks[row] + 1
        tensors = upload(device, row_start, judge, first_child, next_sibling)
        return cls(*tensors, depths, ranks, int(depths.max()), int(tests.max()))

    def chosen(self, drafts: Tensor, stops: Tensor, next_ids: Tensor) -> Tensor:
        """[R] the token that follows each row of the paths that end at the rows `stops` [B]; 0 elsewhere."""
        chosen, row, token = torch.zeros_like(drafts), stops, next_ids
        for _ in range(self.depth + 1):
            chosen = chosen.index_copy(0, row, token)
            inside = row > self.row_start
            token = torch.where(inside, drafts[row - 1], token)
            row = torch.where(inside, self.judge[row - 1], row)
        return chosen


def match_trees(target_ids: Tensor, drafts: Tensor, trees: Trees) -> Verdict:
    """Follow from the root what the target chose: target_ids [R], drafts [R].

    `accepted` is the row of the last draft kept, counted from the request's first row: 1 + the draft's number, or 0.
    """
    rows = torch.arange(len(drafts), device=drafts.device)
    said = target_ids[trees.judge] == drafts  # [R] of the draft in this row; never in a last row, where drafts is -1
    root = torch.zeros_like(said).index_fill(0, trees.row_start, True)
    reached = root
    for _ in range(trees.depth):
        reached = root | (said & reached[trees.judge]).roll(1)  # row i + 1 is reached through draft i
    # Siblings differ, so what is reached is one path, and its end is the last row of it.
    ends = torch.where(reached, rows, -1).cummax(0).values
    last = torch.cat((trees.row_start[1:], rows.new_tensor([len(rows)]))) - 1
    stops = ends[last]
    return Verdict(stops - trees.row_start, target_ids[stops])


def verify_trees(p: Tensor, q: Tensor, drafts: Tensor, trees: Trees, u_accept: Tensor, u_sample: Tensor) -> Verdict:
    """Recursive rejection down the tree: p, q [R, V], drafts [R], u_accept, u_sample float64 [R], see `verify`.

    A draft whose q is no distribution or cannot have produced it is passed over, which is exact whatever it was. The
    verdict is that of `match_trees`. One loop for all requests; there is no copy to the host.
    """
    usable = is_distribution(q)
    node, child = trees.row_start, trees.first_child[trees.row_start]  # [B]
    left = p[node]  # [B, V] what is left of the target's distribution at this node
    for _ in range(trees.tests):
        x, q_row = drafts[child].clamp(min=0)[:, None], q[child]
        p_x, q_x = left.gather(-1, x)[:, 0], q_row.gather(-1, x)[:, 0]
        judged = (child >= 0) & usable[child] & (q_x > 0)
        kept = judged & (u_accept[child] * q_x < p_x)
        residual = (left - q_row).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        # A residual of zeros means p = q up to rounding, where a rejection had no chance; p itself is right then.
        left = torch.where((judged & ~kept)[:, None] & (total > 0), residual / total, left)
        left = torch.where(kept[:, None], p[torch.where(kept, child + 1, 0)], left)
        node = torch.where(kept, child + 1, node)
        following = torch.where(kept, trees.first_child[node], trees.next_sibling[child])
        child = torch.where(child >= 0, following, child)
    return Verdict(node - trees.row_start, sample(left, u_sample[node]))
