"""Brain scans: what is read of the layouts that users have, how it is split and dealt out, and the network."""

import sys
from dataclasses import dataclass

import cv2
import numpy as np
import pytest
from mri import SIZE, folders, grey, jpeg, mri, parquet, put, scan
from rich.console import Console
from support import failures

from cloister import predict
from cloister.client.data import local_data
from cloister.client.node import node_of
from cloister.config.run import TaskConfig
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.datasets.alzheimer_mri import CLASSES, PUBLISHED, PUBLISHED_TEST, TABLES, AlzheimerMri
from cloister.tasks.partition import deal
from cloister.tasks.pictures.sources import Picture, class_named
from cloister.utils.errors import ConfigError, DataError

SPELLINGS = {
    "underscores": CLASSES,
    "no underscores": tuple(name.replace("_", "") for name in CLASSES),
    "spaces and small letters": tuple(name.replace("_", " ").lower() for name in CLASSES),
}


def counts(examples):
    return np.bincount(examples.y, minlength=4).tolist()


def everything(data):
    parts = (data.train, data.validation, data.test)
    return np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])


def rows_of(examples):
    return {row.tobytes() for row in np.ascontiguousarray(examples.x)}


# Folders


@pytest.mark.parametrize("classes", SPELLINGS.values(), ids=SPELLINGS)
def test_a_folder_per_class_is_split_four_to_one_and_the_test_part_in_half(tmp_path, classes):
    data = mri(folders(tmp_path, 10, classes)).load()
    assert counts(data.train) == [8] * 4 and counts(data.validation) == counts(data.test) == [1] * 4
    assert data.train.x.shape == (32, SIZE, SIZE, 1) and data.train.x.dtype == np.float32
    assert data.train.y.dtype == np.int64
    assert not rows_of(data.train) & rows_of(data.test) and not rows_of(data.validation) & rows_of(data.test)


@pytest.mark.parametrize("parts", [("train", "test"), ("Train", "TEST")])
def test_a_split_that_is_there_is_kept(tmp_path, parts):
    data = mri(folders(tmp_path, 4, parts=parts)).load()
    assert counts(data.train) == [4] * 4 and counts(data.validation) == counts(data.test) == [2] * 4
    ours = mri(tmp_path / parts[0]).read(tmp_path / parts[0])
    assert rows_of(data.train) == rows_of(ours)


def test_pixels_are_grey_values_of_the_asked_size_beside_their_labels(tmp_path):
    x, y = everything(mri(folders(tmp_path, 8), image_size=20).load())
    assert 0 <= x.min() < x.max() <= 1
    for label in range(4):
        expected = [cv2.imdecode(np.frombuffer(jpeg(scan(label, n)), np.uint8), 0) for n in range(8)]
        shares = [each.astype(np.float32) / np.float32(255) for each in expected]
        resized = {cv2.resize(each, (20, 20), interpolation=cv2.INTER_AREA).tobytes() for each in shares}
        assert {row.tobytes() for row in x[y == label]} == resized


def test_colours_become_grey(tmp_path):
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[..., 2] = 200
    cv2.imwrite(str(tmp_path / "red.png"), image)
    put(tmp_path / CLASSES[0] / "red.png", (tmp_path / "red.png").read_bytes())
    examples = mri("").read(tmp_path)
    np.testing.assert_allclose(examples.x, 0.299 * 200 / 255, atol=1 / 255)


def test_the_order_of_classes_is_the_task_s_whatever_a_node_has(tmp_path):
    for label in (3, 1):
        put(tmp_path / CLASSES[label] / "a.jpg", jpeg(scan(label, 0)))
    assert mri("").read(tmp_path).y.tolist() == [1, 3]


def test_the_folder_may_be_one_below_and_only_one(tmp_path):
    folders(tmp_path / "Dataset", 8)
    assert len(everything(mri(tmp_path).load())[1]) == 32
    folders(tmp_path / "Augmented", 8)
    with pytest.raises(DataError, match=r"task\.data-path: .*Augmented, .*Dataset all hold images; name one of them"):
        mri(tmp_path).load()


def test_hidden_files_and_others_are_passed_over(tmp_path):
    folders(tmp_path, 8)
    put(tmp_path / CLASSES[0] / "._scan (0).jpg", b"resource fork")
    put(tmp_path / CLASSES[0] / "Thumbs.db", b"thumbs")
    put(tmp_path / "notes" / "read.me", b"")
    assert len(everything(mri(tmp_path).load())[1]) == 32


def test_a_folder_that_is_named_like_no_class_is_not_passed_over(tmp_path):
    folders(tmp_path, 2)
    put(tmp_path / "Midl_Demented" / "a.jpg", jpeg(scan(0, 0)))
    with pytest.raises(DataError, match="the folder Midl_Demented holds images and is named like no class: Mild_D"):
        mri(tmp_path).load()


def test_a_folder_to_predict_may_be_labelled_by_the_task_s_names(tmp_path):
    scored = predict.read(mri(""), folders(tmp_path, 1, SPELLINGS["spaces and small letters"]))
    assert scored.y.tolist() == [0, 1, 2, 3] and scored.names[0] == "mild demented/scan (0).jpg"
    assert np.array_equal(scored.x, mri("").read(tmp_path).x)
    put(tmp_path / "unknown" / "a.jpg", jpeg(scan(0, 0)))
    assert predict.read(mri(""), tmp_path).labelled.tolist() == [True, True, True, False, True]


def test_half_a_split_is_refused(tmp_path):
    folders(tmp_path, 2, parts=("train",))
    with pytest.raises(DataError, match=r"must hold images to train on and to test on, .* found train$"):
        mri(tmp_path).load()
    folders(tmp_path, 2)
    with pytest.raises(DataError, match="found train and some beside them"):
        mri(tmp_path).load()
    assert len(mri("").read(tmp_path)) == 16, "a node's own data needs no split"


@pytest.mark.parametrize("place", ["", "nowhere", "empty"])
def test_no_images_are_refused_with_what_is_expected(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError,
        match=r"task\.data-path.*(must be a folder of images|expected folders of images|there is no file or folder at)",
    ):
        mri(tmp_path / place if place else "").load()


def test_too_few_images_to_test_on(tmp_path):
    with pytest.raises(DataError, match=r"task\.data-path: 4 test examples are too few of each class"):
        mri(folders(tmp_path, 5)).load()


def test_names_of_classes():
    assert class_named("VERY mild-demented", CLASSES) == 3 and class_named("demented", CLASSES) is None


# Parquet


def test_parquet_files_of_a_split(tmp_path):
    parquet(tmp_path / "data" / "train-00000-of-00001-c08a.parquet", [0, 1, 2, 3] * 6, CLASSES)
    parquet(tmp_path / "data" / "test-00000-of-00001-44.parquet", [3, 2, 1, 0] * 4, CLASSES)
    data = mri(tmp_path).load()
    assert counts(data.train) == [6] * 4 and counts(data.validation) == counts(data.test) == [2] * 4
    for label, mean in enumerate(data.train.x[data.train.y == label].mean() for label in range(4)):
        assert mean == pytest.approx((40 + 50 * label) / 255, abs=0.03)


def test_one_parquet_file_holds_what_folders_hold(tmp_path):
    labels = [label for label in range(4) for _ in range(5)]
    images = [jpeg(scan(label, number)) for label in range(4) for number in range(5)]
    one = mri("").read(parquet(tmp_path / "own.parquet", labels, images=images))
    other = mri("").read(folders(tmp_path / "folders", 5))
    assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


def test_a_file_that_names_its_labels_is_believed(tmp_path):
    path = parquet(tmp_path / "own.parquet", [0, 1], ("VeryMildDemented", "Mild Demented"))
    assert mri("").read(path).y.tolist() == [3, 0]
    unknown = parquet(tmp_path / "other.parquet", [0, 1], ("cat", "Mild Demented"))
    with pytest.raises(DataError, match=r"data-path: .* names a class 'cat'; the task's classes are Mild_Demented"):
        mri("").read(unknown)


def test_labels_that_are_no_classes(tmp_path):
    def check(labels):
        images = [jpeg(scan(0, 0))] * 2
        path = parquet(tmp_path / "own.parquet", labels, images=images)
        with pytest.raises(DataError, match=r"must hold labels 0 \(Mild_Demented\), 1 "):
            mri("").read(path)
        with pytest.raises(DataError, match=r"task\.data-path: .* must hold labels 0 \(Mild_Demented\)"):
            mri(path).load()
        named = parquet(tmp_path / "named.parquet", labels, CLASSES, images)
        with pytest.raises(DataError, match=r"must hold labels 0 \(Mild_Demented\), 1 "):
            mri("").read(named)

    assert not failures([[0, 4], [0, -1], [0, None]], check)


def test_a_file_that_is_no_such_parquet_file(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet as writer

    (tmp_path / "text.parquet").write_text("not parquet")
    writer.write_table(pa.table({"image": [b"a"]}), tmp_path / "no label.parquet")
    writer.write_table(pa.table({"label": [1]}), tmp_path / "no image.parquet")
    for path in tmp_path.iterdir():
        with pytest.raises(DataError, match="must be a parquet file with the columns image"):
            mri("").read(path)


def test_labels_of_a_parquet_file_may_be_names(tmp_path):
    names = ["Non_Demented", "nobody", "mild demented"]
    path = parquet(tmp_path / "own.parquet", names, images=[jpeg(scan(0, number)) for number in range(3)])
    assert mri("").rows(path).y.tolist() == [2, -1, 0]


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path / "own.parquet", [0, 1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow to be read: pip install 'cloister-fl\[parquet\]'"):
        mri("").read(path)
    assert len(mri("").read(folders(tmp_path / "folders", 1))) == 4, "folders need none"


# Damaged images


@pytest.fixture
def damaged(tmp_path):
    """32 images, of which one is empty, one is cut off, one ends in zeros like a broken download, and one is text."""
    folders(tmp_path, 8)
    whole = jpeg(scan(0, 0))
    broken = {
        "Mild_Demented/scan (1).jpg": b"",
        "Moderate_Demented/scan (2).jpg": whole[: len(whole) // 2],
        "Non_Demented/scan (3).jpg": whole[:-60] + bytes(60),
        "Very_Mild_Demented/scan (4).jpg": b"not an image",
    }
    for name, content in broken.items():
        put(tmp_path / name, content)
    return tmp_path, list(broken)


def test_damaged_images_are_counted_in_one_error_and_named_to_their_owner_alone(damaged, caplog):
    root, names = damaged
    for where, read in (("task.data-path", mri(root).load), ("data-path", lambda: mri("").read(root))):
        caplog.clear()
        with pytest.raises(DataError, match=rf"^{where}: .*: 4 of 32 images cannot be used: ") as caught:
            read()
        assert "task.skip-damaged = true leaves them out" in str(caught.value)
        for name in names:
            assert name in caplog.text and name not in str(caught.value)
        assert caught.value.first == f"{names[0]} is the first"


def test_damaged_images_are_left_out_if_asked_and_named_in_a_warning(damaged, caplog):
    root, names = damaged
    for read in (lambda task: everything(task.load()), lambda task: (task.read(root).x, task.read(root).y)):
        caplog.clear()
        x, y = read(mri(root, skip_damaged=True))
        assert np.bincount(y).tolist() == [7] * 4 and np.isfinite(x).all() and len(x) == 28
        assert "4 images cannot be used" in caplog.text and all(name in caplog.text for name in names)
        means = [x[y == label].mean() for label in range(4)]
        np.testing.assert_allclose(means, (40 + 50 * np.arange(4)) / 255, atol=0.03)


def test_many_damaged_images_are_counted(tmp_path, caplog):
    folders(tmp_path, 8)
    first, *others = tmp_path.rglob("*.jpg")
    for path in others:
        path.write_bytes(b"x")
    with pytest.raises(DataError, match=r": 31 of 32 images cannot be used: is damaged, .* \(31 images\)"):
        mri(tmp_path).load()
    assert caplog.messages[-1].endswith("and 21 more")
    first.write_bytes(b"x")
    with pytest.raises(DataError, match="32 of 32 images cannot be used"):
        mri(tmp_path, skip_damaged=True).load()


def test_a_damaged_row_of_a_parquet_file_is_named(tmp_path):
    path = parquet(tmp_path / "own.parquet", [0, 1, 2], images=[jpeg(scan(0, 0)), b"", jpeg(scan(2, 0))])
    with pytest.raises(DataError, match="1 of 3 images cannot be used: is absent, unreadable or empty") as caught:
        mri("").read(path)
    assert caught.value.first == "own.parquet row 1 is the first"


def test_a_client_that_protects_its_examples_leaves_single_damaged_ones_out(damaged, tmp_path, caplog):
    """Keep the node working: one damaged image must not decide whether it has images."""
    root, _ = damaged
    config = TaskConfig(name="alzheimer-mri", image_size=SIZE, test_fraction=0.0)
    node = {"data-path": str(root), "ledger-dir": str(tmp_path / "ledgers")}
    with pytest.raises(DataError, match="4 of 32 images cannot be used"):
        local_data(config, node_of(node), 0)
    assert len(local_data(config, node_of(node), 0, tolerant=True).train) == 28
    assert "4 of 32 rows are left out" in caplog.text


def test_a_client_that_protects_its_examples_leaves_single_images_out_that_are_none(tmp_path):
    """Whatever one image is, and wherever it lies, it must not decide whether there are others."""
    root = tmp_path / "images"
    folders(root)
    whole = mri("").rows(root)
    put(root / "Unknown" / "x.jpg", jpeg(scan(0, 0)))
    (root / CLASSES[0] / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    found = mri("").rows(root)
    good = np.isfinite(found.x[:, 0, 0, 0])
    assert len(found.x) == len(whole.x) + 1 and good.sum() == len(whole.x)
    np.testing.assert_array_equal(found.x[good], whole.x)
    with pytest.raises(DataError, match="Unknown"):
        mri("").read(root)


def test_a_site_names_the_folder_of_its_images_and_none_above(tmp_path):
    """One image more, above them, decided where the others were looked for."""
    folders(tmp_path / "above" / "images")
    for read in (mri("").read, mri("").rows):
        with pytest.raises(DataError, match=r"no images at .*above; .* there are folders named images"):
            read(tmp_path / "above")


def test_two_layouts_in_one_folder_are_an_error_to_whoever_checks(tmp_path):
    root = folders(tmp_path)
    parquet(root / "more.parquet", [1])
    with pytest.raises(DataError, match="folders of images and parquet files; keep one of the two"):
        mri("").read(root)


def test_labels_of_a_parquet_file_may_be_stored_as_categories(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet as files

    names = pa.array([CLASSES[2].encode(), b"\xff", CLASSES[1].encode()]).cast(pa.string(), safe=False)
    images = pa.array([jpeg(scan(0, number)) for number in range(3)])
    files.write_table(pa.table({"image": images, "label": names.dictionary_encode()}), tmp_path / "x.parquet")
    assert mri("").rows(tmp_path / "x.parquet").y.tolist() == [2, -1, 1]


def test_a_label_of_a_parquet_file_that_is_none_changes_no_other(tmp_path):
    def check(labels):
        path = parquet(tmp_path / "own.parquet", labels, images=[jpeg(scan(0, number)) for number in range(3)])
        assert mri("").rows(path).y.tolist() == [0, -1, 2]

    assert not failures(
        [[0.0, 1.5, 2.0], [0.0, np.nan, 2.0], ["0", "x", "2"], np.array([0, 2**63, 2], np.uint64)], check
    )


# Splits and partitions


@dataclass
class Listed:
    """A source of which only the labels are asked for."""

    labels: np.ndarray
    root: str = "root"

    @property
    def pictures(self):
        return [Picture(str(number), label, "") for number, label in enumerate(self.labels.tolist())]


def published():
    return np.random.default_rng(0).permutation(np.repeat(np.arange(4), PUBLISHED))


def test_the_published_images_without_a_split_get_one_of_the_published_sizes():
    labels = published()
    train, validation, test = mri("").parts(Listed(labels))
    assert np.bincount(labels[train]).tolist() == [724, 49, 2566, 1781] == np.sum(TABLES["table-2"], axis=0).tolist()
    both = np.concatenate([validation, test])
    assert tuple(np.bincount(labels[both])) == PUBLISHED_TEST
    assert np.abs(np.bincount(labels[test]) - np.array(PUBLISHED_TEST) / 2).max() <= 0.5
    assert np.unique(np.concatenate([train, both])).size == 6400


def test_the_published_partitions_are_dealt_to_the_letter(caplog):
    train, *_ = mri("").parts(Listed(published()))
    data = Dataset(*[Examples(np.zeros((len(train), 1)), published()[train])] * 2)
    for name in ("table-2", "table-3"):
        config = TaskConfig(name="alzheimer-mri", partition=name)
        parts = deal(config, "iid", data, 4, 4, 1, AlzheimerMri.tables)
        assert [counts(data.train.take(part)) for part in parts] == [list(row) for row in TABLES[name]]
    assert not caplog.text


def test_what_a_table_asks_for_too_much_of_is_dealt_in_its_proportions(caplog):
    train, *_ = mri("").parts(Listed(published()))
    data = Dataset(*[Examples(np.zeros((len(train), 1)), published()[train])] * 2)
    config = TaskConfig(name="alzheimer-mri", partition="table-9")
    parts = deal(config, "iid", data, 3, 4, 1, AlzheimerMri.tables)
    # 724 in the proportions 120 : 180 : 524.
    assert [counts(data.train.take(part)) for part in parts] == [
        [106, 9, 1122, 496], [158, 11, 894, 506], [460, 29, 550, 779],
    ]  # fmt: skip
    assert "'table-9' asks for 824 training examples of class 0, and there are 724" in caplog.text
    assert caplog.text.count("asks for") == 1


def test_clients_keep_a_fifth_of_each_class_back(tmp_path):
    config = mri(folders(tmp_path, 30), partition="table-3", test_fraction=0.2).config
    for number in range(4):
        own = local_data(config, node_of({"partition-id": number, "num-partitions": 4}), 1)
        kept, total = np.array(counts(own.test)), np.array(counts(own.test)) + counts(own.train)
        assert total.sum() > 0 and np.abs(kept - total / 5).max() <= 0.5


def test_a_table_is_for_its_number_of_clients_and_its_task(tmp_path):
    config = mri(folders(tmp_path, 8), partition="table-9").config
    with pytest.raises(ConfigError, match=r"task\.partition = 'table-9' has 3 rows; the federation has 4 clients"):
        local_data(config, node_of({"partition-id": 0, "num-partitions": 4}), 1)
    with pytest.raises(ConfigError, match=r"'table-2' is no table of task\.name = 'digits', which has none"):
        local_data(TaskConfig(partition="table-2"), node_of({"partition-id": 0, "num-partitions": 4}), 1)


def test_settings_of_images_belong_to_this_task():
    def check(key, value):
        with pytest.raises(
            ConfigError, match=rf"task\.{key.replace('_', '-')} = {value} has no effect .* alzheimer-mri"
        ):
            local_data(TaskConfig(**{key: value}), node_of({"partition-id": 0, "num-partitions": 4}), 1)

    assert not failures([("image_size", 64), ("skip_damaged", True)], check)


@pytest.mark.parametrize(("size", "key"), [(17, "task.image-size"), ("auto", "usual_size")])
def test_one_rule_says_how_small_images_may_be(size, key):
    class Tiny(AlzheimerMri):
        usual_size = 17

    with pytest.raises(ConfigError, match=rf"{key} = 17 is not valid: the network .* takes images of 18 pixels"):
        Tiny(TaskConfig(name="alzheimer-mri", image_size=size))


# The model and its scores


def test_the_network_is_the_published_one():
    network = mri("", image_size="auto").build().keras
    assert network.input_shape == (None, 128, 128, 1) and network.count_params() == 6_517_476
    told = [type(layer).__name__ for layer in network.layers]
    assert told == ["Conv2D", "MaxPooling2D"] * 2 + ["Conv2D", "Flatten"] + ["Dense", "Dropout"] * 2 + ["Dense"]
    convolutions = [layer for layer in network.layers if type(layer).__name__ == "Conv2D"]
    assert [layer.filters for layer in convolutions] == [32, 64, 128]
    assert all(layer.kernel_size == (3, 3) and layer.padding == "valid" for layer in convolutions)
    assert [layer.units for layer in network.layers if type(layer).__name__ == "Dense"] == [64, 32, 4]
    assert [layer.rate for layer in network.layers if type(layer).__name__ == "Dropout"] == [0.1, 0.1]


def test_softmax_regression_takes_images_of_any_size_and_has_a_recipe_of_its_own():
    task = mri("", model="softmax", image_size=64)
    assert {name: array.shape for name, array in task.build().arrays().items()} == {
        "softmax/kernel": (4096, 4),
        "softmax/bias": (4,),
    }
    assert (task.recipe.optimizer, mri("").recipe.optimizer) == ("sgd", "adam"), "models in NumPy know SGD alone"


def test_a_federation_of_softmax_regression_learns_by_its_recipe(tmp_path):
    folders(tmp_path / "scans", 40)
    settings = {
        "task.name": "alzheimer-mri",
        "task.data-path": str(tmp_path / "scans"),
        "task.image-size": SIZE,
        "task.model": "softmax",
        "privacy.server": "none",
        "seed": 1,
        "num-rounds": 2,
        "tensorboard": False,
        "output-dir": str(tmp_path),
    }
    first, *_, last = simulate(settings, 4, ConsoleReporter(1, Console(quiet=True))).rounds
    assert first.central["accuracy"] == 0.25, "it starts at zero"
    assert last.central["accuracy"] >= 0.5, "the lightest and the darkest class; those between are not linear in grey"


def test_predictions_do_not_depend_on_how_many_are_made_at_once():
    task = mri("")
    model = task.build()
    x = np.random.default_rng(0).random((150, *task.input_shape), np.float32)
    np.testing.assert_allclose(model.predict(x)[100:], model.predict(x[100:]), rtol=1e-5)


def test_the_published_figures_by_hand():
    y = np.array([0, 0, 2, 3])
    scores = np.array([[0.7, 0.1, 0.1, 0.1], [0.2, 0.1, 0.6, 0.1], [0.1, 0.1, 0.7, 0.1], [0.0, 0.1, 0.2, 0.7]])
    found = mri("").metrics(y, scores)
    # Class by class: precision 1, 1/2, 1; recall 1/2, 1, 1; class 1 occurs nowhere.
    assert found["accuracy"] == 0.75 and found["precision"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    # Of 4 · 12 pairs of a true class and another, those of 0.2 lose against 0.6 and tie with another 0.2.
    assert found["auc"] == pytest.approx((4 * 12 - 1 - 0.5) / 48)
    assert "auc" not in mri("").metrics(y, scores * np.nan)


def test_files_that_are_left_out_are_named_in_a_warning(tmp_path, caplog):
    folders(tmp_path, 8)
    for name in ("stray.jpg", "Non_Demented/notes.txt", "Non_Demented/.hidden", "README.md"):
        put(tmp_path / name, jpeg(scan(0, 0)))
    (tmp_path / "Mild Demented").symlink_to("Mild_Demented")
    for read in (lambda: mri(tmp_path).load(), lambda: mri("").read(tmp_path)):
        caplog.clear()
        read()
        told = [message for message in caplog.messages if not message.startswith("decoded images are kept in ")]
        (line,) = told
        assert line.startswith(f"{tmp_path}: 4 files or links left out, as no image of a class: ")
        assert line.endswith("Mild Demented, Non_Demented/notes.txt, README.md, stray.jpg")


def test_the_decoder_says_nothing_of_its_own(tmp_path, capfd):
    assert grey(b"\x89PNG\r\n\x1a\nno more", (8, 8)) is None
    assert capfd.readouterr() == ("", "")
