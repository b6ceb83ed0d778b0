"""Pages, slots and the ledger: who owns what, after every operation. No model and no tensors are needed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from minispec.config import SamplingParams
from minispec.core import Request
from minispec.kv.pool import KVCache, KVPool, Ledger, OutOfPages, PageAllocator, SlotTable


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(), seed=0, max_len=64)


def make_pool(num_slots: int = 64, page_size: int = 4, **options) -> KVPool:
    return KVPool(num_slots, page_size, **{"num_rows": 8, "max_len": 64, **options})


def run_prompt(pool: KVPool, name: str, prompt: list[int]) -> Request:
    """Admit a request and pretend that its whole prompt was computed."""
    request = make_request(name, prompt)
    pool.admit(request)
    assert pool.reserve(request, len(prompt))
    request.kv_len = len(prompt)
    return request


# --- pages


def test_fresh_pages_are_handed_out_in_order_and_come_back_in_order():
    pages = PageAllocator(6)
    first = pages.alloc(4)
    assert first.tolist() == [0, 1, 2, 3]
    pages.free(first)
    assert pages.alloc(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_refused_alloc_takes_nothing():
    pages = PageAllocator(3)
    pages.alloc(1)
    with pytest.raises(OutOfPages) as refused:
        pages.alloc(3)
    assert (refused.value.needed, refused.value.free, pages.num_free) == (3, 2, 2)
    assert pages.alloc(2).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [[0], [2, 2], [1, 3], [-1], [4]])
def test_pages_that_are_not_taken_cannot_be_freed(wrong):
    pages = PageAllocator(4)
    pages.alloc(3)
    pages.free(np.array([0]))
    with pytest.raises(AssertionError):
        pages.free(np.array(wrong))
    assert pages.num_free == 2


def test_random_alloc_and_free_never_hand_out_a_page_twice():
    rng, pages, taken = random.Random(0), PageAllocator(32), set()
    for _ in range(2000):
        if rng.random() < 0.5 and pages.num_free:
            new = pages.alloc(rng.randint(0, pages.num_free)).tolist()
            assert taken.isdisjoint(new) and len(set(new)) == len(new)
            taken.update(new)
        else:
            back = rng.sample(sorted(taken), rng.randint(0, len(taken)))
            pages.free(np.array(back, np.int64))
            taken.difference_update(back)
        assert pages.num_free + len(taken) == 32 and taken.isdisjoint(pages.free_pages.tolist())


# --- tensors and table


def test_cache_shape_and_bytes_per_slot():
    cache = KVCache(num_layers=3, num_slots=8, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (3, 8, 2, 16)
    assert cache.bytes_per_slot == 3 * 2 * 16 * 2 * 2
    assert not cache.k.any() and not cache.v.any()


def test_table_rows_are_whole_pages_and_each_is_lent_once():
    table = SlotTable(num_rows=2, max_len=9, page_size=4)
    assert table.slots.shape == (2, 12)
    assert [table.acquire_row(), table.acquire_row(), table.num_free_rows] == [0, 1, 0]
    with pytest.raises(AssertionError, match="2 rows"):
        table.acquire_row()
    table.release_row(1)
    with pytest.raises(AssertionError, match="row 1"):
        table.release_row(1)
    table.row(0)[:2] = [7, 8]
    assert table.slots[0, :2].tolist() == [7, 8]


def test_the_pool_rounds_down_to_whole_pages():
    pool = make_pool(num_slots=67, page_size=16)
    assert (pool.num_pages, pool.num_slots) == (4, 64)


# --- one request


@pytest.mark.parametrize(("page_size", "prompt_len"), [(1, 3), (4, 3), (4, 4), (4, 5), (16, 17)])
def test_pages_held_after_each_step_are_those_of_the_written_tokens(page_size, prompt_len):
    pool = make_pool(page_size=page_size)
    request = run_prompt(pool, "a", list(range(prompt_len)))
    for _ in range(6):
        assert request.num_pages == -(-request.kv_len // page_size)
        pool.check_integrity([request])
        request.tokens.append(50)
        assert pool.reserve(request, len(request.tokens))
        request.kv_len += 1


def test_a_lone_request_gets_consecutive_slots_each_time():
    pool = make_pool(enable_radix_cache=False)
    for _ in range(3):
        request = run_prompt(pool, "a", list(range(30)))
        assert pool.slots(request).tolist() == list(range(32))
        pool.release(request)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rejected_drafts_leak_no_slot(page_size):
    pool = make_pool(num_slots=128, page_size=page_size)
    for i in range(50):
        request = run_prompt(pool, str(i), [i] * 5)
        for _ in range(6):
            request.tokens.append(i)
            assert pool.reserve(request, len(request.tokens) + 4)  # four drafts, all rejected
            request.kv_len += 1
            pool.check_integrity([request])
        pool.release(request)
        ledger = pool.check_integrity([request])
        assert ledger.private == ledger.locked == 0 and ledger.free + ledger.cached == pool.num_pages


def test_writing_past_the_allocated_slots_is_reported():
    pool = make_pool()
    request = run_prompt(pool, "a", [1, 2, 3])
    request.kv_len = 5
    with pytest.raises(AssertionError, match="5 written, 4 allocated"):
        pool.check_integrity([request])


def test_a_second_release_is_refused_and_changes_nothing():
    pool = make_pool()
    request, other = run_prompt(pool, "a", [1, 2, 3, 4, 5]), run_prompt(pool, "b", [6, 7])
    pool.release(request)
    before = pool.check_integrity([request, other])
    with pytest.raises(AssertionError, match="'a' holds nothing"):
        pool.release(request)
    assert pool.check_integrity([request, other]) == before
    assert (request.table_row, request.node, request.num_pages, request.tree_len, request.kv_len) == (
        None,
        None,
        0,
        0,
        0,
    )


def test_a_half_prefilled_request_can_be_dropped_after_any_chunk():
    for page_size in (1, 4):
        for chunks in range(1, 6):
            pool = make_pool(page_size=page_size)
            request = make_request("a", list(range(40)))
            pool.admit(request)
            for end in range(8, 8 * chunks + 1, 8):
                assert pool.reserve(request, end)
                request.kv_len = end
                pool.check_integrity([request])
            pool.release(request)
            assert pool.check_integrity([]) == Ledger(
                64 // page_size - 8 * chunks // page_size, 8 * chunks // page_size, 0, 0
            )


# --- prefix hits


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "cached"),
    [(4, 1, 0), (4, 4, 0), (4, 5, 4), (4, 8, 4), (4, 12, 8), (4, 13, 12), (4, 14, 12), (4, 16, 12), (4, 17, 16)]
    + [(1, n, n - 1) for n in (1, 2, 3, 17)]
    + [(16, 16, 0), (16, 17, 16), (16, 32, 16)],
)
def test_a_prompt_seen_before_is_reused_up_to_its_last_token(page_size, prompt_len, cached):
    pool, prompt = make_pool(page_size=page_size), list(range(prompt_len))
    pool.release(run_prompt(pool, "first", prompt))
    again = make_request("again", prompt)
    assert pool.admit(again) == again.kv_len == again.tree_len == cached
    assert again.num_pages * page_size == cached < prompt_len
    pool.check_integrity([again])


def test_the_last_sampled_token_is_not_cached_because_it_was_never_read():
    pool = make_pool(page_size=1)
    request = run_prompt(pool, "a", [0, 1, 2, 3])
    request.tokens.append(4)
    assert pool.reserve(request, 5)
    request.kv_len = 5
    request.tokens.append(5)  # sampled, then the request ends
    pool.release(request)
    assert pool.admit(make_request("b", [0, 1, 2, 3, 4, 5, 6])) == 5


def test_identical_prompts_in_one_step_are_stored_once_in_the_end():
    pool, prompt = make_pool(num_slots=128), list(range(14))
    wave = [run_prompt(pool, str(i), prompt) for i in range(4)]
    assert pool.check_integrity(wave) == Ledger(32 - 16, 0, 0, 16)  # nobody knew of the others
    for request in wave:
        pool.commit_prefix(request)
        pool.check_integrity(wave)
    assert pool.check_integrity(wave) == Ledger(32 - 7, 0, 3, 4)  # 3 shared pages and a tail each
    assert len({tuple(pool.slots(request)[:12]) for request in wave}) == 1
    second = [make_request(f"{i}'", prompt) for i in range(4)]
    assert [pool.admit(request) for request in second] == [12] * 4
    pool.check_integrity(wave + second)
    for request in wave + second:
        pool.release(request)
    assert pool.check_integrity(wave + second) == Ledger(32 - 3, 3, 0, 0)


def test_commit_prefix_keeps_private_slots_where_they_are():
    pool = make_pool()
    request = run_prompt(pool, "a", list(range(10)))
    before = pool.slots(request).copy()
    pool.commit_prefix(request)
    assert pool.slots(request).tolist() == before.tolist() and request.tree_len == 8
    pool.commit_prefix(request)
    assert request.tree_len == 8 and request.node.locks == 1
    pool.check_integrity([request])


def test_duplicates_are_freed_and_the_row_moves_to_the_trees_slots():
    pool = make_pool()
    first, second = run_prompt(pool, "a", list(range(9))), run_prompt(pool, "b", [*range(8), *range(20, 26)])
    tail = pool.slots(second)[8:].tolist()
    pool.commit_prefix(first)
    pool.commit_prefix(second)
    assert pool.slots(second).tolist() == pool.slots(first)[:8].tolist() + tail
    assert second.tree_len == 12
    assert pool.check_integrity([first, second]).private == 2


def test_release_without_keep_leaves_nothing_new_in_the_tree():
    pool = make_pool()
    pool.release(run_prompt(pool, "a", list(range(12))), keep=False)
    assert pool.check_integrity([]) == Ledger(16, 0, 0, 0)


def test_without_the_radix_cache_nothing_is_found_and_nothing_stays():
    pool, prompt = make_pool(enable_radix_cache=False), list(range(12))
    first = run_prompt(pool, "a", prompt)
    pool.commit_prefix(first)
    assert first.tree_len == 0
    second = make_request("b", prompt)
    assert pool.admit(second) == 0
    pool.check_integrity([first, second])
    pool.release(first)
    pool.release(second)
    assert pool.check_integrity([first, second]) == Ledger(16, 0, 0, 0)


# --- memory runs short


def test_reserve_evicts_what_is_cached_and_no_more_than_it_needs():
    pool = make_pool(num_slots=32)
    pool.release(run_prompt(pool, "old", list(range(24))))
    assert (pool.num_free_pages, pool.num_evictable_pages) == (2, 6)
    assert pool.available(8) and not pool.available(9)
    request = make_request("new", [50] * 15)
    pool.admit(request)
    assert pool.reserve(request, 15)
    assert pool.check_integrity([request]) == Ledger(0, 4, 0, 4)


def test_a_refused_reserve_changes_nothing():
    pool = make_pool(num_slots=32)
    pool.release(run_prompt(pool, "old", list(range(8))))
    request = run_prompt(pool, "new", [50] * 5)
    picture, ledger = pool.tree.to_text(), pool.check_integrity([request])
    assert not pool.reserve(request, 33)  # more than the whole pool
    assert pool.tree.to_text() == picture and pool.check_integrity([request]) == ledger
    assert pool.reserve(request, 32)
    assert pool.check_integrity([request]) == Ledger(0, 0, 0, 8)


def test_a_prefix_in_use_is_never_evicted():
    pool, prompt = make_pool(num_slots=32), list(range(13))
    pool.release(run_prompt(pool, "a", prompt))
    user = make_request("b", prompt)
    assert pool.admit(user) == 12
    greedy = make_request("c", [60] * 40)
    pool.admit(greedy)
    assert not pool.reserve(greedy, 24)
    assert pool.reserve(greedy, 20)
    assert pool.check_integrity([user, greedy]) == Ledger(0, 0, 3, 5)


def test_a_preempted_request_finds_its_own_prefix_again():
    pool = make_pool()
    request = run_prompt(pool, "a", list(range(10)))
    request.tokens += [30, 31, 32]
    assert pool.reserve(request, 12)
    request.kv_len = 12
    pool.release(request)
    assert pool.admit(request) == 12 and len(request.tokens) == 13
    pool.check_integrity([request])


def test_a_request_longer_than_a_table_row_is_an_internal_error_that_takes_no_page():
    pool = make_pool(num_slots=128)
    request = run_prompt(pool, "a", [1])
    with pytest.raises(AssertionError, match="65 positions in a table row of 64"):
        pool.reserve(request, 65)
    pool.check_integrity([request])


# --- the check itself


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, a, b: pool.allocator.alloc(1), "has 0 owners"),
        (lambda pool, a, b: pool.slots(a).__setitem__(slice(8, 12), pool.slots(b)[8:12]), "owners"),
        (lambda pool, a, b: pool.slots(a).__setitem__(slice(0, 4), pool.slots(a)[4:8].copy()), "row and tree disagree"),
        (lambda pool, a, b: pool.tree.lock(a.node), "locks and"),
        (lambda pool, a, b: pool.tree.unlock(a.node), "locks and"),
        (lambda pool, a, b: a.tokens.__setitem__(1, 99), "spells other tokens"),
        (lambda pool, a, b: setattr(a, "kv_len", 6), "cuts the tree's part"),
        (lambda pool, a, b: setattr(a, "num_pages", 2), "has 0 owners"),
        (lambda pool, a, b: setattr(a, "table_row", None), "no table row"),
        (lambda pool, a, b: pool.table.acquire_row(), "rows"),
    ],
)
def test_check_integrity_finds_planted_damage(damage, message):
    pool = make_pool()
    a, b = run_prompt(pool, "a", list(range(10))), run_prompt(pool, "b", list(range(20, 32)))
    pool.commit_prefix(a)
    assert pool.check_integrity([a, b]) == Ledger(10, 0, 2, 4)
    damage(pool, a, b)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([a, b])


def test_page_owners_names_every_page():
    pool = make_pool(num_slots=32)
    pool.release(run_prompt(pool, "old", list(range(8))))
    user = make_request("u", [0, 1, 2, 3, 9])
    pool.admit(user)
    assert pool.reserve(user, 5)
    assert pool.page_owners([user]) == ["locked", "cached", "u", "free", "free", "free", "free", "free"]


# --- random lives of requests: the ledger after every operation, and what each slot holds


def tag(tokens: list[int], position: int) -> int:
    """Stands for the K/V of a position: it depends on all tokens up to there."""
    return hash(tuple(tokens[: position + 1]))


class Walk:
    """Requests that come, prefill in chunks, draft, decode, share, are preempted and leave, at random."""

    def __init__(self, page_size: int, enable_radix_cache: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = make_pool(96 + 5 * page_size, page_size, num_rows=6, enable_radix_cache=enable_radix_cache)
        self.memory = np.zeros(self.pool.num_slots, np.int64)
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.counts = dict.fromkeys(("hits", "refused", "preempted", "shared", "drafted"), 0)

    def admit(self) -> None:
        if len(self.running) == 6:
            return
        request = self.preempted.pop() if self.preempted else make_request(str(self.rng.random()), self.prompt())
        self.counts["hits"] += self.pool.admit(request) > 0
        self.running.append(request)

    def prompt(self) -> list[int]:
        if self.running and self.rng.random() < 0.3:
            return list(self.running[-1].prompt)
        return [self.rng.randint(10, 30)] * 18 + [3] * self.rng.randint(0, 12)

    def step(self, request: Request) -> None:
        """Compute up to 7 committed tokens, or the last one and drafts; write all of them, keep the committed."""
        end = min(len(request.tokens), request.kv_len + self.rng.randint(1, 7))
        drafts = self.rng.randint(0, 4) if end == len(request.tokens) and end < 58 else 0
        if not self.pool.reserve(request, end + drafts):
            self.counts["refused"] += 1
            return
        slots = self.pool.slots(request)
        for position in range(request.kv_len, end):
            self.memory[slots[position]] = tag(request.tokens, position)
        self.memory[slots[end : end + drafts]] = -1
        self.counts["drafted"] += drafts
        request.kv_len = end
        if end == len(request.tokens) < 60:
            request.tokens.append(self.rng.choice([3, 3, 3, 4]))

    def commit(self, request: Request) -> None:
        free = self.pool.num_free_pages
        self.pool.commit_prefix(request)
        self.counts["shared"] += self.pool.num_free_pages > free

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request, keep=self.rng.random() < 0.8)
        if self.rng.random() < 0.4 and len(request.tokens) < 40:
            self.preempted.append(request)
            self.counts["preempted"] += 1

    def check(self) -> None:
        self.pool.check_integrity(self.running + self.preempted)
        for request in self.running:
            found = self.memory[self.pool.slots(request)[: request.kv_len]].tolist()
            assert found == [tag(request.tokens, position) for position in range(request.kv_len)]


@pytest.mark.parametrize(("page_size", "radix"), [(1, True), (4, True), (4, False), (16, True)])
def test_random_lives_keep_the_ledger_and_every_slots_content(page_size, radix):
    walk = Walk(page_size, radix, seed=page_size)
    for _ in range(3000):
        action = walk.rng.choices([walk.step, walk.commit, walk.leave, None], weights=[6, 1, 1, 2])[0]
        if action is None or not walk.running:
            walk.admit()
        else:
            action(walk.rng.choice(walk.running))
        walk.check()
    while walk.running:
        walk.leave(walk.running[0])
    ledger = walk.pool.check_integrity(walk.preempted)
    assert ledger.private == ledger.locked == 0 and ledger.free + ledger.cached == walk.pool.num_pages
    assert radix == (ledger.cached > 0)
    wanted = ("hits", "refused", "preempted", "shared", "drafted") if radix else ("preempted", "drafted")
    assert min(walk.counts[name] for name in wanted) >= 5, f"the walk was too tame: {walk.counts}"
