"""Several processes that share a model: the same ids as one, half the weights each, and an end in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_checkpoints import VARIANTS, add_shard, mtp_tensors, their_mtp, write_tiny_checkpoint

from minispec import LLM, SamplingParams
from minispec.config import ConfigError, EngineConfig
from minispec.kv.sizing import MemoryPlan
from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.linear import stored_bytes
from minispec.models.llama import CausalLM
from minispec.models.loading import load_model
from minispec.models.sharding import Shard, WorkerLost

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 8, 7], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAFTS = {"candidate_length": 3, "adaptive": False}
ROOT = Path(__file__).resolve().parent.parent


def make(folder: Path | str, **options: object) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", kv_cache_tokens=512, page_size=4, check_every_step=True,
               max_num_batched_tokens=24, **options)  # fmt: skip


def ids(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def checkpoint(folder: Path, name: str, **more: object) -> Path:
    architecture, fields = VARIANTS[name]
    return write_tiny_checkpoint(folder, architecture, **fields, **more)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("dense"), "llama with biases")


def workers_of(llm: LLM) -> list[subprocess.Popen]:
    return list(llm.group.workers)


# The parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parts_of_each_layer_add_up_to_the_layer(name: str, tmp_path: Path) -> None:
    if name == "llama with one kv head":
        pytest.skip("one head cannot be shared by two")
    folder = checkpoint(tmp_path, name)
    whole = load_model(str(folder), dtype=torch.float32).model
    parts = []
    for rank in range(2):
        loaded = load_model(str(folder), dtype=torch.float32, shard=Shard(rank, 2))
        assert loaded.config == Shard(rank, 2).config(whole.config)
        assert sum(p.numel() for p in loaded.model.parameters()) < sum(p.numel() for p in whole.parameters())
        for layer in loaded.model.layers:  # here the sum is the test's own
            layer.attention._forward_hooks.clear()
            layer.mlp._forward_hooks.clear()
        parts.append(loaded.model)
    x = torch.randn(7, whole.config.hidden_size, generator=torch.Generator().manual_seed(3))
    cos, sin = whole.rotary(torch.arange(7))

    def attend(layer, q, k, v):  # any function of a head and its key/value head
        return q.mean(-1, keepdim=True) + (k.mean(-1, keepdim=True) * v).repeat_interleave(q.shape[1] // v.shape[1], 1)

    for index, layer in enumerate(whole.layers):
        mixed = sum(part.layers[index].attention(x, cos, sin, attend) for part in parts)
        torch.testing.assert_close(mixed, layer.attention(x, cos, sin, attend), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sum(part.layers[index].mlp(x) for part in parts), layer.mlp(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"num_kv_heads": 1}, "1 key/value heads"),
        ({"num_heads": 3, "num_kv_heads": 3}, "3 attention heads"),
        ({"intermediate_size": 47}, "47 numbers of an MLP"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_number(fields: dict, what: str) -> None:
    config = ModelConfig("llama", 50, 32, 48, 1, 4, 2, 8, 64)
    assert Shard(1, 2).config(config) == replace(config, num_heads=2, num_kv_heads=1, intermediate_size=24)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size 2 does not divide the model's {what}"):
        Shard(0, 2).config(replace(config, **fields))


# Whole engines ---------------------------------------------------------------------------------------------------


def test_two_processes_give_the_ids_of_one(dense: Path) -> None:
    expected = ids(make(dense))
    for speculative in (None, {"draft_model": "ngram"} | DRAFTS, {"draft_model": "early-exit"} | DRAFTS):
        with make(dense, tensor_parallel_size=2, speculative_config=speculative) as llm:
            [worker] = workers_of(llm)
            sent = []
            send = llm.group._send
            llm.group._send = lambda message, send=send, sent=sent: (sent.append(message), send(message))
            assert ids(llm) == expected
            assert ids(llm) == expected  # now from the radix cache
            metrics = llm.metrics()
            assert (metrics.speculation.verify_rows > 0) == (speculative is not None)
            if speculative is None or speculative["draft_model"] == "ngram":
                assert len(sent) == metrics.steps  # one message for each forward of the target
            assert llm.model_config.num_heads == 2
        assert worker.wait(60) == 0
        assert not dist.is_initialized()


def test_a_deepseek_drafts_for_itself_in_two_processes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "deepseek v3", max_shard_size="40KB")
    model, mtp = their_mtp(folder)
    add_shard(folder, mtp_tensors(model, mtp))
    with make(folder, speculative_config={"draft_model": "mtp"} | DRAFTS) as llm:
        expected, counted = ids(llm), llm.metrics()
    with make(folder, tensor_parallel_size=2, speculative_config={"draft_model": "mtp"} | DRAFTS) as llm:
        assert ids(llm) == expected
        metrics = llm.metrics()
    assert metrics.speculation.drafted == counted.speculation.drafted > 0
    assert metrics.speculation.accepted == counted.speculation.accepted  # so the module's parts add up as well


def test_a_draft_model_of_its_own_stays_in_process_0(dense: Path) -> None:
    expected = ids(make(dense))
    with make(dense, tensor_parallel_size=2, speculative_config={"draft_model": str(dense)} | DRAFTS) as llm:
        assert ids(llm) == expected
        assert llm.metrics().acceptance_rate == 1.0  # it is the target itself, whole


def test_a_worker_that_dies_is_an_error_and_no_hang(dense: Path) -> None:
    llm = make(dense, tensor_parallel_size=2)
    [worker] = workers_of(llm)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(60)
    with pytest.raises(WorkerLost, match="has ended"):
        ids(llm)
    with pytest.raises(WorkerLost):
        ids(llm)
    llm.close()
    assert not dist.is_initialized()


def test_a_worker_that_hangs_is_an_error_too(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.parallel.END_SECONDS", 1)
    llm = make(dense, tensor_parallel_size=2)
    [worker] = workers_of(llm)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), llm.group._messages)  # not five minutes
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="Timed out"):
        ids(llm)
    llm.close()
    assert worker.returncode == -signal.SIGKILL


def test_a_model_that_cannot_be_divided_leaves_no_group_behind(dense: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 4 attention heads"):
        make(dense, tensor_parallel_size=3)
    assert not dist.is_initialized()


SCRIPT = """
import sys, time, json
sys.path.insert(0, "tests")
from test_parallel import ids, make
llm = make(sys.argv[1], tensor_parallel_size=2)
print(json.dumps([[worker.pid for worker in llm.group.workers], ids(llm)]), flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
llm.close()
"""


def script(*command: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_sigterm_ends_the_workers_too(dense: Path) -> None:
    process = script(sys.executable, "-c", SCRIPT, str(dense), "wait")
    [[worker], _] = json.loads(process.stdout.readline())
    process.terminate()
    process.wait(60)
    for _ in range(600):
        if not Path(f"/proc/{worker}").exists() or "State:\tZ" in Path(f"/proc/{worker}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the worker runs on without process 0")


def test_torchrun_starts_all_of_them(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = script(sys.executable, *command, str(tmp_path / "script.py"), str(dense), "end")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert json.loads(output) == [[], ids(make(dense))]  # said once: by process 0


# The memory plan -------------------------------------------------------------------------------------------------


def test_the_memory_plan_counts_what_is_there(dense: Path) -> None:
    llm = make(dense, speculative_config={"draft_model": str(dense)} | DRAFTS)
    config = llm.model_config
    assert llm.plan.whole["weights"] == llm.plan.whole["draft weights"] == config.num_parameters * 4
    cache = llm.engine.runner.tenant.cache
    assert llm.plan.per_slot["K/V"] * 513 == sum(t.numel() * 4 for pair in (cache.k, cache.v) for t in pair)
    assert llm.plan.per_slot["draft K/V"] == llm.plan.per_slot["K/V"]
    assert "tokens that fit" in str(llm.plan) and " 512" in str(llm.plan)


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    loaded = load_model(str(checkpoint(tmp_path, "llama tied")), dtype=torch.float32)
    assert stored_bytes(loaded.model) == loaded.config.num_parameters * 4


def test_a_plan_without_a_part_leaves_its_line_out() -> None:
    text = str(MemoryPlan({"weights": 10**9, "draft weights": 0}, {"K/V": 100}, 1000, reserve=0.2))
    assert "draft" not in text.replace("hidden states and draft", "") and "20%" in text


def test_a_part_of_a_damaged_checkpoint_is_refused(dense: Path) -> None:
    config = Shard(0, 2).config(load_model(str(dense), dtype=torch.float32).config)
    views = CausalLM(config).weight_views()
    assert views["model.layers.0.self_attn.o_proj.weight"].shape == (32, 16)
    (dense / "config.json").write_text((text := (dense / "config.json").read_text()).replace(": 48", ": 50"))
    try:
        with pytest.raises(ModelLoadError, match="contradicting shapes"):
            load_model(str(dense), dtype=torch.float32, shard=Shard(0, 2))
    finally:
        (dense / "config.json").write_text(text)


@pytest.mark.parametrize("draft", [{"draft_model": "ngram", "topk": 2}, {"draft_model": "eagle", "draft_head": "x"}])
def test_trees_and_eagle_heads_stay_in_one_process(draft: dict) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 takes chains of drafts"):
        EngineConfig(tensor_parallel_size=2, speculative_config=draft)
