"""Tiny random checkpoints in the real file layouts, written by transformers' own model classes.

`write_tiny_checkpoint(folder, "qwen3")` is a Hugging Face folder of some 100 kB with weights, config and tokenizer;
`write_tiny_gguf` turns one into the .gguf file that llama.cpp's converter would make of it. Weights are large enough
that every switch of an architecture changes the logits visibly: biases are not zero and norms are not one.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gguf
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import MtpModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
STRETCHED = ROPE["yarn"] | {"mscale": 1.0, "mscale_all_dim": 0.8}
QWEN_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# name -> (architecture, what differs from SIZES): every switch that the loader and the model know
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama linear": ("llama", {"rope_parameters": ROPE["linear"]}),
    "llama llama3": ("llama", {"rope_parameters": ROPE["llama3"]}),
    "llama yarn": ("llama", {"rope_parameters": ROPE["yarn"]}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 moe": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3 moe in every other layer": ("qwen3_moe", QWEN_MOE | {"decoder_sparse_step": 2}),
    "qwen3 moe but in one layer": ("qwen3_moe", QWEN_MOE | {"mlp_only_layers": [1], "attention_bias": True}),
    "deepseek v3": ("deepseek_v3", MLA),
    "deepseek v3 with long texts": ("deepseek_v3", MLA | {"rope_parameters": STRETCHED}),
    "deepseek v3 otherwise": (
        "deepseek_v3",
        MLA | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "deepseek v2": ("deepseek_v2", MLA | {"topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": ("deepseek_v2", MLA | {"q_lora_rank": None, "topk_method": "greedy"}),
    "glm 4 moe lite": ("glm4_moe_lite", MLA | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: 3 special tokens, 256 bytes, 41 merges, a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    text = "A small model reads a prompt, then writes one token after another; each token looks back at all before it. "
    core.train_from_iterator([text], trainer)
    assert core.get_vocab_size() == VOCAB
    endoftext, start, end = SPECIAL_TOKENS
    tokens = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": endoftext}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, **tokens)


def write_tiny_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    tokenizer: bool = True,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a random checkpoint into `folder` and return it; `overrides` are fields of its config.json."""
    fields = {name: value for name, value in (SIZES | overrides).items() if name != "head_dim" or value}
    config = AutoConfig.for_model(architecture, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.2 * noise if norm else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of the experts; as large as the scores' differences
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def write_tiny_gguf(folder: Path, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> Path:
    """Convert a tiny checkpoint (one weight file) into a .gguf file; matrices with 32k columns are stored as `kind`."""
    config = AutoConfig.from_pretrained(folder)
    # llama.cpp files Mistral under "llama", row order of its rotary heads and all
    arch = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config)
    _add_tokenizer(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, weight in load_file(folder / "model.safetensors").items():
        if arch == "llama" and (part := name.split(".")[-2]) in heads:
            rows = weight.reshape(heads[part], 2, -1, *weight.shape[1:])  # [heads, 2, D/2, ...]
            weight = rows.transpose(1, 2).reshape(weight.shape).contiguous()
        stored = kind if weight.dim() == 2 and weight.shape[1] % 32 == 0 else GGMLQuantizationType.F32
        values = gguf.quantize(weight.numpy(), stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / stretched).numpy())


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].get)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a sharded checkpoint as one more shard, in its index too."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = f"model-mtp-{len(content['weight_map'])}.safetensors"
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    content["weight_map"] |= dict.fromkeys(tensors, shard)
    index.write_text(json.dumps(content))


def their_mtp(folder: Path, num_modules: int = 1) -> tuple[PreTrainedModel, MtpModel]:
    """transformers' model of a checkpoint of DeepSeek's kind, and its MTP modules with random weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.config.num_mtp_layers = num_modules
    mtp, generator = MtpModel(model, num_modules), torch.Generator().manual_seed(7)
    shared = {id(p) for p in model.parameters()}
    with torch.no_grad():
        for name, tensor in (*mtp.named_parameters(), *mtp.named_buffers()):
            if id(tensor) not in shared and "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return model.eval(), mtp.eval()


def mtp_tensors(model: PreTrainedModel, mtp: MtpModel) -> dict[str, torch.Tensor]:
    """The modules as DeepSeek's files hold them: experts one by one, embedding and head once more."""
    tensors = {}
    for k, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{model.config.num_hidden_layers + k}."
        tensors[prefix + "embed_tokens.weight"] = model.get_input_embeddings().weight
        tensors[prefix + "shared_head.head.weight"] = model.lm_head.weight
        for name, tensor in layer.state_dict().items():
            name = name.replace("post_norm.", "shared_head.norm.").removeprefix("mtp_block.")
            if name.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                    tensors[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = gate
                    tensors[f"{prefix}mlp.experts.{e}.up_proj.weight"] = up
            elif name.endswith("experts.down_proj"):
                tensors |= {f"{prefix}mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
            else:
                tensors[prefix + name] = tensor
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
