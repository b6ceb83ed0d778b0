"""Text streams: whole characters only, spaces right at every cut, stop strings that never leak and never get lost."""

from __future__ import annotations

import os.path
import random
from collections.abc import Iterable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minispec.text import KEEP, TextStream

MARK = "\ufffd"
SAMPLE = "The quick brown fox, naïve café, 12 35, Ďábel 🌶️ 日本語 and so on.\n\tA new line "


def _wrap(core: Tokenizer, specials: Sequence[str] = ("<s>", "</s>")) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def byte_level_bpe() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([SAMPLE] * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return _wrap(core)


def metaspace_unigram() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "▁", "▁the", "▁a", "the", "a", "b", "▁b", "日本", "é", "▁▁", ",", "'", "s"]
    core = Tokenizer(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return _wrap(core)


def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "un", "##aff", "##able", "the", "##s", ".", "日"]
    core = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(core)


def byte_fallback_bpe() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2 and Mistral: "▁" for a space, "<0xF0>" for bytes without a token."""
    pieces = ["<unk>", "▁", "a", "b", "▁a", "▁b", "é"] + [f"<0x{i:02X}>" for i in range(256)]
    core = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return _wrap(core)


def pieces_tokenizer(pieces: Iterable[str]) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Exactly these tokens, joined without anything between them."""
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core), ids


def run(stream: TextStream, ids: Iterable[int]) -> list[str]:
    return [stream.push(i) for i in ids]


def stream_pieces(pieces: Sequence[str], stop: Sequence[str]) -> tuple[TextStream, list[str]]:
    tokenizer, ids = pieces_tokenizer(pieces)
    stream = TextStream(tokenizer, [], stop)
    return stream, run(stream, [ids[piece] for piece in pieces])


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One id per byte in a byte-level vocabulary."""
    to_char = {bytes_of(tokenizer, i): i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1}
    return [to_char[bytes([b])] for b in data]


def bytes_of(tokenizer: PreTrainedTokenizerFast, token_id: int) -> bytes:
    # GPT-2's table: printable bytes stand for themselves, the others for 256, 257, ...
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    code = ord(tokenizer.convert_ids_to_tokens(token_id))
    return bytes([code if code < 256 else others[code - 256]])


# -- characters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\U0001f336", "\u010f", "a\U0001f336b", "日本"])
def test_a_character_split_over_tokens_arrives_whole(text: str) -> None:
    tokenizer = byte_level_bpe()
    stream = TextStream(tokenizer, byte_ids(tokenizer, b"x: "))
    pieces = run(stream, byte_ids(tokenizer, text.encode()))
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == "" and stream.text == text


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
def test_an_unfinished_character_is_one_mark_and_comes_once(make, count: int) -> None:
    tokenizer = make()
    data = "🌶".encode()[:count]
    if make is byte_level_bpe:
        ids, a = byte_ids(tokenizer, data), byte_ids(tokenizer, b"a")
    else:
        ids, a = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in data], [tokenizer.convert_tokens_to_ids("a")]
    stream = TextStream(tokenizer, [])
    assert run(stream, ids) == [""] * count
    assert stream.flush() == MARK and stream.flush() == "" and stream.text == MARK
    stream = TextStream(tokenizer, [])
    assert run(stream, ids + a) == [""] * count + [MARK + "a"]


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    tokenizer = byte_level_bpe()
    head, tail = byte_ids(tokenizer, b"x" + "🌶".encode()[:2]), byte_ids(tokenizer, "🌶".encode()[2:])
    assert run(TextStream(tokenizer, head), tail) == ["", "🌶"]
    stream = TextStream(tokenizer, head)
    assert run(stream, byte_ids(tokenizer, b"a")) == ["a"], "the prompt's broken character is not the output's"
    assert TextStream(tokenizer, head).flush() == ""


def test_bytes_that_are_no_text_keep_the_window_small() -> None:
    tokenizer = byte_level_bpe()
    sizes = []

    class Spy:
        def __getattr__(self, name: str):
            return getattr(tokenizer, name)

        def decode(self, ids, **options):
            sizes.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = byte_ids(tokenizer, bytes([0x80, 0xF0] * 500))
    stream = TextStream(Spy(), ids * 3)
    shown = "".join(run(stream, ids)) + stream.flush()
    assert shown == MARK * 1000
    assert max(sizes) <= 2 * KEEP + 1 and len(sizes) < 3000


@pytest.mark.parametrize("make", [byte_level_bpe, metaspace_unigram, word_piece])
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_at_any_cut_join_to_the_full_decode(make, skip: bool) -> None:
    tokenizer, rng = make(), random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 60))]
        cut = rng.randrange(len(ids))
        stream = TextStream(tokenizer, ids[:cut], skip_special_tokens=skip)
        joined = "".join(run(stream, ids[cut:])) + stream.flush()
        whole, prompt = decode(tokenizer, ids, skip), decode(tokenizer, ids[:cut], skip)
        assert joined == whole[len(os.path.commonprefix([whole, prompt])) :] == stream.text


def test_byte_fallback_text_at_any_cut_joins_to_the_full_decode() -> None:
    tokenizer, rng, compared = byte_fallback_bpe(), random.Random(6), 0
    for _ in range(300):
        text = "".join(rng.choice([" ", " a", "b", "é", "🌶", "日", "\n"]) for _ in range(rng.randrange(2, 30)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = [
            i for token in ids for i in ([1] * (rng.random() < 0.1) + [token])
        ]  # stray spaces, even inside characters
        for cut in {0, rng.randrange(len(ids))}:
            whole, prompt = decode(tokenizer, ids, True), decode(tokenizer, ids[:cut], True)
            if MARK in whole or MARK in prompt:
                continue  # this decoder marks a run of bytes as a whole; the stream keeps its good characters
            compared += 1
            stream = TextStream(tokenizer, ids[:cut])
            assert "".join(run(stream, ids[cut:])) + stream.flush() == whole[len(prompt) :]
    assert compared > 100


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = metaspace_unigram()
    the, end = tokenizer.convert_tokens_to_ids(["▁the", "</s>"])
    assert run(TextStream(tokenizer, [the]), [end] * 40 + [the]) == [""] * 40 + [" the"]
    assert "".join(run(TextStream(tokenizer, [the], skip_special_tokens=False), [end, the])) == "</s> the"


def test_without_a_tokenizer_the_text_stays_empty() -> None:
    stream = TextStream(None, [1, 2], stop=["a"])
    assert run(stream, [3, 4]) == ["", ""] and stream.flush() == "" == stream.text and not stream.stopped


# -- stop strings ----------------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    stream, shown = stream_pieces(["DEF", "G", "HI", "J"], stop=["DEFGHIJ"])
    assert shown == ["", "", "", ""] and stream.stopped and stream.flush() == "" == stream.text
    stream, shown = stream_pieces(["DEF", "G", "HI", "K"], stop=["DEFGHIJ"])
    assert shown == ["", "", "", "DEFGHIK"] and not stream.stopped


def test_a_held_back_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    stream, shown = stream_pieces(["one", "\n"], stop=["\n\n"])
    assert shown == ["one", ""] and stream.flush() == "\n" and stream.text == "one\n" and stream.flush() == ""


def test_nothing_from_the_stop_string_on_is_ever_released() -> None:
    stream, shown = stream_pieces(["one, two, ", "three, fo", "ur, fi", "ve, s", "ix"], stop=["five"])
    assert "".join(shown) == "one, two, three, four, " == stream.text
    assert stream.stopped and stream.flush() == "" and stream.text == "one, two, three, four, "


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    stream, shown = stream_pieces(["ab", "xa", "ba", "b!"], stop=["abc"])
    assert shown == ["", "abx", "ab", "ab!"] and stream.text == "abxabab!"


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_hold_for_any_text_and_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        pieces = ["".join(rng.choices("abc", weights=[3, 3, 1], k=rng.randrange(1, 6))) for _ in range(6)]
        text = "".join(pieces)
        ends = [n for n in range(len(text) + 1) if text[:n].endswith(tuple(stops))]
        expected = text
        if ends:
            expected = text[: min(ends[0] - len(s) for s in stops if text[: ends[0]].endswith(s))]
        tokenizer, ids = pieces_tokenizer(pieces)
        stream, seen, shown = TextStream(tokenizer, [], stops), "", ""
        for piece in pieces:
            shown += stream.push(ids[piece])
            seen += piece
            assert stream.stopped == bool(ends and ends[0] <= len(seen))
            if not stream.stopped:
                held = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
                assert shown == seen[: len(seen) - held]
        assert shown + stream.flush() == expected == stream.text


def test_a_stop_string_may_pass_before_min_tokens_and_counts_only_if_completed_later() -> None:
    tokenizer, ids = pieces_tokenizer(["E", "N", "D", "x"])
    stream = TextStream(tokenizer, [], stop=["END"])
    shown = [stream.push(ids[c], check_stop=False) for c in "END"] + run(stream, [ids["x"]])
    assert "".join(shown) == "ENDx" and not stream.stopped
    stream = TextStream(tokenizer, [], stop=["END"])
    shown = [stream.push(ids[c], check_stop=False) for c in "xEN"] + [stream.push(ids["D"])]
    assert "".join(shown) == "x" and stream.stopped
    # "b" passed for good; "ab" is held back for "abc" and decided by the next token.
    tokenizer, ids = pieces_tokenizer(["xxb", "ab", "x"])
    stream = TextStream(tokenizer, [], stop=["b", "abcd"])
    assert [stream.push(ids[p], check_stop=False) for p in ("xxb", "ab")] == ["xxb", ""]
    assert stream.push(ids["x"]) == "abx" and not stream.stopped


def test_a_stop_string_may_hold_a_character_that_spans_tokens() -> None:
    tokenizer = byte_level_bpe()
    stream = TextStream(tokenizer, [], stop=["🌶"])
    assert "".join(run(stream, byte_ids(tokenizer, "a🌶b".encode()))) == "a" and stream.stopped
