"""Every mistake in a task of a user's own is one line that says what to do."""

from pathlib import Path

import numpy as np
import pytest
from support import failures

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Recipe, Regression, Task
from cloister.tasks.faults import (
    faults_of_attributes,
    faults_of_examples,
    faults_of_model,
    faults_of_naming,
    refuse_faulty,
    sample,
)
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.targets import Target
from cloister.utils.errors import ConfigError

X = np.random.default_rng(0).random((20, 4), np.float32)
Y = np.arange(20) % 3


class Sound(Task):
    recipe = Recipe(local_epochs=1, batch_size=8, learning_rate=0.1)
    classes = 3
    input_shape = (4,)
    models = ("softmax",)

    def load(self):
        return Dataset(Examples(X, Y), Examples(X, Y))

    def build(self):
        return SoftmaxRegression(features=4, classes=3)


class Numbers(Regression):
    recipe, input_shape, models = Sound.recipe, (4,), ("softmax",)
    load, build = Sound.load, Sound.build


class Outputs(SoftmaxRegression):
    """Predicts what it is told to."""

    def __init__(self, change):
        super().__init__(features=4, classes=3)
        self.change = change

    def predict(self, x):
        return self.change(super().predict(x))


def made(kind=Sound, **attributes):
    return type("Mine", (kind,), attributes)(TaskConfig())


def texts(faults):
    return [str(fault) for fault in faults]


def one(faults):
    (text,) = texts(faults)
    assert len(text) < 200 and "\n" not in text and "[" not in text
    return text


def test_a_sound_task_has_no_fault():
    task = made(class_names=("a", "b", "c"), image_shape=(2, 2))
    examples = Examples(X, Y)
    assert texts(faults_of_attributes(task)) == texts(faults_of_examples(task, examples, "load()")) == []
    assert texts(faults_of_model(task, task.build(), X)) == texts(faults_of_naming(task, task.build())) == []
    refuse_faulty(task, task.build(), examples)
    refuse_faulty(task, task.build(), None)


def test_what_a_class_says_and_cannot_be():
    def check(attributes, says):
        task = made(**attributes)
        text = one(faults_of_attributes(task))
        with pytest.raises(ConfigError, match=says) as refusal:
            refuse_faulty(task, SoftmaxRegression(features=4, classes=3), None)
        assert str(refusal.value) == f"task 'digits': {text}"

    assert not failures(
        [
            ({"classes": 1}, "classes: 1; give the number of classes, 2 or more"),
            ({"class_names": ("a", "b")}, "class_names: 2 names; give 3 different names"),
            ({"class_names": ("a", "b", "b")}, "class_names: 3 names; give 3 different names"),
            ({"class_names": "abc"}, "class_names: 3 names; give 3 different names"),
            ({"input_shape": 4}, "input_shape: 4; give a tuple of whole numbers"),
            ({"input_shape": (4, 0)}, r"input_shape: \(4, 0\); give a tuple"),
            ({"image_shape": (3, 3)}, r"image_shape: \(3, 3\); it must have as many pixels as input_shape \(4,\)"),
        ],
        check,
    )


def test_examples_that_cannot_be_trained_on():
    def check(x, y, says):
        assert says in one(faults_of_examples(made(), Examples(x, y), "load()"))

    assert not failures(
        [
            (X[:0], Y[:0], "load(): no examples; at least one is needed"),
            (X[:, :3], Y, "inputs of shape (3,), where input_shape is (4,); reshape them, or set input_shape to (3,)"),
            (X.astype(str), Y, "inputs of <U32; make them numbers: float32"),
            (np.where(X > 0.9, np.nan, X), Y, "inputs; leave these rows out"),
            (np.full((20, 4), 1e39), Y, "NaN or infinity in 20 of 20 inputs; leave these rows out"),
            (X, np.eye(3)[Y], "targets of shape (20, 3); give shape (n,): use .argmax(axis=1) on one-hot rows"),
            (X, Y.astype(float), "labels of float64; make them integers"),
            (X, np.array(["a", "b", "c"])[Y], "labels of <U1; make them integers, the places in class_names"),
            (X, Y + 1, "labels from 1 to 3, where classes is 3; they must lie from 0 to 2; labels from 1 need - 1"),
            (X, Y - 1, "labels from -1 to 1, where classes is 3"),
        ],
        check,
    )


def test_several_faults_are_several_lines():
    task, examples = made(), Examples(X[:, :2], Y + 7)
    with pytest.raises(ConfigError) as refusal:
        refuse_faulty(task, task.build(), examples)
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == ["task 'digits'"] * 2


def test_targets_of_a_regression():
    def check(y):
        assert "make them finite float32" in one(faults_of_examples(made(Numbers), Examples(X, y), "load()"))
        assert texts(faults_of_examples(made(Numbers), Examples(X, np.linspace(-1, 1, 20)), "load()")) == []

    assert not failures([np.array(["a"] * 20), np.full(20, np.nan)], check)


def test_models_that_cannot_be_scored():
    def check(change, says):
        assert says in one(faults_of_model(made(), Outputs(change), X))

    assert not failures(
        [
            (lambda out: out[:, :2], "outputs of shape (20, 2), expected (20, 3); end it with 3 units"),
            (
                lambda out: np.log(out + 0.1),
                "no probabilities, such as logits; end the model with activation='softmax'",
            ),
            (lambda out: 1 / (1 + np.exp(-out)), "no probabilities"),
            (lambda out: out * np.nan, "NaN or infinite; check the initial weights"),
            (lambda out: out / np.zeros((7, 7)), f"the model cannot predict: ValueError at {Path(__file__).name}:"),
        ],
        check,
    )


def test_a_faulty_model_does_not_hide_faulty_scores():
    def check(change):
        task = made(metrics=lambda self, y, scores: {"accuracy": np.nan}, losses=lambda self, y, scores: 0.5)
        of_model, *of_scores = texts(faults_of_model(task, Outputs(change), X))
        assert of_model.startswith("build(): ")
        assert [text.split(";")[0] for text in of_scores] == [
            "metrics(): no 'loss'",
            "losses(): shape ()",
        ]

    assert not failures([lambda out: out[:, :2], lambda out: out * np.nan, lambda out: out / np.zeros(7)], check)


def test_a_regression_ends_with_one_number():
    assert "outputs of shape (20, 3), expected (20,); end it with one unit" in one(
        faults_of_model(made(Numbers), SoftmaxRegression(features=4, classes=3), X)
    )


def test_arrays_that_cannot_be_sent():
    class Whole(SoftmaxRegression):
        def arrays(self):
            return super().arrays() | {"counter": np.zeros(1, np.int64)}

    class Empty(SoftmaxRegression):
        def arrays(self):
            return {}

    (first, *_) = texts(faults_of_model(made(), Whole(features=4, classes=3), X))
    assert "weight counter of int64; use a layer with float weights" in first
    assert "a model without weights" in one(faults_of_model(made(), Empty(features=4, classes=3), X))


def test_names_that_change():
    class Renamed(SoftmaxRegression):
        made = 0

        def __init__(self):
            super().__init__(features=4, classes=3)
            Renamed.made += 1
            self.number = Renamed.made

        def arrays(self):
            return {f"{self.number}/{name}": array for name, array in super().arrays().items()}

    task = made(build=lambda self: Renamed())
    assert "arrays of other names or shapes when it is called again" in one(faults_of_naming(task, task.build()))


def test_a_model_that_can_be_built_only_once():
    rest = [SoftmaxRegression(features=4, classes=3)]
    task = made(build=lambda self: rest.pop())
    text = one(faults_of_naming(task, task.build()))
    assert f"an error when it is called again: IndexError at {Path(__file__).name}:" in text


def test_metrics_that_fail():
    def check(metrics, says):
        task = made(metrics=metrics)
        assert says in one(faults_of_model(task, task.build(), X))

    assert not failures(
        [
            (lambda self, y, scores: 1 / 0, f"metrics(): ZeroDivisionError at {Path(__file__).name}:"),
            (lambda self, y, scores: {"loss": np.nan}, "metrics(): a 'loss' that is not finite"),
            (lambda self, y, scores: {"loss": scores}, "metrics(): values that are no numbers"),
            (lambda self, y, scores: [0.5], "metrics(): values that are no numbers; return a dict"),
            (lambda self, y, scores: {"accuracy": 0.5}, "metrics(): no 'loss'; add it"),
        ],
        check,
    )


def test_a_metric_that_is_undefined_on_the_sample_is_no_fault():
    """The AUC of one class is NaN, or raises."""

    class Findings(Sound):
        classes, target = 0, Target("binary-cross-entropy", shape=(3,))

        def metrics(self, y, scores):
            assert all(set(finding) == {0, 1} for finding in y.T), "both classes are there"
            return super().metrics(y, scores) | {"first": np.nan}

    task = made(Findings)
    assert texts(faults_of_model(task, task.build(), sample(task, None))) == []
    assert texts(faults_of_model(made(metrics=lambda *_: {"loss": 0.5, "auc": np.nan}), task.build(), X)) == []


def test_made_up_targets_have_every_class():
    class Places(Sound):
        classes, target = (
            0,
            {"stage": Target(shape=(2,), classes=3), "age": Target("mse"), "ill": Target("binary-cross-entropy")},
        )

    y = made(Places).placeholders(4).y
    assert y["stage"].tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert y["age"].tolist() == [0] * 4 and y["ill"].tolist() == [0, 1, 0, 1]


def test_losses_that_are_not_one_an_example():
    def check(losses):
        task = made(losses=losses)
        assert "losses(): shape" in one(faults_of_model(task, task.build(), X))

    assert not failures([lambda self, y, scores: 0.5, lambda self, y, scores: y[:, None]], check)


def test_a_sample_is_of_the_task_or_made_up():
    task = made()
    assert sample(task, None).shape == (2, 4)
    assert np.array_equal(sample(task, Examples(np.tile(X, (9, 1)), np.tile(Y, 9))), np.tile(X, (9, 1))[:64])
