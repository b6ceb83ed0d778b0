"""Training of MTP heads: the text, the features, the unrolled module, the loop, the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_checkpoints import write_tiny_checkpoint

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.config import ConfigError
from minispec.core import TokenKind
from minispec.models.llama import CausalLM
from minispec.models.mtp import MTPModule, save_mtp
from minispec.training.__main__ import main
from minispec.training.data import Conversations, Frame, held_out_rows, write_conversations
from minispec.training.features import Features, LinearFit, compute_features, spoken_next
from minispec.training.train import Recipe, Trainer, draft_vocabulary, new_module
from minispec.training.unroll import Batch, DepthResult, HeadLoss, acceptance, unroll

LENGTH = 56
RECIPE = Recipe(steps=12, batch=4, held_out=3, evaluate_every=4, vocab=200, warmup=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), dtype="float32", max_num_seqs=6, kv_cache_tokens=1024)


@pytest.fixture(scope="module")
def text(llm) -> Conversations:
    """What the pipeline writes."""
    return write_conversations(llm, 24, LENGTH, question_tokens=6, seed=1, progress=False)


@pytest.fixture(scope="module")
def data(llm) -> Conversations:
    """Greedy answers of 40 tokens: a random model soon repeats itself, so there is something to learn."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 300, (24, 8)).tolist()
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=LENGTH - 8, ignore_eos=True))
    tokens = np.array([p + a.token_ids for p, a in zip(prompts, answers, strict=True)], dtype=np.uint16)
    return Conversations(tokens, np.tile(np.arange(LENGTH) >= 8, (24, 1)), np.zeros(24, np.float16))


@pytest.fixture(scope="module")
def features(llm, data) -> Features:
    return compute_features(llm.model, data, held_out_rows(data, 3, 0), batch=5, progress=False)


def trainer(llm, data, features, recipe=RECIPE) -> Trainer:
    vocab_ids = draft_vocabulary(data, recipe.vocab, llm.engine.runner.vocab_size)
    head = llm.model.head.plain_weight[vocab_ids]
    module = new_module(llm.model, features.projection)
    held_out = held_out_rows(data, recipe.held_out, recipe.seed)
    return Trainer(module, llm.model, head, vocab_ids, data, features, held_out, recipe)


# Text ----------------------------------------------------------------------------------------------------------


def test_text_has_one_length_and_its_answers_are_what_the_engine_answers(llm, text):
    assert text.token_ids.shape == text.answer_mask.shape == (24, LENGTH)
    frame = Frame.of(llm)
    greedy = 0
    for tokens, mask, temperature in zip(*text, strict=True):
        assert list(tokens[: len(frame.opening)]) == frame.opening
        starts = np.flatnonzero(mask & ~np.pad(mask[:-1], (1, 0)))
        for start in starts:
            assert list(tokens[start - len(frame.to_answer) : start]) == frame.to_answer
            if temperature == 0:
                [output] = llm.generate([tokens[:start].tolist()], SamplingParams(temperature=0, max_tokens=8))
                end = start + int(mask[start:].argmin() or LENGTH - start)
                assert output.token_ids[: end - start] == tokens[start : min(end, start + 8)].tolist()
                greedy += 1
    assert greedy >= 3 and text.answer_mask.mean() > 0.1


def test_text_depends_on_the_seed_alone(llm, text):
    again = write_conversations(llm, 24, LENGTH, question_tokens=6, seed=1, progress=False)
    assert all(np.array_equal(a, b) for a, b in zip(text, again, strict=True))


@pytest.mark.parametrize("length", [3, 5000])
def test_a_length_without_room_is_refused(llm, length):
    with pytest.raises(ConfigError, match=f"got {length}"):
        write_conversations(llm, 1, length, progress=False)


def test_text_survives_its_file_and_mixed_lengths_are_refused(tmp_path, text):
    text.save(tmp_path / "a.npz")
    Conversations(*(x[:2, :30] if x.ndim == 2 else x[:2] for x in text)).save(tmp_path / "b.npz")
    twice = Conversations.load(tmp_path / "a.npz", tmp_path / "a.npz")
    assert len(twice.token_ids) == 48 and np.array_equal(twice.answer_mask[24:], text.answer_mask)
    with pytest.raises(ConfigError, match=r"\[30, 56\]"):
        Conversations.load(tmp_path / "a.npz", tmp_path / "b.npz")
    with pytest.raises(ConfigError, match="c.npz"):
        Conversations.load(tmp_path / "c.npz")


# Features ------------------------------------------------------------------------------------------------------


def test_features_are_the_target_s_own_hidden_states_and_choices(llm, data, features):
    tokens = torch.from_numpy(data.token_ids[7].astype(np.int64))
    with torch.inference_mode():
        hidden = llm.model.forward(tokens, torch.arange(LENGTH), CausalAttention())
        p = llm.model.logits(hidden).softmax(-1)
    torch.testing.assert_close(features.hidden[7], hidden, rtol=1e-4, atol=1e-4)
    spoken = torch.from_numpy(spoken_next(data)[7])
    assert torch.equal(features.top_ids[7, spoken, 0].long(), p[spoken].argmax(-1))
    torch.testing.assert_close(features.top_probs[7, spoken].float(), p[spoken].topk(8).values, rtol=0, atol=1e-3)
    assert not features.top_probs[7, ~spoken].any()
    assert spoken[:-1].tolist() == data.answer_mask[7, 1:].tolist() and not spoken[-1]


def test_linear_fit_is_least_squares_whatever_the_parts():
    x, w = torch.randn(200, 6), torch.randn(4, 6)
    fit = LinearFit(6, 4, torch.device("cpu"))
    for part in x.split(37):
        fit.add(part, part @ w.T + 1e-3 * torch.randn(len(part), 4))
    torch.testing.assert_close(fit.solve(ridge=0), w, rtol=0, atol=1e-3)


def test_held_out_conversations_do_not_move_the_projection(llm, data, features):
    held_out = held_out_rows(data, 3, 0)
    assert (data.temperature[held_out] == 0).all()
    changed = Conversations(data.token_ids.copy(), data.answer_mask, data.temperature)
    changed.token_ids[held_out] = 7
    other = compute_features(llm.model, changed, held_out, progress=False)
    torch.testing.assert_close(other.projection, features.projection, rtol=1e-3, atol=1e-3)
    changed.token_ids[np.setdiff1d(np.arange(24), held_out), -9:] = 7
    other = compute_features(llm.model, changed, held_out, progress=False)
    assert (other.projection - features.projection).abs().max() > 1e-2
    with pytest.raises(ConfigError, match="hold 24 greedy ones out"):
        held_out_rows(data, 24, 0)


# The unrolled module -------------------------------------------------------------------------------------------


def random_batch(target: CausalLM, vocab: int, rows: int = 9) -> Batch:
    H = target.config.hidden_size
    return Batch(
        torch.randint(vocab, (2, rows)),
        torch.randn(2, rows, H),
        torch.rand(2, rows) < 0.8,
        torch.randint(vocab, (2, rows)),
        torch.randint(vocab, (2, rows, 8)),
        torch.rand(2, rows, 8).softmax(-1) * 0.9,
    )


def chain_states(
    module: MTPModule, target: CausalLM, tokens: torch.Tensor, hidden: torch.Tensor, row: int, depths: int
):
    """hidden' of the last row of a chain of `depths` drafts that ends at `row`, computed one row after another."""
    keys, values, state = [], [], None

    def attend(layer, q, k, v):
        keys.append(k)
        values.append(v)
        K, V = torch.cat(keys), torch.cat(values)  # [n, Hkv, D]
        group = q.shape[1] // K.shape[1]
        K, V = K.repeat_interleave(group, 1), V.repeat_interleave(group, 1)
        weights = (torch.einsum("qhd,nhd->hqn", q, K) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hqn,nhd->qhd", weights, V)

    first = row - depths + 1
    for p in range(row + 1):
        cos, sin = target.rotary(torch.tensor([p]))
        state = hidden[p : p + 1] if p <= first else state
        state = module(target.embedding(tokens[p + 1 : p + 2]), state, cos, sin, attend)
    return state[0]


def test_unrolled_rows_are_what_drafting_computes_row_by_row(llm, monkeypatch):
    target, vocab = llm.model, llm.model.config.vocab_size
    module = new_module(target, torch.randn(32, 64) / 8)
    batch = random_batch(target, vocab)
    states = []
    monkeypatch.setattr(HeadLoss, "apply", lambda s, *rest: (states.append(s), (s.sum(-1), s.argmax(-1)))[1])
    everywhere = batch._replace(spoken=torch.ones_like(batch.spoken))
    with torch.no_grad():
        unroll(module, target, target.embedding.weight, everywhere, 4, torch.float32)
        for k, state in enumerate(states):
            state = state.view(2, 8 - k, -1)  # the first k rows have no chain of this depth
            for b in range(2):
                for row in range(k, 8):
                    expected = chain_states(module, target, batch.token_ids[b], batch.hidden[b], row, k + 1)
                    torch.testing.assert_close(state[b, row - k], expected, rtol=1e-4, atol=1e-4)


def test_head_loss_is_cross_entropy_with_its_gradient(monkeypatch):
    monkeypatch.setattr("minispec.training.unroll.LOSS_ROWS", 3)
    states = torch.randn(7, 5, requires_grad=True)
    head, ids = torch.randn(11, 5), torch.stack([torch.randperm(11)[:4] for _ in range(7)])
    probs = torch.rand(7, 4) / 4
    dense = torch.zeros(7, 11).scatter(1, ids, probs)
    expected = F.cross_entropy(states @ head.T, dense, reduction="none")
    scale = torch.rand(7)
    (expected * scale).sum().backward()
    wanted, states.grad = states.grad, None
    losses, best = HeadLoss.apply(states, head, ids, probs)
    (losses * scale).sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(states.grad, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
    assert torch.equal(best, (states @ head.T).argmax(-1))


def test_acceptance_counts_chains_and_not_single_drafts():
    right = torch.tensor([[1, 1, 0, 1, 1]]).bool(), torch.tensor([[0, 1, 1, 0, 1]]).bool()
    learnt = torch.ones(1, 5).bool(), torch.tensor([[0, 1, 1, 1, 1]]).bool()
    results = [DepthResult(torch.tensor(0.0), m, r) for m, r in zip(learnt, right, strict=True)]
    # chains from rows 0..3: (1,1) (1,1) (0,-) (1,1): kept 2, 2, 0, 2
    agreement, length = acceptance(results)
    assert agreement == pytest.approx([4 / 5, 3 / 4]) and length == pytest.approx(1 + 6 / 4)


# The loop ------------------------------------------------------------------------------------------------------


def test_training_learns_and_only_the_module_moves(llm, data, features):
    run = trainer(llm, data, features, replace(RECIPE, steps=80, lr=0.01, depth1_share=0.3))
    before = {name: p.clone() for name, p in llm.model.state_dict().items()}
    rows = run.batch(run.train_rows)  # what a random target says of other text cannot be foreseen
    first, last = unroll(run.module, llm.model, run.head, rows, 3, torch.float32), run.run(progress=False)
    assert [entry.step for entry in last] == list(range(4, 81, 4))
    last = unroll(run.module, llm.model, run.head, rows, 3, torch.float32)
    assert all(b.loss < a.loss - 0.15 for a, b in zip(first, last, strict=True))
    assert acceptance(last)[1] > acceptance(first)[1] + 0.15, (acceptance(first), acceptance(last))
    assert all(torch.equal(before[name], p) for name, p in llm.model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in llm.model.parameters())


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(llm, data, features, tmp_path):
    whole = trainer(llm, data, features)
    expected = whole.run(progress=False)
    path = tmp_path / "checkpoint.pt"
    first = trainer(llm, data, features)
    train, calls = first._train, []

    def interrupted(batch):
        calls.append(1)
        if len(calls) == 7:  # after the checkpoint of step 4
            raise KeyboardInterrupt
        return train(batch)

    first._train = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.run(path, progress=False)
    second = trainer(llm, data, features)
    history = second.run(path, progress=False)
    assert [h.agreement for h in history] == [h.agreement for h in expected]
    for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ConfigError, match="another folder"):
        trainer(llm, data, features, replace(RECIPE, lr=0.5)).run(path, progress=False)


def test_each_epoch_reads_every_conversation_once(llm, data, features, monkeypatch):
    run = trainer(llm, data, features)
    seen: list[int] = []
    monkeypatch.setattr(run, "batch", lambda rows: seen.extend(rows))
    batches = run._batches()
    for _ in range(10):  # two epochs of 21 // 4
        next(batches)
    assert len(set(seen[:20])) == len(set(seen[20:])) == 20 and seen[:20] != seen[20:]
    assert not set(seen) & set(run.held_out)


def test_too_little_text_is_refused(llm, data, features):
    with pytest.raises(ConfigError, match="21 conversations to learn from are less than a batch of 22"):
        trainer(llm, data, features, replace(RECIPE, batch=22))


def test_the_engine_keeps_the_drafts_that_the_trainer_calls_right(llm, folder, data, features, tmp_path):
    run = trainer(llm, data, features, replace(RECIPE, steps=60, lr=0.01))
    run.run(progress=False)
    vocab_ids = torch.nonzero(run.to_draft >= 0)[:, 0]
    save_mtp(tmp_path / "head.safetensors", run.module, llm.model_config, draft_ids=vocab_ids, dtype=torch.float32)
    config = {"draft_model": "mtp", "draft_head": str(tmp_path / "head.safetensors"), "candidate_length": 1}
    engine = LLM(str(folder), dtype="float32", speculative_config=config)
    greedy = np.flatnonzero(data.temperature == 0)
    [result] = unroll(run.module, llm.model, run.head, run.batch(greedy), 1, torch.float32)
    judged = []
    for right, tokens, mask in zip(result.right, data.token_ids[greedy], data.answer_mask[greedy], strict=True):
        start = int(mask.argmax())
        spoken = int(mask[start:].argmin() or LENGTH - start)
        params = SamplingParams(temperature=0, max_tokens=spoken, ignore_eos=True)
        output = engine.generate([tokens[:start].tolist()], params)[0].outputs[0]
        assert output.token_ids == tokens[start : start + spoken].tolist()
        for place, kind in enumerate(output.kinds):  # row i reads token i + 1 and drafts token i + 2
            if kind in (TokenKind.ACCEPTED, TokenKind.CORRECTED):
                assert (kind is TokenKind.ACCEPTED) == bool(right[start + place - 2]), (start, place)
                judged.append(kind)
    assert judged.count(TokenKind.ACCEPTED) > 5 and judged.count(TokenKind.CORRECTED) > 5, judged


# The command ---------------------------------------------------------------------------------------------------


def test_command_makes_a_head_that_the_engine_loads(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model", "qwen3")
    work = tmp_path / "work"
    command = ["--work", str(work), "--model", str(folder), "--dtype", "float32", "--conversations", "20"]
    command += [
        "--length",
        "64",
        "--question-tokens",
        "6",
        "--steps",
        "4",
        "--batch",
        "4",
        "--held-out",
        "3",
        "--evaluate-every",
        "2",
        "--vocab",
        "150",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "step 4" in out and str(work / "mtp.safetensors") in out
    files = {path.name: path.stat().st_mtime_ns for path in work.iterdir()}
    assert set(files) == {"text.npz", "features.safetensors", "checkpoint.pt", "mtp.safetensors"}
    assert main(command) == 0  # nothing is left to do but to write the head again
    kept = ("text.npz", "features.safetensors", "checkpoint.pt")
    assert all((work / name).stat().st_mtime_ns == files[name] for name in kept)
    assert main([*command, "--length", "48", "--question-tokens", "96", "--work", str(tmp_path / "short")]) == 2
    assert "the assistant says nothing in 20 conversations of 48 tokens" in capsys.readouterr().err
    Conversations.load(work / "text.npz")[0].tofile(tmp_path / "raw")
    other = Conversations(*(x.copy() for x in Conversations.load(work / "text.npz")))
    other.token_ids[0, -1] ^= 1
    other.save(tmp_path / "other.npz")
    assert main([*command, "--data", str(tmp_path / "other.npz")]) == 2  # features of another text
    assert f"belongs to text {Conversations.load(work / 'text.npz').digest}" in capsys.readouterr().err
    for option, value in (("--steps", "0"), ("--depth1-share", "2"), ("--lr", "-1"), ("--data", str(tmp_path / "raw"))):
        assert main([*command, option, value]) == 2 and value in capsys.readouterr().err
    for name in ("features.safetensors", "checkpoint.pt"):
        whole = (work / name).read_bytes()
        (work / name).write_bytes(whole[:1000])
        assert main(command) == 2 and f"{name} is not a complete" in capsys.readouterr().err
        (work / name).write_bytes(whole)
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=20)
    plain = LLM(str(folder), dtype="float32").generate([prompt], params)[0]
    config = {"draft_model": "mtp", "draft_head": str(work / "mtp.safetensors"), "candidate_length": 3}
    speculating = LLM(str(folder), dtype="float32", speculative_config=config).generate([prompt], params)[0]
    assert speculating.token_ids == plain.token_ids and speculating.metrics.speculation.drafted > 0
    assert main([*command[:-1], "100"]) == 2 and "another folder" in capsys.readouterr().err
    more = [*command, "--start", str(work / "mtp.safetensors"), "--data", str(work / "text.npz")]
    more[1] = str(tmp_path / "more")
    assert main([*more, "--lr", "0.0"]) == 0  # a step of 0 leaves the head as it was
    before, after = (load_file(tmp_path / name / "mtp.safetensors") for name in ("work", "more"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    write_tiny_checkpoint(tmp_path / "other", "llama")
    more[1] = str(tmp_path / "third")
    more[more.index("--start") + 1] = str(tmp_path / "other" / "model.safetensors")
    assert main(more) == 2 and "MTP module" in capsys.readouterr().err
