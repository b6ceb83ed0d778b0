"""What a model needs and how fast it can be at best, from its config.json alone: `python -m minispec plan`.

Decoding one token reads every weight that takes part in it, so memory bandwidth bounds tokens per second. A round of
speculation reads the draft's weights K times and the target's once, and gives (1 - a^(K+1)) / (1 - a) tokens where each
draft is kept with probability a (Leviathan et al. 2023, section 3.1). K/V reads, which grow with the context, and the
network between devices are left out.

Knows: sizes. Does not know: weights, tensors, this machine. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minispec.config import ConfigError, SpeculativeConfig, check_number
from minispec.device import DTYPES
from minispec.kv.sizing import DEFAULT_FRACTION, MemoryPlan, slots_that_fit
from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.loading import ASSETS, MINIATURE, read_config
from minispec.models.sharding import Shard

CONFIGS = ASSETS / "configs"
RESERVE = SpeculativeConfig.state_cache_reserve


@dataclass(frozen=True)
class Plan:
    """str(plan) is what the command prints. memory: of the device that also holds the draft.

    parameters: of the whole model; read: those that one token reads. bound, drafted_bound: most tokens per second of
    one request, without and with drafts. emitted: tokens per round.
    """

    title: str
    parameters: int
    read: int
    draft_parameters: int
    memory: MemoryPlan
    emitted: float
    bound: float
    drafted_bound: float

    def __str__(self) -> str:
        draft = f", and {self.draft_parameters / 1e9:,.2f}e9 that draft" if self.draft_parameters else ""
        lines = [
            self.title,
            f"parameters      {self.parameters / 1e9:,.2f}e9, of which a token reads {self.read / 1e9:,.2f}e9{draft}",
            str(self.memory) if self.memory.slots else "the weights do not fit: more devices are needed (--tp)",
            f"at best         {self.bound:,.1f} tokens/s for one request",
        ]
        if self.drafted_bound != self.bound:
            gain = f"{self.drafted_bound / self.bound:.2f} times: {self.emitted:.2f} tokens per round"
            lines.append(f"with drafts     {self.drafted_bound:,.1f} tokens/s ({gain})")
        return "\n".join(lines)


def make_plan(
    model: str,
    *,
    tp: int = 1,
    draft: str | None = None,
    acceptance: float = 0.7,
    candidate_length: int = 4,
    bandwidth: float = 4800.0,
    memory: float = 141.0,
    dtype: str = "bfloat16",
) -> Plan:
    """Plan `model` on `tp` devices of so much memory (10^9 bytes) and bandwidth (10^9 bytes per second) each.

    model: a name under assets/configs, a folder, a config.json, or org/name. draft: "mtp", "ngram" (which reads
    nothing) or another model, which lies on the first device alone; None: the config's MTP modules if it promises any.
    acceptance: how often a draft is kept where all before it were.
    Raises ConfigError or ModelLoadError for what cannot be planned.
    """
    check_number("acceptance", acceptance, 0, 1)
    check_number("candidate_length", candidate_length, 0, 64, integer=True)
    check_number("tp", tp, 1, integer=True)
    for name, value in (("bandwidth", bandwidth), ("memory", memory)):
        check_number(name, value, 1e-3)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    whole, size, number = find_config(model), DTYPES[dtype].itemsize, DTYPES[dtype]
    part, H = Shard(0, tp).config(whole), whole.hidden_size
    draft = ("mtp" if whole.num_mtp else "ngram") if draft is None else draft
    own = hidden = draft_kv = read = drafting = 0  # the draft's numbers: here, hidden bytes, K/V bytes, read for one
    if draft == "mtp":
        if not whole.num_mtp:
            raise ConfigError(f"the config of {model} promises no MTP module to draft with")
        module = part.layer_parameters(part.num_layers) + 2 * H * H
        own, draft_kv = part.num_mtp * module, part.num_mtp * part.kv_bytes_per_token(number) // part.num_layers
        hidden = (part.num_mtp + 1) * H * size
        read = part.num_parameters_read(range(part.num_layers, part.num_layers + 1)) + 2 * H * H
        drafting = whole.num_mtp * (whole.layer_parameters(whole.num_layers) + 2 * H * H)
    elif draft != "ngram":
        other = find_config(draft)
        own = drafting = other.num_parameters
        draft_kv, read = other.kv_bytes_per_token(number), other.num_parameters_read()
    weights, kv = part.num_parameters * size, part.kv_bytes_per_token(number)
    free = int(memory * 1e9) - weights - own * size
    slots = slots_that_fit(
        free, int(memory * 1e9), target=kv, others=hidden + draft_kv, fixed=0, reserve=RESERVE if own else 0.0
    )
    emitted = sum(acceptance**j for j in range(candidate_length + 1))
    plain = bandwidth * 1e9 / (rows_read(part, 1) * size)
    round_bytes = (rows_read(part, candidate_length + 1) + candidate_length * read) * size
    return Plan(
        f"{model}, {dtype}, {tp} x {memory:g} GB at {bandwidth:,g} GB/s; drafts by {draft}, K = {candidate_length}, "
        f"{acceptance:.0%} kept; {DEFAULT_FRACTION:.0%} of what is free",
        whole.num_parameters,
        whole.num_parameters_read(),
        drafting,
        MemoryPlan(
            {"weights": weights, "draft weights": own * size},
            {"K/V": kv, "hidden states": hidden, "draft K/V": draft_kv},
            slots,
            RESERVE if own else 0.0,
        ),
        emitted,
        plain,
        emitted * bandwidth * 1e9 / round_bytes if candidate_length else plain,
    )


def rows_read(config: ModelConfig, rows: int) -> float:
    """Numbers that a forward of so many rows reads; of experts, those that at least one row is expected to choose.

    Rows are taken to choose independently and evenly: E (1 - (1 - k/E)^rows) of E experts.
    """
    numbers = config.num_parameters_read()
    if config.moe:
        E, k = config.moe.num_experts, config.moe.experts_per_token
        more = E * (1 - (1 - k / E) ** rows) - k
        layers = config.num_layers - len(config.moe.dense_layers)
        numbers += layers * more * 3 * config.hidden_size * config.moe.intermediate_size
    return numbers


def find_config(name: str) -> ModelConfig:
    """The config behind a name that comes with the package, a folder, a config.json, or org/name (one download)."""
    path = Path(name).expanduser()
    known = CONFIGS / f"{path.name}.json"
    if name == MINIATURE or path.is_dir():
        return read_config(ASSETS / name if name == MINIATURE else path)
    if not path.is_file() and known.is_file() and name in json.loads(known.read_text("utf-8"))["_source"]:
        path = known
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, "config.json"))
        except Exception as error:  # hub, network and file errors share no base class
            reason, names = str(error).strip().split("\n")[0], ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json")))
            raise ModelLoadError(f"no config of {name!r}: {reason} (known without a network: {names})") from error
    try:
        return ModelConfig.from_hf(json.loads(path.read_text("utf-8")))
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not the config of a model: {error!r}") from error
