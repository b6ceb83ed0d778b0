"""Reading a .gguf file: metadata, dequantised weights under Hugging Face names, and the tokenizer.

Knows: llama.cpp's names, its row order of rotary heads, and which splitting rule a vocabulary was trained with. Does
not know: our fused parameters (loading.py fills them) or how a quantised block is coded (the `gguf` library does).

Taught in notebook 01 (one token at a time), as the origin of the small model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minispec.models.config import ModelConfig, ModelLoadError

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """An opened .gguf file. Weights stay on disk until `tensors` walks over them.

    Raises ModelLoadError for a damaged file or an unsupported architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise ModelLoadError(f"{path} is not a complete GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # Arrays (the vocabulary) are slow to unpack and not needed here: the tokenizer reads them itself.
        self.fields = {key: field.contents() for key, field in reader.fields.items() if len(field.types) == 1}
        if "token_embd.weight" in self._tensors:
            self.fields["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
        if ROPE_FACTORS in self._tensors:
            self.fields["rope_factors"] = self._read(self._tensors[ROPE_FACTORS]).tolist()
        self.config = ModelConfig.from_gguf(self.fields, frozenset(self._tensors))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 weight) one by one; a name that we do not know is passed on as it is."""
        for name, tensor in self._tensors.items():
            if name == ROPE_FACTORS:
                continue
            weight = self._read(tensor)
            if self.config.architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", name)):
                heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
                weight = _halves_from_pairs(weight, heads)
            yield _hugging_face_name(name), weight

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the file, None if it has none."""
        if "tokenizer.ggml.model" not in self.fields:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, local_files_only=True)
        except Exception as error:  # the libraries below raise many kinds, a bare Exception among them
            raise ModelLoadError(f"the tokenizer in {self.path} cannot be read: {error}") from error
        if self.fields.get("tokenizer.ggml.pre") == "smollm":
            _split_digits(tokenizer)
        return tokenizer

    def _read(self, tensor: ReaderTensor) -> torch.Tensor:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(
                f"{self.path}: tensor {tensor.name} is {kind}, which `gguf` cannot dequantise"
            ) from error
        shape = tensor.shape.tolist()[::-1]  # GGUF counts axes backwards
        return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        return f"model.layers.{match[1]}.{LAYER_NAMES.get(match[2], match[2])}.{kind}"
    return f"{MODEL_NAMES.get(stem, stem)}.{kind}"


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: it turns neighbours (2i, 2i+1) of a head, we turn (i, i + D/2)."""
    rows = weight.view(heads, -1, 2, *weight.shape[1:])  # [heads, D/2, 2, ...]
    return rows.transpose(1, 2).reshape(weight.shape)  # [heads, 2, D/2, ...] -> [heads * D, ...]


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """SmolLM's rule: every digit stands alone, then GPT-2's split. The general conversion leaves the first half out."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
