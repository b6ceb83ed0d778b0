"""Small operations in as few launches as there are: FlashInfer's on a GPU where it is installed, torch's otherwise.

Between two matrix products of a small model there is little to compute and much to start. What is launched from a CUDA
graph gains little; eager steps gain more. FlashInfer's operations write over what they read and know no gradients, so
they are for inference mode only, and for what nobody reads afterwards.

Knows: formulas. Does not know: layers. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minispec.models.rope import rotary_tables, rotate

HEAD_SIZES = (64, 128, 256)  # that FlashInfer turns


class RMSNorm(nn.RMSNorm):
    """x [..., H] -> x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, section 4)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]. On a CPU torch has no kernel for it and takes eight, but it has one for LayerNorm.

        The numbers x and -x have the mean 0 and, for a variance, the mean of x^2.
        """
        if x.is_cuda:
            return super().forward(x)
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, both.shape[-1:], eps=self.eps)[..., : x.shape[-1]] * self.weight

    def of_sum(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y [N, H] -> (x + y, its norm), perhaps in the memory of x and y."""
        if _fused(x.is_cuda, x.dtype):
            _flashinfer().fused_add_rmsnorm(y, x, self.weight, self.eps, enable_pdl=False)
            return x, y
        x = x + y
        return x, self(x)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 I], the gate and then what it lets through -> silu(gate) * up [N, I]."""
    if gate_up.shape[-1] % 16 == 0 and _fused(gate_up.is_cuda, gate_up.dtype):  # halves of whole 16 bytes
        return _flashinfer().silu_and_mul(gate_up, enable_pdl=False)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotary(
    frequencies: torch.Tensor, positions: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [N] -> (cos, sin) [N, 1, D] in dtype, times scale, for `turn`. Made once per forward for all layers.

    Where FlashInfer turns, they are its own: cosines and sines side by side, float32 [N, D], and the row of each token.
    """
    cos, sin = (table * scale for table in rotary_tables(frequencies, positions))
    half = len(frequencies)
    if 2 * half in HEAD_SIZES and _fused(positions.is_cuda, dtype):
        both = torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1)
        return both, torch.arange(len(positions), device=positions.device)
    return cos.to(dtype), sin.to(dtype)


def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [N, heads, D] as `rope.rotate` turns them, perhaps in their own memory; cos, sin: of `rotary`."""
    if cos.dim() == 3:
        return rotate(heads, cos, sin)
    size = heads.shape[-1]
    flat = heads.view(len(heads), -1)  # what it calls queries and keys, it treats alike
    _flashinfer().apply_rope_with_cos_sin_cache_inplace(sin, flat[:, :-size], flat[:, -size:], size, cos, is_neox=True)
    return heads


def _fused(is_cuda: bool, dtype: torch.dtype) -> bool:
    half = dtype in (torch.float16, torch.bfloat16)
    return is_cuda and half and torch.is_inference_mode_enabled() and _flashinfer() is not None


@functools.cache
def _flashinfer() -> Any:
    """The package; None where it is not installed."""
    try:
        import flashinfer
    except Exception:  # whatever its own imports may raise
        return None
    return flashinfer
