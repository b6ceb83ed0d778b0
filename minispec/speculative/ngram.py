"""A drafter without a model: text repeats itself, so propose what followed the last time.

    tokens      1 2 7 1 2 8 1 2      suffix 1 2 occurred before: at 0 and, latest, at 3
    proposal    8 1 2 8 ...          what followed there; past the end of the text it goes on with itself

Rule: the longest suffix of ngram_max to ngram_min tokens that occurred earlier wins, and of its occurrences the
latest. An occurrence may overlap the suffix but is never the suffix itself. No occurrence, no draft.

Source: prompt lookup decoding (Saxena 2023); LLMA (Yang et al. 2023), section 3, copies from a reference text alike.
Knows: the committed tokens of each request, which only ever grow. Does not know: models, q (its drafts are certain).
Taught in notebook 09 (guess and verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minispec.config import check_number
from minispec.speculative.drafter import Proposal

if TYPE_CHECKING:
    from minispec.core import Request


@dataclass
class _Index:
    """N-grams of one request's tokens[:length]; ends[g] is the index after the latest occurrence of g."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0
    found: int = 0  # tokens of the suffix that was found last; 0: none


class NgramDrafter:
    """Proposes copies of the request's own text. Work per new token: one dictionary entry per n-gram length."""

    name = "ngram"
    forwards = bytes_read = weight_bytes = 0

    def __init__(self, ngram_max: int = 4, ngram_min: int = 2) -> None:
        """Longest and shortest suffix to look up, in tokens. Raises ConfigError unless 1 <= ngram_min <= ngram_max."""
        check_number("ngram_max", ngram_max, 1, integer=True)
        check_number("ngram_min", ngram_min, 1, ngram_max, integer=True)
        self.lengths = range(ngram_max, ngram_min - 1, -1)  # longest first
        self._indexes: dict[Request, _Index] = {}

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """See `Drafter.propose`; q is None."""
        return Proposal([self._draft(request, k) for request, k in zip(requests, candidate_lengths, strict=True)])

    def match_length(self, request: Request) -> int:
        """Tokens of the suffix that the latest proposal for this request goes back to; 0: it had none."""
        return self._indexes[request].found

    def release(self, request: Request) -> None:
        """See `Drafter.release`; the index is built again from the tokens if the request comes back."""
        self._indexes.pop(request, None)

    def _draft(self, request: Request, k: int) -> list[int]:
        tokens = request.tokens
        source = self._continuation(tokens, self._indexes.setdefault(request, _Index()))
        if source is None:
            return []
        draft: list[int] = []
        for i in range(source, source + k):
            draft.append(tokens[i] if i < len(tokens) else draft[i - len(tokens)])
        return draft

    def _continuation(self, tokens: list[int], index: _Index) -> int | None:
        """Index of the token after the latest earlier occurrence of the longest known suffix."""
        # The n-grams that end at the last token are left for the next call: a suffix must not find itself.
        for end in range(index.length + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    index.ends[tuple(tokens[end - n : end])] = end
        index.length = len(tokens) - 1
        for n in self.lengths:
            if (end := index.ends.get(tuple(tokens[-n:]))) is not None:
                index.found = n
                return end
        index.found = 0
        return None
