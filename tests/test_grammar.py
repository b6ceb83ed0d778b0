"""Grammars: what may be written is exactly what the grammar says, with and without drafts, alone and in a batch.

The reference knows finite languages only: a token may stand where some word of the language begins with the text and
it. Nothing of the parser under test is in it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models
from tools import ScriptedDrafter, assert_idle, finish, markov, run, tag_engine
from transformers import PreTrainedTokenizerFast

from minispec import LLM, SamplingParams
from minispec.config import ConfigError
from minispec.core import Request, Row
from minispec.engine import Engine
from minispec.sampling.grammar import Grammars, constrain
from minispec.speculative.drafter import Proposal

PIECES = ["</s>", "a", "b", "c", "ab", "bc", "ca", "cc"]
V = len(PIECES)
PROMPT = [1, 3, 2, 5]
# Nowhere is the next letter certain: of text that is, the parser allows one spelling in tokens only.
REGEX = "[ab][abc]c?|c[ab]"
WORDS = [x + y + z for x in "ab" for y in "abc" for z in ("", "c")] + ["ca", "cb"]


def letters() -> PreTrainedTokenizerFast:
    """Three letters, some pairs of them, an end token."""
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(PIECES[0], special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=PIECES[0])


def may_follow(output: Sequence[int], words: Sequence[str] = WORDS) -> list[int]:
    text = "".join(PIECES[token] for token in output)
    more = [t for t in range(1, V) if any(word.startswith(text + PIECES[t]) for word in words)]
    return [0] * (text in words) + more


def masked(logits_of, prompt: int = len(PROMPT)):
    """The tag model's logits under the grammar; the text is what follows the prompt."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        x, allowed = np.array(logits_of(tokens), dtype=float), may_follow(tokens[prompt:])
        x[[t for t in range(V) if t not in allowed]] = -np.inf
        return x

    return logits


def greedy(logits_of, prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    while tokens[len(prompt) :][-1:] != [0]:
        tokens.append(int(np.argmax(masked(logits_of, len(prompt))(tokens))))
    return tokens[len(prompt) :]


def engine_of(logits_of, **options) -> Engine:
    return tag_engine(logits_of, vocab_size=V, eos_ids=[0], tokenizer=letters(), **options)


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 20, "regex": REGEX} | options))


class Masked(ScriptedDrafter):
    """Drafts of the masked model, right for as long as the script says."""

    def __init__(self, logits_of, script) -> None:
        right = masked(logits_of)
        super().__init__(lambda tokens: int(np.argmax(right(tokens))), V, script)


# Ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("script", ["none", None, [0], [2, 0, 1]])
def test_greedy_ids_are_those_of_the_masked_model(overlap: bool, script) -> None:
    for seed in range(12):
        logits_of = markov(V, seed=seed)
        # What is right ends within a draft, and what is wrong may break the grammar or not.
        guess = Masked(logits_of, None if script == "none" else script)
        options = {} if script == "none" else {"drafter": guess, "candidate_length": 3}
        engine = engine_of(logits_of, enable_overlap=overlap, **options)
        free = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        constrained, other, alone = run(engine, [PROMPT, PROMPT[::-1], PROMPT], [params(), free, params(max_tokens=2)])
        assert constrained.output == greedy(logits_of, PROMPT) and constrained.finish_reason == "stop"
        assert constrained.text.text in WORDS
        assert alone.output == constrained.output[:2]
        assert len(other.output) == 9, "a request without a grammar is free"
        assert_idle(engine)
        engine.close()


def test_drafts_end_where_the_grammar_does() -> None:
    logits_of = markov(V, seed=1)
    expected = greedy(logits_of, PROMPT)
    wrong = next(t for t in range(1, V) if t not in may_follow(expected[:1]))

    class Drafter(ScriptedDrafter):
        def _draft(self, request: Request, k: int) -> list[int]:
            return [expected[0], wrong, 1] if len(request.tokens) == len(PROMPT) else [wrong, *[0] * (k - 1)]

    engine = engine_of(logits_of, drafter=Drafter(None, V), candidate_length=3)
    [request] = run(engine, [[*PROMPT]], params())
    assert request.output == expected
    assert {drafts for step in engine.runner.steps for *_, drafts in step} == {0}, "drafts that cannot stand were run"


def test_an_end_token_in_a_draft_may_stand_where_the_text_is_complete() -> None:
    logits_of = markov(V, seed=2)
    expected = greedy(logits_of, PROMPT)

    class Drafter(ScriptedDrafter):
        def _draft(self, request: Request, k: int) -> list[int]:
            return [*expected[request.num_output :], 0, 0, 0, 0][:k]

    engine = engine_of(logits_of, drafter=Drafter(None, V), candidate_length=8)
    [request] = run(engine, [PROMPT], params())
    assert request.output == expected and request.finish_reason == "stop"
    first = len(expected) - 1  # the prompt's step brings one token, and all others are drafts
    assert [drafts for step in engine.runner.steps for *_, drafts in step] == [0, first]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    logits_of = markov(V, seed=3)
    engine = engine_of(logits_of, slots=24, page_size=2, max_num_seqs=4)
    requests = run(engine, [[1, 2, 3], [2, 3, 1], [3, 2, 1], [1, 3, 2]], params(regex="[abc]{24}", max_tokens=12))
    assert engine.scheduler.preemptions
    for request in requests:
        assert re.fullmatch("[abc]{1,24}", request.text.text)
    alone = run(engine_of(logits_of), [[1, 2, 3]], params(regex="[abc]{24}", max_tokens=12))
    assert requests[0].output == alone[0].output


# Distributions -----------------------------------------------------------------------------------------------------


def probabilities(logits_of, temperature: float) -> dict[tuple[int, ...], float]:
    """Of every whole output, by enumeration."""
    result, todo = {}, [((), 1.0)]
    while todo:
        output, chance = todo.pop()
        if output[-1:] == (0,):
            result[output] = chance
            continue
        x = masked(logits_of)([*PROMPT, *output]) / temperature
        p = np.exp(x - x.max())
        todo += [((*output, t), chance * w) for t, w in enumerate(p / p.sum()) if w]
    return result


class Dice:
    """Draws its drafts from a fixed q that knows no grammar."""

    name, forwards, bytes_read, weight_bytes = "dice", 0, 0, 0

    def __init__(self, k: int) -> None:
        self.rng, self.k = np.random.default_rng(5), k
        self.q = np.array([0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.6, 0.1])

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> Proposal:
        tokens = [self.rng.choice(V, size=length, p=self.q).tolist() for length in lengths]
        q = torch.tensor(self.q, dtype=torch.float32)
        return Proposal(tokens, [q.expand(len(draft), V) for draft in tokens])

    def release(self, request: Request) -> None:
        pass


class DiceTree(Dice):
    """The same as a tree: two tokens at each place, the second drawn without the first."""

    parents = (-1, -1, 0, 0, 1, 1)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> Proposal:
        drafts, qs = [], []
        for _ in lengths:
            tokens, rows = [], []
            for i in range(len(self.parents)):
                q = self.q.copy()
                if i % 2:
                    q[tokens[-1]] = 0
                rows.append(torch.tensor(q / q.sum(), dtype=torch.float32))
                tokens.append(int(self.rng.choice(V, p=q / q.sum())))
            drafts, qs = [*drafts, tokens], [*qs, torch.stack(rows)]
        fits = [tokens[:n] for tokens, n in zip(drafts, lengths, strict=True)]
        parents = [list(self.parents[:n]) for n in lengths]
        return Proposal(fits, [q[:n] for q, n in zip(qs, lengths, strict=True)], parents)


def distance(drafter, count: int = 2000, **options) -> tuple[float, int]:
    """Chi-square of the outputs of a sampled request, and its degrees of freedom."""
    logits_of = markov(V, seed=4)
    speculative = {"candidate_length": 3, "adaptive": False} | options
    engine = engine_of(logits_of, drafter=drafter, max_num_seqs=500, slots=16384, max_num_batched_tokens=4096,
                       **({"speculative_config": speculative} if drafter else {}))  # fmt: skip
    engine.config.__dict__["check_every_step"] = False
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(count // 500):
        seen.update(tuple(r.output) for r in run(engine, [PROMPT], params(temperature=1.3, n=500, seed=seed)))
    expected = {output: count * p for output, p in probabilities(logits_of, 1.3).items()}
    assert set(seen) <= set(expected), "an output that cannot be"
    cells = [output for output, n in expected.items() if n >= 5]
    assert len(cells) > 10
    return sum((seen[o] - expected[o]) ** 2 / expected[o] for o in cells), len(cells)


@pytest.mark.parametrize("kind", ["plain", "dice", "match", "tree", "tree match"])
def test_sampled_outputs_have_the_masked_distribution(kind: str) -> None:
    options = {"verification": "match"} if "match" in kind else {}
    if "tree" in kind:
        options |= {"candidate_length": 2, "topk": 2, "num_draft_tokens": 6}
    drafter = None if kind == "plain" else DiceTree(6) if "tree" in kind else Dice(3)
    value, freedom = distance(drafter, **options)
    assert value < freedom + 4 * (2 * freedom) ** 0.5


def test_a_draft_that_is_cut_needs_a_q_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.sampling.grammar.is_distribution", lambda q: torch.zeros(len(q), dtype=torch.bool))
    value, freedom = distance(Dice(3))
    assert value > freedom + 6 * (2 * freedom) ** 0.5, "the test above sees no bias"


# Masks -------------------------------------------------------------------------------------------------------------


def test_masks_are_those_of_the_language_after_every_draft() -> None:
    grammars = Grammars(letters(), V + 3, [0, 99])
    rng = np.random.default_rng(0)
    for _ in range(60):
        constraint, output = grammars.start("regex", REGEX), []
        while output[-1:] != [0]:
            drafts = rng.integers(0, V, size=4).tolist()
            masks, _ = constraint.masks(output, drafts)
            assert masks.shape[1] == V + 3 and not masks[:, V:].any(), "padding can never be written"
            for n, mask in enumerate(masks):
                history = output + drafts[:n]
                ended = history[-1:] == [0]
                assert np.flatnonzero(mask).tolist() == ([0] if ended else may_follow(history))
            last = drafts[: len(masks) - 1]
            follows = drafts[len(last)] if len(last) < 4 else None
            assert follows is None or last[-1:] == [0] or follows not in may_follow(output + last)
            output = output + [int(rng.choice(may_follow(output)))]


def test_masks_in_a_tree_follow_each_drafts_ancestors() -> None:
    grammars, rng, cut = Grammars(letters(), V, [0]), np.random.default_rng(2), 0
    for _ in range(150):
        constraint, output = grammars.start("regex", REGEX), []
        while output[-1:] != [0]:
            row = Row(None, 0, 0)
            row.drafts, row.parents = [], []
            for _ in range(9):
                token, parent = int(rng.integers(0, V)), int(rng.integers(-1, len(row.drafts)))
                if (token, parent) not in zip(row.drafts, row.parents, strict=True):
                    row.drafts, row.parents = [*row.drafts, token], [*row.parents, parent]
            paths = [row.path(draft) for draft in range(len(row.drafts))]
            texts = [[row.drafts[each] for each in path] for path in paths]
            stand = [
                all(text[n] in may_follow(output + text[:n]) and 0 not in text[:n] for n in range(len(text)))
                for text in texts
            ]
            masks, kept = constraint.masks(output, row.drafts, paths)
            assert kept == [draft for draft, good in enumerate(stand) if good]
            for text, mask in zip([[], *(texts[draft] for draft in kept)], masks, strict=True):
                assert np.flatnonzero(mask).tolist() == ([0] if text[-1:] == [0] else may_follow(output + text))
            row.keep(kept)
            assert [[row.drafts[i] for i in row.path(d)] for d in range(len(kept))] == [texts[draft] for draft in kept]
            cut += 0 < len(kept) < len(stand)
            output = output + [int(rng.choice(may_follow(output)))]
    assert cut > 50


def test_q_of_a_tree_is_cut_to_what_may_follow_the_parent() -> None:
    constraint = Grammars(letters(), V, [0]).start("regex", REGEX)
    row = Row(SimpleNamespace(constraint=constraint, prompt=[], tokens=[1]), 0, 1)
    row.drafts, row.parents = [2, 7, 3, 1, 0], [-1, -1, 0, 0, 2]
    row.q = torch.rand(5, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    histories, q = [[1], [1], [1, 2], [1, 2, 3]], row.q[[0, 1, 2, 4]]
    constrain([row], torch.device("cpu"))
    assert (row.drafts, row.parents) == ([2, 7, 3, 0], [-1, -1, 0, 2])
    for history, before, after in zip(histories, q, row.q, strict=True):
        expected = torch.zeros(V)
        expected[may_follow(history)] = before[may_follow(history)]
        assert torch.allclose(after, expected / expected.sum())


def test_masks_depend_on_what_was_written_and_on_nothing_else(tiny: LLM) -> None:
    grammars, rng = tiny.engine.intake.grammars, np.random.default_rng(1)
    constraint, output = grammars.start("json_schema", json.dumps(SCHEMA)), []
    for _ in range(60):
        (masks, _), draft = constraint.masks(output, []), []
        for _ in range(4):  # a draft that makes sense for a while
            draft.append(int(rng.choice(np.flatnonzero(masks[-1]))))
            masks, _ = constraint.masks(output, draft)
        fresh = grammars.start("json_schema", json.dumps(SCHEMA))
        for n, mask in enumerate(masks):
            if 2 not in draft[:n]:
                assert (mask == fresh.masks(output + draft[:n], [])[0][0]).all()
        output.append(draft[0])
        if output[-1] == 2:
            break
    json.loads(tiny.tokenizer.decode(output, skip_special_tokens=True))


def test_completions_have_states_of_their_own() -> None:
    engine = engine_of(markov(V, seed=6))
    requests = run(engine, [PROMPT], params(temperature=2.0, n=20, seed=1))
    texts = [request.text.text for request in requests]
    assert set(texts) <= set(WORDS) and len(set(texts)) > 3


def test_a_parser_that_gives_up_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(markov(V, seed=1))
    [bad] = engine.add(PROMPT, params())
    [good] = engine.add(PROMPT, params())
    bad.constraint._matcher.consume_token(0)  # no word is empty: from here on it is in error
    finish(engine)
    assert (bad.finish_reason, good.finish_reason) == ("error", "stop") and "can be chosen" in bad.error
    assert good.output == greedy(markov(V, seed=1), PROMPT) and "ends its request" in caplog.text


# The border --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"regex": "("}, "regex '(' cannot be used"),
        ({"json_schema": {"type": "nope"}}, "Invalid type: nope"),
        ({"json_schema": "{"}, "json_schema '{' cannot be used"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"ebnf": "root ::= x"}, "'x' not found"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(given, fragment: str) -> None:
    engine = engine_of(markov(V))
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        engine.add(PROMPT, SamplingParams(**given))
    assert not engine.requests


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"regex": ""}, "regex must be text that is not empty"),
        ({"regex": 5}, "regex"),
        ({"json_schema": {"a": {1, 2}}}, "is not JSON"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_makes_no_sense_is_refused(given, fragment: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        SamplingParams(**given)


def test_a_grammar_needs_a_tokenizer_and_an_end() -> None:
    for engine in (tag_engine(), tag_engine(vocab_size=V, tokenizer=letters())):
        with pytest.raises(ConfigError, match="fast tokenizer and an end token"):
            engine.add([1], params())


def test_grammars_are_compiled_once_and_by_any_thread() -> None:
    grammars, compiled = Grammars(letters(), V, [0]), []
    threads = [threading.Thread(target=lambda: compiled.append(grammars.compile("regex", REGEX))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grammars.compile("regex", REGEX) in compiled and grammars.compile.cache_info().currsize == 1
    both = [SamplingParams(json_schema=value) for value in ({"type": "object"}, '{"type": "object"}')]
    assert len(set(both)) == 1


# The three kinds, in a model that knows bytes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> LLM:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("grammar"), "llama")
    drafts = {"draft_model": ["early-exit", "ngram"], "candidate_length": 3, "early_exit_layers": 1}
    return LLM(str(folder), dtype="float32", kv_cache_tokens=2048, speculative_config=drafts, check_every_step=True)


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["é", "b"]}, "list": {"type": "array", "maxItems": 2,
                   "items": {"type": "boolean"}}},
    "required": ["n", "kind", "list"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_every_kind_of_grammar_holds(tiny: LLM, temperature: float) -> None:
    each = [
        {"regex": r"[0-9]{1,3}-(é|日本)"}, {"ebnf": 'root ::= "x" y\ny ::= [0-9] | "(" y ")"'}, {"json_schema": SCHEMA}
    ]  # fmt: skip
    settings = [SamplingParams(temperature=temperature, seed=3, max_tokens=200, **given) for given in each]
    number, nested, data = (output.text for output in tiny.generate(["a"] * 3, settings))
    assert re.fullmatch(r"[0-9]{1,3}-(é|日本)", number)
    assert re.fullmatch(r"x\(*[0-9]\)*", nested) and nested.count("(") == nested.count(")")
    assert set(value := json.loads(data)) == {"n", "kind", "list"} and value["kind"] in ("é", "b")
    plain = [SamplingParams(temperature=0, max_tokens=200, speculative=False, **given) for given in each]
    fast = [SamplingParams(temperature=0, max_tokens=200, **given) for given in each]
    one, other = ([out.token_ids for out in tiny.generate(["a"] * 3, its)] for its in (plain, fast))
    assert one == other
    assert_idle(tiny.engine)
