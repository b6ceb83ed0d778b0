"""A radix tree over token ids: which prefixes have their K/V stored, and in which slots.

Knows: token ids, slot numbers, locks, and the order of use. A path from the root spells a prefix; a node holds the
run of tokens on the edge to it and one slot per token. Everything is counted in whole pages: a node's length is a
multiple of `page_size`, and siblings differ within their first page, which is also their key in the parent.
Does not know: requests, free pages, tensors (kv/pool.py owns those).

Taught in notebook 06 (radix tree: match, insert, split) and notebook 07 (locks and eviction).
After RadixAttention in SGLang (Zheng et al. 2024, "Efficient Execution of Structured Language Model Programs", 3).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(eq=False)
class RadixNode:
    """The edge from `parent` to here: n tokens, n slots. The root has none."""

    key: np.ndarray  # int64 [n] token ids
    slots: np.ndarray  # int64 [n] where their K/V lies
    parent: RadixNode | None = field(default=None, repr=False)
    children: dict[tuple[int, ...], RadixNode] = field(default_factory=dict, repr=False)  # by their first page
    locks: int = 0  # holders whose prefix ends here or below
    last_access: int = 0  # the tree's clock when a match or an insert last came through

    def __lt__(self, other: RadixNode) -> bool:
        """Older first: the order in which a heap hands nodes to eviction."""
        return self.last_access < other.last_access

    def path(self) -> Iterator[RadixNode]:
        """This node, its parent, and so on up to and including the root."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def evictable_leaf(self) -> bool:
        """May be thrown away now: nobody holds it and nothing hangs below it."""
        return not self.children and self.locks == 0 and self.parent is not None


class Match(NamedTuple):
    """The longest stored prefix: the node where it ends, and its slots."""

    node: RadixNode
    slots: np.ndarray  # int64 [length]

    @property
    def length(self) -> int:
        return len(self.slots)


class Inserted(NamedTuple):
    """What insert did: `node` ends the inserted prefix; the first len(present) tokens were in the tree before."""

    node: RadixNode
    present: np.ndarray  # int64, the tree's own slots of those tokens


class RadixTree:
    """Prefixes in whole pages, with locks and eviction of the least recently used.

    num_evictable, num_locked: slots in nodes that nobody / somebody holds; their sum is all slots in the tree.

    >>> tree = RadixTree(page_size=2)
    >>> found = tree.insert([1, 2, 3, 4, 5], slots=[0, 1, 2, 3, 4])  # the fifth token does not fill a page
    >>> found = tree.insert([1, 2, 7, 8], slots=[6, 7, 8, 9])
    >>> found.present.tolist()  # [1, 2] was there: the tree keeps its slots 0, 1; the caller keeps its 6, 7
    [0, 1]
    >>> tree.lock(found.node)
    >>> print(tree.to_text())
    root  2 evictable, 4 locked
    `- 1 2  slots 0-1  used 2  locks 1
       +- 3 4  slots 2-3  used 1
       `- 7 8  slots 8-9  used 2  locks 1
    >>> tree.match([1, 2, 3, 4, 9, 9]).slots.tolist()
    [0, 1, 2, 3]
    >>> tree.evict(num_pages=3).tolist()  # three are wanted, one is not locked
    [2, 3]
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = RadixNode(np.empty(0, np.int64), np.empty(0, np.int64))
        self.clock = 0  # counts matches and inserts; a logical clock, so that a run can be repeated exactly
        self.num_evictable = 0
        self.num_locked = 0

    def match(self, ids: Sequence[int] | np.ndarray) -> Match:
        """Find the longest stored prefix of `ids`, in whole pages, and mark it as just used.

        Splits a node when the match ends inside it, so that the returned node ends exactly where the match ends and
        a lock on it holds no token more. The slots may be read until the next evict, or for as long as the node is
        locked. Linear in the length of the match.
        """
        ids = self._whole_pages(ids)
        self.clock += 1
        self.root.last_access = self.clock
        node, length, slots = self.root, 0, [self.root.slots]
        while length < len(ids):
            child = node.children.get(self._first_page(ids[length:]))
            if child is None:
                break
            common = self._common_length(child.key, ids[length:])
            node = child if common == len(child.key) else self._split(child, common)
            node.last_access = self.clock
            slots.append(node.slots)
            length += common
        return Match(node, np.concatenate(slots))

    def insert(self, ids: Sequence[int] | np.ndarray, slots: Sequence[int] | np.ndarray) -> Inserted:
        """Store the whole pages of `ids`; slots[i] holds the K/V of ids[i].

        Only the slots behind the part that was present change hands, from the caller to the tree. The caller goes on
        owning its duplicates slots[: len(present)] and the tail that does not fill a page.
        """
        assert len(slots) >= len(ids), f"{len(ids)} tokens with only {len(slots)} slots"
        ids = self._whole_pages(ids)
        node, present = self.match(ids)
        if len(present) == len(ids):
            return Inserted(node, present)
        # Copies: the caller's arrays are often views of a table row that is reused later.
        key = ids[len(present) :].copy()
        new_slots = np.array(slots[len(present) : len(ids)], np.int64)
        leaf = RadixNode(key, new_slots, parent=node, last_access=self.clock)
        node.children[self._first_page(key)] = leaf
        self.num_evictable += len(key)
        return Inserted(leaf, present)

    def lock(self, node: RadixNode) -> None:
        """Hold the prefix that ends at `node`: it cannot be evicted until an equal number of unlocks."""
        for part in node.path():
            if part.locks == 0:
                self.num_evictable -= len(part.key)
                self.num_locked += len(part.key)
            part.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one lock of the same node. Asserts that there is one."""
        # A holder of `node` holds its whole path, so the count here is the smallest of all.
        assert node.locks > 0, "unlock of a radix node that nobody holds"
        for part in node.path():
            part.locks -= 1
            if part.locks == 0:
                self.num_locked -= len(part.key)
                self.num_evictable += len(part.key)

    def evict(self, num_pages: int) -> np.ndarray:
        """Throw away up to `num_pages` pages that nobody holds; return their slots, int64, now the caller's.

        Least recently used leaf first and the end of a leaf before its beginning; a parent becomes a leaf when its
        last child is gone. Fewer slots come back only when fewer are evictable. Collecting the leaves visits every
        node once per call.
        """
        wanted = num_pages * self.page_size
        leaves = [node for node in self.nodes() if node.evictable_leaf]
        heapq.heapify(leaves)
        freed = [self.root.slots]
        while wanted > 0 and leaves:
            leaf = heapq.heappop(leaves)
            keep = max(0, len(leaf.key) - wanted)
            freed.append(leaf.slots[keep:])
            wanted -= len(leaf.key) - keep
            self.num_evictable -= len(leaf.key) - keep
            if keep:
                leaf.key, leaf.slots = leaf.key[:keep], leaf.slots[:keep]
                continue
            parent = leaf.parent
            del parent.children[self._first_page(leaf.key)]
            if parent.evictable_leaf:
                heapq.heappush(leaves, parent)
        return np.concatenate(freed)

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what disagrees, unless keys, slots, locks, times and sizes are consistent."""
        sizes = {True: 0, False: 0}
        pages = [self.root.slots]
        for node in (self.root, *self.nodes()):
            name = f"node [{_short(node.key)}]"
            below = sum(child.locks for child in node.children.values())
            assert node.locks >= below, f"{name}: {node.locks} locks, its children have {below}"
            if node is self.root:
                continue
            assert len(node.key) == len(node.slots) > 0, f"{name}: {len(node.slots)} slots"
            assert len(node.key) % self.page_size == 0, f"{name}: not whole pages"
            page_slots = node.slots.reshape(-1, self.page_size)
            offsets = page_slots - page_slots[:, :1]
            assert (page_slots[:, 0] % self.page_size == 0).all(), f"{name}: a page starts off the page grid"
            assert (offsets == np.arange(self.page_size)).all(), f"{name}: slots of a page are not consecutive"
            pages.append(page_slots[:, 0])
            assert node.parent.children.get(self._first_page(node.key)) is node, f"{name}: hangs under a wrong key"
            assert node.last_access <= node.parent.last_access <= self.clock, f"{name}: used after its parent"
            sizes[node.locks > 0] += len(node.key)
        all_pages = np.concatenate(pages)
        assert len(np.unique(all_pages)) == len(all_pages), "a page is in the tree twice"
        assert self.num_locked == sizes[True], f"num_locked {self.num_locked}, counted {sizes[True]}"
        assert self.num_evictable == sizes[False], f"num_evictable {self.num_evictable}, counted {sizes[False]}"

    def to_text(self) -> str:
        """Draw the tree, children in order of their ids: tokens, slots, time of last use, locks. ASCII, stable."""
        lines = [f"root  {self.num_evictable} evictable, {self.num_locked} locked"]
        stack = [(self.root, "", "")]
        while stack:
            node, mark, indent = stack.pop()
            if node is not self.root:
                locks = f"  locks {node.locks}" if node.locks else ""
                lines.append(f"{mark}{_short(node.key)}  slots {_runs(node.slots)}  used {node.last_access}{locks}")
            children = sorted(node.children.items(), reverse=True)  # the last to be drawn goes on the stack first
            for i, (_, child) in enumerate(children):
                mark, bar = ("`- ", "   ") if i == 0 else ("+- ", "|  ")
                stack.append((child, indent + mark, indent + bar))
        return "\n".join(lines)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut `node` after `length` tokens and return the new upper half.

        before   parent -- node[0:n] -- children
        after    parent -- upper[0:length] -- node[length:n] -- children

        The old object stays at the lower end: whoever locked it still holds the whole path. Both halves have the
        same holders and were used at the same time.
        """
        upper = RadixNode(node.key[:length], node.slots[:length], node.parent, {}, node.locks, node.last_access)
        node.parent.children[self._first_page(upper.key)] = upper
        node.key, node.slots, node.parent = node.key[length:], node.slots[length:], upper
        upper.children[self._first_page(node.key)] = node
        return upper

    def _whole_pages(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.asarray(ids[: len(ids) // self.page_size * self.page_size], np.int64)

    def _first_page(self, ids: np.ndarray) -> tuple[int, ...]:
        return tuple(ids[: self.page_size].tolist())

    def _common_length(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix in whole pages."""
        limit = min(len(a), len(b))
        different = np.flatnonzero(a[:limit] != b[:limit])
        common = int(different[0]) if len(different) else limit
        return common // self.page_size * self.page_size


def _short(ids: np.ndarray) -> str:
    """All ids of a short run, both ends of a long one."""
    if len(ids) <= 8:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:4]))} .. {ids[-1]} ({len(ids)})"


def _runs(slots: np.ndarray) -> str:
    """[0, 1, 2, 8, 9] -> "0-2,8-9"."""
    runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
