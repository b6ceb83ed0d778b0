"""Where to compute, in which number format, and how the host and the device work side by side.

Knows: what torch says about this machine; jobs, in what order they run, how long they took. Does not know: models or
their sizes, what a job is for. Taught in notebooks 00 (the map), where the machine card shows what was chosen and why,
and 08 (overlap).

Decoding reads every weight once per step, so half the bytes is nearly twice the speed, provided that the processor
multiplies the short format itself. bfloat16 keeps float32's range, so weights trained in it need no rescaling.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from minispec.config import ConfigError, check_choice

CPU = torch.device("cpu")
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


# Copies ----------------------------------------------------------------------------------------------------------
#
# On CUDA both ways go through page-locked memory, so that neither side waits. The memory comes from torch's pinned
# allocator, which notes an event with each copy: a block is handed out again only when the copies that use it are done.


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in one copy for all. Do not write to the arrays afterwards.

    Arrays of any shape and any type that torch knows. On a CPU nothing is copied.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    return _parts(_packed(tensors, pin_memory=True).to(device, non_blocking=True), tensors)


def download(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in host memory, where a CPU has them already. What a job downloads is there after `Flight.wait`."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


ALIGN = 16  # bytes at whose multiples each array begins: enough for every type


def _packed(tensors: Sequence[torch.Tensor], *, pin_memory: bool = False) -> torch.Tensor:
    """All of them in one run of bytes, uint8 [bytes]."""
    size = sum(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    for part, tensor in zip(_parts(packed, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def _parts(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `_packed` has put together, shaped and typed as the originals."""
    parts, start = [], 0
    for tensor in like:
        parts.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += -(-tensor.nbytes // ALIGN) * ALIGN
    return parts


# Jobs ------------------------------------------------------------------------------------------------------------
#
# A step of the engine has a part for the device (draft, forward, verify) and parts for the host (plan, settle). The
# device's part is a job. Three devices take jobs, all of them in the order in which they come:
#
#     InlineDevice     runs the job while the caller waits: no overlap
#     ThreadDevice     runs it in one worker thread beside the caller: a CPU, or a GPU through a stream of its own
#     VirtualDevice    runs it at once, and lets a clock say how long it would have taken: for teaching and tests

T = TypeVar("T")
SWITCH_INTERVAL = (
    0.0005  # seconds that a Python thread runs on when another one waits; Python's own default is ten times
)


class Span(NamedTuple):
    """Part of a job or of the host's work: its name, and when it began and ended (seconds of the device's clock)."""

    name: str
    start: float
    end: float


class Watch:
    """Given to a job, which says `with watch("forward"): ...` around its parts."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.mark, self.spans = mark, []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.mark()
        yield
        self.spans.append(Span(name, start, self.mark()))


Job = Callable[[Watch], T]


class Flight(Generic[T]):
    """A job on its way. `wait` returns its result, or raises what it raised; `spans` are its parts then.

    `peek` is for a later job: the result with its tensors, which the device may still be computing.
    """

    def __init__(self, peek: Callable[[], T], watch: Watch, wait: Callable[[], T]) -> None:
        self.peek, self.wait, self._watch = peek, wait, watch

    @property
    def spans(self) -> list[Span]:
        return self._watch.spans


class Stream:
    """A CUDA stream as the host sees it. Marks are events; when they have passed they are turned into seconds."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # weights and pools are filled on another stream
        self._known = self.mark(), time.perf_counter()  # nothing is ahead of this mark: it passes at once

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, watch: Watch, done: torch.cuda.Event) -> None:
        """Wait until `done` has passed, and say when the parts of the job did."""
        if not done.query():
            done.synchronize()
            self._known = done, time.perf_counter()
        event, at = self._known
        watch.spans = [
            Span(name, *(at + event.elapsed_time(mark) / 1e3 for mark in marks)) for name, *marks in watch.spans
        ]


class InlineDevice:
    """The caller itself does the job, at once; on CUDA it launches it, and `wait` waits for what was launched."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._stream = Stream(device) if device.type == "cuda" else None

    def now(self) -> float:
        """Seconds on this device's clock."""
        return time.perf_counter()

    def spend(self, name: str) -> None:
        """The host has done this part of its work; only a virtual clock has to be told."""

    def submit(self, job: Job[T]) -> Flight[T]:
        """Begin a job after all that were submitted before. What it raises is raised by `wait`."""
        stream = self._stream
        watch = Watch(stream.mark if stream else self.now)

        def work() -> tuple[T, torch.cuda.Event | None]:
            with torch.cuda.stream(stream.stream) if stream else nullcontext(), torch.inference_mode():
                return job(watch), stream.mark() if stream else None

        future = self._begin(work)

        def wait() -> T:
            result, done = future.result()
            if done:
                stream.wait(watch, done)
            return result

        return Flight(lambda: future.result()[0], watch, wait)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except BaseException as error:  # it belongs to whoever waits
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Take no more jobs; those that were submitted end."""


class ThreadDevice(InlineDevice):
    """One worker thread beside the caller."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # The worker asks for the interpreter between two operations; the host must not keep it for long.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="minispec-device")

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        return self._worker.submit(work)

    def close(self) -> None:
        """See InlineDevice."""
        self._worker.shutdown(wait=True)


class VirtualDevice(InlineDevice):
    """A clock that only the dials move: seconds of each part, by its name; others take no time.

    Jobs are done at once, but they begin when the device is free and end when their dials say so, and `wait` puts the
    host's clock there. So a schedule can be timed to the tick, the same on every machine.
    """

    def __init__(self, dials: Mapping[str, float]) -> None:
        super().__init__()
        self.dials = dict(dials)
        self._host = self._free = 0.0

    def now(self) -> float:
        """See InlineDevice."""
        return self._host

    def spend(self, name: str) -> None:
        """See InlineDevice."""
        self._host += self.dials.get(name, 0.0)

    def submit(self, job: Job[T]) -> Flight[T]:
        """See InlineDevice."""
        flight = super().submit(job)
        at = max(self._host, self._free)
        for place, (name, *_) in enumerate(flight.spans):
            flight.spans[place] = Span(name, at, at + self.dials.get(name, 0.0))
            at = flight.spans[place].end
        self._free = at

        def wait() -> T:
            self._host = max(self._host, at)
            return flight.peek()

        return Flight(flight.peek, flight._watch, wait)
