"""Random numbers are right (known answers), uniform, independent, and depend on nothing but their key."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minispec.sampling.rng import Purpose, _unit_interval, child_seed, philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    got = philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert tuple(got[:, 0].tolist()) == words


def test_philox_computes_many_counters_at_once_like_one_by_one():
    counters = np.arange(4 * 7, dtype=np.uint64).reshape(4, 7) * np.uint64(0x9E3779B)
    keys = np.arange(2 * 7, dtype=np.uint64).reshape(2, 7)
    single = [philox4x32(counters[:, i : i + 1], keys[:, i : i + 1])[:, 0] for i in range(7)]
    assert np.array_equal(philox4x32(counters, keys), np.stack(single, axis=1))


def test_largest_number_is_below_one_and_scales_below_any_total():
    ones, zero = np.array([ONES], np.uint64), np.array([0], np.uint64)
    largest = _unit_interval(ones, ones)[0]
    assert largest == 1 - 2.0**-53
    assert _unit_interval(zero, zero)[0] == 0
    assert _unit_interval(zero, np.array([2048], np.uint64))[0] == 2.0**-53  # 53 bits, not 32
    totals = np.concatenate(
        [np.float32(1) + np.arange(-50, 50, dtype=np.float32) * np.float32(2**-24), 2.0 ** np.arange(50)]
    )
    assert (largest * totals.astype(np.float64) < totals).all()


def test_a_number_depends_only_on_seed_position_and_purpose():
    seeds, positions = [7, 7, 2**40 + 7, 8], [0, 1, 0, 2**33]
    batch = uniforms(seeds, positions, Purpose.ACCEPT)
    alone = [uniforms([s], [p], Purpose.ACCEPT)[0] for s, p in zip(seeds, positions, strict=True)]
    assert batch.dtype == np.float64 and batch.tolist() == alone


def test_every_bit_of_the_key_counts():
    # The high words of seed and position too: a request beyond 2**32 must not repeat the numbers of another.
    keys = [(0, 0), (1, 0), (2**32, 0), (2**62, 0), (0, 1), (0, 2**32)]
    values = {uniforms([s], [p], purpose)[0] for s, p in keys for purpose in Purpose}
    assert len(values) == len(keys) * len(Purpose)


def chi_square_is_plausible(counts: np.ndarray) -> bool:
    """False if equal cells give such counts less than once in 10,000 times, far too uneven or far too even."""
    expected = counts.sum() / counts.size
    statistic, df = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    # Wilson and Hilferty 1931: the cube root of chi-square / df is nearly normal.
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return abs(z) < 3.9


N = 40_000
STREAMS = {
    "positions of one seed": lambda purpose: uniforms(3, np.arange(N), purpose),
    "seeds at one position": lambda purpose: uniforms(np.arange(N), 17, purpose),
    "child seeds": lambda purpose: uniforms([child_seed(5, i) for i in range(2000)], 0, purpose),
}


@pytest.mark.parametrize("purpose", [Purpose.SAMPLE, Purpose.ACCEPT, Purpose.DRAFT])
@pytest.mark.parametrize("stream", STREAMS)
def test_numbers_are_uniform(stream, purpose):
    u = STREAMS[stream](purpose)
    assert u.min() >= 0 and u.max() < 1
    assert chi_square_is_plausible(np.histogram(u, bins=64, range=(0, 1))[0])


ARANGE = np.arange(N, dtype=np.uint64)
PAIRS = {
    "two purposes": (uniforms(3, ARANGE, Purpose.SAMPLE), uniforms(3, ARANGE, Purpose.ACCEPT)),
    "draft and accept": (uniforms(3, ARANGE, Purpose.DRAFT), uniforms(3, ARANGE, Purpose.ACCEPT)),
    "next position": (uniforms(3, ARANGE, Purpose.SAMPLE), uniforms(3, ARANGE + 1, Purpose.SAMPLE)),
    "next seed": (uniforms(3, ARANGE, Purpose.SAMPLE), uniforms(4, ARANGE, Purpose.SAMPLE)),
    "seed and position swapped": (uniforms(ARANGE, 9, Purpose.SAMPLE), uniforms(9, ARANGE, Purpose.SAMPLE)),
    "parent and child": (uniforms(3, ARANGE, Purpose.SAMPLE), uniforms(child_seed(3, 1), ARANGE, Purpose.SAMPLE)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_numbers_with_different_keys_are_independent(pair):
    counts = np.histogram2d(*PAIRS[pair], bins=16, range=((0, 1), (0, 1)))[0]
    assert chi_square_is_plausible(counts)


def test_child_seeds_differ_are_valid_seeds_and_the_first_is_the_parent():
    children = [child_seed(parent, i) for parent in (0, 7, 2**63 - 1) for i in range(1024)]
    assert len(set(children)) == len(children)
    assert all(0 <= seed < 2**63 for seed in children)
    assert [child_seed(parent, 0) for parent in (0, 7)] == [0, 7]
