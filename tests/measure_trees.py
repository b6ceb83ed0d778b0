"""How many tokens a verification brings, trees against chains, at the same number of verified rows.

python tests/measure_trees.py --prompts questions.jsonl            a table: counted, so any machine gives the same
python tests/measure_trees.py --rows 4 8 16 --topk 2 4 --tokens 64

Prompts are answered greedily with the shipped head. A line of the table is one shape: `rows` = 1 + draft tokens that
the target reads for a request, `depth` = draft tokens in a row at most (as many forwards of the head). Emitted /
verify rows is the acceptance length. The end of each answer, where less fits than the shape has, is counted with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
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
    args = parser.parse_args()
    prompts = list(BUILT_IN)
    if args.prompts:
        lines = Path(args.prompts).read_text("utf-8").splitlines()
        prompts = [json.loads(line)["turns"][0] for line in lines][:: args.every]
    print(f"{len(prompts)} prompts, {args.tokens} tokens each")
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
