"""Use what `cloister new` writes as a user would: installed beside Cloister, checked, tested and run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.scaffold.package import ENDINGS, GROUPS, write_package
from cloister.utils.errors import ConfigError

KINDS = [
    *[("task", source, "keras") for source in ENDINGS],
    *[("task", source, "numpy") for source in ENDINGS],
    ("strategy", "csv", "keras"),
    ("mechanism", "csv", "keras"),
]
TORCH = [("task", source, "torch") for source in ENDINGS]
OTHERS = [kind for kind in KINDS if kind[0] != "task"]


def of_each(kinds, torch):
    """Parameters of the fixture `of_each_kind`."""
    lists = [pytest.param(kinds, marks=pytest.mark.slow), pytest.param(torch, marks=pytest.mark.torch)]
    return pytest.mark.parametrize("of_each_kind", lists, indirect=True, ids=["all", "torch"])


IN_TURN = """
import json, os, sys
from cloister.cli import app

for folder, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    print("$", *arguments, flush=True)
    ended = app(arguments, standalone_mode=False)
    assert not ended, f"{arguments} ended with {ended}"
"""
"""Commands of `cloister` in one process, which imports Keras once."""
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def installed(folder, kind, source, framework="keras", name="my-thing"):
    """A package, and what pip would leave of it."""
    made = write_package(kind, name, source, folder / name, framework=framework)
    facts = made / f"{name.replace('-', '_')}-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    group, points = re.search(
        r'entry-points\."([\w.]+)"\]\n(\S+ = .*)\n', (made / "pyproject.toml").read_text()
    ).groups()
    (facts / "entry_points.txt").write_text(f"[{group}]\n" + points.replace('"', "") + "\n")
    return made


@pytest.fixture
def of_each_kind(tmp_path, request):
    """Packages of several kinds beside each other."""
    if request.param[0][-1] == "torch":
        pytest.importorskip("torch")
    return {each: installed(tmp_path, *each, f"my-{'-'.join(each)}") for each in request.param}


def within(made, *command, beside=()):
    """A command with the package on the path, in its folder."""
    path = os.pathsep.join([str(made), *map(str, beside), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)


def test_every_file_is_complete(tmp_path):
    for kind, source, framework in (*KINDS, *TORCH):
        place = tmp_path / f"any place {kind} {source} {framework}"
        made = write_package(kind, "ward-7", source, place, framework=framework)
        texts = [path.read_text() for path in made.rglob("*") if path.suffix in (".py", ".md", ".toml")]
        assert len(texts) == 5
        assert not any(mark in text for text in texts for mark in ("{{", "{%", "MODULE"))
        assert f'ward-7 = "ward_7.{kind}:Ward7"' in (made / "pyproject.toml").read_text()
        for path in made.rglob("*.py"):
            compile(path.read_text(), path, "exec")


@of_each(KINDS, TORCH)
def test_their_own_tests_pass(tmp_path, of_each_kind):
    """In one process, which imports Keras once."""
    made = of_each_kind.values()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--import-mode=importlib"]
    folders = [str(one / "tests") for one in made]
    done = within(tmp_path, sys.executable, "-m", "pytest", *options, *folders, beside=made)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(rf"^{2 * len(made)} passed", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_its_own_tests_pass_where_no_data_is_in_the_package(tmp_path):
    made = installed(tmp_path, "task", "images", "numpy")
    (made / "my_thing" / "data").rename(tmp_path / "own")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests"]
    done = within(made, *command)
    assert re.search(r"^1 passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout[-3000:]
    done = within(made, "env", f"TASK_DATA={tmp_path / 'own'}", *command)
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE), done.stdout[-3000:]
    done = within(made, "env", f"TASK_DATA={tmp_path / 'gone'}", *command)
    assert re.search(r"^1 failed, 1 skipped", done.stdout, re.MULTILINE), "what is named is not skipped"


@of_each([("task", "csv", "keras"), ("task", "npz", "numpy"), ("task", "images", "numpy"), *OTHERS], TORCH[:1])
def test_the_commands_of_their_readmes_work_and_a_new_task_has_nothing_wrong(tmp_path, of_each_kind):
    """Each source and each framework occurs once. The tests of a package check the task for all pairs of the two."""
    commands = []
    for (_, source, framework), made in of_each_kind.items():
        blocks = BLOCK.findall((made / "README.md").read_text())
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        ours = [shlex.split(line)[1:] for line in lines if line.startswith("cloister ")]
        assert ours
        # Runs are alike, whatever was read.
        runs = source == "csv" and framework != "numpy"
        commands += [(str(made), each) for each in ours if runs or each[0] == "check"]
    done = within(tmp_path, sys.executable, "-c", IN_TURN, json.dumps(commands), beside=of_each_kind.values())
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    said = dict(part.partition("\n")[::2] for part in done.stdout.split("$ ")[1:])
    for kind, source, framework in of_each_kind:
        if kind == "task":
            checked = said[f"check task my-task-{source}-{framework}"]
            assert [line[:4] for line in checked.splitlines()] == ["ok  "] * (6 if source == "images" else 5), checked
            assert "one round of 2 clients: loss " in checked


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
    from cloister.server.build import STRATEGIES
    from cloister.tasks import TASKS

    assert {f"cloister.{group}" for group in GROUPS.values()} == {
        registry.group for registry in (TASKS, STRATEGIES, MECHANISMS)
    }
    packaged = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert packaged["tool"]["setuptools"]["package-data"]["cloister.scaffold"] == ["templates/**/*.jinja"]


def test_a_package_of_images_says_what_protects_patients(tmp_path):
    for source, says in (("images", True), ("npz", False)):
        made = write_package("task", "ward", source, tmp_path / source)
        for name in ("README.md", "ward/task.py"):
            assert ("PatientID" in (made / name).read_text()) == says
