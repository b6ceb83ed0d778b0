"""Small operations in as few launches as there are: FlashInfer's on a GPU where it is installed, torch's otherwise.

Between two matrix products of a small model there is little to compute and much to start. What is launched from a CUDA
graph gains little; eager steps gain more.

Knows: formulas. Does not know: layers. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


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


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 I], the gate and then what it lets through -> silu(gate) * up [N, I]."""
    half = gate_up.dtype in (torch.float16, torch.bfloat16)
    if gate_up.is_cuda and half and gate_up.shape[-1] % 16 == 0 and _flashinfer():  # rows of whole 16 bytes
        return _flashinfer().silu_and_mul(gate_up, enable_pdl=False)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def _flashinfer() -> Any:
    """The package; None where it is not installed."""
    try:
        import flashinfer
    except Exception:  # whatever its own imports may raise
        return None
    return flashinfer
