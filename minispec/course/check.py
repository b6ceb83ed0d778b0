"""Checkers of the exercises. They print one line and never raise, so a half-done notebook still runs to its end.

    not answered yet      exercise 1: not done yet
    wrong                 exercise 1: rows(1, 2) gives 2, expected 3         (the smallest case that fails)
    right                 exercise 1: ok (5 cases)

Knows: what a right answer does. Where the package can be asked, the expected result is the package's own.
Does not know: how to solve anything; solutions are in notebooks/solutions. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from minispec.config import EngineConfig, SamplingParams
from minispec.core import Step
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.models.config import ModelConfig


class Case(NamedTuple):
    """One call and its result. `shown`: how to write the arguments where their repr is long."""

    args: tuple[Any, ...]
    expected: Any
    shown: str = ""


def judge(name: str, answer: Any, cases: Sequence[Case]) -> None:
    """Print the verdict on a function (called with each case, smallest first) or on a plain value (one case)."""
    print(f"{name}: {_verdict(answer, cases)}")


def _verdict(answer: Any, cases: Sequence[Case]) -> str:
    for case in cases:
        call, expected = _call(answer, case), reprlib.repr(case.expected)
        try:
            # A copy, so that an answer that changes its arguments cannot spoil the next case.
            got = answer(*copy.deepcopy(case.args)) if callable(answer) else answer
            if got is None or got is ... or isinstance(got, str) and not got.strip():
                return "not done yet"
            if not _same(got, case.expected):
                return f"{call} gives {reprlib.repr(got)}, expected {expected}"
        except NotImplementedError:
            return "not done yet"
        except Exception as error:  # whatever a learner's code may raise is an answer too
            return f"{call} raises {type(error).__name__} ({error}), expected {expected}"
    return f"ok ({len(cases)} case{'s' * (len(cases) > 1)})"


def _call(answer: Any, case: Case) -> str:
    if not callable(answer):
        return "your answer"
    return f"{getattr(answer, '__name__', 'your function')}({case.shown or ', '.join(map(repr, case.args))})"


def _same(got: Any, expected: Any) -> bool:
    got = got.tolist() if hasattr(got, "tolist") else got  # numbers and arrays of numpy and torch
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return math.isclose(got, expected, rel_tol=1e-6)
    if isinstance(expected, list) and isinstance(got, tuple):
        got = list(got)
    return bool(got == expected)


# Models to count on ----------------------------------------------------------------------------------------------

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    tie_embeddings=True,
)
ONE_LAYER = replace(
    SMOLLM2, vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2
)
SIZES = "vocab_size 10, hidden_size 4, intermediate_size 8, num_layers {}, num_heads 2, num_kv_heads 1, head_dim 2"
MODELS = {  # how a checker names a config -> the config; the small ones by their sizes, to be computed by hand
    SIZES.format(1): ONE_LAYER,
    SIZES.format(2): replace(ONE_LAYER, num_layers=2),
    "smollm2": SMOLLM2,
}


class ToyRunner:
    """A target model of one line, for engines that need no weights: token t is followed by (7 t + 3) mod V."""

    vocab_size, weight_bytes = 50, 0

    @classmethod
    def next_token(cls, tokens: Sequence[int]) -> int:
        return (7 * tokens[-1] + 3) % cls.vocab_size

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        following = [self.next_token([t]) for row in step.sampled for t in row.token_ids[-row.num_logits :]]
        return torch.eye(self.vocab_size)[following]  # [R, V]


def toy_engine(**options: Any) -> Engine:
    """The real engine over a `ToyRunner`; `options` as for EngineConfig."""
    config = EngineConfig(check_every_step=True, **options)
    slots, sizes = config.kv_cache_tokens or 1024, {"num_rows": config.max_num_seqs, "max_len": 256}
    pool = KVPool(slots, config.page_size, enable_radix_cache=config.enable_radix_cache, **sizes)
    return Engine(config, ToyRunner(), pool, context_length=256)


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


def nb02_ex1(kv_bytes: Callable[[ModelConfig, int], int]) -> None:
    """(config, bytes per number) -> bytes that one token adds to the cache."""
    sizes = {4: torch.float32, 2: torch.float16}
    cases = [
        Case((model, size), model.kv_bytes_per_token(dtype), f"{name}, {size}")
        for name, model in MODELS.items()
        for size, dtype in sizes.items()
    ]
    judge("exercise 1", kv_bytes, cases)


def nb02_ex2(tokens_that_fit: Callable[[int, ModelConfig, int], int], mha_factor: float) -> None:
    """(bytes of memory, config, bytes per number) -> tokens, and how much more K/V the same model needs without GQA."""
    every_head = replace(SMOLLM2, num_kv_heads=SMOLLM2.num_heads)
    cases = [
        Case(
            (memory, model, size), memory // (2 * model.num_layers * model.num_kv_heads * model.head_dim * size), shown
        )
        for memory, model, size, shown in [
            (100, ONE_LAYER, 4, f"100, {SIZES.format(1)}, 4"),
            (256_000_000, SMOLLM2, 4, "256_000_000, smollm2, 4"),
            (256_000_000, SMOLLM2, 2, "256_000_000, smollm2, 2"),
            (256_000_000, every_head, 4, "256_000_000, smollm2 with 9 K/V heads, 4"),
        ]
    ]
    judge("exercise 2, tokens", tokens_that_fit, cases)
    judge("exercise 2, factor", mha_factor, [Case((), 3.0)])
