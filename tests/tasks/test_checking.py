"""`cloister check task`: what it tries, and what it leaves behind: nothing."""

import re
from dataclasses import replace

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client.data import _part, benchmark_of, task_of
from cloister.client.trainers import _made, _resolved
from cloister.config.run import TaskConfig, parse
from cloister.server.prepare import prepare
from cloister.simulation.checking import _configuration, check_task
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.datasets.patients import RANGES, BreastCancer
from cloister.tasks.splits import dataset_at
from cloister.tasks.tables import Table
from cloister.utils.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def afresh():
    """Tests exchange methods of a task, of which a process keeps one."""
    for kept in (task_of, benchmark_of, _part, _made, _resolved):
        kept.cache_clear()
    yield
    for kept in (task_of, benchmark_of, _part, _made, _resolved):
        kept.cache_clear()


def table(folder, *, rows=40, names="benign,malignant", **cells):
    names, rng = names.split(","), np.random.default_rng(0)
    lines = [",".join([*RANGES, "target"])]
    for row in range(rows):
        values = {name: f"{rng.uniform(*ends):.4f}" for name, ends in RANGES.items()}
        values["target"] = names[row % len(names)]
        lines.append(",".join((values | (cells if row == 3 else {})).values()))
    path = folder / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def found(*given):
    return [(line.kind, line.text) for line in check_task(*given)]


def test_a_built_in_task_is_sound():
    lines = found("breast-cancer")
    assert [kind for kind, _ in lines] == ["ok"] * 5
    assert lines[0][1] == "load(), train: 456 examples of shape (30,), 2 classes, 170 to 286 examples in each"
    assert lines[3][1].startswith("it can be trained with privacy.client='dp-sgd'; ")
    assert lines[4][1].startswith("one round of 2 clients: loss ")


def test_a_site_s_file_is_sound_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    lines = found("breast-cancer", table(tmp_path))
    assert [kind for kind, _ in lines] == ["ok"] * 4 and "one round of 2 clients: loss " in lines[3][1]
    assert [path.name for path in tmp_path.iterdir()] == ["own.csv"]


def test_a_faulty_file_is_one_line_and_the_code_of_a_failure(tmp_path):
    def check(changes, says):
        path = table(tmp_path, **changes)
        done = CliRunner().invoke(app, ["check", "task", "breast-cancer", "--data", str(path)])
        assert done.exit_code == 1
        assert done.output.startswith("fault  read(): data-path: ") and says in done.output
        assert "; data row " in done.output and len(done.output.splitlines()) == 1

    assert not failures(
        [
            ({"mean area": "none"}, "column mean area must hold numbers only"),
            ({"mean area": ""}, "column mean area has empty or infinite cells"),
            ({"target": "secret"}, "column target must hold 0 (malignant) or 1 (benign) only"),
            ({"target": "2"}, "column target must hold 0 (malignant) or 1 (benign) only"),
        ],
        check,
    )


def test_an_unbalanced_file_is_noted(tmp_path):
    lines = found("breast-cancer", table(tmp_path, names="benign"))
    assert ("note", "read(): no example of malignant") in lines
    assert ("warn", "read(): all examples are of one class, benign; is a folder or a file missing?") in lines
    rare = found("breast-cancer", table(tmp_path, rows=80, names="benign", target="malignant"))
    assert ("note", "read(): fewer than 2% of the examples are of malignant") in rare
    assert not any(kind == "warn" for kind, _ in rare)


@pytest.mark.parametrize(
    ("name", "says"),
    [("tumours", "unknown task task.name = 'tumours'; known: "), ("heart-disease", "load(): task.data-path")],
)
def test_a_task_that_cannot_be_made_or_has_no_data(name, says):
    lines = found(name)
    assert lines[0][0] == "fault" and lines[0][1].startswith(says)
    assert all(kind == "fault" for kind, _ in lines)


def test_what_a_model_fails_at_is_told_and_nothing_after_it(monkeypatch):
    monkeypatch.setattr(BreastCancer, "metrics", lambda self, y, scores: {"accuracy": 1.0})
    lines = found("breast-cancer")
    assert [kind for kind, _ in lines] == ["ok", "ok", "fault"]
    assert "metrics(): no 'loss'" in lines[-1][1]


def test_faults_of_data_recipe_and_model_are_told_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(BreastCancer, "metrics", lambda self, y, scores: {"accuracy": 1.0})
    monkeypatch.setattr(BreastCancer, "recipe", replace(BreastCancer.recipe, class_weights=(1.0, 2.0, 3.0)))
    lines = found("breast-cancer", table(tmp_path, target="2"))
    assert {kind for kind, _ in lines} == {"fault"}
    assert [text.split(":")[0] for _, text in lines] == ["recipe", "read()", "metrics()"]


def test_inputs_that_were_not_scaled_are_noted(monkeypatch):
    load = BreastCancer.load

    def raw(self):
        whole = load(self)
        return Dataset(Examples(whole.train.x * 255, whole.train.y), whole.test)

    monkeypatch.setattr(BreastCancer, "load", raw)
    note = "load(), train: inputs beyond 10, on which networks train badly; scale them in the task"
    assert [text for kind, text in found("breast-cancer") if kind == "note"] == [note]


class TestSettings:
    def test_those_of_the_task_and_of_training_are_tried(self):
        own = {"task.partition": "dirichlet", "task.alpha": 40.0, "client.local-epochs": 2, "num-rounds": 30}
        note, *rest = found("breast-cancer", None, own | {"client.warmup-rounds": 5, "privacy.server": "global-dp"})
        assert note[0] == "note" and note[1].endswith(": num-rounds, client.warmup-rounds, privacy.server")
        assert [kind for kind, _ in rest] == ["ok"] * 5

    def test_they_change_what_is_found(self):
        (*_, last) = found("breast-cancer", None, {"client.class-weights": "1.0,2.0,3.0"})
        assert last[0] == "fault" and "client.class-weights has 3 numbers" in last[1]

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ("task.alhpa=0.4", "unknown key 'task.alhpa'"),
            ("task.name='digits'", "task.name = 'digits' contradicts the task that is to be checked, 'breast-cancer'"),
            ("num-rounds=0", "num-rounds"),
        ],
    )
    def test_the_command_refuses_what_a_run_would(self, given, says):
        done = CliRunner().invoke(app, ["check", "task", "breast-cancer", "-c", given])
        assert done.exit_code == 1 and len(done.output.splitlines()) == 1 and says in done.output

    def test_groups_are_tried_with_their_mechanism(self):
        given = {"task.group": "patient", "privacy.client": "dp-sgd", "num-rounds": 9}
        config = _configuration("breast-cancer", None, given)
        assert config.privacy.client.name == "dp-sgd" and config.num_rounds == 1

    def test_groups_need_no_mechanism_to_be_looked_for_and_are_counted(self, tmp_path):
        """A site that names an array it has not got would answer every message with noise alone."""
        rng, path = np.random.default_rng(1), tmp_path / "own.npz"
        x, y = rng.random((40, 64), np.float32), np.arange(40) % 10
        np.savez(path, x=x, y=y, person=np.array(["a"] * 3 + ["b"] * 7 + [f"p{n}" for n in range(30)]))
        softmax = {"task.model": "softmax"}
        lines = found("digits", path, softmax | {"task.group": "person"})
        assert ("ok", "read(): 32 persons of 1 to 7 examples each") in lines
        assert lines[-1][0] == "ok" and lines[-1][1].startswith("one round of 2 clients: ")
        lines = found("digits", path, softmax | {"task.group": "patient"})
        (fault,) = [text for kind, text in lines if kind == "fault"]
        assert "and patient (whole numbers or text" in fault and fault.endswith("; the file holds x, y, person")


def test_an_error_of_the_user_s_code_is_one_line(monkeypatch):
    def build(self):
        raise RuntimeError("first\nsecond")

    at = f"{__file__}:{build.__code__.co_firstlineno + 1}"
    monkeypatch.setattr(BreastCancer, "build", build)
    remedy = "change the network, or what it is built for: inputs of shape (30,)"
    told = f"build() fails with RuntimeError at {at}: first second; {remedy}"
    assert found("breast-cancer")[-1] == ("fault", told)
    with pytest.raises(ConfigError, match=re.escape(f"task 'breast-cancer': {told}")):
        prepare(parse({"task.name": "breast-cancer"}))


def test_an_error_of_build_is_not_told_at_length(monkeypatch):
    def build(self):
        raise ValueError("\x1b[1mtoo small\x1b[0m" + "\x1b" * 500)

    monkeypatch.setattr(BreastCancer, "build", build)
    (*_, (_, text)) = found("breast-cancer")
    assert ": too small\ufffd" in text and len(text) < 600 and "\x1b" not in text


def test_a_run_refuses_the_same_faults_before_it_makes_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(BreastCancer, "metrics", lambda self, y, scores: {"accuracy": 1.0})
    settings = f"task.name='breast-cancer' num-rounds=1 output-dir='{tmp_path / 'runs'}'"
    done = CliRunner().invoke(app, ["run", "-c", settings])
    assert done.exit_code == 1 and "task 'breast-cancer': metrics(): no 'loss'; add it" in done.output
    assert not (tmp_path / "runs").exists()


def test_callbacks_are_noted_and_a_recipe_that_does_not_fit_is_a_fault(monkeypatch):
    monkeypatch.setattr(BreastCancer, "recipe", replace(BreastCancer.recipe, callbacks=list))
    note = "recipe: a run with privacy.client refuses its Keras callbacks; use client.callbacks = false"
    assert ("note", note) in found("breast-cancer")
    uneven = replace(BreastCancer.recipe, callbacks=None, class_weights=(1.0, 2.0, 3.0))
    monkeypatch.setattr(BreastCancer, "recipe", uneven)
    ((kind, text),) = found("breast-cancer")
    assert kind == "fault" and text == (
        "recipe: client.class-weights has 3 numbers, and task 'breast-cancer' takes one for each of its 2 classes; "
        "change it in the task's recipe"
    )


def test_labels_that_begin_at_one_are_told_to_whoever_has_the_file(tmp_path):
    digits = np.arange(1, 11)
    np.savez(tmp_path / "own.npz", x=np.zeros((10, 64), np.float32), y=digits)
    (line,) = found("digits", tmp_path / "own.npz", {"task.model": "softmax"})
    assert line[0] == "fault" and "must hold labels from 0 to 9; subtract 1 from each where they" in line[1]
    assert "found labels from 1 to 10" in line[1]


COLUMNS = Table({"age": (18.0, 100.0), "dose": (0.0, 10.0)}, "outcome", 2, ("healthy", "ill"))


def test_a_table_reads_the_groups_that_the_run_names(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,dose,outcome,patient,visit\n30,1,ill,a,1\n31,2,ill,a,2\n")
    for read in (COLUMNS.read, COLUMNS.rows):
        assert read(path, "patient").groups.tolist() == ["a", "a"] and read(path, "visit").groups.tolist() == ["1", "2"]
        assert read(path).groups is None
        with pytest.raises(DataError, match="lacks the columns ward"):
            read(path, "ward")


def test_a_faulty_row_is_named_to_its_owner_and_is_no_part_of_the_error(tmp_path):
    def check(rows, says, first):
        path = tmp_path / "own.csv"
        path.write_text("\n".join(["age,dose,outcome", *rows]))
        with pytest.raises(DataError) as refused:
            COLUMNS.read(path)
        assert says in str(refused.value) and first in refused.value.first
        assert "data row" not in str(refused.value) and first not in repr(refused.value)

    assert not failures(
        [
            (
                ["30,1,ill", "17,1,ill"],
                "column age must hold numbers from 18 to 100",
                "data row 2 holds '17'",
            ),
            (
                ["30,x,ill", "30,y,ill"],
                "column dose must hold numbers only",
                "data row 1 holds 'x', and 1 more",
            ),
            (["30,1,ill", "30,1,sick"], "column outcome must hold 0 (healthy) or 1 (ill) only", "holds 'sick'"),
        ],
        check,
    )


def test_a_row_out_of_range_is_left_out_under_dp_sgd_and_rows_without_labels_can_be_predicted(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,dose,outcome\n30,1,ill\n17,1,ill\n")
    assert np.isnan(COLUMNS.rows(path).x).any(axis=1).tolist() == [False, True]
    assert COLUMNS.judged(path).y.tolist() == [1, 1]
    path.write_text("age,dose\n59,5\n")
    assert COLUMNS.judged(path).y is None
    np.testing.assert_allclose(COLUMNS.judged(path).x, [[0.5, 0.5]])


def test_one_file_is_divided_and_a_folder_that_is_not_there_is_said_to_be_so(tmp_path):
    class Rows(BreastCancer):
        def read(self, path):
            return COLUMNS.read(path)

    task, path = Rows(TaskConfig(name="breast-cancer")), tmp_path / "own.csv"
    path.write_text("\n".join(["age,dose,outcome", *["30,1,ill", "40,1,healthy"] * 10]))
    data = dataset_at(task, path, ".csv")
    assert (len(data.train), len(data.test)) == (16, 4)
    with pytest.raises(DataError, match=r"there is no file or folder at .*gone"):
        dataset_at(task, tmp_path / "gone", ".csv")
    with pytest.raises(DataError, match=r"lacks train\.csv and test\.csv; .* to use own\.csv alone, name "):
        dataset_at(task, tmp_path, ".csv")


class Visits(BreastCancer):
    """A table whose rows are visits of patients."""

    def read(self, path):
        return COLUMNS.read(path, self.config.group)


def visits(folder, group):
    """The data of a simulation: ten patients of two visits each, in one file."""
    path = folder / "own.csv"
    rows = [f"30,1,{'ill' if number % 4 < 2 else 'healthy'},p{number // 2}" for number in range(20)]
    path.write_text("\n".join(["age,dose,outcome,patient", *rows]))
    return dataset_at(Visits(TaskConfig(name="breast-cancer", group=group)), path, ".csv")


def test_a_column_that_is_not_there_is_no_group_of_a_simulation(tmp_path):
    with pytest.raises(DataError, match=r"task.group = 'ward' names no .*, which has age, dose, outcome, patient;"):
        visits(tmp_path, "ward")


def test_all_rows_of_a_group_train_or_all_test(tmp_path):
    data = visits(tmp_path, "patient")
    assert data.groups["patient"].tolist() == data.train.groups.tolist() and data.owners is None
    train, test = (set(part.groups.tolist()) for part in (data.train, data.test))
    assert not train & test and len(train) == 8 and len(data.train) == 16


def test_an_array_that_is_not_there_is_no_group_of_a_simulation(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 30), np.float32), y=np.arange(4) % 2, patient=np.arange(4))
    task = BreastCancer(TaskConfig(name="breast-cancer", group="ward"))
    with pytest.raises(DataError, match=r"task.group = 'ward' names no .*, which has x, y, patient;"):
        dataset_at(task, tmp_path / "own.npz", ".npz")
