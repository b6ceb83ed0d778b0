"""The command line: `python -m minispec COMMAND` (or `minispec`), see `--help`.

torch is imported only when a command needs it, so help is quick. Exit codes: 0 done, 1 broken pipe, 2 refused (one
sentence on stderr), 130 interrupted.

Knows: options, standard streams, exit codes, and the chat shell. Does not know: how an answer is made.

Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minispec import __version__
from minispec.config import ConfigError, SamplingParams
from minispec.serving.launch import add_flags, serve

if TYPE_CHECKING:
    from minispec.llm import LLM, Piece

CHAT_HELP = """/reset  forget the conversation   /quit  leave (as does the end of input)   /help  this list
Ctrl-C ends an answer early. All turns are sent again each time; the radix cache finds what it has seen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` defaults to the process's own arguments."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character shows a mark, not a traceback
            stream.reconfigure(errors="replace")
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        args.run(args)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # whoever read our output has left; Python must not complain when it flushes at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        from minispec.models.config import ModelLoadError

        if not isinstance(error, (ConfigError, ModelLoadError)):
            raise
        print(f"minispec: {error}", file=sys.stderr)
        return 2


# Commands ------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> None:
    params = _params(args)
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    with _load(args) as llm:
        from minispec.terminal import Ink, cost_line, stream_answer

        ink = Ink(sys.stderr, args.color)
        messages = [{"role": "user", "content": prompt}]
        request = stream_answer(llm, messages if args.chat else prompt, params, _write)
        print(flush=True)
        print(ink.dim(cost_line(request)), file=sys.stderr)


def _chat(args: argparse.Namespace) -> None:
    params = _params(args)
    with _load(args) as llm:
        ChatShell(llm, params, color=args.color).run()


def _demo(args: argparse.Namespace) -> None:
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    # A prompt that the first of two runs left in the radix cache would make the second one look faster.
    with _load(args, enable_radix_cache=False) as llm:
        from minispec.demo import run_demo

        run_demo(llm, params, figure=args.figure, color=args.color)


def _serve(args: argparse.Namespace) -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error}: the server needs the extra serve, pip install 'minispec[serve]'") from error
    serve(args)


def _doctor(args: argparse.Namespace) -> None:
    from minispec.doctor import machine_card

    print(machine_card(args.device))


def _plan(args: argparse.Namespace) -> None:
    from minispec.plan import make_plan

    names = ("model", "tp", "draft", "acceptance", "candidate_length", "bandwidth", "memory", "dtype")
    print(make_plan(**{name: getattr(args, name) for name in names}))


def _bench(args: argparse.Namespace) -> None:
    from minispec import bench as reports
    from minispec.bench.host import bench_host
    from minispec.bench.offline import bench, bench_batch
    from minispec.bench.serve import bench_serve, servers
    from minispec.bench.steering import bench_steering

    questions = reports.load_prompts(args.prompts)
    options = {name: getattr(args, name) for name in ("dtype", "max_tokens", "rounds")}
    k, found, rows = args.candidate_length, None, []
    if args.what == "host":
        rows = bench_host()
    elif args.what == "steering":
        prompts = list(questions.values())
        rows = [
            bench_steering(args.model, prompts, draft=draft, candidate_length=k, **options) for draft in args.drafts
        ]
    elif args.what == "serve":
        load = {name: getattr(args, name) for name in ("rates", "requests", "max_tokens", "rounds")}
        with servers(args.model, args.dtype, args.drafts, k) as urls:
            rows = bench_serve(urls, list(questions.values()), **load)
    elif args.what == "batch":
        found = bench_batch(args.model, questions, batch=args.batch, **options)
    else:
        more = {"drafts": args.drafts, "quantization": args.quantization, "gguf": args.gguf}
        found = bench(args.model, questions, candidate_length=k, **more, **options)
    if args.json:
        settings = {
            name: Path(value).name if name in ("prompts", "gguf") and value else value
            for name, value in vars(args).items()
            if name not in ("run", "refuse", "json", "figure")
        }
        reports.write_json(args.json, settings, rows if found is None else reports.as_json(found))
    if args.figure and found:
        reports.draw(args.figure, found)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _fetch(_: argparse.Namespace) -> None:
    from minispec.models.embedded import fetch_embedded

    print(fetch_embedded(progress=sys.stderr.isatty()))


def _params(args: argparse.Namespace) -> SamplingParams:
    names = [field.name for field in fields(SamplingParams)]
    return SamplingParams(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _load(args: argparse.Namespace, **options: Any) -> LLM:
    if sys.stderr.isatty():
        print(f"loading {args.model} ...", file=sys.stderr)
    from minispec.llm import LLM

    speculative = None
    if args.draft:
        names = [args.draft.removesuffix("+ngram"), "ngram"] if args.draft.endswith("+ngram") else args.draft
        speculative = {"draft_model": names, "candidate_length": args.candidate_length}
    for name in ("page_size", "kv_cache_tokens", "context_length"):
        options[name] = getattr(args, name)
    return LLM(args.model, dtype=args.dtype, device=args.device, speculative_config=speculative, **options)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


# The chat shell ------------------------------------------------------------------------------------------------


class ChatShell:
    """Reads turns from stdin, streams the answers, forgets the oldest turns when the context is full."""

    def __init__(self, llm: LLM, params: SamplingParams, color: bool = True) -> None:
        from minispec.terminal import Ink

        self.llm, self.params = llm, params
        self.ink = Ink(sys.stdout, color)
        self.messages: list[dict[str, str]] = []  # user and assistant in turn
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # line editing; Windows has its own
                import readline  # noqa: F401

    def run(self) -> None:
        """Until /quit or the end of input."""
        self._say(CHAT_HELP)
        for line in self._lines():
            if line == "/quit":
                return
            if line == "/reset":
                self.messages.clear()
                self._say("the conversation is empty")
            elif line == "/help":
                self._say(CHAT_HELP)
            elif line.startswith("/"):
                self._say(f"unknown command {line.split()[0]}; /help lists them")
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        prompt = "\n> " if sys.stdin.isatty() else ""
        while True:
            try:
                yield input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\n/quit or Ctrl-D leaves")

    def _answer(self, text: str) -> None:
        from minispec.terminal import cost_line, stream_answer

        self.messages.append({"role": "user", "content": text})
        pieces: list[Piece] = []

        def show(piece: Piece) -> None:
            pieces.append(piece)
            _write(piece)

        try:
            self._make_room()
            with _interrupts() as interrupted:
                request = stream_answer(self.llm, self.messages, self.params, show, interrupted)
        except (ConfigError, RuntimeError) as error:  # this turn cannot be answered; the shell goes on without it
            self.messages.pop()
            self._say(f"error: {error}")
            return
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self._say(f"\n{cost_line(request)}")

    def _make_room(self) -> None:
        """Drop the oldest turns until the conversation leaves room for an answer (at most half the context)."""
        limit = self.llm.engine.context_length
        room = min(self.params.max_tokens, limit // 2)
        dropped = 0
        while len(self.messages) > 1 and self._count() + room > limit:
            del self.messages[:2]
            dropped += 1
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
            self._say(f"the context limit of {limit} tokens is near: {turns} dropped")

    def _count(self) -> int:
        return len(self.llm.tokenizer.encode(self.llm.render_chat(self.messages), add_special_tokens=False))

    def _say(self, text: str) -> None:
        print(self.ink.dim(text), flush=True)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is read between tokens, so no step of the engine is cut in half; a second one raises."""
    seen = []

    def on_interrupt(*_: object) -> None:
        seen.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


# Options -------------------------------------------------------------------------------------------------------


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, except those of switches: what they store is no default that anybody could give."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.nargs == 0 else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minispec", allow_abbrev=False, description="A readable LLM server. Notebook 00 is the map."
    )
    parser.add_argument("--version", action="version", version=f"minispec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help,
            description=help,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run, refuse=sub.error)
        return sub

    demo = command("demo", _demo, "three prompts, plain and speculating: coloured text, a table, a figure")
    _model_options(demo, draft="ngram")
    demo.add_argument("--max-tokens", type=int, default=96, help="most output tokens of each run")
    demo.add_argument("--figure", default="figures/demo.png", help="where to save the figure")

    generate = command("generate", _generate, "continue a prompt; the text goes to stdout, what it cost to stderr")
    generate.add_argument("prompt", help="the prompt; - reads it from stdin")
    generate.add_argument("--chat", action="store_true", help="frame the prompt as a question to an assistant")
    _model_options(generate)
    _sampling_options(generate, max_tokens=128)

    chat = command("chat", _chat, "talk to the model; the conversation stays in the radix cache")
    _model_options(chat)
    _sampling_options(chat, max_tokens=512)

    add_flags(command("serve", _serve, "an HTTP server with the OpenAI API, flags as in SGLang"))

    doctor = command("doctor", _doctor, "the machine card: device, dtype, measured speeds, versions")
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    plan = command("plan", _plan, "memory and the most tokens per second that it allows, from a config alone")
    add = plan.add_argument
    add(
        "model",
        help="org/name, a folder, or a config.json; DeepSeek-R1, Qwen2.5-72B-Instruct, MiMo-7B-RL need no network",
    )
    add("--tp", type=int, default=1, metavar="N", help="devices that share the target")
    add("--draft", metavar="NAME", help="mtp, ngram, or a model; None: mtp where the config promises it")
    add("--acceptance", type=float, default=0.7, metavar="A", help="how often a draft is kept")
    add("--candidate-length", type=int, default=4, metavar="K", help="draft tokens per step")
    add("--bandwidth", type=float, default=4800, metavar="GB/s", help="memory bandwidth of a device, such as an H200")
    add("--memory", type=float, default=141, metavar="GB", help="memory of a device")
    add("--dtype", default="bfloat16", help="bfloat16, float16 or float32; float8 files are computed in it as well")
    add = command(
        "bench", _bench, "tokens per second next to transformers on the same weights, in one run"
    ).add_argument
    whats = {
        "alone": "one prompt at a time",
        "batch": "a crowd",
        "serve": "servers under load",
        "steering": "the controller and fixed numbers of drafts",
        "host": "the engine without a model",
    }
    add("what", nargs="?", choices=whats, default="alone", help="; ".join(": ".join(each) for each in whats.items()))
    add("--model", default="smollm2-135m", help="smollm2-135m, a folder, or org/name")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (CUDA only)")
    add("--prompts", metavar="FILE", help="questions in Spec-Bench form (JSONL); None: six of our own")
    add("--max-tokens", type=int, default=96, metavar="N", help="output tokens of each answer")
    add("--candidate-length", type=int, default=4, metavar="K", help="draft tokens per step")
    add("--drafts", type=_words, default="ngram", metavar="A,B", help="drafters to compare, such as mtp,mtp+ngram")
    add("--quantization", type=_words, default="", metavar="A,B", help="alone: weights to compare as well, int8,int4")
    add("--gguf", metavar="FILE", help="alone: a file for llama.cpp, to compare as well (llama-cpp-python)")
    add("--batch", type=int, default=32, metavar="N", help="batch: prompts at once")
    add("--rounds", type=int, default=3, metavar="N", help="how often everything is repeated")
    add("--rates", type=numbers, default="1,2,4", metavar="R,R", help="serve: requests per second")
    add("--requests", type=int, default=32, metavar="N", help="serve: at each rate, in each round")
    add("--json", metavar="FILE", help="write the figures and the machine card there as well")
    add("--figure", metavar="FILE", help="alone, batch: draw the table there (.png, .svg)")
    command("fetch", _fetch, "fetch the embedded model (once) and print its folder")
    return parser


def _model_options(parser: argparse.ArgumentParser, draft: str | None = None) -> None:
    add = parser.add_argument_group("model and engine").add_argument
    add("--model", default="smollm2-135m", help="smollm2-135m, a folder, a .gguf file, or org/name")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (CUDA only)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--draft", default=draft, metavar="NAME", help="ngram, mtp, mtp+ngram, auto, early-exit, or a model")
    add("--candidate-length", type=int, default=4, metavar="K", help="draft tokens per step")
    add("--page-size", type=int, default=16, metavar="N", help="K/V slots handed out at a time")
    add("--kv-cache-tokens", type=int, metavar="N", help="K/V slots in all; None: by device and model")
    add("--context-length", type=int, metavar="N", help="most tokens of one request; None: the model's limit")
    add("--no-color", dest="color", action="store_false", help="bold and underline only; NO_COLOR does the same")


def _sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="most output tokens")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="N", help="only the N likeliest; 0 is off")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest with probability P together")
    add("--min-p", type=float, default=0.0, metavar="P", help="only tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: fewer repetitions")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="off the logit of each token written before")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time it was written")
    add("--seed", type=int, metavar="N", help="the same seed draws the same tokens; None: a new one each time")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be repeated)")
    add("--ignore-eos", action="store_true", help="go on past the model's own end")
