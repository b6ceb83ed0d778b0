"""The comparison measures what it says: same prompts, same number of tokens, everybody in every round."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import random

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from minispec import LLM, SamplingParams, bench
from minispec.bench import host, offline, steering
from minispec.bench import serve as bench_serve
from minispec.cli import main
from minispec.config import ConfigError, EngineConfig
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.lang.backends import BackendError
from minispec.serving.launch import BackgroundServer


def test_every_contestant_runs_every_prompt_in_every_round_in_turn():
    calls = []
    contestants = {name: lambda job, name=name: calls.append((name, job[0][0])) or [[7] * 5] for name in "AB"}
    results = bench.measure(contestants, {"one": [[1]], "two": [[2]]}, rounds=2)
    assert calls == [("A", 1), ("B", 1)] + [("A", 1), ("B", 1), ("A", 2), ("B", 2)] * 2
    assert [r.name for r in results] == ["A", "B"] and all(len(r.rates()) == 2 for r in results)


def test_rates_are_tokens_over_seconds_and_the_table_shows_medians():
    slow = bench.Result("slow", {"a": [[1, 2]], "b": [[3, 4, 5, 6]]}, {"a": [1, 2, 4], "b": [1, 2, 4]})
    fast = bench.Result("fast", slow.answers, {"a": [1, 1, 1], "b": [0.5, 1, 2]}, {"length": 2.125})
    assert slow.rates() == [3, 1.5, 0.75] and slow.rates("b") == [4, 2, 1] and fast.median() == 3
    lines = bench.table("title", [slow, fast]).splitlines()
    assert lines[0] == "title" and lines[1].split() == ["tokens/s", "low", "high", "ratio", "a", "b"]
    assert lines[3].split() == ["fast", "3.0", "2.0", "4.0", "2.00x", "2.0", "4.0"]
    assert lines[4].split() == ["fast", "length", "2.12"]
    rows = bench.as_json([slow, fast])
    assert rows[1]["tokens_per_second"] == {"all": [4, 3, 2], "a": [2, 2, 2], "b": [8, 4, 2]}
    assert rows[1]["facts"] == {"length": 2.125}


def test_all_contestants_write_the_same_text(tmp_path, capsys):
    model, drafts = str(write_tiny_checkpoint(tmp_path, "llama")), ["ngram", "early-exit+ngram"]
    options = {"dtype": "float32", "max_tokens": 9, "candidate_length": 3, "rounds": 1}
    results = offline.bench(
        model, {"one": "abc abc abc abc", "two": "x"}, drafts=drafts, quantization=["int8"], **options
    )
    names = ["minispec", "minispec ngram K=3", "minispec early-exit+ngram K=3"]
    names += [name.replace("minispec", "minispec int8") for name in names]
    assert [result.name for result in results] == ["transformers", "transformers, prompt lookup", *names]
    assert all(result.answers == results[0].answers for result in results[:5])
    assert all(len(ids) == 9 for result in results for [ids] in result.answers.values())
    assert results[5].answers == results[6].answers, "drafts change nothing with short weights either"
    same = sum(a == b for a, b in zip(results[5].answers["one"][0], results[2].answers["one"][0], strict=True))
    assert 0 <= results[5].facts["same tokens"] <= 9 and (same == 9 or results[5].facts["same tokens"] < 9)
    assert results[5].facts["perplexity"] == pytest.approx(results[2].facts["perplexity"], rel=0.2)
    assert "2 prompts, 9 tokens each" in capsys.readouterr().out


def test_tokens_in_common_end_at_the_first_that_differs():
    a = bench.Result("a", {"x": [[1, 2, 3]], "y": [[1, 2, 3]]})
    b = bench.Result("b", {"x": [[1, 9, 3]], "y": [[1, 2, 3]]})
    assert offline.common(a, b) == 2 and offline.common(a, a) == 3


def test_perplexity_is_that_of_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_tiny_checkpoint(tmp_path, "llama")
    jobs = {"a": [[5, 6, 7, 8, 9]], "b": [[9, 3, 9]]}
    model, losses = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for [ids] in jobs.values():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        losses += [-logits[i, token].item() for i, token in enumerate(ids[1:])]
    expected = math.exp(sum(losses) / len(losses))
    with LLM(str(folder), dtype="float32") as llm:
        assert offline.perplexity(llm, jobs) == pytest.approx(expected, rel=1e-4)


def test_a_crowd_shares_its_beginning_and_writes_what_transformers_writes(tmp_path, capsys):
    model = str(write_tiny_checkpoint(tmp_path, "llama"))
    questions = dict(enumerate(["one two three", "four five", "a longer text with more words than the others have"]))
    options = {"dtype": "float32", "max_tokens": 4, "batch": 5, "rounds": 1}
    theirs, mine = offline.bench_batch(model, questions, **options)
    assert theirs.answers == mine.answers and [len(answers) for answers in mine.answers.values()] == [5, 5]
    out = capsys.readouterr().out
    assert "5 prompts of" in out and "mixed: " in out and "shared: " in out
    with pytest.raises(ConfigError, match="batch must be a whole number >= 1, got 0"):
        offline.bench_batch(model, questions, **options | {"batch": 0})


def test_the_host_is_measured_with_the_real_engine(monkeypatch, capsys):
    monkeypatch.setattr(host, "BATCHES", (1, 2))
    monkeypatch.setattr(host, "CACHED", (1000, 3000))
    monkeypatch.setattr(host, "STEPS", 3)
    steps = []
    monkeypatch.setattr(
        host.FreeModel, "forward", lambda self, step, _: steps.append(len(step.rows)) or self.logits[: len(step.rows)]
    )
    rows = host.bench_host()
    assert [row.get("batch") for row in rows] == [1, 2, None, None]
    assert all(value > 0 for row in rows for value in row.values())
    assert steps == [1] * len(steps[: steps.index(2)]) + [2] * len(steps[steps.index(2) :])
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("overlap", [True, False])
def test_thousands_of_requests_leave_nothing_behind(overlap):
    """Objects that Python still knows when all requests have ended, some aborted, through slots that are reused."""
    config = EngineConfig(max_num_seqs=16, enable_overlap=overlap)
    pool = KVPool(4096, config.page_size, num_rows=16, max_len=512)
    engine, chance = Engine(config, host.FreeModel(), pool, context_length=512), random.Random(0)

    def serve(count: int) -> int:
        for _ in range(count):
            prompt = [chance.randrange(900) for _ in range(chance.randrange(4, 60))]
            params = SamplingParams(temperature=0, max_tokens=chance.randrange(1, 12), ignore_eos=True)
            [request] = engine.add(prompt, params)
            if chance.random() < 0.05:
                engine.abort(request.id)
            while len(engine.requests) > 24:
                engine.step()
        while engine.has_work:
            engine.step()
        gc.collect()
        return len(gc.get_objects())

    before = serve(1000)
    assert serve(3000) < before + 300, "a tenth of an object per request would be a leak"
    engine.close()


def test_prompts_are_the_first_of_each_category_cut(tmp_path):
    path = tmp_path / "q.jsonl"
    entries = [{"category": c, "turns": [f"{c} {n} " + "x" * 2000]} for c in bench.CATEGORIES for n in (1, 2)]
    path.write_text("\n".join(map(json.dumps, entries)))
    prompts = bench.load_prompts(str(path))
    assert list(prompts) == list(bench.CATEGORIES)
    assert [p.split()[1] for p in prompts.values()] == ["1"] * 6 and {len(p) for p in prompts.values()} == {1500}
    assert len(bench.load_prompts(None)) == 6
    path.write_text(json.dumps(entries[0]))
    with pytest.raises(ConfigError, match="no prompt of category coding"):
        bench.load_prompts(str(path))
    path.write_text("no json")
    with pytest.raises(ConfigError, match="q.jsonl is not a file of Spec-Bench questions"):
        bench.load_prompts(str(path))


def test_the_command_prints_a_table_and_writes_files(tmp_path, capsys):
    model, out, figure = str(write_tiny_checkpoint(tmp_path, "llama")), tmp_path / "a/out.json", tmp_path / "b/out.png"
    command = ["bench", "--model", model, "--dtype", "float32", "--max-tokens", "3", "--rounds", "1"]
    assert main([*command, "--json", str(out), "--figure", str(figure)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 prompts, 3 tokens each" in lines[0] and lines[1].split()[4:] == [c[:9] for c in bench.CATEGORIES]
    assert [line[:30].strip() for line in lines[2:6]] == [
        "transformers",
        "transformers, prompt lookup",
        "minispec",
        "minispec ngram K=4",
    ]
    found = json.loads(out.read_text())
    assert list(found) == ["machine", "settings", "results"] and len(found["results"]) == 4
    assert found["settings"]["max_tokens"] == 3 and any(line.startswith("device") for line in found["machine"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--model", model, "--rounds", "0"]) == 2
    assert "rounds must be a whole number >= 1, got 0" in capsys.readouterr().err
    if importlib.util.find_spec("llama_cpp") is None:
        assert main([*command, "--gguf", "x.gguf"]) == 2
        assert "--gguf x.gguf needs the package llama-cpp-python" in capsys.readouterr().err


def test_steering_is_compared_with_every_fixed_length(tmp_path, capsys):
    model = str(write_tiny_checkpoint(tmp_path, "llama"))
    command = ["bench", "steering", "--model", model, "--dtype", "float32", "--max-tokens", "4", "--rounds", "1"]
    assert main([*command, "--candidate-length", "3"]) == 0
    head, names, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("24 requests of 1 to 10 tokens, ngram, 1 rounds")
    assert names.split()[:5] == ["adaptive", "K=0", "K=1", "K=2", "K=3"]
    assert [line[:14].strip() for line in lines] == [*steering.PHASES, "all"]
    for line in lines:
        adaptive, *fixed = map(float, line[14:].split("x")[0].split()[:5])
        assert adaptive / max(fixed) == pytest.approx(float(line.split()[-1][:-1]), abs=0.02)
    assert main([*command, "--candidate-length", "0"]) == 2 and "candidate_length" in capsys.readouterr().err


def test_fixed_lengths_to_compare_with():
    assert [steering._lengths(k) for k in (1, 4, 7)] == [[0, 1], [0, 1, 2, 4], [0, 1, 2, 4, 7]]


# Under load --------------------------------------------------------------------------------------------------------


def answer(due: float, times: list[float], **meta: float) -> bench_serve.Answer:
    meta = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 4, "spec_num_correct_drafts": 1,
            "spec_num_proposed_drafts": 4, "spec_verify_ct": 2, "spec_accept_length": 1.5} | meta  # fmt: skip
    return bench_serve.Answer(due, times, meta)


def test_the_figures_of_known_answers():
    first = [answer(0.0, [0.1, 0.4, 1.0]), answer(1.0, [1.3, 2.0], completion_tokens=6, spec_verify_ct=0)]
    second = [answer(5.0, [5.2, 6.0], cached_tokens=10), bench_serve.Answer(5.5)]
    figures = bench_serve.summary([first, second])
    assert figures["tokens_per_second"] == pytest.approx((10 / 2 + 4 / 1) / 2), "the median of the rounds"
    assert figures["ttft_ms"] == {"p50": 200, "p99": 300}, "from the moment it was due"
    assert figures["tpot_ms"] == {"p50": pytest.approx(800 / 3, abs=0.01), "p99": 300}
    assert figures["itl_ms"] == {"p50": 600, "p99": 800}
    assert figures["cached_share"] == pytest.approx(18 / 30)
    assert (figures["acceptance_rate"], figures["acceptance_length"]) == (3 / 12, 6 / 4)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    nothing = bench_serve.summary([[bench_serve.Answer(0.0)]])
    assert (nothing["tokens_per_second"], nothing["failed"], nothing["ttft_ms"]["p99"]) == (0, 1, 0)


class StubEndpoint:
    """A server that notes what it is sent."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: dict):
        sent.append((self.url, path, body.get("text")))
        assert path == "/flush_cache" or body["sampling_params"]["ignore_eos"], "each answer has as many tokens"
        if body.get("text") == "bad":
            raise BackendError("no")
        yield {"meta_info": {"completion_tokens": 0}}
        yield {"meta_info": answer(0, []).meta}


sent: list[tuple] = []


def test_every_server_gets_the_same_requests_and_an_empty_cache(monkeypatch, capsys):
    monkeypatch.setattr(bench_serve, "RuntimeEndpoint", StubEndpoint)
    gaps = []
    real = bench_serve.load
    monkeypatch.setattr(
        bench_serve, "load", lambda u, p, g, n: gaps.append((u, tuple(p), tuple(g))) or real(u, p, g, n)
    )
    sent.clear()
    urls = {"plain": "A", "mtp": "B"}
    rows = bench_serve.bench_serve(urls, ["x", "bad"], rates=[200, 1000], requests=12, max_tokens=4, rounds=2)
    assert [(row["rate"], row["server"]) for row in rows] == [
        (200, "plain"),
        (200, "mtp"),
        (1000, "plain"),
        (1000, "mtp"),
    ]
    loads = gaps[2:]  # two have warmed up
    assert [url for url, *_ in loads] == ["A", "B"] * 4
    pairs = list(zip(loads[::2], loads[1::2], strict=True))
    assert all(a[1:] == b[1:] for a, b in pairs) and len({a[2] for a, _ in pairs}) == 4
    gaps.clear()
    bench_serve.bench_serve(urls, ["x", "bad"], rates=[200, 1000], requests=12, max_tokens=4, rounds=2)
    assert gaps[2:] == loads, "another run has the same load"
    mean = sum(sum(a[2]) / 12 for a, _ in pairs[::2]) / 2
    assert 0.5 / 200 < mean < 2 / 200, "the rate is the one asked for"
    assert [entry for entry in sent if entry[1] == "/flush_cache"] == [
        (u, "/flush_cache", None) for u in "ABABABAB" * 2
    ]
    for row in rows:
        assert row["failed"] + row["completed"] == 24 and 0 < row["failed"] < 24
    for name, value in (("requests", 0), ("rounds", 0), ("max_tokens", 0), ("rates", [0])):
        given = {"rates": [1], "requests": 1, "max_tokens": 1, "rounds": 1} | {name: value}
        with pytest.raises(ConfigError, match=name.removesuffix("s")):
            bench_serve.bench_serve(urls, ["x"], **given)
    assert capsys.readouterr().out.count("\n") == 6 * 2


def test_real_servers_under_load(tmp_path):
    model = str(write_tiny_checkpoint(tmp_path, "llama"))
    drafts = {"draft_model": "ngram", "ngram_min": 1, "adaptive": False}
    options = {"dtype": "float32", "kv_cache_tokens": 2048}
    with BackgroundServer(LLM(model, **options)) as plain:
        with BackgroundServer(LLM(model, **options, speculative_config=drafts)) as drafting:
            urls, prompts = {"plain": plain.url, "ngram": drafting.url}, ["some words", "other words", "some words too"]
            rows = bench_serve.bench_serve(urls, prompts, rates=[50, 100], requests=5, max_tokens=24, rounds=1)
    assert [(row["rate"], row["server"]) for row in rows] == [(r, s) for r in (50, 100) for s in urls]
    for row in rows:
        assert row["completed"] == 5 and row["failed"] == 0 and row["tokens_per_second"] > 0
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] and row["itl_ms"]["p50"] > 0
        assert (row["server"] == "plain") == (row["acceptance_length"] == 0)


def test_the_command_starts_a_server_and_writes_json(tmp_path, capsys):
    model, out = str(write_tiny_checkpoint(tmp_path, "llama")), tmp_path / "out.json"
    command = ["bench", "serve", "--model", model, "--dtype", "float32", "--drafts", "ngram", "--rates", "50"]
    assert main([*command, "--requests", "2", "--max-tokens", "8", "--rounds", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [(row["server"], row["rate"], row["completed"]) for row in rows] == [("plain", 50, 2), ("ngram", 50, 2)]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    assert main(["bench", "serve", "--model", str(tmp_path / "nothing"), "--drafts", ""]) == 2
    assert "the server plain has not started" in capsys.readouterr().err
