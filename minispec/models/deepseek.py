"""Multi-head latent attention: all heads of a token share one short vector in the cache.

    x -> down -> latent c [R] -> norm --+--> cached: [c, k_rope], R + r numbers per token, whatever the number of heads
              -> k_rope [r] -> turned --+
              -> q [Hq, D + r] (through a short vector of its own where the model has q_rank)

The textbook form expands every cached c into the keys W_k c and the values W_v c of each head. But q . (W_k c) is
(W_k^T q) . c, and the weighted sum of W_v c is W_v times the weighted sum of c. So the matrices move to the query and
to the output ("absorbed"), and what is left is ordinary attention with a single key/value head: the latents are the
keys, and their first R numbers are the values. Decoding then reads R + r numbers per token instead of 2 * Hq * D, and
rows of all kinds stay one forward. After DeepSeek-V2 (2024), section 2.1.

Knows: the arithmetic of N packed rows. Does not know: slots, routing, layers. Taught in notebook 10 (the MTP head),
where the small DeepSeek drafts for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minispec.models.config import ModelConfig
from minispec.models.kernels import RMSNorm, turn
from minispec.models.linear import Linear
from minispec.models.rope import softmax_factor

NORM_EPS = 1e-6  # of the two inner norms, whatever the model's rms_norm_eps


class LatentAttention(nn.Module):
    """One layer's attention of DeepSeek-V2, V3, R1 and GLM-4-MoE-Lite."""

    def __init__(self, config: ModelConfig, index: int, **where: object) -> None:
        super().__init__()
        mla, H, heads = config.mla, config.hidden_size, config.num_heads
        self.index, self.mla, self.num_heads = index, mla, heads
        queries = heads * (mla.nope_dim + mla.rope_dim)
        self.sizes = [mla.q_rank or queries, mla.kv_rank, mla.rope_dim]
        self.down = Linear(H, sum(self.sizes), **where)
        self.q_norm = RMSNorm(mla.q_rank, NORM_EPS, **where) if mla.q_rank else None
        self.q_up = Linear(mla.q_rank, queries, **where) if mla.q_rank else None
        self.kv_norm = RMSNorm(mla.kv_rank, NORM_EPS, **where)
        self.kv_up = nn.Parameter(torch.empty(heads * (mla.nope_dim + mla.value_dim), mla.kv_rank, **where))
        self.output = Linear(heads * mla.value_dim, H, **where)
        # `attend` divides by the square root of what it sees, R + r; the model was trained with that of D + r.
        seen, trained = mla.kv_rank + mla.rope_dim, mla.nope_dim + mla.rope_dim
        self.query_scale = softmax_factor(config.rope) * (seen / trained) ** 0.5

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
        """x [N, H], cos and sin [N, 1, r] -> [N, H]; attend gets q [N, Hq, R + r], k [N, 1, R + r], v = k[..., :R]."""
        mla = self.mla
        q, latent, k_rope = self.down(x).split(self.sizes, -1)
        if self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q, q_rope = q.view(len(x), self.num_heads, -1).split((mla.nope_dim, mla.rope_dim), -1)
        turned = torch.cat((q_rope, k_rope[:, None]), 1)  # [N, Hq + 1, r]
        if mla.interleaved:  # the checkpoint turns neighbours (2i, 2i + 1), we turn (i, i + r/2)
            turned = turned.unflatten(-1, (-1, 2)).mT.flatten(-2)
        turned = turn(turned, cos, sin)
        to_keys, to_values = self.kv_up.view(self.num_heads, -1, mla.kv_rank).split((mla.nope_dim, mla.value_dim), 1)
        absorbed = torch.einsum("nhd,hdr->nhr", q, to_keys)  # [N, Hq, R]
        query = torch.cat((absorbed, turned[:, :-1]), -1) * self.query_scale
        key = torch.cat((self.kv_norm(latent)[:, None], turned[:, -1:]), -1)
        mixed = attend(self.index, query, key, key[..., : mla.kv_rank])  # [N, Hq, R]
        return self.output(torch.einsum("nhr,hvr->nhv", mixed, to_values).flatten(1))

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint, relative to the attention -> the part of our parameters that it fills."""
        q_rows = self.sizes[0]
        views = {
            "kv_a_proj_with_mqa.weight": self.down.weight[q_rows:],
            "kv_a_layernorm.weight": self.kv_norm.weight,
            "kv_b_proj.weight": self.kv_up,
            "o_proj.weight": self.output.weight,
        }
        if self.q_up is None:
            return views | {"q_proj.weight": self.down.weight[:q_rows]}
        return views | {
            "q_a_proj.weight": self.down.weight[:q_rows],
            "q_a_layernorm.weight": self.q_norm.weight,
            "q_b_proj.weight": self.q_up.weight,
        }
