"""From a configuration to a drafter: load what it needs and refuse pairs that cannot work.

Knows: which drafter needs which weights. Does not know: how any of them drafts.
Taught in notebook 12 (speculation inside the engine).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from minispec.config import ConfigError, SpeculativeConfig
from minispec.device import choose_device, choose_dtype
from minispec.kv.pool import KVPool
from minispec.models.config import ModelLoadError
from minispec.models.eagle import load_eagle
from minispec.models.embedded import EMBEDDED_MODEL, embedded_path
from minispec.models.llama import CausalLM
from minispec.models.loading import ASSETS, LoadedModel, load_model, read_safetensors, read_tensors
from minispec.models.mtp import MTPWeights, NoMTPModule, load_mtp
from minispec.runner import ModelRunner
from minispec.speculative.drafter import Drafter
from minispec.speculative.model import EagleDrafter, EarlyExitDrafter, MTPDrafter, StandaloneDrafter
from minispec.speculative.ngram import NgramDrafter
from minispec.speculative.remote import DraftProcess

log = logging.getLogger(__name__)

BUILT_IN = ("auto", "ngram", "mtp", "eagle", "early-exit")
EMBEDDED_HEAD = ASSETS / f"{EMBEDDED_MODEL}-mtp.safetensors"


@dataclass(frozen=True)
class Prepared:
    """A drafter whose weights are loaded; `build` makes it once there are slots.

    bytes_per_slot: that it takes of the target's device, hidden_bytes of them for hidden states. attentions: of its own
    there. reads_hidden: see `ModelRunner`. weights: modules of its own there. close: call it at the end, in any case.
    """

    build: Callable[[ModelRunner, KVPool], Drafter]
    bytes_per_slot: int = 0
    attentions: int = 0
    reads_hidden: bool = False
    hidden_bytes: int = 0
    weights: Sequence[nn.Module] = ()
    close: Callable[[], None] = lambda: None


def prepare_drafters(
    config: SpeculativeConfig | None, loaded: LoadedModel, *, dtype: torch.dtype, device: torch.device
) -> list[Prepared]:
    """The drafters that `config` names; none without it, or with candidate_length 0. dtype, device: the target's.

    Raises ConfigError or ModelLoadError when one cannot be had or does not fit the target.
    """
    if config is None or config.candidate_length == 0:
        return []
    prepared: list[Prepared] = []
    for name in ("mtp", "ngram") if config.draft_model == "auto" else config.drafters:
        if loaded.shard.rank and name not in ("mtp", "early-exit"):
            continue  # only process 0 drafts with what is not a part of the target
        if name == "ngram":
            copy = NgramDrafter(config.ngram_max, config.ngram_min, config.topk, config.candidate_length)
            prepared.append(Prepared(lambda runner, pool, copy=copy: copy))
            continue
        try:
            prepared.append(model_drafter(name, config, loaded, dtype, device))
        except NoMTPModule as error:
            if config.draft_model != "auto":
                raise
            log.info("drafting with n-grams alone: %s", error)
    return prepared


def model_drafter(
    name: str, config: SpeculativeConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device
) -> Prepared:
    """The drafter `name`, which is none of n-grams. Of `loaded`, a draft model of its own needs the tokenizer alone."""
    choice = {
        "sampled": config.draft_sampling == "probabilistic",
        "least_confidence": config.draft_confidence_threshold,
        "topk": config.topk,
        "depth": config.candidate_length,
    }
    where = {"dtype": dtype, "device": device, "quantization": config.draft_quantization}
    if name == "eagle":
        weights = load_eagle(Path(config.draft_head).expanduser(), loaded.model, **where)
        return _reader(EagleDrafter, weights, loaded.model, dtype, choice)
    if name == "mtp":
        weights = load_mtp(loaded.shard.tensors(_mtp_tensors(config.draft_head, loaded)), loaded.model, **where)
        loaded.shard.add_up(module.layer for module in weights.modules)
        used = replace(weights, modules=weights.modules[: config.candidate_length])  # a later one would never draft
        return _reader(MTPDrafter, used, loaded.model, dtype, choice)
    if name == "early-exit":
        layers, most = config.early_exit_layers or max(1, loaded.config.num_layers // 4), loaded.config.num_layers - 1
        if layers > most:
            raise ConfigError(f"early_exit_layers must be from 1 to {most} for this model, got {layers}")
        return Prepared(partial(EarlyExitDrafter, layers, **choice))
    if config.draft_process:
        process = DraftProcess(name, config, loaded.tokenizer, dtype, device)
        return Prepared(process.build, process.bytes_per_slot, process.attentions, close=process.close)
    here = _draft_device(config.draft_device) if config.draft_device else device
    if here.type != device.type:  # what is quick there may be slow here
        dtype, _ = choose_dtype("auto", here)
    try:
        draft = load_model(name, dtype=dtype, device=here, quantization=config.draft_quantization)
    except ModelLoadError as error:
        raise ConfigError(f"draft_model {name!r}: not {', '.join(BUILT_IN)}, so taken for a model; {error}") from error
    check_same_tokenizer(loaded.tokenizer, draft.tokenizer)
    shared = here == device
    size = draft.config.kv_bytes_per_token(dtype) if shared else 0
    own = [draft.model] if shared else []
    return Prepared(partial(StandaloneDrafter, draft.model, **choice), size, int(shared), weights=own)


def _reader(
    kind: type[MTPDrafter], weights: MTPWeights, target: CausalLM, dtype: torch.dtype, choice: dict[str, Any]
) -> Prepared:
    """A drafter that reads the target's hidden states and keeps those of its modules."""
    count, config = len(weights.modules), weights.config
    hidden = (max(1, len(weights.layers)) + count) * config.hidden_size * dtype.itemsize
    size = hidden + count * replace(config, num_layers=1).kv_bytes_per_token(dtype)
    own = [*weights.modules, *([] if weights.head is target.head else [weights.head])]
    own += [weights.embedding] if weights.embedding else []
    return Prepared(partial(kind, weights, dtype=dtype, **choice), size, count, True, hidden, own)


def _draft_device(name: str) -> torch.device:
    try:
        return choose_device(name)
    except ConfigError as error:
        raise ConfigError(f"draft_device {name!r}: {error}") from error


def _mtp_tensors(head: str | None, loaded: LoadedModel) -> Iterator[tuple[str, torch.Tensor]]:
    if head is not None:
        return read_safetensors(Path(head).expanduser())
    source = Path(loaded.source)
    if source == embedded_path():
        if not EMBEDDED_HEAD.is_file():
            raise ConfigError(f"this installation lacks the MTP module of {EMBEDDED_MODEL} ({EMBEDDED_HEAD.name})")
        return read_safetensors(EMBEDDED_HEAD)
    if not source.is_dir():
        raise NoMTPModule(f"{source} holds no MTP module that we can read; name a head file in draft_head")
    return read_tensors(source)


def check_same_tokenizer(target: PreTrainedTokenizerBase | None, draft: PreTrainedTokenizerBase | None) -> None:
    """Raise ConfigError unless both map the same text to the same ids. Padded embeddings are no difference."""
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        raise ConfigError(
            f"the draft model's tokenizer has {len(theirs)} tokens and the target's {len(ours)}: they must be the same"
        )
    token = min(t for t in ours if theirs.get(t) != ours[t])
    raise ConfigError(
        f"the tokenizers have {len(ours)} tokens each but differ: {token!r} is {ours[token]} for the target and "
        f"{theirs.get(token, 'missing')} for the draft model"
    )
