"""Checkers of the exercises. They print one line and never raise, so a half-done notebook still runs to its end.

    not answered yet      exercise 1: not done yet
    wrong                 exercise 1: rows(1, 2) gives 2, expected 3         (the smallest case that fails)
    right                 exercise 1: ok (5 cases)

Knows: what a right answer does. Where the package can be asked, the expected result is the package's own.
Does not know: how to solve anything; solutions are in notebooks/solutions. Used from notebook 00 (the map) on.
"""

from minispec.course.check.basics import nb00_ex1, nb00_ex2, nb01_ex1, nb01_ex2, nb02_ex1, nb02_ex2
from minispec.course.check.judge import Case, judge
from minispec.course.check.overlap import LazyDrafter, brought, nb08_ex1, nb08_ex2, nb13_ex1, nb13_ex2
from minispec.course.check.radix import eviction_trees, nb06_ex1, nb06_ex2, nb07_ex1, nb07_ex2
from minispec.course.check.scheduling import nb03_ex1, nb03_ex2, nb04_ex1, nb04_ex2, nb05_ex1, nb05_ex2
from minispec.course.check.speculation import (
    SHARED_ROWS,
    TRACES,
    chi_square,
    nb09_ex1,
    nb09_ex2,
    nb10_ex1,
    nb10_ex2,
    nb11_ex1,
    nb11_ex2,
    nb12_ex1,
    nb12_ex2,
    nb14_ex1,
    nb14_ex2,
    rows_spent,
)
from minispec.course.check.toys import SMOLLM2, FaultyDrafter, ToyRunner, VirtualClock, toy_engine
