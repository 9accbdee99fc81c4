"""Targets: what a loss takes and gives, for one example as for many; and tasks that state them."""

import dataclasses

import kinds
import numpy as np
import pytest
from kinds import Kind, made
from support import failures

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Recipe, Task
from cloister.tasks.faults import faults_of_attributes, faults_of_examples
from cloister.tasks.partition import deal
from cloister.tasks.recipe import transforms_of
from cloister.tasks.splits import dataset_of_owners
from cloister.tasks.targets import Target
from cloister.utils.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
SHARES = RNG.random((8, 3))
FINDINGS = RNG.integers(0, 2, (8, 3))


def probabilities(*shape):
    scores = RNG.random(shape) + 0.1
    return scores / scores.sum(axis=-1, keepdims=True)


# Losses and metrics


def by_hand(target, y, scores):
    """The losses of examples, one number after another."""
    losses = []
    for true, said in zip(y, scores, strict=True):
        each = []
        for place in np.ndindex(target.shape):
            t, p = true[place], said[place]
            match target.loss:
                case "cross-entropy":
                    each.append(-np.log(p[t]))
                case "binary-cross-entropy":
                    each.append(-np.log(p if t else 1 - p))
                case "mae":
                    each.append(abs(p - t))
                case _:
                    each.append((p - t) ** 2)
        losses.append(np.mean(each))
    return losses


CASES = [
    (Target(classes=4), RNG.integers(0, 4, 8), probabilities(8, 4)),
    (Target(shape=(2, 5), classes=3), RNG.integers(0, 3, (8, 2, 5)), probabilities(8, 2, 5, 3)),
    (Target("binary-cross-entropy", (3,)), FINDINGS, SHARES),
    (Target("binary-cross-entropy"), FINDINGS[:, 0], SHARES[:, 0]),
    (Target("binary-cross-entropy", (2, 2)), RNG.integers(0, 2, (8, 2, 2)), RNG.random((8, 2, 2))),
    (Target("mse"), RNG.random(8), RNG.random(8)),
    (Target("rmse", (2,)), RNG.random((8, 2)), RNG.random((8, 2))),
    (Target("mae", (2, 3, 1)), RNG.random((8, 2, 3, 1)), RNG.random((8, 2, 3, 1))),
]


def test_a_loss_is_the_mean_over_the_numbers_of_an_example():
    def check(target, y, scores):
        losses = target.losses(y, scores)
        assert losses.shape == (8,)
        np.testing.assert_allclose(losses, by_hand(target, y, scores), rtol=1e-6)
        assert target.metrics(y, scores)["loss"] == pytest.approx(losses.mean())

    assert not failures(CASES, check)


def test_metrics_say_what_their_names_do():
    def check(target, y, scores, expected):
        found = target.metrics(y, scores)
        assert {name: pytest.approx(found[name]) for name in found if name != "loss"} == expected

    half = np.array([0.2, 0.8, 0.9, 0.4])
    assert not failures(
        [
            (Target("binary-cross-entropy"), np.array([0, 1, 0, 1]), half, {"accuracy": 0.5, "auc": 0.5}),
            (Target("binary-cross-entropy"), np.array([1, 1, 1, 1]), half, {"accuracy": 0.5}),
            (Target("binary-cross-entropy", (2, 1)), np.ones((4, 2, 1)), np.full((4, 2, 1), 0.6), {"accuracy": 1.0}),
            (Target("mae"), np.zeros(4), np.array([1.0, -1.0, 3.0, 3.0]), {"mae": 2.0}),
            (Target("mse"), np.zeros(4), np.array([1.0, -1.0, 3.0, 3.0]), {"rmse": 5**0.5}),
            (Target("rmse", (2,)), np.zeros((1, 2)), np.array([[1.0, 7.0]]), {"rmse": 5.0}),
        ],
        check,
    )


def test_the_auc_is_a_mean_over_the_findings_that_have_one():
    y = np.array([[0, 1, 1], [1, 1, 0], [0, 1, 1]])
    scores = np.array([[0.1, 0.5, 0.2], [0.9, 0.5, 0.1], [0.2, 0.5, 0.3]])
    assert Target("binary-cross-entropy", (3,)).metrics(y, scores)["auc"] == 1.0


def test_a_valid_target_does_not_depend_on_others():
    def check(target, y, bad):
        rows = np.concatenate([y.astype(np.asarray(bad).dtype, copy=False), np.asarray(bad)[None]])
        assert target.usable(rows).tolist() == [True] * 8 + [False]

    assert not failures(
        [
            (*CASES[0][:2], np.int64(4)),
            (*CASES[1][:2], np.full((2, 5), -1)),
            (*CASES[2][:2], np.array([0.0, 0.5, 1.0])),
            (*CASES[6][:2], np.array([0.0, np.inf])),
            (*CASES[7][:2], np.full((2, 3, 1), 1e39)),
        ],
        check,
    )


def test_targets_that_no_model_can_be_trained_on():
    def check(target, says):
        class Mine(kinds.Findings):
            pass

        Mine.target = target
        (text,) = map(str, faults_of_attributes(made(Mine)))
        assert text.startswith("target: ") and says in text

    assert not failures(
        [
            (Target("crossentropy", classes=3), "loss 'crossentropy' is none of cross-entropy, binary-cross-entropy"),
            (Target(classes=3), "one label for each example; state classes = 3 in its place"),
            ({"5 year risk": Target("mse")}, "the name '5 year risk'; use 1 to 20 letters, digits and _"),
            ({"a": Target("mse"), "b" * 21: Target("mse")}, "letters, digits and _"),
            (Target(classes=1, shape=(2,)), "'cross-entropy' needs the number of classes, 2 or more; found classes 1"),
            (Target("mse", classes=3), "'mse' takes numbers; leave out classes"),
            (Target("mse", shape=(3, 0)), "shape (3, 0) must be a tuple of whole numbers above 0"),
            (Target("mse", weight=0.0), "weight 0.0 must be a finite number above 0"),
            ({"a": Target("mse"), "b": Target()}, "target: b: 'cross-entropy' needs"),
        ],
        check,
    )


def test_a_task_states_classes_or_a_target():
    class Both(kinds.Findings):
        classes = 3

    class Neither(Kind):
        pass

    assert "classes: 3 beside a target; leave them out" in str(next(faults_of_attributes(made(Both))))
    assert "classes: 0; give the number of classes, 2 or more; state a target" in str(
        next(faults_of_attributes(made(Neither)))
    )


class Labels(Task):
    recipe, models, classes, input_shape = Recipe(1, 8, 0.1), ("none",), 3, (4,)

    def load(self):
        raise NotImplementedError

    build = load


def test_the_remedy_is_true_for_the_targets_that_were_found():
    """`argmax` on findings would train on the first finding of each patient."""

    def check(y, remedy):
        (text,) = map(str, faults_of_examples(Labels(TaskConfig()), Examples(np.zeros((8, 4)), y), "load()"))
        assert text.endswith(remedy)
        assert ("argmax" in text) == ("argmax" in remedy)

    assert not failures(
        [
            (np.eye(3, dtype=int)[RNG.integers(0, 3, 8)], "use .argmax(axis=1) on one-hot rows"),
            (FINDINGS, "state target = Target('binary-cross-entropy', shape=(3,))"),
            (RNG.integers(0, 3, (8, 4, 4)), "state target = Target('cross-entropy', shape=(4, 4), classes=3)"),
            (RNG.integers(0, 2, (8, 4, 4, 1)), "state target = Target('binary-cross-entropy', shape=(4, 4, 1))"),
            (RNG.random((8, 4)), "state target = Target('mse', shape=(4,))"),
            (RNG.integers(0, 3, (8, 1)), "give shape (n,): use y[:, 0]"),
        ],
        check,
    )


# Tasks


def test_the_loss_of_several_outputs_is_their_weighted_sum():
    task = made(kinds.Scans)
    y = task.load().test.y
    scores = Examples({"stage": np.full((len(y), 3), 1 / 3), "volume": y["volume"] + 2}, y).x
    np.testing.assert_allclose(task.losses(y, scores), np.log(3) + 0.5 * 4, rtol=1e-6)
    found = task.metrics(y, scores)
    assert set(found) >= {"loss", "stage.loss", "stage.accuracy", "volume.loss", "volume.rmse"}
    assert found["volume.rmse"] == pytest.approx(2) and found["loss"] == pytest.approx(task.losses(y, scores).mean())


def stored(path, examples, **others):
    arrays = {}
    for letter, rows in (("x", examples.x), ("y", examples.y)):
        for name in rows.dtype.names or [""]:
            arrays[f"{letter}_{name}" if name else letter] = rows[name] if name else rows
    np.savez(path, **(arrays | others))
    return path


def test_a_site_s_file_holds_what_the_task_states(tmp_path):
    def check(kind):
        task = made(kind)
        examples = task.load().train
        read = task.read(stored(tmp_path / f"{kind.__name__}.npz", examples))
        assert read.x.dtype.names == examples.x.dtype.names and read.y.shape == examples.y.shape
        np.testing.assert_allclose(task.losses(read.y, _perfect(task, read.y)).mean(), 0, atol=1e-6)

    assert not failures([kind for kind in kinds.KINDS if kind is not kinds.Robust], check)


def _perfect(task, y):
    said = {}
    for name, target in task.targets.items():
        own = y[name] if name else y
        said[name] = np.eye(target.classes)[own] if target.classes else own
    return said[""] if "" in said else Examples(said, y).x


def test_a_file_that_does_not_hold_it_is_refused_in_words(tmp_path):
    def check(kind, changes, says):
        task = made(kind)
        with pytest.raises(DataError) as refusal:
            task.read(stored(tmp_path / "site.npz", task.load().train, **changes))
        assert says in str(refusal.value)

    assert not failures(
        [
            (kinds.Findings, {"y": np.full((64, 3), 2)}, "holds targets that are not 0 or 1 of shape (n, 3)"),
            (kinds.Findings, {"y": np.zeros((64, 4))}, "found x of float32 and y of float64 (64, 4)"),
            (kinds.Masks, {"y": np.full((64, 4, 4), 3)}, "not labels from 0 to 2 of shape (n, 4, 4)"),
            (
                kinds.Scans,
                {"x_age": np.zeros((64, 2))},
                "must hold inputs of shape {'picture': (4, 4, 1), 'age': (1,)}",
            ),
            (kinds.Scans, {"y_volume": np.full(64, np.nan)}, "volume finite numbers"),
            (
                kinds.Scans,
                {"y_stage": np.zeros(63, int)},
                "must be an .npz file with arrays x_picture, x_age (numbers)",
            ),
        ],
        check,
    )


def test_a_row_that_is_faulty_leaves_the_others_usable():
    task = made(kinds.Scans)
    examples = task.load().train
    examples.x["age"][3], examples.y["stage"][5] = np.nan, 7
    assert np.flatnonzero(~task.usable(examples)).tolist() == [3, 5]


def test_partitions_by_class_are_refused_without_a_class_of_each_example():
    def check(kind):
        data = made(kind).load()
        parts = deal(TaskConfig(name="mine"), "iid", data, 3, kind.classes, 0)
        assert sorted(np.concatenate(parts)) == list(range(len(data.train)))
        for partition in ("shards", "dirichlet", "table"):
            with pytest.raises(ConfigError, match=r"deals by class, and an example of .*'mine' has none"):
                deal(TaskConfig(name="mine", partition=partition), "iid", data, 3, kind.classes, 0)

    assert not failures([kinds.Findings, kinds.Masks, kinds.Autoencoder, kinds.Scans], check)


def test_a_picture_is_not_turned_without_its_mask():
    class Whole(kinds.Lesions):
        target = Target("binary-cross-entropy", shape=(2,))

    assert transforms_of(made(kinds.Lesions)) == {} == transforms_of(made(kinds.Scans))
    assert "flip" in transforms_of(made(Whole))


class TestWeightsOfExamples:
    class Weighted(kinds.Measures):
        weighted = True

        def examples(self, rng, count):
            return dataclasses.replace(super().examples(rng, count), weights=np.arange(count) % 3)

    def test_they_are_in_the_file_of_a_site_whose_task_states_them(self, tmp_path):
        task = made(self.Weighted)
        examples = task.load().train
        path = stored(tmp_path / "site.npz", examples, weights=examples.weights)
        np.testing.assert_array_equal(task.read(path).take(np.arange(1, 5)).weights, [1, 2, 0, 1])
        assert made(kinds.Measures).read(path).weights is None
        with pytest.raises(DataError, match=r"and weights \(numbers, one a row\)"):
            task.read(stored(tmp_path / "none.npz", examples))

    def test_a_weight_that_is_no_weight_costs_its_row_alone(self, tmp_path):
        task = made(self.Weighted)
        examples = task.load().train
        weights = np.where(np.arange(64) == 2, -1.0, np.where(np.arange(64) == 4, np.nan, 1.0))
        path = stored(tmp_path / "site.npz", examples, weights=weights)
        assert np.flatnonzero(~task.usable(task.rows(path))).tolist() == [2, 4]
        with pytest.raises(DataError, match="weights that are not finite numbers of at least 0"):
            task.read(path)

    def test_a_task_and_its_data_agree_on_them(self):
        for task, data in ((self.Weighted, kinds.Measures), (kinds.Measures, self.Weighted)):
            (fault,) = map(str, faults_of_examples(made(task), made(data).load().train, "load()"))
            assert "weights of examples; give Examples weights and state weighted = True, or neither" in fault

    def test_they_and_faults_are_kept_where_sites_are_joined(self):
        sites = [dataclasses.replace(made(self.Weighted).load().train, faults=(name,)) for name in ("a", "b")]
        data = dataset_of_owners(made(self.Weighted), sites, np.repeat([0, 1], len(sites[0])))
        assert data.train.faults == ("a", "b") and data.test.faults == ()
        whole = Examples.joined(sites)
        weight_of = {tuple(x): weight for x, weight in zip(whole.x.tolist(), whole.weights, strict=True)}
        for part in (data.train, data.test):
            assert part.weights.tolist() == [weight_of[tuple(x)] for x in part.x.tolist()]

    def test_they_multiply_the_factors_of_a_recipe(self):
        examples = Examples(np.zeros((4, 1)), np.array([0, 1, 1, 0]), weights=np.array([1, 2, 0, 5]))
        recipe = Recipe(1, 4, 0.1, class_weights=(1.0, 3.0), loss_scale=2.0)
        assert recipe.weights(examples).tolist() == [2, 12, 0, 10]
        assert Recipe(1, 4, 0.1).weights(examples).tolist() == [1, 2, 0, 5]
        assert Recipe(1, 4, 0.1).weights(dataclasses.replace(examples, weights=None)) is None


def test_groups_and_whole_rows_of_several_arrays_are_kept():
    examples = dataclasses.replace(made(kinds.Scans).load().train, groups=np.arange(64) // 2)
    taken = examples.take(np.array([5, 3]))
    assert taken.groups.tolist() == [2, 1] and len(taken) == 2
    np.testing.assert_array_equal(taken.x["picture"], examples.x["picture"][[5, 3]])
    assert len(Dataset(taken, examples).train) == 2
