"""What a decoder-only model is made of: one frozen record, read from config.json or from GGUF metadata.

Knows: the architectures and rotary kinds that minispec runs, where each checkpoint format keeps its numbers, and how
to refuse the rest in one sentence. Does not know: tensors, files, or how a layer computes.

Taught in notebook 01 (one token at a time); `kv_bytes_per_token` is notebook 02's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# model_type in config.json -> the class that must stand under "architectures"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mimo": "MiMoForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # those with multi-head latent attention
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


class KVShape(NamedTuple):
    """What a token leaves in the cache of a layer: key/value heads, numbers of a key, numbers of a value.

    value_size 0: the values are the first numbers of the keys.
    """

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (deepseek.py): q_rank and kv_rank are the sizes of the short vectors, q_rank None
    where queries come straight from the hidden state. A query or key head has nope_dim numbers that are not turned and
    rope_dim that are, in neighbouring pairs if `interleaved`; a value head has value_dim."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MLAConfig:
        """Read the keys of DeepSeek's config.json."""
        _refuse_unless(config, "attention_bias", False)
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        kv_rank, nope, rope, value = (_required(config, name) for name in sizes)
        return cls(kv_rank, config.get("q_lora_rank"), nope, rope, value, config.get("rope_interleave", True))

    def num_parameters(self, hidden_size: int, heads: int) -> int:
        """Of one layer."""
        queries = heads * (self.nope_dim + self.rope_dim)
        q = self.q_rank * (hidden_size + 1 + queries) if self.q_rank else hidden_size * queries
        down = hidden_size * (self.kv_rank + self.rope_dim) + self.kv_rank
        return q + down + heads * (self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts (moe.py): each token is read by experts_per_token of num_experts MLPs of intermediate_size,
    and by one of shared_size if that is not 0. dense_layers: numbers of the layers that have one ordinary MLP instead.

    sigmoid: scores are sigmoids, not a softmax. balanced: a bias per expert takes part in the choice. normalized: the
    weights of the chosen add up to `scaling`. Of num_groups of experts the groups_per_token best are looked at; a group
    is as good as the sum of its group_top best.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    sigmoid: bool = False
    balanced: bool = False
    normalized: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_top: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelLoadError(f"{self.experts_per_token} experts per token cannot be chosen of {self.num_experts}")
        size, groups = self.num_experts // self.num_groups, self.groups_per_token
        fits = self.group_top <= size and groups <= self.num_groups and self.experts_per_token <= groups * size
        if self.num_experts % self.num_groups or (self.num_groups > 1 and not fits):
            choice = f"{self.experts_per_token} of {self.num_experts} experts"
            raise ModelLoadError(f"{choice} cannot be chosen from the best {groups} of {self.num_groups} groups")

    @classmethod
    def from_hf(cls, kind: str, config: Mapping[str, Any]) -> MoEConfig | None:
        """Read the keys of Qwen3-MoE's, DeepSeek's or GLM-Lite's config.json; None for models without experts."""
        layers = range(config["num_hidden_layers"])
        if kind == "qwen3_moe":
            step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
            return cls(
                config.get("num_experts") or _required(config, "num_local_experts"),
                _required(config, "num_experts_per_tok"),
                _required(config, "moe_intermediate_size"),
                dense_layers=frozenset(i for i in layers if i in listed or (i + 1) % step),
                normalized=bool(config.get("norm_topk_prob", False)),
            )
        if kind not in LATENT:
            return None
        third = kind != "deepseek_v2"
        method = config.get("topk_method", "noaux_tc" if third else "greedy")
        if method not in (("noaux_tc",) if third else ("greedy", "group_limited_greedy")):
            raise ModelLoadError(f"topk_method {method!r} is not supported for {kind}")
        _refuse_unless(config, "scoring_func", "sigmoid" if third else "softmax")
        _refuse_unless(config, "moe_layer_freq", 1)
        if not third:
            _refuse_unless(config, "norm_topk_prob", False)
        kinds, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace", 1)
        dense = [i for i in layers if (i < first if kinds is None else kinds[i] == "dense")]
        size, grouped = _required(config, "moe_intermediate_size"), method != "greedy"
        return cls(
            _required(config, "n_routed_experts"),
            _required(config, "num_experts_per_tok"),
            size,
            shared_size=size * (config.get("n_shared_experts") or 0),
            dense_layers=frozenset(dense),
            sigmoid=third,
            balanced=third,
            normalized=third and bool(config.get("norm_topk_prob", True)),
            scaling=config.get("routed_scaling_factor", 1.0),
            num_groups=(config.get("n_group") or 1) if grouped else 1,
            groups_per_token=(config.get("topk_group") or 1) if grouped else 1,
            group_top=2 if third else 1,
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model.

    qkv_bias, o_bias: the attention projections carry biases. qk_norm: RMS norm on each query and key head (Qwen3).
    sliding_window: positions that a token may look back, None for all. eos_ids: every id that ends a reply.
    mla, moe: attention and MLPs of DeepSeek's kind; with mla, head_dim is the part of a head that is turned.
    num_mtp: MTP modules that the config promises; whether they are there, the weights say.
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
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    num_mtp: int = 0

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
            if method != "fp8" or config["quantization_config"].get("weight_block_size") != [128, 128]:
                supported = "fp8 in blocks of 128 x 128, and GGUF files"
                raise ModelLoadError(
                    f"quantisation {method!r} is not supported in safetensors; supported are {supported}"
                )

        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3", "qwen3_moe", "mimo")
        mla = MLAConfig.from_hf(config) if kind in LATENT else None
        eos = (generation or {}).get("eos_token_id")
        return cls(
            architecture=kind,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=mla.rope_dim if mla else config.get("head_dim") or hidden // heads,
            max_position=_required(config, "max_position_embeddings"),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias and kind != "mimo",
            qk_norm=kind.startswith("qwen3"),
            sliding_window=_sliding_window(kind, config),
            bos_id=config.get("bos_token_id"),
            eos_ids=_ids(eos if eos is not None else config.get("eos_token_id")),
            mla=mla,
            moe=MoEConfig.from_hf(kind, config),
            num_mtp=config.get("num_nextn_predict_layers") or 0,
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

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The experts of a layer; None where it has one MLP. MTP modules are layers past the last."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in the cache, per layer."""
        if self.mla:
            return KVShape(1, self.mla.kv_rank + self.mla.rope_dim, 0)
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def layer_parameters(self, layer: int, experts: int | None = None) -> int:
        """Numbers in a decoder layer, where it has experts with so many of them (default: all)."""
        H, D, q, kv = self.hidden_size, self.head_dim, self.num_heads, self.num_kv_heads
        if self.mla:
            attention = self.mla.num_parameters(H, q)
        else:
            attention = H * (q + 2 * kv) * D + q * D * H + self.qkv_bias * (q + 2 * kv) * D + self.o_bias * H
        mlp, moe = 3 * H * self.intermediate_size, self.moe_of(layer)
        if moe:
            count = moe.num_experts if experts is None else experts
            mlp = 3 * H * (count * moe.intermediate_size + moe.shared_size) + moe.num_experts * (H + moe.balanced)
        return attention + self.qk_norm * 2 * D + mlp + 2 * H

    @property
    def num_parameters(self) -> int:
        """Numbers in the model; a tied head counts once, MTP modules do not count."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + sum(map(self.layer_parameters, range(self.num_layers))) + self.hidden_size

    def num_parameters_read(self, layers: range | None = None, vocab_size: int | None = None) -> int:
        """What a forward of one token reads of some layers (default: all), the norm and a head of `vocab_size` rows.

        That is all but the embedding table, of which it takes one row, and the experts that the token does not choose;
        more tokens read more experts.
        """
        experts = self.moe.experts_per_token if self.moe else None
        layers = range(self.num_layers) if layers is None else layers
        head = self.hidden_size * (1 + (vocab_size or self.vocab_size))
        return sum(self.layer_parameters(layer, experts) for layer in layers) + head

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token leaves in the cache, all layers, keys and values."""
        heads, key, value = self.kv_shape
        return self.num_layers * heads * (key + value) * dtype.itemsize


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
