"""A matrix product that reads its weight as fast as the machine can.

At one to a few rows a product is bound by reading the weight, and on a CPU the ordinary row-major layout is read at a
third of the possible speed (and float32 with 2 to 4 rows much slower still). oneDNN can reorder a weight once into
the blocks that its kernels read; the results are the same bits in bfloat16. `pack` does that after loading.

Knows: one weight. Does not know: what it projects. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PACK_ROWS = 8  # the row count that the blocks are chosen for; good from 1 to some hundreds
PACK_MIN_NUMBERS = 2**16  # a smaller weight stays in the processor's cache, where its layout does not matter


def can_pack(weight: torch.Tensor) -> bool:
    """True where oneDNN has a packed product for this weight and it pays: CPU, float32 or bfloat16, not tiny."""
    if weight.device.type != "cpu" or weight.numel() < PACK_MIN_NUMBERS or not torch.backends.mkldnn.is_available():
        return False
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)


class Linear(nn.Module):
    """x [N, inputs] -> [N, outputs] with weight [outputs, inputs] and an optional bias. Created uninitialised."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **where: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, **where), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Reorder the weight for fast reading and drop the plain copy. Does nothing where that is not possible."""
        if self.packed is None and can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_ROWS)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
