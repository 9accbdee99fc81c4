"""What the documents say is true: commands, keys, names."""

import ast
import doctest
import importlib
import pkgutil
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import cloister
from cloister.cli import app
from cloister.config.run import known_keys, parse
from cloister.config.settings import read_settings
from cloister.tasks import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command_word_for_word():
    (command,) = re.findall(r"^pip install -e '\.\[test\]'.*$", README, flags=re.MULTILINE)
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("key", known_keys())
def test_every_key_is_explained(key):
    assert f"`{key}`" in (ROOT / "docs" / "configuration.md").read_text()


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
"""A link inside the repository: a path, an anchor, or both."""
CODE = re.compile(r"`([^`\n]+)`")


def anchors_of(page):
    """What headings of a page can be linked to as."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_documents_lead_somewhere(name):
    page = ROOT / name
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{name} links to {path}"
        assert not anchor or anchor in anchors_of(target), f"{name} links to {path}{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_files_and_modules_that_documents_name_exist(name):
    for code in CODE.findall((ROOT / name).read_text()):
        if re.fullmatch(r"(tests|cloister|docs|benchmarks|experiments|docker)/[\w/.-]+", code):
            assert (ROOT / code).exists(), f"{name} names {code}"
        if re.fullmatch(r"cloister(\.\w+){2,}", code):
            assert pkgutil.resolve_name(code) is not None, f"{name} names {code}"


TOUR = ROOT / "docs" / "tour.md"
PLACED = sorted(set(re.findall(r"\[`(\w+(?:\.\w+)?)`\]\(\.\./([\w/]+\.py)\)", TOUR.read_text())))
"""How the tour names a function, a class or a constant: a link to its file."""


def defined_in(path):
    """What a file defines: names, and `Class.name` of what is in its classes."""
    for node in ast.parse(path.read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if isinstance(target, ast.Name):
                yield target.id
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))


def test_the_tour_names_what_it_talks_about():
    assert len(PLACED) >= 30


@pytest.mark.parametrize(("name", "path"), PLACED)
def test_what_the_tour_names_is_defined_in_the_file_that_it_links_to(name, path):
    assert name in set(defined_in(ROOT / path))


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
"""What a user calls first: each has an example in its docstring."""


@pytest.mark.parametrize("name", CALLED_FIRST)
def test_the_examples_of_what_users_call_first_run(name):
    thing = getattr(cloister, name)
    module = importlib.import_module(thing.__module__)
    (example,) = doctest.DocTestFinder(recurse=False).find(thing, name, module)
    assert len(example.examples) >= 3
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not result.failed


@pytest.mark.parametrize("command", re.findall(r'^cloister run (.*-c ".*")$', README, flags=re.MULTILINE))
def test_the_readmes_examples_run(command, tmp_path):
    arguments = shlex.split(command)
    arguments[-1] = re.sub(r"num-rounds=\d+", "", arguments[-1]) + f" num-rounds=1 output-dir='{tmp_path}'"
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 0, result.output
    assert "Result" in result.output


ONCE_SIGNED = 10
"""ε above which a guarantee is not one that somebody would put a name to."""


@pytest.mark.parametrize("command", re.findall(r'^cloister run .*-c "(.*)"$', README, flags=re.MULTILINE))
def test_what_the_readme_shows_as_a_guarantee_is_one_to_sign(command):
    privacy = parse(read_settings([command])).privacy
    if privacy.server.name == "global-dp":
        assert 0 < privacy.server.max_epsilon <= ONCE_SIGNED
    if privacy.client.name in ("dp-sgd", "gaussian"):
        assert 0 < privacy.client.max_epsilon <= ONCE_SIGNED


def test_the_readme_teaches_nobody_to_rename_data():
    assert "data-identity" not in README


def test_the_ledger_that_the_readme_shows_is_the_one_of_the_run_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, shown = re.search(
        r"^cloister run (.*max-epsilon.*)\ncloister ledger show (.*)$", README, re.MULTILINE
    ).groups()
    *options, settings = shlex.split(run)
    settings += " num-rounds=1"
    assert CliRunner().invoke(app, ["run", *options, settings]).exit_code == 0
    (ledger,) = tmp_path.glob(shown)
    result = CliRunner().invoke(app, ["ledger", "show", str(ledger)])
    assert result.exit_code == 0 and "ε = 4 at δ = 1e-05" in result.output


class TestATaskByHand:
    """The section of docs/tasks.md, to the letter."""

    text = (ROOT / "docs" / "tasks.md").read_text().partition("## A task by hand")[2]

    def block(self, language):
        (found,) = re.findall(rf"^```{language}\n(.*?)^```$", self.text, flags=re.MULTILINE | re.DOTALL)
        return found

    @pytest.fixture
    def installed(self, tmp_path, monkeypatch):
        """What `pip install` of the package leaves: its code, and its entry points."""
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
        assert list(tmp_path.glob("runs/ledgers/scans-*.jsonl")), "nobody said that the data is public"
        predicted = CliRunner().invoke(app, ["predict", str(run), "scans.npz"])
        assert predicted.exit_code == 0 and len(predicted.stdout.splitlines()) == 61


def test_how_long_the_tests_take_is_said_before_they_run_and_in_the_readme():
    conftest = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "conftest.py")))  # there are others of this name
    header = " ".join(conftest.pytest_report_header(SimpleNamespace(getoption=lambda _: conftest.FAST)))
    assert f"at most {conftest.MINUTES} minutes" in header and "at most seven minutes" in " ".join(README.split())
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


def test_images_named_by_person_become_the_array_that_a_run_protects(tmp_path, monkeypatch):
    from PIL import Image

    written = (ROOT / "docs" / "tasks.md").read_text().partition("**Several images of one person.**")[2]
    code = re.search(r"```python\n(.*?)```", written, re.DOTALL)
    for number in range(6):
        folder = tmp_path / "images" / ("ring" if number % 2 else "square")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 30), 10 * number).save(folder / f"p{number // 2:03d}_{number:05d}.png")
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    with np.load("site.npz") as site:
        assert site["x"].shape == (6, 32, 32, 1) and 0 < site["x"].max() <= 1
        assert sorted(zip(site["person"], site["y"], strict=True)) == [(f"p00{n}", y) for n in range(3) for y in (0, 1)]
