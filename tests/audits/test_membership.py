"""Membership inference: the scores against models whose behaviour is known, the pool, and a run."""

import numpy as np
import pytest
from scipy import stats

from cloister.audits.membership import Seen, confidences, drawn, grouped
from cloister.audits.scores import auc
from cloister.config.run import TaskConfig
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.datasets.regressions import Linear

EXAMPLES, SHADOWS, EFFECT = 600, 16, 2.0
ATTACKS = ("loss_threshold", "lira_online", "lira_offline", "rmia")


@pytest.fixture
def world():
    """Examples of very different difficulty, of which a model that trained on one is surer by `EFFECT`."""
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0, 3, EXAMPLES)
    inside = drawn(EXAMPLES // 2, EXAMPLES, SHADOWS, 1)
    member = rng.random(EXAMPLES) < 0.5
    shadows = difficulty + EFFECT * inside + rng.normal(size=(SHADOWS, EXAMPLES))
    target = difficulty + EFFECT * member + rng.normal(size=EXAMPLES)
    return Seen(target, shadows, inside), member


def told(scores, member):
    return auc(scores[member], scores[~member])


def test_each_attack_finds_members(world):
    seen, member = world
    best = stats.norm.cdf(EFFECT / np.sqrt(2))
    # With few shadow models LiRA knows each example's mean only so well.
    assert told(seen.lira_online(), member) == pytest.approx(best, abs=0.04)
    assert told(seen.lira_offline(), member) == pytest.approx(best, abs=0.06)
    assert told(seen.loss_threshold(), member) == pytest.approx(stats.norm.cdf(EFFECT / np.sqrt(20)), abs=0.05)
    assert told(seen.rmia(), member) > told(seen.loss_threshold(), member) + 0.05


def test_exchanged_at_random_there_are_none_to_find(world):
    seen, member = world
    other = np.random.default_rng(5).permutation(member)
    found = {attack: told(getattr(seen, attack)(), other) for attack in ATTACKS}
    assert found == pytest.approx(dict.fromkeys(ATTACKS, 0.5), abs=0.07)


def test_shadow_models_with_shuffled_labels_teach_lira_nothing(world):
    seen, member = world
    broken = Seen(seen.target, seen.shadows, np.random.default_rng(5).permuted(seen.inside, axis=0))
    assert told(broken.lira_online(), member) < 0.6 < 0.85 < told(seen.lira_online(), member)


def test_lira_by_hand():
    inside = np.array([[True], [True], [False], [False]])
    seen = Seen(np.array([2.0]), np.array([[1.0], [3.0], [-1.0], [1.0]]), inside)
    # Means 2 and 0, and the variance around each: (1 + 1)/(2 - 1).
    expected = stats.norm.logpdf(2, 2, np.sqrt(2)) - stats.norm.logpdf(2, 0, np.sqrt(2))
    assert seen.lira_online() == pytest.approx([expected])
    assert seen.lira_offline() == pytest.approx([2 / np.sqrt(2)])


def test_rmia_by_hand():
    """Both kinds of shadow models say 1/2 of everything: examples are ranked by what the target says."""
    inside = np.array([[True] * 4, [True] * 4, [False] * 4, [False] * 4])
    seen = Seen(np.array([0.0, 2.0, 1.0, 1.0]), np.zeros((4, 4)), inside)
    assert seen.rmia() == pytest.approx([0.25, 1.0, 0.75, 0.75])


def test_a_shadow_model_as_target_is_not_its_own_reference(world):
    seen, _ = world
    other = seen.against(3)
    assert (other.target == seen.shadows[3]).all() and len(other.shadows) == len(other.inside) == SHADOWS - 1
    assert not (other.shadows == seen.shadows[3]).all(axis=1).any()
    assert told(other.lira_online(), seen.inside[3]) > 0.85


def test_every_example_is_inside_and_outside_of_two_models():
    for members in (0, 5, 50, 95, 100):
        inside = drawn(members, 100, 8, 0)
        assert inside.shape == (8, 100)
        assert inside.sum(axis=0).min() == inside.sum(axis=0).max() == np.clip(round(8 * members / 100), 2, 6)
        assert (inside != inside[:, :1]).any()


def test_sets_are_of_one_owner():
    scores, owners = np.array([1.0, 10.0, 3.0, 20.0, 99.0]), np.array([0, 1, 0, 1, 1])
    assert grouped(scores, owners, 2).tolist() == [2.0, 15.0]
    assert len(grouped(scores, owners, 9)) == 0


def test_confidence_is_the_logit_of_the_right_class():
    task = Digits(TaskConfig(name="digits"))
    said = np.array([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    found = confidences(task, np.array([0, 0, 1]), said)
    assert found[0] == pytest.approx(np.log(0.7 / 0.3), rel=1e-5)
    assert np.isfinite(found).all() and found[1] > 15 and found[2] < -15


def test_confidence_of_a_number_falls_with_its_error():
    found = confidences(Linear(TaskConfig(name="linear")), np.zeros(3), np.array([0.0, 0.1, 1.0]))
    assert np.isfinite(found).all() and (np.diff(found) < 0).all()
