"""The controller: what it decides under every limit, and that its decisions pay, on a clock that the test turns.

The clock moves only when the tag model or the scripted drafter runs, by a cost that the test chooses. So expected
tokens per second are exact, and a decision that does not pay fails here on every machine alike.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
from tools import ScriptedDrafter, TagRunner, assert_idle, finish, markov, run, scripted, tag_engine, tag_greedy

import minispec.engine
from minispec import SamplingParams, SpeculativeConfig
from minispec.config import ConfigError
from minispec.course.check.toys import FaultyDrafter
from minispec.metrics import MetricsRow
from minispec.speculative import controller as rules
from minispec.speculative.costs import Acceptance, StepCost, bucket
from minispec.speculative.drafter import Proposal
from minispec.speculative.ngram import NgramDrafter

VOCAB = 12


class Clock:
    """A clock for `minispec.engine`. rows -> seconds of a forward; each draft forward takes `draft` seconds."""

    def __init__(self, monkeypatch, cost=lambda rows: 30 + rows, draft=2.0) -> None:
        self.now, self.cost, self.draft = 0.0, cost, draft
        monkeypatch.setattr(minispec.engine.time, "perf_counter", lambda: self.now)
        forward, propose = TagRunner.forward, ScriptedDrafter.propose

        def slow_forward(runner, step, table):
            self.now += self.cost(step.num_tokens)
            return forward(runner, step, table)

        def slow_propose(drafter, requests, lengths):
            proposal = propose(drafter, requests, lengths)
            self.now += self.draft * max(map(len, proposal.tokens))
            return proposal

        monkeypatch.setattr(TagRunner, "forward", slow_forward)
        monkeypatch.setattr(ScriptedDrafter, "propose", slow_propose)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def make(drafter, logits_of=None, **speculative):
    """An engine with room for long texts."""
    return tag_engine(
        logits_of or markov(),
        slots=8192,
        context_length=2048,
        max_num_seqs=64,
        drafter=drafter,
        speculative_config={"candidate_length": 4, **speculative},
    )


class Chancy(ScriptedDrafter):
    """Each draft token is right with a chance that depends on the request's text so far."""

    def __init__(self, logits_of, chance, seed=0) -> None:
        super().__init__(lambda tokens: int(np.argmax(logits_of(tokens))), VOCAB)
        self.chance, self.random = chance, random.Random(seed)

    def _draft(self, request, k):
        draft = []
        for _ in range(k):
            token = self.next_token(request.tokens + draft)
            right = self.random.random() < self.chance(request)
            draft.append(token if right else (token + 1) % self.vocab_size)
        return draft


def lengths(engine) -> dict[int, int]:
    return engine.metrics.lengths


class Bushy(ScriptedDrafter):
    """Trees of one level: the target's choice is at each place with a chance of its own, else nowhere."""

    def __init__(self, logits_of, chances) -> None:
        super().__init__(lambda tokens: int(np.argmax(logits_of(tokens))), VOCAB)
        self.chances, self.random = chances, random.Random(0)

    def propose(self, requests, lengths):
        tokens = [self._level(request, k) for request, k in zip(requests, lengths, strict=True)]
        return Proposal(tokens, parents=[[-1] * len(level) for level in tokens])

    def _level(self, request, k):
        right = self.next_token(request.tokens)
        wrong = [token for token in range(VOCAB) if token != right]
        u = self.random.random()
        place = int(np.searchsorted(np.cumsum(self.chances), u))
        return (wrong[:place] + [right] + wrong[place:])[:k]


# Settings ----------------------------------------------------------------------------------------------------------


def test_the_documented_dictionary_works_as_it_stands(caplog):
    config = SpeculativeConfig.from_any(
        {
            "draft_model": "mtp",
            "candidate_length": 4,
            "verification_batch_size": 8,
            "fallback_threshold": 0.3,
            "max_retry_attempts": 2,
        }
    )
    assert config.adaptive and config.verification_batch_size == 8


@pytest.mark.parametrize(
    "field,value,said",
    [
        ("adaptive", 1, "adaptive must be True or False, got 1"),
        ("min_candidate_length", 5, "min_candidate_length must be a whole number from 0 to 4, got 5"),
        ("verification_batch_size", 0, "verification_batch_size must be a whole number >= 1, got 0"),
        ("disable_by_batch_size", 2.5, "disable_by_batch_size must be a whole number >= 1, got 2.5"),
        ("acceptance_window", 0, "acceptance_window must be a whole number from 1 to 100000, got 0"),
        ("fallback_threshold", 1.5, "fallback_threshold must be a number from 0 to 1, got 1.5"),
        ("fallback_threshold", float("nan"), "fallback_threshold must be a number from 0 to 1, got nan"),
        ("max_retry_attempts", -1, "max_retry_attempts must be a whole number >= 0, got -1"),
        ("max_consecutive_rejections", 0, "max_consecutive_rejections must be a whole number >= 1, got 0"),
        ("target_acceptance", 0.6, r"target_acceptance must be two numbers \(low, high\), got 0.6"),
        ("target_acceptance", (0.8, 0.6), "target_acceptance high must be a number from 0.8 to 1, got 0.6"),
        ("draft_confidence_threshold", "x", "draft_confidence_threshold must be a number from 0 to 1, got 'x'"),
        ("metrics_interval", True, "metrics_interval must be a whole number from 1 to 100000, got True"),
        ("state_cache_reserve", 0.95, "state_cache_reserve must be a number from 0 to 0.9, got 0.95"),
        ("draft_model", ["auto", "ngram"], "draft_model 'auto' stands alone"),
        ("falback_threshold", 0.3, "no field 'falback_threshold'; fields are .*fallback_threshold"),
    ],
)
def test_a_bad_setting_is_refused_with_field_value_and_range(field, value, said):
    with pytest.raises(ConfigError, match=said):
        SpeculativeConfig.from_any({field: value})


@pytest.mark.parametrize("fields", [{"speculative": 1}, {"candidate_length": 65}, {"candidate_length": -1}])
def test_a_bad_wish_of_a_request_is_refused(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} must be .*got {next(iter(fields.values()))}"):
        SamplingParams(**fields)


# Costs -------------------------------------------------------------------------------------------------------------


def test_row_cost_follows_what_is_measured_and_forgets():
    cost = StepCost()
    assert not cost.known
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows = int(rng.integers(1, 20))
        cost.record(rows, (30 + 2 * rows) * rng.uniform(0.9, 1.1))
    assert cost.seconds(np.array([1, 10, 40])) == pytest.approx([32, 50, 110], rel=0.08)
    for _ in range(1000):
        rows = int(rng.integers(1, 20))
        cost.record(rows, 10 + rows)
    assert cost.seconds(np.array([1, 10])) == pytest.approx([11, 20], rel=0.1)


def test_row_cost_learns_a_step_that_no_line_has():
    cost, true = StepCost(), {1: 50, 2: 90, 3: 110, 4: 110, 5: 112}
    for n in range(200):
        cost.record(1 + n % 5, true[1 + n % 5])
    assert cost.seconds(np.array(list(true))) == pytest.approx(list(true.values()), rel=0.05)


def test_row_cost_ignores_the_first_forwards_and_is_not_carried_away_by_one():
    cost = StepCost()
    for seconds in (900, 700, *[30] * 20):
        cost.record(1, seconds)
    assert cost.seconds(np.array([1])) == pytest.approx([30])
    cost.record(1, 30_000)
    assert cost.seconds(np.array([1]))[0] < 40


def test_row_cost_with_one_size_assumes_some_cost_of_a_row_and_never_less_for_more_rows():
    cost = StepCost()
    for _ in range(20):
        cost.record(4, 32.0)
    one, four, many = cost.seconds(np.array([1, 4, 36]))
    assert one < four == pytest.approx(32) and many == pytest.approx(64, rel=0.05)
    for rows, seconds in ((1, 50), (8, 10)) * 20:  # cheaper with more rows, as measured
        cost.record(rows, seconds)
    curve = cost.seconds(np.arange(1, 100))
    assert (np.diff(curve) >= 0).all() and (curve > 0).all()


def test_buckets_are_exact_where_it_matters_and_grow():
    assert [bucket(n) for n in range(1, 17)] == list(range(1, 17))
    buckets = [bucket(n) for n in range(17, 4096)]
    assert buckets == sorted(buckets) and len(set(buckets)) < 40 and min(buckets) > 16


def test_acceptance_counts_a_draft_behind_a_rejected_one_as_not_judged():
    window = Acceptance(100)
    for accepted in [0, 1, 2, 3] * 25:
        window.record(3, accepted)
    assert window.chances(4, [0.5], 4) == pytest.approx([75 / 100, 50 / 75, 25 / 50, 25 / 50], abs=0.03)
    assert window.rate == 0.5


def test_acceptance_forgets_beyond_its_window():
    window, recent = Acceptance(8), Acceptance(8)
    for n in range(50):
        window.record(1 + n % 3, 0)
    for n in range(8):
        for each in (window, recent):
            each.record(1 + n % 3, min(n % 4, 1 + n % 3))
    assert window.chances(3, [0.5], 4) == recent.chances(3, [0.5], 4) and window.rate == recent.rate


# Gain --------------------------------------------------------------------------------------------------------------


def test_an_oracle_gets_the_longest_drafts_and_a_fool_gets_none(clock):
    logits_of = markov()
    engine = make(scripted(logits_of), candidate_length=6)
    [request] = run(engine, [[1, 2]], greedy(400))
    assert request.output == tag_greedy(logits_of, [1, 2], 400)
    assert lengths(engine)[6] > 0.8 * sum(lengths(engine).values())
    fool = make(scripted(logits_of, script=[0]), candidate_length=6)
    [request] = run(fool, [[1, 2]], greedy(400))
    assert request.output == tag_greedy(logits_of, [1, 2], 400)
    assert lengths(fool)[0] > 0.9 * sum(lengths(fool).values()) and fool.metrics.choices["probe"] > 2


def fixed_time(clock, k, waves, tokens, seed=0) -> float:
    """Time on the clock of an engine that always drafts k tokens, without the engine.

    waves: one after the other, batches of (prompt length, chance that a draft is right) for each request.
    """
    rng, time = random.Random(seed), 0.0
    for wave in waves:
        time += clock.cost(sum(length for length, _ in wave))
        left = [tokens - 1] * len(wave)
        while any(left):
            drafts = [max(0, min(k, n - 1)) for n in left]
            time += clock.cost(sum(d + (n > 0) for d, n in zip(drafts, left, strict=True))) + clock.draft * max(drafts)
            for b, (_, chance) in enumerate(wave):
                right = [rng.random() < chance for _ in range(drafts[b])]
                left[b] -= (left[b] > 0) * (1 + [*right, False].index(False))
    return time


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_the_time_of_a_fixed_length_needs_no_engine(clock, k):
    clock.cost = lambda rows: max(30.0, 12 + 2.2 * rows)
    logits_of, chance = markov(), {1: 0.9, 2: 0.15, 3: 0.5}
    engine = make(
        Chancy(logits_of, lambda request: chance[request.prompt[0]]), logits_of, candidate_length=k, adaptive=False
    )
    waves, start = ([1], [2, 1, 3, 3], [1, 2]), clock.now
    for wave in waves:
        run(engine, [[first, 2] for first in wave], greedy(40))
    expected = fixed_time(clock, k, [[(2, chance[first]) for first in wave] for wave in waves], 40)
    assert clock.now - start == pytest.approx(expected)


def spent(clock, drafter, prompts, params, logits_of=None, **speculative) -> float:
    """Time on the clock that an engine needs for these requests."""
    start = clock.now
    engine = make(drafter, logits_of, **speculative)
    run(engine, prompts, params)
    assert_idle(engine)
    return clock.now - start


COSTS = {
    "memory bound": (lambda rows: 30 + 0.5 * rows, 2.0),
    "rows cost": (lambda rows: 20 + 4 * rows, 2.0),
    "saturates": (lambda rows: max(30, 2.5 * rows), 1.0),
    "dear drafts": (lambda rows: 30 + rows, 12.0),
}


@pytest.mark.parametrize("batch,tokens", [(1, 300), (4, 200), (16, 150)])
@pytest.mark.parametrize("costs", COSTS)
def test_adaptive_comes_near_the_best_fixed_length(clock, costs, batch, tokens):
    """Learning included: these are the first 50 to 300 steps of an engine."""
    clock.cost, clock.draft = COSTS[costs]
    logits_of, prompts = markov(), [[1 + b % 11, 2, 1 + b % 7] for b in range(batch)]
    ratios = []
    for chance in (0.0, 0.3, 0.6, 0.9):
        fixed = [fixed_time(clock, k, [[(3, chance)] * batch], tokens) for k in range(7)]
        made = Chancy(logits_of, lambda request, chance=chance: chance)
        ratios.append(min(fixed) / spent(clock, made, prompts, greedy(tokens), logits_of, candidate_length=6))
    assert min(ratios) > 0.88 and sum(ratios) / 4 > 0.94, ratios


def test_adaptive_beats_every_fixed_length_when_text_and_batch_change(clock):
    clock.cost, clock.draft = lambda rows: max(30.0, 12 + 2.2 * rows), 2.0
    logits_of = markov()
    # Long stretches of easy and hard text, alone and in a crowd.
    waves = [[1], [2], [1, 2, 3, 4] * 4, [1, 3, 1], [2, 4, 2, 4] * 3]
    chance = [0.15, 0.9]
    fixed = [
        fixed_time(clock, k, [[(2, chance[first % 2]) for first in wave] for wave in waves], 200) for k in range(8)
    ]
    made = Chancy(logits_of, lambda request: chance[request.prompt[0] % 2])
    engine, start = make(made, logits_of, candidate_length=7), clock.now
    for wave in waves:
        run(engine, [[first, 2] for first in wave], greedy(200))
    assert clock.now - start < min(fixed), (clock.now - start, fixed)


def test_a_useless_drafter_costs_less_than_a_twentieth(clock):
    logits_of = markov()
    for draft in (0.5, 2.0, 6.0):
        clock.draft = draft
        plain = fixed_time(clock, 0, [[(2, 0.0)]], 600)
        useless = spent(clock, scripted(logits_of, script=[0]), [[1, 2]], greedy(600), logits_of)
        assert useless <= plain / 0.95


def test_prompts_that_are_read_do_not_make_it_flap(clock):
    logits_of = markov()
    engine = make(Chancy(logits_of, lambda request: 0.5), logits_of)
    engine.add([1, 2], greedy(600))
    for n in range(300):
        if n % 10 == 9:
            engine.add([3] * 40, greedy(2))
        engine.step()
    assert engine.metrics.choices["probe"] < 300 / rules.EXPLORE + 5
    assert lengths(engine).get(0, 0) < 0.25 * sum(lengths(engine).values())


def test_the_plain_step_stays_measured(clock):
    logits_of = markov()
    engine = make(scripted(logits_of))
    run(engine, [[1, 2]], greedy(1500))
    assert engine.metrics.choices["baseline"] >= 2
    expected = 5 * clock.cost(1) / (clock.cost(5) + 4 * clock.draft)  # five tokens a step against one
    assert engine.snapshot().speed_up == pytest.approx(expected, rel=0.05)


def test_it_pauses_when_steps_with_drafts_turn_out_slower(clock, caplog):
    logits_of = markov()
    engine = make(scripted(logits_of, script=[1]))
    # The rows of a draft cost more than any line shows: only the comparison with plain steps tells.
    engine.controller._best = lambda copied, *rest: (1.0, np.inf, np.full(len(copied), 4))
    clock.cost = lambda rows: 30 + 20 * (rows - 1)
    with caplog.at_level(logging.INFO):
        [request] = run(engine, [[1, 2]], greedy(800))
    assert request.output == tag_greedy(logits_of, [1, 2], 800)
    assert engine.metrics.regressions >= 2 and engine.metrics.choices["regression"] > 64
    assert "of plain speed" in caplog.text and engine.snapshot().speed_up < 1


# Limits ------------------------------------------------------------------------------------------------------------


def test_verification_batch_size_goes_round(clock):
    logits_of = markov()
    engine = make(scripted(logits_of), adaptive=False, verification_batch_size=2)
    requests = [engine.add([1, n], greedy(60))[0] for n in range(5)]
    while any(request.num_output == 0 for request in requests):
        engine.step()
    engine.metrics.choices.clear()
    drafted = Counter()
    for _ in range(10):
        step = engine.step()
        with_drafts = [row.request.id for row in step.rows if row.max_drafts]
        assert len(with_drafts) == 2
        drafted.update(with_drafts)
    assert max(drafted.values()) - min(drafted.values()) <= 1 and engine.metrics.choices["turn"] == 30
    finish(engine)
    assert [r.output for r in requests] == [tag_greedy(logits_of, [1, n], 60) for n in range(5)]


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_request_below_the_threshold_falls_back_and_is_tried_again(clock, adaptive):
    logits_of = markov()
    clock.cost = lambda rows: 30 + 0.01 * rows  # drafts are nearly free: only the threshold speaks against them
    clock.draft = 0.01
    drafter = Chancy(logits_of, lambda request: 0.2)
    engine = make(drafter, logits_of, adaptive=adaptive, fallback_threshold=0.5, max_retry_attempts=2)
    [request] = run(engine, [[1, 2]], greedy(600))
    assert request.output == tag_greedy(logits_of, [1, 2], 600)
    assert engine.metrics.fallbacks == 3  # once, and after each of two retries
    assert request.metrics.speculation.verify_rows == 3 * rules.EVIDENCE
    assert engine.metrics.choices["fallback"] > 400


def test_above_the_threshold_nobody_falls_back(clock):
    logits_of = markov()
    engine = make(Chancy(logits_of, lambda request: 0.95), logits_of, fallback_threshold=0.5)
    run(engine, [[1, 2]], greedy(300))
    assert engine.metrics.fallbacks == 0


def test_one_request_falls_back_and_the_others_go_on(clock):
    logits_of = markov()
    drafter = Chancy(logits_of, lambda request: 0.95 if request.prompt[0] == 1 else 0.0)
    engine = make(drafter, logits_of, adaptive=False, fallback_threshold=0.3, max_retry_attempts=0)
    good, bad = run(engine, [[1, 2], [3, 4]], greedy(200))
    assert bad.metrics.speculation.verify_rows == rules.EVIDENCE
    assert good.metrics.acceptance_length > 3


def test_rejections_in_a_row_lead_to_a_pause(clock):
    logits_of = markov()
    engine = make(scripted(logits_of, script=[0]), adaptive=False, max_consecutive_rejections=3)
    [request] = run(engine, [[1, 2]], greedy(150))
    verified = request.metrics.speculation.verify_rows
    assert verified == pytest.approx(3 * 150 / (3 + rules.PAUSE), abs=3)
    assert engine.metrics.choices["rejections"] > 100 and engine.metrics.fallbacks == 0
    # Two in a row, then a hit: no pause.
    engine = make(scripted(logits_of, script=[0, 0, 1]), adaptive=False, max_consecutive_rejections=3)
    run(engine, [[1, 2]], greedy(150))
    assert "rejections" not in engine.metrics.choices


def test_a_large_batch_stops_drafts_and_does_not_flap(clock):
    logits_of = markov()
    engine = make(scripted(logits_of), adaptive=False, disable_by_batch_size=2)
    [long] = engine.add([1, 2], greedy(300))
    engine.add([2, 2], greedy(300))
    engine.step()
    drafts = []
    for n in range(60):
        if n % 8 == 4 and n < 30:
            engine.add([3, n % 11], greedy(2))  # a short visit
        step = engine.step()
        drafts.append(any(row.max_drafts for row in step.rows))
    changes = sum(a != b for a, b in zip(drafts, drafts[1:], strict=False))
    assert changes == 2 and not any(drafts[8:30]) and drafts[-1]
    assert engine.metrics.choices["batch"] > 0
    finish(engine)
    assert long.output == tag_greedy(logits_of, [1, 2], 300)


def test_prompts_being_read_are_no_batch(clock):
    logits_of = markov()
    engine = make(scripted(logits_of), adaptive=False, disable_by_batch_size=1)
    engine.add([1, 2], greedy(100))
    engine.step()
    engine.add(list(range(10)) * 20, greedy(1))
    step = engine.step()
    assert {row.max_drafts for row in step.rows if row.num_committed == 1} == {4}


def test_target_acceptance_moves_the_longest_draft_of_a_request(clock):
    logits_of = markov()
    drafter = Chancy(logits_of, lambda request: 0.99 if request.prompt[0] == 1 else 0.1)
    engine = make(drafter, logits_of, adaptive=False, candidate_length=8, target_acceptance=(0.6, 0.8))
    good, bad = [engine.add(prompt, greedy(1000))[0] for prompt in ([1, 2], [3, 4])]
    for _ in range(60):
        step = engine.step()
    by_request = {row.request: row.max_drafts for row in step.rows}
    assert by_request[good] == 8 and by_request[bad] == 1
    engine.abort(good.id), engine.abort(bad.id)


def test_min_candidate_length_is_kept_without_a_gain(clock):
    logits_of = markov()
    engine = make(scripted(logits_of, script=[0]), min_candidate_length=2)
    [request] = run(engine, [[1, 2]], greedy(60))  # later the comparison with plain steps stops it
    assert lengths(engine)[0] <= 4 and lengths(engine)[2] > 45
    assert request.output == tag_greedy(logits_of, [1, 2], 60)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_request_may_ask_for_none_or_fewer(clock, adaptive):
    logits_of = markov()
    engine = make(scripted(logits_of), adaptive=adaptive)
    params = [greedy(60), greedy(60, speculative=False), greedy(60, candidate_length=2), greedy(60, candidate_length=0)]
    prompts = [[1, 2], [2, 2], [3, 2], [4, 2]]
    requests = run(engine, prompts, params)
    assert [r.output for r in requests] == [tag_greedy(logits_of, p, 60) for p in prompts]
    most = [max(r.metrics.accepted_per_step, default=0) for r in requests]
    assert most == [4, 0, 2, 0] and [r.metrics.drafted > 0 for r in requests] == [True, False, True, False]
    assert engine.metrics.choices["request"] > 100


# Two drafters ------------------------------------------------------------------------------------------------------


def make_pair(logits_of, model, **speculative):
    engine = tag_engine(logits_of, slots=8192, context_length=2048, drafter=model)
    config = SpeculativeConfig(candidate_length=4, ngram_min=1, **speculative)
    copier = NgramDrafter(4, 1)
    engine.controller = rules.Controller(config, [model, copier], VOCAB, engine.metrics)
    engine.drafters = [model, copier]
    return engine


def test_the_drafter_that_is_kept_more_is_used_and_the_other_tried_now_and_then(clock):
    def echo(tokens):  # text that repeats itself: copies are right
        return [float(t == len(tokens) % VOCAB) for t in range(VOCAB)]

    for logits_of, chance, winner in ((echo, 0.2, "ngram"), (markov(order=6), 0.95, "scripted")):
        engine = make_pair(logits_of, Chancy(logits_of, lambda request, c=chance: c))
        [request] = run(engine, [[1, 2]], greedy(600))
        assert request.output == tag_greedy(logits_of, [1, 2], 600)
        drafted = {name: counts.verify_rows for name, counts in engine.metrics.by_drafter.items()}
        assert drafted[winner] > 0.75 * sum(drafted.values()), drafted
        assert 0 < engine.metrics.explorations <= sum(drafted.values()) / rules.EXPLORE + 1
        assert set(engine.snapshot().alignment) == set(drafted)


def test_without_adaptive_a_copy_comes_first(clock):
    logits_of = markov(order=6)
    engine = make_pair(logits_of, scripted(logits_of), adaptive=False)
    engine.add([1, 2, 3, 1, 2], greedy(40))
    engine.step()
    [request] = engine.requests.values()
    while engine.has_work:
        [copy] = NgramDrafter(4, 1).propose([request], [4]).tokens
        [row] = engine.step().rows
        assert not row.max_drafts or row.drafter == ("ngram" if copy else "scripted")
    assert set(engine.metrics.by_drafter) == {"ngram", "scripted"}


# Faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FaultyDrafter.KINDS)
def test_a_fault_costs_a_draft_is_said_once_and_after_the_retries_the_drafter_is_off(clock, caplog, kind):
    logits_of = markov()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=80) if kind == "NaN" else greedy(80)
    drafter = FaultyDrafter(scripted(logits_of), VOCAB, dict.fromkeys(range(3, 100), kind))
    engine = make(drafter, max_retry_attempts=2, adaptive=False)
    [request] = run(engine, [[1, 2]], params)
    assert request.finish_reason == "length" and (kind == "NaN" or request.output == tag_greedy(logits_of, [1, 2], 80))
    metrics = engine.snapshot()
    assert metrics.drafter_faults == 3 and metrics.drafters_off == ["scripted"] and len(metrics.faults) == 1
    assert drafter.calls == 5  # two good ones, the fault, two retries
    said = [r.message for r in caplog.records if "failed" in r.message]
    assert len([m for m in said if "off" not in m]) == 1 and "is off" in caplog.text
    assert metrics.choices["fault"] > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    "make_q",
    [
        lambda n: np.full((n, VOCAB), 1 / VOCAB),
        lambda n: torch.ones(n, VOCAB, dtype=int),
        lambda n: torch.full((n, VOCAB), 1 / VOCAB).to_sparse(),
        lambda n: torch.empty(n, VOCAB, device="meta"),
    ],
)
def test_a_q_that_cannot_be_used_is_a_fault(make_q):
    class Odd:
        name = "odd"

        def propose(self, requests, lengths):
            return Proposal([[1] * n for n in lengths], [make_q(n) for n in lengths])

        def release(self, request):
            pass

    engine = make(Odd(), adaptive=False)
    [request] = run(engine, [[1, 2]], SamplingParams(temperature=1.0, seed=1, max_tokens=12))
    assert request.finish_reason == "length" and engine.metrics.drafters_off == ["odd"]


def test_faults_long_ago_are_forgiven(clock):
    logits_of = markov()
    every = {n: "raises" for n in range(5, 2000, rules_recovered() + 1)}
    engine = make(FaultyDrafter(scripted(logits_of), VOCAB, every), max_retry_attempts=0, adaptive=False)
    run(engine, [[1, 2]], greedy(100))
    assert engine.metrics.drafters_off == ["scripted"]  # no retry allowed: off at once
    engine = make(FaultyDrafter(scripted(logits_of), VOCAB, every), max_retry_attempts=1, adaptive=False)
    run(engine, [[1, 2]], greedy(1800))
    assert engine.metrics.drafter_faults >= 3 and engine.metrics.drafters_off == []


def rules_recovered() -> int:
    from minispec.speculative import guard

    return guard.RECOVERED


def test_every_fault_at_a_random_step_in_200_random_runs():
    rng = random.Random(0)
    for number in range(200):
        logits_of = markov(seed=number % 7)
        kinds = {rng.randint(1, 12): rng.choice(FaultyDrafter.KINDS) for _ in range(rng.randint(1, 3))}
        inner = scripted(logits_of, script=[rng.randint(0, 4) for _ in range(5)])
        engine = tag_engine(
            logits_of,
            slots=rng.choice([64, 128, 512]),
            context_length=48,
            page_size=rng.choice([1, 4, 16]),
            enable_radix_cache=rng.random() < 0.7,
            max_num_seqs=rng.randint(1, 6),
            drafter=FaultyDrafter(inner, VOCAB, kinds),
            speculative_config={
                "candidate_length": rng.randint(1, 5),
                "adaptive": rng.random() < 0.5,
                "max_retry_attempts": rng.randint(0, 3),
                "verification_batch_size": rng.choice([None, 1, 3]),
                "fallback_threshold": rng.choice([0.0, 0.4]),
            },
        )
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 7))]
        requests = run(engine, prompts, greedy(20))
        assert [r.output for r in requests] == [tag_greedy(logits_of, p, 20) for p in prompts], number
        assert_idle(engine)


def test_a_fault_of_one_drafter_leaves_the_other(clock):
    def echo(tokens):
        return [float(t == len(tokens) % VOCAB) for t in range(VOCAB)]

    model = FaultyDrafter(scripted(echo, script=[0]), VOCAB, dict.fromkeys(range(1, 100), "raises"))
    engine = make_pair(echo, model)
    [request] = run(engine, [[1, 2]], greedy(200))
    assert engine.metrics.drafters_off == ["scripted"] and request.metrics.acceptance_length > 3


def test_a_sampled_request_is_right_whatever_the_controller_does():
    """The distribution of the second token, over seeds, with and without an adaptive controller."""

    def logits_of(tokens):
        return [0.5, 0.0, 1.0, -1.0][:VOCAB] if tokens[-1] % 2 else [0.0, 1.0, 0.0, 0.5]

    class Uniform:
        name = "uniform"

        def propose(self, requests, lengths):
            rng = np.random.default_rng(sum(len(r.tokens) * (r.seed % 1000 + 1) for r in requests))
            q = torch.full((max(lengths), 4), 0.25)
            return Proposal([rng.integers(0, 4, n).tolist() for n in lengths], [q[:n] for n in lengths])

        def release(self, request):
            pass

    engine = tag_engine(
        logits_of,
        vocab_size=4,
        slots=8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        drafter=Uniform(),
        speculative_config={"candidate_length": 3},
    )
    count = 4000
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=3) for s in range(count)]
    requests = run(engine, [[1]] * count, params)
    seen = np.zeros((4, 4))
    for request in requests:
        seen[request.output[0], request.output[1]] += 1
    p = torch.softmax(torch.tensor([logits_of([t]) for t in range(4)]), -1).numpy()
    expected = count * p[1][:, None] * p
    assert ((seen - expected) ** 2 / expected).sum() < 39.3  # chi-square, 15 degrees of freedom: chance 0.0006
    assert engine.metrics.speculation.drafted > 0 and 0 < engine.metrics.speculation.acceptance_rate < 1


# Metrics -----------------------------------------------------------------------------------------------------------


def test_the_history_adds_up(clock):
    logits_of = markov()
    engine = make(scripted(logits_of, script=[2, 0, 4]), metrics_interval=10)
    run(engine, [[1, 2], [3, 4]], greedy(100))
    rows, total = engine.history, engine.snapshot()
    assert [row.step for row in rows] == list(range(10, 10 * len(rows) + 1, 10)) and len(rows) == total.steps // 10
    last = MetricsRow.between(engine._before, total)
    for name in ("steps", "output_tokens"):
        assert sum(getattr(row, name) for row in [*rows, last]) == getattr(total, name)
    assert sum(row.seconds for row in [*rows, last]) == pytest.approx(sum(total.seconds.values()))
    assert sum((Counter(row.choices) for row in [*rows, last]), Counter()) == Counter(total.choices)
    assert all(row.batch == 2 for row in rows[1:4]) and all(0 < row.acceptance_rate < 1 for row in rows)
    assert sum(total.lengths.values()) == sum(total.choices.values()) + 2  # the two prompts' ends
    drafted = sum(length * count for length, count in total.lengths.items())
    assert drafted == total.speculation.drafted == total.by_drafter["scripted"].drafted


def test_a_snapshot_does_not_change(clock):
    engine = make(scripted(markov()))
    run(engine, [[1, 2]], greedy(20))
    before = engine.snapshot()
    drafted, choices = before.speculation.drafted, dict(before.choices)
    run(engine, [[3, 2]], greedy(20))
    assert before.speculation.drafted == drafted and before.choices == choices


# Trees ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch,best", [(1, 3), (8, 1), (32, 0), (64, 0)])
def test_a_tree_is_as_large_as_pays_at_this_batch(clock, batch, best):
    """A forward takes 30 + rows: one row more is worth it alone, not in a crowd. `best` is the most of the formula."""
    logits_of, chances = markov(), [0.5, 0.2, 0.1, 0.05, 0.02, 0.01]
    rates = [(1 + sum(chances[:n])) * batch / (30 + batch * (1 + n)) for n in range(7)]
    assert int(np.argmax(rates)) == best
    engine = make(Bushy(logits_of, chances), logits_of, topk=6, num_draft_tokens=6)
    requests = run(engine, [[i % 12, i // 12, 2] for i in range(batch)], greedy(300 if batch < 32 else 80))
    assert engine.metrics.steps < sum(request.metrics.forwards for request in requests) / (0.8 * batch), "all at once"
    common, _ = Counter(lengths(engine)).most_common(1)[0]
    assert abs(common - best) <= (best > 1)  # 2 and 3 differ by less than a hundredth
    assert engine.metrics.drafter_faults == 0


def test_each_draft_of_a_tree_is_counted_for_itself():
    window = Acceptance(3, tree=True)
    for path in ([0, 1], [0, 2], [1], [1, 2]):  # the first one is forgotten
        window.record(4, len(path), path)
    assert window.chances(4, [0.0], weight=1e-9) == pytest.approx([1 / 3, 2 / 3, 2 / 3, 0], abs=1e-6)
    assert window.rate == pytest.approx(5 / 12)
