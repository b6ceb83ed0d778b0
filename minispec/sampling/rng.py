"""Random numbers that depend only on what they are for: (seed, position, purpose), never on what ran before.

A counter-based generator has no state: it encrypts a counter with a key. The key is the request's seed, the counter
is the place where the number is used. So a seeded request draws the same numbers alone, in a batch, with a chunked
prompt or after a preemption, and no stream has to be saved, restored or skipped.

    position   index, in prompt + output, of the token that is being chosen
    purpose    what the number decides there; one position may need a draft, a test and a choice
    branch     which of several at the same position, where drafts are a tree; 0 in a chain

Knows: Philox and how its bits become a float. Does not know: requests, distributions, devices.
Taught in notebook 11 (lossless).
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Purpose(enum.IntEnum):
    """What a random number decides. Numbers of different purposes are independent."""

    SAMPLE = 0  # choose a token from p, or from the residual after a rejection
    ACCEPT = 1  # keep or reject a draft token
    DRAFT = 2  # draw a draft token from q
    CHILD_SEED = 3  # give each of the n completions of a prompt its own seed


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox-4x32-10: [4, R] counter words and [2, R] key words -> [4, R] random words, each a uint64 below 2**32.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC'11), section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _LOW, (left >> _32) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def _random_words(seeds: ArrayLike, positions: ArrayLike, purpose: Purpose, branches: ArrayLike = 0) -> np.ndarray:
    """[4, R] random words for R seeds, positions and branches (each may be one number)."""
    arrays = (np.asarray(numbers, np.uint64) for numbers in (seeds, positions, branches))
    seed, position, branch = np.broadcast_arrays(*arrays)
    words = np.full_like(position, int(purpose)), branch
    counter = np.stack((position & _LOW, position >> _32, *words))
    return philox4x32(counter, np.stack((seed & _LOW, seed >> _32)))


def _unit_interval(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two 32-bit words -> float64 in [0, 1): their top 53 bits, in steps of 2**-53.

    The largest value is 1 - 2**-53, so u * total < total for every float64 total > 0. As a float32 it would be 1.
    """
    return (((high << _32) | low) >> np.uint64(11)) * 2.0**-53


def uniforms(seeds: ArrayLike, positions: ArrayLike, purpose: Purpose, branches: ArrayLike = 0) -> np.ndarray:
    """float64 [R] uniform in [0, 1), one for each seed [R], position [R] and branch [R] (not negative).

    Seeds and positions are below 2**64, branches below 2**32: what tells drafts of a tree apart at one position.
    """
    words = _random_words(seeds, positions, purpose, branches)
    return _unit_interval(words[0], words[1])


def child_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a prompt asked for n times; the first keeps `seed` itself. 0 <= result < 2**63."""
    if index == 0:
        return seed
    words = _random_words(seed, index, Purpose.CHILD_SEED)
    return int(((words[0] << _32) | words[1]) >> np.uint64(1))
