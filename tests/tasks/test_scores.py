"""Count class by class, and compute the figures that imbalance does not flatter."""

import numpy as np
import pytest
from sklearn import metrics
from support import failures

from cloister.config.run import parse
from cloister.tasks import TASKS
from cloister.tasks.scores import RATES, Classification, class_figures, roc_curves


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


def test_roc_curves_are_those_of_scikit_learn(told):
    y, scores = told
    for number, curve in enumerate(roc_curves(y[:, None] == np.arange(4), scores, "abcd")):
        inside = y == number
        assert curve.name == "abcd"[number]
        assert curve.auc == pytest.approx(metrics.roc_auc_score(inside, scores[:, number]))
        alarms, found, _ = metrics.roc_curve(inside, scores[:, number], drop_intermediate=False)
        for rate, share in zip(RATES, curve.found, strict=True):
            above = alarms == alarms[alarms >= rate].min()
            assert found[alarms <= rate].max() - 1e-4 <= share <= found[above].max() + 1e-4


def test_a_perfect_score_finds_all_without_false_alarms():
    (curve,) = roc_curves(np.array([[0], [1], [1]]), np.array([[0.1], [0.8], [0.9]]), ["ill"])
    assert curve.auc == 1 and set(curve.found) == {1.0}


def test_there_is_no_curve_of_a_class_that_all_or_none_are_of_or_of_a_model_that_diverged():
    members = np.array([[0, 1, 0], [0, 1, 1]])
    (curve,) = roc_curves(members, np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]), "abc")
    assert (curve.name, curve.auc) == ("c", 0)
    assert roc_curves(members, np.full((2, 3), np.nan), "abc") == []


def test_a_class_without_examples_is_left_out_of_the_mean():
    found = Classification.of(np.array([0, 1]), one_hot([0, 1], 3))
    assert found.macro_f1 == 1 and found.classes[2].support == 0 and found.auc is None


def test_two_classes_have_the_area_of_class_one():
    y, scores = np.array([0, 1, 1, 0]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    assert Classification.of(y, scores).auc == metrics.roc_auc_score(y, scores[:, 1])


def test_a_model_that_diverged_has_no_area():
    assert Classification.of(np.array([0, 1]), np.full((2, 2), np.nan)).auc is None


def test_figures_of_imbalanced_classes_are_those_of_scikit_learn():
    def check(share, classes, digits):
        rng = np.random.default_rng(classes)
        y = np.where(rng.random(300) < share, 0, rng.integers(0, classes, 300))
        scores = rng.dirichlet(np.ones(classes), 300) + np.eye(classes)[y]
        scores = np.round(scores / scores.sum(axis=1, keepdims=True), digits)  # few digits: many ties
        found, ovr = class_figures(y, scores), [metrics.roc_auc_score(y == k, scores[:, k]) for k in range(classes)]
        assert found["f1"] == pytest.approx(metrics.f1_score(y, scores.argmax(axis=1), average="macro"))
        assert found["auc"] == pytest.approx(ovr[1] if classes == 2 else np.mean(ovr))

    assert failures([(0.9, 2, 9), (0.9, 2, 1), (0.8, 3, 1), (0.5, 7, 2)], check) == []


def test_the_majority_flatters_accuracy_and_neither_figure():
    y, constant = (np.arange(100) < 5).astype(int), np.tile([0.9, 0.1], (100, 1))
    found = class_figures(y, constant)
    assert Classification.of(y, constant).majority == 0.95 == np.mean(constant.argmax(axis=1) == y)
    assert found["auc"] == 0.5 and found["f1"] < 0.5


def test_of_one_class_there_is_an_f1_and_no_area():
    assert class_figures(np.zeros(3, int), one_hot([0, 0, 1], 2)).keys() == {"f1"}


def test_tasks_of_classes_report_them_and_others_do_not():
    def check(name, figures):
        task = TASKS.load(name)(parse({"task.name": name}).task)
        classes = task.classes or 2
        y = np.arange(2 * classes) % classes
        found = task.metrics(y, np.full((len(y), classes), 1 / classes) if task.classes else np.zeros(len(y)))
        assert figures <= set(found) and (task.classes or not {"f1", "auc"} & set(found))

    cases = [(name, {"loss", "accuracy", "f1", "auc"}) for name in ("digits", "breast-cancer", "heart-disease")]
    assert failures([*cases, ("linear", {"loss", "rmse"})], check) == []
