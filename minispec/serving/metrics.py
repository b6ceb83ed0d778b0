"""What the server tells about itself: one snapshot of the engine, as JSON and in Prometheus form.

Names follow SGLang's, with the prefix `minispec:`. Figures mean what `minispec.metrics` says.

Knows: which numbers matter to who runs a server. Does not know: when they are asked for.
Used in notebook 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minispec.core import Request
from minispec.llm import LLM
from minispec.metrics import EngineMetrics

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
# name, kind, what it is, its value in a snapshot
Series = tuple[str, type[Metric], str, Callable[[dict[str, Any]], float]]
SERIES: list[Series] = [
    ("num_running_reqs", GaugeMetricFamily, "Requests that hold slots", lambda s: s["running"]),
    ("num_queue_reqs", GaugeMetricFamily, "Requests that wait for slots", lambda s: s["waiting"]),
    ("max_total_num_tokens", GaugeMetricFamily, "Slots in the pool", lambda s: sum(s["slots"].values())),
    ("num_used_tokens", GaugeMetricFamily, "Slots that requests hold", lambda s: s["used_tokens"]),
    ("num_cached_tokens", GaugeMetricFamily, "Slots of cached prefixes", lambda s: s["slots"]["cached"]),
    ("cache_hit_rate", GaugeMetricFamily, "Cached share of prompt tokens", lambda s: s["cache_hit_rate"]),
    ("prompt_tokens", CounterMetricFamily, "Prompt tokens of finished requests", lambda s: s["prompt_tokens"]),
    ("cached_tokens", CounterMetricFamily, "Of them, found in the cache", lambda s: s["cached_tokens"]),
    ("generation_tokens", CounterMetricFamily, "Output tokens", lambda s: s["output_tokens"]),
    ("forward_passes", CounterMetricFamily, "Forwards of the target model", lambda s: s["steps"]),
    ("preemptions", CounterMetricFamily, "Requests that gave their slots back", lambda s: s["preemptions"]),
    ("spec_accept_length", GaugeMetricFamily, "Tokens per verification", lambda s: s["acceptance_length"]),
    ("spec_accept_rate", GaugeMetricFamily, "Accepted share of draft tokens", lambda s: s["acceptance_rate"]),
    ("spec_num_steps", GaugeMetricFamily, "Draft tokens asked for, K", lambda s: s["candidate_length"]),
    ("spec_verify_calls", CounterMetricFamily, "Verifications", lambda s: s["speculation"]["verify_rows"]),
    ("spec_num_draft_tokens", CounterMetricFamily, "Draft tokens verified", lambda s: s["speculation"]["drafted"]),
    ("spec_num_accepted_tokens", CounterMetricFamily, "Draft tokens kept", lambda s: s["speculation"]["accepted"]),
    ("spec_drafter_faults", CounterMetricFamily, "Failures of the drafter", lambda s: s["drafter_faults"]),
    ("spec_fallbacks", CounterMetricFamily, "Pauses of a request that kept too few", lambda s: s["fallbacks"]),
    ("spec_regressions", CounterMetricFamily, "Pauses because drafts did not pay", lambda s: s["regressions"]),
    ("spec_speed_up", GaugeMetricFamily, "Speed of drafted steps over plain ones", lambda s: s["speed_up"]),
    ("spec_draft_latency_seconds", GaugeMetricFamily, "Mean time of drafting", lambda s: s["draft_latency"]),
    ("spec_verify_latency_seconds", GaugeMetricFamily, "Mean time of verifying", lambda s: s["verification_latency"]),
    ("spec_rollbacks_per_second", GaugeMetricFamily, "Verifications undone", lambda s: s["rollbacks_per_second"]),
    ("spec_forwards_saved", GaugeMetricFamily, "Forwards of the target saved", lambda s: s["forwards_saved"]),
    ("spec_weight_bytes_saved", GaugeMetricFamily, "Bytes of weights not read", lambda s: s["weight_bytes_saved"]),
]  # fmt: skip


DERIVED = [name for name, value in vars(EngineMetrics).items() if isinstance(value, property)]


def snapshot(llm: LLM) -> dict[str, Any]:
    """The engine's counters and what it holds now; call it on the engine's thread. slots: by owner, as in `Ledger`."""
    engine, pool, tree, counts = llm.engine, llm.engine.pool, llm.engine.pool.tree, llm.metrics()
    slots = {"free": pool.num_free_pages * pool.page_size, "cached": tree.num_evictable, "locked": tree.num_locked}
    slots["private"] = pool.num_slots - sum(slots.values())
    return (
        asdict(counts)
        | {name: getattr(counts, name) for name in DERIVED}
        | {
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "slots": slots,
            "used_tokens": slots["locked"] + slots["private"],
            "cache_hit_rate": counts.cached_tokens / max(1, counts.prompt_tokens),
            "candidate_length": engine.controller.config.candidate_length if engine.controller else 0,
        }
    )


class ServerMetrics:
    """The series of /metrics: those of a snapshot, and histograms of the requests that have finished."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._snapshot: dict[str, Any] | None = None
        self._registry.register(self)
        self._first, self._whole = (
            Histogram(f"minispec:{name}", text, buckets=SECONDS, registry=self._registry)
            for name, text in (
                ("time_to_first_token_seconds", "From arrival to the first token"),
                ("e2e_request_latency_seconds", "From arrival to the end"),
            )
        )

    def observe(self, request: Request) -> None:
        """Count a finished request."""
        if request.metrics.first_token_s is not None:
            self._first.observe(request.metrics.first_token_s)
        self._whole.observe(request.metrics.finished_s)

    def render(self, snapshot: dict[str, Any]) -> bytes:
        """The text that Prometheus reads."""
        self._snapshot = snapshot
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        if self._snapshot is None:
            return
        for name, kind, text, value in SERIES:
            yield kind(f"minispec:{name}", text, value=value(self._snapshot))
        finished = CounterMetricFamily("minispec:num_requests", "Requests that have ended", labels=["finish_reason"])
        for reason, count in self._snapshot["finished"].items():
            finished.add_metric([reason], count)
        at = CounterMetricFamily("minispec:spec_accepted_tokens_per_pos", "Draft tokens kept", labels=["position"])
        for position, count in enumerate(self._snapshot["speculation"]["accepted_at"]):
            at.add_metric([str(position)], count)
        why = CounterMetricFamily("minispec:spec_choices", "Why a request got so many drafts", labels=["reason"])
        for reason, count in self._snapshot["choices"].items():
            why.add_metric([reason], count)
        yield from (finished, at, why)
