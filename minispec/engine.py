"""The loop: plan, draft, run, verify, commit. One call of `step` is one forward of the target model.

Knows: the order of the five parts and what a finished token changes (cursors, text, stops, counters). Does not know:
how rows are chosen (scheduler), where K/V live (pool), what a forward is (runner), how drafts are made (drafter).

Rollback is truncation: after verification `kv_len` is set to the committed end. Slots of rejected drafts stay
reserved and are overwritten by the next step.

Taught in notebooks 04 (continuous batching) and 12 (speculation inside the engine).
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from minispec.config import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from minispec.core import Request, Row, Status, Step, TokenEvent, TokenKind
from minispec.kv.pool import KVPool
from minispec.metrics import EngineMetrics, MetricsRow, RollbackEvent
from minispec.runner import Runner
from minispec.sampling.rng import child_seed
from minispec.sampling.sampler import Outcome, choose_tokens
from minispec.scheduler import Scheduler
from minispec.speculative.controller import Controller
from minispec.speculative.drafter import Drafter
from minispec.text import TextStream

log = logging.getLogger(__name__)


class Engine:
    """Runs requests over one model. It belongs to one thread; only `add` and `abort` may be called from a callback.

    runner: the target model. pool: its slots. context_length: most tokens of one request (cut to the pool's size).
    drafters: who proposes tokens to verify; none: plain decoding. tokenizer: turns ids into text (None: ids only).
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
    ) -> None:
        self.config, self.runner, self.pool, self.drafters = config, runner, pool, list(drafters)
        self.context_length = min(context_length, pool.num_slots)
        self.eos_ids = frozenset(eos_ids)
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config, pool)
        self.metrics = EngineMetrics()
        self.history: list[MetricsRow] = []
        speculative = config.speculative_config or SpeculativeConfig()
        self.verification, self.metrics_interval = speculative.verification, speculative.metrics_interval
        self.controller: Controller | None = None
        if drafters and speculative.candidate_length:
            self.controller = Controller(speculative, drafters, runner.vocab_size, self.metrics)
        self._before = self.snapshot()  # when the latest row of the history was written
        self.requests: dict[str, Request] = {}  # everything not finished
        self._ids = itertools.count()
        self._seeds = random.SystemRandom()
        self._stepping = False
        self._took: dict[str, float] = {}  # seconds of each phase of the latest step
        self._abort_later: set[str] = set()  # ids whose abort came from inside a step
        if self.context_length < 2:
            raise ConfigError(f"a context of {self.context_length} tokens cannot hold a prompt and an output token")

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

        Raises ConfigError: empty prompt, an id outside the vocabulary, no room for one output token, or an id of a
        request that is still running.
        """
        prompt = self.check_prompt(prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop {params.stop} needs text, and this model has no tokenizer: use stop_token_ids")
        base = request_id if request_id is not None else self._new_id()
        names = [base if params.n == 1 else f"{base}.{i}" for i in range(params.n)]
        for name in names:
            if name in self.requests:
                raise ConfigError(f"request id {name!r} is already running")
        longest = self.context_length
        max_len = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        requests = []
        for index, name in enumerate(names):
            request = Request(
                id=name,
                group=base,
                prompt=prompt,
                params=params,
                seed=seed if index == 0 else child_seed(seed, index),
                max_len=max_len,
                eos_ids=self.eos_ids,
                index=index,
                text=TextStream(self.tokenizer, prompt, params.stop, params.skip_special_tokens),
                on_token=on_token,
            )
            self.requests[name] = request
            self.scheduler.add(request)
            requests.append(request)
        return requests

    def check_prompt(self, prompt: Sequence[int]) -> list[int]:
        """The prompt as a list of plain ints; raises ConfigError when it cannot be run."""
        try:
            prompt = [_token_id(token) for token in prompt]
        except TypeError as error:
            raise ConfigError(f"a prompt must be a list of token ids, got {prompt!r:.80}") from error
        if not prompt:
            raise ConfigError("the prompt is empty: at least one token is needed")
        if len(prompt) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the context limit is {self.context_length}: "
                f"at most {self.context_length - 1} leave room for an output token"
            )
        self._check_ids("the prompt", prompt)
        return prompt

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.runner.vocab_size:
                raise ConfigError(f"{what} holds token id {token}, outside the vocabulary of {self.runner.vocab_size}")

    def abort(self, request_id: str) -> bool:
        """End a request now, or all completions of a prompt; False when none of that name runs (that is no error).

        During a step (from a callback, or from the garbage collector) it takes effect when the step ends, and no
        further token of it is committed or reported before.
        """
        found = [r for r in self.requests.values() if request_id in (r.id, r.group)]
        for request in found:
            if self._stepping:
                self._abort_later.add(request.id)
            else:
                self._finish(request, "abort")
        return bool(found)

    def _new_id(self) -> str:
        taken = {request.group for request in self.requests.values()} | set(self.requests)
        return next(name for name in map("request-{}".format, self._ids) if name not in taken)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # One step ------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One forward for everybody whose turn it is. Returns what was run (an empty step when nothing is queued).

        Ctrl-C takes effect when the step is done. An exception of the model passes through; the requests are still
        there and the next step computes them again.
        """
        if self._stepping:
            raise RuntimeError("a step is running already: an engine belongs to one thread, callbacks must not step it")
        self._stepping = True
        with hold_interrupts():
            try:
                return self._step()
            finally:
                self._stepping = False
                for request_id in self._abort_later & set(self.requests):
                    self.abort(request_id)
                self._abort_later.clear()

    def _step(self) -> Step:
        with self._timed("plan"):
            step = self.scheduler.plan(self.controller.choose if self.controller else None)
        if not step.rows:
            assert not self.requests, "requests are queued and none can run"
            return step
        with self._timed("draft"):
            if self.controller:
                self.controller.draft(step)
        with self._timed("forward"):
            logits = self.runner.forward(step, self.pool.table.slots)
        with self._timed("verify"):
            outcomes = choose_tokens(logits, step.sampled, self.verification) if step.sampled else []
        with self._timed("commit"):
            self._commit(step, outcomes)
        self._end_step(step)
        if self.config.check_every_step:
            self.check_integrity()
        return step

    def _commit(self, step: Step, outcomes: list[Outcome]) -> None:
        """Give each request its tokens and set its cursors to the committed end."""
        self.metrics.steps += 1
        self.metrics.computed_tokens += step.num_tokens
        self._count_seconds(step)
        tokens_before, emitting = self.metrics.output_tokens, 0
        by_row = dict(zip(map(id, step.sampled), outcomes, strict=True))
        for row in step.rows:
            request = row.request
            if request.id in self._abort_later:
                continue
            request.metrics.forwards += 1
            request.metrics.computed_tokens += row.q_len
            was_prefill = request.in_prefill
            request.kv_len = row.start + row.num_committed
            outcome = by_row.get(id(row))
            if outcome is None:  # a chunk of a prompt; others that begin alike need not wait for its end
                self.pool.commit_prefix(request)
                continue
            if outcome.failed:
                self._fail(request, "no token can be chosen: the logits are not finite, or every token is forbidden")
                continue
            if was_prefill:
                self.pool.commit_prefix(request)
            self._append(row, outcome)
            emitting += 1
        self._emitted = self.metrics.output_tokens - tokens_before
        if emitting:
            self.metrics.forwards_saved += self._emitted / emitting - 1

    def _append(self, row: Row, outcome: Outcome) -> None:
        request = row.request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = time.perf_counter() - request.created
        for place, (token, kind) in enumerate(zip(outcome.tokens, _kinds(row, outcome), strict=True)):
            request.tokens.append(token)
            request.kinds.append(kind)
            if outcome.logprobs:
                request.logprobs.append(outcome.logprobs[place])
            reason, text = self._read(request, token)
            event = TokenEvent(token, kind, text, reason)
            if reason is not None:
                break
            self._emit(request, event)
            if request.id in self._abort_later:  # the consumer has had enough
                break
        request.kv_len = len(request.tokens) - 1  # rollback: what lies behind is not valid any more
        self._count(row, outcome, emitted=place + 1)
        if row.drafts:
            self.controller.record(row, outcome.accepted, place + 1, broken=outcome.broken)
        if reason is not None:
            self._finish(request, reason, event)

    def _read(self, request: Request, token: int) -> tuple[str | None, str]:
        """Finish reason (None: go on) after `token`, the newest, and the text that may be shown now."""
        params, text = request.params, request.text
        may_stop = request.num_output > params.min_tokens
        if may_stop and token in request.stop_ids:
            return "stop", text.flush()
        shown = text.push(token, check_stop=request.num_output >= params.min_tokens)
        if text.stopped:
            return "stop", shown
        if len(request.tokens) == request.max_len:
            return "length", shown + text.flush()
        return None, shown

    def _count(self, row: Row, outcome: Outcome, emitted: int) -> None:
        self.metrics.output_tokens += emitted
        if not row.drafts:
            return
        metrics = row.request.metrics
        metrics.accepted_per_step.append(outcome.accepted)
        for counts in (metrics.speculation, self.metrics.speculation):
            counts.record(len(row.drafts), outcome.accepted, emitted)
        kept = min(outcome.accepted, emitted)  # a stop inside the draft undoes the rest of it, right or not
        if kept < len(row.drafts):
            start, undone = row.start + row.num_committed + kept, tuple(row.drafts[kept:])
            slots = self.pool.slots(row.request)[start : start + len(undone)].tolist()
            metrics.rollbacks.append(
                RollbackEvent(row.request.id, self.metrics.steps, start, tuple(slots), undone, outcome.accepted)
            )

    def _count_seconds(self, step: Step) -> None:
        """Draft and verification time: once for the engine, in full for each request that shared the wait."""
        draft, verify = self._took["draft"], self._took["forward"] + self._took["verify"]
        asked = [row for row in step.rows if row.max_drafts > 0]
        for row in asked:
            row.request.metrics.speculation.record_seconds(draft, verify if row.drafts else None)
        if asked:
            self.metrics.speculation.record_seconds(draft, verify if any(row.drafts for row in asked) else None)

    def _end_step(self, step: Step) -> None:
        """Tell the controller what the step cost, and write a row of the history when it is time."""
        if self.controller:
            draft = self._took["draft"]
            self.controller.end_step(step, draft, sum(self._took.values()) - draft, self._emitted)
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
            metrics.draft_forwards = sum(getattr(drafter, "forwards", 0) for drafter in self.drafters)
            metrics.draft_bytes = sum(getattr(drafter, "bytes_read", 0) for drafter in self.drafters)
        return metrics

    def _fail(self, request: Request, message: str) -> None:
        request.error = message
        self._finish(request, "error")

    def _finish(self, request: Request, reason: str, event: TokenEvent | None = None) -> None:
        """The only way out: give everything back and say so once."""
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

    @staticmethod
    def _emit(request: Request, event: TokenEvent) -> None:
        if request.on_token:
            request.on_token(event)

    # Care ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner and all cursors agree."""
        self.pool.check_integrity(self.scheduler.running)
        for request in self.requests.values():
            assert request.status is not Status.FINISHED, f"{request.id} is finished and still listed"
            assert request.status is Status.RUNNING or request.table_row is None, f"{request.id} waits and holds slots"

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._took[phase] = time.perf_counter() - started
        self.metrics.add_seconds(phase, self._took[phase])


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the block is done, so that no bookkeeping is cut in half. Does nothing off the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])


def _token_id(token: object) -> int:
    """A plain int; TypeError for anything that is no whole number (True and False are none)."""
    if isinstance(token, bool):
        raise TypeError(f"{token} is no token id")
    return operator.index(token)


def _kinds(row: Row, outcome: Outcome) -> list[TokenKind]:
    if not row.drafts:
        return [TokenKind.PLAIN]
    last = TokenKind.BONUS if outcome.accepted == len(row.drafts) else TokenKind.CORRECTED
    return [TokenKind.ACCEPTED] * outcome.accepted + [last]
