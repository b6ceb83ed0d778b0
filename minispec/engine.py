"""The loop: plan, launch (draft, run, verify), advance, settle. One call of `step` is one forward of the target model.

    plan      who takes part, with how many tokens; slots                       host
    launch    draft, forward and verification, as one job                       device
    advance   tokens and cursors, all that the next step must know              host, as short as can be
    settle    text, stop strings, callbacks, counters, the ends of requests     host, may run under the next step

Rollback is truncation: advancing sets `kv_len` to the committed end. Slots of rejected drafts stay reserved and are
overwritten by the next step. Where drafts were a tree, the accepted path is first brought to consecutive slots. What a
launched step may still touch is not given back: a request that ends with a step in flight leaves when that step is in,
and what it brings is dropped.

Knows: the order of the parts and what a finished token changes (cursors, text, stops, counters). Does not know: how
rows are chosen (scheduler), where K/V live (pool), what a forward is (runner), how drafts are made (drafter), what runs
beside what (device). Taught in notebooks 04 (continuous batching), 08 (overlap) and 12 (speculation inside the engine).
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from minispec.account import Account, Launched
from minispec.config import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from minispec.core import Request, Row, Status, Step, TokenEvent, TokenKind
from minispec.device import InlineDevice, ThreadDevice, Watch
from minispec.intake import Intake
from minispec.interrupts import hold_interrupts
from minispec.kv.pool import KVPool
from minispec.metrics import EngineMetrics, MetricsRow
from minispec.runner import Runner, keep_paths
from minispec.sampling.distribution import needs_processing
from minispec.sampling.grammar import constrain
from minispec.sampling.sampler import Judged, Outcome, judge, outcomes
from minispec.scheduler import Scheduler
from minispec.speculative.controller import Controller
from minispec.speculative.drafter import Drafter
from minispec.trace import Trace

log = logging.getLogger(__name__)

NO_TOKEN = "no token can be chosen: the logits are not finite, or every token is forbidden"


class Engine:
    """Runs requests over one model. It belongs to one thread; only `add` and `abort` may be called from a callback.

    runner: the target model. pool: its slots. context_length: most tokens of one request (cut to the pool's size).
    drafters: who proposes tokens to verify; none: plain decoding. tokenizer: turns ids into text (None: ids only).
    device: where steps run, beside the host unless enable_overlap is off.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        pool: KVPool,
        *,
        context_length: int,
        eos_ids: Iterable[int] = (),
        tokenizer: object | None = None,
        drafters: Sequence[Drafter] = (),
        device: InlineDevice | None = None,
    ) -> None:
        self.config, self.runner, self.pool, self.drafters = config, runner, pool, list(drafters)
        self.intake = Intake(runner.vocab_size, min(context_length, pool.num_slots), eos_ids, tokenizer)
        self.scheduler = Scheduler(config, pool)
        self.device = device or (ThreadDevice(runner.device) if config.enable_overlap else InlineDevice(runner.device))
        self.account = Account(self.device, trace=Trace() if config.enable_trace else None)
        self.metrics = self.account.metrics
        self.history: list[MetricsRow] = []
        speculative = config.speculative_config or SpeculativeConfig()
        self.verification, self.metrics_interval = speculative.verification, speculative.metrics_interval
        self.controller: Controller | None = None
        if drafters and speculative.candidate_length:
            self.controller = Controller(speculative, drafters, runner.vocab_size, self.metrics)
        self._before = self.snapshot()  # when the latest row of the history was written
        self.requests: dict[str, Request] = {}  # everything not finished
        self._ids = itertools.count()
        self._launched: Launched | None = None  # on the device
        self._unsettled: Launched | None = None  # its tokens are committed, and not yet looked at
        self._leaving: dict[Request, tuple[str, TokenEvent | None]] = {}  # ended with a step in flight
        self._stepping = False
        self._abort_later: set[Request] = set()  # whose abort came from inside a step
        self._raised: list[BaseException] = []  # by callbacks

    # Requests come and go ------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        request_id: str | None = None,
    ) -> list[Request]:
        """Queue the `params.n` completions of a prompt (token ids); they run when `step` is called.

        Raises ConfigError: see `Intake.requests`, an id of a request that is still running, or a closed engine.
        """
        running = {request.group for request in self.requests.values()} | set(self.requests)
        group = request_id
        if group is None:
            group = next(name for name in map("request-{}".format, self._ids) if name not in running)
        requests = self.intake.requests(prompt, params, group, on_token)
        for name in (group, *(request.id for request in requests)):
            if name in running:
                raise ConfigError(f"request id {name!r} is already running")
        for request in requests:
            self.requests[request.id] = request
            self.scheduler.add(request)
        return requests

    def abort(self, request_id: str) -> bool:
        """End a request now, or all completions of a prompt; False when none of that name runs (that is no error).

        During a step (from a callback, or from the garbage collector) it takes effect when the step ends, and no
        further token of it is committed or reported before.
        """
        found = [r for r in self.requests.values() if request_id in (r.id, r.group)]
        if self._stepping:
            self._abort_later.update(found)
        elif found:
            with self._exclusive():
                try:
                    if self._unsettled or any(request.in_flight for request in found):
                        self._land()
                finally:  # whatever the step in flight brought, these end with this block
                    self._abort_later.update(found)
        return bool(found)

    @property
    def context_length(self) -> int:
        """Most tokens of one request."""
        return self.intake.context_length

    @property
    def trace(self) -> Trace | None:
        """What was done when, if enable_trace is on."""
        return self.account.trace

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # One step ------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One forward for everybody whose turn it is. Returns what was run (an empty step when nothing is queued).

        With overlap, the step whose tokens came in is returned; the next one is on the device already, and what the
        tokens mean (text, stop strings, callbacks) is settled under it, at the next call.
        Ctrl-C takes effect when the step is done, and so does what a callback raises. An exception of the model passes
        through; the requests are still there and the next step computes them again.
        """
        with self._exclusive():
            started = self.device.now()
            launched = self.overlap_loop() if self.config.enable_overlap else self.normal_loop()
            if launched is None:
                return Step([])
            self._end_step(launched, self.device.now() - started)
            if self.config.check_every_step:
                self.check_integrity()
            return launched.step

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """What callbacks want to abort is aborted at the end of this block; nobody may step inside."""
        if self._stepping:
            raise RuntimeError("a step is running already: an engine belongs to one thread, callbacks must not step it")
        self._stepping = True
        with hold_interrupts():
            try:
                yield
            finally:
                self._end_aborted()
                self._stepping = False
        if self._raised:  # now that all is in order
            error, self._raised = self._raised[0], []
            raise error

    def _end_aborted(self) -> None:
        while self._abort_later:  # a callback that hears of an end may abort another one
            request = self._abort_later.pop()
            if not request.finished:
                self._finish(request, "abort")

    # Both loops do the same things to each step, in another order.

    def normal_loop(self) -> Launched | None:
        """Plan, launch, wait, advance, settle: one after the other. None when nothing can run."""
        step = self._plan()
        if not step.rows:
            return None
        launched = self._launch(step)
        self._advance(launched)
        self._settle(launched)
        return launched

    def overlap_loop(self) -> Launched | None:
        """Settle the step before and plan the next one while this one is on the device.

            host      settle n-1, plan n+1    advance n    settle n, plan n+2      advance n+1
            device    step n ................              step n+1 ...........

        When no row of step n+1 needs to know what step n brings (its token ids can stay on the device), n+1 is launched
        before n is in, and the device never waits. Otherwise (drafts start where the accepted ones end) the host waits
        for n and launches at once what it has planned.
        """
        if self._launched is None:
            step = self._plan()
            if not step.rows:
                return None
            self._launched = self._launch(step)
        current, self._launched = self._launched, None
        self._settle_rest()
        following = self._plan(ahead=True)
        carried = following is not None and self._carry(following, current)
        if carried:
            self._launched = self._launch(following, after=current)
        self._advance(current)
        self._unsettled = current
        if not carried:
            following = following and self._complete(following)
            if not following or not following.rows:  # memory is short, or all have ended: settle first, then look again
                self._settle_rest()
                self._end_aborted()
                following = self._plan()
            if following.rows:
                self._launched = self._launch(following)
        if self._launched is None:
            self._settle_rest()
        return current

    def _settle_rest(self) -> None:
        if self._unsettled is not None:
            launched, self._unsettled = self._unsettled, None
            self._settle(launched)

    def land(self) -> None:
        """Wait for the step in flight, if there is one, and settle it."""
        with self._exclusive():
            self._land()

    def _land(self) -> None:
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._settle_rest()
            self._advance(launched)
            self._unsettled = launched
        self._settle_rest()

    # The parts of a step ---------------------------------------------------------------------------------------

    def _plan(self, *, ahead: bool = False) -> Step | None:
        with self.account.timed("plan"):
            step = self.scheduler.plan(self.controller.most if self.controller else 0, ahead=ahead)
        assert ahead or step.rows or not self.requests, "requests are queued and none can run"
        return step

    def _carry(self, step: Step, before: Launched) -> bool:
        """Let rows of `step` take their token from `before`, which is in flight; False if one cannot."""
        drafting = self.controller and (self.controller.on or any(row.max_drafts for row in before.step.rows))
        places = {row.request: place for place, row in enumerate(before.step.sampled)}
        unknown = any(row.request in places and needs_processing(row.request.params) for row in step.rows)
        if not step.rows or drafting or unknown:  # a history must be known to process logits
            return False
        for row in step.rows:
            row.carried, row.max_drafts = places.get(row.request), 0
        return True

    def _complete(self, step: Step) -> Step:
        """A step that was planned ahead, after what it waited for is in."""
        ended = self._abort_later | {row.request for row in step.rows if row.request.ending or row.request.finished}
        rows = [row for row in step.rows if row.request not in ended]
        for row in rows:
            if not row.request.in_prefill:
                row.start, row.max_drafts = row.request.kv_len, min(row.max_drafts, row.request.max_drafts)
        return Step(rows)

    def _launch(self, step: Step, after: Launched | None = None) -> Launched:
        """Send draft, forward and verification to the device; move the cursors of what the step reads for sure."""
        if self.controller and after is None:
            with self.account.timed("choose"):
                self.controller.choose(step)
        for row in step.rows:
            request = row.request
            request.in_flight += 1
            request.unread += row.emits * (1 + row.max_drafts)
            if request.in_prefill:
                request.kv_len = row.end
        before = after.flight if after and any(row.carried is not None for row in step.rows) else None

        def job(watch: Watch) -> Judged | None:
            if before is not None:
                step.take_over(before.peek().carried)
            if any(row.max_drafts for row in step.rows):
                with watch("draft"):
                    self.controller.draft(step)
            with watch("forward"):
                constrain(step.sampled, self.runner.device)
                logits = self.runner.forward(step, self.pool.table.slots)
            with watch("verify"):
                judged = judge(logits, step.sampled, self.verification, step.known) if step.sampled else None
                keep_paths(self.runner, self.pool, step.sampled, judged)
            with watch("copy"):
                return judged and judged.to_host()

        return self.account.launch(step, job)

    def _advance(self, launched: Launched) -> None:
        """Wait for the step; append its tokens and set cursors to the committed end: what the next step must know."""
        step = launched.step
        try:
            judged = launched.flight.wait()
        except BaseException:
            self._give_up(launched)
            raise
        self.account.landed(launched)
        with self.account.timed("advance", launched):
            if self.controller:
                self.controller.settle()
            results = iter(outcomes(judged, step.sampled) if judged else ())
            launched.outcomes = [next(results) if row.emits else None for row in step.rows]
            for row, outcome in zip(step.rows, launched.outcomes, strict=True):
                request = row.request
                request.in_flight -= 1
                request.unread -= row.emits * (1 + row.max_drafts)
                dropped = request.ending or request in self._abort_later  # it ended while this was in flight
                launched.emitted.append(0 if dropped else self._take(row, outcome))
            for request in [request for request in self._leaving if not request.in_flight]:
                self._finish(request, *self._leaving.pop(request))

    def _take(self, row: Row, outcome: Outcome | None) -> int:
        """Commit what a row has brought; the number of tokens that it adds."""
        request, before = row.request, len(row.request.tokens)
        request.metrics.forwards += 1
        request.metrics.computed_tokens += row.q_len
        if before == request.prefill_end:  # it is reading its prompt; others that begin alike need not wait for its end
            request.kv_len = max(request.kv_len, row.end)
            if not (outcome and outcome.failed):
                self.pool.commit_prefix(request, row.end)
        if outcome is None:
            return 0
        self.pool.repoint(row, outcome.path)
        for place, (token, kind) in enumerate(zip(outcome.tokens, row.kinds(outcome.path), strict=False)):
            request.tokens.append(token)
            request.kinds.append(kind)
            if outcome.logprobs:
                request.logprobs.append(outcome.logprobs[place])
            if request.num_output > request.params.min_tokens and token in request.stop_ids:
                request.ending = "stop"
                break
            if len(request.tokens) == request.max_len:
                request.ending = "length"
                break
        else:
            request.ending = "error" if outcome.failed else None
        request.kv_len = len(request.tokens) - 1  # rollback: what lies behind is not valid any more
        return len(request.tokens) - before

    def _give_up(self, launched: Launched) -> None:
        """The device failed: the cursors go back to where they were before the launches, and nothing is in flight."""
        flying = [launched] if self._launched is None else [launched, self._launched]
        self._launched = None
        for each in flying[1:]:
            with suppress(BaseException):
                each.flight.wait()
        for row in (row for each in flying for row in each.step.rows):
            request = row.request
            request.in_flight = request.unread = 0
            if len(request.tokens) == request.prefill_end:
                request.kv_len = min(request.kv_len, row.start)
        for request, ending in self._leaving.items():
            self._finish(request, *ending)
        self._leaving.clear()

    def _settle(self, launched: Launched) -> None:
        """What the new tokens mean: text, stop strings, who hears of them, counters, who has ended."""
        step = launched.step
        with self.account.timed("settle", launched):
            self.account.count_seconds(launched)
            emitted = []
            for row, outcome, count in zip(step.rows, launched.outcomes, launched.emitted, strict=True):
                request = row.request
                if outcome is None or request.finished:
                    continue
                if request in self._abort_later:  # by the callback of another one: this was not seen by anybody
                    request.end = row.end if count else request.end
                    continue
                if count:
                    emitted.append(self._report(row, outcome, count))
                ended = request.finished or request in self._abort_later  # by the tokens before the one that failed
                if outcome.failed and not ended:
                    request.error = request.error or NO_TOKEN
                    self._finish(request, "error")
            self.metrics.output_tokens += sum(emitted)
            self.metrics.forwards_saved += sum(emitted) / len(emitted) - 1 if emitted else 0
        if self.controller and self._launched is None:
            self.controller.settle()

    def _report(self, row: Row, outcome: Outcome, count: int) -> int:
        """Tell about the row's `count` tokens until one of them ends the text; the number that stays."""
        request, first = row.request, row.end
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = time.perf_counter() - request.created
        for place in range(count):
            token, number = request.tokens[first + place], first + place + 1 - len(request.prompt)
            try:
                reason, text = self._read(request, token, number)
            except Exception as error:  # a tokenizer may raise what it likes, and only this text is lost
                request.error = f"the text cannot be read: {error}"
                reason, text = "error", ""
            logprob = request.logprobs[number - 1] if request.logprobs else None
            event = TokenEvent(token, request.kinds[number - 1], text, reason, logprob)
            if reason is None:
                self._emit(request, event)
            if reason is not None or request in self._abort_later:  # the consumer has had enough
                break
        emitted = place + 1
        if emitted < count:
            request.end = first + emitted
        if row.drafts:
            self.account.count_drafts(row, outcome.path, emitted, self.pool.slots(request))
            self.controller.record(row, outcome.path, emitted, broken=outcome.broken)
        if reason is not None:
            self._finish(request, reason, event)
        return emitted

    def _read(self, request: Request, token: int, number: int) -> tuple[str | None, str]:
        """Finish reason (None: go on) after `token`, output token `number` from 1, and the text that may be shown."""
        params, text = request.params, request.text
        if number > params.min_tokens and token in request.stop_ids:
            return "stop", text.flush()
        shown = text.push(token, check_stop=number >= params.min_tokens)
        if text.stopped:
            return "stop", shown
        if len(request.prompt) + number == request.max_len:
            return "length", shown + text.flush()
        return None, shown

    def _end_step(self, launched: Launched, seconds: float) -> None:
        """Tell the controller what the step cost, and write a row of the history when it is time."""
        self.metrics.wall_seconds += seconds
        if not self.requests:
            self.device.rest()
        if self.controller:
            draft = launched.seconds.get("draft", 0.0)
            self.controller.end_step(launched.step, draft, max(0.0, seconds - draft), sum(launched.emitted))
        if self.metrics.steps % self.metrics_interval == 0:
            now = self.snapshot()
            self.history.append(MetricsRow.between(self._before, now))
            self._before = now

    def snapshot(self) -> EngineMetrics:
        """A copy of all counters, those that other parts keep included."""
        metrics = copy.deepcopy(self.metrics)
        metrics.preemptions, metrics.target_bytes = self.scheduler.preemptions, self.runner.weight_bytes
        if self.controller:
            metrics.alignment = self.controller.alignment
            metrics.add_up_drafters(self.drafters)
        return metrics

    def _finish(self, request: Request, reason: str, event: TokenEvent | None = None) -> None:
        """The only way out: give everything back and say so once; when a launched step still has it, after that."""
        if request.in_flight:
            request.ending, _ = self._leaving.setdefault(request, (reason, event))
            return
        if request.end is not None:
            kept = request.num_output
            del request.tokens[request.end :], request.kinds[kept:], request.logprobs[kept:]
            request.kv_len, request.end = max(request.tree_len, min(request.kv_len, len(request.tokens) - 1)), None
        request.finish_reason = reason
        del self.requests[request.id]
        self.scheduler.remove(request, keep=reason != "error")
        if self.controller:
            self.controller.release(request)
        request.metrics.finished_s = time.perf_counter() - request.created
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self.metrics.prompt_tokens += len(request.prompt)
        self.metrics.cached_tokens += request.metrics.cached_tokens
        self._emit(request, event or TokenEvent(-1, TokenKind.PLAIN, request.text.flush(), reason))

    def _emit(self, request: Request, event: TokenEvent) -> None:
        if request.on_token:
            try:
                request.on_token(event)
            except BaseException as error:  # the others' tokens must not be lost for it
                self._raised.append(error)

    # Care ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner and all cursors agree."""
        self.pool.check_integrity(self.scheduler.running)
        for request in self.requests.values():
            assert request.status is not Status.FINISHED, f"{request.id} is finished and still listed"
            assert request.status is Status.RUNNING or request.table_row is None, f"{request.id} waits and holds slots"

    def close(self) -> None:
        """Abort what runs and let the device go. Nothing can be added after that."""
        self.intake.open = False
        try:
            with self._exclusive():
                try:
                    self._land()
                finally:
                    self._abort_later.update(self.requests.values())
        finally:
            self.device.close()
