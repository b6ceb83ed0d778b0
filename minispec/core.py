"""The nouns that everything else shares. Read this file first.

A `Request` is one sequence on its way from prompt to text. A `Step` is one forward pass; it holds one `Row` per
request that takes part. A prefill chunk, a decode step and a verification are all rows: they differ only in how
many tokens they bring.

    tokens     p0 p1 p2 p3 | t4 t5 t6              prompt | output, all committed
    kv_len     ------------------^                 positions whose target K/V is valid (here 6, token 6 is pending)
    cached_len ----^                               found in the radix tree at the latest admission
    tree_len   --------^                           owned by the radix tree now (locked), a whole number of pages
    slots      one per position up to allocated    [0, tree_len) the tree's, [tree_len, allocated) the request's own

While it runs, between steps: 0 <= cached_len <= kv_len < len(tokens), and kv_len == len(tokens) - 1 once it decodes.
With a step in flight, kv_len counts the prompt tokens that it reads, and `unread` what it may add to tokens.

Does not know: who schedules, stores or computes. Taught in notebook 00 (the map).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minispec.config import SamplingParams
from minispec.metrics import RequestMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from minispec.kv.radix import RadixNode
    from minispec.sampling.grammar import Constraint
    from minispec.text import TextStream


class Status(enum.Enum):
    """Where a request is. WAITING holds no slots; FINISHED never changes again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenKind(enum.Enum):
    """How an output token came to be.

    PLAIN: sampled without a draft at its position. ACCEPTED: drafted and kept.
    CORRECTED: sampled in place of a rejected draft. BONUS: sampled after a draft that was kept whole.
    """

    PLAIN = "plain"
    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of one output token and of the likeliest ones, {token id: logprob}."""

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class TokenEvent:
    """One committed output token as a stream consumer sees it; `text` is what became safe to show."""

    token_id: int
    kind: TokenKind
    text: str
    finish_reason: str | None
    logprob: TokenLogprob | None = None  # where it was asked for


@dataclass(eq=False)
class Request:
    """One sequence: what was asked, what is committed, and how far each cursor has come."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int  # key of its random numbers; params.seed or drawn once at admission
    max_len: int  # most tokens, prompt and output together
    eos_ids: frozenset[int] = frozenset()
    group: str = ""  # what the n completions of one prompt have in common
    index: int = 0  # which of them
    text: TextStream | None = None
    constraint: Constraint | None = None  # what a grammar lets it write
    on_token: Callable[[TokenEvent], None] | None = None  # called as each token is committed

    tokens: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    cached_len: int = 0
    kv_len: int = 0
    prefill_end: int = 0  # prefill is done when kv_len reaches this; set at each admission
    table_row: int | None = None  # its row of the slot table while RUNNING
    num_pages: int = 0  # pages in that row, the tree's and its own
    tree_len: int = 0
    node: RadixNode | None = None  # deepest tree node it has locked

    in_flight: int = 0  # launched steps with a row of it whose result is not in
    unread: int = 0  # most tokens that these may bring
    ending: str | None = None  # finish reason, known before the end is settled
    end: int | None = None  # tokens that stay when it ends, if some came behind a stop string

    kinds: list[TokenKind] = field(default_factory=list)  # one per output token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    created: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        # End tokens: the model's own unless ignored, and the caller's.
        own = frozenset() if self.params.ignore_eos else self.eos_ids
        self.stop_ids = own | frozenset(self.params.stop_token_ids)

    @property
    def output(self) -> list[int]:
        """Committed output token ids."""
        return self.tokens[len(self.prompt) : self.end]

    @property
    def num_output(self) -> int:
        return (len(self.tokens) if self.end is None else self.end) - len(self.prompt)

    @property
    def pending(self) -> int:
        """Committed tokens that the target has not read yet; 1 for a decoding request."""
        return len(self.tokens) - self.kv_len

    @property
    def in_prefill(self) -> bool:
        return self.kv_len < self.prefill_end

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def max_drafts(self) -> int:
        """Most draft tokens that can still be of use: the target adds one token of its own to every step.

        With a step in flight, as many as if it brought one token.
        """
        return max(0, self.max_len - len(self.tokens) - (self.unread > 0) - 1)


@dataclass
class Row:
    """One request's part of a forward: tokens[start : start + n] and then its drafts.

    A row that emits has the last of its request's tokens, so it yields logits for 1 + len(drafts) positions; a prefill
    chunk that stops earlier yields none.
    """

    request: Request
    start: int
    num_committed: int
    emits: bool = True
    carried: int | None = None  # its token is what this row of the step before, of those that emit, is going to choose
    carried_token: int = 0  # that token, once it is chosen; see Step.known
    max_drafts: int = 0  # draft tokens that are wanted and have slots and budget
    drafter: str = ""  # who drafts
    kind: int = 0  # of text, for those who compare drafters: tokens of the longest suffix that the text has said before
    drafts: list[int] = field(default_factory=list)
    q: Tensor | None = None  # [len(drafts), V] what the drafts were drawn from; None: chosen without chance
    parents: list[int] | None = None  # of a tree: the draft that each one follows, -1: the last token; None: a chain
    allowed: Tensor | None = None  # bool [1 + len(drafts), V] what a grammar lets follow the last token and each draft

    @property
    def q_len(self) -> int:
        """Tokens that this row brings to the forward."""
        return self.num_committed + len(self.drafts)

    @property
    def kv_len(self) -> int:
        """Positions that the last of them attends to, itself included."""
        return self.start + self.q_len

    @property
    def end(self) -> int:
        """Position of the first token that is not committed."""
        return self.start + self.num_committed

    @property
    def token_ids(self) -> list[int]:
        if self.carried is not None:
            return [self.carried_token]
        return self.request.tokens[self.start : self.end] + self.drafts

    @property
    def lineage(self) -> Sequence[int]:
        """The draft that each draft follows; -1: the last committed token. Parents come before their children."""
        return range(-1, len(self.drafts) - 1) if self.parents is None else self.parents

    def path(self, last: int) -> list[int]:
        """Numbers of the drafts from the first one to `last`, each the parent of the next; -1: none."""
        if self.parents is None:
            return list(range(last + 1))
        path = []
        while last >= 0:
            path.append(last)
            last = self.parents[last]
        return path[::-1]

    def keep(self, drafts: Sequence[int]) -> None:
        """Drop all drafts but these, in order; the parent of each of them is among them, too."""
        self.drafts = [self.drafts[draft] for draft in drafts]
        self.q = None if self.q is None else self.q[list(drafts)]
        if self.parents is not None:
            place = {draft: i for i, draft in enumerate(drafts)} | {-1: -1}
            self.parents = [place[self.parents[draft]] for draft in drafts]

    @property
    def depth(self) -> int:
        """Drafts on its longest path."""
        drafts = range(len(self.drafts))
        return max(len(self.path(draft)) for draft in drafts) if self.parents else len(drafts)

    def kinds(self, path: Sequence[int]) -> list[TokenKind]:
        """Of the tokens that it brings when the drafts of `path` are kept."""
        if not self.drafts:
            return [TokenKind.PLAIN]
        rejected = (path[-1] if path else -1) in self.lineage  # there were drafts behind it
        return [TokenKind.ACCEPTED] * len(path) + [TokenKind.CORRECTED if rejected else TokenKind.BONUS]

    @property
    def num_logits(self) -> int:
        """Positions of this row whose next token is wanted."""
        return 1 + len(self.drafts) if self.emits else 0


UNKNOWN = -2  # where a row's token ids are below zero: UNKNOWN - i stands for Step.known[i], -1 for no token at all


def known_tokens(token_ids: Tensor, known: Tensor | None) -> Tensor:
    """int64 of any shape: what stands for a token that only the device knows is replaced by that token."""
    return (
        token_ids if known is None else known[(UNKNOWN - token_ids).clamp(min=0)].where(token_ids <= UNKNOWN, token_ids)
    )


@dataclass
class Step:
    """The rows of one forward; N = sum of q_len packed tokens."""

    rows: list[Row]
    known: Tensor | None = None  # int64, tokens that only the device knows so far, see `known_tokens`

    @property
    def num_tokens(self) -> int:
        return sum(row.q_len for row in self.rows)

    def take_over(self, next_ids: Tensor) -> None:
        """Give the rows that carry a token the one that the step before has chosen; on a GPU it stays there."""
        on_host = next_ids.device.type == "cpu"
        self.known = None if on_host else next_ids
        for row in self.rows:
            if row.carried is not None:
                row.carried_token = int(next_ids[row.carried]) if on_host else UNKNOWN - row.carried

    @property
    def sampled(self) -> list[Row]:
        """Rows that yield logits, in order."""
        return [row for row in self.rows if row.emits]


@dataclass
class StepLayout:
    """A step as flat int64 arrays (host memory): what a forward needs, and nothing about requests."""

    q_lens: np.ndarray  # [B]
    kv_lens: np.ndarray  # [B] history of each row, its own tokens included
    table_rows: np.ndarray  # [B]
    token_ids: np.ndarray  # [N]
    positions: np.ndarray  # [N] by which the model tells near from far
    before: np.ndarray  # [N] place in its table row of the token that each one follows
    slots: np.ndarray  # [N] where the K/V of each token goes
    logit_rows: np.ndarray  # [R] packed rows whose logits are wanted
    # Of rows that end in a tree of n tokens: bool [m, n], which of these the last m tokens of the row see. All see all
    # that lies before the tree, and rows that are not named here see whatever is not behind them.
    trees: dict[int, np.ndarray] = field(default_factory=dict)


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """bool [n, n]: is node j on the way from the root to node i, or i itself? Parents come before their children.

    >>> ancestors([-1, 0, 0, 1]).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees
