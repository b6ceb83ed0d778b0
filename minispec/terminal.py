"""What the command line and the demo share: styled text, one streamed answer, and a line that says what it cost.

Knows: ANSI escapes and when to leave them out, the counters of a request. Does not know: commands, prompts, colours of
token kinds. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from minispec.config import SamplingParams
from minispec.core import Request
from minispec.llm import LLM, Piece, Prompt


class Ink:
    """Styles text for `stream`: none unless it is a terminal, and no colours where the user wants none."""

    def __init__(self, stream: TextIO, color: bool = True) -> None:
        self.styled = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colored = color and not os.environ.get("NO_COLOR")

    def paint(self, text: str, attributes: str = "", color: str = "") -> str:
        """`text` between escapes; `attributes` and `color` are codes of ANSI SGR such as "1;4" and "36"."""
        codes = ";".join(code for code in (attributes, color if self.colored else "") if code)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.styled and codes and text else text

    def dim(self, text: str) -> str:
        return self.paint(text, "2")


def stream_answer(
    llm: LLM,
    prompt: Prompt | Sequence[Mapping[str, str]],
    params: SamplingParams,
    show: Callable[[Piece], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Request:
    """Run one prompt or conversation alone, `show` each piece, and return the finished request with its counters.

    `stopped` is asked between pieces; True aborts the request. Raises ConfigError as `LLM.stream` does.
    """
    with llm.stream(prompt, params) as pieces:
        for piece in pieces:
            show(piece)
            if stopped():
                break
    return pieces.request


def tokens_per_second(request: Request) -> float:
    """Output tokens over all the time from prompt to end, prefill included."""
    return request.num_output / request.metrics.finished_s


def cost_line(request: Request) -> str:
    """One line: prompt tokens, how many the cache had, output, speed, acceptance when it speculated."""
    metrics = request.metrics
    parts = [
        f"{len(request.prompt)} prompt tokens",
        f"{metrics.cached_tokens} cached",
        f"{request.num_output} new",
        f"{tokens_per_second(request):.1f} tokens/s",
    ]
    if metrics.drafted:
        parts.append(f"acceptance {metrics.acceptance_rate:.0%}, length {metrics.acceptance_length:.2f}")
    ending = {"length": "cut at the token limit", "abort": "aborted"}.get(request.finish_reason)
    return ", ".join(parts + [ending] if ending else parts)
