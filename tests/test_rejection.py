"""Verification is exact: what comes out is distributed as p, whatever was drafted.

`law` measures `verify` from outside. For fixed p, q and draft its answer is a step function of the two uniforms, so
halving the interval finds every step, and the lengths between the steps are the probabilities: no sampling.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minispec.sampling.distribution import sample
from minispec.sampling.rejection import verify, verify_ids
from minispec.sampling.rng import Purpose, uniforms

NEARLY_ONE = 1 - 2.0**-53
VOCAB = 5


def pack(drafts: list[list[int]]):
    """The row layout of rejection.py: drafts [R], row_start [B], num_drafts [B]."""
    lengths = torch.tensor([len(d) for d in drafts])
    rows = torch.tensor([token for d in drafts for token in (*d, -1)])
    return rows, (lengths + 1).cumsum(0) - (lengths + 1), lengths


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """[C, ...] -> [2C, ...]: the draft row and the bonus row of each of C requests with one draft."""
    return values.repeat_interleave(2, dim=0)


def judge(p, q, x, u_accept, u_sample):
    """Verify C requests with one draft x [C] each."""
    packed = pack([[token] for token in x.tolist()])
    return verify(rows_of(p), None if q is None else rows_of(q), *packed, rows_of(u_accept), rows_of(u_sample))


def largest_u(holds, count: int) -> torch.Tensor:
    """[count] the end of the interval from 0 on which the condition holds (u [count] -> bool [count])."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(55):
        middle = (low + high) / 2
        inside = holds(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return low


def law(p, q, x):
    """C cases p, q [C, V], x [C] -> (chance to keep x [C], law of the token that replaces it [C, V])."""
    cases, vocab = p.shape
    half = torch.full((cases,), 0.5, dtype=torch.float64)
    keep = largest_u(lambda u: judge(p, q, x, u, half).accepted == 1, cases)
    # The replacement is chosen with u_accept as large as can be; token i comes out below the i-th edge.
    p, q, x = (None if t is None else t.repeat_interleave(vocab, dim=0) for t in (p, q, x))
    token, reject = torch.arange(vocab).repeat(cases), torch.full((cases * vocab,), NEARLY_ONE, dtype=torch.float64)
    edges = largest_u(lambda u: judge(p, q, x, reject, u).next_ids <= token, cases * vocab).view(cases, vocab)
    return keep, edges.diff(dim=-1, prepend=torch.zeros(cases, 1, dtype=torch.float64))


def outcome(p, q, drawn_from=None):
    """C pairs p, q [C, V], drafts drawn from q -> (law of the first token [C, V], chance to keep the draft [C])."""
    cases, vocab = p.shape
    drawn_from = q if drawn_from is None else drawn_from
    x = torch.arange(vocab).repeat(cases)
    keep, replacement = law(*(t.repeat_interleave(vocab, dim=0) for t in (p, q)), x)
    keep, replacement = keep.view(cases, vocab), replacement.view(cases, vocab, vocab)
    first = drawn_from * keep + torch.einsum("cx,cxv->cv", drawn_from * (1 - keep), replacement)
    return first, (drawn_from * keep).sum(-1)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def random_rows(generator, count: int, zeros: float = 0.3) -> torch.Tensor:
    weights = torch.rand(count, VOCAB, generator=generator, dtype=torch.float64) ** 3
    weights[torch.rand(count, VOCAB, generator=generator) < zeros] = 0
    weights[torch.arange(count), torch.randint(VOCAB, (count,), generator=generator)] += 0.05
    return weights / weights.sum(-1, keepdim=True)


GENERATOR = torch.Generator().manual_seed(0)
P, Q = random_rows(GENERATOR, 50), random_rows(GENERATOR, 50)


def test_the_output_is_distributed_as_p_for_random_pairs_with_zeros():
    assert (P == 0).any() and (Q == 0).any()
    first, kept = outcome(P, Q)
    torch.testing.assert_close(first, P, atol=1e-9, rtol=0)
    torch.testing.assert_close(kept, torch.minimum(P, Q).sum(-1), atol=1e-9, rtol=0)


def test_the_output_is_distributed_as_p_for_equal_pairs_and_for_disjoint_ones():
    left, right = P.clone(), P.clone()
    left[:, ::2], right[:, 1::2] = 0.0, 0.0
    left[:, 1] += 0.01
    right[:, 0] += 0.01
    left, right = left / left.sum(-1, keepdim=True), right / right.sum(-1, keepdim=True)
    first, kept = outcome(torch.cat([P, left]), torch.cat([P, right]))
    torch.testing.assert_close(first, torch.cat([P, left]), atol=1e-9, rtol=0)
    torch.testing.assert_close(kept, torch.cat([torch.ones(50), torch.zeros(50)]).double(), atol=1e-9, rtol=0)


def test_a_draft_chosen_without_chance_needs_a_one_hot_q_and_none_means_that():
    x = torch.arange(50) % VOCAB
    one_hot = torch.nn.functional.one_hot(x, VOCAB).double()
    keep, replacement = law(P, None, x)
    first = one_hot * keep[:, None] + (1 - keep)[:, None] * replacement
    torch.testing.assert_close(first, P, atol=1e-9, rtol=0)
    torch.testing.assert_close(keep, P[torch.arange(50), x], atol=1e-9, rtol=0)
    same_keep, same_replacement = law(P, one_hot, x)
    assert torch.equal(keep, same_keep) and torch.equal(replacement, same_replacement)


def test_float32_rows_are_exact_to_float32():
    first, _ = outcome(P.float(), Q.float(), drawn_from=Q)
    torch.testing.assert_close(first, P, atol=1e-6, rtol=0)


def test_q_must_be_what_the_draft_was_drawn_from():
    p, raw, filtered = row(0.1, 0.2, 0.3, 0.4), row(0.4, 0.3, 0.2, 0.1), row(4 / 7, 3 / 7, 0, 0)
    torch.testing.assert_close(outcome(p, filtered)[0], p, atol=1e-9, rtol=0)
    biased, _ = outcome(p, raw, drawn_from=filtered)
    torch.testing.assert_close(biased, row(1 / 7, 2 / 7, 1 / 7, 3 / 7), atol=1e-9, rtol=0)


def test_the_recovered_token_comes_from_p_minus_q_or_from_p_without_the_draft():
    p = row(0.5, 0.3, 0.2)
    torch.testing.assert_close(outcome(p, row(0.2, 0.3, 0.5))[0], p, atol=1e-9, rtol=0)
    keep, replacement = law(p, row(0.2, 0.3, 0.5), torch.tensor([2]))
    torch.testing.assert_close(keep, torch.tensor([0.4]).double(), atol=1e-7, rtol=0)
    torch.testing.assert_close(replacement, row(1, 0, 0), atol=1e-9, rtol=0)
    keep, replacement = law(p, None, torch.tensor([1]))
    torch.testing.assert_close(keep, torch.tensor([0.3]).double(), atol=1e-7, rtol=0)
    torch.testing.assert_close(replacement, row(5 / 7, 0, 2 / 7), atol=1e-9, rtol=0)


def test_a_greedy_target_gives_its_argmax_whatever_q_is():
    p = row(0, 1, 0)
    for q in (row(0.6, 0.3, 0.1), row(0, 1, 0), row(1, 0, 0)):
        torch.testing.assert_close(outcome(p, q)[0], p, atol=1e-9, rtol=0)
    # Control: a drafter that always takes its likeliest token but reports its softmax as q.
    biased, _ = outcome(row(0.3, 0.5, 0.2), row(0.6, 0.3, 0.1), drawn_from=row(1, 0, 0))
    torch.testing.assert_close(biased, row(1 / 2, 1 / 3, 1 / 6), atol=1e-9, rtol=0)


def test_a_residual_of_zeros_gives_p_and_not_token_0():
    p = row(0, 0.25, 0.75)
    u = torch.linspace(0, 0.999, 16, dtype=torch.float64)
    always = torch.ones(16, dtype=torch.float64)  # no uniform is 1; here it forces a rejection although p = q
    verdict = judge(p.expand(16, 3), p.expand(16, 3), torch.full((16,), 2), always, u)
    assert verdict.accepted.tolist() == [0] * 16
    assert torch.equal(verdict.next_ids, sample(p.expand(16, 3), u))
    certain = judge(row(0, 1, 0), None, torch.tensor([1]), always[:1], u[:1])
    assert certain.next_ids.tolist() == [1]


@pytest.mark.parametrize(
    "bad_q", [(torch.nan,) * 3, (0.6, torch.nan, 0.4), (-0.2, 0.7, 0.5), (0.9, 0.9, 0.9), (1, 0, 0), (0, torch.inf, 0)]
)
def test_a_q_that_is_no_distribution_or_excludes_the_draft_costs_only_the_draft(bad_q):
    p = row(0.5, 0.3, 0.2)
    keep, replacement = law(p, row(*bad_q), torch.tensor([1]))
    assert keep.item() < 1e-9
    torch.testing.assert_close(replacement, p, atol=1e-9, rtol=0)


def test_a_target_row_of_nan_gives_valid_ids_and_leaves_other_requests_alone():
    p = P[:6].clone()
    u = torch.linspace(0, 0.99, 6, dtype=torch.float64)
    packed = pack([[1, 2], [3], []])
    good = verify(p, Q[:6], *packed, u, u)
    p[3:5] = torch.nan
    bad = verify(p, Q[:6], *packed, u, u)
    assert bad.accepted[1] == 0 and 0 <= bad.next_ids[1] < VOCAB
    for b in (0, 2):
        assert (bad.accepted[b], bad.next_ids[b]) == (good.accepted[b], good.next_ids[b])


def test_draft_j_is_judged_by_row_j_and_the_bonus_comes_from_the_last_row():
    expected = torch.tensor([3, 1, 4, 2])  # what the target says after 0, 1, 2 and 3 drafts
    tags = torch.nn.functional.one_hot(expected, VOCAB).double()
    u = torch.full((4,), 0.7, dtype=torch.float64)
    for drafts, accepted, next_id in [
        ([3, 1, 4], 3, 2),
        ([3, 1, 0], 2, 4),
        ([3, 0, 4], 1, 1),
        ([0, 1, 4], 0, 3),
        ([1, 4, 2], 0, 3),  # right for the rows one further on
    ]:
        packed = pack([drafts])
        for verdict in (verify(tags, None, *packed, u, u), verify_ids(expected, *packed)):
            assert (verdict.accepted.tolist(), verdict.next_ids.tolist()) == ([accepted], [next_id]), drafts


def test_each_row_uses_its_own_random_numbers():
    p = row(0.4, 0.3, 0.3).expand(3, 3)
    keep, reject = 0.0, 0.9
    for j, u_accept in enumerate([(reject, keep, keep), (keep, reject, keep), (keep, keep, reject)]):
        u_sample = torch.full((3,), 0.1, dtype=torch.float64)
        u_sample[j] = 0.99
        verdict = verify(p, None, *pack([[0, 0]]), torch.tensor(u_accept).double(), u_sample)
        assert (verdict.accepted.tolist(), verdict.next_ids.tolist()) == ([j], [2])


def random_batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    drafts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (3, 0, 1, 5, 0, 2, 4)]
    num_rows = sum(len(d) + 1 for d in drafts)
    p, q = random_rows(generator, num_rows, 0.1), random_rows(generator, num_rows, 0)
    u = torch.rand(2, num_rows, generator=generator, dtype=torch.float64)
    return drafts, p, q, u


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_ragged_batch_gives_each_request_what_it_gets_alone(one_hot):
    seen = set()
    for seed in range(20):
        drafts, p, q, u = random_batch(seed)
        q = None if one_hot else q
        packed = pack(drafts)
        batch = verify(p, q, *packed, *u)
        for b, start in enumerate(packed[1].tolist()):
            own = slice(start, start + len(drafts[b]) + 1)
            alone = verify(p[own], None if q is None else q[own], *pack([drafts[b]]), *u[:, own])
            assert (batch.accepted[b], batch.next_ids[b]) == (alone.accepted[0], alone.next_ids[0])
            assert 0 <= batch.accepted[b] <= len(drafts[b]) and 0 <= batch.next_ids[b] < VOCAB
            seen.add((len(drafts[b]), batch.accepted[b].item()))
    assert {(3, 0), (3, 1), (1, 1), (2, 0)} <= seen


def test_requests_without_drafts_are_sampled_as_usual():
    u = torch.rand(2, 50, generator=GENERATOR, dtype=torch.float64)
    verdict = verify(P, None, *pack([[]] * 50), *u)
    assert torch.equal(verdict.next_ids, sample(P, u[1])) and not verdict.accepted.any()


def test_greedy_verification_is_the_case_of_one_hot_rows():
    for seed in range(20):
        drafts, p, _, u = random_batch(seed)
        one_hot = torch.nn.functional.one_hot(p.argmax(-1), VOCAB).float()
        packed = pack(drafts)
        general, greedy = verify(one_hot, None, *packed, *u), verify_ids(p.argmax(-1), *packed)
        assert torch.equal(general.accepted, greedy.accepted) and torch.equal(general.next_ids, greedy.next_ids)


def test_sample_and_match_gives_the_samples_whatever_was_drafted_and_keeps_no_more_than_rejection():
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for p, q in zip(P, Q, strict=True):
        ids = sample(p.expand(1000, VOCAB), u)
        kept = []
        for x in range(VOCAB):
            verdict = verify_ids(rows_of(ids), *pack([[x]] * 1000))
            assert torch.equal(verdict.accepted, (ids == x).long())
            assert torch.equal(torch.where(verdict.accepted == 1, x, verdict.next_ids), ids)
            kept.append(verdict.accepted.double().mean())
        torch.testing.assert_close(torch.stack(kept), p, atol=1e-3, rtol=0)
        assert (q * p).sum() <= torch.minimum(p, q).sum() + 1e-12
    for seed in range(20):
        drafts, p, _, u = random_batch(seed)
        ids, (rows, starts, counts) = sample(p, u[1]), pack(drafts)
        verdict = verify_ids(ids, rows, starts, counts)
        for draft, start, n, next_id in zip(drafts, starts, verdict.accepted, verdict.next_ids, strict=True):
            assert [*draft[:n], next_id] == ids[start : start + n + 1].tolist()


@pytest.mark.parametrize("one_hot", [True, False])
def test_no_input_is_changed(one_hot):
    drafts, p, q, u = random_batch(0)
    inputs = [p, None if one_hot else q, *pack(drafts), *u]
    before = [None if t is None else t.clone() for t in inputs]
    verify(*inputs)
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("one_hot", [True, False])
def test_nothing_waits_for_a_value_on_the_host(one_hot):
    drafts, p, q, u = random_batch(0)
    on_meta = [None if t is None else t.to("meta") for t in (p, None if one_hot else q, *pack(drafts), *u)]
    assert verify(*on_meta).next_ids.shape == (len(drafts),)  # a meta tensor has no values to read


def test_a_chain_of_drafts_gives_the_joint_distribution_of_the_target():
    """100,000 seeded requests draft three tokens of a Markov chain q; the target is another chain p."""
    count, length, vocab = 100_000, 3, 3
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.0, 0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.1, 0.4], [0.2, 0.4, 0.4]], dtype=torch.float64)
    seeds = np.arange(count, dtype=np.uint64)

    def uniform(position, purpose):
        return torch.from_numpy(uniforms(seeds, position, purpose))

    history = [torch.zeros(count, dtype=torch.int64)]  # all start from token 0
    for j in range(length):
        history.append(sample(q[history[-1]], uniform(j, Purpose.DRAFT)))
    before = torch.stack(history, dim=1)  # [count, 4] the token before each row
    drafts = torch.cat([before[:, 1:], torch.full((count, 1), -1)], dim=1)
    u_accept, u_sample = (
        torch.stack([uniform(j, purpose) for j in range(length + 1)], dim=1).flatten()
        for purpose in (Purpose.ACCEPT, Purpose.SAMPLE)
    )
    row_start, num_drafts = torch.arange(count) * (length + 1), torch.full((count,), length)
    verdict = verify(
        p[before.flatten()], q[before.flatten()], drafts.flatten(), row_start, num_drafts, u_accept, u_sample
    )

    text = torch.where(torch.arange(length + 1) < verdict.accepted[:, None], drafts, -1)
    text[torch.arange(count), verdict.accepted] = verdict.next_ids
    for j in range(1, length):  # what one step did not reach is decoded as usual
        text[:, j] = torch.where(text[:, j] >= 0, text[:, j], sample(p[text[:, j - 1]], uniform(j, Purpose.SAMPLE)))

    got = torch.bincount(text[:, 0] * vocab**2 + text[:, 1] * vocab + text[:, 2], minlength=vocab**3) / count
    expected = (p[0][:, None, None] * p[:, :, None] * p[None, :, :]).flatten()
    assert ((got - expected).abs() <= 4.5 * (expected * (1 - expected) / count).sqrt()).all()
    assert len(verdict.accepted.unique()) == length + 1
