"""The routes: from an HTTP request to a submission to the engine's thread, and from its updates to an answer.

Every request goes the same way: check the body, encode the prompts (off the event loop), submit, and then either wait
for the end or write one server-sent event per update. A watcher beside it aborts what a client that has gone away
still has running, whether it waits in the queue, streams, or wants the answer in one piece.

Errors have OpenAI's form, {"error": {"message", "type", "param", "code"}}, with the status that ERRORS gives.

Knows: HTTP, paths, status codes. Does not know: how requests are run. Used in notebook 13 (everything on).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minispec import __version__
from minispec.config import ConfigError, SamplingParams, check_number
from minispec.llm import LLM
from minispec.serving.engine_thread import (
    EngineThread,
    Overloaded,
    RequestFailed,
    Submission,
    TimedOut,
    Unavailable,
    Update,
)
from minispec.serving.metrics import ServerMetrics, snapshot
from minispec.serving.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    TemplateRequest,
    usage,
)

PROBE_SECONDS = 20.0  # how long /health_generate waits
OPEN_PATHS = ("/", "/health")  # need no key: the page holds no data, and who watches the process has none


class ModelNotFound(Exception):
    """A request names a model that is not served here."""


# What a handler may raise -> status and code of the answer.
ERRORS: dict[type[Exception], tuple[int, str | None]] = {
    ConfigError: (400, None),
    ModelNotFound: (404, "model_not_found"),
    Overloaded: (429, "queue_full"),
    RequestFailed: (500, "request_failed"),
    Unavailable: (503, "unavailable"),
    TimedOut: (504, "timeout"),
}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class ServerSettings:
    """model: the name under which it is served. max_queued_requests: completions that may wait beyond those that run.

    request_timeout: seconds from arrival to the end. max_body_bytes: of a request. api_key: None lets everybody in.
    Raises ConfigError that names the field, the value and the range.
    """

    model: str
    api_key: str | None = None
    max_queued_requests: int = 256
    request_timeout: float = 600.0
    max_body_bytes: int = 1 << 22

    def __post_init__(self) -> None:
        check_number("max_queued_requests", self.max_queued_requests, 0, integer=True)
        check_number("request_timeout", self.request_timeout, 0.001)
        check_number("max_body_bytes", self.max_body_bytes, 1, integer=True)
        if self.api_key == "":
            raise ConfigError("api_key is empty: leave it out to let everybody in")


def create_app(llm: LLM, settings: ServerSettings) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops the engine's thread; `llm` is that thread's from then on."""
    server = Server(llm, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        try:
            yield
        finally:
            server.engine.stop()

    handlers = dict.fromkeys([HTTPException, RequestValidationError, Exception, *ERRORS], _refuse)
    app = FastAPI(
        title="minispec", version=__version__, lifespan=lifespan, exception_handlers=handlers, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    app.add_middleware(Gate, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes)
    for path, method, handler in (
        ("/", "GET", server.page),
        ("/health", "GET", server.health),
        ("/health_generate", "GET", server.health_generate),
        ("/metrics", "GET", server.metrics),
        ("/get_server_info", "GET", server.get_server_info),
        ("/v1/models", "GET", server.models),
        ("/v1/chat/completions", "POST", server.chat_completions),
        ("/v1/completions", "POST", server.completions),
        ("/generate", "POST", server.generate),
        ("/apply-template", "POST", server.apply_template),
        ("/abort_request", "POST", server.abort_request),
        ("/flush_cache", "POST", server.flush_cache),
        ("/flush_cache", "GET", server.flush_cache),
    ):
        app.add_api_route(path, handler, methods=[method])
    app.state.server = server
    return app


class Server:
    """The handlers of one served model."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings  # of llm only what does not change: tokenizer, settings
        if llm.tokenizer is not None:
            llm.encode("a")  # a tokenizer settles its truncation at its first use; from then on threads may share it
        self.counts = ServerMetrics()
        self.engine = EngineThread(
            llm,
            max_queued=settings.max_queued_requests,
            timeout=settings.request_timeout,
            on_finish=self.counts.observe,
        )
        self._watchers: set[asyncio.Task[None]] = set()
        self._started = int(time.time())

    # OpenAI ----------------------------------------------------------------------------------------------------

    async def chat_completions(self, http: HTTPRequest, body: ChatRequest) -> Response:
        return await self._complete(http, body)

    async def completions(self, http: HTTPRequest, body: CompletionRequest) -> Response:
        return await self._complete(http, body)

    async def _complete(self, http: HTTPRequest, body: ChatRequest | CompletionRequest) -> Response:
        if body.model not in (None, "default", self.settings.model):
            raise ModelNotFound(f"the model {body.model!r:.80} is not served here; {self.settings.model!r} is")
        prompts, params = body.prompts(), body.params()
        id = f"{body.prefix}-{uuid.uuid4().hex}"
        submission = await self._submit(http, id, prompts, [params] * len(prompts))
        if body.stream:
            return _event_stream(self._chunks(body, submission))
        tokenizer, model = self.llm.tokenizer, self.settings.model
        choices = [body.choice(update, tokenizer, whole=True) for update in await submission.whole()]
        return JSONResponse(body.answer(id, model, choices, whole=True) | {"usage": usage(submission.requests)})

    async def _chunks(self, body: ChatRequest | CompletionRequest, submission: Submission) -> AsyncIterator[dict]:
        def chunk(update: Update, extra: dict[str, Any]) -> dict[str, Any]:
            choice = body.choice(update, self.llm.tokenizer, whole=False) | extra
            return body.answer(submission.id, self.settings.model, [choice], whole=False) | no_usage

        no_usage = {"usage": None} if body.include_usage else {}
        if body.opening:
            for index in range(len(submission.requests)):
                yield chunk(Update(index), body.opening)
        async for update in submission.updates():
            if update.text or update.logprobs or update.finish_reason:
                yield chunk(update, {})
        if body.include_usage:
            last = body.answer(submission.id, self.settings.model, [], whole=False)
            yield last | {"usage": usage(submission.requests)}

    async def models(self) -> Response:
        model = {"id": self.settings.model, "object": "model", "created": self._started, "owned_by": "minispec"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self.llm.engine.context_length}]})

    # SGLang ----------------------------------------------------------------------------------------------------

    async def generate(self, http: HTTPRequest, body: GenerateRequest) -> Response:
        id = body.rid or uuid.uuid4().hex
        submission = await self._submit(http, id, body.prompts(), body.params())
        if body.stream:
            return _event_stream(self._growing(body, submission))
        whole = await submission.whole()
        items = [body.item(submission.requests[update.index], update, id) for update in whole]
        if body.scores_prompt:
            for item, request in zip(items, submission.requests, strict=True):
                scored = await self._prompt_logprobs(request.prompt, body.logprob_start_len)
                item["meta_info"]["input_token_logprobs"] = scored
        return JSONResponse(items if body.is_list or len(items) > 1 else items[0])

    async def _prompt_logprobs(self, ids: list[int], start: int) -> list[list[Any]]:
        """[logprob, id, None] of each prompt token from place `start` on; the first one has no logprob."""
        if start >= len(ids):
            raise ConfigError(f"logprob_start_len must be below the {len(ids)} tokens of the prompt, got {start}")
        head, rest = ids[: start + 1], ids[start + 1 :]
        [scores] = await self.engine.call(lambda llm: llm.score(head, [rest])) if rest else [[]]
        return [[score, token, None] for score, token in zip([None, *scores], ids[start:], strict=True)]

    async def apply_template(self, body: TemplateRequest) -> Response:
        text = self.llm.render_chat(body.messages, add_generation_prompt=body.add_generation_prompt)
        return JSONResponse({"prompt": text})

    async def _growing(self, body: GenerateRequest, submission: Submission) -> AsyncIterator[dict[str, Any]]:
        """Each completion as it stands after each of its updates: the text so far, not what is new."""
        seen = [Update(index) for index in range(len(submission.requests))]
        async for update in submission.updates():
            whole = seen[update.index]
            whole.add(update)
            yield body.item(submission.requests[update.index], whole, submission.id)

    async def abort_request(self, body: AbortRequest) -> Response:
        found = [s for s in self.engine.submissions.values() if body.abort_all or s.id == body.rid]
        for submission in found:
            self.engine.abort(submission)
        return JSONResponse({"aborted": [submission.id for submission in found]})

    async def flush_cache(self) -> Response:
        """Throw away every cached prefix that no request holds."""

        def flush(llm: LLM) -> int:
            pages = llm.engine.pool.num_evictable_pages
            llm.engine.pool.evict(pages)
            return pages * llm.engine.pool.page_size

        return JSONResponse({"flushed_tokens": await self.engine.call(flush)})

    async def get_server_info(self) -> Response:
        state = await self.engine.call(snapshot)
        state["avg_spec_accept_length"] = state["acceptance_length"]
        settings = asdict(self.settings) | asdict(self.llm.config)
        del settings["api_key"]
        chosen = {"version": __version__, "device": str(self.llm.device), "dtype": str(self.llm.dtype)}
        return JSONResponse(chosen | settings | {"internal_states": [state]})

    # Health ----------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """200 while the engine's thread runs."""
        self.engine.check_alive()
        return JSONResponse({"status": "ok"})

    async def health_generate(self, http: HTTPRequest) -> Response:
        """200 if the engine ends a step in time and, unless the queue is full, makes a token."""

        async def probe() -> None:
            await self.engine.call(lambda llm: None)
            with contextlib.suppress(Overloaded):
                params = SamplingParams(max_tokens=1)
                await (await self._submit(http, uuid.uuid4().hex, [[0]], [params])).whole()

        try:
            await asyncio.wait_for(probe(), PROBE_SECONDS)
        except asyncio.TimeoutError as error:
            raise Unavailable(f"the engine has not answered within {PROBE_SECONDS:g} seconds") from error
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        text = self.counts.render(await self.engine.call(snapshot))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return HTMLResponse((resources.files("minispec") / "assets" / "live.html").read_text("utf-8"))

    # Both ------------------------------------------------------------------------------------------------------

    async def _submit(
        self, http: HTTPRequest, id: str, prompts: list[Any], params: Sequence[SamplingParams]
    ) -> Submission:
        self.engine.check_room(sum(p.n for p in params))  # before the work of encoding
        ids = await asyncio.to_thread(self._prepare, prompts, params)
        submission = await self.engine.submit(id, list(zip(ids, params, strict=True)))
        watcher = asyncio.create_task(self._watch(http, submission))
        self._watchers.add(watcher)  # the loop alone would not keep it
        watcher.add_done_callback(self._watchers.discard)
        return submission

    def _prepare(self, prompts: list[Any], params: Sequence[SamplingParams]) -> list[list[int]]:
        """What takes a while, and neither the event loop nor the engine should wait for: token ids; grammars."""
        for grammar in {p.grammar for p in params} - {None}:
            self.llm.engine.intake.grammars.compile(*grammar)
        return [self.llm.encode(prompt) for prompt in prompts]

    async def _watch(self, http: HTTPRequest, submission: Submission) -> None:
        """Abort what still runs when the client has gone; an answer that is complete ends the wait as well."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.engine.abort(submission)


def _event_stream(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Server-sent events; an error after the first one is an event too, since the status is out."""

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except tuple(ERRORS) as error:
            yield f"data: {json.dumps(_known_error(error)[1])}\n\n"
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


# Errors --------------------------------------------------------------------------------------------------------


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _known_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for one of ERRORS."""
    status, code = next(value for kind, value in ERRORS.items() if isinstance(error, kind))
    return status, _error(status, str(error), code=code)


async def _refuse(http: HTTPRequest, error: Exception) -> Response:
    """Any exception of a handler as an answer."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]  # the others may be about the same value
        param = ".".join(str(part) for part in first["loc"][1:]) or "body"
        if "json" not in http.headers.get("content-type", ""):
            first = {"msg": "it must be JSON, sent with the header Content-Type: application/json"}
        elif first["type"] == "json_invalid":
            param, first = "body", {"msg": f"not JSON at character {param}: {first['ctx']['error']}"}
        why = first["msg"].removeprefix("Value error, ").replace("Extra inputs are not permitted", "no such field")
        return JSONResponse(_error(400, f"{param}: {why}", param=param), 400)
    if isinstance(error, HTTPException):
        return JSONResponse(_error(error.status_code, error.detail), error.status_code, headers=error.headers)
    if not isinstance(error, tuple(ERRORS)):
        return JSONResponse(_error(500, "internal error; the server's log says more"), 500)
    status, content = _known_error(error)
    return JSONResponse(content, status, headers={"Retry-After": "1"} if status == 429 else None)


class Gate:
    """Before anything is read: the API key, compared in constant time, and the size of the body."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.expected is not None and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not secrets.compare_digest(given, self.expected):
                message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                return await JSONResponse(_error(401, message, code="invalid_api_key"), 401)(scope, receive, send)
        received = 0

        async def counted() -> Message:  # what the client says of the size is not asked: it may say nothing
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise HTTPException(413, f"the body has more than {self.max_body_bytes} bytes")
            return message

        await self.app(scope, counted, send)
