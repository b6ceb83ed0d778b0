"""What surrounds a GPU, tested without one: FlashInfer's plans, the padding of graphs, no waits inside a step, sizes.

FlashInfer's kernels are replaced by `FakeWrapper`, which reads exactly what it was handed (index arrays, mask bits,
buffers) and computes with it; its calls are bound to the real package's signatures where that is installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_attention import random_table, textbook
from test_drafters import MAX_TOKENS, config_for, greedy, hot, make, tiny  # noqa: F401 (tiny is a fixture)
from tiny_checkpoints import add_shard, mtp_tensors, their_mtp, write_tiny_checkpoint
from tools import assert_idle, assert_same_ids

from minispec import LLM, SamplingParams
from minispec.attention import flashinfer as backend
from minispec.attention.choose import choose_attention, make_attention
from minispec.attention.flashinfer import FlashInferAttention, FlashInferLatentAttention, packed_masks, paged_indices
from minispec.attention.torch_backend import TorchAttention
from minispec.config import ConfigError, EngineConfig
from minispec.core import UNKNOWN, StepLayout, known_tokens
from minispec.graphs import graph_batches, padded
from minispec.kv import sizing
from minispec.models.sharding import WHOLE
from minispec.runner import Segment, pack
from minispec.sampling import distribution
from minispec.sampling.rejection import verify
from minispec.speculative.drafter import Proposal
from minispec.speculative.model import ModelDrafter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def random_step(
    rng: np.random.Generator, q_choices: Sequence[int], most_rows: int = 6
) -> tuple[StepLayout, np.ndarray]:
    rows = int(rng.integers(1, most_rows + 1))
    table = random_table(rows, int(rng.integers(1000)))
    lengths, starts = rng.choice(q_choices, size=rows), rng.choice([0, 1, 7, 60, 250], size=rows)
    segments = [
        Segment(row, int(start), rng.integers(0, 50, n).tolist(), int(rng.integers(0, n + 1)))
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    return pack(segments, table), table


# FlashInfer's plans ------------------------------------------------------------------------------------------------


def seen_by_torch(layout: StepLayout, table: np.ndarray) -> list[list[int]]:
    """For each packed token, the slots that the torch backend lets it see, in order."""
    plan, seen = TorchAttention(2, 1, dtype=torch.float32, device="cpu").plan(layout, table), {}
    for group in plan.groups:
        packed = range(group.batch * group.q_len) if group.packed is None else group.packed.tolist()
        slots = torch.arange(5000)[group.slots] if isinstance(group.slots, slice) else group.slots
        slots = slots.view(group.batch, group.kv_len)
        for place, token in enumerate(packed):
            row, j = divmod(place, group.q_len)
            mask = torch.zeros(group.kv_len) if group.mask is None else group.mask[row, 0, j]
            seen[token] = slots[row][mask == 0].tolist()
    return [seen[token] for token in range(len(seen))]


def test_two_hundred_random_mixes_show_each_token_the_slots_that_torch_shows_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        layout, table = random_step(rng, [1, 1, 2, 5, 33, 90])
        indices, expected, token = paged_indices(layout, table), seen_by_torch(layout, table), 0
        assert all(array.dtype == np.int32 for array in indices) and (indices.last_page_len == 1).all()
        bits, starts = packed_masks(layout)
        for b, (q_len, kv_len) in enumerate(zip(layout.q_lens, layout.kv_lens, strict=True)):
            pages = indices.kv_indices[indices.kv_indptr[b] : indices.kv_indptr[b + 1]].tolist()
            assert len(pages) == kv_len and indices.qo_indptr[b + 1] - indices.qo_indptr[b] == q_len
            mask = np.unpackbits(bits[starts[b] : starts[b + 1]], count=q_len * kv_len, bitorder="little")
            for j, row in enumerate(mask.reshape(q_len, kv_len)):
                assert expected[token] == pages[: kv_len - q_len + j + 1]  # causal from the bottom right
                assert expected[token] == [page for page, bit in zip(pages, row, strict=True) if bit]
                token += 1


def test_a_tree_sees_its_ancestors_and_all_that_came_before():
    segments = [Segment(0, 2, [0] * 3, 3, [-1, 0, 0]), Segment(1, 0, [0] * 2, 2)]
    bits, starts = packed_masks(pack(segments, random_table(2, 0)))
    assert starts.tolist() == [0, 2, 3] and starts.dtype == np.int32  # 15 and 4 bits, each row on a whole byte
    seen = np.unpackbits(bits[:2], count=15, bitorder="little").reshape(3, 5)
    assert seen.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert np.unpackbits(bits[2:], count=4, bitorder="little").tolist() == [1, 0, 1, 1]


class FakeWrapper:
    """A FlashInfer wrapper in torch. It reads what it was given and nothing else; `calls` is a record."""

    calls: list[tuple[str, str, tuple, dict]] = []
    kind = ""

    def __init__(self, *args, **kwargs) -> None:
        self.note("__init__", args, kwargs)
        self.graph = kwargs.get("use_cuda_graph", False)
        self._int_workspace_buffer = torch.zeros(1)
        self._pin_memory_int_workspace_buffer, self.ready = None, False
        self.buffers = {name: kwargs.get(f"paged_kv_{name}_buffer") for name in ("indptr", "indices", "last_page_len")}

    def note(self, name: str, args: tuple, kwargs: dict) -> None:
        FakeWrapper.calls.append((self.kind, name, args, kwargs))

    def plan(self, *args, **kwargs) -> None:
        self.note("plan", args, kwargs)
        q_len = kwargs.get("q_len_per_req")
        kv_indptr, indices, last = args[:3] if self.graph else args[1:4]
        tensors = [indices, *args[: 3 if self.graph else 4]]
        assert all(tensor.dtype == torch.int32 for tensor in tensors) and kwargs["q_data_type"] == torch.float32
        self.qo = torch.arange(len(last) + 1) * q_len if self.graph else args[0]
        self.causal, self._custom_mask_buf, self._mask_indptr_buf = self.graph or kwargs["causal"], None, None
        if self.graph:
            assert len(self.buffers["indptr"]) == len(kv_indptr) and len(self.buffers["last_page_len"]) == len(last)
            self.buffers["indptr"].copy_(kv_indptr)
            self.buffers["indices"][: len(indices)].copy_(indices)
        else:
            self.buffers |= {"indptr": kv_indptr, "indices": indices}
        assert (last == 1).all() and self._pin_memory_int_workspace_buffer is not None
        self.scale = kwargs["sm_scale"]

    def run(self, q, caches, **kwargs) -> torch.Tensor:
        self.note("run", (q, caches), kwargs)
        k_cache, v_cache = (cache.squeeze(1) for cache in caches)
        assert q.is_contiguous() and caches[0].shape[1] == 1
        for b in range(len(self.qo) - 1):
            rows, (first, last) = slice(self.qo[b], self.qo[b + 1]), self.buffers["indptr"][b : b + 2]
            slots = self.buffers["indices"][first:last].long()
            keys, values = (
                cache[slots].repeat_interleave(q.shape[1] // cache.shape[1], 1) for cache in (k_cache, v_cache)
            )
            n, length = len(q[rows]), len(slots)
            seen = torch.arange(length) <= torch.arange(length - n, length)[:, None]
            if self._custom_mask_buf is not None:
                bits = self._custom_mask_buf[self._mask_indptr_buf[b] : self._mask_indptr_buf[b + 1]].numpy()
                seen = torch.from_numpy(np.unpackbits(bits, count=n * length, bitorder="little")).bool().view(n, length)
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * self.scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            kwargs["out"][rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return kwargs["out"]


class FakePrefill(FakeWrapper):
    kind = "BatchPrefillWithPagedKVCacheWrapper"


class FakeDecode(FakeWrapper):
    kind = "BatchDecodeWithPagedKVCacheWrapper"


class FakeLatent(FakeWrapper):
    """The wrapper for latents: other names, lengths in place of last pages, two parts of queries and of the cache."""

    kind = "BatchMLAPagedAttentionWrapper"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.buffers = {name: kwargs.get(name) for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, *sizes, **kwargs) -> None:
        given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self.note("plan", (*given, num_heads, *sizes), kwargs)
        assert all(tensor.dtype == torch.int32 for tensor in given) and kwargs["q_data_type"] == torch.float32
        assert kwargs["causal"] and self._pin_memory_int_workspace_buffer is not None
        assert len(kv_indices) == kv_indptr[-1] and (kv_indptr.diff() == kv_len_arr).all()
        for (name, buffer), tensor in zip(self.buffers.items(), given, strict=True):
            if self.graph:
                assert name == "kv_indices" or len(buffer) == len(tensor)
                buffer[: len(tensor)].copy_(tensor)
            else:
                self.buffers[name] = tensor
        self.scale, self.sizes, self.num_heads = kwargs["sm_scale"], sizes, num_heads

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out) -> torch.Tensor:
        self.note("run", (q_nope, q_pe, ckv_cache, kpe_cache), {"out": out})
        R, r, page_size = self.sizes
        assert page_size == ckv_cache.shape[1] == kpe_cache.shape[1] == 1 and q_nope.shape[1] == self.num_heads
        assert (q_nope.shape[-1], q_pe.shape[-1], ckv_cache.shape[-1], kpe_cache.shape[-1]) == (R, r, R, r)
        assert out.shape == q_nope.shape and out.is_contiguous() and q_pe.stride(-1) == kpe_cache.stride(-1) == 1
        qo, starts, indices, lengths = self.buffers.values()
        for b, length in enumerate(lengths.tolist()):
            rows, slots = slice(qo[b], qo[b + 1]), indices[starts[b] : starts[b] + length].long()
            latents, turned = ckv_cache[slots, 0], kpe_cache[slots, 0]
            scores = torch.einsum("qhd,kd->hqk", q_nope[rows], latents) + torch.einsum(
                "qhd,kd->hqk", q_pe[rows], turned
            )
            n = len(q_nope[rows])
            seen = torch.arange(length) <= torch.arange(length - n, length)[:, None]
            weights = (scores * self.scale).masked_fill(~seen, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,kd->qhd", weights, latents)
        return out


class FakeEvent:
    """An event that complains when it is not recorded in turn with being waited for."""

    def __init__(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.recorded = False

    def record(self) -> None:
        self.recorded = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakePrefill
    module.BatchDecodeWithPagedKVCacheWrapper = FakeDecode
    module.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeLatent)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(backend, "_pinned", torch.from_numpy)
    monkeypatch.setattr(backend, "_plan_buffer", lambda: (torch.zeros(1), FakeEvent()))
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(backend, "GRAPH_SLOTS", 4096)
    FakeWrapper.calls = []
    return module


def attention_of(heads: tuple[int, int, int]) -> FlashInferAttention:
    return FlashInferAttention(*heads, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 16), (4, 4, 8)])
def test_any_mix_of_rows_equals_the_textbook(fake, heads, graph):
    (Hq, Hkv, D), rng = heads, np.random.default_rng(2)
    torch.manual_seed(0)
    attention = attention_of(heads)
    for _ in range(8):
        layout, table = random_step(rng, [4] if graph else [1, 1, 2, 5, 33])
        N = int(layout.q_lens.sum())
        k_cache, v_cache = (torch.randn(4096, Hkv, D) for _ in range(2))
        q, k, v = (torch.randn(N, h, D) for h in (Hq, Hkv, Hkv))
        plan = attention.plan(layout, table, graph=graph)
        if graph:
            assert plan.new_slots is None
            plan.new_slots = torch.from_numpy(layout.slots)
        out, first = attention.run(plan, k_cache, v_cache, q.transpose(0, 1).contiguous().transpose(0, 1), k, v), 0
        for row, q_len, kv_len in zip(layout.table_rows, layout.q_lens, layout.kv_lens, strict=True):
            rows, slots = slice(first, first + q_len), table[row, :kv_len]
            assert torch.equal(k_cache[slots[kv_len - q_len :]], k[rows])
            expected = textbook(q[rows], k_cache[slots], v_cache[slots])
            assert (out[rows].double() - expected).abs().max() < 2e-5
            first += q_len
    made = [call for call in FakeWrapper.calls if call[1] == "__init__" and call[0] == FakeDecode.kind]
    sizes = {len(call[2][2]) for call in FakeWrapper.calls if call[0] == FakeDecode.kind and call[1] == "plan"}
    assert len(made) == len(sizes)  # one wrapper for each batch size, and then the same again


def test_a_tree_is_handed_to_the_kernel_as_bits(fake):
    attention, table = attention_of((2, 1, 8)), random_table(2, 0)
    layout = pack([Segment(0, 9, [0] * 3, 3), Segment(1, 2, [0], 1)], table)
    torch.manual_seed(0)
    caches, (q, k, v) = [torch.randn(4096, 1, 8) for _ in range(2)], (torch.randn(4, h, 8) for h in (2, 1, 1))
    chain = attention.run(attention.plan(layout, table), *caches, q, k, v).clone()
    branched = pack([Segment(0, 9, [0] * 3, 3, [-1, 0, 0]), Segment(1, 2, [0], 1)], table)
    tree = attention.run(attention.plan(branched, table), *caches, q, k, v).clone()
    same = [bool((chain[i] - tree[i]).abs().max() < 1e-6) for i in range(4)]
    assert same == [True, True, False, True]  # the third token does not see the second
    lone = pack([Segment(0, 9, [0, 0], 2)], table)
    third = attention.run(attention.plan(lone, table), *caches, q[[0, 2]], k[[0, 2]], v[[0, 2]])[1]
    assert (tree[2] - third).abs().max() < 1e-6
    after = attention.run(attention.plan(layout, table), *caches, q, k, v)
    assert torch.equal(after, chain)  # no mask is left over


def test_a_plan_buffer_is_not_written_before_its_copy_is_done(fake):
    attention, table = attention_of((2, 1, 8)), random_table(1, 0)
    layout, used = pack([Segment(0, 3, [0], 1)], table), []
    for _ in range(2 * backend.PLAN_BUFFERS):
        attention.plan(layout, table, graph=bool(len(used) % 2))
        used.append(attention._buffers[-1][0].data_ptr())
    assert len(set(used)) == backend.PLAN_BUFFERS and used[: backend.PLAN_BUFFERS] == used[backend.PLAN_BUFFERS :]


def latent_attention(num_heads: int, sizes: tuple[int, int]) -> FlashInferLatentAttention:
    made = make_attention("flashinfer", num_heads, 1, sum(sizes), dtype=torch.float32, device=CPU, latent=sizes)
    assert isinstance(made, FlashInferLatentAttention) and made.name == "flashinfer"
    return made


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("num_heads,sizes", [(5, (16, 4)), (2, (8, 8))])
def test_latents_of_any_mix_of_rows_equal_the_textbook(fake, num_heads, sizes, graph):
    (R, r), rng = sizes, np.random.default_rng(4)
    torch.manual_seed(0)
    attention = latent_attention(num_heads, sizes)
    for _ in range(8):
        layout, table = random_step(rng, [4] if graph else [1, 1, 2, 5, 33])
        N = int(layout.q_lens.sum())
        cache, empty = torch.randn(4096, 1, R + r), torch.empty(4096, 1, 0)
        q, k = torch.randn(N, num_heads, R + r), torch.randn(N, 1, R + r)
        plan = attention.plan(layout, table, graph=graph)
        if graph:
            assert plan.new_slots is None
            plan.new_slots = torch.from_numpy(layout.slots)
        out, first = attention.run(plan, cache, empty, q, k, k[..., :R]), 0
        assert out.shape == (N, num_heads, R)
        for row, q_len, kv_len in zip(layout.table_rows, layout.q_lens, layout.kv_lens, strict=True):
            rows, slots = slice(first, first + q_len), table[row, :kv_len]
            assert torch.equal(cache[slots[kv_len - q_len :]], k[rows])
            expected = textbook(q[rows], cache[slots], cache[slots])[..., :R]
            assert (out[rows].double() - expected).abs().max() < 2e-5
            first += q_len
    made = [call for call in FakeWrapper.calls if call[1] == "__init__" and call[3].get("use_cuda_graph")]
    sizes = {len(call[2][3]) for call in FakeWrapper.calls if call[0] == FakeLatent.kind and call[1] == "plan"}
    assert len(made) == (len(sizes) if graph else 0)


def test_a_tree_over_latents_is_computed_by_torch(fake):
    attention, table = latent_attention(2, (8, 4)), random_table(2, 0)
    torch.manual_seed(0)
    cache, empty = torch.randn(4096, 1, 12), torch.empty(4096, 1, 0)
    q, k = torch.randn(4, 2, 12), torch.randn(4, 1, 12)
    torch_attention = TorchAttention(2, 1, dtype=torch.float32, device=CPU)
    for parents in ([-1, 0, 0], None):
        layout = pack([Segment(0, 9, [0] * 3, 3, parents), Segment(1, 2, [0], 1)], table)
        planned = len([call for call in FakeWrapper.calls if call[1] == "plan"])
        got = attention.run(attention.plan(layout, table), cache, empty, q, k, k[..., :8])
        expected = torch_attention.run(torch_attention.plan(layout, table), cache, empty, q, k, k[..., :8])
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        assert len([call for call in FakeWrapper.calls if call[1] == "plan"]) - planned == (parents is None)


def test_the_small_deepseek_runs_on_flashinfers_plans(fake, monkeypatch, tmp_path):
    """Its own module drafts, every step and every draft through the wrappers for latents."""
    write_tiny_checkpoint(tmp_path, "deepseek_v3", max_shard_size="60KB")
    add_shard(tmp_path, mtp_tensors(*their_mtp(tmp_path)))
    prompts = [[5, 9, 13, 2, 7], [3, 3, 3], list(range(4, 30))]
    speculative = {"draft_model": "mtp", "candidate_length": 3}
    plain = make(tmp_path, speculative).generate(prompts, greedy(12))
    assert FakeWrapper.calls == []
    monkeypatch.setattr("minispec.runner.choose_attention", lambda *args, **where: ("flashinfer", "a fake"))
    llm = make(tmp_path, speculative, page_size=4, chunked_prefill_size=9)
    programs = record(llm, k=3)
    assert [o.token_ids for o in llm.generate(prompts, greedy(12))] == [o.token_ids for o in plain]
    assert {kind for kind, *_ in FakeWrapper.calls} == {FakeLatent.kind} and llm.metrics().drafter_faults == 0
    assert all(program.replays > 1 for program in programs)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_our_calls_for_latents_fit_the_real_signatures(monkeypatch: pytest.MonkeyPatch):
    import flashinfer.mla

    real = flashinfer.mla.BatchMLAPagedAttentionWrapper
    with monkeypatch.context() as patch:
        fake.__wrapped__(types.SimpleNamespace(setattr=patch.setattr, setitem=patch.setitem))
        attention, table = latent_attention(2, (512, 64)), random_table(2, 0)
        layout = pack([Segment(0, 3, [0, 0], 1), Segment(1, 9, [0, 0], 1)], table)
        for graph in (False, True):
            plan = attention.plan(layout, table, graph=graph)
            plan.new_slots = torch.from_numpy(layout.slots)
            k = torch.zeros(4, 1, 576)
            attention.run(
                plan, torch.zeros(4096, 1, 576), torch.zeros(4096, 1, 0), k.expand(4, 2, 576), k, k[..., :512]
            )
        calls = list(FakeWrapper.calls)
    assert [name for _, name, *_ in calls] == ["__init__", "plan", "run"] * 2
    for _, name, args, kwargs in calls:
        inspect.signature(getattr(real, name)).bind(None, *args, **kwargs)
    source = inspect.getsource(real)
    names = ("_pin_memory_int_workspace_buffer", "_int_workspace_buffer")
    assert all(f"self.{name}" in source for name in names)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_our_calls_fit_the_real_signatures(monkeypatch: pytest.MonkeyPatch):
    import flashinfer

    real = {name: getattr(flashinfer, name) for name in (FakePrefill.kind, FakeDecode.kind)}
    with monkeypatch.context() as patch:
        request = types.SimpleNamespace(**{"setattr": patch.setattr, "setitem": patch.setitem})
        fake.__wrapped__(request)
        attention, table = attention_of((2, 1, 64)), random_table(2, 0)
        layout = pack([Segment(0, 3, [0, 0], 1), Segment(1, 9, [0, 0], 1)], table)
        tree = pack([Segment(0, 3, [0, 0], 1, [-1, -1]), Segment(1, 9, [0, 0], 1)], table)
        for graph in (False, True):
            plan = attention.plan(layout if graph else tree, table, graph=graph)
            plan.new_slots = torch.from_numpy(layout.slots)
            tensors = [torch.zeros(4, heads, 64) for heads in (2, 1, 1)]
            attention.run(plan, torch.zeros(4096, 1, 64), torch.zeros(4096, 1, 64), *tensors)
        calls = list(FakeWrapper.calls)
    assert {(kind, name) for kind, name, *_ in calls} == {
        (kind, name) for kind in real for name in ("__init__", "plan", "run")
    }
    for kind, name, args, kwargs in calls:
        decode_plan = kind == FakeDecode.kind and name == "plan"
        function = getattr(real[kind], "_plan_impl" if decode_plan else name)  # plan itself takes whatever comes
        bound = inspect.signature(function).bind(None, *args, **kwargs)
        assert decode_plan is False or "q_len_per_req" in bound.arguments
    source = "".join(inspect.getsource(kind) for kind in real.values())
    names = ("_pin_memory_int_workspace_buffer", "_int_workspace_buffer", "_custom_mask_buf", "_mask_indptr_buf")
    assert all(f"self.{name}" in source for name in names)


class Forbidden:
    """A finder of modules that knows one which may not be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "flashinfer":
            raise ImportError("not here")


@pytest.mark.parametrize(
    "device,head_dim,dtype,fragment",
    [
        (CPU, 64, torch.bfloat16, "needs CUDA, and the device is 'cpu'"),
        (CUDA, 32, torch.bfloat16, "heads of 64, 128, 256 numbers, not 32"),
        (CUDA, 64, torch.float32, "not float32"),
        (CUDA, 64, torch.bfloat16, "cannot be imported: not here"),
    ],
)
def test_what_flashinfer_cannot_do_falls_to_torch_or_is_refused(monkeypatch, device, head_dim, dtype, fragment):
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Forbidden(), *sys.meta_path])
    name, reason = choose_attention("auto", head_dim, dtype, device)
    assert name == "torch" and fragment in reason
    assert choose_attention("torch", head_dim, dtype, device) == ("torch", "asked for")
    with pytest.raises(ConfigError, match="attention_backend 'flashinfer' cannot be used: .*take 'torch'"):
        choose_attention("flashinfer", head_dim, dtype, device)


def test_latents_of_other_sizes_fall_to_torch_or_are_refused(fake):
    where = {"dtype": torch.bfloat16, "device": CUDA}
    assert choose_attention("auto", 576, latent=(512, 64), **where)[0] == "flashinfer"
    for latent in ((256, 64), (512, 32), (64, 512)):
        name, reason = choose_attention("auto", sum(latent), latent=latent, **where)
        assert name == "torch" and f"512 + 64 numbers, not {latent[0]} + {latent[1]}" in reason
        with pytest.raises(ConfigError, match="attention_backend 'flashinfer' cannot be used: .*take 'torch'"):
            choose_attention("flashinfer", sum(latent), latent=latent, **where)


def test_flashinfer_is_taken_where_it_can_be_had(fake):
    assert choose_attention("auto", 128, torch.float16, CUDA)[0] == "flashinfer"
    assert choose_attention("flashinfer", 64, torch.bfloat16, CUDA) == ("flashinfer", "asked for")
    assert choose_attention("torch", 64, torch.bfloat16, CUDA)[0] == "torch"


def test_the_options_are_checked_at_the_border(tiny):  # noqa: F811
    for bad in ({"attention_backend": "triton"}, {"enable_cuda_graphs": 1}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            EngineConfig(**bad)
    with pytest.raises(ConfigError, match="FlashInfer needs CUDA.*take 'torch'"):
        LLM(str(tiny[0]), device="cpu", attention_backend="flashinfer")
    assert make(tiny[0], None).attention == "torch (FlashInfer needs CUDA, and the device is 'cpu')"


def test_a_cpu_never_imports_flashinfer(monkeypatch, tiny):  # noqa: F811
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Forbidden(), *sys.meta_path])
    make(tiny[0], None).generate(tiny[2][:1], greedy(2))
    with pytest.raises(ImportError):
        import flashinfer  # noqa: F401


# Padding and graphs ------------------------------------------------------------------------------------------------


def test_batch_sizes_of_graphs_double_up_to_the_largest():
    assert graph_batches(16) == [1, 2, 4, 8, 16] and graph_batches(17) == [1, 2, 4, 8, 16, 17]
    for most in range(1, 70):
        sizes = graph_batches(most)
        assert sizes[0] == 1 and sizes[-1] == most and all(b <= 2 * a for a, b in zip(sizes, sizes[1:], strict=False))


def test_padding_changes_no_token_and_writes_to_the_spare_slot():
    rng, spare, checked = np.random.default_rng(3), 9999, 0
    for _ in range(200):
        layout, table = random_step(rng, [1, 2, 3, 4])
        batch, q_len = len(layout.q_lens) + int(rng.integers(0, 3)), int(layout.q_lens.max()) + int(rng.integers(0, 2))
        if layout.kv_lens.min() < q_len:
            continue
        checked += 1
        whole, places = padded(layout, batch, q_len, spare)
        assert all(len(array) == batch * q_len for array in (whole.token_ids, whole.positions, whole.slots))
        for before, after in ((layout.token_ids, whole.token_ids), (layout.positions, whole.positions)):
            assert (after[places] == before).all()
        assert (whole.slots[places] == layout.slots).all() and (np.diff(places) > 0).all()
        assert (places[layout.logit_rows] == whole.logit_rows).all()
        padding = np.setdiff1d(np.arange(batch * q_len), places)
        assert (whole.slots[padding] == spare).all() and (whole.positions >= 0).all()
        assert (whole.kv_lens >= q_len).all() and (whole.q_lens == q_len).all()
        assert (whole.kv_lens[: len(layout.q_lens)] == layout.kv_lens).all()
        seen, seen_padded = seen_by_torch(layout, table), seen_by_torch(whole, table)
        assert [seen_padded[place] for place in places] == seen
        real = {slot for slots in seen for slot in slots}
        assert {slot for slots in seen_padded for slot in slots} <= real  # padding reads nothing but what is there
    assert checked > 100


def record(llm: LLM, batches: Sequence[int] = (1, 3, 6), k: int = 4) -> list:
    """Let everything that can be captured run from buffers; returns the programs."""
    runner, drafters = llm.engine.runner, [d for d in llm.engine.drafters if isinstance(d, ModelDrafter)]
    runner.record(batches, k)
    programs = [runner.program]
    for drafter in drafters:
        drafter.record(batches, k)
        programs += [drafter._program(depth) for depth in range(k)]
    return programs


@pytest.mark.parametrize("kind", ["mtp", "chain", "early-exit", "itself"])
@pytest.mark.parametrize("page_size,params", [(1, greedy()), (4, hot())], ids=["greedy", "sampled"])
def test_replays_give_what_eager_steps_give(tiny, kind, page_size, params):  # noqa: F811
    folder, _, prompts, expected = tiny
    options = {"page_size": page_size, "max_num_seqs": 5, "chunked_prefill_size": 9}
    eager, padded_llm = (make(folder, config_for(kind, tiny) | {"candidate_length": 4}, **options) for _ in range(2))
    programs = record(padded_llm)
    spare = padded_llm.engine.pool.num_slots
    assert padded_llm.engine.runner.tenant.cache.k.shape[1] == spare + 1
    for _ in range(2):  # cold, then on cached prefixes
        results = [llm.generate(prompts, params) for llm in (eager, padded_llm)]
        for plain, replayed, (ids, margin) in zip(*results, expected, strict=True):
            assert plain.token_ids == replayed.token_ids
            assert plain.metrics.speculation.accepted == replayed.metrics.speculation.accepted
            if params.greedy:
                assert_same_ids(replayed.token_ids, ids, margin)
        assert (padded_llm.engine.pool.table.slots < spare).all()
    assert all(program.replays > 5 for program in programs), [program.replays for program in programs]
    assert padded_llm.metrics().drafter_faults == 0
    for llm in (eager, padded_llm):
        assert_idle(llm.engine)


def test_plain_decoding_replays_every_step_but_the_prompts(tiny):  # noqa: F811
    folder, _, prompts, expected = tiny
    llm = make(folder, None, max_num_seqs=6)
    [program] = record(llm, k=0)
    for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    assert set(program.recordings) == {(1, 1), (3, 1), (6, 1)}
    assert program.replays >= MAX_TOKENS - 1


def test_logits_do_not_depend_on_padding(tiny):  # noqa: F811
    llm = make(tiny[0], None)
    runner, rng = llm.engine.runner, np.random.default_rng(0)
    table = np.random.default_rng(1).permutation(1024)[:600].reshape(6, 100)
    runner.tenant.cache.k.normal_()
    runner.tenant.cache.v.normal_()
    runner.program.record([(2, 1), (8, 1), (8, 4)])
    for lengths in ([1], [1, 1, 1], [4, 4], [1, 3, 2, 4, 1]):
        segments = [
            Segment(row, int(rng.integers(4, 90)), rng.integers(0, 50, n).tolist(), n) for row, n in enumerate(lengths)
        ]
        before = [runner.tenant.cache.k.clone(), runner.tenant.cache.v.clone()]
        with torch.inference_mode():
            layout, replays = pack(segments, table), runner.program.replays
            got = runner.program(layout, table)
            assert runner.program.replays == replays + 1
            written = runner.tenant.cache.k[:, :-1].clone()
            runner.tenant.cache.k.copy_(before[0])
            runner.tenant.cache.v.copy_(before[1])
            recordings, runner.program.recordings = runner.program.recordings, {}
            expected = runner.program(layout, table)
            runner.program.recordings = recordings
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(written, runner.tenant.cache.k[:, :-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths,starts,fits",
    [
        ([1, 1], [5, 5], True),
        ([1] * 5, [5] * 5, False),
        ([4, 1], [5, 9], True),
        ([5], [9], False),
        ([4, 1], [5, 2], False),
    ],
)
def test_a_step_that_fits_no_graph_runs_eagerly(tiny, lengths, starts, fits):  # noqa: F811
    program = make(tiny[0], None).engine.runner.program
    program.record([(4, 1), (4, 4)])
    table = np.arange(400).reshape(5, 80)
    segments = [Segment(row, start, [0] * n, n) for row, (start, n) in enumerate(zip(starts, lengths, strict=True))]
    with torch.inference_mode():
        assert len(program(pack(segments, table), table)) == sum(lengths)
    assert program.replays == fits


def test_a_row_whose_logits_nobody_wants_brings_none(tiny):  # noqa: F811
    program = make(tiny[0], config_for("itself", tiny)).engine.drafters[0].program
    program.record([(1, 1)])
    table = np.arange(100).reshape(1, 100)
    with torch.inference_mode():
        assert len(program(pack([Segment(0, 5, [0], 0)], table), table)) == program.replays == 0
        assert len(program(pack([Segment(0, 5, [0], 1)], table), table)) == program.replays == 1


@pytest.mark.parametrize("kind", ["mtp", "itself"])
def test_the_whole_engine_runs_on_flashinfers_plans(fake, tiny, monkeypatch, kind):  # noqa: F811
    """Eager mixes through the prefill wrapper, everything else through captured shapes; the ids are the reference's."""
    monkeypatch.setattr("minispec.runner.choose_attention", lambda *args, **where: ("flashinfer", "a fake"))
    folder, _, prompts, expected = tiny
    llm = make(folder, config_for(kind, tiny) | {"candidate_length": 3}, page_size=4, chunked_prefill_size=9)
    programs = record(llm, k=3)
    for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    assert llm.metrics().drafter_faults == 0 and all(program.replays > 1 for program in programs)
    assert kind == "mtp" or llm.metrics().acceptance_rate == 1


def test_a_history_that_the_graphs_buffer_cannot_hold_runs_eagerly(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr("minispec.graphs.GRAPH_SLOTS", 20)
    program = make(tiny[0], None).engine.runner.program
    program.record([(2, 1)])
    table = np.arange(100).reshape(1, 100)
    for start, replays in ((10, 1), (18, 1), (5, 2)):
        with torch.inference_mode():
            program(pack([Segment(0, start, [0], 1)], table), table)
        assert program.replays == replays


# What the host does not know yet -----------------------------------------------------------------------------------


def test_known_tokens_stand_in_for_what_the_host_has_not_seen():
    known = torch.tensor([7, -1, 9])
    ids = torch.tensor([4, UNKNOWN, -1, UNKNOWN - 2, UNKNOWN - 1])
    assert known_tokens(ids, known).tolist() == [4, 7, -1, 9, -1]
    assert known_tokens(ids, None) is ids
    assert Proposal([[UNKNOWN - 2, 5], []], known=known).on_host() == [[9, 5], []]


def test_a_draft_that_is_no_token_is_never_kept():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    zero = torch.zeros(2, dtype=torch.float64)
    where = torch.tensor([0]), torch.tensor([1])
    for q in (None, torch.tensor([[1.0, 0.0], [1.0, 0.0]])):
        for draft, accepted in ((0, 1), (-1, 0)):
            verdict = verify(p, q, torch.tensor([draft, -1]), *where, zero, zero)
            assert verdict.accepted.tolist() == [accepted] and verdict.next_ids.tolist() == [0]


@pytest.mark.parametrize("sampling", [greedy(), hot()], ids=["greedy", "sampled"])
def test_a_draft_model_that_loses_its_numbers_is_counted_and_switched_off(tiny, sampling):  # noqa: F811
    folder, _, prompts, _ = tiny
    speculative = config_for("mtp", tiny) | {"candidate_length": 3, "max_retry_attempts": 1}
    llm, plain = make(folder, speculative | {"verification": "match"}), make(folder, None)
    llm.engine.drafters[0].modules[0].norm.weight.fill_(torch.nan)
    got = llm.generate(prompts, sampling)
    assert [o.token_ids for o in got] == [o.token_ids for o in plain.generate(prompts, sampling)]
    assert all(o.finish_reason == "length" for o in got)
    metrics = llm.metrics()
    assert metrics.drafters_off == ["mtp"] and metrics.drafter_faults > 1 and metrics.speculation.accepted == 0


WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "__bool__", "__int__", "__float__", "__index__")


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts, by name, what would make the host wait for a GPU."""

    OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        booleans = name in ("index", "index_put", "index_put_") and any(
            tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in args[1]
        )
        if booleans or any(name.startswith(op) for op in self.OPS):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch):
    """count(llm) -> (waits inside of jobs, and between them: one for each job at most)."""

    def count(llm: LLM) -> list[str]:
        seen: list[str] = []
        submit, inside = llm.engine.device.submit, []
        for name in WAITS:
            original = getattr(torch.Tensor, name)

            def counted(self, *args, name=name, original=original, **kwargs):
                if inside:
                    seen.append(name)
                return original(self, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, counted)

        def submitted(job):
            def watched(watch):
                inside.append(True)
                try:
                    with Waits() as mode:
                        return job(watch)
                finally:
                    inside.pop()
                    seen.extend(mode.seen)

            flight = submit(watched)
            wait = flight.wait

            def waited():
                seen.append("wait")
                return wait()

            flight.wait = waited
            return flight

        llm.engine.device.submit = submitted
        return seen

    return count


@pytest.mark.parametrize("kind", ["mtp", "chain", "early-exit", "itself", None])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=2.0, logprobs=2, seed=1, max_tokens=12, ignore_eos=True),
    ],
    ids=["greedy", "filtered", "logprobs"],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_one_wait_in_a_round(tiny, waits, monkeypatch, kind, params, graphs):  # noqa: F811
    folder, _, prompts, _ = tiny
    monkeypatch.setattr(distribution, "NUCLEUS_WIDTH", 1 << 30)  # as on a GPU, which sorts all
    llm = make(folder, config_for(kind, tiny) if kind else None, enable_overlap=False, check_every_step=False)
    if graphs:
        record(llm)
    seen = waits(llm)
    llm.generate(prompts, params)
    assert seen == ["wait"] * llm.metrics().steps and len(seen) > 4


def test_the_counter_of_waits_sees_them(tiny, waits):  # noqa: F811
    """Ending a draft by its confidence, and penalties, need the tokens: the host waits once for each depth."""
    folder, _, prompts, _ = tiny
    for speculative, params in (
        ({"draft_confidence_threshold": 0.01}, greedy()),
        ({}, SamplingParams(temperature=0, frequency_penalty=0.1, max_tokens=12, ignore_eos=True)),
    ):
        llm = make(folder, config_for("mtp", tiny) | speculative, enable_overlap=False)
        seen = waits(llm)
        llm.generate(prompts[:1], params)
        assert seen.count("tolist") >= llm.metrics().draft_forwards


# Memory ------------------------------------------------------------------------------------------------------------


def test_slots_pay_for_every_tenant_and_for_what_is_not_slots():
    plain = sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=0)
    assert plain == 80
    assert sizing.slots_that_fit(1000, 4000, target=10, others=10, fixed=0) == plain // 2
    assert sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=400) == plain // 2
    assert sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=0, fraction=0.9) == 60
    assert sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=0, reserve=0.25) == plain * 3 // 4
    assert sizing.slots_that_fit(1000, 4000, target=10, others=10, fixed=0, reserve=0.25) == plain // 2
    assert sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=5000) == 0
    assert sizing.slots_that_fit(1000, 4000, target=10, others=0, fixed=0, fraction=0.1) == 0
    rng = np.random.default_rng(0)
    for _ in range(200):
        free, target, others, fixed = (int(rng.integers(1, n)) for n in (10**6, 90, 90, 10**5))
        slots = sizing.slots_that_fit(free, 10**6, target=target, others=others, fixed=fixed, reserve=0.2)
        assert slots * (target + others) + fixed <= free or slots == 0
        assert slots * target <= free * 0.8 * 0.8


def test_a_step_pays_for_its_rows_and_for_its_logits():
    assert sizing.step_bytes(100, 8, 0, 1000, 2) == 1600
    assert sizing.step_bytes(100, 0, 3, 1000, 2) == 3 * 1000 * (sizing.SAMPLING_BYTES + sizing.GRAPH_BYTES + 2)
    for most, k in ((1, 0), (16, 3), (33, 8)):  # logits that all graphs keep: the target's, and the draft's by depth
        target = sum(batch * q for batch in graph_batches(most) for q in {1, k + 1})
        draft = sum(batch * (2 if depth == 0 else 1) for batch in graph_batches(most) for depth in range(k))
        assert 4 * (target + draft) <= sizing.GRAPH_BYTES * most * (k + 1)


@pytest.mark.parametrize("kind,modules", [("mtp", 1), ("chain", 3), ("early-exit", 0), ("itself", 0), (None, 0)])
def test_the_pool_of_a_gpu_counts_what_the_tensors_really_take(tiny, monkeypatch, kind, modules):  # noqa: F811
    """What the sizing takes for a slot is what tenants and hidden pools allocate for one."""
    folder, _, _, _ = tiny
    llm = make(folder, config_for(kind, tiny) | {"candidate_length": 4} if kind else None)
    runner, drafters = llm.engine.runner, llm.engine.drafters
    tenants = [runner.tenant, *(t for d in drafters for t in getattr(d, "tenants", [getattr(d, "tenant", None)]) if t)]
    pools = drafters[0].hidden if modules else []
    real = sum(t.cache.bytes_per_slot for t in tenants) + sum(p.shape[1] * p.element_size() for p in pools)
    asked = {}
    monkeypatch.setattr("minispec.llm.slots_that_fit", lambda free, total, **rest: asked.update(rest) or 512)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    from minispec.speculative.build import prepare_drafters

    prepared = prepare_drafters(
        llm.config.speculative_config, types.SimpleNamespace(
            model=llm.model, config=llm.model_config, tokenizer=llm.tokenizer, source=str(folder),
                shard=WHOLE,
        ), dtype=torch.float32, device=CPU,
    )  # fmt: skip
    llm.device = CUDA
    assert llm._default_cache_tokens(64, prepared) == 512
    assert asked["target"] + asked["others"] == real and asked["fixed"] > 0
    assert sum(each.attentions for each in prepared) == len(tenants) - 1
