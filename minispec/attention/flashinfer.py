"""Paged attention on a GPU, by FlashInfer's FA2 kernels.

FlashInfer works in two halves: `plan` divides the work of a step among the GPU's processors (on the host, from lengths
alone), `run` computes one layer. One prefill wrapper serves any mix of rows: its causal mask is aligned at the last
token of each row, so prompt chunks, single tokens and chains of drafts need no mask of their own. Inside a CUDA graph
the grid must not change, so every captured shape of B rows of q_len tokens has a wrapper of its own. DeepSeek's latents
(models/deepseek.py) have other kernels, which take one kind of wrapper for both and know no masks of trees.

What holds it together, each a wrong answer otherwise:
- Attention sees slots: a page is one slot, and all index tensors are int32 (others are read as if they were).
- `plan` stages in page-locked memory what a copy brings to the GPU later. Such a buffer is written again only when its
  event says that the copy is done.
- Workspaces are shared by all wrappers, so every run or replay follows its own plan, on the same stream.

Knows: FlashInfer's interface (0.6.18). Does not know: what a row is for, who owns a slot, when graphs are captured.
It imports FlashInfer when an attention is made, never before. Taught in notebook 13 (everything on).

FlashInfer: Ye et al. 2025. FA2: Dao 2023, FlashAttention-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from minispec.attention.torch_backend import TorchAttention
from minispec.core import StepLayout
from minispec.device import upload

HEAD_SIZES = (64, 128, 256)  # that FA2 kernels exist for
LATENT_SIZES = (512, 64)  # that the kernels for latents exist for: of the latent, and of the key that is turned
WORKSPACE_BYTES = 128 << 20  # for partial results of long rows that several processors share
PLAN_BYTES = 8 << 20  # for what a plan says
PLAN_BUFFERS = 8  # a round of drafts plans once for each of its tokens, and should not wait for the first plan's copy
GRAPH_SLOTS = 1 << 20  # positions that the rows of a captured step may attend to, all together
DEVICE_BYTES = WORKSPACE_BYTES + PLAN_BYTES + 4 * GRAPH_SLOTS  # that one attention takes of the GPU


def obstacle(
    head_dim: int, dtype: torch.dtype, device: torch.device, latent: tuple[int, int] | None = None
) -> str | None:
    """What keeps FlashInfer from serving such a model on that device; None: nothing. latent: see `choose_attention`."""
    if device.type != "cuda":
        return f"FlashInfer needs CUDA, and the device is {str(device)!r}"
    if latent and latent != LATENT_SIZES:
        wanted, got = (f"{size} + {turned}" for size, turned in (LATENT_SIZES, latent))
        return f"FlashInfer's kernels for latents are for {wanted} numbers, not {got}"
    if not latent and head_dim not in HEAD_SIZES:
        return f"FlashInfer's kernels are for heads of {', '.join(map(str, HEAD_SIZES))} numbers, not {head_dim}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer computes in float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # whatever its own imports may raise
        return f"FlashInfer (package flashinfer-python) cannot be imported: {error}"
    return None


class PagedIndices(NamedTuple):
    """A step as FlashInfer reads it, int32 in host memory: B rows, N packed tokens, pages of one slot."""

    qo_indptr: np.ndarray  # [B+1] the tokens of row b are [qo_indptr[b], qo_indptr[b+1])
    kv_indptr: np.ndarray  # [B+1] its pages are kv_indices[kv_indptr[b] : kv_indptr[b+1]]
    kv_indices: np.ndarray  # [sum of kv_lens]
    last_page_len: np.ndarray  # [B] tokens in its last page
    kv_lens: np.ndarray  # [B] tokens in all of them, which kernels for latents read in place of last_page_len


def paged_indices(layout: StepLayout, table: np.ndarray) -> PagedIndices:
    """The indices of a step. `table` [rows, positions] holds slot ids."""
    pages = [table[row, :length] for row, length in zip(layout.table_rows, layout.kv_lens, strict=True)]
    return PagedIndices(
        qo_indptr=_starts(layout.q_lens),
        kv_indptr=_starts(layout.kv_lens),
        kv_indices=np.concatenate(pages).astype(np.int32),
        last_page_len=np.ones(len(pages), dtype=np.int32),
        kv_lens=layout.kv_lens.astype(np.int32),
    )


def packed_masks(layout: StepLayout) -> tuple[np.ndarray, np.ndarray]:
    """FlashInfer's custom mask: (bits uint8, int32 [B+1] first byte of each row's bits).

    The bits of a row are [q_len, kv_len] in row-major order, the lowest bit of a byte first, and begin at a whole byte.
    """
    bits = []
    for row, (q_len, kv_len) in enumerate(zip(layout.q_lens, layout.kv_lens, strict=True)):
        seen = np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)
        if row in layout.trees:
            sees = layout.trees[row]  # [m, n]
            seen[q_len - len(sees) :, kv_len - sees.shape[1] :] = sees
        bits.append(np.packbits(seen.reshape(-1), bitorder="little"))
    return np.concatenate(bits), _starts([len(row) for row in bits])


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def _plan_buffer() -> tuple[torch.Tensor, torch.cuda.Event]:
    return torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


@dataclass
class Plan:
    """A planned step. new_slots [N]: where its K/V go; None in a captured step, whose graph has a place for them."""

    wrapper: Any
    new_slots: torch.Tensor | None


class FlashInferAttention:
    """Attention of a model with Hq query and Hkv K/V heads of size D. Scale is D**-0.5.

    Raises what `import flashinfer` raises; ask `obstacle` before.
    """

    name = "flashinfer"

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        import flashinfer

        self._flashinfer, self.device = flashinfer, device
        self._heads, self._scale = (num_heads, num_kv_heads, head_dim), head_dim**-0.5
        self._dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._mixed = self._eager_wrapper()
        self._int_workspace = self._mixed._int_workspace_buffer
        self._captured: dict[tuple[int, int], Any] = {}
        self._buffers = [_plan_buffer() for _ in range(PLAN_BUFFERS)]
        self._graph_slots: torch.Tensor | None = None  # int32, what captured steps attend to

    def plan(self, layout: StepLayout, table: np.ndarray, *, graph: bool = False) -> Any:
        """Plan a step for all layers; `table` [rows, positions] holds slot ids, it is read now and not kept.

        graph: the step's rows have all the same q_len, no tree and at least q_len positions, and it is captured, or a
        replay of what was captured for so many rows.
        """
        indices = paged_indices(layout, table)
        kv_indices, slots = upload(self.device, indices.kv_indices, layout.slots)
        # Lengths stay on the host, where plan reads them; page-locked, so that its own copies of them do not wait.
        host = {name: _pinned(array) for name, array in indices._asdict().items() if name != "kv_indices"}
        buffer, copied = self._buffers[0]
        self._buffers.append(self._buffers.pop(0))
        copied.synchronize()
        q_len = int(layout.q_lens[0]) if graph else None
        wrapper = self._captured_wrapper(len(layout.q_lens), q_len) if graph else self._mixed
        wrapper._pin_memory_int_workspace_buffer = buffer
        self._plan(wrapper, PagedIndices(kv_indices=kv_indices, **host), q_len)
        if layout.trees:  # run takes these two when they are there; given to plan, it would wait for the GPU
            bits, starts = packed_masks(layout)
            wrapper._custom_mask_buf, wrapper._mask_indptr_buf = upload(self.device, bits, starts)
        copied.record()
        return Plan(wrapper, None if graph else slots)

    def _captured_wrapper(self, batch: int, q_len: int) -> Any:
        """The wrapper of a captured shape, made when it is planned for the first time."""
        if (batch, q_len) not in self._captured:
            int32 = {"dtype": torch.int32, "device": self.device}
            if self._graph_slots is None:
                self._graph_slots = torch.zeros(GRAPH_SLOTS, **int32)
            wrapper = self._graph_wrapper(*(torch.zeros(batch + more, **int32) for more in (1, 1, 0)))
            wrapper._int_workspace_buffer = self._int_workspace
            self._captured[batch, q_len] = wrapper
        return self._captured[batch, q_len]

    def _eager_wrapper(self) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")

    def _graph_wrapper(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, lengths: torch.Tensor) -> Any:
        """A wrapper that reads these buffers, int32 [B+1], [B+1] and [B], and `_graph_slots`."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,  # the prefill kernel: any number of heads in a group, and several tokens a row
            paged_kv_indptr_buffer=kv_indptr,
            paged_kv_indices_buffer=self._graph_slots,
            paged_kv_last_page_len_buffer=lengths,
            backend="fa2",
        )

    def _plan(self, wrapper: Any, step: PagedIndices, q_len: int | None) -> None:
        """q_len: of each row of a captured step."""
        lengths, shape = (step.kv_indptr, step.kv_indices, step.last_page_len), (*self._heads, 1)  # pages of one slot
        options = self._dtypes | {"sm_scale": self._scale, "non_blocking": True}
        if q_len is None:
            wrapper.plan(step.qo_indptr, *lengths, *shape, causal=True, **options)
        else:
            wrapper.plan(*lengths, *shape, q_len_per_req=q_len, **options)

    def run(
        self,
        plan: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k, v [N, Hkv, D] into one layer's caches [slots, Hkv, D], then attend: q [N, Hq, D] -> [N, Hq, D]."""
        k_cache.index_copy_(0, plan.new_slots, k)
        v_cache.index_copy_(0, plan.new_slots, v)
        q = q.contiguous()
        # Left to itself, run fills its output with zeros first, and asks for a launch mode that was never measured.
        return plan.wrapper.run(q, (k_cache[:, None], v_cache[:, None]), out=torch.empty_like(q), enable_pdl=False)


class FlashInferLatentAttention(FlashInferAttention):
    """Attention of Hq query heads to one latent of R numbers and one turned key of r numbers per token.

    Scale is (R + r)**-0.5. Steps with trees are computed by torch, from the same cache.
    """

    def __init__(
        self, num_heads: int, latent_size: int, turned_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_heads, 1, latent_size + turned_size, dtype=dtype, device=device)
        self._sizes = latent_size, turned_size
        self._for_trees = TorchAttention(num_heads, 1, dtype=dtype, device=device)

    def plan(self, layout: StepLayout, table: np.ndarray, *, graph: bool = False) -> Any:
        """See `FlashInferAttention`."""
        return self._for_trees.plan(layout, table) if layout.trees else super().plan(layout, table, graph=graph)

    def _eager_wrapper(self) -> Any:
        return self._flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2")

    def _graph_wrapper(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self._flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=self._graph_slots,
            kv_len_arr=lengths,
            backend="fa2",
        )

    def _plan(self, wrapper: Any, step: PagedIndices, q_len: int | None) -> None:
        lengths, shape = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_lens), (*self._sizes, 1)
        wrapper.plan(*lengths, self._heads[0], *shape, causal=True, sm_scale=self._scale, **self._dtypes)

    def run(
        self,
        plan: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k [N, 1, R + r] into one layer's cache [slots, 1, R + r]: q [N, Hq, R + r] -> [N, Hq, R].

        v is the latents in k, and v_cache is empty.
        """
        if not isinstance(plan, Plan):
            return self._for_trees.run(plan, k_cache, v_cache, q, k, v)
        k_cache.index_copy_(0, plan.new_slots, k)
        (latents, turned), (q_latent, q_turned) = k_cache.split(self._sizes, -1), q.split(self._sizes, -1)
        return plan.wrapper.run(q_latent, q_turned, latents, turned, out=q.new_empty(q_latent.shape))
