"""Who runs when: budgets, chunks, admission, preemption, sharing, abort. All on the tag model, all counted."""

from __future__ import annotations

import random
import signal

import pytest
from tools import GREEDY, assert_idle, finish, markov, run, scripted, tag_engine, tag_greedy

from minispec import SamplingParams
from minispec.config import ConfigError
from minispec.core import Status
from minispec.speculative.ngram import NgramDrafter


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, **more)


def test_no_forward_exceeds_the_token_budget_and_decoding_rows_come_first():
    engine = tag_engine(max_num_batched_tokens=16, max_num_seqs=8, drafter=scripted(markov()))
    run(engine, [[i] * 20 for i in range(8)], greedy(10))
    for step in engine.runner.steps:
        assert sum(committed + drafts for _, _, committed, drafts in step) <= 16
        is_decode = [committed == 1 and start >= 20 for _, start, committed, _ in step]
        assert is_decode == sorted(is_decode, reverse=True)


def test_a_long_prompt_never_stops_the_others():
    engine = tag_engine(max_num_batched_tokens=8, chunked_prefill_size=6, max_num_seqs=4)
    [short] = engine.add([1, 2], greedy(30))
    engine.step()
    engine.add([3] * 60, greedy(2))
    while not short.finished:
        before = short.num_output
        engine.step()
        assert short.num_output == before + 1
    finish(engine)


def test_a_prompt_advances_although_drafts_could_use_the_whole_budget():
    engine = tag_engine(max_num_batched_tokens=8, max_num_seqs=4, drafter=scripted(markov()), candidate_length=8)
    running = [r for prompt in ([1], [2], [3]) for r in engine.add(prompt, greedy(60))]
    for _ in range(3):
        engine.step()
    [late] = engine.add([4] * 9, greedy(1))
    for _ in range(9):
        engine.step()
    assert late.finished and not all(r.finished for r in running)


def test_last_chunk_of_one_token():
    logits_of = markov()
    engine = tag_engine(logits_of, chunked_prefill_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    [request] = run(engine, [prompt])
    assert [committed for step in engine.runner.steps[:3] for _, _, committed, _ in step] == [4, 4, 1]
    assert request.output == tag_greedy(logits_of, prompt, 16)


def test_a_waiting_request_starts_as_soon_as_one_leaves():
    for radix in (True, False):
        engine = tag_engine(max_num_seqs=2, chunked_prefill_size=4, enable_radix_cache=radix)
        requests = [r for p, n in (([1] * 18, 4), ([2], 3), ([3], 3)) for r in engine.add(p, greedy(n))]
        while not requests[1].finished:
            assert requests[2].status is Status.WAITING
            engine.step()
        engine.step()
        assert requests[2].num_output == 1
        finish(engine, limit=20)


def test_pages_held_are_those_written():
    for length in (3, 4, 5):
        engine = tag_engine(page_size=4)
        [request] = engine.add(list(range(length)), greedy(6))
        while engine.has_work:
            engine.step()
            if not request.finished:
                assert request.num_pages == -(-max(request.kv_len, 1) // 4)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafter", [None, "scripted", "ngram"])
def test_preemption_changes_nothing_but_time(page_size, drafter):
    logits_of = markov()
    made = {None: None, "scripted": scripted(logits_of, script=[1, 3, 0]), "ngram": NgramDrafter(3, 1)}[drafter]
    engine = tag_engine(logits_of, slots=64, page_size=page_size, max_num_seqs=6, drafter=made, context_length=64)
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    requests = run(engine, prompts, greedy(28))
    assert engine.scheduler.preemptions > 0
    assert [r.output for r in requests] == [tag_greedy(logits_of, p, 28) for p in prompts]
    assert_idle(engine)


def test_slots_of_rejected_drafts_go_back_before_anybody_is_preempted():
    logits_of = markov()
    engine = tag_engine(
        logits_of,
        slots=26,
        page_size=1,
        max_num_seqs=2,
        chunked_prefill_size=1,
        enable_radix_cache=False,
        drafter=scripted(logits_of, script=[0]),
        candidate_length=12,
    )
    # While the older request reads its prompt, the drafts of the younger take every slot that is left.
    older, younger = (r for p, n in (([1] * 12, 2), ([2], 14)) for r in engine.add(p, greedy(n)))
    for _ in range(12):
        engine.step()
    assert older.num_output == 1 and engine.pool.num_free_pages == 0
    finish(engine)
    assert (older.num_output, younger.num_output) == (2, 14) and engine.scheduler.preemptions == 0


def test_a_preempted_request_goes_on_before_those_that_wait():
    engine = tag_engine(slots=16, page_size=1, context_length=16, max_num_seqs=2)
    work = (([1] * 3, 12), ([2] * 3, 9), ([3], 1))
    _, preempted, waiting = (r for p, n in work for r in engine.add(p, greedy(n)))
    while not preempted.metrics.preemptions:
        engine.step()
    assert list(engine.scheduler.waiting) == [preempted, waiting]
    while not waiting.finished:
        engine.step()
    assert preempted.finished or preempted.status is Status.RUNNING
    finish(engine)


@pytest.mark.parametrize("pages,admitted", [(4, False), (5, True)])
def test_a_newcomer_leaves_each_running_request_a_page_to_grow_into(pages, admitted):
    engine = tag_engine(slots=4 * pages, page_size=4, context_length=16, max_num_seqs=3, enable_radix_cache=False)
    *_, late = (r for i in (1, 2, 3) for r in engine.add([i] * 4, greedy(4)))
    engine.step()
    # The first two fill a page each and are about to need another one each; the third prompt needs one now.
    assert (late.status is Status.RUNNING) == admitted
    finish(engine)
    assert (engine.scheduler.preemptions > 0) == admitted  # all three need six pages


def test_after_a_preemption_the_first_step_emits_one_token_and_no_draft_is_left():
    logits_of = markov()
    engine = tag_engine(logits_of, slots=48, page_size=4, max_num_seqs=3, drafter=scripted(logits_of))
    requests = [r for p in ([1], [2], [3]) for r in engine.add(p, greedy(40))]
    seen = 0
    while engine.has_work:
        before = {
            r: (r.metrics.preemptions, r.num_output, r.in_prefill or r.status is Status.WAITING) for r in requests
        }
        engine.step()
        for r in requests:
            preempted, outputs, recomputing = before[r]
            if recomputing and preempted and r.num_output > outputs:
                assert r.num_output == outputs + 1
                seen += 1
    assert seen > 0


def test_cached_tokens_are_those_of_the_first_admission():
    engine = tag_engine(slots=64, page_size=4, max_num_seqs=6, chunked_prefill_size=4, context_length=64)
    requests = run(engine, [[i, i + 1, i + 2, i + 3, i + 4] for i in range(6)], greedy(20))
    assert engine.scheduler.preemptions > 0
    assert all(r.metrics.cached_tokens == 0 for r in requests)
    [again] = run(engine, [requests[0].prompt], greedy(2))
    assert again.metrics.cached_tokens in (0, 4)


def test_a_prompt_that_is_fully_cached_computes_one_token_at_least():
    for n in (1, 3, 4, 5, 8):
        engine = tag_engine(page_size=4)
        first, second = (run(engine, [list(range(n))], greedy(3))[0] for _ in range(2))
        assert second.output == first.output
        assert second.metrics.cached_tokens == (n - 1) // 4 * 4
        assert second.metrics.computed_tokens >= 3


def test_what_a_finished_request_wrote_is_what_the_next_one_finds():
    forced = {4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4]}

    def logits_of(tokens):
        return [float(t == len(tokens)) for t in range(12)]

    assert [logits_of(v).index(1.0) for v in forced.values()] == [4, 5]
    engine = tag_engine(logits_of, page_size=1)
    [first] = run(engine, [[0, 1, 2, 3]], greedy(2))
    assert first.output == [4, 5]
    [second] = run(engine, [[0, 1, 2, 3, 4, 5, 6]], greedy(1))
    assert second.metrics.cached_tokens == 5


def test_same_prompts_at_once_and_later_share_one_copy():
    logits_of = markov()
    engine = tag_engine(logits_of, page_size=4, max_num_seqs=8)
    prompt = list(range(12)) + list(range(9))
    for _ in range(2):
        requests = run(engine, [prompt] * 4, greedy(5))
        assert all(r.output == tag_greedy(logits_of, prompt, 5) for r in requests)
    ledger = engine.pool.check_integrity([])
    assert ledger.cached == (len(prompt) + 4) // 4  # prompt and the four outputs that were read, whole pages, once


def test_a_burst_with_one_long_prefix_computes_it_once():
    engine = tag_engine(page_size=4, max_num_seqs=8, chunked_prefill_size=16)
    shared = [i % 12 for i in range(64)]
    run(engine, [[*shared, i] for i in range(6)], greedy(1))
    assert engine.metrics.computed_tokens == 65 + 5 * 1


def test_completions_of_one_prompt_compute_it_once_and_differ():
    engine = tag_engine(page_size=4, max_num_seqs=8)
    params = SamplingParams(n=4, seed=7, max_tokens=12)
    prompt = [i % 12 for i in range(41)]
    first, second = run(engine, [prompt], params), run(engine, [prompt], params)
    assert [r.index for r in first] == [0, 1, 2, 3]
    assert len({tuple(r.output) for r in first}) > 1
    assert [r.output for r in first] == [r.output for r in second]
    assert sum(r.metrics.cached_tokens for r in first) == 3 * 40
    assert [r.output for r in run(engine, [prompt], SamplingParams(n=1, seed=7, max_tokens=12))] == [first[0].output]


def test_a_request_larger_than_the_pool_is_refused_and_others_go_on():
    engine = tag_engine(slots=32, page_size=4, context_length=64)
    [good] = engine.add([1, 2, 3], GREEDY)
    with pytest.raises(ConfigError, match="40 tokens.*limit is 32"):
        engine.add([1] * 40, GREEDY)
    [long] = engine.add([2] * 20, greedy(40))
    finish(engine, limit=200)
    assert good.finish_reason == "length" and good.num_output == 16
    assert long.finish_reason == "length" and len(long.tokens) == 32
    assert_idle(engine)


def test_abort_at_any_moment_leaves_nothing():
    logits_of = markov()
    for moment in range(8):
        engine = tag_engine(logits_of, max_num_seqs=2, chunked_prefill_size=4, drafter=scripted(logits_of))
        victim, other, queued = (r for p in ([1] * 14, [2] * 3, [3]) for r in engine.add(p, greedy(12)))
        for _ in range(moment):
            engine.step()
        for request in (victim, queued):
            was_running = request.id in engine.requests
            assert engine.abort(request.id) == was_running
            assert not engine.abort(request.id)
            assert request.finish_reason == ("abort" if was_running else "length")
        finish(engine)
        assert other.output == tag_greedy(logits_of, [2] * 3, 12)
        assert_idle(engine)
    assert not engine.abort("never heard of")


def test_one_id_cannot_run_twice_at_once():
    engine = tag_engine()
    engine.add([1], GREEDY, request_id="mine")
    with pytest.raises(ConfigError, match="'mine' is already running"):
        engine.add([2], GREEDY, request_id="mine")
    finish(engine)
    engine.add([2], GREEDY, request_id="mine")
    finish(engine)


@pytest.mark.parametrize("page_size,radix", [(1, True), (4, True), (16, False)])
def test_a_thousand_random_requests_through_a_pool_far_too_small(page_size, radix):
    """Preemption, eviction, aborts and speculation at once: every id is right and nothing leaks."""
    rng = random.Random(page_size)
    logits_of = markov(vocab_size=12)
    engine = tag_engine(
        logits_of,
        slots=96,
        page_size=page_size,
        context_length=80,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        chunked_prefill_size=9,
        enable_radix_cache=radix,
        drafter=scripted(logits_of, script=[0, 4, 1, 2]),
    )
    stems = [[rng.randrange(12) for _ in range(24)] for _ in range(5)]
    requests, aborted = [], set()
    while len(requests) < 1000 or engine.has_work:
        while len(requests) < 1000 and len(engine.scheduler.waiting) < 6:
            prompt = rng.choice(stems)[: rng.randrange(25)] + [rng.randrange(12) for _ in range(rng.randint(1, 12))]
            requests += engine.add(prompt, greedy(rng.randint(1, 30)))
        engine.step()
        if engine.requests and rng.random() < 0.03:
            victim = rng.choice(list(engine.requests))
            engine.abort(victim)
            aborted.add(victim)
    assert engine.scheduler.preemptions > 20 and len(aborted) > 10
    assert (engine.metrics.cached_tokens > 1000) == radix
    for request in requests:
        expected = tag_greedy(logits_of, request.prompt, request.params.max_tokens)
        if request.id in aborted:
            assert request.output == expected[: request.num_output] and request.finish_reason == "abort"
        else:
            assert request.output == expected and request.finish_reason == "length"
    assert_idle(engine)


def test_a_preempted_request_finds_what_it_had_computed():
    logits_of = markov()
    engine = tag_engine(logits_of, slots=64, page_size=1, max_num_seqs=6, context_length=64)
    requests = run(engine, [[i, i + 1, i + 2] for i in range(6)], greedy(24))
    preempted = [r for r in requests if r.metrics.preemptions]
    assert preempted and any(r.cached_len > 3 for r in preempted)
    assert all(r.metrics.cached_tokens == 0 for r in requests)


def test_nobody_waits_for_a_prefix_that_is_already_cached():
    engine = tag_engine(page_size=4, max_num_seqs=4, chunked_prefill_size=8)
    shared = [i % 12 for i in range(40)]
    run(engine, [shared], greedy(1))
    slow, quick = (r for tail in ([5] * 30, [6]) for r in engine.add(shared + tail, greedy(4)))
    engine.step()
    assert quick.status is Status.RUNNING and slow.in_prefill
    finish(engine)


def test_the_oldest_prompt_is_read_first():
    engine = tag_engine(max_num_batched_tokens=8, max_num_seqs=4)
    older, younger = (r for p in ([1] * 20, [2] * 20) for r in engine.add(p, greedy(1)))
    while not older.finished:
        engine.step()
    assert younger.kv_len < 8
    finish(engine)


# Aborts from inside a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radix", [True, False])
def test_a_callback_may_abort_another_request_in_the_middle_of_a_step(radix):
    logits_of = markov()
    engine = tag_engine(logits_of, page_size=1, enable_radix_cache=radix, drafter=scripted(logits_of))
    seen = []

    def on_token(event):
        seen.append(event)
        if len(seen) == 2:
            assert engine.abort("b")

    [first] = engine.add([1], greedy(12), request_id="a", on_token=on_token)
    [victim] = engine.add([2], greedy(12), request_id="b")
    [third] = engine.add([3], greedy(12), request_id="c")
    finish(engine)
    assert victim.finish_reason == "abort" and victim.num_output < 12
    assert [r.output for r in (first, third)] == [tag_greedy(logits_of, [i], 12) for i in (1, 3)]
    assert_idle(engine)


def test_a_request_that_aborts_itself_in_a_callback_gets_no_further_token():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of))
    events = []

    def on_token(event):
        events.append(event)
        if len(events) == 3:  # in the middle of an accepted draft
            engine.abort("a")

    [request] = engine.add([1], greedy(12), request_id="a", on_token=on_token)
    finish(engine)
    assert [e.finish_reason for e in events] == [None, None, None, "abort"]
    assert request.num_output == 3 and request.finish_reason == "abort"
    assert_idle(engine)


def test_a_step_inside_a_step_is_refused():
    engine = tag_engine()
    caught = []

    def on_token(event):
        with pytest.raises(RuntimeError, match="running already"):
            engine.step()
        caught.append(event)

    engine.add([1], greedy(2), on_token=on_token)
    finish(engine)
    assert len(caught) == 2


def test_an_exception_of_the_model_passes_through_and_the_next_step_goes_on():
    logits_of = markov()
    engine = tag_engine(logits_of, page_size=4, drafter=scripted(logits_of))
    [request] = engine.add([1, 2, 3, 4, 5], greedy(12))
    real, calls = engine.runner.forward, []

    def forward(step, table):
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("out of luck")
        return real(step, table)

    engine.runner.forward = forward
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            engine.check_integrity()
    assert request.output == tag_greedy(logits_of, request.prompt, 12)
    assert_idle(engine)


def test_an_interrupt_waits_for_the_end_of_the_step():
    engine = tag_engine()
    [request] = engine.add([1, 2], greedy(3))
    real = engine.scheduler.plan

    def plan(k, ahead=False):
        signal.raise_signal(signal.SIGINT)
        return real(k)

    engine.scheduler.plan = plan
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.num_output == 1
    engine.check_integrity()


def test_completions_are_aborted_together_by_the_name_of_their_prompt():
    engine = tag_engine()
    requests = engine.add([1, 2], SamplingParams(n=3, max_tokens=20), request_id="x")
    engine.step()
    assert engine.abort("x.1") and requests[1].finished and not requests[0].finished
    assert engine.abort("x") and all(r.finish_reason == "abort" for r in requests)
    assert not engine.abort("x")


def test_automatic_ids_step_aside():
    engine = tag_engine()
    engine.add([1], GREEDY, request_id="request-0")
    engine.add([1], SamplingParams(n=2), request_id="request-1")
    assert engine.add([1], GREEDY)[0].id == "request-2"
    finish(engine)


# Room ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2, 3, 4])
def test_drafts_leave_room_for_a_prompt_in_the_smallest_budgets(budget):
    logits_of = markov()
    wrong = scripted(logits_of, script=[0])
    engine = tag_engine(logits_of, max_num_batched_tokens=budget, max_num_seqs=2, drafter=wrong)
    engine.add([1], greedy(60))
    engine.step()
    [late] = engine.add([2, 3, 4], greedy(1))
    for _ in range(4):
        engine.step()
    assert late.finished
    finish(engine)


def test_slots_of_rejected_drafts_go_back_for_a_new_request():
    logits_of = markov()
    wrong = scripted(logits_of, script=[0])
    engine = tag_engine(logits_of, slots=64, page_size=1, context_length=64, drafter=wrong, candidate_length=60)
    engine.add([1], greedy(60))
    for _ in range(3):
        engine.step()
    [late] = engine.add([2] * 10, greedy(1))
    for _ in range(2):
        engine.step()
    assert late.finished
    finish(engine)


def test_drafts_may_use_the_whole_budget_when_no_prompt_is_to_be_read():
    logits_of = markov()
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 1, "drafter": scripted(logits_of), "candidate_length": 7}
    engine = tag_engine(logits_of, **options)
    run(engine, [[1, 2], [3, 4]], greedy(17))  # the second one waits, but there is no place for it
    assert engine.runner.steps[1][0][-1] == 7


def test_a_short_beginning_in_common_is_not_waited_for():
    engine = tag_engine(page_size=4, max_num_batched_tokens=32, chunked_prefill_size=2)
    shared = [1, 2, 3, 4]
    first, second = (r for tail in ([5] * 20, [6] * 20) for r in engine.add(shared + tail, greedy(1)))
    engine.step()
    assert first.status is second.status is Status.RUNNING
    finish(engine)


def test_drafts_get_pages_again_when_the_one_that_lacked_them_is_gone():
    logits_of = markov()
    wrong = scripted(logits_of, script=[0])
    engine = tag_engine(logits_of, slots=16, page_size=4, context_length=16, max_num_seqs=3, drafter=wrong)
    engine.add([1, 2], greedy(12))
    [head] = engine.add([2] * 13, greedy(1))
    engine.step()
    assert head.status is Status.WAITING and engine.pool.num_free_pages == 3
    engine.abort(head.id)
    engine.step()
    engine.step()
    assert engine.runner.steps[1:] == [[("request-0", 2, 1, 1)], [("request-0", 3, 1, 4)]]
    finish(engine)


def test_a_shared_beginning_is_waited_for_and_no_longer():
    engine = tag_engine(
        slots=2048, context_length=1024, page_size=4, max_num_batched_tokens=32, chunked_prefill_size=16
    )
    shared = [i % 12 for i in range(16)]
    [long] = engine.add(shared + [1] * 800, greedy(1))
    for _ in range(2):
        engine.step()
    short, other = (r for p in ([*shared, 2], [7, 7]) for r in engine.add(p, greedy(1)))
    for _ in range(2):
        engine.step()
    assert short.finished and other.finished and not long.finished
    assert short.metrics.cached_tokens == 16
    finish(engine)


def test_slack_in_the_last_page_is_used_for_drafts_when_no_page_is_free():
    logits_of = markov()
    engine = tag_engine(logits_of, slots=16, page_size=4, context_length=16, drafter=scripted(logits_of, script=[0]))
    engine.add([1, 2, 3, 4, 5], greedy(8))
    engine.add([4], greedy(8))
    engine.step()
    engine.step()
    assert engine.pool.num_free_pages == 0
    assert engine.runner.steps[1] == [("request-0", 5, 1, 4), ("request-1", 1, 1, 2)]  # 2 of its 4 slots were left
    finish(engine)


def test_eviction_takes_no_more_than_is_short():
    engine = tag_engine(slots=8, page_size=1, context_length=8)
    run(engine, [[1, 2, 3, 4]], greedy(2))
    assert engine.pool.num_evictable_pages == 5
    [request] = engine.add([9, 9, 9, 9], greedy(1))
    engine.step()
    assert engine.pool.num_evictable_pages == 4 + 4  # one of the old five went; the new four are cached too
    assert request.finished
