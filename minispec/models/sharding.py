"""Which part of a model a process holds when several share it (tensor parallelism).

    q, k, v, gate, up    split by rows: a process computes some heads, and some of the inner numbers of each MLP
    o, down              split by columns: what those heads and numbers add to the layer's output
    all the rest         whole in each process: embedding, norms, routers, MLA's latents, MTP projections, the head

So the outputs of attention and of the MLP are partial sums, and each layer adds them up over all processes twice
(Shoeybi et al. 2019, Megatron-LM, section 3). A part is an ordinary model with fewer heads and narrower MLPs: the
model's own code knows nothing of its neighbours, and its K/V holds the heads that it has. MLA's latent, which all heads
share, is cached by all.

Knows: sizes and names. Does not know: processes, steps. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from minispec.config import ConfigError
from minispec.models.config import ModelConfig

ROWS = re.compile(r"\b(q|q_b|k|v|kv_b|gate|up)_proj\.(weight|bias)$")
COLUMNS = re.compile(r"\b(o|down)_proj\.weight$")
OUTPUT_BIAS = "o_proj.bias"  # of a sum: it counts once


class Shard(NamedTuple):
    """Process `rank` of the `size` that share a model."""

    rank: int = 0
    size: int = 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """The part's own sizes. Raises ConfigError when something cannot be divided evenly."""

        def part(what: str, count: int) -> int:
            if count % self.size:
                raise ConfigError(f"tensor_parallel_size {self.size} does not divide the model's {count} {what}")
            return count // self.size

        heads, moe = part("attention heads", config.num_heads), config.moe
        if moe:
            inner = part("numbers of an expert", moe.intermediate_size)
            moe = replace(moe, intermediate_size=inner, shared_size=part("shared numbers", moe.shared_size))
        return replace(
            config,
            num_heads=heads,
            num_kv_heads=heads if config.mla else part("key/value heads", config.num_kv_heads),
            intermediate_size=part("numbers of an MLP", config.intermediate_size),
            moe=moe,
        )

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each tensor of a checkpoint, by its Hugging Face name, the part that belongs here."""
        for name, tensor in tensors:
            if self.rank and name.endswith(OUTPUT_BIAS):
                tensor = torch.zeros_like(tensor)
            axis = 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None
            if axis is not None and tensor.shape[axis] % self.size == 0:  # else its shape does not fit the config
                tensor = tensor.chunk(self.size, axis)[self.rank]
            yield name, tensor

    def add_up(self, layers: Iterable[torch.nn.Module]) -> None:
        """Let decoder layers add their partial sums up over all processes, in the default process group."""
        if self.size > 1:
            for layer in layers:
                for module in (layer.attention, layer.mlp):
                    module.register_forward_hook(_sum)


WHOLE = Shard()


class WorkerLost(RuntimeError):
    """Another process of the group has ended, or did not answer in time. The engine cannot go on."""


def _sum(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    try:
        dist.all_reduce(output)
    except RuntimeError as error:
        raise WorkerLost(f"a process of this tensor-parallel group has ended or hangs: {error}") from error
    return output
