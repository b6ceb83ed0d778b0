"""The multi-token-prediction module: one decoder layer that guesses the token after the next.

    embedding(token[p]) -> norm ---+
                                   cat -> projection -> decoder layer -> norm -> hidden'[p] -> the target's head
    hidden[p-1] of the target -> norm

It has the target's embedding and head, and one layer of its own. The target's hidden state at p-1 already knows what
token p was likely to be; together with what it became, one layer is often enough to say what p+1 is. To guess further,
the module reads its own hidden' in place of the target's; of several modules, each reads that of the one before.
After DeepSeek-V3 (2024), section 2.2; the order of the two halves and the tensor names differ between families.

A head file may state that it drafts from fewer tokens: d2t[i] added to draft id i is the target's id (EAGLE-3's
convention, Li et al. 2025). Most of a draft is reading the head, and most text is written with few different tokens.

Knows: the arithmetic of N packed rows, and where families keep their tensors. Does not know: caches, slots, drafting.
Taught in notebook 10 (the MTP head).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.kernels import RMSNorm
from minispec.models.linear import Linear, bytes_read, matrices, quantize
from minispec.models.llama import Attend, CausalLM, DecoderLayer

# Family -> (prefix of module k's tensors, our part -> its name there). The decoder layer lies under `layer`.
FAMILIES = {
    "deepseek": (
        r"model\.layers\.(\d+)\.",
        {"enorm": "enorm", "hnorm": "hnorm", "projection": "eh_proj", "layer": "", "norm": "shared_head.norm"},
    ),
    "mimo": (
        r"model\.mtp_layers\.(\d+)\.",
        {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "projection": "input_proj",
            "layer": "",
            "norm": "final_layernorm",
        },
    ),
}
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"  # in most files copies of the target's own


class MTPModule(nn.Module):
    """One module. `hidden_first`: the projection reads [hidden, embedding] (MiMo), not [embedding, hidden]."""

    def __init__(self, config: ModelConfig, *, hidden_first: bool = False, **where: object) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_first = hidden_first
        self.enorm = RMSNorm(H, eps, **where)
        self.hnorm = RMSNorm(H, eps, **where)
        self.projection = Linear(2 * H, H, **where)
        self.layer = DecoderLayer(config, 0, config.moe, **where)
        self.norm = RMSNorm(H, eps, **where)
        self.requires_grad_(False)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embedded, hidden [N, H], cos, sin [N, 1, D] -> hidden' [N, H] after the norm; calls attend(0, ...) once."""
        halves = self.enorm(embedded), self.hnorm(hidden)
        x = self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, -1))  # [N, 2H] -> [N, H]
        return self.norm(self.layer(x, cos, sin, attend))

    def weight_views(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Name within a checkpoint's module -> the part of our parameters that it fills."""
        views = {
            f"{names[part]}.weight": getattr(self, part).weight for part in ("enorm", "hnorm", "projection", "norm")
        }
        prefix = f"{names['layer']}." if names["layer"] else ""
        return views | {prefix + name: view for name, view in self.layer.weight_views().items()}


@dataclass(frozen=True)
class MTPWeights:
    """MTP modules in order of depth and the head that they share, ready to run.

    draft_ids: int64 [V'], the target's id of each row of the head; None: the rows are the target's vocabulary.
    config: sizes of the modules' layer. rotary: positions [N] -> cos, sin [N, 1, D]. module_bytes, head_bytes: that a
    token reads of one module, and of the head. embedding: the modules' own; None: the target's.
    layers: of the target, whose inputs, side by side, are what the first module reads; none: its final hidden states.
    """

    modules: list[nn.Module]
    head: nn.Module
    draft_ids: torch.Tensor | None
    config: ModelConfig
    rotary: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    module_bytes: int
    head_bytes: int
    embedding: nn.Embedding | None = None
    layers: tuple[int, ...] = ()


class NoMTPModule(ModelLoadError):
    """The checkpoint has none for this target."""


def load_mtp(
    tensors: Iterable[tuple[str, torch.Tensor]],
    target: CausalLM,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: str | None = None,
) -> MTPWeights:
    """Build the MTP modules that a checkpoint holds; found by tensor names, whatever its config promises.

    tensors: (name, tensor) pairs of the whole checkpoint or of a separate head file; others are passed over.
    quantization: "int8", "int4" or "fp8" for the modules and a copy of the head, see `linear.quantize`.
    Raises ModelLoadError when there are none (NoMTPModule), when they do not follow each other from their family's
    first number on, when one is incomplete or of another shape than the target's, or when d2t does not lead to
    different ids of the target.
    """
    found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    config, draft_ids, num_layers = target.config, None, target.config.num_layers
    for name, tensor in tensors:
        if name == "d2t":
            draft_ids = target_ids(tensor, config.vocab_size).to(device)
        for family, (pattern, _) in FAMILIES.items():
            match = re.match(pattern, name)
            if match and (family != "deepseek" or int(match[1]) >= num_layers):
                found.setdefault((family, int(match[1])), {})[name[match.end() :]] = tensor
    if not found:
        wanted, promised = f"model.layers.{num_layers}.eh_proj.weight", config.num_mtp
        promise = f", though its config promises {promised}" if promised else ""
        raise NoMTPModule(f"the checkpoint holds no MTP module for this target (tensors such as {wanted}){promise}")
    family = min(found)[0]
    first = num_layers if family == "deepseek" else 0
    if sorted(found) != [(family, first + k) for k in range(len(found))]:
        there = ", ".join(f"{name} {index}" for name, index in sorted(found))
        raise ModelLoadError(f"the MTP modules must be {family} {first} and those that follow it, found {there}")
    embedding = _own(found, EMBEDDING, lambda: target.embedding.weight)
    own_head = _own(found, HEAD, lambda: target.head.plain_weight)  # which may be a copy: only if it is needed
    modules = []
    for (family, index), parts in sorted(found.items()):
        module = MTPModule(config, hidden_first=family == "mimo", dtype=dtype, device=device)
        fill_module(module.weight_views(FAMILIES[family][1]), parts, f"MTP module {index}")
        modules.append(module.eval())
    H, experts = config.hidden_size, config.moe.experts_per_token if config.moe else None
    numbers = config.layer_parameters(config.num_layers, experts) + 2 * H**2 + 3 * H
    head = target.head
    if draft_ids is not None or quantization or own_head is not None:
        rows = head.plain_weight if own_head is None else own_head
        rows = rows if draft_ids is None else rows[draft_ids]
        head = Linear(rows.shape[1], rows.shape[0], dtype=dtype, device=device)
        head.weight.copy_(rows)
    make_quick(modules if head is target.head else [*modules, head], quantization)
    embedding = None if embedding is None else nn.Embedding.from_pretrained(embedding)
    size, of_head = bytes_read(numbers, modules[0]), bytes_read(head.numbers, head)
    return MTPWeights(modules, head, draft_ids, config, target.rotary, size, of_head, embedding)


def make_quick(parts: Iterable[nn.Module], quantization: str | None) -> None:
    """Quantize, if so asked, and pack the matrices of what a head does not share with the target."""
    own = nn.ModuleList(parts)
    if quantization:
        quantize(own, quantization)
    for part in matrices(own):
        part.pack()


def _own(
    found: Mapping[object, dict[str, torch.Tensor]], name: str, of_target: Callable[[], torch.Tensor]
) -> torch.Tensor | None:
    """Take the matrix of that name out of all modules; it, if it is another one than the target's."""
    copies = [parts.pop(name) for parts in found.values() if name in parts]
    if not copies:
        return None
    targets = of_target()
    for copy in copies:
        if copy.shape != targets.shape:
            shapes = f"{list(copy.shape)}, the target's {list(targets.shape)}"
            raise ModelLoadError(f"an MTP module's {name} has the shape {shapes}")
    own = [copy for copy in (copy.to(targets) for copy in copies) if not torch.equal(copy, targets)]
    return own[0] if own else None


def save_mtp(
    path: Path | str,
    module: MTPModule,
    target_config: ModelConfig,
    *,
    draft_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a module (not packed, embedding half first) as a head file: safetensors with DeepSeek's names.

    draft_ids: int64 [V'], ascending: the ids that it drafts from. metadata goes into the file's header.
    """
    assert not module.hidden_first, "DeepSeek's files hold the embedding's half of the projection first"
    views = module.weight_views(FAMILIES["deepseek"][1])
    prefix = f"model.layers.{target_config.num_layers}."
    tensors = {prefix + name: view.detach().to("cpu", dtype).contiguous() for name, view in views.items()}
    if draft_ids is not None:
        tensors["d2t"] = draft_ids.cpu() - torch.arange(len(draft_ids))
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    Path(path).chmod(0o644)  # safetensors writes files that only their owner can read


def target_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 [V'] from the differences in a file. Raises ModelLoadError unless they lead to different known ids."""
    if d2t.dim() != 1 or len(d2t) == 0 or d2t.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ModelLoadError(f"d2t must be a list of whole numbers, got {d2t.dtype} {list(d2t.shape)}")
    ids = d2t.long() + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ModelLoadError(f"d2t leads to ids {ids.min()} to {ids.max()}; the target has 0 to {vocab_size - 1}")
    if len(ids.unique()) < len(ids):
        raise ModelLoadError(f"d2t leads {len(ids)} draft ids to {len(ids.unique())} ids of the target: not one to one")
    return ids


def fill_module(views: dict[str, torch.Tensor], parts: dict[str, torch.Tensor], what: str) -> None:
    """Copy a head file's tensors into the parts of our parameters; raise ModelLoadError for one that does not fit."""
    for name, view in views.items():
        if name not in parts:
            raise ModelLoadError(f"{what}: tensor {name} is missing")
        if parts[name].shape != view.shape:
            shapes = f"{list(parts[name].shape)} in the file, {list(view.shape)} by the target's config"
            raise ModelLoadError(f"{what}: tensor {name} has contradicting shapes: {shapes}")
        if parts[name].dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            kind = str(parts[name].dtype).removeprefix("torch.")
            raise ModelLoadError(f"{what}: tensor {name} is {kind}; read are float16, bfloat16, float32 and float64")
        if not parts[name].isfinite().all():
            raise ModelLoadError(f"{what}: tensor {name} holds numbers that are not finite")
        view.copy_(parts[name])
    unknown = sorted(set(parts) - set(views))
    if unknown:
        raise ModelLoadError(f"{what}: unexpected tensor {unknown[0]}")
