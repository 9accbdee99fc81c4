"""Labels are mapped by what the task says, each by itself."""

import numpy as np
import pytest
from support import failures

from cloister.config.run import TaskConfig
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.labels import NO_CLASS, classes_of, described
from cloister.utils.errors import DataError

NAMES = ("benign", "unclear", "malignant")
NUMBERS = ("1", "2", "3")


class Named(Digits):
    """Three classes with names."""

    classes = 3
    class_names = NAMES
    input_shape = (2,)


class OneBased(Named):
    """Three classes that are called 1, 2 and 3."""

    class_names = NUMBERS


def test_what_labels_become():
    def check(labels, names, expected):
        found = classes_of(np.asarray(labels), 3, names)
        assert found.dtype == np.int64 and found.tolist() == expected

    assert not failures(
        [
            (["malignant", " benign", "unclear "], NAMES, [2, 0, 1]),
            (["Malignant", "", "none"], NAMES, [NO_CLASS] * 3),
            (["0", "2", "1.0"], NAMES, [0, 2, 1]),
            (["0.5", "-1", "1e3"], (), [NO_CLASS] * 3),
            ([0, 2, 7], (), [0, 2, 7]),
            ([1, 3, 2], NUMBERS, [0, 2, 1]),
            (["1", "3.0", "2"], NUMBERS, [0, 2, 1]),
            ([0, 4, 1], NUMBERS, [NO_CLASS, NO_CLASS, 0]),
            (np.eye(3)[[2, 0]], NAMES, [2, 0]),
            (np.eye(3, dtype=bool)[[1]], NAMES, [1]),
            ([[0.5, 0.5, 0], [0, 0, 0], [1, 1, 0], [0, 0, 2], [0, 0, np.nan]], NAMES, [NO_CLASS] * 5),
            (np.eye(3), (), [NO_CLASS] * 3),
            (np.array([2**63], np.uint64), (), [NO_CLASS]),
            (np.zeros(0, "U3"), NAMES, []),
            (np.array([b"benign", b"\xff", b"malignant"]), NAMES, [0, NO_CLASS, 2]),
            (np.array(["benign", "\udcff"]), NAMES, [0, NO_CLASS]),
            (np.array([0x110041, ord("2")], np.uint32).view("U1"), (), [NO_CLASS, 2]),
            (np.array([0x110041, ord("2")], ">u4").view(">U1"), (), [NO_CLASS, 2]),
        ],
        check,
    )


def test_each_label_is_mapped_by_itself():
    """No site's data decides what a label means: a part of a file means what it means in the whole."""

    def check(names):
        rng = np.random.default_rng(3)
        labels = rng.choice(["0", "1", "2", "3", *NAMES, "x", "1.0"], 200)
        whole = classes_of(labels, 3, names)
        assert all(classes_of(labels[[i]], 3, names)[0] == whole[i] for i in range(200))

    assert not failures([((),), (NAMES,), (NUMBERS,)], check)


def test_labels_in_words():
    def check(names, text):
        assert described(3, names) == text

    assert not failures(
        [
            ((), "from 0 to 2"),
            (NUMBERS, "1, 2 or 3"),
            (NAMES, "0 (benign), 1 (unclear) or 2 (malignant)"),
        ],
        check,
    )


def written(folder, y):
    np.savez(folder / "own.npz", x=np.zeros((len(y), 2)), y=y)
    return folder / "own.npz"


def test_a_file_may_hold_names_or_one_hot_rows(tmp_path):
    def check(task, y, expected):
        assert task(TaskConfig()).read(written(tmp_path, y)).y.tolist() == expected

    assert not failures(
        [
            (Named, np.array(["malignant", "benign"]), [2, 0]),
            (Named, np.eye(3, dtype=np.float32)[[1, 2]], [1, 2]),
            (OneBased, np.array([1, 3], np.uint8), [0, 2]),
        ],
        check,
    )


def test_other_labels_are_refused_without_being_quoted(tmp_path):
    def check(task, y, says):
        with pytest.raises(DataError, match=says) as refusal:
            task(TaskConfig()).read(written(tmp_path, y))
        assert "secret" not in str(refusal.value) and "labels from" not in str(refusal.value), (
            "what a node has stays there"
        )

    assert not failures(
        [
            (Digits, np.array(["3", "4"]), r"y \(integer labels\); found x of float64 and y of <U1 \(2,\)"),
            (Digits, np.eye(10), r"y \(integer labels\); found .* y of float64 \(10, 10\)"),
            (Named, np.array(["benign", "secret"]), r"must hold labels 0 \(benign\), 1 \(unclear\) or 2 \(malignant\)"),
            (Named, np.eye(4), r"integer labels, class names or one-hot rows\); found .* y of float64 \(4, 4\)"),
            (OneBased, np.array([0, 1]), "must hold labels 1, 2 or 3"),
        ],
        check,
    )
