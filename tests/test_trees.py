"""Trees of drafts: the same ids and the same distributions, and every slot holds what its position says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from test_attention import SLOTS, random_table
from test_drafters import config_for, greedy, make, run_with_exact_draft_rows, tiny  # noqa: F401
from test_lossless import PROMPT, SMALLEST_P_VALUE, sample_and_compare
from test_lossless import make as make_lossless
from test_lossless import tiny as tiny_lossless  # noqa: F401
from tools import (
    TreeDrafter,
    assert_idle,
    assert_same_ids,
    finish,
    markov,
    reference_logits,
    run,
    tag_engine,
    tag_greedy,
)

from minispec import SamplingParams
from minispec.attention.torch_backend import TorchAttention
from minispec.config import ConfigError, SpeculativeConfig
from minispec.core import Request, Row, Step, TokenKind, ancestors
from minispec.runner import Segment, pack
from minispec.sampling.distribution import sample
from minispec.sampling.rejection import verify, verify_ids
from minispec.sampling.trees import Trees, match_trees, verify_trees
from minispec.speculative.drafter import Proposal
from minispec.speculative.growing import GrowingTree
from minispec.speculative.ngram import NgramDrafter

NEARLY_ONE = 1 - 2.0**-53
TREE = {"candidate_length": 3, "topk": 3, "num_draft_tokens": 7}


def random_parents(rng: np.random.Generator, n: int) -> list[int]:
    return [int(rng.integers(-1, i)) if i else -1 for i in range(n)]


def path_of(parents, last: int) -> list[int]:
    return [] if last < 0 else [*path_of(parents, parents[last]), last]


# Rows, positions, masks --------------------------------------------------------------------------------------------


def test_a_row_knows_its_paths_and_what_was_rejected():
    request = Request("r", [1, 2], SamplingParams(), seed=0, max_len=99)
    tree = Row(request, 1, 1, drafts=[7, 9, 2, 5], parents=[-1, 0, 0, 2])
    chain = Row(request, 1, 1, drafts=[7, 9, 2, 5])
    A, C, B = TokenKind.ACCEPTED, TokenKind.CORRECTED, TokenKind.BONUS
    assert [tree.path(last) for last in range(-1, 4)] == [[], [0], [0, 1], [0, 2], [0, 2, 3]]
    assert [chain.path(last) for last in (-1, 0, 3)] == [[], [0], [0, 1, 2, 3]]
    assert (tree.depth, chain.depth) == (3, 4)
    assert tree.kinds([]) == [C] and tree.kinds([0, 1]) == [A, A, B] and tree.kinds([0, 2]) == [A, A, C]
    assert chain.kinds([0, 1]) == [A, A, C] and chain.kinds([0, 1, 2, 3])[-1] is B


def test_pack_gives_depths_for_positions_and_places_for_slots():
    table = np.arange(100).reshape(2, 50)
    tree = Segment(0, 10, [3, 7, 9, 2, 5], 5, [-1, 0, 0, 2])
    level = Segment(1, 22, [8, 8], 2, [-1, -1, 1, 0])  # two nodes more behind two that were written before
    layout = pack([tree, Segment(1, 4, [1], 1), level], table)
    assert layout.positions.tolist() == [10, 11, 12, 12, 13, 4, 21, 21]
    assert layout.slots.tolist() == [10, 11, 12, 13, 14, 54, 72, 73]
    assert layout.before.tolist() == [9, 10, 11, 11, 13, 3, 21, 20]
    assert sorted(layout.trees) == [0, 2]
    assert layout.trees[2].tolist() == [[False, True, True, False], [True, False, False, True]]


def textbook(q, k, v, visible):
    """q [Q, Hq, D], k and v [L, Hkv, D], visible bool [Q, L] -> [Q, Hq, D] in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,lhd->hql", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def test_any_mix_of_rows_with_trees_equals_the_textbook():
    generator = torch.Generator().manual_seed(1)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        table, segments, visible = random_table(7, seed), [], []
        for row in range(7):
            n = int(rng.choice([0, 0, 1, 3, 6]))
            new, start = int(rng.integers(1, 8)) if n else int(rng.choice([1, 7])), int(rng.choice([n, n + 7, 200]))
            parents = random_parents(rng, n)
            segments.append(Segment(row, start, [0] * new, 0, parents or None))
            end = start + new
            sees = np.tril(np.ones((end, end), dtype=bool))
            if n:
                sees[end - n :, end - n :] = ancestors(parents)
            visible.append(torch.from_numpy(sees[start:]))
        layout = pack(segments, table)
        k_cache, v_cache = (torch.randn(SLOTS, 2, 8, generator=generator) for _ in range(2))
        q = torch.randn(len(layout.slots), 4, 8, generator=generator)
        k, v = (torch.randn(len(layout.slots), 2, 8, generator=generator) for _ in range(2))
        attention = TorchAttention(4, 2, dtype=torch.float32, device="cpu")
        out = attention.run(attention.plan(layout, table), k_cache, v_cache, q, k, v)
        first = 0
        for segment, sees in zip(segments, visible, strict=True):
            rows, slots = slice(first, first + len(sees)), table[segment.table_row, : sees.shape[1]]
            expected = textbook(q[rows], k_cache[slots], v_cache[slots], sees)
            assert (out[rows].double() - expected).abs().max() < 2e-5
            first += len(sees)


def test_logits_of_a_tree_are_those_of_each_path_alone(tiny):  # noqa: F811
    """The naive reference computes every path anew, without a mask and without a cache."""
    folder, _, prompts, _ = tiny
    llm, rng = make(folder, None, page_size=4), np.random.default_rng(0)
    pool = llm.engine.pool
    for prompt in prompts[:4]:
        request = Request("r", prompt, SamplingParams(), seed=0, max_len=len(prompt) + 9)
        pool.admit(request)
        parents, drafts = random_parents(rng, 9), rng.integers(0, 200, 9).tolist()
        row = Row(request, 0, len(prompt), drafts=drafts, parents=parents)
        assert pool.reserve(request, row.kv_len)
        logits = llm.engine.runner.forward(Step([row]), pool.table.slots)
        for last in range(-1, 9):
            path = [drafts[draft] for draft in path_of(parents, last)]
            torch.testing.assert_close(
                logits[1 + last], reference_logits(llm.model, prompt + path)[-1], atol=1e-4, rtol=0
            )
        pool.release(request, keep=False)


# Verification ------------------------------------------------------------------------------------------------------


def packed(drafts, lineages):
    """drafts [R] and Trees of several requests."""
    return torch.tensor([token for each in drafts for token in (*each, -1)]), Trees.of(lineages)


def test_matching_follows_the_targets_choices_to_the_end():
    rng = np.random.default_rng(0)
    depths = set()
    for _ in range(200):
        lineages = [random_parents(rng, int(rng.integers(0, 9))) for _ in range(3)]
        drafts = []
        for parents in lineages:
            taken: dict[int, list[int]] = {}
            drafts.append([])
            for parent in parents:
                free = [t for t in range(10) if t not in taken.setdefault(parent, [])]
                taken[parent].append(int(rng.choice(free[:3])))
                drafts[-1].append(taken[parent][-1])
        tokens, trees = packed(drafts, lineages)
        target = torch.from_numpy(rng.integers(0, 3, len(tokens)))
        verdict = match_trees(target, tokens, trees)
        start = 0
        for b, (parents, draft) in enumerate(zip(lineages, drafts, strict=True)):
            node = -1
            while (
                child := next(
                    (i for i, p in enumerate(parents) if p == node and draft[i] == target[start + 1 + node]), None
                )
            ) is not None:
                node = child
            assert (verdict.accepted[b], verdict.next_ids[b]) == (node + 1, target[start + 1 + node])
            depths.add(len(path_of(parents, node)))
            chosen = trees.chosen(tokens, trees.row_start + verdict.accepted, verdict.next_ids)
            for row in (-1, *path_of(parents, node)):
                assert chosen[start + 1 + row] == target[start + 1 + row]
            start += len(parents) + 1
    assert depths >= {0, 1, 2, 3}


def random_p(generator, *shape: int) -> torch.Tensor:
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 3
    weights[torch.rand(*shape, generator=generator) < 0.25] = 0
    weights += (
        1e-3 * torch.eye(shape[-1], dtype=torch.float64)[torch.randint(shape[-1], shape[:-1], generator=generator)]
    )
    return weights / weights.sum(-1, keepdim=True)


def largest_u(holds) -> float:
    """The end of the interval from 0 on which holds(u)."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def law_of_siblings(p, q, xs, without) -> torch.Tensor:
    """Law [V] of the first token when a root has the children xs, their q rows being `without`. No sampling.

    The answer is a step function of each uniform, and the lengths of the steps are found by halving.
    """
    k, vocab = len(xs), len(p)
    tokens, trees = packed([xs], [[-1] * k])
    rows = torch.cat((p[None], torch.full((k, vocab), 1 / vocab, dtype=torch.float64)))
    q_rows = torch.cat((torch.stack(without), torch.zeros(1, vocab, dtype=torch.float64)))

    def verdict(child: int, u: float, u_sample: float = 0.5):
        """All elder children rejected if they can be, this one judged with u."""
        accept = torch.zeros(k + 1, dtype=torch.float64)
        accept[:child] = NEARLY_ONE
        accept[child] = u
        samples = torch.full((k + 1,), u_sample, dtype=torch.float64)
        return verify_trees(rows, q_rows, tokens, trees, accept, samples)

    law, left = torch.zeros(vocab, dtype=torch.float64), 1.0
    for child, x in enumerate(xs):
        keep = largest_u(lambda u, child=child: int(verdict(child, u).accepted) == child + 1)
        law[x] += left * keep
        left *= 1 - keep
    if left > 1e-12:
        edges = [largest_u(lambda u, t=t: int(verdict(k - 1, NEARLY_ONE, u).next_ids) <= t) for t in range(vocab)]
        law += left * torch.tensor(edges, dtype=torch.float64).diff(prepend=torch.zeros(1))
    return law


def drawn_in_turn(q, k: int):
    """Every outcome of k draws without replacement: (chance, tokens, the distribution that each was drawn from)."""
    outcomes = [(1.0, [], [])]
    for _ in range(k):
        longer = []
        for chance, xs, rows in outcomes:
            rest = q.clone()
            rest[xs] = 0
            rest = rest / rest.sum()
            longer += [(chance * rest[x].item(), [*xs, x], [*rows, rest]) for x in rest.nonzero()[:, 0].tolist()]
        outcomes = longer
    return outcomes


@pytest.mark.parametrize("k", [1, 2, 3])
def test_siblings_drawn_without_replacement_leave_p_as_it_is(k):
    generator = torch.Generator().manual_seed(k)
    for _ in range(5 - k):
        p, q = random_p(generator, 4), random_p(generator, 4)
        if (q > 0).sum() < k:
            continue
        outcomes = drawn_in_turn(q, k)
        law = sum(chance * law_of_siblings(p, q, xs, rows) for chance, xs, rows in outcomes)
        torch.testing.assert_close(law, p, atol=1e-7, rtol=0)


def test_control_siblings_judged_by_the_whole_q_are_seen():
    p, q = torch.tensor([0.2, 0.4, 0.4]).double(), torch.tensor([0.7, 0.2, 0.1]).double()
    law = sum(chance * law_of_siblings(p, q, xs, [q, q]) for chance, xs, _ in drawn_in_turn(q, 2))
    assert (law - p).abs().max() > 0.01


def test_siblings_chosen_without_chance_leave_p_as_it_is():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    for xs in ([0], [1, 3], [2, 0, 1], [0, 1, 2, 3]):
        one_hot = [torch.eye(4, dtype=torch.float64)[x] for x in xs]
        torch.testing.assert_close(law_of_siblings(p, None, xs, one_hot), p, atol=1e-7, rtol=0)


def test_a_q_that_is_no_distribution_drops_its_draft_only():
    p, q = torch.tensor([0.1, 0.2, 0.7]).double(), torch.tensor([0.5, 0.5, 0.0]).double()
    bad = torch.full((3,), float("nan"), dtype=torch.float64)
    torch.testing.assert_close(
        law_of_siblings(p, None, [2, 0], [bad, q]), law_of_siblings(p, None, [0], [q]), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("count", [200_000])
def test_two_levels_give_pairs_distributed_as_the_target_says(count):
    """Whole trees, drawn and judged: chi-square of the first two tokens, three siblings then two."""
    generator = torch.Generator().manual_seed(5)
    # The target's distributions of the first token, and of the second after each first one; then the draft's.
    p0, p1 = (random_p(generator, *shape) * 0.7 + 0.1 for shape in ((3,), (3, 3)))
    q0, q1 = random_p(generator, 3) * 0.8 + 0.2 / 3, random_p(generator, 3, 3) * 0.8 + 0.2 / 3
    u = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731

    def draw(q, k):
        tokens, rows = [], []
        for _ in range(k):
            tokens.append(sample(q, u(len(q))))
            rows.append(q)
            q = q.scatter(-1, tokens[-1][:, None], 0.0)
            q = q / q.sum(-1, keepdim=True)
        return tokens, rows

    first, first_q = draw(q0.expand(count, 3), 2)
    second, second_q = draw(q1[first[0]], 2)  # only the elder has children
    parents = [-1, -1, 0, 0]
    bonus = torch.full((count,), -1)
    tokens = torch.stack([*first, *second, bonus], 1).flatten()
    q = torch.stack([*first_q, *second_q, second_q[0]], 1).flatten(0, 1)
    after = [p1[token] for token in first] + [p1[0][None].expand(count, 3)] * 2
    p = torch.stack([p0.expand(count, 3), *after], 1).flatten(0, 1)
    verdict = verify_trees(p, q, tokens, Trees.of([parents] * count), u(5 * count), u(5 * count))
    last = verdict.accepted
    assert (last.bincount(minlength=5) > 100).all()
    kept = torch.where(last == 2, first[1], first[0])
    one = torch.where(last == 0, verdict.next_ids, kept)
    two = torch.where(last < 3, verdict.next_ids, torch.where(last == 3, second[0], second[1]))
    two = torch.where(last == 0, sample(p1[one], u(count)), two)
    seen = torch.zeros(3, 3, dtype=torch.float64).index_put_((one, two), torch.ones(count).double(), accumulate=True)
    expected = p0[:, None] * p1 * count
    cells = expected > 5
    assert not seen[expected == 0].any() and cells.sum() >= 5
    distance = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    p_value = torch.special.gammaincc((cells.sum() - 1.0).double() / 2, distance / 2)
    assert p_value > 1e-3, (seen / count, expected / count)


def test_a_chain_is_judged_like_a_chain():
    generator = torch.Generator().manual_seed(2)
    for n in range(5):
        p, q = random_p(generator, 3 * (n + 1), 5), random_p(generator, 3 * (n + 1), 5)
        drafts = [torch.randint(5, (n,), generator=generator).tolist() for _ in range(3)]
        tokens, trees = packed(drafts, [range(-1, n - 1)] * 3)
        counts = torch.full((3,), n)
        u = torch.rand(2, len(tokens), generator=generator, dtype=torch.float64)
        for mine, theirs in (
            (verify_trees(p, q, tokens, trees, *u), verify(p, q, tokens, trees.row_start, counts, *u)),
            (match_trees(p.argmax(-1), tokens, trees), verify_ids(p.argmax(-1), tokens, trees.row_start, counts)),
        ):
            assert torch.equal(mine.accepted, theirs.accepted) and torch.equal(mine.next_ids, theirs.next_ids)


# The engine, on the tag model ----------------------------------------------------------------------------------------


MODES = list(product((1, 4, 16), (True, False), (3, None), (True, False)))


def tree_drafter(logits_of, luck: float = 0.6) -> TreeDrafter:
    return TreeDrafter(lambda tokens: int(np.argmax(logits_of(tokens))), 12, luck)


def tree_engine(logits_of, **options):
    options.setdefault("drafter", tree_drafter(logits_of))
    options["speculative_config"] = {**TREE, "num_draft_tokens": 9, "adaptive": False} | options.pop("speculative", {})
    return tag_engine(logits_of, **options)


@pytest.mark.parametrize("page_size,radix,chunk,overlap", MODES)
def test_ids_are_the_references_and_every_slot_holds_its_position(page_size, radix, chunk, overlap):
    logits_of = markov()
    engine = tree_engine(
        logits_of,
        page_size=page_size,
        enable_radix_cache=radix,
        chunked_prefill_size=chunk,
        enable_overlap=overlap,
        max_num_seqs=4,
    )
    prompts = [[1, 2, 3], [4] * 17, [1, 2, 3, 4, 5, 6, 7, 8, 9], [5], [1, 2, 3], [9, 8, 7, 6] * 5]
    try:
        for _ in range(2):
            requests = run(engine, prompts, greedy(24))
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.output == tag_greedy(logits_of, prompt, 24)
        assert_idle(engine)
    finally:
        engine.close()
    counts = engine.metrics.speculation
    assert counts.acceptance_length > 1.8 and 0 < counts.accepted < counts.drafted
    assert (engine.runner.moves > 0) == (page_size > 1)  # small pages are re-pointed
    kinds = {kind for request in requests for kind in request.kinds}
    assert kinds == set(TokenKind)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_preemption_changes_nothing_but_time(page_size, overlap):
    logits_of = markov()
    engine = tree_engine(logits_of, page_size=page_size, slots=64, context_length=48, enable_overlap=overlap)
    prompts = [[i, i + 1, 3] for i in range(6)]
    try:
        for request, prompt in zip(run(engine, prompts, greedy(30)), prompts, strict=True):
            assert request.output == tag_greedy(logits_of, prompt, 30)
        assert engine.scheduler.preemptions > 0
        assert_idle(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_aborts_at_any_step_leave_the_others_and_the_ledger_alone(page_size, overlap):
    logits_of = markov()
    for moment in range(1, 8):
        engine = tree_engine(logits_of, page_size=page_size, enable_overlap=overlap)
        try:
            [gone], [stays] = engine.add([1, 2, 3], greedy(30)), engine.add([1, 2, 4], greedy(30))
            for _ in range(moment):
                engine.step()
            engine.abort(gone.id)
            finish(engine)
            assert stays.output == tag_greedy(logits_of, [1, 2, 4], 30)
            assert gone.output == tag_greedy(logits_of, [1, 2, 3], 30)[: len(gone.output)]
            assert_idle(engine)
            [again] = run(engine, [[1, 2, 3, *gone.output]], greedy(5))  # what it left in the cache is right
            assert again.output == tag_greedy(logits_of, [1, 2, 3, *gone.output], 5)
        finally:
            engine.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_stop_inside_an_accepted_path_ends_the_text_there(page_size):
    logits_of = markov(seed=3)
    for place in range(1, 9):
        expected = tag_greedy(logits_of, [1, 2, 3], 24)
        if expected[place] in expected[:place]:
            continue
        engine = tree_engine(logits_of, page_size=page_size, eos_ids=[expected[place]])
        [request] = run(engine, [[1, 2, 3]], replace(greedy(24), ignore_eos=False))
        assert request.output == expected[: place + 1] and request.finish_reason == "stop"
        assert_idle(engine)


def test_undone_drafts_are_the_ones_that_were_not_kept():
    logits_of = markov()
    engine = tree_engine(logits_of, page_size=4)
    [request] = run(engine, [[1, 2, 3]], greedy(24))
    counts = request.metrics.speculation
    assert sum(len(event.drafts) for event in request.metrics.rollbacks) >= counts.drafted - counts.accepted
    assert all(len(event.slots) == len(event.drafts) for event in request.metrics.rollbacks)
    assert len(counts.drafted_at) <= 9 and sum(counts.accepted_at) == counts.accepted
    assert all(kept <= counts.verify_rows for kept in counts.accepted_at)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_logprobs_are_those_of_the_path(logprobs):
    logits_of = markov()
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=logprobs)
    [plain] = run(tag_engine(logits_of), [[1, 2, 3]], params)
    [drafted] = run(tree_engine(logits_of), [[1, 2, 3]], params)
    assert drafted.metrics.speculation.accepted > 5
    assert drafted.logprobs == plain.logprobs


def test_match_gives_a_seeded_request_the_ids_of_plain_decoding_with_penalties_along_the_path():
    logits_of = markov()
    extra = [{}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.4}, {"top_k": 4}, {"min_tokens": 9}]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=24, stop_token_ids=[3], **more)
        for i, more in enumerate(extra * 2)
    ]
    prompts = [[1 + i, 2, 3] for i in range(len(params))]
    plain = run(tag_engine(logits_of), prompts, params)
    for verification in ("match", "rejection"):  # without chance in the drafts they are the same
        engine = tree_engine(logits_of, speculative={"verification": verification})
        requests = run(engine, prompts, params)
        assert [r.output for r in requests] == [r.output for r in plain]
        assert 0.05 < engine.metrics.speculation.acceptance_rate


# Growing -------------------------------------------------------------------------------------------------------------


def request_of(n: int = 3) -> Request:
    request = Request("r", list(range(n)), SamplingParams(temperature=0), seed=0, max_len=999)
    request.table_row = 0
    return request


def grow(chances_of, room: int, depth: int, topk: int) -> GrowingTree:
    """A tree over a model whose children's chances depend on the path."""
    tree, paths = GrowingTree(request_of(), room, depth, topk), {-1: ()}
    while tree.level:
        for node in tree.level:
            for token, chance in enumerate(chances_of(paths[node])):
                paths[len(tree.tokens)] = (*paths[node], token)
                tree.add(node, token, chance, None)
        tree.next_level()
    return tree


def chances(topk: int, seed: int):
    def chances_of(path):
        rng = np.random.default_rng([seed, *path])
        return sorted((rng.dirichlet(np.ones(topk + 2)))[:topk].tolist(), reverse=True)

    return chances_of


@pytest.mark.parametrize("room,depth,topk", [(7, 3, 3), (4, 4, 2), (12, 4, 4), (3, 2, 8)])
def test_the_best_nodes_of_all_that_were_drafted_are_kept_best_first(room, depth, topk):
    for seed in range(30):
        chances_of = chances(topk, seed)
        tree = grow(chances_of, room, depth, topk)
        tokens, q, parents = tree.best()
        lineage = range(-1, len(tokens) - 1) if parents is None else parents
        paths = [tuple(tokens[i] for i in path_of(lineage, last)) for last in range(len(tokens))]
        worth = [float(np.prod([chances_of(path[:i])[token] for i, token in enumerate(path)])) for path in paths]
        assert q is None and len(tokens) == min(room, len(tree.tokens)) == len(set(paths))
        assert all(parent < i for i, parent in enumerate(lineage)) and max(map(len, paths)) <= depth
        assert worth == sorted(worth, reverse=True)
        assert np.isclose(sorted(tree.worth, reverse=True)[: len(worth)], worth).all()
        assert len(tree.rows) <= room and len(set(tree.rows)) == len(tree.rows)
        if topk * depth <= room:  # wide enough for the whole search: the first level is kept whole or beaten
            assert sum(len(path) == 1 for path in paths) <= topk


def test_with_rows_for_all_the_tree_is_the_best_there_is():
    for seed in range(30):
        chances_of = chances(2, seed)
        tokens, _, parents = grow(chances_of, 14, 3, 4).best()  # all 2 + 4 + 8 nodes
        assert len(tokens) == 14 and parents is not None


def test_a_sure_model_drafts_a_chain_and_says_so():
    tokens, _, parents = grow(lambda path: [1.0], 4, 4, 3).best()
    assert len(tokens) == 4 and parents is None


def test_segments_bring_the_newest_level_or_all_levels():
    tree = GrowingTree(request_of(5), 6, 3, 2)
    tree.add(-1, 7, 0.5, None)
    tree.add(-1, 8, 0.4, None)
    tree.next_level()
    assert tree.segment(False) == Segment(0, 5, [7, 8], 2, [-1, -1])
    for token, parent, chance in ((1, 0, 0.9), (2, 0, 0.1), (3, 1, 0.9), (4, 1, 0.1)):
        tree.add(parent, token, chance, None)
    tree.next_level()
    assert tree.segment(False) == Segment(0, 7, [1, 3], 2, [-1, -1, 0, 1])
    assert tree.segment(True) == Segment(0, 5, [7, 8, 1, 3], 2, [-1, -1, 0, 1])
    assert tree.logit_row(4).output == [8, 3]


def test_ngram_drafts_what_followed_several_earlier_times():
    tokens = [1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 8, 6, 1, 2]
    request = Request("r", tokens, SamplingParams(), seed=0, max_len=99)
    for topk, expected in (
        (1, ([8, 6, 1], None)),
        (2, ([8, 6, 1, 5, 1], [-1, 0, 1, 0, 3])),
        (3, ([8, 6, 1, 5, 1, 7, 7, 1], [-1, 0, 1, 0, 3, -1, 5, 6])),
    ):
        proposal = NgramDrafter(2, 2, topk, 3).propose([request], [10])
        assert (proposal.tokens[0], proposal.parents[0]) == expected
        for k in range(1, len(expected[0])):
            shorter = NgramDrafter(2, 2, topk, 3).propose([request], [k])
            assert shorter.tokens[0] == expected[0][:k]


# Model drafters ------------------------------------------------------------------------------------------------------

KINDS = ["mtp", "chain", "mtp+ngram", "early-exit", "itself"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size,radix,chunk", [(1, True, 3), (4, True, None), (4, False, 3), (16, True, 3)])
def test_every_drafter_gives_reference_ids_with_trees(tiny, kind, page_size, radix, chunk):  # noqa: F811
    folder, _, prompts, expected = tiny
    llm = make(
        folder, config_for(kind, tiny) | TREE, page_size=page_size, enable_radix_cache=radix, chunked_prefill_size=chunk
    )
    with llm:
        for _ in range(2):
            for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
                assert_same_ids(output.token_ids, ids, margin)
        assert llm.metrics().drafter_faults == 0
        counts = llm.engine.metrics.speculation
        assert counts.drafted > 0 and len(counts.drafted_at) == 3
        if kind == "itself":  # the right path is always in the tree, to its full depth, but at the end of a request
            assert counts.acceptance_length > 2.4
        assert_idle(llm.engine)


@pytest.mark.parametrize("kind", ["mtp", "chain"])
@pytest.mark.parametrize("page_size,radix,chunk", [(1, True, None), (4, True, 3), (16, False, None)])
def test_draft_rows_that_are_called_exact_are_exact_after_a_path_has_moved(tiny, kind, page_size, radix, chunk):  # noqa: F811
    """They are computed from the target's hidden states of the accepted path."""
    folder, _, prompts, _ = tiny
    speculative = config_for(kind, tiny) | TREE
    llm = make(folder, speculative, page_size=page_size, enable_radix_cache=radix, chunked_prefill_size=chunk)
    with llm:
        run_with_exact_draft_rows(llm, prompts)
        counts = llm.engine.metrics.speculation
        assert sum(counts.accepted_at[1:]) > 0  # two drafts of a path were kept, so something had to move


TREES = [
    ("standalone", 2, 2, 5, "rejection", "probabilistic"),
    ("standalone", 3, 3, 7, "rejection", "probabilistic"),
    ("standalone", 3, 3, 7, "match", "probabilistic"),
    ("mtp", 2, 3, 6, "rejection", "probabilistic"),
    ("mtp", 3, 2, 9, "rejection", "probabilistic"),
    ("mtp", 3, 2, 9, "rejection", "greedy"),
    ("early-exit", 2, 2, 4, "rejection", "probabilistic"),
]


@pytest.mark.parametrize("kind,depth,topk,num,verification,sampling", TREES)
def test_trees_leave_the_distribution_of_every_position_as_it_is(
    tiny_lossless,  # noqa: F811
    kind,
    depth,
    topk,
    num,
    verification,
    sampling,
):
    llm = make_lossless(
        tiny_lossless, kind, depth, topk=topk, num_draft_tokens=num, verification=verification, draft_sampling=sampling
    )
    with llm:
        values = sample_and_compare(llm, tiny_lossless[1], num + 3, [SamplingParams(temperature=0.9)])
        assert min(values) > SMALLEST_P_VALUE, values
        counts = llm.engine.metrics.speculation
        assert len(counts.drafted_at) == depth and sum(counts.accepted_at[1:]) > 20
        assert counts.drafted > 2 * counts.verify_rows


def test_greedy_and_sampled_requests_share_a_step_and_both_get_trees(tiny_lossless):  # noqa: F811
    params = [SamplingParams(temperature=t, seed=1, max_tokens=12, ignore_eos=True) for t in (0.9, 0, 0.9, 0)]
    options = {"topk": 3, "num_draft_tokens": 8}
    with make_lossless(tiny_lossless, "standalone", 3, **options) as llm:
        together = [output.token_ids for output in llm.generate([PROMPT] * 4, params)]
        assert llm.metrics().drafter_faults == 0
        assert all(
            r.metrics.speculation.drafted > 2 * r.metrics.speculation.verify_rows
            for r in llm.generate(PROMPT, params[1])
        )
    with make_lossless(tiny_lossless, "standalone", 3, **options) as llm:
        assert together == [llm.generate(PROMPT, p)[0].token_ids for p in params]


# Borders -------------------------------------------------------------------------------------------------------------


def test_a_tree_that_is_none_costs_its_draft(caplog):
    logits_of = markov()
    for tokens, parents in (([1, 2], [-1]), ([1, 2], [-1, 1]), ([1, 2], [-2, 0]), ([1, 1], [-1, -1]), ([1], ["x"])):

        class Wrong(TreeDrafter):
            def propose(self, requests, lengths, tokens=tokens, parents=parents):
                return Proposal([tokens] * len(requests), parents=[parents] * len(requests))

        engine = tree_engine(logits_of, drafter=Wrong(lambda t: 0, 12))
        [request] = run(engine, [[1, 2, 3]], greedy(6))
        assert request.output == tag_greedy(logits_of, [1, 2, 3], 6)
        assert request.metrics.drafted == 0 and sum(engine.metrics.faults.values()) == 3


def test_settings_are_checked_at_the_border():
    assert SpeculativeConfig(topk=4, num_draft_tokens=9).most_drafts == 9
    assert SpeculativeConfig(topk=4).most_drafts == 16 and SpeculativeConfig().most_drafts == 4
    for bad in ({"topk": 0}, {"topk": 65}, {"topk": 2, "num_draft_tokens": 3}, {"num_draft_tokens": 8}, {"topk": 2.0}):
        with pytest.raises(ConfigError, match=next(reversed(bad))):
            SpeculativeConfig(**bad)
