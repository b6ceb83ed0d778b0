"""Programs run by an `LLM` in this process: its engine in a thread of its own.

An engine belongs to one thread, and every branch of every program calls from another one. So calls become commands,
taken between two steps; whatever was asked for since the last step shares the next forward.

Knows: the LLM and the thread. Does not know: programs. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from minispec.config import ConfigError, SamplingParams
from minispec.lang.choices import check_start, shared_start
from minispec.lang.program import Messages, Variable

if TYPE_CHECKING:
    from minispec.core import Request
    from minispec.llm import LLM

T = TypeVar("T")
Commands = queue.SimpleQueue  # of functions of the LLM; None: the end


class Runtime:
    """A backend in this process. Until `shutdown` the LLM is its own; a `with` block shuts it down as well.

    model: an LLM, or what `LLM` takes as a model, with its options. An LLM that was given stays open at the end.
    Raises what `LLM` raises.
    """

    def __init__(self, model_path: str | LLM = "smollm2-135m", **options: Any) -> None:
        if isinstance(model_path, str):
            from minispec.llm import LLM  # torch; programs that ask a server do without

            self.llm = LLM(model_path, **options)
        else:
            self.llm = model_path
        self._commands: Commands = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=_serve, args=(self.llm, self._commands), daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._commands.put, None)  # a Runtime that is dropped ends its thread too

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """See `Backend`. Raises ConfigError when there is no template or it refuses the conversation."""
        return self.llm.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def generate(self, text: str, params: SamplingParams, job: Variable) -> tuple[str, dict[str, Any]]:
        """See `Backend`. Raises ConfigError as `LLM.generate` does, RuntimeError when the request fails."""
        events = queue.SimpleQueue()
        [request] = self._call(lambda llm: llm.engine.add(llm.encode(text), params, on_token=events.put))
        job.on_cancel(lambda: self._send(lambda llm: llm.abort(request.id)))
        while True:
            event = events.get()
            job.emit(event.text)
            if event.finish_reason in ("abort", "error"):
                raise RuntimeError(f"{request.id}: {request.error or 'aborted'}")
            if event.finish_reason is not None:
                return request.text.text, _meta_info(request)

    def score(self, text: str, choices: Sequence[str], job: Variable) -> list[list[float]]:
        """See `Backend`; as many choices as have room share a forward. Raises ConfigError as `LLM.score` does."""

        def score(llm: LLM) -> list[list[float]]:
            prompt, *full = (llm.encode(part) for part in (text, *(text + choice for choice in choices)))
            start = shared_start(prompt, full)
            check_start(start, choices, full)
            return llm.score(prompt[:start], [ids[start:] for ids in full])

        return self._call(score)

    def shutdown(self) -> None:
        """Abort what is running and end the thread. Shutting down twice is no error."""
        with self._sending:
            self._end()
        self._thread.join()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _call(self, function: Callable[[LLM], T]) -> T:
        """Run `function(llm)` in the engine's thread and wait for its result."""
        future: Future[T] = Future()

        def command(llm: LLM) -> None:
            try:
                future.set_result(function(llm))
            except Exception as error:
                future.set_exception(error)

        self._send(command)
        return future.result()

    def _send(self, command: Callable[[LLM], Any]) -> None:
        with self._sending:  # nothing may come after the end
            if not self._end.alive:
                raise ConfigError("this Runtime is shut down")
            self._commands.put(command)


def _serve(llm: LLM, commands: Commands) -> None:
    """The engine's thread. An exception of the model ends the requests that it had, and no others."""
    while (command := _next_command(llm, commands)) is not None:
        try:
            command(llm)
        except Exception as error:
            _abort_all(llm, f"{type(error).__name__}: {error}")
    _abort_all(llm, "the Runtime was shut down")


def _next_command(llm: LLM, commands: Commands) -> Callable[[LLM], Any] | None:
    """What was asked for, one at a time; if there is nothing, a step; if there is nothing to compute either, wait."""
    try:
        return commands.get(block=not llm.engine.has_work)
    except queue.Empty:
        return lambda llm: llm.engine.step()


def _abort_all(llm: LLM, why: str) -> None:
    for request in list(llm.engine.requests.values()):
        request.error = why
        llm.abort(request.id)


def _meta_info(request: Request) -> dict[str, Any]:
    """Counts of a finished request under SGLang's names."""
    reason, metrics = request.finish_reason, request.metrics
    meta = {
        "id": request.id,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": request.num_output,
        "cached_tokens": metrics.cached_tokens,
        "finish_reason": {"type": reason} | ({"length": request.num_output} if reason == "length" else {}),
        "e2e_latency": metrics.finished_s,
    }
    if request.params.logprobs is not None:
        pairs = zip(request.output, request.logprobs, strict=True)
        meta["output_token_logprobs"] = [[entry.logprob, token, None] for token, entry in pairs]
    return meta
