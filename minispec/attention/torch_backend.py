"""Paged attention in plain torch, for any mix of prefill chunks, decode rows and verifications, on any device.

Knows: how to read K/V through the slot table and which positions a token may see. Does not know: what a row is for,
who owns a slot, or anything about pages (a slot id is an address, whatever the page size).

Three things make it quick enough to serve on a CPU:
- Rows with the same q_len are stacked into one call, cut where padding would waste more than it saves.
- The G query heads that share a K/V head are folded into the query length ([B, Hkv, G*Q, D]), so K/V are read once
  and never repeated (grouped-query attention, Ainslie et al. 2023, section 2).
- Everything that depends only on the step (slots, masks) is built once in `plan` and used by every layer.
- On a CPU many rows attend by two batched matrix products; torch's fused attention is quicker for a few rows only.

Taught in notebooks 02 (KV cache) and 03 (pages).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from minispec.core import StepLayout
from minispec.device import upload

STACK_MAX_Q = 64  # longer rows (prefill chunks) go alone: a stack of them would be mostly padding
MATMUL_BATCH = 8  # rows of a group from which two matrix products were quicker than fused attention (on a CPU)
PADDING_LIMIT = 2.0  # a stack may read at most about this many times the K/V that its shortest row needs


@dataclass
class Group:
    """B rows of equal q_len Q that share one attention call over L positions (padded to the longest)."""

    batch: int
    q_len: int
    kv_len: int
    packed: torch.Tensor | None  # [B*Q] packed rows; None when the group is the whole step, in order
    slots: torch.Tensor | slice  # [B*Hkv*L] slot * Hkv + head, or the slots as a slice when they are consecutive
    mask: torch.Tensor | None  # [B, 1, G*Q, L] 0 or -inf; None when every position may be seen


@dataclass
class Plan:
    """What one step needs, for all layers: groups, and where new K/V go ([N] slots)."""

    groups: list[Group]
    new_slots: torch.Tensor


class TorchAttention:
    """Attention of a model with Hq query and Hkv K/V heads of size D. Scale is D**-0.5."""

    name = "torch"

    def __init__(self, num_heads: int, num_kv_heads: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads  # G
        self.dtype, self.device = dtype, torch.device(device)

    def plan(self, layout: StepLayout, table: np.ndarray, *, graph: bool = False) -> Plan:
        """Group the rows of a step. `table` [rows, positions] holds slot ids; it is read now and not kept.

        graph: the step repeats a recorded shape, which means nothing here.
        """
        row_starts = np.concatenate([[0], np.cumsum(layout.q_lens)])
        groups = []
        for rows in _stacks(layout.q_lens, layout.kv_lens):
            q_len, kv_len = int(layout.q_lens[rows[0]]), int(layout.kv_lens[rows].max())
            trees = {b: layout.trees[row] for b, row in enumerate(rows.tolist()) if row in layout.trees}
            packed = (row_starts[rows][:, None] + np.arange(q_len)).reshape(-1)  # [B*Q]
            in_order = len(packed) == row_starts[-1] and bool((np.diff(packed) == 1).all())
            groups.append(
                Group(
                    batch=len(rows),
                    q_len=q_len,
                    kv_len=kv_len,
                    packed=None if in_order else self._to_device(packed),
                    slots=self._slots(table[layout.table_rows[rows], :kv_len], layout.kv_lens[rows]),
                    mask=self._mask(layout.kv_lens[rows], q_len, kv_len, trees),
                )
            )
        return Plan(groups, self._to_device(layout.slots))

    def run(
        self,
        plan: Plan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k, v [N, Hkv, D] into one layer's caches [slots, Hkv, D], then attend: q [N, Hq, D] -> [N, Hq, D].

        Where the v cache is empty, the values are the first numbers of the keys, and v says how many.
        """
        k_flat, v_flat = k_cache.flatten(1), v_cache.flatten(1)  # rows of Hkv*D: index_copy writes whole rows
        k_flat.index_copy_(0, plan.new_slots, k.flatten(1))
        if v_flat.shape[1]:
            v_flat.index_copy_(0, plan.new_slots, v.flatten(1))
        size = v.shape[-1]
        if len(plan.groups) == 1 and plan.groups[0].packed is None:
            return self._attend(plan.groups[0], k_cache, v_cache, q, size)
        out = q.new_empty(*q.shape[:2], size)
        for group in plan.groups:
            read = self._attend(group, k_cache, v_cache, q.index_select(0, group.packed), size)
            out.index_copy_(0, group.packed, read)
        return out

    def _attend(
        self, g: Group, k_cache: torch.Tensor, v_cache: torch.Tensor, q: torch.Tensor, value_size: int
    ) -> torch.Tensor:
        heads, group, size = self.num_kv_heads, self.group_size, q.shape[-1]
        k = self._read(g, k_cache)
        v = self._read(g, v_cache) if v_cache.shape[-1] else k[..., :value_size]
        q = q.view(g.batch, g.q_len, heads, group, size).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
        q = q.reshape(g.batch, heads, group * g.q_len, size)  # [B, Hkv, G*Q, D]
        if g.batch >= MATMUL_BATCH and q.device.type == "cpu":
            scores = torch.matmul(q, k.transpose(-1, -2)).mul_(size**-0.5)  # [B, Hkv, G*Q, L]
            scores = scores if g.mask is None else scores.add_(g.mask)
            out = torch.matmul(scores.softmax(-1), v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=g.mask)
        out = out.view(g.batch, heads, group, g.q_len, value_size).permute(0, 3, 1, 2, 4)  # [B, Q, Hkv, G, D]
        return out.reshape(g.batch * g.q_len, heads * group, value_size)

    def _read(self, g: Group, cache: torch.Tensor) -> torch.Tensor:
        """cache [slots, Hkv, D] -> [B, Hkv, L, D], each head's positions side by side."""
        if isinstance(g.slots, slice):
            return cache[g.slots].transpose(0, 1)[None]  # a view
        return cache.flatten(0, 1).index_select(0, g.slots).view(g.batch, self.num_kv_heads, g.kv_len, -1)

    def _slots(self, slots: np.ndarray, kv_lens: np.ndarray) -> torch.Tensor | slice:
        batch, kv_len = slots.shape
        if batch == 1 and (np.diff(slots[0]) == 1).all():
            return slice(int(slots[0, 0]), int(slots[0, -1]) + 1)
        # Padding reads the row's own first slot: masked, and never another request's (possibly non-finite) numbers.
        slots = np.where(np.arange(kv_len) < kv_lens[:, None], slots, slots[:, :1])
        heads = np.arange(self.num_kv_heads)[:, None]
        return self._to_device((slots[:, None] * self.num_kv_heads + heads).reshape(-1))  # [B, Hkv, L]

    def _mask(self, kv_lens: np.ndarray, q_len: int, kv_len: int, trees: dict[int, np.ndarray]) -> torch.Tensor | None:
        if q_len == 1 and (kv_lens == kv_len).all() and not trees:
            return None
        last_visible = kv_lens[:, None] - q_len + np.arange(q_len)  # [B, Q]: query j is position kv_len - q_len + j
        hidden = np.arange(kv_len) > last_visible[:, :, None]  # [B, Q, L]
        for b, sees in trees.items():  # [m, n]
            hidden[b, q_len - len(sees) :, kv_lens[b] - sees.shape[1] : kv_lens[b]] = ~sees
        [hidden] = upload(self.device, hidden)
        mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None].repeat(1, 1, self.group_size, 1)  # [B, 1, G*Q, L]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return upload(self.device, np.ascontiguousarray(array, dtype=np.int64))[0]


def _stacks(q_lens: np.ndarray, kv_lens: np.ndarray) -> list[np.ndarray]:
    """Split the rows of a step into stacks of equal q_len and similar kv_len; each stack keeps the rows' order."""
    stacks = []
    for q_len in np.unique(q_lens):
        rows = np.flatnonzero(q_lens == q_len)
        if q_len > STACK_MAX_Q:
            stacks.extend(np.array([row]) for row in rows)
            continue
        rows = rows[np.argsort(kv_lens[rows], kind="stable")]
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or kv_lens[rows[end]] > PADDING_LIMIT * kv_lens[rows[start]] + 64:
                stacks.append(np.sort(rows[start:end]))
                start = end
    return stacks
