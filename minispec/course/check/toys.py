"""Small things to ask questions about: model sizes, and the real engine over a model of one line.

Knows: what is quick to compute by hand. Does not know: any exercise. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from minispec.config import EngineConfig
from minispec.core import Request, Step
from minispec.device import InlineDevice
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.models.config import ModelConfig
from minispec.speculative.drafter import Drafter, Proposal

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

    vocab_size, weight_bytes, device = 50, 0, torch.device("cpu")

    @classmethod
    def next_token(cls, tokens: Sequence[int]) -> int:
        return (7 * tokens[-1] + 3) % cls.vocab_size

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        following = [self.next_token([t]) for row in step.sampled for t in row.token_ids[-row.num_logits :]]
        return torch.eye(self.vocab_size)[following]  # [R, V]


class VirtualClock:
    """Seconds by a price list in place of measured ones, so that a controller decides alike on every machine.

    forward: rows -> seconds of a forward. draft: seconds of each draft forward. `now` adds up.
    """

    def __init__(self, engine: Engine, forward: Callable[[int], float], draft: float) -> None:
        self.now, self.forward, self.draft = 0.0, forward, draft
        self._learn, engine.controller.end_step = engine.controller.end_step, self.end_step

    def end_step(self, step: Step, draft_seconds: float, other_seconds: float, emitted: int) -> None:
        """See `Controller.end_step`; the seconds that were measured count for nothing."""
        drafting = self.draft * max((len(row.drafts) for row in step.rows), default=0)
        self.now += drafting + self.forward(step.num_tokens)
        self._learn(step, drafting, self.forward(step.num_tokens), emitted)


class FaultyDrafter:
    """Any drafter, broken on purpose: `faults` maps the number of a proposal, from 1, to one of KINDS."""

    KINDS = ("raises", "no memory", "NaN", "unknown id", "too many tokens", "too few drafts", "no numbers")

    def __init__(self, drafter: Drafter, vocab_size: int, faults: Mapping[int, str]) -> None:
        self.drafter, self.vocab_size, self.faults = drafter, vocab_size, faults
        self.name, self.calls = drafter.name, 0

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        self.calls += 1
        fault = self.faults.get(self.calls)
        if fault in ("raises", "no memory"):
            raise torch.OutOfMemoryError("injected") if fault == "no memory" else RuntimeError("injected")
        proposal = self.drafter.propose(requests, candidate_lengths)
        tokens = proposal.on_host()
        if fault == "NaN":
            q = [torch.full((len(draft), self.vocab_size), torch.nan) for draft in tokens]
            return Proposal(tokens, q)
        if fault == "unknown id":
            tokens[-1] = [self.vocab_size]
        elif fault == "too many tokens":
            tokens[-1] = [0] * (candidate_lengths[-1] + 1)
        elif fault == "no numbers":
            tokens[-1] = ["0"]
        return Proposal(tokens[:-1] if fault == "too few drafts" else tokens, proposal.q)

    def release(self, request: Request) -> None:
        self.drafter.release(request)


def toy_engine(
    *,
    drafters: Sequence[Drafter] = (),
    device: InlineDevice | None = None,
    context_length: int = 512,
    **options: Any,
) -> Engine:
    """The real engine over a `ToyRunner`; `options` as for EngineConfig."""
    config = EngineConfig(check_every_step=True, **{"enable_overlap": False} | options)
    slots, sizes = config.kv_cache_tokens or 1024, {"num_rows": config.max_num_seqs, "max_len": context_length}
    pool = KVPool(slots, config.page_size, enable_radix_cache=config.enable_radix_cache, **sizes)
    return Engine(config, ToyRunner(), pool, context_length=context_length, drafters=drafters, device=device)
