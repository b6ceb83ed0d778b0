"""How a server does under load: plain and with drafts, at several request rates, over HTTP on loopback.

    python -m minispec bench serve --drafts mtp --rates 1,2,4 --requests 32 --rounds 3 --json result.json

Each contestant is a server process of its own. Requests arrive as a Poisson process: the gaps are drawn from an
exponential distribution, and nobody waits for an answer before the next one is sent. In every round and at every rate
all servers get the same prompts at the same moments, one server after the other, each with an empty radix cache.

    TTFT     from the moment a request was due to its first token
    TPOT     from the first token to the last one, per token after the first
    ITL      between two arrivals of text as a reader sees them; a kept draft comes with its verification
    cached   share of the prompt tokens that came from the radix cache
    kept     accepted share of the draft tokens; length: tokens per verification

Times are percentiles over the requests of all rounds, tokens/s is the median of the rounds. Load and server share this
machine's cores.

Knows: arrivals, percentiles, the server's answers. Does not know: how they are made. Taught in notebook 13 (everything
on).
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from minispec.config import ConfigError, check_number
from minispec.lang.backends import BackendError, RuntimeEndpoint

COLUMNS = ("rate", "server", "tokens/s", "ttft", "", "tpot", "", "itl", "", "cached", "kept", "length", "failed")


@dataclass
class Answer:
    """What came of one request: when it was due, when text came, SGLang's meta_info, empty if it failed."""

    due: float  # seconds of time.perf_counter, as the others
    times: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.meta.get("completion_tokens", 0)


def load(url: str, prompts: Sequence[str], gaps: Sequence[float], max_tokens: int) -> list[Answer]:
    """Send prompt i when gaps[0] + ... + gaps[i] seconds have passed, in a thread of its own; wait for all answers."""
    server, begun = RuntimeEndpoint(url), time.perf_counter()

    def ask(prompt: str, due: float) -> Answer:
        answer = Answer(due)
        time.sleep(max(0.0, due - time.perf_counter()))
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        with suppress(BackendError, ConfigError):
            for event in server.post("/generate", {"text": prompt, "sampling_params": sampling, "stream": True}):
                answer.times.append(time.perf_counter())
                meta = event["meta_info"]
            answer.meta = meta
        return answer

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, prompts, [begun + after for after in accumulate(gaps)]))


def summary(rounds: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """The figures of one server at one rate, out of the answers of each round. Times in milliseconds."""
    answers = [answer for answers in rounds for answer in answers if answer.meta]
    rates = [
        sum(a.tokens for a in some) / (max(a.times[-1] for a in some) - min(a.due for a in some))
        for some in ([a for a in each if a.meta] for each in rounds)
        if some
    ]
    sums = {
        name: sum(a.meta[name] for a in answers)
        for name in ("prompt_tokens", "cached_tokens", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    }
    verified = sum(a.meta["spec_verify_ct"] for a in answers)
    emitted = sum(a.meta["spec_verify_ct"] * a.meta["spec_accept_length"] for a in answers)
    return {
        "tokens_per_second": statistics.median(rates or [0.0]),
        "ttft_ms": percentiles([a.times[0] - a.due for a in answers]),
        "tpot_ms": percentiles([(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in answers if a.tokens > 1]),
        "itl_ms": percentiles([later - earlier for a in answers for earlier, later in pairwise(a.times)]),
        "cached_share": sums["cached_tokens"] / max(1, sums["prompt_tokens"]),
        "acceptance_rate": sums["spec_num_correct_drafts"] / max(1, sums["spec_num_proposed_drafts"]),
        "acceptance_length": emitted / max(1, verified),
        "completed": len(answers),
        "failed": sum(map(len, rounds)) - len(answers),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds: the smallest value that so many percent do not exceed.

    >>> percentiles([0.004, 0.001, 0.002, 0.003])
    {'p50': 2.0, 'p99': 4.0}
    """
    ordered = sorted(seconds) or [0.0]
    return {f"p{share}": round(1000 * ordered[ceil(share / 100 * len(ordered)) - 1], 3) for share in (50, 99)}


def bench_serve(
    urls: dict[str, str], prompts: Sequence[str], *, rates: Sequence[float], requests: int, max_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Load each server (name -> URL) at each rate (requests per second); print a table and return its rows.

    Raises ConfigError for a number out of range.
    """
    for name, value in (("requests", requests), ("max_tokens", max_tokens), ("rounds", rounds)):
        check_number(name, value, 1, integer=True)
    for rate in rates:
        check_number("a rate", rate, 0.001)
    for url in urls.values():
        load(url, prompts[:1], [0.0], max_tokens)  # warms it up
    answers: dict[tuple[float, str], list[list[Answer]]] = {(rate, name): [] for rate in rates for name in urls}
    for place in range(rounds):
        for rate in rates:
            chance = random.Random(f"{place} {rate}")
            gaps, chosen = [chance.expovariate(rate) for _ in range(requests)], chance.choices(prompts, k=requests)
            for name, url in urls.items():
                next(RuntimeEndpoint(url).post("/flush_cache", {}))
                answers[rate, name].append(load(url, chosen, gaps, max_tokens))
    rows = [{"rate": rate, "server": name} | summary(its) for (rate, name), its in answers.items()]
    print(f"{requests} requests of {max_tokens} tokens, greedy, {rounds} rounds; times in ms, p50 and p99")
    line = "{:>6} {:18}{:>9}" + "{:>9}" * 6 + "{:>8}" * 4
    print(line.format(*COLUMNS))
    for row in rows:
        times = [f"{row[name][p]:.1f}" for name in ("ttft_ms", "tpot_ms", "itl_ms") for p in ("p50", "p99")]
        shares = [f"{row[name]:.0%}" for name in ("cached_share", "acceptance_rate")]
        rest = f"{row['acceptance_length']:.2f}", row["failed"]
        print(line.format(f"{row['rate']:g}", row["server"], f"{row['tokens_per_second']:.1f}", *times, *shares, *rest))
    return rows


@contextmanager
def servers(model: str, dtype: str, drafts: Sequence[str], candidate_length: int) -> Iterator[dict[str, str]]:
    """A plain server process and one for each drafter ("a+b": a list of two), as name -> URL; they end with the block.

    Raises ConfigError with the last words of a server that does not start.
    """
    command = [sys.executable, "-m", "minispec.launch_server", "--model-path", model, "--dtype", dtype, "--port", "0"]
    command += ["--log-level", "error"]
    configs = {draft: {"draft_model": draft.split("+"), "candidate_length": candidate_length} for draft in drafts}
    with ExitStack() as stack:
        started = {}
        for name, config in {"plain": None, **configs}.items():
            flags = [] if config is None else ["--speculative-config", json.dumps(config)]
            started[name] = stack.enter_context(subprocess.Popen(command + flags, stderr=subprocess.PIPE, text=True))
            stack.callback(started[name].terminate)
        urls = {}
        for name, process in started.items():
            said = []
            for text in process.stderr:
                said.append(text)
                if found := re.search(r"minispec serves .* at (http://\S+)", text):
                    urls[name] = found[1]
                    break
            else:
                raise ConfigError(f"the server {name} has not started: {''.join(said)[-500:].strip()}")
        yield urls
