"""How an answer is judged: called with each case, smallest first, and told the first one that it fails.

Knows: cases and how to say what went wrong in one line. Does not know: any exercise.
Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One call and its result. `shown`: how to write the arguments where their repr is long."""

    args: tuple[Any, ...]
    expected: Any
    shown: str = ""


def judge(name: str, answer: Any, cases: Sequence[Case]) -> None:
    """Print the verdict on a function (called with each case, smallest first) or on a plain value (one case)."""
    print(f"{name}:", *_verdict(answer, cases).split())  # one line, whatever a repr looks like


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
    if isinstance(expected, list) and isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(_same, got, expected))
    return bool(got == expected)
