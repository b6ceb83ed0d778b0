"""Overlap changes nothing but the time: every drafter in modes drawn from all of them, with overlap and without.

Ids, finish reasons and cached-token counts of both loops are compared with each other, and the ids with plain decoding
in the simplest mode. Where slots are short, what was evicted by the time of an admission depends on the moment, and
cached-token counts are only held to their bounds. Sampled requests are verified by "match", so their ids do not depend
on what was drafted.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from test_drafters import config_for, tiny  # noqa: F401  (a fixture)
from tiny_checkpoints import write_tiny_checkpoint
from tools import assert_idle, finish, markov, scripted, tag_engine

from minispec import LLM, SamplingParams
from minispec.core import Request
from minispec.engine import Engine
from minispec.speculative.controller import Controller
from minispec.speculative.ngram import NgramDrafter

# page size, radix cache, chunk, slots, requests at a time
MODES = list(product((1, 4, 16), (True, False), (3, None), (80, 1024), (2, 6)))
SIMPLEST = (16, True, None, 1024, 6)
TAG_DRAFTERS = ("none", "ngram", "scripted", "scripted+ngram")
MODEL_DRAFTERS = ("mtp", "chain", "mtp+ngram", "itself", "standalone", "early-exit")


def requests_for(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Ten requests: a long shared prefix, two equal prompts, ends of all kinds, with and without penalties."""
    shared = [(7 * i + 3) % vocab_size for i in range(19)]
    prompts = [(shared if n % 2 else []) + [(n * i + 1) % vocab_size for i in range(1 + 3 * (n % 8))] for n in range(9)]
    each = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=14),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=10, stop_token_ids=[2, 3]),
        SamplingParams(
            temperature=1.2, seed=6, max_tokens=9, min_tokens=3, stop_token_ids=list(range(0, vocab_size, 4))
        ),
    ]
    return [*prompts, prompts[-2]], each * 2


def options_of(mode, overlap: bool) -> dict:
    page_size, radix, chunk, _, batch = mode
    return {
        "page_size": page_size,
        "enable_radix_cache": radix,
        "chunked_prefill_size": chunk,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 32,
        "enable_overlap": overlap,
    }


Results = list[tuple[list[int], str, int]]


def results_of(engine: Engine, vocab_size: int) -> Results:
    """(ids, finish reason, cached tokens) of all requests, then of the same ones with a warm cache if there is one."""
    requests: list[Request] = []
    for _ in range(1 + engine.config.enable_radix_cache):
        for prompt, params in zip(*requests_for(vocab_size), strict=True):
            requests += engine.add(prompt, params)
        finish(engine)
        assert_idle(engine)
    assert engine.metrics.drafter_faults == 0
    return [(r.output, r.finish_reason, r.metrics.cached_tokens) for r in requests]


def assert_same(normal: Results, overlapping: Results, expected: Results, mode) -> None:
    for results in (normal, overlapping):
        assert [result[:2] for result in results] == [result[:2] for result in expected[: len(results)]], mode
        lengths = [len(prompt) for prompt in requests_for(12)[0]] * 2
        assert all(0 <= cached < length for (*_, cached), length in zip(results, lengths, strict=False)), mode
    if mode[3] == 1024:
        assert overlapping == normal, mode


def of_tag_model(drafter: str, mode, overlap: bool) -> tuple[Results, Engine]:
    logits_of = markov()
    model, copier = scripted(logits_of, script=[2, 0, 3, 1]), NgramDrafter(3, 1)
    drafters = {"none": [], "ngram": [copier], "scripted": [model], "scripted+ngram": [model, copier]}[drafter]
    speculative = {"candidate_length": 3, "adaptive": False, "verification": "match"}
    engine = tag_engine(
        logits_of,
        slots=mode[3],
        context_length=64,
        eos_ids=[7],
        drafter=drafters[0] if drafters else None,
        speculative_config=speculative,
        **options_of(mode, overlap),
    )
    if len(drafters) == 2:
        config = engine.config.speculative_config
        engine.controller, engine.drafters = Controller(config, drafters, 12, engine.metrics), drafters
    results = results_of(engine, 12)
    assert (engine.metrics.speculation.drafted > 0) == bool(drafters)
    return results, engine


@pytest.mark.parametrize("drafter", TAG_DRAFTERS)
def test_the_tag_model(drafter):
    expected, preempted = of_tag_model("none", SIMPLEST, False)[0], 0
    assert {reason for _, reason, _ in expected} == {"stop", "length"}
    for mode in random.Random(drafter).sample(MODES, 24):
        (normal, _), (overlapping, engine) = (of_tag_model(drafter, mode, overlap) for overlap in (False, True))
        assert_same(normal, overlapping, expected, mode)
        assert any(cached for *_, cached in normal) == mode[1], mode
        preempted += engine.scheduler.preemptions
    assert preempted > 0


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """Another model than the target, with its tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("draft"), "llama", seed=1, num_hidden_layers=1)


def of_tiny_model(tiny, speculative, mode, overlap: bool) -> Results:  # noqa: F811
    llm = LLM(
        str(tiny[0]),
        dtype="float32",
        kv_cache_tokens=mode[3],
        context_length=64,
        check_every_step=True,
        speculative_config={"candidate_length": 3, "adaptive": False, "verification": "match"} | speculative,
        **options_of(mode, overlap),
    )
    with llm:
        results = results_of(llm.engine, llm.model_config.vocab_size)
        assert (llm.metrics().speculation.drafted > 0) == (speculative.get("candidate_length") != 0)
    return results


@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_drafters_with_a_model(tiny, draft_folder, drafter):  # noqa: F811
    speculative = {"draft_model": str(draft_folder)} if drafter == "standalone" else config_for(drafter, tiny)
    expected = of_tiny_model(tiny, {"candidate_length": 0}, SIMPLEST, False)
    for mode in random.Random(drafter).sample(MODES, 5):
        normal, overlapping = (of_tiny_model(tiny, speculative, mode, overlap) for overlap in (False, True))
        assert_same(normal, overlapping, expected, mode)
