"""DeepSeek, GLM-Lite, Qwen3-MoE and MiMo in their real file layout, in the whole engine, against transformers."""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafters import greedy, make
from test_engine_matrix import prompts_for
from test_models import TOKENS, hf, our_logits, their_logits
from test_mtp import recomputed_drafts, record
from tiny_checkpoints import MLA, STRETCHED, VARIANTS, add_shard, mtp_tensors, their_mtp, write_tiny_checkpoint
from tools import assert_idle, assert_same_ids, reference_greedy
from transformers import AutoModelForCausalLM

from minispec.attention.naive import CausalAttention
from minispec.models.config import ModelConfig, ModelLoadError, MoEConfig, RopeConfig
from minispec.models.deepseek import LatentAttention
from minispec.models.loading import dequantized, load_model
from minispec.models.moe import MoE, Router
from minispec.models.rope import softmax_factor

# The architectures through the engine --------------------------------------------------------------------------------


def rename_to_mimo(folder: Path) -> None:
    """MiMo is Qwen2 by another name, with MTP modules."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    file.write_text(json.dumps(config | own | {"num_nextn_predict_layers": 1}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """variant -> (folder with several shards, transformers' model), made when first asked for."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def get(variant: str):
        if variant not in made:
            architecture, overrides = VARIANTS[{"mimo": "qwen2"}.get(variant, variant)]
            folder = tmp_path_factory.mktemp("checkpoint")
            write_tiny_checkpoint(folder, architecture, max_shard_size="60KB", **overrides)
            assert len(list(folder.glob("*.safetensors"))) > 1
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            if variant == "mimo":
                rename_to_mimo(folder)
            made[variant] = folder, theirs.eval()
        return made[variant]

    return get


ENGINE = ["qwen3 moe", "deepseek v3", "deepseek v3 with long texts", "deepseek v2 lite", "glm 4 moe lite", "mimo"]


@pytest.mark.parametrize("variant", ENGINE)
@pytest.mark.parametrize("page_size,chunk", [(1, 5), (16, None)])
def test_logits_of_chunks_cached_tokens_and_verifications_equal_transformers(checkpoints, variant, page_size, chunk):
    """Of every row that the engine ever computes: prefill in chunks, decoding, verification, behind a radix hit."""
    folder, theirs = checkpoints(variant)
    llm = make(
        folder,
        {"draft_model": "ngram", "candidate_length": 3, "ngram_min": 1},
        page_size=page_size,
        chunked_prefill_size=chunk,
    )
    runner, known, compared = llm.engine.runner, {}, []

    def expected(tokens: list[int]) -> torch.Tensor:
        if tuple(tokens) not in known:
            with torch.no_grad():
                known[tuple(tokens)] = theirs(torch.tensor([tokens])).logits[0]
        return known[tuple(tokens)]

    def forward(step, table, plain=runner.forward):
        logits = plain(step, table)
        places = iter(logits)
        for row in step.rows:
            whole = expected(row.request.tokens[: row.start] + row.token_ids)
            for position in range(row.kv_len - row.num_logits, row.kv_len):
                torch.testing.assert_close(next(places), whole[position], atol=1e-4, rtol=0)
                compared.append(row.q_len)
        return logits

    runner.forward = forward
    prompts = prompts_for(4, llm.model_config.vocab_size)
    for _ in range(2):
        llm.generate(prompts, greedy())
    assert len(compared) > 60 and max(compared) > 3
    assert llm.metrics().cached_tokens > 40
    assert_idle(llm.engine)


def test_a_cached_token_takes_one_latent_and_one_turned_key_per_layer(checkpoints):
    folder, _ = checkpoints("deepseek v3")
    llm = make(folder, None, kv_cache_tokens=64)
    cache, config = llm.engine.runner.tenant.cache, llm.model_config
    assert cache.k.shape == (3, 64 + 1, 1, 16 + 4) and cache.v.numel() == 0
    assert cache.bytes_per_slot == config.kv_bytes_per_token(torch.float32) == 3 * 20 * 4


# The MTP module of DeepSeek ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A DeepSeek-V3 with its MTP module in the same checkpoint, transformers' two halves, prompts, reference ids."""
    folder = tmp_path_factory.mktemp("deepseek")
    write_tiny_checkpoint(folder, "deepseek_v3", max_shard_size="60KB", **(MLA | {"rope_parameters": STRETCHED}))
    model, mtp = their_mtp(folder)
    add_shard(folder, mtp_tensors(model, mtp))
    loaded = load_model(str(folder), dtype=torch.float32).model
    prompts = prompts_for(6, loaded.config.vocab_size)
    return folder, model, mtp, prompts, [reference_greedy(loaded, prompt, 12) for prompt in prompts]


MODES = list(product((1, 16), (False, True), (5, None), (1, 4)))  # page size, overlap, chunk, K


@pytest.mark.parametrize("page_size,overlap,chunk,k", MODES)
def test_the_pair_gives_the_same_ids_with_and_without_drafts(pair, page_size, overlap, chunk, k):
    folder, _, _, prompts, expected = pair
    options = {"page_size": page_size, "enable_overlap": overlap, "chunked_prefill_size": chunk}
    for speculative in ({"draft_model": "mtp", "candidate_length": k}, None):
        llm = make(folder, speculative, **options)
        seen = record(llm.engine.drafters[0]) if speculative else []
        for _ in range(2):  # the second round meets a warm cache
            for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
                assert_same_ids(output.token_ids, ids, margin)
        assert llm.metrics().drafter_faults == 0 and (llm.engine.metrics.speculation.drafted > 0) == bool(speculative)
        assert_idle(llm.engine)
        for tokens, drafts in {(*tokens, -1, *drafts): (tokens, drafts) for tokens, drafts in seen}.values():
            assert_same_ids(drafts, *recomputed_drafts(llm.engine.drafters[0], tokens, len(drafts)))


@torch.inference_mode()
def assert_mtp_logits(drafter, ids, theirs, layer_and_norms, head) -> None:
    """Our first module's logits over a whole sequence are those of `layer_and_norms(embedded, hidden, ...)`."""
    size = len(ids) - 1  # row p reads token p and the hidden state of p - 1
    hidden, embedded = theirs.model(ids[None]).last_hidden_state[:, :-1], theirs.model.embed_tokens(ids[None, 1:])
    positions, mask = torch.arange(size)[None], torch.full((size, size), -torch.inf).triu(1)[None, None]
    expected = head(layer_and_norms(embedded, hidden, theirs.model.rotary_emb(embedded, positions), mask, positions))[0]
    ours = drafter.target.forward(ids, torch.arange(size + 1), CausalAttention())
    tables = drafter.target.rotary(torch.arange(size))
    states = drafter.modules[0](drafter.target.embedding(ids[1:]), ours[:-1], *tables, CausalAttention())
    assert expected.std() > 0.5
    torch.testing.assert_close(drafter.head(states), expected, atol=1e-4, rtol=0)


def test_mtp_logits_equal_transformers_own(pair):
    folder, theirs, mtp, _, _ = pair
    drafter = make(folder, {"draft_model": "mtp"}).engine.drafters[0]

    def layer(*parts):
        return mtp.layers[0](*parts, None)

    assert_mtp_logits(drafter, TOKENS[:40], theirs, layer, mtp.shared_head)


def test_a_promise_without_weights_is_one_sentence(tmp_path):
    folder = write_tiny_checkpoint(tmp_path, "deepseek_v3", **MLA)
    with pytest.raises(ModelLoadError, match="no MTP module.*model.layers.3.eh_proj.weight.*its config promises 1"):
        make(folder, {"draft_model": "mtp"})
    llm = make(folder, {"draft_model": "auto"})  # n-grams alone
    assert [drafter.name for drafter in llm.engine.drafters] == ["ngram"]


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_module_may_have_an_embedding_and_a_head_of_its_own(pair, tmp_path, name):
    """As a rule the file holds the target's once more; where it does not, the module's count, and ids do not change."""
    folder, model, mtp, prompts, expected = pair
    tensors = mtp_tensors(model, mtp)
    shared = make(folder, {"draft_model": "mtp"}).engine.drafters[0]
    assert shared.embedding is shared.target.embedding and shared.head is shared.target.head
    own = tensors[f"model.layers.3.{name}.weight"].flip(0)
    save_file(tensors | {f"model.layers.3.{name}.weight": own.contiguous()}, tmp_path / "head.safetensors")
    llm = make(folder, {"draft_model": "mtp", "draft_head": str(tmp_path / "head.safetensors")})
    drafter = llm.engine.drafters[0]
    used = drafter.embedding.weight if name == "embed_tokens" else drafter.head.plain_weight
    assert torch.equal(used, own)
    seen = record(drafter)
    for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    for tokens, drafts in seen:
        assert_same_ids(drafts, *recomputed_drafts(drafter, tokens, len(drafts)))
    save_file(tensors | {f"model.layers.3.{name}.weight": own[1:].contiguous()}, tmp_path / "head.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name}.weight has the shape \[299, 32\], the target's \[300, 32\]"):
        make(folder, {"draft_model": "mtp", "draft_head": str(tmp_path / "head.safetensors")})


PUBLISHED = {  # config.json of DeepSeek-V3 and R1
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_published_sizes_come_out_of_the_published_config():
    """The technical report: 671 billion parameters, a token reads 37; README_WEIGHTS: 11.5 of the module's own."""
    config = ModelConfig.from_hf(PUBLISHED)
    assert config.context_length == 163_840
    assert round(config.num_parameters / 1e9) == 671
    assert round((config.num_parameters_read() + 129280 * 7168) / 1e9, 1) in (37.5, 37.6)
    assert round((config.layer_parameters(61) + 2 * 7168**2) / 1e9, 1) in (11.5, 11.6)
    assert config.kv_bytes_per_token(torch.bfloat16) == 61 * (512 + 64) * 2


def test_weight_bytes_count_what_one_token_reads(pair):
    folder, *_ = pair
    llm = make(folder, {"draft_model": "mtp"})
    model, drafter = llm.model, llm.engine.drafters[0]

    def read(module: torch.nn.Module) -> int:
        idle = [part.experts[3:].parameters() for part in module.modules() if isinstance(part, MoE)]
        return sum(p.numel() for p in module.parameters()) - sum(p.numel() for p in chain(*idle))

    assert llm.engine.runner.weight_bytes == 4 * (read(model) - model.embedding.weight.numel())
    assert drafter.weight_bytes == 4 * (read(drafter.modules[0]) + model.head.weight.numel())


# MiMo ----------------------------------------------------------------------------------------------------------------


def test_mimo_reads_the_hidden_state_first(checkpoints):
    """transformers has no MiMo: its own Qwen2 layer, and three lines around it."""
    folder, theirs = checkpoints("mimo")
    H, generator = theirs.config.hidden_size, torch.Generator().manual_seed(2)
    layer = type(theirs.model.layers[0])(theirs.config, 0)
    rest = {
        name: torch.nn.RMSNorm(H, theirs.config.rms_norm_eps)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    rest["input_proj"] = torch.nn.Linear(2 * H, H, bias=False)
    parts = torch.nn.ModuleDict(rest | {"layer": layer})
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    tensors = {f"model.mtp_layers.0.{name.removeprefix('layer.')}": t for name, t in parts.state_dict().items()}
    add_shard(folder, tensors)
    drafter = make(folder, {"draft_model": "mtp"}).engine.drafters[0]
    assert drafter.modules[0].hidden_first

    def around(embedded, hidden, tables, mask, positions):
        x = rest["input_proj"](torch.cat((rest["hidden_layernorm"](hidden), rest["token_layernorm"](embedded)), -1))
        return rest["final_layernorm"](layer(x, mask, positions, position_embeddings=tables))

    assert_mtp_logits(drafter, TOKENS[:40], theirs, around, theirs.lm_head)


# Parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["deepseek v3", "deepseek v3 with long texts", "deepseek v3 otherwise"])
def test_absorbed_attention_equals_the_textbook_form(variant):
    config = ModelConfig.from_hf(hf("deepseek_v3", **VARIANTS[variant][1]))
    layer, mla, N = LatentAttention(config, 0), config.mla, 9
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3
    angles = torch.randn(N, 1, mla.rope_dim // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    x, seen = torch.randn(N, config.hidden_size), []

    def attend(index, q, k, v):
        seen.append((q, k))
        return CausalAttention()(index, q, k, v)

    ours = layer(x, cos, sin, attend)
    turned = seen[0][0][..., mla.kv_rank :] / layer.query_scale, seen[0][1][:, 0, mla.kv_rank :]
    # Expand every latent into keys and values of all heads, then attend as everywhere else.
    q, latent, _ = layer.down(x).split(layer.sizes, -1)
    q = q if layer.q_up is None else layer.q_up(layer.q_norm(q))
    q = q.view(N, 4, -1)[..., : mla.nope_dim]
    k, v = (layer.kv_norm(latent) @ layer.kv_up.T).view(N, 4, -1).split((mla.nope_dim, mla.value_dim), -1)
    q = torch.cat((q, turned[0]), -1) * softmax_factor(config.rope)
    k = torch.cat((k, turned[1][:, None].expand(-1, 4, -1)), -1)
    expected = layer.output(CausalAttention()(0, q, k, v).flatten(1))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_softmax_factor_is_one_without_yarn_or_without_its_weight():
    assert softmax_factor(RopeConfig()) == 1.0
    yarn = {"factor": 40.0, "original_max_position_embeddings": 4096}
    assert softmax_factor(RopeConfig(kind="yarn", parameters=yarn)) == 1.0
    published = softmax_factor(RopeConfig(kind="yarn", parameters=yarn | {"mscale_all_dim": 1.0}))
    assert published == pytest.approx((0.1 * 3.6888795 + 1) ** 2)


def test_a_balance_bias_decides_who_is_chosen_and_not_with_what_weight():
    router = Router(MoEConfig(4, 2, 8, sigmoid=True, balanced=True), 8)
    router.weight.data.normal_()
    router.bias.data.copy_(torch.tensor([10.0, 0.0, 0.0, 10.0]))
    x = torch.randn(5, 8)
    ids, weights = router(x)
    assert set(ids.flatten().tolist()) == {0, 3}
    torch.testing.assert_close(weights, (x @ router.weight.T).sigmoid().gather(1, ids))


def test_experts_outside_the_best_groups_are_not_looked_at():
    """Group 1 has the best expert of all, but the sum of its two best is smaller than that of the others."""
    scores = torch.tensor([0.5, 0.45, 0.9, 0.01, 0.48, 0.47])
    for group_top, expected in ((2, {0, 4}), (1, {2, 0})):
        config = MoEConfig(6, 2, 8, sigmoid=True, num_groups=3, groups_per_token=2, group_top=group_top)
        router = Router(config, 1)
        router.weight.data = torch.logit(scores)[:, None]
        assert set(router(torch.ones(1, 1))[0][0].tolist()) == expected


def test_each_chosen_expert_runs_once_over_all_rows_that_chose_it():
    moe, calls = MoE(MoEConfig(8, 2, 4, shared_size=4), 8), []
    for parameter in moe.parameters():
        parameter.data.normal_()
    for number, expert in enumerate(moe.experts):
        expert.register_forward_hook(lambda _, args, out, number=number: calls.append((number, len(args[0]))))
    x = torch.randn(11, 8)
    out = moe(x)
    ids, weights = moe.router(x)
    assert dict(calls) == {e: int((ids == e).sum()) for e in ids.unique().tolist()} and len(calls) == len(dict(calls))
    for row in range(11):
        alone = sum(w * moe.experts[e](x[row : row + 1]) for e, w in zip(ids[row].tolist(), weights[row], strict=True))
        torch.testing.assert_close(out[row : row + 1], alone + moe.shared(x[row : row + 1]))


def test_in_bfloat16_the_router_stays_float32(pair):
    """Scores that differ in the third digit would be ties, and a near tie decides which expert reads the token."""
    model = load_model(str(pair[0]), dtype=torch.bfloat16).model
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "router" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "router" not in name} == {torch.bfloat16}
    assert model.logits(model(TOKENS, torch.arange(97), CausalAttention())).isfinite().all()


# float8 --------------------------------------------------------------------------------------------------------------


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 weight, float32 scale of each block), as DeepSeek's published conversion makes them."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, stored = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in product(range(rows), range(columns)):
        block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scales[i, j] = block.abs().max() / 448
        stored[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def test_a_float8_checkpoint_equals_transformers_on_the_dequantised_one(tmp_path):
    """Sizes that blocks of 128 do not divide; weights and scales in different shards, either one first."""
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    sizes = MLA | {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 136, "kv_lora_rank": 140}
    for path in (folder, plain):
        write_tiny_checkpoint(path, "deepseek_v3", **sizes)
    weights, one, two = load_file(folder / "model.safetensors"), {}, {}
    for name, weight in weights.items():
        if weight.dim() == 2 and "proj" in name:
            early = len(one) % 2
            stored, scales = in_blocks(
                weight * (1 + torch.arange(len(weight))[:, None]) / 100
            )  # blocks unlike each other
            (one if early else two)[name], (two if early else one)[name + "_scale_inv"] = stored, scales
            weights[name] = torch.cat(
                [
                    torch.cat(
                        [
                            stored[i : i + 128, j : j + 128].float() * scales[i // 128, j // 128]
                            for j in range(0, weight.shape[1], 128)
                        ],
                        1,
                    )
                    for i in range(0, len(weight), 128)
                ]
            )
        else:
            one[name] = weight
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    save_file(one, folder / "a.safetensors", metadata={"format": "pt"})
    save_file(two, folder / "b.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(one, "a.safetensors") | dict.fromkeys(two, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    theirs = their_logits(plain)
    assert theirs.std() > 0.5
    torch.testing.assert_close(our_logits(folder), theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "tensors,sentence",
    [
        ({"x": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "float8 tensor x needs its scales"),
        ({"x_scale_inv": torch.ones(1, 1)}, "float8 tensor x needs its scales"),
        (
            {"x": torch.zeros(129, 4).to(torch.float8_e4m3fn), "x_scale_inv": torch.ones(1, 1)},
            r"x has contradicting shapes: \[129, 4\] with scales \[1, 1\]",
        ),
    ],
)
def test_float8_without_fitting_scales_is_refused(tensors, sentence):
    with pytest.raises(ModelLoadError, match=sentence):
        list(dequantized(tensors.items()))


# Configs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config,sentence",
    [
        (hf("deepseek_v3", **MLA | {"kv_lora_rank": None}), "lacks 'kv_lora_rank'"),
        (hf("deepseek_v3", **MLA | {"attention_bias": True}), "attention_bias True is not supported"),
        (hf("deepseek_v3", **MLA | {"scoring_func": "softmax"}), "scoring_func 'softmax' is not supported"),
        (hf("deepseek_v3", **MLA | {"topk_method": "greedy"}), "topk_method 'greedy' is not supported"),
        (hf("deepseek_v3", **MLA | {"moe_layer_freq": 2}), "moe_layer_freq 2 is not supported"),
        (hf("deepseek_v3", **MLA | {"num_experts_per_tok": 9}), "9 experts per token cannot be chosen of 8"),
        (hf("deepseek_v3", **MLA | {"n_group": 3}), "3 of 8 experts cannot be chosen from the best 2 of 3 groups"),
        (hf("deepseek_v3", **MLA | {"n_group": 8}), "3 of 8 experts cannot be chosen from the best 2 of 8 groups"),
        (hf("deepseek_v3", **MLA | {"topk_group": 5}), "from the best 5 of 4 groups"),
        (hf("deepseek_v3", **MLA | {"topk_group": 1}), "3 of 8 experts cannot be chosen from the best 1 of 4 groups"),
        (hf("deepseek_v2", **MLA | {"norm_topk_prob": True}), "norm_topk_prob True is not supported"),
        (hf("qwen3_moe", num_experts_per_tok=2, moe_intermediate_size=8), "lacks 'num_local_experts'"),
        (hf(quantization_config={"quant_method": "fp8"}), "quantisation 'fp8' is not supported.*128 x 128"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused(config, sentence):
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        ModelConfig.from_hf(config)
    assert "\n" not in str(caught.value)
