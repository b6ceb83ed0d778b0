"""What happened when: the two lanes of the engine, host and device, as a list of events.

Knows: events, and how to write them in the Chrome trace format that Perfetto opens (ui.perfetto.dev). Does not know:
what the parts mean. Taught in notebook 08 (overlap).
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HOST, DEVICE = "host", "device"
IDLE = "idle"  # the name of gaps, which are derived and not recorded


class Event(NamedTuple):
    """One part of one step. start, end: seconds; step: number of the launch, from 1; rows and tokens of its forward.

    While a step is planned, its number is that of the next launch, and its rows are not known.
    """

    lane: str
    name: str
    start: float
    end: float
    step: int
    rows: int
    tokens: int
    request_ids: tuple[str, ...]


class Trace:
    """The latest `size` events, in the order in which they ended."""

    def __init__(self, size: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self.events)

    def lane(self, name: str) -> list[Event]:
        """The events of one lane, in order of their start."""
        return sorted((event for event in self.events if event.lane == name), key=lambda event: event.start)

    def idle(self, lane: str = DEVICE, shortest: float = 0.0) -> list[Event]:
        """The gaps of a lane that are longer than `shortest` seconds, as events of the step that was waited for."""
        pairs = itertools.pairwise(self.lane(lane))
        return [b._replace(name=IDLE, start=a.end, end=b.start) for a, b in pairs if b.start - a.end > shortest]

    def idle_share(self, lane: str = DEVICE) -> float:
        """Share of the time from the lane's first event to its last one's end in which it did nothing."""
        events = self.lane(lane)
        whole = events[-1].end - events[0].start if events else 0.0
        return sum(gap.end - gap.start for gap in self.idle(lane)) / whole if whole else 0.0

    def to_perfetto(self, path: Path | str) -> None:
        """Write all events and gaps as Chrome trace JSON, times in microseconds from the first event."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._chrome()), "displayTimeUnit": "ms"}), "utf-8")

    def _chrome(self) -> Iterable[dict]:
        lanes = (HOST, DEVICE)
        zero = min((event.start for event in self.events), default=0.0)
        for number, lane in enumerate(lanes):
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for e in (*self.events, *self.idle(HOST), *self.idle(DEVICE)):
            times = {"ts": 1e6 * (e.start - zero), "dur": 1e6 * (e.end - e.start)}
            args = {"step": e.step, "rows": e.rows, "tokens": e.tokens, "requests": list(e.request_ids)}
            yield {"ph": "X", "name": e.name, "pid": 1, "tid": lanes.index(e.lane), "args": args, **times}
