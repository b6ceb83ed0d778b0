"""The target distribution is what SamplingParams says, row by row, and a token is drawn from exactly it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from minispec.config import ConfigError, SamplingParams
from minispec.sampling import distribution
from minispec.sampling.distribution import (
    LogitRow,
    bad_rows,
    needs_processing,
    probabilities,
    process_logits,
    sample,
    token_logprobs,
)
from minispec.sampling.rejection import verify
from minispec.sampling.rng import Purpose, uniforms

NEARLY_ONE = 1 - 2.0**-53


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """One row in plain Python and float64, straight from the docstring of SamplingParams."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    weight = [math.exp((x - logits[order[0]]) / params.temperature) for x in logits]
    kept = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1:
        total, upto, nucleus = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if upto >= params.top_p * total:
                break
            nucleus.append(i)
            upto += weight[i]
        kept = nucleus
    kept = [i for i in kept if weight[i] >= params.min_p * weight[order[0]]]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in set(kept) else 0.0 for i in range(len(logits))]


def p_of(p: list[float], **params) -> list[float]:
    """What remains of the probabilities p under these parameters."""
    return probabilities(torch.tensor([p]).log(), [SamplingParams(**params)])[0].tolist()


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, -1, 1, 2, 5, 30, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.9137, 0.5171, 0.0013]),
        min_p=rng.choice([0.0, 0.0, 0.0531, 0.3117]),
    )


def random_batch(seed: int, vocab: int = 40, count: int = 24) -> tuple[torch.Tensor, list[SamplingParams]]:
    """Logits in steps of 1/2, so with many ties, and some at -inf; any mix of parameters."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, vocab, generator=generator) * 4).round() / 2
    logits[torch.rand(count, vocab, generator=generator) < 0.1] = -torch.inf
    logits[:, 3] = 1.5
    return logits, [random_params(rng) for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_a_mixed_batch_equals_the_rules_in_plain_python(seed):
    logits, params = random_batch(seed)
    p = probabilities(logits, params)
    expected = torch.tensor([reference(x, row) for x, row in zip(logits.tolist(), params, strict=True)])
    assert p.dtype == torch.float32
    assert torch.equal(p > 0, expected > 0)
    torch.testing.assert_close(p, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(p.sum(-1), torch.ones(len(params)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(seed):
    logits, params = random_batch(seed)
    batch = probabilities(logits, params)
    for r, row in enumerate(params):
        assert torch.equal(probabilities(logits[r : r + 1], [row])[0], batch[r]), row


@pytest.mark.parametrize("width", [1, 3, 16])
def test_looking_at_few_tokens_first_does_not_change_the_nucleus(width, monkeypatch):
    logits, params = random_batch(5)
    expected = probabilities(logits, params)
    monkeypatch.setattr(distribution, "NUCLEUS_WIDTH", width)
    assert torch.equal(probabilities(logits, params), expected)


def test_a_flat_row_keeps_a_nucleus_wider_than_the_first_look():
    vocab = 3 * distribution.NUCLEUS_WIDTH
    logits = torch.zeros(2, vocab)
    logits[1, 7] = 30.0
    p = probabilities(logits, [SamplingParams(top_p=0.75)] * 2)
    assert (p > 0).sum(-1).tolist() == [vocab * 3 // 4, 1]
    assert (p[0, : vocab * 3 // 4] > 0).all()  # equal tokens stay in order of id


def test_rows_without_top_k_and_top_p_are_not_sorted(monkeypatch):
    sorted_rows = []
    for name in ("sort", "topk"):
        original = getattr(torch.Tensor, name)

        def counting(self, *args, original=original, **kwargs):
            sorted_rows.append(self.shape[0])
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counting)
    plain = [SamplingParams(), SamplingParams(temperature=0, top_k=5, top_p=0.5), SamplingParams(min_p=0.1)]
    probabilities(torch.randn(3, 50), plain)
    assert sorted_rows == []
    probabilities(torch.randn(5, 50), [*plain, SamplingParams(top_k=3), SamplingParams(top_p=0.9)])
    assert sorted_rows == [2]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 9])
def test_top_k_off_or_as_large_as_the_vocabulary_keeps_all(top_k):
    assert p_of([0.3, 0.3, 0.2, 0.2], top_k=top_k) == pytest.approx([0.3, 0.3, 0.2, 0.2])


def test_edges_of_top_k_and_top_p():
    assert p_of([0.3, 0.3, 0.2, 0.2], top_k=1, top_p=0.8) == [1, 0, 0, 0]
    assert p_of([0.97, 0.01, 0.01, 0.01], top_p=0.9) == [1, 0, 0, 0]
    assert p_of([0.97, 0.01, 0.01, 0.01], top_p=1.0) == pytest.approx([0.97, 0.01, 0.01, 0.01])
    assert p_of([0.5, 0.25, 0.15, 0.1], temperature=0.5, top_p=0.7) == [1, 0, 0, 0]  # temperature comes first
    assert p_of([0.5, 0.25, 0.15, 0.1], top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0])  # the crossing token stays
    assert p_of([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == [1, 0, 0, 0]  # top_p of what top_k left, 4/7 and 3/7
    assert p_of([0.25, 0.25, 0.25, 0.25], top_k=3) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert p_of([0.5, 0.3, 0.15, 0.05], min_p=0.25) == pytest.approx([10 / 19, 6 / 19, 3 / 19, 0])
    assert p_of([0.5, 0.3, 0.15, 0.05], min_p=1.0) == [1, 0, 0, 0]


def test_top_p_1_drops_nothing_however_unlikely():
    p = probabilities(torch.tensor([[0.0, -60.0, -61.0]]), [SamplingParams(top_k=2, top_p=1.0)])
    assert (p > 0).tolist() == [[True, True, False]]


def test_greedy_is_exactly_one_at_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.1, 0.2, 0.3], [5.0, -torch.inf, 5.0]])
    params = [SamplingParams(temperature=0), SamplingParams(top_k=50), SamplingParams(temperature=0, top_p=0.1)]
    p = probabilities(logits, params)
    assert p[0].tolist() == [0, 1, 0] and p[2].tolist() == [1, 0, 0]
    assert p[1].tolist() == pytest.approx(logits[1].softmax(-1).tolist())  # unset temperature is 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_is_finite_and_nearly_greedy(temperature):
    logits = torch.tensor([[-1e4, 1e4, 0.0, -torch.inf]])
    for extra in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}):
        assert probabilities(logits, [SamplingParams(temperature=temperature, **extra)]).tolist() == [[0, 1, 0, 0]]


def test_a_huge_temperature_is_flat_but_keeps_forbidden_tokens_out():
    p = probabilities(torch.tensor([[3.0, -50.0, -torch.inf, 0.0]]), [SamplingParams(temperature=1e300)])
    assert p[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_bad_rows_are_found_and_do_not_touch_the_others():
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, 2.0, -inf], [1.0, nan, 0.0], [-inf] * 3, [inf, 0.0, 0.0], [0.0, 0.0, 1e30]])
    assert bad_rows(logits).tolist() == [False, True, True, True, False]
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0}):
        p = probabilities(logits, [SamplingParams(**params)] * 5)
        good = probabilities(logits[[0, 4]], [SamplingParams(**params)] * 2)
        assert torch.equal(p[[0, 4]], good)
        ids = sample(p, torch.full((5,), 0.999, dtype=torch.float64))
        assert ((ids >= 0) & (ids < 3)).all()


# Processing of logits: penalties, logit_bias, min_tokens.


def processed(logits: list[float], prompt=(), output=(), stop_ids=frozenset(), **params) -> list[float]:
    row = LogitRow(SamplingParams(**params), list(prompt), list(output), frozenset(stop_ids))
    return process_logits(torch.tensor([logits]), [row])[0].tolist()


def test_repetition_penalty_makes_prompt_and_output_tokens_less_likely_once():
    got = processed([2.0, -2.0, 2.0, -2.0, 0.0], [0, 0, 1], [0, 4], repetition_penalty=2.0)
    assert got == [1.0, -4.0, 2.0, -2.0, 0.0]


def test_presence_and_frequency_penalties_count_output_only():
    got = processed([0.0] * 4, [0, 0, 3], [1, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert got == [0.0, -0.75, -1.0, 0.0]
    assert processed([0.0] * 4, [0, 0, 3], [], presence_penalty=0.5) == [0.0] * 4


def test_penalties_come_before_the_bias_and_repetition_before_the_others():
    got = processed([4.0, 0.0], [], [0], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 10.0, 1: -3})
    assert got == [4.0 / 2 - 1 + 10, -3.0]


def test_stop_ids_are_masked_until_min_tokens_outputs():
    for length, masked in [(0, True), (2, True), (3, False), (4, False)]:
        got = processed([1.0, 2.0, 3.0], [0] * 9, [1] * length, stop_ids={2}, min_tokens=3)
        assert got == [1.0, 2.0, -torch.inf if masked else 3.0], length


def test_stop_ids_outside_the_vocabulary_mask_nothing():
    assert processed([1.0, 2.0, 3.0], stop_ids={-1, 3, 100}, min_tokens=3) == [1.0, 2.0, 3.0]


def test_only_rows_that_need_it_change_and_raw_logits_never():
    raw = torch.randn(3, 6)
    before = raw.clone()
    plain = LogitRow(SamplingParams(top_k=3, temperature=0.2), [1], [2])
    assert process_logits(raw, [None, plain, None]) is raw
    biased = LogitRow(SamplingParams(logit_bias={4: 2.0}), [1], [2])
    out = process_logits(raw, [None, biased, plain])
    assert torch.equal(raw, before)
    assert (out != raw).nonzero().tolist() == [[1, 4]]


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop_token_ids": [1]}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_processing_is_asked_for_exactly_when_a_parameter_needs_it(params, needed):
    assert needs_processing(SamplingParams(**params)) is needed


def decode(logits: list[float], params: SamplingParams, length: int, k: int, draft, stop_ids=frozenset()) -> list[int]:
    """A model whose logits never change, decoded in verified steps of up to k drafts from draft(output, k)."""
    output: list[int] = []
    while len(output) < length:
        drafts = draft(output, min(k, length - len(output) - 1))
        rows = [LogitRow(params, [0], output + drafts[:j], stop_ids) for j in range(len(drafts) + 1)]
        p = probabilities(process_logits(torch.tensor([logits] * len(rows)), rows), [params] * len(rows))
        u = [
            torch.from_numpy(uniforms(1, len(output) + np.arange(len(rows)), purpose))
            for purpose in (Purpose.ACCEPT, Purpose.SAMPLE)
        ]
        layout = torch.tensor([*drafts, -1]), torch.tensor([0]), torch.tensor([len(drafts)])
        accepted, next_ids = verify(p, None, *layout, *u)
        output += drafts[: accepted[0]] + next_ids.tolist()
    return output


DRAFTS = {
    "always token 0": lambda output, k: [0] * k,
    "repeat": lambda output, k: (output[-3:] * k)[:k],
    "cycle": lambda output, k: [(len(output) + j) % 3 for j in range(k)],
}


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("draft", DRAFTS)
def test_penalties_count_each_token_once_whatever_is_drafted(draft, k):
    params = SamplingParams(temperature=0, frequency_penalty=1.5)
    assert decode([5.0, 4.0, 3.0, 0.0], params, 8, k, DRAFTS[draft]) == [0, 1, 0, 2, 1, 0, 2, 1]


def test_row_j_has_the_history_of_j_drafts_each_token_once():
    params = SamplingParams(frequency_penalty=1.5)
    rows = [LogitRow(params, [3], [0, 1, 0][:j]) for j in range(4)]
    got = process_logits(torch.tensor([[5.0, 4.0, 3.0, 0.0]] * 4), rows)
    assert got.tolist() == [[5, 4, 3, 0], [3.5, 4, 3, 0], [3.5, 2.5, 3, 0], [2, 2.5, 3, 0]]


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_bias_holds_at_every_position_of_a_block(temperature, k):
    never = SamplingParams(temperature=temperature, logit_bias={0: -100})
    assert 0 not in decode([5.0, 4.0, 3.0, 0.0], never, 12, k, DRAFTS["cycle"])
    only = SamplingParams(temperature=temperature, logit_bias={3: 100})
    assert decode([5.0, 4.0, 3.0, 0.0], only, 12, k, DRAFTS["cycle"]) == [3] * 12


@pytest.mark.parametrize("k", range(6))
def test_min_tokens_holds_inside_a_block(k):
    params = SamplingParams(temperature=0, min_tokens=3)
    eos = frozenset({0})
    assert decode([9.0, 4.0, 3.0], params, 5, k, DRAFTS["always token 0"], eos) == [1, 1, 1, 0, 0]


# Drawing a token.


def test_sampling_is_the_inverse_of_the_cumulative_distribution():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = [0.0, 0.125, 0.25 - 2**-40, 0.25, 0.5, 0.75 - 2**-40, 0.75, NEARLY_ONE]
    ids = sample(p.expand(len(u), -1), torch.tensor(u, dtype=torch.float64))
    assert ids.tolist() == [1, 1, 1, 3, 3, 3, 4, 4] and ids.dtype == torch.int64


def test_evenly_spread_numbers_give_each_token_its_share():
    p = probabilities(torch.randn(1, 30, generator=torch.Generator().manual_seed(0)) * 2, [SamplingParams(top_k=20)])
    count = 4096
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.bincount(sample(p.expand(count, -1), u), minlength=30)
    assert ((shares - p[0] * count).abs() <= 1).all()


def test_a_token_of_probability_zero_is_never_drawn():
    logits, params = random_batch(11, vocab=200)
    p = probabilities(logits, params)
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, NEARLY_ONE):
        ids = sample(p, torch.full((len(params),), u, dtype=torch.float64))
        assert (p.gather(-1, ids[:, None]) > 0).all()


def test_a_seeded_request_draws_the_same_ids_alone_and_among_others():
    logits, params = random_batch(2, count=8)
    seeds = [1, 901, 2, 902, 3, 903, 4, 904]
    others = [1, 77, 2, 78, 3, 79, 4, 80]  # as after another run: only every second request kept its seed
    for position in (5, 105):

        def draw(rows, seeds, position=position):
            u = torch.from_numpy(uniforms(seeds, position, Purpose.SAMPLE))
            return sample(probabilities(logits[rows], [params[r] for r in rows]), u).tolist()

        batch = draw(range(8), seeds)
        assert [draw([r], [seeds[r]])[0] for r in range(8)] == batch
        assert draw(range(8), others)[::2] == batch[::2]


# Log-probabilities.


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.tensor([0, 8, 3, 3])
    chosen, top_ids, top_values = token_logprobs(logits, ids, 2)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[range(4), ids], atol=1e-5, rtol=0)
    best = expected.topk(2)
    assert torch.equal(top_ids, best.indices)
    torch.testing.assert_close(top_values.double(), best.values, atol=1e-5, rtol=0)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32():
    logits = torch.tensor([[10.0, 9.0, -20.0]], dtype=torch.bfloat16)
    chosen, _, _ = token_logprobs(logits, torch.tensor([1]), 0)
    assert chosen.dtype == torch.float32
    assert chosen.item() == pytest.approx(-1.3132617, abs=1e-5)


@pytest.mark.parametrize(("top", "columns"), [(0, 0), (2, 2), (9, 3)])
def test_as_many_top_logprobs_as_asked_and_as_there_are(top, columns):
    _, top_ids, top_values = token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), top)
    assert top_ids.shape == top_values.shape == (2, columns)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [("max_new_tokens", "called max_tokens here"), ("tempreature", "no field 'tempreature'; fields are temperature")],
)
def test_an_unknown_parameter_is_refused_with_the_right_name(name: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        SamplingParams(**{name: 3})
