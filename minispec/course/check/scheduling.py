"""Exercises of notebooks 03 (pages), 04 (continuous batching) and 05 (chunked prefill).

Knows: what a right answer does; the real pool and the real scheduler say it. Does not know: how to solve anything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minispec.config import SamplingParams
from minispec.core import Request
from minispec.course.check.judge import Case, judge
from minispec.course.check.toys import toy_engine
from minispec.engine import Engine
from minispec.kv.pool import KVPool, OutOfPages

LENGTHS = [[1], [5, 9], [16, 17, 64, 65], [30, 81, 12, 45, 64, 7, 23, 96, 51, 38, 70, 19]]

# 03 Pages ----------------------------------------------------------------------------------------------------------


def nb03_ex1(waste: Callable[[list[int], int], int]) -> None:
    """(tokens that each request stores, page size) -> slots that are reserved and hold nothing."""
    cases = []
    for lengths in LENGTHS:
        for page_size in (1, 4, 16, 64):
            pool = KVPool(2048, page_size, num_rows=len(lengths), max_len=128, enable_radix_cache=False)
            for length in lengths:
                request = Request("toy", [0] * length, SamplingParams(), seed=0, max_len=128)
                pool.admit(request)
                pool.reserve(request, length)
            reserved = pool.num_slots - pool.num_free_pages * page_size
            cases.append(Case((lengths, page_size), reserved - sum(lengths)))
    judge("exercise 1", waste, cases)


def nb03_ex2(allocator: Callable[[int], Any]) -> None:
    """A class: allocator(num_pages) with alloc(n) -> n page ids (OutOfPages if fewer are free) and free(pages)."""

    @functools.wraps(allocator, updated=())
    def used(num_pages: int) -> str:
        return _fault(allocator(num_pages), num_pages, random.Random(num_pages)) or "no fault"

    judge("exercise 2", used, [Case((n,), "no fault") for n in (1, 2, 4, 16)])


def _fault(pages: Any, num_pages: int, rng: random.Random) -> str:
    """What 500 random operations found wrong, in a few words, or nothing."""
    taken: list[Any] = []  # as they were handed out
    for _ in range(500):
        held, n = {int(page) for pages in taken for page in pages}, rng.randint(0, num_pages)
        if taken and rng.random() < 0.5:
            back = taken.pop(rng.randrange(len(taken)))
            pages.free(back)
            if len(back) and _accepts(AssertionError, pages.free, back):
                return f"page {back[0]} can be freed twice"
        elif n > num_pages - len(held):
            if _accepts(OutOfPages, pages.alloc, n):
                return f"alloc({n}) with {num_pages - len(held)} free works"
        else:
            got = pages.alloc(n)
            if len(got) != n:
                return f"alloc({n}) gives {len(got)} pages"
            for page in map(int, got):
                if page in held or not 0 <= page < num_pages:
                    return f"page {page} was taken" if page in held else f"there is no page {page}"
                held.add(page)
            taken.append(got)
    return ""


def _accepts(refusal: type[Exception], call: Callable[[Any], Any], argument: Any) -> bool:
    try:
        call(argument)
    except refusal:
        return False
    return True


# 04 Continuous batching --------------------------------------------------------------------------------------------


def nb04_ex1(static: Callable[[list[int], int], int], continuous: Callable[[list[int], int], int]) -> None:
    """(output tokens of each request, seats) -> forwards until all are done."""
    rng, named = random.Random(0), [([3], 1), ([3, 1], 1), ([3, 1], 2), ([1, 4, 2], 2), ([3, 9, 2, 8, 4, 6], 3)]
    cases = named + [([rng.randint(1, 12) for _ in range(size)], rng.randint(1, 5)) for size in range(3, 12)]
    for name, answer in {"static": static, "continuous": continuous}.items():
        expected = [
            sum(_forwards(o[i : i + s], s) for i in range(0, len(o), s)) if name == "static" else _forwards(o, s)
            for o, s in cases
        ]
        judge(f"exercise 1, {name}", answer, [Case(case, n) for case, n in zip(cases, expected, strict=True)])


def _forwards(outputs: Sequence[int], seats: int) -> int:
    engine = toy_engine(max_num_seqs=seats, enable_radix_cache=False)
    for length in outputs:
        _add(engine, 1, length)
    while engine.has_work:
        engine.step()
    return engine.metrics.steps


def _add(engine: Engine, prompt: int, output: int) -> Request:
    [request] = engine.add([1] * prompt, SamplingParams(temperature=0, max_tokens=output))
    return request


def nb04_ex2(joins: Callable[[int, list[int], int, int], list[int]]) -> None:
    """(requests that decode, prompts in the queue, budget, seats) -> rows of each request that joins, in order."""
    rng, cases = random.Random(0), [(1, [4], 8, 2), (2, [4, 4], 8, 3), (3, [6, 9, 4], 16, 8), (4, [5], 4, 4)]
    cases.append((0, [9], 4, 4))
    for size in range(1, 16):
        seats = rng.randint(1, 8)
        cases.append((rng.randint(0, seats), [rng.randint(1, 12) for _ in range(size)], rng.randint(seats, 40), seats))
    judged = []
    for decoding, waiting, budget, seats in cases:
        engine = toy_engine(max_num_batched_tokens=budget, max_num_seqs=seats, enable_radix_cache=False)
        for _ in range(decoding):
            _add(engine, 1, 9)
        if decoding:
            engine.step()
        joined = [_add(engine, prompt, 9) for prompt in waiting]
        rows = [row.q_len for row in engine.step().rows if row.request in joined]
        judged.append(Case((decoding, waiting, budget, seats), rows))
    judge("exercise 2", joins, judged)


# 05 Chunked prefill ------------------------------------------------------------------------------------------------


def nb05_ex1(largest_forward: Callable[[int, int, int, int], int]) -> None:
    """(requests that decode, tokens of a new prompt, chunk size, budget) -> rows of the largest forward."""
    sizes = [(1, 5, 8, 64), (3, 300, 32, 512), (3, 300, 512, 512), (0, 20, 8, 64), (4, 100, 32, 20), (7, 40, 64, 47)]
    sizes += [(6, 200, 50, 8), (8, 250, 96, 104), (2, 96, 96, 98)]
    cases = []
    for decoding, prompt, chunk, budget in sizes:
        engine = toy_engine(
            max_num_batched_tokens=budget, chunked_prefill_size=chunk, max_num_seqs=8, enable_radix_cache=False
        )
        for _ in range(decoding):
            _add(engine, 1, 150)
        if decoding:
            engine.step()
        newcomer = _add(engine, prompt, 1)
        largest = 0
        while not newcomer.finished:
            largest = max(largest, engine.step().num_tokens)
        cases.append(Case((decoding, prompt, chunk, budget), largest))
    judge("exercise 1", largest_forward, cases)


def nb05_ex2(split: Callable[[list[int], int, int], list[int]]) -> None:
    """(prompt tokens that each request has not read yet, 0: it decodes; budget; chunk size) -> rows of each."""
    rng, cases = random.Random(0), []
    for _ in range(20):
        budget, chunk = rng.randint(8, 48), rng.randint(1, 32)
        engine = toy_engine(max_num_batched_tokens=64, chunked_prefill_size=8, max_num_seqs=8, enable_radix_cache=False)
        for _ in range(rng.randint(1, 8)):
            _add(engine, rng.choice([4, rng.randint(1, 60)]), rng.randint(2, 9))
        engine.step()  # with room for all, so that some write already while older ones have a long prompt to read
        engine.scheduler.chunk_size = chunk
        engine.scheduler.config = replace(engine.config, max_num_batched_tokens=budget)
        while engine.has_work:
            requests = list(engine.requests.values())
            unread = [len(r.prompt) - r.kv_len if r.kv_len < len(r.prompt) else 0 for r in requests]
            rows = {row.request.id: row.q_len for row in engine.step().rows}
            cases.append(Case((unread, budget, chunk), [rows.get(r.id, 0) for r in requests]))
    judge("exercise 2", split, sorted(cases, key=lambda case: len(case.args[0])))
