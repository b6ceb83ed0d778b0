"""Exercises of notebooks 00 (the map), 01 (one token at a time) and 02 (the KV cache).

Knows: what a right answer does. Does not know: how to solve anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from minispec.config import SamplingParams
from minispec.course.check.judge import Case, judge
from minispec.course.check.toys import MODELS, ONE_LAYER, SIZES, SMOLLM2, ToyRunner, toy_engine
from minispec.models.config import ModelConfig

# 00 The map ------------------------------------------------------------------------------------------------------


def nb00_ex1(count_parameters: Callable[[ModelConfig], int]) -> None:
    """Numbers in a Llama model with a tied head, from its config."""
    judge("exercise 1", count_parameters, [Case((m,), m.num_parameters, name) for name, m in MODELS.items()])


def nb00_ex2(most_tokens_per_second: Callable[[int, int, float], float]) -> None:
    """(parameters, bytes per number, GB/s that memory is read at) -> tokens/s that decoding cannot exceed."""
    cases = [
        Case((1_000_000_000, 1, 1.0), 1.0),
        Case((1_000_000_000, 2, 50.0), 25.0),
        Case((134_515_008, 4, 20.0), 20e9 / 538_060_032),
        Case((134_515_008, 2, 4000.0), 4000e9 / 269_030_016),
    ]
    judge("exercise 2", most_tokens_per_second, cases)


# 01 One token at a time --------------------------------------------------------------------------------------------


def nb01_ex1(rows_computed: Callable[[int, int], int]) -> None:
    """(prompt tokens P, output tokens N) -> rows that a loop without a cache computes."""
    sizes = [(1, 1), (1, 2), (2, 3), (6, 12), (300, 48)]
    judge("exercise 1", rows_computed, [Case((p, n), sum(range(p, p + n))) for p, n in sizes])


def nb01_ex2(generate: Callable[[Callable[[Sequence[int]], int], list[int], int, Collection[int]], list[int]]) -> None:
    """generate(next_token, prompt, max_tokens, stop_ids) must return what the engine returns."""
    requests = [([1], 1, ()), ([1], 4, ()), ([1], 4, (10,)), ([2, 1], 6, (4,)), ([1, 10], 6, (1, 10)), ([5], 40, (49,))]
    cases = []
    for prompt, max_tokens, stops in requests:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stops)
        engine = toy_engine()
        [request] = engine.add(prompt, params)
        while engine.has_work:
            engine.step()
        shown = f"next_token, {prompt}, {max_tokens}, {set(stops) or '{}'}"
        cases.append(Case((_at_most(50), prompt, max_tokens, stops), request.output, shown))
    judge("exercise 2", generate, cases)


def _at_most(limit: int) -> Callable[[Sequence[int]], int]:
    """ToyRunner.next_token that refuses to be asked for ever."""
    calls = []

    def next_token(tokens: Sequence[int]) -> int:
        calls.append(1)
        if len(calls) > limit:
            raise RuntimeError(f"next_token was called {limit} times and your loop goes on")
        return ToyRunner.next_token(tokens)

    return next_token


# 02 The KV cache ---------------------------------------------------------------------------------------------------

DTYPES = {4: torch.float32, 2: torch.float16}  # by bytes per number


def nb02_ex1(kv_bytes: Callable[[ModelConfig, int], int]) -> None:
    """(config, bytes per number) -> bytes that one token adds to the cache."""
    cases = [
        Case((model, size), model.kv_bytes_per_token(dtype), f"{name}, {size}")
        for name, model in MODELS.items()
        for size, dtype in DTYPES.items()
    ]
    judge("exercise 1", kv_bytes, cases)


def nb02_ex2(tokens_that_fit: Callable[[int, ModelConfig, int], int], mha_factor: float) -> None:
    """(bytes of memory, config, bytes per number) -> tokens, and how much more K/V the same model needs without GQA."""
    every_head, much = replace(SMOLLM2, num_kv_heads=SMOLLM2.num_heads), 256_000_000
    asked = [(100, ONE_LAYER, 4, SIZES.format(1)), (much, SMOLLM2, 4, "smollm2"), (much, SMOLLM2, 2, "smollm2")]
    asked.append((much, every_head, 4, "smollm2 with 9 K/V heads"))
    cases = [
        Case((memory, model, size), memory // model.kv_bytes_per_token(DTYPES[size]), f"{memory:_}, {shown}, {size}")
        for memory, model, size, shown in asked
    ]
    judge("exercise 2, tokens", tokens_that_fit, cases)
    judge("exercise 2, factor", mha_factor, [Case((), 3.0)])
