"""Side by side in one run: how to time fairly, and how to tell it.

Every contestant does every job in every round, one after another (A B C D, A B C D, ...), so a noisy minute hits all of
them. Reported is the median of the rounds with the lowest and highest, as a table, as JSON with the machine's card, and
as a figure.

    offline.py    transformers and this engine on the same weights: one prompt at a time, a crowd of 32
    steering.py   the controller and every fixed number of drafts, while the batch swings
    serve.py      server processes under load
    host.py       what the engine costs when the model costs nothing

Knows: jobs, seconds, tokens. Does not know: why something is fast. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minispec.config import ConfigError

CATEGORIES = ("writing", "coding", "qa", "summarization", "rag", "math_reasoning")
MAX_CHARACTERS = 1500
BUILT_IN = (  # in the same order
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

Job = Sequence[list[int]]  # prompts, as token ids
Contestant = Callable[[Job], "list[list[int]]"]  # -> the ids of the answers


@dataclass
class Result:
    """What one contestant did: per job its answers (of the last round) and the seconds of each round."""

    name: str
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    def rates(self, job: str | None = None) -> list[float]:
        """Tokens per second of each round, in one job or in all of them together."""
        jobs = list(self.answers) if job is None else [job]
        tokens = sum(len(ids) for name in jobs for ids in self.answers[name])
        return [tokens / sum(spent) for spent in zip(*(self.seconds[name] for name in jobs), strict=True)]

    def median(self, job: str | None = None) -> float:
        """The median of `rates`."""
        return statistics.median(self.rates(job))


def load_prompts(path: str | None) -> dict[str, str]:
    """Category -> prompt: built in, or from a JSONL file in Spec-Bench form ({"category", "turns"}) the first of each.

    Raises ConfigError when the file cannot be read so or lacks one of six categories.
    """
    if path is None:
        return dict(zip(CATEGORIES, BUILT_IN, strict=True))
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
    return {category: first[category] for category in CATEGORIES}


def measure(contestants: Mapping[str, Contestant], jobs: Mapping[str, Job], rounds: int) -> list[Result]:
    """Warm everybody up on the first job, then time `rounds` interleaved rounds."""
    results = [Result(name, seconds={job: [] for job in jobs}) for name in contestants]
    for run in contestants.values():
        run(next(iter(jobs.values())))
    for _ in range(rounds):
        for job, prompts in jobs.items():
            for result, run in zip(results, contestants.values(), strict=True):
                started = time.perf_counter()
                result.answers[job] = run(prompts)
                result.seconds[job].append(time.perf_counter() - started)
    return results


def table(title: str, results: Sequence[Result]) -> str:
    """Tokens per second of all jobs, the ratio to the first contestant, each job, and what else is known."""
    jobs = list(results[0].answers)
    jobs, width = jobs if len(jobs) > 1 else [], max(28, *(len(result.name) for result in results)) + 2
    head = f"{'':{width}}{'tokens/s':>9}{'low':>8}{'high':>8}{'ratio':>8}" + "".join(f"{job[:9]:>10}" for job in jobs)
    lines = [title, head]
    for result in results:
        rates, ratio = result.rates(), f"{result.median() / results[0].median():.2f}x"
        line = f"{result.name:{width}}{result.median():9.1f}{min(rates):8.1f}{max(rates):8.1f}{ratio:>8}"
        lines.append(line + "".join(f"{result.median(job):10.1f}" for job in jobs))
    for result in results:
        if result.facts:
            facts = ", ".join(f"{name} {value:.3g}" for name, value in result.facts.items())
            lines.append(f"{result.name:{width}}{facts}")
    return "\n".join(lines)


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The same for a file; tokens per second of each round, of each job and of all together."""
    return [
        {
            "name": result.name,
            "tokens_per_second": {"all": result.rates()} | {job: result.rates(job) for job in result.answers},
            "facts": result.facts,
        }
        for result in results
    ]


def write_json(path: str, settings: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the figures with what was asked for and the card of this machine, which is measured now."""
    from minispec.doctor import machine_card

    found = {"machine": str(machine_card()).splitlines(), "settings": dict(settings), "results": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def draw(path: str, results: Sequence[Result]) -> None:
    """Bars of tokens per second with the lowest and highest round, for all jobs together; PNG, SVG or PDF by suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8, 1 + 0.32 * len(results)), layout="constrained", dpi=110)
    axes, medians = figure.subplots(), [result.median() for result in results]
    ends = [(m - min(r.rates()), max(r.rates()) - m) for m, r in zip(medians, results, strict=True)]
    colors = ["#0072B2" if result.name.startswith("minispec") else "#999999" for result in results]
    bars = axes.barh([r.name for r in results], medians, xerr=list(zip(*ends, strict=True)), color=colors)
    axes.bar_label(bars, [f"{m:.0f}  ({m / medians[0]:.2f}x)" for m in medians], padding=6)
    axes.set_xlim(0, 1.25 * max(medians))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens per second")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
