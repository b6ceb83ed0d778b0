"""Paged attention against the textbook formula, row by row, for random mixes of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minispec.attention.torch_backend import PADDING_LIMIT, STACK_MAX_Q, TorchAttention, _stacks
from minispec.runner import Segment, pack

SLOTS, POSITIONS = 4096, 700


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [Q, Hq, D] at the last Q of L positions, k and v [L, Hkv, D] -> [Q, Hq, D], in float64, one head at a time."""
    (Q, Hq, D), L = q.shape, len(k)
    out = torch.empty(Q, Hq, D, dtype=torch.float64)
    for head in range(Hq):
        keys, values = (x[:, head * k.shape[1] // Hq].double() for x in (k, v))
        scores = q[:, head].double() @ keys.T / D**0.5
        scores.masked_fill_(torch.arange(L) > torch.arange(L - Q, L)[:, None], -torch.inf)
        out[:, head] = scores.softmax(-1) @ values
    return out


def random_table(rows: int, seed: int) -> np.ndarray:
    """A slot table in which no slot is used twice; positions past a row's end hold other rows' slots, as in life."""
    return np.random.default_rng(seed).permutation(SLOTS)[: rows * (SLOTS // rows)].reshape(rows, -1)[:, :POSITIONS]


@pytest.mark.parametrize("heads", [(9, 3, 16), (4, 4, 8), (8, 1, 16)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_any_mix_of_rows_equals_the_textbook(heads, dtype, tolerance):
    Hq, Hkv, D = heads
    generator = torch.Generator().manual_seed(1)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        q_lens = rng.choice([1, 1, 1, 2, 5, 5, 33, STACK_MAX_Q + 9], size=6)
        starts = rng.choice([0, 1, 7, 60, 250], size=6)
        table = random_table(6, seed)
        segments = [Segment(r, int(s), [0] * int(n), 0) for r, (s, n) in enumerate(zip(starts, q_lens, strict=True))]
        layout = pack(segments, table)
        k_cache, v_cache = (torch.randn(SLOTS, Hkv, D, generator=generator).to(dtype) for _ in range(2))
        q = torch.randn(q_lens.sum(), Hq, D, generator=generator).to(dtype)
        k, v = (torch.randn(q_lens.sum(), Hkv, D, generator=generator).to(dtype) for _ in range(2))
        attention = TorchAttention(Hq, Hkv, dtype=dtype, device="cpu")
        out = attention.run(attention.plan(layout, table), k_cache, v_cache, q, k, v)
        first = 0
        for segment, n in zip(segments, q_lens, strict=True):
            rows, slots = slice(first, first + n), table[segment.table_row, : segment.start + n]
            assert torch.equal(k_cache[slots[segment.start :]], k[rows])  # written where the table says
            expected = textbook(q[rows], k_cache[slots], v_cache[slots])
            assert (out[rows].double() - expected).abs().max() < tolerance
            first += n


def test_numbers_in_slots_of_others_never_reach_a_row():
    table = random_table(3, 0)
    layout = pack([Segment(0, 5, [0], 0), Segment(1, 60, [0], 0), Segment(2, 2, [0], 0)], table)
    k_cache, v_cache = (torch.full((SLOTS, 2, 8), float("nan")) for _ in range(2))
    for row, end in ((0, 5), (1, 60), (2, 2)):
        k_cache[table[row, :end]] = v_cache[table[row, :end]] = 1.0
    attention = TorchAttention(4, 2, dtype=torch.float32, device="cpu")
    plan = attention.plan(layout, table)
    assert len(plan.groups) == 1  # the short rows are padded to the long one
    x = torch.ones(3, 2, 8)
    assert torch.isfinite(attention.run(plan, k_cache, v_cache, torch.ones(3, 4, 8), x, x)).all()


def test_a_lone_row_with_consecutive_slots_is_read_in_place():
    table = np.arange(100).reshape(1, -1)
    attention = TorchAttention(4, 2, dtype=torch.float32, device="cpu")
    assert attention.plan(pack([Segment(0, 9, [0, 0], 0)], table), table).groups[0].slots == slice(0, 11)
    table[0, 4] = 77
    assert isinstance(attention.plan(pack([Segment(0, 9, [0, 0], 0)], table), table).groups[0].slots, torch.Tensor)


def test_stacks_hold_every_row_once_and_waste_little():
    rng = np.random.default_rng(0)
    for _ in range(50):
        q_lens = rng.choice([1, 4, 5, STACK_MAX_Q + 1], size=rng.integers(1, 30))
        kv_lens = q_lens + rng.choice([0, 10, 500, 3000], size=len(q_lens))
        stacks = _stacks(q_lens, kv_lens)
        assert sorted(np.concatenate(stacks).tolist()) == list(range(len(q_lens)))
        for rows in stacks:
            assert len(set(q_lens[rows])) == 1
            assert len(rows) == 1 or kv_lens[rows].max() <= PADDING_LIMIT * kv_lens[rows].min() + 64
        decode = [rows for rows in stacks if q_lens[rows[0]] == 1]
        assert len(decode) <= 4
