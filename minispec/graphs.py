"""A forward as a program: packed integers in, logits out; run operation by operation, or replayed from a CUDA graph.

A decoding step of a small model is hundreds of short kernels, and launching each one takes the host longer than the GPU
needs to compute it. A graph is launched as a whole, but it is a recording: the same kernels, shapes and addresses every
time. So steps are recorded for some batch sizes and row lengths, and a step in between is padded up to the next one:

    rows of the step        graph of 4 rows, 3 tokens each        . a token of padding
    a b                     . a b      short rows are filled up in front, where padding sees nothing that it should not
    c d e                   c d e
    f                       . . f
                            . . .      rows of padding read the first row's history; nobody reads what they compute

All padding writes to the spare slot, which lies behind those that the pool hands out. Steps that are larger than the
largest graph, those that read prompts, and those with trees of drafts (whose masks no graph has) run eagerly.

Knows: packed steps, static buffers, when a step fits a graph. Does not know: models, requests, the pool.
Taught in notebook 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minispec.attention.flashinfer import GRAPH_SLOTS
from minispec.core import StepLayout, known_tokens
from minispec.device import upload

SLOTS = 2  # place of the slots among a program's columns: token ids, positions, slots, and what it reads besides
WARM_UP = 2  # runs before the recording, in which libraries allocate what may not be allocated inside of it

# body(columns, plan, wanted): columns [C][N] int64, the attention's plan, packed rows whose logits are wanted (None:
# all) -> logits [R, V].
Body = Callable[[Sequence[torch.Tensor], Any, "torch.Tensor | None"], torch.Tensor]


def graph_batches(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: padding less than doubles a step.

    >>> graph_batches(1), graph_batches(12)
    ([1], [1, 2, 4, 8, 12])
    """
    powers = [2**i for i in range(max_num_seqs.bit_length()) if 2**i < max_num_seqs]
    return [*powers, max_num_seqs]


def padded(layout: StepLayout, batch: int, q_len: int, spare: int) -> tuple[StepLayout, np.ndarray]:
    """The step as `batch` rows of `q_len` tokens, and the place of each of its packed tokens among those, [N].

    Each row of the step must attend to at least q_len positions.
    """
    rows, lengths = len(layout.q_lens), layout.q_lens
    ends, first = q_len * np.arange(1, rows + 1), np.cumsum(lengths) - lengths
    places = np.repeat(ends - lengths - first, lengths) + np.arange(lengths.sum())
    kv_lens, table_rows = np.full(batch, q_len), np.full(batch, layout.table_rows[0])
    kv_lens[:rows], table_rows[:rows] = layout.kv_lens, layout.table_rows
    positions = (kv_lens[:, None] - q_len + np.arange(q_len)).reshape(-1)
    whole = StepLayout(
        q_lens=np.full(batch, q_len),
        kv_lens=kv_lens,
        table_rows=table_rows,
        token_ids=spread(layout.token_ids, places, batch * q_len, 0),
        positions=positions,
        before=positions - 1,
        slots=spread(layout.slots, places, batch * q_len, spare),
        logit_rows=places[layout.logit_rows],
    )
    return whole, places


def spread(values: np.ndarray, places: np.ndarray, size: int, fill: int) -> np.ndarray:
    """int64 [size]: values at their places, `fill` elsewhere."""
    spaced = np.full(size, fill, dtype=np.int64)
    spaced[places] = values
    return spaced


@dataclass
class Recording:
    """One captured shape: its input buffers [C, N], and what computes the logits from them."""

    columns: torch.Tensor
    replay: Callable[[Any], torch.Tensor]


class Program:
    """Runs `body` over the tokens of a step, through a graph where one fits.

    tenant: whose attention plans the steps, and whose spare slot padding writes to. num_extra: columns of slots that
    the body reads besides. last_only: of a row with several tokens only the last one's logits are ever wanted.
    """

    def __init__(self, body: Body, tenant: Any, *, num_extra: int = 0, last_only: bool = False) -> None:
        self.body, self.attention, self.spare = body, tenant.attention, tenant.spare
        self.device, self.num_columns, self.last_only = tenant.device, 3 + num_extra, last_only
        self.capturable = tenant.capturable or self.device.type != "cuda"
        self.recordings: dict[tuple[int, int], Recording] = {}  # by (batch, q_len)
        self.replays = 0
        self.announce: Callable[..., None] | None = None  # told what is about to run, see parallel.py
        self._memory = None  # that all recordings share: they run one after another

    def __call__(
        self, layout: StepLayout, table: np.ndarray, *extra: np.ndarray, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [R, V] of the step's logit_rows. known: see `known_tokens`; any token may be read in place of none."""
        if self.announce:
            self.announce(layout, table, extra, known)
        shape = self._shape(layout)
        if shape is not None:
            return self._replay(shape, layout, table, extra, known)
        plan = self.attention.plan(layout, table)
        arrays = layout.token_ids, layout.positions, layout.slots, *extra, layout.logit_rows
        token_ids, *columns, wanted = upload(self.device, *arrays)
        return self.body([known_tokens(token_ids, known).clamp(min=0), *columns], plan, wanted)

    def _shape(self, layout: StepLayout) -> tuple[int, int] | None:
        """The smallest recorded shape that the step fits into."""
        rows, longest, shortest = len(layout.q_lens), layout.q_lens.max(), layout.kv_lens.min()
        if layout.trees or (self.last_only and len(layout.logit_rows) != rows):
            return None
        fitting = [(batch, q) for batch, q in self.recordings if batch >= rows and longest <= q <= shortest]
        shape = min(fitting, key=lambda shape: shape[0] * shape[1], default=None)
        too_long = shape and layout.kv_lens.sum() + shape[0] * shape[1] > GRAPH_SLOTS
        return None if too_long else shape

    def _replay(
        self,
        shape: tuple[int, int],
        layout: StepLayout,
        table: np.ndarray,
        extra: Sequence[np.ndarray],
        known: torch.Tensor | None,
    ) -> torch.Tensor:
        recording, (whole, places) = self.recordings[shape], padded(layout, *shape, self.spare)
        spaced = [spread(column, places, len(whole.slots), self.spare) for column in extra]
        rows = np.arange(len(layout.q_lens)) if self.last_only else whole.logit_rows
        columns, wanted = upload(self.device, np.stack((whole.token_ids, whole.positions, whole.slots, *spaced)), rows)
        plan = self.attention.plan(whole, table, graph=True)
        recording.columns.copy_(columns)
        if known is not None:
            recording.columns[0] = known_tokens(columns[0], known).clamp(min=0)
        self.replays += 1
        return recording.replay(plan).index_select(0, wanted)

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Capture (batch, q_len) shapes, the largest first: what it allocates is enough for the others.

        Off CUDA there is no graph, and a replay is a call with the same buffers: tests see what surrounds a graph.
        On CUDA only FlashInfer's attention can be captured, and no experts; with others nothing is.
        """
        if not self.capturable:
            return
        for batch, q_len in sorted(set(shapes) - set(self.recordings), reverse=True):
            columns = torch.zeros(self.num_columns, batch * q_len, dtype=torch.int64, device=self.device)
            columns[SLOTS:] = self.spare
            wanted = None
            if self.last_only and q_len > 1:
                wanted = torch.arange(q_len - 1, batch * q_len, q_len, device=self.device)
            record = self._capture if self.device.type == "cuda" else self._call
            self.recordings[batch, q_len] = Recording(columns, record(columns, wanted, batch, q_len))

    def _call(
        self, columns: torch.Tensor, wanted: torch.Tensor | None, batch: int, q_len: int
    ) -> Callable[[Any], torch.Tensor]:
        def call(plan: Any) -> torch.Tensor:
            plan.new_slots = columns[SLOTS]
            return self.body(columns, plan, wanted)

        return call

    def _capture(
        self, columns: torch.Tensor, wanted: torch.Tensor | None, batch: int, q_len: int
    ) -> Callable[[Any], torch.Tensor]:
        call, nothing = self._call(columns, wanted, batch, q_len), np.zeros(batch * q_len, dtype=np.int64)
        idle = StepLayout(
            q_lens=np.full(batch, q_len),
            kv_lens=np.full(batch, q_len),
            table_rows=nothing[:batch],
            token_ids=nothing,
            positions=nothing,
            before=nothing,
            slots=nothing + self.spare,
            logit_rows=nothing,
        )
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            plan = self.attention.plan(idle, np.full((1, q_len), self.spare), graph=True)
            for _ in range(WARM_UP):
                call(plan)
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            logits = call(plan)
        self._memory = self._memory or graph.pool()

        def replay(plan: Any) -> torch.Tensor:  # the plan is in the buffers that the graph reads
            graph.replay()
            return logits

        return replay
