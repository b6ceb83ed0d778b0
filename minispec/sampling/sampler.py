"""From the logits of a step to the tokens of each row: the one place where sampling and verification meet.

A row with n drafts has 1 + n logits rows. The target distribution of each is what the ordinary sampler would use
there, with the drafts that lead there appended to the history (in a chain, the first j at row j); plain decoding is the
case n = 0. So no sampling parameter can mean something else under speculation.

Knows: how to line up requests, histories, random numbers and logits rows. Does not know: how drafts were made, what
happens to the tokens afterwards. Taught in notebook 11 (lossless).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minispec.core import Row, TokenLogprob, known_tokens
from minispec.device import download, upload
from minispec.sampling.distribution import (
    LogitRow,
    bad_rows,
    needs_processing,
    probabilities,
    process_logits,
    sample,
    token_logprobs,
)
from minispec.sampling.rejection import Verdict, is_distribution, verify, verify_ids
from minispec.sampling.rng import Purpose, uniforms
from minispec.sampling.trees import Trees, match_trees, verify_trees


@dataclass(frozen=True)
class Outcome:
    """What one row brought: the drafts of `path` (their numbers, in order), then one token of the target's own.

    `failed` means that the logits behind the accepted drafts define no distribution (not finite, or every token
    forbidden): there is no further token, and the request must end.
    `broken` means that the draft that was dropped came with a q that is no distribution, or that a draft is no token.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprob]
    failed: bool = False
    broken: bool = False


class Judged(NamedTuple):
    """What was decided about the rows of a step, B rows and R logits rows, on the logits' device."""

    last: torch.Tensor  # int64 [B] the last logits row that counts; in a chain, the number of drafts kept
    next_ids: torch.Tensor  # int64 [B]
    bad: torch.Tensor  # bool [R], no distribution
    broken: torch.Tensor  # bool [B]
    drafts: torch.Tensor  # int64 [R], -1 where there is none
    logprobs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # of rows that want them, see token_logprobs
    carried: torch.Tensor  # next_ids on the logits' device, whatever becomes of the others

    def to_host(self) -> Judged:
        """All of it in host memory, but what the next step may read on the device; see `download`."""
        return Judged(*download(*self[:5]), [tuple(download(*each)) for each in self.logprobs], self.carried)


@torch.inference_mode()
def judge(
    logits: torch.Tensor, rows: Sequence[Row], verification: str = "rejection", known: torch.Tensor | None = None
) -> Judged:
    """Sample and verify all rows of a step at once, without waiting for the device.

    logits: [R, V] float32, the rows' positions in order (1 + number of drafts each). verification: see
    `SpeculativeConfig`. With "match" every position is sampled with the random number that plain decoding uses there,
    so a seeded request gets the tokens that it gets without speculation. In a tree whose drafts were chosen without
    chance "rejection" is the same: to reject them one after the other is to ask whether a sample of p is among them.
    known: see `Step.known`.
    """
    row_start, num_drafts = _places(rows)
    trees = Trees.of([row.lineage for row in rows], logits.device) if any(row.parents for row in rows) else None
    drafts = np.array([t for row in rows for t in (*row.drafts, -1)])  # [R]; -1: bonus row
    greedy = all(row.request.params.greedy for row in rows)
    random = [] if greedy else _uniforms(rows, row_start, trees)
    drafts, starts, counts, *random = upload(logits.device, drafts, row_start, num_drafts, *random)
    drafts = known_tokens(drafts, known)

    processed, q = process_logits(logits, _histories(rows)), None
    if greedy:
        verdict = _match(processed.argmax(dim=-1), drafts, starts, counts, trees)
    else:
        p = probabilities(processed, [row.request.params for row in rows for _ in range(row.num_logits)])  # [R, V]
        u_accept, u_sample = random
        if verification != "match":
            q = _draft_distributions(rows, drafts, p)
        if verification == "match" or (trees and q is None):
            verdict = _match(sample(p, u_sample), drafts, starts, counts, trees)
        elif trees:
            verdict = verify_trees(p, q, drafts, trees, u_accept, u_sample)
        else:
            verdict = verify(p, q, drafts, starts, counts, u_accept, u_sample)

    stops = starts + verdict.accepted
    dropped = trees.first_child[stops] if trees else torch.where(stops < starts + counts, stops, -1)  # [B] its row
    broken = torch.zeros_like(stops, dtype=torch.bool) if q is None else (dropped >= 0) & ~is_distribution(q[dropped])
    if trees:
        chosen = trees.chosen(drafts, stops, verdict.next_ids)
    else:
        chosen = drafts.clamp(min=0).index_copy(0, stops, verdict.next_ids)  # [R] the token that each row ends up with
    logprobs = [
        token_logprobs(logits[start : start + row.num_logits], chosen[start : start + row.num_logits], top)
        for row, start in zip(rows, row_start, strict=True)
        if (top := row.request.params.logprobs) is not None
    ]
    return Judged(*verdict, bad_rows(processed), broken, drafts, logprobs, verdict.next_ids)


def outcomes(judged: Judged, rows: Sequence[Row]) -> list[Outcome]:
    """What was decided, as plain numbers, and `Row.drafts` too. Waits for the device if `judged` is still there."""
    row_start, num_drafts = _places(rows)
    last, next_ids, bad, broken, drafts = (column.tolist() for column in judged[:5])
    logprobs, result = iter(judged.logprobs), []
    for b, row in enumerate(rows):
        row.drafts = drafts[row_start[b] : row_start[b] + num_drafts[b]]
        path = row.path(last[b] - 1)
        failures = [bad[row_start[b] + 1 + draft] for draft in (-1, *path)]  # of the logits rows that chose the tokens
        failed = True in failures  # what a bad row says about its draft does not count
        path = path[: failures.index(True)] if failed else path
        tokens = [row.drafts[draft] for draft in path] + ([] if failed else [next_ids[b]])
        of_row = _logprobs(*next(logprobs)) if row.request.params.logprobs is not None else []
        of_tokens = [of_row[1 + draft] for draft in (-1, *path) if of_row][: len(tokens)]
        result.append(Outcome(path, tokens, of_tokens, failed, broken[b] or -1 in row.drafts))
    return result


def _match(
    target_ids: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, trees: Trees | None
) -> Verdict:
    return match_trees(target_ids, drafts, trees) if trees else verify_ids(target_ids, drafts, starts, counts)


def _places(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """[B] first logits row of each request, [B] its drafts."""
    num_drafts = np.array([len(row.drafts) for row in rows])
    return np.cumsum(num_drafts + 1) - (num_drafts + 1), num_drafts


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


def _histories(rows: Sequence[Row]) -> list[LogitRow | None]:
    """One entry per logits row; None where the parameters leave the logits alone."""
    histories: list[LogitRow | None] = []
    for row in rows:
        request = row.request
        if not needs_processing(request.params):
            histories += [None] * row.num_logits
            continue
        for j in range(row.num_logits):
            output = request.output + [row.drafts[draft] for draft in row.path(j - 1)]
            allowed = None if row.allowed is None else row.allowed[j]
            histories.append(LogitRow(request.params, request.prompt, output, request.stop_ids, allowed))
    return histories


def _uniforms(rows: Sequence[Row], row_start: np.ndarray, trees: Trees | None) -> tuple[np.ndarray, np.ndarray]:
    """[R], [R] random numbers to keep the draft of each row and to choose what follows it.

    Keyed by the request's seed and the position of the token being chosen, and siblings of a tree by their rank.
    """
    counts = np.array([row.num_logits for row in rows])
    seeds = np.repeat(np.array([row.request.seed for row in rows], dtype=np.uint64), counts)
    ends = np.repeat(np.array([row.end for row in rows]), counts)
    if trees is None:
        positions = ends + np.arange(len(ends)) - np.repeat(row_start, counts)
        return uniforms(seeds, positions, Purpose.ACCEPT), uniforms(seeds, positions, Purpose.SAMPLE)
    positions = ends + trees.depths
    before = np.append(positions[1:] - 1, positions[-1])  # where the draft of each row lies, one before what follows it
    return uniforms(seeds, before, Purpose.ACCEPT, trees.ranks), uniforms(seeds, positions, Purpose.SAMPLE)


def _logprobs(chosen: torch.Tensor, top_ids: torch.Tensor, top_values: torch.Tensor) -> list[TokenLogprob]:
    return [
        TokenLogprob(value, dict(zip(ids_at, values_at, strict=True)))
        for value, ids_at, values_at in zip(chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    ]
