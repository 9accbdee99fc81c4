"""What the documents say is true: commands, keys, names."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.core.config import known_keys

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command_word_for_word():
    (command,) = re.findall(r"^pip install -e '\.\[test\]'.*$", README, flags=re.MULTILINE)
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("key", known_keys())
def test_every_key_is_explained(key):
    assert f"`{key}`" in (ROOT / "docs" / "configuration.md").read_text()


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("command", re.findall(r'^cloister run (.*-c ".*")$', README, flags=re.MULTILINE))
def test_the_readmes_examples_run(command, tmp_path):
    import shlex

    arguments = shlex.split(command)
    arguments[-1] = re.sub(r"num-rounds=\d+", "", arguments[-1]) + f" num-rounds=1 output-dir='{tmp_path}'"
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 0, result.output
    assert "Result" in result.output


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["run", *arguments])

    def test_a_bad_key_is_one_line_and_exit_code_1(self):
        result = self.run("-c", "num-round=3")
        assert result.exit_code == 1 and "did you mean 'num-rounds'" in result.output
        assert "Traceback" not in result.output

    def test_a_toml_file(self, tmp_path):
        settings = tmp_path / "run.toml"
        settings.write_text(f'num-rounds = 1\noutput-dir = "{tmp_path}"\n[task]\nmodel = "softmax"\n')
        result = self.run("-c", str(settings))
        assert result.exit_code == 0 and "round   1/1" in result.output

    def test_a_missing_toml_file(self):
        assert "no file at nowhere.toml" in self.run("-c", "nowhere.toml").output
