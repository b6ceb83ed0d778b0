"""Which attention computes: FlashInfer where it can, plain torch everywhere else.

Knows: the names of the backends and who may ask for them. Does not know: how they compute.
Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import torch

from minispec.attention.flashinfer import FlashInferAttention, FlashInferLatentAttention, obstacle
from minispec.attention.torch_backend import TorchAttention
from minispec.config import ConfigError


def choose_attention(
    requested: str, head_dim: int, dtype: torch.dtype, device: torch.device, *, latent: tuple[int, int] | None = None
) -> tuple[str, str]:
    """Return (name, reason) for "auto", "torch" or "flashinfer". Raises ConfigError when FlashInfer cannot be had.

    latent: the cache holds latents of R numbers, which are the values too, and turned keys of r: (R, r).
    """
    if requested == "torch":
        return "torch", "asked for"
    reason = obstacle(head_dim, dtype, device, latent)
    if requested == "flashinfer" and reason:
        raise ConfigError(f"attention_backend 'flashinfer' cannot be used: {reason}; take 'torch' or 'auto'")
    if reason:
        return "torch", reason
    return "flashinfer", "asked for" if requested == "flashinfer" else "it can serve this model on this GPU"


def make_attention(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    latent: tuple[int, int] | None = None,
) -> TorchAttention | FlashInferAttention:
    """The attention of that name, as `choose_attention` gives it."""
    where = {"dtype": dtype, "device": device}
    if name == "torch":
        return TorchAttention(num_heads, num_kv_heads, **where)
    if latent:
        return FlashInferLatentAttention(num_heads, *latent, **where)
    return FlashInferAttention(num_heads, num_kv_heads, head_dim, **where)
