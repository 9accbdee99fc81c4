"""The tutorial, word for word: its commands, in its order."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "runtimes"))
from processes import Processes  # noqa: E402

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
SECONDS = 240


def given(command, option):
    """Return the value after an option."""
    return command[command.index(option) + 1]


def pairs(text):
    """`key=value` pairs, as Flower reads them."""
    from cloister.config.io import read_settings

    return read_settings([text])


def install(folder):
    """Write the files that `pip install -e scans` leaves."""
    project = (folder / "scans" / "pyproject.toml").read_text()
    group, point = re.search(r'entry-points\."([\w.]+)"\]\n(\S+ = .*)\n', project).groups()
    facts = folder / "scans" / "scans-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: scans\nVersion: 0.1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n" + point.replace('"', "") + "\n")


def test_the_page_has_these_commands():
    assert [command[0] for command in COMMANDS] == [
        "cloister",
        "pip",
        *["cloister"] * 5,
        "flower-superlink",
        *["cloister"] * 2,
        "flwr",
        *["cloister"] * 2,
    ]


@pytest.mark.runtimes(minutes=2)
def test_whoever_follows_the_tutorial_trains_with_two_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "scans"), os.environ.get("PYTHONPATH", "")]))
    runs = []
    with Processes(tmp_path / "processes", shortened=True) as processes:

        def follow(command):
            program = shutil.which(command[0]) or str(Path(sys.executable).with_name(command[0]))
            script = shlex.join([program, *(str(runs[0]) if word == "RUN" else word for word in command[1:])])
            processes.run("step", shutil.which("bash"), "-c", f"cd {tmp_path} && {script}", seconds=SECONDS)
            runs[:] = sorted(path.parent for path in tmp_path.glob("runs/*/privacy.json"))

        follow(COMMANDS[0])
        install(tmp_path)
        for command in COMMANDS[2:7]:
            follow(command)
        plain, private = runs
        assert (plain / "report.html").is_file()
        example = json.loads((private / "privacy.json").read_text())["clients"]
        assert example["status"] == "sound" and example["by-examples"][0]["claims"][0]["unit"] == "example"

        processes.superlink(*COMMANDS[7][2:])
        sites = [pairs(given(command, "--node-config")) for command in COMMANDS[8:10]]
        nodes = [site | {"data-path": str(tmp_path / site["data-path"])} for site in sites]
        processes.supernodes(nodes, *COMMANDS[8][:2])
        settings = pairs(given(COMMANDS[10], "--run-config"))
        processes.flwr_run(settings | {"output-dir": str(tmp_path / "deployed"), "run-name": "r"}, seconds=SECONDS)
        rounds = [json.loads(line) for line in (tmp_path / "deployed" / "r" / "rounds.jsonl").read_text().splitlines()]
        assert rounds[-1]["round"] == 3
        for command in COMMANDS[11:]:
            follow(command)
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert lines[0].startswith("example,prediction,probability,class,probability of ") and len(lines) == 201
