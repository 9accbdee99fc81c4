"""What is counted class by class."""

import numpy as np
import pytest
from sklearn import metrics

from cloister.tasks.scores import Classification


def one_hot(predicted, classes):
    return np.eye(classes)[predicted]


@pytest.fixture
def told():
    rng = np.random.default_rng(5)
    scores = rng.dirichlet(np.ones(4), 200)
    return rng.integers(0, 4, 200), scores


def test_it_agrees_with_scikit_learn(told):
    y, scores = told
    predicted, found = scores.argmax(axis=1), Classification.of(*told)
    np.testing.assert_array_equal(found.confusion, metrics.confusion_matrix(y, predicted))
    precision, recall, f1, support = metrics.precision_recall_fscore_support(y, predicted)
    for number, scored in enumerate(found.classes):
        assert (scored.precision, scored.recall, scored.f1) == pytest.approx(
            (precision[number], recall[number], f1[number])
        )
        assert scored.support == support[number] and scored.name == str(number)
    assert found.macro_f1 == pytest.approx(f1.mean())
    assert found.auc == pytest.approx(metrics.roc_auc_score(y, scores, multi_class="ovr"))


def test_rows_are_true_and_columns_predicted():
    found = Classification.of(np.array([0, 0, 1]), one_hot([1, 1, 1], 2), ("well", "ill"))
    assert found.confusion == ((0, 2), (0, 1))
    assert [scored.name for scored in found.classes] == ["well", "ill"]
    assert found.classes[0].precision == found.classes[0].recall == found.classes[0].f1 == 0


def test_a_class_without_examples_is_left_out_of_the_mean():
    found = Classification.of(np.array([0, 1]), one_hot([0, 1], 3))
    assert found.macro_f1 == 1 and found.classes[2].support == 0 and found.auc is None


def test_two_classes_have_the_area_of_class_one():
    y, scores = np.array([0, 1, 1, 0]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    assert Classification.of(y, scores).auc == metrics.roc_auc_score(y, scores[:, 1])


def test_a_model_that_diverged_has_no_area():
    assert Classification.of(np.array([0, 1]), np.full((2, 2), np.nan)).auc is None
