"""The arithmetic: our logits against transformers' for every architecture and switch, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import ROPE, SIZES, VARIANTS, VOCAB, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.models.config import ModelConfig, ModelLoadError, RopeConfig
from minispec.models.llama import CausalLM
from minispec.models.loading import load_model
from minispec.models.rope import rotary_frequencies, rotary_tables, rotate

TOKENS = torch.randint(0, VOCAB, (97,), generator=torch.Generator().manual_seed(5))


def our_logits(path: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    model = load_model(path, dtype=torch.float32, progress=False).model
    return model.logits(model(tokens, torch.arange(len(tokens)), CausalAttention()))


def their_logits(path: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model(tokens[None]).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    path = write_tiny_checkpoint(tmp_path, architecture, tokenizer=False, **overrides)
    theirs = their_logits(path)
    assert theirs.std() > 0.5  # random weights large enough for the comparison to mean something
    torch.testing.assert_close(our_logits(path), theirs, atol=1e-4, rtol=0)


def test_every_rope_kind_changes_the_logits(tmp_path: Path) -> None:
    kinds = {name: {"rope_parameters": rope} for name, rope in ROPE.items()} | {"default": {}}
    logits = [our_logits(write_tiny_checkpoint(tmp_path / n, tokenizer=False, **o)) for n, o in kinds.items()]
    for i, one in enumerate(logits):
        assert all((one - other).abs().max() > 0.01 for other in logits[:i])


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"truncate": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_yarn_options_equal_transformers(extra: dict, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, tokenizer=False, rope_parameters=ROPE["yarn"] | extra)
    torch.testing.assert_close(our_logits(path), their_logits(path), atol=1e-4, rtol=0)


def test_rows_depend_on_each_other_only_through_attend(tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path), dtype=torch.float32).model
    positions = torch.tensor([4, 0, 9])
    together = model(TOKENS[:3], positions, lambda layer, q, k, v: q)
    alone = [model(TOKENS[i : i + 1], positions[i : i + 1], lambda layer, q, k, v: q)[0] for i in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))


def test_attend_gets_layer_numbers_and_turned_heads(tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path), dtype=torch.float32).model
    seen: list[tuple] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.clone(), k.clone(), v.clone()))
        return q

    same_token = torch.tensor([7, 7])
    model(same_token, torch.tensor([0, 3]), attend)
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    _, q, k, v = seen[0]
    assert q.shape == (2, 4, 8) and k.shape == v.shape == (2, 2, 8)
    assert torch.equal(v[0], v[1])  # values carry no position
    assert not torch.allclose(q[0], q[1]) and not torch.allclose(k[0], k[1])
    torch.testing.assert_close(q[0].norm(dim=-1), q[1].norm(dim=-1))  # turning keeps the length


def test_rotated_dot_products_depend_on_distance_only() -> None:
    frequencies, scale = rotary_frequencies(RopeConfig(), 8)
    assert scale == 1.0
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def dot(p: int, q_at: int) -> float:
        at = [rotary_tables(frequencies, torch.tensor([x])) for x in (p, q_at)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())

    assert dot(5, 2) == pytest.approx(dot(103, 100), abs=1e-4)
    assert dot(5, 2) != pytest.approx(dot(5, 3), abs=1e-3)


def test_naive_attention_of_several_sequences_equals_each_alone() -> None:
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    together = CausalAttention([3, 4])(0, q, k, v)
    parts = [CausalAttention()(0, q[s], k[s], v[s]) for s in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(together, torch.cat(parts))
    assert not torch.allclose(together[3:], CausalAttention()(0, q, k, v)[3:])


def test_bfloat16_model_has_bfloat16_weights_and_float32_logits(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "qwen3")
    model = load_model(path, dtype=torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.frequencies.dtype == torch.float32  # bfloat16 would blur positions beyond 256
    logits = model.logits(model(TOKENS, torch.arange(97), CausalAttention()))
    assert logits.dtype == torch.float32
    assert (logits - our_logits(path)).abs().max() < 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_num_parameters_counts_the_model(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    config = load_model(write_tiny_checkpoint(tmp_path, architecture, **overrides), dtype=torch.float32).config
    assert config.num_parameters == sum(p.numel() for p in CausalLM(config).parameters())


def hf(model_type: str = "llama", **overrides: object) -> dict:
    return SIZES | {"model_type": model_type} | overrides


def test_kv_bytes_per_token_is_two_vectors_per_layer_and_head() -> None:
    config = ModelConfig.from_hf(hf())
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * config.kv_bytes_per_token(torch.bfloat16)


@pytest.mark.parametrize("kind", ROPE)
def test_old_and_new_rope_spellings_mean_the_same(kind: str) -> None:
    new = ModelConfig.from_hf(hf(rope_parameters=ROPE[kind] | {"rope_theta": 5e5}))
    old_scaling = {k: v for k, v in ROPE[kind].items() if k not in ("rope_theta", "rope_type")} | {"type": kind}
    assert new == ModelConfig.from_hf(hf(rope_theta=5e5, rope_scaling=old_scaling))
    assert new.rope.theta == 5e5


def test_original_length_of_a_stretched_rope_defaults_to_the_models() -> None:
    rope = ModelConfig.from_hf(hf(rope_scaling={"type": "yarn", "factor": 4.0})).rope
    assert rope.parameters["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (hf(), 512),
        (hf("mistral", sliding_window=64), 64),
        (hf("mistral", sliding_window=4096), 512),
        (hf("mistral", sliding_window=None), 512),
        (hf("qwen2", sliding_window=64, use_sliding_window=False), 512),
        (hf("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3), 512),
        (hf("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2), 64),
        (hf("qwen3", sliding_window=64, use_sliding_window=True, layer_types=["full_attention"] * 3), 512),
        (hf(rope_scaling={"type": "yarn", "factor": 4.0}), 2048),
        (hf(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}), 512),
    ],
)
def test_context_length_stops_at_the_sliding_window(config: dict, length: int) -> None:
    assert ModelConfig.from_hf(config).context_length == length


def test_inside_its_window_a_windowed_model_equals_transformers(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "mistral", tokenizer=False, sliding_window=64)
    length = load_model(path, dtype=torch.float32).config.context_length
    theirs, ours = their_logits(path), our_logits(path)
    torch.testing.assert_close(ours[:length], theirs[:length], atol=1e-4, rtol=0)
    assert (ours[length:] - theirs[length:]).abs().max() > 0.01


def test_generation_config_decides_the_end_tokens() -> None:
    assert ModelConfig.from_hf(hf()).eos_ids == (2,)
    assert ModelConfig.from_hf(hf(), {"eos_token_id": [5, 2, 5]}).eos_ids == (5, 2)
    assert ModelConfig.from_hf(hf(), {"eos_token_id": 0}).eos_ids == (0,)
    assert ModelConfig.from_hf(hf(eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (hf("gpt2"), "architecture 'gpt2' is not supported; supported are LlamaForCausalLM"),
        (hf(architectures=["LlamaForTokenClassification"]), "'LlamaForTokenClassification' is not supported"),
        (hf("mixtral", architectures=["MixtralForCausalLM"]), "'MixtralForCausalLM' is not supported"),
        (hf(rope_scaling={"rope_type": "longrope", "factor": 2}), "rope type 'longrope' is not supported; .* yarn"),
        (hf(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "'llama3' needs the parameter 'low_freq_factor'"),
        (hf(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5 is not supported"),
        (hf(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported is 'silu'"),
        (hf(mlp_bias=True), "mlp_bias True is not supported"),
        (hf(quantization_config={"quant_method": "awq"}), "quantisation 'awq' is not supported"),
        (hf(hidden_size=None), "lacks 'hidden_size'"),
        (hf(num_hidden_layers=0), "num_layers must be a whole number >= 1, got 0"),
        (hf(vocab_size="many"), "vocab_size must be a whole number >= 1, got 'many'"),
        (hf(num_key_value_heads=3), "4 query heads cannot share 3 key/value heads"),
        (hf(head_dim=7), "head_dim 7 is odd"),
    ],
)
def test_unsupported_config_is_refused_in_one_sentence(config: dict, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        ModelConfig.from_hf(config)
    assert "\n" not in str(caught.value)


def test_smollm2_logits_equal_transformers(smollm2_path: Path) -> None:
    tokens = torch.randint(17, 49152, (40,), generator=torch.Generator().manual_seed(1))
    ours, theirs = our_logits(smollm2_path, tokens), their_logits(smollm2_path, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_smollm2_writes_the_same_64_tokens_as_transformers(smollm2_path: Path) -> None:
    loaded = load_model(smollm2_path, dtype=torch.float32)
    chat = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    text = loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor(loaded.tokenizer.encode(text))
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, local_files_only=True)
    tokens = theirs.generate(prompt[None], max_new_tokens=64, do_sample=False)[0]
    written = tokens[len(prompt) :]
    assert len(written) == 64 and "lighthouse" in loaded.tokenizer.decode(written)

    # The engine in one go, and with everything on.
    for options in ({}, {"page_size": 4, "chunked_prefill_size": 7, "speculative_config": {"ngram_min": 1}}):
        llm = LLM(str(smollm2_path), dtype="float32", kv_cache_tokens=256, check_every_step=True, **options)
        [output] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=64))
        assert output.prompt_token_ids == prompt.tolist() and output.token_ids == written.tolist()

    # Every token is our argmax after the ones before it, so by induction our own greedy loop writes the same ids.
    model = loaded.model
    hidden = model(tokens, torch.arange(len(tokens)), CausalAttention())
    assert torch.equal(model.logits(hidden[len(prompt) - 1 : -1]).argmax(-1), written)
