"""A matrix product that reads its weight as fast as the machine can.

At one to a few rows a product is bound by reading the weight, and on a CPU the ordinary row-major layout is read at a
third of the possible speed (and float32 with 2 to 4 rows much slower still). oneDNN can reorder a weight once into
the blocks that its kernels read; the results are the same bits in bfloat16. `pack` does that after loading.

`quantize`, before it, makes the weight itself smaller. torch's products with short weights are quicker than the others
for a few rows only, so on a CPU the rounded numbers are kept twice: short for a few rows, whole for many. What decides
is the number of rows, so a prompt and its continuation see the same weights.

Knows: one weight. Does not know: what it projects. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from minispec.config import ConfigError

PACK_ROWS = 8  # the row count that the blocks are chosen for; good from 1 to some hundreds
PACK_MIN_NUMBERS = 2**16  # a smaller weight stays in the processor's cache, where its layout does not matter
INT8_ROWS, INT4_ROWS = 3, 4  # up to so many rows torch's short product was quicker than oneDNN's with whole numbers
INT4_GROUP = 32  # inputs that share a scale and a zero: what GGUF files do, whose 4-bit weights so lose nothing more
INT4_OUTPUTS = 16  # the kernel computes so many outputs at a time


def can_pack(weight: torch.Tensor) -> bool:
    """True where oneDNN has a packed product for this weight and it pays: CPU, float32 or bfloat16, not tiny."""
    if weight.device.type != "cpu" or weight.numel() < PACK_MIN_NUMBERS or not torch.backends.mkldnn.is_available():
        return False
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)


@dataclass(frozen=True)
class Short:
    """A weight in few bits. product: x [N, inputs] bfloat16 -> [N, outputs], quick for N up to `rows`."""

    product: Callable[[torch.Tensor], torch.Tensor]
    rows: int
    nbytes: int


class Linear(nn.Module):
    """x [N, inputs] -> [N, outputs] with weight [outputs, inputs] and an optional bias. Created uninitialised."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **where: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, **where), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None
        self.short: Short | None = None
        self.numbers = inputs * outputs
        self.nbytes_read = self.weight.nbytes  # by `forward` of one row

    @property
    def plain_weight(self) -> torch.Tensor:
        """The weight [outputs, inputs] in row-major order, unpacked into a copy if need be."""
        return self.weight if self.packed is None else self.packed.to_dense()

    def pack(self) -> None:
        """Reorder the weight for fast reading and drop the plain copy. Does nothing where that is not possible."""
        if self.packed is None and can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_ROWS)
            self.weight = None

    def shorten(self, kind: str) -> None:
        """Round the weight to "int8" or "int4" and keep it both ways (CPU). Does nothing where it cannot be divided."""
        outputs, inputs = self.weight.shape
        if kind == "int4" and (inputs % INT4_GROUP or outputs % INT4_OUTPUTS):
            return
        rounded, self.short = (_int8 if kind == "int8" else _int4)(self.weight.float())
        self.weight.copy_(rounded)
        self.nbytes_read = self.short.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.short is not None and 0 < len(x) <= self.short.rows:
            y = self.short.product(x.bfloat16()).to(x.dtype)
            return y if self.bias is None else y + self.bias
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, Short]:
    """The rounded weight, and what computes with it: one scale per output."""
    scales = (weight.abs().amax(1).clamp(min=1e-12) / 127).bfloat16()
    numbers = (weight / scales[:, None]).round().clamp(-127, 127)
    short, nbytes = numbers.to(torch.int8), numbers.numel() + scales.nbytes
    return numbers * scales[:, None], Short(lambda x: torch._weight_int8pack_mm(x, short, scales), INT8_ROWS, nbytes)


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, Short]:
    """The same with a scale and a zero for each INT4_GROUP inputs of an output."""
    groups = weight.unflatten(1, (-1, INT4_GROUP))  # [outputs, groups, INT4_GROUP]
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales = ((high - low).clamp(min=1e-12) / 15).bfloat16()
    numbers = ((groups - low) / scales).round().clamp(0, 15)
    zeros = (low + 8 * scales).bfloat16()  # what the number 8 means
    short = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.flatten(1).int(), 1)
    both = torch.cat((scales, zeros), -1).transpose(0, 1).contiguous()  # [groups, outputs, 2]

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, short, INT4_GROUP, both)

    return ((numbers - 8) * scales + zeros).flatten(1), Short(product, INT4_ROWS, short.nbytes + both.nbytes)


def matrices(*modules: nn.Module) -> Iterator[Linear]:
    """The matrices in these modules, each one once."""
    yield from {part: None for module in modules for part in module.modules() if isinstance(part, Linear)}


def bytes_read(numbers: float, *modules: nn.Module) -> int:
    """Bytes of `numbers` numbers of the modules' matrices, as a forward of one row reads them."""
    parts = list(matrices(*modules))
    return round(numbers * sum(part.nbytes_read for part in parts) / sum(part.numbers for part in parts))


def stored_bytes(*modules: nn.Module) -> int:
    """Bytes of the weights in these modules; a tied head counts once more when it is packed."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        tensors |= {id(tensor): tensor for tensor in module.parameters()}
    parts = list(matrices(*modules))
    packed = sum(part.packed.numel() * part.packed.element_size() for part in parts if part.packed is not None)
    short = sum(part.short.nbytes for part in parts if part.short is not None)
    plain = {id(part.weight): part.nbytes_read for part in parts if part.short is None}  # torchao's do not know it
    return packed + short + sum(plain.get(name, tensor.nbytes) for name, tensor in tensors.items())


def quantize(module: nn.Module, kind: str) -> None:
    """Round the matrices of `module` to "int8", "int4" or "fp8"; comes before `pack`.

    int8 has one scale per output, int4 one per 32 inputs of an output. On a CPU torch computes with them, on a GPU
    torchao. fp8 rounds the rows that come in as well and multiplies in fp8.
    Raises ConfigError where the device does not do that, or torchao is needed and missing.
    """
    parts = list(matrices(module))
    device = parts[0].weight.device
    if kind == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        needed = "a GPU of compute capability 8.9 or later"
        raise ConfigError(f"quantization 'fp8' needs {needed}, and the weights are on {str(device)!r}")
    if kind == "int4" and device.type != "cpu":
        raise ConfigError(
            f"quantization 'int4' is for a CPU, and the weights are on {str(device)!r}; there is int8, fp8"
        )
    if device.type == "cpu":
        for part in parts:
            part.shorten(kind)
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of each library that it has for another machine
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(f"quantization {kind!r} needs torchao on a GPU, which is not installed: {error}") from error
    finally:
        logging.disable(before)
    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8DynamicActivationFloat8WeightConfig}[kind]()
    quantize_(module, config, lambda part, _: isinstance(part, Linear))
    for part in parts:
        part.nbytes_read = part.numbers
