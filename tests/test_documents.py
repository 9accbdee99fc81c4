"""The documents' statements are true: commands, keys, names."""

import ast
import doctest
import importlib
import json
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import cloister
from cloister.cli import app
from cloister.config.io import read_settings
from cloister.config.run import known_keys, parse
from cloister.tasks import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command_word_for_word():
    (command,) = re.findall(r"^pip install -e '\.\[test\]'.*$", README, flags=re.MULTILINE)
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()


def test_each_mark_has_its_minutes_a_command_and_a_stage_of_ci():
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = [re.split(r"\W", mark)[0] for mark in marks]
    page, ci = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for text in (*(f"\n| `{name}` |" for name in names), *(f"\npytest -m {name} " for name in names)):
        assert text in page
    commands = re.findall(r"^(?:[A-Z_]+=1 bounded |bounded |    )pytest -m (\w+)", ci, re.MULTILINE)
    assert [name for name in names if name not in commands] == ["long"]


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
"""A link inside the repository: a path, an anchor, or both."""
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(tests|cloister|docs|benchmarks|experiments|docker)/[\w/.-]+")
MODULE = re.compile(r"cloister(\.\w+){2,}")
PLACED = re.compile(r"\[`(\w+(?:\.\w+)?)`\]\(\.\./([\w/]+\.py)\)")
"""A function, a class or a constant that the tour names: a link to its file."""


def short(page):
    return page.relative_to(ROOT).as_posix()


@cache
def text_of(page):
    return page.read_text()


@cache
def anchors_of(page):
    """Return what headings of a page can be linked to as."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def defined_in(path):
    """Return what a file defines: names, and `Class.name` of what is in its classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if isinstance(target, ast.Name):
                names.add(target.id)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def is_there(name):
    """Return whether a dotted name is a module, or something that a module defines."""
    *module, last = name.split(".")
    folder = ROOT.joinpath(*module)
    if (folder / last).is_dir() or (folder / f"{last}.py").exists():
        return True
    return folder.with_suffix(".py").exists() and last in defined_in(folder.with_suffix(".py"))


def test_every_key_is_explained():
    page = text_of(ROOT / "docs" / "configuration.md")
    assert not [key for key in known_keys() if f"`{key}`" not in page]


def test_links_between_documents_lead_somewhere():
    links = [(page, path, anchor) for page in PAGES for path, anchor in LINK.findall(text_of(page))]
    assert links
    assert not [
        f"{short(page)}: {path}{anchor}"
        for page, path, anchor in links
        if not (target := page.parent / path if path else page).exists()
        or (anchor and anchor not in anchors_of(target.resolve()))
    ]


def test_files_and_modules_that_documents_name_exist():
    named = [(page, code) for page in PAGES for code in CODE.findall(text_of(page))]
    files = [(page, code) for page, code in named if FILE.fullmatch(code)]
    names = [(page, code) for page, code in named if MODULE.fullmatch(code)]
    assert files and names
    missing = [named for named in files if not (ROOT / named[1]).exists()]
    missing += [named for named in names if not is_there(named[1])]
    assert not [f"{short(page)}: {code}" for page, code in missing]


def test_what_the_tour_names_is_defined_in_the_file_that_it_links_to():
    placed = PLACED.findall(text_of(ROOT / "docs" / "tour.md"))
    assert len(set(placed)) >= 30
    assert not [f"{path}: {name}" for name, path in placed if name not in defined_in(ROOT / path)]


CALLED_FIRST = [
    "Account",
    "DiscreteGaussian",
    "GaussianNoise",
    "GlobalDP",
    "Mechanism",
    "PrivacyBudget",
    "PrivateStrategy",
    "clip",
    "leave_one_out",
    "noisy_mean",
    "parse",
]
"""A user's first calls: each has an example in its docstring."""


@pytest.mark.parametrize("name", CALLED_FIRST)
def test_the_examples_of_what_users_call_first_run(name):
    thing = getattr(cloister, name)
    module = importlib.import_module(thing.__module__)
    (example,) = doctest.DocTestFinder(recurse=False).find(thing, name, module)
    assert len(example.examples) >= 3
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not result.failed


EXAMPLE = re.compile(r'^cloister run (.*-c )"?(.*?)"?\n(?:cloister ledger show (.*)\n)?', re.MULTILINE)
"""A command of the README, its settings, and where the README shows the run's ledger."""
EXAMPLES = EXAMPLE.findall(README)


def in_the_repository(settings):
    """Return settings as they are, or the path of their file from any folder."""
    return str(ROOT / settings) if settings.endswith(".toml") else settings


@pytest.mark.parametrize(("command", "settings", "ledger"), EXAMPLES)
def test_the_readmes_examples_run_and_leave_the_ledgers_that_it_shows(command, settings, ledger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*shlex.split(command), in_the_repository(settings)]
    result = CliRunner().invoke(app, ["run", *options, "-c", "num-rounds=1"])
    assert result.exit_code == 0, result.output
    assert "Result" in result.output
    if ledger:
        (path,) = tmp_path.glob(ledger)
        shown = CliRunner().invoke(app, ["ledger", "show", str(path)])
        assert shown.exit_code == 0 and "ε = 4 at δ = 1e-05" in shown.output


ONCE_SIGNED = 10
"""ε above which a person who answers for data does not sign a guarantee."""


def test_what_the_readme_shows_as_a_guarantee_is_one_to_sign():
    budgets = []
    for _, settings, _ in EXAMPLES:
        privacy = parse(read_settings([in_the_repository(settings)])).privacy
        if privacy.server.name == "global-dp":
            budgets.append((settings, privacy.server.max_epsilon))
        if privacy.client.name in ("dp-sgd", "gaussian"):
            budgets.append((settings, privacy.client.max_epsilon))
    assert len(budgets) >= 2
    assert not [(settings, epsilon) for settings, epsilon in budgets if not 0 < epsilon <= ONCE_SIGNED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_first_run_ends_in_a_guarantee_and_a_model_that_learnt(seed, tmp_path):
    command, settings, _ = EXAMPLES[0]
    options = [*shlex.split(command), in_the_repository(settings)]
    result = CliRunner().invoke(app, ["run", *options, "-c", f"seed={seed} output-dir='{tmp_path}' run-name='first'"])
    assert result.exit_code == 0, result.output
    privacy = json.loads((tmp_path / "first" / "privacy.json").read_text())
    assert privacy["status"] == "sound"
    assert all(claim["epsilon"] <= 4 and claim["unit"] == "client" for claim in privacy["claims"])
    *_, last = (tmp_path / "first" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(last)["central"]["accuracy"] >= 0.80


def test_the_readme_does_not_show_how_to_rename_data():
    assert "data-identity" not in README


class TestATaskByHand:
    """The section of docs/tasks.md, to the letter."""

    text = (ROOT / "docs" / "tasks.md").read_text().partition("## A task by hand")[2].partition("\n## ")[0]

    def block(self, language):
        (found,) = re.findall(rf"^```{language}\n(.*?)^```$", self.text, flags=re.MULTILINE | re.DOTALL)
        return found

    @pytest.fixture
    def installed(self, tmp_path, monkeypatch):
        """Write the files that `pip install` of the package leaves: its code, and its entry points."""
        site, package = tmp_path / "site", tmp_path / "site" / "my_package"
        facts = site / "my_package-1.dist-info"
        for folder in (package, facts):
            folder.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "scans.py").write_text(self.block("python"))
        (group,) = tomllib.loads(self.block("toml"))["project"]["entry-points"].items()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
        points = "".join(f"{name} = {value}\n" for name, value in group[1].items())
        (facts / "entry_points.txt").write_text(f"[{group[0]}]\n{points}")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(vars(TASKS), "_table", raising=False)
        yield
        vars(TASKS).pop("_table", None)

    def test_it_trains_and_predicts(self, installed, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(0)
        y = np.arange(60) % 2
        np.savez("scans.npz", x=rng.normal(y[:, None, None, None], 0.3, (60, 16, 16, 1)), y=y)
        (settings,) = re.findall(r'^cloister run -c "(.*)"$', self.block("sh"), flags=re.MULTILINE)
        quick = "num-rounds=1 tensorboard=false privacy.server='none' strategy.min-nodes=2"
        result = CliRunner().invoke(app, ["run", "-n", "2", "-c", settings, "-c", quick])
        assert result.exit_code == 0, result.output
        (run,) = (path.parent for path in tmp_path.glob("runs/*/config.json"))
        assert list(tmp_path.glob("runs/ledgers/scans-*.jsonl")), "the task's data was taken for public"
        predicted = CliRunner().invoke(app, ["predict", str(run), "scans.npz"])
        assert predicted.exit_code == 0 and len(predicted.stdout.splitlines()) == 61


def test_how_long_the_tests_take_is_said_before_they_run_and_in_the_readme():
    conftest = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "conftest.py")))  # there are others of this name
    header = " ".join(conftest.pytest_report_header(SimpleNamespace(getoption=lambda _: conftest.FAST)))
    assert f"at most {conftest.MINUTES} minutes" in header and "at most eight minutes" in " ".join(README.split())
    assert conftest.FAST in (ROOT / "pyproject.toml").read_text()


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


def test_images_named_by_person_become_the_groups_that_a_run_protects(tmp_path, monkeypatch):
    from PIL import Image
    from tasks.hospital import scans

    written = (ROOT / "docs" / "tasks.md").read_text().partition("**Several images of one person.**")[2]
    code = re.search(r"```python\n(.*?)```", written, re.DOTALL)
    for number in range(6):
        folder = tmp_path / "images" / ("ring" if number % 2 else "square")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 30), 10 * number).save(folder / f"p{number // 2:03d}_{number:05d}.png")
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    site = scans({"group": "person"}, class_names=("ring", "square")).read(tmp_path / "images")
    assert site.x.shape == (6, 4, 4, 1) and 0 < site.x.max() <= 1
    assert sorted(zip(site.groups, site.y, strict=True)) == [(f"p00{n}", y) for n in range(3) for y in (0, 1)]
