"""Exercises of notebooks 06 (radix tree) and 07 (locks, eviction, hit rate).

Knows: what a right answer does; every expected result comes from the package's own tree or pool.
Does not know: how to solve anything.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minispec.config import SamplingParams
from minispec.core import Request
from minispec.course.check.judge import Case, judge
from minispec.kv.pool import KVPool
from minispec.kv.radix import RadixNode, RadixTree


def _unseen(answer: Any, verdict: Callable[[Any], str]) -> Callable[[], Any]:
    """Lets `judge` compare a verdict on an answer, so that a wrong answer does not show the right one."""

    def your_answer() -> Any:
        got = answer() if callable(answer) else answer
        return got if got is None or got is ... or isinstance(got, str) and not got.strip() else verdict(got)

    return your_answer


# 06 The radix tree -------------------------------------------------------------------------------------------------

SENTENCES = ("a bird sings in the tree", "a bird sings at night", "a bird")


def nb06_ex1(drawing: str) -> None:
    """The tree of SENTENCES, inserted in this order with pages of one word: a node in each line, children indented."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    tree = RadixTree(page_size=1)
    for sentence in SENTENCES:
        tree.insert([words.index(word) for word in sentence.split()], range(len(sentence.split())))
    wanted = {tuple(" ".join(words[i] for i in part.key) for part in list(n.path())[-2::-1]) for n in tree.nodes()}

    def verdict(drawn: str) -> str:
        nodes = list(_drawn_nodes(str(drawn)))
        for path in nodes:
            if path not in wanted or nodes.count(path) > 1:
                return f"not node {path[-1]!r}"
        return "the tree" if len(nodes) == len(wanted) else "a node is missing"

    judge("exercise 1", _unseen(drawing, verdict), [Case((), "the tree")])


def _drawn_nodes(drawing: str) -> Iterator[tuple[str, ...]]:
    """Each line as the nodes from the root to it. An indent may be drawn with the lines of `RadixTree.to_text`."""
    above: list[tuple[int, str]] = []
    for line in drawing.splitlines():
        indent, words = re.fullmatch(r"([\s|`+-]*)(.*)", line).groups()
        if words:
            above = [(width, name) for width, name in above if width < len(indent)]
            above.append((len(indent), " ".join(words.split())))
            yield tuple(name for _, name in above)


def nb06_ex2(match_prefix: Callable[[dict, list[int]], list[int]]) -> None:
    """(root, ids) -> slots of the longest stored prefix; a node is {"key": [...], "slots": [...], "children": {}}."""
    rng, cases = random.Random(0), []
    for number in range(200):
        tree, length = RadixTree(page_size=1), 1 + number // 40
        for first in range(0, 10 * (number // 20), 10):
            ids = rng.choices((1, 2, 3), k=rng.randint(1, length))
            tree.insert(ids, range(first, first + len(ids)))
        asked, root = rng.choices((1, 2, 3), k=rng.randint(0, length + 1)), _as_dicts(tree.root)
        cases.append(Case((root, asked), tree.match(asked).slots.tolist(), f"{_spelled(root)}, {asked}"))
    judge("exercise 2", match_prefix, sorted(cases, key=lambda case: len(case.shown)))


def _as_dicts(node: RadixNode) -> dict:
    children = {first: _as_dicts(child) for (first,), child in node.children.items()}
    return {"key": node.key.tolist(), "slots": node.slots.tolist(), "children": children}


def _spelled(node: dict) -> str:
    """{[1, 2]: {[3], [1, 1]}}: keys only."""
    below = ", ".join(map(_spelled, node["children"].values()))
    return (f"{node['key']}: {{{below}}}" if below else f"{node['key']}") if node["key"] else f"root {{{below}}}"


# 07 Locks, eviction, hit rate --------------------------------------------------------------------------------------

EVICTIONS = (  # inserted one after the other; matched after that; held
    (([1, 2, 3, 4], [7, 8, 9]), (), ()),
    (([1, 2, 3, 4], [7, 8, 9]), (), ([1, 2],)),
    (([1, 2], [1, 2, 3], [7, 8, 9]), ([1, 2],), ()),
    (([1, 2, 3], [1, 2, 4, 5], [1, 6]), (), ([1, 2, 4, 5],)),
)


def eviction_trees() -> list[RadixTree]:
    """Four small trees with pages of one token, the same at each call."""
    trees = []
    for inserted, matched, held in EVICTIONS:
        tree = RadixTree(page_size=1)
        for number, ids in enumerate(inserted):
            tree.insert(ids, range(10 * number, 10 * number + len(ids)))
        for ids in matched:
            tree.match(ids)
        for ids in held:
            tree.lock(tree.match(ids).node)
        trees.append(tree)
    return trees


def nb07_ex1(tree_1: list[int], tree_2: list[int], tree_3: list[int], tree_4: list[int]) -> None:
    """For each of `eviction_trees`: the slots, in any order, that evict(num_pages=3) gives back."""
    for number, (answer, tree) in enumerate(zip((tree_1, tree_2, tree_3, tree_4), eviction_trees(), strict=True), 1):
        gone = sorted(tree.evict(3).tolist())

        def verdict(slots: Any, gone: list[int] = gone) -> str:
            return "these slots" if sorted(slots) == gone else f"not {slots}"

        judge(f"exercise 1, tree {number}", _unseen(answer, verdict), [Case((), "these slots")])


def nb07_ex2(commit_prefix: Callable[[KVPool, Request], None]) -> None:
    """commit_prefix(pool, request) as the package's: whoever runs at the same time, no page is lost."""
    rng, cases = random.Random(0), []
    for number in range(60):
        prompts = [rng.choices((1, 2), k=rng.randint(1, 1 + number // 3)) for _ in range(1 + number // 15)]
        page_size = rng.choice((1, 2))
        cases.append(
            Case((prompts, page_size), _ledgers(prompts, page_size), f"{prompts} at once, pages of {page_size}")
        )

    @functools.wraps(commit_prefix)
    def ledgers(prompts: list[list[int]], page_size: int) -> list[list[int]]:
        return _ledgers(prompts, page_size, commit_prefix)

    judge("exercise 2", ledgers, sorted(cases, key=lambda case: len(case.shown)))


def _ledgers(
    prompts: Sequence[list[int]], page_size: int, commit_prefix: Callable[[KVPool, Request], None] | None = None
) -> list[list[int]]:
    """Pages by owner after each event: all prompts come in, then each is read and stored, then each request ends."""
    pool = KVPool(256, page_size, num_rows=len(prompts), max_len=32)
    if commit_prefix:
        pool.commit_prefix = functools.partial(commit_prefix, pool)
    requests = [Request(f"request {i}", ids, SamplingParams(), seed=0, max_len=32) for i, ids in enumerate(prompts)]
    for request in requests:
        pool.admit(request)
        pool.reserve(request, len(request.prompt))

    def read(request: Request) -> None:
        request.kv_len = len(request.prompt)
        pool.commit_prefix(request)

    found = []
    for event in (read, pool.release):
        for request in requests:
            event(request)
            found.append(list(pool.check_integrity(requests)))
    return found
