"""From a prompt and its parameters to requests: everything is checked here, before anything is queued.

Knows: the vocabulary, the context limit, how to say what is wrong. Does not know: what runs, or when.
Taught in notebook 04 (continuous batching).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Sequence

from minispec.config import ConfigError, SamplingParams
from minispec.core import Request, TokenEvent
from minispec.sampling.rng import child_seed
from minispec.text import TextStream


class Intake:
    """Makes the requests of one engine. context_length: most tokens of one request, prompt and output together."""

    def __init__(
        self, vocab_size: int, context_length: int, eos_ids: Iterable[int] = (), tokenizer: object | None = None
    ) -> None:
        """Raises ConfigError when the context holds no prompt and output token."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self.eos_ids, self.tokenizer = frozenset(eos_ids), tokenizer
        self._seeds = random.SystemRandom()
        self.open = True  # False: the engine is closed, and nothing will run any more
        if context_length < 2:
            raise ConfigError(f"a context of {context_length} tokens cannot hold a prompt and an output token")

    def requests(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        group: str,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> list[Request]:
        """The `params.n` completions of a prompt (token ids), named after their group.

        Raises ConfigError: closed engine, empty prompt, an id outside the vocabulary, no room for one output token,
        stop strings without a tokenizer.
        """
        if not self.open:
            raise ConfigError("the engine is closed: it takes no more requests")
        prompt = self.check_prompt(prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop {params.stop} needs text, and this model has no tokenizer: use stop_token_ids")
        longest = self.context_length
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return [
            Request(
                id=group if params.n == 1 else f"{group}.{index}",
                group=group,
                prompt=prompt,
                params=params,
                seed=seed if index == 0 else child_seed(seed, index),
                max_len=longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens),
                eos_ids=self.eos_ids,
                index=index,
                text=TextStream(self.tokenizer, prompt, params.stop, params.skip_special_tokens),
                on_token=on_token,
            )
            for index in range(params.n)
        ]

    def check_prompt(self, prompt: Sequence[int]) -> list[int]:
        """The prompt as a list of plain ints; raises ConfigError when it cannot be run."""
        try:
            prompt = [_token_id(token) for token in prompt]
        except TypeError as error:
            raise ConfigError(f"a prompt must be a list of token ids, got {prompt!r:.80}") from error
        if not prompt:
            raise ConfigError("the prompt is empty: at least one token is needed")
        if len(prompt) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the context limit is {self.context_length}: "
                f"at most {self.context_length - 1} leave room for an output token"
            )
        self._check_ids("the prompt", prompt)
        return prompt

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"{what} holds token id {token}, outside the vocabulary of {self.vocab_size}")


def _token_id(token: object) -> int:
    """A plain int; TypeError for anything that is no whole number (True and False are none)."""
    if isinstance(token, bool):
        raise TypeError(f"{token} is no token id")
    return operator.index(token)
