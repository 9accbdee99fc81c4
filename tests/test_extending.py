"""Every package in docs/extending.md and the exact mechanism in examples: installed beside Cloister, and run."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401
from statistics_of_noise import std_is
from typer.testing import CliRunner

from cloister import Contributions, GaussianNoise
from cloister.cli import app
from cloister.privacy.mechanisms import MECHANISMS
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(python|toml|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_TURN = """
import json, sys
from cloister.cli import app

for arguments in json.loads(sys.argv[1]):
    ended = app(arguments, standalone_mode=False)
    assert not ended, f"{arguments} ended with {ended}"
"""
PACKAGES = ["damped", "chebyshev", "euclidean_laplace", "exact_gaussian"]


def sections():
    """Return the code, the entry point and the command of each package, by the name of its module."""
    found, module = {}, ""
    for kind, text in BLOCK.findall(PAGE):
        if kind == "python":
            module = re.match(r"# (\w+)\.py\n", text)[1]
            found[module] = {}
        found[module][kind] = text
    exact = EXAMPLES / "exact_gaussian"
    found["exact_gaussian"] = {
        "python": (exact / "exact_gaussian.py").read_text(),
        "toml": (exact / "pyproject.toml").read_text(),
        "sh": re.search(r"^cloister run .*$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)[0],
    }
    return found


def test_the_page_is_read():
    assert list(sections()) == PACKAGES
    assert all(set(parts) == {"python", "toml", "sh"} for parts in sections().values())


def test_a_mechanism_is_one_file_of_sixty_lines():
    code = sections()["euclidean_laplace"]["python"]
    assert len(code.splitlines()) <= 60


def install(name, site):
    """Write the files that `pip install` of the package leaves: its module, and its entry points."""
    parts = sections()[name]
    facts = site / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / f"{name}.py").write_text(parts["python"])
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    group, points = re.search(r'entry-points\."([\w.]+)"\]\n((?:\S.*\n)+)', parts["toml"]).groups()
    (facts / "entry_points.txt").write_text(f"[{group}]\n" + points.replace('"', ""))


def in_the_site(site, *command):
    """A command with the package on the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def made(site):
    """The directory of the run."""
    (directory,) = (path for path in (site / "runs").iterdir() if (path / "privacy.json").exists())
    return directory


@pytest.fixture
def site(tmp_path, request):
    install(request.param, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_strategy_with_options_a_distance_and_a_mechanism_without_floating_point(tmp_path):
    """Their commands in one process, which imports Keras once."""
    names = ("damped", "chebyshev", "exact_gaussian")
    commands = []
    for name in names:
        install(name, tmp_path)
        program, *arguments = shlex.split(sections()[name]["sh"])
        assert program == "cloister"
        commands.append([*arguments, "-c", f"output-dir='{tmp_path / 'out' / name / 'runs'}' seed=1"])
    done = in_the_site(tmp_path, sys.executable, "-c", IN_TURN, json.dumps(commands))
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: made(tmp_path / "out" / name) for name in names}
    rounds = [json.loads(line) for line in (runs["damped"] / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["round"] == 2
    configured = json.loads((runs["damped"] / "config.json").read_text())
    assert configured["config"]["strategy.damping"] == 0.25
    facts = {name: json.loads((runs[name] / "privacy.json").read_text()) for name in names}
    assert facts["chebyshev"]["status"] == "sound"
    assert facts["chebyshev"]["parameters"]["privacy.distance"] == "chebyshev"
    assert (facts["exact_gaussian"]["mechanism"], facts["exact_gaussian"]["status"]) == ("exact-gaussian", "sound")
    lines = [json.loads(line) for line in (runs["exact_gaussian"] / "ledger.jsonl").read_text().splitlines()]
    multipliers = [line["event"]["noise_multiplier"] for line in lines if "event" in line]
    assert len(multipliers) == 2 and all(2 * (1 - 1e-10) < z < 2 for z in multipliers)


@pytest.fixture
def found_here(monkeypatch):
    """Finds what is installed in a folder, in this process."""

    def forget():
        vars(MECHANISMS).pop("_table", None)

    def find(site):
        monkeypatch.syspath_prepend(site)
        forget()

    yield find
    forget()
    sys.modules.pop("euclidean_laplace", None)


@pytest.mark.parametrize("site", ["euclidean_laplace"], indirect=True)
def test_a_mechanism_gets_its_claim_its_ledger_and_its_promise(site, found_here):
    found_here(site)
    program, *arguments = shlex.split(sections()["euclidean_laplace"]["sh"])
    done = CliRunner().invoke(app, [*arguments, "-c", f"output-dir='{site / 'runs'}' seed=1"])
    assert program == "cloister" and done.exit_code == 0, done.output
    directory = made(site)
    facts = json.loads((directory / "privacy.json").read_text())
    assert (facts["mechanism"], facts["status"]) == ("euclidean-laplace", "sound")
    assert facts["parameters"] == {"epsilon": 2.0, "bound": 0.5}
    # Two rounds of pure 2. A loss distribution is rounded up to a step of its grid.
    (claim,) = (each for each in facts["claims"] if each["scope"] == "this run")
    assert 3.9 < claim["epsilon"] <= 4.01 and claim["unit"] == "client"
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    assert events == [{"kind": "pure", "epsilon": 2.0}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("site", ["euclidean_laplace"], indirect=True)
def test_a_mechanism_runs_under_the_contract_of_the_built_in_ones(site):
    script = (
        "import os, random; os.urandom = random.Random(1).randbytes\n"  # the same noise in every test run
        "from cloister import check_mechanism\nfrom cloister.privacy.mechanisms import MECHANISMS\n"
        "made = MECHANISMS.load('euclidean-laplace')\n"
        "check_mechanism(made(epsilon=1.0), runs=600)\nprint('passed')\n"
        "check_mechanism(made(epsilon=0.0), runs=600)"
    )
    done = in_the_site(site, sys.executable, "-c", script)
    assert done.stdout.strip() == "passed" and done.returncode, done.stderr
    assert "epsilon must be > 0" in done.stderr


@pytest.fixture
def exact_gaussian(tmp_path, monkeypatch):
    """Return the module of the exact mechanism."""
    install("exact_gaussian", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("exact_gaussian")
    sys.modules.pop("exact_gaussian")


def test_an_exact_release_is_a_whole_number_of_steps_and_bounded_by_them(exact_gaussian):
    """Updates far beyond the bound, at it, and none: each counts with whole steps of a norm of at most 2^20."""
    rng, sizes = np.random.default_rng(3), (1000, 7)
    for length in (0.0, 1e-3, 1.0, 1.0000001, 50.0):
        update = [rng.standard_normal(size) for size in sizes]
        norm = np.sqrt(sum(piece @ piece for piece in update))
        whole = exact_gaussian.truncated([piece * (min(length, 1.0000001) / norm * 2**20) for piece in update])
        squares = sum(int(number) ** 2 for piece in whole for number in piece)
        assert squares <= 2**40 and all((piece == np.rint(piece)).all() for piece in whole)
        assert length < 1 or squares > 2**40 * 0.999


def test_the_exact_release_has_the_noise_that_it_says(exact_gaussian):
    layout = Layout.of({"w": np.zeros(50_000)})
    sent = layout.rows({"w": np.zeros(50_000)})
    mechanism = exact_gaussian.ExactGaussian(multiplier=2.0, bound=0.5)
    given = Contributions(Cohort.of(layout, sent, (sent, sent)), (1.0, 1.0), 2, 2.0, GaussianNoise(1), 1)
    released = mechanism.release(given)
    assert released.noise_std == 0.5 and std_is(released.models[0][0], 0.5)
    steps = released.models[0][0] / (0.5 / 2**20 / 2)
    np.testing.assert_array_equal(steps, np.rint(steps))
