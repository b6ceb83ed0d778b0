"""A draft model in another process: the ids and the counts of one process, and an end in every case."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_drafters import greedy, hot, make, tiny  # noqa: F401
from tiny_checkpoints import write_tiny_checkpoint
from tools import assert_idle, assert_same_ids

from minispec import LLM, SamplingParams
from minispec.config import ConfigError, SpeculativeConfig
from minispec.core import Request
from minispec.kv.pool import KVPool
from minispec.speculative import remote
from minispec.speculative.drafter import Proposal
from minispec.speculative.remote import Mirror, RemoteDrafter


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is not the target: another seed, as many layers less one."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("draft"), "llama", num_hidden_layers=1)


def remotely(folder: Path, draft: Path, **more: object) -> dict:
    return {"draft_model": str(draft), "draft_process": True, "candidate_length": 3} | more


def drafter_of(llm: LLM) -> RemoteDrafter:
    [drafter] = [drafter for drafter in llm.engine.drafters if isinstance(drafter, RemoteDrafter)]
    return drafter


# Whole engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_ids_and_counts_are_those_of_one_process(tiny, draft, overlap):  # noqa: F811
    folder, _, prompts, expected = tiny
    options = {"page_size": 4, "chunked_prefill_size": 3, "enable_overlap": overlap}
    here = make(folder, remotely(folder, draft, draft_process=False), **options)
    with make(folder, remotely(folder, draft), **options) as there:
        for _ in range(2):  # the second round meets warm caches, there and here
            for params in (greedy(), hot()):
                wanted, outputs = here.generate(prompts, params), there.generate(prompts, params)
                assert [out.token_ids for out in outputs] == [out.token_ids for out in wanted]
                assert [out.metrics.accepted_per_step for out in outputs] == [
                    out.metrics.accepted_per_step for out in wanted
                ]
            for output, (ids, margin) in zip(there.generate(prompts, greedy()), expected, strict=True):
                assert_same_ids(output.token_ids, ids, margin)
            here.generate(prompts, greedy())
        metrics, local = there.metrics(), here.metrics()
        assert metrics.drafter_faults == 0 and metrics.speculation.accepted == local.speculation.accepted > 0
        assert metrics.draft_forwards > 0 and metrics.draft_bytes > 0
        assert metrics.by_drafter.keys() == local.by_drafter.keys() == {"standalone"}
        assert_idle(there.engine)
    assert drafter_of(there).process.popen.poll() == 0


@pytest.mark.parametrize(
    "more", [{"topk": 2, "num_draft_tokens": 6}, {"draft_sampling": "greedy"}, {"verification": "match"}]
)
def test_trees_and_every_way_to_draw_are_those_of_one_process(tiny, draft, more):  # noqa: F811
    folder, _, prompts, _ = tiny
    here = make(folder, remotely(folder, draft, draft_process=False, **more))
    with make(folder, remotely(folder, draft, **more)) as there:
        for params in (greedy(), hot()):
            wanted, outputs = here.generate(prompts, params), there.generate(prompts, params)
            assert [out.token_ids for out in outputs] == [out.token_ids for out in wanted]
        assert there.metrics().speculation.accepted == here.metrics().speculation.accepted
        assert there.metrics().speculation.drafted == here.metrics().speculation.drafted > 0


def test_bytes_of_a_round_are_counted_and_rows_of_chances_cost_most(tiny, draft):  # noqa: F811
    folder, _, prompts, _ = tiny
    with make(folder, remotely(folder, draft)) as llm:
        llm.generate(prompts, greedy())
        chosen = llm.metrics()
        drafter, vocab_size = drafter_of(llm), llm.engine.runner.vocab_size
        assert chosen.remote_rounds == drafter.rounds > 0
        sent, received = chosen.remote_round_bytes
        assert sent * chosen.remote_rounds == chosen.remote_sent_bytes == drafter.bytes_sent
        assert received * chosen.remote_rounds == chosen.remote_received_bytes
        tokens = sum(len(prompt) for prompt in prompts) + chosen.output_tokens
        assert chosen.remote_sent_bytes < 8 * tokens + 400 * (chosen.remote_rounds + len(prompts))  # each token once
        llm.generate(prompts, hot())
        drawn = llm.metrics()
        rows = drawn.speculation.drafted - chosen.speculation.drafted
        assert drawn.remote_received_bytes - chosen.remote_received_bytes > 4 * vocab_size * rows > 0
    with make(folder, remotely(folder, draft, verification="match")) as llm:
        llm.generate(prompts, hot())
        matched = llm.metrics()
        assert matched.remote_received_bytes < 4 * vocab_size * matched.speculation.drafted


def test_preemption_aborts_and_ids_that_come_again(tiny, draft):  # noqa: F811
    folder, _, prompts, expected = tiny
    with make(folder, remotely(folder, draft), kv_cache_tokens=48, page_size=4) as llm:
        for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
            assert_same_ids(output.token_ids, ids, margin)
        assert llm.metrics().preemptions > 0
        for prompt, (ids, margin) in zip(prompts[:3], expected, strict=False):
            llm.engine.add(prompt[::-1], greedy(), request_id="again")
            for _ in range(4):
                llm.engine.step()
            assert llm.abort("again")
            [request] = llm.engine.add(prompt, greedy(), request_id="again")
            while llm.engine.has_work:
                llm.engine.step()
            assert_same_ids(request.output, ids, margin)
        assert llm.metrics().drafter_faults == 0
        assert not drafter_of(llm)._told
        assert_idle(llm.engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_costs_only_the_drafts(tiny, draft, how, monkeypatch):  # noqa: F811
    folder, _, prompts, expected = tiny
    monkeypatch.setattr(remote, "END_SECONDS", 1)
    llm = make(folder, remotely(folder, draft, max_retry_attempts=1))
    llm.generate(prompts[:1], greedy())
    process = drafter_of(llm).process.popen
    if how == signal.SIGSTOP:
        drafter_of(llm).link.timeout = remote.timedelta(seconds=2)
    os.kill(process.pid, how)
    for output, (ids, margin) in zip(llm.generate(prompts, greedy()), expected, strict=True):
        assert_same_ids(output.token_ids, ids, margin)
    metrics = llm.metrics()
    assert metrics.faults == {"DraftProcessLost": 2} and metrics.drafters_off == ["standalone"]
    llm.close()
    assert process.poll() == -signal.SIGKILL
    llm.close()


def test_what_cannot_be_drafted_with_is_refused_and_leaves_no_process(tiny, tmp_path, monkeypatch):  # noqa: F811
    folder, *_ = tiny
    started = []
    real = remote.subprocess.Popen
    monkeypatch.setattr(remote.subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    with pytest.raises(ConfigError, match="draft_process is for a draft model of its own, not for .*mtp"):
        SpeculativeConfig(draft_model="mtp", draft_process=True)
    with pytest.raises(ConfigError, match="draft_process"):
        SpeculativeConfig(draft_model="x", draft_process="yes")
    with pytest.raises(ConfigError, match="so taken for a model"):
        make(folder, remotely(folder, tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="larger than the whole pool"):  # after the draft model is loaded
        make(folder, remotely(folder, folder), page_size=100_000, kv_cache_tokens=None)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


# The other end ---------------------------------------------------------------------------------------------------


class Scripted:
    """A drafter that says the length of the text, or raises."""

    name, forwards, bytes_read, weight_bytes = "scripted", 0, 0, 1

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.asked, self.fail = pool, [], False

    def propose(self, requests, lengths):
        self.asked.append([(request.id, list(request.tokens), k) for request, k in zip(requests, lengths, strict=True)])
        for request in requests:
            if request.table_row is not None:
                self.pool.draft_exact[self.pool.slots(request)[: len(request.tokens) - 1]] = True
        if self.fail:
            raise FloatingPointError("not finite")
        return Proposal([[len(r.tokens)] * k for r, k in zip(requests, lengths, strict=True)])

    def cursor(self, request: Request) -> int:
        return len(request.tokens) - 1


def new(tokens: list[int]) -> tuple:
    return tokens, SamplingParams(), 7, frozenset()


def mirror_of(num_slots: int, num_rows: int = 2) -> tuple[Mirror, Scripted, KVPool]:
    pool = KVPool(num_slots, 4, num_rows=num_rows, max_len=num_slots)
    drafter = Scripted(pool)
    return Mirror(drafter, pool, with_q=True), drafter, pool


def test_the_mirror_adds_what_is_new_and_forgets_what_has_ended():
    mirror, drafter, pool = mirror_of(64)
    tokens, qs, parents, *_ = mirror.answer([], [("a", 2, new([1, 2, 3]), []), ("b", 1, new([4]), [5])])
    assert (tokens, qs, parents) == ([[3, 3], [2]], [None, None], [None, None])
    mirror.answer([], [("a", 1, None, [9, 8])])
    assert drafter.asked[-1] == [("a", [1, 2, 3, 9, 8], 1)]
    pool.check_integrity(mirror.requests.values())
    mirror.answer(["a"], [("a", 1, new([1, 2, 3, 9, 8, 7]), [])])  # the same id, another request
    assert drafter.asked[-1] == [("a", [1, 2, 3, 9, 8, 7], 1)] and set(mirror.requests) == {"a", "b"}
    assert mirror.requests["a"].tree_len == 4  # what the first one left
    ledger = pool.check_integrity(mirror.requests.values())
    mirror.answer(["a", "b"], [])
    assert not mirror.requests and pool.check_integrity([]).private == 0 < ledger.private


def test_when_slots_are_short_those_who_wait_give_theirs():
    mirror, drafter, pool = mirror_of(16)
    mirror.answer([], [("a", 1, new(list(range(10))), [])])
    tokens, *_ = mirror.answer([], [("b", 1, new(list(range(20, 30))), [])])
    assert tokens == [[10]] and mirror.requests["a"].table_row is None
    pool.check_integrity(mirror.requests.values())
    tokens, *_ = mirror.answer([], [("a", 2, None, [1]), ("b", 2, None, [2])])  # no room for both
    assert tokens == [[], [11, 11]] and drafter.asked[-1][0] == ("a", [*range(10), 1], 0)  # b has slots
    pool.check_integrity(mirror.requests.values())
    tokens, *_ = mirror.answer([], [("b", 2, None, [3])])
    assert tokens == [[12, 12]]


def test_more_requests_than_rows_take_turns():
    mirror, _, pool = mirror_of(64, num_rows=1)
    for turn, name in enumerate("abab"):
        [tokens], *_ = mirror.answer([], [(name, 1, new([1, 2]) if turn < 2 else None, [])])
        assert tokens == [2]
        pool.check_integrity(mirror.requests.values())


def test_an_error_comes_over_as_text_and_nothing_is_forgotten():
    mirror, drafter, _ = mirror_of(64)
    drafter.fail = True
    assert "FloatingPointError: not finite" in mirror.answer([], [("a", 1, new([1, 2]), [])])
    drafter.fail = False
    assert mirror.answer([], [("a", 1, None, [3])])[0] == [[3]]
    link = SimpleNamespace(
        send=lambda message: None, receive=lambda: "in the draft process: ValueError", sent=0, received=0
    )
    request = Request("a", [1], SamplingParams(), 0, 9)
    proxy = RemoteDrafter(SimpleNamespace(link=link), torch.device("cpu"), "standalone", 1)
    with pytest.raises(RuntimeError, match="in the draft process: ValueError"):
        proxy.propose([request], [1])


def test_q_comes_over_as_it_was():
    mirror, drafter, _ = mirror_of(64)
    q = torch.rand(1, 5)
    drafter.propose = lambda requests, lengths: Proposal([[1], []], [q, None], [None, [-1]])
    _, qs, parents, *_ = mirror.answer([], [("a", 1, new([1]), []), ("b", 1, new([2]), [])])
    assert np.array_equal(qs[0], q.numpy()) and qs[1] is None and parents == [None, [-1]]
    mirror.with_q = False
    assert mirror.answer([], [("a", 1, None, []), ("b", 1, None, [])])[1] == [None, None]
