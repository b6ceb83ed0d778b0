"""The machine card: what this machine is and how fast it reads and multiplies, measured in about a second.

Two numbers explain most of what an LLM server does. Decoding one token reads every weight once: `read_gb_s` bounds it.
Prefill multiplies many tokens with each weight that it reads: `gflops` bounds it. Notebook 02 draws both as a roofline.

Knows: torch's devices and installed packages. Does not know: engines. Taught in notebook 00 (the map).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minispec.attention.choose import choose_attention
from minispec.device import choose_device, choose_dtype
from minispec.models.embedded import EMBEDDED_MODEL, embedded_ready

READ_BYTES = {"cpu": 2**28, "cuda": 2**30}  # several times the last cache
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 5
EMBEDDED_HEAD_DIM = 64


@dataclass(frozen=True)
class MachineCard:
    """What was found. str(card) is an aligned table.

    read_gb_s: 10^9 bytes per second read from the device's memory. gflops: 10^9 floating point operations per second
    of a square matrix product, by dtype (a multiply and an add count as two). memory_gb: 10^9 bytes, None if unknown.
    """

    device: torch.device
    name: str
    memory_gb: float | None
    cores: int
    threads: int
    dtype: torch.dtype
    dtype_reason: str
    read_gb_s: float
    gflops: dict[torch.dtype, float]
    versions: dict[str, str]
    model_ready: bool

    def __str__(self) -> str:
        lines = {
            "device": f"{self.device} ({self.name})",
            "memory": "unknown" if self.memory_gb is None else f"{self.memory_gb:.1f} GB",
            "CPU cores": f"{self.cores}, torch uses {self.threads} threads",
            "dtype": f"{_short(self.dtype)}: {self.dtype_reason}",
            "memory read": f"{self.read_gb_s:.1f} GB/s",
        }
        lines |= {f"matrix {_short(dtype)}": f"{rate:,.0f} GFLOP/s" for dtype, rate in self.gflops.items()}
        if self.device.type == "cuda":
            name, reason = choose_attention("auto", EMBEDDED_HEAD_DIM, self.dtype, self.device)
            lines["attention"] = f"{name}: {reason}"
        lines |= self.versions
        lines[EMBEDDED_MODEL] = "in the cache" if self.model_ready else "not fetched yet (python -m minispec fetch)"
        width = max(map(len, lines))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in lines.items())


def machine_card(device: str | None = "auto") -> MachineCard:
    """Look at `device` and measure it. Raises ConfigError for a device that is not there."""
    chosen = choose_device(device)
    dtype, reason = choose_dtype("auto", chosen)
    on_gpu = chosen.type == "cuda"
    return MachineCard(
        device=chosen,
        name=torch.cuda.get_device_name(chosen) if on_gpu else _processor_name(),
        memory_gb=torch.cuda.get_device_properties(chosen).total_memory / 1e9 if on_gpu else _memory_gb(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        dtype=dtype,
        dtype_reason=reason,
        read_gb_s=measure_read(chosen) / 1e9,
        gflops={d: measure_matmul(chosen, d) / 1e9 for d in dict.fromkeys((torch.float32, dtype))},
        versions={"Python": platform.python_version()}
        | {p: _version(p) for p in ("torch", "transformers", "flashinfer")},
        model_ready=embedded_ready(),
    )


def measure_read(device: torch.device) -> float:
    """Bytes per second of reading one large buffer from end to end; the best of a few."""
    buffer = torch.ones(READ_BYTES[device.type] // 4, device=device)
    return READ_BYTES[device.type] / _best_seconds(buffer.sum, device)


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a square matrix product; the best of a few."""
    n = MATRIX_SIZE[device.type]
    a = torch.randn(n, n, device=device).to(dtype)  # equal numbers would flatter a GPU: fewer bits flip, clocks rise
    return 2 * n**3 / _best_seconds(lambda: a @ a, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one may load a library or allocate
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(package: str) -> str:
    # Reading the metadata imports nothing: importing flashinfer takes seconds and may compile.
    names = ("flashinfer-python", "flashinfer") if package == "flashinfer" else (package,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _processor_name() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    return name or platform.machine()


def _memory_gb() -> float | None:
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


if __name__ == "__main__":
    print(machine_card())
