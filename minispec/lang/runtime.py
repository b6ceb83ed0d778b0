"""Programs run by an `LLM` in this process: its engine in a thread of its own.

An engine belongs to one thread, and every branch of every program calls from another one. So calls are queued for that
thread, and so is each step: whatever was asked for since the last step shares the next forward.

Knows: the LLM and the thread. Does not know: programs. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from minispec.config import SamplingParams
from minispec.lang.choices import start_of_choices
from minispec.lang.program import Messages, Variable

if TYPE_CHECKING:
    from minispec.core import Request, TokenEvent
    from minispec.llm import LLM


class Runtime:
    """A backend in this process. Until `shutdown` the LLM is its own; a `with` block shuts it down as well.

    model_path: an LLM, or what `LLM` takes as a model, with its options. Raises what `LLM` raises.
    """

    def __init__(self, model_path: str | LLM = "smollm2-135m", **options: Any) -> None:
        if isinstance(model_path, str):
            from minispec.llm import LLM  # torch; programs that ask a server do without

            model_path = LLM(model_path, **options)
        self.llm = model_path
        self._thread = ThreadPoolExecutor(1, "minispec-engine")
        self._stepping = False  # a step is queued

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """See `Backend`. Raises ConfigError when there is no template or it refuses the conversation."""
        return self.llm.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def generate(self, text: str, params: SamplingParams, job: Variable) -> tuple[str, dict[str, Any]]:
        """See `Backend`. Raises ConfigError as `LLM.generate` does, RuntimeError when the request fails."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

        def add() -> Request:
            [request] = self.llm.engine.add(self.llm.encode(text), params, on_token=events.put)
            if not self._stepping:
                self._queue_step()
            return request

        request = self._thread.submit(add).result()
        job.on_cancel(lambda: self._thread.submit(self.llm.abort, request.id))
        while (event := events.get()).finish_reason is None:
            job.emit(event.text)
        if request.finish_reason in ("abort", "error"):
            raise RuntimeError(f"{request.id}: {request.error or 'aborted'}")
        return request.text.text, _meta_info(request)

    def score(self, text: str, choices: Sequence[str], job: Variable) -> list[list[float]]:
        """See `Backend`; as many choices as have room share a forward. Raises ConfigError as `LLM.score` does."""

        def score() -> list[list[float]]:
            prompt, *full = (self.llm.encode(part) for part in (text, *(text + choice for choice in choices)))
            start = start_of_choices(prompt, full)
            return self.llm.score(prompt[:start], [ids[start:] for ids in full])

        return self._thread.submit(score).result()

    def shutdown(self) -> None:
        """Abort what is running and end the thread. Shutting down twice is no error."""
        self._thread.shutdown(cancel_futures=True)
        self._abort_all("the Runtime was shut down")

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _queue_step(self) -> None:
        self._stepping = self.llm.engine.has_work
        if self._stepping:
            self._thread.submit(self._step)

    def _step(self) -> None:
        """One step, behind which stands the next one. An exception of the model ends the requests that it had."""
        try:
            self.llm.engine.step()
            self._queue_step()
        except Exception as error:  # the thread may also take no further step, at the end of the process
            self._abort_all(f"{type(error).__name__}: {error}")
            self._stepping = False

    def _abort_all(self, why: str) -> None:
        for request in [*self.llm.engine.requests.values()]:
            request.error = why
            self.llm.abort(request.id)


def _meta_info(request: Request) -> dict[str, Any]:
    """Counts of a finished request under SGLang's names."""
    reason = request.finish_reason
    meta = {
        "id": request.id,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": request.num_output,
        "cached_tokens": request.metrics.cached_tokens,
        "finish_reason": {"type": reason} | ({"length": request.num_output} if reason == "length" else {}),
    }
    if request.params.logprobs is not None:
        pairs = zip(request.output, request.logprobs, strict=True)
        meta["output_token_logprobs"] = [[entry.logprob, token, None] for token, entry in pairs]
    return meta
