"""transformers and this engine on the same weights, prompts and cores: one prompt at a time, and a crowd.

    python -m minispec bench --prompts questions.jsonl --drafts ngram,mtp,mtp+ngram --quantization int8,int4
    python -m minispec bench batch --batch 32

Alone: six prompts, one after the other; greedy, the same number of tokens for everybody, nobody stops early.
A crowd: so many prompts of mixed length at once, without and with a common beginning of PREFIX tokens. transformers
pads them to one batch; this engine takes them as a server does. Its radix cache is emptied before each run.

Short weights change the answers a little: told are the perplexity on the prompts (one prompt after another, given its
first token), and how many tokens of an answer come before the first that differs from the plain engine's, on average.

Knows: contestants. Does not know: how to time (__init__.py). Taught in notebook 13 (everything on).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from minispec.bench import Contestant, Job, Result, measure, table
from minispec.config import ConfigError, check_number

if TYPE_CHECKING:
    from minispec.llm import LLM

PREFIX = 300  # tokens


def chat_ids(llm: LLM, questions: Sequence[str]) -> list[list[int]]:
    """The questions in the model's chat format, as token ids."""
    framed = [llm.render_chat([{"role": "user", "content": question}]) for question in questions]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in framed]


def theirs(llm: LLM, model: str, max_tokens: int, **options: int) -> Contestant:
    """transformers' generate with the weights of `llm`: all prompts of a job at once, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from minispec.models.loading import find_model

    other = AutoModelForCausalLM.from_pretrained(find_model(model), dtype=llm.dtype).to(llm.device).eval()
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        eos_token_id=other.generation_config.eos_token_id,
        **options,
    )

    @torch.inference_mode()
    def run(prompts: Job) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=llm.device)
        there = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=llm.device)
        return other.generate(ids, attention_mask=there, generation_config=settings)[:, longest:].tolist()

    return run


def ours(llm: LLM, max_tokens: int) -> Contestant:
    """This engine, with an empty radix cache."""
    from minispec import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def run(prompts: Job) -> list[list[int]]:
        llm.engine.pool.evict(llm.engine.pool.num_evictable_pages)
        return [output.token_ids for output in llm.generate(list(prompts), params)]

    return run


def llama_cpp(gguf: str, max_tokens: int) -> Contestant:
    """llama.cpp with a .gguf file, prompt after prompt. Raises ConfigError where llama-cpp-python is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise ConfigError(f"--gguf {gguf} needs the package llama-cpp-python: {error}") from error
    import torch

    model = Llama(gguf, n_ctx=2048, n_threads=torch.get_num_threads(), verbose=False)

    def run(prompts: Job) -> list[list[int]]:
        streams = [model.generate(prompt, temp=0.0) for prompt in prompts]
        return [[token for token, _ in zip(stream, range(max_tokens), strict=False)] for stream in streams]

    return run


def bench(
    model: str,
    questions: dict[str, str],
    *,
    dtype: str,
    max_tokens: int,
    candidate_length: int,
    drafts: Sequence[str],
    quantization: Sequence[str] = (),
    gguf: str | None = None,
    rounds: int,
) -> list[Result]:
    """One prompt at a time; prints a table. "a+b" among `drafts` is a list of two. Raises ConfigError for bad values.

    questions: name -> prompt. gguf: a file for llama.cpp, which is compared then as well.
    """
    from minispec import LLM

    _check(max_tokens=max_tokens, candidate_length=candidate_length, rounds=rounds)
    engines: dict[str, LLM] = {}
    for kind in (None, *quantization):
        for draft in (None, *drafts):
            config = draft and {"draft_model": draft.split("+"), "candidate_length": candidate_length}
            name = " ".join(filter(None, ("minispec", kind, draft and f"{draft} K={candidate_length}")))
            engines[name] = LLM(model, dtype=dtype, quantization=kind, speculative_config=config)
    plain = engines["minispec"]
    lookup = theirs(plain, model, max_tokens, prompt_lookup_num_tokens=candidate_length)
    contestants = {"transformers": theirs(plain, model, max_tokens), "transformers, prompt lookup": lookup}
    if gguf:
        contestants["llama.cpp"] = llama_cpp(gguf, max_tokens)
    contestants |= {name: ours(llm, max_tokens) for name, llm in engines.items()}
    jobs = {name: [ids] for name, ids in zip(questions, chat_ids(plain, list(questions.values())), strict=True)}
    results = measure(contestants, jobs, rounds)
    reference = next(result for result in results if result.name == "minispec")
    for result in results:
        llm = engines.get(result.name)
        counts = llm and llm.metrics().speculation
        if counts and counts.drafted:
            result.facts |= {"first kept": counts.acceptance_by_position[0], "length": counts.acceptance_length}
        if llm and llm.config.quantization and not counts.drafted:
            result.facts |= {"perplexity": perplexity(llm, jobs), "same tokens": common(result, reference)}
    reference.facts["perplexity"] = perplexity(plain, jobs)
    precision = str(plain.dtype).removeprefix("torch.")
    what = f"{len(jobs)} prompts, {max_tokens} tokens each, one at a time, greedy, {precision}, {rounds} rounds"
    print(table(what, results))
    return results


def bench_batch(
    model: str, questions: dict[str, str], *, dtype: str, max_tokens: int, batch: int, rounds: int
) -> list[Result]:
    """A crowd; prints a table. Raises ConfigError for bad values."""
    from minispec import LLM

    _check(max_tokens=max_tokens, batch=batch, rounds=rounds)
    llm = LLM(model, dtype=dtype, max_num_seqs=batch)
    asked = [f"{list(questions.values())[n % len(questions)]} ({n})" for n in range(batch)]
    mixed = chat_ids(llm, asked)
    prefix = [token for ids in chat_ids(llm, list(questions.values())) for token in ids][:PREFIX]
    jobs: dict[str, Job] = {"mixed": mixed, "shared": [prefix + llm.tokenizer.encode(text)[-60:] for text in asked]}
    results = measure({"transformers": theirs(llm, model, max_tokens), "minispec": ours(llm, max_tokens)}, jobs, rounds)
    lengths = sorted(map(len, mixed))
    what = f"{batch} prompts of {lengths[0]} to {lengths[-1]} tokens; shared: {len(prefix)} in common, up to 60 more;"
    print(table(f"{what} {max_tokens} tokens each, {rounds} rounds", results))
    for job in jobs:
        print(f"{job}: {results[1].median(job) / results[0].median(job):.2f}x")
    return results


def perplexity(llm: LLM, jobs: dict[str, Job]) -> float:
    """Of the prompts of all jobs, each given its first token."""
    scores = [score for [ids] in jobs.values() for score in llm.score(ids[:1], [ids[1:]])[0]]
    return math.exp(-sum(scores) / len(scores))


def common(result: Result, reference: Result) -> float:
    """Tokens before the first that differs, per answer."""
    pairs = [
        zip(a, b, strict=True)
        for job, answers in result.answers.items()
        for a, b in zip(answers, reference.answers[job], strict=True)
    ]
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pair))) for pair in pairs) / len(pairs)


def _check(**values: Any) -> None:
    for name, value in values.items():
        check_number(name, value, 1, integer=True)
