"""The exit codes of `cloister`, as docs/runs.md has them: 1 of what failed, 2 of what cannot be read."""

import re
import tempfile
from pathlib import Path

import click
import pytest
import typer
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.testing import CliRunner

from cloister import cli

FLOWERS = {"warm-node", "superlink", "superexec"}
"""Commands that hand their options to Flower's."""
FAILING = [
    "run -c num-rounds=-1",
    "plan -c num-rounds=-1",
    "audit -c num-rounds=-1",
    "audit nosuch",
    "status nosuch",
    "new task Nosuch",
    "policy nosuch",
    "predict nosuch nosuch",
    "signing-key nosuch",
    "report nosuch",
    "compare nosuch",
    "sweep nosuch",
    "provision nosuch",
    "check task nosuch",
    "ledger verify nosuch",
    "ledger anchor nosuch --key nosuch --to nosuch",
    "ledger show nosuch",
    "ledger leakage nosuch",
    "site list nosuch",
    "site approve nosuch one",
    "site rotate nosuch one",
    "site remove nosuch one",
]
ENDLESS = {"watch", "dashboard"}
"""Commands that go on: what they read may come later."""
WITHOUT_INPUT = {"check kernels"}


def commands(command, path=()):
    """Each command with the words that call it."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(cli.app)))
OWN = sorted(COMMANDS.keys() - FLOWERS)


@pytest.fixture
def result_of(tmp_path, monkeypatch):
    """Call each command in an empty folder, where Flower knows no connection."""

    def call(line):
        folder = tempfile.mkdtemp(dir=tmp_path)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FLWR_HOME", f"{folder}/flwr")
        return CliRunner().invoke(cli.app, line.split())

    return call


def test_an_option_that_is_not_known_is_2(result_of):
    def check(name):
        assert result_of(f"{name} --nosuch").exit_code == 2

    assert failures(OWN, check) == []


def test_settings_that_cannot_be_read_are_2(result_of):
    def check(name):
        given = " nosuch" * sum(isinstance(one, click.Argument) and one.required for one in COMMANDS[name].params)
        assert result_of(f"{name}{given} -c unreadable").exit_code == 2

    assert failures([name for name in OWN if any("-c" in one.opts for one in COMMANDS[name].params)], check) == []


def test_what_failed_is_1(result_of):
    def check(line):
        result = result_of(line)
        assert result.exit_code == 1
        assert "traceback" not in result.output, "a mistake of ours, and not the one that was made"

    assert failures(FAILING, check) == []


def test_the_docs_have_all_codes_and_no_others():
    section = (Path(__file__).parents[1] / "docs" / "runs.md").read_text().partition("## How a command ends")[2]
    table = section.partition("| command |")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert told == {0, cli.FAILED, cli.MISUSED, cli.BUDGET_SPENT, cli.INTERRUPTED} == {0, 1, 2, 3, 130}


def test_every_command_is_tried():
    tried = {name for name in OWN for line in FAILING if f"{line} ".startswith(f"{name} ")}
    assert tried == set(OWN) - ENDLESS - WITHOUT_INPUT
