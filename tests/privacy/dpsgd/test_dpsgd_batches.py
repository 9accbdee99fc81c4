"""Batches are drawn as they are accounted for. False alarms: six deviations, 2e-9 each, and seeds are fixed."""

import math

import numpy as np
import pytest

from cloister.privacy.dpsgd import batches
from cloister.privacy.dpsgd.batches import Members, pieces, poisson, rows_of, shuffle, units_of
from cloister.utils.errors import ConfigError

N, Q, STEPS = 12, 0.3, 40_000


def table(batches):
    """Who took part: a row of 0s and 1s for each batch."""
    rows = np.zeros((STEPS, N))
    for row, batch in zip(rows, batches, strict=True):
        assert len(set(batch)) == len(batch)
        row[batch] = 1
    return rows


def drawn_independently(rows):
    """Whether everybody takes part with probability Q, and no two have to do with each other or with the last step."""
    deviation = 6 / math.sqrt(STEPS)
    standard = (rows - Q) / math.sqrt(Q * (1 - Q))
    pairs = standard.T @ standard / STEPS - np.eye(N)
    in_turn = standard[1:].T @ standard[:-1] / STEPS
    limits = [abs(standard.mean(axis=0)), abs(pairs[~np.eye(N, dtype=bool)]), abs(in_turn)]
    return all(np.all(found < deviation) for found in limits)


@pytest.mark.parametrize("seed", [3, None])
def test_poisson_draws_each_example_by_itself(seed):
    rows = table(poisson(N, Q, STEPS, seed))
    assert drawn_independently(rows)
    empty = (1 - Q) ** N
    assert abs(np.mean(~rows.any(axis=1)) - empty) < 6 * math.sqrt(empty / STEPS)


def test_the_test_of_independence_can_fail():
    rng = np.random.default_rng(0)
    assert not drawn_independently(table(shuffle(N, 3, STEPS, seed=3)))
    assert not drawn_independently((rng.random((STEPS, N)) < 1.1 * Q).astype(float))
    assert not drawn_independently(np.repeat(rng.random((STEPS // 2, N)) < Q, 2, axis=0).astype(float))


def test_a_seed_repeats_and_none_does_not():
    first, again, fresh = (list(poisson(2000, 0.5, 2, seed)) for seed in (5, 5, None))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], fresh[0]) and not np.array_equal(first[0], first[1])


def test_a_rate_of_one_takes_everybody_and_a_tiny_one_nobody():
    assert [list(batch) for batch in poisson(5, 1.0, 2)] == [[0, 1, 2, 3, 4]] * 2
    assert [len(batch) for batch in poisson(1000, 1e-15, 3)] == [0, 0, 0]
    assert [len(batch) for batch in poisson(0, 0.5, 2)] == [0, 0]


def test_of_all_numbers_those_below_the_rate_take_part(monkeypatch):
    """Of 2^64 equally likely numbers, q·2^64: to the last one, and never none."""
    for rate, last in ((0.5, 2**63 - 1), (2.0**-64, 0), (1e-30, 0), (1.0, 2**64 - 1)):
        drawn = np.array([0, last, min(last + 1, 2**64 - 1)], np.uint64)
        monkeypatch.setattr(batches, "_uniform", lambda seed, drawn=drawn: lambda count: drawn)
        (batch,) = poisson(3, rate, 1)
        assert list(batch) == ([0, 1, 2] if rate == 1 else [0, 1])


def test_batches_come_from_the_operating_system_alone(monkeypatch):
    """Whoever knows the state of a generator of numbers that is no cryptographic one knows who takes part."""

    def refused(*_):
        raise AssertionError("a generator that can be predicted")

    def drawn(byte):
        monkeypatch.setattr("os.urandom", lambda count: bytes([byte]) * count)
        return [batch.tolist() for batch in poisson(500, 0.5, 3)]

    monkeypatch.setattr(np.random, "default_rng", refused)
    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("seed", [1, None])
def test_shuffle_draws_a_new_order_when_one_is_used_up(seed):
    """Two orders of 50 are the same with probability 1/50!."""
    batches = list(shuffle(50, 10, 15, seed))
    orders = [np.concatenate(batches[start : start + 5]).tolist() for start in (0, 5, 10)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_shuffle_takes_everybody_once_an_order():
    batches = list(shuffle(10, 3, 7, seed=1))
    assert [len(batch) for batch in batches] == [3] * 7
    for start in (0, 3):
        assert len(set(np.concatenate(batches[start : start + 3]))) == 9


def test_pieces_hold_everybody_in_turn():
    for size in (1, 2, 7, 8, 100):
        for count in range(0, 3 * size + 2):
            parts = pieces(count, size)
            assert [i for part in parts for i in range(count)[part]] == list(range(count))
            assert all(part.stop - part.start == size for part in parts)
        assert pieces(0, size) == []


def test_the_order_of_a_seed_is_the_same_again():
    first, again, other = ([batch.tolist() for batch in shuffle(50, 10, 15, seed)] for seed in (4, 4, 5))
    assert first == again != other


def test_numbers_out_of_range_are_named_at_once():
    wrong = [
        *[
            (lambda rate=rate: poisson(10, rate, 1), f"sampling_rate must be above 0 and at most 1, got {rate}")
            for rate in (0.0, -0.1, 1.01, math.nan)
        ],
        (lambda: poisson(-1, 0.5, 1), "examples must be >= 0, got -1"),
        (lambda: poisson(10, 0.5, -1), "steps must be >= 0, got -1"),
        (lambda: shuffle(-1, 1, 1), "examples must be >= 0, got -1"),
        (lambda: shuffle(10, 1, -1), "steps must be >= 0, got -1"),
        (lambda: shuffle(10, 0, 1), "batch_size must be from 1 to the 10 examples, got 0"),
        (lambda: shuffle(10, 11, 1), "batch_size must be from 1 to the 10 examples, got 11"),
        (lambda: units_of(GROUPS, 0), "group_cap must be > 0, got 0"),
    ]
    for make, says in wrong:
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == says


def test_the_smallest_and_the_largest_part():
    assert [len(batch) for batch in shuffle(3, 1, 4, seed=1)] == [1] * 4
    assert [sorted(batch) for batch in shuffle(3, 3, 2, seed=1)] == [[0, 1, 2]] * 2
    assert list(poisson(3, 0.5, 0)) == list(shuffle(3, 1, 0)) == []


GROUPS = np.array(["d", "a", "d", "b", "a", "d", "e", "b", "d"])
"""Of four persons, whose examples are 1, 4; 3, 7; 0, 2, 5, 8; and 6."""
MEMBERS = [[1, 4], [3, 7], [0, 2, 5, 8], [6]]


class TestGroups:
    @pytest.mark.parametrize("groups", [GROUPS, GROUPS[:, None]])
    def test_all_examples_of_each_in_the_order_of_their_names(self, groups):
        for cap in (4, 100):
            assert [unit.tolist() for unit in units_of(groups, cap)] == MEMBERS
        assert units_of(groups[:0], 3) == []

    def test_of_a_large_one_any_may_be_kept(self):
        """With 400 seeds each of four examples is among three kept in 300 ± 6·√75 cases."""
        found = [units_of(GROUPS, 3, seed) for seed in range(400)]
        assert all([unit.tolist() for unit in units[:2]] == MEMBERS[:2] for units in found)
        kept = np.array([np.isin(MEMBERS[2], units[2]) for units in found])
        assert (kept.sum(axis=1) == 3).all() and (abs(kept.sum(axis=0) - 300) < 6 * math.sqrt(75)).all()
        assert all(np.all(np.diff(units[2]) > 0) for units in found)

    def test_a_seed_keeps_the_same_again(self):
        groups = np.zeros(1000)
        ((first,), (again,), (other,), (fresh,)) = (units_of(groups, 100, seed) for seed in (2, 2, 3, None))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other) and not np.array_equal(first, fresh)

    def test_rows_of_a_batch_and_the_number_of_their_unit(self):
        units = units_of(GROUPS, 4)
        rows, numbers = rows_of(units, np.array([2, 0, 3]))
        assert rows.tolist() == [0, 2, 5, 8, 1, 4, 6] and numbers.tolist() == [0, 0, 0, 0, 1, 1, 2]
        for found in rows_of(units, np.zeros(0, np.intp)):
            assert found.shape == (0,) and found.dtype == np.intp


class TestMembers:
    @pytest.mark.parametrize("groups", [GROUPS, GROUPS[:, None]])
    def test_a_row_for_each_group_filled_up_with_its_first(self, groups):
        members = Members(groups)
        assert len(members) == 4
        found, meant = members.table(slice(0, 4), 3)
        assert found.tolist() == [[1, 4, 1], [3, 7, 3], [0, 2, 5], [6, 6, 6]]
        assert meant.tolist() == [[True, True, False], [True, True, False], [True] * 3, [True, False, False]]
        found, meant = members.table(slice(2, 4), 1)
        assert found.tolist() == [[0], [6]] and meant.all()

    def test_the_first_of_many_are_kept(self):
        """Sorting that is not stable shows in long arrays alone."""
        groups = np.random.default_rng(1).integers(0, 3, 5000)
        found, meant = Members(groups).table(slice(0, 3), 50)
        assert found.tolist() == [np.flatnonzero(groups == group)[:50].tolist() for group in range(3)] and meant.all()
