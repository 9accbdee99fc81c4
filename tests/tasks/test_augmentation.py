"""Random changes of examples: each by itself, whoever else is there."""

import numpy as np
import pytest
from test_faults import made

from cloister.config.run import TaskConfig
from cloister.tasks import TASKS
from cloister.tasks.base import Recipe
from cloister.tasks.recipe import Augmentation, key_of, mirrored, shifted, transforms_of
from cloister.utils.errors import DataError

X = np.random.default_rng(0).random((6, 4, 4), np.float32)
BOTH = Augmentation((mirrored, shifted))
KEY = key_of("secret", 3)


def jittered(example, rng):
    return example + rng.normal(0, 1, example.shape).astype(example.dtype)


def test_what_becomes_of_an_example_does_not_depend_on_the_others():
    whole = BOTH.changed(X, KEY)
    for order in ([3], [5, 3, 0], [3, 3]):
        np.testing.assert_array_equal(BOTH.changed(X[order], KEY), whole[order])


def test_another_step_and_another_key_change_it_in_another_way():
    jitter = Augmentation((jittered,))
    found = [jitter.changed(X, key_of(*parts)) for parts in (("a", 1), ("a", 1), ("a", 2), ("b", 1))]
    np.testing.assert_array_equal(found[0], found[1])
    assert not any(np.array_equal(found[0][i], other[i]) for other in found[2:] for i in range(len(X)))


def test_different_examples_draw_different_numbers():
    moved = Augmentation((jittered,)).changed(X, KEY) - X
    assert len({tuple(np.round(row.ravel(), 4)) for row in moved}) == len(X)


def test_the_examples_themselves_stay_as_they_are():
    def zeroed(example, rng):
        example[:] = 0
        return example

    before = X.copy()
    assert not Augmentation((zeroed,)).changed(X, KEY).any()
    np.testing.assert_array_equal(X, before)


def test_a_picture_is_mirrored_half_of_the_time():
    """2,000 tosses: 0.5 ± 0.06 is more than five standard deviations."""
    rng = np.random.default_rng(1)
    flipped = [np.array_equal(mirrored(X[0], rng), X[0][:, ::-1]) for _ in range(2000)]
    assert np.mean(flipped) == pytest.approx(0.5, abs=0.06)


def test_a_picture_is_shifted_by_an_eighth_at_most_with_zeros_behind_it():
    picture, places = np.zeros((17, 17), np.float32), set()
    picture[8, 8] = 1
    for seed in range(300):
        moved = shifted(picture, np.random.default_rng(seed))
        assert moved.sum() == 1
        places.add(tuple(int(axis[0]) - 8 for axis in np.nonzero(moved)))
    assert places == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}
    full = shifted(np.ones((8, 8, 3), np.float32), np.random.default_rng(3))
    assert full.shape == (8, 8, 3) and set(np.unique(full)) <= {0.0, 1.0}


@pytest.mark.parametrize(("name", "known"), [("digits", True), ("mnist", True), ("breast-cancer", False)])
def test_tasks_of_pictures_know_the_transforms_of_pictures(name, known):
    assert list(transforms_of(TASKS.load(name)(TaskConfig(name=name)))) == (["flip", "shift"] if known else [])


def test_a_flat_picture_is_changed_as_a_picture():
    digits = TASKS.load("digits")(TaskConfig())
    x = np.arange(64, dtype=np.float32)[None]
    flip = Augmentation.of(digits, Recipe(1, 1, 0.1, augmentation=("flip",)))
    found = {tuple(flip.changed(x, key_of(step))[0]) for step in range(20)}
    assert found == {tuple(x[0]), tuple(x.reshape(8, 8)[:, ::-1].ravel())}


def test_a_task_brings_transforms_of_its_own():
    task = made(transforms={"jitter": jittered})
    assert list(transforms_of(task)) == ["jitter"]
    assert Augmentation.of(task, Recipe(1, 1, 0.1)) is None
    assert Augmentation.of(task, Recipe(1, 1, 0.1, augmentation=("jitter",))).transforms == (jittered,)


def failing(example, rng):
    if example[0, 0] > 0.5:
        raise ValueError(f"{example}")
    return example


def test_where_a_transform_fails_under_dp_only_that_example_is_lost():
    broken = X[:, 0, 0] > 0.5
    assert broken.any() and not broken.all()
    found = Augmentation((failing,)).changed_or_lost(X, KEY)
    assert np.isnan(found[broken]).all()
    np.testing.assert_array_equal(found[~broken], X[~broken])
    shrinking = Augmentation((lambda example, rng: example[:2],))
    assert np.isnan(shrinking.changed_or_lost(X, KEY)).all()


def test_and_without_dp_it_is_an_error():
    with pytest.raises(DataError, match=r"a transform gives shape \(2, 4\), expected \(4, 4\)"):
        Augmentation((lambda example, rng: example[:2],)).changed(X, KEY)
