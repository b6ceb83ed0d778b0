"""The module applied to itself: K depths of drafting over whole conversations at once, as at inference time.

A module that has only seen true hidden states drafts one token well and the next ones badly, because from then on it
reads its own. So it is trained on what it will meet ("training-time test", EAGLE-3, Li et al. 2025, section 3.2):

    depth 1   row p reads token[p] and the target's hidden[p - 1]           -> its hidden'  -> token p + 1
    depth 2   row p reads token[p] and the hidden' of depth 1 at p - 1      -> its hidden'' -> token p + 1

A chain of drafts that ends at row p of depth k began at row p - k + 1 of depth 1. Its query sees what the K/V hold at
inference: depth-1 rows up to where the chain began, then one row of each later depth.

    query at depth 3, row p:    1 1 1 1 1 1 2 3        keys of depth 1 up to p - 2, depth 2 at p - 1, itself

Knows: shapes, masks, the loss. Does not know: data files, optimisers. Taught in notebook 14 (how the head was made).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.func import functional_call

from minispec.models.llama import Attend, CausalLM
from minispec.models.mtp import MTPModule
from minispec.training.features import positions_of

LOSS_ROWS = 1024  # rows of logits that exist at the same time


class Batch(NamedTuple):
    """B conversations of L tokens, and what the target says after each position, in ids of the draft vocabulary.

    token_ids [B, L]. hidden [B, L, H]: the target's. spoken bool [B, L]: the next token is the assistant's, so this
    position is learnt. label [B, L]: the target's choice, -1 if the draft vocabulary lacks it. ids int64, probs
    float32 [B, L, TOP]: its likeliest tokens; probability 0 for those that the draft vocabulary lacks.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    spoken: torch.Tensor
    label: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


class DepthResult(NamedTuple):
    """learnt, right: bool [B, L - 1], rows that count and rows whose argmax is the target's; row i reads token i + 1.
    losses: cross-entropy in nats of the rows that count."""

    losses: torch.Tensor
    learnt: torch.Tensor
    right: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The mean, 0 if no row counts."""
        return self.losses.sum() / max(1, len(self.losses))


def unroll(module: MTPModule, target: CausalLM, head: torch.Tensor, batch: Batch, depths: int) -> list[DepthResult]:
    """Draft `depths` tokens from every position, in the dtype of `head` ([V', H], frozen): one result per depth.

    Gradients reach the module's parameters, whatever their dtype.
    """
    dtype = head.dtype
    B, rows = len(batch.token_ids), batch.token_ids.shape[1] - 1
    weights = {name: p.to(dtype) for name, p in module.named_parameters()}
    tokens = batch.token_ids[:, 1:]
    embedded = target.embedding(tokens.flatten()).to(dtype)  # [B * (L-1), H]
    cos, sin = (table.to(dtype) for table in target.rotary(positions_of(tokens)))
    state = batch.hidden[:, :-1].to(dtype)
    attention = UnrolledAttention(B, rows, state.device)
    label, ids, probs = batch.label[:, 1:], batch.ids[:, 1:], batch.probs[:, 1:]
    results = []
    for depth in range(1, depths + 1):
        attend = attention.at(depth)
        state = functional_call(module, weights, (embedded, state.flatten(0, 1), cos, sin, attend)).view(B, rows, -1)
        learnt = batch.spoken[:, 1:].clone()
        learnt[:, : depth - 1] = False  # these chains would have begun before the text
        losses, best = HeadLoss.apply(state[learnt], head, ids[learnt], probs[learnt])
        right = torch.zeros_like(learnt)
        right[learnt] = best == label[learnt]
        results.append(DepthResult(losses, learnt, right))
        state = torch.cat((torch.zeros_like(state[:, :1]), state[:, :-1]), 1)  # row p reads the state of p - 1
    return results


def acceptance(results: list[DepthResult]) -> tuple[list[float], float]:
    """(agreement per depth, acceptance length of greedy chains) from depth results on text that the target wrote.

    A chain from row i is right at depth k in row i + k - 1, and kept as far as all its drafts are right.
    """
    agreement = [r.right.sum().item() / max(1, r.learnt.sum().item()) for r in results]
    rows = results[0].learnt.shape[1] - len(results) + 1
    kept = counted = torch.ones_like(results[0].learnt[:, :rows])
    length = torch.zeros(kept.shape, device=kept.device)
    for k, result in enumerate(results):
        kept = kept & result.right[:, k : k + rows]
        counted = counted & result.learnt[:, k : k + rows]
        length += kept
    return agreement, 1 + (length * counted).sum().item() / max(1, counted.sum().item())


class UnrolledAttention:
    """Attention of all depths over B conversations of L rows; keeps the K/V of the depths before."""

    def __init__(self, batch_size: int, rows: int, device: torch.device) -> None:
        self.batch_size = batch_size
        index = torch.arange(rows, device=device)
        self.age = index[:, None] - index  # [L, L] how far key j lies before query i
        self.keys: list[torch.Tensor] = []  # one per depth, [B, Hkv, 1, L, D]
        self.values: list[torch.Tensor] = []

    def at(self, depth: int) -> Attend:
        """The `attend` of one depth, from 1: q [B * L, Hq, D], k and v [B * L, Hkv, D] -> [B * L, Hq, D]. To be called
        once for each depth in order, as each reads the K/V of the ones before."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            num_kv = k.shape[1]
            q, k, v = (x.unflatten(0, (self.batch_size, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, D]
            q = q.unflatten(1, (num_kv, -1)) * q.shape[-1] ** -0.5  # [B, Hkv, G, L, D]
            self.keys.append(k[:, :, None])
            self.values.append(v[:, :, None])
            scores = q @ self.keys[0].transpose(-1, -2)  # [B, Hkv, G, L, L]
            scores = scores.masked_fill(self.age < depth - 1, -torch.inf)
            # Of each later depth m a query sees one key, that of its own chain, depth - m rows before it.
            later = range(1, depth)
            own = [(q * _delayed(self.keys[m], depth - 1 - m)).sum(-1, keepdim=True) for m in later]
            weights = torch.cat((scores, *own), -1).softmax(-1)
            rows = scores.shape[-1]
            out = weights[..., :rows] @ self.values[0]  # [B, Hkv, G, L, D]
            for place, m in enumerate(later):
                out = out + weights[..., rows + place, None] * _delayed(self.values[m], depth - 1 - m)
            return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)

        return attend


def _delayed(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [..., L, D] moved `rows` to the back; what lies before the start repeats the first row and is never learnt."""
    return x if rows == 0 else torch.cat((x[..., :1, :].expand(*x.shape[:-2], rows, -1), x[..., :-rows, :]), -2)


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of the target's likeliest tokens under softmax(state @ head.T), with a head that does not learn.

    states [n, H], head [V', H], ids [n, TOP], probs [n, TOP] -> losses float32 [n], argmax int64 [n]. What probs lack
    to 1 is not learnt. The gradient is computed along the way, in blocks of rows, so [n, V'] never exists as a whole.
    """

    @staticmethod
    def forward(
        ctx, states: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses, best, grads = [], [], []
        for block, wanted, p in zip(states.split(LOSS_ROWS), ids.split(LOSS_ROWS), probs.split(LOSS_ROWS), strict=True):
            logits = (block @ head.T).float()
            log_total, mass = logits.logsumexp(-1, keepdim=True), p.sum(-1, keepdim=True)
            best.append(logits.argmax(-1))
            losses.append(mass[:, 0] * log_total[:, 0] - (p * logits.gather(-1, wanted)).sum(-1))
            slope = logits.sub_(log_total).exp_().mul_(mass).scatter_add_(-1, wanted, -p)
            grads.append(slope.to(head.dtype) @ head)
        ctx.save_for_backward(torch.cat(grads))
        best = torch.cat(best)
        ctx.mark_non_differentiable(best)
        return torch.cat(losses), best

    @staticmethod
    def backward(ctx, by_loss: torch.Tensor, _by_best: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """by_loss [n] -> the gradient by states [n, H]."""
        (grads,) = ctx.saved_tensors
        return (by_loss[:, None] * grads).to(grads.dtype), None, None, None
