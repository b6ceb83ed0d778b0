"""One device and dtype policy, and a machine card that measures what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tools import tag_engine

from minispec import doctor
from minispec.config import ConfigError, SamplingParams
from minispec.device import (
    BFLOAT16_FLAGS,
    DEVICE_VARIABLE,
    InlineDevice,
    ThreadDevice,
    _packed,
    _parts,
    choose_device,
    choose_dtype,
    download,
    upload,
)

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_auto_takes_cuda_where_there_is_one(gpus, monkeypatch) -> None:
    gpus(0)
    assert choose_device() == choose_device(None) == choose_device("auto") == CPU
    gpus(1)
    assert choose_device("auto") == CUDA and choose_device("cpu") == CPU
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert choose_device("auto") == CPU, "the variable decides auto"
    assert choose_device("cuda") == CUDA, "and only auto"


def test_a_cuda_device_that_is_not_there_is_refused_in_one_sentence(gpus, monkeypatch) -> None:
    gpus(0)
    with pytest.raises(ConfigError, match="device is 'cuda', but torch finds 0 CUDA devices"):
        choose_device("cuda")
    gpus(2)
    assert choose_device("cuda:1").index == 1
    with pytest.raises(ConfigError, match="'cuda:2', but torch finds 2"):
        choose_device("cuda:2")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:7")
    with pytest.raises(ConfigError, match=f"{DEVICE_VARIABLE} is 'cuda:7'"):
        choose_device("auto")


@pytest.mark.parametrize("name", ["gpu", "mps", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cudax", 3])
def test_an_unknown_device_is_refused_by_name(name) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        choose_device(name)


@pytest.mark.parametrize("flag", BFLOAT16_FLAGS)
def test_auto_dtype_on_a_cpu_follows_the_instructions(flag: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, flag: True})
    dtype, reason = choose_dtype("auto", CPU)
    assert dtype is torch.bfloat16 and flag in reason
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, flag: False})
    assert choose_dtype("auto", CPU) == choose_dtype(None, CPU) and choose_dtype(None, CPU)[0] is torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_dtype("auto", CPU)[0] is torch.float32


@pytest.mark.parametrize("good", [True, False])
def test_auto_dtype_on_a_gpu_follows_the_hardware(good: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: good or including_emulation)
    assert choose_dtype("auto", CUDA)[0] is (torch.bfloat16 if good else torch.float32)


def test_a_dtype_that_is_asked_for_is_taken_or_refused() -> None:
    assert choose_dtype("float32", CPU) == (torch.float32, "asked for")
    assert choose_dtype("bfloat16", CPU)[0] is torch.bfloat16
    assert choose_dtype("float16", CUDA)[0] is torch.float16
    with pytest.raises(ConfigError, match="float16 is for CUDA only, got device 'cpu'"):
        choose_dtype("float16", CPU)
    with pytest.raises(ConfigError, match="'fp8'"):
        choose_dtype("fp8", CPU)


def test_the_machine_card_holds_what_was_measured() -> None:
    card = doctor.machine_card("cpu")
    assert card.device == CPU and card.read_gb_s > 0.1
    assert set(card.gflops) == {torch.float32, card.dtype} and min(card.gflops.values()) > 0.1
    assert card.cores >= 1 and card.threads == torch.get_num_threads()
    lines = str(card).splitlines()
    for word in ("cpu", "GB/s", "GFLOP/s", card.dtype_reason, torch.__version__, "transformers", "flashinfer"):
        assert any(word in line for line in lines), word
    columns = {re.match(r".+?\s{2,}", line).end() for line in lines}
    assert len(columns) == 1, "values are aligned"


def test_importing_the_package_and_the_machine_card_never_import_flashinfer(tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("raise SystemExit('flashinfer was imported')")
    code = "import minispec.llm, minispec.doctor as d; d.machine_card('cpu'); print('fine')"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr


def test_no_code_names_a_gpu_without_asking() -> None:
    bare = re.compile(r"\.cuda\(\)|device\s*=\s*[\\]?[\"']cuda")
    files = [*(ROOT / "minispec").rglob("*.py"), *(ROOT / "notebooks").rglob("*.ipynb")]
    assert files and not [f"{f}: {m[0]}" for f in files for m in [bare.search(f.read_text("utf-8"))] if m]


ARRAYS = (
    np.arange(3, dtype=np.int32),
    np.zeros(0, dtype=np.int64),
    np.array([True, False, True]),
    np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2],  # not contiguous
    np.array(7),
    np.arange(5, dtype=np.int64),
)


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    [tensor] = upload(CPU, array)
    [back] = download(tensor)
    assert tensor.data_ptr() == array.ctypes.data == back.data_ptr()
    for array, tensor in zip(ARRAYS, upload(CPU, *ARRAYS), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.shape == array.shape


def test_arrays_of_all_types_share_one_buffer() -> None:
    """The one copy that goes to a GPU, without the GPU."""
    tensors = upload(CPU, *ARRAYS)
    packed = _packed(tensors)
    there = _parts(packed.clone(), tensors)  # clone: the copy
    packed.fill_(255)
    for tensor, part in zip(tensors, there, strict=True):
        assert torch.equal(tensor, part) and tensor.dtype == part.dtype and part.shape == tensor.shape
    assert packed.nbytes == 16 + 0 + 16 + 48 + 16 + 48


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_thread_that_does_something_else_has_no_helpers_left(two_threads):
    """They would count against the processors, and the helpers of whoever computes would sleep between operations."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def compute(*_: object) -> None:
        torch.ones(2000, 2000) @ torch.ones(2000, 2000)

    device = ThreadDevice(torch.device("cpu"))
    device.submit(lambda watch: None).wait()
    alone = threads()
    compute()
    assert threads() > alone, "this torch keeps no helpers: the test can show nothing"
    gate = threading.Event()
    flight = device.submit(lambda watch: gate.wait(10))
    assert threads() == alone
    gate.set()
    flight.wait()
    device.submit(compute).wait()
    assert threads() > alone
    device.rest()
    device.submit(lambda watch: None).wait()
    assert threads() == alone
    device.close()
    device.rest()


def test_an_engine_that_has_nothing_to_do_lets_its_device_rest():
    rests = []

    class Device(InlineDevice):
        def rest(self) -> None:
            rests.append(len(engine.requests))

    engine = tag_engine(device=Device())
    for length in (2, 4):
        engine.add([1, 2, 3], SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert rests == [0]
