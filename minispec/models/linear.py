"""A matrix product that reads its weight as fast as the machine can.

At one to a few rows a product is bound by reading the weight, and on a CPU the ordinary row-major layout is read at a
third of the possible speed (and float32 with 2 to 4 rows much slower still). oneDNN can reorder a weight once into
the blocks that its kernels read; the results are the same bits in bfloat16. `pack` does that after loading.
`quantize`, before it, makes the weight itself smaller; a draft may be a little wrong.

Knows: one weight. Does not know: what it projects. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

from minispec.config import ConfigError

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
        self.itemsize = self.weight.element_size()  # bytes of a number that `forward` reads

    @property
    def plain_weight(self) -> torch.Tensor:
        """The weight [outputs, inputs] in row-major order, unpacked into a copy if need be."""
        return self.weight if self.packed is None else self.packed.to_dense()

    def pack(self) -> None:
        """Reorder the weight for fast reading and drop the plain copy. Does nothing where that is not possible."""
        if self.packed is None and not self.quantized and can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_ROWS)
            self.weight = None

    @property
    def quantized(self) -> bool:
        return self.itemsize == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.quantized and 0 < len(x) <= PACK_ROWS and x.device.type == "cpu":
            # torchao turns the whole weight back into bfloat16 for each product: good for many rows only.
            scale = self.weight.scale.flatten().bfloat16()
            y = torch._weight_int8pack_mm(x.bfloat16(), self.weight.qdata, scale).to(x.dtype)
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


def stored_bytes(*modules: nn.Module) -> int:
    """Bytes of the weights in these modules; a tied head counts once more when it is packed."""
    size, seen = 0, set()
    for part in (part for module in modules for part in module.modules()):
        tensors = dict(part.named_parameters(recurse=False))
        if isinstance(part, Linear):
            tensors["weight"] = part.packed if part.weight is None else part.weight
        for name, tensor in tensors.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                matrix = name == "weight" and isinstance(part, Linear)
                size += tensor.numel() * (part.itemsize if matrix else tensor.element_size())
    return size


def quantize(module: nn.Module, kind: str) -> None:
    """Round the matrices of `module` to "int8" (one scale per output) or "fp8" with torchao; comes before `pack`.

    int8 rounds weights only. fp8 rounds the rows that come in as well and multiplies in fp8.
    Raises ConfigError when torchao is missing, or when the device does not multiply fp8.
    """
    matrices = [part for part in module.modules() if isinstance(part, Linear)]
    device = matrices[0].weight.device
    if kind == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        needed = "a GPU of compute capability 8.9 or later"
        raise ConfigError(f"draft_quantization 'fp8' needs {needed}, and the draft is on {str(device)!r}")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of each library that it has for another machine
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(f"draft_quantization {kind!r} needs torchao, which is not installed: {error}") from error
    finally:
        logging.disable(before)
    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8DynamicActivationFloat8WeightConfig}[kind]()
    quantize_(module, config, lambda part, _: isinstance(part, Linear))
    for part in matrices:
        part.itemsize = 1
