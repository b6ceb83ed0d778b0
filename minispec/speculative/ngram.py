"""A drafter without a model: text repeats itself, so propose what followed the last time.

    tokens      1 2 7 1 2 8 1 2      suffix 1 2 occurred before: at 0 and, latest, at 3
    proposal    8 1 2 8 ...          what followed there; past the end of the text it goes on with itself

Rule: the longest suffix of ngram_max to ngram_min tokens that occurred earlier wins, and of its occurrences the
latest. An occurrence may overlap the suffix but is never the suffix itself. No occurrence, no draft.

With topk > 1 the draft is a tree: what followed the best occurrence, then what the next ones by the same rule add to
it, up to topk of them.

Source: prompt lookup decoding (Saxena 2023); LLMA (Yang et al. 2023), section 3, copies from a reference text alike.
Knows: the committed tokens of each request, which only ever grow. Does not know: models, q (its drafts are certain).
Taught in notebook 09 (guess and verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minispec.config import MAX_CANDIDATE_LENGTH, check_number
from minispec.speculative.drafter import Proposal

if TYPE_CHECKING:
    from minispec.core import Request


@dataclass
class _Index:
    """N-grams of one request's tokens[:length]; ends[g]: indexes after the latest occurrences of g, latest first."""

    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    length: int = 0
    found: int = 0  # tokens of the suffix that was found last; 0: none


class NgramDrafter:
    """Proposes copies of the request's own text. Work per new token: one dictionary entry per n-gram length."""

    name = "ngram"
    forwards = bytes_read = weight_bytes = 0

    def __init__(
        self, ngram_max: int = 4, ngram_min: int = 2, topk: int = 1, depth: int = MAX_CANDIDATE_LENGTH
    ) -> None:
        """Longest and shortest suffix to look up, in tokens; continuations to draft, and tokens of each, at most.

        Raises ConfigError unless 1 <= ngram_min <= ngram_max.
        """
        check_number("ngram_max", ngram_max, 1, integer=True)
        check_number("ngram_min", ngram_min, 1, ngram_max, integer=True)
        self.lengths = range(ngram_max, ngram_min - 1, -1)  # longest first
        self.topk, self.depth = topk, depth
        self._indexes: dict[Request, _Index] = {}

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """See `Drafter.propose`; q is None."""
        drafts = [self._draft(request, k) for request, k in zip(requests, candidate_lengths, strict=True)]
        return Proposal([tokens for tokens, _ in drafts], parents=[parents for _, parents in drafts])

    def match_length(self, request: Request) -> int:
        """Tokens of the suffix that the latest proposal for this request goes back to; 0: it had none."""
        return self._indexes[request].found

    def release(self, request: Request) -> None:
        """See `Drafter.release`; the index is built again from the tokens if the request comes back."""
        self._indexes.pop(request, None)

    def _draft(self, request: Request, k: int) -> tuple[list[int], list[int] | None]:
        """Up to k tokens, and their parents where several continuations differ."""
        tokens = request.tokens
        draft: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}  # (draft, token that follows) -> that draft
        for source in self._continuations(tokens, self._indexes.setdefault(request, _Index())):
            node = -1
            copy: list[int] = []
            for i in range(source, source + self.depth):
                copy.append(tokens[i] if i < len(tokens) else copy[i - len(tokens)])
                if (node, copy[-1]) not in children:
                    if len(draft) == k:
                        break
                    children[node, copy[-1]] = len(draft)
                    draft.append(copy[-1])
                    parents.append(node)
                node = children[node, copy[-1]]
        return draft, None if parents == list(range(-1, len(draft) - 1)) else parents

    def _continuations(self, tokens: list[int], index: _Index) -> list[int]:
        """Indexes of the tokens after the best `topk` earlier occurrences of known suffixes, the best one first."""
        # The n-grams that end at the last token are left for the next call: a suffix must not find itself.
        for end in range(index.length + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    ends = index.ends.setdefault(tuple(tokens[end - n : end]), [])
                    ends.insert(0, end)
                    del ends[self.topk :]
        index.length = len(tokens) - 1
        found = {n: index.ends.get(tuple(tokens[-n:]), []) for n in self.lengths}
        index.found = next((n for n, ends in found.items() if ends), 0)
        return list(dict.fromkeys(end for ends in found.values() for end in ends))[: self.topk]
