"""What the target thinks at every position of the text: the inputs and the labels of the training.

The base never changes, so its hidden states and its next-token distributions are computed once, by prefill. Of each
distribution the TOP likeliest tokens are kept: they hold nearly all of it, and one number per kept token is enough to
teach not only the target's choice but also how sure it was (distillation, Hinton et al. 2015).

The same pass finds a good start. The module begins as a copy of the target's last layer, so its projection should
produce what that layer is used to read. The best linear guess of it from the module's two inputs is a least-squares
problem with a closed solution, and it drafts usefully before the first step of training.

Knows: one causal forward over conversations of one length. Does not know: the module that learns from it.
Taught in notebook 14 (how the head was made).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from minispec.config import ConfigError
from minispec.models.llama import Attend, CausalLM
from minispec.training.data import Conversations

TOP = 8


class Features(NamedTuple):
    """For C conversations of L tokens. hidden [C, L, H]: the target's, after its final norm. top_ids int32 and
    top_probs float16 [C, L, TOP]: the likeliest next tokens at temperature 1, the likeliest first; 0 where the next
    token is not the assistant's, and so not learnt. projection float32 [H, 2H]: where the module's should start."""

    hidden: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    projection: torch.Tensor

    def save(self, path: Path, origin: str) -> None:
        """origin: the text and the model that they belong to."""
        save_file(self._asdict(), path.with_suffix(".part"), metadata={"origin": origin})
        path.with_suffix(".part").replace(path)

    @classmethod
    def load(cls, path: Path, origin: str) -> Features:
        """Raises ConfigError when the file is damaged or belongs to other text or another model."""
        try:
            with safe_open(path, framework="pt") as file:
                if (made_of := file.metadata()["origin"]) != origin:
                    raise ConfigError(f"{path} belongs to {made_of}, not to {origin}: use another folder")
                return cls(*map(file.get_tensor, cls._fields))
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is not a complete file of features ({error}): remove it") from error


def spoken_next(data: Conversations) -> np.ndarray:
    """bool [C, L]: the token after this position is the assistant's own."""
    return np.pad(data.answer_mask[:, 1:], ((0, 0), (0, 1)))


@torch.inference_mode()
def compute_features(
    model: CausalLM, data: Conversations, held_out: np.ndarray, *, batch_size: int = 8, progress: bool = True
) -> Features:
    """Prefill all conversations, `batch_size` at a time. The projection is fitted without the rows of `held_out`.

    Raises ConfigError when the text has ids that the model lacks, or the assistant never speaks in what is not held
    out.
    """
    if (largest := data.token_ids.max()) >= model.config.vocab_size:
        raise ConfigError(f"the text has token id {largest}; the model has 0 to {model.config.vocab_size - 1}")
    count, length = data.token_ids.shape
    weight = model.embedding.weight
    hidden = torch.empty(count, length, model.config.hidden_size, dtype=weight.dtype)
    top_ids = torch.zeros(count, length, TOP, dtype=torch.int32)
    top_probs = torch.zeros(count, length, TOP, dtype=torch.float16)
    wanted = torch.from_numpy(spoken_next(data))
    learnt = wanted.clone()
    learnt[torch.from_numpy(held_out)] = False
    if not learnt.any():
        raise ConfigError(f"the assistant says nothing in {count} conversations of {length} tokens: make them longer")
    fit = LinearFit(2 * model.config.hidden_size, model.config.hidden_size, weight.device)
    last_input: list[torch.Tensor] = []  # what the last layer reads
    for start in tqdm(range(0, count, batch_size), desc="reading the target's mind", disable=not progress):
        rows = slice(start, min(start + batch_size, count))
        ids = torch.from_numpy(data.token_ids[rows].astype(np.int64)).to(weight.device)
        with model.layers[-1].register_forward_pre_hook(lambda _, args: last_input.append(args[0].clone())):
            states = model.forward(ids.flatten(), positions_of(ids), causal_attend(len(ids)))
        states, read = (x.view(len(ids), length, -1) for x in (states, last_input.pop()))
        here = learnt[rows, 1:].to(states.device)
        inputs = torch.cat((_normed(model.embedding(ids[:, 1:])[here]), _normed(states[:, :-1][here])), -1)
        fit.add(inputs, read[:, 1:][here].float())
        hidden[rows] = states
        logits = model.logits(states[wanted[rows].to(states.device)])
        best = logits.topk(TOP, -1)
        top_ids[rows][wanted[rows]] = best.indices.int().cpu()
        top_probs[rows][wanted[rows]] = (best.values - logits.logsumexp(-1, keepdim=True)).exp().half().cpu()
    return Features(hidden, top_ids, top_probs, fit.solve())


class LinearFit:
    """Least squares y = W x over rows that come in parts, with a little ridge."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.xx = torch.zeros(inputs, inputs, device=device)
        self.xy = torch.zeros(inputs, outputs, device=device)
        self.rows = 0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x [n, inputs], y [n, outputs], float32."""
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.rows += len(x)

    def solve(self, ridge: float = 1e-4) -> torch.Tensor:
        """W float32 [outputs, inputs]. `ridge` is relative to inputs of mean square 1."""
        xx = self.xx.double() / self.rows + ridge * torch.eye(len(self.xx), dtype=torch.float64, device=self.xx.device)
        return torch.linalg.solve(xx, self.xy.double() / self.rows).T.float().contiguous().cpu()


def _normed(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] scaled to mean square 1, as a fresh norm of the module does."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """ids [B, L] -> 0..L-1 for each conversation, [B * L]."""
    return torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))


def causal_attend(batch_size: int) -> Attend:
    """An `attend` for B = `batch_size` conversations of L tokens each: q [B * L, Hq, D], k and v [B * L, Hkv, D] ->
    [B * L, Hq, D], each row over the rows of its own conversation up to itself."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (batch_size, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
