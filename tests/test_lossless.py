"""Speculation changes no distribution and no greedy id: chi-square for every drafter, and what is right is accepted.

The reference is computed, not sampled: p of each position given the tokens before it, from transformers' own forward
and the sampling rules in plain Python. Position j of n completions then has a known expectation for every pair of
(token before, token), and the distance from it is compared with chi-square. Counts vary less than that law says, since
each completion has its own prefix, so a right engine passes with room; the controls show that a wrong rule does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_drafters import write_head
from test_sampling import reference
from tiny_checkpoints import write_tiny_checkpoint
from tools import ScriptedDrafter, assert_idle, markov, tag_engine
from tools import run as run_engine
from transformers import AutoModelForCausalLM

from minispec import LLM, SamplingParams
from minispec.core import TokenKind
from minispec.sampling import sampler
from minispec.sampling.distribution import LogitRow
from minispec.sampling.rejection import Verdict, verify

VOCAB = 12
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]
COUNT = 800
DRAFTERS = ("ngram", "scripted", "standalone", "mtp", "early-exit", "copy-first")
WITHOUT_CHANCE = ("ngram", "scripted")
# Surely passed by a right engine with these seeds, and far above what any of the wrong rules reaches.
SMALLEST_P_VALUE = 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a target of 12 tokens, an MTP head and another model as draft; transformers' copy of the target;
    and what likely follows each token, for the scripted drafter."""
    root = tmp_path_factory.mktemp("lossless")
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "tokenizer": False}
    target = write_tiny_checkpoint(root / "target", **sizes)
    write_tiny_checkpoint(root / "draft", seed=1, **(sizes | {"num_hidden_layers": 1}))
    write_head(root / "head.safetensors", LLM(str(target), kv_cache_tokens=64).model_config)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        after = theirs(torch.arange(VOCAB)[:, None]).logits[:, 0].argmax(-1).tolist()
    return root, theirs, after


def make(tiny, kind: str, k: int, **options) -> LLM:
    root, _, after = tiny
    speculative = {
        "ngram": {"draft_model": "ngram", "ngram_min": 1},
        "scripted": {},
        "standalone": {"draft_model": str(root / "draft")},
        "itself": {"draft_model": str(root / "target")},
        "mtp": {"draft_model": "mtp", "draft_head": str(root / "head.safetensors")},
        "early-exit": {"draft_model": "early-exit", "early_exit_layers": 1},
        "copy-first": {"draft_model": [str(root / "draft"), "ngram"], "ngram_min": 3},
    }[kind]
    speculative |= {"candidate_length": k, "adaptive": False}
    for name in ("verification", "draft_sampling", "topk", "num_draft_tokens"):
        if name in options:
            speculative[name] = options.pop(name)
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "kv_cache_tokens": 16384} | options
    drafter = ScriptedDrafter(lambda tokens: after[tokens[-1]], VOCAB) if kind == "scripted" else None
    return LLM(str(root / "target"), dtype="float32", drafter=drafter, speculative_config=speculative, **options)


@torch.inference_mode()
def distributions(theirs, outputs: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> np.ndarray:
    """[n, T, V] what each token of each output is drawn from, given all before it."""
    tokens = torch.tensor([PROMPT + list(output) for output in outputs])
    logits = theirs(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :].tolist()
    known: dict[tuple, list[float]] = {}
    rows = []
    for output, its_params, its_logits in zip(outputs, params, logits, strict=True):
        for j, x in enumerate(its_logits):
            key = (id(its_params), *output[:j])
            if key not in known:
                known[key] = reference(penalised(x, its_params, output[:j]), its_params)
            rows.append(known[key])
    return np.array(rows).reshape(len(outputs), -1, VOCAB)


def penalised(logits: list[float], params: SamplingParams, output: Sequence[int]) -> list[float]:
    """Penalties and bias of one position, straight from the docstring of SamplingParams."""
    x = list(logits)
    for token in range(VOCAB):
        if token in PROMPT or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        if token in output:
            x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
        x[token] += params.logit_bias.get(token, 0)
    return x


def p_values(p: np.ndarray, outputs: Sequence[Sequence[int]]) -> list[float]:
    """One per position; cells are pairs of (token before, token) that 5 or more completions are expected in."""
    outputs = np.array(outputs)
    n, length = outputs.shape
    values = []
    for j in range(length):
        if (p[np.arange(n), j, outputs[:, j]] == 0).any():
            values.append(0.0)  # a token that cannot be
            continue
        before = outputs[:, j - 1] if j else np.zeros(n, dtype=int)
        expected, seen = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
        np.add.at(expected, before, p[:, j])
        np.add.at(seen, (before, outputs[:, j]), 1)
        cells = expected >= 5
        assert cells.sum() >= 3
        distance = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
        half = torch.tensor([cells.sum() / 2, distance / 2], dtype=torch.float64)
        values.append(torch.special.gammaincc(*half).item())
    return values


def sample_and_compare(llm: LLM, theirs, length: int, each: Sequence[SamplingParams]) -> list[float]:
    """p-values of COUNT completions of `length` tokens, `each` of the parameters in turn."""
    params = [each[i % len(each)] for i in range(COUNT)]
    seeded = [replace(p, max_tokens=length, ignore_eos=True, seed=i) for i, p in enumerate(params)]
    outputs = [output.token_ids for output in llm.generate([PROMPT] * COUNT, seeded)]
    assert_idle(llm.engine)
    assert llm.metrics().drafter_faults == 0
    return p_values(distributions(theirs, outputs, params), outputs)


def ways(kind: str, k: int) -> list[tuple[str, str]]:
    """(verification, draft_sampling) to run: with "match" each depth has one of the two ways to draft."""
    if kind in WITHOUT_CHANCE:
        return [("rejection", "greedy"), ("match", "greedy")]
    drawn = ["probabilistic", "greedy"]
    return [("rejection", drawn[0]), ("rejection", drawn[1]), ("match", drawn[k == 2])]


@pytest.mark.parametrize(
    "kind,k,verification,sampling", [(d, k, *way) for d in DRAFTERS for k in (1, 2, 4) for way in ways(d, k)]
)
def test_every_drafter_leaves_the_distribution_of_every_position_as_it_is(tiny, kind, k, verification, sampling):
    llm = make(tiny, kind, k, verification=verification, draft_sampling=sampling)
    values = sample_and_compare(llm, tiny[1], k + 2, [SamplingParams(temperature=0.9)])
    assert min(values) > SMALLEST_P_VALUE, values
    counts = llm.engine.metrics.speculation
    assert len(counts.drafted_at) == k and min(counts.drafted_at) > 100 and 0.02 < counts.acceptance_rate < 0.98


MIXED = [
    SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_p=0.8, frequency_penalty=0.8, presence_penalty=0.3),
    SamplingParams(min_p=0.1, logit_bias={3: 1.5, 7: -2.0}),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05, frequency_penalty=1.5),
]


@pytest.mark.parametrize("verification", ["rejection", "match"])
@pytest.mark.parametrize("kind", ["scripted", "mtp", "copy-first"])
def test_every_sampling_parameter_means_the_same_under_speculation(tiny, kind, verification):
    llm = make(tiny, kind, 3, verification=verification)
    values = sample_and_compare(llm, tiny[1], 6, MIXED)
    assert min(values) > SMALLEST_P_VALUE, values
    assert 0.02 < llm.engine.metrics.speculation.acceptance_rate < 0.98


def likelier_wins(p, q, drafts, row_start, num_drafts, u_accept, u_sample) -> Verdict:
    """A wrong rule: a draft stays where p >= q, without chance."""
    q = torch.nn.functional.one_hot(drafts.clamp(min=0), VOCAB).float() if q is None else q
    return verify(p, q, drafts, row_start, num_drafts, torch.full_like(u_accept, 1 - 2.0**-53), u_sample)


def no_residual(p, q, drafts, row_start, num_drafts, u_accept, u_sample) -> Verdict:
    """A wrong rule: the token after a rejection is drawn from p."""
    accepted, _ = verify(p, q, drafts, row_start, num_drafts, u_accept, u_sample)
    rows = row_start + accepted
    return Verdict(accepted, sampler.sample(p[rows], u_sample[rows]))


def frozen_history(rows) -> list[LogitRow]:
    """A wrong history: penalties do not see the draft tokens before a position."""
    return [LogitRow(r.request.params, r.request.prompt, r.request.output) for r in rows for _ in range(r.num_logits)]


@pytest.mark.parametrize(
    "name,wrong", [("verify", likelier_wins), ("verify", no_residual), ("_histories", frozen_history)]
)
@pytest.mark.parametrize("kind", ["scripted", "mtp"])
def test_control_a_wrong_rule_is_seen(tiny, kind, name, wrong, monkeypatch):
    monkeypatch.setattr(sampler, name, wrong)
    values = sample_and_compare(make(tiny, kind, 3), tiny[1], 6, MIXED if name == "_histories" else [SamplingParams()])
    assert min(values) < SMALLEST_P_VALUE / 1e3, values


@pytest.mark.parametrize("verification,seen", [("rejection", True), ("match", False)])
def test_control_a_q_that_the_draft_was_not_drawn_from_is_seen_and_match_needs_none(tiny, verification, seen):
    llm = make(tiny, "standalone", 3, verification=verification)
    honest = llm.engine.drafters[0].propose

    def uniform_q(requests, lengths):
        proposal = honest(requests, lengths)
        return replace(proposal, q=[torch.full_like(q, 1 / VOCAB) for q in proposal.q])

    llm.engine.drafters[0].propose = uniform_q
    values = sample_and_compare(llm, tiny[1], 6, [SamplingParams()])
    assert (min(values) < SMALLEST_P_VALUE / 1e3) == seen, values


# "match": what plain decoding would have drawn --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scripted", "standalone", "mtp", "copy-first"])
def test_match_gives_a_seeded_request_the_ids_of_plain_decoding(tiny, kind):
    plain, llm = make(tiny, "ngram", 0), make(tiny, kind, 4, verification="match")
    params = [replace(p, seed=i, max_tokens=20, ignore_eos=True) for i, p in enumerate([SamplingParams(), *MIXED] * 4)]
    expected = [output.token_ids for output in plain.generate([PROMPT] * len(params), params)]
    assert [output.token_ids for output in llm.generate([PROMPT] * len(params), params)] == expected
    assert plain.metrics().speculation.drafted == 0
    assert 0.02 < llm.metrics().acceptance_rate < 0.98
    by_rejection = make(tiny, kind, 4, verification="rejection").generate([PROMPT] * len(params), params)
    assert [output.token_ids for output in by_rejection] != expected


@pytest.mark.parametrize("script", [None, [0], [2, 0, 1, 3]])
def test_match_gives_the_ids_of_plain_decoding_for_any_draft_and_any_sampling_parameter(script):
    logits_of = markov()
    params = [replace(p, seed=i, max_tokens=24) for i, p in enumerate([SamplingParams(temperature=0), *MIXED] * 2)]
    prompts = [[1 + i, 2, 3] for i in range(len(params))]
    plain = run_engine(tag_engine(logits_of), prompts, params)
    drafter = ScriptedDrafter(lambda tokens: int(np.argmax(logits_of(tokens))), 12, script)
    engine = tag_engine(logits_of, drafter=drafter, speculative_config={"verification": "match", "adaptive": False})
    requests = run_engine(engine, prompts, params)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert {TokenKind.ACCEPTED, TokenKind.CORRECTED} <= {kind for r in requests for kind in r.kinds} or script == [0]


# A draft that is always right --------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)


@pytest.mark.parametrize("page_size,chunk,slots", [(1, 1, 96), (1, 5, 96), (4, 2, 96), (4, None, 512), (16, 7, 80)])
def test_the_target_as_its_own_draft_is_accepted_whole(tiny, page_size, chunk, slots):
    """Chunks of any size, prefix hits, preemption and resume, greedy and sampled requests together."""
    llm = make(
        tiny,
        "itself",
        3,
        page_size=page_size,
        chunked_prefill_size=chunk,
        kv_cache_tokens=slots,
        context_length=64,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        check_every_step=True,
    )
    prompts = [PROMPT[i % 5 :] + PROMPT + [i] * (1 + i % 3) for i in range(8)] + [PROMPT * 2 + [7]] * 2
    params = [GREEDY if i % 4 else replace(GREEDY, temperature=0.8, seed=i) for i in range(len(prompts))]
    for _ in range(2):
        llm.generate(prompts, params)
    metrics = llm.metrics()
    assert metrics.acceptance_rate > 0.999 and metrics.speculation.drafted > 50  # p = q but for rounding
    assert metrics.cached_tokens > 0 and (metrics.preemptions > 0) == (slots < 512)
    assert metrics.drafter_faults == 0


@pytest.mark.parametrize("kind", ["standalone", "mtp", "early-exit", "copy-first"])
def test_greedy_and_sampled_requests_of_different_lengths_are_drafted_together(tiny, kind):
    llm = make(tiny, kind, 4)
    params = [replace(GREEDY, max_tokens=n, temperature=t, seed=1) for n, t in ((5, 0.9), (18, 0), (3, 0), (9, 0.9))]
    together = [output.token_ids for output in llm.generate([PROMPT] * 4, params)]
    assert llm.metrics().drafter_faults == 0
    assert together == [make(tiny, kind, 4).generate(PROMPT, p)[0].token_ids for p in params]


@pytest.mark.parametrize("kind", ["standalone", "itself", "mtp"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_acceptance_is_the_same_with_a_cold_and_with_a_warm_cache(tiny, kind, page_size):
    llm = make(tiny, kind, 3, page_size=page_size)
    for params in (GREEDY, replace(GREEDY, temperature=0.9, seed=5)):
        prompt = [int(params.greedy), *PROMPT]
        [cold], [warm] = llm.generate(prompt, params), llm.generate(prompt, params)
        assert (cold.metrics.cached_tokens, warm.metrics.cached_tokens) == (0, len(prompt) - 1)
        assert cold.metrics.accepted_per_step == warm.metrics.accepted_per_step
        assert cold.token_ids == warm.token_ids
