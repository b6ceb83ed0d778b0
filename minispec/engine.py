"""The loop: plan, draft, run, verify, commit. One call of `step` is one forward of the target model.

Knows: the order of the five parts and what a finished token changes (cursors, text, stops, counters). Does not know:
how rows are chosen (scheduler), where K/V live (pool), what a forward is (runner), how drafts are made (drafter).

Rollback is truncation: after verification `kv_len` is set to the committed end. Slots of rejected drafts stay
reserved and are overwritten by the next step.

Taught in notebooks 04 (continuous batching) and 12 (speculation inside the engine).
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from minispec.config import ConfigError, EngineConfig, SamplingParams
from minispec.core import Request, Row, Status, Step, TokenEvent, TokenKind
from minispec.kv.pool import KVPool
from minispec.metrics import EngineMetrics
from minispec.runner import Runner
from minispec.sampling.rng import child_seed
from minispec.sampling.sampler import Outcome, choose_tokens
from minispec.scheduler import Scheduler
from minispec.speculative.drafter import Drafter
from minispec.text import TextStream

log = logging.getLogger(__name__)


class Engine:
    """Runs requests over one model.

    runner: the target model. pool: its slots. context_length: most tokens of one request (cut to the pool's size).
    drafter: proposes tokens to verify, or None. tokenizer: turns ids into text (None: ids only).
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
        drafter: Drafter | None = None,
    ) -> None:
        self.config, self.runner, self.pool, self.drafter = config, runner, pool, drafter
        self.context_length = min(context_length, config.context_length or context_length, pool.num_slots)
        self.eos_ids = frozenset(eos_ids)
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config, pool)
        self.metrics = EngineMetrics()
        self.requests: dict[str, Request] = {}  # everything not finished
        self._ids = itertools.count()
        self._seeds = random.SystemRandom()

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
        base = request_id if request_id is not None else f"request-{next(self._ids)}"
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
        prompt = [int(token) for token in prompt]
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
        """End a request now, in whatever state it is. False when no such request is running (that is no error)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # One step ------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One forward for everybody whose turn it is. Returns what was run (an empty step when nothing is queued)."""
        with self._timed("plan"):
            step = self.scheduler.plan(self._candidate_length())
        if not step.rows:
            assert not self.requests, "requests are queued and none can run"
            return step
        with self._timed("draft"):
            self._draft(step)
        with self._timed("forward"):
            logits = self.runner.forward(step, self.pool.table.slots)
        with self._timed("verify"):
            outcomes = choose_tokens(logits, step.sampled) if step.sampled else []
        with self._timed("commit"):
            self._commit(step, outcomes)
        if self.config.check_every_step:
            self.check_integrity()
        return step

    def _candidate_length(self) -> int:
        return self.config.speculative_config.candidate_length if self.drafter else 0

    def _draft(self, step: Step) -> None:
        """Fill `row.drafts` and `row.q`. A drafter that fails costs its draft, never a request."""
        rows = [row for row in step.rows if row.max_drafts > 0]
        if not rows:
            return
        try:
            proposal = self.drafter.propose([row.request for row in rows], [row.max_drafts for row in rows])
            for tokens, row in zip(proposal.tokens, rows, strict=True):
                if len(tokens) > row.max_drafts or not all(0 <= t < self.runner.vocab_size for t in tokens):
                    raise ValueError(f"draft {tokens} for {row.max_drafts} places")
        except Exception:
            log.exception("the drafter %s failed; this step runs without drafts", self.drafter.name)
            self.metrics.drafter_faults += 1
            return
        for row, tokens, q in zip(rows, proposal.tokens, proposal.q or [None] * len(rows), strict=True):
            row.drafts, row.q = list(tokens), q

    def _commit(self, step: Step, outcomes: list[Outcome]) -> None:
        """Give each request its tokens and set its cursors to the committed end."""
        self.metrics.steps += 1
        self.metrics.computed_tokens += step.num_tokens
        by_row = dict(zip(map(id, step.sampled), outcomes, strict=True))
        for row in step.rows:
            request = row.request
            request.metrics.forwards += 1
            request.metrics.computed_tokens += row.q_len
            was_prefill = request.in_prefill
            request.kv_len = row.start + row.num_committed
            outcome = by_row.get(id(row))
            if outcome is None:
                continue
            if outcome.failed:
                self._fail(request, "the model returned logits that are not finite")
                continue
            if was_prefill:  # from here on, others may share the prompt
                self.pool.commit_prefix(request)
            self._append(row, outcome)

    def _append(self, row: Row, outcome: Outcome) -> None:
        request = row.request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = time.perf_counter() - request.created
        emitted = 0
        for place, (token, kind) in enumerate(zip(outcome.tokens, _kinds(row, outcome), strict=True)):
            request.tokens.append(token)
            request.kinds.append(kind)
            if outcome.logprobs:
                request.logprobs.append(outcome.logprobs[place])
            emitted += 1
            reason, text = self._read(request, token)
            if reason is None:
                self._emit(request, TokenEvent(token, kind, text, None))
                continue
            request.kv_len = len(request.tokens) - 1
            self._count(row, outcome, emitted)
            self._finish(request, reason, TokenEvent(token, kind, text, reason))
            return
        request.kv_len = len(request.tokens) - 1
        self._count(row, outcome, emitted)

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
        if row.drafts:
            row.request.metrics.accepted_per_step.append(outcome.accepted)
            for counts in (row.request.metrics.speculation, self.metrics.speculation):
                counts.record(len(row.drafts), outcome.accepted, emitted)

    def _fail(self, request: Request, message: str) -> None:
        request.error = message
        self._finish(request, "error")

    def _finish(self, request: Request, reason: str, event: TokenEvent | None = None) -> None:
        """The only way out: give everything back and say so once."""
        request.finish_reason = reason
        self.scheduler.remove(request, keep=reason != "error")
        if self.drafter:
            self.drafter.release(request)
        del self.requests[request.id]
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
        self.metrics.add_seconds(phase, time.perf_counter() - started)


def _kinds(row: Row, outcome: Outcome) -> list[TokenKind]:
    if not row.drafts:
        return [TokenKind.PLAIN]
    last = TokenKind.BONUS if outcome.accepted == len(row.drafts) else TokenKind.CORRECTED
    return [TokenKind.ACCEPTED] * outcome.accepted + [last]
