"""The model itself: Llama, Mistral, Qwen, MiMo, DeepSeek and GLM-Lite are one decoder with a few switches.

    token ids -> embedding -> [ norm, attention, add; norm, MLP, add ] x L -> norm -> hidden -> head -> logits

Attention is grouped-query attention here or DeepSeek's (deepseek.py); the MLP is one or a choice of many (moe.py).

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
from torch import nn

from minispec.models.config import ModelConfig, MoEConfig
from minispec.models.deepseek import LatentAttention
from minispec.models.kernels import RMSNorm, rotary, turn
from minispec.models.linear import Linear, bytes_read, matrices
from minispec.models.moe import MLP, MoE
from minispec.models.rope import rotary_frequencies

# attend(layer, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, Dv]) -> [N, Hq, Dv]. q and k arrive turned to their positions
# and may be strided views; the softmax scale D**-0.5 is the attention's to apply. Dv is D, but for MLA's latents.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Hq query heads that share Hkv heads of keys and values (grouped-query attention, Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, index: int, **where: object) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.index = index
        self.num_q, self.num_kv, self.head_dim = config.num_heads, config.num_kv_heads, D
        self.qkv = Linear(H, (self.num_q + 2 * self.num_kv) * D, config.qkv_bias, **where)
        self.q_norm = RMSNorm(D, config.rms_norm_eps, **where) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps, **where) if config.qk_norm else None
        self.output = Linear(self.num_q * D, H, config.o_bias, **where)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [N, H], cos and sin [N, 1, D] -> [N, H]."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [N, Hq + 2 Hkv, D]
        qk, v = heads[:, : -self.num_kv], heads[:, -self.num_kv :]  # [N, Hq + Hkv, D], [N, Hkv, D]
        if self.q_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.num_q]), self.k_norm(qk[:, self.num_q :])), 1)
        qk = turn(qk, cos, sin)  # queries and keys of all heads turn in one go
        mixed = attend(self.index, qk[:, : self.num_q], qk[:, self.num_q :], v)  # [N, Hq, D]
        return self.output(mixed.reshape(len(x), -1))  # [N, Hq * D] -> [N, H]

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint, relative to the attention -> the part of our parameters that it fills."""
        views = {"o_proj.weight": self.output.weight}
        sizes = [count * self.head_dim for count in (self.num_q, self.num_kv, self.num_kv)]
        for kind, fused in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
            if fused is not None:
                parts = zip("qkv", fused.split(sizes), strict=True)
                views |= {f"{letter}_proj.{kind}": part for letter, part in parts}
        if self.output.bias is not None:
            views["o_proj.bias"] = self.output.bias
        if self.q_norm is not None:
            views |= {"q_norm.weight": self.q_norm.weight, "k_norm.weight": self.k_norm.weight}
        return views


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream. moe: of its experts, None for one MLP."""

    def __init__(self, config: ModelConfig, index: int, moe: MoEConfig | None, **where: object) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(H, eps, **where)
        self.attention = (LatentAttention if config.mla else Attention)(config, index, **where)
        self.mlp_norm = RMSNorm(H, eps, **where)
        self.mlp = MoE(moe, H, **where) if moe else MLP(H, config.intermediate_size, **where)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [N, H], which may be overwritten, cos and sin [N, 1, D] -> [N, H]."""
        x, normed = self.mlp_norm.of_sum(x, self.attention(self.attention_norm(x), cos, sin, attend))
        return x + self.mlp(normed)

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint, relative to the layer -> the part of our parameters that it fills."""
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}
        views = {f"{name}.weight": norm.weight for name, norm in norms.items() if isinstance(norm, RMSNorm)}
        parts = {"self_attn": self.attention, "mlp": self.mlp}
        return views | {
            f"{at}.{name}": view for at, part in parts.items() for name, view in part.weight_views().items()
        }


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
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, config.moe_of(i), **where) for i in range(config.num_layers)
        )
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
        """positions [N] -> (cos, sin) [N, 1, D] in the model's dtype, see `kernels.rotary`."""
        return rotary(self.frequencies, positions, self.rope_scale, self.norm.weight.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] -> [n, V] float32. Ask only for rows whose next token is wanted: the head is a large matrix."""
        return self.head(hidden).float()

    def bytes_read(self, layers: range | None = None) -> int:
        """Bytes of weights that a forward of one token reads of `layers` (default: all), the norm and the head."""
        layers = range(self.config.num_layers) if layers is None else layers
        of_head = self.config.num_parameters_read(range(0))
        of_layers = self.config.num_parameters_read(layers) - of_head
        return bytes_read(of_layers, *(self.layers[i] for i in layers)) + bytes_read(of_head, self.head)

    def pack(self) -> None:
        """Reorder the weights for fast reading. After it they can no longer be filled or trained."""
        for part in matrices(self):
            part.pack()

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a Hugging Face checkpoint -> the part of our (fused) parameters that it fills."""
        views = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        if not self.config.tie_embeddings:
            views["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            views |= {f"model.layers.{index}.{name}": view for name, view in layer.weight_views().items()}
        return views
