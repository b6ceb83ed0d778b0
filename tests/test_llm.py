"""The front door: what may be given, what comes back, streams, chats, errors. On a tiny random Llama."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from tiny_checkpoints import write_tiny_checkpoint
from tools import assert_idle

from minispec import LLM, SamplingParams, SpeculativeConfig
from minispec.config import ConfigError
from minispec.core import TokenKind

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
USER = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("llm"), "llama"))


@pytest.fixture
def llm(folder):
    llm = LLM(folder, dtype="float32", kv_cache_tokens=512, page_size=4, check_every_step=True)
    yield llm
    assert_idle(llm.engine)


def test_prompts_may_be_text_ids_or_lists_of_both(llm):
    ids = llm.tokenizer.encode("some text")
    [from_text], [from_ids] = llm.generate("some text", GREEDY), llm.generate(ids, GREEDY)
    assert from_text.token_ids == from_ids.token_ids and len(from_text.token_ids) == 12
    assert from_text.prompt == "some text" and from_ids.prompt is None
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == ids
    many = llm.generate(["some text", ids, "other"], [GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [o.token_ids for o in many[:2]] == [from_text.token_ids] * 2
    assert len(many[2].token_ids) <= 3
    assert llm.generate([], GREEDY) == []


def test_text_is_the_decoded_output_and_logprobs_are_there_when_asked(llm):
    [out] = llm.generate("some text", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3))
    prompt, both = out.prompt_token_ids, out.prompt_token_ids + out.token_ids
    decode = llm.tokenizer.decode
    assert out.text == decode(both, skip_special_tokens=True)[len(decode(prompt, skip_special_tokens=True)) :]
    assert len(out.logprobs) == 12 and all(len(entry.top) == 3 for entry in out.logprobs)
    assert llm.generate("some text", GREEDY)[0].logprobs is None
    assert out.finish_reason == "length" and out.outputs[0].error is None


def test_defaults_are_sampling_with_a_limit(llm):
    [out] = llm.generate("some text")
    assert 1 <= len(out.token_ids) <= 128


def test_n_completions_have_indexes_and_their_own_metrics(llm):
    [out] = llm.generate("some text", SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True))
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in out.outputs}) > 1
    assert out.text == out.outputs[0].text and out.metrics is out.outputs[0].metrics


def test_stream_pieces_join_to_the_text_and_carry_their_kind(folder):
    llm = LLM(
        folder,
        dtype="float32",
        kv_cache_tokens=512,
        speculative_config={"candidate_length": 3, "ngram_min": 1, "adaptive": False},
    )
    prompt = "abc abc abc abc"
    [whole] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    pieces = list(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    assert "".join(pieces) == whole.text
    assert [p.token_id for p in pieces] == whole.token_ids
    assert [p.kind for p in pieces] == whole.outputs[0].kinds
    assert {TokenKind.ACCEPTED, TokenKind.CORRECTED} <= {p.kind for p in pieces}
    assert [p.finish_reason for p in pieces] == [None] * 39 + ["length"]


def test_streams_share_the_engine_and_closing_one_aborts_it(llm):
    [expected] = llm.generate("two", GREEDY)
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    assert len(llm.engine.requests) == 2
    next(first)
    text = next(second)
    first.close()
    assert len(llm.engine.requests) == 1
    assert text + "".join(second) == expected.text


def test_a_stream_that_is_dropped_unread_leaves_nothing(llm):
    stream = llm.stream("one", GREEDY)
    assert len(llm.engine.requests) == 1
    stream.close()
    assert not llm.engine.requests and stream.request.finish_reason == "abort"
    stream = llm.stream("one", GREEDY)
    del stream
    assert not llm.engine.requests


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    real, calls = llm.engine.step, []

    def step():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY)
    assert not llm.engine.requests
    assert len(llm.generate("one", GREEDY)[0].token_ids) == 12


def test_chat_frames_with_the_template_and_one_bos(llm):
    text = llm.render_chat(USER)
    assert "hello there" in text
    [out] = llm.chat(USER, GREEDY)
    assert out.prompt_token_ids.count(llm.tokenizer.bos_token_id) == text.count(llm.tokenizer.bos_token) > 0
    both = llm.chat([USER, [{"role": "user", "content": "bye"}]], GREEDY)
    assert both[0].token_ids == out.token_ids and len(both) == 2
    assert "".join(llm.stream(USER, GREEDY)) == out.text


def test_a_second_turn_finds_the_first_in_the_cache(llm):
    [first] = llm.chat(USER, GREEDY)
    history = [*USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and now"}]
    [second] = llm.chat(history, GREEDY)
    assert second.metrics.cached_tokens >= len(first.prompt_token_ids) // 4 * 4 - 4


@pytest.mark.parametrize("stop", ["xyz", ["q", "ab"]])
def test_stop_strings_never_leak_under_speculation(folder, stop):
    llm = LLM(
        folder,
        dtype="float32",
        kv_cache_tokens=512,
        speculative_config={"candidate_length": 4, "ngram_min": 1, "adaptive": False},
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [plain] = llm.generate("abc abc abc", params)
    middle = plain.text[8:11]
    for stops in ([middle], [*([stop] if isinstance(stop, str) else stop), middle]):
        [out] = llm.generate("abc abc abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stops))
        cut = min(plain.text.find(s) for s in stops if s in plain.text)
        assert out.text == plain.text[:cut] and out.finish_reason == "stop"
        streamed = "".join(
            llm.stream("abc abc abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stops))
        )
        assert streamed == out.text
    assert_idle(llm.engine)


@pytest.mark.parametrize(
    "prompt,message",
    [
        ("", "empty"),
        ([""], "empty"),
        ([[]], "empty"),
        ([5, 999], "999.*vocabulary of 300"),
        ([-1], "-1"),
        ([[1.5]], "list of token ids"),
        ([1] * 600, "600 tokens.*512"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(llm, prompt, message):
    if prompt in ("", [""]) and llm.tokenizer.encode(""):
        pytest.skip("this tokenizer turns an empty text into a start token, which is a prompt")
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompt, GREEDY)
    with pytest.raises(ConfigError, match=message):
        llm.generate(
            ["good", *(prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt])], GREEDY
        )
    assert not llm.engine.requests
    assert llm.generate("good", GREEDY)[0].finish_reason == "length"


def test_limits_of_length(llm):
    limit = llm.engine.context_length
    [out] = llm.generate([1] * (limit - 4), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(out.token_ids) == 4 and out.finish_reason == "length"
    [out] = llm.generate([1] * (limit - 4), SamplingParams(temperature=0, max_tokens=10**8, ignore_eos=True))
    assert len(out.token_ids) == 4
    with pytest.raises(ConfigError, match=f"{limit} tokens.*{limit}"):
        llm.generate([1] * limit, GREEDY)


@pytest.mark.parametrize(
    "field,value",
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "x"),
        ("max_tokens", True),
        ("min_tokens", 500),
        ("n", 0),
        ("seed", -1),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: float("inf")}),
        ("repetition_penalty", 0),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(llm, field):
    value = {300: 1.0} if field == "logit_bias" else [300]
    with pytest.raises(ConfigError, match=f"{field}.*300.*vocabulary of 300"):
        llm.generate("good", SamplingParams(**{field: value}))
    assert not llm.engine.requests


@pytest.mark.parametrize(
    "options,message",
    [
        ({"page_sise": 4}, "page_sise.*page_size"),
        ({"page_size": 0}, "page_size.*>= 1.*0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "4.*8"),
        ({"kv_cache_tokens": 3, "page_size": 4}, "3.*4"),
        ({"enable_radix_cache": 1}, "enable_radix_cache"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "tpu"}, "tpu"),
        ({"speculative_config": {"candidate_lenght": 3}}, "candidate_lenght.*candidate_length"),
        ({"speculative_config": {"candidate_length": -1}}, "candidate_length.*-1"),
        ({"speculative_config": {"draft_model": "magic"}}, "draft_model.*ngram.*magic"),
        ({"speculative_config": {"ngram_min": 5, "ngram_max": 3}}, "ngram_min.*3.*5"),
        ({"speculative_config": "ngram"}, "dictionary.*'ngram'"),
    ],
)
def test_a_bad_option_is_refused_by_name(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **options)


def test_malformed_conversations_are_refused(llm):
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": 5}], [{"content": "x"}]):
        with pytest.raises(ConfigError):
            llm.chat(messages, GREEDY)
    llm.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat(USER, GREEDY)
    assert llm.generate("still works", GREEDY)[0].finish_reason == "length"


def test_params_must_match_the_prompts(llm):
    with pytest.raises(ConfigError, match="2 prompts and 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ConfigError, match="n=2"):
        llm.stream("a", SamplingParams(n=2))


def test_works_inside_a_running_event_loop(llm):
    async def cell():
        return llm.generate("one", GREEDY)[0].text, "".join(llm.stream("one", GREEDY))

    text, streamed = asyncio.run(cell())
    assert text == streamed


def test_abort_and_close(folder):
    with LLM(folder, dtype="float32", kv_cache_tokens=512) as llm:
        stream = llm.stream("one", GREEDY)
        next(stream)
        [request_id] = llm.engine.requests
        assert llm.abort(request_id) and not llm.abort(request_id)
        assert [p.finish_reason for p in stream][-1] == "abort"
    llm.close()


def test_metrics_are_counts_of_what_happened(folder):
    llm = LLM(folder, dtype="float32", kv_cache_tokens=512, page_size=1)
    [out] = llm.generate([5, 6, 7], GREEDY)
    metrics = llm.metrics()
    assert (metrics.steps, metrics.computed_tokens, metrics.output_tokens) == (12, 14, 12)
    assert metrics.prompt_tokens == 3 and metrics.finished == {"length": 1}
    assert metrics.weight_bytes_read == 12 * llm.model_config.num_parameters_read() * 4
    assert out.metrics.forwards == 12 and out.metrics.first_token_s <= out.metrics.finished_s
    [again] = llm.generate([5, 6, 7], GREEDY)
    assert again.metrics.cached_tokens == 2 and llm.metrics().cached_tokens == 2


def test_speculative_config_object_and_dictionary_are_the_same(folder):
    for config in (SpeculativeConfig(candidate_length=2), {"candidate_length": 2}):
        llm = LLM(folder, dtype="float32", kv_cache_tokens=64, speculative_config=config)
        assert llm.config.speculative_config.candidate_length == 2 and llm.engine.drafters[0].name == "ngram"
    assert not LLM(folder, kv_cache_tokens=64, speculative_config={"candidate_length": 0}).engine.drafters


def test_importing_the_package_is_light_and_never_imports_flashinfer():
    code = (
        "import sys, minispec; print('torch' in sys.modules)\n"
        "from minispec import LLM; print('flashinfer' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_a_start_token_is_added_to_text_and_never_doubled_in_a_chat(folder):
    llm = LLM(folder, dtype="float32", kv_cache_tokens=64)
    calls = []

    class Recorder:
        chat_template = "x"

        def __getattr__(self, name):
            return getattr(type(self).inner, name)

        def encode(self, text, add_special_tokens=True, verbose=True):
            calls.append(add_special_tokens)
            return [7, 8]

        def apply_chat_template(self, messages, **options):
            return "framed"

    Recorder.inner = llm.tokenizer
    llm.tokenizer = Recorder()
    llm.generate("text", GREEDY)
    llm.chat(USER, GREEDY)
    llm.stream(USER, GREEDY).close()
    assert calls == [True, False, False]


def test_a_stream_that_fails_says_so(llm, monkeypatch):
    monkeypatch.setattr(llm.model, "logits", lambda hidden: llm_logits(hidden) * float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        list(llm.stream("one", GREEDY))
    assert llm.generate("one", GREEDY)[0].outputs[0].error and not llm.engine.requests


def llm_logits(hidden):
    import torch

    return torch.ones(len(hidden), 300)


def test_text_held_back_is_shown_when_a_request_is_aborted(llm):
    [whole] = llm.generate("one", GREEDY)
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[whole.text + "!"]))
    for _ in range(6):
        assert next(stream) == ""
    llm.abort(stream.request.id)
    assert whole.text.startswith("".join(stream)) and stream.request.text.text


@pytest.mark.parametrize("k", [0, 4])
def test_min_tokens_holds_stop_strings_back_too(folder, k):
    speculative = {"candidate_length": k, "ngram_min": 1}
    llm = LLM(folder, dtype="float32", kv_cache_tokens=512, speculative_config=speculative)
    base = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    [whole] = llm.generate("abc abc abc", SamplingParams(**base))
    ends = []  # text after each token
    stream = llm.stream("abc abc abc", SamplingParams(**base))
    for piece in stream:
        ends.append(piece if not ends else ends[-1] + piece)
    n = next(i for i in range(4, 20) if ends[i][-1:] not in ends[i - 1] and len(ends[i]) > len(ends[i - 1])) + 1
    stop = ends[n - 1][-1]  # first written by token n
    [early] = llm.generate("abc abc abc", SamplingParams(**base, stop=stop, min_tokens=n))
    assert len(early.token_ids) == n and early.text == ends[n - 1][:-1]
    [late] = llm.generate("abc abc abc", SamplingParams(**base, stop=stop, min_tokens=n + 1))
    assert len(late.token_ids) > n and late.text.startswith(ends[n - 1])
    assert late.token_ids == whole.token_ids[: len(late.token_ids)]


def test_what_was_held_back_for_a_stop_string_is_there_at_the_end(llm):
    base = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    [whole] = llm.generate("one", SamplingParams(**base))
    params = SamplingParams(**base, stop=whole.text[-2:] + "~never~")
    assert llm.generate("one", params)[0].text == "".join(llm.stream("one", params)) == whole.text
    last = whole.token_ids[-1]
    if last not in whole.token_ids[:-1]:
        params = SamplingParams(**base, stop=whole.text[-2:] + "~never~", stop_token_ids=[last])
        [out] = llm.generate("one", params)
        assert out.finish_reason == "stop" and whole.text.startswith(out.text) and out.token_ids == whole.token_ids


def test_ids_of_any_whole_number_are_prompts(llm):
    import numpy as np
    import torch

    [expected] = llm.generate([5, 6, 7], GREEDY)
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), iter([5, 6, 7]), [np.int64(5), 6, 7]):
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected.token_ids
    assert [o.token_ids for o in llm.generate(np.array([[5, 6, 7]] * 2), GREEDY)] == [expected.token_ids] * 2
    assert llm.generate([5, 6, 7], SamplingParams(temperature=np.float32(0), max_tokens=np.int64(12), ignore_eos=True))


@pytest.mark.parametrize(
    "prompt", [None, 5, b"abc", {"a": 1}, [[1], 5], [True, False], [[1, None]], "\ud800", [1.9], [["a"]]]
)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(ConfigError):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.requests


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None], 5, [GREEDY, GREEDY]])
def test_what_are_no_params_is_refused(llm, params):
    with pytest.raises(ConfigError, match="params"):
        llm.generate("one", params)


def test_params_are_values():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias, stop=None, stop_token_ids={3, 4})
    bias[10**6] = 5.0
    assert params.logit_bias == {1: 1.0} and params.stop == () and set(params.stop_token_ids) == {3, 4}
    assert len({SamplingParams(), SamplingParams(), SamplingParams(seed=1)}) == 2
    assert SamplingParams(max_tokens=10**400).max_tokens == 10**400


def test_a_closed_llm_says_so(folder):
    llm = LLM(folder, dtype="float32", kv_cache_tokens=64)
    stream = llm.stream("one", GREEDY)
    next(stream)
    llm.close()
    assert [p.finish_reason for p in stream][-1] == "abort"
    for use in (lambda: llm.generate("one"), lambda: llm.stream("one"), lambda: llm.chat(USER), llm.metrics):
        with pytest.raises(ConfigError, match="closed"):
            use()


def test_a_chat_template_may_refuse(llm):
    before = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        llm.chat(USER, GREEDY)
    llm.tokenizer.chat_template = before


def test_sizes_that_cannot_work_are_refused(folder):
    with pytest.raises(ConfigError, match="page_size 100000 is larger than the whole pool"):
        LLM(folder, page_size=100_000)
    with pytest.raises(ConfigError, match="context of 1 tokens"):
        LLM(folder, context_length=1)
    with pytest.raises(ConfigError, match="context_length 513 is more than the 512"):
        LLM(folder, context_length=513)


def test_the_smaller_of_context_and_pool_limits_a_request(folder):
    for options, limit in (({}, 512), ({"context_length": 40}, 40), ({"kv_cache_tokens": 64}, 64)):
        llm = LLM(folder, dtype="float32", **options)
        assert llm.engine.context_length == limit
        [out] = llm.generate([5], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(out.token_ids) == limit - 1
    assert LLM(folder, dtype="float32", max_num_seqs=2).engine.pool.num_slots == 1024  # no more than can be used


def test_the_first_token_is_timed_once(llm):
    stream = llm.stream("one", GREEDY)
    next(stream)
    first = stream.request.metrics.first_token_s
    list(stream)
    assert stream.request.metrics.first_token_s == first < stream.request.metrics.finished_s


def test_padding_ids_are_never_chosen(tmp_path):
    llm = LLM(str(write_tiny_checkpoint(tmp_path, "llama", vocab_size=310)), dtype="float32", kv_cache_tokens=64)
    for temperature in (0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, logit_bias={305: 50.0})
        assert all(token < len(llm.tokenizer) for token in llm.generate("one", params)[0].token_ids)


def test_stop_strings_need_a_tokenizer(tmp_path):
    llm = LLM(str(write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)), dtype="float32", kv_cache_tokens=64)
    with pytest.raises(ConfigError, match="no tokenizer: use stop_token_ids"):
        llm.generate([5, 6], SamplingParams(stop="x"))
    with pytest.raises(ConfigError, match="give token ids"):
        llm.generate("text")
    [out] = llm.generate([5, 6], GREEDY)
    assert len(out.token_ids) == 12 and out.text == ""


def test_streams_left_to_the_garbage_collector_disturb_nobody(llm):
    import gc

    [expected] = llm.generate("two", GREEDY)
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(5):
            for text in ("one", "three"):
                cycle = [llm.stream(text, GREEDY)]
                cycle.append(cycle)
                next(cycle[0])
                del cycle
            assert llm.generate("two", GREEDY)[0].token_ids == expected.token_ids
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert not llm.engine.requests


def test_weight_bytes_follow_the_dtype(folder):
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        llm = LLM(folder, dtype=dtype, kv_cache_tokens=64)
        assert llm.engine.runner.weight_bytes == llm.model_config.num_parameters_read() * size
