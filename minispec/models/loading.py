"""From a name or a path to a model that can run: `load_model`.

    "smollm2-135m"        the embedded model (embedded.py)
    "deepseek-mini"       a small DeepSeek with its MTP module, part of the package (assets/deepseek-mini/README.md)
    a folder              config.json and safetensors, in one file or sharded; never uses the network
    a file ending .gguf   llama.cpp's format (gguf.py)
    "org/name"            fetched by huggingface_hub, which keeps its own cache and honours HF_HUB_OFFLINE

All end in the same place: pairs (Hugging Face name, tensor), copied one by one into our fused parameters, so
there is never a second whole copy in memory. Every tensor must be expected, and every expected tensor must come.

Knows: files and names. Does not know: arithmetic, caches, requests. Taught in notebook 01 (one token at a time).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.embedded import EMBEDDED_MODEL, fetch_embedded
from minispec.models.gguf import GGUFFile
from minispec.models.linear import quantize
from minispec.models.llama import CausalLM
from minispec.models.sharding import WHOLE, Shard

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab*")
FP8_BLOCK = 128  # rows and columns that share a scale
ASSETS = Path(str(resources.files("minispec"))) / "assets"
MINIATURE = "deepseek-mini"
HUB_FILES_UNUSED = ("consolidated*", "original/*")  # the same weights once more, in another layout


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer (None if the checkpoint has none: ids only) and where it came from.

    shard: the part of the model that this is; config tells the part's sizes.
    """

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase | None
    config: ModelConfig
    source: str
    shard: Shard = WHOLE


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    progress: bool = True,
    shard: Shard | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; see the module's docstring for what `name_or_path` may be.

    quantization: "int8", "int4" or "fp8" of all layers (not of the head), see `linear.quantize`.
    shard: load only this part of it.
    Raises ModelLoadError (a ValueError), one sentence that names what is missing, damaged or not supported.
    """
    path, shard = find_model(str(name_or_path), progress), shard or WHOLE
    if path.is_file():
        file = GGUFFile(path)
        config, tokenizer, tensors = file.config, file.tokenizer(), file.tensors()
    else:
        config, tokenizer, tensors = read_config(path), read_tokenizer(path), read_tensors(path)
    config, tensors = shard.config(config), shard.tensors(tensors)
    model = CausalLM(config, dtype=dtype, device=device)
    shard.add_up(model.layers)
    fill(model, tqdm(tensors, desc="loading weights", unit=" tensors", delay=3, leave=False, disable=not progress))
    if quantization:
        quantize(model.layers, quantization)
    model.pack()
    return LoadedModel(model.eval(), tokenizer, config, str(path), shard)


def fill(model: CausalLM, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy checkpoint tensors into the model; each of `model.weight_views()` must come exactly once."""
    missing = model.weight_views()
    for name, tensor in tensors:
        view = missing.pop(name, None)
        if view is None and not _may_ignore(name, model.config):
            raise ModelLoadError(f"unexpected tensor {name} {list(tensor.shape)}: the config leaves no place for it")
        if view is not None and tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(f"tensor {name} is {kind}; read are float16, bfloat16, float32 and float64")
        if view is not None and view.shape != tensor.shape:
            shapes = f"{list(tensor.shape)} in the file, {list(view.shape)} by the config"
            raise ModelLoadError(f"tensor {name} has contradicting shapes: {shapes}")
        if view is not None:
            view.copy_(tensor)
    if missing:
        raise ModelLoadError(f"{len(missing)} tensors are missing from the checkpoint, the first is {min(missing)}")


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json (optional) of a Hugging Face folder."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} holds no config.json, so it is not a Hugging Face model folder")
    generation = folder / "generation_config.json"
    try:
        return ModelConfig.from_hf(
            read_json(folder / "config.json"), read_json(generation) if generation.is_file() else {}
        )
    except ModelLoadError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # a value of another kind than it should be
        raise ModelLoadError(f"a value in the config of {folder} has the wrong type: {error}") from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer with its chat template, None if the folder has none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries below raise many kinds, a bare Exception among them
        raise ModelLoadError(f"the tokenizer in {folder} cannot be read: {error}") from error


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from all safetensors files of a folder, one in memory at a time, fp8 ones dequantised."""
    return dequantized(pair for path in _weight_files(folder) for pair in read_safetensors(path))


def dequantized(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Multiply float8 matrices with their scales: NAME_scale_inv has one for each block of 128 x 128 of NAME.

    That is how DeepSeek-V3 stores its weights. Either may come first, from any shard; float32 goes out.
    Raises ModelLoadError when one comes without the other, or their shapes do not fit.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stem = name.removesuffix("_scale_inv")
        if name == stem and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif stem not in waiting:
            waiting[stem] = tensor
        else:
            weight, scales = (tensor, waiting.pop(stem)) if name == stem else (waiting.pop(stem), tensor)
            if scales.shape != tuple(-(-size // FP8_BLOCK) for size in weight.shape):
                shapes = f"{list(weight.shape)} with scales {list(scales.shape)}"
                raise ModelLoadError(f"tensor {stem} has contradicting shapes: {shapes} for blocks of {FP8_BLOCK}")
            for axis, size in enumerate(weight.shape):
                scales = scales.float().repeat_interleave(FP8_BLOCK, axis).narrow(axis, 0, size)
            yield stem, weight.float() * scales
    if waiting:
        raise ModelLoadError(f"the float8 tensor {min(waiting)} needs its scales, and they need it: one is missing")


def read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from one safetensors file. Raises ModelLoadError when it is missing or cut short."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a complete safetensors file: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise ModelLoadError(
                f"{folder} holds no model.safetensors and no index of shards (only safetensors are read)"
            )
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index} holds no weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise ModelLoadError(f"shard {name} is missing from {folder}, though {index.name} lists it")
    return [folder / name for name in names]


def _may_ignore(name: str, config: ModelConfig) -> bool:
    """Tensors without a place that do no harm: rotary tables, a tied head, layers past the last (MTP modules)."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = name.startswith("model.mtp_layers.") or (layer is not None and int(layer[1]) >= config.num_layers)
    return beyond or name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def find_model(name: str, progress: bool = True) -> Path:
    """The folder or .gguf file behind a name, fetched if it must be."""
    path = Path(name).expanduser()
    if name == EMBEDDED_MODEL:
        return fetch_embedded(progress=progress)
    if name == MINIATURE:
        return ASSETS / name
    if (name and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelLoadError(f"{name} is a file but not .gguf; give a .gguf file or the folder that holds config.json")
    if path.suffix != ".gguf" and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _from_hub(name)
    known = f"{EMBEDDED_MODEL!r} and {MINIATURE!r} (embedded), a folder, a .gguf file, or 'org/name' on the hub"
    raise ModelLoadError(f"no model {name!r}: no such file or folder; known are {known}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_UNUSED))
    except Exception as error:  # hub, network and file errors share no base class
        reason = str(error).strip().split("\n")[0]
        hint = f"(without a network, give a folder, a .gguf file or {EMBEDDED_MODEL!r})"
        raise ModelLoadError(f"cannot fetch {name!r} from the Hugging Face hub: {reason} {hint}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelLoadError when it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
