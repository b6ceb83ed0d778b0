"""What a decoder-only model is made of: one frozen record, read from config.json or from GGUF metadata.

Knows: the architectures and rotary kinds that minispec runs, where each checkpoint format keeps its numbers, and how
to refuse the rest in one sentence. Does not know: tensors, files, or how a layer computes.

Taught in notebook 01 (one token at a time); `kv_bytes_per_token` is notebook 02's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# model_type in config.json -> the class that must stand under "architectures"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# rotary kind -> the parameters that it cannot do without
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": ("factors",),  # one divisor per frequency; only GGUF files state it
}


class ModelLoadError(ValueError):
    """A model that cannot be loaded: unknown, incomplete, damaged, contradictory or not supported."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base `theta` and how the frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            public = [kind for kind in ROPE_KINDS if kind != "factors"]
            raise ModelLoadError(f"rope type {self.kind!r} is not supported; supported are {', '.join(public)}")
        for name in ROPE_KINDS[self.kind]:
            value = self.parameters.get(name)
            if value is None:
                raise ModelLoadError(f"rope type {self.kind!r} needs the parameter {name!r}, which the config lacks")
            if name != "factors" and (not isinstance(value, (int, float)) or value <= 0):
                raise ModelLoadError(f"rope parameter {name} must be a number above 0, got {value!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_scaling` + `rope_theta` (older files) or `rope_parameters` (transformers 5)."""
        values = config.get("rope_scaling") or config.get("rope_parameters") or {}
        theta = values.get("rope_theta") or config.get("rope_theta") or 10000.0
        kind = values.get("rope_type") or values.get("type") or "default"
        rotated = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if rotated != 1:
            raise ModelLoadError(f"partial_rotary_factor {rotated} is not supported; supported is 1 (whole heads)")
        parameters = {k: v for k, v in values.items() if k not in ("rope_theta", "rope_type", "type")}
        if kind in ("llama3", "yarn"):
            original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
            parameters.setdefault("original_max_position_embeddings", original)
        return cls(float(theta), kind, parameters)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one Llama-family model.

    qkv_bias, o_bias: the attention projections carry biases. qk_norm: RMS norm on each query and key head (Qwen3).
    sliding_window: positions that a token may look back, None for all. eos_ids: every id that ends a reply.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position"
        for name in sizes.split():
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"the model's {name} must be a whole number >= 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of numbers")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the contents of config.json and, for the end-of-sequence ids, of generation_config.json.

        Raises ModelLoadError for anything that this package would compute wrongly.
        """
        kind = config.get("model_type")
        name = (config.get("architectures") or [ARCHITECTURES.get(kind, kind)])[0]
        if ARCHITECTURES.get(kind) != name:
            raise ModelLoadError(_unsupported_architecture(name, ARCHITECTURES.values()))
        _refuse_unless(config, "hidden_act", "silu")
        _refuse_unless(config, "mlp_bias", False)
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ModelLoadError(f"quantisation {method!r} is not supported in safetensors; supported is GGUF")

        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
        eos = (generation or {}).get("eos_token_id")
        return cls(
            architecture=kind,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            max_position=_required(config, "max_position_embeddings"),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            qk_norm=kind == "qwen3",
            sliding_window=_sliding_window(kind, config),
            bos_id=config.get("bos_token_id"),
            eos_ids=_ids(eos if eos is not None else config.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
        """Read GGUF metadata: `fields` as key -> value, "vocab_size" and "rope_factors" put in by the reader.

        Raises ModelLoadError for an architecture or a rotary kind that is not supported, or a missing key.
        """
        arch = fields.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES or fields.get(f"{arch}.expert_count"):
            name = f"{arch} (mixture of experts)" if arch in GGUF_ARCHITECTURES else arch
            raise ModelLoadError(_unsupported_architecture(name, GGUF_ARCHITECTURES))
        own = {key.removeprefix(f"{arch}."): value for key, value in fields.items() if key.startswith(f"{arch}.")}
        heads = _required(own, "attention.head_count")
        head_dim = own.get("attention.key_length") or _required(own, "embedding_length") // heads
        rotated = own.get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelLoadError(
                f"rope.dimension_count {rotated} is not supported; supported is the head size {head_dim}"
            )
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            architecture=arch,
            vocab_size=_required(fields, "vocab_size"),
            hidden_size=_required(own, "embedding_length"),
            intermediate_size=_required(own, "feed_forward_length"),
            num_layers=_required(own, "block_count"),
            num_heads=heads,
            num_kv_heads=own.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=_required(own, "context_length"),
            rms_norm_eps=_required(own, "attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(own, fields.get("rope_factors")),
            tie_embeddings="output.weight" not in tensor_names,
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            o_bias="blk.0.attn_output.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            sliding_window=own.get("attention.sliding_window"),
            bos_id=fields.get("tokenizer.ggml.bos_token_id"),
            eos_ids=_ids([end for end in ends if end is not None]),
        )

    @property
    def context_length(self) -> int:
        """Most positions of one sequence, in tokens.

        Inside its window a windowed model computes exactly what a full one does, so minispec stops there.
        YaRN states the length before stretching; the stretched one counts.
        """
        length = self.max_position
        if self.rope.kind == "yarn":
            stretched = self.rope.parameters["factor"] * self.rope.parameters["original_max_position_embeddings"]
            length = max(length, int(stretched))
        return min(length, self.sliding_window or length)

    @property
    def num_parameters(self) -> int:
        """Numbers in the model; a tied head counts once."""
        H, D, q, kv = self.hidden_size, self.head_dim, self.num_heads, self.num_kv_heads
        attention = H * (q + 2 * kv) * D + q * D * H + self.qkv_bias * (q + 2 * kv) * D + self.o_bias * H
        layer = attention + self.qk_norm * 2 * D + 3 * H * self.intermediate_size + 2 * H
        embeddings = self.vocab_size * H * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + H

    @property
    def num_parameters_read(self) -> int:
        """Of these, what every forward reads: all but the embedding table, of which it takes one row per token.

        A tied table is read as a whole, because it is the head too.
        """
        return replace(self, tie_embeddings=True).num_parameters

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token leaves in the cache: two vectors per layer and key/value head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _unsupported_architecture(name: Any, supported: Any) -> str:
    return f"architecture {name!r} is not supported; supported are {', '.join(supported)}"


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ModelLoadError(f"the model's config lacks {name!r}")
    return config[name]


def _refuse_unless(config: Mapping[str, Any], name: str, supported: Any) -> None:
    value = config.get(name, supported)
    if value != supported:
        raise ModelLoadError(f"{name} {value!r} is not supported; supported is {supported!r}")


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    values = [] if value is None else [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(values))


def _sliding_window(kind: str, config: Mapping[str, Any]) -> int | None:
    """The window if any layer has one. Qwen states a window that is off unless use_sliding_window is set."""
    if kind == "mistral":
        return config.get("sliding_window")
    if kind == "llama" or not config.get("use_sliding_window", False):
        return None
    windowed = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    if config.get("layer_types"):
        windowed = "sliding_attention" in config["layer_types"]
    return config.get("sliding_window") if windowed else None


def _gguf_rope(own: Mapping[str, Any], factors: list[float] | None) -> RopeConfig:
    """Llama 3's stretching comes ready made as a tensor of divisors, the other kinds as metadata."""
    theta = float(own.get("rope.freq_base", 10000.0))
    if factors is not None:
        return RopeConfig(theta, "factors", {"factors": tuple(factors)})
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    original = own.get("rope.scaling.original_context_length", own["context_length"])
    parameters = {"factor": own.get("rope.scaling.factor"), "original_max_position_embeddings": original}
    return RopeConfig(theta, kind, parameters)
