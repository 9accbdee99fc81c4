"""A run as an entry for the registry of deployments, which the registry's own checker accepts."""

import importlib.util
import itertools
import os
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from reported import write_run
from support import failures
from typer.testing import CliRunner

from cloister.cli import app
from cloister.config.io import read_toml
from cloister.server.reports.html.data import LONGEST, Statements
from cloister.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "registry" / "registry_entry.py"
ENTRY = (SCRIPT.parent / "entry.toml").read_text()
(STATED,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "report.md").read_text(), re.DOTALL)
"""The example of the page: what is in it is what is tested."""
WITHOUT_LINKS = re.sub(r"^sources.*\n", "", ENTRY, flags=re.MULTILINE)
"""The registry's checker asks the network about every link."""
SPEC = importlib.util.spec_from_file_location("registry_entry", SCRIPT)
registry_entry = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(registry_entry)
Entry, write_entry = registry_entry.Entry, registry_entry.write_entry


@pytest.fixture
def checker(tmp_path):
    """The registry's own checker, in the layout of its repository."""
    root = os.environ.get("CLOISTER_DATA", "")
    source = Path(root) / "deployments-registry"
    if not root or not source.is_dir():
        pytest.skip("CLOISTER_DATA does not name a folder with deployments-registry/")
    home = tmp_path / "registry"
    for folder in ("tools", "schemas"):
        (home / folder).mkdir(parents=True)
    shutil.copy(source / "check.py", home / "tools" / "check.py")
    shutil.copy(source / "deployments-schema.yaml", home / "schemas" / "deployments-schema.yaml")
    (home / "known_bad_urls.txt").touch()
    spec = importlib.util.spec_from_file_location("check", home / "tools" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry_of(text=WITHOUT_LINKS):
    return Entry.model_validate(tomllib.loads(text))


def written(place, entry=None, statements=None, **run):
    return write_entry(write_run(place / "run", **run), entry or entry_of(), statements or Statements())


def test_the_registrys_checker_accepts_it(tmp_path_factory, checker):
    def check(kind, stated):
        folder = tmp_path_factory.mktemp("case")
        assert checker.check(written(folder, statements=stated, kind=kind)) == {}

    cases = itertools.product(["sound", "dp-sgd"], [Statements(), Statements.model_validate(tomllib.loads(STATED))])
    assert failures(cases, check) == []


def test_and_whatever_the_operator_writes(tmp_path_factory, checker):
    def check(text):
        folder = tmp_path_factory.mktemp("case")
        entry = entry_of().model_copy(update={"description": text, "sources": text})
        assert checker.check(written(folder, entry, Statements(trust=text[:LONGEST]))) == {}

    cases = ["a: b # c\n- d", "'quoted' \"twice\" | > %", "x" * 1900 + " y", "ε ≤ 2\ttab\x01", "true"]
    assert failures(cases, check) == []


def test_the_checker_can_refuse(tmp_path, checker):
    path = written(tmp_path)
    content = yaml.safe_load(path.read_text())
    del content["deployment"]["basic"]["intended_use"]
    path.write_text(yaml.safe_dump(content | {"tier": 4}))
    assert len(checker.check(path)["check schema"]) == 2


def test_it_holds_the_largest_epsilon_of_the_claim(tmp_path):
    content = yaml.safe_load(written(tmp_path).read_text())
    loss = content["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": 2.0, "delta": 1e-5}
    assert "ε = 1 at δ = 1e-05" in loss["privacy_parameters_details"]
    assert content["deployment"]["dp_variant"]["unprotected_quantities"] == "who replies"
    assert content["url_slug"] == "tumour-triage-four-hospitals-2026" and content["status"] == "Draft"


def test_it_tells_who_adds_the_noise(tmp_path_factory):
    def check(kind, told):
        folder = tmp_path_factory.mktemp("case")
        content = yaml.safe_load(written(folder, kind=kind).read_text())
        assert content["deployment"]["deployment_model"]["model_name_details"] == told

    cases = [
        ("sound", "Noise is added on a server that is trusted."),
        (
            "shares",
            "Noise is added on the clients, in shares: the server learns a sum with noise, and no single update.",
        ),
        ("dp-sgd", "Noise is added on the clients."),
    ]
    assert failures(cases, check) == []


def test_a_run_without_a_guarantee_has_no_entry(tmp_path_factory):
    def check(kind):
        folder = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="no sound claim"):
            written(folder, kind=kind)
        assert not (folder / "run" / "registry.yaml").exists()

    assert failures(["none", "heuristic", "laplace"], check) == []


def test_a_bad_file_is_refused_by_the_name_of_its_key(tmp_path_factory):
    def check(change, named):
        folder = tmp_path_factory.mktemp("case")
        path = folder / "entry.toml"
        path.write_text(ENTRY.replace(*change, 1))
        with pytest.raises(ConfigError, match=re.escape(named)):
            read_toml(Entry, path, str(path))

    cases = [
        (("name =", "nmae ="), "unknown key 'nmae'"),
        (("name =", "# name ="), "name is missing"),
        (("2026-11-22", "22.11.2026"), "publication-date"),
        (("Healthcare", "Health"), "sector = 'Health'"),
        (('["Four Hospitals"]', "[]"), "curators"),
    ]
    assert failures(cases, check) == []


def test_the_script_writes_the_statements_that_a_report_was_given(tmp_path, monkeypatch):
    place = write_run(tmp_path / "run")
    for name, text in (("stated", STATED), ("other", 'unit = "One hospital."')):
        (tmp_path / f"{name}.toml").write_text(text)

    def reported(*options):
        done = CliRunner().invoke(app, ["report", str(place), *options])
        assert done.exit_code == 0, done.output
        return (place / "report.html").read_text(encoding="utf-8")

    stated = reported("--statements", str(tmp_path / "stated.toml"))
    assert "computing centre" in stated and reported() == stated
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(place), str(SCRIPT.parent / "entry.toml")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    actors = yaml.safe_load((place / "registry.yaml").read_text())["deployment"]["deployment_model"]["actors"]
    assert "The operator states: The university's computing centre" in actors
    reported("--statements", str(tmp_path / "other.toml"))
    assert "One hospital." in reported() and "computing centre" not in reported()
