"""What `cloister new` writes, as a user would take it: installed beside Cloister, checked, tested and run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.core.errors import ConfigError
from cloister.scaffold.package import GROUPS, write_package

KINDS = [("task", "csv"), ("task", "npz"), ("task", "images"), ("strategy", "csv"), ("mechanism", "csv")]
IN_TURN = """
import json, sys
from cloister.cli import app

for arguments in json.loads(sys.argv[1]):
    ended = app(arguments, standalone_mode=False)
    assert not ended, f"{arguments} ended with {ended}"
"""
"""Commands of `cloister` in one process, which imports Keras once."""
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def installed(folder, kind, source):
    """A package called my-thing, and what pip would leave of it."""
    made = write_package(kind, "my-thing", source, folder / "my-thing")
    facts = made / "my_thing-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-thing\nVersion: 0.1.0\n")
    group, points = re.search(
        r'entry-points\."([\w.]+)"\]\n(\S+ = .*)\n', (made / "pyproject.toml").read_text()
    ).groups()
    (facts / "entry_points.txt").write_text(f"[{group}]\n" + points.replace('"', "") + "\n")
    return made


def within(made, *command):
    """A command with the package on the path, in its folder."""
    path = os.pathsep.join([str(made), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)


def cloister(made, *arguments):
    return within(made, str(Path(sys.executable).with_name("cloister")), *arguments)


@pytest.mark.parametrize(("kind", "source"), KINDS)
def test_every_file_is_complete(tmp_path, kind, source):
    made = write_package(kind, "ward-7", source, tmp_path / "any place")
    texts = [path.read_text() for path in made.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    assert len(texts) == 5
    assert not any(mark in text for text in texts for mark in ("{{", "{%", "MODULE"))
    assert f'ward-7 = "ward_7.{kind}:Ward7"' in (made / "pyproject.toml").read_text()
    for path in made.rglob("*.py"):
        compile(path.read_text(), path, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "source"), KINDS)
def test_its_own_tests_pass(tmp_path, kind, source):
    made = installed(tmp_path, kind, source)
    done = within(made, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_its_own_tests_pass_where_no_data_is_in_the_package(tmp_path):
    made = installed(tmp_path, "task", "images")
    (made / "my_thing" / "data").rename(tmp_path / "own")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests"]
    done = within(made, *command)
    assert re.search(r"^1 passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout[-3000:]
    done = within(made, "env", f"TASK_DATA={tmp_path / 'own'}", *command)
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE), done.stdout[-3000:]
    done = within(made, "env", f"TASK_DATA={tmp_path / 'gone'}", *command)
    assert re.search(r"^1 failed, 1 skipped", done.stdout, re.MULTILINE), "what is named is not skipped"


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize(("kind", "source"), KINDS)
def test_the_commands_of_its_readme_work(tmp_path, kind, source):
    made = installed(tmp_path, kind, source)
    lines = [line.strip() for block in BLOCK.findall((made / "README.md").read_text()) for line in block.splitlines()]
    ours = [shlex.split(line) for line in lines if line.startswith("cloister ")]
    assert ours
    if source != "csv":  # runs are alike, whatever was read
        ours = [command for command in ours if command[1] == "check"]
    done = within(made, sys.executable, "-c", IN_TURN, json.dumps([arguments for _, *arguments in ours]))
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.slow
def test_a_new_task_has_nothing_wrong(tmp_path):
    made = installed(tmp_path, "task", "csv")
    done = cloister(made, "check", "task", "my-thing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:4] for line in done.stdout.splitlines()] == ["ok  "] * 5
    assert "one round of 2 clients: loss " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plugin", "x"], "'plugin' cannot be made; valid: task, strategy, mechanism"),
        (["task", "My Task"], "the name 'My Task' is not valid"),
        (["task", "class"], "the name 'class' is not valid"),
        (["task", "x", "--from", "xls"], "--from 'xls' is not valid: it must be csv, npz, images"),
    ],
)
def test_what_cannot_be_made(tmp_path, arguments, says):
    done = CliRunner().invoke(app, ["new", *arguments, "--to", str(tmp_path / "made")])
    assert done.exit_code == 1 and says in done.output and len(done.output.splitlines()) == 1
    assert not (tmp_path / "made").exists()


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is there already; name another folder with --to"):
        write_package("task", "x", "csv", tmp_path)
    with pytest.raises(ConfigError, match="notes"):
        write_package("task", "x", "csv", tmp_path / "notes" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_every_kind_has_a_group_of_entry_points():
    import tomllib

    from cloister.privacy.mechanisms import MECHANISMS
    from cloister.server.strategies import STRATEGIES
    from cloister.tasks import TASKS

    assert {f"cloister.{group}" for group in GROUPS.values()} == {
        registry.group for registry in (TASKS, STRATEGIES, MECHANISMS)
    }
    packaged = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert packaged["tool"]["setuptools"]["package-data"]["cloister.scaffold"] == ["templates/**/*.jinja"]
