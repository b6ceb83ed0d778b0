"""The four tools that most tests need: a naive reference, a tag model, scripted drafters, and the ledger check.

The tag model is a target without arithmetic. Its "K/V" of a slot is the fingerprint of the token prefix that ends
there; a forward recomputes the fingerprint of every position that a row attends to and compares. A wrong slot, a
stale slot, a missing rollback, or a prefix hit on other tokens fails at once, at the place where it happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minispec.attention.naive import CausalAttention
from minispec.config import EngineConfig, SamplingParams
from minispec.core import Request, Row, Step, known_tokens
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.speculative.drafter import Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=16)
TIE = 1e-4  # a reference argmax whose margin is below this decides nothing


# The naive reference ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def reference_logits(model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [N, V] of a full recompute: no cache, no batch."""
    ids = torch.tensor(list(tokens))
    return model.logits(model.forward(ids, torch.arange(len(ids)), CausalAttention()))


def reference_greedy(model, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()):
    """Greedy ids of a full recompute for each token, and the smallest argmax margin met on the way."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(max_tokens):
        first, second = reference_logits(model, tokens)[-1].topk(2).values.tolist()
        margin = min(margin, first - second)
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :], margin


def assert_same_ids(got: list[int], expected: list[int], margin: float) -> None:
    """Equal ids, unless the reference itself was a near tie somewhere."""
    assert got == expected or margin < TIE, f"{got} is not {expected} (smallest margin {margin:.2e})"


# The tag model -----------------------------------------------------------------------------------------------------

LogitsOf = Callable[[Sequence[int]], Sequence[float]]


def fingerprints(tokens: Sequence[int], before: int = 7) -> list[int]:
    """One 61-bit number per position, of all tokens up to it; `before`: the number of the position before the first."""
    return list(itertools.accumulate(tokens, lambda h, t: (h * 1_000_003 + t + 1) % (2**61 - 1), initial=before))[1:]


def markov(vocab_size: int = 12, order: int = 2, seed: int = 0) -> LogitsOf:
    """Logits that depend on the last `order` tokens: text that repeats itself, as real text does."""

    def logits_of(tokens: Sequence[int]) -> np.ndarray:
        key = [seed, *(t + 1 for t in tokens[-order:])]
        return np.random.default_rng(key).normal(size=vocab_size) * 2

    cache: dict[tuple[int, ...], np.ndarray] = {}

    def cached(tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens[-order:])
        if key not in cache:
            cache[key] = logits_of(tokens)
        return cache[key]

    return cached


def token_ids(step: Step, row: Row) -> list[int]:
    """The row's tokens, with drafts that only the device knows."""
    return known_tokens(torch.tensor(row.token_ids), step.known).tolist()


class TagRunner:
    """A runner whose logits are a function of the token prefix and whose slots carry fingerprints."""

    weight_bytes, device = 1, torch.device("cpu")

    def __init__(self, num_slots: int, vocab_size: int, logits_of: LogitsOf) -> None:
        self.vocab_size, self.logits_of = vocab_size, logits_of
        self.tags = np.full(num_slots, -1, dtype=np.int64)
        self.moves = 0  # slots that were copied to others
        self.steps: list[list[tuple[str, int, int, int]]] = []  # per forward: (request, start, committed, drafts)
        self._known: dict[str, tuple[list[int], np.ndarray]] = {}  # request -> its latest tokens and fingerprints

    def _fingerprints(self, request_id: str, tokens: list[int]) -> np.ndarray:
        """`fingerprints`, those of the tokens that were the same at the latest forward not computed again."""
        known, tags = self._known.get(request_id, ([], np.zeros(0, dtype=np.int64)))
        same = len(known)
        while tokens[:same] != known[:same]:  # drafts were rejected, or another request has this name
            same -= 1
        new = fingerprints(tokens[same:], int(tags[same - 1])) if same else fingerprints(tokens)
        tags = np.concatenate([tags[:same], np.array(new, dtype=np.int64)])
        self._known[request_id] = tokens, tags
        return tags

    def forward(self, step: Step, table: np.ndarray) -> torch.Tensor:
        self.steps.append([(r.request.id, r.start, r.num_committed, len(r.drafts)) for r in step.rows])
        tokens = [row.request.tokens[: row.start] + token_ids(step, row) for row in step.rows]
        follow = [  # per row, what is said after its last committed token and after each draft
            [
                of_row[: row.end] + [of_row[row.end + draft] for draft in row.path(last)]
                for last in range(-1, len(row.drafts))
            ]
            for row, of_row in zip(step.rows, tokens, strict=True)
        ]
        expected = [
            self._fingerprints(row.request.id, of_row)
            if row.parents is None
            else np.array(fingerprints(of_row[: row.end]) + [fingerprints(sequence)[-1] for sequence in sequences[1:]])
            for row, of_row, sequences in zip(step.rows, tokens, follow, strict=True)
        ]
        slots = [table[row.request.table_row, : row.kv_len] for row in step.rows]
        for row, tags, places in zip(step.rows, expected, slots, strict=True):  # all writes come before all reads
            self.tags[places[row.start :]] = tags[row.start :]
        logits = []
        for row, sequences, tags, places in zip(step.rows, follow, expected, slots, strict=True):
            wrong = np.flatnonzero(self.tags[places] != tags)
            assert not len(wrong), f"{row.request.id} at {row.start}: foreign or stale K/V at positions {wrong[:5]}"
            for sequence in sequences if row.emits else ():
                logits.append(np.asarray(self.logits_of(sequence), dtype=np.float32))
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, self.vocab_size)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.moves += int((sources != targets).sum())
        self.tags[targets.numpy()] = self.tags[sources.numpy()]


def tag_greedy(logits_of: LogitsOf, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """What greedy decoding of a tag model must give."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(logits_of(tokens))))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def tag_engine(
    logits_of: LogitsOf | None = None,
    *,
    vocab_size: int = 12,
    slots: int = 512,
    context_length: int = 128,
    eos_ids: Sequence[int] = (),
    drafter=None,
    candidate_length: int = 4,
    tokenizer=None,
    device=None,
    **config,
) -> Engine:
    """An engine over the tag model; the ledger is checked after every step."""
    config.setdefault("page_size", 4)
    config.setdefault("enable_overlap", False)
    if drafter is not None:
        config.setdefault("speculative_config", {"candidate_length": candidate_length, "adaptive": False})
    config = EngineConfig(check_every_step=True, kv_cache_tokens=slots, **config)
    pool = KVPool(
        slots,
        config.page_size,
        num_rows=config.max_num_seqs,
        max_len=min(context_length, slots),
        enable_radix_cache=config.enable_radix_cache,
    )
    runner = TagRunner(pool.num_slots, vocab_size, logits_of or markov(vocab_size))
    drafters = [] if drafter is None else [drafter]
    return Engine(
        config,
        runner,
        pool,
        context_length=context_length,
        eos_ids=eos_ids,
        drafters=drafters,
        tokenizer=tokenizer,
        device=device,
    )


def run(engine: Engine, prompts: Sequence[Sequence[int]], params=GREEDY, limit: int = 10_000) -> list[Request]:
    """Run prompts to their end (with a bound on the steps) and return their requests, completions flattened."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [r for prompt, p in zip(prompts, each, strict=True) for r in engine.add(prompt, p)]
    finish(engine, limit)
    return requests


def finish(engine: Engine, limit: int = 10_000) -> None:
    """Step until nothing is queued; more than `limit` steps is a hang."""
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"still running after {limit} steps: {list(engine.requests)[:5]}")


def assert_idle(engine: Engine) -> None:
    """Nothing is held by anybody: every page is free or evictable."""
    ledger = engine.pool.check_integrity([])
    assert ledger.locked == ledger.private == 0 and not engine.scheduler.running and not engine.scheduler.waiting


# Scripted drafters -------------------------------------------------------------------------------------------------


class ScriptedDrafter:
    """Drafts that are right for a chosen number of positions and then wrong.

    `next_token(tokens)` is the target's greedy choice. `script`: how many drafts are right, step by step (per request,
    repeated for ever); None: always right.
    """

    name = "scripted"

    def __init__(self, next_token: Callable[[Sequence[int]], int], vocab_size: int, script=None) -> None:
        self.next_token, self.vocab_size, self.script = next_token, vocab_size, script
        self.calls: dict[Request, int] = {}
        self.released: list[str] = []

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        return Proposal([self._draft(r, k) for r, k in zip(requests, candidate_lengths, strict=True)])

    def _draft(self, request: Request, k: int) -> list[int]:
        call = self.calls.get(request, 0)
        self.calls[request] = call + 1
        right = k if self.script is None else self.script[call % len(self.script)]
        draft: list[int] = []
        for place in range(k):
            token = self.next_token(request.tokens + draft)
            draft.append(token if place < right else (token + 1) % self.vocab_size)
        return draft

    def release(self, request: Request) -> None:
        self.released.append(request.id)


class TreeDrafter:
    """Drafts random trees of all shapes, in which the target's choice is now and then among the children of a node.

    `next_token(tokens)`: the target's choice. `luck`: how often a draft that could be right is.
    """

    name = "trees"

    def __init__(self, next_token: Callable[[Sequence[int]], int], vocab_size: int, luck: float = 0.6) -> None:
        self.next_token, self.vocab_size, self.luck = next_token, vocab_size, luck

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        drafts = [self._draft(r.tokens, k) for r, k in zip(requests, candidate_lengths, strict=True)]
        return Proposal([tokens for tokens, _ in drafts], parents=[parents for _, parents in drafts])

    def _draft(self, tokens: Sequence[int], k: int) -> tuple[list[int], list[int]]:
        rng = np.random.default_rng([7, *tokens])
        draft, parents, right = [], [], -1  # right: the last node of the path that the target would take
        follows = self.next_token(tokens)
        for _ in range(k):
            parent = int(rng.choice([-1, *range(len(draft))])) if rng.random() < 0.5 else right
            taken = {token for token, its_parent in zip(draft, parents, strict=True) if its_parent == parent}
            free = [t for t in range(self.vocab_size) if t not in taken and (parent != right or t != follows)]
            hit = parent == right and rng.random() < self.luck
            parents.append(parent)
            draft.append(follows if hit else int(rng.choice(free)))
            if hit:
                right, path = len(draft) - 1, []
                node = right
                while node >= 0:
                    path.append(draft[node])
                    node = parents[node]
                follows = self.next_token([*tokens, *path[::-1]])
        return draft, parents

    def release(self, request: Request) -> None:
        pass


def scripted(logits_of: LogitsOf, vocab_size: int = 12, script=None) -> ScriptedDrafter:
    """A scripted drafter for a tag model."""
    return ScriptedDrafter(lambda tokens: int(np.argmax(logits_of(tokens))), vocab_size, script)
