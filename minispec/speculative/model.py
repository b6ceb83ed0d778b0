"""Drafting with a model: catch up with the committed tokens, then extend with its own output.

A draft row lives at the slot of the last token that it has read, so everything stored at slot p depends on tokens 0..p
only, and whatever the radix tree finds is valid for the draft model as well.

    position      0 1 2 3 4 5 6 7 8 9        tokens 0..6 are committed, K = 3
    exact         x x x x . . .              rows computed from committed tokens (and true hidden states)
    catch up              o o o              one ragged forward; its last output is draft 7
    extend                      ~ ~          rows of drafts 7 and 8 give drafts 8 and 9; not exact, overwritten later

One bit per slot says whether its draft row is exact; the cursor of a request is the length of its exact run. A prompt
read in chunks, a prefix from the cache, a draft kept in part, a step without drafts, a preemption: all of them only
leave the run shorter, and the next catch-up closes the gap.

Knows: slots, cursors, how to choose draft tokens and report q. Does not know: how drafts are judged.
Taught in notebooks 10 (the MTP head) and 12 (speculation inside the engine).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from minispec.core import Request, StepLayout
from minispec.kv.pool import KVPool
from minispec.models.config import ModelConfig
from minispec.models.llama import CausalLM
from minispec.models.mtp import MTPModule
from minispec.runner import ModelRunner, Segment, Tenant, pack
from minispec.sampling.distribution import LogitRow, needs_processing, probabilities, process_logits, sample
from minispec.sampling.rng import Purpose, uniforms
from minispec.speculative.drafter import Proposal

CATCH_UP_ROWS = 512  # most rows of one request in one catch-up forward; a long prompt takes several


class ModelDrafter(ABC):
    """What all drafters with a model share. Subclasses say how one forward is done.

    pool: slots, table and exact bits. vocab_size: the target's. sampled: draw drafts from q at the request's own
    parameters when it samples; otherwise take the argmax and report a one-hot q. Both are exact.
    """

    name: str
    weight_bytes: int  # read by each draft forward
    shift = 0  # positions before it have no draft row
    max_len: int | None = None  # positions that the draft model can number; longer requests are not drafted

    def __init__(self, pool: KVPool, vocab_size: int, device: torch.device, *, sampled: bool = True) -> None:
        self.pool, self.vocab_size, self.device, self.sampled = pool, vocab_size, device, sampled
        self.forwards = 0

    @abstractmethod
    def forward(self, layout: StepLayout, carried: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run packed draft rows -> (logits [B, V'] float32 at layout.logit_rows, state [B, ...] for the next depth).

        Positions in the layout count from `shift`. `carried` is None in a catch-up. After it each request brings one
        row per depth, and `carried` is the state that its row before gave.
        """

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """See `Drafter.propose`. Slots for the drafts must be reserved."""
        lengths = [self._clip(request, k) for request, k in zip(requests, candidate_lengths, strict=True)]
        active = [b for b, k in enumerate(lengths) if k > 0]
        drafts: list[list[int]] = [[] for _ in requests]
        q_rows: list[list[torch.Tensor]] = [[] for _ in requests]
        state = None
        depth = 0
        while active:
            if depth == 0:
                logits, state = self._catch_up([requests[b] for b in active])
            else:
                segments = [
                    self._segment(requests[b], len(requests[b].tokens) + depth - 1, drafts[b][-1:]) for b in active
                ]
                logits, state = self._run([requests[b] for b in active], self._layout(segments), state)
            tokens, q = self._choose(
                self._to_target(logits), [requests[b] for b in active], [drafts[b] for b in active]
            )
            for i, b in enumerate(active):
                drafts[b].append(tokens[i])
                if q is not None:
                    q_rows[b].append(q[i])
            depth += 1
            going_on = [i for i, b in enumerate(active) if lengths[b] > depth]
            if state is not None and len(going_on) < len(active):
                state = state[going_on]
            active = [active[i] for i in going_on]
        return Proposal(drafts, [torch.stack(rows) if rows else None for rows in q_rows])

    def release(self, request: Request) -> None:  # noqa: B027
        """Nothing is kept per request: exact bits belong to slots."""

    def cursor(self, request: Request) -> int:
        """Positions [shift, cursor) hold exact draft rows. The last committed token is not counted: it must be run."""
        last = len(request.tokens) - 1
        exact = self.pool.draft_exact[self.pool.slots(request)[self.shift : last]]
        gap = np.flatnonzero(~exact)
        return self.shift + int(gap[0]) if len(gap) else max(last, self.shift)

    def _clip(self, request: Request, k: int) -> int:
        """Drafts that the draft model has positions for; none before it has a first row."""
        if len(request.tokens) <= self.shift:
            return 0
        return k if self.max_len is None else max(0, min(k, self.max_len - len(request.tokens) + 1))

    def _catch_up(self, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make all rows up to the last committed token exact; the outputs of that token's rows."""
        while True:
            # Those that need more than one forward go first, alone; then all of them end in the same forward.
            behind = [r for r in requests if len(r.tokens) - self.cursor(r) > CATCH_UP_ROWS]
            segments = []
            for request in behind or requests:
                start = self.cursor(request)
                chunk = request.tokens[start : start + CATCH_UP_ROWS]
                segments.append(self._segment(request, start, chunk, num_logits=0 if behind else 1))
            layout = self._layout(segments)
            outputs = self._run(behind or requests, layout, None)
            self.pool.draft_exact[layout.slots] = True
            if not behind:
                return outputs

    def _run(
        self, requests: Sequence[Request], layout: StepLayout, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward`, counted."""
        self.forwards += 1
        for request in requests:
            request.metrics.draft_forwards += 1
        return self.forward(layout, carried)

    def _segment(self, request: Request, start: int, tokens: Sequence[int], num_logits: int = 1) -> Segment:
        return Segment(request.table_row, start - self.shift, tokens, num_logits)

    @property
    def table(self) -> np.ndarray:
        """Position - shift -> slot."""
        return self.pool.table.slots[:, self.shift :]

    def _layout(self, segments: Sequence[Segment]) -> StepLayout:
        return pack(segments, self.table)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary: ids that the draft model lacks get probability 0, its surplus is cut."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocab_size]

    def _choose(
        self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[list[int]]
    ) -> tuple[list[int], torch.Tensor | None]:
        """One token per request from logits [B, V]; q [B, V] if any was drawn by chance."""
        rows = [
            LogitRow(r.params, r.prompt, r.output + draft, r.stop_ids) if needs_processing(r.params) else None
            for r, draft in zip(requests, drafts, strict=True)
        ]
        logits = process_logits(logits, rows)
        if not self.sampled or all(r.params.greedy for r in requests):
            return logits.argmax(-1).tolist(), None
        q = probabilities(logits, [r.params for r in requests])
        seeds = np.array([r.seed for r in requests], dtype=np.uint64)
        positions = np.array([len(r.tokens) + len(draft) for r, draft in zip(requests, drafts, strict=True)])
        u = self._tensor(uniforms(seeds, positions, Purpose.DRAFT))
        return sample(q, u).tolist(), q


class MTPDrafter(ModelDrafter):
    """The target's own MTP module over its hidden pool, used again for every depth with its own hidden state.

    The row of position p reads token p and the hidden state of p - 1, so position 0 has none.
    """

    name = "mtp"
    shift = 1

    def __init__(
        self, module: MTPModule, runner: ModelRunner, pool: KVPool, *, dtype: torch.dtype, sampled: bool = True
    ) -> None:
        super().__init__(pool, runner.vocab_size, runner.device, sampled=sampled)
        assert runner.hidden is not None, "MTP reads the hidden pool: the runner must keep it"
        self.module, self.runner, self.target = module, runner, runner.model
        H = self.target.config.hidden_size
        self.weight_bytes = _bytes_of_layers(self.target.config, 1, dtype) + 2 * H * H * dtype.itemsize
        self.tenant = Tenant(self.target.config, 1, pool.num_slots, dtype=dtype, device=self.device)

    def forward(self, layout: StepLayout, carried: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ModelDrafter; the carried state is the module's own hidden state [B, H]."""
        if carried is None:  # shifted position p - 1 is where the target's hidden state of p - 1 lies
            rows = np.repeat(layout.table_rows, layout.q_lens)
            carried = self.runner.hidden.index_select(0, self._tensor(self.pool.table.slots[rows, layout.positions]))
        embedded = self.target.embedding(self._tensor(layout.token_ids))
        cos, sin = self.target.rotary(self._tensor(layout.positions))
        hidden = self.module(embedded, carried, cos, sin, self.tenant.attend(layout, self.table))  # [N, H]
        hidden = hidden.index_select(0, self._tensor(layout.logit_rows))  # [B, H]
        return self.target.logits(hidden), hidden


class StandaloneDrafter(ModelDrafter):
    """A smaller model with the target's tokenizer and K/V of its own in the shared slots."""

    name = "standalone"

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sampled: bool = True,
    ) -> None:
        super().__init__(pool, vocab_size, device, sampled=sampled)
        self.model, self.max_len = model, model.config.context_length
        self.weight_bytes = model.config.num_parameters * dtype.itemsize
        self.tenant = Tenant(model.config, model.config.num_layers, pool.num_slots, dtype=dtype, device=device)

    def forward(self, layout: StepLayout, carried: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ModelDrafter; nothing is carried."""
        attend = self.tenant.attend(layout, self.table)
        hidden = self.model.forward(self._tensor(layout.token_ids), self._tensor(layout.positions), attend)
        logits = self.model.logits(hidden.index_select(0, self._tensor(layout.logit_rows)))
        return logits, None


class EarlyExitDrafter(ModelDrafter):
    """The target's own first layers, then its norm and head. Their K/V are the target's: there is nothing to catch up.

    What a draft writes at its slot is what the target's first layers would write there for the same token.
    """

    name = "early-exit"

    def __init__(self, num_layers: int, runner: ModelRunner, pool: KVPool, *, sampled: bool = True) -> None:
        super().__init__(pool, runner.vocab_size, runner.device, sampled=sampled)
        self.num_layers, self.runner = num_layers, runner
        self.weight_bytes = _bytes_of_layers(runner.model.config, num_layers, runner.model.norm.weight.dtype)

    def cursor(self, request: Request) -> int:
        """The target itself has read all tokens but the last."""
        return request.kv_len

    def forward(self, layout: StepLayout, carried: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ModelDrafter; nothing is carried."""
        model = self.runner.model
        attend = self.runner.tenant.attend(layout, self.table)
        ids, positions = self._tensor(layout.token_ids), self._tensor(layout.positions)
        hidden = model.forward(ids, positions, attend, num_layers=self.num_layers)
        logits = model.logits(hidden.index_select(0, self._tensor(layout.logit_rows)))
        return logits, None


def _bytes_of_layers(config: ModelConfig, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes of some layers, the final norm and the head."""
    return replace(config, num_layers=num_layers, tie_embeddings=True).num_parameters * dtype.itemsize
