"""The walkthroughs: scripts that the site shows as pages, beside what they printed."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
from quick_runs import quick_runs  # noqa: F401

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "walkthroughs").glob("*.py"))
MEASURED = re.compile(r"(accuracy|rmse|before) [\d.]+")
"""What noise decides; all else is the same in every run."""


def names(script):
    return script.stem


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_walkthrough_prints_what_its_page_shows(script, runs_end_with_a_page, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    runpy.run_path(str(script))
    shown = script.with_suffix(".txt").read_text()
    assert MEASURED.sub(r"\1", capsys.readouterr().out) == MEASURED.sub(r"\1", shown)


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_its_page_has_all_of_its_code(script):
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert script.relative_to(ROOT).as_posix() in hooks.PAGES
    page = hooks.walkthrough(script)
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    code = script.read_text().split('"""', 2)[2]
    lines = [line for line in code.splitlines() if line and not line.startswith("#")]
    assert lines == [line for line in blocks.splitlines() if line]


def test_links_in_walkthroughs_lead_somewhere():
    links = [(script, path) for script in SCRIPTS for path in re.findall(r"\]\(([^)#]+)", script.read_text())]
    assert links and all((script.parent / path).is_file() for script, path in links)
