"""`cloister predict`: the model that a run or a client has kept, on a table, an archive, or a folder of images."""

import csv
import gzip
import itertools
import json

import cv2
import kinds
import numpy as np
import pytest
from kinds import made
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.testing import CliRunner

from cloister.cli import app
from cloister.config.run import parse
from cloister.predict import Predictions, predict, read
from cloister.tasks import TASKS
from cloister.tasks.datasets.regressions import OPTIMA
from cloister.tasks.targets import Target
from cloister.utils.errors import ConfigError, DataError, FederationError
from cloister.utils.rows import as_rows, fields

LINEAR = {"task.name": "linear", "privacy.server": "laplace-clustering"}
DIGITS = {"task.name": "digits", "task.model": "softmax"}
COLUMNS = ["example", "prediction", "probability", "class"]


def kept(folder, settings, *models):
    """A folder with a configuration and these models: one, or several hypotheses."""
    folder.mkdir(exist_ok=True)
    config = parse(settings)
    (folder / "config.json").write_text(json.dumps({"config": config.flat()}))
    for number, arrays in enumerate(models):
        name = "model" if len(models) == 1 else f"hypothesis-{number}"
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


def linear(folder, *thetas):
    return kept(folder, LINEAR, *({"linear/kernel": np.array(theta, np.float32)} for theta in thetas))


def digits(folder, seed=0):
    rng = np.random.default_rng(seed)
    return kept(
        folder,
        DIGITS,
        {"softmax/kernel": rng.normal(size=(64, 10)).astype(np.float32), "softmax/bias": np.zeros(10, np.float32)},
    )


def label(classes):
    return {"": Target(classes=classes)}


def table(path, rows, head="a,b"):
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


class TestChoice:
    X = ((1.0, 0.0), (0.0, 1.0), (2.0, -1.0))

    def test_one_model(self, tmp_path):
        found = predict(linear(tmp_path / "run", (5, 6)), table(tmp_path / "x.csv", self.X))
        np.testing.assert_allclose(found.outputs, [5, 6, 4])
        assert found.metrics == {} and found.hypotheses == 1

    def test_of_several_the_one_of_least_loss(self, tmp_path_factory):
        def check(best, name):
            folder = tmp_path_factory.mktemp("case")
            rows = [(*x, np.dot(x, OPTIMA[best]) + 0.1) for x in self.X]
            data = table(folder / "x.csv", rows, f"a,b,{name}")
            found = predict(linear(folder / "run", *OPTIMA), data)
            assert found.hypothesis == best and found.hypotheses == 2
            assert found.metrics["rmse"] == pytest.approx(0.1, rel=1e-4)

        assert failures(itertools.product([0, 1], ["y", "label", " Y"]), check) == []

    def test_without_labels_one_must_be_named(self, tmp_path):
        run, data = linear(tmp_path / "run", *OPTIMA), table(tmp_path / "x.csv", self.X)
        with pytest.raises(ConfigError, match=r"holds 2 hypotheses.*--hypothesis \(0 to 1\)"):
            predict(run, data)
        np.testing.assert_allclose(predict(run, data, 1).outputs, [4, -4.5, 12.5])
        with pytest.raises(ConfigError, match="--hypothesis 2"):
            predict(run, data, 2)

    def test_one_that_has_diverged_is_not_the_best(self, tmp_path):
        data = table(tmp_path / "x.csv", [(1, 1, 11)], "a,b,y")
        with np.errstate(invalid="ignore"):
            assert predict(linear(tmp_path / "run", (np.nan, 1), (5, 6)), data).hypothesis == 1

    def test_hypotheses_are_in_the_order_of_their_numbers(self, tmp_path):
        thetas = [(number, 0) for number in range(12)]
        found = predict(linear(tmp_path / "run", *thetas), table(tmp_path / "x.csv", [(1, 0)]), 10)
        np.testing.assert_allclose(found.outputs, [10])


class TestData:
    def test_an_archive_with_and_without_labels(self, tmp_path):
        run, rng = digits(tmp_path / "run"), np.random.default_rng(1)
        x, y = rng.random((7, 64)), rng.integers(0, 10, 7)
        np.savez(tmp_path / "plain.npz", x=x)
        np.savez(tmp_path / "labelled.npz", x=x, y=y)
        plain, labelled = predict(run, tmp_path / "plain.npz"), predict(run, tmp_path / "labelled.npz")
        np.testing.assert_array_equal(plain.outputs, labelled.outputs)
        assert not plain.metrics
        assert labelled.metrics["accuracy"] == np.mean(labelled.outputs.argmax(axis=1) == y)

    def test_a_table_of_a_classification(self, tmp_path):
        run, rng = digits(tmp_path / "run"), np.random.default_rng(1)
        x, y = rng.random((5, 64)), rng.integers(0, 10, 5)
        head = ",".join(map(str, range(64)))
        labelled = table(tmp_path / "x.csv", np.column_stack([x, y]), f"{head},label")
        np.savez(tmp_path / "x.npz", x=x, y=y)
        one, other = predict(run, labelled), predict(run, tmp_path / "x.npz")
        np.testing.assert_allclose(one.outputs, other.outputs, rtol=1e-5)
        assert one.metrics == pytest.approx(other.metrics)

    def test_a_table_of_any_dialect(self, tmp_path):
        run = linear(tmp_path / "run", (5, 6))
        text = "größe,b,y\n1.5,0,7.5\n0,-2,-12\n"
        dialects = {
            "bars.csv": text.replace(",", "|").encode(),
            "commas.csv": text.replace(",", ";").replace(".", ",").encode("cp1252"),
            "mark.csv": text.encode("utf-8-sig"),
            "packed.csv.gz": gzip.compress(text.encode()),
        }

        def check(name):
            (tmp_path / name).write_bytes(dialects[name])
            found = predict(run, tmp_path / name)
            np.testing.assert_allclose(found.outputs, [7.5, -12])
            assert found.metrics["rmse"] == pytest.approx(0, abs=1e-5)

        assert failures(dialects, check) == []

    def test_a_table_that_does_not_fit(self, tmp_path_factory):
        def check(head, rows, says):
            folder = tmp_path_factory.mktemp("case")
            with pytest.raises(DataError, match=says) as refusal:
                predict(linear(folder / "run", (5, 6)), table(folder / "x.csv", rows, head))
            assert "data-path" not in str(refusal.value)

        cases = [
            ("a,b,c", [(1, 2, 3)], "must have 2 columns"),
            ("a,b", [(1, "x")], "no example can be scored; 0: column b must hold numbers only"),
            ("a,b", [(1, "inf")], "NaN or infinite"),
            ("a,b", [(3,)], "no example can be scored; 0: has another number of cells"),
        ]
        assert failures(cases, check) == []

    def test_labels_that_are_no_classes(self, tmp_path_factory):
        def check(label):
            folder = tmp_path_factory.mktemp("case")
            data = table(folder / "x.csv", [[0.1] * 64 + [label]], ",".join(map(str, range(64))) + ",y")
            with pytest.raises(DataError, match=r"whole numbers|labels from 0 to 9"):
                predict(digits(folder / "run"), data)

        assert failures([0.5, 10, -1], check) == []

    def test_an_archive_that_does_not_fit(self, tmp_path_factory):
        def check(arrays):
            folder = tmp_path_factory.mktemp("case")
            np.savez(folder / "x.npz", **arrays)
            with pytest.raises(DataError):
                predict(digits(folder / "run"), folder / "x.npz")

        cases = [
            {"y": np.zeros(2, int)},
            {"x": np.array(["a"])},
            {"x": np.zeros((2, 64)), "y": np.zeros(2)},
            {"x": np.zeros((0, 64))},
        ]
        assert failures(cases, check) == []

    def test_a_task_of_several_inputs_reads_neither_tables_nor_images(self, tmp_path):
        class OfImages(kinds.Scans):
            image_shape = (4, 4)

        (tmp_path / "images").mkdir()
        cv2.imwrite(str(tmp_path / "images" / "a.png"), np.zeros((4, 4), np.uint8))

        def check(place):
            with pytest.raises(DataError, match=r"several inputs reads \.npz files"):
                read(made(OfImages), place)

        assert failures([tmp_path / "images", table(tmp_path / "x.csv", [(1, 2)])], check) == []

    def test_no_such_data(self, tmp_path):
        with pytest.raises(DataError, match="no file or folder"):
            predict(digits(tmp_path / "run"), tmp_path / "none.csv")

    def test_a_task_with_a_format_of_its_own_reads_that(self, tmp_path):
        """Raw measurements taken for scaled ones would give wrong numbers without an error."""
        from cloister.tasks.datasets.patients import RANGES

        task = TASKS.load("breast-cancer")(parse({"task.name": "breast-cancer"}).task)
        arrays = task.build().arrays()
        arrays["softmax/kernel"] = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
        run = kept(tmp_path / "run", {"task.name": "breast-cancer"}, arrays)
        raw = [[low for low, _ in RANGES.values()] + [1]]
        found = predict(run, table(tmp_path / "x.csv", raw, ",".join([*RANGES, "target"])))
        np.testing.assert_allclose(found.outputs, [[0.5, 0.5]])
        head, row = csv.reader(found.lines())
        assert head == [*COLUMNS, *(f"probability of {name}" for name in task.class_names)]
        assert row == ["0", "0", "0.5", task.class_names[0], "0.5", "0.5"]
        with pytest.raises(DataError, match="lacks the columns"):
            predict(run, table(tmp_path / "x.csv", [[0.0] * 30], ",".join(map(str, range(30)))))


class TestImages:
    def folder(self, place, images, suffix=".png"):
        for name, image in images.items():
            path = place / f"{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), image)
        return place

    def bytes_of(self, seed, shape):
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def test_they_are_grey_scaled_and_in_the_order_of_their_names(self, tmp_path):
        images = {"b": self.bytes_of(0, (8, 8)), "a": self.bytes_of(1, (8, 8))}
        run = digits(tmp_path / "run")
        found = predict(run, self.folder(tmp_path / "images", images))
        np.savez(tmp_path / "x.npz", x=np.stack([images["a"], images["b"]]).reshape(2, 64) / 255)
        assert found.names == ("a.png", "b.png") and not found.metrics
        np.testing.assert_allclose(found.outputs, predict(run, tmp_path / "x.npz").outputs, rtol=1e-5)

    def test_they_are_brought_to_the_size_of_the_task_and_lose_their_colours(self, tmp_path):
        small = self.bytes_of(0, (8, 8))
        large = np.repeat(np.kron(small, np.ones((3, 3), np.uint8))[..., None], 3, axis=2)
        run = digits(tmp_path / "run")
        found = predict(run, self.folder(tmp_path / "images", {"a": small, "b": large}))
        np.testing.assert_allclose(found.outputs[0], found.outputs[1], rtol=1e-3, atol=1e-6)

    def test_folders_named_by_labels(self, tmp_path):
        images = {f"{label}/{n}": self.bytes_of(n, (8, 8)) for label in (0, 7) for n in range(2)}
        found = predict(digits(tmp_path / "run"), self.folder(tmp_path / "images", images))
        expected = np.array([int(name.split("/")[0]) for name in found.names])
        assert found.metrics["accuracy"] == np.mean(found.outputs.argmax(axis=1) == expected)
        assert sorted(expected) == [0, 0, 7, 7]

    def test_what_does_not_fit(self, tmp_path):
        run = digits(tmp_path / "run")
        (tmp_path / "empty").mkdir()
        np.savez(tmp_path / "one.npz", x=[0.0])
        (tmp_path / "one.npz").rename(tmp_path / "one.JPG")
        with pytest.raises(DataError, match=r"one\.JPG is one image; give the folder that it lies in"):
            predict(run, tmp_path / "one.JPG")
        with pytest.raises(DataError, match="holds no images"):
            predict(run, tmp_path / "empty")
        mixed = self.folder(tmp_path / "mixed", {"1/a": self.bytes_of(0, (8, 8)), "b": self.bytes_of(0, (8, 8))})
        found = predict(run, mixed)
        assert found.names == ("1/a.png", "b.png") and found.labelled == 1
        (tmp_path / "empty" / "a.png").write_text("no image")
        with pytest.raises(DataError, match=r"a\.png: is damaged, too large, or of another kind"):
            predict(run, tmp_path / "empty")
        with pytest.raises(DataError, match="no images"):
            predict(linear(tmp_path / "linear", (5, 6)), mixed)


class TestModels:
    def test_a_folder_without_a_configuration(self, tmp_path):
        with pytest.raises(DataError, match="no run directory"):
            predict(tmp_path, tmp_path / "x.csv")

    def test_a_folder_without_all_its_models(self, tmp_path_factory):
        def check(missing):
            folder = tmp_path_factory.mktemp("case")
            run = linear(folder / "run", *OPTIMA)
            for number in (0, 1) if missing == "all" else (0,):
                (run / f"hypothesis-{number}.npz").unlink()
            with pytest.raises(DataError, match="must hold one model"):
                predict(run, table(folder / "x.csv", [(1, 2)]))

        assert failures(["all", "one"], check) == []

    def test_a_file_that_is_no_model(self, tmp_path):
        run = linear(tmp_path / "run", (5, 6))
        (run / "model.npz").write_bytes(b"PK\x03\x04")
        with pytest.raises(DataError, match="holds no model"):
            predict(run, table(tmp_path / "x.csv", [(1, 2)]))

    def test_a_model_of_another_task(self, tmp_path):
        run = kept(tmp_path / "run", LINEAR, {"softmax/kernel": np.zeros((2, 2))})
        with pytest.raises(FederationError, match="is in only one"):
            predict(run, table(tmp_path / "x.csv", [(1, 2)]))

    @pytest.mark.parametrize("name", ["numpy", "keras"])
    def test_what_was_saved_is_what_is_loaded(self, tmp_path, name):
        model = "softmax" if name == "numpy" else "mlp"
        task = TASKS.load("digits")(parse({"task.model": model}).task)
        first, second = task.build(), task.build()
        first.initialise(3)
        first.assign({key: array + np.float32(0.1) for key, array in first.arrays().items()})
        first.save(tmp_path / f"model{first.suffix}")
        second.load(tmp_path / f"model{first.suffix}")
        for key, array in first.arrays().items():
            np.testing.assert_array_equal(second.arrays()[key], array)
        (tmp_path / f"model{first.suffix}").write_bytes(b"PK\x03\x04")
        with pytest.raises(DataError, match="holds no model"):
            second.load(tmp_path / f"model{first.suffix}")

    def test_a_keras_model_of_another_shape_is_refused(self, tmp_path):
        task = TASKS.load("digits")(parse({}).task)
        other = TASKS.load("linear")(parse({"task.name": "linear", "task.model": "keras"}).task).build()
        other.save(tmp_path / "model.keras")
        with pytest.raises(DataError, match="holds no model of this task"):
            task.build().load(tmp_path / "model.keras")


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["predict", *map(str, arguments)])

    def test_it_prints_predictions_and_figures_of_merit_apart(self, tmp_path):
        data = table(tmp_path / "x.csv", [(1, 0, 4), (0, 1, -4.5)], "a,b,y")
        result = self.run(linear(tmp_path / "run", *OPTIMA), data)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == ["example,prediction", "0,4", "1,-4.5"]
        assert "hypothesis 1 of 2" in result.stderr and "rmse 0" in result.stderr

    def test_it_writes_a_file(self, tmp_path):
        np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((3, 64)))
        result = self.run(digits(tmp_path / "run"), tmp_path / "x.npz", "--out", tmp_path / "out.csv")
        assert result.exit_code == 0 and result.stdout == ""
        assert result.stderr == f"3 rows written to {tmp_path / 'out.csv'}\n"
        head, *lines = (tmp_path / "out.csv").read_text().splitlines()
        assert head.split(",") == [*COLUMNS[:3], *(f"probability of {number}" for number in range(10))]
        assert len(lines) == 3
        for _, chosen, largest, *every in csv.reader(lines):
            assert largest == every[int(chosen)] == max(every, key=float)
            assert sum(map(float, every)) == pytest.approx(1, abs=1e-4)

    def test_a_class_that_has_a_name_is_called_by_it(self):
        scores, named = np.array([[0.25, 0.75], [1.0, 0.0]]), ("healthy", 'ill, "mild"')
        head, *lines = Predictions(("a", "b"), scores, {}, class_names=named, targets=label(2)).lines()
        assert next(csv.reader([head])) == [*COLUMNS, "probability of healthy", 'probability of ill, "mild"']
        assert lines == ['a,1,0.75,"ill, ""mild""",0.25,0.75', "b,0,1,healthy,1,0"]

    def test_a_name_of_a_class_is_no_name_of_another_column(self):
        named = ("class", "prediction", "=1+1")
        found = Predictions(("a",), np.array([[0.25, 0.5, 0.25]]), {}, class_names=named, targets=label(3))
        head, row = csv.reader(found.lines())
        assert len(set(head)) == 7 and dict(zip(head, row, strict=True))["probability of prediction"] == "0.5"
        assert not any(cell.startswith("=") for cell in (*head, *row))

    def test_every_number_of_other_targets_is_a_column(self):
        def check(outputs, lines):
            targets = {name: Target("mse", array.shape[1:]) for name, array in fields(outputs).items()}
            assert list(Predictions(("a", "b"), outputs, {}, targets=targets).lines()) == lines

        pair = as_rows({"stage": np.array([[0.25, 0.75], [1, 0]]), "age": np.array([3.5, 4])})
        assert not failures(
            [
                (np.array([1.0, 2.5]), ["example,prediction", "a,1", "b,2.5"]),
                (np.eye(2), ["example,prediction 1,prediction 2", "a,1,0", "b,0,1"]),
                (np.arange(4.0).reshape(2, 2, 1), ["example,prediction 1,prediction 2", "a,0,1", "b,2,3"]),
                (
                    pair,
                    ["example,prediction stage 1,prediction stage 2,prediction age", "a,0.25,0.75,3.5", "b,1,0,4"],
                ),
            ],
            check,
        )

    def test_places_with_classes_have_class_numbers(self):
        scores = np.eye(3)[np.array([[2, 0], [1, 1]])]

        def check(shape, lines):
            outputs = scores.reshape(2, *shape, 3)
            found = Predictions(("a", "b"), outputs, {}, targets={"": Target(shape=shape, classes=3)})
            assert list(found.lines()) == lines

        lines = ["example,prediction 1,prediction 2", "a,2,0", "b,1,1"]
        assert not failures([((2,), lines), ((2, 1), lines), ((1, 2), lines)], check)

    def test_outputs_with_classes_have_their_columns_beside_others(self):
        scores = as_rows({"stage": np.array([[0.25, 0.75], [1, 0]]), "age": np.array([3.5, 4])})
        targets = {"stage": Target(classes=2), "age": Target("mse")}
        head, *lines = Predictions(("a", "b"), scores, {}, targets=targets).lines()
        of = [f"probability stage of {number}" for number in range(2)]
        assert head.split(",") == ["example", "prediction stage", "probability stage", *of, "prediction age"]
        assert lines == ["a,1,0.75,0.25,0.75,3.5", "b,0,1,1,0,4"]

    def test_an_error_is_one_line(self, tmp_path):
        result = self.run(linear(tmp_path / "run", *OPTIMA), table(tmp_path / "x.csv", [(1, 2)]))
        assert result.exit_code == 1 and "--hypothesis" in result.output and "Traceback" not in result.output
        out = tmp_path / "none" / "out.csv"
        result = self.run(linear(tmp_path / "run", *OPTIMA), tmp_path / "x.csv", "--hypothesis", 0, "--out", out)
        assert result.exit_code == 1 and "cannot be written" in result.output

    def test_names_are_quoted_where_csv_needs_it(self):
        lines = list(Predictions(('a,"b".png', "c"), np.array([1.0, 2.0]), {}).lines())
        assert lines[1:] == ['"a,""b"".png",1', "c,2"]

    def test_no_name_is_a_formula_to_a_spreadsheet(self):
        def check(name):
            (_, line) = Predictions((name,), np.array([-1.5]), {}).lines()
            (cells,) = csv.reader([line])
            assert cells == [f"'{name}", "-1.5"], "a number stays one"

        assert failures(["=HYPERLINK(1).png", "+1.png", "-1.png", "@SUM.png", "\t=1.png", "＝1.png"], check) == []

    def test_the_model_of_a_run(self, tmp_path):
        from cloister.simulation.simulate import simulate

        outcome = simulate(DIGITS | {"output-dir": str(tmp_path), "num-rounds": 2, "privacy.server": "none"})
        test = outcome.plan.task.load().test
        np.savez(tmp_path / "test.npz", x=test.x, y=test.y)
        assert predict(outcome.directory.path, tmp_path / "test.npz").metrics == outcome.rounds[-1].central
