"""Token ids in, text out, one token at a time: never half a character, never a piece of a stop string.

Two things can make new text unsafe to show. A token may end inside a character (byte-level vocabularies split an
emoji over up to four tokens), and the text may end with what could become a stop string. A `TextStream` keeps both
back until more tokens, or the end, decide.

    released | held back: could begin a stop string | an unfinished character
    text     | the rest of `decode(all tokens)`, minus what the prompt decodes to

Knows: tokenizers' decoders and stop strings. Does not know: why a request ends, stop tokens (the engine does not push
those), models. Taught in notebook 01 (one token at a time).
"""

from __future__ import annotations

import codecs
import os.path
import re
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufffd"  # what every decoder writes for bytes that are no character
KEEP = 8  # tokens of context that a decoder needs at most: four bytes of a character, one token each, and some to spare
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer:
    """Turns ids into text piece by piece: the pieces joined are decode(prompt + output) minus decode(prompt).

    A decoder may look at its neighbours (a leading space is dropped at the start, a character may span tokens), so one
    token cannot be decoded alone. Each step decodes a window of the last tokens and subtracts what the window said
    before: constant cost per token.

    Vocabularies with byte fallback ("<0xF0>", SentencePiece) are a special case: their decoders turn a whole run of
    bytes into marks while its last character is unfinished, so such bytes go through Python's own UTF-8 decoder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # An invisible token in the window would push out the context that the decoder needs.
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._invisible = special | set(tokenizer.all_special_ids) if skip_special else set()
        letter = tokenizer.convert_tokens_to_ids("<0x41>")
        self._letter = letter if letter is not None and self._decode([letter]) == "A" else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._said = ""  # the part of decode(window) that is out, or the prompt's
        visible = (i for i in reversed(prompt_ids) if i not in self._invisible)
        for token_id in reversed(list(islice(visible, KEEP))):
            self.push(token_id)
        self._said = self._decode(self._window)  # a mark that ends the prompt is the prompt's

    def push(self, token_id: int) -> str:
        """Add one token; return the text that it completes."""
        if token_id in self._invisible:
            return ""
        if self._letter is not None and (match := BYTE_TOKEN.fullmatch(self._token(token_id))):
            # For the decoder the next token stands after a letter, so its leading space counts.
            self._window, self._said = [self._letter], "A"
            return self._utf8.decode(bytes.fromhex(match[1]))
        cut_short = self._utf8.decode(b"", final=True)
        self._window.append(token_id)
        text = self._decode(self._window)
        # Less than all of _said only where the prompt ended inside a character that is complete now.
        start = len(os.path.commonprefix([text, self._said]))
        unfinished = text.endswith(MARK)  # only the last mark can still change: UTF-8 finds its feet at once
        end = max(start, len(text) - unfinished)
        self._said = text[:end]
        if len(self._window) > 2 * KEEP:
            self._window = self._window[-KEEP:]
            shorter = self._decode(self._window)
            self._said = shorter[: len(shorter) - (len(text) - end)]
        return cut_short + text[start:end]

    def finish(self) -> str:
        """The end of the output: one mark for a character that was never finished, else nothing."""
        rest = self._decode(self._window)[len(self._said) :] + self._utf8.decode(b"", final=True)
        self._said += rest
        return rest

    def _token(self, token_id: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(token_id) or ""  # ids beyond the vocabulary have no text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one request as it grows. With tokenizer None the text stays empty.

    stop: strings that end the text; the one whose last character comes first wins, and of two that end together the
    longer. So the result does not depend on how the text is cut into tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._held = ""
        self._released: list[str] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: the text ends before it, and whatever is pushed later is dropped."""
        return self._stopped

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """Add one output token; return the text that is now safe to show, often "".

        check_stop False lets a stop string pass that this token completes (before min_tokens).
        """
        if self._detokenizer is None or self._stopped:
            return ""
        return self._grow(self._detokenizer.push(token_id), check_stop)

    def flush(self) -> str:
        """The request has ended by length or by a stop token: return what was held back; "" after a stop string."""
        if self._detokenizer is None or self._stopped:
            return ""
        shown = self._grow(self._detokenizer.finish(), check_stop=False) + self._held
        self._released.append(self._held)
        self._held = ""
        return shown

    def _grow(self, new: str, check_stop: bool) -> str:
        text = self._held + new
        match = self._first_stop(text, known=len(self._held)) if check_stop else None
        self._stopped = match is not None
        safe = len(text) - self._ambiguous(text) if match is None else match
        self._held = text[safe:]
        self._released.append(text[:safe])
        return text[:safe]

    def _first_stop(self, text: str, known: int) -> int | None:
        """Where the stop string starts that is completed first after text[:known]; None if there is none."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _ambiguous(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with and goes beyond."""
        sizes = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        return next((n for n in sizes if any(len(s) > n and text.endswith(s[:n]) for s in self._stop)), 0)
