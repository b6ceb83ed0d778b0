"""The engine in a thread of its own, seen from asyncio.

    event loop                                engine thread
    submit, abort, call  --- commands --->    taken in order, between two steps
    Submission.updates   <-- updates ----     at the end of a step, one callback for everything that it committed

A step blocks for as long as a forward takes, so it must not run on the event loop; and an engine belongs to one thread,
so nothing else touches it. If that thread ends with an exception, every caller gets an error and nobody waits for ever.

Knows: the two threads, how many requests may wait, how long one may take. Does not know: HTTP, models, tokens' meaning.
Used in notebook 13 (everything on).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from minispec.config import ConfigError, SamplingParams
from minispec.core import Request, TokenEvent, TokenLogprob
from minispec.llm import LLM

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_SECONDS = 1.0  # without work, after which the slot ledger is checked


class Overloaded(Exception):
    """As many requests run and wait as may; later there may be room."""


class Unavailable(Exception):
    """The engine's thread does not run: it has crashed, or the server is shutting down."""


class TimedOut(Exception):
    """The request took longer than a request may."""


class RequestFailed(Exception):
    """The engine ended this request with an error; others go on."""


@dataclass
class Update:
    """What one step added to one completion; `index` counts the completions of its submission."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, later: Update) -> None:
        """Make this the two together."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


class Submission:
    """The completions that one caller waits for. `requests` may be read when they are finished."""

    def __init__(self, id: str, count: int) -> None:
        self.id, self.count, self.unfinished = id, count, count
        self.requests: list[Request] = []
        self._events: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    async def updates(self) -> AsyncIterator[Update]:
        """What the steps add, in order, until every completion has its finish_reason.

        Raises RequestFailed, TimedOut or Unavailable; then nothing of it runs any more.
        """
        missing = self.count
        while missing:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            missing -= event.finish_reason is not None
            yield event

    async def whole(self) -> list[Update]:
        """Wait for the end, and return each completion as one update. Raises as `updates` does."""
        async for _ in self.updates():
            pass
        ended = enumerate(self.requests)
        return [Update(i, r.text.text, r.output, r.logprobs, r.finish_reason) for i, r in ended]


class EngineThread:
    """Runs the engine of `llm`. All methods belong to the event loop in which `start` was called.

    max_queued: requests that may wait beyond those that run at once; more are refused. timeout: seconds for a request.
    on_finish: called in the event loop with each request that has ended.
    """

    def __init__(
        self, llm: LLM, *, max_queued: int, timeout: float, on_finish: Callable[[Request], None] = lambda _: None
    ) -> None:
        self.capacity, self.timeout, self.on_finish = llm.config.max_num_seqs + max_queued, timeout, on_finish
        self.submissions: dict[str, Submission] = {}  # everything not finished
        self._llm = llm  # the engine thread's, like the next two
        self._updates: dict[Request, tuple[Submission, Update]] = {}  # of the step that runs
        self._replies: list[Callable[[], None]] = []  # to be called in the event loop
        self._commands: queue.SimpleQueue[tuple[Callable[[LLM], Any], asyncio.Future] | None] = queue.SimpleQueue()
        self._ended: Unavailable | None = None
        self._thread = threading.Thread(target=self._run, name="minispec-engine", daemon=True)

    # In the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; its answers go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Let the step that runs end, abort what is left, and wait for the thread. Stopping twice is no error."""
        self._ended = self._ended or Unavailable("the server is shutting down")
        self._commands.put(None)
        self._thread.join()

    def check_alive(self) -> None:
        """Raise Unavailable when no request can be served."""
        if self._ended:
            raise self._ended

    def check_room(self, count: int) -> None:
        """Raise ConfigError if `count` completions are more than ever fit, Overloaded or Unavailable if not now."""
        self.check_alive()
        if not 0 < count <= self.capacity:
            raise ConfigError(f"a request must ask for 1 to {self.capacity} completions, got {count}")
        unfinished = sum(submission.unfinished for submission in self.submissions.values())
        if unfinished + count > self.capacity:
            raise Overloaded(f"{unfinished} of at most {self.capacity} requests run or wait; try again later")

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run `function(llm)` on the engine's thread, between two steps. Raises what it raises, or Unavailable."""
        return await self._send(function)

    async def submit(self, id: str, prompts: Sequence[tuple[list[int], SamplingParams]]) -> Submission:
        """Queue the completions of all prompts (token ids), or none of them.

        Raises ConfigError as `Engine.add` does and for an id that is in use, Overloaded, or Unavailable.
        """
        self.check_room(count := sum(params.n for _, params in prompts))
        if id in self.submissions:
            raise ConfigError(f"request id {id!r} is already running")
        submission = self.submissions[id] = Submission(id, count)
        late = TimedOut(f"the request took longer than {self.timeout:g} seconds")
        submission._timer = self._loop.call_later(self.timeout, self._fail, submission, late)
        await self._send(partial(self._add, submission, prompts))
        return submission

    def abort(self, submission: Submission) -> None:
        """End what still runs of a submission, before the next step. A finished one is no error."""
        if submission.unfinished and not self._ended:
            self._send(lambda llm: [llm.abort(request.id) for request in submission.requests])

    def _send(self, function: Callable[[LLM], T]) -> asyncio.Future[T]:
        self.check_alive()
        future = self._loop.create_future()
        self._commands.put((function, future))
        return future

    def _deliver(self, submission: Submission, update: Update) -> None:
        request = submission.requests[update.index]
        if update.finish_reason is not None:
            submission.unfinished -= 1
            if not submission.unfinished:
                self._forget(submission)
            self.on_finish(request)
        if update.finish_reason == "error":
            self._fail(submission, RequestFailed(request.error))
        else:
            submission._events.put_nowait(update)

    def _fail(self, submission: Submission, error: Exception) -> None:
        submission._events.put_nowait(error)
        self.abort(submission)

    def _forget(self, submission: Submission) -> None:
        submission._timer.cancel()
        del self.submissions[submission.id]

    def _crashed(self) -> None:
        """Tell whoever waits. Commands come from the event loop, so none can be late."""
        self._ended = Unavailable("the engine has stopped after an internal error")
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                _resolve(command[1], None, self._ended)
        for submission in list(self.submissions.values()):
            self._fail(submission, self._ended)
            self._forget(submission)

    # In the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            checked = True
            while (taken := self._take_commands(wait=None if checked else IDLE_SECONDS)) is not None:
                self._flush()  # replies wait for no step
                if self._llm.engine.has_work:
                    self._llm.engine.step()
                    self._flush()
                    checked = False
                elif not taken:
                    self._llm.check_integrity()
                    checked = True
        except BaseException:
            log.exception("the engine's thread ends")
            self._replies.append(self._crashed)
        self._flush()
        self._llm.engine.device.close()

    def _take_commands(self, wait: float | None) -> int | None:
        """Do what was asked for since the last step and return its number; None: stop.

        While there is nothing to compute, wait for something to do, `wait` seconds at most.
        """
        taken = 0
        while True:
            try:
                command = self._commands.get(block=not taken and not self._llm.engine.has_work, timeout=wait)
            except queue.Empty:
                return taken
            if command is None:
                for request_id in list(self._llm.engine.requests):
                    self._llm.abort(request_id)
                return None
            taken += 1
            function, future = command
            result = error = None
            try:
                result = function(self._llm)
            except Exception as raised:
                error = raised
            self._replies.append(partial(_resolve, future, result, error))

    def _add(self, submission: Submission, prompts: Sequence[tuple[list[int], SamplingParams]], llm: LLM) -> None:
        try:
            for number, (prompt, params) in enumerate(prompts):
                name = submission.id if len(prompts) == 1 else f"{submission.id}-{number}"
                for request in llm.engine.add(prompt, params, request_id=name):
                    request.on_token = partial(self._collect, submission, request, len(submission.requests))
                    submission.requests.append(request)
        except Exception:
            for request in submission.requests:
                request.on_token = None
                llm.abort(request.id)
            self._replies.append(partial(self._forget, submission))
            raise

    def _collect(self, submission: Submission, request: Request, index: int, event: TokenEvent) -> None:
        _, update = self._updates.setdefault(request, (submission, Update(index)))
        update.text += event.text
        update.finish_reason = event.finish_reason
        if event.token_id >= 0:  # an aborted or failed request ends without a token
            update.token_ids.append(event.token_id)
            if event.logprob is not None:
                update.logprobs.append(event.logprob)

    def _flush(self) -> None:
        """Hand over what has come together, with one wake-up of the event loop."""
        calls = self._replies + [partial(self._deliver, *pair) for pair in self._updates.values()]
        self._replies, self._updates = [], {}
        if calls:
            self._loop.call_soon_threadsafe(lambda: [call() for call in calls])


def _resolve(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if not future.done():  # its caller may have been cancelled
        future.set_result(result) if error is None else future.set_exception(error)
