"""Overlap: the same results as the normal loop, in less time, and nothing given back that a step may still touch.

Times are those of a virtual clock, so they are exact. Races are looked for on the worker thread.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from test_drafters import config_for, tiny  # noqa: F401  (a fixture)
from test_text import pieces_tokenizer
from tiny_checkpoints import write_tiny_checkpoint
from tools import (
    TagRunner,
    assert_idle,
    assert_same_ids,
    finish,
    markov,
    run,
    scripted,
    tag_engine,
    tag_greedy,
)

from minispec import LLM, SamplingParams
from minispec.config import ConfigError, EngineConfig
from minispec.device import InlineDevice, ThreadDevice, VirtualDevice
from minispec.engine import Engine
from minispec.kv.pool import KVPool
from minispec.trace import DEVICE, HOST, IDLE, Event, Trace


@pytest.fixture(autouse=True)
def watchdog():
    """A deadlock ends the test instead of the patience."""

    def bark(number, frame):
        raise TimeoutError("the engine hangs")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def make(logits_of, *, overlap=True, drafter=None, device=None, **options) -> Engine:
    return tag_engine(logits_of, drafter=drafter, enable_overlap=overlap, device=device, **options)


# Jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_device", [InlineDevice, lambda: ThreadDevice(torch.device("cpu")), lambda: VirtualDevice({})]
)
def test_jobs_run_in_order_and_their_errors_belong_to_the_waiter(make_device):
    device, done = make_device(), []

    def job(number):
        def work(watch):
            with watch("part"):
                done.append(number)
            if number == 2:
                raise ValueError("two")
            return number * 10

        return work

    flights = [device.submit(job(n)) for n in range(5)]
    assert [f.wait() for f in flights[:2]] == [0, 10]
    with pytest.raises(ValueError, match="two"):
        flights[2].wait()
    assert [f.wait() for f in flights[3:]] == [30, 40] and flights[4].peek() == 40 and done == list(range(5))
    assert [span.name for span in flights[0].spans] == ["part"]
    device.close()


def test_the_worker_runs_beside_the_caller_without_gradients():
    device, go = ThreadDevice(torch.device("cpu")), threading.Event()

    def work(watch):
        go.wait(10)
        return torch.is_inference_mode_enabled(), threading.current_thread() is threading.main_thread()

    flight = device.submit(work)
    go.set()  # would never be reached if submit waited
    assert flight.wait() == (True, False)
    device.close()


def test_the_virtual_clock_moves_by_its_dials():
    device = VirtualDevice({"draft": 2, "forward": 10, "plan": 3})

    def job(watch):
        for name in ("draft", "forward", "other"):
            with watch(name):
                pass

    first, second = device.submit(job), device.submit(job)
    assert [(s.name, s.start, s.end) for s in first.spans] == [("draft", 0, 2), ("forward", 2, 12), ("other", 12, 12)]
    device.spend("plan"), device.spend("nothing")
    assert device.now() == 3
    first.wait()
    assert device.now() == 12 and second.spans[0].start == 12
    second.wait()
    assert device.now() == 24
    device.spend("plan")
    assert device.submit(job).spans[0].start == 27  # the device was idle


# Time --------------------------------------------------------------------------------------------------------------


def period(overlap: bool, drafter=None, steps: int = 40, batch: int = 2, **dials: float) -> float:
    """Ticks of a step in the long run."""
    engine = make(
        markov(), overlap=overlap, drafter=drafter, device=VirtualDevice(dials), slots=4096, context_length=1024
    )
    for first in range(batch):
        engine.add([1, first], greedy(1000, ignore_eos=True))
    for _ in range(5):
        engine.step()
    started = engine.device.now()
    for _ in range(steps):
        engine.step()
    return (engine.device.now() - started) / steps


@pytest.mark.parametrize("plan,settle,forward", [(2, 3, 10), (2, 3, 5), (2, 3, 4), (7, 8, 1), (0, 1, 1)])
def test_a_plain_step_takes_the_longer_of_host_and_device(plan, settle, forward):
    dials = {"plan": plan, "settle": settle, "forward": forward}
    assert period(False, **dials) == plan + settle + forward
    assert period(True, **dials) == pytest.approx(max(plan + settle, forward), abs=1 / 40)


@pytest.mark.parametrize("plan,settle,draft,forward", [(2, 3, 4, 10), (2, 3, 1, 4), (4, 6, 1, 2)])
def test_a_speculating_step_takes_the_longer_of_host_and_device(plan, settle, draft, forward):
    dials = {"plan": plan, "settle": settle, "draft": draft, "forward": forward}
    drafter = scripted(markov(), script=[3, 0, 2])
    assert period(False, drafter, **dials) == plan + settle + draft + forward
    assert period(True, drafter, **dials) == pytest.approx(max(plan + settle, draft + forward), abs=1 / 40)


def test_what_must_be_known_first_is_waited_for():
    """Choosing drafts and advancing stay on the critical path, and only they."""
    dials = {"plan": 2, "settle": 3, "forward": 10, "draft": 1, "choose": 0.5, "advance": 0.25}
    assert period(True, scripted(markov()), **dials) == pytest.approx(11.75, abs=1 / 40)


def test_the_trace_shows_the_device_idle_without_overlap_and_busy_with_it(tmp_path):
    shares = []
    for overlap in (False, True):
        device = VirtualDevice({"plan": 2, "settle": 3, "forward": 10})
        engine = make(markov(), overlap=overlap, device=device, enable_trace=True)
        run(engine, [[1, 2]], greedy(40))
        shares.append(engine.trace.idle_share(DEVICE))
        host, lane = engine.trace.lane(HOST), engine.trace.lane(DEVICE)
        assert {e.name for e in host} == {"plan", "advance", "settle"}
        assert {e.name for e in lane} == {"forward", "verify", "copy"}
        assert [e.step for e in lane if e.name == "forward"] == list(range(1, 41))
        assert all(e.rows == 1 and e.request_ids == ("request-0",) for e in lane)
        engine.trace.to_perfetto(tmp_path / "trace.json")
        written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        forwards = [e for e in written if e["name"] == "forward"]
        gaps = [e for e in written if e["name"] == IDLE and e["tid"] == 1]
        assert [(e["dur"], e["args"]["step"]) for e in gaps] == ([] if overlap else [(5e6, n) for n in range(2, 41)])
        assert len(forwards) == 40 and forwards[0]["dur"] == 10e6 and forwards[1]["ts"] > forwards[0]["ts"]
    assert shares[0] == pytest.approx(1 / 3, abs=0.01) and shares[1] < 0.01


def test_results_on_their_way_to_the_host_are_a_part_of_the_device():
    device = VirtualDevice({"forward": 10, "copy": 2})
    engine = make(markov(), device=device, enable_trace=True)
    run(engine, [[1, 2]], greedy(3))
    spans = [(e.name, e.start, e.end) for e in engine.trace.lane(DEVICE) if e.end > e.start]
    assert spans == [
        (name, 12 * n + a, 12 * n + b) for n in range(3) for name, a, b in (("forward", 0, 10), ("copy", 10, 12))
    ]
    assert engine.snapshot().seconds["copy"] == 6


def test_gaps_of_a_lane():
    trace = Trace()
    for start, end in ((0, 2), (2, 3), (5, 6)):
        trace.events.append(Event(DEVICE, "forward", start, end, end, 1, 1, ("a",)))
    assert trace.idle() == [Event(DEVICE, IDLE, 3, 5, 6, 1, 1, ("a",))]
    assert trace.idle_share() == pytest.approx(1 / 3) and trace.idle(shortest=2) == []
    assert Trace().idle_share() == 0 and Trace(2).events.maxlen == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_clock_that_stands_still_is_no_measurement(overlap, recwarn):
    logits_of = markov()
    config = {"candidate_length": 4}  # adaptive
    engine = make(
        logits_of,
        overlap=overlap,
        drafter=scripted(logits_of, script=[2, 0, 4]),
        device=VirtualDevice({}),
        speculative_config=config,
        slots=1024,
        context_length=512,
    )
    [request] = run(engine, [[1, 2]], greedy(300))
    assert request.output == tag_greedy(logits_of, [1, 2], 300) and not recwarn.list
    assert request.metrics.drafted > 100 and engine.snapshot().speed_up == 0.0


# The same results --------------------------------------------------------------------------------------------------


def both(logits_of, prompts, params, **options):
    """(normal, overlapping) engines after the same requests, and the requests."""
    engines = [make(logits_of, overlap=overlap, **options) for overlap in (False, True)]
    return [(engine, run(engine, prompts, params)) for engine in engines]


@pytest.mark.parametrize("drafted", [False, True])
def test_ids_ends_and_cached_tokens_are_those_of_the_normal_loop(drafted):
    logits_of, rng = markov(seed=5), random.Random(0)
    prompts = [[rng.randrange(12) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 1.0]),
            seed=n,
            max_tokens=rng.randint(1, 20),
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=rng.choice([[], [3]]),
            frequency_penalty=rng.choice([0, 0, 1.0]),
            logprobs=rng.choice([None, 2]),
        )
        for n in range(20)
    ]
    drafter = scripted(logits_of, script=[2, 0, 4]) if drafted else None
    options = {"eos_ids": [7], "max_num_seqs": 4, "max_num_batched_tokens": 16, "chunked_prefill_size": 8}
    if drafted:
        options["speculative_config"] = {"candidate_length": 3, "adaptive": False, "verification": "match"}
    (_, normal), (engine, overlapping) = both(logits_of, prompts, params, drafter=drafter, **options)
    for a, b in zip(normal, overlapping, strict=True):
        assert (a.output, a.finish_reason, len(a.kinds)) == (b.output, b.finish_reason, len(b.kinds))
        assert [(p.logprob, p.top) for p in a.logprobs] == [(p.logprob, p.top) for p in b.logprobs]
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_finished_request_leaves_no_token_more_in_the_cache(overlap, page_size):
    logits_of = markov()
    engine = make(logits_of, overlap=overlap, page_size=page_size)
    [first] = run(engine, [[0, 1, 2, 3]], greedy(2))
    [again] = run(engine, [[0, 1, 2, 3, *first.output, 6]], greedy(1))
    assert again.metrics.cached_tokens == 5 // page_size * page_size


@pytest.mark.parametrize("drafted", [False, True])
def test_the_same_prompt_again_in_the_moment_its_first_owner_ends(drafted):
    logits_of = markov()
    cached = []
    for overlap in (False, True):
        engine = make(logits_of, overlap=overlap, page_size=1, drafter=scripted(logits_of) if drafted else None)
        requests = []

        def resubmit(event, engine=engine, requests=requests):
            if event.finish_reason and len(requests) < 4:
                requests.extend(engine.add([1, 2, 3, 4, 5], greedy(9), on_token=resubmit))

        requests += engine.add([1, 2, 3, 4, 5], greedy(9), on_token=resubmit)
        engine.add([7, 7], greedy(60))
        finish(engine)
        assert all(r.output == tag_greedy(logits_of, [1, 2, 3, 4, 5], 9) for r in requests)
        cached.append([r.metrics.cached_tokens for r in requests])
    assert cached[0] == cached[1] == [0, 4, 4, 4]


def test_every_drafter_gives_the_same_ids_with_and_without_overlap(tiny):  # noqa: F811
    folder, _, prompts, expected = tiny
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for kind in ("mtp", "chain", "mtp+ngram", "itself", "early-exit"):
        for adaptive in (False, True):
            llm = LLM(
                str(folder),
                dtype="float32",
                kv_cache_tokens=1024,
                check_every_step=True,
                speculative_config=config_for(kind, tiny) | {"candidate_length": 3, "adaptive": adaptive},
            )
            for output, (ids, margin) in zip(llm.generate(prompts, params), expected, strict=True):
                assert_same_ids(output.token_ids, ids, margin)
            assert llm.metrics().drafter_faults == 0
            assert_idle(llm.engine)
            llm.close()


def test_more_batches_alive_than_steps_keep_their_tokens_apart():
    """Three times as many requests as fit, their prompts read in chunks between the others' tokens."""
    logits_of = markov()
    engine = make(logits_of, max_num_seqs=3, max_num_batched_tokens=8, chunked_prefill_size=5)
    prompts = [[n, *range(n)] for n in range(1, 10)]
    requests = run(engine, prompts, [greedy(3 + n) for n in range(9)])
    assert [r.output for r in requests] == [tag_greedy(logits_of, p, 3 + n) for n, p in enumerate(prompts)]


# Ends in flight ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_string_ends_a_request_whose_next_step_is_launched(drafted):
    logits_of = markov(seed=4)
    expected = tag_greedy(logits_of, [1, 2], 16)
    tokenizer, _ = pieces_tokenizer("abcdefghijkl")
    stop = tokenizer.decode(expected[4:6])
    drafter = scripted(logits_of) if drafted else None
    (_, [a]), (engine, [b]) = both(
        logits_of, [[1, 2]], greedy(16, stop=[stop]), drafter=drafter, tokenizer=tokenizer, page_size=1
    )
    assert a.finish_reason == b.finish_reason == "stop" and a.output == b.output and a.text.text == b.text.text
    assert len(b.output) < 16 and len(b.kinds) == len(b.output)
    [again] = run(engine, [[1, 2, *b.output, 0]], greedy(1))
    assert again.metrics.cached_tokens == 2 + len(b.output) - 1
    assert_idle(engine)


def test_an_end_token_costs_one_wasted_row_and_no_token():
    logits_of = markov(seed=3)
    expected = tag_greedy(logits_of, [1, 2], 16)
    place = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    rows = []
    for overlap in (False, True):
        engine = make(logits_of, overlap=overlap, eos_ids=[expected[place]])
        [request] = run(engine, [[1, 2]], greedy(16))
        assert request.output == expected[: place + 1] and request.finish_reason == "stop"
        rows.append(engine.metrics.computed_tokens)
        assert_idle(engine)
    assert rows[1] == rows[0] + 1
    # The last token of a length is known beforehand: nothing is wasted.
    rows = [make(logits_of, overlap=overlap) for overlap in (False, True)]
    assert len({run(engine, [[1, 2]], greedy(9)) and engine.metrics.computed_tokens for engine in rows}) == 1


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("moment", range(12))
def test_abort_between_launch_and_result(drafted, moment):
    logits_of = markov(seed=3)
    expected = tag_greedy(logits_of, [1, 2], 16)
    eos = [expected[5]] if expected[5] not in expected[:5] else []
    events = []
    engine = make(logits_of, drafter=scripted(logits_of, script=[1, 0, 2]) if drafted else None, eos_ids=eos)
    [victim] = engine.add([1, 2], greedy(16), on_token=events.append, request_id="victim")
    [other] = engine.add([5, 6, 7], greedy(16))
    for _ in range(moment):
        engine.step()
    before = victim.finished
    assert engine.abort("victim") == (not before) and not engine.abort("victim") and not engine.abort("nobody")
    assert victim.finished and victim.finish_reason in ("abort", "stop", "length")
    finish(engine)
    assert [e.finish_reason for e in events if e.finish_reason] == [victim.finish_reason]
    assert victim.output == expected[: victim.num_output]
    ids = tag_greedy(logits_of, [5, 6, 7], 16, eos)
    assert other.output == ids
    assert_idle(engine)


@pytest.mark.parametrize("drafted", [False, True])
def test_abort_from_a_callback_at_every_token(drafted):
    logits_of = markov()
    expected = tag_greedy(logits_of, [1, 2], 12)
    for place in range(12):
        engine = make(logits_of, drafter=scripted(logits_of, script=[3, 1]) if drafted else None)
        seen = []

        def stop_here(event, engine=engine, seen=seen, place=place):
            seen.append(event)
            if len(seen) == place + 1:
                assert engine.abort("x") == (place < 11)
                engine.abort("x")

        [request] = engine.add([1, 2], greedy(12), on_token=stop_here, request_id="x")
        [other] = engine.add([3, 4], greedy(12))
        finish(engine)
        assert request.output == expected[: place + 1], place
        assert request.finish_reason == ("length" if place == 11 else "abort")
        assert [e.finish_reason for e in seen].count(request.finish_reason) == 1
        assert other.output == tag_greedy(logits_of, [3, 4], 12)
        assert_idle(engine)


@pytest.mark.parametrize("drafted", [False, True])
def test_preemption_waits_for_the_step_in_flight(drafted):
    logits_of = markov()
    drafter = scripted(logits_of, script=[0, 2, 1]) if drafted else None
    prompts = [[n, n + 1, 2] for n in range(6)]
    (_, normal), (engine, requests) = both(
        logits_of, prompts, greedy(24), slots=64, page_size=4, max_num_seqs=6, context_length=64, drafter=drafter
    )
    assert engine.scheduler.preemptions > 0
    assert [r.output for r in requests] == [r.output for r in normal] == [tag_greedy(logits_of, p, 24) for p in prompts]
    assert_idle(engine)


def test_an_error_of_the_model_loses_no_request():
    logits_of = markov()
    for broken_at in range(1, 12):
        engine = make(logits_of, max_num_batched_tokens=16, chunked_prefill_size=4)
        forward, calls = engine.runner.forward, []

        def flaky(step, table, forward=forward, calls=calls, broken_at=broken_at):
            calls.append(1)
            if len(calls) == broken_at:
                raise RuntimeError("the device is gone")
            return forward(step, table)

        engine.runner.forward = flaky
        prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 4], [9, 8, 7, 6, 5]]
        requests = [engine.add(p, greedy(8))[0] for p in prompts]
        failures = 0
        while engine.has_work:
            try:
                engine.step()
            except RuntimeError:
                failures += 1
                engine.check_integrity()
        assert failures == (broken_at <= len(calls))
        assert [r.output for r in requests] == [tag_greedy(logits_of, p, 8) for p in prompts], broken_at
        assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_an_error_in_a_callback_loses_nobodys_token(overlap, drafted):
    logits_of = markov()
    engine = make(logits_of, overlap=overlap, drafter=scripted(logits_of, script=[2, 0]) if drafted else None)
    heard: dict[str, list] = {"a": [], "b": [], "c": []}

    def listen(name):
        def on_token(event):
            heard[name].append(event)
            if name == "b" and len(heard["b"]) in (2, 5):
                raise OSError("the consumer is gone")

        return on_token

    requests = [engine.add([n, 3], greedy(10), on_token=listen(name))[0] for n, name in enumerate(heard)]
    errors = 0
    while engine.has_work:
        try:
            engine.step()
        except OSError:
            errors += 1
            engine.check_integrity()
    assert 1 <= errors <= 2  # both may come in one step
    for request, events in zip(requests, heard.values(), strict=True):
        assert [e.token_id for e in events] == request.output == tag_greedy(logits_of, request.prompt, 10)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_callback_may_abort_another_request_before_its_token_is_seen(overlap):
    logits_of = markov()
    engine = make(logits_of, overlap=overlap)
    seen = []

    def abort_b(event):
        seen.append(event)
        if len(seen) == 4:
            engine.abort("b")

    [a] = engine.add([1, 2], greedy(10), on_token=abort_b, request_id="a")
    heard = []
    [b] = engine.add([3, 4], greedy(10), on_token=heard.append, request_id="b")
    finish(engine)
    assert b.finish_reason == "abort" and b.output == [e.token_id for e in heard[:-1]] and len(b.kinds) == len(b.output)
    assert b.output == tag_greedy(logits_of, [3, 4], 10)[: b.num_output] and a.num_output == 10
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size,length", [(1, 3), (4, 8), (4, 7)])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_callback_aborts_a_request_at_the_end_of_its_prompt(overlap, page_size, length, drafted):
    logits_of = markov()
    options = {"page_size": page_size, "chunked_prefill_size": 1 if page_size == 1 else None}
    drafter = scripted(logits_of) if drafted else None
    engine = make(logits_of, overlap=overlap, drafter=drafter, **options)
    [a] = engine.add([1, 2], greedy(8), on_token=lambda event: engine.abort("b"))
    [b] = engine.add([3] * length, greedy(8), request_id="b")
    finish(engine)
    assert a.output == tag_greedy(logits_of, [1, 2], 8) and b.finish_reason == "abort"
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_callback_aborts_the_only_other_request(overlap):
    logits_of = markov()
    engine = make(logits_of, overlap=overlap)
    [a] = engine.add([1, 2], greedy(3), on_token=lambda event: event.finish_reason and engine.abort("b"))
    [b] = engine.add([3, 4], greedy(3), request_id="b")
    finish(engine)
    assert a.finish_reason == "length" and b.finish_reason in ("abort", "length")
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_completion_of_a_group_aborts_the_group(overlap):
    engine = make(markov(), overlap=overlap)
    params = SamplingParams(n=4, max_tokens=8, seed=1)
    requests = engine.add([1, 2], params, on_token=lambda event: engine.abort("g"), request_id="g")
    with pytest.raises(ConfigError, match="'g' is already running"):
        engine.add([1, 2], greedy(2), request_id="g")
    finish(engine)
    assert [request.finish_reason for request in requests] == ["abort"] * 4
    assert_idle(engine)


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_between_steps_loses_no_committed_token(steps):
    logits_of = markov()
    engine, heard = make(logits_of), []
    [a] = engine.add([1, 2], greedy(3), on_token=heard.append)
    [b] = engine.add([3, 4], greedy(20))
    for _ in range(steps):
        engine.step()
    engine.abort(a.id)
    finish(engine)
    assert (
        [e.token_id for e in heard if e.token_id >= 0] == a.output == tag_greedy(logits_of, [1, 2], 3)[: a.num_output]
    )
    assert a.finish_reason == ("length" if a.num_output == 3 else "abort")
    assert engine.metrics.output_tokens == a.num_output + b.num_output
    assert_idle(engine)


def test_abort_and_close_end_requests_whatever_others_raise():
    def raising(event):
        raise OSError("the consumer is gone")

    for end in ("abort", "close"):
        engine = make(markov())
        [a] = engine.add([1, 2], greedy(20), on_token=raising)
        [b] = engine.add([3, 4], greedy(20), request_id="b")
        with pytest.raises(OSError):
            engine.step()
            engine.step()
        [worker] = engine.device._worker._threads
        with pytest.raises(OSError):
            engine.abort("b") if end == "abort" else engine.close()
        assert b.finish_reason == "abort" and worker.is_alive() == (end == "abort")
        if end == "close":
            assert a.finish_reason == "abort" and not engine.requests

    engine = make(markov())
    [a] = engine.add([1, 2], greedy(20), request_id="a")
    forward, calls = engine.runner.forward, []

    def third_time_unlucky(step, table):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the device is gone")
        return forward(step, table)

    engine.runner.forward = third_time_unlucky
    engine.step()
    engine.step()  # the third step is launched
    with pytest.raises(ZeroDivisionError):
        engine.abort("a")
    assert a.finish_reason == "abort" and not engine.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_engine_takes_nothing(overlap):
    engine, late = make(markov(), overlap=overlap), []
    [request] = engine.add([1, 2], greedy(20), on_token=lambda event: event.finish_reason and late.append(again()))

    def again():
        with pytest.raises(ConfigError, match="the engine is closed"):
            engine.add([3, 4], greedy(5))
        return True

    engine.step()
    engine.close()  # the callback hears of the end, and asks for more
    assert request.finish_reason == "abort" and late == [True] and again()
    engine.close()
    assert not engine.has_work and not engine.step().rows and not engine.abort(request.id)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_cannot_be_read_ends_its_request_only(overlap):
    logits_of = markov()
    tokenizer, _ = pieces_tokenizer("abcdefghijkl")
    engine = make(logits_of, overlap=overlap, tokenizer=tokenizer)
    [sick] = engine.add([1, 2], greedy(10))
    heard = []
    [well] = engine.add([3, 4], greedy(10), on_token=heard.append)
    push, calls = sick.text.push, []

    def broken(token, **options):
        calls.append(token)
        if len(calls) == 3:
            raise RuntimeError("no such piece")
        return push(token, **options)

    sick.text.push = broken
    finish(engine)
    assert sick.finish_reason == "error" and "no such piece" in sick.error and sick.num_output == 3
    assert [e.token_id for e in heard] == well.output == tag_greedy(logits_of, [3, 4], 10)
    assert_idle(engine)


def test_no_slot_of_a_launched_step_is_free():
    """Looked at from inside the forward, while the host goes on."""
    logits_of = markov()
    runner_forward = TagRunner.forward
    engine = make(logits_of, slots=96, page_size=4, context_length=64, max_num_seqs=6, drafter=scripted(logits_of))
    checked = []

    def looking(step, table):
        result = runner_forward(engine.runner, step, table)
        time.sleep(0.0005)
        for row in step.rows:
            assert row.request.table_row is not None, f"{row.request.id} was released in flight"
            slots = table[row.request.table_row, row.start : row.kv_len] // 4
            assert not engine.pool.allocator._is_free[slots].any()
            checked.append(len(slots))
        return result

    engine.runner.forward = looking
    rng = random.Random(2)
    requests = [engine.add([n % 12, 3], greedy(rng.randint(1, 20)))[0] for n in range(40)]
    while engine.has_work:
        engine.step()
        if rng.random() < 0.1 and engine.requests:
            engine.abort(rng.choice(list(engine.requests)))
    assert len(checked) > 100 and all(r.output == tag_greedy(logits_of, r.prompt, 30)[: r.num_output] for r in requests)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_thousand_random_requests_with_aborts_on_the_worker_thread(drafted):
    rng = random.Random(int(drafted))
    logits_of = markov(vocab_size=12)
    engine = make(
        logits_of,
        slots=128,
        page_size=4,
        context_length=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        chunked_prefill_size=9,
        drafter=scripted(logits_of, script=[0, 4, 1, 2]) if drafted else None,
    )
    stems = [[rng.randrange(12) for _ in range(20)] for _ in range(5)]
    requests, aborted = [], set()
    while len(requests) < 1000 or engine.has_work:
        while len(requests) < 1000 and len(engine.scheduler.waiting) < 6:
            prompt = rng.choice(stems)[: rng.randrange(21)] + [rng.randrange(12) for _ in range(rng.randint(1, 12))]
            requests += engine.add(prompt, greedy(rng.randint(1, 20)))
        engine.step()
        if engine.requests and rng.random() < 0.05:
            victim = rng.choice(list(engine.requests))
            engine.abort(victim)
            aborted.add(victim)
    assert engine.scheduler.preemptions > 5 and len(aborted) > 20
    for request in requests:
        expected = tag_greedy(logits_of, request.prompt, request.params.max_tokens)
        assert request.output == expected[: request.num_output]
        assert request.finish_reason == ("abort" if request.num_output < len(expected) else request.finish_reason)
        assert request.id in aborted or request.finish_reason == "length"
    assert_idle(engine)


# The front door ----------------------------------------------------------------------------------------------------


def test_overlap_is_on_by_default_and_the_trace_is_asked_for(tmp_path):
    folder = str(write_tiny_checkpoint(tmp_path, "llama"))
    assert EngineConfig().enable_overlap
    with LLM(folder, dtype="float32", kv_cache_tokens=256) as llm:
        llm.generate([5, 6, 7], greedy(4))
        with pytest.raises(ConfigError, match="enable_trace=True"):
            llm.trace()
        assert isinstance(llm.engine.device, ThreadDevice)
    with LLM(folder, dtype="float32", kv_cache_tokens=256, enable_trace=True, enable_overlap=False) as llm:
        llm.generate([5, 6, 7], greedy(4))
        assert len([e for e in llm.trace().lane(DEVICE) if e.name == "forward"]) == 4
        assert type(llm.engine.device) is InlineDevice


def test_a_closed_engine_has_no_thread(tmp_path):
    folder = str(write_tiny_checkpoint(tmp_path, "llama"))
    llm = LLM(folder, dtype="float32", kv_cache_tokens=256)
    stream = llm.stream([5, 6, 7], greedy(50, ignore_eos=True))
    next(stream)
    [worker] = llm.engine.device._worker._threads
    assert worker.is_alive() and worker.name.startswith("minispec-device")
    llm.close()
    assert not worker.is_alive()
    assert stream.request.finish_reason == "abort"


def test_streams_and_batches_read_the_same_with_overlap(tmp_path):
    folder = str(write_tiny_checkpoint(tmp_path, "llama"))
    texts = []
    for overlap in (False, True):
        with LLM(folder, dtype="float32", kv_cache_tokens=512, enable_overlap=overlap) as llm:
            [whole] = llm.generate("abc abc", greedy(20, ignore_eos=True))
            streams = [llm.stream("abc abc", greedy(20, ignore_eos=True)) for _ in range(3)]
            pieces = [list(stream) for stream in streams]
            assert all("".join(p) == whole.text and [x.token_id for x in p] == whole.token_ids for p in pieces)
            texts.append(whole.text)
    assert texts[0] == texts[1]


def test_a_pool_without_a_device_argument_follows_the_configuration():
    config = EngineConfig(kv_cache_tokens=64, enable_overlap=True)
    pool = KVPool(64, 16, num_rows=4, max_len=64)
    device = VirtualDevice({})
    engine = Engine(config, TagRunner(64, 12, markov()), pool, context_length=64, device=device)
    assert engine.device is device
    np.testing.assert_array_equal(run(engine, [[1, 2]], greedy(5))[0].output, tag_greedy(markov(), [1, 2], 5))
