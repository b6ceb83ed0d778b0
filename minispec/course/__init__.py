"""The teaching side: what every notebook of the course starts with.

    from minispec import course
    course.setup()                       threads, seed, picture style; prints the kind of device and the dtype
    llm = course.load()                  the embedded model in an engine that checks its ledger after every step
    course.show(Engine.step)             the real source, so no notebook holds a copy that grows old
    guess = course.predict("...", 45)    a guess before the run, and afterwards: course.reveal(guess, measured)
    course.check.nb00_ex1(answer)        exercises (check.py);  course.figures.work(...)  pictures (figures.py)

Knows: the whole package. Does not know: notebooks' texts. Nothing in the package imports it. Used from notebook 00
(the map) on.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from IPython.display import Markdown
from IPython.utils.capture import capture_output

import minispec
from minispec.attention.naive import CausalAttention
from minispec.course import check, figures
from minispec.device import choose_device
from minispec.llm import LLM
from minispec.models.embedded import EMBEDDED_MODEL, fetch_embedded
from minispec.models.llama import CausalLM

__all__ = ["check", "figures", "load", "naive_greedy", "predict", "reveal", "setup", "show"]

DTYPE = "float32"  # ids of greedy runs are compared, so rounding has to be far below the margins between tokens
THREADS = 2  # what every machine has: more would be quicker and would sum in another order


def setup(seed: int = 0) -> None:
    """Fix what results depend on, and print what they may depend on: the kind of device and the dtype."""
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    torch.manual_seed(seed)
    matplotlib.rcParams.update(figures.STYLE)
    print(f"device: {choose_device().type}, dtype: {DTYPE}")


def load(**options: Any) -> LLM:
    """An LLM with the embedded model in float32 that counts its slots after every step; `options` as for LLM.

    Without overlap unless asked for, so that a step is over when `engine.step()` returns.
    """
    options = {"enable_overlap": False} | options
    fetch_embedded()  # only the download may show a bar: others come or not with the speed of the machine
    with capture_output():
        return LLM(EMBEDDED_MODEL, dtype=DTYPE, check_every_step=True, **options)


def naive_greedy(model: CausalLM, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Greedy output ids with no cache, and per forward the positions (start, end) that it computed."""
    tokens, forwards = list(prompt), []
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.norm.weight.device)
        hidden = model.forward(ids, torch.arange(len(ids), device=ids.device), CausalAttention())
        forwards.append((0, len(ids)))
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :], forwards


def show(thing: Callable[..., Any] | type) -> Markdown:
    """The source of a function, class or method of the package, highlighted, under the name of its file."""
    thing = inspect.unwrap(thing)
    root = Path(minispec.__file__).parent.parent
    path = Path(inspect.getsourcefile(thing) or "").relative_to(root).as_posix()
    return Markdown(f"```python\n# {path}\n\n{textwrap.dedent(inspect.getsource(thing))}```")


def predict(question: str, default: float) -> float:
    """Print a question with your guess and return the guess. Change the number in the cell before you run on."""
    print(f"{question}?\nmy guess: {_shown(default)}")
    return default


def reveal(guess: float, measured: float) -> None:
    """Print what a guess was worth."""
    if isinstance(guess, (int, float)):
        verdict = "exactly right" if guess == measured else f"off by {abs(guess - measured):,}"
    else:
        verdict = "a guess is a number"
    print(f"guess {_shown(guess)}, measured {measured:,}: {verdict}")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else repr(value)
