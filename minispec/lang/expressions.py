"""What a program is written in: text, `gen`, `select` and the turns of a conversation, joined with +.

An expression only says what is wanted; nothing runs until it is added to the state of a program.

Knows: the vocabulary and its arguments. Does not know: backends, threads. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from minispec.config import SGLANG_NAMES, ConfigError, SamplingParams
from minispec.lang.choices import ChoicesMethod, token_length_normalized

OTHER_NAMES = ("dtype", "return_logprob", "top_logprobs_num")
SAMPLING_NAMES = {*SGLANG_NAMES, *OTHER_NAMES, *(f.name for f in fields(SamplingParams))}
# What gen(dtype=...) writes, as a regular expression.
DTYPES = {int: "-?[0-9]+", float: r"-?[0-9]+\.[0-9]+", bool: "True|False", str: r'"[^"\n]*"'}


@dataclass(frozen=True)
class Turn:
    """Here a turn of `role` begins, or ends."""

    role: str
    begins: bool


@dataclass(frozen=True)
class Gen:
    """Text that the model writes, with these fields of SamplingParams; or the one of `choices` that `method` takes."""

    name: str | None
    sampling: Mapping[str, Any]
    choices: tuple[str, ...] = ()
    method: ChoicesMethod = token_length_normalized


Part = str | Turn | Gen


@dataclass(frozen=True)
class Expression:
    """Several parts, in order. Expressions and texts add up."""

    parts: tuple[Part, ...]

    def __add__(self, other: str | Expression) -> Expression:
        return Expression((*self.parts, *parts_of(other)))

    def __radd__(self, other: str | Expression) -> Expression:
        return Expression((*parts_of(other), *self.parts))


def parts_of(value: Any) -> tuple[Part, ...]:
    """The parts of a text or an expression. Raises ConfigError for anything else."""
    if not isinstance(value, str | Expression):
        raise ConfigError(f"a program is made of text, gen, select and roles; it cannot take {value!r:.80}")
    return (value,) if isinstance(value, str) else value.parts


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams out of keyword arguments, under our names or SGLang's; None means not given.

    Raises ConfigError for unknown names, for n other than 1, and for a dtype that is not one of DTYPES.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if (kind := given.pop("dtype", None)) is not None:
        if not isinstance(kind, type) or kind not in DTYPES or "regex" in given:
            raise ConfigError(f"dtype must be int, float, bool or str, without a regex beside it; got {kind!r:.80}")
        given["regex"] = DTYPES[kind]
    for name in given:
        if name not in SAMPLING_NAMES:
            raise ConfigError(f"gen has no argument {name!r}; it takes {', '.join(sorted(SAMPLING_NAMES))}")
    if given.get("n", 1) != 1:
        raise ConfigError(f"gen writes one continuation, got n={given['n']!r}: fork the state for several")
    top = given.pop("top_logprobs_num", 0)
    if given.pop("return_logprob", False):
        given["logprobs"] = top
    return {SGLANG_NAMES.get(name, name): value for name, value in given.items()}


def gen(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expression:
    """Let the model write on; the text is kept as s[name]. options: fields of SamplingParams, or SGLang's names.

    With `choices` (and `choices_method`) this is `select`. Raises ConfigError for what cannot be carried out.
    """
    choices, method = options.pop("choices", None), options.pop("choices_method", None)
    sampling = sampling_fields({"max_tokens": max_tokens, **options})
    if choices is None:
        return Expression((Gen(name, sampling),))
    return select(name, choices, sampling.pop("temperature", 0), method, **sampling)


def select(
    name: str | None, choices: Iterable[str], temperature: float = 0, choices_method: ChoicesMethod | None = None
) -> Expression:
    """Take the one of `choices` that the model finds likeliest; it becomes part of the text and is kept as s[name].

    choices_method: `token_length_normalized` (mean log-probability per token, the default), `total_likelihood` (their
    sum), `greedy_token_selection`, or a function from lists of log-probabilities to an index. Of equal choices the
    first is taken, so a repeated one never counts twice. There is no chance in it: temperature must be 0.
    Raises ConfigError: no choices, an empty one, one that is no text.
    """
    listed = () if isinstance(choices, str) else tuple(choices)
    if not listed or not all(isinstance(choice, str) and choice for choice in listed):
        raise ConfigError(f"choices must be one or more texts that are not empty, got {choices!r:.80}")
    if temperature:
        raise ConfigError(f"select takes the best choice, so temperature must be 0, got {temperature!r}")
    return Expression((Gen(name, {}, listed, choices_method or token_length_normalized),))


def _role(role: str) -> tuple[Callable[..., Expression], Callable[[], Expression], Callable[[], Expression]]:
    """A whole turn of a role, its begin and its end."""
    begin, end = Expression((Turn(role, True),)), Expression((Turn(role, False),))
    return lambda content="": begin + content + end, lambda: begin, lambda: end


# user("..."), or the same in pieces: user_begin(), "...", user_end(). assistant(gen("answer")) asks for an answer.
system, system_begin, system_end = _role("system")
user, user_begin, user_end = _role("user")
assistant, assistant_begin, assistant_end = _role("assistant")
