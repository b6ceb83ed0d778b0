"""Model drafters: every one is lossless, rows are exact in every mode, and what is right is always accepted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine_matrix import prompts_for
from tiny_checkpoints import tiny_tokenizer, write_tiny_checkpoint
from tools import assert_idle, assert_same_ids, reference_greedy

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.config import ConfigError
from minispec.models.config import ModelLoadError
from minispec.models.linear import Linear
from minispec.models.llama import RMSNorm
from minispec.models.mtp import FAMILIES, MTPModule
from minispec.speculative.build import check_same_tokenizer
from minispec.speculative.model import MTPDrafter

MAX_TOKENS = 12
MODES = list(product((1, 4, 16), (True, False), (3, None), (1, 4)))  # page size, radix, chunk, K


def greedy(n: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def hot(n: int = MAX_TOKENS) -> SamplingParams:
    """So hot that p and q are nearly flat: drafts of a random head are kept now and then."""
    return SamplingParams(temperature=3.0, seed=1, max_tokens=n, ignore_eos=True)


def write_head(path, config, family: str = "deepseek", num_modules: int = 1):
    """Random MTP modules in a family's own names, as a safetensors file."""
    torch.manual_seed(3)
    module = MTPModule(config, hidden_first=family == "mimo")
    tensors = {}
    for k in range(num_modules):
        prefix = {"deepseek": f"model.layers.{config.num_layers + k}.", "mimo": f"model.mtp_layers.{k}."}[family]
        for name, view in module.weight_views(FAMILIES[family][1]).items():
            tensors[prefix + name] = torch.randn(view.shape) * 0.2 + ("norm" in name)
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target, an MTP head for it (chain.safetensors beside it: one of three modules), the prompts of the matrix
    and the reference's ids."""
    folder = tmp_path_factory.mktemp("target")
    write_tiny_checkpoint(folder, "llama")
    llm = LLM(str(folder), dtype="float32", kv_cache_tokens=64)
    head = write_head(folder.parent / "head.safetensors", llm.model_config)
    write_head(folder.parent / "chain.safetensors", llm.model_config, num_modules=3)
    prompts = prompts_for(6, llm.model_config.vocab_size)
    return folder, head, prompts, [reference_greedy(llm.model, prompt, MAX_TOKENS) for prompt in prompts]


def make(folder, speculative, **options) -> LLM:
    options = {"kv_cache_tokens": 1024, "check_every_step": True, **options}
    speculative = {"adaptive": False, **(speculative or {"candidate_length": 0})}
    return LLM(str(folder), dtype="float32", speculative_config=speculative, **options)


def config_for(kind: str, tiny) -> dict:
    folder, head, *_ = tiny
    return {
        "mtp": {"draft_model": "mtp", "draft_head": str(head)},
        "chain": {"draft_model": "mtp", "draft_head": str(head.with_name("chain.safetensors"))},
        "mtp+ngram": {"draft_model": ["mtp", "ngram"], "draft_head": str(head), "ngram_min": 1},
        "early-exit": {"draft_model": "early-exit", "early_exit_layers": 1},
        "itself": {"draft_model": str(folder)},
    }[kind]


@pytest.mark.parametrize("kind", ["mtp", "chain", "mtp+ngram", "early-exit", "itself"])
@pytest.mark.parametrize("page_size,radix,chunk,k", MODES)
def test_every_drafter_gives_reference_ids_in_every_mode(tiny, kind, page_size, radix, chunk, k):
    folder, _, prompts, expected = tiny
    llm = make(
        folder,
        config_for(kind, tiny) | {"candidate_length": k},
        page_size=page_size,
        enable_radix_cache=radix,
        chunked_prefill_size=chunk,
    )
    for _ in range(2):  # the second round meets a warm cache
        for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
            assert_same_ids(output.token_ids, ids, margin)
    assert llm.metrics().drafter_faults == 0
    counts = llm.engine.metrics.speculation
    assert counts.drafted > 0
    if kind == "itself":
        assert counts.accepted == counts.drafted
    assert_idle(llm.engine)


def mtp_rows(drafter: MTPDrafter, tokens: list[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per module k: (k, keys, values, hidden states) of its rows k .. n-1, recomputed from nothing."""
    ids, n = torch.tensor(tokens), len(tokens)
    hidden = drafter.target.forward(ids, torch.arange(n), CausalAttention())
    seen = []

    def attend(layer, q, k, v):
        seen.append((k, v))
        return CausalAttention()(layer, q, k, v)

    for k, module in enumerate(drafter.modules[: n - 1], start=1):
        cos, sin = drafter.target.rotary(torch.arange(n - k))
        hidden = module(drafter.target.embedding(ids[k:]), hidden[:-1], cos, sin, attend)
        yield k, *seen[-1], hidden


def run_with_exact_draft_rows(llm: LLM, prompts: list[list[int]]) -> None:
    """Run them, and after each step recompute every draft row that is called exact."""
    drafter, pool, checked = llm.engine.drafters[0], llm.engine.pool, 0
    for tensor in [t.cache.k for t in drafter.tenants] + [t.cache.v for t in drafter.tenants] + drafter.hidden:
        tensor.fill_(float("nan"))  # a hole would not go unseen
    for index, prompt in enumerate(prompts):
        llm.engine.add(prompt, hot() if index % 2 else greedy())
    while llm.engine.has_work:
        llm.engine.step()
        for request in llm.engine.scheduler.running:
            end = drafter.cursor(request)
            if end > 1 and not request.in_prefill:
                for m, *expected in mtp_rows(drafter, request.tokens[:end]):
                    slots, cache = torch.from_numpy(pool.slots(request)[m:end]), drafter.tenants[m - 1].cache
                    stored = cache.k[0, slots], cache.v[0, slots], drafter.hidden[m][slots]
                    torch.testing.assert_close(stored, tuple(expected), atol=1e-4, rtol=1e-4)
                checked += end
    assert checked > 500


@pytest.mark.parametrize("kind", ["mtp", "chain"])
@pytest.mark.parametrize("page_size,radix,chunk,k", MODES)
def test_draft_rows_that_are_called_exact_are_exact(tiny, kind, page_size, radix, chunk, k):
    """After every step of every request, in every mode: no row of a rejected draft, of a chunk border or of another
    request's prefix is ever taken for an exact one. The same for the hidden states that the next module reads."""
    folder, _, prompts, _ = tiny
    speculative = config_for(kind, tiny) | {"candidate_length": k}
    llm = make(folder, speculative, page_size=page_size, enable_radix_cache=radix, chunked_prefill_size=chunk)
    run_with_exact_draft_rows(llm, prompts)
    assert 0 < llm.engine.metrics.speculation.accepted < llm.engine.metrics.speculation.drafted
    if radix:  # rows of a cached prefix are used again, up to the last whole page
        [request] = llm.engine.add(prompts[0] + [5, 6, 7], greedy(8))
        while request.num_output < 1:
            llm.engine.step()
        assert llm.engine.drafters[0].cursor(request) >= request.metrics.cached_tokens > 0


@pytest.mark.parametrize("kind", ["mtp", "chain"])
def test_acceptance_with_a_prefix_hit_equals_acceptance_without(tiny, kind):
    folder, _, prompts, _ = tiny
    llm = make(folder, config_for(kind, tiny) | {"candidate_length": 3}, page_size=4)
    for prompt in prompts[:-1]:
        [cold], [warm] = llm.generate(prompt, hot(30)), llm.generate(prompt, hot(30))
        assert cold.metrics.accepted_per_step == warm.metrics.accepted_per_step
        assert cold.token_ids == warm.token_ids
    counts = llm.engine.metrics.speculation
    assert 0 < counts.accepted < counts.drafted


def test_preemption_and_pauses_only_leave_gaps_that_are_closed(tiny):
    folder, head, prompts, expected = tiny
    for kind in ("mtp", "chain", "itself"):
        llm = make(
            folder, config_for(kind, tiny) | {"candidate_length": 3}, page_size=1, kv_cache_tokens=90, context_length=80
        )
        for prompt in prompts[:5]:
            llm.engine.add(prompt, greedy())
        step = 0
        requests = list(llm.engine.requests.values())
        while llm.engine.has_work:
            llm.engine.controller.model.on = step % 3 > 0  # a pause with K = 0 in every third step
            llm.engine.step()
            step += 1
        assert llm.engine.scheduler.preemptions > 0
        for request, (ids, margin) in zip(requests, expected, strict=False):
            assert_same_ids(request.output, ids, margin)
        if kind == "itself":
            assert llm.engine.metrics.speculation.acceptance_rate == 1.0
        assert_idle(llm.engine)


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_a_draft_equal_to_the_target_is_always_accepted_when_sampling(tiny, sampling):
    folder, _, prompts, _ = tiny
    llm = make(folder, {"draft_model": str(folder), "candidate_length": 4, "draft_sampling": sampling})
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.4, max_tokens=20, seed=4, ignore_eos=True)
    llm.generate(prompts, params)
    rate = llm.engine.metrics.speculation.acceptance_rate
    assert rate > 0.999 if sampling == "probabilistic" else 0 < rate < 0.9  # p = q, but for the last bit of float32


def test_a_draft_model_with_a_shorter_context_stops_there(tiny, tmp_path):
    folder, _, prompts, _ = tiny
    short = write_tiny_checkpoint(tmp_path, "llama", max_position_embeddings=32)
    llm = make(folder, {"draft_model": str(short), "candidate_length": 3}, context_length=64)
    prompt = prompts[0][:20]
    [output] = llm.generate(prompt, greedy(40))
    assert_same_ids(output.token_ids, *reference_greedy(llm.model, prompt, 40))
    drafted = llm.engine.metrics.speculation.drafted
    assert drafted > 0 and llm.metrics().drafter_faults == 0
    llm.generate((prompts[0] * 3)[:40], greedy(10))
    assert llm.engine.metrics.speculation.drafted == drafted


@pytest.mark.parametrize("vocab_size", [280, 320])
def test_padded_vocabularies_are_accepted_both_ways(tiny, tmp_path, vocab_size):
    folder, _, prompts, _ = tiny
    draft = write_tiny_checkpoint(tmp_path, "llama", vocab_size=vocab_size)
    llm = make(folder, {"draft_model": str(draft), "candidate_length": 3})
    padding = {token: -1e6 for token in range(280, 300)}  # a trained target never writes what no text is made of
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=4, ignore_eos=True, logit_bias=padding)
    outputs = llm.generate([[t % 280 for t in prompt] for prompt in prompts], params)
    assert llm.metrics().drafter_faults == 0 and llm.engine.metrics.speculation.drafted > 0
    assert all(token < 280 for output in outputs for token in output.token_ids)


def test_a_different_tokenizer_is_refused_with_both_facts():
    ours, theirs, swapped = (copy.deepcopy(tiny_tokenizer()) for _ in range(3))
    check_same_tokenizer(ours, theirs)
    theirs.add_tokens(["<extra>"])
    with pytest.raises(ConfigError, match=f"{len(ours)}.*same"):
        check_same_tokenizer(ours, theirs)
    ours.add_tokens(["<one>"])
    swapped.add_tokens(["<other>"])
    with pytest.raises(ConfigError, match="<one>.*missing"):
        check_same_tokenizer(ours, swapped)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_heads_are_found_by_name_in_each_family(tiny, tmp_path, family):
    folder, _, prompts, expected = tiny
    head = write_head(tmp_path / "head.safetensors", LLM(str(folder), kv_cache_tokens=64).model_config, family)
    llm = make(folder, {"draft_model": "mtp", "draft_head": str(head)})
    assert llm.engine.drafters[0].modules[0].hidden_first == (family == "mimo")
    [output] = llm.generate(prompts[0], greedy())
    assert_same_ids(output.token_ids, *expected[0])


def test_what_cannot_be_drafted_with_is_refused_in_one_sentence(tiny, tmp_path):
    folder, head, *_ = tiny
    with pytest.raises(ModelLoadError, match="no MTP module"):
        make(folder, {"draft_model": "mtp"})
    with pytest.raises(ModelLoadError, match="not a complete safetensors"):
        make(folder, {"draft_model": "mtp", "draft_head": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="early_exit_layers must be from 1 to 2 for this model, got 3"):
        make(folder, {"draft_model": "early-exit", "early_exit_layers": 3})
    with pytest.raises(ConfigError, match="draft_head.*only read when"):
        make(folder, {"draft_model": "ngram", "draft_head": "x"})
    for names in (["mtp", "early-exit"], ["ngram", "ngram"], [], 5, [""]):
        with pytest.raises(ConfigError, match="draft_model"):
            make(folder, {"draft_model": names})
    other = write_tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=48)
    with pytest.raises(ModelLoadError, match=r"enorm.weight has contradicting shapes: \[32\].*\[48\]"):
        make(other, {"draft_model": "mtp", "draft_head": str(head)})


@pytest.mark.parametrize("hidden_first", [False, True])
def test_the_module_equals_transformers_own(tiny, hidden_first):
    """Hidden states and logits of transformers' MTP layer, with our random head put into it."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    folder, head, prompts, _ = tiny
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.config.num_mtp_layers, theirs.config.mtp_hidden_states_first = 1, hidden_first
    mtp = MtpModel(theirs, 1)
    renamed = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "post_norm"}
    weights = {}
    for name, tensor in load_file(head).items():
        name = name.split(".", 3)[3]
        stem = name.removesuffix(".weight")
        weights[f"layers.0.{renamed[stem]}.weight" if stem in renamed else f"layers.0.mtp_block.{name}"] = tensor
    missing, unexpected = mtp.load_state_dict(weights, strict=False)
    assert not unexpected and not [name for name in missing if name.startswith("layers.")]

    ids = torch.tensor([prompts[0]])
    n = ids.shape[1]
    with torch.inference_mode():
        hidden = theirs.model(ids).last_hidden_state
        expected = mtp.forward_layer(0, hidden[:, :-1], torch.arange(n - 1)[None], None, input_ids=ids[:, 1:])[0]

        llm = make(folder, {"draft_model": "mtp", "draft_head": str(head)})
        [module] = llm.engine.drafters[0].modules
        module.hidden_first = hidden_first
        ours = llm.model.forward(ids[0], torch.arange(n), CausalAttention())
        cos, sin = llm.model.rotary(torch.arange(n - 1))
        got = module(llm.model.embedding(ids[0, 1:]), ours[:-1], cos, sin, CausalAttention())
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(llm.model.logits(got), theirs.lm_head(expected), atol=1e-4, rtol=1e-4)


def test_what_a_draft_model_reads_is_counted(tiny, monkeypatch):
    """Compared with the numbers in the weights of every Linear and norm that really ran."""
    folder, head, prompts, _ = tiny
    seen: list[int] = []
    for kind in ("mtp", "chain", "early-exit", "itself"):
        llm = make(folder, config_for(kind, tiny) | {"candidate_length": 4})
        drafter = llm.engine.drafters[0]
        forward = drafter.forward

        def counted(segments, depth, known, forward=forward):
            with monkeypatch.context() as patch:
                for layer in (Linear, RMSNorm):
                    run = layer.forward

                    def reading(self, x, run=run):
                        seen.append((self.weight if self.weight is not None else self.plain_weight).numel() * 4)
                        return run(self, x)

                    patch.setattr(layer, "forward", reading)
                return forward(segments, depth, known)

        drafter.forward = counted
        seen.clear()
        [out] = llm.generate(prompts[0], greedy(9))
        metrics = llm.metrics()
        assert metrics.draft_forwards == out.metrics.draft_forwards == drafter.forwards > 0
        assert out.metrics.draft_bytes == drafter.bytes_read
        assert metrics.weight_bytes_read == metrics.steps * llm.engine.runner.weight_bytes + drafter.bytes_read
        assert drafter.bytes_read == pytest.approx(sum(seen), rel=0.02)


@pytest.mark.parametrize("kind", ["mtp", "chain", "itself"])
def test_a_long_prompt_is_caught_up_with_in_several_forwards(tiny, kind, monkeypatch):
    folder, _, prompts, expected = tiny
    monkeypatch.setattr("minispec.speculative.model.CATCH_UP_ROWS", 5)
    llm = make(folder, config_for(kind, tiny) | {"candidate_length": 3}, page_size=4, enable_radix_cache=False)
    outputs = llm.generate(prompts, greedy())  # of several lengths: some are behind while others are not
    for output, (ids, margin) in zip(outputs, expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    assert llm.metrics().drafter_faults == 0
    if kind == "itself":
        assert llm.engine.metrics.speculation.acceptance_rate == 1.0
    # Alone, K = 1, two output tokens after the first: each catch-up reads at most 5 of the n + 1 (less the shift) rows.
    [alone] = make(folder, config_for(kind, tiny) | {"candidate_length": 1}).generate(prompts[0], greedy(3))
    rows = len(prompts[0]) + 1 - llm.engine.drafters[0].shift
    assert alone.metrics.draft_forwards == -(-rows // 5)  # of a chain, one module is enough for one draft


def test_greedy_and_sampling_requests_of_different_lengths_share_a_batch(tmp_path):
    folder = str(write_tiny_checkpoint(tmp_path, "llama"))
    config = {"draft_model": "early-exit", "candidate_length": 3}
    with LLM(folder, dtype="float32", speculative_config=config) as llm:
        # The sampling requests end first, so that from some depth on only the greedy one still drafts.
        params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)]
        params += [SamplingParams(seed=n, max_tokens=n, ignore_eos=True) for n in range(2, 7)]
        outputs = llm.generate([[5, 6, 7]] * 6, params)
        assert llm.metrics().drafter_faults == 0
    with LLM(folder, dtype="float32") as llm:
        assert llm.generate([[5, 6, 7]], params[0])[0].token_ids == outputs[0].token_ids
