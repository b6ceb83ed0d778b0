"""Speculation inside the engine: acceptance, rollback, stops inside a draft, limits, metrics. On the tag model."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from test_text import pieces_tokenizer
from tools import GREEDY, assert_idle, finish, markov, run, scripted, tag_engine, tag_greedy

from minispec import SamplingParams
from minispec.core import TokenKind
from minispec.speculative.drafter import Proposal
from minispec.speculative.ngram import NgramDrafter


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, **more)


def test_an_always_right_drafter_is_accepted_whole_at_every_step():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of))
    [request] = run(engine, [[1, 2, 3]], greedy(21))
    assert request.metrics.accepted_per_step == [4, 4, 4, 4]  # one token from the prompt, then 4 x 5
    assert request.metrics.acceptance_rate == 1.0 and request.metrics.acceptance_length == 5.0
    assert len(engine.runner.steps) == 5


def test_an_always_wrong_drafter_costs_nothing_but_rows():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of, script=[0]))
    [request] = run(engine, [[1, 2, 3]], greedy(10))
    assert request.output == tag_greedy(logits_of, [1, 2, 3], 10)
    assert request.metrics.accepted == 0 and request.metrics.forwards == 10


def test_scripted_acceptance_is_counted_exactly_and_rolled_back_every_time():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of, script=[3, 1, 0, 2]), candidate_length=3)
    [request] = engine.add([1, 2, 3], greedy(20))
    engine.step()
    for accepted in (3, 1, 0, 2):
        before = len(request.tokens)
        engine.step()
        assert len(request.tokens) == before + accepted + 1
        assert request.kv_len == len(request.tokens) - 1
    counts = request.metrics.speculation
    assert request.metrics.accepted_per_step == [3, 1, 0, 2]
    assert (counts.drafted, counts.accepted, counts.emitted, counts.verify_rows) == (12, 6, 10, 4)
    assert counts.acceptance_by_position == [0.75, 0.5, 0.25] and counts.acceptance_length == 2.5
    plain, A, C, B = TokenKind.PLAIN, TokenKind.ACCEPTED, TokenKind.CORRECTED, TokenKind.BONUS
    assert request.kinds == [plain, A, A, A, B, A, C, C, A, A, C]


def test_steps_without_drafts_do_not_enter_the_acceptance_figures():
    engine = tag_engine(lambda tokens: np.eye(12)[len(tokens) % 12], drafter=NgramDrafter(3, 2))
    [request] = run(engine, [[7, 7]], greedy(5))
    assert request.metrics.drafted == 0 and request.metrics.speculation.verify_rows == 0
    assert request.metrics.accepted_per_step == []


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_slot_leaks_when_every_draft_is_rejected(page_size):
    logits_of = markov()
    engine = tag_engine(logits_of, page_size=page_size, slots=256, drafter=scripted(logits_of, script=[0]))
    for i in range(50):
        run(engine, [[i % 12, (i + 1) % 12, 3]], greedy(1 + i % 7))
        assert_idle(engine)


def test_text_ends_at_an_end_token_that_is_accepted_in_the_middle_of_a_draft():
    logits_of = markov(seed=3)
    prompt = [1, 2, 3]
    expected = tag_greedy(logits_of, prompt, 16)
    place = next(i for i in range(2, 5) if expected[i] not in expected[:i])
    engine = tag_engine(logits_of, eos_ids=[expected[place]], drafter=scripted(logits_of))
    [request] = run(engine, [prompt])
    assert request.output == expected[: place + 1] and request.finish_reason == "stop"
    engine = tag_engine(logits_of, drafter=scripted(logits_of))
    [request] = run(engine, [prompt], greedy(16, stop_token_ids=[expected[place]]))
    assert request.output == expected[: place + 1] and request.finish_reason == "stop"
    engine = tag_engine(logits_of, eos_ids=[expected[place]], drafter=scripted(logits_of))
    [request] = run(engine, [prompt], greedy(16, ignore_eos=True))
    assert request.output == expected and request.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_min_tokens_holds_the_end_token_back_for_exactly_that_many(k):
    def logits_of(tokens):  # wants the end token 5 always, then 6
        return [0.0] * 5 + [9.0, 3.0] + [0.0] * 5

    drafter = scripted(lambda tokens: [float(t == (5 if len(tokens) >= 5 else 6)) for t in range(12)]) if k else None
    engine = tag_engine(logits_of, eos_ids=[5], drafter=drafter, candidate_length=k)
    [request] = run(engine, [[1, 2]], greedy(16, min_tokens=3))
    assert request.output == [6, 6, 6, 5] and request.finish_reason == "stop"
    [request] = run(engine, [[1, 2]], greedy(8, ignore_eos=True))
    assert request.output == [5] * 8 and request.finish_reason == "length"


def test_the_last_vocabulary_entry_can_be_produced_when_ends_are_ignored():
    engine = tag_engine(lambda tokens: [float(t == 11) for t in range(12)], eos_ids=[3])
    assert run(engine, [[1]], greedy(4, ignore_eos=True, min_tokens=2))[0].output == [11] * 4


@pytest.mark.parametrize("prompt_len,expected", [(27, 5), (31, 1)])
def test_drafts_are_clipped_to_what_the_context_leaves(prompt_len, expected):
    logits_of = markov()
    engine = tag_engine(logits_of, context_length=32, drafter=scripted(logits_of), candidate_length=5)
    prompt = [i % 12 for i in range(prompt_len)]
    [request] = run(engine, [prompt], greedy(100))
    assert request.output == tag_greedy(logits_of, prompt, expected) and request.finish_reason == "length"
    assert all(start + committed + drafts < 32 for step in engine.runner.steps for _, start, committed, drafts in step)


def test_with_one_token_left_nothing_is_drafted():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of), candidate_length=4)
    run(engine, [[1, 2]], greedy(2))
    assert [drafts for step in engine.runner.steps for *_, drafts in step] == [0, 0]


@pytest.mark.parametrize("k", range(6))
def test_penalties_count_the_drafts_before_each_position(k):
    logits = [5.0, 4.0, 3.0, 0.0]
    wrong_half_the_time = scripted(lambda tokens: np.eye(4)[len(tokens) % 2], vocab_size=4)
    engine = tag_engine(
        lambda tokens: logits, vocab_size=4, drafter=wrong_half_the_time if k else None, candidate_length=k
    )
    [request] = run(engine, [[3]], greedy(8, frequency_penalty=1.5))
    assert request.output == [0, 1, 0, 2, 1, 0, 2, 1]


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logit_bias_holds_at_every_position_of_a_block(k, temperature):
    logits_of = markov()
    prompt = [1, 2, 3]
    favourite = Counter(tag_greedy(logits_of, prompt, 30)).most_common(1)[0][0]
    for bias, check in ((-100.0, lambda out: favourite not in out), (100.0, lambda out: set(out) == {favourite})):
        engine = tag_engine(logits_of, drafter=scripted(logits_of) if k else None, candidate_length=k)
        params = SamplingParams(temperature=temperature, max_tokens=30, logit_bias={favourite: bias})
        [request] = run(engine, [prompt], params)
        assert check(request.output)


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_are_those_of_the_raw_logits_at_every_position(k):
    logits_of = markov()
    prompt = [1, 2, 3]
    engine = tag_engine(logits_of, drafter=scripted(logits_of, script=[3, 1, 0]) if k else None, candidate_length=k)
    [request] = run(engine, [prompt], greedy(14, logprobs=2, frequency_penalty=0.3, logit_bias={4: 2.0}))
    assert len(request.logprobs) == len(request.output) == 14
    for place, (token, entry) in enumerate(zip(request.output, request.logprobs, strict=True)):
        raw = torch.tensor(logits_of(prompt + request.output[:place])).log_softmax(-1)
        assert abs(entry.logprob - raw[token].item()) < 1e-4
        assert list(entry.top) == raw.topk(2).indices.tolist()
        assert np.allclose(list(entry.top.values()), raw.topk(2).values, atol=1e-4)


class BrokenDrafter:
    """Raises, or returns what no drafter may return."""

    name = "broken"

    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, requests, candidate_lengths):
        if isinstance(self.proposal, Exception):
            raise self.proposal
        return Proposal([self.proposal] * len(requests))

    def release(self, request):
        pass


@pytest.mark.parametrize("fault", [RuntimeError("no memory"), [99], [-1], [1] * 9, [None]], ids=str)
def test_a_drafter_fault_costs_the_draft_and_not_the_request(fault):
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=BrokenDrafter(fault))
    requests = run(engine, [[1, 2], [3]])
    assert [r.output for r in requests] == [tag_greedy(logits_of, p, 16) for p in ([1, 2], [3])]
    assert engine.metrics.drafter_faults > 0 and engine.metrics.speculation.drafted == 0
    assert_idle(engine)


def test_a_target_row_that_is_not_finite_ends_its_request_only():
    good = markov()

    def logits_of(tokens):
        return [float("nan")] * 12 if tokens[0] == 9 and len(tokens) > 5 else good(tokens)

    for temperature in (0, 1.0):
        engine = tag_engine(logits_of, drafter=scripted(good))
        params = SamplingParams(temperature=temperature, max_tokens=16, seed=1)
        sick, well = run(engine, [[9, 1], [1, 2]], params)
        assert sick.finish_reason == "error" and "not finite" in sick.error
        assert all(0 <= t < 12 for t in sick.output + well.output)
        assert well.finish_reason == "length"
        assert well.output == run(tag_engine(good, drafter=scripted(good)), [[1, 2]], params)[0].output
        assert_idle(engine)
    sick, well = run(tag_engine(lambda t: [float("nan")] * 12 if t[0] == 9 else good(t)), [[9], [1]])
    assert sick.finish_reason == "error" and sick.output == [] and well.num_output == 16


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("verification", ["rejection", "match"])
@pytest.mark.parametrize("script", [[4], [2, 0, 3], [1], [0]])
def test_tokens_before_a_target_row_that_is_not_finite_stay(script, verification, overlap):
    """Wherever the row lies in a draft, the same comes out as without drafts."""
    good, prompt = markov(), [9, 1]
    for count in range(10):

        def logits_of(tokens, limit=2 + count):
            return good(tokens) if tokens[0] != 9 or len(tokens) < limit else [float("nan")] * 12

        expected, events = tag_greedy(good, prompt, count), []
        engine = tag_engine(
            logits_of,
            drafter=scripted(good, script=script),
            enable_overlap=overlap,
            page_size=1,
            speculative_config={"candidate_length": 4, "adaptive": False, "verification": verification},
        )
        [sick] = engine.add(prompt, greedy(16, logprobs=1), on_token=events.append)
        [seeded] = engine.add([9, 2], SamplingParams(temperature=0.01, seed=1, max_tokens=16))
        [well] = engine.add([1, 2], greedy(16))
        finish(engine)
        assert sick.finish_reason == seeded.finish_reason == "error" and "not finite" in sick.error
        assert sick.output == [e.token_id for e in events[:-1]] == expected
        assert seeded.num_output == count
        assert len(sick.kinds) == len(sick.logprobs) == len(expected) and events[-1].finish_reason == "error"
        assert well.output == tag_greedy(good, [1, 2], 16)
        counts = sick.metrics.speculation
        assert counts.accepted <= counts.emitted <= len(expected)
        assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_before_a_target_row_that_is_not_finite_is_no_error(overlap):
    good, prompt = markov(seed=3), [9, 1]
    expected = tag_greedy(good, prompt, 8)
    end = next(i for i in range(2, 5) if expected[i] not in expected[:i])
    tokenizer, _ = pieces_tokenizer("abcdefghijkl")

    def logits_of(tokens):
        return good(tokens) if len(tokens) <= len(prompt) + end else [float("nan")] * 12

    for params in (
        greedy(16, stop_token_ids=[expected[end]]),
        greedy(16, stop=[tokenizer.decode(expected[end : end + 1])]),
        greedy(end + 1),
    ):
        engine = tag_engine(logits_of, drafter=scripted(good), enable_overlap=overlap, tokenizer=tokenizer)
        [request] = run(engine, [prompt], params)
        assert request.finish_reason in ("stop", "length") and request.error is None
        assert request.output == expected[: end + 1]
        assert_idle(engine)


def test_a_seed_gives_the_same_ids_alone_in_a_batch_in_chunks_and_after_preemption():
    logits_of = markov()
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24)
    prompt = [1, 2, 3, 4, 5]
    [alone] = run(tag_engine(logits_of), [prompt], params)
    free = SamplingParams(temperature=1.3, max_tokens=24)
    others = [SamplingParams(seed=5, max_tokens=24), free, greedy(24), free, free, free, free]
    for options in ({}, {"chunked_prefill_size": 2}, {"slots": 64, "context_length": 40}):
        engine = tag_engine(logits_of, max_num_seqs=8, **options)
        requests = run(engine, [[i] for i in range(7)] + [prompt], [*others, params])
        assert requests[-1].output == alone.output
        assert all(0 <= t < 12 for r in requests for t in r.output)
        if "slots" in options:
            assert requests[-1].metrics.preemptions > 0
    assert run(tag_engine(logits_of), [prompt], SamplingParams(seed=12, max_tokens=24))[0].output != alone.output


@pytest.mark.parametrize("drafter", ["none", "right", "half", "ngram"])
def test_sampled_text_has_the_target_distribution(drafter):
    """Chi-square of whole outputs of 4 tokens (V = 4, temperature 0.8, top_k 3) against exact probabilities."""
    logits_of = markov(vocab_size=4, order=1, seed=5)
    made = {
        "none": None,
        "right": scripted(logits_of, vocab_size=4),
        "half": scripted(logits_of, vocab_size=4, script=[1, 0, 2]),
        "ngram": NgramDrafter(2, 1),
    }[drafter]
    engine = tag_engine(
        logits_of, vocab_size=4, drafter=made, max_num_seqs=64, max_num_batched_tokens=2048, slots=4096, page_size=1
    )
    n = 3000
    params = [SamplingParams(temperature=0.8, top_k=3, max_tokens=4, seed=i) for i in range(n)]
    prompt = [0, 1, 2, 3, 0, 2, 1, 0]
    requests = run(engine, [prompt] * n, params)

    def next_p(last):
        logits = np.array(logits_of([last]), dtype=np.float64) / 0.8
        logits[np.argsort(logits)[0]] = -np.inf
        p = np.exp(logits - logits.max())
        return p / p.sum()

    observed = Counter(tuple(r.output) for r in requests)
    table = [next_p(token) for token in range(4)]
    chi2, cells = 0.0, 0
    for a, b, c, d in product(range(4), repeat=4):
        expected = n * table[prompt[-1]][a] * table[a][b] * table[b][c] * table[c][d]
        if expected >= 5:
            chi2 += (observed[a, b, c, d] - expected) ** 2 / expected
            cells += 1
        elif expected == 0:
            assert not observed[a, b, c, d]
    assert cells > 15 and chi2 < cells + 4 * (2 * cells) ** 0.5  # mean plus 4 standard deviations
    if drafter != "none":
        assert engine.metrics.speculation.drafted > 500 and 0 < engine.metrics.speculation.acceptance_rate < 1


def test_greedy_and_sampled_requests_share_a_batch():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of, script=[2, 0, 4]))
    params = [greedy(12), SamplingParams(seed=3, max_tokens=12), greedy(12)]
    a, b, c = run(engine, [[1], [2], [3]], params)
    assert a.output == tag_greedy(logits_of, [1], 12) and c.output == tag_greedy(logits_of, [3], 12)
    assert (
        b.output
        == run(tag_engine(logits_of, drafter=scripted(logits_of, script=[2, 0, 4])), [[2]], params[1])[0].output
    )


def test_the_drafter_forgets_requests_that_end():
    logits_of = markov()
    drafter = NgramDrafter(3, 1)
    engine = tag_engine(logits_of, drafter=drafter)
    engine.add([1, 2], GREEDY, request_id="a")
    engine.add([1, 2], GREEDY, request_id="b")
    engine.step()
    engine.step()
    engine.abort("a")
    finish(engine)
    assert not drafter._indexes


def test_what_a_failed_request_computed_is_not_kept():
    bad = True

    def logits_of(tokens):
        return [float("nan")] * 12 if bad and len(tokens) > 14 else markov_logits(tokens)

    markov_logits = markov()
    engine = tag_engine(logits_of, page_size=1)
    prompt = [i % 12 for i in range(10)]
    [failed] = run(engine, [prompt])
    assert failed.finish_reason == "error" and failed.num_output == 5
    bad = False
    [again] = run(engine, [prompt + failed.output])
    assert again.metrics.cached_tokens == len(prompt)  # shared when its logits were still good; the rest went


class DrawingDrafter:
    """Draws drafts from a distribution of its own and reports it, or lies that it was uniform."""

    name = "drawing"

    def __init__(self, logits_of, lie=False):
        self.logits_of, self.lie = logits_of, lie
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, requests, candidate_lengths):
        tokens, q = [], []
        for request, k in zip(requests, candidate_lengths, strict=True):
            drafts, rows = [], []
            for _ in range(k):
                row = torch.tensor(self.logits_of(request.tokens + drafts)).float().softmax(-1)
                drafts.append(int(torch.multinomial(row, 1, generator=self.generator)))
                rows.append(torch.full_like(row, 1 / len(row)) if self.lie else row)
            tokens.append(drafts)
            q.append(torch.stack(rows))
        return Proposal(tokens, q)

    def release(self, request):
        pass


@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafts_drawn_by_chance_leave_the_target_distribution_as_it_is(k):
    """Chi-square per position. The control: a drafter that reports another q than it drew from biases the text."""
    logits_of, other = markov(vocab_size=4, order=1, seed=5), markov(vocab_size=4, order=1, seed=8)
    table = [torch.tensor(logits_of([token])).softmax(-1).numpy() for token in range(4)]
    fits = {}
    for lie in (False, True):
        drafter = DrawingDrafter(other, lie)
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "slots": 4096, "page_size": 1}
        engine = tag_engine(logits_of, vocab_size=4, drafter=drafter, candidate_length=k, **options)
        requests = run(engine, [[0, 1, 2, 3]] * 1500, [SamplingParams(max_tokens=4, seed=i) for i in range(1500)])
        assert 0.1 < engine.metrics.speculation.acceptance_rate < 0.95
        fits[lie] = []
        for place in (1, 2, 3):
            seen = Counter((r.output[place - 1], r.output[place]) for r in requests)
            before = Counter(r.output[place - 1] for r in requests)
            cells = [(a, b) for a, b in product(range(4), repeat=2) if before[a] * table[a][b] >= 5]
            expected = {(a, b): before[a] * table[a][b] for a, b in cells}
            fits[lie].append(sum((seen[c] - expected[c]) ** 2 / expected[c] for c in cells) / len(cells))
    assert max(fits[False]) < 3.0  # chi-square per cell: about 1 when the distribution is right
    assert max(fits[True]) > 6.0


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal([[1.5]]),
        Proposal([torch.tensor([1.0])]),
        Proposal([[1, 2]], [torch.full((2, 5), 0.2)]),
        Proposal([[1, 2]], [torch.full((1, 12), 1 / 12)]),
        Proposal([[1, 2]], []),
        Proposal([[1], [2]]),
        Proposal([[1]], torch.ones(1, 12)),
    ],
    ids=str,
)
def test_a_malformed_proposal_costs_the_draft_and_not_the_request(proposal):
    logits_of = markov()
    drafter = BrokenDrafter(None)
    drafter.propose = lambda requests, lengths: proposal
    engine = tag_engine(logits_of, drafter=drafter)
    [request] = run(engine, [[1, 2]], SamplingParams(temperature=0, max_tokens=8))
    assert request.output == tag_greedy(logits_of, [1, 2], 8)
    assert engine.metrics.drafter_faults > 0


def test_drafts_of_any_whole_number_become_plain_ints():
    logits_of = markov()
    plain = scripted(logits_of)
    for convert in (np.array, torch.tensor):
        drafter = BrokenDrafter(None)
        drafter.propose = lambda r, k, convert=convert: Proposal([convert(t) for t in plain.propose(r, k).tokens])
        expected = tag_greedy(logits_of, [1, 2], 12)
        engine = tag_engine(logits_of, drafter=drafter, eos_ids=[expected[3]])
        [request] = run(engine, [[1, 2]])
        assert request.output == expected[: expected.index(expected[3]) + 1]
        assert all(type(token) is int for token in request.output) and engine.metrics.drafter_faults == 0


def test_a_drafter_that_fails_to_forget_stops_nobody(caplog):
    class Clinging(NgramDrafter):
        def release(self, request):
            raise RuntimeError("no")

    engine = tag_engine(drafter=Clinging())
    assert all(r.finish_reason == "length" for r in run(engine, [[1], [2]]))
    assert engine.metrics.drafter_faults == 2 and "may still keep" in caplog.text
    assert_idle(engine)


def test_a_drafter_without_a_configuration_uses_the_default_one():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of), candidate_length=4)
    object.__setattr__(engine.config, "speculative_config", None)
    assert run(engine, [[1]])[0].metrics.drafted > 0


def test_when_every_token_is_forbidden_the_request_says_so():
    for temperature in (0, 1.0):
        params = SamplingParams(temperature=temperature, stop_token_ids=range(12), min_tokens=4, max_tokens=8)
        forbidden, fine = run(tag_engine(), [[1], [2]], [params, GREEDY])
        assert forbidden.finish_reason == "error" and "every token is forbidden" in forbidden.error
        assert forbidden.output == [] and fine.num_output == 16


def test_a_bad_row_behind_a_rejected_draft_harms_nobody():
    good = markov()
    prompt = [1, 2, 3]
    right = tag_greedy(good, prompt, 16)

    def logits_of(tokens):  # not finite after any text that greedy decoding does not write
        n = len(tokens) - len(prompt)
        return good(tokens) if list(tokens[len(prompt) :]) == right[:n] else [float("nan")] * 12

    drafter = scripted(good, script=[1])
    [request] = run(tag_engine(logits_of, drafter=drafter), [prompt])
    assert request.output == right and request.finish_reason == "length" and request.metrics.accepted > 0


def test_counts_end_where_the_text_ends():
    logits_of = markov(seed=3)
    prompt = [1, 2, 3]
    expected = tag_greedy(logits_of, prompt, 16)
    end = next(i for i in range(2, 5) if expected[i] not in expected[:i])
    engine = tag_engine(logits_of, page_size=1, eos_ids=[expected[end]], drafter=scripted(logits_of))
    [request] = run(engine, [prompt])
    counts = request.metrics.speculation
    assert counts.emitted == request.num_output - 1 == end and engine.metrics.output_tokens == end + 1
    assert (counts.accepted, counts.drafted) == (4, 4)  # all drafts were right, those behind the end as well
    [again] = run(engine, [[*prompt, *request.output, 0]], greedy(1))
    assert again.metrics.cached_tokens == len(prompt) + end  # what was read, and nothing behind the end


def test_seeds_of_completions_are_not_those_of_neighbouring_seeds():
    params = [SamplingParams(n=2, seed=seed, max_tokens=24) for seed in (7, 8)]
    a, b, c, d = run(tag_engine(slots=2048), [[1, 2, 3]] * 2, params)
    assert len({tuple(r.output) for r in (a, b, c, d)}) == 4
    assert len({r.seed for r in (a, b, c, d)}) == 4 and b.seed != c.seed


def test_cached_tokens_of_the_engine_are_those_of_its_requests():
    logits_of = markov()
    engine = tag_engine(logits_of, slots=64, page_size=1, max_num_seqs=6, context_length=64)
    requests = run(engine, [[i, i + 1, i + 2] for i in range(6)], greedy(24))
    assert engine.scheduler.preemptions > 0
    assert engine.metrics.cached_tokens == sum(r.metrics.cached_tokens for r in requests) == 0
