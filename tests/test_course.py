"""The course's own tools: checkers that never raise, real source, pictures made of true numbers, re-execution."""

from __future__ import annotations

import collections
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from nbclient.exceptions import CellExecutionError

import minispec
from minispec import course
from minispec.config import SamplingParams
from minispec.core import TokenKind
from minispec.course import check, figures, run_notebooks
from minispec.course.check import Case, judge
from minispec.device import VirtualDevice
from minispec.engine import Engine
from minispec.kv.pool import OutOfPages, PageAllocator
from minispec.kv.radix import RadixTree
from minispec.metrics import MetricsRow
from minispec.runner import ModelRunner
from minispec.sampling.distribution import sample
from minispec.speculative import controller as rules
from minispec.speculative.drafter import Proposal
from minispec.trace import DEVICE, Event, Trace

PACKAGE = Path(minispec.__file__).parent


@pytest.fixture
def said(capsys):
    """What the last calls printed, one string per line."""
    return lambda: capsys.readouterr().out.splitlines()


# Checkers ----------------------------------------------------------------------------------------------------------


def todo(*_):
    raise NotImplementedError


def bad_repr():
    class Bad:
        def __repr__(self):
            raise RuntimeError("no repr")

    return Bad()


@pytest.mark.parametrize("answer", [todo, lambda n: None, lambda n: ..., None, ..., "", " \n"])
def test_an_unanswered_exercise_is_not_done_yet(said, answer) -> None:
    judge("exercise 1", answer, [Case((1,), 1)])
    assert said() == ["exercise 1: not done yet"]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: 1,
        lambda n: 1 / 0,
        lambda n: n.nothing,
        lambda n: np.arange(3),
        lambda n: bad_repr(),
        "word",
        [1, 2],
        bad_repr(),
    ],
)
def test_a_checker_never_raises_whatever_the_answer_is(said, answer) -> None:
    judge("exercise 1", answer, [Case((1,), 1)])
    [line] = said()
    assert line.endswith(", expected 1") and (" gives " in line or " raises " in line)


def test_the_smallest_failing_case_is_named(said) -> None:
    def double(n):
        return n + n if n < 3 else n

    judge("exercise 1", double, [Case((n,), 2 * n) for n in (1, 2, 3, 4)])
    assert said() == ["exercise 1: double(3) gives 3, expected 6"]


def test_an_exception_is_reported_with_its_message(said) -> None:
    def f(n):
        raise ValueError("no such n")

    judge("exercise 1", f, [Case((2,), 1, "two")])
    assert said() == ["exercise 1: f(two) raises ValueError (no such n), expected 1"]


@pytest.mark.parametrize("got", [0.3, 0.1 + 0.2, np.float64(0.3), torch.tensor(0.3, dtype=torch.float64)])
def test_numbers_of_any_kind_count_as_right(said, got) -> None:
    judge("exercise 1", lambda: got, [Case((), 0.3)])
    judge("exercise 1", got, [Case((), 0.3)])
    assert said() == ["exercise 1: ok (1 case)"] * 2


@pytest.mark.parametrize("got", [(1, 2), [1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_lists_of_any_kind_count_as_right(said, got) -> None:
    judge("exercise 1", lambda: got, [Case((), [1, 2])])
    judge("exercise 1", lambda: [got, got], [Case((), [[1, 2], [1, 2]])])
    assert said() == ["exercise 1: ok (1 case)"] * 2


def test_numbers_in_lists_may_be_rounded_as_single_ones(said) -> None:
    judge("exercise 1", lambda: torch.tensor([[0.1, 2 / 3]]), [Case((), [[0.1, 2 / 3]])])
    assert said() == ["exercise 1: ok (1 case)"]


@pytest.mark.parametrize("got", [0.31, math.nan, [0.3], "0.3"])
def test_what_is_near_or_alike_is_not_right(said, got) -> None:
    judge("exercise 1", lambda: got, [Case((), 0.3)])
    judge("exercise 1", lambda: [[got]], [Case((), [[0.3]])])
    assert all("expected" in line for line in said())


@pytest.mark.parametrize("got", [[], [1], [1, 2, 3], [2, 1], "12", 12])
def test_a_list_of_other_length_or_order_is_not_right(said, got) -> None:
    judge("exercise 1", lambda: got, [Case((), [1, 2])])
    assert "expected [1, 2]" in said()[0]


def test_an_answer_that_changes_its_arguments_cannot_spoil_the_next_case(said) -> None:
    shared = [1, 2, 3]

    def last(items):
        return items.pop()

    judge("exercise 1", last, [Case((shared,), 3), Case((shared,), 3)])
    assert said() == ["exercise 1: ok (2 cases)"] and shared == [1, 2, 3]


EXERCISES = [getattr(check, name) for name in sorted(vars(check)) if re.fullmatch(r"nb\d\d_ex\d", name)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda f: f.__name__)
def test_every_exercise_starts_as_not_done_and_survives_nonsense(said, exercise) -> None:
    answers = exercise.__code__.co_argcount
    exercise(*[todo] * answers)
    assert {line.split(": ")[1] for line in said()} == {"not done yet"}
    exercise(*[lambda *_: "nonsense"] * answers)
    assert all("expected" in line for line in said())


def test_the_sizes_that_exercises_use_are_the_embedded_models(smollm2_path) -> None:
    from minispec.models.loading import read_config

    config = read_config(smollm2_path)
    names = [
        name for name in vars(check.SMOLLM2) if name.startswith(("num_", "vocab", "hidden", "interm", "head", "tie"))
    ]
    assert len(names) == 9 and [vars(config)[n] for n in names] == [vars(check.SMOLLM2)[n] for n in names]
    assert check.SMOLLM2.num_parameters == 134_515_008


def wrong_stop_in_prompt(next_token, prompt, max_tokens, stop_ids):
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and tokens[-1] not in stop_ids:
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def wrong_drops_the_stop_token(next_token, prompt, max_tokens, stop_ids):
    output = []
    while len(output) < max_tokens and (token := next_token(prompt + output)) not in stop_ids:
        output.append(token)
    return output


def wrong_forgets_the_limit(next_token, prompt, max_tokens, stop_ids):
    output = []
    while len(output) <= max_tokens and not (output and output[-1] in stop_ids):
        output.append(next_token(prompt + output))
    return output


@pytest.mark.parametrize("wrong", [wrong_stop_in_prompt, wrong_drops_the_stop_token, wrong_forgets_the_limit])
def test_the_stopping_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb01_ex2(wrong)
    assert "gives" in said()[0]


def test_counting_exercises_find_the_usual_mistakes(said) -> None:
    check.nb00_ex1(lambda c: c.num_parameters + c.vocab_size * c.hidden_size)  # the tied head counted twice
    check.nb00_ex2(lambda n, size, rate: rate / n / size)  # GB taken for bytes
    check.nb01_ex1(lambda p, n: n * (2 * p + n + 1) // 2)  # one row too many per forward
    check.nb02_ex1(lambda c, size: 2 * c.num_layers * c.num_heads * c.head_dim * size)  # query heads
    check.nb02_ex2(lambda m, c, size: m / (2 * c.num_layers * c.num_kv_heads * c.head_dim * size), 9)  # not rounded
    lines = said()
    assert len(lines) == 6 and all("expected" in line for line in lines)


def prefix(drafts, chosen):
    """The drafts that stay."""
    differ = [d != c for d, c in zip(drafts, chosen, strict=False)]
    return drafts[: differ.index(True) if True in differ else len(drafts)]


def cut(tokens, eos):
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def kept_anywhere(drafts, chosen, eos):
    """Takes every place where draft and choice agree for kept, also behind the first difference."""
    kept = [d for d, c in zip(drafts, chosen, strict=False) if d == c]
    return cut([*kept, chosen[len(kept)]], eos)


VERIFY_MISTAKES = {
    "no token of the target's own": lambda d, c, eos: cut(prefix(d, c), eos) if d else [c[0]],
    "no correction, only a bonus": lambda d, c, eos: cut(prefix(d, c) + c[-1:] * (prefix(d, c) == d), eos),
    "always the last choice": lambda d, c, eos: cut([*prefix(d, c), c[-1]], eos),
    "goes on after the end": lambda d, c, eos: [*prefix(d, c), c[len(prefix(d, c))]],
    "drops the end token": lambda d, c, eos: [t for t in cut([*prefix(d, c), c[len(prefix(d, c))]], eos) if t != eos],
    "kept behind a difference": kept_anywhere,
}


@pytest.mark.parametrize("mistake", VERIFY_MISTAKES)
def test_the_verification_exercise_finds_the_usual_mistakes(said, mistake) -> None:
    check.nb09_ex2(VERIFY_MISTAKES[mistake])
    assert "gives" in said()[0]


def test_the_formula_exercise_finds_the_usual_mistakes(said) -> None:
    check.nb09_ex1(lambda a, k: (1 - a ** (k + 1)) / (1 - a))  # divides by zero where a = 1
    check.nb09_ex1(lambda a, k: k + 1 if a == 1 else (1 - a**k) / (1 - a))  # the target's own token forgotten
    check.nb09_ex1(lambda a, k: 1 + a * k)  # guesses as if none depended on another
    assert all("expected" in line for line in said())


def test_chi_square_is_the_tail_of_the_distribution() -> None:
    even = torch.tensor([0.5, 0.5])
    assert math.isclose(check.chi_square(torch.tensor([60, 40]), even), 0.0455, abs_tol=1e-4)  # 2 standard deviations
    assert check.chi_square(torch.tensor([50, 50]), even) == 1
    thirds = torch.tensor([1, 1, 1]) / 3
    assert math.isclose(check.chi_square(torch.tensor([10, 20, 30]), thirds), math.exp(-5), rel_tol=1e-5)  # 10 / 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, q: (p - q).abs() / (p - q).abs().sum(-1, keepdim=True).clamp(min=1e-9),
        lambda p, q: (p - q).clamp(min=0),  # does not sum to 1
        lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(-1, keepdim=True),  # 0 / 0 where p = q
        lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum().clamp(min=1e-9),  # the sum over all rows
        lambda p, q: p,
    ],
)
def test_the_residual_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb11_ex1(wrong)
    assert "expected" in said()[0]


def of(p, x):
    return p[torch.arange(len(x)), x]


def exact(p, q, x, u_accept, u_sample):
    rest = (p - q).clamp(min=0)
    return torch.where(u_accept * of(q, x) < of(p, x), x, sample(rest / rest.sum(-1, keepdim=True), u_sample))


def if_likeliest(p, q, x, u_accept, u_sample):
    return torch.where(x == p.argmax(-1), x, sample(p, u_sample))


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (lambda p, q, x, u, v: torch.where(u * of(q, x) < of(p, x), x, sample(p, v)), "'not p'"),  # p again
        (lambda p, q, x, u, v: torch.where(of(q, x) <= of(p, x), x, sample(p, v)), "'too few drafts kept'"),
        (lambda p, q, x, u, v: x, "'not p'"),
        (lambda p, q, x, u, v: sample(p, v), "'too few drafts kept'"),  # exact, but what are the drafts for
        (lambda p, q, x, u, v: x[:3], "raises"),
    ],
)
def test_the_sampling_exercise_tells_exact_rules_from_wrong_ones(said, wrong, verdict) -> None:
    check.nb11_ex2(if_likeliest, exact)
    assert said() == ["exercise 2, shortcut: ok (1 case)", "exercise 2, speculate: ok (1 case)"]
    check.nb11_ex2(exact, wrong)
    shortcut, speculate = said()
    assert "exact(20,000 draws) gives 'p', expected 'not p'" in shortcut
    assert verdict in speculate and speculate.endswith("expected 'p'")


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (lambda e, h: (e[:-1], h), "'agreement 0.10'"),  # a token with its own hidden state
        (lambda e, h: (e[2:], h[:-1]), "'agreement 0.10'"),  # a state too old
        (lambda e, h: (e, h), "'agreement 0.10'"),
        (lambda e, h: e, "raises"),
    ],
)
def test_the_pairing_exercise_reports_what_was_measured(said, wrong, verdict) -> None:
    def agreement(pair):
        embedded, hidden = pair(torch.arange(5), torch.arange(4))
        return 0.5 if torch.equal(embedded, hidden + 1) else 0.1

    check.nb10_ex1(lambda embedded, hidden: (embedded[1:], hidden), agreement)
    check.nb10_ex1(wrong, agreement)
    right, line = said()
    assert right == "exercise 1: ok (1 case)" and verdict in line and line.endswith("expected 'above 0.3'")


def test_the_table_exercise_finds_the_usual_mistakes(said) -> None:
    def share(trace, j, offered):
        return sum(accepted >= j for _, accepted in trace) / max(1, offered)

    def longest(trace):
        return max(drafted for drafted, _ in trace)

    check.nb10_ex2(lambda t: [share(t, j, len(t)) for j in range(1, longest(t) + 1)])  # drafts may be short
    check.nb10_ex2(lambda t: [share(t, j, sum(a >= j - 1 for _, a in t)) for j in range(1, longest(t) + 1)])
    check.nb10_ex2(lambda t: [share(t, j, sum(d >= j for d, _ in t)) for j in range(longest(t))])  # from depth 0
    assert all("expected" in line for line in said())


def pages_for(tokens, page_size):
    return -(-tokens // page_size)


def split(pages, count):
    return pages[:count], pages[count:]


REWIND_MISTAKES = {
    "kv_len counts the pending token": lambda p, s, t, k: (t + k + 1, *split(p, pages_for(t + k + 1, s))),
    "no slot for the pending token": lambda p, s, t, k: (t + k, *split(p, pages_for(t + k, s))),
    "only full pages": lambda p, s, t, k: (t + k, *split(p, (t + k + 1) // s)),
    "the kept guesses forgotten": lambda p, s, t, k: (t, *split(p, pages_for(t + 1, s))),
    "pages lost": lambda p, s, t, k: (t + k, p[: pages_for(t + k + 1, s)], []),
    "a page in both": lambda p, s, t, k: (t + k, p[: pages_for(t + k + 1, s)], p[(t + k + 1) // s :]),
}


@pytest.mark.parametrize("mistake", REWIND_MISTAKES)
def test_the_rewind_exercise_finds_the_usual_mistakes(said, mistake) -> None:
    check.nb12_ex1(lambda p, s, t, k: (t + k, *split(p, pages_for(t + k + 1, s))))
    check.nb12_ex1(REWIND_MISTAKES[mistake])
    right, wrong = said()
    assert right == "exercise 1: ok (200 cases)" and "gives" in wrong


def test_rows_are_spent_on_guesses_and_on_each_forward() -> None:
    S = check.SHARED_ROWS
    assert check.rows_spent([True] * 6, lambda history: 2) == 2 * (S + 3)
    assert check.rows_spent([False] * 3, lambda history: 2) == 3 * (S + 3)
    assert check.rows_spent([True, False, True], lambda history: 0) == 3 * (S + 1)
    seen = []
    check.rows_spent([True, False, True, True, True, True], lambda history: seen.append(history) or 9)
    assert seen == [[], [(4, 1)]]  # the forward's own token takes the place of the wrong one


def adaptive(history, probe_after=12):
    recent = [kept / guesses for guesses, kept in history[-probe_after:] if guesses][-3:]
    return 1 if not recent else 4 * (sum(recent) / len(recent) > 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda history, k=k: k for k in range(5)),  # no fixed number
        lambda history: 4 if not history or history[-1][1] else 0,  # never tries again
        lambda history: 1 + 3 * bool(history and history[-1][1]),  # never stops
        lambda history: adaptive(history, probe_after=200),  # notices too late
    ],
)
def test_the_adaptive_exercise_wants_all_three_texts(said, wrong) -> None:
    check.nb12_ex2(adaptive)
    check.nb12_ex2(wrong)
    right, line = said()
    assert right == "exercise 2: ok (3 cases)" and "times the best" in line


def test_the_training_exercises_find_the_usual_mistakes(said) -> None:
    def numbers(c, norms=5, width=2, mlp=3):
        H, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return width * H * H + 2 * H * q + 2 * H * kv + mlp * H * c.intermediate_size + norms * H

    assert numbers(check.SMOLLM2) == 4_205_376
    check.nb14_ex1(numbers)
    for wrong in ({"norms": 4}, {"norms": 3}, {"width": 1}, {"mlp": 2}):
        check.nb14_ex1(lambda c, wrong=wrong: numbers(c, **wrong))
    check.nb14_ex2(lambda m, e, h: (m(e[1:], h[:-1]), m(e[2:], m(e[1:], h[:-1])[:-1])))
    check.nb14_ex2(lambda m, e, h: (m(e[1:], h[:-1]), m(e[2:], h[:-2])))  # the target's state again
    check.nb14_ex2(lambda m, e, h: (m(e[1:], h[:-1]), m(e[1:-1], m(e[1:], h[:-1])[:-1])))  # the token before
    check.nb14_ex2(lambda m, e, h: (m(e, h), m(e[1:], m(e, h)[:-1])))  # no shift
    lines = said()
    assert [line for line in lines if "ok" in line] == ["exercise 1: ok (3 cases)", "exercise 2: ok (3 cases)"]
    assert len(lines) == 9 and sum("expected" in line for line in lines) == 7


# Exercises of notebooks 03 to 05 --------------------------------------------------------------------------------------


class QueueOfPages:
    """A right answer to exercise 2 of notebook 03; each subclass makes one mistake."""

    def __init__(self, num_pages):
        self.pages = list(range(num_pages))

    def alloc(self, n):
        if n > len(self.pages):
            raise OutOfPages(n, len(self.pages))
        taken, self.pages = self.pages[:n], self.pages[n:]
        return taken

    def free(self, pages):
        assert not set(pages) & set(self.pages)
        self.pages += pages


class TakesAnyNumber(QueueOfPages):
    says = "free works"

    def alloc(self, n):
        taken, self.pages = self.pages[:n], self.pages[n:]
        return taken


class TakesSomeBeforeItRefuses(QueueOfPages):
    says = "raises OutOfPages"

    def alloc(self, n):
        taken = [self.pages.pop(0) for _ in range(min(n, len(self.pages)))]
        if len(taken) < n:
            raise OutOfPages(n, len(taken))
        return taken


class NeverTakesBack(QueueOfPages):
    says = "can be freed twice"

    def free(self, pages):
        assert not set(pages) & set(self.pages)


class TakesBackTwice(QueueOfPages):
    says = "can be freed twice"

    def free(self, pages):
        self.pages += pages


class KeepsWhatItGives(QueueOfPages):
    says = "gives 0 pages"

    def alloc(self, n):
        super().alloc(n)
        return self.pages[:n]


class GivesOneLess(QueueOfPages):
    says = "pages'"

    def alloc(self, n):
        return super().alloc(n)[1:]


class AlwaysGivesTheFirst(QueueOfPages):
    says = "was taken"

    def alloc(self, n):
        return list(range(len(super().alloc(n))))


class GivesOnePageSeveralTimes(QueueOfPages):
    says = "was taken"

    def alloc(self, n):
        return super().alloc(n)[:1] * n


class CountsFromOne(QueueOfPages):
    says = "there is no page"

    def __init__(self, num_pages):
        self.pages = list(range(1, num_pages + 1))


@pytest.mark.parametrize("right", [QueueOfPages, PageAllocator])
def test_right_allocators_are_found_right(said, right) -> None:
    check.nb03_ex2(right)
    assert said() == ["exercise 2: ok (4 cases)"]


@pytest.mark.parametrize("wrong", QueueOfPages.__subclasses__())
def test_the_allocator_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb03_ex2(wrong)
    [line] = said()
    assert line.startswith(f"exercise 2: {wrong.__name__}(") and line.endswith("expected 'no fault'")
    assert wrong.says in line


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lengths, size: -sum(lengths) % size,  # as if all shared their last page
        lambda lengths, size: sum(size - n % size for n in lengths),  # a full page counts as an empty one
        lambda lengths, size: sum(n % size for n in lengths),  # the used part of the last page
    ],
)
def test_the_waste_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb03_ex1(lambda lengths, size: sum(-n % size for n in lengths))
    check.nb03_ex1(wrong)
    right, line = said()
    assert right == "exercise 1: ok (16 cases)" and "gives" in line


def batches(outputs, seats):
    return [outputs[i : i + seats] for i in range(0, len(outputs), seats)]


def earliest_seat(outputs, seats, last=max):
    free_at = [0] * seats
    for length in outputs:
        free_at[free_at.index(min(free_at))] += length
    return last(free_at)


def test_the_makespan_exercise_finds_the_usual_mistakes(said) -> None:
    def static(outputs, seats):
        return sum(map(max, batches(outputs, seats)))

    check.nb04_ex1(static, earliest_seat)
    assert said() == ["exercise 1, static: ok (14 cases)", "exercise 1, continuous: ok (14 cases)"]
    check.nb04_ex1(earliest_seat, static)
    check.nb04_ex1(lambda o, s: max(o) * -(-len(o) // s), lambda o, s: max(max(o), -(-sum(o) // s)))
    check.nb04_ex1(lambda o, s: sum(o), lambda o, s: earliest_seat(sorted(o, reverse=True), s))
    check.nb04_ex1(lambda o, s: static(sorted(o), s), lambda o, s: earliest_seat(o, s, last=min))
    assert all("gives" in line for line in said())


def joins(decoding, waiting, budget, seats, *, whole=False, skip=False):
    budget, rows = budget - decoding, []
    for prompt in waiting[: seats - decoding]:
        if budget <= 0 or whole and prompt > budget:
            if skip:
                continue
            break
        rows.append(min(prompt, budget))
        budget -= rows[-1]
    return rows


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d, w, b, s: joins(d, w, b, s, whole=True),
        lambda d, w, b, s: joins(d, w, b, s, whole=True, skip=True),  # a short prompt overtakes a long one
        lambda d, w, b, s: joins(0, w, b, s - d),  # those who decode pay nothing
        lambda d, w, b, s: joins(d, w, b, s + d),  # and need no seat
        lambda d, w, b, s: joins(d, w, b, 99),
        lambda d, w, b, s: w[: s - d],
    ],
)
def test_the_admission_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb04_ex2(joins)
    check.nb04_ex2(wrong)
    right, line = said()
    assert right == "exercise 2: ok (20 cases)" and "gives" in line


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d, p, c, b: d + min(c, b - d),  # a prompt shorter than a chunk
        lambda d, p, c, b: d + min(p, c),  # no budget
        lambda d, p, c, b: min(d + min(p, c), b) if d else min(p, b),
        lambda d, p, c, b: min(p, c, b - d),
        lambda d, p, c, b: d + min(p, c, b),
    ],
)
def test_the_largest_forward_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb05_ex1(lambda d, p, c, b: d + min(p, c, b - d))
    check.nb05_ex1(wrong)
    right, line = said()
    assert right == "exercise 1: ok (9 cases)" and "gives" in line


def shares(unread, budget, chunk, *, decode_first=True, one_prompt=False):
    rows = [int(left == 0) if decode_first else 0 for left in unread]
    budget -= sum(rows)
    for place, left in enumerate(unread):
        if left or not decode_first:
            rows[place] = min(left or 1, chunk, budget)
            budget -= rows[place]
            budget *= not (one_prompt and left)
    return rows


@pytest.mark.parametrize(
    "wrong",
    [
        lambda u, b, c: shares(u, b, c, decode_first=False),
        lambda u, b, c: shares(u, b, c, one_prompt=True),
        lambda u, b, c: shares(u, b, 512),  # no chunks
        lambda u, b, c: shares(u, 512, c),  # no budget
        lambda u, b, c: shares(u, b + u.count(0), c),  # decode rows are free
        lambda u, b, c: [min(left or 1, c, b) for left in u],
    ],
)
def test_the_split_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb05_ex2(shares)
    check.nb05_ex2(wrong)
    right, line = said()
    assert right.startswith("exercise 2: ok (") and "gives" in line


# Source, guesses, the reference loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [Engine.step, ModelRunner.forward, check.Case, course.load])
def test_show_gives_the_real_source(thing) -> None:
    text = course.show(thing).data
    path = re.match(r"```python\n# (minispec/[\w/]+\.py)\n\n", text)[1]
    lines = text.split("\n")[3:-1]
    source = (PACKAGE.parent / path).read_text("utf-8")
    assert len(lines) > 2 and all(line in source for line in lines) and text.endswith("```")
    assert not lines[0].startswith(" ")


def test_a_guess_is_returned_and_judged(said) -> None:
    assert course.predict("forwards", default=45) == 45
    course.reveal(1000, 1000)
    course.reveal(45, 1038)
    assert said() == [
        "forwards?",
        "my guess: 45",
        "guess 1,000, measured 1,000: exactly right",
        "guess 45, measured 1,038: off by 993",
    ]


def test_setup_makes_random_numbers_repeat_and_says_only_device_and_dtype(said) -> None:
    course.setup(seed=3)
    first = torch.rand(2)
    course.setup(seed=3)
    assert torch.equal(first, torch.rand(2)) and 1 <= torch.get_num_threads() <= 2
    assert all(re.fullmatch(r"device: (cpu|cuda), dtype: float32", line) for line in said())


# Pictures ----------------------------------------------------------------------------------------------------------


def legend(picture: figures.Picture, panel: int = 0) -> list[str]:
    return [text.get_text() for text in picture.axes[panel].get_legend().get_texts()]


def test_the_work_picture_counts_each_row_once() -> None:
    runs = {"no cache": [(0, 3), (0, 4), (0, 5)], "KV cache": [(0, 3), (3, 4), (4, 5)]}
    picture = figures.work(runs, prompt_len=3)
    assert legend(picture, 0) == ["prompt, first time: 3", "output, first time: 2", "computed again: 7"]
    assert legend(picture, 1) == ["prompt, first time: 3", "output, first time: 2", "computed again: 0"]
    assert [ax.get_title() for ax in picture.axes] == ["no cache: 12 rows", "KV cache: 5 rows"]
    for ax in picture.axes:  # a cell lies around the number of its position and of its forward
        assert ax.get_xlim() == (-0.5, 4.5) and sorted(ax.get_ylim()) == [-0.5, 2.5]


DRAWINGS = [
    lambda: figures.roofline(20.0, 50.0, {"decode": (0.5, 8.0), "prefill": (20.0, 45.0)}),
    lambda: figures.bars("times", {"TTFT": {"a": 1.0, "b": 2.0}, "TPOT": {"a": 0.1, "b": 0.2}}, "ms"),
    lambda: figures.work({"one": [(0, 2)]}, 2),
    lambda: figures.forwards({"copy": [1, 5, 5], "story": [1]}, {1: 1.0, 5: 1.2}),
    lambda: figures.overlap([0.75, 0.25], [0.5, 0.5]),
    lambda: figures.heat_maps("best K", {"time": np.array([[1.0, 0.8], [1.0, 1.2]])}, (1, 8), (0, 3)),
    lambda: figures.budget({"a": [(1, 2), (1, 0)]}, limit=8),
    lambda: figures.trade("title", {"a": (1.0, 2.0), "b": (2.0, 3.0)}, "x", "y"),
    lambda: figures.controller(HISTORY),
]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_picture_is_a_png_that_names_itself_and_the_same_each_time(draw) -> None:
    picture = draw()
    png = picture._repr_png_()
    assert png[:4] == b"\x89PNG" and png == draw()._repr_png_() and repr(picture) == f"<picture: {picture.title}>"


def test_the_roof_bends_where_memory_and_arithmetic_meet() -> None:
    picture = figures.roofline(20.0, 50.0, {"decode": (0.5, 8.0), "prefill": (20.0, 45.0)})
    [ax] = picture.axes
    x, y = ax.lines[0].get_data()
    assert np.allclose(y, np.minimum(20 * x, 50)) and ax.lines[1].get_xdata()[0] == 2.5
    assert legend(picture) == ["decode", "prefill"]


def heights(ax) -> list[list[float]]:
    return [[bar.get_height() for bar in drawn] for drawn in ax.containers if hasattr(drawn, "patches")]


def test_the_forwards_picture_counts_forwards_by_their_tokens() -> None:
    picture = figures.forwards({"copy": [1, 3, 3], "story": [1, 1]}, {1: 1.0, 5: 1.2})
    left, right = picture.axes
    assert heights(left) == [[1, 0, 2], [2, 0, 0]] and legend(picture) == ["copy", "story"]
    assert [t.get_text() for t in left.get_xticklabels()] == ["1", "2", "3"]
    assert right.lines[0].get_xydata().tolist() == [[1, 1.0], [5, 1.2]]


def test_the_overlap_picture_fills_both_distributions() -> None:
    picture = figures.overlap(torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]))
    assert [heights(ax) for ax in picture.axes] == [[[0.5, 0.25], [0, 0.25]], [[0.5, 0.25], [0.25, 0]]]
    assert legend(picture, 0) == ["kept, min(p, q): 0.75", "thrown away: 0.25"]
    assert legend(picture, 1) == ["kept, min(p, q): 0.75", "residual: 0.25"]


def test_the_bytes_of_a_token_shrink_with_the_acceptance_length() -> None:
    picture = figures.token_bytes({"weights": 6e6, "module": 2e6}, 7e6, {"chat": (2.0, 4e6)})
    [ax] = picture.axes
    weights, module = (band.get_paths()[0].vertices for band in ax.collections)
    top = {round(x, 3): max(y for at, y in module if at == x) for x, _ in module}
    assert top[1.0] == pytest.approx(8) and top[3.0] == pytest.approx(8 / 3) and weights[:, 1].max() == pytest.approx(6)
    plain, chat = ax.lines
    assert list(plain.get_ydata()) == [7, 7] and chat.get_xydata().tolist() == [[2, 4]]
    assert legend(picture) == ["weights", "module", "without guesses", "chat"]


def test_guesses_pay_from_the_chance_at_which_their_tokens_outgrow_their_cost() -> None:
    costs = {"free": {1: 1.0, 2: 1.0}, "dear": {1: 1.5, 2: 1.75, 3: 4.5}, "hopeless": {1: 2.5}}
    [ax] = figures.break_even(costs).axes
    free, dear, hopeless = (line.get_ydata().tolist() for line in ax.lines)
    assert free == [0, 0] and dear[:2] == [0.5, 0.5] and math.isnan(dear[2]) and math.isnan(hopeless[0])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["free", "dear", "hopeless: never"]


def test_the_roofline_takes_one_dot_or_many_for_a_label() -> None:
    [ax] = figures.roofline(10, 100, {"decode": (0.5, 4), "verify": [(1, 8), (1.5, 12)]}).axes
    assert [line.get_xydata().tolist() for line in ax.lines[2:]] == [[[0.5, 4]], [[1, 8], [1.5, 12]]]


def test_bars_show_their_values_unless_there_are_too_many() -> None:
    few, many = ({"a": dict.fromkeys("0123456789"[:n], 1), "b": dict.fromkeys("0123456789"[:n], 2)} for n in (8, 9))
    assert [len(figures.bars("t", series, "u").axes[0].texts) for series in (few, many)] == [16, 0]


def texts_and_boxes(svg: str) -> tuple[list[tuple[float, float, float]], list[tuple[float, float, float, float]]]:
    root = ElementTree.fromstring(svg)
    tag = "{http://www.w3.org/2000/svg}"
    texts = [
        (float(t.get("x")), float(t.get("y")), 0.62 * float(t.get("font-size")) * len(t.text or ""))
        for t in root.iter(f"{tag}text")
    ]
    boxes = [tuple(float(r.get(k, 0)) for k in ("x", "y", "width", "height")) for r in root.iter(f"{tag}rect")]
    return texts, boxes


def test_the_heat_map_writes_every_number_and_frames_the_least_of_each_row() -> None:
    values = np.array([[1.0, 0.8, 0.9], [1.0, 1.2, 1.5]])
    picture = figures.heat_maps("best K", {"time": values, "rows": -values}, (1, 8), (0, 1, 3))
    time, rows = picture.axes
    assert [text.get_text() for text in time.texts] == ["1.00", "0.80", "0.90", "1.00", "1.20", "1.50"]
    assert [[round(frame.get_x() + 0.46) for frame in ax.patches] for ax in (time, rows)] == [[1, 0], [0, 2]]
    assert [round(frame.get_y() + 0.46) for frame in time.patches] == [0, 1]
    assert [label.get_text() for label in (*time.get_xticklabels(), *time.get_yticklabels())] == list("01318")


def test_the_tree_picture_has_a_box_for_each_draft_in_the_column_of_its_depth() -> None:
    svg = figures.draft_tree("The", ["cat", "dog", "sat", "ran", "on"], [-1, -1, 0, 0, 2], [0, 2], "down").data
    texts, boxes = texts_and_boxes(svg)
    _, _, width, height = boxes[0]
    assert all(x + w <= width for x, _, w in texts) and all(x + w <= width and y + h <= height for x, y, w, h in boxes)
    columns = sorted({x for x, *_ in boxes[1:]})
    assert len(columns) == 4
    fills = collections.Counter(
        r.get("fill") for r in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    )
    assert fills[figures.KEPT] == 2 and fills[figures.COLORS["again"]] == 3 and fills[figures.FIX] == 1
    assert len({(x, y) for x, y, *_ in boxes[1:]}) == 7  # nothing hides anything
    whole = figures.draft_tree("The", ["cat"], [-1], [0], "sat").data
    assert figures.FIX not in whole


def test_the_slots_picture_has_one_box_for_each_slot_and_a_gap_behind_each_page() -> None:
    kinds = ["prompt", "prompt", "output", "undone", "guess", "reserved", "free", "free"]
    svg = figures.slots({"first": {"": kinds}, "then": {"": kinds[::-1]}}, page_size=2).data
    texts, boxes = texts_and_boxes(svg)
    fills = [r.get("fill") for r in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")][1:]
    look = {kind: color for kind, (color, _) in figures.SLOT_LOOKS.items()}
    assert fills == [look[kind] for kind in (*kinds, *kinds[::-1], *look)] and len(set(look.values())) == 6
    steps = [b[0] - a[0] for a, b in zip(boxes[1:8], boxes[2:9], strict=True)]
    assert steps == [22, 30, 22, 30, 22, 30, 22]
    _, _, width, height = boxes[0]
    assert all(x + w <= width for x, _, w in texts) and all(x + w <= width and y + h <= height for x, y, w, h in boxes)
    letters = [
        t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text") if len(t.text or "") == 1
    ]
    assert "".join(letters) == "ppoxg" + "gxopp" + "pogx"


def test_the_slots_picture_puts_the_rows_of_a_moment_together_and_marks_what_was_written() -> None:
    rows = {"target K/V": ["output", "guess+"], "draft K/V": ["output+", "reserved"]}
    svg = figures.slots({"before": rows, "after": rows}, page_size=16).data
    shown = words(svg)
    assert [w for w in shown if len(w) > 1] == [
        *("before", "target K/V", "draft K/V", "after", "target K/V", "draft K/V", "output", "guess", "reserved")
    ]
    bold = [r.get("stroke-width") == "3" for r in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")]
    assert bold[1:] == [False, True, True, False] * 2 + [False] * 3 and inside(svg)
    texts, boxes = texts_and_boxes(svg)
    tops = [y for _, y, _, _ in boxes[1:9:2]]
    assert tops[1] - tops[0] == 30 and tops[2] - tops[1] == 54  # room for the title of the moment


def test_the_map_is_the_same_each_time_and_its_text_stays_in_its_boxes() -> None:
    svg = figures.request_map().data
    assert svg == figures.request_map().data
    texts, boxes = texts_and_boxes(svg)
    for x, y, width in texts:
        around = [b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3]]
        _, smallest = min((b[2] * b[3], b) for b in around)
        assert x + width <= smallest[0] + smallest[2] + 1, (x, y, width, smallest)


def test_a_drawing_is_no_wider_than_a_small_window_and_keeps_its_shape() -> None:
    drawings = [ElementTree.fromstring(figures.base.svg(width, 50, []).data) for width in (420, 840, 1050)]
    looks = [[drawing.get(name) for name in ("width", "height", "viewBox")] for drawing in drawings]
    assert looks == [["420", "50", "0 0 420 50"], ["840", "50", "0 0 840 50"], ["840", "40", "0 0 1050 50"]]


def test_the_map_names_only_modules_that_exist_and_every_notebook() -> None:
    named = [module for stage in figures.STAGES for line in stage.modules for module in line.split()]
    assert len(named) >= 10 and all((PACKAGE / module).exists() for module in named)
    planned = {number for stage in figures.STAGES for number in stage.notebooks}
    assert planned | {13} == set(range(15))


@pytest.mark.parametrize("guess", ["8", None, ...])
def test_a_guess_that_is_no_number_stops_nobody(capsys, guess) -> None:
    course.reveal(course.predict("how many", default=guess), 5)
    assert "a guess is a number" in capsys.readouterr().out


def test_a_loop_that_never_ends_is_told_so(capsys) -> None:
    def endless(next_token, prompt, max_tokens, stop_ids):
        tokens = list(prompt)
        while tokens[-1] not in stop_ids:
            tokens.append(next_token(tokens))
        return tokens[len(prompt) :]

    check.nb01_ex2(endless)
    assert "your loop goes on" in capsys.readouterr().out


def answer(words: list[str], kinds: list[TokenKind]) -> tuple[SimpleNamespace, SimpleNamespace]:
    output = SimpleNamespace(token_ids=list(range(len(words))), outputs=[SimpleNamespace(kinds=kinds)])
    return output, SimpleNamespace(decode=lambda ids: words[ids[0]])


def test_the_token_strip_shows_every_token_and_counts_the_kinds() -> None:
    kinds = [TokenKind.PLAIN, TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.BONUS, TokenKind.CORRECTED] * 8
    words = ["A", " <b>", "&", "\n", " \u00e4"] * 8
    svg = figures.token_strip(*answer(words, kinds)).data
    texts, boxes = texts_and_boxes(svg)
    shown = [t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert shown[:5] == ["A", "\u00b7<b>", "&", "\u21b5", "\u00b7\u00e4"] and len(shown) == 40 + 4
    assert [int(label.split()[0]) for label in shown[-4:]] == [8, 16, 8, 8]
    assert all(x + width <= 880 for x, _, width in texts) and all(x + width <= 880 for x, _, width, _ in boxes)


def test_the_strip_below_the_tokens_shows_both_probabilities() -> None:
    kinds = [TokenKind.PLAIN, TokenKind.ACCEPTED, TokenKind.CORRECTED]
    output, tokenizer = answer(["A", "b", "c"], kinds)
    output.logprobs = [SimpleNamespace(logprob=math.log(chance)) for chance in (1.0, 0.5, 0.25)]
    svg = figures.token_strip(output, tokenizer, {1: 1.0, 2: 0.5}).data
    rects = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"))[1:]
    bars = [(float(r.get("height")), r.get("fill")) for r in rects if r.get("rx") is None]
    draft, target = figures.OTHERS[0], figures.COLORS["ink"]
    first, second, third = bars[:2], bars[2:4], bars[4:6]
    assert first == [(0, draft), (18, target)] and second == [(18, draft), (9, target)]
    assert third[0] == (9, draft) and third[1] == (round(18 / 4), target) and inside(svg)
    assert "to the drafter" in words(svg)[-1] and "drafter" not in figures.token_strip(output, tokenizer).data


# Pictures of memory and of schedules -------------------------------------------------------------------------------


def shapes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """(fill, x, y, width, height) of each box but the paper."""
    boxes = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"))[1:]
    return [(b.get("fill"), *(float(b.get(k)) for k in ("x", "y", "width", "height"))) for b in boxes]


def words(svg: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def inside(svg: str) -> bool:
    texts, [(_, _, width, height), *boxes] = texts_and_boxes(svg)
    return all(x + w <= width and y <= height for x, y, w in texts) and all(
        x + w <= width and y + h <= height for x, y, w, h in boxes
    )


def test_the_pages_picture_fills_each_page_as_far_as_it_is_written() -> None:
    moments = {"first": [("A", 1.0), ("request-7", 0.5), ("free", 0.0)], "then": [("free", 0.0)] * 3}
    svg = figures.pages(moments).data
    assert words(svg) == ["first", "A", "7", "then", "free", "A", "A's, half of it written", "A", "A's, full"]
    page_a, full, page_7, half, free = shapes(svg)[:5]
    assert page_a[1:] == full[1:] and page_a[0] == page_7[0] == free[0] == "white" != full[0] != half[0]
    assert half[4] == page_7[4] / 2 and half[2] + half[4] == page_7[2] + page_7[4]  # from the bottom
    assert page_a[1] < page_7[1] < free[1] and svg == figures.pages(moments).data
    for pages in (3, 32, 64):
        assert inside(figures.pages({"a longer name": [("A", 1.0)] * pages, "b": [("free", 0.0)] * pages}).data)


def test_the_gantt_chart_shows_each_forward_of_each_request() -> None:
    runs = {
        "static": [{"A": "prompt", "B": "prompt"}, {"A": "idle", "B": "output"}, {"C": "prompt"}],
        "continuous": [{"A": "prompt", "B": "prompt"}, {"B": "output", "C": "prompt"}],
    }
    svg = figures.gantt(runs).data
    assert inside(svg)
    titles = [line for line in words(svg) if "forwards" in line]
    assert titles == ["static: 3 forwards, 1 idle seats", "continuous: 2 forwards"]
    kind_of = {(color, height): kind for kind, (color, _, height, _) in figures.GANTT_LOOKS.items()}
    assert len(kind_of) == 5
    kinds = [kind_of[fill, height] for fill, _, _, _, height in shapes(svg)]
    static = ["prompt", "idle", "prompt", "output", "waiting", "waiting", "prompt"]
    assert kinds == [*static, "prompt", "prompt", "output", "waiting", "prompt", "prompt", "output", "idle", "waiting"]
    assert "is computed again" not in words(svg)  # only what is there is explained
    legend = texts_and_boxes(svg)[0][-4:]
    assert all(x + width < other for (x, _, width), (other, _, _) in zip(legend, legend[1:], strict=False))


def test_the_gantt_chart_draws_forwards_as_wide_as_they_cost() -> None:
    runs = {"one": [{"A": "prompt"}, {"A": "output"}, {"A": "output"}], "two": [{"A": "prompt"}]}
    svg = figures.gantt(runs, {"one": [6, 2, 2], "two": [5]}).data
    assert inside(svg)
    (_, x, *_), (_, x2, _, w2, _), (_, x3, _, w3, _), (_, y, _, v, _) = shapes(svg)[:4]
    assert x2 - x == pytest.approx(3 * w2, abs=0.2) and x3 - x2 == pytest.approx(w2, abs=0.2) and w3 == w2
    assert y == x and v == pytest.approx(2.5 * w2, abs=0.2)
    assert x3 + w3 == pytest.approx(880 - 20, abs=0.2)  # the longest run takes the whole width


def test_the_budget_picture_stacks_decode_and_prompt_rows() -> None:
    picture = figures.budget({"whole": [(3, 0), (3, 29)], "chunks": [(3, 8), (2, 8)]}, limit=32)
    whole, chunks = picture.axes
    assert heights(whole) == [[3, 3], [0, 29]] and heights(chunks) == [[3, 2], [8, 8]]
    assert [bar.get_y() for bar in chunks.containers[1].patches] == [3, 2]
    assert legend(picture) == ["budget: 32", "decode: 6", "prompt: 29"]
    assert whole.get_ylim() == chunks.get_ylim() and whole.get_title() == "whole: 2 forwards"
    assert legend(figures.budget({"one": [(1, 2)]})) == ["decode: 1", "prompt: 2"]
    assert figures.budget({"one": [(1, 2)]}, limit=50).axes[0].get_ylim()[1] > 50


def test_the_trade_picture_joins_its_points_in_order() -> None:
    picture = figures.trade("chunks", {"8": (11.0, 0.5), "none": (303.0, 0.9)}, "gap", "tokens")
    [ax] = picture.axes
    assert ax.lines[0].get_xydata().tolist() == [[11.0, 0.5], [303.0, 0.9]]
    assert [text.get_text() for text in ax.texts] == ["8", "none"] and ax.get_xlabel() == "gap"


# Re-execution ------------------------------------------------------------------------------------------------------


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "my-env", "display_name": "Mine"}})


def test_a_notebook_is_run_in_its_folder_and_left_clean(tmp_path) -> None:
    source = "import sys; print(1); sys.stdout.flush(); print(open('here').read())"
    nb = notebook(source, "from ipywidgets import IntSlider; IntSlider()", "2")
    nb.cells[2].metadata = nbformat.from_dict({"tags": ["keep"], "collapsed": True})
    (tmp_path / "here").write_text("found")
    run_notebooks.execute(nb, tmp_path)
    run_notebooks.normalise(nb)
    nbformat.validate(nb)
    assert [cell.execution_count for cell in nb.cells] == [1, 2, 3]
    assert nb.cells[0].outputs == [{"output_type": "stream", "name": "stdout", "text": "1\nfound\n"}]
    assert nb.cells[1].outputs == [] and nb.cells[2].outputs[0].data["text/plain"] == "2"
    assert nb.metadata == run_notebooks.METADATA and [dict(c.metadata) for c in nb.cells] == [
        {},
        {},
        {"tags": ["keep"]},
    ]


def test_a_notebook_that_raises_is_left_as_it_was(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "07_broken.ipynb"
    nbformat.write(notebook("1 / 0"), path)
    before = path.read_bytes()
    monkeypatch.setattr(run_notebooks, "find", lambda numbers: [path])
    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path)
    assert run_notebooks.main([]) == 1 and path.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().out
    with pytest.raises(CellExecutionError):
        run_notebooks.execute(notebook("1 / 0"), tmp_path)


def test_numbers_choose_a_notebook_with_its_solutions(tmp_path) -> None:
    (tmp_path / "solutions").mkdir()
    for name in ("00_a", "solutions/00_a", "01_b", "solutions/01_b", "notes"):
        (tmp_path / f"{name}.ipynb").touch()

    def names(*numbers: str) -> list[str]:
        return [p.relative_to(tmp_path).as_posix() for p in run_notebooks.find(numbers, tmp_path)]

    assert names() == ["00_a.ipynb", "solutions/00_a.ipynb", "01_b.ipynb", "solutions/01_b.ipynb"]
    assert names("01") == ["01_b.ipynb", "solutions/01_b.ipynb"]
    with pytest.raises(ValueError, match="no notebook '1'"):
        names("1")


# Radix tree: notebooks 06 and 07 ---------------------------------------------------------------------------------

TREE = "a bird\n  sings\n    in the tree\n    at night"


@pytest.mark.parametrize(
    "drawing",
    [
        TREE,
        "\n" + TREE.replace("  ", "\t") + "\n\n",
        "a bird\n  sings\n    at night\n    in the  tree",
        "`- a bird\n   `- sings\n      +- at night\n      `- in the tree",
    ],
)
def test_the_drawing_exercise_takes_any_order_and_indent(said, drawing) -> None:
    check.nb06_ex1(drawing)
    assert said() == ["exercise 1: ok (1 case)"]


@pytest.mark.parametrize(
    ("drawing", "complaint"),
    [
        ("a bird sings\n  in the tree\n  at night", "not node 'a bird sings'"),  # a match does not split
        ("a bird\n  sings in the tree\n  sings at night", "not node 'sings in the tree'"),  # siblings that begin alike
        ("a bird\nsings\n  in the tree\n  at night", "not node 'sings'"),  # at the root
        (TREE + "\n  sings", "not node 'sings'"),  # twice
        (TREE.replace("    at night", "  at night"), "not node 'at night'"),  # below the wrong one
        (TREE.replace("\n    at night", ""), "a node is missing"),
        (" ", "not done yet"),
        (7, "not node '7'"),
    ],
)
def test_the_drawing_exercise_names_the_first_wrong_node_and_not_the_right_one(said, drawing, complaint) -> None:
    check.nb06_ex1(drawing)
    [line] = said()
    assert complaint in line and (complaint == "not done yet" or line.endswith("expected 'the tree'"))


def matched(root, ids, *, whole_nodes=False, no_compare=False, loses_rest=False):
    if not ids or ids[0] not in root["children"]:
        return []
    child = root["children"][ids[0]]
    equal = [a == b for a, b in zip(child["key"], ids, strict=False)]
    common = len(equal) if no_compare or all(equal) else equal.index(False)
    if common < len(child["key"]):
        return [] if whole_nodes else child["slots"][:common]
    return child["slots"] + ([] if loses_rest else matched(child, ids[common:], whole_nodes=whole_nodes))


def test_the_match_exercise_finds_the_usual_mistakes(said) -> None:
    check.nb06_ex2(matched)
    check.nb06_ex2(lambda root, ids: matched(root, ids)[: len(ids) - 1])  # the last token left out here too
    for mistake in ("whole_nodes", "no_compare", "loses_rest"):
        check.nb06_ex2(lambda root, ids, mistake=mistake: matched(root, ids, **{mistake: True}))
    check.nb06_ex2(lambda root, ids: range(len(matched(root, ids))))  # the slots must be the tree's
    right, *wrong = said()
    assert right == "exercise 2: ok (200 cases)"
    assert len(wrong) == 5 and all(re.search(r"\(root \{.*\}, \[.*\]\) gives .*, expected \[", line) for line in wrong)


def svg_of(frame) -> ElementTree.Element:
    return ElementTree.fromstring(frame.data)


def words_of(frame) -> list[str]:
    return [t.text for t in svg_of(frame).iter("{http://www.w3.org/2000/svg}text")]


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.fixture
def film() -> figures.TreeFilm:
    return figures.TreeFilm(RadixTree(page_size=1), letters)


def insert(tree: RadixTree, word: str, slot: int = 0):
    return tree.insert(list(map(ord, word)), range(slot, slot + len(word))).node


def test_a_film_says_what_was_new_split_held_and_thrown_away(film) -> None:
    tree = film.tree
    insert(tree, "abcdef")
    assert words_of(film.take("one"))[:5] == ["one", "6 evictable, 0 locked", "root", "abcdef", "new: 6 tokens, used 1"]
    held = insert(tree, "abx", slot=10)
    two = words_of(film.take("two"))
    facts = dict(zip(two[3:9:2], two[4:9:2], strict=True))
    assert facts == {"ab": "split: 2 tokens, used 2", "cdef": "4 tokens, used 1", "x": "new: 1 token, used 2"}
    tree.lock(held)
    three = words_of(film.take("three"))
    assert three[three.index("ab") + 1] == "2 tokens, used 2"  # not split again
    assert three.count("1") == 3 and "held, with its number of locks" in three  # two nodes, and the legend
    tree.evict(2)
    four = words_of(film.take("four"))
    facts = dict(zip(four, four[1:], strict=False))
    assert (
        facts["cd"] == "2 tokens, used 1" and facts["ef"] == "evicted: 2 tokens" and "thrown away in this step" in four
    )
    assert "ef" not in words_of(film.take("five"))
    assert len(film.frames) == 5 and len({frame.data for frame in film.frames}) == 5


def test_a_film_shows_a_new_node_that_is_held_as_both(film) -> None:
    film.tree.lock(insert(film.tree, "ab"))
    insert(film.tree, "cd", slot=10)
    rects = [r.attrib for r in svg_of(film.take("one")).iter("{http://www.w3.org/2000/svg}rect")]
    new, held = figures.TREE_LOOKS["new"], figures.TREE_LOOKS["locked"]
    looks = [(r["fill"], r["stroke"]) for r in rects if float(r["height"]) == 40][1:]  # without the root
    assert sorted(looks) == sorted([(held[0], new[1]), (new[0], new[1])])


def test_a_film_shows_a_whole_branch_that_was_thrown_away_as_it_was(film) -> None:
    insert(film.tree, "ab")
    insert(film.tree, "abcd", slot=10)
    insert(film.tree, "abef", slot=20)
    film.take("before")
    film.tree.evict(100)
    words = words_of(film.take("after"))
    assert [words[words.index(key) + 1] for key in ("ab", "cd", "ef")] == ["evicted: 2 tokens"] * 3
    boxes = {
        tuple(map(float, (r.get("x"), r.get("y"))))
        for r in svg_of(film.frames[1]).iter("{http://www.w3.org/2000/svg}rect")
        if r.get("stroke-dasharray")
    }
    assert len({x for x, _ in boxes}) == 3 and len(boxes) == 4  # ab, cd and ef right of it, and the legend


@pytest.mark.parametrize("runs", [(3, 2), (300, 250), (40, 40, 40, 40, 40, 40)])
def test_a_tree_stays_inside_its_page_with_boxes_side_by_side(film, runs) -> None:
    word = ""
    for depth, length in enumerate(runs):
        insert(film.tree, f"{word}{'yz'[depth % 2] * length}", slot=1000 * depth)
        insert(film.tree, f"{word}{'kl'[depth % 2] * length}", slot=1000 * depth + 500)
        word += "yz"[depth % 2] * length
    frame = film.take("deep")
    size = svg_of(frame)
    boxes = [
        tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in list(size)[1:] if r.tag.endswith("rect")
    ]
    assert len(boxes) >= 2 * len(runs) + 2 and size.get("viewBox").startswith("0 0 880 ")
    for i, (x, y, w, h) in enumerate(boxes):
        assert 0 < x and x + w <= 880 and y + h <= float(size.get("viewBox").split()[3])
        assert not any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in boxes[:i])
    lines = sorted((float(t.get("x")), float(t.get("y"))) for t in size.iter("{http://www.w3.org/2000/svg}text"))
    assert all(b[0] > a[0] or b[1] - a[1] >= 13 for a, b in itertools.pairwise(lines))
    for mono in size.iter("{http://www.w3.org/2000/svg}text"):
        if "Mono" in mono.get("font-family"):
            left, width = float(mono.get("x")), 7.3 * len(mono.text)
            assert any(x <= left and left + width <= x + w for x, _, w, _ in boxes), mono.text


def test_a_long_run_keeps_its_two_ends_on_two_lines(film) -> None:
    insert(film.tree, "A" + "b" * 300 + "C\nD")
    first, second = words_of(film.take("long"))[3:5]
    assert first.startswith("Ab") and first.endswith("\u2026") and second.startswith("\u2026b")
    assert second.endswith("C\u21b5D") and len(first) == len(second)


def test_the_hit_rate_picture_draws_each_curve_in_percent() -> None:
    picture = figures.hit_rates({"a": {64: 0.1, 128: 0.5}, "b": {64: 0.0, 128: 0.25}}, best=0.5)
    best, *curves = picture.axes[0].lines
    assert best.get_ydata() == [50, 50] and [curve.get_xydata().tolist() for curve in curves] == [
        [[64, 10], [128, 50]],
        [[64, 0], [128, 25]],
    ]
    assert legend(picture) == ["a", "b"] and len({curve.get_linestyle() for curve in curves}) == 2


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        (([1, 2, 3], [2, 3, 12], [12, 21, 22], [2, 21]), []),
        (((3, 2, 1), {12, 3, 2}, np.array([22, 21, 12]), [21, 2]), []),
        (([0, 1, 2], [2, 3, 12], [12, 21, 22], [2, 21]), [1]),  # from the beginning of a leaf
        (([10, 11, 12], [10, 11, 12], [12, 21, 22], [2, 21]), [1, 2]),  # the latest instead of the oldest
        (([1, 2, 3], [1, 2, 3], [0, 1, 12], [2, 21]), [2, 3]),  # a lock not seen; a parent by its child's age
        (([1, 2, 3], [2, 3, 12], [12, 21, 22], [2, 13, 21]), [4]),  # always as many as asked for
        ((3, "x", [None], [2, 21, 21]), [1, 2, 3, 4]),
    ],
)
def test_the_eviction_exercise_judges_each_tree_and_hides_the_answer(said, answers, wrong) -> None:
    check.nb07_ex1(*answers)
    lines = said()
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"exercise 1, tree {number}: ")
        assert line.endswith("expected 'these slots'" if number in wrong else "ok (1 case)")
    assert len(lines) == 4


def test_half_an_answer_to_the_eviction_exercise_is_not_done(said) -> None:
    check.nb07_ex1([1, 2, 3], ..., None, ...)
    assert [line.split(": ")[1] for line in said()] == ["ok (1 case)", *["not done yet"] * 3]


def test_the_eviction_trees_are_whole_and_the_same_at_each_call() -> None:
    first, again = check.eviction_trees(), check.eviction_trees()
    for tree in first:
        tree.check_integrity()
    first[0].evict(3)
    assert [t.to_text() for t in again] == [t.to_text() for t in check.eviction_trees()]


def commit(pool, request, *, freed=slice(None), unlock=True, point=True, keep=True):
    """KVPool.commit_prefix in steps that can be left out. freed: which of the pages that others stored go back."""
    row, size, old = pool.table.row(request.table_row), pool.page_size, request.tree_len
    whole = request.kv_len // size * size if keep else 0
    node, present = pool.tree.insert(request.tokens[:whole], row[:whole])
    pool.allocator.free((row[old : len(present)][::size] // size)[freed])
    if point:
        row[: len(present)] = present
    pool.tree.lock(node)
    if unlock:
        pool.tree.unlock(request.node)
    request.node, request.tree_len = node, whole


COMMIT_MISTAKES = {
    "pages of others' copies lost": {"freed": slice(0, 0)},
    "the first page lost": {"freed": slice(1, None)},
    "the last page lost": {"freed": slice(0, -1)},
    "the row still names its old pages": {"point": False},
    "a lock too many": {"unlock": False},
    "nothing kept": {"keep": False},
}


@pytest.mark.parametrize("mistake", COMMIT_MISTAKES)
def test_the_leak_exercise_finds_the_usual_mistakes(said, mistake) -> None:
    check.nb07_ex2(commit)
    check.nb07_ex2(lambda pool, request: commit(pool, request, **COMMIT_MISTAKES[mistake]))
    right, wrong = said()
    assert right == "exercise 2: ok (60 cases)" and "at once, pages of" in wrong and "expected [[" in wrong
    assert len(re.search(r"\((.*) at once", wrong)[1]) < 40  # a small case


def test_the_leak_exercise_finds_pages_given_back_that_the_tree_owns(said) -> None:
    def frees_all(pool, request):
        row, size = pool.table.row(request.table_row), pool.page_size
        whole = request.kv_len // size * size
        node, present = pool.tree.insert(request.tokens[:whole], row[:whole])
        pool.allocator.free(row[: len(present)][::size] // size)  # also what was the tree's before
        row[: len(present)] = present
        pool.tree.lock(node)
        pool.tree.unlock(request.node)
        request.node, request.tree_len = node, whole

    check.nb07_ex2(frees_all)
    assert "raises AssertionError" in said()[0]


# The controller: notebook 12 -----------------------------------------------------------------------------------------


def history_row(step: int, steps: int = 10, **fields) -> MetricsRow:
    zeros = dict.fromkeys(("seconds", "output_tokens", "batch", "candidate_length", "acceptance_rate"), 0)
    return MetricsRow(step, steps, **zeros | {"acceptance_length": 0, "speed_up": 0, "choices": {}} | fields)


HISTORY = [
    history_row(30, batch=1, candidate_length=4, acceptance_rate=0.75, choices={"gain": 9, "probe": 1}),
    history_row(40, batch=2, choices={"gain": 5, "regression": 15}),
    history_row(45, steps=5, batch=1, candidate_length=2, acceptance_rate=0, choices={"gain": 5}),
]


def test_the_controller_picture_shows_what_the_history_says() -> None:
    picture = figures.controller(HISTORY)
    batch, length, kept, why = picture.axes
    for ax, values in ((batch, [1, 2, 1]), (length, [4, 0, 2])):
        [stairs] = ax.patches
        assert stairs.get_data().values.tolist() == values and stairs.get_data().edges.tolist() == [20, 30, 40, 45]
    x, rates = kept.lines[0].get_data()
    assert x.tolist() == [25, 35, 42.5] and rates[0] == 0.75 and rates[2] == 0  # none kept is not none drafted
    assert np.isnan(rates[1])
    assert legend(picture, 3) == ["gain", "probe", "regression"]
    assert np.allclose(heights(why), [[0.9, 0.25, 1], [0.1, 0, 0], [0, 0.75, 0]])
    assert np.allclose([bar.get_y() for bar in why.containers[2]], [1, 0.25, 1])
    assert [(bar.get_x(), bar.get_width()) for bar in why.containers[0]] == [(20, 10), (30, 10), (40, 5)]
    assert why.get_xlim() == kept.get_xlim() == (20, 45)


def test_every_reason_of_the_controller_has_a_look_of_its_own() -> None:
    head = re.findall(r"^    ([a-z ]+?)  +\S.*?(?:  +([a-z]+)  +\S.*)?$", rules.__doc__, re.M)
    named = {name for pair in head for name in pair if name}
    assert named == set(figures.REASON_LOOKS) and len(named) == 13
    looks = [figures.REASON_LOOKS[name] for name in named - {"fixed"}]  # which never meets "gain"
    assert len(set(looks)) == len(looks)
    picture = figures.controller([history_row(10, choices=dict.fromkeys(named, 1))])
    assert set(legend(picture, 3)) == named and np.allclose(np.sum(heights(picture.axes[3])), 1)


def test_a_history_without_rows_is_refused_and_says_why() -> None:
    with pytest.raises(ValueError, match="shorter than metrics_interval"):
        figures.controller([])


class Right:
    """Always right about a toy."""

    name = "right"

    def propose(self, requests, lengths):
        drafts = []
        for request, k in zip(requests, lengths, strict=True):
            tokens = list(request.tokens)
            for _ in range(k):
                tokens.append(check.ToyRunner.next_token(tokens))
            drafts.append(tokens[len(request.tokens) :])
        return Proposal(drafts)

    def release(self, request):
        pass


def on_a_clock(tokens: int = 30, *, context_length: int = 256, **speculative):
    engine = check.toy_engine(drafters=[Right()], context_length=context_length, speculative_config=speculative)
    clock = check.VirtualClock(engine, forward=lambda rows: 30 + rows, draft=2)
    [request] = engine.add([1, 2, 3], minispec.SamplingParams(temperature=0, max_tokens=tokens))
    while engine.has_work:
        engine.step()
    return engine, clock, request


def test_a_virtual_clock_adds_up_the_prices_of_forwards_and_of_each_draft() -> None:
    engine, clock, request = on_a_clock(11, candidate_length=4, adaptive=False)
    assert engine.metrics.lengths == {0: 1, 4: 2}  # the prompt's forward, then twice five tokens
    assert clock.now == (30 + 3) + 2 * (30 + 5 + 4 * 2)
    assert request.output == [check.ToyRunner.next_token([t]) for t in request.tokens[2:-1]]


def test_a_controller_believes_the_virtual_clock_and_no_other() -> None:
    engine, clock, _ = on_a_clock(200, candidate_length=4)
    again, other, _ = on_a_clock(200, candidate_length=4)
    assert engine.metrics.lengths == again.metrics.lengths and clock.now == other.now
    costs = engine.controller.target_cost.seconds(np.array([5])), engine.controller.draft_cost.seconds(np.array([1]))
    assert np.allclose(costs, [[35], [2]], rtol=0.05)


def test_a_toy_has_the_context_that_was_asked_for() -> None:
    assert len(on_a_clock(500)[2].tokens) == 256 and len(on_a_clock(500, context_length=512)[2].tokens) == 503


# Overlap: notebook 08 ----------------------------------------------------------------------------------------------


def ticking(overlap: bool, **dials: float):
    engine = check.toy_engine(device=VirtualDevice(dials), enable_overlap=overlap, enable_trace=True)
    engine.add([1], SamplingParams(temperature=0, max_tokens=6))
    while engine.has_work:
        engine.step()
    return engine.trace


def test_two_lanes_are_as_long_as_they_took_and_gaps_of_the_device_are_red() -> None:
    traces = {name: ticking(on, plan=2, settle=3, forward=10) for name, on in (("turns", False), ("overlap", True))}
    drawn = figures.two_lanes(traces, (0, 40)).data
    assert drawn == figures.two_lanes(traces, (0, 40)).data and inside(drawn)
    tick, looks = (880 - 80 - 20) / 40, figures.LANE_LOOKS
    panels = [[b for b in shapes(drawn) if low < b[2] < low + 90] for low in (20, 114)]
    widths = [{name: [round(b[3] / tick, 1) for b in p if b[0] == looks[name][0]] for name in looks} for p in panels]
    assert widths[0]["forward"] == [10, 10, 8] and widths[0]["plan"] == [2, 2, 2] and widths[0]["settle"] == [3, 3]
    assert widths[1]["forward"] == [10, 10, 10, 8] and widths[1]["settle"] == [3, 3, 3]  # legend apart
    gaps = [[(round((b[1] - 80) / tick, 1), round(b[3] / tick, 1)) for b in p if b[0] == figures.FIX] for p in panels]
    assert gaps == [[(12, 5), (27, 5)], []]
    device = [b[2] for b in panels[0] if b[0] == looks["forward"][0]]
    assert all(device[0] < b[2] and b[2] + b[4] < device[0] + 26 for b in panels[0] if b[0] == figures.FIX)
    said = words(drawn)
    assert said[0] == f"turns: the device is idle for {traces['turns'].idle_share():.0%} of the time"
    assert "overlap: the device is idle for 0% of the time" in said and "the device waits" in said
    assert [w for w in said if w.isdecimal()][-9:] == [str(t) for t in range(0, 41, 5)]


def test_boxes_of_the_lanes_name_the_step_that_they_belong_to() -> None:
    drawn = figures.two_lanes({"x": ticking(True, plan=20, settle=20, forward=60)}, (60, 180)).data
    said = words(drawn)
    assert {"settle 1", "plan 3", "forward 2", "settle 2", "plan 4", "forward 3"} <= set(said)
    assert not {"forward 4", "settle 3", "the device waits"} & set(said)
    second = next(t for t in ElementTree.fromstring(drawn).iter() if t.text == "forward 2")
    tick = next(t for t in ElementTree.fromstring(drawn).iter() if t.text == "80")
    assert float(second.get("x")) == pytest.approx(80 + 50 * 6.5)  # the middle of 80 to 140
    assert float(tick.get("x")) == pytest.approx(80 + 20 * 6.5)


def test_lanes_in_other_units_begin_with_the_first_event() -> None:
    trace = Trace()
    for start, end in ((100.0, 100.002), (100.004, 100.005)):
        trace.events.append(Event(DEVICE, "forward", start, end, 1, 1, 1, ()))
    drawn = figures.two_lanes({"x": trace}, (0, 10), unit="ms", scale=1e3).data
    [gap, first, second] = [(fill, round((x - 80) / 78, 1), round(w / 78, 1)) for fill, x, _, w, _ in shapes(drawn)[:3]]
    assert gap == (figures.FIX, 2, 2) and first[1:] == (0, 2) and second[1:] == (4, 1)
    assert "ms" in words(drawn)


def period(plan, settle, advance, draft, forward):
    if draft:
        return max(plan + settle, draft + forward) + advance
    return max(plan + settle + advance, forward)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, s, a, d, f: p + s + a + d + f,
        lambda p, s, a, d, f: max(p + s + a, d + f),
        lambda p, s, a, d, f: max(p + s, d + f) + a,
        lambda p, s, a, d, f: max(p + s, f) + a if d else max(p + s + a, f),
        lambda p, s, a, d, f: max(p + s, d + f) + a if d else max(p + s, f),
    ],
)
def test_the_period_exercise_finds_the_usual_mistakes(said, wrong) -> None:
    check.nb08_ex1(period, lambda plan, advance, forward: forward - plan - advance)
    assert said() == ["exercise 1, period: ok (9 cases)", "exercise 1, longest_settle: ok (4 cases)"]
    check.nb08_ex1(wrong, lambda plan, advance, forward: forward - plan)
    assert [", expected " in line for line in said()] == [True, True]


def settled(forwards, end, *, late=False, twice=False, count=True, keep_end=True):
    outputs, ended, wasted = {}, [], 0
    for forward in forwards:
        gone = list(ended)
        for name, token in forward.items():
            if name in gone:
                wasted += count
                if twice and token == end:
                    ended.append(name)
                if not late:
                    continue
            if keep_end or token != end:
                outputs.setdefault(name, []).append(token)
            if token == end and name not in ended:
                ended.append(name)
    return outputs, ended, wasted


@pytest.mark.parametrize("mistake", [{"late": True}, {"twice": True}, {"count": False}, {"keep_end": False}])
def test_the_finished_twice_exercise_finds_the_usual_mistakes(said, mistake) -> None:
    check.nb08_ex2(settled)
    assert said() == ["exercise 2: ok (9 cases)"]
    check.nb08_ex2(lambda forwards, end: settled(forwards, end, **mistake))
    assert ", expected " in said()[0]


def test_what_the_finished_twice_exercise_shows_has_a_wasted_row() -> None:
    engine, forwards, ended = check.brought({"A": (5, 9), "B": (7, 9)})
    assert [forward.get("B") for forward in forwards] == [8, 9, 9, None, None] and ended == ["B", "A"]
    assert engine.metrics.computed_tokens == sum(map(len, forwards)) == 8 and not engine.has_work


# Everything on: notebook 13 ----------------------------------------------------------------------------------------


def ranked(ladder, shared, *, first=False, total=False, reverse=True, price=lambda f, r, shared: shared * f + r):
    prices = [price(forwards, rows, shared) for _, forwards, rows in ladder]
    before = [prices[0]] * len(prices) if total else [0 if first else prices[0], *prices]
    saved = {ladder[n][0]: before[n] - prices[n] for n in range(0 if first else 1, len(ladder))}
    return sorted(saved, key=lambda name: saved[name], reverse=reverse)


@pytest.mark.parametrize(
    "mistake",
    [
        {"first": True},
        {"total": True},
        {"reverse": False},
        {"price": lambda f, r, shared: f},
        {"price": lambda f, r, shared: r},
        {"price": lambda f, r, shared: 20 * f + r},
    ],
)
def test_the_ranking_exercise_finds_the_usual_mistakes(said, mistake) -> None:
    check.nb13_ex1(lambda ladder, shared: ranked([("", *ladder[0][1:]), *ladder[1:]], shared))
    assert re.fullmatch(r"exercise 1: ok \(\d\d cases\)", said()[0])
    check.nb13_ex1(lambda ladder, shared: ranked(ladder, shared, **mistake))
    assert ", expected " in said()[0]


COLD, WARM = [[1] * 12 + [2 + n] * 8 for n in range(6)], [[1] * 320 + [2 + n] for n in range(6)]


@pytest.mark.parametrize(
    "prompts, fault",
    [
        ([[1] * 16 + [2 + n] * 8 for n in range(6)], "% found"),
        (COLD[:5], "5 prompts"),
        ([[1] * 12 + [2 + n] * 7 for n in range(6)], "prompt 1 has 19 tokens"),
        ([[1] * 11 + [2 + n] * 9 for n in range(6)], "prompt 2 begins otherwise"),
        ([*COLD[:5], COLD[0]], "prompt 6 is there twice"),
        ([[60] * 20 + [n] for n in range(6)], "outside the vocabulary"),
    ],
)
def test_the_cold_and_warm_exercise_names_what_is_wrong_with_the_prompts(said, prompts, fault) -> None:
    check.nb13_ex2(lambda: COLD, lambda: WARM)
    assert said() == ["exercise 2, cold: ok (1 case)", "exercise 2, warm: ok (1 case)"]
    check.nb13_ex2(lambda: prompts, lambda: COLD)
    cold, warm = said()
    assert fault in cold and cold.endswith("expected 'as asked'")
    assert "0.0% found" in warm and warm.endswith("expected 'as asked'")


def test_warm_prompts_must_be_long_enough(said) -> None:
    for common, verdict in ((288, "ok"), (112, "found")):  # 5 * 288 of 6 * 289, 5 * 112 of 6 * 113: 83 and 83 per cent
        check.nb13_ex2(lambda: COLD, lambda common=common: [[1] * common + [n] * 8 for n in range(2, 8)])
        assert verdict in said()[1]


def test_a_waterfall_starts_each_bar_where_the_last_one_ended() -> None:
    picture = figures.waterfall("title", {"forwards": {"plain": 40, "half": 20, "same": 20, "more": 30}})
    [ax] = picture.axes
    bars = [(bar.get_x(), bar.get_width(), bar.get_facecolor()) for bar in ax.patches]
    assert [(x, round(w)) for x, w, _ in bars] == [(0, 40), (20, 20), (20, 0), (20, 10)]
    assert (
        len({color for *_, color in bars}) == 3 and bars[1][2] == bars[2][2] and [b.get_hatch() for b in ax.patches][3]
    )
    assert [t.get_text() for t in ax.texts] == ["40", "20", "20", "30"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["plain", "half", "same", "more"]
    assert repr(picture) == "<picture: title>" and picture._repr_png_() == picture._repr_png_()
