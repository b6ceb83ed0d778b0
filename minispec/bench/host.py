"""What the engine costs when the model costs nothing: Python per step, and the radix cache per token.

    python -m minispec bench host

The model answers with the same logits whatever it is asked, so what remains is planning, packing, sampling, settling
and bookkeeping. Linear is good: per step with the batch, per token of the radix cache not with what it holds.

Knows: the engine, the tree. Does not know: any real model. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from minispec.config import EngineConfig, SamplingParams
from minispec.core import Step
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.kv.radix import RadixTree
from minispec.runner import pack, segments_of

BATCHES = (1, 8, 64)
STEPS = 200
CACHED = (1_000, 10_000, 100_000)  # tokens in the tree
SEQUENCE = 1000  # tokens of each sequence in it; its first half is one of ten beginnings


class FreeModel:
    """A model that has its answer ready."""

    vocab_size, weight_bytes, device = 1000, 0, torch.device("cpu")
    logits = torch.zeros(max(BATCHES), vocab_size)

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        """See Runner; packs as a real one does."""
        return self.logits[: len(pack(segments_of(step), table).logit_rows)]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See Runner."""


def step_seconds(batch: int, steps: int = STEPS) -> float:
    """Median seconds of a decoding step of `batch` requests."""
    config = EngineConfig(max_num_seqs=batch, enable_overlap=False)
    pool = KVPool(batch * (steps + 32), config.page_size, num_rows=batch, max_len=steps + 32)
    engine = Engine(config, FreeModel(), pool, context_length=steps + 32)
    for number in range(batch):
        engine.add([number] * 8, SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True))
    engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def radix_seconds(cached: int, page_size: int = 16) -> dict[str, float]:
    """Median seconds per token to insert a sequence into a tree of so many tokens, and to match it again."""
    chance, tree = np.random.default_rng(0), RadixTree(page_size)
    beginnings = chance.integers(0, 1000, (10, SEQUENCE // 2))
    insert, match = [], []
    for number in range(max(1, cached // SEQUENCE)):
        ids = np.concatenate((beginnings[number % 10], chance.integers(0, 1000, SEQUENCE // 2))).tolist()
        started = time.perf_counter()
        tree.insert(ids, range(SEQUENCE))
        inserted = time.perf_counter()
        tree.match(ids)
        insert.append(inserted - started)
        match.append(time.perf_counter() - inserted)
    return {"insert": statistics.median(insert[-20:]) / SEQUENCE, "match": statistics.median(match[-20:]) / SEQUENCE}


def bench_host() -> list[dict[str, Any]]:
    """Measure, print and return the rows. torch uses one thread: what is measured is the host."""
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for batch in BATCHES:
        spent = 1e6 * step_seconds(batch)
        rows.append({"batch": batch, "step_us": spent, "request_us": spent / batch})
        print(f"batch {batch:4}  {spent:8.0f} us per step {spent / batch:8.1f} us per request")
    for cached in CACHED:
        spent_on = radix_seconds(cached)
        rows.append({"cached_tokens": cached} | {f"{name}_ns": 1e9 * each for name, each in spent_on.items()})
        insert, match = (1e9 * spent_on[name] for name in ("insert", "match"))
        print(f"{cached:7} cached tokens  insert {insert:6.0f} ns, match {match:6.0f} ns per token")
    torch.set_num_threads(threads)
    return rows
