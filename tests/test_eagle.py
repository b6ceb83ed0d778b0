"""EAGLE heads: read from their files, and the same drafts as the published equations written down once more."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from test_drafters import greedy, hot, make, tiny  # noqa: F401
from tools import assert_idle, assert_same_ids

from minispec import SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.config import ConfigError
from minispec.models.config import ModelLoadError

H, HEADS, KV, D, INNER, V, DRAFT_V, THETA = 32, 4, 1, 8, 40, 300, 120, 5000.0
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "vocab_size": V,
    "draft_vocab_size": DRAFT_V,
}


def weights_of(kind: str) -> dict[str, torch.Tensor]:
    """Random weights with the names of the published files; K/V heads, inner width and theta are not the target's."""
    generator = torch.Generator().manual_seed(4)
    layer = "midlayer" if kind == "eagle3" else "layers.0"
    width = 2 * H if kind == "eagle3" else H
    shapes = {
        "fc.weight": (H, (3 if kind == "eagle3" else 2) * H),
        "embed_tokens.weight": (V, H),
        f"{layer}.self_attn.q_proj.weight": (HEADS * D, width),
        f"{layer}.self_attn.k_proj.weight": (KV * D, width),
        f"{layer}.self_attn.v_proj.weight": (KV * D, width),
        f"{layer}.self_attn.o_proj.weight": (H, HEADS * D),
        f"{layer}.mlp.gate_proj.weight": (INNER, H),
        f"{layer}.mlp.up_proj.weight": (INNER, H),
        f"{layer}.mlp.down_proj.weight": (H, INNER),
        f"{layer}.post_attention_layernorm.weight": (H,),
    }
    if kind == "eagle3":
        norms = ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight")
        shapes |= {name: (H,) for name in norms} | {"lm_head.weight": (DRAFT_V, H)}
    if kind == "eagle1":
        shapes["fc.bias"] = (H,)
    weights = {n: torch.randn(s, generator=generator) * 0.3 + ("norm" in n) for n, s in shapes.items()}
    if kind == "eagle3":
        ids = torch.randperm(V, generator=generator)[:DRAFT_V].sort().values
        weights |= {
            "d2t": ids - torch.arange(DRAFT_V),
            "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        }
    return weights


def write(folder, kind: str, *, layers=None, binary: bool = False, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}} if layers else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | extra | changes))
    if binary:
        torch.save(weights_of(kind), folder / "pytorch_model.bin")
    else:
        save_file(weights_of(kind), folder / "model.safetensors")
    return folder


# The equations once more -------------------------------------------------------------------------------------------


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def turned(x, positions):
    """x [N, heads, D]: pair i of each head turned by position * theta^(-2i/D)."""
    angle = positions[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def layer_of(w, prefix, x, residual):
    """One decoder layer over rows 0..n-1 that all see those before them; x goes into attention."""
    n = len(x)
    q, k, v = ((x @ w[f"{prefix}.self_attn.{name}_proj.weight"].T).view(n, -1, D) for name in "qkv")
    q, k = turned(q, torch.arange(n)), turned(k, torch.arange(n))
    scores = torch.einsum("nhd,md->hnm", q, k[:, 0]) / D**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hnm,md->nhd", scores.softmax(-1), v[:, 0]).reshape(n, -1)
    x = residual + mixed @ w[f"{prefix}.self_attn.o_proj.weight"].T
    y = rms(x, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T


@torch.inference_mode()
def drafts_by_the_paper(model, w, kind: str, tokens: list[int], count: int, layers=(2, 1, 0)) -> list[int]:
    """The likeliest draft tokens, everything computed anew for each of them."""
    ids, inputs = torch.tensor(tokens), {}
    x, (cos, sin) = model.embedding(ids), model.rotary(torch.arange(len(ids)))
    for number, layer in enumerate(model.layers):
        inputs[number] = x
        x = layer(x, cos, sin, CausalAttention())
    final = model.norm(x)
    if kind == "eagle3":
        hidden = torch.cat([inputs[layer] for layer in layers], -1) @ w["fc.weight"].T
    else:
        hidden = final
    hidden, drafts = hidden[:-1], []
    for _ in range(count):
        embedded = model.embedding(torch.tensor([*tokens, *drafts])[1:])
        if kind == "eagle3":
            both = torch.cat(
                (rms(embedded, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])), -1
            )
            out = layer_of(w, "midlayer", both, hidden)
            row = (rms(out[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax()
            drafts.append(int(row + w["d2t"][row]))
        else:
            x = torch.cat((embedded, hidden), -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
            out = layer_of(w, "layers.0", x, x)
            drafts.append(int(model.logits(out[-1:]).argmax()))
        hidden = torch.cat((hidden, out[-1:]))
    return drafts


# Tests ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,layers,binary",
    [("eagle1", None, False), ("eagle2", None, True), ("eagle3", None, True), ("eagle3", [0, -1, 1], False)],
)
def test_drafts_are_those_of_the_published_equations(tiny, tmp_path, kind, layers, binary):  # noqa: F811
    folder, _, prompts, _ = tiny
    head = write(tmp_path / "head", kind, layers=layers, binary=binary)
    llm = make(folder, {"draft_model": "eagle", "draft_head": str(head), "candidate_length": 4}, page_size=4)
    w, compared = weights_of(kind), 0
    with llm:
        drafter = llm.engine.drafters[0]
        for prompt in prompts:
            [request] = llm.engine.add(prompt, greedy(30))
            while not request.finished:
                llm.engine.step()
                llm.engine.land()
                if not request.finished and request.max_drafts >= 4 and request.num_output:
                    assert llm.engine.pool.reserve(request, len(request.tokens) + 4)
                    [got] = drafter.propose([request], [4]).on_host()
                    used = [layer + 1 for layer in layers] if layers else (2, 1, 0)
                    assert got == drafts_by_the_paper(llm.model, w, kind, request.tokens, 4, used)
                    compared += 1
    assert compared > 20


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("page_size,radix,chunk,topk", [(1, True, 3, 1), (4, True, None, 3), (16, False, 3, 3)])
def test_greedy_ids_are_the_references(tiny, tmp_path, kind, page_size, radix, chunk, topk):  # noqa: F811
    folder, _, prompts, expected = tiny
    head = write(tmp_path / "head", kind)
    llm = make(
        folder,
        {"draft_model": ["eagle", "ngram"], "draft_head": str(head), "candidate_length": 3, "topk": topk},
        page_size=page_size,
        enable_radix_cache=radix,
        chunked_prefill_size=chunk,
    )
    with llm:
        for _ in range(2):
            for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
                assert_same_ids(output.token_ids, ids, margin)
        llm.generate(prompts, hot())
        metrics = llm.metrics()
        assert metrics.drafter_faults == 0 and metrics.by_drafter["eagle"].drafted > 100
        assert metrics.by_drafter["eagle"].accepted > 0
        assert_idle(llm.engine)


def test_a_file_alone_has_the_sizes_of_the_target(tiny, tmp_path):  # noqa: F811
    folder, _, prompts, expected = tiny
    w = weights_of("eagle2")
    for name in ("k_proj", "v_proj"):
        w[f"layers.0.self_attn.{name}.weight"] = torch.randn(2 * D, H)
    for name, shape in (("gate_proj", (48, H)), ("up_proj", (48, H)), ("down_proj", (H, 48))):
        w[f"layers.0.mlp.{name}.weight"] = torch.randn(shape)
    save_file(w, tmp_path / "head.safetensors")
    with make(folder, {"draft_model": "eagle", "draft_head": str(tmp_path / "head.safetensors")}) as llm:
        [output] = llm.generate(prompts[0], greedy())
        assert_same_ids(output.token_ids, *expected[0])
        assert llm.engine.metrics.speculation.drafted > 0


def test_what_is_no_head_for_this_target_is_refused_in_one_sentence(tiny, tmp_path):  # noqa: F811
    folder, mtp_head, *_ = tiny

    def load(path):
        return make(folder, {"draft_model": "eagle", "draft_head": str(path)})

    with pytest.raises(ConfigError, match="needs draft_head"):
        make(folder, {"draft_model": "eagle"})
    with pytest.raises(ModelLoadError, match="no EAGLE head"):
        load(mtp_head)
    with pytest.raises(ModelLoadError, match="holds no model.safetensors"):
        (tmp_path / "empty").mkdir()
        load(tmp_path / "empty")
    with pytest.raises(ModelLoadError, match="hidden_size 48, the target 32"):
        load(write(tmp_path / "wide", "eagle3", hidden_size=48))
    with pytest.raises(ModelLoadError, match="reads before layers"):
        load(write(tmp_path / "layers", "eagle3", layers=[1, 2, 3]))
    with pytest.raises(ModelLoadError, match="contradicting shapes"):
        load(write(tmp_path / "inner", "eagle1", intermediate_size=44))
    broken = write(tmp_path / "broken", "eagle1", binary=True)
    (broken / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match="not a complete file"):
        load(broken)
    short = weights_of("eagle3")
    del short["midlayer.mlp.up_proj.weight"]
    save_file(short, write(tmp_path / "short", "eagle3") / "model.safetensors")
    with pytest.raises(ModelLoadError, match="midlayer.mlp.up_proj.weight is missing"):
        load(tmp_path / "short")


def test_an_eagle_head_drafts_by_chance_too(tiny, tmp_path):  # noqa: F811
    folder, _, prompts, _ = tiny
    head = write(tmp_path / "head", "eagle3")
    speculative = {"draft_model": "eagle", "draft_head": str(head), "candidate_length": 2, "topk": 2}
    with make(folder, speculative) as llm:
        params = SamplingParams(temperature=2.0, seed=1, max_tokens=20, ignore_eos=True)
        llm.generate(prompts, params)
        assert llm.metrics().drafter_faults == 0 and llm.engine.metrics.speculation.drafted > 0
