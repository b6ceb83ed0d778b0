"""Every mode of the engine gives the ids of naive decoding: on the tag model (exact) and on tiny models (float32)."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from tools import assert_idle, assert_same_ids, markov, reference_greedy, run, scripted, tag_engine, tag_greedy

from minispec import LLM, SamplingParams
from minispec.speculative.ngram import NgramDrafter

PAGES, RADIX, CHUNKS, LENGTHS, BATCHES = (1, 4, 16), (True, False), (4, 64, None), (0, 1, 4), (1, 8)
MATRIX = list(product(PAGES, RADIX, CHUNKS, LENGTHS, BATCHES))
MAX_TOKENS = 12


def prompts_for(batch: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of many lengths; half of them share a long prefix, and two are the same."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(19)]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 3, 4, 5, 16, 17, 33]))] for _ in range(batch)]
    for i in range(0, batch, 2):
        prompts[i] = shared + prompts[i]
    prompts[-1] = list(prompts[0])
    return prompts


@pytest.mark.parametrize("page_size,radix,chunk,k,batch", MATRIX)
@pytest.mark.parametrize("drafter", ["scripted", "ngram"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tag_model_gives_reference_ids_in_every_mode(page_size, radix, chunk, k, batch, drafter, overlap):
    logits_of = markov()
    drafters = {"scripted": scripted(logits_of, script=[2, 0, 3, 1, 4]), "ngram": NgramDrafter(3, 1)}
    engine = tag_engine(
        logits_of,
        page_size=page_size,
        enable_radix_cache=radix,
        chunked_prefill_size=chunk,
        drafter=drafters[drafter] if k else None,
        candidate_length=k,
        enable_overlap=overlap,
    )
    prompts = prompts_for(batch, 12)
    for _ in range(2):  # the second round meets a warm cache
        requests = run(engine, prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        assert [r.output for r in requests] == [tag_greedy(logits_of, p, MAX_TOKENS) for p in prompts]
        assert_idle(engine)
    assert (engine.metrics.speculation.drafted > 0) == (k > 0)
    assert (engine.metrics.cached_tokens > 0) == radix


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama, and the naive reference's ids (with margins) for the prompts of the matrix."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")
    llm = LLM(str(folder), dtype="float32", kv_cache_tokens=64)
    prompts = prompts_for(8, llm.model_config.vocab_size)
    expected = [reference_greedy(llm.model, prompt, MAX_TOKENS) for prompt in prompts]
    return folder, prompts, expected


@pytest.mark.parametrize("page_size,radix,chunk,k,batch", MATRIX)
@pytest.mark.parametrize("overlap", [False, True])
def test_tiny_llama_gives_reference_ids_in_every_mode(tiny, page_size, radix, chunk, k, batch, overlap):
    folder, prompts, expected = tiny
    llm = LLM(
        str(folder),
        dtype="float32",
        page_size=page_size,
        enable_radix_cache=radix,
        chunked_prefill_size=chunk,
        kv_cache_tokens=1024,
        check_every_step=True,
        enable_overlap=overlap,
        speculative_config={"draft_model": "ngram", "candidate_length": k, "ngram_min": 1, "adaptive": False},
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(2):
        for output, (ids, margin) in zip(llm.generate(prompts[:batch], params), expected, strict=False):
            assert_same_ids(output.token_ids, ids, margin)
    assert_idle(llm.engine)


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_other_architectures_through_the_whole_engine(tmp_path, architecture):
    folder = write_tiny_checkpoint(tmp_path, architecture)
    llm = LLM(
        str(folder),
        dtype="float32",
        page_size=4,
        chunked_prefill_size=5,
        kv_cache_tokens=512,
        check_every_step=True,
        speculative_config={"candidate_length": 3, "ngram_min": 1, "adaptive": False},
    )
    prompts = prompts_for(4, llm.model_config.vocab_size)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_same_ids(output.token_ids, *reference_greedy(llm.model, prompt, MAX_TOKENS))


def test_bfloat16_engine_runs_and_stays_close_to_float32(tiny):
    folder, prompts, _ = tiny
    logprobs = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM(str(folder), dtype=dtype, kv_cache_tokens=256)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True))
        logprobs.append(torch.tensor([o.logprobs[0].logprob for o in outputs]))
    assert (logprobs[0] - logprobs[1]).abs().max() < 0.1
