"""Which draft tokens stay, and which token follows them: exact for every target distribution p.

One forward judges a run of drafts. Request b owns num_drafts[b] + 1 rows from row_start[b] on. Row j of them holds
p of the token after the first j drafts, so it judges draft j; the last row has no draft and is the bonus row.

    requests        b=0: drafts 7, 9     b=1: no draft     b=2: draft 4
    rows            0     1     2        3                 4     5
    drafts [R]      7     9    -1       -1                 4    -1       -1 in a bonus row
    row_start [B]   0                    3                 4
    num_drafts [B]  2                    0                 1

If row 0 keeps draft 7 and row 1 rejects draft 9, request 0 has accepted 1 and its next token comes from row 1, so the
step yields two tokens. A request without drafts is ordinary sampling by the same call.

Two rules, both exact. `verify` weighs p against q: Leviathan et al. 2023, section 2.3 and appendix A.1; Chen et al.
2023, algorithm 2. `verify_ids` lets the target choose first and keeps drafts that say the same: with argmaxes for
greedy decoding, with samples of p for "sample and match".

Knows: p, q, drafts and uniforms. Does not know: logits, sampling parameters, who drafted.
Taught in notebooks 09 (guess and verify) and 11 (lossless).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minispec.sampling.distribution import sample


class Verdict(NamedTuple):
    """accepted [B]: leading draft tokens kept. next_ids [B]: the correction, or the bonus if all were kept. int64."""

    accepted: Tensor
    next_ids: Tensor


def verify_ids(target_ids: Tensor, drafts: Tensor, row_start: Tensor, num_drafts: Tensor) -> Verdict:
    """Keep drafts while they equal what the target chose: target_ids [R], drafts [R], row_start [B], num_drafts [B].

    Whatever was drafted, the tokens that come out are target_ids of their rows: drafts only say how many at once.
    """
    stop = _first_stop(target_ids == drafts, row_start, num_drafts)
    return Verdict(stop - row_start, target_ids[stop])


def verify(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    row_start: Tensor,
    num_drafts: Tensor,
    u_accept: Tensor,
    u_sample: Tensor,
) -> Verdict:
    """Keep draft x with probability min(1, p(x) / q(x)); at the first rejection sample from max(p - q, 0) normalised.

    p [R, V]: target distributions. q [R, V]: the distributions that the drafts were really drawn from (filtered like
    p or not, it need not be p's family), bonus rows ignored; None: each draft was chosen without chance, so its q is
    one-hot. drafts [R] below V, row_start [B], num_drafts [B]: see above. u_accept, u_sample: float64 [R], independent
    uniforms in [0, 1) of each row's position. Nothing is changed in place; there is no copy to the host.

    A draft that is no token (-1), or whose q row is no distribution (NaN, negative, wrong sum) or cannot have produced
    it (q(x) = 0), is dropped and p is sampled instead, which is exact whatever the draft was. All next_ids are below V.
    """
    x = drafts.clamp(min=0)[:, None]  # [R, 1] bonus rows point at some token, the answer is not used
    p_x = p.gather(-1, x)[:, 0]
    if q is None:
        valid = drafts >= 0
        q_x = torch.ones_like(p_x)
    else:
        q_x = q.gather(-1, x)[:, 0]
        valid = is_distribution(q) & (q_x > 0) & (drafts >= 0)
    # A product, not the ratio p / q, so that nothing divides by 0; strict, so that p(x) = 0 is never accepted.
    stop = _first_stop(valid & (u_accept * q_x < p_x), row_start, num_drafts)
    rejected = valid[stop] & (stop < row_start + num_drafts)
    return Verdict(stop - row_start, sample(_next_distribution(p[stop], q, x, stop, rejected), u_sample[stop]))


def is_distribution(q: Tensor) -> Tensor:
    """bool [R]: which rows of q [R, V] hold no negative number and add up to one. A NaN fails both."""
    return (q.amin(-1) >= 0) & ((q.sum(-1) - 1).abs() < 1e-3)


def _first_stop(kept: Tensor, row_start: Tensor, num_drafts: Tensor) -> Tensor:
    """[B] the first row of each request whose draft is not kept (kept: bool [R]); the bonus row if all are.

    The answer for every row at once is a running minimum from the back. It cannot run into the next request,
    because a bonus row always stops.
    """
    num_rows = kept.shape[0]
    rows = torch.arange(num_rows, device=kept.device)
    stops = torch.where(kept, num_rows, rows)
    bonus = row_start + num_drafts
    stops[bonus] = bonus
    return stops.flip(0).cummin(0).values.flip(0)[row_start]


def _next_distribution(p: Tensor, q: Tensor | None, x: Tensor, stop: Tensor, rejected: Tensor) -> Tensor:
    """[B, V] what to sample at the stop rows: the residual where a draft was rejected, p [B, V] elsewhere.

    A residual of zeros means p = q up to rounding, where a rejection had no chance; p itself is right then.
    """
    residual = p.scatter(-1, x[stop], 0.0) if q is None else (p - q[stop]).clamp_(min=0)
    total = residual.sum(-1, keepdim=True)
    return torch.where(rejected[:, None] & (total > 0), residual / total, p)
