"""The small DeepSeek: its training reaches every weight, balances the experts, goes on where it stopped, and ships."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tools import reference_logits
from transformers import AutoTokenizer

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.models.config import ModelConfig
from minispec.training import joint as training
from minispec.training.data import Conversations
from minispec.training.joint import CONFIG, SHIPPED, Joint

SMALL = CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture
def joint() -> Joint:
    return Joint(ModelConfig.from_hf(SMALL))


def test_the_losses_are_those_of_rows_that_read_only_what_came_before(joint):
    ids = torch.randint(0, 2048, (2, 9))
    now, ahead = joint(ids)
    for row in range(2):
        torch.testing.assert_close(now[row], reference_logits(joint.model, ids[row].tolist())[:-1], atol=1e-5, rtol=0)
        hidden = joint.model(ids[row], torch.arange(9), CausalAttention())
        tables = joint.model.rotary(torch.arange(8))
        states = joint.module(joint.model.embedding(ids[row, 1:]), hidden[:-1], *tables, CausalAttention())
        torch.testing.assert_close(ahead[row], joint.model.logits(states)[:-1], atol=1e-5, rtol=0)
    first, second, same = joint.losses(ids)
    chosen = now.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert first.item() == pytest.approx(-chosen.mean().item(), abs=1e-5)
    chosen = ahead.log_softmax(-1).gather(-1, ids[:, 2:, None])
    assert second.item() == pytest.approx(-chosen.mean().item(), abs=1e-5)
    assert same == (now[:, 1:].argmax(-1) == ahead.argmax(-1)).float().mean().item()


def test_every_weight_but_the_balance_learns(joint):
    now, ahead, _ = joint.losses(torch.randint(0, 2048, (8, 33)))
    (now + ahead).backward()
    trained = {id(p) for p in (*joint.inner, *joint.outer)}
    assert len(trained) == len(joint.inner) + len(joint.outer) and all(p.dim() == 2 for p in joint.inner)
    for name, parameter in joint.named_parameters():
        balance = "router.bias" in name
        assert (id(parameter) in trained) != balance
        assert balance or (parameter.grad is not None and parameter.grad.abs().sum() > 0), name


def run(work: Path, steps: int, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    monkeypatch.setattr(training, "CONFIG", SMALL)
    monkeypatch.setattr(training, "LENGTH", 24)
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    monkeypatch.setattr(training, "HELD_OUT", 4)
    monkeypatch.setattr(training, "texts_of", lambda data: data.token_ids.tolist())
    monkeypatch.setattr(training, "AutoTokenizer", Tokenizer)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (12, 40)).astype(np.uint16)
    Conversations(tokens, np.ones(tokens.shape, bool), np.zeros(12, np.float16)).save(work.parent / "text.npz")
    arguments = [
        "--work",
        str(work),
        "--data",
        str(work.parent / "text.npz"),
        "--steps",
        str(steps),
        "--batch-size",
        "2",
    ]
    work.mkdir(exist_ok=True)
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    assert training.main(arguments) == 0


class Tokenizer:
    """Text is ids already; the shipped tokenizer goes into the folder."""

    @classmethod
    def from_pretrained(cls, path: Path) -> Tokenizer:
        assert path == SHIPPED
        return cls()

    def encode(self, ids: list[int]) -> list[int]:
        return ids

    def save_pretrained(self, folder: Path) -> None:
        AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(folder)


def test_an_interrupted_run_gives_the_same_weights(tmp_path, monkeypatch):
    """The one that goes on reads the checkpoint of step 4, which the whole run wrote on its way."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    kept = {}

    def keep(state, path, save=torch.save):
        save(state, path)
        kept[state[0]] = path.read_bytes()

    monkeypatch.setattr(training.torch, "save", keep)
    run(whole, 6, monkeypatch)
    parts.mkdir()
    (parts / "joint.pt").write_bytes(kept[4])
    run(parts, 6, monkeypatch)
    assert sorted(kept) == [2, 4, 6]
    with safe_open(whole / "deepseek-mini/model.safetensors", "pt") as one:
        with safe_open(parts / "deepseek-mini/model.safetensors", "pt") as two:
            assert set(one.keys()) == set(two.keys())
            assert all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in one.keys())
            assert json.loads(one.metadata()["recipe"])["steps"] == 6 and "step 6: loss" in two.metadata()["held_out"]


def test_what_was_trained_runs_in_the_engine_and_drafts_for_itself(tmp_path, monkeypatch):
    """After a few steps over 40 ids both halves have learnt which ids there are."""
    run(tmp_path / "work", 30, monkeypatch)
    llm = LLM(
        str(tmp_path / "work/deepseek-mini"),
        dtype="float32",
        kv_cache_tokens=128,
        check_every_step=True,
        speculative_config={"draft_model": "mtp", "candidate_length": 2, "adaptive": False},
    )
    plain = LLM(str(tmp_path / "work/deepseek-mini"), dtype="float32", kv_cache_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == plain.generate([[5, 6, 7]], params)[0].token_ids
    assert llm.engine.metrics.speculation.drafted > 10


def test_experts_that_are_read_too_little_become_likelier(tmp_path, monkeypatch):
    seen = []

    class Spy(Joint):
        def __init__(self, config):
            super().__init__(config)
            seen.append(self)
            self.counts = {}
            for router in self.routers:
                self.counts[router] = torch.zeros(8)
                router.register_forward_hook(self.count)

        def count(self, router, _, out):
            if torch.is_grad_enabled():
                load = out[0].flatten().bincount(minlength=8).float()
                self.counts[router] += torch.sign(load.mean() - load)

    monkeypatch.setattr(training, "Joint", Spy)
    run(tmp_path / "work", 3, monkeypatch)
    for router, steps in seen[0].counts.items():
        torch.testing.assert_close(router.bias.data, training.BALANCE_SPEED * steps)
        assert router.bias.abs().sum() > 0


def test_the_shipped_model_drafts_for_itself():
    """Latent attention, routed experts and the MTP module in the true layout, by name and without a network."""
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 12e6
    prompts = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Tell me a story.")]
    outputs = []
    for speculative in ({"draft_model": "mtp", "candidate_length": 3, "adaptive": False}, None):
        llm = LLM("deepseek-mini", dtype="float32", kv_cache_tokens=512, speculative_config=speculative)
        outputs.append([o.token_ids for o in llm.chat(prompts, SamplingParams(temperature=0, max_tokens=64))])
        if speculative:
            config, counts = llm.model_config, llm.engine.metrics.speculation
            assert config.architecture == "deepseek_v3" and config.mla and config.moe and config.num_mtp == 1
            assert config.num_parameters > 3e6
            assert counts.acceptance_by_position[0] > 0.3
    assert outputs[0] == outputs[1]
