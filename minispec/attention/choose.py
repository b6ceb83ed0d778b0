"""Which attention computes: FlashInfer where it can, plain torch everywhere else.

Knows: the names of the backends and who may ask for them. Does not know: how they compute.
Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import torch

from minispec.attention.flashinfer import FlashInferAttention, obstacle
from minispec.attention.torch_backend import TorchAttention
from minispec.config import ConfigError


def choose_attention(
    requested: str, head_dim: int, dtype: torch.dtype, device: torch.device, *, latent: bool = False
) -> tuple[str, str]:
    """Return (name, reason) for "auto", "torch" or "flashinfer". Raises ConfigError when FlashInfer cannot be had.

    latent: the cache holds latents, whose first numbers are the values.
    """
    if requested == "torch":
        return "torch", "asked for"
    reason = "latent attention is computed by torch" if latent else obstacle(head_dim, dtype, device)
    if requested == "flashinfer" and reason:
        raise ConfigError(f"attention_backend 'flashinfer' cannot be used: {reason}; take 'torch' or 'auto'")
    if reason:
        return "torch", reason
    return "flashinfer", "asked for" if requested == "flashinfer" else "it can serve this model on this GPU"


def make_attention(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> TorchAttention | FlashInferAttention:
    """The attention of that name, as `choose_attention` gives it."""
    if name == "flashinfer":
        return FlashInferAttention(num_heads, num_kv_heads, head_dim, dtype=dtype, device=device)
    return TorchAttention(num_heads, num_kv_heads, dtype=dtype, device=device)
