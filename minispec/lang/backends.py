"""Who runs the model for a program: an `LLM` in this process, or a server.

`Runtime`: an engine belongs to one thread, and every branch of every program calls from another one. So calls are
queued for that thread, and so is each step: whatever was asked for since the last step shares the next forward.

`RuntimeEndpoint`: one connection per call; closing it tells the server that nobody waits any more. The server has
/generate in SGLang's form, and /apply-template for conversations.

    POST /generate        {"text", "sampling_params", "stream": true} -> events {"text" so far, "meta_info"}
    POST /generate        {"text": [...], "return_logprob", "logprob_start_len": s} -> list; meta_info of each holds
                          "input_token_logprobs": [[logprob, token id, ...]] of the prompt's tokens s, s + 1, ...
                          (the first may have null: nothing need stand before it)
    POST /apply-template  {"messages", "add_generation_prompt"} -> {"prompt"}

Knows: the LLM and its thread, HTTP. Does not know: programs. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from minispec.config import SGLANG_NAMES, ConfigError, SamplingParams
from minispec.core import Request
from minispec.lang.choices import start_of_choices
from minispec.lang.program import Dicts, Variable

NAMES = {ours: theirs for theirs, ours in SGLANG_NAMES.items()}
DEFAULTS = asdict(SamplingParams())
TAIL = 32  # tokens at a prompt's end, more than a choice behind them can ever change


class Runtime:
    """A backend in this process. Until `shutdown` the LLM belongs to its thread.

    model_path: an LLM, or what `LLM` takes as a model, with its options. Raises what `LLM` raises.
    """

    def __init__(self, model_path: Any = "smollm2-135m", **options: Any) -> None:
        from minispec.llm import LLM  # torch; programs that ask a server do without

        self.llm = LLM(model_path, **options) if isinstance(model_path, str) else model_path
        self._thread = ThreadPoolExecutor(1, "minispec-engine")
        self._stepping = False  # a step is queued
        self.render = self.llm.render_chat  # reads the tokenizer and nothing else, so any thread may

    def generate(self, text: str, params: SamplingParams, job: Variable) -> tuple[str, dict[str, Any]]:
        """See `Backend`. Raises ConfigError as `LLM.generate` does, RuntimeError when the request fails."""
        events = queue.SimpleQueue()  # of TokenEvents

        def add() -> Request:
            [request] = self.llm.engine.add(self.llm.encode(text), params, on_token=events.put)
            self._queue_step()
            return request

        if params.grammar:  # slow, and nobody else should wait for it
            self.llm.engine.intake.grammars.compile(*params.grammar)
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
        self._thread.shutdown()  # the step that runs cannot queue another one, and so aborts what there is
        self._abort_all("the Runtime was shut down")  # what was added behind it

    def _queue_step(self) -> None:
        if self.llm.engine.has_work and not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        """One step, behind which stands the next one. An exception of the model ends the requests that it had."""
        self._stepping = False
        try:
            self.llm.engine.step()
            self._queue_step()
        except Exception as error:  # the thread may also take no further step, at the end of the process
            self._abort_all(f"{type(error).__name__}: {error}")

    def _abort_all(self, why: str) -> None:
        for request in [*self.llm.engine.requests.values()]:
            request.error = why
            self.llm.abort(request.id)


def _meta_info(request: Request) -> dict[str, Any]:
    """Counts of a finished request under SGLang's names."""
    end = {"type": request.finish_reason}
    end |= {"length": request.num_output} if request.finish_reason == "length" else {}
    meta = {"id": request.id, "prompt_tokens": len(request.prompt), "completion_tokens": request.num_output}
    meta |= {"cached_tokens": request.metrics.cached_tokens, "finish_reason": end}
    if request.params.logprobs is not None:
        pairs = zip(request.output, request.logprobs, strict=True)
        meta["output_token_logprobs"] = [[entry.logprob, token, None] for token, entry in pairs]
    return meta


class BackendError(RuntimeError):
    """The server cannot be reached, breaks off, or says that it failed."""


class RuntimeEndpoint:
    """A backend behind a URL. Nothing is asked before a program runs.

    timeout: seconds without a sign of life from the server. Raises ConfigError for what is no http or https URL.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 600.0) -> None:
        url = urlsplit(base_url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if url.scheme not in kinds or not url.hostname:
            raise ConfigError(f"base_url must be like http://localhost:30000, got {base_url!r:.80}")
        self._connection = partial(kinds[url.scheme], url.netloc, timeout=timeout)
        self.base_url, self._path = base_url.rstrip("/"), url.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._headers |= {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def render(self, messages: Dicts, *, add_generation_prompt: bool) -> str:
        """See `Backend`. Raises ConfigError when the template refuses the conversation, or BackendError."""
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return next(self.post("/apply-template", body))["prompt"]

    def generate(self, text: str, params: SamplingParams, job: Variable) -> tuple[str, dict[str, Any]]:
        """See `Backend`. Raises ConfigError for what the server refuses, or BackendError."""
        given = {name: value for name, value in asdict(params).items() if value != DEFAULTS[name]}
        top = given.pop("logprobs", None)
        sampling = {NAMES.get(name, name): value for name, value in ({"max_tokens": params.max_tokens} | given).items()}
        body = {"text": text, "sampling_params": sampling, "stream": True}
        body |= {} if top is None else {"return_logprob": True, "top_logprobs_num": top}
        shown, answer = 0, {"text": "", "meta_info": {}}
        for answer in self.post("/generate", body, job):
            job.emit(answer["text"][shown:])
            shown = len(answer["text"])
        return answer["text"], answer["meta_info"]

    def score(self, text: str, choices: Sequence[str], job: Variable) -> list[list[float]]:
        """See `Backend`. Raises ConfigError for what the server refuses, or BackendError."""
        body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        first = next(self.post("/generate", body, job))  # says how long the prompt is, and leaves it in the cache
        tail = max(0, first["meta_info"]["prompt_tokens"] - TAIL)
        body |= {"text": [text, *(text + choice for choice in choices)]}
        body |= {"return_logprob": True, "logprob_start_len": tail}
        [answers] = self.post("/generate", body, job)
        entries = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        prompt, *full = ([entry[1] for entry in its] for its in entries)
        start = start_of_choices(prompt, full)
        return [[entry[0] for entry in its[start:]] for its in entries[1:]]

    def post(self, path: str, body: dict[str, Any], job: Variable | None = None) -> Iterator[Any]:
        """The answer, or the events of an answer that is a stream. Raises as `generate` does."""
        connection = self._connection()
        try:
            connection.connect()
            if job is not None:
                job.on_cancel(partial(connection.sock.shutdown, socket.SHUT_RDWR))  # who reads it gets an error
            connection.request("POST", self._path + path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                self._refuse(path, response.status, response.read())
            if response.headers.get_content_type() != "text/event-stream":
                yield json.loads(response.read())
                return
            for line in response:
                kind, _, data = line.partition(b":")
                if data.strip() == b"[DONE]":
                    return
                if kind == b"data":
                    if "error" in (event := json.loads(data)):
                        self._refuse(path, 500, data)
                    yield event
            raise BackendError(f"{self.base_url}{path}: the answer breaks off")
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise BackendError(f"{self.base_url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _refuse(self, path: str, status: int, content: bytes) -> None:
        """Raise what the server's error says."""
        message = content.decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):  # another form: shown as it is
            message = json.loads(message)["error"]["message"]
        if status == 400:
            raise ConfigError(message)
        raise BackendError(f"{self.base_url}{path}: status {status}: {message:.500}")
