"""Small operations that one launch does on a GPU: FlashInfer's where it is installed, plain torch otherwise.

The norm is one launch in torch already. What is launched from a graph gains little; eager steps gain more.

Knows: formulas. Does not know: layers. Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F


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
