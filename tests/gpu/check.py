"""Is the GPU path right, and how fast is it? One run, no network, less than four minutes.

    python tests/gpu/check.py --out figures/                # the embedded model and its MTP head
    python tests/gpu/check.py --model PATH --dtype bfloat16  # another one; MTP where its checkpoint has a module
    python tests/gpu/check.py --dry                         # anywhere: few tokens, what needs a GPU is left out

1. FlashInfer's attention against the torch backend on 20 random mixes of rows, captured shapes included, over heads and
   over latents. (Elsewhere torch's stands in for it, which shows that the script runs, and no more.)
2. The engine's ids: in float32 with torch attention, and as it runs by default, with every drafter, overlap and graphs
   on and off. An id may differ where the reference's own choice was a near tie, and nowhere else.
3. Tokens per second at batch 1, 8 and 32 of all of these, beside transformers, and the share of the memory's measured
   speed that reading the weights alone makes up.
4. One JSON and two figures under --out, named after the card. Exit status 1 when something was wrong.

Each part has its share of the time, and a part that fails is counted as wrong: the others run all the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minispec import LLM, SamplingParams
from minispec.attention.choose import choose_attention, make_attention
from minispec.attention.torch_backend import TorchAttention
from minispec.bench import BUILT_IN
from minispec.config import ConfigError
from minispec.doctor import machine_card
from minispec.models.config import ModelLoadError
from minispec.runner import Segment, pack

TIES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}  # logit margins that rounding may turn around
FAR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative error of attention
# Seconds after the start at which each part begins nothing more; what is under way then is finished.
UNTIL = {"attention": 30.0, "float32": 75.0, "speed": 180.0, "transformers": 205.0}
LATENT = (512, 64)  # DeepSeek's sizes
WANTED = 1.4  # tokens per second of MTP at batch 1 in those of plain decoding


class Check:
    """What was found so far, and what went wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.perf_counter()
        self.found: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.skipped: dict[str, str] = {}
        self.until = UNTIL["attention"]

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.started > self.until

    def part(self, name: str, run: Callable[..., None], *args: Any) -> None:
        """Run a part within its time. Whatever it raises is one thing that is wrong."""
        self.until = UNTIL[name]
        try:
            run(self, *args)
        except Exception as error:
            self.expect(False, f"{name}: {type(error).__name__}: {error}")

    def skip(self, what: str, reason: str) -> None:
        self.skipped[what] = reason
        print(f"  skipped: {what}: {reason}")

    def expect(self, good: bool, what: str) -> None:
        print(f"  {'ok   ' if good else 'WRONG'} {what}")
        if not good:
            self.wrong.append(what)


# 1. Attention -------------------------------------------------------------------------------------------------------


def check_attention(
    check: Check,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    latent: tuple[int, int] | None = None,
) -> None:
    name, reason = choose_attention("auto", heads[2], dtype, device, latent=latent)
    if name != "flashinfer":
        check.skip(f"attention {heads}", reason)
        if not check.args.dry:
            return
    Hq, Hkv, D = heads
    Dv = latent[0] if latent else D
    fast = make_attention(name, *heads, dtype=dtype, device=device, latent=latent)
    plain = TorchAttention(Hq, Hkv, dtype=torch.float32, device=device)
    rng, slots, errors = np.random.default_rng(0), 40_000, []
    caches = [torch.randn(slots, Hkv, d, device=device, dtype=dtype) for d in (D, 0 if latent else D)]
    table = rng.permutation(slots)[:36_000].reshape(12, 3000)
    for mix in range(2 if check.args.dry else 20):
        if check.late:
            check.skip(f"attention {heads}, from mix {mix} on", "its time is over")
            break
        graph, rows = mix % 2 == 1, int(rng.integers(1, 13))
        lengths = [int(rng.choice([1, 4]))] * rows if graph else rng.choice([1, 1, 4, 5, 64, 300], rows).tolist()
        starts = rng.integers(0, 2600, rows)
        segments = [Segment(row, int(starts[row]) + n, [0] * n, 1) for row, n in enumerate(lengths)]
        layout = pack(segments, table)
        q, k, v = (torch.randn(sum(lengths), h, D, device=device, dtype=dtype) for h in (Hq, Hkv, Hkv))
        v = k[..., :Dv] if latent else v
        plan = fast.plan(layout, table, graph=graph)
        plan.new_slots = torch.from_numpy(layout.slots).to(device)
        got = captured(lambda: fast.run(plan, *caches, q, k, v)) if graph else fast.run(plan, *caches, q, k, v)  # noqa: B023
        exact = [cache.float() for cache in caches]
        expected = plain.run(plain.plan(layout, table), *exact, q.float(), k.float(), v.float())
        errors.append(float((got.float() - expected).norm() / expected.norm()))
    entry = {"heads": heads, "latent": latent, "dtype": str(dtype), "backend": name, "relative_errors": errors}
    check.found.setdefault("attention", []).append(entry)
    worst = max(errors, default=0.0)
    check.expect(worst < FAR[dtype], f"attention by {name}, {Hq}/{Hkv}x{D}: largest relative error {worst:.1e}")


def captured(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a replay of `run`; of `run` itself where there are no graphs."""
    if not torch.cuda.is_available():
        return run()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    out.zero_()
    graph.replay()
    return out


# 2. and 3. The engine -------------------------------------------------------------------------------------------------


def speculative(drafter: str, args: argparse.Namespace) -> dict[str, Any] | None:
    if drafter == "plain":
        return None
    config = {"draft_model": drafter, "candidate_length": args.candidate_length, "adaptive": False}
    return config | ({"draft_head": args.draft_head} if drafter == "mtp" and args.draft_head else {})


def build(check: Check, drafter: str, dtype: str, **options: Any) -> LLM | None:
    """An engine, or None where the model has no such drafter or time is up."""
    what = ", ".join([drafter, dtype, *(f"{name}={value}" for name, value in options.items())])
    if check.late:
        check.skip(what, f"{check.until:.0f} seconds are over")
        return None
    options = {"max_num_seqs": max(check.args.batches), "max_num_batched_tokens": 2048} | options
    config = speculative(drafter, check.args)
    try:
        return LLM(check.args.model, dtype=dtype, device=check.args.device, speculative_config=config, **options)
    except (ConfigError, ModelLoadError) as error:
        check.skip(what, str(error))
        return None


def prompts_for(llm: LLM, count: int) -> list[list[int]]:
    questions = [BUILT_IN[i % len(BUILT_IN)] + " " * (i // len(BUILT_IN)) for i in range(count)]
    if llm.tokenizer is None or not getattr(llm.tokenizer, "chat_template", None):
        rng = np.random.default_rng(0)
        return [rng.integers(1, llm.model_config.vocab_size - 1, 12 + 5 * (i % 7)).tolist() for i in range(count)]
    return [llm.encode([{"role": "user", "content": question}]) for question in questions]


def compare(check: Check, what: str, got: Sequence[Any], reference: Sequence[Any], dtype: torch.dtype) -> None:
    """Equal ids, or a first difference at a near tie of the reference."""
    ties = wrong = 0
    for ours, theirs in zip(got, reference, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        place = next((i for i, (a, b) in pairs if a != b), None)
        if place is not None:
            first, second = sorted(theirs.logprobs[place].top.values(), reverse=True)[:2]
            ties, wrong = ties + (first - second < TIES[dtype]), wrong + (first - second >= TIES[dtype])
    check.found.setdefault("ids", {})[what] = {"requests": len(got), "near_ties": ties, "wrong": wrong}
    check.expect(not wrong, f"ids {what}: {len(got) - ties - wrong} equal, {ties} part at a near tie, {wrong} differ")


def check_ids_in_float32(check: Check, drafters: Sequence[str], params: SamplingParams) -> None:
    reference = None
    for drafter, overlap in itertools.product(drafters, (False, True)):
        llm = build(check, drafter, "float32", attention_backend="torch", enable_overlap=overlap)
        if llm is None:
            continue
        with llm:
            got = llm.generate(prompts_for(llm, 6), params)
            if reference is None:
                reference = got
            compare(check, f"float32, {drafter}, overlap {overlap}", got, reference, torch.float32)


def check_engine(check: Check, drafters: Sequence[str], params: SamplingParams) -> None:
    """Ids and speed of the engine as it runs by default, feature by feature."""
    args, reference = check.args, None
    found = check.found.setdefault("speed", [])
    plain = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    # All on comes first: that is what must be known if time is short.
    for overlap, graphs, drafter in itertools.product((True, False), (True, False), drafters):
        llm = build(check, drafter, args.dtype, enable_overlap=overlap, enable_cuda_graphs=graphs)
        if llm is None:
            continue
        with llm:
            what = f"{drafter}, overlap {overlap}, graphs {graphs}"
            got = llm.generate(prompts_for(llm, 6), params)
            if reference is None:
                reference = got
            compare(check, what, got, reference, llm.dtype)
            for batch in args.batches:
                found.append({"drafter": drafter, "overlap": overlap, "graphs": graphs, "batch": batch})
                found[-1] |= timed(llm, prompts_for(llm, batch), plain)
            llm.check_integrity()
            runner = llm.engine.runner
            check.found["model"] = {"name": args.model, "weight_bytes": runner.weight_bytes}
            check.found["model"] |= {"dtype": str(llm.dtype), "attention": llm.attention}
            recordings = runner.program.recordings
            if graphs and llm.device.type == "cuda" and llm.attention.startswith("flashinfer"):
                check.expect(bool(recordings), f"{what}: {len(recordings)} captured shapes of the target")
    plain_rates = {feature_of(entry): entry["tokens_per_s"] for entry in found if entry["drafter"] == "plain"}
    for entry in found:
        rate = plain_rates.get(feature_of(entry))
        entry["to_plain"] = entry["tokens_per_s"] / rate if rate else None


def feature_of(entry: dict[str, Any]) -> tuple[bool, bool, int]:
    return entry["overlap"], entry["graphs"], entry["batch"]


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """The better of two runs, after one that fills the cache of prompts; counts of both."""
    llm.generate(prompts, params)
    before, seconds = llm.metrics(), []
    for _ in range(2):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds.append(time.perf_counter() - started)
    after, tokens = llm.metrics(), sum(len(output.token_ids) for output in outputs)
    read, steps = after.weight_bytes_read - before.weight_bytes_read, after.steps - before.steps
    kept = after.speculation.accepted - before.speculation.accepted
    return {
        "tokens_per_s": tokens / min(seconds),
        "weight_bytes_per_token": read / (2 * tokens),
        "tokens_per_forward": 2 * tokens / steps,
        "drafts_kept": kept / (2 * tokens),
    }


def time_transformers(check: Check, llm_dtype: torch.dtype, device: torch.device) -> None:
    from transformers import AutoModelForCausalLM

    from minispec.models.loading import find_model

    args = check.args
    llm = build(check, "plain", args.dtype, enable_cuda_graphs=False)
    if llm is None:
        return
    with llm:
        prompts = {batch: prompts_for(llm, batch) for batch in args.batches}
    del llm
    theirs = AutoModelForCausalLM.from_pretrained(find_model(args.model), dtype=llm_dtype).to(device).eval()
    options = {"do_sample": False, "max_new_tokens": args.max_tokens, "min_new_tokens": args.max_tokens}
    rates = {}
    for batch, lines in prompts.items():
        if check.late:
            check.skip(f"transformers at batch {batch}", "its time is over")
            continue
        width = max(map(len, lines))
        ids = torch.tensor([[0] * (width - len(line)) + line for line in lines], device=device)
        mask = torch.tensor([[0] * (width - len(line)) + [1] * len(line) for line in lines], device=device)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            with torch.inference_mode():
                out = theirs.generate(ids, attention_mask=mask, pad_token_id=0, **options)
            out.tolist()  # waits
            seconds.append(time.perf_counter() - started)
        rates[batch] = batch * args.max_tokens / min(seconds)
    check.found["transformers_tokens_per_s"] = rates
    for entry in check.found["speed"]:
        rate = rates.get(entry["batch"])
        entry["to_transformers"] = entry["tokens_per_s"] / rate if rate else None


# 4. What is left behind -----------------------------------------------------------------------------------------------


def report(check: Check, read_gb_s: float) -> None:
    """Print the table; add the share of the memory's speed that reading weights makes up at batch 1."""
    print(f"\n{'':34}{'batch':>6}{'tokens/s':>11}{'to plain':>10}{'to transf.':>12}{'of memory':>11}")
    for entry in check.found["speed"]:
        entry["memory_share"] = entry["weight_bytes_per_token"] * entry["tokens_per_s"] / (read_gb_s * 1e9)
        name = f"{entry['drafter']}{', overlap' * entry['overlap']}{', graphs' * entry['graphs']}"
        ratios = [f"{entry[key]:.2f}x" if entry.get(key) else "" for key in ("to_plain", "to_transformers")]
        share = f"{entry['memory_share']:.0%}"
        print(f"{name:34}{entry['batch']:>6}{entry['tokens_per_s']:11.1f}{ratios[0]:>10}{ratios[1]:>12}{share:>11}")
    alone = {"drafter": "mtp", "overlap": True, "graphs": True, "batch": 1}
    gains = [entry["to_plain"] for entry in check.found["speed"] if alone.items() <= entry.items()]
    check.found["mtp_to_plain_at_batch_1"] = {"wanted": WANTED, "measured": gains[0] if gains else None}
    print(f"MTP at batch 1, graphs and overlap on both sides, wanted {WANTED}x plain:", *gains or ["not measured"])


def draw(check: Check, out: Path, name: str) -> list[Path]:
    from minispec.course.figures.plots import bars, token_bytes

    speed, args = check.found["speed"], check.args
    full = [entry for entry in speed if entry["overlap"] and entry["graphs"]] or speed
    series = {
        drafter: {f"batch {e['batch']}": e["tokens_per_s"] for e in full if e["drafter"] == drafter}
        for drafter in dict.fromkeys(e["drafter"] for e in full)
    }
    pictures = {"speed": bars(f"tokens per second, {check.found['device']['name']}", series, "tokens/s")}
    alone = {e["drafter"]: (e["tokens_per_forward"], e["weight_bytes_per_token"]) for e in full if e["batch"] == 1}
    target, drafts = check.found["model"]["weight_bytes"], args.candidate_length * check.found["draft_weight_bytes"]
    parts = {"the target": target, f"{args.candidate_length} MTP drafts": drafts}
    pictures["bytes"] = token_bytes(parts, target, alone)
    paths = []
    for kind, picture in pictures.items():
        paths.append(out / f"{name}_{kind}.png")
        paths[-1].write_bytes(picture._repr_png_())
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-head", help="a safetensors file with an MTP module, where the checkpoint has none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--candidate-length", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--dry", action="store_true", help="a few tokens, to see that the script runs")
    args = parser.parse_args(arguments)
    args.batches = (1, 2) if args.dry else (1, 8, 32)
    args.max_tokens = 4 if args.dry else args.max_tokens
    args.out.mkdir(parents=True, exist_ok=True)

    check, card = Check(args), machine_card(args.device)
    print(card, "\n")
    check.found["device"] = {
        "name": card.name,
        "read_gb_s": card.read_gb_s,
        "torch": torch.__version__,
        "dry": args.dry,
    }
    drafters = ("plain", "ngram", "mtp")
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=2)
    llm = build(check, "mtp", args.dtype, enable_cuda_graphs=False) or build(check, "plain", args.dtype)
    with llm:
        config, dtype, device = llm.model_config, llm.dtype, llm.device
        own = [d.weight_bytes for d in llm.engine.drafters]
        check.found["draft_weight_bytes"] = own[0] if own else 0
    if not config.mla:
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        check.part("attention", check_attention, device, dtype, heads)
    check.part("attention", check_attention, device, torch.bfloat16, (16, 8, 128))
    check.part("attention", check_attention, device, torch.bfloat16, (16, 1, sum(LATENT)), LATENT)
    check.part("float32", check_ids_in_float32, drafters, params)
    check.part("speed", check_engine, drafters, params)
    check.part("transformers", time_transformers, dtype, device)
    report(check, card.read_gb_s)
    if device.type != "cuda":
        check.skip("CUDA graphs", f"the device is {str(device)!r}")

    name = "gpu_" + re.sub(r"\W+", "_", card.name.lower()).strip("_") + ("_dry" if args.dry else "")
    check.found |= {"skipped": check.skipped, "wrong": check.wrong, "seconds": time.perf_counter() - check.started}
    target = args.out / f"{name}.json"
    target.write_text(json.dumps(check.found, indent=1) + "\n", encoding="utf-8")
    print("\nwrote", *[target, *draw(check, args.out, name)])
    print(f"{check.found['seconds']:.0f} s;", "all well" if not check.wrong else f"{len(check.wrong)} wrong")
    return int(bool(check.wrong))


if __name__ == "__main__":
    sys.exit(main())
