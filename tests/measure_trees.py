"""How many tokens a verification brings, trees against chains, at the same number of verified rows.

python tests/measure_trees.py --prompts questions.jsonl            a table: counted, so any machine gives the same
python tests/measure_trees.py --rows 4 8 16 --topk 2 4 --tokens 64
python tests/measure_trees.py --speed --rows 8 --topk 4 --depth 3        seconds, on a quiet machine

Prompts are answered greedily with the shipped head. A line of the table is one shape: `rows` = 1 + draft tokens that
the target reads for a request, `depth` = draft tokens in a row at most (as many forwards of the head). Emitted /
verify rows is the acceptance length. The end of each answer, where less fits than the shape has, is counted with it.
With --speed the prompts are answered one by one, in bfloat16, by no drafts, the chains and the trees of each number of
rows in turn, several rounds (A B C A B C); a line gives the median, lowest and highest tokens per second of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from minispec import LLM, SamplingParams
from minispec.bench import BUILT_IN
from minispec.metrics import SpeculationCounts


def shapes(rows: int, topks: list[int], depths: list[int]) -> Iterator[dict[str, int]]:
    """The chain of so many rows and the trees that fit into them, as settings."""
    yield {"candidate_length": rows - 1}
    for topk in topks:
        for depth in depths:
            if 1 < depth < rows - 1:
                yield {"candidate_length": depth, "topk": topk, "num_draft_tokens": rows - 1}


def measure(args: argparse.Namespace, prompts: list[str], shape: dict[str, int]) -> SpeculationCounts:
    """The counters of one shape over all prompts."""
    speculative = {"draft_model": "mtp", "draft_head": args.head, "adaptive": False} | shape
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    with LLM(args.model, max_num_batched_tokens=1024, kv_cache_tokens=16384, speculative_config=speculative) as llm:
        llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        return llm.metrics().speculation


def measure_speed(args: argparse.Namespace, prompts: list[str], rows: int) -> None:
    """Print tokens per second of no drafts, of chains of every depth, and of the trees and the chain of `rows` rows."""
    chains = [{"candidate_length": depth} for depth in args.depth if depth < rows - 1]
    contestants, rates = [None, *chains, *shapes(rows, args.topk, args.depth)], {}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with ExitStack() as stack:
        engines = []
        for shape in contestants:
            speculative = shape and {"draft_model": "mtp", "draft_head": args.head, "adaptive": False} | shape
            options = {"dtype": "bfloat16", "kv_cache_tokens": 4096, "enable_radix_cache": False}
            engines.append(stack.enter_context(LLM(args.model, speculative_config=speculative, **options)))
            engines[-1].chat([[{"role": "user", "content": prompts[0]}]], params)  # warm
        for _ in range(args.rounds):
            spent = [0.0] * len(engines)
            for prompt in prompts:
                for i, llm in enumerate(engines):
                    start = time.perf_counter()
                    llm.chat([[{"role": "user", "content": prompt}]], params)
                    spent[i] += time.perf_counter() - start
            for i, seconds in enumerate(spent):
                rates.setdefault(i, []).append(len(prompts) * args.tokens / seconds)
        for i, (shape, llm) in enumerate(zip(contestants, engines, strict=True)):
            name = "no drafts" if shape is None else f"topk {shape.get('topk', 1)}, depth {shape['candidate_length']}"
            length = llm.metrics().speculation.acceptance_length if shape else 1.0
            low, high, middle = min(rates[i]), max(rates[i]), statistics.median(rates[i])
            ratio = middle / statistics.median(rates[0])
            print(f"{rows:4}  {name:16}  {middle:7.1f} ({low:.1f} to {high:.1f})  {ratio:.2f}x  length {length:.3f}")


def main() -> None:
    """Print one line per shape as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="a head file instead of the shipped one")
    parser.add_argument("--prompts", help="a JSONL file of Spec-Bench questions; none: a few built-in ones")
    parser.add_argument("--every", type=int, default=10, help="take every n-th question")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 6, 8, 12, 16])
    parser.add_argument("--topk", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--depth", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--speed", action="store_true", help="tokens per second instead of counters")
    parser.add_argument("--rounds", type=int, default=3, help="of --speed")
    args = parser.parse_args()
    prompts = list(BUILT_IN)
    if args.prompts:
        lines = Path(args.prompts).read_text("utf-8").splitlines()
        prompts = [json.loads(line)["turns"][0] for line in lines][:: args.every]
    print(f"{len(prompts)} prompts, {args.tokens} tokens each")
    if args.speed:
        print("rows  contestant        tokens/s (lowest to highest)  over no drafts  acceptance length")
        for rows in args.rows:
            measure_speed(args, prompts, rows)
        return
    print("rows  topk  depth  verify rows  emitted  acceptance length  at depth 1, 2, ...")
    for rows in args.rows:
        for shape in shapes(rows, args.topk, args.depth):
            counts = measure(args, prompts, shape)
            kept = " ".join(f"{share:.2f}" for share in counts.acceptance_by_position[:6])
            print(
                f"{rows:4}  {shape.get('topk', 1):4}  {shape['candidate_length']:5}  {counts.verify_rows:11}  "
                f"{counts.emitted:7}  {counts.acceptance_length:17.3f}  {kept}",
                flush=True,
            )


if __name__ == "__main__":
    main()
