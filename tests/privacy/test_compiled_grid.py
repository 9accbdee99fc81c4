"""Sums by the compiled kernel: NumPy's, bit for bit, whatever the updates hold."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from support import failures

from cloister.privacy.mechanisms import grid as grids
from cloister.privacy.mechanisms.grid import Adder, Grid, IntegerSums
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort
from cloister.utils.errors import PrivacyError
from cloister.utils.threads import BLOCK, Span

compiled_grid = pytest.importorskip(
    "cloister.privacy.mechanisms.discrete.numba_kernel", reason="the compiled kernel comes with cloister-fl[fast]"
)
WIDTH = 1001
ODD = (np.nan, np.inf, -np.inf, 1e200, 3e38, -3e38, 1e-45, -0.0, 1e-19, -1e-30)


@pytest.fixture
def small_spans(monkeypatch):
    """Short spans go through the kernel too."""
    monkeypatch.setattr(grids, "COMPILED", 1)


def cohort_of_odd_rows(dtype):
    """Whole steps and their neighbours, one odd number in a row, what does not hold, what is left out."""
    rng = np.random.default_rng(3)
    sent = rng.standard_normal(WIDTH).astype(dtype)
    whole = rng.integers(-900, 900, WIDTH).astype(dtype)
    towards = [np.nextafter(whole, dtype(side)) for side in (-np.inf, 0, np.inf)]
    with np.errstate(over="ignore"):
        odd = [np.where(np.arange(WIDTH) == 500, number, rng.uniform(-9, 9, WIDTH)).astype(dtype) for number in ODD]
    rows = [*towards, *odd, whole * 1e9, whole * dtype(1e-41), np.full(WIDTH, np.nan, dtype), sent]
    weights = rng.uniform(0.5, 2, len(rows))
    weights[[1, -2]] = 0
    layout = Layout.of({"w": sent})
    cohort = Cohort(layout, (sent,), tuple((row,) for row in rows), np.ones(len(rows)), np.ones(len(rows)))
    return cohort, weights


def added(cohort, weights, grid, span, signs=(1, 1, -1)):
    """The squares and the sums after each pass."""
    adder, sums, found = Adder(grid, cohort.layout.dtype), IntegerSums(grid, len(span)), []
    for sign in signs:
        squares, out = np.zeros(len(cohort)), np.empty(len(span))
        adder.add_up(cohort, span, weights, squares, sums, sign)
        sums.write(out)
        found += [squares, out]
    return found


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("steps", [2.0**15, 2.0**26, pytest.param(2.0**40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_and_squares_are_those_of_numpy(dtype, steps, monkeypatch, small_spans):
    cohort, weights = cohort_of_odd_rows(dtype)
    grid, spans = Grid(1.0, steps, 0), [Span(0, 0, WIDTH), Span(0, 3, 40), Span(0, 999, 1001)]
    fast = [added(cohort, weights, grid, span) for span in spans]
    monkeypatch.setattr(grids, "COMPILED", BLOCK + 1)
    slow = [added(cohort, weights, grid, span) for span in spans]
    for one, other in zip(fast, slow, strict=True):
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(one, other, strict=True))
        assert one[1].any()
    assert not np.isfinite(fast[0][0]).all()


class TestWhatIsBroken:
    def test_rounding_to_nearest_is_refused(self, monkeypatch):
        right = compiled_grid.change
        monkeypatch.setattr(compiled_grid, "change", lambda numbers, sums, sign: right(np.rint(numbers), sums, sign))
        grids.kernel.cache_clear()
        with pytest.raises(PrivacyError, match="numba's kernel of sums is not NumPy's"):
            grids.kernel(np.dtype(np.float32), np.dtype(np.int32))

    def test_a_sign_that_is_forgotten(self):
        wrong = SimpleNamespace(change=lambda numbers, sums, sign: compiled_grid.change(numbers, sums, 1))
        assert not grids.adds_as_numpy(wrong, np.dtype(np.float32), np.dtype(np.int32))

    def test_a_kernel_that_is_wrong_for_few_numbers(self):
        """Halves, the largest numbers that sums take, numbers next to none, and the zero that has a sign."""

        def check(dtype, changed, found):
            def change(numbers, sums, sign):
                sums += sign * changed(numbers).astype(sums.dtype)

            for integers in (np.int32, np.int64):
                wrong = SimpleNamespace(change=change)
                assert grids.adds_as_numpy(wrong, np.dtype(dtype), np.dtype(integers)) is not found

        cases = [
            (one, *other)
            for one, other in product(
                [np.float32, np.float64],
                [
                    (np.trunc, False),
                    (np.floor, True),
                    (lambda numbers: np.where(np.abs(numbers) <= 3, np.rint(numbers), np.trunc(numbers)), True),
                    (lambda numbers: np.where(np.abs(numbers) > 3, np.rint(numbers), np.trunc(numbers)), True),
                    (lambda numbers: np.trunc(np.clip(numbers, -(2**26) + 8, None)), True),
                    (lambda numbers: np.trunc(np.clip(numbers, None, 2**26 - 8)), True),
                    (lambda numbers: np.where(np.abs(numbers) < 1e-39, np.sign(numbers), np.trunc(numbers)), True),
                    (lambda numbers: np.trunc(numbers) + ((numbers == 0) & np.signbit(numbers)), True),
                ],
            )
        ]
        assert failures(cases, check) == []

    def test_what_does_not_hold_is_added(self, monkeypatch, small_spans):
        row = (np.full(WIDTH, 100.0, np.float32),)
        sent = (np.zeros(WIDTH, np.float32),)
        cohort = Cohort(Layout.of({"w": sent[0]}), sent, (row,), np.ones(1), np.ones(1))
        grid, span = Grid(1.0, 2.0**10, 0), Span(0, 0, WIDTH)
        assert not added(cohort, np.ones(1), grid, span)[1].any()
        monkeypatch.setattr(Grid, "holds", lambda self, squares: np.bool_(True))
        assert np.square(added(cohort, np.ones(1), grid, span)[1]).sum() > grid.steps**2


def test_small_sums_do_not_ask_for_the_kernel(monkeypatch):
    monkeypatch.setattr(grids, "kernel", lambda *_: pytest.fail("a small model waits for a compiler"))
    cohort, weights = cohort_of_odd_rows(np.float32)
    assert added(cohort, weights, Grid(1.0, 2.0**15, 0), Span(0, 0, WIDTH))[1].any()


def test_without_numba_numpy_adds(monkeypatch, small_spans):
    cohort, weights = cohort_of_odd_rows(np.float32)
    fast = added(cohort, weights, Grid(1.0, 2.0**15, 0), Span(0, 0, WIDTH))
    monkeypatch.setattr(grids, "kernel", lambda *_: None)
    slow = added(cohort, weights, Grid(1.0, 2.0**15, 0), Span(0, 0, WIDTH))
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(fast, slow, strict=True))
