"""Exercises of notebooks 08 (overlap) and 13 (everything on).

Knows: what a right answer does; the real engine, often over a virtual clock, says it. Does not know: how to solve
anything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minispec.config import SamplingParams
from minispec.core import Request, Step
from minispec.course.check.judge import Case, judge
from minispec.course.check.toys import ToyRunner, toy_engine
from minispec.device import VirtualDevice
from minispec.engine import Engine
from minispec.speculative.drafter import Proposal
from minispec.trace import DEVICE

# 08 Overlap --------------------------------------------------------------------------------------------------------

STEADY, SLOWER = 12, 40  # steps until the clock ticks evenly; more ticks than any case asks about


class LazyDrafter:
    """Always the same guess: for questions of time, where it does not matter what is guessed."""

    name, forwards, bytes_read, weight_bytes = "lazy", 0, 0, 0

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        return Proposal([[0] * k for k in candidate_lengths])

    def release(self, request: Request) -> None:
        """Nothing is kept."""


def _period(plan: int, settle: int, advance: int, draft: int, forward: int) -> int:
    """Ticks between the starts of two forwards, in the long run, with overlap; draft 0: plain decoding."""
    dials = {"plan": plan, "settle": settle, "advance": advance, "draft": draft, "forward": forward}
    options: dict[str, Any] = {}
    if draft:
        options = {"drafters": [LazyDrafter()], "speculative_config": {"candidate_length": 1, "adaptive": False}}
    engine = toy_engine(device=VirtualDevice(dials), enable_overlap=True, enable_trace=True, **options)
    engine.add([1], SamplingParams(temperature=0, max_tokens=4 * STEADY))
    for _ in range(STEADY):
        engine.step()
    assert engine.trace is not None
    starts = [event.start for event in engine.trace.lane(DEVICE) if event.name == "forward"]
    return round(starts[-1] - starts[-2])


def nb08_ex1(period: Callable[[int, int, int, int, int], int], longest_settle: Callable[[int, int, int], int]) -> None:
    """(ticks of plan, settle, advance, draft, forward) -> ticks of a step with overlap; draft 0: plain decoding.

    (ticks of plan, advance, forward) -> the longest settle that plain decoding does not feel.
    """
    sizes = [(2, 3, 0, 0, 10), (2, 3, 0, 0, 4), (2, 3, 1, 0, 10), (2, 3, 1, 0, 5), (2, 3, 0, 4, 10), (2, 3, 1, 4, 10)]
    sizes += [(2, 9, 1, 1, 3), (0, 1, 2, 3, 1), (7, 8, 2, 0, 1)]
    judge("exercise 1, period", period, [Case(ticks, _period(*ticks)) for ticks in sizes])
    cases = []
    for plan, advance, forward in ((2, 0, 10), (2, 1, 10), (0, 3, 5), (4, 1, 5)):
        hidden = [s for s in range(SLOWER) if _period(plan, s, advance, 0, forward) == forward]
        cases.append(Case((plan, advance, forward), max(hidden)))
    judge("exercise 1, longest_settle", longest_settle, cases)


class _Counting(ToyRunner):
    """Token t is followed by t + 1, up to END, which repeats itself; keeps what each forward has brought."""

    END = 9

    def __init__(self) -> None:
        self.brought: list[dict[str, int]] = []

    @classmethod
    def next_token(cls, tokens: Sequence[int]) -> int:
        return min(tokens[-1] + 1, cls.END)

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        logits = super().forward(step, table)
        ids = logits.argmax(dim=1).tolist()
        self.brought.append({row.request.id: token for row, token in zip(step.sampled, ids, strict=True)})
        return logits


def brought(jobs: dict[str, tuple[int, int]], overlap: bool = True) -> tuple[Engine, list[dict[str, int]], list[str]]:
    """Run jobs, name -> (first token, most output tokens), over a toy model that counts up to 9 and ends there.

    Returns the engine, for each forward name -> the token that its row brought, and the names that ended with a 9.
    """
    engine, ended = toy_engine(enable_overlap=overlap, device=VirtualDevice({}), max_num_seqs=3), []
    engine.runner = _Counting()
    for name, (first, most) in jobs.items():

        def hear(event: Any, name: str = name) -> None:
            if event.finish_reason == "stop":
                ended.append(name)

        params = SamplingParams(temperature=0, max_tokens=most, stop_token_ids=[_Counting.END])
        engine.add([first], params, request_id=name, on_token=hear)
    while engine.has_work:
        engine.step()
    return engine, engine.runner.brought, ended


def nb08_ex2(settle: Callable[[list[dict[str, int]], int], tuple[dict[str, list[int]], list[str], int]]) -> None:
    """(for each forward: name -> token that it brought, end token) -> name -> its tokens, names ended, wasted rows."""
    runs: list[dict[str, tuple[int, int]]] = [{"A": (6, 2)}, {"A": (7, 9)}, {"A": (5, 9), "B": (7, 9)}]
    runs += [{"A": (8, 1), "B": (8, 9), "C": (1, 4)}]
    runs += [{name: ((size * n) % 9, 2 + n % 5) for n, name in enumerate("ABCDEFG"[:size])} for size in range(3, 8)]
    cases = []
    for jobs in runs:
        engine, steps, ended = brought(jobs)
        normal, kept, _ = brought(jobs, overlap=False)
        outputs = {name: [step[name] for step in kept if name in step] for name in jobs}
        wasted = engine.metrics.computed_tokens - normal.metrics.computed_tokens
        cases.append(Case((steps, _Counting.END), [outputs, ended, wasted]))
    judge("exercise 2", settle, cases)


# 13 Everything on --------------------------------------------------------------------------------------------------

Ladder = list[tuple[str, int, int]]


def nb13_ex1(rank: Callable[[Ladder, int], list[str]]) -> None:
    """(ladder: name, forwards, rows; price of a forward in rows) -> names without the first, what saves most first."""
    cases: list[tuple[Ladder, int]] = [([("plain", 30, 40), ("batching", 10, 40)], 20)]
    cases += [([("plain", 30, 40), ("A", 20, 38), ("B", 19, 26)], shared) for shared in (20, 1)]
    cases += [([("plain", 30, 40), ("A", 20, 60), ("B", 20, 60), ("C", 18, 61)], shared) for shared in (20, 0)]
    rng = random.Random(0)
    for size in range(3, 9):
        ladder = [(name, rng.randint(10, 60), rng.randint(60, 400)) for name in "abcdefgh"[:size]]
        cases += [(ladder, shared) for shared in (0, 20, 100)]
    judged = []
    for ladder, shared in cases:
        bills = [shared * forwards + rows for _, forwards, rows in ladder]
        saved = {ladder[place][0]: bills[place - 1] - bills[place] for place in range(1, len(ladder))}
        if len(set(saved.values())) == len(saved):
            judged.append(Case((ladder, shared), sorted(saved, key=lambda name: -saved[name])))
    judge("exercise 1", rank, judged)


PROMPTS, SHORTEST, LONGEST, SAME_START = 6, 20, 400, 12


def nb13_ex2(cold: Callable[[], list[list[int]]], warm: Callable[[], list[list[int]]]) -> None:
    """Each returns six prompts (ids from 0 to 49) that all begin with the same 12 tokens: no hits, and over 80 %."""
    for name, answer in {"cold": cold, "warm": warm}.items():

        @functools.wraps(answer)
        def tried(name: str = name, answer: Callable[[], list[list[int]]] = answer) -> str:
            prompts = answer()
            fault = _unfit(prompts)
            if fault:
                return fault
            engine = toy_engine(max_num_seqs=1)
            for prompt in prompts:
                engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
            while engine.has_work:
                engine.step()
            rate = engine.metrics.cached_tokens / engine.metrics.prompt_tokens
            good = rate == 0 if name == "cold" else rate > 0.8
            return "as asked" if good else f"{rate:.1%} found"

        judge(f"exercise 2, {name}", tried, [Case((), "as asked")])


def _unfit(prompts: list[list[int]]) -> str:
    """What is wrong with the prompts, in at most 28 letters (a verdict shows no more), or nothing."""
    if len(prompts) != PROMPTS:
        return f"{len(prompts)} prompts, not {PROMPTS}"
    for number, prompt in enumerate(map(list, prompts), start=1):
        if not SHORTEST <= len(prompt) <= LONGEST:
            return f"prompt {number} has {len(prompt)} tokens"
        if prompt[:SAME_START] != list(prompts[0])[:SAME_START]:
            return f"prompt {number} begins otherwise"
        if prompt in map(list, prompts[: number - 1]):
            return f"prompt {number} is there twice"
    return ""
