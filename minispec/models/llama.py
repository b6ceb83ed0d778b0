"""The model itself: Llama, Mistral, Qwen2 and Qwen3 are one decoder with a few switches.

    token ids -> embedding -> [ norm, attention, add; norm, gated MLP, add ] x L -> norm -> hidden -> head -> logits

Knows: weights and the arithmetic of N packed rows. Does not know: caches, pages, batches, masks. Rows meet only in
attention, and attention is a function `attend` that the caller brings along; everything else treats each row alone.
That is why prompt chunks, single tokens and drafts can share a forward.

Projections that read the same input are one matrix (q, k, v; gate and up): decoding reads every weight once per
forward, and fewer, larger reads are faster.

Taught in notebook 01 (one token at a time).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from minispec.models.config import ModelConfig
from minispec.models.linear import Linear
from minispec.models.rope import rotary_frequencies, rotary_tables, rotate

# attend(layer, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]. q and k arrive turned to their positions
# and may be strided views; the softmax scale D**-0.5 is the attention's to apply.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, **where: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **where))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, **where: object) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.index = index
        self.num_q, self.num_kv, self.head_dim = config.num_heads, config.num_kv_heads, D
        self.attention_norm = RMSNorm(H, config.rms_norm_eps, **where)
        self.qkv = Linear(H, (self.num_q + 2 * self.num_kv) * D, config.qkv_bias, **where)
        self.q_norm = RMSNorm(D, config.rms_norm_eps, **where) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps, **where) if config.qk_norm else None
        self.output = Linear(self.num_q * D, H, config.o_bias, **where)
        self.mlp_norm = RMSNorm(H, config.rms_norm_eps, **where)
        self.gate_up = Linear(H, 2 * config.intermediate_size, **where)
        self.down = Linear(config.intermediate_size, H, **where)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [N, H], cos and sin [N, 1, D] -> [N, H]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [N, Hq + 2 Hkv, D]
        qk, v = heads[:, : -self.num_kv], heads[:, -self.num_kv :]  # [N, Hq + Hkv, D], [N, Hkv, D]
        if self.q_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.num_q]), self.k_norm(qk[:, self.num_q :])), 1)
        qk = rotate(qk, cos, sin)  # queries and keys of all heads turn in one go
        mixed = attend(self.index, qk[:, : self.num_q], qk[:, self.num_q :], v)  # [N, Hq, D]
        return self.output(mixed.reshape(len(x), -1))  # [N, Hq * D] -> [N, H]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # [N, intermediate] each
        return self.down(F.silu(gate) * up)


class CausalLM(nn.Module):
    """A decoder-only language model over packed rows.

    Parameters are uninitialised until a loader fills `weight_views`; `pack` then makes them quick to read. Build it
    with the dtype it shall have: the rotary frequencies stay float32, which a later `.to(dtype)` would not respect.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        where = {"dtype": dtype, "device": device}
        V, H = config.vocab_size, config.hidden_size
        self.embedding = nn.utils.skip_init(nn.Embedding, V, H, **where)
        self.layers = nn.ModuleList(DecoderLayer(config, i, **where) for i in range(config.num_layers))
        self.norm = RMSNorm(H, config.rms_norm_eps, **where)
        self.head = Linear(H, V, **where)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        frequencies, self.rope_scale = rotary_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        self.requires_grad_(False)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, num_layers: int | None = None
    ) -> torch.Tensor:
        """token_ids, positions [N] int64 -> hidden [N, H] after the final norm. Calls `attend` once per layer.

        `num_layers` stops after the first layers and norms what there is (early exit).
        """
        x = self.embedding(token_ids)  # [N, H]
        cos, sin = self.rotary(positions)
        for layer in self.layers[:num_layers]:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N] -> (cos, sin) [N, 1, D] in the model's dtype, made once per forward for all layers."""
        tables = rotary_tables(self.frequencies, positions)
        cos, sin = ((table * self.rope_scale).to(self.norm.weight.dtype) for table in tables)
        return cos, sin

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] -> [n, V] float32. Ask only for rows whose next token is wanted: the head is a large matrix."""
        return self.head(hidden).float()

    def pack(self) -> None:
        """Reorder the weights for fast reading. After it they can no longer be filled or trained."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a Hugging Face checkpoint -> the part of our (fused) parameters that it fills."""
        views = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        if not self.config.tie_embeddings:
            views["lm_head.weight"] = self.head.weight
        for layer in self.layers:
            views |= {f"model.layers.{layer.index}.{name}": view for name, view in layer_weight_views(layer).items()}
        return views


def layer_weight_views(layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """The same for one layer, with names relative to the layer."""
    views = {
        "self_attn.o_proj.weight": layer.output.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        "mlp.down_proj.weight": layer.down.weight,
    }
    if isinstance(layer.attention_norm, RMSNorm):
        views["input_layernorm.weight"] = layer.attention_norm.weight
    views["mlp.gate_proj.weight"], views["mlp.up_proj.weight"] = layer.gate_up.weight.chunk(2)
    sizes = [count * layer.head_dim for count in (layer.num_q, layer.num_kv, layer.num_kv)]
    for kind, fused in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
        if fused is not None:
            parts = zip("qkv", fused.split(sizes), strict=True)
            views |= {f"self_attn.{letter}_proj.{kind}": part for letter, part in parts}
    if layer.output.bias is not None:
        views["self_attn.o_proj.bias"] = layer.output.bias
    if layer.q_norm is not None:
        views |= {"self_attn.q_norm.weight": layer.q_norm.weight, "self_attn.k_norm.weight": layer.k_norm.weight}
    return views
