"""Batches are drawn as they are accounted for. False alarms: six deviations, 2e-9 each, and seeds are fixed."""

import math

import numpy as np
import pytest

from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd import batches
from cloister.privacy.dpsgd.batches import pieces, poisson, shuffle

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


@pytest.mark.parametrize(("rate", "last"), [(0.5, 2**63 - 1), (2.0**-64, 0), (1e-30, 0), (1.0, 2**64 - 1)])
def test_of_all_numbers_those_below_the_rate_take_part(monkeypatch, rate, last):
    """Of 2^64 equally likely numbers, q·2^64: to the last one, and never none."""
    drawn = np.array([0, last, min(last + 1, 2**64 - 1)], np.uint64)
    monkeypatch.setattr(batches, "_uniform", lambda seed: lambda count: drawn)
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


@pytest.mark.parametrize("size", [1, 2, 7, 8, 100])
def test_pieces_hold_everybody_in_turn(size):
    for count in range(0, 3 * size + 2):
        parts = pieces(count, size)
        assert [i for part in parts for i in range(count)[part]] == list(range(count))
        assert all(part.stop - part.start == size for part in parts)
    assert pieces(0, size) == []


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.01, math.nan])
def test_a_rate_must_be_a_probability(rate):
    with pytest.raises(ConfigError, match="sampling_rate"):
        poisson(10, rate, 1)


@pytest.mark.parametrize("wrong", [{"examples": -1}, {"steps": -1}])
def test_numbers_of_a_shuffle_are_none_below_zero(wrong):
    (key,) = wrong
    with pytest.raises(ConfigError, match=key):
        shuffle(**{"examples": 10, "batch_size": 1, "steps": 1} | wrong)


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_part_must_fit(batch_size):
    with pytest.raises(ConfigError, match="batch_size"):
        shuffle(10, batch_size, 1)
