"""What a drafter is: something that guesses the next tokens of each request.

Knows: the shape of a proposal. Does not know: how guesses are made, or how they are judged; a bad guess costs
time and never changes the result, so a drafter needs no other promise than an honest q.

Taught in notebook 09 (guess and verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from minispec.core import UNKNOWN

if TYPE_CHECKING:
    from minispec.core import Request


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one step.

    tokens: one list per request, at most as long as asked; an empty one means no idea, decode as usual. The first n of
    a list must be a draft of their own, because there may be room for n.
    A model's drafts may be known to the device alone: the lists hold what stands for them, see `core.known_tokens`.
    q: per request, the distributions that its drafts were really drawn from, float32 [len(tokens[b]), V] on the
    target's device, or None when they were chosen without chance (copied, or an argmax). None for all of them.
    For a child of a tree that was drawn without replacement that is q without its elder siblings, normalised.
    parents: per request, the number of the draft that each one follows (-1: the committed tokens), lower than its own,
    and siblings differ; or None for a chain, in which each follows the one before. None for all of them.
    """

    tokens: list[list[int]]
    q: Sequence[Tensor | None] | None = None
    parents: Sequence[list[int] | None] | None = None
    known: Tensor | None = None  # int64, on the target's device

    def on_host(self) -> list[list[int]]:
        """All tokens as such. Waits for the device."""
        known = [] if self.known is None else self.known.tolist()
        return [[known[UNKNOWN - t] if t <= UNKNOWN else t for t in tokens] for tokens in self.tokens]


class Drafter(Protocol):
    """Anything that can propose; it may keep state per request."""

    name: str
    forwards: int  # of draft models so far; 0 without one, as the two below
    bytes_read: int  # of weights, by all of them
    weight_bytes: int  # that it takes to draft one token

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """Guess up to candidate_lengths[b] tokens after the committed tokens of requests[b]. Changes no request."""

    def release(self, request: Request) -> None:
        """Forget what is kept for this request: it ended. Does nothing if nothing is kept."""
