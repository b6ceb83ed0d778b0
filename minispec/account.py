"""The engine's books: what each step cost, what its drafts brought, and when everything happened.

Knows: launched steps, the device's clock, `EngineMetrics`, the trace. Does not know: what the steps are for.
Taught in notebooks 08 (overlap) and 09 (guess and verify).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from minispec.core import Row, Step
from minispec.device import Flight, InlineDevice, Job, Span
from minispec.metrics import EngineMetrics, RollbackEvent
from minispec.sampling.sampler import Judged, Outcome
from minispec.trace import DEVICE, HOST, Event, Trace


@dataclass
class Launched:
    """A step on its way through the device, and what came of it."""

    step: Step
    flight: Flight[Judged | None]
    number: int  # of the launch, from 1
    seconds: dict[str, float] = field(default_factory=dict)  # of its parts on the device
    outcomes: list[Outcome | None] = field(default_factory=list)  # what each row brought; None: it emits nothing
    emitted: list[int] = field(default_factory=list)  # tokens that each row has added


class Account:
    """Launches jobs on a device and keeps the counters and the trace (None: none) of one engine."""

    def __init__(self, device: InlineDevice, trace: Trace | None = None) -> None:
        self.device, self.trace, self.metrics = device, trace, EngineMetrics()
        self._launches = 0

    def launch(self, step: Step, job: Job[Judged | None]) -> Launched:
        """Send the job of a step to the device."""
        self._launches += 1
        return Launched(step, self.device.submit(job), self._launches)

    def landed(self, launched: Launched) -> None:
        """A launched step has come in: note the parts of its job, in seconds."""
        for span in launched.flight.spans:
            seconds = span.end - span.start
            launched.seconds[span.name] = launched.seconds.get(span.name, 0.0) + seconds
            self.metrics.add_seconds(span.name, seconds)
            self._note(DEVICE, span, launched)
        self.metrics.steps += 1
        self.metrics.computed_tokens += launched.step.num_tokens

    @contextmanager
    def timed(self, name: str, launched: Launched | None = None) -> Iterator[None]:
        """A part of the host's work on a launched step, or on the next one (None)."""
        started = self.device.now()
        yield
        self.device.spend(name)
        span = Span(name, started, self.device.now())
        self.metrics.add_seconds(name, span.end - span.start)
        self._note(HOST, span, launched)

    def _note(self, lane: str, span: Span, launched: Launched | None = None) -> None:
        if self.trace is not None:
            rows = launched.step.rows if launched else []
            tokens, ids = sum(row.q_len for row in rows), tuple(row.request.id for row in rows)
            number = launched.number if launched else self._launches + 1
            self.trace.events.append(Event(lane, *span, number, len(rows), tokens, ids))

    def count_drafts(self, row: Row, path: list[int], emitted: int, slots: np.ndarray) -> None:
        """What became of a row's drafts, of which those of `path` were kept. slots: of all positions of its request."""
        metrics, accepted = row.request.metrics, len(path)
        metrics.accepted_per_step.append(accepted)
        for counts in (metrics.speculation, self.metrics.speculation):
            counts.record(len(row.drafts), accepted, emitted, row.depth)
        kept = path[:emitted]  # a stop inside the draft undoes the rest of it, right or not
        if len(kept) < len(row.drafts):
            start = row.end + len(kept)
            undone = tuple(token for draft, token in enumerate(row.drafts) if draft not in kept)
            places = tuple(slots[start : start + len(undone)].tolist())
            metrics.rollbacks.append(RollbackEvent(row.request.id, self.metrics.steps, start, places, undone, accepted))

    def count_seconds(self, launched: Launched) -> None:
        """Draft and verification time: once for the engine, in full for each request that shared the wait."""
        seconds = launched.seconds
        draft, verify = seconds.get("draft", 0.0), seconds["forward"] + seconds.get("verify", 0.0)
        asked = [row for row in launched.step.rows if row.max_drafts > 0]
        for row in asked:
            row.request.metrics.speculation.record_seconds(draft, verify if row.drafts else None)
        if asked:
            self.metrics.speculation.record_seconds(draft, verify if any(row.drafts for row in asked) else None)
