"""Side by side in one run: transformers and this engine on the same weights, prompts and cores.

    python -m minispec bench --prompts spec_bench_questions.jsonl --drafts ngram,mtp,mtp+ngram --rounds 3

Every contestant answers every prompt in every round, one after another (A B C D, A B C D, ...), so a noisy minute hits
all of them. Reported: tokens per second over all prompts, median of the rounds with the lowest and highest, the ratio
to transformers' plain generate, and of a drafter how often its first draft was kept and what a verification brought.
All decode greedily for the same number of tokens and never stop early.

    python -m minispec bench --steering --drafts mtp+ngram

compares the controller with every fixed number of drafts on 24 requests whose batch swings between 1 and 16.

Knows: how to time fairly. Does not know: why something is fast. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minispec.config import ConfigError, check_number

if TYPE_CHECKING:
    from minispec.llm import LLM

CATEGORIES = ("writing", "coding", "qa", "summarization", "rag", "math_reasoning")
MAX_CHARACTERS = 1500
BUILT_IN = (
    "Describe a small harbour town on a winter morning in two paragraphs.",
    "Write a Python function that merges two sorted lists, then the same function with comments on each line.",
    "Why is the sky blue? Answer in three sentences.",
    "Summarize in two sentences: A cache keeps what was computed before. A radix cache keeps it as a tree of token "
    "prefixes, so that prompts which begin alike share their keys and values. When memory is short, the leaf that was "
    "used longest ago is dropped first, and prefixes that a running request uses are never dropped.",
    "Text: The ferry leaves at 7:10, 9:40 and 12:20. It returns at 8:30, 11:00 and 13:45. Question: When does the "
    "first ferry after nine leave, and when does it return?",
    "A farmer has 17 sheep, buys 5 more and sells 8. Each remaining sheep gives 3 kg of wool. How much wool is that?",
)

Contestant = Callable[[list[int]], int]  # prompt ids -> number of generated tokens


@dataclass
class Result:
    """Tokens per second of one contestant over all prompts, per round."""

    name: str
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def load_prompts(path: str | None) -> list[str]:
    """Built-in prompts, or from a JSONL file in Spec-Bench form ({"category", "turns"}) the first of six categories.

    Raises ConfigError when the file cannot be read so or lacks one of them.
    """
    if path is None:
        return list(BUILT_IN)
    first: dict[str, str] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            first.setdefault(entry["category"], entry["turns"][0][:MAX_CHARACTERS])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of Spec-Bench questions: {error}") from error
    missing = [category for category in CATEGORIES if category not in first]
    if missing:
        raise ConfigError(f"{path} has no prompt of category {', '.join(missing)}")
    return [first[category] for category in CATEGORIES]


def measure(contestants: dict[str, Contestant], prompts: Sequence[list[int]], rounds: int) -> list[Result]:
    """Warm everybody up on the first prompt, then time `rounds` interleaved rounds."""
    results = [Result(name) for name in contestants]
    for run in contestants.values():
        run(prompts[0])
    for _ in range(rounds):
        tokens = [0] * len(results)
        seconds = [0.0] * len(results)
        for prompt in prompts:
            for i, run in enumerate(contestants.values()):
                started = time.perf_counter()
                tokens[i] += run(prompt)
                seconds[i] += time.perf_counter() - started
        for result, count, spent in zip(results, tokens, seconds, strict=True):
            result.rates.append(count / spent)
    return results


def make_contestants(
    model: str, dtype: str, max_tokens: int, k: int, drafts: Sequence[str]
) -> tuple[dict[str, Contestant], dict[str, LLM]]:
    """transformers plain and with prompt lookup, this engine plain and with each drafter ("a+b" for a list of two);
    and the engines, the plain one first."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from minispec import LLM, SamplingParams
    from minispec.models.loading import find_model

    engines = {"minispec": LLM(model, dtype=dtype, enable_radix_cache=False)}
    for draft in drafts:
        config = {"draft_model": draft.split("+"), "candidate_length": k}
        name = f"minispec, {draft} K={k}"
        engines[name] = LLM(model, dtype=dtype, enable_radix_cache=False, speculative_config=config)
    plain = engines["minispec"]
    theirs = AutoModelForCausalLM.from_pretrained(find_model(model), dtype=plain.dtype).to(plain.device).eval()
    common = {"do_sample": False, "max_new_tokens": max_tokens, "min_new_tokens": max_tokens}

    def transformers_with(**options: int) -> Contestant:
        settings = GenerationConfig(
            **common, **options, pad_token_id=0, eos_token_id=theirs.generation_config.eos_token_id
        )

        @torch.inference_mode()
        def run(prompt: list[int]) -> int:
            ids = torch.tensor([prompt], device=plain.device)
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            return out.shape[1] - len(prompt)

        return run

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def minispec_with(llm: LLM) -> Contestant:
        return lambda prompt: len(llm.generate(prompt, params)[0].token_ids)

    contestants = {
        "transformers": transformers_with(),
        f"transformers, prompt lookup K={k}": transformers_with(prompt_lookup_num_tokens=k),
    }
    return contestants | {name: minispec_with(llm) for name, llm in engines.items()}, engines


def bench(
    model: str,
    questions: Sequence[str],
    *,
    dtype: str,
    max_tokens: int,
    candidate_length: int,
    drafts: Sequence[str],
    rounds: int,
) -> list[Result]:
    """Run the comparison and print its table. Raises ConfigError for a number below 1."""
    for name, value in (("max_tokens", max_tokens), ("candidate_length", candidate_length), ("rounds", rounds)):
        check_number(name, value, 1, integer=True)
    contestants, engines = make_contestants(model, dtype, max_tokens, candidate_length, drafts)
    llm = engines["minispec"]
    prompts = []
    for question in questions:
        framed = llm.render_chat([{"role": "user", "content": question}])
        prompts.append(llm.tokenizer.encode(framed, add_special_tokens=False))
    results = measure(contestants, prompts, rounds)
    precision = str(llm.dtype).removeprefix("torch.")
    print(f"{len(prompts)} prompts, {max_tokens} tokens each, one at a time, greedy, {precision}, {rounds} rounds")
    print(f"{'':36}{'tokens/s':>10}{'low':>8}{'high':>8}{'ratio':>8}{'first kept':>12}{'length':>8}")
    for result in results:
        ratio = f"{result.median / results[0].median:.2f}x"
        line = f"{result.name:36}{result.median:10.1f}{min(result.rates):8.1f}{max(result.rates):8.1f}{ratio:>8}"
        counts = engines[result.name].engine.metrics.speculation if result.name in engines else None
        if counts and counts.drafted:
            line += f"{counts.acceptance_by_position[0]:12.1%}{counts.acceptance_length:8.2f}"
        print(line)
    return results


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
