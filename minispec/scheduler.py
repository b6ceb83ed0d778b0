"""Who takes part in the next forward, and with how many tokens.

Continuous batching (Orca, Yu et al. 2022, section 3.1): requests join and leave between any two forwards. Chunked
prefill (Sarathi, Agrawal et al. 2023): a prompt is read in pieces that share a forward with decoding requests, so a
long prompt never stops the others. One budget of tokens per forward is given out in this order:

1. every decoding request gets one row; when slots run out, what rejected drafts left over is taken back, then the
   request admitted last is preempted: it gives its slots back, waits at the head of the queue, and is computed again
   later (most of it comes from the radix cache);
2. room for draft tokens of the decoding requests, oldest first, where slots are free or hold cached prefixes, and only
   in pages that they hold already while the queue's head lacks pages (the controller may use less of it);
3. prompt chunks of admitted requests, oldest first;
4. admission, first come first served, when the whole prompt fits.

No request can wait for ever: the oldest running one is never preempted for another, a request always fits alone (its
length is limited to the pool), and while a prompt is being read, drafts leave a quarter of the budget to it.

Knows: requests, budgets, slots. Does not know: models, tensors, tokens' meaning, time.
Taught in notebooks 04 (continuous batching) and 05 (chunked prefill).
"""

from __future__ import annotations

from collections import deque

from minispec.config import EngineConfig
from minispec.core import Request, Row, Status, Step
from minispec.kv.pool import KVPool, pages_for


class Scheduler:
    """Owns the queue and the set of running requests (in order of admission)."""

    def __init__(self, config: EngineConfig, pool: KVPool) -> None:
        self.config, self.pool = config, pool
        self.chunk_size = config.chunked_prefill_size or config.max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._head_lacks_pages = False  # the first in the queue could not be admitted for want of pages

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request, *, keep: bool) -> None:
        """Take a request out wherever it is; `keep` leaves its computed prefix in the radix cache."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.pool.release(request, keep=keep)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def plan(self, candidate_length: int, *, ahead: bool = False) -> Step | None:
        """Choose the rows of the next forward and reserve their slots. An empty step means nothing can run.

        `Row.max_drafts` of a decoding row says how many draft tokens, at most `candidate_length`, have slots and
        budget. ahead: a step is in flight, so nothing can be taken from a request; None when that is necessary.
        """
        # 1) One row for everyone who decodes.
        rows = []
        if self._head_lacks_pages and not ahead:
            self._trim_drafts()
        for request in list(self.running):
            decoding = request.status is Status.RUNNING and not request.in_prefill
            if not decoding or request.ending or len(request.tokens) + (request.unread > 0) >= request.max_len:
                continue
            if ahead and not self.pool.reserve(request, len(request.tokens) + request.unread):
                return None
            if ahead or self._make_room(request):
                rows.append(Row(request, len(request.tokens) + request.unread - 1, 1))
        budget = self.config.max_num_batched_tokens - len(rows)
        # 2) Drafts.
        prefilling = [request for request in self.running if request.in_prefill and not request.ending]
        reading = prefilling or (self.waiting and len(self.running) < self.config.max_num_seqs)
        draft_budget = budget - (max(1, self.config.max_num_batched_tokens // 4) if reading else 0)
        for row in rows:
            row.max_drafts = self._draft_slots(row.request, min(candidate_length, draft_budget))
            draft_budget -= row.max_drafts
            budget -= row.max_drafts
        # 3) Prompt chunks of requests that hold slots already.
        for request in prefilling:
            budget -= self._add_chunk(rows, request, budget)
        # 4) New requests.
        self._head_lacks_pages = False
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if self._better_later(request) or not self._admit(request):
                break
            self.waiting.popleft()
            budget -= self._add_chunk(rows, request, budget)
        return Step(rows)

    def _add_chunk(self, rows: list[Row], request: Request, budget: int) -> int:
        size = min(request.prefill_end - request.kv_len, self.chunk_size, budget)
        if size > 0:
            emits = request.kv_len + size == len(request.tokens)
            rows.append(Row(request, request.kv_len, size, emits))
        return max(size, 0)

    def _draft_slots(self, request: Request, wanted: int) -> int:
        """Reserve up to `wanted` draft slots. Drafts preempt nobody and take no page that the queue's head lacks."""
        wanted, length = max(0, min(wanted, request.max_drafts)), len(request.tokens) + request.unread
        needed = min(length + wanted, request.max_len)
        if wanted and (self._head_lacks_pages or not self.pool.reserve(request, needed)):
            wanted = max(0, min(wanted, request.num_pages * self.pool.page_size - length))
        return wanted

    def _make_room(self, request: Request) -> bool:
        """Reserve the slot of the pending token; False if `request` itself had to be preempted.

        When slots are short, pages left over from rejected drafts go back first, then the youngest requests go.
        """
        if self.pool.reserve(request, len(request.tokens)):
            return True
        self._trim_drafts()
        while not self.pool.reserve(request, len(request.tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _trim_drafts(self) -> None:
        """Take back the pages that rejected drafts have left behind."""
        for request in self.running:
            self.pool.trim(request)

    def _preempt(self, request: Request) -> None:
        """Give its slots back and put it at the head of the queue. What it has computed stays cached until evicted."""
        self.running.remove(request)
        self.pool.release(request, keep=True)
        request.status = Status.WAITING
        request.metrics.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> bool:
        """Move a request from the queue to the running ones if the slots of all its tokens can be had."""
        cached = self.pool.admit(request)
        # One page of headroom for each running request, else the newcomer would be preempted in the next steps.
        needed = pages_for(len(request.tokens), self.pool.page_size) - request.num_pages + len(self.running)
        self._head_lacks_pages = not self.pool.available(needed)
        if self._head_lacks_pages:
            self.pool.release(request, keep=False)
            return False
        reserved = self.pool.reserve(request, len(request.tokens))
        assert reserved, "the pool promised these pages"
        if request.metrics.forwards == 0:  # a preempted request keeps the figure of its first admission
            request.metrics.cached_tokens = cached
        request.cached_len = cached
        request.prefill_end = len(request.tokens)
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _better_later(self, request: Request) -> bool:
        """True when most of what this request must compute is about to be computed by a running one.

        It waits, and those behind it (first come, first served), until the other has read what they share, and takes
        that from the radix cache: n completions of one prompt, or a burst of prompts with one long system prompt,
        compute the common part once.
        """
        reading = [other for other in self.running if len(other.tokens) == other.prefill_end]
        if not reading or not self.config.enable_radix_cache:
            return False
        cached, size = self.pool.tree.match(request.tokens[:-1]).length, self.pool.page_size
        # More than half of the rest, in whole pages. The tree may lack it until the other has its first token.
        shared = size * pages_for((len(request.tokens) + cached) // 2 + 1, size)
        if shared >= len(request.tokens):
            return False
        prefix = request.tokens[:shared]
        return any(other.prefill_end >= shared and other.tokens[:shared] == prefix for other in reading)
