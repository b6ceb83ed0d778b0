"""Starting the server: SGLang's flags, the process with its signals, and a server inside a notebook.

`python -m minispec.launch_server --model-path ... --speculative-algorithm NEXTN` and `minispec serve` are the process.
`BackgroundServer(LLM(...))` serves from a thread, so it may be started where an event loop runs already (Jupyter).

A flag, or a value of one, that this package cannot carry out is refused with the reason. Help needs no torch.

Knows: command line, sockets, signals. Does not know: routes, the engine. Used in notebook 13 (everything on).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minispec.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    import uvicorn

    from minispec.llm import LLM

log = logging.getLogger(__name__)
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
DTYPES = {"half": "float16", "float": "float32"}  # SGLang's other names
START_SECONDS = 60.0
# Flags of SGLang that cannot be carried out -> why.
REFUSED = {
    "--trust-remote-code": "only minispec's own model code runs, never a checkpoint's",
    "--chat-template": "the chat template is the one in the model's folder",
    "--kv-cache-dtype": "K/V are kept in --dtype",
    "--dp-size": "there is no data parallelism, only --tp-size",
    "--lora-paths": "there is no code for adapters",
    "--tool-call-parser": "tools are not supported",
    "--reasoning-parser": "an answer is not taken apart",
    "--schedule-policy": "requests are served in the order in which they come",
    "--cuda-graph-max-bs": "graphs are recorded for batches of up to --max-running-requests",
    "--speculative-draft-model-quantization": "it is draft_quantization in --speculative-config",
    "--speculative-accept-threshold-single": "drafts are kept by the exact rule, which has no threshold",
}


class _Refuse(argparse.Action):
    """A flag of REFUSED."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        parser.error(f"{given[-1]} is not supported: {self.const}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the server, with SGLang's names."""
    add = parser.add_argument_group("model").add_argument
    add("--model-path", "--model", default="smollm2-135m", help="smollm2-135m, a folder, a .gguf file, or org/name")
    add("--served-model-name", help="the name that clients ask for; None: the model path")
    add("--dtype", default="auto", help="auto, float32 (float), bfloat16, or float16 (half, CUDA only)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--quantization", metavar="NAME", help="weights in few bits: int8 or int4 (CPU), int8 or fp8 (CUDA)")
    add("--tp-size", "--tp", "--tensor-parallel-size", dest="tensor_parallel_size", type=int, default=1, metavar="N",
        help="processes, with a device each, that share the model")  # fmt: skip
    add("--attention-backend", default="auto", metavar="NAME", help="auto, flashinfer (CUDA), or torch_native")
    add("--disable-cuda-graph", dest="enable_cuda_graphs", action="store_false", help="launch kernel by kernel")
    add = parser.add_argument_group("memory and scheduling").add_argument
    add("--context-length", type=int, metavar="N", help="most tokens of one request; None: the model's limit")
    add("--mem-fraction-static", type=float, metavar="X", help="share of a GPU's memory for weights and K/V")
    add("--max-total-tokens", dest="kv_cache_tokens", type=int, metavar="N", help="K/V slots; None: by device, model")
    add("--max-running-requests", dest="max_num_seqs", type=int, default=16, metavar="N", help="that run at once")
    add("--max-queued-requests", type=int, default=256, metavar="N", help="that may wait; more get a 429")
    add("--chunked-prefill-size", type=int, metavar="N", help="most prompt tokens of a request in one forward")
    add("--page-size", type=int, default=16, metavar="N", help="K/V slots handed out at a time")
    add("--disable-radix-cache", dest="enable_radix_cache", action="store_false", help="compute every prompt anew")
    add("--disable-overlap-schedule", dest="enable_overlap", action="store_false", help="plan and compute in turn")
    add = parser.add_argument_group("speculative decoding").add_argument
    add("--speculative-algorithm", metavar="NAME", help=", ".join(ALGORITHMS))
    add("--speculative-draft-model-path", "--speculative-draft-model", "--speculative-draft", metavar="PATH",
        help="STANDALONE: the draft model; EAGLE, EAGLE3, NEXTN: a head, None: the target's own")  # fmt: skip
    add("--speculative-num-steps", type=int, metavar="K", help="draft tokens per step")
    add("--speculative-num-draft-tokens", type=int, metavar="N", help="tokens verified per step; K + 1 in a chain")
    add("--speculative-eagle-topk", type=int, default=1, metavar="N", help="drafts after each token; above 1: trees")
    add("--speculative-config", metavar="JSON", help="fields of SpeculativeConfig, instead of the flags above")
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one")
    add("--port", type=int, default=30000, metavar="N", help="0 takes a free one")
    add("--api-key", metavar="KEY", help="what clients must send; None lets everybody in")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="seconds that a request may take")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="how much is said")
    add("--enable-metrics", action="store_true", default=True, help="/metrics is always there")
    for flag, why in REFUSED.items():
        add(flag, nargs="*", action=_Refuse, const=why, help=argparse.SUPPRESS)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as keyword arguments of LLM. Raises ConfigError for what cannot be carried out, with the reason."""
    options = {field.name: getattr(args, field.name) for field in fields(EngineConfig) if field.name in args}
    least = max(args.max_num_seqs, args.chunked_prefill_size or 0)
    options["max_num_batched_tokens"] = max(EngineConfig.max_num_batched_tokens, least)
    options["attention_backend"] = args.attention_backend.replace("torch_native", "torch")
    options["speculative_config"] = speculative_options(args)
    return options | {"dtype": DTYPES.get(args.dtype, args.dtype), "device": args.device}


def speculative_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """The speculative flags as fields of SpeculativeConfig; None without them.

    NEXTN and EAGLE are the target's MTP module (or a head file). EAGLE3 is an EAGLE head of any version, and so is
    EAGLE with the folder of one; with an ordinary language model EAGLE is STANDALONE. A topk above 1 makes trees.
    """
    name, draft = args.speculative_algorithm, args.speculative_draft_model_path
    steps, verified, topk = args.speculative_num_steps, args.speculative_num_draft_tokens, args.speculative_eagle_topk
    if args.speculative_config is not None:
        if not (name is draft is steps is verified is None and topk == 1):
            raise ConfigError("--speculative-config holds all settings: leave the other --speculative flags out")
        try:
            return json.loads(args.speculative_config)
        except ValueError as error:
            raise ConfigError(f"--speculative-config {args.speculative_config!r:.80} is not JSON: {error}") from error
    if name is None:
        if not (draft is steps is verified is None and topk == 1):
            raise ConfigError(f"--speculative flags need --speculative-algorithm, one of {', '.join(ALGORITHMS)}")
        return None
    if name not in ALGORITHMS:
        raise ConfigError(f"--speculative-algorithm {name!r} must be one of {', '.join(ALGORITHMS)}")
    if topk == 1 and steps is not None and verified is not None and verified != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {verified} counts the {steps} drafts of --speculative-num-steps and the "
            f"token before them: it must be {steps + 1}, or be left out"
        )
    if topk == 1 and steps is None and verified is not None:
        steps = verified - 1
    options: dict[str, Any] = {} if steps is None else {"candidate_length": steps}
    if topk != 1:
        options |= {"topk": topk} | ({} if verified is None else {"num_draft_tokens": verified - 1})
    if name == "NGRAM":
        if draft is not None:
            raise ConfigError(f"--speculative-draft-model-path {draft!r}: NGRAM needs no model")
        return options | {"draft_model": "ngram"}
    options.setdefault("candidate_length", 3)
    if name == "EAGLE3" or name == "EAGLE" and _is_eagle_head(draft):
        return options | {"draft_model": "eagle", "draft_head": draft}
    if name != "STANDALONE" and draft in (None, args.model_path):
        return options | {"draft_model": "mtp"}
    if name != "STANDALONE" and Path(draft).suffix == ".safetensors":
        return options | {"draft_model": "mtp", "draft_head": draft}
    if name == "NEXTN":
        raise ConfigError(
            f"--speculative-draft-model-path {draft!r}: NEXTN takes the target's own MTP module, or a .safetensors head"
        )
    if draft is None:
        raise ConfigError("STANDALONE needs --speculative-draft-model-path: the model that drafts")
    if name == "EAGLE":
        log.warning("EAGLE with the language model %r as draft runs as STANDALONE", draft)
    return options | {"draft_model": draft}


def _is_eagle_head(draft: str | None) -> bool:
    """True for a folder whose config.json speaks of EAGLE, as the architecture of such a head does."""
    config = Path(draft or "") / "config.json"
    return draft is not None and config.is_file() and "eagle" in config.read_text("utf-8").lower()


def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT; then nothing new is taken and what has begun is finished. A second one ends it."""
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    options = engine_options(args)
    with bind(args.host, args.port) as listener:
        from minispec.llm import LLM

        llm = LLM(args.model_path, **options)
        server = _uvicorn(
            llm,
            args.log_level,
            model=args.served_model_name or args.model_path,
            api_key=args.api_key,
            max_queued_requests=args.max_queued_requests,
            request_timeout=args.request_timeout,
        )
        listener.listen()  # who reads the next line may connect at once: it waits until the server takes it
        print(f"minispec serves {args.model_path} at {_url(listener)}", file=sys.stderr, flush=True)
        server.run(sockets=[listener])


class BackgroundServer:
    """A server in a thread of this process: `with BackgroundServer(LLM()) as server: ... server.url`.

    The LLM is the server's from then on. settings: fields of `ServerSettings`. port 0 takes a free one.
    Raises ConfigError when the port is taken.
    """

    def __init__(self, llm: LLM, *, host: str = "127.0.0.1", port: int = 0, **settings: Any) -> None:
        listener = bind(host, port)
        self.url = _url(listener)
        self._server = _uvicorn(llm, "warning", **({"model": "default"} | settings))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="minispec-http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the HTTP server has not started; its log says why")
            time.sleep(0.01)

    def stop(self) -> None:
        """Finish what has begun, then stop. Stopping twice is no error."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, taken before the model is loaded. Raises ConfigError when it cannot be had."""
    # The protocol is named because asyncio looks at it: only then does an answer not wait for the client's ACK (40 ms).
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn(llm: LLM, log_level: str, **settings: Any) -> uvicorn.Server:
    import uvicorn

    from minispec.serving.api import ServerSettings, create_app

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            """The first signal drains, as uvicorn does; the second waits for nothing, not even for a step."""
            if self.should_exit:
                os._exit(1)
            self.should_exit = True

    app = create_app(llm, ServerSettings(**settings))
    return Server(uvicorn.Config(app, log_level=log_level, lifespan="on", ws="none"))
