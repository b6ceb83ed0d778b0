"""The prompting language: every name of it, over the engine in this process and over a server that speaks HTTP.

Tests that take `backend` run three times: in this process, over a stub that speaks the same form in front of the same
engine, and over minispec's own server.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from tools import TagRunner, assert_idle, markov, reference_logits

import minispec.lang as sgl
from minispec import LLM, SamplingParams
from minispec.config import ConfigError
from minispec.lang.choices import start_of_choices
from minispec.lang.program import Run
from minispec.serving.launch import BackgroundServer

EXACT = {"temperature": 0, "ignore_eos": True}
PAGE = 4


# A server -------------------------------------------------------------------------------------------------------------


class ServerJob:
    """What a backend shows and asks of whoever waits, on the server's side."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self.cancel = emit, lambda: None

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self.cancel = callback

    def emit(self, piece: str) -> None:
        try:
            self._emit(piece)
        except OSError:  # the client has gone
            self.cancel()


class Handler(BaseHTTPRequestHandler):
    """/generate in SGLang's form and /apply-template, in front of the server's `runtime`."""

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        try:
            answer = self.generate(body) if self.path == "/generate" else self.apply_template(body)
        except ConfigError as error:
            return self.reply(400, {"error": {"message": str(error)}})
        except RuntimeError:
            return None
        return None if answer is None else self.reply(200, answer)

    def reply(self, status: int, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def apply_template(self, body: dict) -> dict:
        return {"prompt": self.server.runtime.llm.render_chat(**body)}

    def generate(self, body: dict) -> object:
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
        values = {names.get(name, name): value for name, value in body["sampling_params"].items()}
        start = body.get("logprob_start_len")
        if body.get("return_logprob") and start is None:
            values["logprobs"] = body["top_logprobs_num"]
        params, runtime = SamplingParams(**values), self.server.runtime
        if body.get("stream"):
            self.stream(body["text"], params)
            return None
        texts = body["text"] if isinstance(body["text"], list) else [body["text"]]
        answers = []
        for text in texts:
            value, meta = runtime.generate(text, params, ServerJob(lambda piece: None))
            if start is not None:
                ids = runtime.llm.encode(text)
                later = ids[start + 1 :]
                lists = [later] if later else []
                [scores] = runtime._thread.submit(runtime.llm.score, ids[: start + 1], lists).result() or [[]]
                meta["input_token_logprobs"] = [[s, i, None] for s, i in zip([None, *scores], ids[start:], strict=True)]
            answers.append({"text": value, "meta_info": meta})
        return answers if isinstance(body["text"], list) else answers[0]

    def stream(self, text: str, params: SamplingParams) -> None:
        whole: list[str] = []

        def event(meta: dict) -> None:
            self.wfile.write(f"data: {json.dumps({'text': ''.join(whole), 'meta_info': meta})}\n\n".encode())

        def emit(piece: str) -> None:
            if not whole:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
            whole.append(piece)
            event({})

        value, meta = self.server.runtime.generate(text, params, ServerJob(emit))
        if not whole:
            emit("")
        whole[:] = [value]
        event(meta)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("lang"), "llama"))


@pytest.fixture(scope="module")
def runtime(folder) -> Iterator[sgl.Runtime]:
    runtime = sgl.Runtime(folder, dtype="float32", kv_cache_tokens=2048, page_size=PAGE, check_every_step=True)
    yield runtime
    runtime.shutdown()


@pytest.fixture(scope="module")
def server(runtime) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.runtime, server.seen = True, runtime, []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def stub_url(server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def server_url(folder) -> Iterator[str]:
    """minispec's own server, over the same weights as `runtime`."""
    options = {"dtype": "float32", "kv_cache_tokens": 2048, "page_size": PAGE, "check_every_step": True}
    with BackgroundServer(LLM(folder, **options), model="tiny") as real:
        yield real.url


@pytest.fixture(autouse=True)
def _nothing_is_left(request) -> Iterator[None]:
    yield
    sgl.set_default_backend(None)
    assert_ends(lambda: not program_threads(), "threads of programs")
    if {"runtime", "backend", "server"} & set(request.fixturenames):
        runtime = request.getfixturevalue("runtime")
        assert_ends(lambda: not runtime.llm.engine.requests, "requests in the engine")
        assert_idle(runtime.llm.engine)


@pytest.fixture(params=["runtime", "endpoint", "minispec server"])
def backend(request, runtime):
    urls = {"endpoint": "stub_url", "minispec server": "server_url"}
    chosen = runtime
    if request.param in urls:
        chosen = sgl.RuntimeEndpoint(request.getfixturevalue(urls[request.param]))
    sgl.set_default_backend(chosen)
    return chosen


def program_threads() -> list[str]:
    names = ("minispec-program", "minispec-function", "minispec-batch")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def assert_ends(done: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError(f"still there: {what}")


# A backend without a model --------------------------------------------------------------------------------------------


class Scripted:
    """Answers are functions of the text; a text that holds "wait" is answered when `gate` opens or nobody waits."""

    def __init__(self, logprobs: list[list[float]] | None = None) -> None:
        self.gate, self.started = threading.Event(), threading.Semaphore(0)
        self.logprobs, self.texts, self.cancelled, self.before_failure = logprobs, [], 0, 0

    def render(self, messages, *, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt

    def generate(self, text, params, job):
        self.texts.append(text)
        self.started.release()
        if "fail" in text:
            for _ in range(self.before_failure):
                self.started.acquire()
            raise ValueError("the branch fails")
        if "wait" in text:
            cancelled = threading.Event()
            job.on_cancel(cancelled.set)
            job.emit("[")
            while not (self.gate.wait(0.005) or cancelled.is_set()):
                pass
            if cancelled.is_set():
                self.cancelled += 1
                raise RuntimeError("aborted")
        answer = f"[{len(text)}]"
        return answer, {"max_tokens": params.max_tokens, "temperature": params.temperature}

    def score(self, text, choices, job):
        self.texts.append(text)
        return self.logprobs[: len(choices)]


# Text and variables ---------------------------------------------------------------------------------------------------


@sgl.function
def complete(s, start, tokens=8):
    s += "Text: " + start
    s += sgl.gen("rest", max_tokens=tokens, **EXACT) + "|" + sgl.gen("more", max_tokens=4, **EXACT)


def greedy(runtime: sgl.Runtime, text: str, tokens: int) -> str:
    """What the LLM itself writes."""
    params = SamplingParams(max_tokens=tokens, **EXACT)
    return runtime._thread.submit(runtime.llm.generate, text, params).result()[0].text


def test_a_program_writes_what_the_model_writes(backend, runtime):
    s = complete.run(start="A small model")
    first = greedy(runtime, "Text: A small model", 8)
    assert s["rest"] == first
    assert s["more"] == greedy(runtime, f"Text: A small model{first}|", 4)
    assert s.text() == f"Text: A small model{s['rest']}|{s['more']}" and s.messages() == []
    meta = s.get_meta_info("rest")
    assert meta["completion_tokens"] == 8 and meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["prompt_tokens"] == len(runtime.llm.encode("Text: A small model"))
    assert "rest" in s and "nothing" not in s
    with pytest.raises(KeyError, match="nothing"):
        s["nothing"]


def test_sampling_fields_have_both_names_and_gen_overrides_run(backend, runtime):
    @sgl.function
    def ask(s, stop):  # a parameter of the function is not taken for a field
        s += stop + sgl.gen("a") + sgl.gen("b", max_tokens=2, return_logprob=True, top_logprobs_num=2)

    s = ask.run("abc", max_new_tokens=5, **EXACT)
    assert [s.get_meta_info(name)["completion_tokens"] for name in "ab"] == [5, 2]
    logprobs = s.get_meta_info("b")["output_token_logprobs"]
    assert len(logprobs) == 2 and all(entry[0] < 0 for entry in logprobs)
    assert "output_token_logprobs" not in s.get_meta_info("a")
    assert ask.run(stop="abc", max_tokens=5, seed=3).text() == ask.run("abc", max_tokens=5, sampling_seed=3).text()


SGLANG_PROGRAM = """
import sglang as sgl
@sgl.function
def code_audit_workflow(s, code_snippet):
    s += sgl.user(f"Please audit this C++ code for memory leaks or buffer overflows:\\n{code_snippet}")
    s += sgl.assistant(sgl.gen("analysis", max_tokens=1024, temperature=0.1))
sgl.set_default_backend(sgl.RuntimeEndpoint("http://localhost:30000"))
result = code_audit_workflow.run(code_snippet=c_code)
print(result["analysis"])
"""


def test_a_program_for_sglang_runs_with_another_import(server_url, capsys):
    program = SGLANG_PROGRAM.replace("import sglang as", "import minispec.lang as")
    program = program.replace("http://localhost:30000", server_url.replace("127.0.0.1", "localhost"))
    names = {"c_code": "int* p = new int[3];"}
    exec(program, names)
    question, answer = names["result"].messages()
    assert question["role"] == "user" and question["content"].endswith("overflows:\nint* p = new int[3];")
    assert answer == {"role": "assistant", "content": names["result"]["analysis"]}
    assert capsys.readouterr().out == names["result"]["analysis"] + "\n"
    meta = names["result"].get_meta_info("analysis")
    assert meta["completion_tokens"] > 1 and meta["prompt_tokens"] + meta["completion_tokens"] <= 512


# Conversations --------------------------------------------------------------------------------------------------------


@sgl.function
def whole_turns(s):
    s += sgl.system("Be short.") + sgl.user("Hi " + sgl.gen("thought", 3))
    s += sgl.assistant("So: " + sgl.gen("answer", 6) + ".")


@sgl.function
def marked_turns(s):
    s += sgl.system_begin() + "Be short." + sgl.system_end()
    s += sgl.user_begin()
    s += "Hi " + sgl.gen("thought", 3) + sgl.user_end()
    s += sgl.assistant_begin() + "So: " + sgl.gen("answer", 6)
    s += "." + sgl.assistant_end()


@sgl.function
def block_turns(s):
    with s.system():
        s += "Be short."
    with s.user():
        s += "Hi "
        s += sgl.gen("thought", 3)
    with s.assistant():
        s += "So: " + sgl.gen("answer", 6) + "."


@sgl.function
def called_turns(s):
    s.system("Be short.")
    s.user("Hi " + sgl.gen("thought", 3))
    s.assistant("So: " + sgl.gen("answer", 6) + ".")


@pytest.mark.parametrize("program", [whole_turns, marked_turns, block_turns, called_turns], ids=lambda p: p.__name__)
def test_turns_are_written_by_the_models_template(backend, runtime, program):
    s = program.run(**EXACT)
    opening = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi "
    assert s["thought"] == greedy(runtime, opening, 3)
    before = f"{opening}{s['thought']}<|im_end|>\n<|im_start|>assistant\nSo: "
    assert s["answer"] == greedy(runtime, before, 6)
    assert s.text() == f"{before}{s['answer']}.<|im_end|>\n"
    assert [m["role"] for m in s.messages()] == ["system", "user", "assistant"]
    assert s.messages()[2]["content"] == f"So: {s['answer']}."


def test_a_conversation_may_begin_with_the_assistant(backend, runtime):
    @sgl.function
    def tool_use(s, question):
        s += sgl.assistant(f"To answer: {question} I need a " + sgl.gen("tool", choices=["calculator", "web"]) + ".")
        s += sgl.assistant("I write: " + sgl.gen("text", max_tokens=6, **EXACT))

    s = tool_use("What is 2 * 2?")
    begun = f"<|im_start|>assistant\nTo answer: What is 2 * 2? I need a {s['tool']}.<|im_end|>\n"
    assert s["text"] == greedy(runtime, f"{begun}<|im_start|>assistant\nI write: ", 6)


def test_turns_that_cannot_stand_where_they_are_are_refused():
    user, mark = sgl.user("a"), sgl.user_begin()
    for wrong in (mark + mark, sgl.user_end(), mark + sgl.assistant_end(), user + "b", user + sgl.gen(), "b" + user):
        with pytest.raises(ConfigError, match="cannot stand here"):
            sgl.function(lambda s, wrong=wrong: s.__iadd__(wrong)).run(backend=Scripted())
    dropping = Scripted()
    dropping.render = lambda messages, add_generation_prompt: "fixed"
    with pytest.raises(ConfigError, match="does not show an unfinished turn of the user"):
        sgl.function(lambda s: s.__iadd__(mark + sgl.gen())).run(backend=dropping)


def test_what_gen_writes_can_be_constrained(backend, runtime):
    @sgl.function
    def form(s):
        s += "a " + sgl.gen("day", regex="(Mon|Tues|Sun)day") + " " + sgl.gen("number", dtype=int, max_tokens=4)
        s += sgl.gen("data", json_schema='{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}')

    s = form.run(temperature=1, seed=5)
    assert s["day"] in ("Monday", "Tuesday", "Sunday") and re.fullmatch("-?[0-9]*", s["number"])
    assert isinstance(json.loads(s["data"]), list)
    assert s.get_meta_info("day")["finish_reason"]["type"] == "stop"
    with pytest.raises(ConfigError, match="regex '.' cannot be used"):
        sgl.function(lambda s: s.__iadd__("a " + sgl.gen("b", regex="("))).run()


def test_nobody_waits_while_a_grammar_is_compiled(runtime, monkeypatch):
    grammars, threads = runtime.llm.engine.intake.grammars, []
    compile = grammars.compile
    monkeypatch.setattr(
        grammars, "compile", lambda *given: threads.append(threading.current_thread().name) or compile(*given)
    )
    sgl.function(lambda s: s.__iadd__("a " + sgl.gen("b", regex="a|bc"))).run(backend=runtime)
    assert threads[0].startswith("minispec-program")


def test_one_step_at_a_time_is_queued(runtime):
    def ask() -> int:
        llm = runtime.llm
        requests = [llm.engine.add([5, 6], SamplingParams(max_tokens=4))[0] for _ in range(3)]
        for _ in requests:
            runtime._queue_step()
        queued = runtime._thread._work_queue.qsize()
        for request in requests:
            llm.abort(request.id)
        return queued

    assert runtime._thread.submit(ask).result() == 1


def test_an_empty_regex_is_refused_and_does_not_hang(backend):
    with pytest.raises(ConfigError, match="regex must be text that is not empty"):
        complete.run(start="x", regex="")


def test_a_rendered_start_token_is_not_doubled(runtime):
    llm = runtime.llm
    tokenizer = llm.tokenizer
    post = tokenizer.backend_tokenizer.post_processor
    try:
        tokenizer.add_bos_token = True
        plain, marked = llm.encode("hello"), llm.encode(f"{tokenizer.bos_token}hello")
        if plain[0] == tokenizer.bos_token_id:  # only tokenizers that add one can double it
            assert marked == plain
        assert marked.count(tokenizer.bos_token_id) == 1
    finally:
        tokenizer.backend_tokenizer.post_processor = post


# Streaming ------------------------------------------------------------------------------------------------------------


def test_pieces_add_up_to_the_text(backend):
    for program, name in ((complete, "rest"), (whole_turns, "answer")):
        arguments = {"start": "A small"} if program is complete else EXACT
        s = program.run(stream=True, **arguments)
        pieces = list(s.text_iter())
        assert len(pieces) > 8 and "".join(pieces) == s.text() == program.run(**arguments).text()
        assert "".join(s.text_iter(var_name=name)) == s[name]  # afterwards too, and as often as wanted


def test_a_stream_returns_at_once_and_shows_what_is_there():
    scripted = Scripted()
    s = complete.run(start="wait", stream=True, backend=scripted)
    pieces = s.text_iter("rest")
    assert next(pieces) == "[" and not scripted.gate.is_set()
    scripted.gate.set()
    assert "".join(pieces) == "10]" and s["rest"] == "[10]"
    assert "".join(s.text_iter()) == s.text() == "Text: wait[10]|[15]"
    with pytest.raises(KeyError, match="nothing"):
        list(s.text_iter("nothing"))


def test_a_run_can_be_cancelled():
    scripted = Scripted()
    s = complete.run(start="wait", stream=True, backend=scripted)
    assert next(s.text_iter()) == "Text: wait"
    scripted.started.acquire()
    s.cancel()
    with pytest.raises(sgl.Cancelled):
        s["rest"]
    with pytest.raises(sgl.Cancelled):
        list(s.text_iter())
    assert_ends(lambda: scripted.cancelled == 1 and s._run.ended, "the run")
    assert len(scripted.texts) == 1  # the second gen was never asked for
    done = complete.run(start="x", backend=scripted)
    done.cancel()
    assert done["rest"] == "[7]"
    with pytest.raises(ConfigError, match="has ended"):
        done += "more"


def test_who_comes_after_the_failure_is_told_at_once():
    run, called = Run(Scripted(), {}), []
    run.fail(ValueError("first"))
    run.fail(ValueError("second"))
    run.on_fail(lambda: called.append(1))
    assert called == [1]
    with pytest.raises(ValueError, match="first"):
        run.check()


def test_an_ended_run_takes_no_more_text():
    s = complete.run(start="x", backend=Scripted())
    with pytest.raises(ConfigError, match="this run has ended"):
        s += "more"


# Forks ----------------------------------------------------------------------------------------------------------------


def test_branches_do_not_see_each_other():
    scripted = Scripted()

    @sgl.function
    def ask(s):
        s += "start " + sgl.gen("common")
        forks = s.fork(3)
        assert len(forks) == 3 and [f["common"] for f in forks] == [s["common"]] * 3
        forks += ["a", "bb", "ccc"]
        forks += lambda i: str(i)
        forks += "!"
        forks += sgl.gen("own")
        forks[1] += "more" + sgl.gen("extra")
        for fork in forks:
            fork += "?"
        assert "own" not in s
        forks.join()
        s += " end"

    s = ask.run(backend=scripted)
    assert s.text() == "start [6] end"
    branches = ["start [6]a0!", "start [6]bb1!", "start [6]ccc2!"]
    assert s["own"] == [f"[{len(text)}]" for text in branches] and s["extra"] == ["[21]"]
    assert set(scripted.texts) == {"start ", *branches, "start [6]bb1![13]more"}
    assert s["common"] == "[6]" and [m["max_tokens"] for m in s.get_meta_info("own")] == [128] * 3


def test_a_fork_does_not_wait_and_bad_forks_are_refused():
    scripted = Scripted()

    @sgl.function
    def ask(s):
        s += "wait" + sgl.gen("common")
        forks = s.fork(2)  # while `common` still runs
        forks += sgl.gen("own")
        assert not scripted.gate.is_set()
        threading.Timer(0.05, scripted.gate.set).start()
        forks.join()
        assert scripted.gate.is_set()  # join does wait

    assert ask.run(backend=scripted)["own"] == ["[7]", "[7]"]
    for action in (
        lambda s: s.fork(0),
        lambda s: s.fork(2).__iadd__(["one"]),
    ):
        with pytest.raises(ConfigError, match="fork|branches"):
            sgl.function(action).run(backend=Scripted())


def test_branches_share_forwards_and_prefix(runtime):
    @sgl.function
    def ask(s):
        s += "A common beginning that fills some pages of the cache, for every branch."
        forks = s.fork(4)
        forks += lambda i: f" Branch {i}:"
        forks += sgl.gen("own", max_tokens=40, **EXACT)
        forks.join()

    runtime._thread.submit(fresh_pool, runtime.llm).result()
    before = runtime.llm.engine.metrics.steps
    s = ask.run(backend=runtime)
    steps = runtime.llm.engine.metrics.steps - before
    assert 40 <= steps < 80  # one after the other they would take 160
    common = len(runtime.llm.encode("A common beginning that fills some pages of the cache, for every branch."))
    cached = sorted(meta["cached_tokens"] for meta in s.get_meta_info("own"))
    assert cached[0] == 0 and min(cached[1:]) >= common // PAGE * PAGE - PAGE


def test_branches_over_a_server_share_their_prefix(server_url):
    backend = sgl.RuntimeEndpoint(server_url)
    next(backend.post("/flush_cache", {}))

    @sgl.function
    def ask(s):
        s += "A beginning that fills some pages of the cache." + sgl.gen("common", max_tokens=8, **EXACT)
        forks = s.fork(3)
        forks += lambda i: f" Branch {i}:"
        forks += sgl.gen("own", max_tokens=4, **EXACT)
        forks.join()

    s = ask.run(backend=backend)
    common = s.get_meta_info("common")
    assert common["cached_tokens"] == 0
    shared = common["prompt_tokens"] // PAGE * PAGE  # what the common gen has left, in whole pages
    assert all(meta["cached_tokens"] >= shared - PAGE for meta in s.get_meta_info("own"))


def fresh_pool(llm: LLM) -> None:
    """Throw away what earlier tests have left in the radix cache."""
    pool = llm.engine.pool
    pool.allocator.free(pool._pages(pool.tree.evict(pool.num_pages)))


# Errors ---------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_branch_reaches_the_caller_and_ends_the_others():
    scripted = Scripted()

    @sgl.function
    def ask(s):
        forks = s.fork(3)
        forks += ["wait", "wait", "then "]
        forks += sgl.gen("own")
        for _ in range(3):
            scripted.started.acquire()
        forks[2] += "fail" + sgl.gen("never")
        forks.join()

    with pytest.raises(ValueError, match="the branch fails"):
        ask.run(backend=scripted)
    assert scripted.cancelled == 2


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_error_of_the_function_ends_what_it_has_asked_for(error):
    scripted = Scripted()

    @sgl.function
    def ask(s):
        s += "wait" + sgl.gen("a")
        scripted.started.acquire()
        raise error

    with pytest.raises(type(error)):
        ask.run(backend=scripted)
    assert scripted.cancelled == 1


@pytest.mark.parametrize("backend", ["runtime", "endpoint"], indirect=True)
def test_errors_of_the_engine_reach_the_caller_and_abort_the_rest(backend, runtime):
    aborted = runtime.llm.engine.metrics.finished.get("abort", 0)

    @sgl.function
    def ask(s):
        long, bad = s.fork(2)
        long += "A small model" + sgl.gen("a", max_tokens=480, **EXACT)
        next(long.text_iter("a"))
        bad += "too long " * 600 + sgl.gen("b")

    with pytest.raises(ConfigError, match="the context limit is 512"):
        ask.run()
    assert_ends(lambda: runtime.llm.engine.metrics.finished.get("abort", 0) == aborted + 1, "the other branch")
    assert complete.run(start="and on")["rest"]


def test_a_fault_of_the_model_ends_its_requests_and_no_others(runtime, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runtime.llm.engine.runner, "forward", lambda step, table: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
            complete.run(start="x", backend=runtime)
    assert complete.run(start="x", backend=runtime)["rest"]


def test_shutdown_ends_what_runs(folder):
    runtime = sgl.Runtime(folder, dtype="float32", kv_cache_tokens=512, page_size=PAGE)
    s = complete.run(start="x", tokens=480, stream=True, backend=runtime)
    next(s.text_iter("rest"))
    runtime.shutdown()
    runtime.shutdown()
    with pytest.raises(RuntimeError, match="shut down|shutdown"):
        s["rest"]
    with pytest.raises(RuntimeError, match="shutdown"):
        complete.run(start="x", backend=runtime)
    assert_idle(runtime.llm.engine)


def test_a_request_that_comes_while_the_runtime_shuts_down_is_refused_and_leaves_nothing(runtime):
    own, block = sgl.Runtime(runtime.llm), threading.Event()
    own._thread.submit(block.wait)
    s = complete.run(start="x", stream=True, backend=own)
    assert_ends(lambda: own._thread._work_queue.qsize() == 1, "a call that is not queued yet")
    closing = threading.Thread(target=own.shutdown)
    closing.start()
    assert_ends(lambda: own._thread._shutdown, "an open runtime")
    block.set()
    closing.join()
    with pytest.raises(RuntimeError, match="shutdown"):
        s["rest"] if "rest" in s else list(s.text_iter())


def test_what_cannot_be_carried_out_is_refused_in_one_sentence():
    for call, message in (
        (lambda: sgl.gen("a", n=2), "n=2: fork"),
        (lambda: sgl.gen("a", dtype=list), "dtype must be int, float, bool or str"),
        (lambda: sgl.gen("a", dtype=[]), "dtype must be int, float, bool or str"),
        (lambda: sgl.gen("a", dtype=int, regex="a"), "without a regex beside it"),
        (lambda: sgl.gen("a", temprature=1), "no argument 'temprature'"),
        (lambda: sgl.gen("a") + 3, "cannot take 3"),
        (lambda: 3 + sgl.user("a"), "cannot take 3"),
        (lambda: complete.run(start="x"), "no backend"),
        (lambda: complete.run(start="x", top_p=7, backend=Scripted()), "top_p must be a number from 0 to 1"),
        (lambda: complete.run_batch([{"start": "x"}], num_threads=0, backend=Scripted()), "num_threads"),
        (lambda: sgl.RuntimeEndpoint("localhost:30000"), "base_url must be like http"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(TypeError, match="start"):
        complete.run(backend=Scripted())
    line = {}

    @sgl.function
    def ask(s):
        try:
            s += sgl.gen("a", temperature=-1)
        except ConfigError:
            line["here"] = True
            raise

    with pytest.raises(ConfigError, match="temperature must be a number >= 0"):
        ask.run(backend=Scripted())
    assert line["here"]  # raised where it was written


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_batch_runs_together_and_keeps_its_order(backend, runtime, capsys):
    items = [{"start": f"number {i}", "tokens": 30} for i in range(8)]
    before = runtime.llm.engine.metrics.steps
    states = complete.run_batch(items, progress_bar=True)
    steps = runtime.llm.engine.metrics.steps - before
    assert steps < 5 * 34 and "8/8" in capsys.readouterr().err  # alone each takes 34
    assert [s.text().startswith(f"Text: number {i}") for i, s in enumerate(states)] == [True] * 8
    assert [s["rest"] for s in states[:2]] == [greedy(runtime, f"Text: number {i}", 30) for i in range(2)]
    complete.run_batch(items[:1])
    assert capsys.readouterr().err == "" and complete.run_batch([]) == []


def test_num_threads_is_how_many_run_at_once():
    scripted = Scripted()
    done: list[sgl.ProgramState] = []
    batch = threading.Thread(
        target=lambda: done.extend(complete.run_batch([{"start": "wait"}] * 5, num_threads=2, backend=scripted))
    )
    batch.start()
    scripted.started.acquire()
    scripted.started.acquire()
    assert not scripted.started.acquire(timeout=0.1)
    scripted.gate.set()
    batch.join()
    assert len(done) == 5


def test_an_error_in_a_batch_reaches_the_caller_and_ends_the_others():
    scripted = Scripted()
    scripted.before_failure = 3  # calls that have begun: two that wait, and this one
    items = [{"start": "wait"}, {"start": "wait"}, {"start": "fail"}, *[{"start": "late"}] * 20]
    with pytest.raises(ValueError, match="the branch fails"):
        complete.run_batch(items, num_threads=3, backend=scripted)
    assert scripted.cancelled == 2
    with pytest.raises(TypeError, match="start"):  # checked before anything runs
        complete.run_batch([{"start": "x"}, {}], num_threads=1, backend=(untouched := Scripted()))
    assert untouched.texts == []


# Choices --------------------------------------------------------------------------------------------------------------


def choose(choices, logprobs, method=None) -> sgl.ProgramState:
    @sgl.function
    def ask(s):
        s += "Q" + sgl.select("c", choices, choices_method=method) + "."

    return ask.run(backend=Scripted(logprobs))


def test_the_normalisation_decides_between_short_and_long():
    certain = [[-1.0], [-1.0, 0.0, 0.0]]  # "x" and "xyz" where yz are certain
    assert choose(["x", "xyz"], certain)["c"] == "xyz"
    assert choose(["x", "xyz"], certain, sgl.total_likelihood)["c"] == "x"  # equal: the first
    assert choose(["x", "xyz"], certain, sgl.greedy_token_selection)["c"] == "xyz"
    unlikely = [[-1.0], [-0.5, -2.5]]
    assert choose(["x", "yz"], unlikely)["c"] == "x"
    assert choose(["x", "yz"], unlikely, sgl.greedy_token_selection)["c"] == "yz"
    assert choose(["x", "yz"], unlikely, lambda lists: 1)["c"] == "yz"
    s = choose(["x", "yz", "x"], unlikely)
    assert s.text() == "Qx." and s.get_meta_info("c")["choices"] == ["x", "yz"]
    assert s.get_meta_info("c")["normalized_prompt_logprobs"] == [-1.0, -1.5]
    assert s.get_meta_info("c")["input_token_logprobs"] == unlikely
    assert choose(["only"], [[-9.0]])["c"] == "only"


def test_bad_choices_are_refused():
    for choices in ([], "abc", ["a", ""], ["a", 3]):
        with pytest.raises(ConfigError, match="choices must be one or more texts"):
            sgl.select("c", choices)
    with pytest.raises(ConfigError, match="choices must be"):
        sgl.gen("c", choices=[])
    with pytest.raises(ConfigError, match="temperature must be 0, got 0.5"):
        sgl.gen("c", choices=["a"], temperature=0.5)
    with pytest.raises(TypeError, match="max_tokens"):
        sgl.gen("c", max_tokens=3, choices=["a"])
    assert sgl.gen("c", choices=["a"], temperature=0) == sgl.select("c", ["a"], choices_method=None)


def expected_logprobs(llm: LLM, prompt: str, choices: list[str]) -> list[list[float]]:
    """From a full recompute; what all tokenisations share is the condition."""
    every = [llm.encode(text) for text in (prompt, *(prompt + c for c in choices))]
    start = next(i for i in range(99) if len({tuple(ids[: i + 1]) for ids in every}) > 1)
    scores = []
    for ids in every[1:]:
        table = reference_logits(llm.model, ids).log_softmax(-1)
        scores.append([table[place - 1, ids[place]].item() for place in range(start, len(ids))])
    return scores


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("Does a small model read?", [" yes", "token", " no, it looks at each token", "token"]),
        ("A small model reads a ", ["token", "prompt", "token after", "token"]),  # " token" crosses the border
        ("A small model reads", [" a token", " a prompt", " a small model"]),  # they begin alike
    ],
)
def test_choices_are_scored_as_a_full_recompute_scores_them(backend, runtime, prompt, choices):

    @sgl.function
    def ask(s):
        s += prompt + sgl.gen("c", choices=choices)

    for _ in range(2):  # the second time most of it comes from the radix cache
        meta = ask.run().get_meta_info("c")
        want = expected_logprobs(runtime.llm, prompt, choices[:3])
        for got, its in zip(meta["input_token_logprobs"], want, strict=True):
            assert got == pytest.approx(its, abs=1e-4)
    means = [sum(its) / len(its) for its in want]
    assert ask.run()["c"] == choices[means.index(max(means))]


def test_a_token_across_the_border_brings_the_end_of_the_prompt_along(runtime):
    crossing = expected_logprobs(runtime.llm, "A small model reads a ", ["token"])
    prompt, whole = runtime.llm.encode("A small model reads a "), runtime.llm.encode("A small model reads a token")
    assert whole[: len(prompt)] != prompt  # the space before the choice becomes part of another token
    assert len(crossing[0]) == len(whole) - len(prompt) + 1


def test_choices_without_a_token_of_their_own_or_before_them_are_refused():
    with pytest.raises(ConfigError, match="no token that they share stands before them"):
        start_of_choices([5], [[5, 6], [7]])
    with pytest.raises(ConfigError, match="adds no token"):
        start_of_choices([5, 6], [[5, 6, 7], [5, 6]])
    assert start_of_choices([5, 6], [[5, 6, 7, 8], [5, 6, 7, 9]]) == 2


def test_choices_need_something_before_them(backend):
    @sgl.function
    def ask(s):
        s += sgl.select("c", ["yes", "no"])

    with pytest.raises(ConfigError, match="behind a prompt|prompt is empty"):
        ask.run()


@pytest.fixture
def tagged(folder):
    """An LLM of 24 pages over the tag model, which fails at once on a wrong or stale slot."""

    def make(**options) -> LLM:
        llm = LLM(folder, dtype="float32", kv_cache_tokens=96, page_size=PAGE, max_num_seqs=4, check_every_step=True,
                  **options)  # fmt: skip
        llm.engine.runner = TagRunner(llm.engine.pool.num_slots, 12, markov(12))
        llm.engine.intake.vocab_size = llm.engine.runner.vocab_size
        return llm

    return make


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # two pages and a token


def tagged_scores(continuations: list[list[int]]) -> list:
    """What `LLM.score` must say of continuations of PROMPT."""
    logits_of = markov(12)

    def score(ids: list[int]) -> list[float]:
        tables = [torch.tensor(logits_of(PROMPT + ids[:i])).log_softmax(-1) for i in range(len(ids))]
        return [table[token].item() for table, token in zip(tables, ids, strict=True)]

    return [pytest.approx(score(ids), abs=1e-5) for ids in continuations]


def test_scores_come_from_the_right_slots_and_leave_nothing(tagged):
    llm = tagged(max_num_batched_tokens=32)
    short, long = [[i % 12, 3, i % 5] for i in range(10)], [[i % 12, *range(11)] for i in range(3)]
    assert llm.score(PROMPT, short) == tagged_scores(short)
    assert_idle(llm.engine)
    # 4 table rows; each brings the token behind the 8 cached ones, and 3 of the continuation
    steps = llm.engine.runner.steps
    assert [len(rows) for rows in steps] == [1, 4, 4, 2]
    assert {row[1:] for rows in steps[1:] for row in rows} == {(8, 1, 3)}  # start, committed, drafts
    assert llm.engine.metrics.steps == 4 and llm.engine.metrics.computed_tokens == 9 + 10 * 4
    assert llm.score(PROMPT, long) == tagged_scores(long)
    assert_idle(llm.engine)
    assert [len(rows) for rows in steps[4:]] == [1, 2, 1]  # 32 tokens in a forward


def test_scores_wait_for_memory_and_rows(tagged):
    llm = tagged()
    huge = [[i, *range(12)] * 4 for i in range(3)]  # two of these and PROMPT are more than 24 pages
    assert llm.score(PROMPT, huge) == tagged_scores(huge)
    assert [len(rows) for rows in llm.engine.runner.steps] == [1, 1, 1, 1]
    assert_idle(llm.engine)
    others = [llm.engine.add([i] * 8, SamplingParams(max_tokens=8 + 4 * i, **EXACT))[0] for i in range(4)]
    llm.engine.step()
    assert llm.score(PROMPT, huge) == tagged_scores(huge)
    assert [request.finished for request in others] == [True, True, True, False]  # when there was room at last
    while llm.engine.has_work:
        llm.engine.step()
    assert all(request.finish_reason == "length" for request in others)
    assert_idle(llm.engine)


def test_bad_continuations_are_refused_and_a_fault_leaves_nothing(tagged):
    llm = tagged()
    for bad in ([[]], [[99]], [[1] * 500]):
        with pytest.raises(ConfigError):
            llm.score(PROMPT, bad)
    with pytest.raises(ConfigError, match="empty"):
        llm.score([], [[1]])
    assert llm.score(PROMPT, []) == []
    llm.engine.runner.forward = lambda step, table: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm._score_some(PROMPT, [[1]])
    assert_idle(llm.engine)


def test_scores_without_a_radix_cache(folder):
    llm = LLM(folder, dtype="float32", kv_cache_tokens=128, page_size=PAGE, enable_radix_cache=False)
    prompt = llm.encode("A small model reads a token")
    [got] = llm.score(prompt, [[40, 41]])
    table = reference_logits(llm.model, [*prompt, 40, 41]).log_softmax(-1)
    assert got == pytest.approx([table[-3, 40].item(), table[-2, 41].item()], abs=1e-4)


# Where it runs --------------------------------------------------------------------------------------------------------


def test_programs_run_inside_a_running_event_loop(backend):
    async def cell() -> str:
        states = complete.run_batch([{"start": "x"}] * 2)
        return states[0].text() + "".join(complete.run(start="y", stream=True).text_iter())

    assert asyncio.run(cell()).count("Text: ") == 2


def test_a_program_called_with_a_state_goes_on_in_it():
    @sgl.function
    def outer(s):
        complete(s, start="inner")
        s += "!"

    assert outer(backend=Scripted()).text() == "Text: inner[11]|[16]!"
    assert complete.__name__ == "complete"


def test_a_program_for_a_server_needs_no_torch_and_minispec_does_not_import_it():
    code = (
        "import sys, minispec; assert 'minispec.lang' not in sys.modules; import minispec.lang as sgl;"
        "sgl.RuntimeEndpoint('http://localhost:1'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The server's side ----------------------------------------------------------------------------------------------------


def test_what_the_server_is_sent(server, stub_url):
    server.seen.clear()
    backend = sgl.RuntimeEndpoint(f"{stub_url}/", api_key="secret")
    complete.run(start="x", min_tokens=1, backend=backend)
    path, body, key = server.seen[0]
    assert (path, key) == ("/generate", "Bearer secret")
    assert body == {
        "text": "Text: x",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True, "min_new_tokens": 1},
        "stream": True,
    }


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 500 no\r\nContent-Length: 4\r\n\r\noops", sgl.BackendError, "status 500: oops"),
        (b'HTTP/1.1 400 no\r\n\r\n{"error": {"message": "too long"}}', ConfigError, "^too long$"),
        (b'HTTP/1.1 429 no\r\n\r\n{"error": {"message": "full"}}', sgl.BackendError, "status 429: full"),
        (b"HTTP/1.1 200 ok\r\nContent-Type: text/event-stream\r\n\r\n", sgl.BackendError, "breaks off"),
        (
            b'HTTP/1.1 200 ok\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error": {"message": "late"}}\n\n',
            sgl.BackendError,
            "late",
        ),
        (b"HTTP/1.1 200 ok\r\n\r\nnot json", sgl.BackendError, "JSONDecodeError"),
        (b"nonsense\r\n\r\n", sgl.BackendError, "BadStatusLine"),
    ],
)
def test_a_server_that_fails_says_so(answer, error, message):
    import socketserver

    class Once(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Once) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(error, match=message):
            complete.run(start="x", backend=sgl.RuntimeEndpoint(f"http://127.0.0.1:{server.server_address[1]}"))
        thread.join()


def test_no_server_at_all():
    with pytest.raises(sgl.BackendError, match="http://127.0.0.1:9/generate: ConnectionRefusedError"):
        complete.run(start="x", backend=sgl.RuntimeEndpoint("http://127.0.0.1:9"))


def test_a_runtime_that_is_dropped_ends_its_thread(runtime):
    own = sgl.Runtime(runtime.llm)
    thread = own._thread.submit(threading.current_thread).result()
    assert own.llm is runtime.llm and thread.is_alive()
    del own
    assert_ends(lambda: not thread.is_alive(), "the engine's thread")


def test_a_process_may_end_while_a_program_runs(folder):
    code = (
        "import sys, minispec.lang as sgl; runtime = sgl.Runtime(sys.argv[1], dtype='float32');"
        "f = sgl.function(lambda s: s.__iadd__('x' + sgl.gen('a', max_tokens=480, ignore_eos=True)));"
        "state = f.run(stream=True, backend=runtime); next(state.text_iter('a')); print('leaving')"
    )
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout == "leaving\n" and "Traceback" not in result.stderr
