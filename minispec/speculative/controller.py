"""How many draft tokens each request gets in the next step, and from which drafter: marginal gain over measured cost.

The j-th draft token of a request is worth the chance S_j that it is kept (and all before it), because a kept draft is
a token more. It costs one row of the target's forward, and all drafts of one depth share a forward of the draft model.
So a step with B decoding requests and n draft tokens, the most promising ones first, brings

    (B + S of the n tokens) / (T(rows + n) + depth * D(drafting requests))        tokens per second

and the controller takes the n and the depth at which that is highest, or no drafts. Drafts of a tree come best first,
so n is its size, and S_j the chance of its j-th best draft, whatever its depth. T and D are measured
(costs.StepCost), S is the windowed acceptance of the request and of all text of its kind (costs.Acceptance). Candidate
length, fall-back, the choice between two drafters and what a full batch can bear are one decision. Limits of
`SpeculativeConfig` come on top, each with its own name in `metrics.choices`:

    gain        so many drafts, or none, gain most          request     the request wants none
    fixed       adaptive is off: always K                   turn        beyond verification_batch_size: others first
    probe       no gain is expected; to keep learning       batch       more decode than disable_by_batch_size
    baseline    none, to keep the plain step measured       rejections  first drafts failed in a row: a pause
    no match    nothing to copy, and no other drafter       fallback    kept less than fallback_threshold: a pause
    room        the request ends, or the budget does        regression  slower than plain decoding lately: a pause
    fault       the drafters are off

Whatever is decided here changes how fast tokens come, never which tokens: a decision depends on committed text and on
measured time, never on a token that is still being judged.

Knows: drafters, costs, windows. Does not know: slots, tensors, how drafts are made or judged.
Taught in notebook 12 (speculation inside the engine). The gain rule follows Leviathan et al. 2023, section 3.3, with
measured times in place of their cost ratio.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minispec.config import MAX_CANDIDATE_LENGTH, SpeculativeConfig
from minispec.core import Request, Row, Step
from minispec.metrics import EngineMetrics, SpeculationCounts
from minispec.speculative.costs import Acceptance, StepCost
from minispec.speculative.drafter import Drafter
from minispec.speculative.guard import Draft, Guard
from minispec.speculative.ngram import NgramDrafter

log = logging.getLogger(__name__)

EVIDENCE = 8  # verifications before a request can fall back
PAUSE = 32  # steps without drafts after rejections, or after a first fall-back; each later one lasts twice as long
LONGEST_PAUSE = 1024
PROBE = 32  # steps without a gain after which drafting is tried; the next time it takes twice as many
BASELINE = 128  # steps with drafts after which one may go without, if the plain step of this batch is not measured
EXPLORE = 64  # steps with drafts after which one has a draft more for each; verifications of a request after which it
# tries the drafter that it does not use
TRIED = 2  # requests that try more drafts at the same time
SWITCH_ON, SWITCH_OFF = 1.03, 0.99  # gain over plain decoding that starts drafting, or lets it go on
BATCH_CALM = 16  # steps in a row that the batch must be small again before drafting goes on
FIRST_GUESS, PRIOR_WEIGHT = 0.7, 4  # chance of a draft before any was judged, and the verifications it counts like
BONUS = 0.5  # standard errors by which a chance is taken to be better than it was found, so that it is tried again
KIND_WINDOW = 64  # verifications of all requests, for each drafter and kind of text
KIND_WEIGHT = 16  # verifications that a request must have had before they count as much as those of its kind of text


@dataclass
class _State:
    """What is remembered of one request."""

    longest: int  # its own limit, moved by target_acceptance
    windows: dict[str, Acceptance] = field(default_factory=dict)  # by drafter
    rejections: int = 0  # first drafts rejected in a row
    resume: int = 0  # number of the step from which it may draft
    paused_for: str = ""
    fallbacks: int = 0
    last_turn: int = 0  # see Controller._waiting_turn
    verified: int = 0


class Controller:
    """Owns the drafters of an engine and decides over them. At most one of them has a model.

    Per step: `choose` (how many drafts), `draft` (get them, on the device), `record` for each row (what was kept),
    `end_step` (times).
    """

    def __init__(
        self, config: SpeculativeConfig, drafters: Sequence[Drafter], vocab_size: int, metrics: EngineMetrics
    ) -> None:
        self.config, self.metrics = config, metrics
        guards = [Guard(drafter, vocab_size, config.max_retry_attempts, metrics) for drafter in drafters]
        self.guards = {guard.name: guard for guard in guards}
        copies = [guard for guard in guards if isinstance(guard.drafter, NgramDrafter)]
        models = [guard for guard in guards if guard not in copies]
        assert len(copies) <= 1 and len(models) <= 1, "one n-gram drafter and one other at most"
        self.copier, self.model = (copies or [None])[0], (models or [None])[0]
        self.target_cost, self.draft_cost, self._trees = StepCost(), StepCost(), config.topk > 1
        self._states: dict[Request, _State] = {}
        self._kinds: dict[tuple[str, int], Acceptance] = {}
        self._ended: list[Request] = []  # requests that drafters may still know
        self._step = self._turns = 0
        self._drafting = True  # whether the latest decision was to draft
        self._since_switch = 0  # steps, or since the latest probe
        self._next_baseline = 2  # number of the step from which a plain one may be measured
        self._probe_after = PROBE
        self._large_until = 0  # drafting is off up to this step, because the batch was too large
        self._paused_until, self._pause = 0, PAUSE
        self._speed_window: deque[tuple[float, float]] = deque(maxlen=64)  # (plain would take, took), drafted steps

    # Before the forward --------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Some drafter has not failed too often."""
        return any(guard.on for guard in self.guards.values())

    @property
    def most(self) -> int:
        """Draft tokens of a request in a step that there must be room for."""
        return self.config.most_drafts if self.on else 0

    def choose(self, step: Step) -> None:
        """Cut `row.max_drafts` of the decoding rows to the drafts that they shall have, and say who drafts.

        Copies are put into `row.drafts` at once: they need no device. The rows' committed tokens must be complete.
        """
        self._step += 1
        rows = [row for row in step.rows if not row.request.in_prefill]
        reason, open_rows = self._closed(len(rows)), []
        for row in rows:
            why = reason or self._held_back(row)
            if why:
                row.max_drafts = 0
                self._count(why)
            else:
                open_rows.append(row)
        for row in self._waiting_turn(open_rows):
            open_rows.remove(row)
            row.max_drafts = 0
            self._count("turn")
        if not open_rows:
            return
        budget = sum(row.max_drafts for row in open_rows)
        caps = [min(row.max_drafts, self._state(row.request).longest, _wish(row)) for row in open_rows]
        copies = self._look_up(open_rows, caps)
        if self.config.adaptive:
            other_rows, context = step.num_tokens - len(rows), sum(row.kv_len for row in step.rows)
            lengths = self._by_gain(open_rows, caps, copies, budget, len(rows), other_rows, context)
        else:
            lengths = self._fixed(open_rows, caps, copies)
        for row, length, (tokens, q, parents) in zip(open_rows, lengths, copies, strict=True):
            row.max_drafts = length
            if self.copier is not None and row.drafter == self.copier.name:
                row.drafts, row.q, row.parents = tokens[:length], q, parents and parents[:length]

    def _closed(self, batch: int) -> str:
        """Why nobody drafts in this step, or ""."""
        config = self.config
        if not self.on:
            return "fault"
        if config.disable_by_batch_size is not None:
            if batch > config.disable_by_batch_size:
                self._large_until = self._step + BATCH_CALM
            if self._step <= self._large_until:
                return "batch"
        if not config.adaptive:
            return ""
        if self._step < self._paused_until:
            return "regression"
        if self._drafting and self._step >= self._next_baseline and self.target_cost.weight(batch) < 0.5:
            # Measured anew for each size of the batch, and when what was measured has faded.
            self._next_baseline = self._step + (BASELINE if self.target_cost.known else 2)
            return "baseline"
        return ""

    def _held_back(self, row: Row) -> str:
        """Why this request does not draft, or ""."""
        state = self._state(row.request)
        if not _wish(row):
            return "request"
        if not row.max_drafts:
            return "room"
        return state.paused_for if self._step < state.resume else ""

    def _waiting_turn(self, rows: list[Row]) -> list[Row]:
        """Those that must wait, because verification_batch_size others had their turn longer ago."""
        most = self.config.verification_batch_size
        if most is None or len(rows) <= most:
            return []
        queue = sorted(rows, key=lambda row: self._state(row.request).last_turn)
        for row in queue[:most]:
            self._turns += 1
            self._state(row.request).last_turn = self._turns
        return queue[most:]

    def _look_up(self, rows: Sequence[Row], caps: Sequence[int]) -> list[Draft]:
        """Copies cost nothing, so they are fetched before deciding; how long their match is says what text it is."""
        if self.copier is None:
            return [([], None, None)] * len(rows)
        copies, _ = self.copier.propose([row.request for row in rows], caps)
        self.copier.settle_faults()
        for row, (tokens, *_) in zip(rows, copies, strict=True):
            row.kind = self.copier.drafter.match_length(row.request) if tokens else 0
        return copies

    def _fixed(self, rows: Sequence[Row], caps: Sequence[int], copies: Sequence[Draft]) -> list[int]:
        """Always as many as fit; a copy where there is one."""
        lengths = []
        for row, cap, (copy, *_) in zip(rows, caps, copies, strict=True):
            use_copy = bool(copy) or self.model is None or not self.model.on
            row.drafter = (self.copier if use_copy else self.model).name
            lengths.append(len(copy) if use_copy else cap)
            self._count("no match" if use_copy and not copy else "fixed")
        return lengths

    def _by_gain(
        self,
        rows: Sequence[Row],
        caps: Sequence[int],
        copies: Sequence[Draft],
        budget: int,
        batch: int,
        other: int,
        context: int,
    ) -> list[int]:
        """The lengths with the most expected tokens per second; see the module's head."""
        model_on, most = self.model is not None and self.model.on, max(caps)
        copied = np.zeros((len(rows), most))  # [rows, places] chance S that this draft is kept
        drawn = np.zeros((len(rows), most))
        for b, (row, cap, (copy, *_)) in enumerate(zip(rows, caps, copies, strict=True)):
            if copy:
                copied[b, : len(copy)] = self._survival(row, self.copier.name, len(copy))
            if model_on:
                drawn[b, :cap] = self._survival(row, self.model.name, cap)
        if not model_on and not copied.any():
            for _ in rows:
                self._count("no match")
            return [0] * len(rows)
        explored = [self._explores(row) and copied[b].any() and drawn[b].any() for b, row in enumerate(rows)]
        from_model = (drawn.sum(1) > copied.sum(1)) ^ np.array(explored)
        plain, best, places = self._best(copied, drawn, from_model, budget, batch, other, context)
        gaining = best >= (SWITCH_OFF if self._drafting else SWITCH_ON) * plain
        probing = not gaining and self._since_switch >= self._probe_after
        if gaining != self._drafting:
            # A probe that led to nothing makes the next one rarer, a switch makes them as frequent as ever.
            self._drafting, self._since_switch, self._probe_after = gaining, 0, PROBE
        elif probing:
            self._since_switch, self._probe_after = 0, min(2 * self._probe_after, LONGEST_PAUSE)
        else:
            self._since_switch += 1
        more = gaining and self._since_switch % EXPLORE == EXPLORE - 1
        probing = probing or more
        lengths = []
        for b, (row, cap) in enumerate(zip(rows, caps, strict=True)):
            tried = probing and (self._step + b) % len(rows) < TRIED
            length = int(places[b]) + (more and tried) if gaining else 2 if tried else 0
            least = min(self.config.min_candidate_length, cap)
            use_copy = copied[b].any() and not from_model[b]
            row.drafter = (self.copier if use_copy or not model_on else self.model).name
            lengths.append(min(max(length, least), cap, budget))
            budget -= lengths[-1]
            self.metrics.explorations += bool(explored[b] and lengths[-1])
            self._count("probe" if probing else "gain")
        return lengths

    def _best(
        self,
        copied: np.ndarray,
        drawn: np.ndarray,
        from_model: np.ndarray,
        budget: int,
        batch: int,
        other: int,
        context: int,
    ) -> tuple[float, float, np.ndarray]:
        """Tokens per second without drafts and with the best drafts, and the length of each request's best draft."""
        if budget <= 0:
            return 1.0, 0.0, np.zeros(len(copied))
        if not self.target_cost.known or (from_model.any() and not self.draft_cost.known):
            # Nothing is measured yet: draft a little, and learn.
            return 1.0, np.inf, np.minimum((np.where(from_model[:, None], drawn, copied) > 0).sum(1), 2)
        rows = batch + other + np.arange(1 + min(budget, copied.size))
        seconds = self.target_cost.seconds(rows, context)
        best, lengths = 0.0, np.zeros(len(copied))
        deepest = min(self.config.candidate_length, drawn.shape[1])
        for depth in range(deepest + 1) if from_model.any() else [0]:
            # At depth 0 the draft model rests, and its requests copy where they can. A tree may have more drafts than
            # it is deep.
            own = from_model if depth else np.zeros_like(from_model)
            most = depth if depth < deepest else drawn.shape[1]
            chances = np.where(own[:, None], drawn * (np.arange(drawn.shape[1]) < most), copied)
            order = np.argsort(-chances, axis=None, kind="stable")[:budget]
            order = order[chances.ravel()[order] > 0]
            if not len(order):
                continue
            drafting = depth * self.draft_cost.seconds(np.array([own.sum()]))[0] if depth else 0.0
            gained = np.cumsum(chances.ravel()[order])
            rates = (batch + gained) / (seconds[1 : len(order) + 1] + drafting)
            n = int(rates.argmax())
            if rates[n] > best:
                best = rates[n]
                lengths = np.bincount(order[: n + 1] // chances.shape[1], minlength=len(copied))
        return batch / seconds[0], best, lengths

    def _explores(self, row: Row) -> bool:
        """Now and then a request tries the drafter that it would not use, so that neither estimate grows old."""
        return self._state(row.request).verified % EXPLORE == EXPLORE - 1

    def _survival(self, row: Row, drafter: str, length: int) -> np.ndarray:
        """[length] chance that each draft is kept."""
        guess = [FIRST_GUESS ** (1 + place) for place in range(length if self._trees else 1)]
        kind = self._kind_window(drafter, row.kind).chances(length, guess, PRIOR_WEIGHT, bonus=BONUS)
        window = self._state(row.request).windows.get(drafter)
        chances = window.chances(length, kind, KIND_WEIGHT) if window else kind
        return np.minimum.accumulate(chances) if self._trees else np.cumprod(chances)

    def _kind_window(self, drafter: str, kind: int) -> Acceptance:
        return self._kinds.setdefault((drafter, kind), Acceptance(KIND_WINDOW, self._trees))

    # Drafting ------------------------------------------------------------------------------------------------------

    def draft(self, step: Step) -> None:
        """Let the draft model fill `row.drafts` and `row.q` of its rows. May run beside the host's work."""
        rows = self._drawn(step)
        if rows:
            drafts, step.known = self.model.propose([row.request for row in rows], [row.max_drafts for row in rows])
            for row, draft in zip(rows, drafts, strict=True):
                row.drafts, row.q, row.parents = draft

    def _drawn(self, step: Step) -> list[Row]:
        """Rows whose drafts come from the draft model."""
        return [row for row in step.rows if row.max_drafts > 0 and self.model and row.drafter == self.model.name]

    # After the forward ---------------------------------------------------------------------------------------------

    def record(self, row: Row, path: Sequence[int], emitted: int, *, broken: bool) -> None:
        """Learn from one verification that kept the drafts of `path`. broken: its q was no distribution."""
        state, drafted, accepted = self._state(row.request), len(row.drafts), len(path)
        if broken:
            self.guards[row.drafter].fault("q is no distribution", "its draft is dropped")
        self.metrics.by_drafter.setdefault(row.drafter, SpeculationCounts()).record(
            drafted, accepted, emitted, row.depth
        )
        window = state.windows.setdefault(row.drafter, Acceptance(self.config.acceptance_window, self._trees))
        window.record(drafted, accepted, path)
        self._kind_window(row.drafter, row.kind).record(drafted, accepted, path)
        state.verified += 1
        state.rejections = 0 if accepted else state.rejections + 1
        self._steer(state, window)

    def _steer(self, state: _State, window: Acceptance) -> None:
        """The limits that look at one request: target_acceptance, fallback_threshold, max_consecutive_rejections."""
        config, evidence = self.config, min(EVIDENCE, self.config.acceptance_window)
        if config.target_acceptance is not None and len(window.recent) >= min(4, evidence):
            low, high = config.target_acceptance
            move = (window.rate > high) - (window.rate < low)
            least = max(1, config.min_candidate_length)
            state.longest = min(max(state.longest + move, least), config.most_drafts)
        if len(window.recent) >= evidence and window.rate < config.fallback_threshold:
            state.fallbacks += 1
            self.metrics.fallbacks += 1
            retry = state.fallbacks <= config.max_retry_attempts
            self._hold(state, "fallback", PAUSE << (state.fallbacks - 1) if retry else None)
        elif config.max_consecutive_rejections is not None and state.rejections >= config.max_consecutive_rejections:
            self._hold(state, "rejections", PAUSE)

    def _hold(self, state: _State, reason: str, steps: int | None) -> None:
        """No drafts for `steps` steps, or for good; what the windows say is forgotten, so a retry is judged anew."""
        state.paused_for, state.rejections = reason, 0
        state.resume = self._step + 1 + steps if steps is not None else 2**62
        state.windows.clear()

    def end_step(self, step: Step, draft_seconds: float, other_seconds: float, emitted: int) -> None:
        """Learn what the step cost, the drafting and all the rest."""
        drawn, decoding = self._drawn(step), [row for row in step.rows if row.emits]
        passes = min(max((len(row.drafts) for row in drawn), default=0), self.config.candidate_length)
        # A request's first draft is dear: the draft model reads the prompt.
        if passes and all(self._state(row.request).verified > 1 for row in drawn):
            self.draft_cost.record(len(drawn), draft_seconds / passes)
        for row in decoding:
            self.metrics.lengths[len(row.drafts)] = self.metrics.lengths.get(len(row.drafts), 0) + 1
        # Prompt chunks say nothing about what a row more costs here, and would outweigh the small steps. No time at all
        # is no measurement: a virtual clock stands still, or drafts were made under the step before.
        if not decoding or any(row.num_committed > 1 for row in step.rows) or other_seconds <= 0:
            return
        context = sum(row.kv_len for row in step.rows)
        if any(row.drafts for row in decoding) and self.target_cost.known:
            plain = float(self.target_cost.seconds(np.array([len(decoding)]), context)[0]) * emitted / len(decoding)
            self._watch(plain, draft_seconds + other_seconds)
        self.target_cost.record(step.num_tokens, other_seconds, context)

    def _watch(self, plain: float, took: float) -> None:
        """Compare with what plain decoding would have taken for the same tokens; pause when it is no gain."""
        window = self._speed_window
        window.append((plain, took))
        self.metrics.plain_seconds += plain
        self.metrics.drafted_seconds += took
        if not self.config.adaptive or len(window) < window.maxlen:
            return
        ratio = sum(p for p, _ in window) / sum(t for _, t in window)
        if ratio < 1:
            log.info("speculation reached %.2f of plain speed over %d steps: a pause", ratio, len(window))
            self.metrics.regressions += 1
            self._paused_until = self._step + 1 + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            window.clear()
        elif ratio > SWITCH_ON:
            self._pause = PAUSE

    @property
    def alignment(self) -> dict[str, float]:
        """Share of its latest drafts that the target agreed with, by drafter."""
        recent: dict[str, np.ndarray] = {}
        for (name, _), window in self._kinds.items():
            if not window.recent:
                continue
            recent[name] = recent.get(name, 0) + np.sum(window.recent, axis=0)
        return {name: float(accepted / drafted) for name, (drafted, accepted) in recent.items()}

    def release(self, request: Request) -> None:
        """Forget a request that has ended, as soon as no drafter is at work."""
        self._ended.append(request)

    def settle(self) -> None:
        """Count the faults of the latest step and forget who has ended. Call this while no drafter is at work."""
        for guard in self.guards.values():
            guard.settle_faults()
        while self._ended:
            request = self._ended.pop()
            for guard in self.guards.values():
                guard.release(request)
            self._states.pop(request, None)

    def _state(self, request: Request) -> _State:
        if request not in self._states:
            self._states[request] = _State(longest=self.config.most_drafts)
        return self._states[request]

    def _count(self, reason: str) -> None:
        self.metrics.choices[reason] = self.metrics.choices.get(reason, 0) + 1


def _wish(row: Row) -> int:
    """Most drafts that the request itself wants."""
    params = row.request.params
    if not params.speculative:
        return 0
    return MAX_CANDIDATE_LENGTH if params.candidate_length is None else params.candidate_length
