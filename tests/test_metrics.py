"""Every figure has one definition: worked examples, and the same numbers out of a running engine."""

from __future__ import annotations

import pytest
from test_drafters import write_head
from tiny_checkpoints import write_tiny_checkpoint
from tools import GREEDY, finish, markov, run, scripted, tag_engine, tag_greedy

from minispec import LLM, SamplingParams
from minispec.metrics import EngineMetrics, RequestMetrics, RollbackEvent, SpeculationCounts
from minispec.speculative.ngram import NgramDrafter


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, **more)


def test_counts_of_a_worked_example():
    counts = SpeculationCounts()
    for accepted in (3, 1, 0, 2):
        counts.record(drafted=3, accepted=accepted, emitted=accepted + 1)
    assert (counts.drafted, counts.accepted, counts.emitted, counts.verify_rows) == (12, 6, 10, 4)
    assert counts.acceptance_rate == 0.5 and counts.acceptance_length == 2.5
    assert counts.acceptance_by_position == [0.75, 0.5, 0.25]
    assert counts.rollbacks == 3 and counts.forwards_saved == 6


def test_places_are_compared_with_what_was_offered_there():
    counts = SpeculationCounts()
    counts.record(drafted=1, accepted=1, emitted=2)
    counts.record(drafted=3, accepted=2, emitted=3)
    counts.record(drafted=2, accepted=0, emitted=1)
    assert (counts.drafted_at, counts.accepted_at) == ([3, 2, 1], [2, 1, 0])
    assert counts.acceptance_by_position == pytest.approx([2 / 3, 1 / 2, 0])


def test_a_stop_inside_a_draft_is_a_rollback_although_every_draft_was_right():
    counts = SpeculationCounts()
    counts.record(drafted=4, accepted=4, emitted=2)
    assert (counts.rollbacks, counts.accepted, counts.emitted) == (1, 4, 2)
    counts.record(drafted=4, accepted=4, emitted=4)  # the stop is the last draft: nothing written is lost
    assert counts.rollbacks == 1


def test_without_drafts_every_figure_is_zero():
    for figures in (SpeculationCounts(), RequestMetrics()):
        assert figures.acceptance_rate == figures.acceptance_length == 0.0
    assert SpeculationCounts().acceptance_by_position == [] and SpeculationCounts().verification_latency == 0.0
    assert RequestMetrics().rollbacks_per_second == EngineMetrics().rollbacks_per_second == 0.0


def test_times_of_a_worked_example():
    counts = SpeculationCounts()
    for draft, verify in ((2.0, 8.0), (1.0, None), (3.0, 4.0)):  # in the second step the drafter had no idea
        counts.record_seconds(draft, verify)
    assert (counts.draft_seconds, counts.verify_seconds, counts.verify_steps) == (6.0, 12.0, 2)
    assert counts.verification_latency == 6.0


def test_rollbacks_per_second_of_a_worked_example():
    event = RollbackEvent("a", step=2, start=7, slots=(3, 4), drafts=(1, 2), accepted=0)
    assert event.end == 9
    assert RequestMetrics(rollbacks=[event] * 3, finished_s=2.0).rollbacks_per_second == 1.5
    engine = EngineMetrics(wall_seconds=4.0, speculation=SpeculationCounts(rollbacks=6))
    assert engine.rollbacks_per_second == 1.5


# In the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_rollback_says_what_was_undone_and_where(page_size):
    logits_of = markov()
    engine = tag_engine(
        logits_of, page_size=page_size, drafter=scripted(logits_of, script=[3, 1, 0, 2]), candidate_length=3
    )
    [request] = engine.add([1, 2, 3], greedy(20))
    engine.step()
    written = []
    for accepted in (3, 1, 0, 2):
        row = engine.step().rows[0]
        first = row.start + 1
        slots = engine.pool.slots(request)[first + accepted : first + 3].tolist()
        written.append((first + accepted, first + 3, tuple(slots), tuple(row.drafts[accepted:]), accepted))
    events = request.metrics.rollbacks
    assert [(e.start, e.end, e.slots, e.drafts, e.accepted) for e in events] == written[1:]  # 3 of 3: nothing undone
    assert [e.step for e in events] == [3, 4, 5] and {e.request_id for e in events} == {request.id}
    assert [len(e.slots) for e in events] == [2, 3, 1]
    assert request.metrics.speculation.rollbacks == engine.metrics.speculation.rollbacks == 3
    finish(engine)


def test_the_positions_of_a_rollback_are_written_again_by_the_next_step():
    logits_of = markov()
    engine = tag_engine(logits_of, drafter=scripted(logits_of, script=[1, 0]), candidate_length=4)
    [request] = run(engine, [[1, 2, 3]], greedy(12))
    starts = {number: steps[0][1] for number, steps in enumerate(engine.runner.steps, 1)}
    assert len(request.metrics.rollbacks) > 3
    for event in request.metrics.rollbacks:
        assert starts.get(event.step + 1, event.start) == event.start


@pytest.mark.parametrize("stop", ["eos", "stop_token_ids", "max_tokens", "abort"])
def test_an_end_inside_a_draft_undoes_the_drafts_behind_it(stop):
    logits_of = markov(seed=3)
    prompt = [1, 2, 3]
    right = tag_greedy(logits_of, prompt, 16)
    place = next(i for i in range(2, 4) if right[i] not in right[:i])
    engine = tag_engine(logits_of, page_size=1, drafter=scripted(logits_of), eos_ids=[right[place]][: stop == "eos"])
    params = greedy(16, stop_token_ids=[right[place]] if stop == "stop_token_ids" else ())
    seen = []

    def on_token(event):
        seen.append(event.token_id)
        if stop == "abort" and len(seen) == place + 1:
            engine.abort(request.id)

    [request] = engine.add(prompt, params, on_token=on_token)
    engine.step()
    slots = engine.pool.slots
    if stop == "max_tokens":
        propose = engine.drafters[0].propose

        def and_then_less(requests, lengths):  # drafts are clipped to the limit, so it has to move under them
            request.max_len = len(prompt) + place + 1
            return propose(requests, lengths)

        engine.drafters[0].propose = and_then_less
    held = []
    engine.pool.slots = lambda r: held.append(slots(r).tolist()) or slots(r)
    engine.step()
    assert request.finished or stop == "abort"
    [event] = request.metrics.rollbacks
    first = len(prompt) + 1
    assert request.output == right[: place + 1]
    assert (event.start, event.end, event.accepted) == (first + place, first + 4, 4)
    assert list(event.drafts) == right[place + 1 : 5] and list(event.slots) == held[0][first + place : first + 4]


def test_plain_decoding_rolls_nothing_back_and_a_bad_row_all_drafts_from_it_on():
    plain = run(tag_engine(), [[1, 2]])[0]
    assert plain.metrics.rollbacks == [] and plain.metrics.speculation.rollbacks == 0
    good = markov()
    broken = tag_engine(lambda t: [float("nan")] * 12 if len(t) > 5 else good(t), drafter=scripted(good))
    [failed] = run(broken, [[1, 2, 3]])
    whole = tag_greedy(good, [1, 2, 3], 5)
    [undone] = failed.metrics.rollbacks
    assert failed.finish_reason == "error" and failed.output == whole[:3]
    assert (undone.start, undone.drafts, undone.accepted) == (6, tuple(whole[3:]), 2)


def test_times_are_counted_once_for_the_engine_and_in_full_for_each_request():
    """By a clock that advances one second whenever it is read, each phase of a step takes one second."""
    engine = tag_engine(markov(), drafter=scripted(markov()))
    requests = run_with_ticks(engine, [[1, 2], [3, 4]], greedy(12))
    counts = engine.metrics.speculation
    steps = sum(any(drafts for *_, drafts in step) for step in engine.runner.steps)
    assert steps == 2 and len(engine.runner.steps) == 4  # the first and the last step of 12 tokens draft nothing
    assert (counts.draft_seconds, counts.verify_seconds, counts.verify_steps) == (steps, 2 * steps, steps)
    assert counts.verification_latency == 2.0 and counts.verify_rows == 4
    for request in requests:
        its = request.metrics.speculation
        assert (its.draft_seconds, its.verify_seconds, its.verify_steps) == (steps, 2 * steps, steps)


def test_text_without_a_repetition_costs_neither_draft_time_nor_a_verification():
    engine = tag_engine(lambda tokens: [float(t == len(tokens) % 12) for t in range(12)], drafter=NgramDrafter(3, 2))
    [request] = run_with_ticks(engine, [[7, 7]], greedy(5))
    counts = request.metrics.speculation
    assert counts.verify_rows == counts.verify_steps == counts.verify_seconds == 0
    assert counts.draft_seconds == engine.metrics.speculation.draft_seconds == 0
    assert engine.metrics.choices == {"no match": 3, "room": 1} and engine.metrics.lengths == {0: 5}


def run_with_ticks(engine, prompts, params):
    with pytest.MonkeyPatch.context() as patch:
        ticks = iter(range(1_000_000))
        patch.setattr("minispec.engine.time.perf_counter", lambda: float(next(ticks)))
        return run(engine, prompts, params)


def test_forwards_saved_by_one_request_are_those_that_plain_decoding_would_have_added():
    logits_of = markov()
    plain, engine = tag_engine(logits_of), tag_engine(logits_of, drafter=scripted(logits_of, script=[3, 1, 0]))
    [slow], [fast] = run(plain, [[1, 2, 3]]), run(engine, [[1, 2, 3]])
    saved = plain.metrics.steps - engine.metrics.steps
    assert engine.metrics.forwards_saved == fast.metrics.speculation.forwards_saved == saved > 0
    assert plain.metrics.forwards_saved == slow.metrics.speculation.forwards_saved == 0


def test_forwards_of_a_batch_are_shared_and_so_is_what_is_saved():
    """Four requests in step, all drafts right: the batch needs 4 forwards in place of 16, not 4 x 12 fewer."""
    logits_of = markov()
    prompts = [[i, i + 1, 3] for i in range(4)]
    plain, engine = tag_engine(logits_of), tag_engine(logits_of, drafter=scripted(logits_of), candidate_length=4)
    run(plain, prompts), run(engine, prompts)
    assert (plain.metrics.steps, engine.metrics.steps) == (16, 4)
    assert engine.metrics.forwards_saved == 12 and engine.metrics.speculation.forwards_saved == 48


def test_a_step_stands_for_the_mean_of_what_its_requests_emitted():
    """One request emits 5 tokens, the other 1: six tokens, for which plain decoding of two needs three forwards."""
    logits_of = markov()
    right = scripted(logits_of)
    engine = tag_engine(logits_of, drafter=right)
    engine.add([1, 2], GREEDY), engine.add([3, 4], GREEDY)
    engine.step()
    assert engine.metrics.forwards_saved == 0  # the first tokens come from the prompts
    honest = right._draft
    right._draft = lambda r, k: [t if r.id == "request-0" else (t + 1) % 12 for t in honest(r, k)]
    before = engine.metrics.output_tokens
    engine.step()
    emitted = engine.metrics.output_tokens - before
    assert emitted == 6 and engine.metrics.forwards_saved == 2
    finish(engine)


def test_weight_bytes_saved_are_net_of_what_the_draft_model_reads(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "target", "llama")
    config = LLM(str(folder), kv_cache_tokens=64).model_config
    head = write_head(tmp_path / "head.safetensors", config)
    params = greedy(10, ignore_eos=True)
    plain = LLM(str(folder), dtype="float32", kv_cache_tokens=512)
    plain.generate([5, 6, 7], params)
    for speculative in (
        {"draft_model": str(folder), "candidate_length": 2},
        {"draft_model": "mtp", "draft_head": str(head), "candidate_length": 2},
    ):
        llm = LLM(str(folder), dtype="float32", kv_cache_tokens=512, speculative_config=speculative)
        [out] = llm.generate([5, 6, 7], params)
        metrics, target = llm.metrics(), llm.engine.runner.weight_bytes
        assert metrics.weight_bytes_saved == plain.metrics().weight_bytes_read - metrics.weight_bytes_read
        assert metrics.weight_bytes_saved == out.metrics.weight_bytes_saved(target)
    # The target as its own draft: 9 decoded tokens in 3 steps save 6 forwards, and 6 drafts read as much.
    assert plain.metrics().weight_bytes_saved == 0
    counts = SpeculationCounts(verify_rows=3, emitted=9)
    assert RequestMetrics(draft_bytes=240, speculation=counts).weight_bytes_saved(100) == 6 * 100 - 240


def test_the_front_door_shows_every_figure(tmp_path):
    folder = write_tiny_checkpoint(tmp_path, "llama")
    speculative = {"candidate_length": 3, "ngram_min": 1, "adaptive": False}
    llm = LLM(str(folder), dtype="float32", kv_cache_tokens=512, speculative_config=speculative)
    [out] = llm.generate("abc abc abc abc", greedy(40, ignore_eos=True))
    metrics, counts = llm.metrics(), out.metrics.speculation
    assert metrics.speculation.drafted == counts.drafted == out.metrics.drafted > 0
    assert metrics.speculation.emitted == counts.emitted
    assert metrics.acceptance_length == counts.acceptance_length > 1
    assert metrics.acceptance_rate == counts.acceptance_rate > 0
    assert metrics.acceptance_by_position == counts.acceptance_by_position
    assert metrics.speculation.rollbacks == len(out.metrics.rollbacks) == counts.rollbacks > 0
    assert metrics.rollbacks_per_second > 0 and out.metrics.rollbacks_per_second > 0
    assert 0 < metrics.speculation.draft_seconds <= metrics.seconds["draft"]
    assert 0 < metrics.verification_latency == counts.verification_latency
    assert metrics.forwards_saved == pytest.approx(counts.forwards_saved) and metrics.draft_forwards == 0
    assert metrics.weight_bytes_saved == pytest.approx(counts.forwards_saved * llm.engine.runner.weight_bytes)
