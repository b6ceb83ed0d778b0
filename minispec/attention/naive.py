"""Attention as the textbook writes it: every token looks at itself and at all tokens before it, no cache.

Knows: one formula, softmax(q k^T / sqrt(D)) v under a causal mask (Vaswani et al. 2017, section 3.2). Does not know:
slots, pages, history. Because it recomputes everything it is slow and easy to trust: the oracle of the tests and the
attention of the reference loop.

Taught in notebook 01 (one token at a time).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CausalAttention:
    """An `attend` for rows that start at position 0: one sequence, or several of the given lengths one after another.

    Memory grows with N squared.
    """

    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        self.lengths = None if lengths is None else torch.as_tensor(lengths)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]. Each key/value head serves Hq / Hkv query heads."""
        N, Hq, D = q.shape
        q = q.reshape(N, k.shape[1], -1, D)  # [N, Hkv, G, D], G = Hq / Hkv
        scores = torch.einsum("nhgd,mhd->hgnm", q, k).float() * D**-0.5  # [Hkv, G, N, N]
        scores = scores.masked_fill(~self.visible(N, q.device), float("-inf"))
        weights = scores.softmax(-1).to(v.dtype)
        return torch.einsum("hgnm,mhd->nhgd", weights, v).reshape(N, Hq, -1)

    def visible(self, N: int, device: torch.device) -> torch.Tensor:
        """Bool [N, N]: may row n look at row m?"""
        causal = torch.ones(N, N, dtype=torch.bool, device=device).tril()
        if self.lengths is None:
            return causal
        owner = torch.arange(len(self.lengths)).repeat_interleave(self.lengths).to(device)  # [N]
        return causal & (owner[:, None] == owner)
