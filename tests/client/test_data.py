"""A client's own examples: from a file of its node, or a part of a benchmark."""

import logging
import re
import tracemalloc
from dataclasses import replace
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
from asking import write_data
from support import failures

from cloister.client.data import _parts, benchmark_of, handing_out, local_data, units_dealt
from cloister.client.node import node_of
from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.columns import LONGEST
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.datasets.regressions import Linear
from cloister.utils.errors import ConfigError, DataError

WHOLE = TaskConfig(test_fraction=0.0)


def node_with(path, **more):
    return {"data-path": str(path), "ledger-dir": str(path.parent / "ledgers")} | more


def read(path, config=WHOLE, tolerant=False):
    return local_data(config, node_of(node_with(path)), seed=5, tolerant=tolerant)


PART = node_of({"partition-id": 0, "num-partitions": 1})


@pytest.fixture
def sites(monkeypatch):
    """Make `linear` eight examples at two sites of four, in groups of these names."""

    def clear():
        benchmark_of.cache_clear()
        _parts.cache_clear()

    def made(**groups):
        examples = Examples(np.zeros((8, 2), np.float32), np.zeros(8, np.float32))
        data = Dataset(examples, examples, owners=np.arange(8) // 4, groups=groups)
        monkeypatch.setattr(Linear, "load", lambda self: data)
        clear()

    yield made
    clear()


def test_groups_that_a_task_gives_in_another_form_are_refused():
    def check(groups, says):
        examples = Examples(np.zeros((8, 2), np.float32), np.zeros(8, np.float32))
        with pytest.raises(DataError, match=re.escape(says)):
            Dataset(examples, examples, groups=groups)

    cases = [
        (np.zeros(8, int), "must hold arrays by name, found ndarray; use groups={'patient': array}, and owners=array"),
        ({"patient": np.zeros(7, int)}, "for each of 8 training examples; found int64 of shape (7,)"),
        ({"patient": np.zeros(8)}, "for each of 8 training examples; found float64 of shape (8,)"),
    ]
    assert failures(cases, check) == []


class TestPartitions:
    def test_parts_are_of_equal_size_and_split_as_the_run_says(self):
        parts = [
            local_data(
                TaskConfig(model="softmax", test_fraction=0.2),
                node_of({"partition-id": i, "num-partitions": 4}),
                seed=5,
            )
            for i in range(4)
        ]
        sizes = [len(part.train) + len(part.test) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) > 1400
        assert all(abs(len(part.test) / (len(part.train) + len(part.test)) - 0.2) < 0.03 for part in parts)

    def test_a_simulated_split_has_every_class_on_both_sides(self):
        config = TaskConfig(test_fraction=0.2)
        part = local_data(config, node_of({"partition-id": 0, "num-partitions": 4}), seed=5)
        assert set(part.test.y) == set(part.train.y) == set(range(10))

    def test_without_a_fraction_to_test_on_all_is_trained_on(self):
        part = local_data(WHOLE, node_of({"partition-id": 0, "num-partitions": 4}), seed=5)
        assert len(part.train) > 300 and len(part.test) == 0

    def test_a_node_without_data(self):
        def check(node):
            with pytest.raises(ConfigError) as refused:
                local_data(TaskConfig(), node_of(node), seed=5)
            assert str(refused.value) == (
                "the node configuration must hold 'data-path', or 'partition-id' and 'num-partitions'"
            )

        assert failures([{}, {"partition-id": 1}, {"num-partitions": 2}], check) == []

    def test_a_partition_that_is_none(self):
        def check(index, reason):
            with pytest.raises(ConfigError, match=f"^node configuration: partition-id = {index} {reason}"):
                local_data(TaskConfig(), node_of({"partition-id": index, "num-partitions": 4}), seed=5)

        cases = [(4, "must be below num-partitions = 4"), (-1, "is not valid"), (True, "is not valid")]
        assert failures(cases, check) == []

    @pytest.mark.parametrize(
        ("task", "there"), [("digits", r"it has none; its load\(\) returns them"), ("linear", "there are user;")]
    )
    def test_groups_of_a_name_that_the_data_does_not_have_are_refused(self, task, there):
        with pytest.raises(DataError, match=f"^task.group = 'banana' names no groups of task '{task}': {there}"):
            local_data(TaskConfig(name=task, group="banana"), PART, seed=5)

    def test_groups_are_those_that_the_run_names(self, sites):
        sites(patient=np.arange(8) // 2, ward=np.arange(8) % 2)
        train = local_data(TaskConfig(name="linear", group="ward", test_fraction=0.0), PART, seed=5).train
        assert set(train.groups.tolist()) == {0, 1}

    def test_a_name_is_spelt_as_at_a_site_and_rows_without_one_are_left_out(self, sites, caplog):
        sites(patient=np.array(["a  b", "a b", " ", "c", "c", "d", "e", "e"]))
        config = TaskConfig(name="linear", group="patient", partition="iid")
        data = benchmark_of(config)
        assert data.train.groups.tolist() == ["a b", "a b", "c", "c", "d", "e", "e"]
        assert data.owners.tolist() == [0, 0, 0, 1, 1, 1, 1] and len(data.train) == 7
        assert "1 of 8 rows are left out" in caplog.text

    def test_units_that_two_clients_have_are_called_the_same(self, sites):
        sites(patient=np.array([1, 1, 2, 3, 3, 4, 4, 5]))
        config = TaskConfig(name="linear", group="patient", test_fraction=0.0)
        nodes = [node_of({"partition-id": number, "num-partitions": 2}) for number in (0, 1)]
        assert [units_dealt(config, node, 5).tolist() for node in nodes] == [[1, 2, 3], [3, 4, 5]]

    def test_examples_that_are_handed_out_are_units_of_one_client(self):
        x = np.zeros((3, 2), np.float32)
        with handing_out([Examples(x, x[:, 0]), Examples(x, x[:, 0])]):
            found = [units_dealt(WHOLE, node_of({"partition-id": number, "num-partitions": 2}), 5) for number in (0, 1)]
        assert [units.tolist() for units in found] == [[0, 1, 2], [3, 4, 5]]


class TestOwnFile:
    def test_it_is_read_whole(self, tmp_path):
        data = read(write_data(tmp_path, 30))
        assert len(data.train) == 30 and len(data.test) == 0 and data.train.groups is None

    @pytest.mark.parametrize("groups", [np.arange(30) // 3, np.array([f"p{i // 3}" for i in range(30)])])
    def test_with_its_groups(self, tmp_path, groups):
        data = read(write_data(tmp_path, 30, patient=groups), TaskConfig(test_fraction=0.0, group="patient"))
        np.testing.assert_array_equal(data.train.groups, groups)

    def test_with_groups_that_are_none(self, tmp_path_factory):
        def check(groups):
            tmp_path = tmp_path_factory.mktemp("case")
            path = write_data(tmp_path, 30, **({} if groups is None else {"patient": groups}))
            with pytest.raises(DataError, match="patient"):
                read(path, TaskConfig(test_fraction=0.0, group="patient"))

        cases = [None, np.arange(30) / 3, np.zeros((30, 1), int), np.zeros(29, int), np.zeros(30, bool)]
        assert failures(cases, check) == []

    def test_a_file_that_is_not_what_the_task_reads(self, tmp_path_factory):
        def check(arrays, says):
            tmp_path = tmp_path_factory.mktemp("case")
            np.savez(tmp_path / "own.npz", **arrays)
            with pytest.raises(DataError, match=says):
                read(tmp_path / "own.npz", TaskConfig())

        cases = [
            ({"x": np.zeros((3, 63)), "y": np.zeros(3, int)}, r"shape \(64,\), found \(63,\)"),
            ({"x": np.zeros((3, 64)), "y": np.full(3, 10)}, "labels from 0 to 9"),
            ({"x": np.zeros((3, 64)), "y": np.full(3, -1)}, "labels from 0 to 9"),
            ({"x": np.full((3, 64), np.nan), "y": np.zeros(3, int)}, "NaN"),
            ({"x": np.zeros((3, 64)), "y": np.zeros(3)}, "integer labels"),
            ({"x": np.zeros((3, 64)), "y": np.zeros(4, int)}, "3 inputs but 4 targets"),
            ({"x": np.zeros((3, 64))}, "arrays x"),
        ]
        assert failures(cases, check) == []

    def test_a_file_that_is_no_archive(self, tmp_path_factory):
        def check(tolerant, content):
            tmp_path = tmp_path_factory.mktemp("case")
            (tmp_path / "own.npz").write_bytes(content)
            with pytest.raises(DataError, match=r"must be an \.npz file"):
                read(tmp_path / "own.npz", tolerant=tolerant)

        cases = [(tolerant, content) for tolerant in [False, True] for content in [b"", b"PK\x03\x04 cut short"]]
        assert failures(cases, check) == []

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(DataError, match="no file at"):
            read(tmp_path / "none.npz")


class TestTolerance:
    """Under DP-SGD a row that the task cannot take is one that is not there."""

    BAD: ClassVar = {
        "nan": {"x": np.nan},
        "infinite": {"x": np.inf},
        "too large for single precision": {"x": 1e39},
        "no class": {"y": 10},
        "below the classes": {"y": -1},
    }

    @pytest.mark.parametrize("kind", BAD)
    def test_a_bad_row_is_left_out_and_no_other(self, tmp_path, kind, caplog):
        rng = np.random.default_rng(0)
        x, y = rng.random((20, 64)), rng.integers(0, 10, 20)
        if "x" in self.BAD[kind]:
            x[7, 3] = self.BAD[kind]["x"]
        else:
            y[7] = self.BAD[kind]["y"]
        path = write_data(tmp_path, x=x, y=y)
        with pytest.raises(DataError):
            read(path)
        with caplog.at_level(logging.WARNING, "cloister.client"):
            found = read(path, tolerant=True).train
        keep = np.arange(20) != 7
        np.testing.assert_array_equal(found.x, x[keep].astype(np.float32))
        np.testing.assert_array_equal(found.y, y[keep])
        assert caplog.messages == ["1 of 20 rows are left out: a number or a label is out of range"]

    def test_whole_numbers_stay_what_they_are_beside_a_row_of_none(self, tmp_path):
        whole = np.full((3, 64), 2**54 + 2**30 + 1)  # rounded to single precision at once, and by way of double, apart
        broken = np.vstack([whole, np.full((1, 64), np.nan)])
        alone = read(write_data(tmp_path, 3, name="whole.npz", x=whole), tolerant=True).train.x
        beside = read(write_data(tmp_path, 4, x=broken), tolerant=True).train.x
        np.testing.assert_array_equal(beside, alone)

    def test_groups_that_the_run_does_not_name_are_none(self, tmp_path, monkeypatch):
        """One row of a group would be drawn each time, and a row more take its place: two clips of an example."""
        rows = Digits.rows
        monkeypatch.setattr(Digits, "rows", lambda self, path: replace(rows(self, path), groups=np.zeros(6)))
        path = write_data(tmp_path, 6)
        for tolerant in (True, False):
            assert read(path, tolerant=tolerant).train.groups is None

    def test_a_name_without_end_is_left_out(self, tmp_path):
        """Spelling it would take minutes, in which nothing can interrupt the node."""
        path = write_data(tmp_path, 3, patient=np.array(["a", "e" + "\u0301\u0316" * 100_000, "b"]))
        found = read(path, TaskConfig(test_fraction=0.0, group="patient"), tolerant=True).train
        np.testing.assert_array_equal(found.groups, ["a", "b"])

    def test_groups_go_with_their_rows(self, tmp_path):
        x = np.random.default_rng(0).random((6, 64))
        x[2] = np.nan
        path = write_data(tmp_path, 6, x=x, patient=np.array([1, 1, 2, 2, 3, 3]))
        found = read(path, TaskConfig(test_fraction=0.0, group="patient"), tolerant=True).train
        np.testing.assert_array_equal(found.groups, [1, 1, 2, 3, 3])

    def test_rows_that_do_not_say_whose_they_are_are_counted(self, tmp_path, caplog):
        path = write_data(tmp_path, 6, patient=np.array(["a", "", "b", "b", " ", "a"]))
        with caplog.at_level(logging.WARNING, "cloister.client"):
            found = read(path, TaskConfig(test_fraction=0.0, group="patient")).train
        np.testing.assert_array_equal(found.groups, ["a", "b", "b", "a"])
        assert caplog.messages == ["2 of 6 rows are left out: they do not say whose they are"]

    def test_a_name_has_one_spelling(self, tmp_path):
        names = np.array(["Jos\u00e9 M", " Jos\u00e9  M\t", "Jose\u0301\u00a0M", "a" * LONGEST, "a" * LONGEST + "a"])
        found = read(write_data(tmp_path, 5, patient=names), TaskConfig(test_fraction=0.0, group="patient")).train
        assert found.groups.tolist() == ["Jos\u00e9 M"] * 3 + ["a" * LONGEST]

    def test_a_file_of_another_shape_is_no_row_that_is_bad(self, tmp_path):
        with pytest.raises(DataError, match=r"shape \(64,\), found \(63,\)"):
            read(write_data(tmp_path, x=np.zeros((40, 63))), tolerant=True)

    def test_good_data_is_the_same_either_way(self, tmp_path):
        path = write_data(tmp_path, 20)
        one, other = read(path).train, read(path, tolerant=True).train
        np.testing.assert_array_equal(one.x, other.x)
        assert one.x.dtype == other.x.dtype == np.float32 and one.y.dtype == other.y.dtype == np.int64


class TestTables:
    """A faulty line of a table is one that is not there: it changes nothing of the others, nor whether they count."""

    PATIENT = "63,1,4,140,260,0,1,112,1,3,2,?,?,{}"
    FAULTS: ClassVar = [
        "",
        "1,2",
        "{},9",
        "9,{}",
        "x{}",
        "{}" + "1" * 300,
        "\xff{}",
        "\x00",
        "{}x",
        "nan,{}",
        "1e999,{}",
        "{}7",
        "secret",
    ]
    """Lines, with the place of a good one in them."""

    def tables(self, name):
        """A header, good lines, and a file's ending."""
        if name == "heart-disease":
            return [], [self.PATIENT.format(number % 2) for number in range(8)], ".data"
        from cloister.tasks.datasets.patients import RANGES

        rng = np.random.default_rng(0)
        lines = [",".join([*(f"{rng.uniform(*ends):.3f}" for ends in RANGES.values()), str(i % 2)]) for i in range(8)]
        return [",".join([*RANGES, "target"])], lines, ".csv"

    def found(self, tmp_path, name, lines, ending):
        path = tmp_path / f"own{len(list(tmp_path.iterdir()))}{ending}"
        path.write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in lines))
        return read(path, TaskConfig(name=name, test_fraction=0.0), tolerant=True).train

    @pytest.mark.parametrize("name", ["heart-disease", "breast-cancer"])
    def test_a_faulty_line_changes_no_other(self, tmp_path, name):
        header, lines, ending = self.tables(name)
        good = self.found(tmp_path, name, [*header, *lines], ending)
        assert len(good) == 8

        def check(fault, place):
            faulty = [*lines[:place], fault.format(lines[0]), *lines[place:]]
            found = self.found(tmp_path, name, [*header, *faulty], ending)
            assert found.x.tobytes() == good.x.tobytes() and found.y.tobytes() == good.y.tobytes()

        assert failures(product(self.FAULTS, [0, 4, 8]), check) == []

    def test_an_absent_file(self, tmp_path):
        for name, ending in (("heart-disease", ".data"), ("breast-cancer", ".csv")):
            with pytest.raises(DataError, match="no file at"):
                read(tmp_path / f"none{ending}", TaskConfig(name=name), tolerant=True)

    def test_a_label_that_is_no_text_changes_no_other(self, tmp_path):
        x = np.random.default_rng(0).random((9, 30))
        y = np.array([b"benign"] * 4 + [b"\xff"] + [b"malignant"] * 4)
        found = read(write_data(tmp_path, x=x, y=y), TaskConfig(name="breast-cancer", test_fraction=0.0), tolerant=True)
        assert found.train.y.tolist() == [1] * 4 + [0] * 4
        np.testing.assert_array_equal(found.train.x, np.delete(x, 4, axis=0).astype(np.float32))

    def test_one_endless_cell_does_not_make_every_cell_as_long(self, tmp_path):
        header, lines, ending = self.tables("breast-cancer")
        endless = lines[0].rpartition(",")[0] + "," + "x" * 100_000
        tracemalloc.start()
        found = self.found(tmp_path, "breast-cancer", [*header, *lines * 50, endless], ending)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(found.x) == 400 and peak < 10_000_000
