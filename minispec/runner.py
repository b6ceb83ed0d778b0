"""From a step to logits: pack the rows, run the model once, return what the sampler needs.

Knows: the model, the K/V tensors, the attention backend, devices. Does not know: requests' lives, budgets, pages,
sampling. The engine talks to it through `forward` alone, so tests put a scripted model in its place.

Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from minispec.attention.choose import choose_attention, make_attention
from minispec.core import Row, Step, StepLayout, ancestors
from minispec.device import upload
from minispec.graphs import Program
from minispec.kv.pool import KVCache, KVPool
from minispec.models.config import ModelConfig
from minispec.models.llama import Attend, CausalLM

if TYPE_CHECKING:
    from minispec.sampling.sampler import Judged


class Runner(Protocol):
    """What the engine needs of a model. `forward` must have written the K/V of every row when it returns."""

    vocab_size: int
    weight_bytes: int  # read once by every forward
    device: torch.device

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        """Logits [R, V] float32 of the positions that `step` wants, in row order. `table` maps position -> slot."""
        ...

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy all that `forward` left at the slots `sources` [n] to the slots `targets` [n], as if at once."""
        ...


class Segment(NamedTuple):
    """Consecutive tokens of one sequence in a forward; logits are wanted for the last `num_logits` of them.

    parents: the last len(parents) places of the table row, some of them perhaps written by earlier forwards, are no
    sequence but a tree. A node follows the node parents[i], or what lies before the tree (-1), sees what is on the way
    to it, and has its depth for a position. Its slot is that of its place in the table row.
    """

    table_row: int
    start: int
    token_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None


def segments_of(step: Step) -> list[Segment]:
    """The rows of a step as a model sees them."""
    return [Segment(row.request.table_row, row.start, row.token_ids, row.num_logits, row.parents) for row in step.rows]


def pack(segments: Sequence[Segment], table: np.ndarray) -> StepLayout:
    """Flatten the segments of a forward. `table` [rows, positions] holds the slot of every reserved position."""
    q_lens = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
    starts = np.array([s.start for s in segments], dtype=np.int64)
    table_rows = np.array([s.table_row for s in segments], dtype=np.int64)
    first = np.cumsum(q_lens) - q_lens  # packed index of each segment's first token
    places = np.arange(q_lens.sum()) + np.repeat(starts - first, q_lens)
    positions, before, trees = places.copy(), places - 1, {}
    for b, segment in enumerate(segments):
        if segment.parents:
            sees, n, end = ancestors(segment.parents), len(segment.parents), first[b] + q_lens[b]
            new = min(n, q_lens[b])
            root = starts[b] + q_lens[b] - n - 1
            positions[end - new : end] = root + sees[n - new :].sum(1)
            before[end - new : end] = root + 1 + np.array(segment.parents[n - new :])
            trees[b] = sees[n - new :]
    wanted = [np.arange(f + n - s.num_logits, f + n) for s, f, n in zip(segments, first, q_lens, strict=True)]
    return StepLayout(
        q_lens=q_lens,
        kv_lens=starts + q_lens,
        table_rows=table_rows,
        token_ids=np.array([token for s in segments for token in s.token_ids], dtype=np.int64),
        positions=positions,
        before=before,
        slots=table[np.repeat(table_rows, q_lens), places].astype(np.int64),
        logit_rows=np.concatenate(wanted),
        trees=trees,
    )


def keep_paths(runner: Runner, pool: KVPool, rows: Sequence[Row], judged: Judged | None) -> None:
    """Bring the accepted path of each tree among `rows` to consecutive slots; the host need not know what it is.

    With pages of one slot that is for `KVPool.repoint` to do, and a chain lies where it should.
    """
    if pool.page_size > 1 and any(row.parents for row in rows):
        last = judged.last
        counts = np.array([row.num_logits for row in rows])
        starts, targets, sources = upload(last.device, np.cumsum(counts) - counts, *pool.moves(rows))
        runner.move(sources[starts + last].flatten(), targets.flatten())


class Tenant:
    """One model's K/V in the shared slots, and the attention that reads them.

    Target and draft model address the same slots through the same table, each in tensors of its own. Behind the slots
    of the pool there is a spare one, number `num_slots`, for the padding of captured steps.
    attention: see `EngineConfig.attention_backend`; `reason` says why it became what it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_layers: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
    ) -> None:
        shape, where = config.kv_shape, {"dtype": dtype, "device": device}
        latent = (config.mla.kv_rank, config.mla.rope_dim) if config.mla else None
        name, self.reason = choose_attention(attention, shape.key_size, latent=latent, **where)
        self.attention = make_attention(name, config.num_heads, shape.heads, shape.key_size, latent=latent, **where)
        self.device, self.spare = device, num_slots
        self.capturable = name == "flashinfer" and not config.moe  # the host must know which experts were chosen
        self.cache = KVCache(num_layers, num_slots + 1, *shape, **where)

    def attend(self, plan: Any) -> Attend:
        """The `attend` of one planned forward: writes each layer's K/V to the step's slots and reads its history."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.attention.run(plan, self.cache.k[layer], self.cache.v[layer], q, k, v)

        return attend


class ModelRunner:
    """Runs one target model over a pool of `num_slots` slots.

    `keep_hidden` adds the hidden pool: [num_slots, H], the target's hidden state (after its final norm) of the token
    in each slot, which an MTP module reads. `num_text_tokens`: ids from here on are padding of the embedding
    and never chosen. attention: see `Tenant`. Raises torch.OutOfMemoryError (or MemoryError) when memory is short.
    """

    def __init__(
        self,
        model: CausalLM,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep_hidden: bool = False,
        num_text_tokens: int | None = None,
        attention: str = "auto",
    ) -> None:
        config = model.config
        self.model, self.device = model, device
        self.num_text_tokens = num_text_tokens or config.vocab_size
        self.vocab_size = config.vocab_size
        self.weight_bytes = model.bytes_read()
        self.attention = attention  # as asked for; draft models ask for the same
        self.tenant = Tenant(config, config.num_layers, num_slots, dtype=dtype, device=device, attention=attention)
        self.program = Program(self._body, self.tenant)
        size = (num_slots + 1, config.hidden_size)
        self.hidden = torch.zeros(size, dtype=dtype, device=device) if keep_hidden else None
        self._layer_inputs: dict[int, torch.Tensor] = {}  # of the latest forward, if the hidden pool holds such

    def keep_layers(self, layers: Sequence[int]) -> None:
        """Let the hidden pool hold what these layers read, side by side, in place of the final hidden state."""
        self.hidden = self.hidden.new_zeros(len(self.hidden), len(layers) * self.model.config.hidden_size)
        for layer in layers:
            self._layer_inputs[layer] = self.hidden[:0]
            self.model.layers[layer].register_forward_pre_hook(
                lambda _, inputs, layer=layer: self._layer_inputs.update({layer: inputs[0].clone()})
            )

    @torch.inference_mode()
    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        """Logits [R, V] float32 of the positions that `step` wants; writes K/V (and hidden) of all its tokens."""
        return self.program(pack(segments_of(step), table), table, known=step.known)

    def record(self, batches: Sequence[int], candidate_length: int) -> None:
        """Capture plain decoding and the verification of so many drafts."""
        self.program.record((batch, q_len) for batch in batches for q_len in {1, candidate_length + 1})

    def _body(self, columns: Sequence[torch.Tensor], plan: Any, wanted: torch.Tensor | None) -> torch.Tensor:
        token_ids, positions, slots = columns
        hidden = self.model.forward(token_ids, positions, self.tenant.attend(plan))  # [N, H]
        if self.hidden is not None:
            kept = torch.cat([*self._layer_inputs.values()], -1) if self._layer_inputs else hidden
            self.hidden.index_copy_(0, slots, kept)
        logits = self.model.logits(hidden if wanted is None else hidden.index_select(0, wanted))  # [R, V]
        logits[:, self.num_text_tokens :] = -torch.inf
        return logits

    @torch.inference_mode()
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See Runner."""
        for cache in (self.tenant.cache.k, self.tenant.cache.v):
            cache.index_copy_(1, targets, cache.index_select(1, sources))
        if self.hidden is not None:
            self.hidden.index_copy_(0, targets, self.hidden.index_select(0, sources))
