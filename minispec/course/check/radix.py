"""Exercises of notebooks 06 (radix tree) and 07 (locks, eviction, hit rate).

Knows: what a right answer does; every expected result comes from the package's own tree or pool.
Does not know: how to solve anything.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from minispec.course.check.judge import Case, judge
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
