"""A small DeepSeek: python -m minispec.training.joint --work DIR --data text.npz [--steps 1000]

A model of DeepSeek-V3's architecture (latent attention, routed experts, an MTP module) and a tokenizer of its own, both
made from conversations that another model wrote. Model and module learn together, as in DeepSeek-V3 (2024):

    loss = CE(model, next token) + weight * CE(module, the token after it)         section 2.2

and nothing in the loss speaks of the experts: a bias per expert is moved up while the expert is read too little and
down while it is read too much (section 2.1.2). DIR gets a checkpoint and, at the end, a Hugging Face folder.

Knows: the small model's sizes, the loss, the order of things. Does not know: how any layer computes.
Taught in notebook 10 (the MTP head).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minispec.models.config import ModelConfig
from minispec.models.embedded import fetch_embedded
from minispec.models.llama import CausalLM
from minispec.models.moe import Router
from minispec.models.mtp import FAMILIES, MTPModule
from minispec.training.data import Conversations
from minispec.training.features import causal_attend, positions_of

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH, WARMUP, BALANCE_SPEED, HELD_OUT = 256, 40, 0.002, 64


def texts_of(data: Conversations) -> list[str]:
    """The conversations as text, without the system message that all of them begin with."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_embedded(), local_files_only=True)
    texts = tokenizer.batch_decode(data.token_ids.astype(np.int64))
    return [text.split("<|im_end|>\n", 1)[1] if text.startswith("<|im_start|>system") else text for text in texts]


def new_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the small model's vocabulary, learnt from the texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, **names)


class Joint(nn.Module):
    """Model and MTP module. New: matrices are drawn from N(0, 1 / inputs), the outer ones smaller; norms are 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model, self.module = CausalLM(config), MTPModule(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = any(part in name for part in ("embedding", "head", "router"))
                nn.init.normal_(parameter, std=0.02 if small else parameter.shape[1] ** -0.5)
        self.requires_grad_(True)
        for router in self.routers():
            router.bias.requires_grad_(False)

    def routers(self) -> Iterator[Router]:
        return (part for part in self.modules() if isinstance(part, Router))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, L] -> logits of the model for tokens 1 .. L-1 and of the module for tokens 2 .. L-1."""
        B, length = ids.shape
        model, attend = self.model, causal_attend(B)
        hidden = model(ids.flatten(), positions_of(ids), attend).view(B, length, -1)
        embedded = model.embedding(ids[:, 1:-1]).flatten(0, 1)  # row p reads token p and the hidden state of p - 1
        cos, sin = model.rotary(positions_of(ids[:, 1:-1]))
        ahead = self.module(embedded, hidden[:, :-2].flatten(0, 1), cos, sin, attend)
        return model.logits(hidden[:, :-1]), model.logits(ahead).view(B, length - 2, -1)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters under DeepSeek's names, in bfloat16 but for the routers' biases."""
        prefix = f"model.layers.{self.model.config.num_layers}."
        module = self.module.weight_views(FAMILIES["deepseek"][1])
        views = self.model.weight_views() | {prefix + name: view for name, view in module.items()}
        kinds = {name: torch.float32 if name.endswith("bias") else torch.bfloat16 for name in views}
        return {name: view.detach().to(kinds[name]).contiguous() for name, view in views.items()}


def train(joint: Joint, stream: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace, path: Path) -> str:
    """Run `args.steps` steps of args.batch_size windows of the token stream, on from the checkpoint at `path` if there is
    one, and write it every 50 steps. Returns what was measured on `held_out` [windows, LENGTH] last."""
    outer = {joint.model.embedding.weight, joint.model.head.weight, *(r.weight for r in joint.routers())}
    trained = [p for p in joint.parameters() if p.requires_grad]
    inner = [p for p in trained if p.dim() == 2 and p not in outer]
    others = [p for p in trained if p.dim() != 2 or p in outer]
    optimizers = [torch.optim.Muon(inner, weight_decay=0.05), torch.optim.AdamW(others, betas=(0.9, 0.95))]
    read: dict[Router, torch.Tensor] = {}
    for router in joint.routers():
        router.register_forward_hook(
            lambda r, _, out: read.__setitem__(r, out[0].flatten().bincount(minlength=len(r.bias)))
        )
    first, note = 0, ""
    if path.is_file():
        first, weights, states = torch.load(path, weights_only=True)
        joint.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="training", mininterval=10)
    for step in bar:
        rng = np.random.default_rng([args.seed, step])
        starts = torch.from_numpy(rng.integers(0, len(stream) - LENGTH, args.batch_size))
        ids = stream[starts[:, None] + torch.arange(LENGTH)]
        factor = min(1.0, (step + 1) / WARMUP) * (1 - step / args.steps)
        for optimizer, base in zip(optimizers, (args.lr, args.lr / 5), strict=True):
            optimizer.param_groups[0]["lr"] = base * factor
        now, ahead = joint(ids)
        losses = [F.cross_entropy(x.flatten(0, 1), ids[:, k:].flatten()) for k, x in ((1, now), (2, ahead))]
        (losses[0] + args.mtp_weight * losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for router, count in read.items():
            router.bias.data += BALANCE_SPEED * torch.sign(count.float().mean() - count)
        bar.set_postfix(loss=f"{losses[0].item():.3f} {losses[1].item():.3f}")
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            note = f"step {step + 1}: {measure(joint, held_out)}"
            bar.write(note)
            torch.save((step + 1, joint.state_dict(), [o.state_dict() for o in optimizers]), path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    return note


@torch.no_grad()
def measure(joint: Joint, held_out: torch.Tensor) -> str:
    """Cross-entropy of both per token, and how often the module's choice is the model's."""
    now, ahead = joint(held_out)
    losses = [F.cross_entropy(x.flatten(0, 1), held_out[:, k:].flatten()).item() for k, x in ((1, now), (2, ahead))]
    agreement = (now[:, 1:].argmax(-1) == ahead.argmax(-1)).float().mean().item()
    return f"loss {losses[0]:.3f}, of the module {losses[1]:.3f}, agreement {agreement:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the tokenizer, train, and write the folder DIR/deepseek-mini."""
    args = _parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    out = args.work / "deepseek-mini"
    texts = texts_of(Conversations.load(args.data))
    tokenizer = new_tokenizer(texts[:-HELD_OUT])
    tokenizer.save_pretrained(out)
    encoded = [torch.tensor(tokenizer.encode(text)) for text in texts]
    held_out = torch.stack([ids[:LENGTH] for ids in encoded[-HELD_OUT:] if len(ids) >= LENGTH])
    stream = torch.cat(encoded[:-HELD_OUT])
    joint = Joint(ModelConfig.from_hf(CONFIG))
    count = sum(p.numel() for p in joint.parameters())
    print(f"{count:,} parameters, {len(stream):,} tokens to learn from, {held_out.numel():,} to measure", flush=True)
    note = train(joint, stream, held_out, args, args.work / "joint.pt")
    card = {"seed": str(args.seed), "steps": str(args.steps), "held_out": note}
    save_file(joint.weights(), out / "model.safetensors", metadata={"format": "pt", **card})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    print(f"{note}\nmodel: {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minispec.training.joint", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint and of the result")
    parser.add_argument("--data", type=Path, required=True, help="conversations of minispec.training (.npz)")
    parser.add_argument("--steps", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of 256 tokens (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's; AdamW's is a fifth (default %(default)s)")
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="of the module's loss (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
