"""Characters by writer, in LEAF's layout and as arrays."""

import json

import numpy as np
import pytest
from test_tasks import task

from cloister.tasks.partition import deal
from cloister.utils.errors import DataError

WRITERS = [f"f{number:04d}_{number % 50:02d}" for number in range(20)]


def pixels(number):
    """Three images of a writer: the upper half has its number as grey value, the lower half is white."""
    images = np.full((3, 28, 28), 255, np.uint8)
    images[:, :14] = number
    return images


def leaf(path, numbers, **changes):
    users = [WRITERS[number] for number in numbers]
    own = {
        WRITERS[number]: {"x": (pixels(number).reshape(3, 784) / 255).tolist(), "y": [number, number + 20, 61]}
        for number in numbers
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": users, "num_samples": [3] * len(users), "user_data": own} | changes))


@pytest.fixture
def folder(tmp_path):
    """Twenty writers in two of LEAF's files."""
    leaf(tmp_path / "all_data_0.json", range(12))
    leaf(tmp_path / "all_data_1.json", range(12, 20))
    return tmp_path


def load(folder, **settings):
    return task("femnist", data_path=str(folder), **settings).load()


def greys(examples):
    """The writers' numbers, of upright images."""
    return np.rint(255 * examples.x[:, 0, 0, 0]).astype(int)


def test_every_writer_of_leafs_files_trains_or_tests(folder):
    data = load(folder)
    assert data.train.x.shape == (54, 28, 28, 1) and data.train.x.dtype == np.float32
    assert np.bincount(data.owners).tolist() == [3] * 18 and np.bincount(data.test_owners).tolist() == [3] * 2
    assert sorted({*greys(data.train), *greys(data.test)}) == list(range(20))
    assert not {*greys(data.train)} & {*greys(data.test)}


def test_pixels_labels_and_writers_stay_together(folder):
    data = load(folder)
    of_each = greys(data.train)
    assert np.array_equal(data.groups["writer"], np.array(WRITERS)[of_each])
    assert all(set(data.train.y[of_each == number]) == {number, number + 20, 61} for number in set(of_each))


def test_a_client_is_a_writer(folder):
    femnist = task("femnist", data_path=str(folder))
    data = femnist.load()
    parts = deal(femnist.config, femnist.partition, data, 18, 62, 0)
    assert all(len(set(data.groups["writer"][part])) == 1 for part in parts)


def test_leafs_own_split_is_put_together_again(folder, tmp_path):
    """By sample: writer 0 is in both of its folders."""
    split = tmp_path / "split"
    split.mkdir()
    leaf(split / "train" / "a.json", range(20))
    leaf(split / "test" / "b.json", [0])
    data = load(split)
    assert len(data.train) + len(data.test) == 63 and not {*greys(data.train)} & {*greys(data.test)}


def test_arrays_are_the_same_as_leafs_files(folder, tmp_path):
    images = np.concatenate([pixels(number) for number in range(20)])
    labels = np.concatenate([[number, number + 20, 61] for number in range(20)])
    (tmp_path / "arrays").mkdir()
    np.savez(tmp_path / "arrays" / "femnist.npz", x=images, y=labels, writer=np.repeat(WRITERS, 3))
    ours, theirs = load(tmp_path / "arrays", rotated_fraction=0.5), load(folder, rotated_fraction=0.5)
    for one, other in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


def test_a_writer_is_turned_alike_whoever_else_is_there(folder, tmp_path):
    def turned(place):
        data = load(place, rotated_fraction=0.5)
        white_above = data.train.x[:, 0, 27, 0] == 1
        return {name: bool(above) for name, above in zip(data.groups["writer"], white_above, strict=True)}

    few = tmp_path / "few"
    leaf(few / "a.json", range(5, 15))
    everyone, some = turned(folder), turned(few)
    assert 3 < sum(everyone.values()) < 15
    assert all(some[name] == everyone[name] for name in set(some) & set(everyone))


@pytest.mark.parametrize(
    "changes",
    [
        {"user_data": []},
        {"user_data": {"a": {"x": [[0.5] * 783], "y": [1]}}},
        {"user_data": {"a": {"x": [[1.5] * 784], "y": [1]}}},
        {"user_data": {"a": {"x": [[float("nan")] * 784], "y": [1]}}},
        {"user_data": {"a": {"x": [[0.5] * 784], "y": [1, 2]}}},
        {"user_data": {"a": {"x": [[0.5] * 784], "y": [1.5]}}},
        {"user_data": {"a": {"y": [1]}}},
    ],
)
def test_json_of_another_layout_is_named(folder, changes):
    leaf(folder / "all_data_2.json", [], **changes)
    with pytest.raises(DataError, match=r"all_data_2\.json must be LEAF's JSON"):
        load(folder)


def test_labels_of_other_classes_are_refused(folder):
    leaf(folder / "all_data_2.json", [], user_data={"a": {"x": [[0.5] * 784], "y": [62]}})
    with pytest.raises(DataError, match="labels from 0 to 61"):
        load(folder)


def test_arrays_without_a_writer_for_each_image_are_refused(tmp_path):
    np.savez(tmp_path / "femnist.npz", x=pixels(1), y=np.arange(3), writer=np.arange(2))
    with pytest.raises(DataError, match="a writer, number or text, for each image"):
        load(tmp_path)


@pytest.mark.parametrize("writers", [0, 1])
def test_fewer_than_two_writers_are_refused(tmp_path, writers):
    leaf(tmp_path / "a.json", range(writers))
    with pytest.raises(DataError, match=f"has images of {writers} writers"):
        load(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    for place in ("", str(tmp_path)):
        with pytest.raises(DataError, match=r"must be a folder with LEAF's \.json files.* or with femnist\.npz"):
            load(place)
