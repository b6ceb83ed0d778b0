"""Where the memory goes, and how many slots fit into a GPU: what a slot costs, and what must stay free besides.

A slot is more than the target's K/V: the draft model's K/V and the hidden states live under the same number. And not
all that is free when the weights are there can go to slots: a forward needs room for what it computes, attention for
its workspaces, and each captured graph keeps its logits.

Knows: bytes. Does not know: devices, tensors. Taught in notebook 03 (pages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_FRACTION = 0.8  # of the free memory, where nobody asked for a share of the whole
SAMPLING_BYTES = 40  # for each row and token of the vocabulary: p, q, sort keys and sums, at the same time
GRAPH_BYTES = 32  # the same for the logits that graphs keep: 4 bytes, and all graphs together have 8 times the rows of
# the largest step, because their batches double from one to the next, and the draft's have fewer rows than the target's


def slots_that_fit(
    free: int, total: int, *, target: int, others: int, fixed: int, fraction: float | None = None, reserve: float = 0.0
) -> int:
    """Slots for a GPU with `free` of `total` bytes left once all weights are loaded; 0 when there is room for none.

    target: bytes of a slot for the target's K/V. others: for all other tenants. fixed: bytes besides slots.
    fraction: of `total`, what weights and slots may take together; None: DEFAULT_FRACTION of `free` goes to slots and
    `fixed`. reserve: least share of that room that the target's K/V leave to the others.

    >>> slots_that_fit(1000, 2000, target=10, others=6, fixed=0)
    50
    >>> slots_that_fit(1000, 2000, target=10, others=6, fixed=160, fraction=0.9)
    40
    >>> slots_that_fit(1000, 2000, target=10, others=0, fixed=0, reserve=0.5)
    40
    """
    room = free * DEFAULT_FRACTION if fraction is None else free - total * (1 - fraction)
    return max(0, int(min((room - fixed) // (target + others), room * (1 - reserve) // target)))


def step_bytes(numbers: int, rows: int, judged: int, vocab_size: int, itemsize: int) -> int:
    """Most bytes that the forwards of a step and the graphs need besides slots and weights.

    numbers: of one packed row, in the widest layer, that are there at the same time. judged: rows whose logits count.
    """
    return rows * numbers * itemsize + judged * vocab_size * (SAMPLING_BYTES + GRAPH_BYTES + itemsize)


@dataclass(frozen=True)
class MemoryPlan:
    """What one device holds; str(plan) is an aligned table.

    whole: bytes by name that do not depend on the number of slots. per_slot: bytes of each slot by name.
    reserve: see `SpeculativeConfig.state_cache_reserve`; 0 where it does not apply.

    >>> print(MemoryPlan({"weights": 2_000_000_000}, {"K/V": 1000, "hidden states": 0}, slots=50_000))
    weights         2.00 GB
    K/V             0.05 GB  1,000 bytes per token
    in all          2.05 GB
    tokens that fit  50,000
    """

    whole: Mapping[str, int]
    per_slot: Mapping[str, int]
    slots: int
    reserve: float = 0.0

    def __str__(self) -> str:
        lines = [(name, gigabytes(size), "") for name, size in self.whole.items() if size]
        for name, size in self.per_slot.items():
            if size:
                lines.append((name, gigabytes(size * self.slots), f"  {size:,} bytes per token"))
        lines.append(("in all", gigabytes(sum(self.whole.values()) + self.slots * sum(self.per_slot.values())), ""))
        if self.reserve:
            lines.append(
                ("state reserve", f"{self.reserve:.0%}", "  of the room, least that hidden states and draft get")
            )
        lines.append(("tokens that fit", f"{self.slots:,}", ""))
        width = max(len(value) for _, value, _ in lines)
        return "\n".join(f"{name:<16}{value:>{width}}{note}" for name, value, note in lines)


def gigabytes(size: float) -> str:
    """10^9 bytes, to two places.

    >>> gigabytes(1.5e9)
    '1.50 GB'
    """
    return f"{size / 1e9:,.2f} GB"
