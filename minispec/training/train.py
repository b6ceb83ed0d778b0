"""The training loop: an MTP module learns to draft for a target that does not change.

Matrices are trained by Muon (Jordan et al. 2024, torch.optim.Muon), which makes every direction of a matrix learn at
the same pace; a small module learns several times faster per step with it. Norms are trained by AdamW. The first part
of the run trains depth 1 alone, which is cheap, the rest all depths.

Knows: optimisers, schedule, checkpoints. Does not know: where the text came from, how the module will be served.
Taught in notebook 14 (how the head was made).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from minispec.config import ConfigError, check_number
from minispec.models.linear import Linear
from minispec.models.llama import CausalLM
from minispec.models.loading import read_safetensors
from minispec.models.mtp import MTPModule, load_mtp
from minispec.training.data import Conversations
from minispec.training.features import Features, spoken_next
from minispec.training.unroll import Batch, DepthResult, acceptance, unroll


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the text.

    depths: drafts unrolled. depth1_share: part of the steps that train depth 1 only. depth_decay: weight of each
    depth's loss relative to the one before. steps x batch_size conversations are read; `lr` is Muon's and falls to 0
    linearly, that of the norms is lr / 10. vocab: size of the draft vocabulary. num_held_out: greedy conversations
    kept for measuring. evaluate_every: steps. Raises ConfigError for a number out of range.
    """

    depths: int = 3
    depth1_share: float = 0.5
    depth_decay: float = 0.8
    steps: int = 1000
    batch_size: int = 16
    lr: float = 0.02
    warmup: int = 20
    weight_decay: float = 0.05
    vocab: int = 8192
    num_held_out: int = 64
    evaluate_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("depths", "steps", "batch_size", "warmup", "vocab", "num_held_out", "evaluate_every"):
            check_number(name, getattr(self, name), 1, integer=True)
        check_number("seed", self.seed, 0, integer=True)
        for name in ("depth1_share", "depth_decay"):
            check_number(name, getattr(self, name), 0, 1)
        for name in ("lr", "weight_decay"):
            check_number(name, getattr(self, name), 0)


@dataclass
class Evaluation:
    """loss: of depth 1, a running mean over the steps before. On the held-out text: agreement with the target's greedy
    choice per depth, and the acceptance length of chains."""

    step: int
    loss: float
    agreement: list[float]
    length: float

    def __str__(self) -> str:
        depths = " / ".join(f"{a:.3f}" for a in self.agreement)
        return f"step {self.step}: loss {self.loss:.3f}, agreement by depth {depths}, length {self.length:.2f}"


def draft_vocabulary(data: Conversations, size: int, vocab_size: int) -> torch.Tensor:
    """The `size` ids that the assistant uses most, in increasing order, int64. All ids if there are not more."""
    counts = np.bincount(data.token_ids[data.answer_mask].astype(np.int64), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def new_module(target: CausalLM, projection: torch.Tensor) -> MTPModule:
    """A float32 module that starts as the target's last layer over the best linear guess of what that layer reads."""
    module = MTPModule(target.config, dtype=torch.float32, device=target.norm.weight.device)
    with torch.no_grad():
        _copy(target.layers[-1], module.layer)
        module.projection.weight.copy_(projection)
        module.enorm.weight.fill_(1.0)
        module.hnorm.weight.fill_(1.0)
        module.norm.weight.copy_(target.norm.weight)
    return module.requires_grad_(True)


def module_from_head(path: Path, target: CausalLM) -> tuple[MTPModule, torch.Tensor]:
    """(a float32 module to go on from, its draft vocabulary) out of a head file.

    Raises ModelLoadError, or ConfigError when it holds several modules, one of MiMo's or no draft vocabulary.
    """
    device = target.norm.weight.device
    loaded = load_mtp(read_safetensors(path), target, dtype=torch.float32, device=device)
    if len(loaded.modules) != 1 or loaded.modules[0].hidden_first or loaded.draft_ids is None:
        wanted = "one MTP module under DeepSeek's names and its draft vocabulary (d2t)"
        raise ConfigError(f"{path} must hold {wanted} to be trained further")
    module = MTPModule(target.config, dtype=torch.float32, device=device)
    with torch.no_grad():
        _copy(loaded.modules[0], module)
    return module.requires_grad_(True), loaded.draft_ids.cpu()


def _copy(source: torch.nn.Module, into: torch.nn.Module) -> None:
    """Copy all weights; those of `source` may be packed."""
    for theirs, ours in zip(source.modules(), into.modules(), strict=True):
        for name, parameter in ours.named_parameters(recurse=False):
            packed = isinstance(ours, Linear) and name == "weight"
            parameter.copy_(theirs.plain_weight if packed else getattr(theirs, name))


class Trainer:
    """Trains `module` in place.

    vocab_ids: int64 [V'], what it may draft. held_out: conversations that only measure.
    Raises ConfigError when the others are less than a batch.
    """

    def __init__(
        self,
        module: MTPModule,
        target: CausalLM,
        vocab_ids: torch.Tensor,
        data: Conversations,
        features: Features,
        held_out: np.ndarray,
        recipe: Recipe,
    ) -> None:
        self.module, self.target, self.recipe = module, target, recipe
        self.data, self.features, self.spoken = data, features, spoken_next(data)
        self.head = target.head.plain_weight[vocab_ids.to(target.norm.weight.device)]  # [V', H]
        self.to_draft = torch.full((target.config.vocab_size,), -1)
        self.to_draft[vocab_ids] = torch.arange(len(vocab_ids))
        self.held_out = held_out
        self.train_rows = np.setdiff1d(np.arange(len(data.token_ids)), held_out)
        if (count := len(self.train_rows)) < recipe.batch_size:
            raise ConfigError(f"{count} conversations to learn from are less than a batch of {recipe.batch_size}")
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        # _train sets their learning rates before each step.
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(others, weight_decay=0.0),
        ]
        self.step = 0
        self.history: list[Evaluation] = []

    def run(self, checkpoint: Path | None = None, origin: str = "", *, progress: bool = True) -> list[Evaluation]:
        """Train to the end of the recipe, from `checkpoint` if that file exists; it is written at each evaluation.

        origin: what the module learns from. progress: show a bar and the evaluations. Raises ConfigError when the
        checkpoint is damaged or has another recipe or origin, FloatingPointError when the loss is not finite.
        """
        recipe = self.recipe
        identity = f"{recipe!r} on {origin}"
        if checkpoint is not None and checkpoint.is_file():
            self._resume(checkpoint, identity)
        mean = self.history[-1].loss if self.history else None
        with tqdm(total=recipe.steps, initial=self.step, desc="training", unit=" steps", disable=not progress) as bar:
            while self.step < recipe.steps:
                loss = self._train(self.batch_of(self._next_rows()))
                mean = loss if mean is None else 0.95 * mean + 0.05 * loss
                self.step += 1
                bar.update()
                bar.set_postfix(loss=f"{mean:.3f}")
                if self.step % recipe.evaluate_every == 0 or self.step == recipe.steps:
                    self.history.append(Evaluation(self.step, mean, *self.evaluate()))
                    if progress:
                        bar.write(str(self.history[-1]))
                    if checkpoint is not None:
                        self._save(checkpoint, identity)
        return self.history

    @torch.no_grad()
    def evaluate(self) -> tuple[list[float], float]:
        """(agreement per depth, acceptance length) on the held-out conversations."""
        parts = np.array_split(self.held_out, max(1, len(self.held_out) // self.recipe.batch_size))
        depths = self.recipe.depths
        results = (unroll(self.module, self.target, self.head, self.batch_of(rows), depths) for rows in parts)
        by_depth = zip(*results, strict=True)
        return acceptance([DepthResult(*map(torch.cat, zip(*depth, strict=True))) for depth in by_depth])

    def batch_of(self, rows: np.ndarray) -> Batch:
        """The conversations of these numbers, on the head's device."""
        rows = np.sort(rows)
        ids = self.to_draft[self.features.top_ids[rows].long()]  # [B, L, TOP], -1 outside the draft vocabulary
        probs = torch.where(ids >= 0, self.features.top_probs[rows].float(), 0.0)
        tokens = torch.from_numpy(self.data.token_ids[rows].astype(np.int64))
        spoken = torch.from_numpy(self.spoken[rows])
        parts = tokens, self.features.hidden[rows], spoken, ids[..., 0], ids.clamp(min=0), probs
        return Batch(*(part.to(self.head.device) for part in parts))

    def _next_rows(self) -> np.ndarray:
        """Conversations of this step; the order of each epoch depends on the seed alone."""
        size = self.recipe.batch_size
        epoch, place = divmod(self.step, len(self.train_rows) // size)
        order = np.random.default_rng([self.recipe.seed, epoch]).permutation(self.train_rows)
        return order[place * size : (place + 1) * size]

    def _train(self, batch: Batch) -> float:
        recipe = self.recipe
        factor = min(1.0, (self.step + 1) / recipe.warmup) * (1 - self.step / recipe.steps)
        for optimizer, base in zip(self.optimizers, (recipe.lr, recipe.lr / 10), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        depths = 1 if self.step < recipe.depth1_share * recipe.steps else recipe.depths
        results = unroll(self.module, self.target, self.head, batch, depths)
        weights = [recipe.depth_decay**k for k in range(depths)]
        loss = sum(w * r.loss for w, r in zip(weights, results, strict=True)) / sum(weights)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.step}: lower lr ({recipe.lr})")
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return results[0].loss.item()

    def _save(self, path: Path, identity: str) -> None:
        state = {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "history": [asdict(entry) for entry in self.history],
            "identity": identity,
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def _resume(self, path: Path, identity: str) -> None:
        try:
            state = torch.load(path, map_location=self.head.device, weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ConfigError(f"{path} is not a complete checkpoint ({error}): remove it") from error
        if state["identity"] != identity:
            raise ConfigError(f"{path} was made by {state['identity']}, not by {identity}: use another folder")
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.history = [Evaluation(**entry) for entry in state["history"]]
