"""The offline front door: text or ids in, text and ids out.

Knows: how to put a model, a pool, a drafter and an engine together, how to tokenise prompts and frame chats, and how
to drive the engine until the caller's requests are done. Does not know: how any of it works.

Taught in notebook 00 (the map).
"""

from __future__ import annotations

import logging
import operator
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch

from minispec.attention.flashinfer import DEVICE_BYTES
from minispec.config import ConfigError, EngineConfig, SamplingParams
from minispec.core import Request, Row, Step, TokenEvent, TokenKind, TokenLogprob
from minispec.device import choose_device, choose_dtype, release_helpers
from minispec.engine import Engine
from minispec.graphs import graph_batches
from minispec.kv.pool import KVPool
from minispec.kv.sizing import MemoryPlan, slots_that_fit, step_bytes
from minispec.metrics import EngineMetrics, MetricsRow, RequestMetrics
from minispec.models.linear import stored_bytes
from minispec.models.loading import load_model
from minispec.parallel import Group
from minispec.runner import ModelRunner
from minispec.sampling.distribution import token_logprobs
from minispec.speculative.build import Prepared, prepare_drafters
from minispec.speculative.drafter import Drafter
from minispec.speculative.model import ModelDrafter
from minispec.trace import Trace

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
DEFAULT_CACHE_TOKENS = 16384  # slots on a CPU, where the limit is patience and not memory


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` holds a final stop token, `text` does not. `logprobs` is None unless asked for."""

    index: int
    text: str
    token_ids: list[int]
    kinds: list[TokenKind]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    metrics: RequestMetrics
    error: str | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt: `outputs` holds its n completions; the other properties speak of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics


class Piece(str):
    """One streamed token: a string (often empty, while a character or a stop string is undecided) that knows more."""

    token_id: int
    kind: TokenKind
    finish_reason: str | None

    @classmethod
    def of(cls, event: TokenEvent) -> Piece:
        piece = cls(event.text)
        piece.token_id, piece.kind, piece.finish_reason = event.token_id, event.kind, event.finish_reason
        return piece


class Stream(Iterator[Piece]):
    """The completion of one prompt, token by token; `"".join(stream)` is the whole text.

    Asking for a piece runs the engine until there is one, so several open streams share forwards. `close`, or dropping
    the stream, aborts the request. `request` holds its counters and, at the end, its finish_reason.
    Raises RuntimeError when the request failed inside the engine.
    """

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self._engine = engine
        self._events: deque[TokenEvent] = deque()
        [self.request] = engine.add(prompt, params, on_token=self._events.append)

    def __next__(self) -> Piece:
        while not self._events and not self.request.finished:
            self._engine.step()
        if self._events:
            return Piece.of(self._events.popleft())
        if self.request.error:
            raise RuntimeError(f"{self.request.id}: {self.request.error}")
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it still runs. Closing twice is no error."""
        self._engine.abort(self.request.id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A refused prompt never became a request; and at the interpreter's end half of the modules are gone.
        if hasattr(self, "request") and not sys.is_finalizing():
            self.close()


class LLM:
    """A model with its engine. It belongs to one thread. `plan` tells where the memory of its device goes.

    model: "smollm2-135m" (fetched once, then offline), "deepseek-mini" (part of the package), a folder in Hugging Face
    layout, a .gguf file, or "org/name".
    dtype: "auto", "float32", "bfloat16", "float16". device: "auto", "cpu", "cuda", "cuda:1".
    drafter: your own drafter instead of the one that speculative_config names: an object with `propose` and `release`,
    as `minispec.speculative.drafter.Drafter` describes them. speculative_config says how many drafts it is asked for.
    options: the fields of `minispec.config.EngineConfig`: page_size, max_num_batched_tokens, chunked_prefill_size,
    max_num_seqs, kv_cache_tokens, mem_fraction_static, context_length, tensor_parallel_size, quantization,
    attention_backend, enable_cuda_graphs, enable_radix_cache, enable_overlap, enable_trace, check_every_step,
    speculative_config.

    tensor_parallel_size: so many processes, with a device each, share the model; this one starts the others. Under
    torchrun they run the same script: in all but process 0 the constructor serves it and then raises SystemExit.

    Raises ConfigError for a bad option and ModelLoadError for a model that cannot be loaded; both are ValueErrors.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        dtype: str = "auto",
        device: str = "auto",
        drafter: Drafter | None = None,
        **options: Any,
    ) -> None:
        known = [field.name for field in fields(EngineConfig)]
        for name in options:
            if name not in known:
                raise ConfigError(f"LLM has no option {name!r}; options are dtype, device, drafter, {', '.join(known)}")
        self.config = EngineConfig(**options)
        self.device, self.group, self._closing = choose_device(device), None, ExitStack()
        self.dtype, self.dtype_reason = choose_dtype(dtype, self.device)
        if (size := self.config.tensor_parallel_size) > 1:
            shared = options if drafter is None else options | {"speculative_config": None}
            self.group = Group(size, {"model": model, "dtype": dtype, "device": device, **shared})
            self._closing.callback(self.group.close)
            self.device = self.group.device(self.device)
        try:
            self._build(model, drafter)
        except BaseException:
            self._closing.close()
            raise

    def _build(self, model: str, drafter: Drafter | None) -> None:
        at = {"dtype": self.dtype, "device": self.device}
        loaded = load_model(model, **at, quantization=self.config.quantization, shard=self.group and self.group.shard)
        self.model, self.tokenizer, self.model_config = loaded.model, loaded.tokenizer, loaded.config
        context = self.config.context_length or loaded.config.context_length
        if context > (limit := loaded.config.context_length):
            raise ConfigError(f"context_length {context} is more than the {limit} tokens that this model can number")
        speculative = None if drafter else self.config.speculative_config
        prepared = prepare_drafters(speculative, loaded, **at)
        for each in prepared:
            self._closing.callback(each.close)
        num_slots = self.config.kv_cache_tokens or self._default_cache_tokens(context, prepared)
        num_slots = self.group.least(num_slots) if self.group else num_slots
        if self.config.page_size > num_slots:
            raise ConfigError(f"page_size {self.config.page_size} is larger than the whole pool of {num_slots} tokens")
        pool = KVPool(
            num_slots,
            self.config.page_size,
            num_rows=self.config.max_num_seqs,
            max_len=min(context, num_slots),
            enable_radix_cache=self.config.enable_radix_cache,
        )
        runner = ModelRunner(
            self.model,
            pool.num_slots,
            num_text_tokens=len(self.tokenizer) if self.tokenizer else None,
            **at,
            keep_hidden=any(each.reads_hidden for each in prepared),
            attention=self.config.attention_backend,
        )
        drafters = [drafter] if drafter else [each.build(runner, pool) for each in prepared]
        if self.group:
            shared = [program for each in drafters for program in getattr(each, "shared_programs", ())]
            self.group.share([runner.program, *shared], self.device)
        self.engine = Engine(
            self.config,
            runner,
            pool,
            context_length=context,
            eos_ids=loaded.config.eos_ids,
            tokenizer=self.tokenizer,
            drafters=drafters,
        )
        release_helpers()  # of the threads that have loaded the weights
        self.attention = f"{runner.tenant.attention.name} ({runner.tenant.reason})"
        self.plan = self._memory_plan(prepared, pool.num_slots)
        log.info("attention: %s\nmemory plan\n%s", self.attention, self.plan)
        if self.config.enable_cuda_graphs and self.device.type == "cuda" and not self.group:
            if loaded.config.moe:
                log.info("CUDA graphs: none, the host must know which experts were chosen")
            else:
                self._record(runner, drafters)
        self._open = True

    def _memory_plan(self, prepared: Sequence[Prepared], slots: int) -> MemoryPlan:
        hidden, drafts = sum(each.hidden_bytes for each in prepared), sum(each.bytes_per_slot for each in prepared)
        speculative = self.config.speculative_config if self.device.type == "cuda" else None
        own = sum(stored_bytes(*each.weights) for each in prepared)
        weights = {"weights": stored_bytes(self.model), "draft weights": own}
        reserve = speculative.state_cache_reserve if speculative else 0.0
        kv = {"K/V": self.model_config.kv_bytes_per_token(self.dtype)}
        return MemoryPlan(weights, kv | {"hidden states": hidden, "draft K/V": drafts - hidden}, slots, reserve)

    def _record(self, runner: ModelRunner, drafters: Sequence[Drafter]) -> None:
        """Capture the steps that come again and again, and tell what that cost."""
        batches, (before, _) = graph_batches(self.config.max_num_seqs), torch.cuda.mem_get_info(self.device)
        runner.record(batches, self._most_drafts)
        for drafter in drafters:
            device = drafter.device if isinstance(drafter, ModelDrafter) else None
            if device is not None and (device.type, device.index or 0) == ("cuda", self.device.index or 0):
                drafter.record(batches, self._most_drafts)
        taken = (before - torch.cuda.mem_get_info(self.device)[0]) / 1e6
        log.info("CUDA graphs: %d shapes of the target, %.0f MB in all", len(runner.program.recordings), taken)

    @property
    def _most_drafts(self) -> int:
        return self.config.speculative_config.candidate_length if self.config.speculative_config else 0

    def _default_cache_tokens(self, context: int, prepared: Sequence[Prepared]) -> int:
        config, model = self.config, self.model_config
        fraction, speculative = config.mem_fraction_static, config.speculative_config
        if self.device.type == "cuda":
            judged = config.max_num_seqs * (1 + (speculative.most_drafts if speculative else 0))
            widest = 3 * model.intermediate_size + 6 * model.hidden_size
            batch, vocab_size, itemsize = config.max_num_batched_tokens, model.vocab_size, self.dtype.itemsize
            slots = slots_that_fit(
                *torch.cuda.mem_get_info(self.device),
                target=model.kv_bytes_per_token(self.dtype),
                others=sum(each.bytes_per_slot for each in prepared),
                fixed=step_bytes(widest, batch, judged, vocab_size, itemsize)
                + (1 + sum(each.attentions for each in prepared)) * DEVICE_BYTES,
                fraction=fraction,
                reserve=speculative.state_cache_reserve if speculative else 0.0,
            )
            return max(context, slots)
        if fraction is not None:
            raise ConfigError(f"mem_fraction_static {fraction} is for CUDA, got device 'cpu'; use kv_cache_tokens")
        return min(config.max_num_seqs * context, max(context, DEFAULT_CACHE_TOKENS))

    # Generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts (text, or token ids), in order. `params`: one for all, one each, or defaults.

        Every prompt is checked before any runs. Raises ConfigError that names the prompt and the limit.
        """
        prompts = as_list("prompts", prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return self._run([self._encode(prompt) for prompt in prompts], texts, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation ([{"role": ..., "content": ...}, ...]) or a list of them.

        Raises ConfigError when the model has no chat template or a message is malformed.
        """
        if isinstance(messages, str):
            raise ConfigError("chat takes a list of messages, such as [{'role': 'user', 'content': ...}], not text")
        many = as_list("messages", messages)
        many = [many] if not many or isinstance(many[0], Mapping) else many
        texts = [self.render_chat(conversation) for conversation in many]
        return self._run([self._encode(text, add_special_tokens=False) for text in texts], texts, params)

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
    ) -> Stream:
        """Yield the completion of a prompt or a conversation token by token.

        Several streams may be open at once and share forwards. Closing or dropping one aborts its request.
        Raises ConfigError as `generate` does (at the call, not at the first piece), and when params.n > 1.
        """
        self._check_open()
        [params] = _params_for(1, params)
        if params.n != 1:
            raise ConfigError(f"stream yields one completion, got n={params.n}")
        return Stream(self.engine, self.encode(prompt), params)

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        self._check_open()
        each = _params_for(len(prompts), params)
        for prompt in prompts:
            self.engine.intake.check_prompt(prompt)
        groups: list[list[Request]] = []
        try:
            for prompt, its_params in zip(prompts, each, strict=True):
                groups.append(self.engine.add(prompt, its_params))
            while not all(request.finished for group in groups for request in group):
                self.engine.step()
        finally:  # Ctrl-C (between two steps) or a fault leaves nothing behind in the engine
            for group in groups:
                for request in group:
                    self.engine.abort(request.id)
        return [_output(group, text) for group, text in zip(groups, texts, strict=True)]

    def score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """The natural log-probability of each token of each continuation, from the raw logits.

        A continuation is a draft that nobody samples against: one row of a forward brings it, behind what the radix
        cache lacks of the prompt, and gets the logits of all its positions. Before that the prompt is read like any
        other, in chunks and beside running requests. Of the continuations nothing is kept.
        Raises ConfigError for ids that cannot be run, an empty prompt or an empty continuation.
        """
        self._check_open()
        prompt, waiting = self.engine.intake.check_prompt(prompt), [list(ids) for ids in continuations]
        for ids in waiting:
            if not ids:
                raise ConfigError("a continuation is empty: it has no token to score")
            self.engine.intake.check_prompt(prompt + ids)
        self._run([prompt], [None], SamplingParams(max_tokens=1, speculative=False))
        scores: list[list[float]] = []
        while waiting:
            scored = self._score_some(prompt, waiting)
            if not scored:  # running requests hold all the memory; some will end
                self.engine.step()
            scores, waiting = scores + scored, waiting[len(scored) :]
        return scores

    def _score_some(self, prompt: list[int], continuations: list[list[int]]) -> list[list[float]]:
        """One forward over as many of the continuations, from the first on, as there is room for."""
        engine, pool = self.engine, self.engine.pool
        engine.land()  # a step in flight would run beside this forward
        rows: list[Row] = []
        budget = self.config.max_num_batched_tokens
        try:
            for ids in continuations[: pool.table.num_free_rows]:
                request = Request("score", prompt, SamplingParams(), seed=0, max_len=len(prompt) + len(ids))
                start = pool.admit(request)
                row = Row(request, start, len(prompt) - start, drafts=ids)
                budget -= row.q_len
                rows.append(row)
                if (budget < 0 and len(rows) > 1) or not pool.reserve(request, row.kv_len):
                    pool.release(rows.pop().request, keep=False)
                    break
            if not rows:
                return []
            step = Step(rows)
            logits = engine.runner.forward(step, pool.table.slots)  # [R, V]: of each row 1 + len(drafts)
        finally:
            for row in rows:
                pool.release(row.request, keep=False)
        engine.metrics.steps += 1
        engine.metrics.computed_tokens += step.num_tokens
        ids = torch.tensor([token for row in rows for token in (*row.drafts, 0)], device=logits.device)
        values = iter(token_logprobs(logits, ids, top=0)[0].tolist())
        return [[next(values) for _ in range(row.num_logits)][:-1] for row in rows]  # what comes after is not asked

    # Text ------------------------------------------------------------------------------------------------------

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's own template writes it, ending where the answer begins if so asked.

        The text holds the model's start token if the template writes one, so encode it without adding another.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("this model has no chat template: use generate() with a prompt you framed yourself")
        if not messages:
            raise ConfigError("the conversation is empty: at least one message is needed")
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise ConfigError(f"a message must have a role and a content, both text; got {message!r}")
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may raise what it likes, such as "roles must alternate"
            raise ConfigError(f"the model's chat template refuses this conversation: {error}") from error

    def encode(self, prompt: Prompt | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a prompt or of a conversation, framed for an answer. Reads the tokenizer and nothing else.

        Text that begins with the model's start token, as a rendered chat may, gets no second one.
        Raises ConfigError for text that is not valid Unicode and for what the chat template refuses.
        """
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            return self._encode(self.render_chat(prompt), add_special_tokens=False)
        return self._encode(prompt)

    def _encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return as_list("a prompt", prompt)  # the engine checks the ids
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer: give token ids instead of text")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt {prompt!r:.80} is not valid Unicode: {error}") from error
        start = self.tokenizer.bos_token
        add_special_tokens &= not (start and prompt.startswith(start))
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)

    # Care ------------------------------------------------------------------------------------------------------

    def metrics(self) -> EngineMetrics:
        """A copy of all counters since start, with the figures that are derived from them."""
        self._check_open()
        return self.engine.snapshot()

    def metrics_history(self) -> list[MetricsRow]:
        """What happened over time: one row for every `metrics_interval` steps."""
        return list(self.engine.history)

    def trace(self) -> Trace:
        """What the host and the device did, and when. Raises ConfigError unless enable_trace is on."""
        if self.engine.trace is None:
            raise ConfigError("nothing is traced: make the LLM with enable_trace=True")
        return self.engine.trace

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner."""
        self.engine.check_integrity()

    def abort(self, request_id: str) -> bool:
        """End a running request (named by `RequestOutput.request_id` or `Stream.request.id`); False if none runs."""
        return self.engine.abort(request_id)

    def close(self) -> None:
        """Abort what is running and let the memory of model and pool go. Closing twice is no error."""
        if self._open:
            self.engine.close()
            self._closing.close()
        self._open = False
        self.model = self.engine.runner = self.engine.controller = None

    def _check_open(self) -> None:
        if not self._open:
            raise ConfigError("this LLM is closed")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_list(what: str, value: Any) -> list[Any]:
    """A list of the items of `value`; a single text, or a single list of ids, given as prompts becomes one item."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{what} must be text, token ids, or a list of them; got {value!r:.80}")
    items = list(value)
    return [items] if what == "prompts" and items and _is_number(items[0]) else items


def _is_number(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, float)
    return True


def _params_for(count: int, params: Any) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts, from None, one for all, or a list."""
    each = [SamplingParams() if params is None else params] * count if not isinstance(params, (list, tuple)) else params
    for item in each:
        if not isinstance(item, SamplingParams):
            raise ConfigError(f"params must be SamplingParams or a list of them, got {item!r:.80}")
    if len(each) != count:
        raise ConfigError(f"{count} prompts and {len(each)} sampling params; give one for all or one each")
    return list(each)


def _output(group: list[Request], text: str | None) -> RequestOutput:
    outputs = [
        CompletionOutput(
            index=request.index,
            text=request.text.text,
            token_ids=request.output,
            kinds=request.kinds,
            finish_reason=request.finish_reason,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            metrics=request.metrics,
            error=request.error,
        )
        for request in group
    ]
    return RequestOutput(group[0].id, text, group[0].prompt, outputs)
