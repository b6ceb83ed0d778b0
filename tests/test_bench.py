"""The comparison measures what it says: same prompts, same number of tokens, everybody in every round."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from minispec import bench
from minispec.cli import main
from minispec.config import ConfigError


def test_every_contestant_runs_every_prompt_in_every_round_in_turn():
    calls = []
    contestants = {name: lambda prompt, name=name: calls.append((name, prompt[0])) or 5 for name in "AB"}
    results = bench.measure(contestants, [[1], [2]], rounds=2)
    assert calls == [("A", 1), ("B", 1)] + [("A", 1), ("B", 1), ("A", 2), ("B", 2)] * 2
    assert [r.name for r in results] == ["A", "B"] and all(len(r.rates) == 2 for r in results)


def test_all_contestants_write_the_same_text(tmp_path):
    model, drafts = str(write_tiny_checkpoint(tmp_path, "llama")), ["ngram", "early-exit", "early-exit+ngram"]
    contestants, engines = bench.make_contestants(model, "float32", 9, 3, drafts)
    prompt = engines["minispec"].tokenizer.encode("abc abc abc abc")
    assert [run(prompt) for run in contestants.values()] == [9] * 6
    names = [[drafter.name for drafter in llm.engine.drafters] for llm in engines.values()]
    assert names == [[], ["ngram"], ["early-exit"], ["early-exit", "ngram"]]


def test_prompts_are_the_first_of_each_category_cut(tmp_path):
    path = tmp_path / "q.jsonl"
    entries = [{"category": c, "turns": [f"{c} {n} " + "x" * 2000]} for c in bench.CATEGORIES for n in (1, 2)]
    path.write_text("\n".join(map(json.dumps, entries)))
    prompts = bench.load_prompts(str(path))
    assert [p.split()[1] for p in prompts] == ["1"] * 6 and {len(p) for p in prompts} == {1500}
    assert len(bench.load_prompts(None)) == 6
    path.write_text(json.dumps(entries[0]))
    with pytest.raises(ConfigError, match="no prompt of category coding"):
        bench.load_prompts(str(path))
    path.write_text("no json")
    with pytest.raises(ConfigError, match="q.jsonl is not a file of Spec-Bench questions"):
        bench.load_prompts(str(path))


def test_the_command_prints_a_table(tmp_path, capsys):
    model = str(write_tiny_checkpoint(tmp_path, "llama"))
    assert main(["bench", "--model", model, "--dtype", "float32", "--max-tokens", "3", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert (
        "6 prompts, 3 tokens each" in out and len([line for line in out.splitlines() if "x" in line.split()[-1]]) >= 3
    )
    assert out.splitlines()[-1].startswith("minispec, ngram K=4")
    assert main(["bench", "--model", model, "--rounds", "0"]) == 2
    assert "rounds must be a whole number >= 1, got 0" in capsys.readouterr().err


def test_steering_is_compared_with_every_fixed_length(tmp_path, capsys):
    model = str(write_tiny_checkpoint(tmp_path, "llama"))
    command = ["bench", "--model", model, "--dtype", "float32", "--steering", "--max-tokens", "4", "--rounds", "1"]
    assert main([*command, "--candidate-length", "3"]) == 0
    head, names, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("24 requests of 1 to 10 tokens, ngram, 1 rounds")
    assert names.split()[:5] == ["adaptive", "K=0", "K=1", "K=2", "K=3"]
    assert [line[:14].strip() for line in lines] == [*bench.PHASES, "all"]
    for line in lines:
        adaptive, *fixed = map(float, line[14:].split("x")[0].split()[:5])
        assert adaptive / max(fixed) == pytest.approx(float(line.split()[-1][:-1]), abs=0.02)
    assert main([*command, "--candidate-length", "0"]) == 2 and "candidate_length" in capsys.readouterr().err


def test_fixed_lengths_to_compare_with():
    assert [bench._lengths(k) for k in (1, 4, 7)] == [[0, 1], [0, 1, 2, 4], [0, 1, 2, 4, 7]]
