"""What a grammar lets a request write: JSON schemas, regular expressions and EBNF, as masks over the vocabulary.

A constraint is a cursor over the committed tokens, as a drafter is. Before each forward it reads what was committed
since, walks over the drafts, noting at each position which tokens may stand there, and goes back to where it was.

    committed  { "a" :            drafts  4 2 x 7                      x cannot stand there, so the draft ends before it
                       ^ cursor   masks   after :   after 4   after 2    of a tree, with all that follows x

The masks belong to the target distribution p, like a logit_bias of minus infinity, so speculation stays exact. A draft
that is cut because of the token that was drawn must have come from what remains of q: q is masked and scaled too, and
the draft is then a draw from that, or none.

When the text is complete, only the model's end tokens are left. Special tokens can stand nowhere else.

Knows: grammars, vocabularies, where a draft stops making sense. Does not know: logits, how tokens are chosen. The
parsing is llguidance's. Taught in notebook 11 (lossless).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minispec.config import ConfigError
from minispec.sampling.rejection import is_distribution

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from minispec.core import Row

log = logging.getLogger(__name__)
KEPT = 64  # compiled grammars
# How json.dumps writes. With free whitespace a small model may write nothing else.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles the grammars of one model and keeps the latest. May be asked from any thread.

    The size of a grammar and the work for one token have llguidance's limits, so both end within some 100 ms.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.eos_ids = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        self.compile = lru_cache(KEPT)(self._compile)

    def start(self, kind: str, text: str) -> Constraint:
        """A constraint for one request. Raises as `compile` does."""
        return Constraint(self.compile(kind, text).deep_copy(), self.vocab_size, self.eos_ids)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """kind: a field of SamplingParams, text: its value.

        Raises ConfigError with what is wrong with the grammar, or with a model that has no end token or no tokenizer
        of the usual fast kind.
        """
        from llguidance import LLMatcher, grammar_from

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=ONE_LINE)
            else:
                grammar = grammar_from(kind, text)
            matcher = LLMatcher(self._vocabulary, grammar)
            problem = matcher.get_error()
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            problem = str(error)
        if problem:
            raise ConfigError(f"{kind} {text!r:.80} cannot be used: {' '.join(problem.split()):.300}")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self.tokenizer, PreTrainedTokenizerFast) or not self.eos_ids:
            raise ConfigError("a grammar needs a model with a fast tokenizer and an end token, and this one lacks them")
        size = max(self.vocab_size, 1 + max(self.tokenizer.get_vocab().values()))
        return from_tokenizer(self.tokenizer, n_vocab=size, eos_token=self.eos_ids)


class Constraint:
    """What one request may write, with a cursor behind what it has written."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size, self._eos_ids = matcher, vocab_size, eos_ids
        self._read = 0  # tokens of the output

    def masks(
        self, output: Sequence[int], drafts: Sequence[int], paths: Sequence[Sequence[int]] | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """bool [1 + n, V]: what may follow the committed output and each of n drafts; the numbers of these drafts.

        They are those that may stand where they do. paths: of each draft, see `Row.path`; None: of a chain. All False,
        which ends the request with an error, when the parser gives up.
        """
        self._matcher.try_consume_tokens(list(output[self._read :]))
        self._read = max(self._read, len(output))
        masks, ends, behind = {-1: self._allowed()}, set(), []  # by draft; the drafts that the matcher stands behind
        for draft, token in enumerate(drafts):
            *before, _ = range(draft + 1) if paths is None else paths[draft]
            parent = before[-1] if before else -1
            if parent in ends or parent not in masks or not masks[parent][token]:
                continue
            shared = len(commonprefix([behind, before]))
            self._matcher.rollback(len(behind) - shared)
            self._matcher.try_consume_tokens([drafts[each] for each in before[shared:]])
            behind = before
            if token not in self._eos_ids and self._matcher.try_consume_tokens([token]):
                masks[draft], behind = self._allowed(), [*before, draft]
            else:  # the end: what follows is dropped
                masks[draft] = np.arange(self._vocab_size) == token
                ends.add(draft)
        self._matcher.rollback(len(behind))
        return np.stack(list(masks.values())), list(masks)[1:]

    def _allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if self._matcher.is_error():
            log.warning("a grammar ends its request: %s", self._matcher.get_error())
            mask[:] = False
        return mask


def constrain(rows: Iterable[Row], device: torch.device) -> None:
    """Before a forward: cut the drafts of constrained rows, and say in `row.allowed` what may stand where."""
    for row in rows:
        request = row.request
        if request.constraint is None:
            continue
        output, paths = request.tokens[len(request.prompt) : row.end], [row.path(i) for i in range(len(row.drafts))]
        masks, kept = request.constraint.masks(output, row.drafts, paths)
        row.keep(kept)
        row.allowed = torch.from_numpy(masks).to(device)
        if row.q is not None:
            left = row.q * row.allowed[[1 + parent for parent in row.lineage]]
            row.q = torch.where(is_distribution(row.q)[:, None], left / left.sum(-1, keepdim=True), row.q)
