"""The server from outside: the openai client and raw HTTP on loopback against a real uvicorn, on a tiny random Llama.

Where a test needs to know what the engine did between two events, it holds the engine's steps and lets them go one by
one, so nothing depends on how fast this machine is.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import json
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sizes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import write_tiny_checkpoint
from tools import assert_idle

from minispec import LLM, SamplingParams
from minispec.config import ConfigError, EngineConfig, SpeculativeConfig
from minispec.core import TokenLogprob
from minispec.serving import api
from minispec.serving.api import ServerSettings
from minispec.serving.engine_thread import EngineThread, TimedOut, Unavailable, Update
from minispec.serving.launch import REFUSED, BackgroundServer, add_flags, bind, engine_options, speculative_options
from minispec.serving.metrics import ServerMetrics, snapshot
from minispec.serving.schema import NOT_CARRIED_OUT, ChatRequest, CompletionRequest, GenerateRequest

KEY = "a key"
CHAT = [{"role": "user", "content": "hello there"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
LONG = {"prompt": "ab ab", "max_tokens": 400, "temperature": 0, "ignore_eos": True}  # for raw HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("serving"), "llama"))


def tiny_llm(folder: str, **options: Any) -> LLM:
    options = {"max_num_seqs": 8, "kv_cache_tokens": 4096, "page_size": 4, "check_every_step": True} | options
    return LLM(folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def offline(folder: str) -> LLM:
    """What the server must agree with: no server, no drafts, no cache."""
    return tiny_llm(folder, enable_radix_cache=False)


class Running:
    """A server, its LLM, and ways to talk to it."""

    def __init__(self, llm: LLM, **settings: Any) -> None:
        self.llm = llm
        self.server = BackgroundServer(llm, **({"model": "tiny"} | settings))
        self.url = self.server.url
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=30)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def idle(self) -> None:
        """Wait until nothing runs; then nothing may be held."""
        wait_until(lambda: not self.llm.engine.requests)
        assert self.http.get("/get_server_info").json()["internal_states"][0]["used_tokens"] == 0
        assert_idle(self.llm.engine)

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        self.server.stop()


@contextlib.contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[Running]:
    running = Running(llm, **settings)
    try:
        yield running
    finally:
        if isinstance(gate := getattr(llm.engine.step, "__self__", None), Gate):
            gate.open()  # a failed test must not hold the engine for ever
        running.close()


@pytest.fixture(scope="module")
def shared(folder: str) -> Iterator[Running]:
    drafts = {"draft_model": "ngram", "candidate_length": 3, "ngram_min": 1, "adaptive": False}
    with serving(tiny_llm(folder, speculative_config=drafts)) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """A server that drafts with n-grams, like the others of this file, and is idle before and after each test."""
    yield shared
    shared.idle()


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this has not happened in time"
        time.sleep(0.002)


class Gate:
    """Holds the engine before each step until a permit is there."""

    def __init__(self, llm: LLM) -> None:
        self.permits, self.steps, self._step = threading.Semaphore(0), 0, llm.engine.step
        self.held = False  # the engine stands at the gate
        llm.engine.step = self.step

    def step(self) -> None:
        self.held = True
        self.permits.acquire()
        self.held = False
        self.steps += 1
        self._step()

    def let(self, steps: int) -> None:
        """Let that many steps go, and wait until they have begun."""
        target = self.steps + steps
        self.permits.release(steps)
        wait_until(lambda: self.steps == target)

    def open(self) -> None:
        self.permits.release(1_000_000)


def events(text: str) -> list[Any]:
    """The data of server-sent events; [DONE] as a string."""
    found = re.findall(r"^data: (.*)\n\n", text, flags=re.M)
    return [item if item == "[DONE]" else json.loads(item) for item in found]


# Chat and completions ---------------------------------------------------------------------------------------------


def test_a_chat_completion_is_the_front_door_s_answer(server: Running, offline: LLM) -> None:
    got = server.openai.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    [expected] = offline.chat(CHAT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert got.object == "chat.completion" and got.model == "tiny" and got.id.startswith("chatcmpl-")
    [choice] = got.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert choice.finish_reason == "length" and choice.logprobs is None
    prompt = len(expected.prompt_token_ids)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (prompt, 12, prompt + 12)
    again = server.openai.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == (prompt - 1) // 4 * 4


def test_a_stream_is_the_whole_answer_in_pieces(server: Running) -> None:
    whole = server.openai.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=CHAT, stream=True, **GREEDY))
    assert {(c.object, c.model, c.id) for c in chunks} == {("chat.completion.chunk", "tiny", chunks[0].id)}
    deltas = [c.choices[0].delta for c in chunks]
    assert deltas[0].role == "assistant" and not any(d.role for d in deltas[1:])
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_usage_comes_last_and_only_when_asked_for(server: Running, max_tokens: int) -> None:
    body = {"messages": CHAT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    plain = events(server.post("/v1/chat/completions", body).text)
    assert plain[-1] == "[DONE]" and all(len(chunk["choices"]) == 1 for chunk in plain[:-1])
    assert not any("usage" in chunk for chunk in plain[:-1])
    asked = events(server.post("/v1/chat/completions", body | {"stream_options": {"include_usage": True}}).text)
    *chunks, last, done = asked
    assert done == "[DONE]" and len(asked) == len(plain) + 1
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == max_tokens
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_prompts_may_be_text_ids_or_lists_and_each_gets_n_completions(server: Running, offline: LLM) -> None:
    one, two = offline.tokenizer.encode("some text"), offline.tokenizer.encode("other")
    expected = [out.text for out in offline.generate([one, two], SamplingParams(temperature=0, max_tokens=16))]
    for prompt, texts in (("some text", expected[:1]), (one, expected[:1]), (["some text", "other"], expected)):
        got = server.openai.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert [choice.text for choice in got.choices] == texts and got.object == "text_completion"
    got = server.openai.completions.create(model="tiny", prompt=[one, two], temperature=0, n=2)
    assert [choice.text for choice in got.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.usage.prompt_tokens == len(one) + len(two)
    chunks = list(server.openai.completions.create(model="tiny", prompt=[one, two], temperature=0, n=2, stream=True))
    for index in range(4):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == expected[index // 2]
        assert [choice.finish_reason is None for choice in mine] == [True] * (len(mine) - 1) + [False]


def test_the_model_may_be_called_default(server: Running) -> None:
    assert server.openai.completions.create(model="default", prompt="x", max_tokens=2).model == "tiny"


def test_cached_tokens_are_those_of_the_first_completion(server: Running) -> None:
    server.post("/flush_cache")
    body = {"prompt": "a long prompt that fills several pages", "n": 2, "max_tokens": 2}
    for cold in (True, False):
        used = server.post("/v1/completions", body).json()["usage"]
        assert (used["prompt_tokens_details"]["cached_tokens"] == 0) is cold


def test_a_seed_repeats_and_n_completions_differ(server: Running) -> None:
    def texts() -> list[str]:
        got = server.openai.chat.completions.create(model="tiny", messages=CHAT, n=3, seed=7, max_tokens=8)
        return [choice.message.content for choice in got.choices]

    first = texts()
    assert len(set(first)) > 1 and first == texts()


def test_a_stop_string_never_reaches_the_client(server: Running, offline: LLM) -> None:
    [out] = offline.generate("stop here", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    stop = out.text[6:9]
    end = out.text.index(stop)
    body = {"prompt": "stop here", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stop": [stop]}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (out.text[:end], "stop")
    *chunks, _ = events(server.post("/v1/completions", body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == out.text[:end]


def test_logprobs_in_the_form_of_each_api(server: Running, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    [out] = offline.generate(offline.encode(CHAT), params)
    logprobs = [entry.logprob for entry in out.logprobs]
    options = GREEDY | {"logprobs": True, "top_logprobs": 2}
    [choice] = server.openai.chat.completions.create(model="tiny", messages=CHAT, **options).choices
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(logprobs, abs=1e-4)
    assert [entry.token for entry in content] == [offline.tokenizer.decode([token]) for token in out.token_ids]
    for entry, mine in zip(content, out.logprobs, strict=True):
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(list(mine.top.values()), abs=1e-4)
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    assert {entry.bytes is None for entry in content} == {True, False}
    streamed = server.openai.chat.completions.create(model="tiny", messages=CHAT, stream=True, **options)
    entries = [e for chunk in streamed if (part := chunk.choices[0].logprobs) for e in part.content]
    assert [e.logprob for e in entries] == pytest.approx(logprobs, abs=1e-4)
    body = {"prompt": out.prompt_token_ids, "logprobs": 2, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 12


def test_a_logprob_of_minus_infinity_can_be_written_as_json() -> None:
    update = Update(0, "x", [5], [TokenLogprob(-math.inf, {6: -math.inf})])
    for body in (ChatRequest(messages=CHAT), CompletionRequest(prompt="x")):
        assert "-9999.0" in json.dumps(body.choice(update, None, whole=True), allow_nan=False)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_sampling_field_reaches_the_engine_and_null_is_absent(kind: type) -> None:
    given = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "logit_bias": {"5": -1.5}, "min_tokens": 2, "max_tokens": 9, "stop": ["x"],
        "stop_token_ids": [4], "ignore_eos": True, "seed": 3, "n": 2, "skip_special_tokens": False,
    }  # fmt: skip
    required = {"messages": CHAT} if kind is ChatRequest else {"prompt": "x"}
    expected = SamplingParams(**(given | {"logit_bias": {5: -1.5}}))
    assert kind.model_validate(required | given).params() == expected
    assert kind.model_validate(required | dict.fromkeys(given)).params() == kind.model_validate(required).params()


def test_defaults_are_those_of_each_api() -> None:
    assert ChatRequest(messages=CHAT).params() == SamplingParams(max_tokens=None)
    assert CompletionRequest(prompt="x").params() == SamplingParams(max_tokens=16)
    assert GenerateRequest(text="x").params() == [SamplingParams()]
    both = ChatRequest(messages=CHAT, max_tokens=5, max_completion_tokens=7)
    assert both.params().max_tokens == 7
    assert ChatRequest(messages=CHAT, logprobs=True).params().logprobs == 0
    assert ChatRequest(messages=CHAT, logprobs=True, top_logprobs=4).params().logprobs == 4


def test_fields_that_ask_for_nothing_may_be_there(server: Running) -> None:
    harmless = {name: values[0] for name, values in NOT_CARRIED_OUT.items() if values}
    body = harmless | {"messages": CHAT, "max_tokens": 2, "user": "me", "metadata": {"a": "b"}, "tools": None}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_contents_may_be_text_parts_and_developer_is_system(server: Running, offline: LLM) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    written = [messages[0] | {"name": None}, {"role": "user", "content": parts, "tool_calls": []}]
    prompt = offline.encode([{"role": "system", "content": "be brief"}, messages[1]])
    got = server.openai.chat.completions.create(model="tiny", messages=written, **GREEDY)
    [expected] = offline.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert got.choices[0].message.content == expected.text and got.usage.prompt_tokens == len(prompt)


# SGLang's routes --------------------------------------------------------------------------------------------------


def test_generate_answers_as_sglang_does(server: Running, offline: LLM) -> None:
    prompt = "abc abc abc abc"
    [out] = offline.generate(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    server.post("/flush_cache")
    got = server.post("/generate", {"text": prompt, "sampling_params": params, "rid": "mine"}).json()
    meta = got["meta_info"]
    assert (got["text"], got["output_ids"]) == (out.text, out.token_ids)
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 40}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(out.prompt_token_ids), 40)
    assert meta["cached_tokens"] == 0 and meta["e2e_latency"] > 0
    drafted, kept, histogram = (
        meta[f"spec_{name}"] for name in ("num_proposed_drafts", "num_correct_drafts", "correct_drafts_histogram")
    )
    assert drafted > kept > 0 and meta["spec_accept_rate"] == kept / drafted
    assert sum(histogram) == meta["spec_verify_ct"] and sum(n * count for n, count in enumerate(histogram)) == kept
    assert meta["spec_accept_length"] == (meta["spec_verify_ct"] + kept) / meta["spec_verify_ct"]
    again = server.post("/generate", {"input_ids": out.prompt_token_ids, "sampling_params": params}).json()
    assert again["text"] == out.text and again["meta_info"]["cached_tokens"] == (len(out.prompt_token_ids) - 1) // 4 * 4


def test_generate_streams_what_there_is_so_far(server: Running) -> None:
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    body = {"text": "abc abc", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    whole = server.post("/generate", body).json()
    *items, done = events(server.post("/generate", body | {"stream": True}).text)
    assert done == "[DONE]" and len(items) > 3
    for earlier, later in zip(items, items[1:], strict=False):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None and later["text"].startswith(earlier["text"])
    assert items[-1]["text"] == whole["text"] and items[-1]["output_ids"] == whole["output_ids"]
    meta = items[-1]["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 20


def test_generate_takes_lists(server: Running) -> None:
    many = {"text": ["one", "two"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3, "n": 2}]}
    many["sampling_params"][0]["ignore_eos"] = many["sampling_params"][1]["ignore_eos"] = True
    got = server.post("/generate", many).json()
    assert [(item["index"], len(item["output_ids"])) for item in got] == [(0, 2), (1, 3), (2, 3)]
    alone = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0, "speculative": False}
    [item] = server.post("/generate", {"text": ["abc abc abc abc"], "sampling_params": alone}).json()
    assert item["meta_info"]["spec_verify_ct"] == 0 and item["meta_info"]["spec_correct_drafts_histogram"] == []


def test_the_cache_can_be_flushed(server: Running) -> None:
    server.post("/v1/completions", LONG | {"max_tokens": 8})
    before = server.http.get("/get_server_info").json()["internal_states"][0]["slots"]
    assert before["cached"] > 0 and sum(before.values()) == 4096
    assert server.post("/flush_cache").json() == {"flushed_tokens": before["cached"]}
    after = server.http.get("/get_server_info").json()["internal_states"][0]["slots"]
    assert after == {"free": 4096, "cached": 0, "locked": 0, "private": 0}
    assert server.http.get("/flush_cache").json() == {"flushed_tokens": 0}


def test_models_health_and_server_info(server: Running) -> None:
    [model] = server.openai.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "minispec", 512)
    assert "/v1/chat/completions" in server.http.get("/openapi.json").json()["paths"]
    server.post("/v1/completions", LONG | {"prompt": "abc abc abc", "max_tokens": 30})
    before = server.llm.engine.metrics.output_tokens
    assert server.http.get("/health").status_code == 200 and server.llm.engine.metrics.output_tokens == before
    assert server.http.get("/health_generate").status_code == 200
    assert server.llm.engine.metrics.output_tokens == before + 1
    info = server.http.get("/get_server_info").json()
    assert (info["model"], info["dtype"], info["page_size"]) == ("tiny", "torch.float32", 4)
    assert info["speculative_config"]["draft_model"] == "ngram" and "api_key" not in info
    [state] = info["internal_states"]
    assert state["avg_spec_accept_length"] == server.llm.engine.metrics.speculation.acceptance_length > 0
    assert state["output_tokens"] == before + 1 and state["candidate_length"] == 3


def test_the_live_page_asks_for_what_there_is(server: Running) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    info = server.http.get("/get_server_info").json()
    read = set(re.findall(r"\bs\.(\w+)", page.text)) | set(re.findall(r"\binfo\.(\w+)", page.text))
    assert len(read) > 12 and read <= set(info) | set(info["internal_states"][0])
    owners = re.search(r"COLORS = {(.*)}", page.text)[1]
    assert set(re.findall(r"(\w+):", owners)) == set(info["internal_states"][0]["slots"])
    assert "//" not in re.sub(r"<!--.*?-->", "", page.text, flags=re.S), "nothing comes from elsewhere"


def test_a_snapshot_in_the_middle_counts_every_slot_once(folder: str) -> None:
    llm = tiny_llm(folder, max_num_seqs=1)
    for prompt in ([5] * 9, [6]):
        llm.engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    state = snapshot(llm)
    slots = state["slots"]
    assert (state["running"], state["waiting"]) == (1, 1) and sum(slots.values()) == 4096
    assert slots["locked"] == 8 and slots["private"] == 4 and state["used_tokens"] == 12


def test_metrics_are_the_engine_s_counters(server: Running) -> None:
    server.post("/v1/completions", LONG | {"prompt": "abc abc abc", "max_tokens": 30})
    text = server.http.get("/metrics").text
    value = {name: float(number) for name, number in re.findall(r"^minispec:(\S+) (\S+)$", text, flags=re.M)}
    engine = server.llm.engine.metrics
    counts = engine.speculation
    assert (
        value["spec_accept_length"] == counts.acceptance_length and value["spec_accept_rate"] == counts.acceptance_rate
    )
    assert value["spec_verify_calls_total"] == counts.verify_rows and value["spec_num_steps"] == 3
    assert value["spec_num_draft_tokens_total"] == counts.drafted > counts.accepted
    assert value["spec_num_accepted_tokens_total"] == counts.accepted
    assert value["generation_tokens_total"] == engine.output_tokens
    assert value['num_requests_total{finish_reason="length"}'] == engine.finished["length"]
    assert [value[f'spec_accepted_tokens_per_pos_total{{position="{j}"}}'] for j in range(3)] == counts.accepted_at
    assert value["time_to_first_token_seconds_count"] == sum(engine.finished.values()) - engine.finished.get("abort", 0)
    assert value["num_running_reqs"] == value["num_used_tokens"] == 0


# Refusals ---------------------------------------------------------------------------------------------------------

REGEX = {"type": "regex", "regex": "b"}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
BAD_REQUESTS = [
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "'other'"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "empty"),
    ("/v1/completions", {"prompt": []}, 400, "completions"),
    ("/v1/completions", {"prompt": [""]}, 400, "empty"),
    ("/v1/completions", {"prompt": [[]]}, 400, "empty"),
    ("/v1/completions", {"prompt": [300]}, 400, "300"),
    ("/v1/completions", {"prompt": 5}, 400, "5"),
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompts"),
    ("/v1/completions", {"prompt": ["x", [True]]}, 400, "True"),
    ("/v1/completions", {"prompt": [1] * 512}, 400, "512 tokens and the context limit is 512"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2.5}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": "x"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": True}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n must"),
    ("/v1/completions", {"prompt": "x", "n": 1000}, 400, "1 to 264"),
    ("/v1/completions", {"prompt": ["x"] * 300}, 400, "1 to 264"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"300": 1}}, 400, "300"),
    ("/v1/completions", {"prompt": "x", "logit_bias": [1]}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "tempereture": 1}, 400, "tempereture"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages is empty"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, 400, "images"),
    ("/v1/chat/completions", {"messages": [CHAT[0] | {"tool_calls": [{}]}]}, 400, "tool_calls"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{}]}, 400, "tools is not supported"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "xml"}}, 400, "json_object, json_schema"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": "json"}, 400, "response_format"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "regex"}}, 400, "response_format"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "choice", "choice": "ab"}}, 400, "a choice must"),
    ("/generate", {"text": "x", "response_format": {"type": "text"}}, 400, "response_format"),
    ("/v1/completions", {"prompt": "x", "guided_regex": "a", "response_format": REGEX}, 400, "twice"),
    ("/v1/chat/completions", {"messages": CHAT, "guided_json": {"type": "x"}}, 400, "Invalid type: x"),
    ("/v1/chat/completions", {"messages": CHAT, "guided_regex": "a", "regex": "b"}, 400, "regex is asked for twice"),
    ("/v1/completions", {"prompt": "x", "guided_choice": []}, 400, "choice"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"structural_tag": "a"}}, 400, "structural_tag"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": 3}, 400, "structured_outputs must be an object"),
    ("/v1/completions", {"prompt": "x", "regex": "(("}, 400, "unclosed group"),
    ("/v1/completions", {"prompt": "x", "regex": "a", "ebnf": "b"}, 400, "regex and ebnf"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "logprobs to be true"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context limit is 512"),
    ("/generate", {}, 400, "text or input_ids"),
    ("/generate", {"text": "x", "input_ids": [1]}, 400, "text or input_ids"),
    ("/generate", {"text": []}, 400, "empty"),
    ("/generate", {"input_ids": []}, 400, "empty"),
    ("/generate", {"text": "x", "sampling_params": {"regex": "a{3,1}"}}, 400, "regex"),
    ("/generate", {"text": "x", "sampling_params": [{}, {}]}, 400, "1 prompts and 2"),
    ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 200}, 400, "logprobs"),
    ("/generate", {"text": "x", "rid": 5}, 400, "rid"),
    ("/generate", {"text": "x", "lora_path": "y"}, 400, "lora_path"),
    ("/nothing", {}, 404, "Not Found"),
    ("/health", {}, 405, "Method Not Allowed"),
]  # fmt: skip


def assert_error(response: httpx.Response, status: int, fragment: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["type"], str)
    assert fragment in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize(("path", "body", "status", "fragment"), BAD_REQUESTS)
def test_a_bad_request_is_refused_in_words(server: Running, path: str, body: Any, status: int, fragment: str) -> None:
    assert_error(server.post(path, body), status, fragment)


def test_a_broken_body_and_an_unknown_field_are_told_by_name(server: Running) -> None:
    header = {"Content-Type": "application/json"}
    broken = server.http.post("/v1/completions", content=b'{"prompt": "x"', headers=header)
    unknown = server.http.post("/v1/completions", json={"prompt": "x", "temperatur": 0})
    assert broken.status_code == unknown.status_code == 400
    assert broken.json()["error"]["param"] == "body"
    assert broken.json()["error"]["message"].startswith("body: not JSON at character 14: ")
    assert unknown.json()["error"]["message"] == "temperatur: no such field"


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}',
     b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', b'{"prompt": "x", "model": "\\ud800"}',
     b'{"prompt": "x", "stop": "\\ud800", "max_tokens": 0}'],
)  # fmt: skip
def test_broken_json_and_broken_text_are_refused(server: Running, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert_error(response, 404 if b"model" in content else 400)


def test_a_body_that_is_not_sent_as_json_is_told_how(server: Running) -> None:
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert_error(response, 400, "Content-Type: application/json")
    assert_error(server.post("/v1/completions", [1]), 400, "valid dictionary")


def test_the_client_gets_the_exception_of_each_status(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools"):
        server.openai.chat.completions.create(model="tiny", messages=CHAT, tools=[{"type": "function"}])


def test_without_a_tokenizer_ids_are_served_and_text_is_refused(tmp_path: Path) -> None:
    with serving(tiny_llm(str(write_tiny_checkpoint(tmp_path, tokenizer=False)))) as server:
        assert_error(server.post("/v1/chat/completions", {"messages": CHAT}), 400, "no chat template")
        assert_error(server.post("/v1/completions", {"prompt": "text"}), 400, "no tokenizer")
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
        [choice] = server.post("/v1/completions", body).json()["choices"]
        assert choice["text"] == "" and [t.split(":")[0] for t in choice["logprobs"]["tokens"]] == ["token_id"] * 3
        server.idle()


def test_a_huge_max_tokens_is_cut_to_the_context(server: Running) -> None:
    prompt = [5] * 500
    got = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 10**8, "ignore_eos": True}).json()
    assert got["usage"]["completion_tokens"] == 12 and got["choices"][0]["finish_reason"] == "length"


def test_the_api_key_guards_everything_but_health(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], secrets.compare_digest
    monkeypatch.setattr(secrets, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    with serving(tiny_llm(folder), api_key=KEY) as server:
        assert server.openai.completions.create(model="tiny", prompt="x").choices
        for path in ("/v1/models", "/metrics", "/get_server_info", "/health_generate", "/openapi.json", "/nothing"):
            assert_error(server.http.get(path), 401, "API key")
        for given in (KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer", "Bearer \u00e9"):
            headers = {"Authorization": given.encode("latin-1")}
            assert_error(server.post("/v1/completions", {"prompt": "x"}, headers=headers), 401)
        assert compared == [f"Bearer {KEY}".encode()] * 12, "each time in constant time, whatever was sent"
        assert server.http.get("/health").status_code == server.http.get("/").status_code == 200


def test_a_large_body_is_refused_whether_it_says_its_size_or_not(folder: str) -> None:
    with serving(tiny_llm(folder), max_body_bytes=1000) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).ljust(1000).encode()
        headers = {"Content-Type": "application/json"}
        for content, status in ((body, 200), (body + b" ", 413)):
            for form in (content, iter([content[:400], content[400:]])):
                response = server.http.post("/v1/completions", content=form, headers=headers)
                assert response.status_code == status, response.text
        assert_error(response, 413, "1000 bytes")


# Limits, clients that leave, crashes --------------------------------------------------------------------------------


def test_a_full_queue_is_a_429_and_room_comes_back(folder: str) -> None:
    llm = tiny_llm(folder, max_num_seqs=1)
    gate = Gate(llm)
    with serving(llm, max_queued_requests=2) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        waiting = [pool.submit(server.post, "/v1/completions", body | {"n": n}) for n in (2, 1)]
        wait_until(lambda: len(llm.engine.requests) + gate.steps >= 1)
        gate.let(1)  # takes what has come meanwhile
        wait_until(lambda: sum(s.unfinished for s in app_engine(server).submissions.values()) == 3)
        response = server.post("/v1/completions", {"prompt": "x", "regex": "(("})  # refused before it is read
        assert_error(response, 429, "3 of at most 3")
        assert response.headers["Retry-After"] == "1"
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model="tiny", prompt="x")
        assert server.http.get("/health").status_code == 200
        probe = pool.submit(server.http.get, "/health_generate")
        wait_until(lambda: not app_engine(server)._commands.empty())
        while not probe.done():
            gate.let(1)
        assert probe.result().status_code == 200, "a full queue is no illness"
        assert not any(w.done() for w in waiting)
        gate.open()
        assert [w.result().status_code for w in waiting] == [200] * 2
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        server.idle()


def test_an_engine_that_stands_still_is_ill(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PROBE_SECONDS", 0.1)
    llm = tiny_llm(folder)
    gate = Gate(llm)
    with serving(llm) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        wait_until(lambda: gate.held)
        assert_error(server.http.get("/health_generate"), 503, "0.1 seconds")
        gate.open()
        assert running.result().status_code == 200
        server.idle()


def app_engine(server: Running) -> Any:
    """The bridge inside a running server."""
    return server.server._server.config.app.state.server.engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_an_error(folder: str, stream: bool) -> None:
    llm = tiny_llm(folder)
    gate = Gate(llm)
    with serving(llm, request_timeout=0.2) as server, ThreadPoolExecutor(1) as pool:
        late = pool.submit(server.post, "/v1/completions", LONG | {"stream": stream, "n": 2})
        gate.let(2)
        if stream:
            gate.let(1)
            wait_until(late.done)
            *_, error, done = events(late.result().text)
            assert done == "[DONE]" and error["error"]["code"] == "timeout"
        else:
            assert_error(late.result(), 504, "took longer than 0.2 seconds")
        steps = gate.steps
        gate.open()
        wait_until(lambda: not llm.engine.requests)
        assert gate.steps <= steps + 2
        server.idle()


@contextlib.contextmanager
def open_request(server: Running, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A raw connection with a request under way."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        yield connection


@pytest.mark.parametrize("state", ["streaming", "in one piece", "waiting"])
def test_a_client_that_leaves_costs_at_most_two_more_steps(folder: str, state: str) -> None:
    llm = tiny_llm(folder, max_num_seqs=1)
    gate = Gate(llm)
    with serving(llm) as server, ThreadPoolExecutor(1) as pool:
        engine = app_engine(server)
        if state == "waiting":
            first = pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 30})
            wait_until(lambda: len(llm.engine.requests) == 1)
        with open_request(server, LONG | {"stream": state == "streaming"}) as connection:
            wait_until(lambda: engine.submissions)
            gate.let(3)
            if state == "streaming":
                received = b""
                while received.count(b"data: ") < 2:
                    received += connection.recv(4096)
            wait_until(lambda: len(engine.submissions) == 1 + (state == "waiting"))
            mine = list(engine.submissions.values())[-1]
        wait_until(lambda: not engine._commands.empty() or not mine.unfinished)  # the abort has been asked for
        steps = gate.steps
        gate.permits.release(2)
        wait_until(lambda: not mine.unfinished)
        assert gate.steps <= steps + 2 and mine.requests[0].finish_reason == "abort"
        assert mine.requests[0].num_output <= 5
        gate.open()
        if state == "waiting":
            assert first.result().json()["usage"]["completion_tokens"] == 30
        server.idle()


def test_the_openai_client_may_give_up_or_stop_listening(folder: str) -> None:
    llm = tiny_llm(folder)
    gate = Gate(llm)
    with serving(llm) as server:
        options = {"model": "tiny", "prompt": "ab", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.APITimeoutError):
            server.openai.with_options(timeout=0.1).completions.create(**options)
        gate.open()
        with server.openai.completions.create(**options, stream=True) as stream:
            next(iter(stream))
        server.idle()
        assert llm.engine.metrics.finished == {"abort": 2} and llm.engine.metrics.output_tokens < 800


def test_the_engine_thread_needs_no_http(folder: str) -> None:
    llm = tiny_llm(folder)
    step, finished = llm.engine.step, []
    llm.engine.step = lambda: (time.sleep(0.01), step())

    async def alone() -> None:
        engine = EngineThread(llm, max_queued=0, timeout=0.3, on_finish=finished.append)
        engine.start()
        short = await engine.submit("short", [([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))])
        [whole] = await short.whole()
        assert len(whole.token_ids) == 2 and whole.finish_reason == "length" and short._timer.cancelled()
        again = await engine.submit("short", [([5, 6], SamplingParams(max_tokens=20, ignore_eos=True))])
        engine.abort(short)  # it has ended, and its name is another's
        assert [update.finish_reason for update in await again.whole()] == ["length"]
        late = await engine.submit("late", [([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))])
        with pytest.raises(TimedOut, match="0.3 seconds"):
            await late.whole()
        await engine.call(lambda llm: None)
        assert late.requests[0].finish_reason == "abort" and not engine.submissions and not llm.engine.requests
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda llm: 1 / 0)
        with pytest.raises(ConfigError, match="300"):
            await engine.submit("half", [([5], SamplingParams(n=3)), ([300], SamplingParams())])
        assert not engine.submissions and not llm.engine.requests
        last = await engine.submit("last", [([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))])
        engine.stop()
        engine.stop()
        assert [update.finish_reason for update in await last.whole()] == ["abort"]
        with pytest.raises(Unavailable):
            await engine.call(lambda llm: None)
        with pytest.raises(Unavailable):
            await engine.submit("after", [([5], SamplingParams())])
        assert not engine.submissions

    asyncio.run(alone())
    assert [request.id for request in finished] == ["short", "short", "late", "last"]
    assert_idle(llm.engine)


def test_replies_wait_for_no_step_and_a_bad_neighbour_costs_nothing(folder: str) -> None:
    llm = tiny_llm(folder)
    gate, counts = Gate(llm), ServerMetrics()

    async def alone() -> None:
        engine = EngineThread(llm, max_queued=4, timeout=60, on_finish=counts.observe)
        engine.start()
        try:
            prompts = [([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))]
            first = await asyncio.wait_for(engine.submit("same", prompts), 10)  # the step that follows is held
            with pytest.raises(ConfigError, match="already running"):
                await asyncio.wait_for(engine.submit("same", prompts), 10)
            gate.open()
            [whole] = await asyncio.wait_for(first.whole(), 10)
            assert len(whole.token_ids) == 2
            blocked = threading.Event()
            calls = [asyncio.create_task(engine.call(lambda llm: blocked.wait(10)))]
            calls += [asyncio.create_task(engine.call(lambda llm: 5)) for _ in range(2)]
            await asyncio.sleep(0)
            calls[1].cancel()  # nobody waits for it, and the answer behind it must still come
            blocked.set()
            assert await asyncio.wait_for(calls[2], 10) == 5
        finally:
            gate.open()
            engine.stop()

    asyncio.run(alone())


def test_a_request_that_ends_without_a_token_counts_as_ended(folder: str) -> None:
    llm, counts = tiny_llm(folder), ServerMetrics()
    [request] = llm.engine.add([5, 6], SamplingParams())
    llm.abort(request.id)
    counts.observe(request)
    count = counts._registry.get_sample_value
    assert count("minispec:time_to_first_token_seconds_count") == 0
    assert count("minispec:e2e_request_latency_seconds_count") == 1


def test_abort_request_ends_it_by_its_id(folder: str) -> None:
    llm = tiny_llm(folder)
    gate = Gate(llm)
    with serving(llm) as server, ThreadPoolExecutor(2) as pool:
        body = {"text": ["abc", "d"], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "rid": "mine"}
        running = pool.submit(server.post, "/generate", body)
        wait_until(lambda: llm.engine.requests)
        assert_error(server.post("/generate", body), 400, "'mine' is already running")
        gate.let(2)
        assert server.post("/abort_request", {"rid": "another"}).json() == {"aborted": []}
        assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": ["mine"]}
        gate.open()
        for item in running.result().json():
            assert item["meta_info"]["finish_reason"] == {"type": "abort"} and len(item["output_ids"]) < 400
        long = pool.submit(server.post, "/generate", body | {"stream": True, "return_logprob": True})
        wait_until(lambda: llm.engine.requests or long.done())
        server.post("/abort_request", {"abort_all": True})
        *items, done = events(long.result().text)
        assert done == "[DONE]" and items[-1]["meta_info"]["finish_reason"] == {"type": "abort"}
        assert all(token >= 0 for item in items for token in item["output_ids"])
        server.idle()


def test_a_failed_request_is_an_error_and_the_others_go_on(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(folder)
    forward = llm.engine.runner.forward

    def poisoned(step: Any, table: Any) -> Any:
        logits = forward(step, table).clone()
        for place, row in enumerate(step.sampled):
            if row.request.prompt[0] == 99:
                logits[place] = float("nan")
        return logits

    monkeypatch.setattr(llm.engine.runner, "forward", poisoned)
    with serving(llm) as server:
        assert_error(server.post("/v1/completions", {"prompt": [[5], [99]]}), 500, "not finite")
        *_, error, _ = events(server.post("/v1/completions", {"prompt": [99], "stream": True}).text)
        assert error["error"]["code"] == "request_failed"
        assert server.post("/v1/completions", {"prompt": [5]}).status_code == 200
        server.idle()


def test_a_crash_ends_every_request_with_an_error(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm(folder, max_num_seqs=1, enable_overlap=False)
    gate = Gate(llm)
    with serving(llm) as server, ThreadPoolExecutor(3) as pool:
        whole = pool.submit(server.post, "/v1/completions", LONG)
        wait_until(lambda: llm.engine.requests)
        stream = pool.submit(server.post, "/v1/completions", LONG | {"stream": True})
        gate.let(2)
        wait_until(lambda: len(app_engine(server).submissions) == 2)
        wait_until(lambda: gate.held)
        llm.engine.runner.forward = None  # what a step needs is gone
        info = pool.submit(server.http.get, "/get_server_info")
        wait_until(lambda: not app_engine(server)._commands.empty())
        gate.open()
        assert_error(whole.result(), 503, "internal error")
        last = stream.result()
        assert last.status_code == 503 or events(last.text)[-2]["error"]["code"] == "unavailable"
        assert_error(info.result(), 503)
        for path in ("/health", "/health_generate", "/metrics", "/get_server_info"):
            assert_error(server.http.get(path), 503)
        assert_error(server.post("/v1/completions", {"prompt": "x"}), 503)
    assert "the engine's thread ends" in caplog.text


def test_a_leak_is_found_when_the_engine_is_idle(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm(folder, check_every_step=False)
    with serving(llm) as server:
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        llm.engine.pool.allocator.alloc(1)
        wait_until(lambda: server.http.get("/health").status_code == 503)
    assert "0 owners" in caplog.text


# Many at once ----------------------------------------------------------------------------------------------------


def test_64_streams_equal_their_solo_runs(server: Running, offline: LLM) -> None:
    prompts = [f"{'abc ' * (i % 7)}prompt {i} of many" for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = [offline.generate(prompt, params)[0].text for prompt in prompts]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected


def test_200_streams_cancelled_at_random_leave_nothing(server: Running, offline: LLM) -> None:
    rng = random.Random(0)
    kept: list[tuple[str, str]] = []

    async def one(client: httpx.AsyncClient, number: int, limit: asyncio.Semaphore) -> None:
        body = {"prompt": f"number {number}", "max_tokens": rng.choice([1, 2, 4, 60]), "stream": True, "temperature": 0}
        after = rng.randint(0, 12)
        async with limit, client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in _first(response.aiter_lines(), after)]
        if lines and lines[-1] == "data: [DONE]":
            text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
            [out] = offline.generate(body["prompt"], SamplingParams(temperature=0, max_tokens=body["max_tokens"]))
            kept.append((text, out.text))

    async def all_of_them() -> None:
        limit = asyncio.Semaphore(24)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            await asyncio.gather(*(one(client, number, limit) for number in range(200)))

    async def _first(lines: Any, count: int) -> Any:
        async for line in lines:
            if line:
                count -= 1
                if count < 0:
                    return
                yield line

    aborted = server.llm.engine.metrics.finished.get("abort", 0)
    asyncio.run(all_of_them())
    server.idle()
    assert server.llm.engine.metrics.finished["abort"] > aborted + 20, "hardly any was cancelled while it ran"
    assert len(kept) > 20 and all(text == expected for text, expected in kept)
    assert not app_engine(server).submissions
    assert server.http.get("/health").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@functools.cache
def openapi(server: Running) -> dict[str, Any]:
    return server.http.get("/openapi.json").json()


OTHER_NAMES = [*NOT_CARRIED_OUT, "x", "response_format", "guided_choice", "structured_outputs"]  # not on the page
GOOD_VALUES = {"prompt": "x", "messages": CHAT, "text": "x", "model": "tiny", "max_tokens": 2, "n": 2, "stream": True}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), good=st.sets(st.sampled_from(sorted(GOOD_VALUES))))
def test_whatever_is_sent_the_server_refuses_or_answers(shared: Running, data: st.DataObject, good: set) -> None:
    """Paths and fields are those of the OpenAPI page, and some that a client may send besides."""
    page = openapi(shared)
    models = {path: routes["post"] for path, routes in page["paths"].items() if "requestBody" in routes.get("post", {})}
    assert len(models) == 5
    path = data.draw(st.sampled_from(sorted(models)))
    model = models[path]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    names = st.sampled_from([*page["components"]["schemas"][model]["properties"], *OTHER_NAMES])
    likely = st.sampled_from([{"type": []}, {"x": 1}, {"include_usage": True}, [[]], ["a"]])  # almost what some need
    fields = data.draw(st.dictionaries(names, JSON | likely, max_size=4))
    body = {name: GOOD_VALUES[name] for name in sorted(good)} | fields
    body.setdefault(*("sampling_params", {"max_new_tokens": 2}) if path == "/generate" else ("max_tokens", 2))
    content = json.dumps(body)
    response = shared.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), (content, response.text)
    if response.status_code != 200:
        assert_error(response, response.status_code)
        assert shared.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert not [event for event in events(response.text) if "error" in event]


# Starting and stopping ---------------------------------------------------------------------------------------------


def test_a_server_starts_where_an_event_loop_runs_already(folder: str) -> None:
    async def inside_a_notebook() -> int:
        with BackgroundServer(tiny_llm(folder), model="tiny") as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            url = server.url
        server.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        return response.status_code

    before = set(threading.enumerate())
    assert asyncio.run(inside_a_notebook()) == 200
    assert {thread for thread in threading.enumerate() if thread.name.startswith("minispec")} <= before


def test_stopping_finishes_what_has_begun(folder: str) -> None:
    llm = tiny_llm(folder)
    gate = Gate(llm)
    with ThreadPoolExecutor(2) as pool:
        running = Running(llm)
        stream = pool.submit(running.post, "/v1/completions", LONG | {"stream": True, "max_tokens": 20})
        wait_until(lambda: llm.engine.requests)
        stopping = pool.submit(running.server.stop)
        gate.open()
        *chunks, last, done = events(stream.result().text)
        assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
        stopping.result(timeout=20)
        running.close()


def test_the_first_signal_drains_and_the_second_ends(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with serving(tiny_llm(folder)) as server:
        http = server.server._server
        http.handle_exit(signal.SIGTERM, None)
        assert http.should_exit and not http.force_exit and codes == []
        http.handle_exit(signal.SIGTERM, None)
        assert codes == [1]


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=f"port {taken.getsockname()[1]}"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="70000"):
        bind("127.0.0.1", 70000)


def test_an_answer_is_sent_at_once(server: Running) -> None:
    server.http.get("/health")
    connections = [protocol.transport for protocol in server.server._server.server_state.connections]
    options = [c.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for c in connections]
    assert options and all(options), "without it each answer waits for the client's delayed ACK"


def flags(*argv: str) -> Any:
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    return parser.parse_args(argv)


def test_flags_become_engine_options() -> None:
    options = engine_options(flags())
    assert options.pop("dtype") == options.pop("device") == "auto"
    assert EngineConfig(**options) == EngineConfig(), "the defaults are the package's"
    given = (
        "--dtype half --device cuda:1 --context-length 100 --max-running-requests 4 --chunked-prefill-size 2048 "
        "--page-size 8 --disable-radix-cache --max-total-tokens 4096 --tp 2 --disable-overlap-schedule "
        "--enable-metrics --quantization int8"
    )
    assert engine_options(flags(*given.split())) == {
        "dtype": "float16", "device": "cuda:1", "context_length": 100, "max_num_seqs": 4, "chunked_prefill_size": 2048,
        "max_num_batched_tokens": 2048, "page_size": 8, "enable_radix_cache": False, "kv_cache_tokens": 4096,
        "enable_overlap": False, "mem_fraction_static": None, "tensor_parallel_size": 2, "speculative_config": None,
        "attention_backend": "auto", "enable_cuda_graphs": True, "quantization": "int8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", None),
        ("--speculative-algorithm NEXTN", {"draft_model": "mtp", "candidate_length": 3}),
        ("--speculative-algorithm EAGLE --speculative-num-steps 5", {"draft_model": "mtp", "candidate_length": 5}),
        ("--speculative-algorithm NEXTN --speculative-draft smollm2-135m",
         {"draft_model": "mtp", "candidate_length": 3}),
        ("--speculative-algorithm NEXTN --speculative-draft-model h.safetensors --speculative-num-draft-tokens 3",
         {"draft_model": "mtp", "draft_head": "h.safetensors", "candidate_length": 2}),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path small --speculative-num-steps 2 "
         "--speculative-num-draft-tokens 3 --speculative-eagle-topk 1",
         {"draft_model": "small", "candidate_length": 2}),
        ("--speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 4 "
         "--speculative-num-draft-tokens 16",
         {"draft_model": "mtp", "candidate_length": 5, "topk": 4, "num_draft_tokens": 15}),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path head --speculative-eagle-topk 2",
         {"draft_model": "eagle", "draft_head": "head", "candidate_length": 3, "topk": 2}),
        ("--speculative-algorithm NGRAM", {"draft_model": "ngram"}),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 9",
         {"draft_model": "ngram", "candidate_length": 8}),
        ('--speculative-config {"draft_model":["mtp","ngram"]}', {"draft_model": ["mtp", "ngram"]}),
    ],
)  # fmt: skip
def test_speculative_flags(given: str, expected: dict[str, Any] | None) -> None:
    options = speculative_options(flags(*given.split()))
    assert options == expected
    SpeculativeConfig.from_any(options)


def test_eagle_with_a_language_model_runs_as_standalone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = speculative_options(flags("--speculative-algorithm", "EAGLE", "--speculative-draft", "org/small"))
    assert options == {"draft_model": "org/small", "candidate_length": 3}
    assert "'org/small' as draft runs as STANDALONE" in caplog.text


def test_eagle_with_the_folder_of_a_head_takes_the_head(tmp_path: Path) -> None:
    for name, architecture in (("head", "LlamaForCausalLMEagle"), ("model", "LlamaForCausalLM")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    line = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path")
    head, model = (speculative_options(flags(*line, str(tmp_path / name))) for name in ("head", "model"))
    assert head == {"draft_model": "eagle", "draft_head": str(tmp_path / "head"), "candidate_length": 3}
    assert model == {"draft_model": str(tmp_path / "model"), "candidate_length": 3}


@pytest.mark.parametrize("flag", REFUSED)
def test_known_flags_that_are_not_carried_out_say_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags(flag, "5")
    assert f"{flag} is not supported: {REFUSED[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ("--attention-backend triton", "'triton'"),
        ("--speculative-algorithm EAGLE3", "draft_head"),
        ("--speculative-algorithm NEXTN --speculative-eagle-topk 0", "topk"),
        (
            "--speculative-algorithm NEXTN --speculative-eagle-topk 4 --speculative-num-draft-tokens 3",
            "num_draft_tokens",
        ),
        ("--speculative-eagle-topk 4", "--speculative-algorithm"),
        ("--speculative-algorithm NEXTN --speculative-draft other", "NEXTN"),
        ("--speculative-algorithm NGRAM --speculative-draft other", "NGRAM"),
        ("--speculative-algorithm STANDALONE", "STANDALONE needs"),
        ("--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-num-draft-tokens 8", "must be 6"),
        ("--speculative-num-steps 5", "--speculative-algorithm"),
        ("--speculative-config {", "not JSON"),
        ("--speculative-config {} --speculative-algorithm NGRAM", "leave the other"),
        ('--speculative-config {"depth":1}', "depth"),
        ("--speculative-config 5", "dictionary"),
        ("--mem-fraction-static 1.5", "mem_fraction_static"),
        ("--mem-fraction-static 0.5 --max-total-tokens 100", "mem_fraction_static"),
        ("--chunked-prefill-size -1", "chunked_prefill_size"),
        ("--page-size 0", "page_size"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_the_reason(given: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        options = engine_options(flags(*given.split()))
        del options["dtype"], options["device"]
        EngineConfig(**options)


def test_a_fraction_of_gpu_memory_needs_a_gpu(folder: str) -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        LLM(folder, mem_fraction_static=0.5)


def test_only_the_server_knows_the_web() -> None:
    web = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
    free = {path for path in sizes.PACKAGE.rglob("*.py") if path.parent.name != "serving" or path.name == "launch.py"}
    for path in free:
        for node in ast.parse(path.read_text("utf-8")).body:  # the top level: what importing the module imports
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert not web & {name.split(".")[0] for name in names}, f"{path} imports {names}"


def test_the_launch_line_serves_and_sigterm_drains(smollm2_path: Path) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    line = "-m minispec.launch_server --model-path smollm2-135m --speculative-algorithm NEXTN --speculative-num-steps 3"
    process = subprocess.Popen(
        [sys.executable, *line.split(), "--port", str(port), "--log-level", "warning"],
        env=os.environ | {"PYTHONPATH": str(sizes.ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60)

        def ready() -> bool:
            assert process.poll() is None, process.stderr.read()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            return False

        wait_until(ready, 60)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        got = client.chat.completions.create(model="smollm2-135m", messages=question, temperature=0, max_tokens=12)
        assert "Paris" in got.choices[0].message.content
        [state] = httpx.get(f"http://127.0.0.1:{port}/get_server_info").json()["internal_states"]
        assert state["candidate_length"] == 3 and state["speculation"]["accepted"] > 0
        options = {"temperature": 0, "max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.chat.completions.create(model="smollm2-135m", messages=question, **options)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length", "it was cut off"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stderr.close()


def test_settings_have_limits() -> None:
    chosen = ServerSettings("tiny")
    assert chosen.api_key is None and chosen.max_queued_requests == 256
    assert chosen.max_body_bytes == 4 * 2**20 and chosen.request_timeout == 600
    wrong = {"api_key": "", "max_queued_requests": -1, "request_timeout": 0, "max_body_bytes": 0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            ServerSettings("tiny", **{name: value})


# Grammars ----------------------------------------------------------------------------------------------------------


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"regex": r'\{"ok": (true|false)\}'},
        {"response_format": {"type": "regex", "regex": r'\{"ok": (true|false)\}'}},
        {"response_format": {"type": "choice", "choice": ['{"ok": true}', '{"ok": false}']}},
        {"guided_choice": ['{"ok": true}', '{"ok": false}']},
        {"structured_outputs": {"choice": ['{"ok": true}', '{"ok": false}'], "regex": None}},
        {"guided_grammar": r'root ::= "{\"ok\": " ("true" | "false") "}"'},
    ],
)
def test_every_spelling_of_a_grammar_constrains_the_answer(server: Running, given: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 60, "temperature": 1, "seed": 1, "n": 3} | given
    whole = server.post("/v1/chat/completions", body).json()["choices"]
    assert all(set(json.loads(choice["message"]["content"])) == {"ok"} for choice in whole)
    assert {choice["finish_reason"] for choice in whole} == {"stop"}
    *chunks, _ = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    for choice in whole:
        mine = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(delta.get("content", "") for delta in mine) == choice["message"]["content"]


def test_any_object_and_the_form_of_generate(server: Running) -> None:
    form = {"type": "json_object"}
    got = server.openai.chat.completions.create(model="tiny", messages=CHAT, response_format=form, seed=3, max_tokens=9)
    assert got.choices[0].message.content.startswith("{")
    sampling = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}
    answer = server.post("/generate", {"text": "x", "sampling_params": sampling}).json()
    assert set(json.loads(answer["text"])) == {"ok"}


def test_the_engine_does_not_wait_while_a_grammar_is_compiled(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, reached, go = server.llm.engine.intake.grammars, threading.Event(), threading.Event()
    compile = grammars.compile

    def slowly(*grammar: str) -> Any:
        reached.set()
        assert go.wait(20)
        return compile(*grammar)

    monkeypatch.setattr(grammars, "compile", slowly)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", {"prompt": "x", "regex": "ab"})
        assert reached.wait(20)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
        assert server.http.get("/health").status_code == 200
        go.set()
        assert waiting.result().json()["choices"][0]["text"] == "ab"


# What the prompting language needs ---------------------------------------------------------------------------------


def test_prompts_are_scored_from_a_place_on(server: Running, offline: LLM) -> None:
    ids = [5, 6, 7, 8, 9]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True}
    answer = server.post("/generate", body | {"logprob_start_len": 1}).json()
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[1:] and entries[0][0] is None
    [expected] = offline.score(ids[:2], [ids[2:]])
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)
    assert (
        len(server.post("/generate", body | {"logprob_start_len": 4}).json()["meta_info"]["input_token_logprobs"]) == 1
    )
    assert "input_token_logprobs" not in server.post("/generate", body).json()["meta_info"]
    assert_error(server.post("/generate", body | {"logprob_start_len": 5}), 400, "below the 5 tokens")
    assert_error(server.post("/generate", body | {"logprob_start_len": -2}), 400, "logprob_start_len")
    assert_error(server.post("/generate", body | {"logprob_start_len": 1, "stream": True}), 400, "stream to be false")
    server.idle()


def test_templates_are_applied(server: Running, offline: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for generate in (True, False):
        body = {"messages": messages, "add_generation_prompt": generate}
        prompt = server.post("/apply-template", body).json()["prompt"]
        assert prompt == offline.render_chat(messages, add_generation_prompt=generate)
    assert_error(server.post("/apply-template", {"messages": [{"role": "user"}]}), 400, "role and a content")
