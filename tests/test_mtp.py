"""MTP: every module reads the right pair at every depth, drafts equal a full recompute, heads are checked and saved."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafters import config_for, greedy, make, tiny, write_head  # noqa: F401 (tiny is a fixture)
from tiny_checkpoints import write_tiny_checkpoint
from tools import TagRunner, assert_idle, assert_same_ids, run, token_ids

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.config import ConfigError, EngineConfig
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.mtp import MTPModule, MTPWeights, save_mtp
from minispec.speculative.model import MTPDrafter

# Tags: the hidden state of a position is a number made of all tokens up to it; a wrong pair gives a wrong number ------


def read(number: int, token: int) -> int:
    """Fingerprint of a prefix and one more token; small enough to be exact in float32."""
    return (number * 31 + token + 1) % 65_521


class TagTarget(TagRunner):
    """The tag model with a hidden pool: (fingerprint of the tokens up to here, 0). `delay` spoils it on purpose."""

    device, attention = torch.device("cpu"), "torch"

    def __init__(self, num_slots: int, ids: list[int], vocab_size: int, delay: int = 0) -> None:
        super().__init__(num_slots, vocab_size, self.logits_of_prefix)
        self.ids, self.delay, self.num_text_tokens = ids, delay, vocab_size
        self.hidden = torch.full((num_slots, 2), float("nan"))
        config = ModelConfig("llama", vocab_size, 2, 2, 1, 1, 1, 2, max_position=128)
        self.model = SimpleNamespace(
            config=config,
            embedding=lambda ids: torch.stack((ids.float(), torch.zeros(len(ids))), -1),
            rotary=lambda positions: (positions, positions),
        )

    def fingerprints(self, tokens) -> list[int]:
        numbers = [0]
        for token in tokens:
            numbers.append(read(numbers[-1], token))
        return numbers[1:]

    def logits_of_prefix(self, tokens) -> np.ndarray:
        return np.eye(self.vocab_size)[self.ids[self.fingerprints(tokens)[-1] % len(self.ids)]]

    def forward(self, step, table) -> torch.Tensor:
        for row in step.rows:
            tokens = row.request.tokens[: row.start] + token_ids(step, row)
            numbers = [0] * self.delay + self.fingerprints(tokens)[: len(tokens) - self.delay]
            slots = table[row.request.table_row, row.start : row.kv_len]
            self.hidden[slots] = torch.tensor([(number, 0.0) for number in numbers[row.start :]])
        return super().forward(step, table)


class TagModule:
    """Module k of m: reads states of module k - 1 only, or the last one its own; returns the next fingerprint."""

    def __init__(self, k: int, m: int) -> None:
        self.k, self.m = k, m

    def __call__(self, embedded, hidden, cos, sin, attend) -> torch.Tensor:
        levels = hidden[:, 1].unique().tolist()
        assert levels in ([self.k - 1], [self.k] if self.k == self.m else []), f"module {self.k} reads {levels}"
        numbers = [read(int(h), int(t)) for h, t in zip(hidden[:, 0], embedded[:, 0], strict=True)]
        return torch.tensor([(number, float(self.k)) for number in numbers])


def tag_mtp(num_modules: int, ids: list[int], vocab_size: int, draft_ids=None, delay=0, k=5, slots=512, **config):
    """An engine whose MTP drafter is right exactly when every module is handed the right pair."""
    config = EngineConfig(
        check_every_step=True,
        kv_cache_tokens=slots,
        speculative_config={"candidate_length": k, "adaptive": False},
        **config,
    )
    pool = KVPool(slots, config.page_size, num_rows=config.max_num_seqs, max_len=128)
    runner = TagTarget(pool.num_slots, ids, vocab_size, delay)
    rows = range(vocab_size) if draft_ids is None else draft_ids.tolist()

    def head(hidden):
        wanted = [ids[int(number) % len(ids)] for number in hidden[:, 0]]
        return torch.tensor([[float(row == token) for row in rows] for token in wanted])

    modules = [TagModule(i + 1, num_modules) for i in range(num_modules)]
    drafter = MTPDrafter(
        MTPWeights(modules, head, draft_ids, runner.model.config, runner.model.rotary, 0, 0),
        runner,
        pool,
        dtype=torch.float32,
    )
    for pool_of_module in drafter.hidden[1:]:
        pool_of_module.fill_(float("nan"))  # int(NaN) raises, and a raising drafter is counted
    return Engine(config, runner, pool, context_length=128, drafters=[drafter])


def tag_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    first = rng.integers(0, 12, 37).tolist()
    return [first, first[:25] + [3, 4], [7, 7], [1], first, rng.integers(0, 12, 20).tolist()]


@pytest.mark.parametrize("num_modules,k", list(product((1, 2, 3), (1, 3, 6))))
@pytest.mark.parametrize("page_size,chunk,slots", [(1, 4, 512), (4, None, 512), (4, 5, 96), (16, 7, 512)])
def test_each_module_reads_the_state_before_and_the_token_at_every_depth(num_modules, k, page_size, chunk, slots):
    options = {"page_size": page_size, "chunked_prefill_size": chunk, "slots": slots, "max_num_seqs": 4}
    engine = tag_mtp(num_modules, list(range(12)), 12, k=k, **options)
    params = SamplingParams(temperature=0, max_tokens=19)
    for _ in range(2):  # cold, then on cached prefixes
        run(engine, tag_prompts(), params)
    assert engine.metrics.drafter_faults == 0
    assert engine.metrics.speculation.accepted == engine.metrics.speculation.drafted > 100
    assert slots > 100 or engine.scheduler.preemptions > 0
    assert_idle(engine)


def test_the_tags_do_see_a_state_that_is_one_position_late():
    engine = tag_mtp(1, list(range(12)), 12, delay=1)
    run(engine, tag_prompts(), SamplingParams(temperature=0, max_tokens=30))
    assert engine.metrics.speculation.acceptance_rate < 0.2  # chance is 1/12


def test_a_reduced_vocabulary_accepts_all_text_within_it():
    ids = sorted(np.random.default_rng(1).choice(100, 32, replace=False).tolist())
    for params in (
        SamplingParams(temperature=0, max_tokens=30),  # argmax over the 32, then the map
        SamplingParams(temperature=0, max_tokens=30, logit_bias={ids[0]: 0.5}),  # spread over the target's 100 first
    ):
        engine = tag_mtp(2, ids, 100, torch.tensor(ids))
        run(engine, tag_prompts(), params)
        assert engine.metrics.drafter_faults == 0
        assert engine.metrics.speculation.accepted == engine.metrics.speculation.drafted > 100


# Arithmetic ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def recomputed_drafts(drafter: MTPDrafter, tokens: list[int], k: int) -> tuple[list[int], float]:
    """k greedy drafts without any cache, as in DeepSeek-V3, section 2.2.3; and the smallest argmax margin."""
    target, tokens, n = drafter.target, list(tokens), len(tokens)
    hidden = target.forward(torch.tensor(tokens), torch.arange(n), CausalAttention())
    drafts, margin, modules, before = [], float("inf"), drafter.modules, hidden[:0]
    for depth in range(k):
        # Module m reads tokens m .. n-1+depth; past the last module, its rows go on with its own states.
        m = min(depth + 1, len(modules))
        before = hidden[:-1] if depth == 0 else hidden if depth < len(modules) else torch.cat((before, hidden[-1:]))
        embedded = drafter.embedding(torch.tensor((tokens + drafts)[-len(before) :]))
        hidden = modules[m - 1](embedded, before, *target.rotary(torch.arange(len(before))), CausalAttention())
        first, second = (logits := drafter.head(hidden[-1:]))[0].topk(2).values.tolist()
        best = logits[0].argmax()
        drafts.append(int(best if drafter.draft_ids is None else drafter.draft_ids[best]))
        margin = min(margin, first - second)
    return drafts, margin


def record(drafter: MTPDrafter) -> list[tuple[list[int], list[int]]]:
    """Every (tokens, drafts) that it proposes from now on."""
    seen, propose = [], drafter.propose

    def recording(requests, lengths):
        proposal = propose(requests, lengths)
        seen.extend((list(r.tokens), drafts) for r, drafts in zip(requests, proposal.on_host(), strict=True))
        return proposal

    drafter.propose = recording
    return seen


@pytest.mark.parametrize("kind", ["mtp", "chain"])
@pytest.mark.parametrize("page_size,radix,chunk", [(1, True, 3), (4, True, None), (16, True, 3), (4, False, 3)])
def test_drafts_equal_a_full_recompute_in_every_mode(tiny, kind, page_size, radix, chunk):  # noqa: F811
    folder, _, prompts, _ = tiny
    options = {"page_size": page_size, "enable_radix_cache": radix, "chunked_prefill_size": chunk}
    llm = make(folder, config_for(kind, tiny) | {"candidate_length": 5}, **options)
    seen = record(llm.engine.drafters[0])
    for _ in range(2):
        llm.generate([[5, 6], *prompts[::2]], greedy(6))  # two tokens: the third module has no row before it drafts
    assert max(len(drafts) for _, drafts in seen) == 4
    distinct = {(*tokens, -1, *drafts): (tokens, drafts) for tokens, drafts in seen}
    for tokens, drafts in distinct.values():
        expected, margin = recomputed_drafts(llm.engine.drafters[0], tokens, len(drafts))
        assert_same_ids(drafts, expected, margin)


def test_a_chain_equals_transformers_own(tiny):  # noqa: F811
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    folder, _, prompts, _ = tiny
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.config.num_mtp_layers = 3
    mtp = MtpModel(theirs, 3)
    llm = make(folder, config_for("chain", tiny) | {"candidate_length": 3})
    renamed = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "post_norm"}
    weights = {}
    for name, tensor in load_file(config_for("chain", tiny)["draft_head"]).items():
        _, _, layer, name = name.split(".", 3)
        stem, place = name.removesuffix(".weight"), f"layers.{int(layer) - llm.model_config.num_layers}."
        weights[place + (f"{renamed[stem]}.weight" if stem in renamed else f"mtp_block.{name}")] = tensor
    assert not mtp.load_state_dict(weights, strict=False).unexpected_keys

    seen = record(llm.engine.drafters[0])
    llm.generate(prompts[::2], greedy(8))
    for tokens, drafts in seen:
        ids, n = torch.tensor([tokens]), len(tokens)
        with torch.inference_mode():
            hidden = theirs.model(ids).last_hidden_state[:, :-1]
            expected, logits, _ = mtp(ids[:, 1:], hidden, None, torch.arange(1, n)[None], None)
        best = logits[0].topk(2).values
        assert_same_ids(drafts, expected[0, : len(drafts)].tolist(), float((best[:, 0] - best[:, 1]).min()))
    assert sum(len(drafts) == 3 for _, drafts in seen) > 5


# Reduced vocabulary and head files -----------------------------------------------------------------------------------

IDS = torch.arange(5, 299, 7)


@pytest.fixture
def reduced_head(tiny, tmp_path):  # noqa: F811
    """The head of `tiny`, drafting from 42 of the 300 ids."""
    path = tmp_path / "reduced.safetensors"
    save_file(load_file(tiny[1]) | {"d2t": IDS - torch.arange(len(IDS))}, path)
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_reduced_head_is_the_targets_rows_at_those_ids(reduced_head, tmp_path, tied):
    """Packed targets too: 300 rows of 256 numbers are reordered for the CPU's kernels."""
    folder = write_tiny_checkpoint(tmp_path / "target", hidden_size=256, tie_word_embeddings=tied)
    head = write_head(tmp_path / "head.safetensors", LLM(str(folder), kv_cache_tokens=64).model_config)
    save_file(load_file(head) | {"d2t": IDS - torch.arange(len(IDS))}, head)
    llm = make(folder, {"draft_model": "mtp", "draft_head": str(head)})
    hidden = torch.randn(3, 256)
    torch.testing.assert_close(
        llm.engine.drafters[0].head(hidden), llm.model.logits(hidden)[:, IDS], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_q_is_zero_outside_a_reduced_vocabulary(tiny, reduced_head, sampling):  # noqa: F811
    folder, _, prompts, _ = tiny
    speculative = {"draft_model": "mtp", "draft_head": str(reduced_head), "draft_sampling": sampling}
    llm = make(folder, speculative)
    outside = [i for i in range(llm.model_config.vocab_size) if i not in IDS]
    drafter, kept = llm.engine.drafters[0], []
    propose = drafter.propose
    drafter.propose = lambda requests, lengths: kept.append(propose(requests, lengths)) or kept[-1]
    llm.generate(prompts, SamplingParams(temperature=1.5, frequency_penalty=0.3, seed=1, max_tokens=12))
    assert llm.metrics().drafter_faults == 0 and sum(map(len, kept[0].tokens)) > 0
    for proposal in kept:
        assert all(token in IDS for tokens in proposal.on_host() for token in tokens)
        for q in proposal.q if sampling == "probabilistic" else ():
            assert (q[:, outside] == 0).all()
            torch.testing.assert_close(q.sum(-1), torch.ones(len(q)))
    assert sampling == "probabilistic" or all(q is None for proposal in kept for q in proposal.q)


def test_a_reduced_head_drafts_the_likeliest_of_its_ids(tiny, reduced_head):  # noqa: F811
    folder, _, prompts, expected = tiny
    llm = make(folder, {"draft_model": "mtp", "draft_head": str(reduced_head), "candidate_length": 4})
    seen = record(llm.engine.drafters[0])
    for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    for tokens, drafts in seen:
        assert_same_ids(drafts, *recomputed_drafts(llm.engine.drafters[0], tokens, len(drafts)))
    full = make(folder, config_for("mtp", tiny)).engine.drafters[0]
    fewer = (llm.model_config.vocab_size - len(IDS)) * llm.model_config.hidden_size
    assert full.weight_bytes - llm.engine.drafters[0].weight_bytes == 4 * fewer


@pytest.mark.parametrize(
    "d2t,sentence",
    [
        (torch.tensor([0, 299]), "ids 0 to 300; the target has 0 to 299"),
        (torch.tensor([-1, 5]), "ids -1 to 6"),
        (torch.tensor([7, 6]), "2 draft ids to 1 ids"),
        (torch.tensor([0.0, 1.0]), "whole numbers, got torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), r"list of whole numbers.*\[2, 2\]"),
    ],
)
def test_a_wrong_map_is_refused_in_one_sentence(tiny, tmp_path, d2t, sentence):  # noqa: F811
    folder, head, *_ = tiny
    save_file(load_file(head) | {"d2t": d2t}, tmp_path / "head.safetensors")
    with pytest.raises(ModelLoadError, match=sentence):
        make(folder, {"draft_model": "mtp", "draft_head": str(tmp_path / "head.safetensors")})


@pytest.mark.parametrize(
    "places,sentence",
    [
        (["layers.4"], "deepseek 3 and those that follow it, found deepseek 4"),
        (["layers.3", "layers.5"], "deepseek 3 and those that follow it, found deepseek 3, deepseek 5"),
        (["mtp_layers.1", "mtp_layers.2"], "mimo 0 and those that follow it, found mimo 1, mimo 2"),
        (["mtp_layers.0", "mtp_layers.2"], "mimo 0 and those that follow it, found mimo 0, mimo 2"),
        (["layers.3", "mtp_layers.0"], "deepseek 3 and those that follow it, found deepseek 3, mimo 0"),
    ],
)
def test_modules_are_numbered_from_their_family_s_first_without_a_gap(tiny, tmp_path, places, sentence):  # noqa: F811
    """The target has 3 layers, so DeepSeek's names begin with layer 3; MiMo counts its modules from 0."""
    folder, head, *_ = tiny
    one = {name.removeprefix("model.layers.3."): tensor for name, tensor in load_file(head).items()}
    tensors = {f"model.{place}.{name}": tensor.clone() for place in places for name, tensor in one.items()}
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(ModelLoadError, match=f"must be {sentence}"):
        make(folder, {"draft_model": "mtp", "draft_head": str(tmp_path / "head.safetensors")})


def trained_module(config) -> MTPModule:
    """A module after one step of gradient descent."""
    module = MTPModule(config).requires_grad_(True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    embedded, hidden = torch.randn(2, 6, config.hidden_size)
    cos, sin = torch.ones(2, 6, 1, config.head_dim)
    module(embedded, hidden, cos, sin, CausalAttention()).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        parameter.data -= 0.1 * parameter.grad
    return module


def test_a_module_can_be_trained_saved_and_used(tiny, tmp_path):  # noqa: F811
    folder, _, prompts, _ = tiny
    config = LLM(str(folder), kv_cache_tokens=64).model_config
    module, path = trained_module(config), tmp_path / "head.safetensors"
    save_mtp(path, module, config, draft_ids=IDS, dtype=torch.float32, metadata={"seed": "0"})
    drafter = make(folder, {"draft_model": "mtp", "draft_head": str(path)}).engine.drafters[0]
    assert drafter.draft_ids.tolist() == IDS.tolist()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, drafter.modules[0].get_parameter(name)), name
    save_mtp(path, module, config)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}


def test_the_embedded_model_comes_with_its_head(tiny, tmp_path, monkeypatch):  # noqa: F811
    folder, head, *_ = tiny
    build = "minispec.speculative.build"
    monkeypatch.setattr(f"{build}.embedded_path", lambda: folder)
    monkeypatch.setattr(f"{build}.EMBEDDED_HEAD", head)
    shipped = make(folder, {"draft_model": "mtp"}).engine.drafters[0]
    given = make(folder, {"draft_model": "mtp", "draft_head": str(head)}).engine.drafters[0]
    for ours, theirs in zip(shipped.modules[0].parameters(), given.modules[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.setattr(f"{build}.EMBEDDED_HEAD", tmp_path / "none.safetensors")
    with pytest.raises(ConfigError, match="lacks the MTP module of smollm2-135m"):
        make(folder, {"draft_model": "mtp"})


# Smaller numbers, other places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mtp", "itself"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_short_drafts_stay_exact_and_read_less(tiny, kind, quantization, monkeypatch):  # noqa: F811
    monkeypatch.setattr("minispec.speculative.model.CATCH_UP_ROWS", 5)  # forwards without a wanted row, too
    folder, _, prompts, expected = tiny
    rates = []
    for kwargs in ({}, {"draft_quantization": quantization}):
        llm = make(folder, config_for(kind, tiny) | kwargs | {"candidate_length": 3})
        for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
            assert_same_ids(output.token_ids, ids, margin)
        assert llm.metrics().drafter_faults == 0
        rates.append((llm.engine.drafters[0].weight_bytes, llm.engine.metrics.speculation.acceptance_rate))
    assert rates[1][0] < rates[0][0]
    if kind == "itself":
        assert rates[0][1] == 1 and {"int8": 0.8, "int4": 0.1}[quantization] < rates[1][1] <= 1


@pytest.mark.parametrize("kind", ["mtp", "itself"])
def test_fp8_is_refused_where_the_device_does_not_multiply_it(tiny, kind):  # noqa: F811
    with pytest.raises(ConfigError, match="fp8.*compute capability 8.9 or later.*'cpu'"):
        make(tiny[0], config_for(kind, tiny) | {"draft_quantization": "fp8"})


def test_draft_device_is_checked(tiny):  # noqa: F811
    folder, _, prompts, expected = tiny
    with pytest.raises(ConfigError, match="draft_device 'npu'"):
        make(folder, config_for("itself", tiny) | {"draft_device": "npu"})
    with pytest.raises(ConfigError, match="draft_device 'cuda:77'.*torch finds"):
        make(folder, config_for("itself", tiny) | {"draft_device": "cuda:77"})
    llm = make(folder, config_for("itself", tiny) | {"draft_device": "cpu"})
    assert_same_ids(llm.generate(prompts[0], greedy()).pop().token_ids, *expected[0])
