"""A small DeepSeek:  python -m minispec.training.joint --work DIR --data text.npz

A model of DeepSeek-V3's architecture (latent attention, routed experts, an MTP module), taught by conversations that
another model wrote. Model and module learn together, as in DeepSeek-V3 (2024):

    loss = CE(model, next token) + mtp_weight * CE(module, the token after it)         section 2.2

and nothing in the loss speaks of the experts: a bias per expert is moved up while the expert is read too little and
down while it is read too much (section 2.1.2). Sizes and tokenizer are those of the "deepseek-mini" that ships. DIR
gets a checkpoint, from which an interrupted run goes on, and at the end the Hugging Face folder.

Knows: the loss, the order of things. Does not know: how any layer computes. Taught in notebook 10 (the MTP head).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from minispec.models.config import ModelConfig
from minispec.models.embedded import fetch_embedded
from minispec.models.llama import CausalLM
from minispec.models.loading import ASSETS, MINIATURE
from minispec.models.moe import Router
from minispec.models.mtp import FAMILIES, MTPModule
from minispec.training.data import Conversations
from minispec.training.features import causal_attend, positions_of

SHIPPED = ASSETS / MINIATURE
CONFIG = json.loads((SHIPPED / "config.json").read_text("utf-8"))
# batch_size windows of LENGTH tokens per step; lr is Muon's and falls to 0, AdamW's is a fifth of it.
RECIPE = {"steps": 1000, "batch_size": 8, "lr": 0.02, "mtp_weight": 0.3, "seed": 0}
LENGTH, WARMUP, BALANCE_SPEED, HELD_OUT, SAVE_EVERY = 256, 40, 0.002, 64, 50


def texts_of(data: Conversations) -> list[str]:
    """The conversations as text, without the system message that all of them begin with."""
    texts = AutoTokenizer.from_pretrained(fetch_embedded()).batch_decode(data.token_ids.astype(np.int64))
    return [text.split("<|im_end|>\n", 1)[1] if text.startswith("<|im_start|>system") else text for text in texts]


class Joint(nn.Module):
    """Model and MTP module. New: matrices are drawn from N(0, 1 / inputs), the outer ones smaller; norms are 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model, self.module = CausalLM(config), MTPModule(config)
        self.routers = [part for part in self.modules() if isinstance(part, Router)]
        self.inner, self.outer = [], []  # parameters for Muon and for AdamW
        for name, parameter in self.named_parameters():
            small = any(part in name for part in ("embedding", "head", "router"))
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if small else parameter.shape[1] ** -0.5)
            if "router.bias" not in name:
                (self.outer if small or parameter.dim() != 2 else self.inner).append(parameter.requires_grad_())

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, L] -> logits of the model for tokens 1 .. L-1 and of the module for tokens 2 .. L-1."""
        B, length = ids.shape
        model, attend = self.model, causal_attend(B)
        hidden = model(ids.flatten(), positions_of(ids), attend).view(B, length, -1)
        embedded = model.embedding(ids[:, 1:-1]).flatten(0, 1)  # row p reads token p and the hidden state of p - 1
        tables = model.rotary(positions_of(ids[:, 1:-1]))
        ahead = self.module(embedded, hidden[:, :-2].flatten(0, 1), *tables, attend)
        return model.logits(hidden[:, :-1]), model.logits(ahead).view(B, length - 2, -1)

    def losses(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """ids [B, L] -> (CE of the model, CE of the module, share of places where both choose the same token)."""
        now, ahead = self(ids)
        pairs = ((now, ids[:, 1:]), (ahead, ids[:, 2:]))
        same = (now[:, 1:].argmax(-1) == ahead.argmax(-1)).float().mean().item()
        return *(F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) for logits, wanted in pairs), same

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters under DeepSeek's names, in bfloat16 but for the routers' biases."""
        prefix = f"model.layers.{self.model.config.num_layers}."
        module = self.module.weight_views(FAMILIES["deepseek"][1])
        views = self.model.weight_views() | {prefix + name: view for name, view in module.items()}
        kinds = {name: torch.float32 if name.endswith("bias") else torch.bfloat16 for name in views}
        return {name: view.detach().to(kinds[name]).contiguous() for name, view in views.items()}


def train(joint: Joint, stream: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace, path: Path) -> str:
    """Learn from windows of the token stream, on from the checkpoint at `path` if that file exists.

    Returns what was measured last on `held_out` [windows, LENGTH].
    """
    optimizers = [torch.optim.Muon(joint.inner, weight_decay=0.05), torch.optim.AdamW(joint.outer, betas=(0.9, 0.95))]
    read: dict[Router, torch.Tensor] = {}
    for router in joint.routers:
        router.register_forward_hook(lambda router, _, out: read.update({router: out[0].flatten()}))
    first, note = 0, "untrained"
    if path.is_file():
        first, weights, states, note = torch.load(path, weights_only=True)
        joint.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="training", mininterval=10)
    for step in bar:
        starts = np.random.default_rng([args.seed, step]).integers(0, len(stream) - LENGTH, args.batch_size)
        factor = min(1.0, (step + 1) / WARMUP) * (1 - step / args.steps)
        for optimizer, base in zip(optimizers, (args.lr, args.lr / 5), strict=True):
            optimizer.param_groups[0]["lr"] = base * factor
        now, ahead, _ = joint.losses(stream[torch.from_numpy(starts)[:, None] + torch.arange(LENGTH)])
        (now + args.mtp_weight * ahead).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for router, ids in read.items():
            count = ids.bincount(minlength=len(router.bias)).float()
            router.bias.data += BALANCE_SPEED * torch.sign(count.mean() - count)
        bar.set_postfix(loss=f"{now.item():.3f} {ahead.item():.3f}")
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            with torch.no_grad():
                now, ahead, same = joint.losses(held_out)
            note = f"step {step + 1}: loss {now:.3f}, of the module {ahead:.3f}, agreement {same:.3f}"
            bar.write(note)
            part = path.with_suffix(".part")  # an interrupted run leaves no half file under the right name
            torch.save((step + 1, joint.state_dict(), [o.state_dict() for o in optimizers], note), part)
            part.replace(path)
    return note


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write the folder DIR/deepseek-mini."""
    parser = argparse.ArgumentParser(prog="python -m minispec.training.joint", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint and of the result")
    parser.add_argument("--data", type=Path, required=True, help="conversations of minispec.training (.npz)")
    for name, value in RECIPE.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=type(value), default=value, help="(default %(default)s)"
        )
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    texts, out = texts_of(Conversations.load(args.data)), args.work / MINIATURE
    (tokenizer := AutoTokenizer.from_pretrained(SHIPPED)).save_pretrained(out)
    encoded = [torch.tensor(tokenizer.encode(text)) for text in texts]
    held_out = torch.stack([ids[:LENGTH] for ids in encoded[-HELD_OUT:] if len(ids) >= LENGTH])
    joint = Joint(ModelConfig.from_hf(CONFIG))
    note = train(joint, torch.cat(encoded[:-HELD_OUT]), held_out, args, args.work / "joint.pt")
    recipe = json.dumps({name: getattr(args, name) for name in RECIPE})
    save_file(joint.weights(), out / "model.safetensors", {"format": "pt", "recipe": recipe, "held_out": note})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    print(f"{note}\nmodel: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
