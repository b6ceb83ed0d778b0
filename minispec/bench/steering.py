"""The controller next to every fixed number of drafts, on 24 requests whose batch swings between 1 and 16.

    python -m minispec bench steering --drafts mtp+ngram

Knows: engines with different settings. Does not know: how the controller decides. Taught in notebook 12 (speculation
inside the engine).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from minispec.config import check_number

PHASES = {"alone": (1, 4), "crowd": (16, 16), "few": (4, 4)}  # (batch, requests): 24 in all
REPEATING = "Repeat this list five times: red, green, blue, yellow, black, white."


def bench_steering(
    model: str, questions: Sequence[str], *, dtype: str, max_tokens: int, candidate_length: int, draft: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Time 24 requests with fixed numbers of drafts and with the controller, taking turns in each phase.

    Prints and returns tokens/s: phase (and "all") -> contestant -> median of the rounds. Each round has its own
    order of prompts. Raises ConfigError for a number below 1.
    """
    from minispec import LLM, SamplingParams

    for name, value in (("max_tokens", max_tokens), ("candidate_length", candidate_length), ("rounds", rounds)):
        check_number(name, value, 1, integer=True)
    base = {"draft_model": draft.split("+"), "candidate_length": candidate_length}
    configs = {f"K={k}": base | {"candidate_length": k, "adaptive": False} for k in _lengths(candidate_length)}
    engines = {
        name: LLM(model, dtype=dtype, enable_radix_cache=False, speculative_config=config)
        for name, config in ({"adaptive": base} | configs).items()
    }
    # Answers of unlike lengths, so that a crowd thins out as it does in a server, and not in one step.
    lengths = [max(1, max_tokens * part // 6) for part in (1, 3, 4, 16)]
    each = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    seconds = {name: {phase: [0.0] * rounds for phase in PHASES} for name in engines}
    for place in range(-1, rounds):  # the first one warms up
        order = [*questions, REPEATING, REPEATING] * 4
        random.Random(place).shuffle(order)
        for phase, (batch, count) in PHASES.items():
            prompts = [[{"role": "user", "content": order.pop()}] for _ in range(count)]
            params = [each[n % len(each)] for n in range(count)]
            for name, llm in engines.items():
                started = time.perf_counter()
                for first in range(0, count, batch):
                    llm.chat(prompts[first : first + batch], params[first : first + batch])
                if place >= 0:
                    seconds[name][phase][place] = time.perf_counter() - started
    counts = {p: sum(lengths[n % len(lengths)] for n in range(count)) for p, (_, count) in PHASES.items()}
    table = {p: {n: counts[p] / statistics.median(s[p]) for n, s in seconds.items()} for p in PHASES}
    whole = {n: statistics.median(map(sum, zip(*s.values(), strict=True))) for n, s in seconds.items()}
    table["all"] = {name: sum(counts.values()) / spent for name, spent in whole.items()}
    print(f"24 requests of {min(lengths)} to {max(lengths)} tokens, {draft}, {rounds} rounds; tokens/s")
    print(f"{'':14}" + "".join(f"{name:>10}" for name in engines) + f"{'adaptive / best fixed':>24}")
    for phase, rates in table.items():
        ratio = rates["adaptive"] / max(rates[name] for name in configs)
        print(f"{phase:14}" + "".join(f"{rate:10.1f}" for rate in rates.values()) + f"{ratio:23.2f}x")
    return table


def _lengths(most: int) -> list[int]:
    """0, the powers of two below `most`, and `most`."""
    return sorted({0, *(2**n for n in range(7) if 2**n < most), most})
