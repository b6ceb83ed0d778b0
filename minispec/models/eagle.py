"""EAGLE heads: one decoder layer that continues the target's own hidden states, as trained and stored by others.

    EAGLE-1, EAGLE-2    [embedding(token[p]), hidden[p-1]] -> projection -> layer without its first norm -> hidden'
                        the target's head on hidden'
    EAGLE-3             hidden[p-1]: what a low, a middle and a high layer of the target read, projected to one width
                        x = hidden + attention over [norm(embedding(token[p])), norm(hidden)]
                        hidden' = x + mlp(norm(x)); a norm and a head of its own on hidden'

For drafts after the first, hidden' stands in place of the target's hidden state. EAGLE-2 is the file of EAGLE-1 with
another way to draft (growing.py). EAGLE-3 drafts from fewer tokens, named by d2t (see mtp.py).

Sources: EAGLE (Li et al. 2024), section 3; EAGLE-3 (Li et al. 2025), section 3. A head is drafted with as an MTP module
is (speculative/model.py), which it resembles. Knows: files, names, the arithmetic of N packed rows. Does not know:
caches, slots, drafting. Taught in notebook 12.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import torch
from torch import nn

from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.kernels import RMSNorm, rotary
from minispec.models.linear import Linear, bytes_read, matrices
from minispec.models.llama import Attend, CausalLM, DecoderLayer
from minispec.models.loading import read_json, read_safetensors
from minispec.models.mtp import MTPWeights, fill_module, make_quick, target_ids
from minispec.models.rope import rotary_frequencies

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
UNREAD = ("embed_tokens.weight", "t2d")  # a copy of the target's; d2t the other way round


class EagleModule(nn.Module):
    """The layer of EAGLE-1 and EAGLE-2. `bias`: the projection has one."""

    def __init__(self, config: ModelConfig, *, bias: bool, **where: object) -> None:
        super().__init__()
        self.projection = Linear(2 * config.hidden_size, config.hidden_size, bias, **where)
        self.layer = DecoderLayer(config, 0, None, **where)
        self.layer.attention_norm = nn.Identity()
        self.requires_grad_(False)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embedded, hidden [N, H], cos, sin [N, 1, D] -> hidden' [N, H]; calls attend(0, ...) once."""
        return self.layer(self.projection(torch.cat((embedded, hidden), -1)), cos, sin, attend)

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the part of our parameters that it fills."""
        views = {"fc.weight": self.projection.weight} | _prefixed("layers.0.", self.layer)
        return views if self.projection.bias is None else views | {"fc.bias": self.projection.bias}


class Eagle3Module(nn.Module):
    """The layer of EAGLE-3. The true hidden states are [N, 3H], its own are [N, H]."""

    def __init__(self, config: ModelConfig, **where: object) -> None:
        super().__init__()
        H = config.hidden_size
        self.projection = Linear(3 * H, H, **where)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps, **where)
        self.layer = DecoderLayer(config, 0, None, **where)
        attention = self.layer.attention
        attention.qkv = Linear(2 * H, len(attention.qkv.weight), config.qkv_bias, **where)
        self.requires_grad_(False)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embedded [N, H], hidden [N, 3H] or [N, H], cos, sin [N, 1, D] -> hidden' [N, H], before the head's norm."""
        if hidden.shape[-1] != embedded.shape[-1]:
            hidden = self.projection(hidden)
        both = torch.cat((self.layer.attention_norm(embedded), self.hidden_norm(hidden)), -1)
        x = hidden + self.layer.attention(both, cos, sin, attend)  # of its own: the engine keeps the hidden states
        return x + self.layer.mlp(self.layer.mlp_norm(x))

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the part of our parameters that it fills."""
        own = {"fc.weight": self.projection.weight, "midlayer.hidden_norm.weight": self.hidden_norm.weight}
        return own | _prefixed("midlayer.", self.layer)


def _prefixed(prefix: str, layer: DecoderLayer) -> dict[str, torch.Tensor]:
    return {prefix + name: view for name, view in layer.weight_views().items()}


def load_eagle(
    path: Path,
    target: CausalLM,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: str | None = None,
) -> MTPWeights:
    """Read an EAGLE head for `target`: a folder with config.json and weights, or a safetensors file of EAGLE-1 or -3.

    The kind is told by the names of the tensors. Without a config the head has the sizes of the target.
    quantization: see `load_mtp`. Raises ModelLoadError when it is no such head, incomplete, or of another width.
    """
    config, settings = target.config, {}
    if path.is_dir() and (path / "config.json").is_file():
        settings = read_json(path / "config.json")
        config = ModelConfig.from_hf(settings | {"architectures": None})
    parts = {name.removeprefix("model."): tensor for name, tensor in _read(path).items()}
    parts = {name: tensor for name, tensor in parts.items() if name not in UNREAD and "rotary_emb" not in name}
    if config.hidden_size != target.config.hidden_size:
        raise ModelLoadError(
            f"the EAGLE head has hidden_size {config.hidden_size}, the target {target.config.hidden_size}"
        )
    if any(name.startswith("layers.1.") for name in parts) or "fc.weight" not in parts:
        raise ModelLoadError(f"{path} is no EAGLE head with one layer (tensors such as fc.weight and midlayer.*)")
    where, layers, draft_ids, head = {"dtype": dtype, "device": device}, (), None, target.head
    if any(name.startswith("midlayer.") for name in parts):
        module = Eagle3Module(config, **where)
        layers = _fused_layers(settings, target.config.num_layers)
        if "d2t" in parts:
            draft_ids = target_ids(parts.pop("d2t"), target.config.vocab_size).to(device)
        rows = config.vocab_size if draft_ids is None else len(draft_ids)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        head = nn.Sequential(norm, Linear(config.hidden_size, rows, **where)).requires_grad_(False)
        views = module.weight_views() | {"norm.weight": norm.weight, "lm_head.weight": head[1].weight}
    else:
        parts.pop("lm_head.weight", None)  # the target's own
        module = EagleModule(config, bias="fc.bias" in parts, **where)
        views = module.weight_views()
    fill_module(views, parts, f"EAGLE head {path.name}")
    numbers = sum(parameter.numel() for parameter in module.parameters())
    make_quick([module] if head is target.head else [module, head], quantization)
    frequencies, scale = rotary_frequencies(config.rope, config.head_dim)
    turns = partial(rotary, frequencies.to(device), scale=scale, dtype=dtype)
    of_head = sum(part.nbytes_read for part in matrices(head))
    return MTPWeights([module], head, draft_ids, config, turns, bytes_read(numbers, module), of_head, layers=layers)


def _fused_layers(settings: dict, num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs are read. A config names the layers before them."""
    ids = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = (2, num_layers // 2, num_layers - 3) if ids is None else tuple(layer + 1 for layer in ids)
    if len(layers) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise ModelLoadError(f"EAGLE-3 reads before layers {layers}, three of the target's {num_layers}, from 0")
    return layers


def _read(path: Path) -> dict[str, torch.Tensor]:
    files = [path / name for name in WEIGHT_FILES if (path / name).is_file()] if path.is_dir() else [path]
    if not files:
        raise ModelLoadError(f"{path} holds no {' or '.join(WEIGHT_FILES)}")
    if files[0].suffix == ".safetensors":
        return dict(read_safetensors(files[0]))
    try:
        return torch.load(files[0], map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelLoadError(f"{files[0]} is not a complete file of weights: {error}") from error
