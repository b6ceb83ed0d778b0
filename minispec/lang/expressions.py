"""What a program is written in: text, `gen`, `select` and the turns of a conversation, joined with +.

An expression only says what is wanted; nothing runs until it is added to the state of a program.

Knows: the vocabulary and its arguments. Does not know: backends, threads. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from minispec.config import ConfigError, SamplingParams
from minispec.lang.choices import ChoicesMethod, token_length_normalized

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
CONSTRAINTS = ("regex", "json_schema", "dtype")


class Expression:
    """Anything that is not plain text. Expressions and texts add up."""

    def __add__(self, other: str | Expression) -> Chain:
        return Chain((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str | Expression) -> Chain:
        return Chain((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True)
class Gen(Expression):
    """Text that the model writes. `sampling` holds fields of SamplingParams, those that were given."""

    name: str | None
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Select(Expression):
    """The one of `choices` that `method` takes."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True)
class Turn(Expression):
    """Here a turn of `role` begins, or ends."""

    role: str
    begins: bool


Part = str | Gen | Select | Turn


@dataclass(frozen=True)
class Chain(Expression):
    """Several parts, in order."""

    parts: tuple[Part, ...]


def parts_of(value: Any) -> tuple[Part, ...]:
    """The parts of a text or an expression. Raises ConfigError for anything else."""
    if isinstance(value, Chain):
        return value.parts
    if not isinstance(value, str | Expression):
        raise ConfigError(f"a program is made of text, gen, select and roles; it cannot take {value!r:.80}")
    return (value,)


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams out of keyword arguments, under our names or SGLang's; None means not given.

    Raises ConfigError for unknown names, for n other than 1, and for regex, json_schema and dtype.
    """
    values = {SGLANG_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    top = values.pop("top_logprobs_num", 0)
    if values.pop("return_logprob", False):
        values["logprobs"] = top
    for name in values:
        if name in CONSTRAINTS:
            raise ConfigError(
                f"{name}= asks for constrained decoding, which minispec does not have: say in the prompt what form the "
                "answer must have, or give choices="
            )
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"gen has no argument {name!r}; it takes {', '.join(SAMPLING_FIELDS)}")
    if values.get("n", 1) != 1:
        raise ConfigError(f"gen writes one continuation, got n={values['n']!r}: fork the state for several")
    return values


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    **sampling: Any,
) -> Gen | Select:
    """Let the model write on; the text is kept as s[name]. `sampling`: fields of SamplingParams, or SGLang's names.

    With `choices` this is `select`. Raises ConfigError for what cannot be carried out, regex= among it.
    """
    if choices is None:
        return Gen(name, sampling_fields({"max_tokens": max_tokens, **sampling}))
    given = sampling_fields({"max_tokens": max_tokens, **sampling})
    temperature = given.pop("temperature", None)
    if given:
        raise ConfigError(f"choices= leaves nothing to sample, so {', '.join(given)} cannot be carried out")
    return select(name, choices, temperature, choices_method)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float | None = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Select:
    """Take the one of `choices` that the model finds likeliest; it becomes part of the text and is kept as s[name].

    choices_method: `token_length_normalized` (mean log-probability per token, the default), `total_likelihood` (their
    sum), `greedy_token_selection`, or a function from lists of log-probabilities to an index. Of equal choices the
    first is taken, so a repeated one never counts twice. There is no chance in it: temperature must be 0 or None.
    Raises ConfigError: no choices, an empty one, one that is no text.
    """
    listed = () if choices is None or isinstance(choices, str) else tuple(choices)
    if not listed or not all(isinstance(choice, str) and choice for choice in listed):
        raise ConfigError(f"choices must be one or more texts that are not empty, got {choices!r:.80}")
    if temperature not in (None, 0):
        raise ConfigError(f"select takes the best choice, so temperature must be 0, got {temperature!r}")
    return Select(name, listed, choices_method or token_length_normalized)


def _role(role: str) -> tuple[Callable[..., Chain], Callable[[], Turn], Callable[[], Turn]]:
    """A whole turn of a role, its begin and its end."""

    def turn(content: str | Expression = "") -> Chain:
        return Turn(role, True) + content + Turn(role, False)

    return turn, partial(Turn, role, True), partial(Turn, role, False)


# user("..."), or the same in pieces: user_begin(), "...", user_end(). assistant(gen("answer")) asks for an answer.
system, system_begin, system_end = _role("system")
user, user_begin, user_end = _role("user")
assistant, assistant_begin, assistant_end = _role("assistant")
