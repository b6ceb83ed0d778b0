"""Fused operations against plain torch, through a FlashInfer that computes the true formulas in place, as it does."""

from __future__ import annotations

import importlib.util
import inspect
import types

import pytest
import torch
import torch.nn.functional as F

from minispec.models import kernels
from minispec.models.kernels import RMSNorm, rotary, silu_and_mul, turn
from minispec.models.llama import CausalLM
from minispec.models.loading import ModelConfig


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


CALLS: list[tuple[str, tuple, dict]] = []


def noted(function):
    def call(*args, **kwargs):
        CALLS.append((function.__name__, args, kwargs))
        return function(*args, **kwargs)

    return call


@noted
def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    total = input.double() + residual.double()
    residual.copy_(total)
    input.copy_(total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double())


@noted
def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous() and positions.is_contiguous()
    assert head_size in (64, 128, 256) and cos_sin_cache.shape[1] == head_size and is_neox
    cos, sin = cos_sin_cache[positions].double()[:, None].chunk(2, -1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        assert heads.shape[1] > 0
        a, b = heads.double().chunk(2, -1)
        heads.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


@noted
def silu_and_mul_of_flashinfer(input, out=None, enable_pdl=None):
    assert input.shape[-1] // 2 * input.element_size() % 16 == 0
    gate, up = input.double().chunk(2, -1)
    return (F.silu(gate) * up).to(input.dtype)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list:
    module = types.SimpleNamespace(
        fused_add_rmsnorm=fused_add_rmsnorm,
        apply_rope_with_cos_sin_cache_inplace=apply_rope_with_cos_sin_cache_inplace,
        silu_and_mul=silu_and_mul_of_flashinfer,
    )
    monkeypatch.setattr(kernels, "_flashinfer", lambda: module)
    CALLS.clear()
    return CALLS


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().as_subclass(OnGpu) for tensor in tensors]


DTYPES = pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])


@DTYPES
def test_a_norm_of_a_sum(fused, dtype, tolerance):
    torch.manual_seed(0)
    norm = RMSNorm(48, 1e-2, dtype=dtype)  # an eps that shows
    norm.weight.data.normal_()
    x, y = torch.randn(2, 5, 48).mul(0.1).to(dtype)
    with torch.inference_mode():
        expected = x + y, norm(x + y)
        [gpu_x, gpu_y] = on_gpu(x, y)
        got = norm.of_sum(gpu_x, gpu_y)
    assert len(fused) == 1
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.as_subclass(torch.Tensor), theirs, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("size", [64, 128])
def test_turning_heads(fused, dtype, tolerance, size):
    torch.manual_seed(0)
    whole = torch.randn(7, 6, size).to(dtype)
    frequencies, positions = torch.rand(size // 2), torch.randint(0, 50, (7,))
    with torch.inference_mode():
        expected = turn(whole[:, :4], *rotary(frequencies, positions, 1.5, dtype))
        [gpu, at] = on_gpu(whole, positions)
        tables = [table.as_subclass(torch.Tensor) for table in rotary(frequencies, at, 1.5, dtype)]
        assert [table.dim() for table in tables] == [2, 1]
        got = turn(gpu[:, :4], *tables)  # a part of what one product gives, as in the model
    assert len(fused) == 1 and got.data_ptr() == gpu.data_ptr()
    torch.testing.assert_close(got.as_subclass(torch.Tensor), expected, atol=4 * tolerance, rtol=tolerance)
    assert torch.equal(gpu[:, 4:].as_subclass(torch.Tensor), whole[:, 4:])


@DTYPES
def test_an_activation(fused, dtype, tolerance):
    torch.manual_seed(0)
    x = torch.randn(3, 32).to(dtype)
    with torch.inference_mode():
        expected, got = silu_and_mul(x), silu_and_mul(on_gpu(x)[0])
    assert len(fused) == 1
    torch.testing.assert_close(got.as_subclass(torch.Tensor), expected, atol=tolerance, rtol=tolerance)


def test_plain_torch_computes_where_flashinfer_cannot(fused, monkeypatch):
    """On a CPU, in float32, where gradients may be wanted, for other sizes, and where it is not installed."""

    def everything(dtype: torch.dtype, *, gpu: bool = True, width: int = 32, size: int = 64) -> int:
        move = on_gpu if gpu else lambda *tensors: list(tensors)
        [x, y, wide, at] = move(
            *torch.randn(2, 4, 16, dtype=dtype), torch.randn(4, width, dtype=dtype), torch.arange(4)
        )
        before, kept = len(fused), x.clone()
        total, _ = RMSNorm(16, 1e-6, dtype=dtype).of_sum(x, y)
        silu_and_mul(wide)
        tables = rotary(torch.rand(size // 2), at, 1.0, dtype)
        turn(torch.randn(4, 3, size, dtype=dtype), *(table.as_subclass(torch.Tensor) for table in tables))
        assert len(fused) > before or torch.equal(x, kept)
        return len(fused) - before

    with torch.no_grad():
        assert everything(torch.bfloat16) == 0
    with torch.inference_mode():
        assert everything(torch.bfloat16) == 3
        assert everything(torch.bfloat16, gpu=False) == everything(torch.float32) == 0
        assert everything(torch.bfloat16, width=24) == everything(torch.bfloat16, size=32) == 2
        monkeypatch.setattr(kernels, "_flashinfer", lambda: None)
        assert everything(torch.bfloat16) == 0


def test_a_model_on_fused_operations_has_the_logits_of_one_without(fused, monkeypatch):
    """The layer's input is overwritten on the way: nobody may read it again, hooks that keep it included."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 50,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 100,
        }
    )
    torch.manual_seed(0)
    model = CausalLM(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3 if parameter.dim() == 2 else 1.0)

    def attend(layer, q, k, v):
        return (
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None].float() for x in (q, k, v)), is_causal=True, enable_gqa=True
            )[0]
            .transpose(0, 1)
            .bfloat16()
        )

    ids, positions = torch.tensor([3, 14, 15, 9, 2]), torch.arange(5) + 7
    with torch.inference_mode():
        expected = model.forward(ids, positions, attend)
        assert fused == []
        monkeypatch.setattr(kernels, "_fused", lambda is_cuda, dtype: True)
        got = model.forward(ids, positions, attend)
    assert [name for name, *_ in fused] == [
        "apply_rope_with_cos_sin_cache_inplace",
        "fused_add_rmsnorm",
        "silu_and_mul_of_flashinfer",
    ] * 3
    assert F.cosine_similarity(got.float(), expected.float(), dim=-1).min() > 0.999


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_calls_fit_the_real_signatures(fused):
    import flashinfer

    with torch.inference_mode():
        [x, y, wide, at] = on_gpu(*torch.randn(2, 4, 16).half(), torch.randn(4, 32).half(), torch.arange(4))
        RMSNorm(16, 1e-6, dtype=torch.float16).of_sum(x, y)
        silu_and_mul(wide)
        turn(torch.randn(4, 3, 64).half(), *rotary(torch.rand(32), at, 1.0, torch.float16))
    assert len(fused) == 3
    for name, args, kwargs in fused:
        real = inspect.signature(getattr(flashinfer, name.removesuffix("_of_flashinfer")))
        bound = real.bind(*args, **kwargs).arguments
        ours = inspect.signature(globals()[name].__closure__[0].cell_contents).bind(*args, **kwargs).arguments
        assert list(bound) == list(ours)  # the fake reads each argument by the name that it has there
