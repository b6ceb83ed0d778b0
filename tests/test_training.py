"""Training of MTP heads: the text, the features, the unrolled module, the loop, the command."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_drafters import write_head
from tiny_checkpoints import write_tiny_checkpoint

from minispec import LLM, SamplingParams
from minispec.attention.naive import CausalAttention
from minispec.config import ConfigError
from minispec.models.llama import CausalLM
from minispec.models.mtp import MTPModule, save_mtp
from minispec.training.__main__ import main
from minispec.training.data import Conversations, Frame, _Conversation, held_out_rows, write_conversations
from minispec.training.features import Features, LinearFit, compute_features, spoken_next
from minispec.training.train import Recipe, Trainer, draft_vocabulary, new_module
from minispec.training.unroll import Batch, DepthResult, HeadLoss, acceptance, unroll

LENGTH = 56
RECIPE = Recipe(steps=12, batch_size=4, num_held_out=3, evaluate_every=4, vocab=200, warmup=1)


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
    """Greedy answers of 48 tokens: a random model soon repeats itself, so there is something to learn."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 300, (24, 8)).tolist()
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=LENGTH - 8, ignore_eos=True))
    tokens = np.array([p + a.token_ids for p, a in zip(prompts, answers, strict=True)], dtype=np.uint16)
    return Conversations(tokens, np.tile(np.arange(LENGTH) >= 8, (24, 1)), np.zeros(24, np.float16))


@pytest.fixture(scope="module")
def features(llm, data) -> Features:
    return compute_features(llm.model, data, held_out_rows(data, 3, 0), batch_size=5, progress=False)


def trainer(llm, data, features, recipe=RECIPE) -> Trainer:
    vocab_ids = draft_vocabulary(data, recipe.vocab, llm.engine.runner.vocab_size)
    module = new_module(llm.model, features.projection)
    held_out = held_out_rows(data, recipe.num_held_out, recipe.seed)
    return Trainer(module, llm.model, vocab_ids, data, features, held_out, recipe)


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


def test_the_end_of_a_turn_is_the_speakers_if_he_said_it():
    frame, eos_ids = Frame([1], to_answer=[9, 7], to_question=[9, 8]), frozenset({9, 2})
    conversation = _Conversation([1], [False], 0.0)
    for said in ([4, 9], [5, 9], [4, 2], [5, 6]):  # the frame's end token, another one, none
        conversation.request = SimpleNamespace(output=said)
        conversation.end_turn(frame, eos_ids)
    assert conversation.tokens == [1, 4, 9, 7, 5, 9, 8, 4, 9, 7, 5, 6, 9, 8]
    assert [t for t, spoken in zip(conversation.tokens, conversation.mask, strict=True) if spoken] == [5, 9, 5, 6]


def test_greedy_conversations_are_held_out(text):
    greedy = set(np.flatnonzero(text.temperature == 0))
    rows = held_out_rows(text, len(greedy), 0)
    assert set(rows) == greedy and 0 < len(greedy) < len(text.temperature)
    assert list(held_out_rows(text, 3, 1)) != list(held_out_rows(text, 3, 0)) == sorted(held_out_rows(text, 3, 0))
    with pytest.raises(ConfigError, match=f"hold {len(greedy) + 1} greedy ones out"):
        held_out_rows(text, len(greedy) + 1, 0)


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
    text._replace(answer_mask=text.answer_mask[:, 1:]).save(tmp_path / "d.npz")
    Conversations(text.token_ids[0], text.answer_mask[0], np.zeros(LENGTH)).save(tmp_path / "e.npz")
    text._replace(temperature=text.temperature[1:]).save(tmp_path / "f.npz")
    for name, shape in {"d.npz": r"\(24, 55\)", "e.npz": r"\(56,\)", "f.npz": r"\(23,\)"}.items():
        with pytest.raises(ConfigError, match=f"{name}.*shapes.*{shape}"):
            Conversations.load(tmp_path / name)


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
        unroll(module, target, target.embedding.weight, everywhere, 4)
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
    right = torch.tensor([[1, 1, 0, 0, 0]]).bool(), torch.tensor([[0, 1, 0, 1, 0]]).bool()
    learnt = torch.tensor([[1, 1, 1, 1, 0]]).bool(), torch.tensor([[0, 1, 1, 1, 0]]).bool()
    results = [DepthResult(torch.zeros(0), m, r) for m, r in zip(learnt, right, strict=True)]
    # chains from rows 0..3: (1, 1) (1, 0) (0, 1), and one that leaves the answer: kept 2, 1, 0
    agreement, length = acceptance(results)
    assert agreement == pytest.approx([2 / 4, 2 / 3]) and length == pytest.approx(1 + 3 / 3)


# The loop ------------------------------------------------------------------------------------------------------


def test_training_learns_and_only_the_module_moves(llm, data, features, capfd):
    run = trainer(llm, data, features, replace(RECIPE, steps=80, lr=0.01, depth1_share=0.3))
    before = {name: p.clone() for name, p in llm.model.state_dict().items()}
    rows = run.batch_of(run.train_rows)  # what a random target says of other text cannot be foreseen
    first, last = unroll(run.module, llm.model, run.head, rows, 3), run.run(progress=False)
    assert capfd.readouterr() == ("", "")
    assert [entry.step for entry in last] == list(range(4, 81, 4))
    last = unroll(run.module, llm.model, run.head, rows, 3)
    assert all(b.loss < a.loss - 0.15 for a, b in zip(first, last, strict=True))
    assert acceptance(last)[1] > acceptance(first)[1] + 0.1, (acceptance(first), acceptance(last))
    assert all(torch.equal(before[name], p) for name, p in llm.model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in llm.model.parameters())


def test_a_new_module_is_the_last_layer_behind_the_projection(tmp_path):
    """Of a target whose matrices are packed (where the machine packs)."""
    folder = write_tiny_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=512)
    target, projection = LLM(str(folder), dtype="float32", kv_cache_tokens=64).model, torch.randn(256, 512) / 20
    module, (embedded, hidden) = new_module(target, projection), torch.randn(2, 5, 256)
    tables = target.rotary(torch.arange(5))
    normed = torch.cat([F.rms_norm(x, (256,), eps=target.config.rms_norm_eps) for x in (embedded, hidden)], -1)
    expected = target.norm(target.layers[-1](normed @ projection.T, *tables, CausalAttention()))
    actual = module(embedded, hidden, *tables, CausalAttention())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_an_evaluation_in_parts_is_one_of_the_whole(llm, data, features):
    run = trainer(llm, data, features, replace(RECIPE, num_held_out=9))  # batches of 5 and 4
    with torch.no_grad():
        whole = unroll(run.module, llm.model, run.head, run.batch_of(run.held_out), RECIPE.depths)
    (agreement, length), (expected, expected_length) = run.evaluate(), acceptance(whole)
    assert agreement == pytest.approx(expected, abs=0.005) and length == pytest.approx(expected_length, abs=0.005)


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
    assert history == expected
    for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ConfigError, match="another folder"):
        trainer(llm, data, features, replace(RECIPE, lr=0.5)).run(path, progress=False)


def test_each_epoch_reads_every_conversation_once(llm, data, features, monkeypatch):
    run = trainer(llm, data, features, replace(RECIPE, steps=10, evaluate_every=99))  # two epochs of 21 // 4
    seen: list[int] = []
    monkeypatch.setattr(run, "batch_of", lambda rows: seen.extend(rows))
    monkeypatch.setattr(run, "_train", lambda batch: 0.0)
    monkeypatch.setattr(run, "evaluate", lambda: ([], 1.0))
    run.run(progress=False)
    assert len(set(seen[:20])) == len(set(seen[20:])) == 20 and seen[:20] != seen[20:]
    assert not set(seen) & set(run.held_out)


def test_schedule_of_depths_and_rates(llm, data, features, monkeypatch):
    run = trainer(llm, data, features, replace(RECIPE, steps=8, warmup=2, lr=0.01, depth_decay=0.5, evaluate_every=99))
    monkeypatch.setattr(run, "evaluate", lambda: ([], 1.0))
    losses, rates = [], []

    def unrolled(module, target, head, batch, depths):
        losses.append([torch.ones(2, requires_grad=True) for _ in range(depths)])
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in run.optimizers])
        return [DepthResult(loss, None, None) for loss in losses[-1]]

    monkeypatch.setattr("minispec.training.train.unroll", unrolled)
    run.run(progress=False)
    for step, factor in enumerate([0.5, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]):
        assert rates[step] == pytest.approx([0.01 * factor, 0.001 * factor])
        weights = [loss.grad.sum().item() for loss in losses[step]]
        assert weights == pytest.approx([1] if step < 4 else [4 / 7, 2 / 7, 1 / 7])


def test_numbers_out_of_range_are_refused():
    for name, value in (("seed", 0.5), ("seed", -1), ("batch_size", 0), ("num_held_out", 2.5), ("depth_decay", 1.5)):
        with pytest.raises(ConfigError, match=f"{name} must be.*got {value}"):
            Recipe(**{name: value})


def test_too_little_text_is_refused(llm, data, features):
    with pytest.raises(ConfigError, match="21 conversations to learn from are less than a batch of 22"):
        trainer(llm, data, features, replace(RECIPE, batch_size=22))


def test_the_engine_keeps_as_many_drafts_as_the_trainer_calls_right(llm, folder, data, features, tmp_path):
    K, start = 3, 8
    run = trainer(llm, data, features, replace(RECIPE, steps=60, lr=0.01))
    run.run(progress=False)
    vocab_ids = torch.nonzero(run.to_draft >= 0)[:, 0]
    save_mtp(tmp_path / "head.safetensors", run.module, llm.model_config, draft_ids=vocab_ids, dtype=torch.float32)
    config = {
        "draft_model": "mtp",
        "draft_head": str(tmp_path / "head.safetensors"),
        "candidate_length": K,
        "adaptive": False,
    }
    speculating = LLM(str(folder), dtype="float32", enable_overlap=False, speculative_config=config)
    drafter, steps = speculating.engine.drafters[0], []

    def propose(requests, lengths, propose=drafter.propose):
        proposal = propose(requests, lengths)
        steps.append((len(requests[0].tokens), len(proposal.tokens[0])))
        return proposal

    drafter.propose = propose
    results = unroll(run.module, llm.model, run.head, run.batch_of(np.arange(len(data.token_ids))), K)
    right = torch.stack([result.right for result in results], 1)  # [conversations, K, rows]
    counted = [0] * (K + 1)
    for tokens, of_depth in zip(data.token_ids.tolist(), right, strict=True):
        steps.clear()
        params = SamplingParams(temperature=0, max_tokens=LENGTH - start, ignore_eos=True)
        [output] = speculating.generate([tokens[:start]], params)
        assert output.token_ids == tokens[start:]
        for (length, drafted), (after, _) in pairwise(steps):  # the last step may be one without a draft
            row = length - 2  # reads the last token; of depth k, its chain goes on in row + k
            kept = [bool(of_depth[k, row + k]) for k in range(drafted)]
            expected = (kept + [False]).index(False)
            assert after - length == expected + 1, (length, kept)
            counted[expected] += drafted == K
    assert counted[0] > 20 and sum(counted[1:K]) > 20 and counted[K] > 5, counted


# The command ---------------------------------------------------------------------------------------------------


OPTIONS = "--dtype float32 --conversations 20 --length 64 --question-tokens 6 --steps 4 --batch-size 4 "
OPTIONS += "--num-held-out 3 --evaluate-every 2 --vocab 150"
STAGES = ("text.npz", "features.safetensors", "checkpoint.pt")


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    """The command in a folder where it has run to its end; command[1] is that folder, command[3] the model's."""
    root = tmp_path_factory.mktemp("command")
    folder = write_tiny_checkpoint(root / "model", "qwen3")
    command = ["--work", str(root / "work"), "--model", str(folder), *OPTIONS.split()]
    assert main(command) == 0
    return command


def test_command_makes_a_head_that_the_engine_loads(command):
    work, folder = Path(command[1]), command[3]
    assert {path.name for path in work.iterdir()} == {*STAGES, "mtp.safetensors"}
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=20)
    plain = LLM(folder, dtype="float32").generate([prompt], params)[0]
    config = {"draft_model": "mtp", "draft_head": str(work / "mtp.safetensors"), "candidate_length": 3}
    speculating = LLM(folder, dtype="float32", speculative_config=config).generate([prompt], params)[0]
    assert speculating.token_ids == plain.token_ids and speculating.metrics.speculation.drafted > 0


def test_command_passes_over_what_is_there(command, capsys):
    work = Path(command[1])
    before = {name: (work / name).stat().st_mtime_ns for name in STAGES}
    assert main(command) == 0
    assert {name: (work / name).stat().st_mtime_ns for name in STAGES} == before
    out = capsys.readouterr().out
    assert "step 4: loss " in out and str(work / "mtp.safetensors") in out
    assert main([*command, "--vocab", "100"]) == 2 and "another folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", STAGES)
def test_command_names_a_damaged_file(command, capsys, name):
    path = Path(command[1], name)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert main(command) == 2 and f"{name} " in capsys.readouterr().err
    path.write_bytes(whole)


def test_command_refuses_bad_options_and_text_in_one_sentence(command, capsys, tmp_path):
    def complaint(*options: str) -> str:
        assert main([*command, *options]) == 2
        return capsys.readouterr().err

    Conversations.load(Path(command[1], "text.npz"))[0].tofile(tmp_path / "raw")
    for option, value in (("--steps", "0"), ("--depth1-share", "2"), ("--lr", "-1"), ("--data", str(tmp_path / "raw"))):
        assert value in complaint(option, value)
    assert "float16" in complaint("--dtype", "float16", "--device", "cpu")
    assert str(tmp_path / "raw") in complaint("--work", str(tmp_path / "raw"))
    elsewhere = ["--work", str(tmp_path / "short")]
    for name in ("conversations", "question_tokens"):
        options = ["--" + name.replace("_", "-"), "0"]
        assert f"{name} must be a whole number >= 1, got 0" in complaint(*elsewhere, *options)
    short = complaint(*elsewhere, "--length", "48", "--question-tokens", "96")
    assert "the assistant says nothing in 20 conversations of 48 tokens" in short


def test_command_refuses_text_that_does_not_belong(command, capsys, tmp_path):
    text, path = Conversations.load(Path(command[1], "text.npz")), str(tmp_path / "other.npz")
    other = text._replace(token_ids=text.token_ids.copy())
    other.token_ids[0, -1] ^= 1
    other.save(Path(path))
    assert main([*command, "--data", path]) == 2  # the features are those of the first text
    assert f"belongs to text {text.digest}" in capsys.readouterr().err
    other.token_ids[0, -1] = 300
    other.save(Path(path))
    assert main([*command, "--data", path, "--work", str(tmp_path)]) == 2
    assert "token id 300; the model has 0 to 299" in capsys.readouterr().err


def test_command_goes_on_from_a_head(command, capsys, tmp_path):
    folder, head, out = Path(command[3]), Path(command[1], "mtp.safetensors"), tmp_path / "mtp.safetensors"
    more = [*command, "--data", str(Path(command[1], "text.npz")), "--work", str(tmp_path), "--start"]
    assert main([*more, str(head), "--lr", "0.0"]) == 0  # a step of 0 leaves the head as it was
    before, after = load_file(head), load_file(out)
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert main([*more, str(folder / "model.safetensors")]) == 2 and "no MTP module" in capsys.readouterr().err
    # Right in shape, but what each half of the projection reads is swapped in such a file.
    mimo = write_head(tmp_path / "mimo.safetensors", LLM(str(folder)).model_config, "mimo")
    save_file(load_file(mimo) | {"d2t": before["d2t"]}, mimo)
    assert main([*more, str(mimo)]) == 2 and "DeepSeek's names" in capsys.readouterr().err
