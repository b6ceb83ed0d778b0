"""From the logits of a step to the tokens of each row: the one place where sampling and verification meet.

A row with n drafts has 1 + n logits rows. Position j's target distribution is what the ordinary sampler would use
there, with the row's first j drafts appended to the history; plain decoding is the case n = 0. So no sampling
parameter can mean something else under speculation.

Knows: how to line up requests, histories, random numbers and logits rows. Does not know: how drafts were made, what
happens to the tokens afterwards. Taught in notebook 11 (lossless).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minispec.core import Row, TokenLogprob
from minispec.sampling.distribution import (
    LogitRow,
    bad_rows,
    needs_processing,
    probabilities,
    process_logits,
    sample,
    token_logprobs,
)
from minispec.sampling.rejection import is_distribution, verify, verify_ids
from minispec.sampling.rng import Purpose, uniforms


@dataclass(frozen=True)
class Outcome:
    """What one row brought: `accepted` drafts kept, then one token of the target's own.

    `failed` means that a row defines no distribution (not finite, or every token forbidden): the request must end.
    `broken` means that the draft that was dropped came with a q that is no distribution.
    """

    accepted: int
    tokens: list[int]
    logprobs: list[TokenLogprob]
    failed: bool = False
    broken: bool = False


@torch.inference_mode()
def choose_tokens(logits: torch.Tensor, rows: Sequence[Row], verification: str = "rejection") -> list[Outcome]:
    """Sample and verify all rows of a step at once.

    logits: [R, V] float32, the rows' positions in order (1 + number of drafts each). verification: see
    `SpeculativeConfig`. With "match" every position is sampled with the random number that plain decoding uses there,
    so a seeded request gets the tokens that it gets without speculation.
    """
    device = logits.device
    num_drafts = np.array([len(row.drafts) for row in rows])
    row_start = np.cumsum(num_drafts + 1) - (num_drafts + 1)  # [B] first logits row of each request
    drafts = torch.tensor([t for row in rows for t in (*row.drafts, -1)], device=device)  # [R]; -1: bonus row
    starts, counts = torch.as_tensor(row_start, device=device), torch.as_tensor(num_drafts, device=device)

    processed, q = process_logits(logits, _histories(rows)), None
    if all(row.request.params.greedy for row in rows):
        verdict = verify_ids(processed.argmax(dim=-1), drafts, starts, counts)
    else:
        p = probabilities(processed, [row.request.params for row in rows for _ in range(row.num_logits)])  # [R, V]
        u_accept, u_sample = (torch.as_tensor(_uniforms(rows, purpose), device=device) for purpose in _VERIFY_PURPOSES)
        if verification == "match":
            verdict = verify_ids(sample(p, u_sample), drafts, starts, counts)
        else:
            q = _draft_distributions(rows, drafts, p)
            verdict = verify(p, q, drafts, starts, counts, u_accept, u_sample)

    stops = starts + verdict.accepted
    broken = torch.zeros_like(stops, dtype=torch.bool) if q is None else ~is_distribution(q[stops])
    broken &= stops < starts + counts  # a bonus row has no draft
    bad, broken = bad_rows(processed).tolist(), broken.tolist()
    accepted, next_ids = verdict.accepted.tolist(), verdict.next_ids.tolist()
    outcomes = []
    for b, row in enumerate(rows):
        tokens = [*row.drafts[: accepted[b]], next_ids[b]]
        failed = any(bad[row_start[b] : row_start[b] + len(tokens)])
        outcomes.append(Outcome(accepted[b], tokens, _logprobs(logits, row, row_start[b], tokens), failed, broken[b]))
    return outcomes


def _draft_distributions(rows: Sequence[Row], drafts: torch.Tensor, p: torch.Tensor) -> torch.Tensor | None:
    """q [R, V] in the order of `drafts` [R]; None when no draft was drawn by chance. Bonus rows hold anything."""
    if all(row.q is None for row in rows):
        return None
    q = torch.zeros_like(p).scatter_(-1, drafts.clamp(min=0)[:, None], 1.0)  # one-hot where chosen without chance
    start = 0
    for row in rows:
        if row.q is not None:
            q[start : start + len(row.drafts)] = row.q
        start += row.num_logits
    return q


_VERIFY_PURPOSES = (Purpose.ACCEPT, Purpose.SAMPLE)


def _histories(rows: Sequence[Row]) -> list[LogitRow | None]:
    """One entry per logits row; None where the parameters leave the logits alone."""
    histories: list[LogitRow | None] = []
    for row in rows:
        request = row.request
        if not needs_processing(request.params):
            histories += [None] * row.num_logits
            continue
        for j in range(row.num_logits):
            output = request.output + row.drafts[:j]
            histories.append(LogitRow(request.params, request.prompt, output, request.stop_ids))
    return histories


def _uniforms(rows: Sequence[Row], purpose: Purpose) -> np.ndarray:
    """[R] random numbers, keyed by the request's seed and the position of the token being chosen."""
    seeds = np.array([row.request.seed for row in rows for _ in range(row.num_logits)], dtype=np.uint64)
    positions = np.array([len(row.request.tokens) + j for row in rows for j in range(row.num_logits)])
    return uniforms(seeds, positions, purpose)


def _logprobs(logits: torch.Tensor, row: Row, start: int, tokens: list[int]) -> list[TokenLogprob]:
    top = row.request.params.logprobs
    if top is None:
        return []
    ids = torch.tensor(tokens, device=logits.device)
    chosen, top_ids, top_values = token_logprobs(logits[start : start + len(tokens)], ids, top)
    return [
        TokenLogprob(value, dict(zip(ids_at, values_at, strict=True)))
        for value, ids_at, values_at in zip(chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    ]
