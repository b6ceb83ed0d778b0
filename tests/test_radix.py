"""The radix tree: what it finds, what it keeps, what it throws away; by hand and against a page-by-page model."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from minispec.kv.radix import RadixNode, RadixTree


def insert_at(tree: RadixTree, ids: list[int], first_slot: int = 0) -> RadixNode:
    """Insert ids with consecutive slots from first_slot; return the node."""
    return tree.insert(ids, list(range(first_slot, first_slot + len(ids)))).node


# --- match and insert


def test_an_empty_tree_matches_nothing_at_its_root():
    tree = RadixTree(page_size=4)
    assert tree.match([1, 2, 3, 4]).length == 0
    assert tree.match([]).node is tree.root


def test_page_truncation_on_insert_and_match():
    tree = RadixTree(page_size=4)
    short = tree.insert([1, 2, 3], [0, 1, 2])
    assert short.node is tree.root and tree.num_evictable == 0 and list(tree.nodes()) == []
    ten = tree.insert(list(range(10)), list(range(10)))
    assert len(ten.present) == 0 and tree.num_evictable == 8
    assert tree.match(list(range(7))).slots.tolist() == [0, 1, 2, 3]
    assert tree.match(list(range(10))).length == 8
    tree.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4])
def test_match_never_reports_more_than_whole_equal_pages(page_size):
    stored, tree = list(range(16)), RadixTree(page_size)
    insert_at(tree, stored)
    for same in range(17):
        asked = stored[:same] + [99] * (16 - same)
        assert tree.match(asked).length == same // page_size * page_size
        tree.check_integrity()
    assert tree.match(stored).slots.tolist() == stored  # splits have changed nothing


def test_insert_keeps_the_slots_that_were_there_first():
    tree = RadixTree(page_size=2)
    insert_at(tree, [1, 2, 3, 4], first_slot=0)
    found = tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15])
    assert found.present.tolist() == [0, 1, 2, 3]
    assert tree.match([1, 2, 3, 4, 5, 6]).slots.tolist() == [0, 1, 2, 3, 14, 15]
    assert tree.num_evictable == 6


def test_the_tree_keeps_copies_of_the_callers_arrays():
    tree, ids, slots = RadixTree(page_size=1), np.array([1, 2, 3]), np.array([7, 8, 9])
    tree.insert(ids, slots)
    ids[:], slots[:] = 0, 0
    assert tree.match([1, 2, 3]).slots.tolist() == [7, 8, 9]


def test_siblings_may_share_ids_inside_their_first_page():
    tree = RadixTree(page_size=4)
    insert_at(tree, [1, 2, 3, 4], first_slot=0)
    insert_at(tree, [1, 2, 3, 5], first_slot=4)
    assert len(tree.root.children) == 2
    assert tree.match([1, 2, 3, 5]).slots.tolist() == [4, 5, 6, 7]


def test_a_deep_chain_needs_no_recursion():
    tree, ids = RadixTree(page_size=1), list(range(2000))
    tree.insert(ids, ids)
    for length in range(1999, 0, -1):
        tree.match(ids[:length])
    assert len(list(tree.nodes())) == 2000 and tree.match(ids).length == 2000
    tree.check_integrity()
    assert len(tree.to_text().splitlines()) == 2001
    assert sorted(tree.evict(2000)) == ids


# --- locks


def test_a_locked_node_is_kept_until_the_last_unlock():
    tree, ids = RadixTree(page_size=1), [1, 2, 3, 4, 5, 6, 7, 8]
    insert_at(tree, ids)
    node = tree.match(ids).node
    tree.lock(node)
    tree.lock(node)
    assert len(tree.evict(100)) == 0 and tree.num_locked == 8
    tree.unlock(node)
    assert len(tree.evict(100)) == 0
    tree.unlock(node)
    assert len(tree.evict(100)) == 8 and tree.num_evictable == tree.num_locked == 0
    with pytest.raises(AssertionError, match="nobody holds"):
        tree.unlock(node)


def test_a_failed_unlock_changes_nothing():
    tree = RadixTree(page_size=1)
    lower = insert_at(tree, [1, 2, 3, 4])
    upper = tree.match([1, 2]).node
    tree.lock(upper)
    with pytest.raises(AssertionError):
        tree.unlock(lower)
    tree.check_integrity()
    assert upper.locks == 1 and tree.num_locked == 2


def test_a_lock_pins_what_was_matched_and_no_token_more():
    tree = RadixTree(page_size=1)
    insert_at(tree, [1, 2, 3, 4])
    tree.lock(tree.match([1, 2, 9]).node)
    assert (tree.num_locked, tree.num_evictable) == (2, 2)
    assert tree.evict(100).tolist() == [2, 3]


def test_the_holder_of_a_node_that_is_split_still_holds_all_of_it():
    tree = RadixTree(page_size=1)
    node = insert_at(tree, [1, 2, 3, 4])
    tree.lock(node)
    insert_at(tree, [1, 2, 7], first_slot=10)
    tree.check_integrity()
    assert (tree.num_locked, tree.num_evictable) == (4, 1)
    assert tree.evict(100).tolist() == [12]
    assert tree.match([1, 2, 3, 4]).length == 4
    tree.unlock(node)
    assert (tree.num_locked, tree.num_evictable) == (0, 4)


# --- eviction


def test_a_partial_match_refreshes_the_matched_half_only():
    tree = RadixTree(page_size=1)
    insert_at(tree, [1, 2, 3, 4], first_slot=0)
    insert_at(tree, [9, 9], first_slot=10)
    tree.match([1, 2])
    assert tree.evict(2).tolist() == [2, 3]
    assert tree.evict(2).tolist() == [10, 11]
    assert tree.match([1, 2]).length == 2


def test_eviction_takes_the_end_of_a_leaf_and_no_more_than_asked():
    tree = RadixTree(page_size=2)
    insert_at(tree, [1, 2, 3, 4, 5, 6])
    assert tree.evict(1).tolist() == [4, 5]
    tree.check_integrity()
    assert tree.match([1, 2, 3, 4, 5, 6]).length == 4


def test_a_parent_is_evicted_after_its_last_child():
    tree = RadixTree(page_size=1)
    insert_at(tree, [1, 2], first_slot=0)
    insert_at(tree, [1, 2, 3], first_slot=0)
    insert_at(tree, [1, 2, 4], first_slot=1)
    assert tree.evict(4).tolist() == [2, 3, 0, 1]
    assert tree.root.children == {} and tree.num_evictable == 0


def test_evicted_tokens_are_not_found_again():
    tree, ids = RadixTree(page_size=4), list(range(8))
    insert_at(tree, ids)
    tree.evict(2)
    assert tree.match(ids).length == 0
    insert_at(tree, ids, first_slot=40)
    assert tree.match(ids).slots[0] == 40


# --- the picture, and the check itself


def test_the_picture_does_not_depend_on_the_order_of_children():
    pictures = set()
    for order in itertools.permutations([[1, 2], [3, 4], [10, 2]]):
        tree = RadixTree(page_size=1)
        for ids in order:
            insert_at(tree, ids, first_slot=ids[0])
        for ids in ([1, 2], [3, 4], [10, 2]):
            tree.match(ids)
        pictures.add(tree.to_text())
    assert pictures == {
        "root  6 evictable, 0 locked\n"
        "+- 1 2  slots 1-2  used 4\n"
        "+- 3 4  slots 3-4  used 5\n"
        "`- 10 2  slots 10-11  used 6"
    }


def test_the_picture_shortens_long_runs():
    tree = RadixTree(page_size=1)
    tree.insert(list(range(20)), [*range(10), *range(30, 40)])
    assert tree.to_text().splitlines()[1] == "`- 0 1 2 3 .. 19 (20)  slots 0-9,30-39  used 1"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree, node: setattr(node, "locks", 1), "locks"),
        (lambda tree, node: setattr(tree, "num_locked", 2), "num_locked"),
        (lambda tree, node: setattr(node, "slots", node.slots + 1), "page grid"),
        (lambda tree, node: setattr(node, "slots", node.slots[::-1]), "page grid|consecutive"),
        (lambda tree, node: setattr(node, "key", node.key + 1), "wrong key"),
        (lambda tree, node: setattr(node, "key", node.key[:1]), "slots"),
        (lambda tree, node: setattr(node, "last_access", 99), "used after"),
        (lambda tree, node: setattr(tree, "num_evictable", 3), "num_evictable"),
        (lambda tree, node: insert_at(tree, [8, 8], first_slot=0), "twice"),
        (lambda tree, node: setattr(node.parent, "locks", -1), "locks"),
    ],
)
def test_check_integrity_finds_planted_damage(damage, message):
    tree = RadixTree(page_size=2)
    node = insert_at(tree, [1, 2])
    tree.check_integrity()
    damage(tree, node)
    with pytest.raises(AssertionError, match=message):
        tree.check_integrity()


# --- 10,000 random operations against a model that knows only single pages


class PageModel:
    """The same cache with no tree: a dictionary from each stored prefix (whole pages) to its last page."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.clock = page_size, 0
        self.pages: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.held: list[tuple[int, ...]] = []

    def prefixes(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [ids[:end] for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def match(self, ids: tuple[int, ...]) -> list[int]:
        self.clock += 1
        found = list(itertools.takewhile(self.pages.__contains__, self.prefixes(ids)))
        self.used.update(dict.fromkeys(found, self.clock))
        return [self.pages[prefix] for prefix in found]

    def insert(self, ids: tuple[int, ...], pages: list[int]) -> list[int]:
        present = self.match(ids)
        for prefix, page in zip(self.prefixes(ids)[len(present) :], pages[len(present) :], strict=True):
            self.pages[prefix], self.used[prefix] = page, self.clock
        return present

    def locked(self) -> set[tuple[int, ...]]:
        return {prefix for ids in self.held for prefix in self.prefixes(ids)}

    def evict(self, num_pages: int) -> set[int]:
        freed: set[int] = set()
        while len(freed) < num_pages:
            inner = {prefix[: -self.page_size] for prefix in self.pages} | self.locked()
            leaves = [prefix for prefix in self.pages if prefix not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=self.used.__getitem__)
            freed.add(self.pages.pop(oldest))
        return freed


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_operations_agree_with_a_page_by_page_model(page_size):
    rng, tree, model = random.Random(page_size), RadixTree(page_size), PageModel(page_size)
    free, holders, seen = list(range(24)), [], {"split": 0, "evicted": 0, "kept by a lock": 0}

    def random_ids() -> tuple[int, ...]:
        pages = rng.choices([(1,) * page_size, (1,) * (page_size - 1) + (2,), (3,) * page_size], k=rng.randint(0, 7))
        return sum(pages, ()) + (1,) * rng.randint(0, page_size - 1)

    def slots_of(pages: list[int]) -> list[int]:
        return [page * page_size + i for page in pages for i in range(page_size)]

    for _ in range(10_000):
        action, ids = rng.choice(["insert", "insert", "match", "lock", "unlock", "evict"]), random_ids()
        whole = ids[: len(ids) // page_size * page_size]
        if action == "insert" and len(whole) // page_size <= len(free):
            mine = [free.pop() for _ in range(len(whole) // page_size)]
            present = model.insert(whole, mine)
            assert tree.insert(ids, slots_of(mine) + [0] * page_size).present.tolist() == slots_of(present)
            free += mine[: len(present)]
        elif action == "match":
            before = len(list(tree.nodes()))
            assert tree.match(ids).slots.tolist() == slots_of(model.match(whole))
            seen["split"] += len(list(tree.nodes())) - before
        elif action == "lock" and len(holders) < 5:
            found, pages = tree.match(ids), model.match(whole)
            tree.lock(found.node)
            holders.append(found.node)
            model.held.append(whole[: len(pages) * page_size])
        elif action == "unlock" and holders:
            chosen = rng.randrange(len(holders))
            tree.unlock(holders.pop(chosen))
            model.held.pop(chosen)
        elif action == "evict":
            wanted = rng.randint(1, 6)
            slots = tree.evict(wanted)
            pages = {slot // page_size for slot in slots.tolist()}
            assert pages == model.evict(wanted) and len(slots) == len(pages) * page_size
            free += sorted(pages)
            seen["evicted"] += len(pages)
            seen["kept by a lock"] += len(pages) < wanted and bool(model.pages)
        tree.check_integrity()
        assert tree.num_locked == len(model.locked()) * page_size
        assert tree.num_evictable + tree.num_locked == len(model.pages) * page_size == (24 - len(free)) * page_size
    assert min(seen.values()) > 50, f"the walk was too tame: {seen}"
