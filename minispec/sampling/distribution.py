"""From logits to the target distribution p, and from p to a token.

    raw logits --process_logits--> logits --probabilities--> p --sample--> token id
        penalties, bias, min_tokens,   temperature, top_k, top_p, min_p
        grammar

Every row is one position of one request and is treated by itself: the same logits, parameters and history give
the same bits of p in any batch. A row inside a drafted run is an ordinary row whose history includes the draft
tokens before it, so speculation cannot change what a parameter means.

Knows: SamplingParams, one row's history. Does not know: requests, drafts, random generators.
Taught in notebook 11 (lossless).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minispec.config import SamplingParams
from minispec.device import upload

# Tokens looked at first for top_p on a CPU: sorting a whole vocabulary costs ten times as much and is rarely needed.
# A GPU sorts it at once: sooner than the host learns whether fewer were enough.
NUCLEUS_WIDTH = 1024

# Limits that keep a division by the temperature finite in float32.
_COLDEST, _HOTTEST = 1e-37, 1e37

# Probabilities are summed in whole units of this, see `sample`.
_UNITS = 2.0**50


@dataclass(frozen=True)
class LogitRow:
    """What the logits of one position depend on besides the model.

    output: committed output tokens and then the draft tokens before this position, each once.
    stop_ids: ids that may not be chosen before params.min_tokens output tokens. allowed: bool [V], by the grammar.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    stop_ids: frozenset[int] = frozenset()
    allowed: Tensor | None = None


def needs_processing(params: SamplingParams) -> bool:
    """True when `process_logits` can change a row with these parameters, so that it must know the row's history."""
    penalty = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalty or bool(params.logit_bias) or params.min_tokens > 0 or params.grammar is not None


def process_logits(logits: Tensor, rows: Sequence[LogitRow | None]) -> Tensor:
    """Apply penalties, logit_bias, the min_tokens mask and the grammar: float32 [R, V], R rows -> [R, V].

    A row given as None, or whose parameters need nothing, stays as it is. The input is never written to (the raw
    logits still serve for logprobs); it is returned itself when no row needs a change. logit_bias ids must be < V.
    """
    todo = [(r, row) for r, row in enumerate(rows) if row is not None and needs_processing(row.params)]
    if not todo:
        return logits
    logits = logits.clone()
    for r, row in todo:
        _process_row(logits[r], row)
    return logits


def _process_row(x: Tensor, row: LogitRow) -> None:
    """Change the logits x [V] of one position in place."""
    params = row.params
    if params.repetition_penalty != 1:  # Keskar et al. 2019 (CTRL), section 4.1, with a sign rule for logits below 0
        seen = _index(set(row.prompt).union(row.output), x)
        factor = params.repetition_penalty
        x[seen] = torch.where(x[seen] > 0, x[seen] / factor, x[seen] * factor)
    if row.output and (params.presence_penalty != 0 or params.frequency_penalty != 0):
        times = Counter(row.output)
        ids, counts = _index(times, x), _index(times.values(), x)
        x[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        x[_index(params.logit_bias, x)] += _index(params.logit_bias.values(), x, np.float32)
    if len(row.output) < params.min_tokens:
        # A tokenizer may name end tokens that the model has no logit for; a negative id must not wrap around.
        x[_index([i for i in row.stop_ids if 0 <= i < x.shape[0]], x)] = -torch.inf
    if row.allowed is not None:
        x.masked_fill_(~row.allowed, -torch.inf)


def _index(numbers: Iterable[float], x: Tensor, dtype: type = np.int64) -> Tensor:
    """Numbers of the host, where x is."""
    return upload(x.device, np.array(list(numbers), dtype=dtype))[0]


def bad_rows(logits: Tensor) -> Tensor:
    """bool [R]: rows [R, V] that define no distribution, because of a NaN, a +inf, or nothing above -inf."""
    return ~torch.isfinite(logits.amax(-1))  # amax passes a NaN on


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that each row samples from: processed logits float32 [R, V], R params -> p float32 [R, V].

    Order: temperature, top_k, top_p, min_p; each works on what the one before left, renormalised. Rows sum to 1.
    temperature 0 gives exactly 1 at the first largest logit and 0 elsewhere. Exactly top_k tokens stay; equal logits
    stay in order of id. top_p keeps the fewest likeliest tokens whose sum reaches it, min_p the tokens at least
    min_p times as likely as the likeliest. Only rows with top_k or top_p are sorted.

    top_p is from Holtzman et al. 2020, section 3.1; min_p from Nguyen et al. 2024, section 3.
    """
    vocab = logits.shape[-1]
    temperature = np.array([p.temperature or 1.0 for p in params]).clip(_COLDEST, _HOTTEST)
    min_p = np.array([p.min_p for p in params], dtype=np.float32)
    cut = [r for r, p in enumerate(params) if not p.greedy and (0 < p.top_k < vocab or p.top_p < 1)]
    greedy = [r for r, row in enumerate(params) if row.greedy]
    rows = (np.array(numbers, dtype=np.int64) for numbers in (cut, greedy))
    temperature, min_p, cut_rows, greedy_rows = upload(logits.device, temperature, min_p, *rows)
    # Subtract the maximum first: 1e4 / 1e-37 overflows, 0 / 1e-37 does not.
    x = (logits - logits.amax(-1, keepdim=True)).div_(temperature.to(logits.dtype)[:, None])
    if cut:
        x.index_copy_(0, cut_rows, _truncate(x[cut_rows], [params[r] for r in cut]))
    if any(p.min_p > 0 for p in params):
        # The likeliest token has x = 0, so p / max(p) = exp(x).
        x.masked_fill_(x < min_p.log()[:, None], -torch.inf)
    p = x.softmax(-1)
    if greedy:
        best = logits[greedy_rows].argmax(-1, keepdim=True)
        p.index_copy_(0, greedy_rows, torch.zeros_like(p[greedy_rows]).scatter_(-1, best, 1.0))
    return p


def _truncate(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set what top_k and top_p drop to -inf: x [F, V] scaled logits with maximum 0 -> [F, V]."""
    vocab = x.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    nucleus = NUCLEUS_WIDTH if x.device.type == "cpu" else vocab
    width = max(min(k, nucleus) if k == vocab else k for k in top_k)
    k, top_p = upload(x.device, np.array(top_k)[:, None], np.array([p.top_p for p in params])[:, None])  # [F, 1]
    kept, complete = _keep_likeliest(x, k, top_p, width)
    if max(top_k) > width and not complete.all():
        flat = ~complete  # so flat that top_p reaches past `width` tokens
        kept[flat], _ = _keep_likeliest(x[flat], k[flat], top_p[flat], vocab)
    return kept


def _keep_likeliest(x: Tensor, k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`_truncate` among the `width` likeliest tokens; also bool [F]: was that wide enough for the row?

    The result of a row does not depend on `width` once it is wide enough: equal logits are told apart by id, and
    sums run from the likeliest token on.
    """
    keys = _sort_keys(x)
    keys = keys.sort(-1).values if width == x.shape[-1] else keys.topk(width, largest=False).values  # [F, width]
    ids = keys & 0xFFFFFFFF
    values = x.gather(-1, ids)  # descending
    weights = values.exp()
    upto = weights.cumsum(-1, dtype=torch.float64)
    # What top_p is a share of: the k likeliest tokens, or all.
    of_all = x.exp().sum(-1, keepdim=True, dtype=torch.float64)
    total = torch.where(k <= width, upto.gather(-1, k.clamp(max=width) - 1), of_all)  # [F, 1]
    rank = torch.arange(width, device=x.device)
    keep = (rank < k) & ((upto - weights < top_p * total) | (top_p == 1))
    complete = (k <= width) | (upto[:, -1:] >= top_p * total)
    kept = torch.full_like(x, -torch.inf).scatter_(-1, ids, values.masked_fill_(~keep, -torch.inf))
    return kept, complete[:, 0]


def _sort_keys(x: Tensor) -> Tensor:
    """int64 [F, V], ascending = likeliest first, equal logits by id; the id is in the low 32 bits. Needs x <= 0.

    The bits of floats of one sign order like integers, so |x| on top and the id below make every key unique.
    """
    return (x.abs().view(torch.int32).long() << 32) | torch.arange(x.shape[-1], device=x.device)


def sample(p: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: p [R, V] with rows that sum to 1, u float64 [R] in [0, 1) -> ids int64 [R].

    The chosen token is the first whose cumulative probability is greater than u; it never has probability 0.
    Sums are taken in whole units of 2**-50: integers add up to the same in any order, so a parallel sum on a GPU
    gives the CPU's result, and a token of probability 0 has a width of exactly 0. A row with NaN gives some valid id.
    """
    edges = (p * _UNITS).long().cumsum(-1)  # [R, V]
    aim = (u[:, None] * edges[:, -1:]).long()  # [R, 1], below the last edge because u <= 1 - 2**-53
    return torch.searchsorted(edges, aim, right=True)[:, 0].clamp_(max=p.shape[-1] - 1)


def token_logprobs(raw_logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under the raw logits [R, V], before any sampling parameter is applied.

    Returns (of ids [R]: float32 [R], the `top` likeliest ids: int64 [R, top], theirs: float32 [R, top]).
    """
    logits = raw_logits.float()
    norm = logits.logsumexp(-1, keepdim=True)  # [R, 1]
    best = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return (logits.gather(-1, ids[:, None]) - norm)[:, 0], best.indices, best.values - norm
