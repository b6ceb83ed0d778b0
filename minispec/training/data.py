"""Text to learn from, written by the target itself, through our own engine.

A draft head must predict what this model will say, not what a good model would, so the model plays both sides of a
chat: it invents the user's turn (its chat frame up to the user's words, an opening word or two for variety, sampled),
then answers it (greedily for half of the conversations), then asks again, until the conversation is long enough.

Knows: the chat frame, how to keep an engine full. Does not know: hidden states, training.
Taught in notebook 14 (how the head was made).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from tqdm.auto import tqdm

from minispec.config import ConfigError, SamplingParams, check_number
from minispec.core import Request
from minispec.llm import LLM

TEMPERATURES = (0.0, 0.0, 0.5, 0.8)  # of the answers; drafts are judged greedily most of the time
# First words of a user's turn. Left alone, a small model asks about the same few things.
OPENINGS = (
    *[""] * 8,
    *"What|Who|Where|When|Why|How|Which|Is|Can|Should|If|Explain|Describe|Compare|List|Name|Give".split("|"),
    *"Tell me|Imagine|Write a story about|Write a poem about|Write an email|Write a speech|Write a recipe".split("|"),
    *"Write a Python function|Write a program|Fix this code:|What does this code do?|Write a SQL query".split("|"),
    *"Translate this sentence|Translate the following German text to English:|Say in French:".split("|"),
    *"Summarize|Summarize the following article:|Rewrite|Correct the grammar:|Make this text shorter:".split("|"),
    *"Solve|Calculate|A train|If a shop sells|John has|The sum of|Prove that|How many|What is the chance".split("|"),
    *"Extract the names from|Classify|Answer using the text below:|Read the passage:|True or false:".split("|"),
    *"Plan a trip|Act as a doctor|Act as a teacher|You are a scientist|Give me advice|Help me|I need ideas".split("|"),
    *"Who wrote|When was|What is the capital|Which country|What happened|How does|What causes|Define".split("|"),
    "Write a short essay on",
)  # fmt: skip


class Conversations(NamedTuple):
    """token_ids uint16 or int32 [conversations, length]; answer_mask bool, True where the assistant speaks;
    temperature float16 [conversations] of its answers."""

    token_ids: np.ndarray
    answer_mask: np.ndarray
    temperature: np.ndarray

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part.npz")  # an interrupted run leaves no half file under the right name
        np.savez_compressed(part, **self._asdict())
        part.replace(path)

    @property
    def digest(self) -> str:
        """Which text this is, in 16 hex digits."""
        return hashlib.sha256(self.token_ids.tobytes() + self.answer_mask.tobytes()).hexdigest()[:16]

    @classmethod
    def load(cls, *paths: Path) -> Conversations:
        """Read files of one length, one after another. Raises ConfigError when one is missing or misshaped."""
        parts = []
        for path in paths:
            try:
                with np.load(path) as file:
                    parts.append(cls(*(file[name] for name in cls._fields)))
            except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
                raise ConfigError(f"{path} does not hold token_ids, answer_mask and temperature: {error}") from error
            shapes = [array.shape for array in parts[-1]]
            if len(shapes[0]) != 2 or shapes != [shapes[0], shapes[0], shapes[0][:1]]:
                raise ConfigError(f"{path}: token_ids, answer_mask and temperature have shapes {shapes}")
        lengths = {part.token_ids.shape[1] for part in parts}
        if len(lengths) != 1:
            raise ConfigError(f"the conversations must have one length, got {sorted(lengths)}")
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def held_out_rows(data: Conversations, count: int, seed: int) -> np.ndarray:
    """Numbers of `count` greedy conversations, drawn by chance, that nothing may be learnt from; increasing.

    Raises ConfigError when the data are too few for that.
    """
    greedy = np.flatnonzero(data.temperature == 0)
    if len(greedy) < count or len(data.token_ids) <= count:
        what = f"{len(data.token_ids)} conversations, {len(greedy)} of them greedy"
        raise ConfigError(f"{what}: too few to hold {count} greedy ones out for measuring")
    return np.sort(np.random.default_rng(seed).permutation(greedy)[:count])


class Frame(NamedTuple):
    """A chat template in three pieces, as token ids: what precedes the first question, what stands between a question
    and its answer, and what stands between an answer and the next question."""

    opening: list[int]
    to_answer: list[int]
    to_question: list[int]

    @classmethod
    def of(cls, llm: LLM) -> Frame:
        marks = [f"<<{name}>>" for name in ("first", "answer", "second")]
        roles = ("user", "assistant", "user")
        rest = llm.render_chat([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)])
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ConfigError("the chat template does not repeat what was said, so its frame cannot be cut out")
            pieces.append(llm.tokenizer.encode(piece, add_special_tokens=False))
        return cls(*pieces)


@dataclass
class _Conversation:
    """One conversation in the making. `request` writes the turn that is missing at its end."""

    tokens: list[int]
    mask: list[bool]
    temperature: float
    answering: bool = False
    request: Request | None = field(default=None, repr=False)

    def extend(self, ids: Sequence[int], spoken: bool = False) -> None:
        self.tokens += ids
        self.mask += [spoken] * len(ids)

    def ask(self, llm: LLM, length: int, question_tokens: int, rng: np.random.Generator) -> None:
        """Queue the turn that is due."""
        left, seed = length - len(self.tokens), int(rng.integers(2**62))
        if self.answering:
            params = SamplingParams(temperature=self.temperature, max_tokens=left, seed=seed)
        else:
            most = min(left, question_tokens)
            params = SamplingParams(temperature=1.0, top_k=100, top_p=0.95, max_tokens=most, seed=seed)
        [self.request] = llm.engine.add(self.tokens, params)

    def end_turn(self, frame: Frame, eos_ids: frozenset[int]) -> None:
        """Keep what was said and add the frame's next piece. The end-of-turn token is the speaker's if he said it."""
        said, piece = self.request.output, frame.to_question if self.answering else frame.to_answer
        if said[-1] == piece[0]:
            piece = piece[1:]
        elif said[-1] in eos_ids:
            said = said[:-1]
        self.extend(said, spoken=self.answering)
        self.extend(piece)
        self.answering = not self.answering


def write_conversations(
    llm: LLM, count: int, length: int, *, question_tokens: int = 96, seed: int = 0, progress: bool = True
) -> Conversations:
    """Let the model talk with itself: `count` conversations of `length` tokens each, in the order of their ends.

    question_tokens: most tokens of a user's turn. The engine is kept full: when a conversation is complete, the next
    one starts. Raises ConfigError when the model has no usable chat template, a number is below 1, or `length` leaves
    no room for a question in the frame.
    """
    check_number("conversations", count, 1, integer=True)
    check_number("question_tokens", question_tokens, 1, integer=True)
    frame, rng = Frame.of(llm), np.random.default_rng(seed)
    openings = [llm.tokenizer.encode(text, add_special_tokens=False) for text in OPENINGS]
    least = len(frame.opening) + max(map(len, openings)) + 1
    if not least <= length <= llm.engine.context_length:
        raise ConfigError(f"length must be from {least} to {llm.engine.context_length} tokens, got {length}")
    done: list[_Conversation] = []
    running: list[_Conversation] = []
    with tqdm(total=count * length, desc="writing text", unit=" tokens", disable=not progress) as bar:
        while len(done) < count:
            while len(running) < min(llm.config.max_num_seqs, count - len(done)):
                conversation = _Conversation([], [], TEMPERATURES[rng.integers(len(TEMPERATURES))])
                conversation.extend(frame.opening)
                conversation.extend(openings[rng.integers(len(openings))])
                conversation.ask(llm, length, question_tokens, rng)
                running.append(conversation)
            llm.engine.step()
            for conversation in [c for c in running if c.request.finished]:
                conversation.end_turn(frame, llm.engine.intake.eos_ids)
                if len(conversation.tokens) >= length:
                    running.remove(conversation)
                    done.append(conversation)
                    bar.update(length)
                else:
                    conversation.ask(llm, length, question_tokens, rng)
    width = np.uint16 if llm.engine.runner.vocab_size <= 2**16 else np.int32
    return Conversations(
        np.array([c.tokens[:length] for c in done], dtype=width),
        np.array([c.mask[:length] for c in done]),
        np.array([c.temperature for c in done], dtype=np.float16),
    )
