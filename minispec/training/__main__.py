"""Train an MTP head:  python -m minispec.training --work DIR [--data text.npz] [--steps 1000]

Four stages, each of which leaves a file in DIR and is passed over when its file is there: text, features, training
(a checkpoint at every evaluation), the head file. So an interrupted run goes on where it stopped.

Knows: files and the order of the stages. Does not know: how any of them works.
Taught in notebook 14 (how the head was made).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from minispec.config import ConfigError
from minispec.llm import LLM
from minispec.models.config import ModelLoadError
from minispec.models.mtp import save_mtp
from minispec.training.data import Conversations, held_out_rows, write_conversations
from minispec.training.features import Features, compute_features
from minispec.training.train import Recipe, Trainer, draft_vocabulary, module_from_head, new_module

WRITERS = 96  # conversations that are written side by side


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is still to do; exit code 0, or 2 with one sentence on stderr."""
    args = _parser().parse_args(argv)
    try:
        recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
        make_head(args, recipe)
    except (ConfigError, ModelLoadError, FloatingPointError, OSError) as error:
        print(f"minispec.training: {error}", file=sys.stderr)
        return 2
    return 0


def make_head(args: argparse.Namespace, recipe: Recipe) -> None:
    """All stages; prints where each result lies."""
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    slots = {"max_num_seqs": WRITERS, "max_num_batched_tokens": 1024, "kv_cache_tokens": WRITERS * (args.length + 16)}
    llm = LLM(args.model, dtype=args.dtype, device=args.device, **slots)
    paths = args.data or [_written(args, llm, recipe.seed)]
    # Those of the first file: more text may join a later run, and they stay unseen.
    held_out = held_out_rows(Conversations.load(paths[0]), recipe.num_held_out, recipe.seed)
    data = Conversations.load(*paths)
    print(f"text: {len(data.token_ids)} conversations of {data.token_ids.shape[1]} tokens")

    path = work / "features.safetensors"
    origin = f"text {data.digest} of {args.model}, {len(held_out)} held out with seed {recipe.seed}"
    if not path.is_file():
        compute_features(llm.model, data, held_out).save(path, origin)
    features = Features.load(path, origin)

    if args.start:
        module, vocab_ids = module_from_head(args.start, llm.model)
    else:
        module = new_module(llm.model, features.projection)
        vocab_ids = draft_vocabulary(data, recipe.vocab, llm.engine.runner.num_text_tokens)
    trainer = Trainer(module, llm.model, vocab_ids, data, features, held_out, recipe)
    history = trainer.run(work / "checkpoint.pt", f"{origin}, from {args.start}")
    out = args.out or work / "mtp.safetensors"
    card = {
        "recipe": json.dumps(asdict(recipe)),
        "text": f"{data.token_ids.size} tokens",
        "held_out": str(history[-1]),
    }
    save_mtp(out, module, llm.model_config, draft_ids=vocab_ids, metadata=card)
    print(f"{history[-1]}\nhead: {out}")


def _written(args: argparse.Namespace, llm: LLM, seed: int) -> Path:
    path = args.work / "text.npz"
    if not path.is_file():
        options = {"question_tokens": args.question_tokens, "seed": seed}
        write_conversations(llm, args.conversations, args.length, **options).save(path)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minispec.training", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of all intermediate files")
    parser.add_argument("--model", default="smollm2-135m", help="the target, as for LLM")
    parser.add_argument("--dtype", default="auto", help="of the target and of the arithmetic (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default %(default)s)")
    parser.add_argument("--data", type=Path, nargs="+", help="text made before (.npz), instead of writing it")
    parser.add_argument("--conversations", type=int, default=2240, help="how many to write (default %(default)s)")
    parser.add_argument("--length", type=int, default=472, help="tokens of each (default %(default)s)")
    parser.add_argument("--question-tokens", type=int, default=96, help="most of a question (default %(default)s)")
    parser.add_argument("--start", type=Path, help="a head file to go on from (its vocabulary stays)")
    parser.add_argument("--out", type=Path, help="the head file (default DIR/mtp.safetensors)")
    for field in fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help="(default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
