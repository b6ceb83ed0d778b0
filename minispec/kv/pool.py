"""Slots, pages and who owns them: the ledger of the K/V memory.

Knows: page numbers, slot numbers, table rows, and for each request which part of its row belongs to the radix tree.
A slot stores one position (of every layer, and of every other tenant of the slot ids); page p is the slots
p * page_size up to (p + 1) * page_size. Does not know: what is computed, when a request should run, or that steps may
still be in flight. All bookkeeping is host memory; only `KVCache` holds tensors, and the pool works without one.

Every page has exactly one owner, so    free + cached (evictable) + cached (locked) + private == all.

    alloc            commit_prefix                  lock / unlock
    free --> private -------------> cached (locked) <----------> cached (evictable)
     ^          |                                                        |
     +----------+---------------------- free, evict ---------------------+

Taught in notebooks 03 (pages), 06 (radix tree), 07 (locks and eviction) and 12 (speculation inside the engine).
After PagedAttention in vLLM (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving", 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from minispec.core import Request, Row
from minispec.kv.radix import RadixTree


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. Internal: `KVPool.reserve` asks first."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed, self.free = needed, free


class PageAllocator:
    """A stack of free page ids: the last pages freed are the first handed out.

    A fresh allocator hands out 0, 1, 2, ..., and freed pages come back in the order in which they were freed, so a
    request that is alone gets consecutive pages every time (consecutive slots can be read without a gather).

    >>> pages = PageAllocator(4)
    >>> first = pages.alloc(3)
    >>> pages.free(first[:2])
    >>> first.tolist(), pages.alloc(3).tolist(), pages.num_free
    ([0, 1, 2], [0, 1, 3], 0)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack = np.arange(num_pages, dtype=np.int64)[::-1].copy()  # the top is at num_free - 1
        self._is_free = np.ones(num_pages, dtype=bool)

    @property
    def free_pages(self) -> np.ndarray:
        """int64 [num_free], next to be handed out first."""
        return self._stack[: self.num_free][::-1]

    def alloc(self, n: int) -> np.ndarray:
        """Take n pages, int64 [n]. Raises OutOfPages, and takes none, when fewer are free."""
        if n > self.num_free:
            raise OutOfPages(n, self.num_free)
        pages = self.free_pages[:n].copy()
        self.num_free -= n
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back. Asserts that each was taken and is named once."""
        n = len(pages)
        assert not n or 0 <= pages.min() <= pages.max() < self.num_pages, f"page ids {pages} out of range"
        assert len(set(pages.tolist())) == n and not self._is_free[pages].any(), f"double free among pages {pages}"
        self._stack[self.num_free : self.num_free + n] = pages[::-1]
        self.num_free += n
        self._is_free[pages] = True


class KVCache:
    """The tensors: k and v [L, num_slots, Hkv, D]. Zeros, so that a slot read before it was written is finite.

    value_size: numbers per value where it is not D. With 0, v is empty: the values are the first numbers of the keys.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads)
        self.k = torch.zeros(*shape, head_size, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, head_size if value_size is None else value_size, dtype=dtype, device=device)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one position takes, all layers, keys and values."""
        return (self.k[:, 0].numel() + self.v[:, 0].numel()) * self.k.element_size()


class SlotTable:
    """Position -> slot: one row per running request. slots: int64 [num_rows, max_len rounded up to whole pages].

    Entries behind a request's allocated pages are left over from earlier and mean nothing.
    """

    def __init__(self, num_rows: int, max_len: int, page_size: int) -> None:
        self.slots = np.zeros((num_rows, pages_for(max_len, page_size) * page_size), dtype=np.int64)
        self._free_rows = list(range(num_rows))[::-1]

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def acquire_row(self) -> int:
        """Take a row. The caller sees to it that one is free."""
        assert self._free_rows, f"all {len(self.slots)} rows of the slot table are taken"
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        """Give a row back. Asserts that it was taken."""
        assert 0 <= row < len(self.slots) and row not in self._free_rows, f"row {row} is not taken"
        self._free_rows.append(row)

    def row(self, row: int) -> np.ndarray:
        """A view: row(r)[position] is the slot of that position."""
        return self.slots[row]


class Ledger(NamedTuple):
    """Pages by owner. The four add up to all pages of the pool."""

    free: int
    cached: int  # in the radix tree, evictable
    locked: int  # in the radix tree, held by a request
    private: int  # a request's own


class KVPool:
    """Hands slots to requests and takes them back. The scheduler calls, per request and in this order:

    admit -> reserve before each step -> commit_prefix (end of prefill) -> reserve ... -> release

    Taking back drafts needs no call: positions from kv_len on are simply written again.
    A release or commit_prefix frees pages at once: the caller waits until no launched step can still touch them.
    """

    def __init__(
        self, num_slots: int, page_size: int, *, num_rows: int, max_len: int, enable_radix_cache: bool = True
    ) -> None:
        """num_slots is rounded down to whole pages. num_rows: most requests at once; max_len: most tokens of one."""
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self.num_slots = self.num_pages * page_size
        self.enable_radix_cache = enable_radix_cache
        self.allocator = PageAllocator(self.num_pages)
        self.table = SlotTable(num_rows, max_len, page_size)
        self.tree = RadixTree(page_size)  # stays empty when the cache is off
        # Does the slot hold an exact draft row of its token? The drafter sets it; a slot starts without.
        self.draft_exact = np.zeros(self.num_slots, dtype=bool)

    @property
    def num_free_pages(self) -> int:
        return self.allocator.num_free

    @property
    def num_evictable_pages(self) -> int:
        return self.tree.num_evictable // self.page_size

    def available(self, num_pages: int) -> bool:
        """Could `num_pages` pages be had now, evicting if need be?"""
        return num_pages <= self.num_free_pages + self.num_evictable_pages

    def slots(self, request: Request) -> np.ndarray:
        """The slots of all its allocated positions, a view of its table row, int64 [num_pages * page_size]."""
        return self.table.row(request.table_row)[: request.num_pages * self.page_size]

    def admit(self, request: Request) -> int:
        """Give the request a table row and lock its longest stored prefix; return that prefix's length in tokens.

        Sets table_row, node, tree_len, num_pages and kv_len. The last token is never looked up: the target must read
        at least one token to say what comes next.
        """
        assert request.table_row is None, f"request {request.id!r} is admitted already"
        found = self.tree.match(request.tokens[:-1])
        self.tree.lock(found.node)
        request.table_row = self.table.acquire_row()
        self.table.row(request.table_row)[: found.length] = found.slots
        request.node = found.node
        request.tree_len = request.kv_len = found.length
        request.num_pages = found.length // self.page_size
        return found.length

    def reserve(self, request: Request, length: int) -> bool:
        """See to it that positions [0, length) have slots, evicting cached prefixes when too few pages are free.

        False, and nothing changed, when even that is not enough.
        """
        width = self.table.slots.shape[1]
        assert length <= width, f"request {request.id!r}: {length} positions in a table row of {width}"
        missing = pages_for(length, self.page_size) - request.num_pages
        if missing <= 0:
            return True
        if not self.available(missing):
            return False
        if missing > self.num_free_pages:
            self.evict(missing - self.num_free_pages)
        row, start = self.table.row(request.table_row), request.num_pages * self.page_size
        pages = self.allocator.alloc(missing)
        slots = pages[:, None] * self.page_size + np.arange(self.page_size)  # [missing, page_size]
        row[start : start + slots.size] = slots.reshape(-1)
        self.draft_exact[slots] = False
        request.num_pages += missing
        return True

    def evict(self, num_pages: int) -> None:
        """Free cached pages that no request holds, those used longest ago first; as many as there are at most."""
        self.allocator.free(self._pages(self.tree.evict(num_pages)))

    def trim(self, request: Request) -> None:
        """Give back the whole pages past its committed tokens, left over from drafts that were not kept."""
        keep = pages_for(len(request.tokens), self.page_size)
        if keep < request.num_pages:
            self.allocator.free(self._pages(self.slots(request)[keep * self.page_size :]))
            request.num_pages = keep

    def moves(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """How to bring accepted paths of trees to consecutive positions: int64 targets [B, D], sources [R, D], slots.

        When the last logits row that counts of request b is r, what lies at the slots sources[r] belongs to targets[b].
        D is the length of the longest path. Shorter ones, and rows without drafts, are filled with moves that do
        nothing: of a slot to itself, or of the last committed token's.
        """
        paths = [[row.path(last) for last in range(-1, len(row.drafts))] for row in rows]
        depth = max(len(path) for its_paths in paths for path in its_paths)
        targets, sources = [], []
        for row, its_paths in zip(rows, paths, strict=True):
            window = self.slots(row.request)[row.end - 1 :]  # [0] is the last committed token's
            own = [place if place <= len(row.drafts) else 0 for place in range(1, depth + 1)]
            targets.append(window[own])
            sources += [window[[1 + draft for draft in path] + own[len(path) :]] for path in its_paths]
        return np.stack(targets), np.stack(sources)

    def repoint(self, row: Row, path: Sequence[int]) -> None:
        """With pages of one slot nothing is moved: positions from `row.end` on name the slots of the drafts in `path`.

        The slots of the other drafts come behind them. Does nothing with larger pages, or for a chain.
        """
        if row.parents and self.page_size == 1:
            window = self.slots(row.request)[row.end : row.end + len(row.drafts)]
            window[:] = window[[*path, *(draft for draft in range(len(window)) if draft not in path)]]

    def commit_prefix(self, request: Request, length: int | None = None) -> None:
        """Hand the whole pages of tokens[:length] to the radix tree, and keep them locked while the request goes on.

        length: positions whose K/V are computed, kv_len unless given.

                  0          tree_len       present        whole     kv_len   allocated
        before    |  the tree's  |  request's  |  request's  |      request's      |
        after     |  the tree's  |  the tree's |  the tree's |      request's      |
                                  own pages freed,  become
                                  row re-pointed    the tree's

        [tree_len, present) is what other requests stored meanwhile: the same tokens at the same positions, so the
        same K/V. Sets node and tree_len (= whole). Does nothing when the radix cache is off.
        """
        if not self.enable_radix_cache:
            return
        row, old = self.table.row(request.table_row), request.tree_len
        whole = (request.kv_len if length is None else length) // self.page_size * self.page_size
        node, present = self.tree.insert(request.tokens[:whole], row[:whole])
        assert old <= len(present), f"request {request.id!r}: part of its locked prefix has left the tree"
        self.allocator.free(self._pages(row[old : len(present)]))
        row[old : len(present)] = present[old:]
        # The new lock comes first, so that the path is held all the time.
        self.tree.lock(node)
        self.tree.unlock(request.node)
        request.node, request.tree_len = node, whole

    def release(self, request: Request, keep: bool = True) -> None:
        """Take everything back: at the end, at an abort, at a preemption. `keep` leaves its prefix in the radix tree.

        Resets table_row, node, tree_len, num_pages and kv_len. Asserts that the request was admitted and not yet
        released.
        """
        assert request.table_row is not None, f"request {request.id!r} holds nothing to release"
        if keep:
            self.commit_prefix(request)
        self.allocator.free(self._private_pages(request))
        self.tree.unlock(request.node)
        self.table.release_row(request.table_row)
        request.table_row = request.node = None
        request.tree_len = request.num_pages = request.kv_len = 0

    def page_owners(self, requests: Iterable[Request]) -> list[str]:
        """Owner of each page, for pictures: "free", "cached", "locked", or the id of one of `requests`."""
        owners = ["?"] * self.num_pages
        for owner, pages in self._claims(requests):
            for page in pages.tolist():
                owners[page] = owner
        return owners

    def check_integrity(self, requests: Iterable[Request]) -> Ledger:
        """Count every page and lock, given all requests that may hold any; return the ledger in pages.

        Raises AssertionError, saying what disagrees, unless each page has exactly one owner, the four kinds of owner
        add up, each row agrees with the tree on the part it got from there, and each lock has its holder.
        """
        requests = list(requests)
        held = [request for request in requests if request.table_row is not None]
        for request in requests:
            empty = request.node is None and request.num_pages == request.tree_len == request.kv_len == 0
            assert empty or request.table_row is not None, (
                f"request {request.id!r} has no table row, but other holdings"
            )
        self.tree.check_integrity()
        self._check_owners(held)
        self._check_rows(held)
        self._check_locks(held)
        private = sum(len(self._private_pages(request)) for request in held)
        locked = self.tree.num_locked // self.page_size
        ledger = Ledger(self.num_free_pages, self.num_evictable_pages, locked, private)
        assert sum(ledger) == self.num_pages, f"{ledger} does not add up to {self.num_pages} pages"
        return ledger

    def _check_owners(self, held: list[Request]) -> None:
        claims = self._claims(held)
        count = np.bincount(np.concatenate([pages for _, pages in claims]), minlength=self.num_pages)
        for page in np.flatnonzero(count != 1).tolist():
            owners = [owner for owner, pages in claims if page in pages]
            raise AssertionError(f"page {page} of {self.num_pages} has {count[page]} owners: {', '.join(owners)}")

    def _check_rows(self, held: list[Request]) -> None:
        rows = {request.table_row for request in held}
        taken = len(self.table.slots) - self.table.num_free_rows
        assert len(rows) == len(held) == taken, f"{len(held)} requests hold {len(rows)} rows; {taken} are taken"
        for request in held:
            name, allocated = f"request {request.id!r}", request.num_pages * self.page_size
            assert request.kv_len <= allocated, f"{name}: {request.kv_len} written, {allocated} allocated"
            assert request.tree_len <= request.kv_len, f"{name}: kv_len {request.kv_len} cuts the tree's part"
            path = list(request.node.path())[::-1]
            ids = np.concatenate([node.key for node in path]).tolist()
            slots = np.concatenate([node.slots for node in path]).tolist()
            assert ids == request.tokens[: request.tree_len], f"{name}: its node spells other tokens"
            assert slots == self.slots(request)[: request.tree_len].tolist(), f"{name}: row and tree disagree"

    def _check_locks(self, held: list[Request]) -> None:
        holders = Counter(node for request in held for node in request.node.path())
        for node in (self.tree.root, *self.tree.nodes()):
            assert node.locks == holders[node], f"{node} has {node.locks} locks and {holders[node]} holders"

    def _claims(self, requests: Iterable[Request]) -> list[tuple[str, np.ndarray]]:
        """(owner, its pages) for every owner that there is."""
        claims = [("free", self.allocator.free_pages)]
        claims += [("locked" if node.locks else "cached", self._pages(node.slots)) for node in self.tree.nodes()]
        held = [request for request in requests if request.table_row is not None]
        return claims + [(request.id, self._private_pages(request)) for request in held]

    def _private_pages(self, request: Request) -> np.ndarray:
        return self._pages(self.slots(request)[request.tree_len :])

    def _pages(self, slots: np.ndarray) -> np.ndarray:
        """Page ids of a run of whole pages of slots."""
        return slots[:: self.page_size] // self.page_size


def pages_for(length: int, page_size: int) -> int:
    """Pages that hold `length` positions.

    >>> [pages_for(n, page_size=4) for n in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-length // page_size)
