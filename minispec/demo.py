"""The demo: three prompts, each answered plain and speculating by the same model, and what that did to the counts.

Where the answer repeats the prompt, guessing from it works; where the answer is all new, it does not, and costs little.
Plain decoding reads every weight once per token. A forward that verifies K guesses reads them once as well, so each
guess that is kept saves a reading: that, and not the arithmetic, is where the time goes.

Knows: prompts, colours, a table and a figure made of the requests' counters. Does not know: how drafts are made or
verified. Taught in notebook 00 (the map).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minispec.config import ConfigError, SamplingParams
from minispec.core import Request, TokenKind
from minispec.llm import LLM, Piece
from minispec.palette import KIND_ANSI, KIND_COLORS, KIND_HATCHES, KIND_LABELS, RUN_COLORS
from minispec.terminal import Ink, cost_line, stream_answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMPTS = {
    "copy": (
        "Copy this text and add one more rule at the end:\n"
        "The library opens at nine in the morning and closes at eight in the evening. It is closed on Sunday. Children "
        "can borrow six books at a time, and adults can borrow twelve books at a time. Books that are late cost ten "
        "cents a day, and books that are lost cost twenty dollars. Please speak softly, so that others can read."
    ),
    "code": "Write a Python class for a stack with push, pop, peek, is_empty and size.",
    "chat": "Explain to a child why the sea is salty.",
}
COLUMNS = ("prompt", "run", "tokens", "tokens/s", "forwards/token", "first kept", "all kept", "length")
COLUMNS += ("weights/token", "speed-up")
STRIP_TOKENS, EDGE = 48, "#333333"  # tokens on one line of the figure, outlines


@dataclass(frozen=True)
class Pair:
    """One prompt and its two finished requests."""

    name: str
    plain: Request
    speculating: Request


def bytes_read(request: Request, target_bytes: int) -> int:
    """Weights read for a request that ran alone; each forward of the target reads `target_bytes`."""
    return request.metrics.forwards * target_bytes + request.metrics.draft_bytes


def run_demo(llm: LLM, params: SamplingParams, *, figure: str | Path, color: bool = True) -> list[Pair]:
    """Run, print and draw the demo. `llm` speculates, its radix cache is off, `params` is greedy.

    Raises ConfigError without a drafter, or when the figure's folder cannot be made.
    """
    if llm.engine.controller is None:
        raise ConfigError(
            "the demo compares plain with speculating: --draft must name a drafter, --candidate-length >= 1"
        )
    figure, ink = Path(figure), Ink(sys.stdout, color)
    try:
        figure.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make a folder for the figure {figure}: {error}") from error
    print(f"{llm.model_config.num_parameters:,} weights, {str(llm.dtype).removeprefix('torch.')} on {llm.device}")
    print("  ".join(ink.paint(KIND_LABELS[kind], *KIND_ANSI[kind]) for kind in TokenKind))
    for speculate in (False, True):  # warm up: the first forward of each shape may choose its kernels
        _answer(llm, "one two three " * 8, replace(params, max_tokens=8), ink, speculate=speculate, show=False)
    pairs = []
    for name, question in PROMPTS.items():
        print(f"\n{ink.paint(question, '3')}")
        plain = _answer(llm, question, params, ink, speculate=False, show=False)
        speculating = _answer(llm, question, params, ink, speculate=True, show=True)
        print(f"\n{ink.dim(cost_line(speculating))}")
        pairs.append(Pair(name, plain, speculating))
    target_bytes = llm.engine.runner.weight_bytes
    print(f"\n{table(pairs, target_bytes)}\n")
    for pair in pairs:
        print(f"{pair.name}: {compare(llm, pair)}")
    _save(pairs, target_bytes, figure)
    return pairs


def _answer(llm: LLM, question: str, params: SamplingParams, ink: Ink, *, speculate: bool, show: bool) -> Request:
    """One run by the same engine. Without drafts each forward writes one token."""

    def write(piece: Piece) -> None:
        if show:
            print(ink.paint(piece, *KIND_ANSI[piece.kind]), end="", flush=True)

    templated = getattr(llm.tokenizer, "chat_template", None)
    prompt = [{"role": "user", "content": question}] if templated else question
    return stream_answer(llm, prompt, replace(params, speculative=speculate), write)


# What the counters say -----------------------------------------------------------------------------------------


def table(pairs: Sequence[Pair], target_bytes: int) -> str:
    """Two lines for each prompt and two for all together."""
    rows = [COLUMNS]
    both = [("plain", [pair.plain for pair in pairs]), ("speculating", [pair.speculating for pair in pairs])]
    groups = [(pair.name, [("plain", [pair.plain]), ("speculating", [pair.speculating])]) for pair in pairs]
    for name, runs in [*groups, ("all", both)]:
        speeds = [_row(run, requests, target_bytes) for run, requests in runs]
        for (run, _), (speed, cells) in zip(runs, speeds, strict=True):
            gain = "" if run == "plain" else f"{speed / speeds[0][0]:.2f}x"
            rows.append(("" if gain else name, run, *cells, gain))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    layout = "  ".join(f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths))
    return "\n".join(layout.format(*row).rstrip() for row in rows)


def _row(run: str, requests: Sequence[Request], target_bytes: int) -> tuple[float, tuple[str, ...]]:
    """(tokens per second, the cells from "tokens" to "weights/token") of some requests together."""
    tokens = sum(request.num_output for request in requests)
    forwards = sum(request.metrics.forwards for request in requests) / tokens
    speed = tokens / sum(request.metrics.finished_s for request in requests)
    counts = [request.metrics.speculation for request in requests]
    drafted, accepted = sum(c.drafted for c in counts), sum(c.accepted for c in counts)
    emitted, verified = sum(c.emitted for c in counts), sum(c.verify_rows for c in counts)
    first, rate, length = "-", "-", "-"
    if drafted:
        first = f"{sum(c.accepted_at[0] for c in counts if c.accepted_at) / verified:.0%}"
        rate, length = f"{accepted / drafted:.0%}", f"{emitted / verified:.2f}"
    weights = f"{sum(bytes_read(r, target_bytes) for r in requests) / tokens / 1e6:,.1f} MB"
    return speed, (str(tokens), f"{speed:.1f}", f"{forwards:.2f}", first, rate, length, weights)


def compare(llm: LLM, pair: Pair) -> str:
    """Whether both runs chose the same tokens; if not, where they part and how close the two choices were."""
    ours, theirs = pair.plain.output, pair.speculating.output
    if ours == theirs:
        return f"both runs wrote the same {len(ours)} tokens"
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    a, b = ours[place], theirs[place]
    prefix = pair.plain.prompt + ours[:place]
    [again] = llm.generate(prefix, SamplingParams(temperature=0, max_tokens=1, logprobs=5))
    top = again.logprobs[0].top
    gap = f"{abs(top[a] - top[b]):.3f} apart" if a in top and b in top else "far apart"
    words = [repr(llm.tokenizer.decode([token])) for token in (a, b)]
    return (
        f"the runs part at output token {place + 1}, {words[0]} or {words[1]}, whose log-probabilities are {gap}. "
        "A forward of one row and one of several round differently, which decides near ties; in float32 they are rare"
    )


# The figure ----------------------------------------------------------------------------------------------------


def draw(pairs: Sequence[Pair], target_bytes: int) -> Figure:
    """Left: the tokens of the speculating run by kind, one block per forward. Right: bytes of weights per token."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = max(-(-pair.speculating.num_output // STRIP_TOKENS) for pair in pairs)
    figure = Figure(figsize=(10, 0.9 + len(pairs) * (0.5 + 0.4 * lines)), dpi=120, layout="constrained")
    axes = figure.subplots(len(pairs), 2, squeeze=False, width_ratios=(3, 1), sharex="col")
    for (strip, bars), pair in zip(axes, pairs, strict=True):
        _draw_strip(strip, pair)
        _draw_bars(bars, pair, target_bytes)
    axes[0][1].set_title("weights read per token", fontsize=11, loc="left")
    legend = [
        Patch(facecolor=KIND_COLORS[kind], hatch=KIND_HATCHES[kind], edgecolor=EDGE, label=KIND_LABELS[kind])
        for kind in TokenKind
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    return figure


def _draw_strip(axes: Axes, pair: Pair) -> None:
    request = pair.speculating
    left, line, on_line = 0.0, 0, 0
    for place, kind in enumerate(request.kinds):
        if on_line >= STRIP_TOKENS and request.kinds[place - 1] is not TokenKind.ACCEPTED:  # keep a block on its line
            left, line, on_line = 0.0, line + 1, 0
        style = {"color": KIND_COLORS[kind], "hatch": KIND_HATCHES[kind], "edgecolor": EDGE, "linewidth": 0.5}
        axes.barh(-line, 1, left=left, height=0.8, **style)
        left += 1 if kind is TokenKind.ACCEPTED else 1.4  # a forward ends with a token of the target's own: a gap
        on_line += 1
    title = f"{pair.name}: {request.num_output} tokens from {request.metrics.forwards} forwards, one block each"
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_axis_off()


def _draw_bars(axes: Axes, pair: Pair, target_bytes: int) -> None:
    for place, (label, request) in enumerate({"speculating": pair.speculating, "plain": pair.plain}.items()):
        megabytes = bytes_read(request, target_bytes) / request.num_output / 1e6
        bar = axes.barh(place, megabytes, color=RUN_COLORS[label], height=0.7)
        axes.bar_label(bar, [f"{megabytes:,.3g} MB"], padding=3, fontsize=10)
    axes.set_yticks([0, 1], ["speculating", "plain"], fontsize=10)
    axes.set_xticks([])
    axes.margins(x=0.35)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _save(pairs: Sequence[Pair], target_bytes: int, path: Path) -> None:
    try:
        draw(pairs, target_bytes).savefig(path)
    except ImportError:
        print("no figure: matplotlib is not installed (pip install 'minispec[course]')")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot save the figure {path}: {error}") from error
    else:
        print(f"figure: {path}")
