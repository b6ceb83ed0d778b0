"""What a user may ask for: engine, sampling and speculation settings, all checked at the border.

Knows: every public option, its default, its range, and how to refuse a bad value in one sentence that names the
field, the value and the limit. Does not know: models, tensors, or how an option is carried out. Whatever passes
these constructors is valid everywhere below, so the engine never checks an option twice.

Taught in notebooks 00 (the map) and 13 (everything on).
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

QUANTIZATIONS = ("int8", "int4", "fp8")
GRAMMARS = ("json_schema", "regex", "ebnf")
SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
MAX_CANDIDATE_LENGTH = 64  # draft tokens; no drafter is right that far ahead


class ConfigError(ValueError):
    """A setting that minispec refuses: unknown name, wrong type, or value out of range."""


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, integer: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number (a whole one if `integer`) with low <= value <= high."""
    kind = "a whole number" if integer else "a number"
    limit = f"from {low} to {high}" if high != math.inf else f">= {low}"
    good_type = isinstance(value, numbers.Integral if integer else numbers.Real) and not isinstance(value, bool)
    if not good_type or value != value or value in (math.inf, -math.inf) or not low <= value <= high:
        raise ConfigError(f"{name} must be {kind} {limit}, got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. Every field means the same with and without speculation.

    Order of application to the logits of one position: repetition, presence and frequency penalties, logit_bias,
    min_tokens mask, grammar, temperature, top_k, top_p, min_p. Repetition counts prompt and output tokens, the other
    two penalties count output tokens only (as in the OpenAI API).

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. max_tokens None runs to the context limit;
    a larger value than the context allows is cut to it. `stop` strings end the text before the match; stop tokens
    (the model's own end-of-sequence ids unless ignore_eos, and stop_token_ids) stay in token_ids and not in text.
    Before min_tokens output tokens neither kind of stop applies. `seed` makes the request reproducible whatever it is
    batched with. With drafts that holds for verification "match"; under "rejection" the tokens depend on how many
    drafts each step had room for, and only their distribution does not. `logprobs` = m reports the natural
    log-probability of each output token and of the m likeliest ones, from the raw logits, before any field here is
    applied. `speculative=False` decodes this request without drafts; `candidate_length` is the most that it gets, where
    the engine's own limit is not lower.

    One of three grammars may say what the text must be as a whole: `json_schema` (a dictionary, or JSON; written on
    one line), `regex` (the syntax of Rust's regex crate), `ebnf` (GBNF or Lark). A text that is complete may end there,
    and one that nothing can follow does; max_tokens and stop may cut it before.

    Raises ConfigError (a ValueError) that names the field, the value and the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    max_tokens: int | None = 128
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True
    candidate_length: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        for name in given.keys() - cls.__dataclass_fields__.keys():
            hint = f"; it is called {SGLANG_NAMES[name]} here" if name in SGLANG_NAMES else ""
            raise ConfigError(f"SamplingParams has no field {name!r}{hint}; fields are {', '.join(_names(cls))}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0)
        check_number("top_k", self.top_k, -1, integer=True)
        check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ConfigError("top_p must be greater than 0 and at most 1, got 0 (for greedy use temperature=0)")
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        check_number("presence_penalty", self.presence_penalty, -1e6, 1e6)
        check_number("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        check_number("min_tokens", self.min_tokens, 0, integer=True)
        if self.max_tokens is not None:
            check_number("max_tokens", self.max_tokens, 1, integer=True)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}")
        if self.seed is not None:
            check_number("seed", self.seed, 0, 2**63 - 1, integer=True)
        check_number("n", self.n, 1, 1024, integer=True)
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, 100, integer=True)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        check_bool("speculative", self.speculative)
        if self.candidate_length is not None:
            check_number("candidate_length", self.candidate_length, 0, MAX_CANDIDATE_LENGTH, integer=True)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, (Sequence, Set)) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, (Sequence, Set)) or isinstance(self.stop_token_ids, str):
            raise ConfigError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            check_number("stop_token_ids", token, 0, integer=True)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            check_number("logit_bias key", token, 0, integer=True)
            check_number(f"logit_bias[{token}]", bias, -1e6, 1e6)
        self._check_grammar()
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's may change later

    def _check_grammar(self) -> None:
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"json_schema {self.json_schema!r:.80} is not JSON: {error}") from error
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} cannot both hold: give one of them")
        for name in given:
            if not isinstance(text := getattr(self, name), str) or not text:
                raise ConfigError(f"{name} must be text that is not empty, got {text!r:.80}")
            if self.ignore_eos:
                raise ConfigError(f"{name} ends with the model's end token: ignore_eos must be False")

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Which grammar holds, and its text."""
        return next(((name, text) for name in GRAMMARS if (text := getattr(self, name)) is not None), None)

    @property
    def greedy(self) -> bool:
        """True when each token is the argmax of the processed logits."""
        return self.temperature == 0


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate.

    draft_model: "ngram" copies what followed the last occurrence of the request's own last tokens; "mtp" is the MTP
    module in the target's checkpoint or in `draft_head`; "eagle" is the EAGLE head in `draft_head`; "early-exit" is the
    target's first layers; anything else is a model with the target's tokenizer, named as for LLM. [x, "ngram"]: per
    request and step one of both, see adaptive. "auto": [mtp, ngram] where the target has an MTP module, else ngram.
    candidate_length: K, most draft tokens in a row, per request and step.
    topk: draft tokens that may follow each token. 1: drafts are chains. More: trees, of at most num_draft_tokens tokens
    (K * topk, unless given), the likeliest of all that were drafted. n-gram: so many earlier continuations.
    adaptive: choose the drafter and the number of drafts (from 0 up) by what they have gained and cost of late. False:
    always candidate_length where it fits, and the n-gram's copy where it has one.
    draft_sampling: draw drafts from q at the request's own parameters ("probabilistic") or take the likeliest
    ("greedy", q is one-hot). Both are exact; greedy requests are drafted greedily in any case.
    draft_head: a safetensors file with an MTP module, or the folder or file of an EAGLE head.
    early_exit_layers: how many of the target's layers draft.
    draft_device: where a draft model of its own computes ("cpu", "cuda:1"); None: with the target.
    draft_process: let it run in a process of its own, which is told the committed tokens and answers with drafts.
    draft_quantization: "int8", "int4" or "fp8" weights for the MTP module or the draft model, as for the target.
    verification: "rejection" keeps a draft with probability min(1, p/q); "match" samples the target at every position
    and keeps drafts while they equal the sample. Both are exact; rejection never accepts less.
    ngram_max, ngram_min: longest and shortest suffix looked up, in tokens; the longest match wins.

    Limits on what the controller (speculative/controller.py) may choose, adaptive or not:
    min_candidate_length: fewest drafts of a request that gets any, and of one for which adaptive sees no gain.
    verification_batch_size: most requests that are verified with drafts in one step, in turn; None: all.
    disable_by_batch_size: no drafts while more requests than this decode; None: never.
    acceptance_window: verifications of a request that its acceptance is measured over.
    fallback_threshold: a request whose windowed acceptance rate is below goes on without drafts; 0: none does.
    max_retry_attempts: how often drafting is tried again after such a fall-back, and after a fault of the drafter.
    max_consecutive_rejections: a request whose first draft was rejected so often in a row pauses; None: never.
    target_acceptance: (low, high); a request's longest draft shrinks by one while its rate is below, and grows above.
    draft_confidence_threshold: a draft ends before a token whose likeliest choice has less probability than this.
    metrics_interval: steps between two rows of `LLM.metrics_history()`.
    state_cache_reserve: least share of a GPU's free memory, of what the cache gets, that the target's K/V leave to
    hidden states and the draft model's K/V.

    Raises ConfigError that names the field, the value and the range; unknown fields are refused by `from_any`.
    """

    draft_model: str | Sequence[str] = "ngram"
    candidate_length: int = 4
    topk: int = 1
    num_draft_tokens: int | None = None
    draft_sampling: str = "probabilistic"
    draft_head: str | None = None
    early_exit_layers: int | None = None
    draft_device: str | None = None
    draft_process: bool = False
    draft_quantization: str | None = None
    verification: str = "rejection"
    ngram_max: int = 4
    ngram_min: int = 2
    adaptive: bool = True
    min_candidate_length: int = 0
    verification_batch_size: int | None = None
    disable_by_batch_size: int | None = None
    acceptance_window: int = 32
    fallback_threshold: float = 0.0
    max_retry_attempts: int = 2
    max_consecutive_rejections: int | None = None
    target_acceptance: Sequence[float] | None = None
    draft_confidence_threshold: float = 0.0
    metrics_interval: int = 100
    state_cache_reserve: float = 0.2

    def __post_init__(self) -> None:
        names = (self.draft_model,) if isinstance(self.draft_model, str) else self.draft_model
        if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"draft_model must be a name or a list of names, got {self.draft_model!r}")
        if len(names) != 1 and not (len(names) == 2 and "ngram" in names and len(set(names)) == 2):
            raise ConfigError(f"draft_model takes one name, or one and 'ngram'; got {self.draft_model!r}")
        if len(names) == 2 and "auto" in names:
            raise ConfigError(f"draft_model 'auto' stands alone; got {self.draft_model!r}")
        check_number("candidate_length", self.candidate_length, 0, MAX_CANDIDATE_LENGTH, integer=True)
        check_number("topk", self.topk, 1, MAX_CANDIDATE_LENGTH, integer=True)
        if self.num_draft_tokens is not None:
            if self.topk == 1:
                raise ConfigError(f"num_draft_tokens {self.num_draft_tokens} is for trees, and topk is 1")
            least = self.candidate_length
            check_number("num_draft_tokens", self.num_draft_tokens, least, MAX_CANDIDATE_LENGTH, integer=True)
        check_choice("draft_sampling", self.draft_sampling, ("probabilistic", "greedy"))
        for name in ("draft_head", "draft_device"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be text that is not empty, got {value!r}")
        if self.draft_head is not None and not {"mtp", "eagle", "auto"} & set(names):
            raise ConfigError(f"draft_head {self.draft_head!r} is only read when draft_model is 'mtp' or 'eagle'")
        if self.draft_head is None and "eagle" in names:
            raise ConfigError("draft_model 'eagle' needs draft_head: the folder or file of the EAGLE head")
        own_model = any(name not in ("ngram", "mtp", "eagle", "early-exit", "auto") for name in names)
        if self.draft_device is not None and not own_model:
            raise ConfigError(f"draft_device {self.draft_device!r} is for a draft model of its own, not for {names}")
        check_bool("draft_process", self.draft_process)
        if self.draft_process and not own_model:
            raise ConfigError(f"draft_process is for a draft model of its own, not for {names}")
        if self.draft_quantization is not None:
            check_choice("draft_quantization", self.draft_quantization, QUANTIZATIONS)
            if not own_model and not {"mtp", "eagle", "auto"} & set(names):
                raise ConfigError(
                    f"draft_quantization is for 'mtp', 'eagle' or a draft model of its own, not for {names}"
                )
        check_choice("verification", self.verification, ("rejection", "match"))
        if self.early_exit_layers is not None:
            check_number("early_exit_layers", self.early_exit_layers, 1, integer=True)
            if "early-exit" not in names:
                raise ConfigError(f"early_exit_layers is for draft_model 'early-exit', not for {names}")
        check_number("ngram_max", self.ngram_max, 1, 32, integer=True)
        check_number("ngram_min", self.ngram_min, 1, self.ngram_max, integer=True)
        object.__setattr__(self, "draft_model", names[0] if len(names) == 1 else tuple(names))
        self._check_limits()

    def _check_limits(self) -> None:
        check_bool("adaptive", self.adaptive)
        check_number("min_candidate_length", self.min_candidate_length, 0, self.candidate_length, integer=True)
        for name in ("acceptance_window", "metrics_interval"):
            check_number(name, getattr(self, name), 1, 100_000, integer=True)
        for name in ("verification_batch_size", "disable_by_batch_size", "max_consecutive_rejections"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, integer=True)
        check_number("max_retry_attempts", self.max_retry_attempts, 0, integer=True)
        check_number("state_cache_reserve", self.state_cache_reserve, 0, 0.9)
        for name in ("fallback_threshold", "draft_confidence_threshold"):
            check_number(name, getattr(self, name), 0, 1)
        if self.target_acceptance is not None:
            band = self.target_acceptance
            if isinstance(band, str) or not isinstance(band, Sequence) or len(band) != 2:
                raise ConfigError(f"target_acceptance must be two numbers (low, high), got {band!r}")
            check_number("target_acceptance low", band[0], 0, 1)
            check_number("target_acceptance high", band[1], band[0], 1)
            object.__setattr__(self, "target_acceptance", tuple(band))

    @property
    def most_drafts(self) -> int:
        """Draft tokens of a request in one step, at most."""
        return self.num_draft_tokens or min(self.candidate_length * self.topk, MAX_CANDIDATE_LENGTH)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names in draft_model."""
        return (self.draft_model,) if isinstance(self.draft_model, str) else self.draft_model

    @classmethod
    def from_any(cls, value: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Accept a ready object, a dictionary of its fields, or None (no speculation)."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative_config must be a dictionary or SpeculativeConfig, got {value!r}")
        known = _names(cls)
        for key in value:
            if key not in known:
                raise ConfigError(f"speculative_config has no field {key!r}; fields are {', '.join(known)}")
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and switches of one engine.

    page_size: slots handed out at a time; also the grain of radix cache hits.
    max_num_batched_tokens: most rows of one forward (decode, draft and prompt tokens together).
    chunked_prefill_size: most prompt tokens of one request in one forward; None means max_num_batched_tokens.
    max_num_seqs: most requests that hold slots at the same time.
    kv_cache_tokens: slots in the pool, rounded down to whole pages; None chooses by device and model.
    mem_fraction_static: the share of a GPU's memory that weights and pool take together, instead of kv_cache_tokens.
    tensor_parallel_size: processes, each with a device of its own, that share the model (parallel.py).
    quantization: weights of the layers in few bits: "int8" or "int4" (CPU), "int8" or "fp8" (CUDA, by torchao).
    attention_backend: "flashinfer" (CUDA, the gpu extra), "torch", or "auto": the first where it can be used.
    enable_cuda_graphs: launch decoding steps and drafts as recorded graphs, where FlashInfer computes attention.
    context_length: most tokens (prompt and output) of one request; None means the model's own limit.
    enable_radix_cache: keep finished prefixes for later prompts.
    enable_overlap: the host settles a step and plans the next one while the device computes; the same results.
    enable_trace: keep what the host and the device do, and when, for `LLM.trace()`.
    check_every_step: verify the slot ledger after each step (tests and notebooks; costs host time).

    Raises ConfigError that names the field, the value and the range.
    """

    page_size: int = 16
    max_num_batched_tokens: int = 512
    chunked_prefill_size: int | None = None
    max_num_seqs: int = 16
    kv_cache_tokens: int | None = None
    mem_fraction_static: float | None = None
    context_length: int | None = None
    tensor_parallel_size: int = 1
    quantization: str | None = None
    attention_backend: str = "auto"
    enable_cuda_graphs: bool = True
    enable_radix_cache: bool = True
    enable_overlap: bool = True
    enable_trace: bool = False
    check_every_step: bool = False
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"):
            check_number(name, getattr(self, name), 1, integer=True)
        for name in ("chunked_prefill_size", "kv_cache_tokens", "context_length"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, integer=True)
        if self.mem_fraction_static is not None:
            check_number("mem_fraction_static", self.mem_fraction_static, 0.01, 1)
            if self.kv_cache_tokens is not None:
                raise ConfigError("mem_fraction_static and kv_cache_tokens both size the pool: give one of them")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}: "
                "every running request needs at least one row per step"
            )
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise ConfigError(f"kv_cache_tokens {self.kv_cache_tokens} is less than one page of {self.page_size}")
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("attention_backend", self.attention_backend, ("auto", "torch", "flashinfer"))
        switches = ("enable_cuda_graphs", "enable_radix_cache", "enable_overlap", "enable_trace", "check_every_step")
        for name in switches:
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "speculative_config", SpeculativeConfig.from_any(self.speculative_config))
        speculative = self.speculative_config
        if self.tensor_parallel_size > 1 and speculative and (speculative.topk > 1 or "eagle" in speculative.drafters):
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} takes chains of drafts: topk must be 1, got "
                f"{speculative.topk}, and no EAGLE head may draft"
            )
