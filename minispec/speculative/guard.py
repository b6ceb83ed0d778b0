"""A drafter behind a guard: whatever it does, the worst that happens is a step without its drafts.

A fault (it raised, or proposed what was not asked for) is logged once per kind and counted. Speculation goes on with
the next step, `max_retry_attempts` times; then this drafter is off for good.

Knows: the form of a proposal. Does not know: what a draft is worth. Taught in notebook 12 (speculation inside the
engine).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from minispec.core import UNKNOWN
from minispec.speculative.drafter import Drafter

if TYPE_CHECKING:
    from torch import Tensor

    from minispec.core import Request
    from minispec.metrics import EngineMetrics

log = logging.getLogger(__name__)

RECOVERED = 100  # proposals in a row without a fault after which earlier faults are forgotten

Draft = tuple[list[int], "Tensor | None", list[int] | None]  # token ids, q and parents as in Proposal


class Guard:
    """Calls one drafter of an engine with `vocab_size` token ids."""

    def __init__(self, drafter: Drafter, vocab_size: int, max_retry_attempts: int, metrics: EngineMetrics) -> None:
        self.drafter, self.vocab_size, self.metrics = drafter, vocab_size, metrics
        self.name = getattr(drafter, "name", type(drafter).__name__)
        self.on = True
        self._attempts = self._most_attempts = max_retry_attempts
        self._good = 0
        self._caught: list[Exception] = []

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> tuple[list[Draft], Tensor | None]:
        """One draft for each request, at most as long as its length; all of them empty after a fault.

        Also the tokens that only the device knows, see `Proposal`.

        It may run beside the host's work, so a fault is kept until `settle_faults`.
        """
        nothing: list[Draft] = [([], None, None) for _ in requests]
        if not self.on or not requests:
            return nothing, None
        try:
            proposal = self.drafter.propose(requests, lengths)
            qs, trees = (column or [None] * len(requests) for column in (proposal.q, proposal.parents))
            least = 0 if proposal.known is None else UNKNOWN - len(proposal.known) + 1
            columns = lengths, proposal.tokens, qs, trees
            drafts = [self._checked(*each, least) for each in zip(*columns, strict=True)]
        except Exception as error:
            self._caught.append(error)
            return nothing, None
        self._good += 1
        if self._good >= RECOVERED:
            self._attempts = self._most_attempts
        return drafts, proposal.known

    def _checked(
        self, length: int, tokens: Sequence[int], q: Tensor | None, parents: Sequence[int] | None, least: int
    ) -> Draft:
        """The draft as plain ints; ValueError or TypeError when it is not what was asked for. least: of all ids."""
        tokens = [operator.index(token) for token in tokens]
        if len(tokens) > length or not all(least <= token < self.vocab_size and token != -1 for token in tokens):
            raise ValueError(f"draft {tokens} for {length} places and a vocabulary of {self.vocab_size}")
        if q is not None and tuple(q.shape) != (len(tokens), self.vocab_size):
            raise ValueError(f"q has shape {list(q.shape)}, expected {[len(tokens), self.vocab_size]}")
        if q is not None and not (torch.is_tensor(q) and q.is_floating_point() and q.layout == torch.strided):
            raise TypeError(f"q must be a dense tensor of floating-point numbers, got {type(q).__name__}")
        if q is not None and q.is_meta:
            raise TypeError("q holds no numbers: it is on the meta device")
        if parents is not None:
            parents = [operator.index(parent) for parent in parents]
            earlier = all(-1 <= parent < draft for draft, parent in enumerate(parents))
            if len(parents) != len(tokens) or not earlier or len({*zip(parents, tokens, strict=True)}) < len(tokens):
                raise ValueError(
                    f"parents {parents} of drafts {tokens}: each an earlier draft or -1, siblings different"
                )
        return tokens, q, parents

    def release(self, request: Request) -> None:
        """See `Drafter.release`."""
        try:
            self.drafter.release(request)
        except Exception as error:
            kind = f"{type(error).__name__} in release"
            self.fault(kind, f"it may still keep something of {request.id}", error)

    def settle_faults(self) -> None:
        """Count what `propose` has caught."""
        while self._caught:
            error = self._caught.pop(0)
            self.fault(type(error).__name__, "a step runs without its drafts", error)

    def fault(self, kind: str, consequence: str, error: Exception | None = None) -> None:
        """Count a fault, and switch the drafter off when it had its chances."""
        if kind not in self.metrics.faults:
            log.warning("the drafter %s failed (%s); %s", self.name, kind, consequence, exc_info=error)
        self.metrics.faults[kind] = self.metrics.faults.get(kind, 0) + 1
        self._good = 0
        self._attempts -= 1
        if self._attempts < 0 and self.on:
            self.on = False
            self.metrics.drafters_off.append(self.name)
            log.warning("the drafter %s is off: it failed again after %d retries", self.name, self._most_attempts)
