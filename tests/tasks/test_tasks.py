"""The built-in tasks: what they load, read, build and score."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from support import failures

from cloister.config.run import TaskConfig
from cloister.tasks import TASKS
from cloister.tasks.datasets import patients
from cloister.tasks.partition import deal
from cloister.utils.errors import ConfigError, DataError, PluginError

NAMES = ("breast-cancer", "digits", "heart-disease", "mnist")
ROW = "63,1,4,140,260,0,1,112,1,3,2,?,?,2"
"""One patient, missing the last two attributes."""


def task(name, **config):
    return TASKS.load(name)(TaskConfig(name=name, **config))


def real(folder):
    """A folder of real data, or a skip."""
    root = os.environ.get("CLOISTER_DATA", "")
    path = Path(root) / folder
    if not root or not path.is_dir():
        pytest.skip(f"CLOISTER_DATA does not name a folder with {folder}/")
    return str(path)


def hospital(folder, *rows, name="own.data"):
    path = folder / name
    path.write_text("".join(row + "\n" for row in rows))
    return path


@pytest.fixture
def hospitals(tmp_path):
    """Four files of 20 rows, half of them ill; in each hospital another age."""
    for number, name in enumerate(patients.HOSPITALS):
        rows = [f"{40 + number},1,4,140,0,0,1,112,1,3,2,?,?,{row % 2}" for row in range(20)]
        hospital(tmp_path, *rows, name=f"processed.{name}.data")
    return tmp_path


@pytest.fixture
def mnist_file(tmp_path):
    """A file in Keras' layout with 20 images to train on and 10 to test on."""
    images = np.arange(20 * 28 * 28, dtype=np.uint8).reshape(20, 28, 28)
    labels = (np.arange(20) % 10).astype(np.uint8)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    return path


# Registry


def test_the_built_in_tasks_are_listed():
    assert set(NAMES) <= set(TASKS.names())


def test_an_unknown_task_is_refused():
    with pytest.raises(PluginError, match=r"unknown task task\.name = 'iris'; .*known: alzheimer-mri, breast-cancer"):
        TASKS.load("iris")


def test_an_unknown_model_is_refused():
    def check(name):
        with pytest.raises(ConfigError, match=r"task\.model must be one of .* got 'tree'"):
            task(name, model="tree")

    assert not failures(NAMES, check)


# Data that is always there


@pytest.mark.parametrize(
    ("name", "train", "test", "features"), [("digits", 1438, 359, 64), ("breast-cancer", 456, 113, 30)]
)
def test_small_benchmarks_are_split_in_a_fixed_and_stratified_way(name, train, test, features):
    first, again = task(name).load(), task(name).load()
    assert first.train.x.shape == (train, features)
    assert first.test.x.shape == (test, features)
    assert first.train.x.dtype == np.float32
    assert first.train.y.dtype == np.int64
    assert first.owners is None
    assert np.array_equal(first.test.x, again.test.x)
    total = np.bincount(first.train.y) + np.bincount(first.test.y)
    assert np.abs(np.bincount(first.test.y) - total / 5).max() <= 0.5


def test_digits_are_grey_values_from_0_to_1():
    data = task("digits").load()
    assert data.train.x.min() == 0
    assert data.train.x.max() == 1


def test_breast_cancer_is_scaled_by_the_published_ranges():
    """The ranges are printed with three decimals, so that the ends are 0 and 1 up to that rounding."""
    data = task("breast-cancer").load()
    x = np.concatenate([data.train.x, data.test.x])
    assert np.abs(x.min(axis=0)).max() < 0.011
    assert np.abs(x.max(axis=0) - 1).max() < 0.011


def test_the_ranges_are_named_in_the_order_of_scikit_learn():
    from sklearn.datasets import load_breast_cancer

    assert list(patients.RANGES) == list(load_breast_cancer().feature_names)


# Breast cancer: a node's own file


@pytest.fixture
def tumours():
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer(as_frame=True).frame.head(25)


def test_a_csv_file_gives_the_task_s_units_whatever_the_order_of_its_columns(tumours, tmp_path):
    path = tmp_path / "own.csv"
    tumours[tumours.columns[::-1]].assign(id=1).to_csv(path, index=False)
    examples = task("breast-cancer").read(path)
    expected = patients.BreastCancer.table.scaled(tumours.drop(columns="target").to_numpy())
    np.testing.assert_allclose(examples.x, expected, rtol=1e-6)
    assert examples.y.tolist() == tumours.target.tolist()


def test_a_wrong_csv_file_is_refused_without_quoting_it(tumours, tmp_path):
    def check(change, message):
        path = tmp_path / "own.csv"
        change(tumours).to_csv(path, index=False)
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            task("breast-cancer").read(path)
        assert "data-path" in str(caught.value)
        assert "secret" not in str(caught.value)

    assert not failures(
        [
            (lambda frame: frame.drop(columns=["mean area", "target"]), "lacks the columns mean area, target"),
            (lambda frame: frame.head(0), "has no rows of data"),
            (lambda frame: frame.assign(target=2), "column target must hold 0 (malignant) or 1 (benign) only"),
            (lambda frame: frame.assign(**{"mean area": "secret"}), "column mean area must hold numbers only"),
            (lambda frame: frame.assign(**{"mean area": np.nan}), "column mean area has empty or infinite cells"),
            (lambda frame: frame.assign(**{"mean area": np.inf}), "column mean area has empty or infinite cells"),
        ],
        check,
    )


def test_an_absent_or_unreadable_csv_file_is_refused(tmp_path):
    path = tmp_path / "own.csv"
    with pytest.raises(DataError, match=r"no file at .*own\.csv"):
        task("breast-cancer").read(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"must be a \.csv file with a header"):
        task("breast-cancer").read(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match=r"must be a \.csv file with a header"):
        task("breast-cancer").read(path)


# MNIST


@pytest.mark.parametrize("given", ["file", "folder", "cache"])
def test_mnist_is_found_in_a_file_a_folder_or_keras_cache(mnist_file, monkeypatch, given):
    if given == "cache":
        home = mnist_file.parent / "home"
        (home / "datasets").mkdir(parents=True)
        mnist_file = mnist_file.rename(home / "datasets" / "mnist.npz")
        monkeypatch.setenv("KERAS_HOME", str(home))
    paths = {"file": str(mnist_file), "folder": str(mnist_file.parent), "cache": ""}
    data = task("mnist", data_path=paths[given]).load()
    assert data.train.x.shape == (20, 28, 28, 1)
    assert data.train.x.dtype == np.float32
    assert data.train.x.max() == 1
    assert data.test.y.tolist() == list(range(10))


def test_an_absent_mnist_says_how_to_get_it(tmp_path, monkeypatch):
    def check(data_path):
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
        given = data_path and str(tmp_path / data_path)
        with pytest.raises(DataError, match=r"task.data-path = .*no file at .*set task.data-path to an mnist.npz"):
            task("mnist", data_path=given).load()

    assert not failures(["", "elsewhere"], check)


def broken_archives():
    images, labels = np.zeros((4, 28, 28), np.uint8), np.zeros(4, np.uint8)
    good = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    yield "a key is absent", {"x_train": images}
    yield "flat images", good | {"x_train": images.reshape(4, -1)}
    yield "floats", good | {"x_train": images / 255}
    yield "an unknown label", good | {"y_test": labels + 10}


def test_a_file_that_is_not_mnist_is_refused(tmp_path):
    def check(arrays):
        np.savez(tmp_path / "mnist.npz", **arrays)
        with pytest.raises(DataError, match=r"task\.data-path: .* must be an .npz file with x_train"):
            task("mnist", data_path=str(tmp_path)).load()

    assert not failures([arrays for _, arrays in broken_archives()], check)


def test_a_damaged_mnist_file_is_refused(tmp_path):
    def check(content):
        (tmp_path / "mnist.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"task\.data-path: .* must be an .npz file with x_train"):
            task("mnist", data_path=str(tmp_path)).load()

    assert not failures([b"", b"nonsense", b"PK\x03\x04cut"], check)


def test_real_mnist_has_the_published_class_counts():
    data = task("mnist", data_path=real("mnist")).load()
    assert np.bincount(data.train.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert len(data.test) == 10_000
    assert data.train.x.min() == 0
    assert data.train.x.max() == 1


# Heart disease


def test_every_hospital_is_a_client(hospitals):
    heart = task("heart-disease", data_path=str(hospitals))
    data = heart.load()
    assert np.bincount(data.owners).tolist() == [16] * 4
    assert len(data.test) == 16
    parts = deal(heart.config, heart.partition, data, 4, heart.classes, 0)
    for number, part in enumerate(parts):
        np.testing.assert_allclose(data.train.x[part, 0], (40 + number - 18) / (100 - 18), rtol=1e-6)


def test_the_test_patients_are_fixed_and_stratified(hospitals):
    first, again = (task("heart-disease", data_path=str(hospitals)).load() for _ in range(2))
    assert np.array_equal(first.test.x, again.test.x)
    assert np.bincount(first.test.y).tolist() == [8, 8]


def test_one_row_is_encoded_as_documented(tmp_path):
    examples = task("heart-disease").read(hospital(tmp_path, ROW))
    expected = [
        *((63 - 18) / 82, 0),  # age
        *(0, 1, 0),  # sex
        *(0, 0, 0, 1, 0),  # cp
        *((140 - 60) / 200, 0),  # trestbps
        *((260 - 50) / 750, 0),  # chol
        *(1, 0, 0),  # fbs
        *(0, 1, 0, 0),  # restecg
        *((112 - 40) / 200, 0),  # thalach
        *(0, 1, 0),  # exang
        *((3 + 5) / 15, 0),  # oldpeak
        *(0, 1, 0, 0),  # slope
        *(0, 1),  # ca, missing
        *(0, 0, 0, 1),  # thal, missing
    ]
    assert examples.x.shape == (1, patients.HeartDisease.table.width)
    assert examples.x.dtype == np.float32
    np.testing.assert_allclose(examples.x[0], expected, rtol=1e-6)
    assert examples.y.tolist() == [1]


def test_a_row_means_the_same_beside_any_other_rows(tmp_path):
    """Nothing is learned from the data: no row changes the features of another."""
    heart = task("heart-disease")
    alone = heart.read(hospital(tmp_path, ROW)).x[0]
    other = "29,0,1,94,564,1,2,202,0,6.2,1,3,3,0"
    assert np.array_equal(heart.read(hospital(tmp_path, other, ROW)).x[1], alone)


def test_impossible_zeros_are_missing_values(tmp_path):
    def check(column, first, usual, written):
        cells = ROW.split(",")
        cells[column] = written
        x = task("heart-disease").read(hospital(tmp_path, ",".join(cells))).x[0]
        np.testing.assert_allclose(x[first : first + 2], (usual, 1), rtol=1e-6)

    assert not failures(
        [
            (column, first, usual, written)
            for column, first, usual in [(3, 10, (120 - 60) / 200), (4, 12, (200 - 50) / 750)]
            for written in ["0", "?", "-9", "-9.0", ""]
        ],
        check,
    )


def test_a_wrong_hospital_file_is_refused_without_quoting_it(tmp_path):
    def check(rows, message):
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            task("heart-disease").read(hospital(tmp_path, *rows))
        assert "data-path" in str(caught.value)
        assert not any(value in str(caught.value).replace(str(tmp_path), "") for value in ("777", "6.7"))

    assert not failures(
        [
            ((), "own.data has no rows of data"),
            ((ROW, "1,2,3"), "data row 2 has another number of cells than there are columns"),
            (("age" + ROW[2:],), "column age must hold numbers only"),
            ((ROW[:-1] + "?",), "column num is empty; every row needs one"),
            ((ROW[:-1] + "7",), "column num must hold 0, 1, 2, 3, 4 only"),
            (("777" + ROW[2:],), "column age must hold numbers from 18 to 100"),
            (("inf" + ROW[2:],), "column age has empty or infinite cells"),
            (("63,1,5" + ROW[6:],), "column cp must hold one of 1, 2, 3, 4, or ?"),
            ((ROW.replace(",260,", ",6.7,"),), "column chol must hold numbers from 50 to 800"),
        ],
        check,
    )


def test_an_absent_hospital_file_is_refused(tmp_path):
    def check(name):
        with pytest.raises(DataError, match=f"data-path: no file at .*{name}"):
            task("heart-disease").read(tmp_path / name)

    assert not failures(["own.data", "own.npz"], check)


def test_binary_nonsense_is_refused(tmp_path):
    path = tmp_path / "own.data"
    path.write_bytes(b"\xff\x00\xfa")
    with pytest.raises(DataError, match="data row 1 has another number of cells"):
        task("heart-disease").read(path)


def test_an_npz_file_is_read_by_the_base_class(tmp_path):
    path = tmp_path / "own.npz"
    for name in ("heart-disease", "breast-cancer"):
        np.savez(path, x=np.zeros((3, *task(name).input_shape), np.float32), y=np.array([0, 1, 1]))
        assert task(name).read(path).y.tolist() == [0, 1, 1]


def test_missing_hospitals_are_named_with_their_source(hospitals):
    (hospitals / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"must be a folder with processed\.va\.data; get them from the UCI"):
        task("heart-disease", data_path=str(hospitals)).load()


def test_no_folder_for_heart_disease_is_refused(hospitals, monkeypatch):
    monkeypatch.chdir(hospitals)
    with pytest.raises(DataError, match=r"task\.data-path = '' must be a folder with processed\.cleveland\.data, "):
        task("heart-disease").load()


def test_real_hospitals_have_the_published_rows_and_diagnoses():
    heart = task("heart-disease", data_path=real("heart-disease"))
    folder = Path(heart.config.data_path)
    files = [heart.read(folder / f"processed.{name}.data") for name in patients.HOSPITALS]
    assert [len(examples) for examples in files] == [303, 294, 123, 200]
    assert [int((examples.y == 0).sum()) for examples in files] == [164, 188, 8, 51]
    data = heart.load()
    assert len(data.train) + len(data.test) == 920
    held = np.array([303, 294, 123, 200]) - np.bincount(data.owners)
    assert np.abs(held - np.array([303, 294, 123, 200]) / 5).max() <= 1
    for examples in (data.train, data.test):
        assert np.isfinite(examples.x).all()
        assert examples.x.min() >= 0
        assert examples.x.max() <= 1


# Scores


def test_binary_tasks_report_the_auc_of_class_one():
    def check(name):
        y = np.array([0, 0, 1, 1])
        scores = np.array([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5], [0.2, 0.8]])
        metrics = task(name).metrics(y, scores)
        assert set(metrics) == {"loss", "accuracy", "f1", "auc"}
        assert metrics["auc"] == 0.75

    assert not failures(["breast-cancer", "heart-disease"], check)


def test_no_auc_without_both_classes_or_from_a_diverged_model():
    breast = task("breast-cancer")
    scores = np.full((4, 2), 0.5)
    assert "auc" not in breast.metrics(np.ones(4, int), scores)
    assert "auc" not in breast.metrics(np.array([0, 1, 0, 1]), scores * np.nan)


# Models


def test_softmax_models_fit_their_data():
    def check(name, model, parameters):
        built = task(name, model=model).build()
        assert sum(array.size for array in built.arrays().values()) == parameters

    assert not failures(
        [("digits", "softmax", 650), ("breast-cancer", "auto", 62), ("heart-disease", "auto", 78)], check
    )


@pytest.mark.parametrize(
    ("name", "model", "shape", "parameters"),
    [
        ("digits", "mlp", (64,), 4810),
        ("mnist", "mlp", (28, 28, 1), 795_010),
        ("mnist", "cnn", (28, 28, 1), 1_663_370),
    ],
)
def test_keras_models_have_the_published_size(name, model, shape, parameters):
    pytest.importorskip("keras")
    built = task(name, model=model).build()
    assert sum(array.size for array in built.arrays().values()) == parameters
    scores = built.predict(np.zeros((2, *shape), np.float32))
    assert scores.shape == (2, 10)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)


def test_keras_weights_have_the_same_names_however_often_a_model_is_built():
    pytest.importorskip("keras")
    digits = task("digits")
    assert list(digits.build().arrays()) == list(digits.build().arrays())
