"""A user's first errors: a system that is not supported, and Ctrl-C while libraries are imported."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cloister.sweep.cells import Cell
from cloister.sweep.sweep import Ended, how_ended
from cloister.utils import crash

ROOT = Path(__file__).parents[1]
REFUSED = "Cloister runs on Linux only; on Windows use it in WSL 2, on macOS in a container or a virtual machine"
WITHOUT = {"windows": "sys.modules['fcntl'] = None", "macos": "del os.posix_fallocate"}
"""Modules that Python lacks on a system."""


def python(code, *words):
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


class TestASystemThatIsNotSupported:
    @pytest.mark.parametrize("system", WITHOUT)
    def test_is_refused_at_the_first_import(self, system):
        for first in ("cloister", "cloister.privacy.accounting.ledger", "cloister.cli", "cloister.server.app"):
            done = python(f"import os, sys; {WITHOUT[system]}; import {first}")
            assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: {REFUSED}"

    @pytest.mark.parametrize("system", WITHOUT)
    def test_is_refused_by_the_command_in_one_sentence(self, system):
        start = "sys.argv = ['/venv/bin/cloister', 'run']; from cloister.__main__ import main; main()"
        done = python(f"import os, sys; {WITHOUT[system]}; {start}")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", REFUSED + "\n")

    def test_is_named_on_the_first_page_and_to_indexes(self):
        assert "On Linux (on Windows: in WSL 2)" in (ROOT / "README.md").read_text()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert project["classifiers"] == ["Operating System :: POSIX :: Linux"]


INTERRUPTED_AT = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == MODULE:
        MODULES.clear()
        os.kill(os.getpid(), signal.SIGINT)

MODULES = [MODULE := sys.argv.pop(1)]
sys.addaudithook(lambda event, arguments: MODULES and interrupt(event, arguments))
from cloister.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("click", "check task digits"),
        ("pydantic.plugin._loader", "sweep cells.toml"),
        ("cloister.sweep.sweep", "sweep cells.toml"),
        ("cloister.simulation.checking", "check task digits"),
    ],
)
def test_ctrl_c_while_a_module_is_imported_is_one_line(tmp_path, monkeypatch, module, command):
    monkeypatch.chdir(tmp_path)
    done = python(INTERRUPTED_AT, module, *command.split())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_that_python_ignores_is_raised_again():
    """As in a callback of the garbage collector."""
    code = """
import os, signal
from cloister.utils.crash import record_interrupts

class Callback:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        [None for _ in range(1000)]

record_interrupts()
Callback()
try:
    signal.pause()
except KeyboardInterrupt:
    print("heard")
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


class TestAnErrorAfterCtrlC:
    @pytest.fixture
    def interrupted(self, monkeypatch):
        monkeypatch.setattr(crash, "interrupts", [signal.SIGINT])

    @pytest.mark.parametrize("error", [ImportError("half"), SystemError("initialization"), OSError(4, "a", "b")])
    def test_is_the_interrupt_whatever_a_library_made_of_it(self, interrupted, error):
        with pytest.raises(KeyboardInterrupt), crash.one_line():
            raise error

    def test_is_an_error_without_it(self):
        with pytest.raises(crash.Crash), crash.one_line():
            raise ImportError("half")


def test_a_cell_that_is_stopped_before_it_began_has_not_failed():
    cell = Cell.__new__(Cell)
    told = [how_ended(Ended(cell, code, 1.0, 0, "")) for code in (-signal.SIGTERM, 130, -signal.SIGKILL)]
    assert told == [
        "stopped before it began; it will be done anew",
        "stopped in order; it will be done anew",
        "failed with exit code -9: it wrote nothing",
    ]


def test_a_check_that_is_interrupted_in_its_round_is_interrupted(monkeypatch):
    from cloister.simulation import checking

    ends = type("Outcome", (), {"ended": "operator", "rounds": []})()
    monkeypatch.setattr(checking, "simulate", lambda *_: ends)
    monkeypatch.setattr(
        checking, "_data_and_model", lambda _config, _data, found, _tell: iter(found.append(None) or ())
    )
    with pytest.raises(KeyboardInterrupt):
        list(checking.check_task("digits"))
