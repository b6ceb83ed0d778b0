"""The gated MLP, and many of them behind a router: mixture of experts.

    x -> router -> k of E experts, each with a weight
    x -> those experts, weighted and added up, and the shared ones that every token reads

A token reads k experts, so the model may know much and still compute little. With several rows in a forward their
experts add up, which is why drafts are dearer to verify here than in a dense model.

Knows: Qwen3-MoE's router (softmax) and DeepSeek's (softmax in V2; in V3 a sigmoid, and a bias that balances the load
and decides who is chosen but not with what weight; groups of experts, of which only the best are looked at). Does not
know: layers, devices. Taught in notebook 10 (the MTP head), where the small DeepSeek drafts for itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minispec.models.config import MoEConfig
from minispec.models.kernels import silu_and_mul
from minispec.models.linear import Linear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, **where: object) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, **where)
        self.down = Linear(intermediate_size, hidden_size, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        return self.down(silu_and_mul(self.gate_up(x)))

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint, relative to the MLP -> the part of our parameters that it fills."""
        gate, up = self.gate_up.weight.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down.weight}


class Router(nn.Module):
    """Which experts read a token, and how much each counts. It computes in float32: a near tie changes the model.

    After DeepSeek-V3 (2024), section 2.1.2; the groups are DeepSeek-V2's (2024), section 2.2.2.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, **where: object) -> None:
        super().__init__()
        self.config, where = config, where | {"dtype": torch.float32}
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, **where))
        self.bias = nn.Parameter(torch.zeros(config.num_experts, **where)) if config.balanced else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, H] -> (expert ids int64, weights float32), each [N, k]."""
        config, logits = self.config, F.linear(x.float(), self.weight)  # [N, E]
        scores = logits.sigmoid() if config.sigmoid else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias
        if config.num_groups > 1:
            groups = choice.unflatten(-1, (config.num_groups, -1))  # [N, groups, E / groups]
            best = groups.topk(config.group_top, -1).values.sum(-1).topk(config.groups_per_token, -1).indices
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        ids = choice.topk(config.experts_per_token, -1).indices
        weights = scores.gather(-1, ids)
        if config.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * config.scaling


class MoE(nn.Module):
    """Routed experts and, if the model has them, the shared ones as a single MLP."""

    def __init__(self, config: MoEConfig, hidden_size: int, **where: object) -> None:
        super().__init__()
        self.router = Router(config, hidden_size, **where)
        self.experts = nn.ModuleList(
            MLP(hidden_size, config.intermediate_size, **where) for _ in range(config.num_experts)
        )
        self.shared = MLP(hidden_size, config.shared_size, **where) if config.shared_size else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]. Each expert that is chosen at all runs once, over the rows that chose it."""
        ids, weights = self.router(x)  # [N, k] each
        order = ids.flatten().argsort(stable=True)  # the N * k pairs of row and expert, by expert
        rows = order // ids.shape[1]
        parts = x[rows].split(ids.flatten().bincount(minlength=len(self.experts)).tolist())
        read = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        read = read * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        return out.index_add(0, rows, read)

    def weight_views(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint, relative to the MoE -> the part of our parameters that it fills."""
        views = {"gate.weight": self.router.weight}
        if self.router.bias is not None:
            views["gate.e_score_correction_bias"] = self.router.bias
        parts = {f"experts.{e}": expert for e, expert in enumerate(self.experts)}
        if self.shared is not None:
            parts["shared_experts"] = self.shared
        return views | {
            f"{at}.{name}": view for at, part in parts.items() for name, view in part.weight_views().items()
        }
