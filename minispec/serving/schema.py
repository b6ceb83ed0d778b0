"""What clients send and what they get: OpenAI's chat and completions API, and SGLang's /generate.

A request model knows how to say itself in our terms (`prompts`, `params`) and how its API writes an answer (`choice`,
`answer`, `item`). Values of sampling fields are checked by SamplingParams, so every API refuses them in the same words.

Nothing that changes an answer is ignored: an unknown field is refused, and so is a known one that asks for something
that this server cannot do (tools, images). null means that a field is absent.

Knows: field names, shapes of answers. Does not know: HTTP, the engine. Used in notebook 13 (everything on).
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, create_model, model_validator

from minispec.config import SGLANG_NAMES, ConfigError, SamplingParams
from minispec.core import Request
from minispec.llm import as_list
from minispec.metrics import RequestMetrics
from minispec.serving.engine_thread import Update

SAMPLING_FIELDS = [field.name for field in fields(SamplingParams)]
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
ROLES = ("system", "user", "assistant", "developer")
# Fields of OpenAI's API that are not carried out -> the values that ask for nothing and may stand there.
NOT_CARRIED_OUT: dict[str, Sequence[Any]] = {
    "audio": (), "prediction": (), "web_search_options": (),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,), "echo": (False,), "suffix": ("",), "store": (False,),
}  # fmt: skip
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")  # change no answer
# What response_format.type may be -> the grammar that it asks for, under one of the names below, which vLLM has.
RESPONSE_FORMATS = {
    "text": lambda given: {},
    "json_object": lambda given: {"json": {"type": "object"}},
    "json_schema": lambda given: {"json": given["json_schema"]["schema"]},
    "regex": lambda given: {"regex": given["regex"]},
    "choice": lambda given: {"choice": given["choice"]},
}
GUIDED = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "choice": "regex"}


class Body(BaseModel):
    """A request body. Fields are checked strictly ("3" is no number), others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    include_usage: bool = False


# The fields of SamplingParams under their own names, which OpenAI's API shares; the others are its usual extensions.
SamplingFields = create_model("SamplingFields", __base__=Body, **{name: (Any, None) for name in SAMPLING_FIELDS})


class OpenAIRequest(SamplingFields):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in NOT_CARRIED_OUT.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise ValueError(f"{name} is not supported by this server")
        return _grammars({k: v for k, v in data.items() if k not in NOT_CARRIED_OUT and k not in LABELS})

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self) -> SamplingParams:
        """Raises ConfigError that names the field, the value and the range."""
        return _sampling_params({name: getattr(self, name) for name in self._set_fields()})

    def choice(self, update: Update, tokenizer: Any, *, whole: bool) -> dict[str, Any]:
        """One choice of an answer, or (not `whole`) of a chunk of a stream."""
        logprobs = self._logprobs(tokenizer, update) if update.logprobs else None
        common = {"index": update.index, "logprobs": logprobs, "finish_reason": update.finish_reason}
        return common | self._content(update.text, whole)

    def answer(self, id: str, model: str, choices: list[dict], *, whole: bool) -> dict[str, Any]:
        """What surrounds the choices."""
        object = self.object if whole else self.chunk_object
        return {"id": id, "object": object, "created": int(time.time()), "model": model, "choices": choices}

    def _set_fields(self) -> set[str]:
        return self.model_fields_set & set(SAMPLING_FIELDS) | {"max_tokens"}


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions. Without max_tokens the answer may run to the context limit."""

    prefix: ClassVar = "chatcmpl"
    object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"
    opening: ClassVar = {"delta": {"role": "assistant", "content": ""}}  # the first chunk of each choice
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def prompts(self) -> list[list[dict[str, str]]]:
        """The one conversation, with text contents. Raises ConfigError for what is not text."""
        if not self.messages:
            raise ConfigError("messages is empty: at least one message is needed")
        return [[_message(message) for message in self.messages]]

    def params(self) -> SamplingParams:
        """Raises ConfigError that names the field, the value and the range."""
        values = {name: getattr(self, name) for name in self._set_fields() - {"logprobs"}}
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise ConfigError(f"top_logprobs {self.top_logprobs} needs logprobs to be true")
        return _sampling_params(values)

    def _content(self, text: str, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokenizer: Any, update: Update) -> dict[str, Any]:
        def named(token_id: int, logprob: float) -> dict[str, Any]:
            text = _text(tokenizer, token_id)
            whole = "\ufffd" not in text  # a part of a character has no text of its own
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}

        content = [
            named(token, entry.logprob) | {"top_logprobs": [named(*pair) for pair in entry.top.items()]}
            for token, entry in zip(update.token_ids, update.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions: one or many prompts, as text or token ids. max_tokens is 16 unless given."""

    prefix: ClassVar = "cmpl"
    object: ClassVar = "text_completion"
    chunk_object: ClassVar = "text_completion"
    opening: ClassVar = None
    prompt: Any
    max_tokens: Any = 16

    def prompts(self) -> list[Any]:
        return as_list("prompts", self.prompt)

    def _content(self, text: str, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokenizer: Any, update: Update) -> dict[str, Any]:
        tops = [entry.top.items() for entry in update.logprobs]
        return {
            "tokens": [_text(tokenizer, token) for token in update.token_ids],
            "token_logprobs": [_finite(entry.logprob) for entry in update.logprobs],
            "top_logprobs": [{_text(tokenizer, token): _finite(logprob) for token, logprob in top} for top in tops],
        }


class GenerateRequest(Body):
    """POST /generate, as SGLang has it: one prompt or a list, with one sampling_params for all or one each."""

    text: Any = None
    input_ids: Any = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    stream: bool = False
    rid: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1  # logprobs of the prompt from this token on, besides the output's; -1: none

    @model_validator(mode="after")
    def _prompts_are_scored_whole(self) -> GenerateRequest:
        if self.logprob_start_len < -1:
            raise ValueError(f"logprob_start_len must be -1 or a place in the prompt, got {self.logprob_start_len}")
        if self.scores_prompt and self.stream:
            raise ValueError("logprob_start_len needs stream to be false")
        return self

    @property
    def scores_prompt(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def is_list(self) -> bool:
        """True when the answer is a list even for one completion."""
        return isinstance(self.text, list) or isinstance(self.input_ids, list) and isinstance(self.input_ids[0], list)

    def prompts(self) -> list[Any]:
        """Raises ConfigError unless exactly one of text and input_ids is there."""
        if (self.text is None) == (self.input_ids is None):
            raise ConfigError("give either text or input_ids")
        prompts = as_list("prompts", self.text if self.input_ids is None else self.input_ids)
        if not prompts:
            raise ConfigError("text or input_ids is an empty list: at least one prompt is needed")
        return prompts

    def params(self) -> list[SamplingParams]:
        """One for each prompt. Raises ConfigError that names the field, the value and the range."""
        count, given = len(self.prompts()), self.sampling_params
        each = given if isinstance(given, list) else [given] * count
        if len(each) != count:
            raise ConfigError(f"{count} prompts and {len(each)} sampling_params; give one for all or one each")
        return [self._params(values) for values in each]

    def _params(self, values: dict[str, Any]) -> SamplingParams:
        values = {SGLANG_NAMES.get(name, name): value for name, value in values.items() if value is not None}
        if self.return_logprob:
            values["logprobs"] = self.top_logprobs_num
        return _sampling_params(values)

    def item(self, request: Request, whole: Update, id: str) -> dict[str, Any]:
        """One completion as far as it is known; the counts of speculation come with its end."""
        reason, token_ids, metrics = whole.finish_reason, whole.token_ids, request.metrics
        meta: dict[str, Any] = {
            "id": id,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(token_ids),
            "cached_tokens": metrics.cached_tokens,
            "finish_reason": None,
        }
        if reason is not None:
            meta["finish_reason"] = {"type": reason} | ({"length": len(token_ids)} if reason == "length" else {})
            meta |= {"e2e_latency": metrics.finished_s} | _speculation(metrics)
        if request.params.logprobs is not None:
            pairs = zip(token_ids, whole.logprobs, strict=True)
            meta["output_token_logprobs"] = [[_finite(entry.logprob), token, None] for token, entry in pairs]
        if request.params.logprobs:
            meta["output_top_logprobs"] = [
                [[_finite(logprob), token, None] for token, logprob in entry.top.items()] for entry in whole.logprobs
            ]
        return {"index": whole.index, "text": whole.text, "output_ids": token_ids, "meta_info": meta}


class TemplateRequest(Body):
    """POST /apply-template: a conversation, to be framed as the model's own chat template does."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True


class AbortRequest(Body):
    """POST /abort_request: the request named `rid` (the id of an answer), or all."""

    rid: str = ""
    abort_all: bool = False


def usage(requests: Sequence[Request]) -> dict[str, Any]:
    """Tokens of finished requests; the n completions of one prompt count it once."""
    first = {request.group: request for request in reversed(requests)}.values()
    prompt, completion = sum(len(r.prompt) for r in first), sum(r.num_output for r in requests)
    cached = sum(request.metrics.cached_tokens for request in first)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def _speculation(metrics: RequestMetrics) -> dict[str, Any]:
    """SGLang's names; the figures mean what `minispec.metrics` says. histogram[n]: verifications that kept n drafts."""
    counts, histogram = metrics.speculation, Counter(metrics.accepted_per_step)
    return {
        "spec_accept_rate": counts.acceptance_rate,
        "spec_accept_length": counts.acceptance_length,
        "spec_num_correct_drafts": counts.accepted,
        "spec_num_proposed_drafts": counts.drafted,
        "spec_verify_ct": counts.verify_rows,
        "spec_correct_drafts_histogram": [histogram[n] for n in range(max(histogram, default=-1) + 1)],
    }


def _sampling_params(values: dict[str, Any]) -> SamplingParams:
    if isinstance(bias := values.get("logit_bias"), Mapping):  # the keys of a JSON object are text
        try:
            values = values | {"logit_bias": {int(token): value for token, value in bias.items()}}
        except ValueError as error:
            raise ConfigError(f"the keys of logit_bias must be token ids: {error}") from error
    return SamplingParams(**values)


def _grammars(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body with response_format, guided_* and structured_outputs as fields of SamplingParams."""
    asked = data.pop("structured_outputs", {})
    if not isinstance(asked, dict):
        raise ValueError(f"structured_outputs must be an object, got {asked!r:.80}")
    given = [*asked.items(), *((name, data.pop(f"guided_{name}", None)) for name in GUIDED)]
    if (form := data.pop("response_format", None)) is not None:
        try:
            given += RESPONSE_FORMATS[form["type"]](form).items()
        except (KeyError, TypeError) as error:
            raise ValueError(f"response_format takes {', '.join(RESPONSE_FORMATS)}; got {form!r:.80}") from error
    for name, value in given:
        if value is not None:
            if (field := GUIDED.get(name, name)) in data:
                raise ValueError(f"{field} is asked for twice")
            data[field] = _one_of(value) if name == "choice" else value
    return data


def _one_of(texts: Any) -> str:
    """The regex of a choice."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"a choice must be a list of texts that are not empty, got {texts!r:.80}")
    return "|".join(re.escape(text) for text in texts)


def _message(message: dict[str, Any]) -> dict[str, str]:
    """Role and text of one message. Raises ConfigError for another role, and for images, tool calls and the like."""
    given = {name: value for name, value in message.items() if value not in (None, [])}
    role, content = given.pop("role", None), given.pop("content", "")
    if role not in ROLES:
        raise ConfigError(f"the role of a message must be one of {', '.join(ROLES)}; got {role!r:.80}")
    if given:
        raise ConfigError(f"a message holds a role and a content; {', '.join(map(repr, given))} is not supported")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(f"a content part must be text, got {part!r:.80}: images and sound are not supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ConfigError(f"the content of a message must be text or a list of text parts, got {content!r:.80}")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(tokenizer: Any, token_id: int) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id])


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
