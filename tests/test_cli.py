"""The command line from outside: what goes to which stream, exit codes, the chat shell, the demo and its figure."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from minispec import LLM, SamplingParams
from minispec.cli import ChatShell, main
from minispec.config import ConfigError
from minispec.core import Request, TokenKind
from minispec.demo import PROMPTS, Pair, compare, run_demo, table
from minispec.metrics import RequestMetrics, SpeculationCounts
from minispec.palette import KIND_ANSI, KIND_COLORS, KIND_HATCHES, KIND_LABELS
from minispec.terminal import Ink, cost_line

COMMANDS = ("demo", "generate", "chat", "serve", "doctor", "fetch")
COST = re.compile(r"(\d+) prompt tokens, (\d+) cached, (\d+) new, [\d.]+ tokens/s")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny random model that repeats itself at times; its context is 512 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, tie_word_embeddings=True, num_hidden_layers=1)
    return ["--model", str(folder), "--dtype", "float32"]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a text the standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


# Help and refusals ---------------------------------------------------------------------------------------------


def test_help_of_every_command_needs_no_torch() -> None:
    code = f"""
import sys
from minispec.cli import ChatShell, main
for argv in [["--help"]] + [[name, "--help"] for name in {COMMANDS!r}]:
    try:
        main(argv)
    except SystemExit as done:
        assert done.code == 0
assert not {{"torch", "transformers", "matplotlib"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"usage: minispec {name}" in done.stdout
    for option in ("--max-tokens", "--temperature", "--top-p", "--draft", "--candidate-length", "--figure", "--chat"):
        assert option in done.stdout
    assert "(default: 0.0)" in done.stdout
    assert "(default: True)" not in done.stdout and "(default: False)" not in done.stdout  # a switch takes no value


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "minispec", "--version"], capture_output=True, env=_environment())
    assert done.returncode == 0 and done.stdout.startswith(b"minispec ")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--dtype", "float8"], "float8"),
        (["--device", "tpu"], "tpu"),
        (["--draft", "oracle"], "oracle"),
        (["--draft", "ngram", "--candidate-length", "65"], "65"),
        (["--temperature", "-1"], "-1.0"),
        (["--temperature", "nan"], "nan"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--page-size", "0"], "page_size"),
        (["--context-length", "1"], "context of 1 tokens"),
        (["--stop", ""], "stop"),
    ],
)
def test_a_bad_value_is_one_sentence_and_exit_2(
    tiny: list[str], capsys: pytest.CaptureFixture, options: list[str], named: str
) -> None:
    assert main(["generate", "hello", *tiny, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("minispec: ") and named in err


def test_an_unknown_flag_is_told_with_the_flags_of_its_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["generate", "hello", "--max-token", "4"])
    out, err = capsys.readouterr()
    assert refused.value.code == 2 and out == "" and "--max-tokens N" in err
    assert err.endswith("minispec generate: error: unrecognized arguments: --max-token 4\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("mtp", "mtp"), ("mtp+ngram", ["mtp", "ngram"]), ("a+b/model+ngram", ["a+b/model", "ngram"]), ("a+b", "a+b")],
)
def test_draft_names_one_drafter_or_one_with_ngrams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, given: str, expected: object
) -> None:
    def refuse(*_: object, speculative_config: dict, **__: object) -> None:
        raise ConfigError(repr(speculative_config))

    monkeypatch.setattr("minispec.llm.LLM", refuse)
    assert main(["generate", "hello", "--draft", given, "--candidate-length", "2"]) == 2
    assert repr({"draft_model": expected, "candidate_length": 2}) in capsys.readouterr().err


def test_an_empty_prompt_is_refused(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    typed("\n")
    assert main(["generate", "-", *tiny]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["dance"], ["generate"], ["generate", "x", "--max-tokens", "many"]])
def test_what_argparse_refuses_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: minispec" in capsys.readouterr().err


def test_a_programming_error_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("minispec.doctor.machine_card", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["doctor"])


# generate, doctor, fetch ---------------------------------------------------------------------------------------


def test_generate_writes_the_text_of_the_front_door(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    with LLM(tiny[1], dtype="float32") as llm:
        [plain] = llm.generate("a model reads", SamplingParams(temperature=0, max_tokens=40))
        [chat] = llm.chat([{"role": "user", "content": "a model reads"}], SamplingParams(temperature=0, max_tokens=40))
    assert plain.text and plain.text != chat.text
    typed("a model reads\n")
    more = ["--max-tokens", "40", *tiny]
    for argv, expected in [
        (["generate", "a model reads", *more], plain),
        (["generate", "-", *more], plain),
        (["generate", "a model reads", "--draft", "ngram", "--candidate-length", "3", *more], plain),
        (["generate", "a model reads", "--chat", *more], chat),
    ]:
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert out == expected.text + "\n"
        assert [int(n) for n in COST.search(err).groups()] == [len(expected.prompt_token_ids), 0, 40]
        assert ("acceptance" in err) == ("--draft" in argv)


def test_sampling_options_reach_the_engine(tiny: list[str], capsys: pytest.CaptureFixture) -> None:
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.1}
    options |= {"presence_penalty": 0.2, "frequency_penalty": 0.1, "stop": ["t", "e"], "max_tokens": 30}
    with LLM(tiny[1], dtype="float32") as llm:
        [expected] = llm.generate("a model", SamplingParams(ignore_eos=True, **options))
    argv = ["generate", "a model", "--ignore-eos", *tiny]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            argv += [f"--{name.replace('_', '-')}", str(one)]
    assert main(argv) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_a_stream_that_cannot_show_a_character_gets_a_mark(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", "a model", "--max-tokens", "40", "--ignore-eos", *tiny]) == 0
    assert b"?" in raw.getvalue()


def test_a_reader_that_leaves_is_no_error(tiny: list[str]) -> None:
    argv = [sys.executable, "-m", "minispec", "generate", "a model", "--max-tokens", "480", "--ignore-eos", *tiny]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert errors == b""


def test_doctor_prints_the_machine_card(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("device", "dtype", "GB/s", "GFLOP/s", "torch"):
        assert word in out


def test_fetch_prints_the_folder_of_the_ready_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    assert main(["fetch"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2-135m'}\n"


# chat ----------------------------------------------------------------------------------------------------------


def test_chat_finds_its_history_in_the_cache(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    typed("a small model reads a prompt\n\nand then\nonce more\n")
    assert main(["chat", "--max-tokens", "24", "--page-size", "1", "--draft", "ngram", *tiny]) == 0
    out = capsys.readouterr().out
    turns = [tuple(map(int, match)) for match in COST.findall(out)]
    assert len(turns) == 3  # the empty line is none, and the end of input ends the shell
    cached = [c for _, c, _ in turns]
    assert cached[0] == 0
    assert cached[1] >= turns[0][0] and cached[2] >= turns[1][0]  # all of the prompt before, at least
    assert all(c < prompt for prompt, c, _ in turns)
    assert "acceptance" in out


def test_chat_commands(tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture) -> None:
    typed("a model\na model\n/reset\na model\n/dance now\n/help\n/quit\nnever read\n")
    assert main(["chat", "--max-tokens", "8", *tiny]) == 0
    out = capsys.readouterr().out
    prompts = [int(prompt) for prompt, _, _ in COST.findall(out)]
    assert len(prompts) == 3 and prompts[0] < prompts[1] and prompts[2] == prompts[0]
    assert "unknown command /dance; /help lists them" in out
    assert out.count("/reset  forget the conversation") == 2  # at the start and when asked
    assert "cut at the token limit" in out


def test_chat_drops_the_oldest_turns_at_the_context_limit(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    typed("a small model reads\n" * 6)
    options = ["--max-tokens", "20", "--ignore-eos", "--context-length", "160"]
    assert main(["chat", *options, *tiny]) == 0
    out = capsys.readouterr().out
    turns = [tuple(map(int, match)) for match in COST.findall(out)]
    assert len(turns) == 6
    assert "the context limit of 160 tokens is near: the oldest turn dropped" in out
    assert all(prompt + 20 <= 160 and new == 20 for prompt, _, new in turns)


def test_chat_remembers_whole_turns(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    long = "a small model reads a prompt, then writes one token after another"  # dropping it alone would make room
    typed(f"{long}\n" * 6)
    with LLM(tiny[1], dtype="float32", context_length=210) as llm:
        shell = ChatShell(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        shell.run()
    assert 1 < len(shell.messages) < 12
    out = capsys.readouterr().out
    for asked, answered in zip(shell.messages[::2], shell.messages[1::2], strict=True):
        assert asked == {"role": "user", "content": long}
        assert answered["role"] == "assistant" and len(answered["content"]) > 10 and answered["content"] in out


def test_chat_survives_a_turn_that_cannot_fit(
    tiny: list[str], typed: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    typed("a model\n" + "far too long " * 100 + "\na model\n")
    assert main(["chat", "--max-tokens", "8", "--context-length", "128", *tiny]) == 0
    out = capsys.readouterr().out
    assert "the context limit is 128" in out
    assert len(COST.findall(out)) == 2


def test_an_interrupt_ends_the_answer_and_not_the_shell(
    tiny: list[str], typed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PressesCtrlC(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes == 6:  # in the first answer, right after the help
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    out = PressesCtrlC()
    monkeypatch.setattr(sys, "stdout", out)
    typed("a model\na model\n")
    before = signal.getsignal(signal.SIGINT)
    assert main(["chat", "--max-tokens", "30", "--ignore-eos", *tiny]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    lines = [line for line in out.getvalue().splitlines() if COST.search(line)]
    assert ["aborted" in line for line in lines] == [True, False]
    aborted, whole = [int(new) for _, _, new in COST.findall(out.getvalue())]
    assert 0 < aborted < 6 and whole == 30


def test_an_interrupt_at_the_prompt_does_not_end_the_shell(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    events: list[str | BaseException] = [KeyboardInterrupt(), "a model", EOFError()]

    def read(prompt: str) -> str:
        event = events.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--max-tokens", "8", *tiny]) == 0
    out = capsys.readouterr().out
    assert "/quit or Ctrl-D leaves" in out and len(COST.findall(out)) == 1


# demo ----------------------------------------------------------------------------------------------------------


def test_demo_prints_its_table_and_saves_its_figure(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "new" / "demo.png"
    assert main(["demo", "--max-tokens", "60", "--figure", str(figure), *tiny]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" not in out  # not a terminal
    assert [cached for _, cached, _ in COST.findall(out)] == ["0"] * len(PROMPTS)  # no run profits from another
    assert figure.read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("prompt "))
    assert [line.split()[0] for line in lines[head + 1 : head + 9 : 2]] == [*PROMPTS, "all"]
    for line in lines[head + 1 : head + 9 : 2]:
        assert line.split()[1] == "plain" and line.split()[4] == "1.00"  # one forward per token, prefill included
    for name in PROMPTS:
        assert re.search(rf"^{name}: both runs wrote the same \d+ tokens$", out, re.M)


def test_demo_runs_differ_only_in_the_drafter(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = {"draft_model": "ngram", "candidate_length": 4, "adaptive": False}
    with LLM(tiny[1], dtype="float32", enable_radix_cache=False, speculative_config=options) as llm:
        drafter = llm.engine.drafters[0]
        pairs = run_demo(llm, SamplingParams(temperature=0, max_tokens=60), figure=tmp_path / "demo.png")
        assert llm.engine.drafters[0] is drafter
        llm.check_integrity()
    assert all(pair.speculating.metrics.accepted for pair in pairs)
    for pair in pairs:
        assert pair.plain.output == pair.speculating.output
        assert set(pair.plain.kinds) == {TokenKind.PLAIN} and pair.plain.metrics.drafted == 0
        assert pair.plain.metrics.cached_tokens == pair.speculating.metrics.cached_tokens == 0
        assert pair.speculating.metrics.forwards < pair.plain.metrics.forwards
    [column] = [line for line in table(pairs, 1000).splitlines() if line.startswith("all")]
    assert str(sum(pair.plain.num_output for pair in pairs)) in column.split()


def test_the_table_is_the_counters() -> None:
    plain = _request([0] * 10, forwards=10, seconds=5.0)
    counts = SpeculationCounts(3, drafted=12, accepted=6, emitted=9, drafted_at=[3], accepted_at=[2])
    fast = _request([0] * 10, forwards=4, seconds=2.0, counts=counts)
    head, first, second, *both = table([Pair("list", plain, fast)], 50_000_000).splitlines()
    assert head.split() == [
        *"prompt run tokens tokens/s forwards/token first kept all kept length".split(),
        *"weights/token speed-up".split(),
    ]
    assert first.split() == "list plain 10 2.0 1.00 - - - 50.0 MB".split()
    assert second.split() == "speculating 10 5.0 0.40 67% 50% 3.00 20.0 MB 2.50x".split()
    assert [line.split()[1:] for line in both][0] == first.split()[1:]
    assert both[1].split() == second.split()


def test_demo_says_where_the_runs_part_and_how_close_it_was(tiny: list[str]) -> None:
    with LLM(tiny[1], dtype="float32") as llm:
        [out] = llm.generate("a model", SamplingParams(temperature=0, max_tokens=6, logprobs=2))
        ours, top = out.token_ids, out.logprobs[3].top
        [other] = set(top) - {ours[3]}
        pair = Pair("x", _request(ours, out.prompt_token_ids), _request([*ours[:3], other, 5], out.prompt_token_ids))
        said = compare(llm, pair)
    assert "part at output token 4" in said
    assert f"{abs(top[ours[3]] - top[other]):.3f} apart" in said


def test_demo_needs_a_drafter_and_a_folder_for_its_figure(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["demo", "--candidate-length", "0", *tiny]) == 2
    assert "--draft must name a drafter" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["demo", "--figure", str(tmp_path / "file" / "demo.png"), *tiny]) == 2
    assert "cannot make a folder for the figure" in capsys.readouterr().err
    assert main(["demo", "--max-tokens", "2", "--figure", str(tmp_path / "demo.nope"), *tiny]) == 2
    assert "cannot save the figure" in capsys.readouterr().err


def test_the_demo_refuses_a_model_without_a_drafter(tiny: list[str], tmp_path: Path) -> None:
    with LLM(tiny[1], dtype="float32") as llm, pytest.raises(ConfigError):
        run_demo(llm, SamplingParams(temperature=0), figure=tmp_path / "demo.png")


# Styles --------------------------------------------------------------------------------------------------------


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Ink(Terminal()).paint("x", "1;4", "35") == "\x1b[1;4;35mx\x1b[0m"
    assert Ink(Terminal(), color=False).paint("x", "1", "36") == "\x1b[1mx\x1b[0m"
    assert Ink(Terminal()).paint("", "1", "36") == ""
    assert Ink(io.StringIO()).paint("x", "1", "36") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Ink(Terminal()).paint("x", "1", "36") == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert Ink(Terminal()).paint("x", "1", "36") == "x"


def test_the_demo_paints_each_token_by_its_kind(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["demo", "--max-tokens", "60", "--figure", str(tmp_path / "demo.png"), *tiny]) == 0
    legend, rest = out.getvalue().split("\n", 2)[1:]
    for kind in (TokenKind.ACCEPTED, TokenKind.CORRECTED, TokenKind.BONUS):
        start = "\x1b[" + ";".join(KIND_ANSI[kind]) + "m"
        assert start + KIND_LABELS[kind] in legend
        assert start in rest


def test_kinds_differ_in_colour_and_without_it() -> None:
    for of_kind in (KIND_COLORS, KIND_LABELS, KIND_ANSI, {k: KIND_ANSI[k][0] for k in TokenKind}):
        assert set(of_kind) == set(TokenKind)
        assert len(set(of_kind.values())) == len(TokenKind)
    # In grey, kinds of one hatching are far apart (relative luminance by Rec. 709 weights, of 255).
    for a in TokenKind:
        for b in TokenKind:
            if a is not b and KIND_HATCHES[a] == KIND_HATCHES[b]:
                assert abs(_luminance(KIND_COLORS[a]) - _luminance(KIND_COLORS[b])) > 60


def test_the_cost_line_tells_of_acceptance_only_when_something_was_drafted() -> None:
    plain = _request([0] * 4, seconds=2.0)
    assert cost_line(plain) == "2 prompt tokens, 0 cached, 4 new, 2.0 tokens/s"
    fast = _request([0] * 4, seconds=1.0, counts=SpeculationCounts(2, drafted=4, accepted=2, emitted=4))
    fast.finish_reason = "abort"
    assert cost_line(fast).endswith("4.0 tokens/s, acceptance 50%, length 2.00, aborted")


def _luminance(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _request(
    output: list[int],
    prompt: list[int] | None = None,
    *,
    forwards: int = 1,
    seconds: float = 1.0,
    counts: SpeculationCounts | None = None,
) -> Request:
    metrics = RequestMetrics(forwards=forwards, finished_s=seconds, speculation=counts or SpeculationCounts())
    prompt = prompt or [1, 2]
    return Request("r", prompt, SamplingParams(), 0, 999, tokens=prompt + output, finish_reason="stop", metrics=metrics)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
