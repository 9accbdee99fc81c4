"""On the machine of the user who has the data, an exception is shown with its text; elsewhere never."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.testing import CliRunner

import cloister
from cloister.cli import app
from cloister.client.data import _own_data, _own_file, benchmark_of, task_of
from cloister.client.trainers import _made
from cloister.simulation.checking import check_task
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.datasets.patients import BreastCancer
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.utils.crash import explained, for_owner, note_failure, one_line, place, quoted
from cloister.utils.errors import FederationError
from cloister.utils.files import quiet_libraries

SECRET = "patient 17"
QUICK = {"task.name": "breast-cancer", "num-rounds": 1, "privacy.server": "none", "tensorboard": False}


@pytest.fixture(autouse=True)
def afresh():
    """Tests exchange methods of a task, of which a process keeps one."""
    kept = (task_of, benchmark_of, _made, _own_file, _own_data)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def fails():
    return float(SECRET)


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def line_of(function, offset=1):
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


class TestText:
    def test_it_is_shown_to_the_owner_alone(self):
        error = caught(fails)
        at = line_of(fails)
        assert explained(error) == f"ValueError at {Path(at).name}", "no folder: a server may receive it"
        assert explained(error, names_folders=True) == f"ValueError at {at}"
        with for_owner():
            said = explained(error)
            assert said == f"ValueError: could not convert string to float: '{SECRET}', at {at}"
        assert SECRET not in explained(error)

    def test_the_line_of_a_command_has_it_only_after_a_part_for_the_owner(self):
        def command(is_owner):
            with one_line():
                with for_owner() if is_owner else quiet_libraries():
                    pass
                fails()

        assert SECRET in str(caught(lambda: command(True))) and SECRET not in str(caught(lambda: command(False)))

    def test_a_failure_is_kept_for_the_owner_alone(self):
        error = caught(fails)
        assert note_failure(error) == ""
        with for_owner() as failed:
            note_failure(error)
        assert [failure.error for failure in failed] == ["ValueError"] and SECRET in failed[0].text

    def test_it_is_one_short_line_without_control_characters(self):
        said = quoted(ValueError("\x1b[1mone\x1b[0m\n two\x00" + "x" * 900))
        assert said.startswith("one two\ufffdx") and len(said) < 260 and "\n" not in said

    def test_arrays_in_it_are_left_out_and_shapes_stay(self):
        for array in (np.eye(3), np.arange(40), np.zeros((2, 2, 2), np.float32)):
            for text in (str(array), repr(array), str(array.tolist())):
                assert quoted(ValueError(f"no {text} of [64, 5]")) == "no ... of [64, 5]"
            assert quoted(KeyError(array)) == "..."

    def test_whole_tracebacks_are_printed_on_request(self, capsys):
        for wanted in (False, True):
            with for_owner(wanted):
                note_failure(caught(fails))
            assert ("in fails" in capsys.readouterr().err) == wanted

    def test_only_commands_of_the_owner_ask_for_it(self):
        """A server, a node or a process of a deployment must never do so."""
        folder, callers, asking = Path(cloister.__file__).parent, set(), ("for_owner", "explaining_failures")
        texts = {file: file.read_text() for file in folder.rglob("*.py")}
        for file, text in texts.items():
            nodes = ast.walk(ast.parse(text)) if any(name in text for name in asking) else ()
            if any(isinstance(each, ast.Name) and each.id in asking for each in nodes):
                callers.add(file.relative_to(folder).as_posix())
        assert "cli/operate.py" not in callers
        assert {Path(caller).parts[0] for caller in callers} == {"cli", "simulation", "estimate"}


def module_of(folder, text):
    (folder / "ward.py").write_text(text)
    return str(folder / "ward.py")


@pytest.fixture
def ward(tmp_path, monkeypatch):
    """A task in a module of its own, as an author writes it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TASKS._table, "ward", "ward:Ward")
    monkeypatch.delitem(sys.modules, "ward", raising=False)
    return tmp_path


class TestModules:
    def test_what_is_wrong_with_a_module_is_told_with_its_line(self, ward):
        def check(text, line, says):
            sys.modules.pop("ward", None)
            path = module_of(ward, text)
            ((kind, said),) = [(each.kind, each.text) for each in check_task("ward")]
            assert kind == "fault" and f"{path}:{line}" in said and says in said

        assert not failures(
            [
                ("x = 1\ny = (2,\nz = 3\n", 2, "SyntaxError: '(' was never closed: y = (2,"),
                ("import json\n\nimport no_such_package.inner\n", 3, "of 'no_such_package'"),
                ("from json import no_such_name\n", 1, "cannot import name 'no_such_name' from 'json'"),
                ("\nvalue = int('12 mm')\n", 2, "ValueError: invalid literal for int() with base 10: '12 mm'"),
            ],
            check,
        )

    def test_a_server_is_told_of_the_module_and_the_line_and_of_no_text(self, ward):
        path = module_of(ward, "import no_such_package\n")
        error = caught(lambda: TASKS.load("ward"))
        assert f"ModuleNotFoundError of 'no_such_package' at {Path(path).name}:1" in str(error)
        path = module_of(ward, f"x = '{SECRET}' y\n")
        error = caught(lambda: TASKS.load("ward"))
        assert f"SyntaxError at {Path(path).name}:1" in str(error) and SECRET not in str(error)

    def test_the_place_of_a_syntax_error_in_data_is_where_it_was_read(self):
        assert place(caught(lambda: ast.literal_eval(f"{SECRET} +"))).startswith(f"{__file__}:")


def breaking(*_, **__):
    raise ArithmeticError(f"the row of {SECRET}")


class TestClients:
    def test_an_error_of_a_client_ends_a_simulation_with_its_text_and_the_directory_has_none(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(SoftmaxRegression, "loss_and_gradients", breaking)
        with pytest.raises(FederationError) as ended:
            simulate(QUICK | {"output-dir": str(tmp_path)}, 2)
        assert f"ArithmeticError: the row of {SECRET}, at {line_of(breaking)}" in str(ended.value)
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert written and not any(SECRET.encode() in content for content in written)

    @pytest.mark.parametrize("own", [False, True])
    def test_a_check_has_it_as_a_fault_even_under_a_mechanism_that_hides_it(self, monkeypatch, own, tmp_path):
        monkeypatch.setattr(SoftmaxRegression, "loss_and_gradients", breaking)
        if own:
            rng = np.random.default_rng(0)
            np.savez(tmp_path / "own.npz", x=rng.random((40, 64), np.float32), y=np.arange(40) % 10, who=np.arange(40))
            given = {"task.model": "softmax", "task.group": "who"}
            lines = list(check_task("digits", tmp_path / "own.npz", given))
        else:
            lines = list(check_task("breast-cancer"))
        (fault,) = [line.text for line in lines if line.kind == "fault"]
        assert f"ArithmeticError: the row of {SECRET}, at {line_of(breaking)}" in fault

    def test_a_plan_has_it_too(self, monkeypatch):
        monkeypatch.setattr(SoftmaxRegression, "loss_and_gradients", breaking)
        settings = "task.name='breast-cancer' num-rounds=1 privacy.server='none'"
        done = CliRunner().invoke(app, ["plan", "-c", settings])
        assert done.exit_code == 1 and f"ArithmeticError: the row of {SECRET}, at {line_of(breaking)}" in done.output

    def test_what_a_method_must_return_is_said_for_none(self, monkeypatch, tmp_path):
        path = tmp_path / "own.npz"
        np.savez(path, x=np.zeros((4, 30), np.float32), y=np.arange(4) % 2)

        def check(method, file):
            with monkeypatch.context() as patch:
                patch.setattr(BreastCancer, method, lambda self, *_: None)
                first, *_ = check_task("breast-cancer", file)
                assert f"{method}() gives an object of type NoneType; return " in first.text

        assert not failures([("read", path), ("load", None)], check)


@pytest.mark.slow
def test_a_module_that_imports_keras_prints_nothing_of_tensorflow(tmp_path):
    module_of(tmp_path, "import keras\n\n\nclass Ward:\n    pass\n")
    code = (
        "from cloister.tasks import TASKS; TASKS._builtin['ward'] = 'ward:Ward'; import sys; "
        "sys.argv = ['cloister', 'check', 'task', 'ward']; from cloister.cli import app; app()"
    )
    search = os.pathsep.join([str(tmp_path), str(Path(cloister.__file__).parents[1])])
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PYTHONPATH": search}, capture_output=True, text=True
    )
    assert done.stdout.startswith("fault  task 'ward' is no task") and done.stderr == ""
