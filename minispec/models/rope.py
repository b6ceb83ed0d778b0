"""Rotary position embedding: position p turns each pair of numbers of a head by an angle p * frequency.

A dot product of two turned vectors depends on the difference of their positions only, so keys can be stored turned
and used at any later time. Long-context models stretch the frequencies; that is all that the kinds differ in.

Knows: frequencies of each kind, and how to turn heads. Does not know: layers, caches, or where positions come from.
Taught in notebook 01 (one token at a time).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from minispec.models.config import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return (frequencies [D/2] float32 in radians per position, factor on cos and sin).

    default: theta^(-2i/D) (Su et al. 2021, RoFormer, section 3.2.2). linear: divided by `factor` (Chen et al. 2023,
    position interpolation). llama3: long waves divided, short ones kept, a ramp between (Llama 3.1's published code).
    yarn: the same idea with a ramp over dimensions and sharper attention (Peng et al. 2023, section 3).
    """
    exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim  # [D/2]
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope.parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    if rope.kind == "factors":
        return frequencies / torch.tensor(rope.parameters["factors"]), 1.0
    return frequencies, 1.0


def softmax_factor(rope: RopeConfig) -> float:
    """What DeepSeek multiplies the softmax scale with: stretched by YaRN, its whole heads are sharpened, turned or not.

    The published code of DeepSeek-V2 and V3 squares the factor, because it means the queries and the keys.
    """
    weight = rope.parameters.get("mscale_all_dim")
    return _mscale(rope.parameters["factor"], weight) ** 2 if rope.kind == "yarn" and weight else 1.0


def rotary_tables(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 (cos, sin), each [N, 1, D], for `rotate`; the first half of sin carries its minus sign."""
    angles = (positions.float()[:, None] * frequencies)[:, None]  # [N, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads [N, heads, D]; number i is paired with number i + D/2.

    (a, b) -> (a cos - b sin, b cos + a sin). Rolling by D/2 puts every number's partner in its place.
    """
    partner = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, partner, sin)


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # whole turns in training
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / parameters["factor"])


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    get = rope.parameters.get
    factor, original = get("factor"), get("original_max_position_embeddings")

    def dimension(turns: float) -> float:  # the pair that makes this many turns over the original length
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(get("beta_fast") or 32), dimension(get("beta_slow") or 1)
    if get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, device="cpu").float()
    keep = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)

    sharpen = get("attention_factor")
    if sharpen is None and get("mscale") and get("mscale_all_dim"):
        sharpen = _mscale(factor, get("mscale")) / _mscale(factor, get("mscale_all_dim"))
    return frequencies * (keep + (1 - keep) / factor), _mscale(factor, 1.0) if sharpen is None else float(sharpen)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
