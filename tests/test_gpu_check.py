"""The GPU check runs anywhere in its dry form, says what it left out, and notices wrong ids."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_drafters import tiny  # noqa: F401 (a fixture)

from minispec import LLM

PATH = Path(__file__).parent / "gpu" / "check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(check, tiny, out: Path) -> tuple[int, dict]:  # noqa: F811
    folder, head, *_ = tiny
    options = ["--dry", "--device", "cpu", "--dtype", "float32", "--out", str(out)]
    status = check.main([*options, "--model", str(folder), "--draft-head", str(head)])
    [file] = out.glob("gpu_*_dry.json")
    return status, json.loads(file.read_text())


def test_a_dry_run_fills_in_everything_but_what_needs_a_gpu(check, tiny, tmp_path, capsys):  # noqa: F811
    status, found = run(check, tiny, tmp_path)
    assert status == 0 and found["wrong"] == []
    assert len(found["skipped"]) == 4 and "the device is 'cpu'" in found["skipped"]["CUDA graphs"]
    assert capsys.readouterr().out.count("FlashInfer needs CUDA") == 3
    assert [entry["backend"] for entry in found["attention"]] == ["torch"] * 3
    assert [len(entry["relative_errors"]) for entry in found["attention"]] == [2] * 3
    assert found["attention"][2]["latent"] == [512, 64] and max(found["attention"][2]["relative_errors"]) > 0
    assert found["mtp_to_plain_at_batch_1"]["wanted"] == 1.4 and found["mtp_to_plain_at_batch_1"]["measured"] > 0
    assert len(found["ids"]) == 6 + 12 and all(entry["wrong"] == 0 for entry in found["ids"].values())
    assert len(found["speed"]) == 3 * 2 * 2 * 2
    for entry in found["speed"]:
        assert entry["tokens_per_s"] > 0 and entry["to_plain"] > 0 and entry["to_transformers"] > 0
        assert entry["drafter"] != "plain" or entry["to_plain"] == 1
        assert entry["memory_share"] > 0 and entry["tokens_per_forward"] > 0
    pictures = [path.read_bytes()[:4] for path in tmp_path.glob("gpu_*.png")]
    assert pictures == [b"\x89PNG"] * 2


def test_wrong_ids_are_noticed(check, tiny, tmp_path, monkeypatch):  # noqa: F811
    original = LLM.generate

    def generate(self, prompts, params=None):
        results = original(self, prompts, params)
        if self.config.speculative_config:
            first = results[0].outputs[0]
            wrong = [(token + 1) % 50 for token in first.token_ids]
            results[0].outputs[0] = replace(first, token_ids=wrong)
        return results

    monkeypatch.setattr(LLM, "generate", generate)
    status, found = run(check, tiny, tmp_path)
    assert status == 1 and len(found["wrong"]) == 4 + 8


def test_time_that_is_up_is_said(check, tiny, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(check.Check, "late", property(lambda self: len(self.found.get("speed", [])) >= 2))
    status, found = run(check, tiny, tmp_path)
    assert status == 0 and len(found["speed"]) == 2 and "seconds are over" in str(found["skipped"])
    assert found["speed"][0]["overlap"] and found["speed"][0]["graphs"]  # first what matters most


def test_a_part_that_fails_is_wrong_and_the_others_run(check, tiny, tmp_path, monkeypatch):  # noqa: F811
    def fails(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(check, "check_attention", fails)
    monkeypatch.setattr(check, "time_transformers", fails)
    monkeypatch.setitem(check.UNTIL, "float32", 0.0)
    status, found = run(check, tiny, tmp_path)
    assert status == 1 and found["wrong"] == ["attention: RuntimeError: no kernel"] * 3 + [
        "transformers: RuntimeError: no kernel"
    ]
    assert len(found["ids"]) == 12 and len(found["speed"]) == 24  # nothing of the part whose time is over
    assert sum("0 seconds are over" in reason for reason in found["skipped"].values()) == 6
