"""From a step to logits: pack the rows, run the model once, return what the sampler needs.

Knows: the model, the K/V tensors, the attention backend, devices. Does not know: requests' lives, budgets, pages,
sampling. The engine talks to it through `forward` alone, so tests put a scripted model in its place.

Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minispec.attention.torch_backend import TorchAttention
from minispec.core import Step, StepLayout
from minispec.kv.pool import KVCache
from minispec.models.llama import CausalLM


class Runner(Protocol):
    """What the engine needs of a model. `forward` must have written the K/V of every row when it returns."""

    vocab_size: int
    weight_bytes: int  # read once by every forward

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        """Logits [R, V] float32 of the positions that `step` wants, in row order. `table` maps position -> slot."""
        ...


def pack(step: Step, table: np.ndarray) -> StepLayout:
    """Flatten the rows of a step. `table` [rows, positions] holds the slot of every reserved position."""
    q_lens = np.array([row.q_len for row in step.rows], dtype=np.int64)
    starts = np.array([row.start for row in step.rows], dtype=np.int64)
    table_rows = np.array([row.request.table_row for row in step.rows], dtype=np.int64)
    first = np.cumsum(q_lens) - q_lens  # packed index of each row's first token
    positions = np.arange(q_lens.sum()) + np.repeat(starts - first, q_lens)
    wanted = [np.arange(f + n - row.num_logits, f + n) for row, f, n in zip(step.rows, first, q_lens, strict=True)]
    return StepLayout(
        q_lens=q_lens,
        kv_lens=starts + q_lens,
        table_rows=table_rows,
        token_ids=np.array([token for row in step.rows for token in row.token_ids], dtype=np.int64),
        positions=positions,
        slots=table[np.repeat(table_rows, q_lens), positions].astype(np.int64),
        logit_rows=np.concatenate(wanted),
    )


class ModelRunner:
    """Runs one target model over a pool of `num_slots` slots.

    Raises torch.OutOfMemoryError (or MemoryError) when the K/V tensors do not fit.
    """

    def __init__(self, model: CausalLM, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        config = model.config
        self.model, self.device = model, device
        self.vocab_size = config.vocab_size
        self.weight_bytes = config.num_parameters * dtype.itemsize
        self.cache = KVCache(
            config.num_layers, num_slots, config.num_kv_heads, config.head_dim, dtype=dtype, device=device
        )
        self.attention = TorchAttention(config.num_heads, config.num_kv_heads, dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        """Logits [R, V] float32 of the positions that `step` wants; writes the K/V of all its tokens."""
        layout = pack(step, table)
        plan = self.attention.plan(layout, table)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.attention.run(plan, self.cache.k[layer], self.cache.v[layer], q, k, v)

        token_ids = torch.from_numpy(layout.token_ids).to(self.device)
        positions = torch.from_numpy(layout.positions).to(self.device)
        hidden = self.model.forward(token_ids, positions, attend)  # [N, H]
        wanted = torch.from_numpy(layout.logit_rows).to(self.device)
        return self.model.logits(hidden.index_select(0, wanted))  # [R, V]
