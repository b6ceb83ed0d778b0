"""Where to compute and in which number format: one policy, with its reason in words.

Knows: what torch says about this machine. Does not know: models or their sizes. Taught in notebook 00 (the map), where
the machine card shows what was chosen and why.

Decoding reads every weight once per step, so half the bytes is nearly twice the speed, provided that the processor
multiplies the short format itself. bfloat16 keeps float32's range, so weights trained in it need no rescaling.
"""

from __future__ import annotations

import os

import torch

from minispec.config import ConfigError, check_choice

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_VARIABLE = "MINISPEC_DEVICE"
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # Intel AMX, AVX-512 (Intel, AMD), ARM


def choose_device(requested: str | None = "auto") -> torch.device:
    """Return the device for "auto" (or None), "cpu", "cuda" or "cuda:N".

    auto is $MINISPEC_DEVICE if that is set, else CUDA where there is one, else the CPU.
    Raises ConfigError for another name and for a CUDA device that this machine does not have.
    """
    name, source = requested or "auto", "device"
    if name == "auto" and os.environ.get(DEVICE_VARIABLE):
        name, source = os.environ[DEVICE_VARIABLE], DEVICE_VARIABLE
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if (kind, colon) != ("cpu", "") and (kind != "cuda" or (colon and not index.isdecimal())):
        raise ConfigError(f"{source} must be auto, cpu, cuda or cuda:N; got {name!r}")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise ConfigError(f"{source} is {name!r}, but torch finds {count} CUDA devices on this machine")
    return torch.device(name)


def choose_dtype(requested: str | None, device: torch.device) -> tuple[torch.dtype, str]:
    """Return (dtype, reason) for "auto" (or None), "float32", "bfloat16" or "float16" on `device`.

    auto is bfloat16 where the device multiplies it in hardware, else float32.
    Raises ConfigError for another name, and for float16 on a CPU: few processors multiply it, and torch's fallback for
    the others is hundreds of times slower than float32.
    """
    name = requested or "auto"
    check_choice("dtype", name, ("auto", *DTYPES))
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype float16 is for CUDA only, got device 'cpu'; use auto, bfloat16 or float32")
    if name != "auto":
        return DTYPES[name], "asked for"
    good, reason = _cuda_bfloat16() if device.type == "cuda" else _cpu_bfloat16()
    return (torch.bfloat16 if good else torch.float32), reason


def _cuda_bfloat16() -> tuple[bool, str]:
    good = torch.cuda.is_bf16_supported(including_emulation=False)
    return good, f"this GPU {'multiplies' if good else 'does not multiply'} bfloat16 in hardware"


def _cpu_bfloat16() -> tuple[bool, str]:
    if not torch.backends.mkldnn.is_available():  # torch's own loops make no use of the instructions
        return False, "this torch build has no oneDNN, which multiplies bfloat16 on a CPU"
    capabilities = torch.cpu.get_capabilities()
    for flag in BFLOAT16_FLAGS:
        if capabilities.get(flag):
            return True, f"this processor multiplies bfloat16 in hardware ({flag})"
    return False, f"this processor has none of {', '.join(BFLOAT16_FLAGS)}"
