"""Exercises of notebooks 09 to 12 and 14: guessing, verifying, and making a head that guesses.

Knows: what a right answer does. Does not know: how to solve anything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minispec.config import SamplingParams
from minispec.core import Request
from minispec.course.check.judge import Case, judge
from minispec.course.check.toys import MODELS
from minispec.kv.pool import KVPool
from minispec.metrics import SpeculationCounts
from minispec.models.config import ModelConfig
from minispec.models.mtp import MTPModule
from minispec.sampling.distribution import sample
from minispec.sampling.rejection import verify_ids
from minispec.sampling.rng import Purpose, uniforms

# 09 Guess and verify -----------------------------------------------------------------------------------------------


def nb09_ex1(expected_tokens: Callable[[float, int], float]) -> None:
    """(chance a that a guess is right, guesses k) -> mean tokens of one forward, the target's own included."""
    sizes = [(0.5, 0), (0.5, 1), (0.0, 3), (1.0, 3), (0.8, 4), (0.62, 7)]
    judge("exercise 1", expected_tokens, [Case((a, k), float(sum(a**j for j in range(k + 1)))) for a, k in sizes])


def nb09_ex2(verified: Callable[[list[int], list[int], int], list[int]]) -> None:
    """(drafts, the target's choice at each of len(drafts) + 1 rows, end token) -> tokens that join the text."""
    rng, cases = random.Random(0), []
    for number in range(50):
        drafts = [rng.randrange(4) for _ in range(number // 10)]
        chosen = [token if rng.random() < 0.7 else rng.randrange(4) for token in drafts] + [rng.randrange(4)]
        ids, row_start, num_drafts = torch.tensor([*drafts, -1]), torch.tensor([0]), torch.tensor([len(drafts)])
        accepted, next_ids = verify_ids(torch.tensor(chosen), ids, row_start, num_drafts)
        tokens = drafts[: accepted.item()] + next_ids.tolist()
        cases.append(Case((drafts, chosen, 0), tokens[: tokens.index(0) + 1] if 0 in tokens else tokens))
    judge("exercise 2", verified, cases)


# 10 The MTP head ---------------------------------------------------------------------------------------------------

Pair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def nb10_ex1(pair: Pair, agreement: Callable[[Pair], float]) -> None:
    """pair(embedded [N, H], hidden [N - 1, H]) -> the rows that the module reads; agreement(pair) measures them."""

    @functools.wraps(pair)
    def measured() -> str:
        share = agreement(pair)
        return "above 0.3" if share > 0.3 else f"agreement {share:.2f}"

    judge("exercise 1", measured, [Case((), "above 0.3", "rows of real answers")])


def nb10_ex2(by_depth: Callable[[list[tuple[int, int]]], list[float]]) -> None:
    """(drafted, accepted) of each verification -> share kept at depth 1, 2, ...; later drafts count as not kept."""
    rng, cases = random.Random(0), []
    for length in range(1, 51):
        counts, trace = SpeculationCounts(), []
        for _ in range(length):
            drafted = rng.randint(1, 1 + length % 4)
            trace.append((drafted, rng.randint(0, drafted)))
            counts.record(*trace[-1], emitted=trace[-1][1] + 1)
        cases.append(Case((trace,), counts.acceptance_by_position))
    judge("exercise 2", by_depth, cases)


# 11 Lossless -------------------------------------------------------------------------------------------------------


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's test: the chance that draws from p [V] (no zeros) give counts [V] as far from p as these or farther."""
    expected = counts.sum() * p.double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(p) - 1) / 2).double(), statistic / 2).item()


def nb11_ex1(residual: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """(p, q) of shape [V] or [R, V] -> what replaces a rejected draft; p where p = q, for then none is rejected."""
    one = [0.75, 0.25], [0.25, 0.75], [1.0, 0.0]
    two = [0.5, 0.5, 0.0], [0.125, 0.25, 0.625], [0.6, 0.4, 0.0]
    same = [0.125, 0.5, 0.375], [0.125, 0.5, 0.375], [0.125, 0.5, 0.375]
    rows = [list(pair) for pair in zip(two, same, strict=True)]
    cases = [Case((torch.tensor(p), torch.tensor(q)), rest, f"{p}, {q}") for p, q, rest in (one, two, same, rows)]
    judge("exercise 1", residual, cases)


Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def nb11_ex2(shortcut: Rule, speculate: Rule) -> None:
    """Rules (p [R, V], q [R, V], drafts [R], u_accept [R], u_sample [R]) -> tokens [R]: one wrong, one exact."""
    p, q = torch.tensor([[8, 4, 1, 6, 2, 5, 4, 2], [3, 10, 2, 6, 1, 1, 8, 1]]) / 32
    numbers = [torch.from_numpy(uniforms(np.arange(20_000), 0, purpose)) for purpose in Purpose]
    u_sample, u_accept, u_draft, _ = numbers
    p_rows, q_rows = (t.expand(len(u_draft), -1) for t in (p, q))
    drafts = sample(q_rows, u_draft)

    def tested(rule: Rule, least_kept: float) -> Callable[[], str]:
        @functools.wraps(rule)
        def verdict() -> str:
            tokens = rule(p_rows, q_rows, drafts.clone(), u_accept, u_sample)
            if (tokens == drafts).double().mean() < least_kept:
                return "too few drafts kept"
            chance = chi_square(torch.bincount(tokens, minlength=len(p)), p)
            return "p" if chance > 0.01 else "not p" if chance < 1e-3 else "perhaps p"

        return verdict

    least_kept = torch.minimum(p, q).sum().item() - 0.02
    judge("exercise 2, shortcut", tested(shortcut, 0), [Case((), "not p", "20,000 draws")])
    judge("exercise 2, speculate", tested(speculate, least_kept), [Case((), "p", "20,000 draws")])


# 12 Speculation inside the engine ----------------------------------------------------------------------------------


def nb12_ex1(rewind: Callable[[list[int], int, int, int], tuple[int, list[int], list[int]]]) -> None:
    """(pages held, page size, tokens before, drafts kept) -> kv_len, pages that stay, pages that can be given back."""
    rng, cases = random.Random(0), []
    for number in range(200):
        page_size, before, drafts = rng.choice([1, 4, 4, 16]), rng.randint(1, 4 + number), rng.randint(0, 8)
        pool = KVPool(1024, page_size, num_rows=1, max_len=256)
        request = Request("toy", [0] * before, SamplingParams(), seed=0, max_len=256)
        pool.admit(request)
        pool.reserve(request, before + drafts)
        pages, free, kept = pool.slots(request)[::page_size] // page_size, pool.num_free_pages, rng.randint(0, drafts)
        request.tokens += [0] * (kept + 1)
        pool.trim(request)
        back = pool.allocator.free_pages[: pool.num_free_pages - free]
        result = [len(request.tokens) - 1, pages[: request.num_pages].tolist(), back.tolist()]
        cases.append(Case((pages.tolist(), page_size, before, kept), result))
    judge("exercise 1", rewind, sorted(cases, key=lambda case: len(case.args[0])))


MOST_GUESSES, SHARED_ROWS = 4, 8
TRACES = {"all right": [True] * 400, "all wrong": [False] * 400, "changing": ([True] * 50 + [False] * 50) * 4}


def rows_spent(right: Sequence[bool], choose: Callable[[list[tuple[int, int]]], int]) -> int:
    """What it costs to write len(right) tokens. right[i]: a guess of token i would be right, if those before it were.

    `choose` says how many guesses the next forward gets, from the (guesses, kept) of all forwards before. A forward
    costs 1 row and 1 more for each guess, and as much as SHARED_ROWS rows whatever is in it.
    """
    history, written, spent = [], 0, 0
    while written < len(right):
        guesses = min(max(choose(list(history)), 0), MOST_GUESSES)
        results = [*right[written : written + guesses], False]
        history.append((guesses, results.index(False)))
        written += results.index(False) + 1
        spent += SHARED_ROWS + 1 + guesses
    return spent


def nb12_ex2(choose: Callable[[list[tuple[int, int]]], int]) -> None:
    """choose(history) -> guesses of the next forward: on each trace at most 1.1 times the rows of the best fixed K."""

    @functools.wraps(choose)
    def against_best(name: str) -> str:
        best = min(rows_spent(TRACES[name], lambda _, k=k: k) for k in range(MOST_GUESSES + 1))
        factor = rows_spent(TRACES[name], choose) / best
        return "at most 1.1" if factor <= 1.1 else f"{factor:.2f} times the best"

    judge("exercise 2", against_best, [Case((name,), "at most 1.1") for name in TRACES])


# 14 How the head was made ------------------------------------------------------------------------------------------


def nb14_ex1(trained_numbers: Callable[[ModelConfig], int]) -> None:
    """Numbers of an MTP module, from the target's config."""
    modules = {name: MTPModule(model, device="meta") for name, model in MODELS.items()}
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    judge("exercise 1", trained_numbers, [Case((MODELS[name],), count, name) for name, count in counts.items()])


def nb14_ex2(two_depths: Callable[[Callable, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """(module, embedded [N, H], hidden [N, H]) -> hidden' of depth 1 [N - 1, H] and of depth 2 [N - 2, H]."""

    def module(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return 10 * hidden + embedded  # so each number shows by its digits what it was made of

    cases = []
    for n in (3, 4, 6):
        embedded, hidden = torch.arange(n)[:, None] + 1.0, torch.arange(n)[:, None] + 4.0
        first = module(embedded[1:], hidden[:-1])
        second = module(embedded[2:], first[:-1])
        shown = f"module, {embedded.tolist()}, {hidden.tolist()}"
        cases.append(Case((module, embedded, hidden), [first.tolist(), second.tolist()], shown))
    judge("exercise 2", two_depths, cases)
