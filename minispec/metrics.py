"""What is counted, defined once. Every figure and table of the course is made from these numbers.

Definitions (K > 0 means that the step carried drafts for the request):
- drafted: draft tokens verified. accepted: those the target kept. emitted: tokens added to the text, after any stop.
- verify row: one request's part of one forward with K > 0. Plain steps (K = 0) do not enter the figures below.
- acceptance rate = accepted / drafted.
- acceptance length = emitted / verify rows, so it counts the token that the target adds (1.0 = nothing gained).
- acceptance by position j = drafts kept at place j / verifications with a draft at place j; a draft after the first
  miss is offered and not kept. In a tree the place of a draft is its depth, and one of a depth is kept at most.
- draft time: seconds in a draft model, catching up included, over the steps that asked for drafts. N-grams are looked
  up while the step is planned.
- verification latency: mean seconds of forward + verify over the steps that carried drafts, from packing the rows until
  the accepted counts and tokens are on the host. Rows of other requests and prompt chunks in the same forward are in.
  Both times are counted once for the engine, and in full for every request that waited for them.
- rollback: a verification after which draft tokens that were written are not in the text: rejected ones and all behind
  them, or what came after a stop. Per second of a request's life, or of the time that the engine spent in steps.
- forwards saved by a request = emitted - verify rows: plain decoding, alone, needs one forward per token.
- forwards saved by the engine: a forward gives each of its B emitting rows one token in plain decoding. A step whose B
  rows emitted E tokens stands for E / B such forwards, so it saved E / B - 1. That is what a batch saves that stays as
  wide as it is; when no other request waits to take the place of a fast one, the slowest decides and less is saved.
- speed-up = seconds that plain steps of this engine would have taken for the tokens of its steps with drafts, at the
  same batch, / seconds that these steps took. The former are a fit to the plain steps that run now and then. Steps
  with prompt chunks are left out.
- weight bytes saved = forwards saved * bytes of the target - bytes that draft models read.

Does not know: who counts. Taught in notebooks 09 (guess and verify) and 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RollbackEvent:
    """What one verification undid: positions [start, end), written for draft tokens that are not in the text."""

    request_id: str
    step: int  # number of the engine's forward, from 1
    start: int
    slots: tuple[int, ...]  # of these positions; the next step writes them again
    drafts: tuple[int, ...]  # the draft tokens there
    accepted: int  # drafts of this verification that the target agreed with, some of them perhaps behind a stop

    @property
    def end(self) -> int:
        return self.start + len(self.drafts)


@dataclass
class SpeculationCounts:
    """Counters of speculation, of one request or of the engine.

    >>> counts = SpeculationCounts()
    >>> for accepted in (3, 1, 0, 2):
    ...     counts.record(drafted=3, accepted=accepted, emitted=accepted + 1)
    >>> counts.drafted, counts.accepted, counts.emitted, counts.acceptance_rate, counts.acceptance_length
    (12, 6, 10, 0.5, 2.5)
    >>> counts.acceptance_by_position
    [0.75, 0.5, 0.25]
    """

    verify_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    rollbacks: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    verify_steps: int = 0  # forwards with drafts; one of them may hold several verify rows
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, emitted: int, depth: int | None = None) -> None:
        """Count one verify row; drafted > 0. depth: drafts on the longest path of a tree; all of them, unless given."""
        depth = drafted if depth is None else depth
        assert 0 <= accepted <= depth <= drafted and drafted > 0
        self.verify_rows += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        self.rollbacks += min(accepted, emitted) < drafted
        missing = depth - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for position in range(depth):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def record_seconds(self, draft: float, verify: float | None) -> None:
        """Count the times of one step that asked for drafts; verify None: there were none to verify."""
        self.draft_seconds += draft
        if verify is not None:
            self.verify_seconds += verify
            self.verify_steps += 1

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.emitted / self.verify_rows if self.verify_rows else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        return [kept / offered for kept, offered in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def forwards_saved(self) -> int:
        """By a request. The sum over requests is no number of the engine's forwards, see EngineMetrics."""
        return self.emitted - self.verify_rows

    @property
    def verification_latency(self) -> float:
        return self.verify_seconds / self.verify_steps if self.verify_steps else 0.0


@dataclass
class RequestMetrics:
    """Counters of one request. Times are seconds since it was added."""

    cached_tokens: int = 0  # prompt tokens found in the radix cache at its first admission
    computed_tokens: int = 0  # rows of the target forward spent on it: prompt, output and rejected drafts
    forwards: int = 0  # forwards of the target that it took part in
    draft_forwards: int = 0  # the same of a draft model
    draft_bytes: int = 0  # of weights, that these read; shared by those who drafted together, in full for each
    preemptions: int = 0
    accepted_per_step: list[int] = field(default_factory=list)  # one entry per verify row
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    rollbacks: list[RollbackEvent] = field(default_factory=list)  # in order, at most one per verify row
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def drafted(self) -> int:
        return self.speculation.drafted

    @property
    def accepted(self) -> int:
        return self.speculation.accepted

    @property
    def acceptance_rate(self) -> float:
        return self.speculation.acceptance_rate

    @property
    def acceptance_length(self) -> float:
        return self.speculation.acceptance_length

    @property
    def rollbacks_per_second(self) -> float:
        """0 until the request has ended."""
        return len(self.rollbacks) / self.finished_s if self.finished_s else 0.0

    def weight_bytes_saved(self, target_bytes: int) -> int:
        """As if the request had run alone, with `target_bytes` read by each forward of the target."""
        return self.speculation.forwards_saved * target_bytes - self.draft_bytes


# Field of EngineMetrics -> the attribute of a drafter that it adds up.
DRAFTERS_COUNT = {
    "draft_forwards": "forwards",
    "draft_bytes": "bytes_read",
    "remote_rounds": "rounds",
    "remote_sent_bytes": "bytes_sent",
    "remote_received_bytes": "bytes_received",
}


@dataclass
class EngineMetrics:
    """Counters of the engine since it started. Seconds are sums over steps."""

    steps: int = 0
    computed_tokens: int = 0  # packed rows over all forwards
    prompt_tokens: int = 0  # of finished requests
    cached_tokens: int = 0  # of them, found in the radix cache
    output_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    wall_seconds: float = 0.0  # in steps
    seconds: dict[str, float] = field(default_factory=dict)  # of each part; with overlap they add up to more

    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    by_drafter: dict[str, SpeculationCounts] = field(default_factory=dict)
    alignment: dict[str, float] = field(default_factory=dict)  # share of each drafter's latest drafts that were kept
    forwards_saved: float = 0.0
    draft_forwards: int = 0
    target_bytes: int = 0  # of weights, read by each forward
    draft_bytes: int = 0  # of weights, read by draft models
    remote_rounds: int = 0  # of drafting in another process
    remote_sent_bytes: int = 0  # to it, and
    remote_received_bytes: int = 0  # from it, in all rounds
    plain_seconds: float = 0.0  # that plain steps of the same engine would have taken for the tokens of drafted steps
    drafted_seconds: float = 0.0  # that these steps did take

    lengths: dict[int, int] = field(default_factory=dict)  # drafts of a request in a step -> how often
    choices: dict[str, int] = field(default_factory=dict)  # why so many, see speculative/controller.py -> how often
    explorations: int = 0  # drafts by the drafter that promised less
    fallbacks: int = 0  # pauses of a request below fallback_threshold
    regressions: int = 0  # pauses of the engine, because speculation had been slower than plain decoding
    faults: dict[str, int] = field(default_factory=dict)  # kind -> times that a drafter raised or returned nonsense
    drafters_off: list[str] = field(default_factory=list)  # after too many faults

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def drafter_faults(self) -> int:
        return sum(self.faults.values())

    @property
    def acceptance_rate(self) -> float:
        return self.speculation.acceptance_rate

    @property
    def acceptance_length(self) -> float:
        return self.speculation.acceptance_length

    @property
    def acceptance_by_position(self) -> list[float]:
        return self.speculation.acceptance_by_position

    @property
    def verification_latency(self) -> float:
        return self.speculation.verification_latency

    @property
    def draft_latency(self) -> float:
        """Mean seconds of drafting in a step that verified drafts."""
        counts = self.speculation
        return counts.draft_seconds / counts.verify_steps if counts.verify_steps else 0.0

    @property
    def speed_up(self) -> float:
        """Tokens per second of steps with drafts over those of plain steps; 0 while either was not measured."""
        return self.plain_seconds / self.drafted_seconds if self.drafted_seconds else 0.0

    @property
    def rollbacks_per_second(self) -> float:
        return self.speculation.rollbacks / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def remote_round_bytes(self) -> tuple[float, float]:
        """Mean bytes that a round sends to the process that drafts, and gets from it."""
        return tuple(n / max(1, self.remote_rounds) for n in (self.remote_sent_bytes, self.remote_received_bytes))

    def add_up_drafters(self, drafters: Iterable[object]) -> None:
        """Take over what drafters count themselves, those that do."""
        for name, counter in DRAFTERS_COUNT.items():
            setattr(self, name, sum(getattr(drafter, counter, 0) for drafter in drafters))

    @property
    def weight_bytes_read(self) -> int:
        return self.steps * self.target_bytes + self.draft_bytes

    @property
    def weight_bytes_saved(self) -> float:
        return self.forwards_saved * self.target_bytes - self.draft_bytes


@dataclass(frozen=True)
class MetricsRow:
    """What happened in the last `steps` steps up to step number `step`: one point of the curves over time."""

    step: int
    steps: int
    seconds: float
    output_tokens: int
    batch: float  # mean of the requests that got tokens in a step
    candidate_length: float  # mean drafts of a request in a step
    acceptance_rate: float
    acceptance_length: float
    speed_up: float
    choices: dict[str, int]

    @classmethod
    def between(cls, before: EngineMetrics, now: EngineMetrics) -> MetricsRow:
        """The difference of two states of the same engine's counters."""
        a, b = before.speculation, now.speculation
        steps, rows = now.steps - before.steps, sum(now.lengths.values()) - sum(before.lengths.values())
        drafted, drafted_seconds = b.drafted - a.drafted, now.drafted_seconds - before.drafted_seconds
        choices = {why: n - before.choices.get(why, 0) for why, n in now.choices.items()}
        return cls(
            step=now.steps,
            steps=steps,
            seconds=now.wall_seconds - before.wall_seconds,
            output_tokens=now.output_tokens - before.output_tokens,
            batch=rows / max(1, steps),
            candidate_length=drafted / max(1, rows),
            acceptance_rate=(b.accepted - a.accepted) / max(1, drafted),
            acceptance_length=(b.emitted - a.emitted) / max(1, b.verify_rows - a.verify_rows),
            speed_up=(now.plain_seconds - before.plain_seconds) / drafted_seconds if drafted_seconds else 0.0,
            choices={why: n for why, n in choices.items() if n},
        )
