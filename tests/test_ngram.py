"""The n-gram drafter proposes exactly what its rule says, at a cost that grows with new tokens only."""

from __future__ import annotations

import random

import pytest

from minispec.config import ConfigError, SamplingParams
from minispec.core import Request
from minispec.speculative.ngram import NgramDrafter


def request_of(tokens: list[int]) -> Request:
    return Request(id="r", prompt=list(tokens), params=SamplingParams(), seed=0, max_len=4096)


def propose(tokens: list[int], k: int, ngram_max: int = 4, ngram_min: int = 2) -> list[int]:
    proposal = NgramDrafter(ngram_max, ngram_min).propose([request_of(tokens)], [k])
    assert proposal.q is None
    return proposal.tokens[0]


def rule(tokens: list[int], k: int, ngram_max: int, ngram_min: int) -> list[int]:
    """The rule again, by search from the back."""
    for n in range(min(ngram_max, len(tokens) - 1), ngram_min - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


def test_proposes_what_followed_the_suffix_and_never_matches_it_with_itself():
    assert propose([1, 2, 3, 9, 1, 2], 3, 2, 2) == [3, 9, 1]
    assert propose([5, 6, 1, 2], 3, 2, 2) == []


def test_of_several_occurrences_the_latest_wins():
    assert propose([1, 2, 7, 1, 2, 8, 1, 2], 3) == [8, 1, 2]


def test_the_longest_suffix_wins_even_if_a_shorter_one_occurred_later():
    assert propose([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, 3, 2) == [4]
    assert propose([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, 2, 2) == [5]
    assert propose([6, 1, 2, 3, 4, 8, 1, 2, 3], 1, 2, 1) == [4]


def test_no_match_gives_no_draft_and_no_dummy_token():
    assert propose([1, 2, 3, 4, 5], 4) == []
    assert propose([0], 4) == []
    assert propose([3, 3], 4) == []  # shorter than ngram_min + 1: the only 3 3 is the suffix
    assert propose([3, 3], 4, 2, 1) == [3, 3, 3, 3]


def test_a_suffix_shorter_than_ngram_min_does_not_count():
    assert propose([1, 2, 9, 2], 3, 4, 2) == []
    assert propose([1, 2, 9, 2], 3, 4, 1) == [9, 2, 9]


def test_a_period_goes_on_past_the_end_of_the_text():
    assert propose([1, 2, 3, 1, 2, 3, 1, 2, 3], 7, 3, 2) == [1, 2, 3, 1, 2, 3, 1]
    assert propose([4, 4, 4], 5) == [4, 4, 4, 4, 4]


@pytest.mark.parametrize("k", [0, 1, 2, 9])
def test_the_proposal_is_never_longer_than_asked(k):
    assert propose([1, 2, 7, 1, 2], k) == [7, 1, 2, 7, 1, 2, 7, 1, 2][:k]


def test_the_index_grown_token_by_token_equals_the_rule():
    rng = random.Random(0)
    for trial in range(40):
        ngram_max = rng.randint(1, 5)
        ngram_min = rng.randint(1, ngram_max)
        drafter = NgramDrafter(ngram_max, ngram_min)
        requests = [request_of([rng.randrange(3) for _ in range(rng.randint(1, 8))]) for _ in range(3)]
        for _ in range(25):
            asked = [rng.randint(0, 6) for _ in requests]
            expected = [rule(r.tokens, k, ngram_max, ngram_min) for r, k in zip(requests, asked, strict=True)]
            assert drafter.propose(requests, asked).tokens == expected, trial
            for request in requests:
                request.tokens += [rng.randrange(3) for _ in range(rng.randint(0, 4))]


def test_requests_do_not_see_each_others_text():
    drafter = NgramDrafter()
    repetitive, fresh = request_of([1, 2, 3, 1, 2]), request_of([7, 1, 2])
    assert drafter.propose([repetitive, fresh], [2, 2]).tokens == [[3, 1], []]


def test_release_forgets_and_a_returning_request_gets_the_same_draft():
    drafter = NgramDrafter()
    request = request_of([1, 2, 3, 1, 2])
    before = drafter.propose([request], [3]).tokens
    drafter.release(request)
    assert not drafter._indexes
    drafter.release(request)  # twice, or never seen: no error
    assert drafter.propose([request], [3]).tokens == before


class CountingList(list):
    """Counts the slices taken of it: one per n-gram read."""

    slices = 0

    def __getitem__(self, key):
        self.slices += isinstance(key, slice)
        return super().__getitem__(key)


def test_work_per_new_token_does_not_grow_with_the_text():
    drafter = NgramDrafter(4, 2)
    request = request_of([])
    request.tokens = CountingList(range(2000))
    drafter.propose([request], [4])
    request.tokens.slices = 0
    request.tokens.append(5)
    drafter.propose([request], [4])
    assert request.tokens.slices <= 2 * 3  # three lengths stored, three looked up


@pytest.mark.parametrize(("ngram_max", "ngram_min"), [(2, 3), (0, 0), (4, 0)])
def test_impossible_lengths_are_refused(ngram_max, ngram_min):
    with pytest.raises(ConfigError):
        NgramDrafter(ngram_max, ngram_min)
