"""The multi-token-prediction module: one decoder layer that guesses the token after the next.

    embedding(token[p]) -> norm ---+
                                   cat -> projection -> decoder layer -> norm -> hidden'[p] -> the target's head
    hidden[p-1] of the target -> norm

It has the target's embedding and head, and one layer of its own. The target's hidden state at p-1 already knows what
token p was likely to be; together with what it became, one layer is often enough to say what p+1 is. To guess further,
the module reads its own hidden' in place of the target's. After DeepSeek-V3 (2024), section 2.2; the order of the
two halves and the tensor names differ between families.

Knows: the arithmetic of N packed rows, and where families keep their tensors. Does not know: caches, slots, drafting.
Taught in notebook 10 (the MTP head).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.linear import Linear
from minispec.models.llama import Attend, CausalLM, DecoderLayer, RMSNorm, layer_weight_views

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
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's own, left unread


class MTPModule(nn.Module):
    """One module. `hidden_first`: the projection reads [hidden, embedding] (MiMo), not [embedding, hidden]."""

    def __init__(self, config: ModelConfig, *, hidden_first: bool = False, **where: object) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_first = hidden_first
        self.enorm = RMSNorm(H, eps, **where)
        self.hnorm = RMSNorm(H, eps, **where)
        self.projection = Linear(2 * H, H, **where)
        self.layer = DecoderLayer(config, 0, **where)
        self.norm = RMSNorm(H, eps, **where)
        self.requires_grad_(False)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embedded, hidden [N, H], cos, sin [N, 1, D] -> hidden' [N, H] after the norm; calls attend(0, ...) once."""
        halves = self.enorm(embedded), self.hnorm(hidden)
        x = self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, -1))  # [N, 2H] -> [N, H]
        return self.norm(self.layer(x, cos, sin, attend))

    def pack(self) -> None:
        """See `CausalLM.pack`."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def weight_views(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Name within a checkpoint's module -> the part of our parameters that it fills."""
        views = {
            f"{names[part]}.weight": getattr(self, part).weight for part in ("enorm", "hnorm", "projection", "norm")
        }
        prefix = f"{names['layer']}." if names["layer"] else ""
        return views | {prefix + name: view for name, view in layer_weight_views(self.layer).items()}


def load_mtp(
    tensors: Iterable[tuple[str, torch.Tensor]], target: CausalLM, *, dtype: torch.dtype, device: torch.device | str
) -> list[MTPModule]:
    """Build the MTP modules that a checkpoint holds, in order; found by tensor names, whatever its config promises.

    tensors: (name, tensor) pairs of the whole checkpoint or of a separate head file; others are passed over.
    Raises ModelLoadError when there are none, or when one is incomplete or of another shape than the target's.
    """
    found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        for family, (pattern, _) in FAMILIES.items():
            match = re.match(pattern, name)
            own = match and (family != "deepseek" or int(match[1]) >= target.config.num_layers)
            if own and name[match.end() :] not in SHARED:
                found.setdefault((family, int(match[1])), {})[name[match.end() :]] = tensor
    if not found:
        raise ModelLoadError("the checkpoint holds no MTP module (tensors such as model.layers.L.eh_proj.weight)")
    modules = []
    for (family, index), parts in sorted(found.items()):
        module = MTPModule(target.config, hidden_first=family == "mimo", dtype=dtype, device=device)
        _fill(module, parts, FAMILIES[family][1], f"MTP module {index}")
        module.pack()
        modules.append(module.eval())
    return modules


def _fill(module: MTPModule, parts: dict[str, torch.Tensor], names: Mapping[str, str], what: str) -> None:
    views = module.weight_views(names)
    for name, view in views.items():
        if name not in parts:
            raise ModelLoadError(f"{what}: tensor {name} is missing")
        if parts[name].shape != view.shape:
            shapes = f"{list(parts[name].shape)} in the file, {list(view.shape)} by the target's config"
            raise ModelLoadError(f"{what}: tensor {name} has contradicting shapes: {shapes}")
        view.copy_(parts[name])
    unknown = sorted(set(parts) - set(views))
    if unknown:
        raise ModelLoadError(f"{what}: unexpected tensor {unknown[0]}")
