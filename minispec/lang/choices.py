"""Which of several texts the model would rather write: where a choice begins, and how two of them are compared.

A choice is scored by the log-probabilities of its tokens. A text does not fall into tokens at the border between
prompt and choice: "The answer is " and "yes" have the token " yes" across it. So prompt + choice is cut into tokens as
a whole, for every choice, and what counts is all that follows the longest beginning that these and the prompt alone
share. If no token crosses the border these are the tokens of the choices; else all choices bring the same end of the
prompt along, cut again. No token of the shared beginning is in any score.

Knows: token ids and log-probabilities. Does not know: models, programs. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence
from statistics import fmean

from minispec.config import ConfigError

LogprobLists = Sequence[Sequence[float]]  # for each choice, one per token
ChoicesMethod = Callable[[LogprobLists], int]  # the index of the choice that is taken; of equal ones the first
SAME_TOKEN = 1e-3  # two rows of one forward may give the same token log-probabilities that differ by less


def token_length_normalized(logprobs: LogprobLists) -> int:
    """The highest mean log-probability per token: a long choice pays for its tokens as a short one does.

    >>> token_length_normalized([[-1.0], [-1.0, 0.0, 0.0]]), total_likelihood([[-1.0], [-1.0, -0.5]])
    (1, 0)
    """
    return max(range(len(logprobs)), key=lambda i: fmean(logprobs[i]))


def total_likelihood(logprobs: LogprobLists) -> int:
    """The highest sum: the text that the model is most likely to write. Every further token lowers it."""
    return max(range(len(logprobs)), key=lambda i: sum(logprobs[i]))


def greedy_token_selection(logprobs: LogprobLists) -> int:
    """Token by token, keep the choices whose next token is the likeliest.

    A choice that has ended goes on with the mean of its own tokens.

    >>> greedy_token_selection([[-1.0, -1.0], [-0.5, -9.0], [-0.5, -8.0, 0.0]])
    2
    """
    left = list(range(len(logprobs)))
    for place in range(max(map(len, logprobs))):
        at = {i: logprobs[i][place] if place < len(logprobs[i]) else fmean(logprobs[i]) for i in left}
        left = [i for i in left if at[i] > max(at.values()) - SAME_TOKEN]
    return left[0]


def start_of_choices(prompt: Sequence[int], full: Sequence[Sequence[int]]) -> int:
    """Tokens that the prompt and every prompt + choice begin with. Raises ConfigError where nothing can be scored.

    >>> start_of_choices([5, 6, 7], [[5, 6, 7, 1], [5, 6, 8]])  # the second choice changes the prompt's last token
    2
    """
    start = len(os.path.commonprefix([list(prompt), *map(list, full)]))
    if start == 0:
        raise ConfigError("choices can only be scored behind a prompt: no token that they share stands before them")
    if start in map(len, full):
        raise ConfigError("a choice adds no token to the prompt, so it cannot be scored")
    return start
