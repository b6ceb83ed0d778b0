"""Drafting with a model: catch up with the committed tokens, then extend with its own output.

A draft row lives at the slot of the last token that it has read, so everything stored at slot p depends on tokens 0..p
only, and whatever the radix tree finds is valid for the draft model as well. The same holds for hidden states.

    position      0 1 2 3 4 5 6 7 8 9        tokens 0..6 are committed, K = 3
    exact         x x x x . . .              rows computed from committed tokens (and true hidden states)
    catch up              o o o              one ragged forward; its last output is draft 7
    extend                      ~ ~          rows of drafts 7 and 8 give drafts 8 and 9; not exact, overwritten later

With topk > 1 the drafts are a tree (growing.py), and a forward extends a whole level of it. Of its draft rows nothing
is kept, so they need not follow the accepted path when the target's do.

One bit per slot says whether its draft row is exact; the cursor of a request is the length of its exact run. A prompt
read in chunks, a prefix from the cache, a draft kept in part, a step without drafts, a preemption: all of them only
leave the run shorter, and the next catch-up closes the gap.

Knows: slots, cursors, how to choose draft tokens and report q. Does not know: how drafts are judged.
Taught in notebooks 10 (the MTP head) and 12 (speculation inside the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minispec.config import MAX_CANDIDATE_LENGTH
from minispec.core import UNKNOWN, Request, StepLayout
from minispec.device import upload
from minispec.graphs import Program
from minispec.kv.pool import KVPool
from minispec.models.llama import CausalLM
from minispec.models.mtp import MTPWeights
from minispec.runner import ModelRunner, Segment, Tenant, pack
from minispec.sampling.distribution import needs_processing, probabilities, process_logits, sample
from minispec.sampling.rng import Purpose, uniforms
from minispec.speculative.drafter import Proposal
from minispec.speculative.growing import GrowingTree

CATCH_UP_ROWS = 512  # most rows of one request in one catch-up forward; a long prompt takes several


class ModelDrafter:
    """What all drafters with a model share. Subclasses say how one forward is done.

    runner: the target's. pool: slots, table and exact bits. sampled: draw drafts from q at the request's own
    parameters when it samples; otherwise take the argmax and report a one-hot q. Both are exact. least_confidence: see
    `SpeculativeConfig.draft_confidence_threshold`. topk: drafts that follow each token, a chain with 1, else a tree.
    depth: most drafts in a row. Subclasses pass all but the first two on.
    """

    name: str
    weight_bytes: int  # read to draft one token, the head included
    deeper_bytes = 0  # read besides in a catch-up, by the models behind the first
    chain = 1  # models that draft in turn, one for each depth; the last one drafts at all depths behind
    shift = 0  # positions before it have no draft row
    max_len: int | None = None  # positions that the draft model can number; longer requests are not drafted
    program: Program  # see `_program`
    draft_ids: torch.Tensor | None = None  # int64 [V'], the target's id of each logit; None: they are the same

    def __init__(
        self,
        runner: ModelRunner,
        pool: KVPool,
        *,
        sampled: bool = True,
        least_confidence: float = 0.0,
        topk: int = 1,
        depth: int = MAX_CANDIDATE_LENGTH,
    ) -> None:
        self.pool, self.sampled, self.least_confidence, self.topk, self.depth = (
            pool,
            sampled,
            least_confidence,
            topk,
            depth,
        )
        self.vocab_size, self.num_text_tokens = runner.vocab_size, runner.num_text_tokens
        self.device = self.target_device = runner.device  # where drafts are computed, where they are verified
        self.attention = runner.attention
        self.forwards = self.bytes_read = 0

    def forward(self, segments: Sequence[Segment], depth: int, known: torch.Tensor | None) -> torch.Tensor:
        """Run draft rows and keep what they leave at their slots -> logits [B, V'] float32 where segments want them.

        known: the drafts of this round, on the draft's device, see `core.known_tokens`.

        depth 0 is a catch-up. At depth j each request brings its newest draft; in a chain of M models, all j drafts
        while j < M, because the model whose turn it is has read none of them.
        """
        layout, table = self._layout(segments)
        return self._program(depth)(layout, table, known=known)

    def _program(self, depth: int) -> Program:
        """What runs at this depth: `program`, unless a subclass says more."""
        return self.program

    @property
    def shared_programs(self) -> list[Program]:
        """Those that compute with the target's layers or its hidden states: all processes of a group run them."""
        return []

    def record(self, batches: Sequence[int], candidate_length: int) -> None:
        """Capture what a round of so many drafts runs: a catch-up after a verification, and one row for each draft."""
        for depth in range(candidate_length):
            longest = candidate_length + 1 if depth == 0 else depth if depth < self.chain else 1
            self._program(depth).record((batch, q_len) for batch in batches for q_len in {1, longest})

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """See `Drafter.propose`. Slots for the drafts must be reserved.

        The host launches the whole round without seeing a token, unless it must: to end a draft by its confidence, to
        let drafts count for the penalties of the next ones, or to choose what grows in a tree, once for each level.
        """
        lengths = [self._clip(request, k) for request, k in zip(requests, candidate_lengths, strict=True)]
        trees = [
            GrowingTree(request, k, min(k, self.depth), self.topk) for request, k in zip(requests, lengths, strict=True)
        ]
        unseen = self.topk == 1 and not self.least_confidence
        unseen &= not any(needs_processing(tree.request.params) for tree in trees if tree.level)
        depth, known = 0, None
        while active := [tree for tree in trees if tree.level]:
            drafting = [tree.request for tree in active]
            if depth == 0:
                logits = self._catch_up(drafting)
            else:
                segments = [tree.segment(everything=depth < self.chain) for tree in active]
                logits = self._run(drafting, segments, depth, known)
            nodes = [(tree, node) for tree in active for node in tree.level]  # in the order of the logits
            if self.least_confidence:
                kept = self._confident(logits)
                nodes, logits = [nodes[i] for i in kept], logits[kept]
            if nodes:
                ids, chances, qs = self._choose(logits, nodes)
                if unseen:
                    first = 0 if known is None else len(known)
                    known = ids[:, 0] if known is None else torch.cat((known, ids[:, 0]))
                    children = [[(UNKNOWN - first - i, 1.0)] for i in range(len(nodes))]
                else:
                    children = _seen(ids, chances)
                for i, ((tree, node), its_children) in enumerate(zip(nodes, children, strict=True)):
                    for rank, (token, chance) in enumerate(its_children):
                        tree.add(node, token, chance, qs[rank][i] if self._draws(tree.request) else None)
            for tree in active:
                tree.next_level()
            depth += 1
        drafts = [tree.best() for tree in trees]
        return Proposal(*([draft[part] for draft in drafts] for part in range(3)), known)

    def release(self, request: Request) -> None:  # noqa: B027
        """Nothing is kept per request: exact bits belong to slots."""

    def cursor(self, request: Request) -> int:
        """Positions [shift, cursor) hold exact draft rows. The last committed token is not counted: it must be run."""
        last = len(request.tokens) - 1
        exact = self.pool.draft_exact[self.pool.slots(request)[self.shift : last]]
        gap = np.flatnonzero(~exact)
        return self.shift + int(gap[0]) if len(gap) else max(last, self.shift)

    def _clip(self, request: Request, k: int) -> int:
        """Drafts that the draft model has positions for; none before it has a first row, at each depth of a tree."""
        if len(request.tokens) <= (self.shift if self.topk == 1 else self.chain):
            return 0
        return k if self.max_len is None else max(0, min(k, self.max_len - len(request.tokens) + 1))

    def _catch_up(self, requests: Sequence[Request]) -> torch.Tensor:
        """Make all rows up to the last committed token exact; the outputs of that token's rows."""
        while True:
            # Those that need more than one forward go first, alone; then all of them end in the same forward.
            behind = [r for r in requests if len(r.tokens) - self.cursor(r) > CATCH_UP_ROWS]
            segments = []
            for request in behind or requests:
                start = self.cursor(request)
                chunk = request.tokens[start : start + CATCH_UP_ROWS]
                segments.append(Segment(request.table_row, start, chunk, 0 if behind else 1))
            logits = self._run(behind or requests, segments, 0)
            for row, start, chunk, *_ in segments:
                self.pool.draft_exact[self.pool.table.slots[row, start : start + len(chunk)]] = True
            if not behind:
                return logits

    def _run(
        self, requests: Sequence[Request], segments: Sequence[Segment], depth: int, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward`, counted: in a catch-up all models of a chain read the rows."""
        count = self.chain if depth == 0 else 1
        read = self.weight_bytes + (self.deeper_bytes if depth == 0 else 0)
        self.forwards += count
        self.bytes_read += read
        for request in requests:
            request.metrics.draft_forwards += count
            request.metrics.draft_bytes += read
        return self.forward(segments, depth, None if known is None else known.to(self.device))

    def _layout(self, segments: Sequence[Segment], shift: int = 0) -> tuple[StepLayout, np.ndarray]:
        """Pack the rows from position `shift` on, counted from there; also the table, position - shift -> slot."""
        table = self.pool.table.slots[:, shift:]
        later = [
            s._replace(start=max(s.start - shift, 0), token_ids=s.token_ids[max(shift - s.start, 0) :])
            for s in segments
            if s.start + len(s.token_ids) > shift
        ]
        return pack(later, table), table

    def _to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary: ids that the draft model lacks, and padding, get probability 0."""
        if self.draft_ids is not None:
            whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.draft_ids, logits)
        text = logits[:, : self.num_text_tokens]
        return torch.nn.functional.pad(text, (0, self.vocab_size - text.shape[-1]), value=-torch.inf)

    def _confident(self, logits: torch.Tensor) -> list[int]:
        """Rows whose likeliest token has at least `least_confidence`.

        That is decided before a token is drawn: to drop a draft because of what was drawn would change its q.
        """
        confidence = torch.exp(logits.amax(-1) - logits.logsumexp(-1))
        return torch.nonzero(~(confidence < self.least_confidence))[:, 0].tolist()  # NaN is for _choose to see

    def _draws(self, request: Request) -> bool:
        """Are its drafts drawn by chance?"""
        return self.sampled and not request.params.greedy

    def _choose(
        self, logits: torch.Tensor, nodes: Sequence[tuple[GrowingTree, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """From the nodes' logits [n, V'] their children: ids [n, topk] (-1 where logits are not finite), chances alike.

        Also, for each rank of children, q [n, V], if any of them is drawn by chance. All on the target's device.
        """
        ids, chances, qs = self._chosen(logits, nodes)
        sound = torch.isfinite(logits.amax(-1))  # a NaN is the maximum of its row
        ids = torch.where(sound.to(ids.device)[:, None], ids, -1)
        return ids.to(self.target_device), chances.to(self.target_device), qs

    def _chosen(
        self, logits: torch.Tensor, nodes: Sequence[tuple[GrowingTree, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        requests = [tree.request for tree, _ in nodes]
        rows = [tree.logit_row(node) if needs_processing(tree.request.params) else None for tree, node in nodes]
        drawn = np.array([self._draws(request) for request in requests])
        if not drawn.any() and not any(rows):  # the common case needs no row over the whole vocabulary
            if self.draft_ids is not None:
                ids, chances = _likeliest(logits, self.topk)
                return self.draft_ids[ids], chances, []
            return *_likeliest(logits[:, : self.num_text_tokens], self.topk), []
        logits = process_logits(self._to_target(logits).to(self.target_device), rows)
        ids, chances = _likeliest(logits, self.topk)
        if not drawn.any():
            return ids, chances, []
        q, columns, qs = probabilities(logits, [request.params for request in requests]), [], []
        random = (self._uniforms(nodes, rank) for rank in range(ids.shape[1]))
        by_chance, *random = upload(self.target_device, drawn[:, None], *random)
        if self.topk > 1:
            chances = torch.where(by_chance, q.topk(ids.shape[1]).values, chances)
        for u in random:  # without replacement: each time what was drawn is taken out
            if columns:
                q = q.scatter(-1, columns[-1][:, None], 0.0)
                q = q / q.sum(-1, keepdim=True)
            columns.append(sample(q, u))
            qs.append(q)
        return torch.where(by_chance, torch.stack(columns, -1), ids), chances, qs

    def _uniforms(self, nodes: Sequence[tuple[GrowingTree, int]], rank: int) -> np.ndarray:
        """float64 [n] to draw the child of that rank with; no two drafts of a request share one."""
        seeds = np.array([tree.request.seed for tree, _ in nodes], dtype=np.uint64)
        positions = np.array([len(tree.request.tokens) + tree.depth for tree, _ in nodes])
        branches = np.array([tree.level.index(node) * self.topk + rank for tree, node in nodes])
        return uniforms(seeds, positions, Purpose.DRAFT, branches)


class MTPDrafter(ModelDrafter):
    """The target's own MTP modules over its hidden pool, module k for the k-th draft of a step.

    The row of module k at position p reads token p and the hidden state of module k - 1 at p - 1 (module 0 is the
    target), so its first row is at position k, and it depends on tokens 0..p only. For drafts past the last module
    (all but the first, of a single one) the last reads its own hidden states.
    """

    name = "mtp"
    shift = 1

    def __init__(
        self, weights: MTPWeights, runner: ModelRunner, pool: KVPool, *, dtype: torch.dtype, **choice: Any
    ) -> None:
        super().__init__(runner, pool, **choice)
        assert runner.hidden is not None, "MTP reads the hidden pool: the runner must keep it"
        self.modules, self.head, self.draft_ids = weights.modules, weights.head, weights.draft_ids
        self.target, self.chain = runner.model, len(self.modules)
        self.embedding, self.rotary = weights.embedding or self.target.embedding, weights.rotary
        config = weights.config
        self.weight_bytes = weights.module_bytes + weights.head_bytes
        self.deeper_bytes = (self.chain - 1) * weights.module_bytes
        if weights.layers:
            runner.keep_layers(weights.layers)
        own = runner.hidden.new_zeros(len(runner.hidden), config.hidden_size)
        self.hidden = [runner.hidden, *(own.clone() for _ in self.modules)]  # by module, 0..M
        where = {"dtype": dtype, "device": self.device, "attention": runner.attention}
        self.tenants = [Tenant(config, 1, pool.num_slots, **where) for _ in self.modules]
        self.programs = {
            (k, source): Program(partial(self._body, k, source), self.tenants[k - 1], num_extra=1, last_only=True)
            for k in range(1, self.chain + 1)
            for source in {k - 1, k}
        }

    def forward(self, segments: Sequence[Segment], depth: int, known: torch.Tensor | None) -> torch.Tensor:
        """See ModelDrafter."""
        logits = self._rows(min(depth + 1, self.chain), min(depth, self.chain), segments, known)
        if depth == 0:
            for k in range(2, self.chain + 1):
                self._rows(k, k - 1, [s._replace(num_logits=0) for s in segments], known)
        return logits

    def _rows(
        self, k: int, source: int, segments: Sequence[Segment], known: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Module k reads the hidden states of module `source`: logits [B, V'] where segments want them."""
        if not any(s.start + len(s.token_ids) > k for s in segments):
            return None  # too early in the sequence for a row
        layout, table = self._layout(segments, shift=k)
        before = self.pool.table.slots[np.repeat(layout.table_rows, layout.q_lens), layout.before + k]
        return self.programs[k, source](layout, table, before, known=known)

    def _body(
        self, k: int, source: int, columns: Sequence[torch.Tensor], plan: Any, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        token_ids, positions, slots, before = columns
        cos, sin = self.rotary(positions)
        embedded, read = self.embedding(token_ids), self.hidden[source].index_select(0, before)
        hidden = self.modules[k - 1](embedded, read, cos, sin, self.tenants[k - 1].attend(plan))  # [N, H]
        self.hidden[k].index_copy_(0, slots, hidden)
        read = hidden if wanted is None else hidden.index_select(0, wanted)
        return self.head(read).float() if len(read) else read

    def _program(self, depth: int) -> Program:
        return self.programs[min(depth + 1, self.chain), min(depth, self.chain)]

    @property
    def shared_programs(self) -> list[Program]:
        """See ModelDrafter."""
        return list(self.programs.values())


class EagleDrafter(MTPDrafter):
    """An EAGLE head: one module, whose first hidden states may be of several layers of the target (models/eagle.py)."""

    name = "eagle"


class StandaloneDrafter(ModelDrafter):
    """A smaller model with the target's tokenizer and K/V of its own in the shared slots, on any device."""

    name = "standalone"

    def __init__(self, model: CausalLM, runner: ModelRunner, pool: KVPool, **choice: Any) -> None:
        super().__init__(runner, pool, **choice)
        config, norm = model.config, model.norm.weight
        self.max_len, self.device = config.context_length, norm.device
        self.weight_bytes = model.bytes_read()
        self.tenant = Tenant(
            config, config.num_layers, pool.num_slots, dtype=norm.dtype, device=norm.device, attention=self.attention
        )
        self.program = _causal_program(model, self.tenant)


class EarlyExitDrafter(ModelDrafter):
    """The target's own first layers, then its norm and head. Their K/V are the target's: there is nothing to catch up.

    What a draft writes at its slot is what the target's first layers would write there for the same token.
    """

    name = "early-exit"

    def __init__(self, num_layers: int, runner: ModelRunner, pool: KVPool, **choice: Any) -> None:
        super().__init__(runner, pool, **choice)
        self.weight_bytes = runner.model.bytes_read(range(num_layers))
        self.program = _causal_program(runner.model, runner.tenant, num_layers)

    def cursor(self, request: Request) -> int:
        """The target itself has read all tokens but the last."""
        return request.kv_len

    @property
    def shared_programs(self) -> list[Program]:
        """See ModelDrafter."""
        return [self.program]


def _causal_program(model: CausalLM, tenant: Tenant, num_layers: int | None = None) -> Program:
    """Drafting with a whole model, or with its first layers."""

    def body(columns: Sequence[torch.Tensor], plan: Any, wanted: torch.Tensor | None) -> torch.Tensor:
        token_ids, positions, _ = columns
        hidden = model.forward(token_ids, positions, tenant.attend(plan), num_layers=num_layers)
        return model.logits(hidden if wanted is None else hidden.index_select(0, wanted))

    return Program(body, tenant, last_only=True)


def _likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] -> the k likeliest ids [n, k] and their chances [n, k]; of one alone the chance does not matter."""
    if k == 1:
        ids = logits.argmax(-1, keepdim=True)
        return ids, torch.ones(ids.shape, device=ids.device)
    top = logits.topk(min(k, logits.shape[-1]))
    return top.indices, (top.values - logits.logsumexp(-1, keepdim=True)).exp()


def _seen(ids: torch.Tensor, chances: torch.Tensor) -> list[list[tuple[int, float]]]:
    """ids, chances [n, k] in host memory, without those of no chance. Raises FloatingPointError for a bad row."""
    rows = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), chances.tolist(), strict=True)]
    if any(token == -1 for row in rows for token, _ in row):
        raise FloatingPointError("the draft model's logits are not finite")
    return [[(token, chance) for token, chance in row if chance > 0] for row in rows]
