"""Work on spans: each once, with a workspace that no other thread has, and the same result however many there are."""

import threading

import numpy as np
import pytest

from cloister.privacy.mechanisms import local, noise, release
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.laplace import LaplaceNoise
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.privacy.mechanisms.noise import GaussianNoise, noised
from cloister.privacy.mechanisms.release import noisy_mean, noisy_trimmed_mean
from cloister.utils import threads
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort
from cloister.utils.threads import Span, for_each_span, spans


@pytest.fixture
def many(monkeypatch):
    """Several threads, for any amount of work."""
    monkeypatch.setattr(threads, "THREADS", 3)
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)


def test_every_span_is_worked_on_once_and_no_two_threads_share_a_workspace(many):
    places, made, used = spans([1000, 0, 7], 10), [], []
    together = threading.Barrier(3, timeout=60)

    def workspace():
        made.append([threading.get_ident(), []])
        return made[-1]

    def work(span, mine):
        if not mine[1]:
            together.wait()  # nobody goes on before all threads have a span
        mine[1].append(threading.get_ident())
        used.append(span)

    for_each_span(places, work, workspace)
    assert sorted(used, key=places.index) == places and len(used) == 101
    assert {maker for maker, _ in made} == {threading.get_ident()}, "made on the thread that calls"
    users = [set(by) for _, by in made]
    assert [len(by) for by in users] == [1, 1, 1] and len(set.union(*users)) == 3


@pytest.mark.parametrize("cost", [0, 1])
def test_little_work_starts_no_thread(cost):
    seen = set()
    for_each_span(spans([50, 3], 10), lambda span, mine: seen.add(threading.get_ident()), list, cost)
    assert seen == {threading.get_ident()}


def test_spans_cover_every_number_once():
    assert spans([3, 0, 4, 5], 4) == [Span(0, 0, 3), Span(2, 0, 4), Span(3, 0, 4), Span(3, 4, 5)]
    assert spans([threads.BLOCK + 1]) == [Span(0, 0, threads.BLOCK), Span(0, threads.BLOCK, threads.BLOCK + 1)]
    row = (np.arange(3.0), np.arange(5.0))
    assert Span(1, 2, 4).of(row).tolist() == [2.0, 3.0] and Span(1, 2, 4).of(row).base is row[1]
    assert len(Span(1, 2, 4)) == 2


def test_no_spans_are_no_work():
    for_each_span([], lambda span, mine: pytest.fail("there is nothing to work on"), list)


def test_what_goes_wrong_on_a_thread_is_raised(many):
    def work(span, mine):
        raise ValueError("of a thread")

    with pytest.raises(ValueError, match="of a thread"):
        for_each_span(spans([100], 10), work, list)


def laplace():
    row = (np.zeros(100_000), np.ones(70_000))
    LaplaceNoise(1).add(row, 3.0)
    return row


START = {"a": np.zeros(100_000), "b": np.ones(70_000)}


def cohort():
    layout = Layout.of(START)
    rows = tuple(layout.rows({name: array + step for name, array in START.items()}) for step in (0.1, -0.3, 2.0))
    return clip(Cohort.of(layout, layout.rows(START), rows), 1.0)


MADE = {
    "mean": lambda: noisy_mean(cohort(), 1.0, 3, GaussianNoise(1)).model,
    "trimmed-mean": lambda: noisy_trimmed_mean(cohort(), 1.0, 3, 1, GaussianNoise(1)).model,
    "laplace": laplace,
    "local": lambda: LocalGaussian(1.0, 1.0).release({"a": START["a"] + 1, "b": START["b"]}, START, GaussianNoise(1)),
    "noised": lambda: noised(tuple(START.values()), 1.0, GaussianNoise(1)),
    "plain": lambda: (GaussianNoise(1).standard_normal(100_000),),
}


@pytest.mark.parametrize("name", MADE)
def test_noise_is_the_same_to_the_bit_however_threads_come_to_the_spans(name, monkeypatch):
    def flat():
        made = MADE[name]()
        return np.concatenate(list(made.values()) if isinstance(made, dict) else made)

    def from_behind(places, *given, **options):
        for_each_span(places[::-1], *given, **options)

    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(threads, "THREADS", 1)
    alone = flat()
    monkeypatch.setattr(threads, "THREADS", 3)
    for module in (noise, local, release, release):
        monkeypatch.setattr(module, "for_each_span", from_behind)
    np.testing.assert_array_equal(alone, flat())
    assert len(np.unique(alone)) > 1000
