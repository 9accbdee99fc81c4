"""The app bundle holds our own sources and nothing that lies beside them; kits never lie where a bundle is made of."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from cloister.deploy.provision.kits import provision
from cloister.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
POLICY = 'mechanisms = ["metric"]\n'
FEDERATION = """\
name = "hospitals"
server.addresses = ["localhost"]
[[sites]]
name = "north"
data-path = "/data/north.npz"
"""
BARE_APP = """\
[project]
name = "an-app"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


@pytest.fixture
def checkout(tmp_path):
    """A clean clone: the tracked files of kinds that Flower looks at."""
    home = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.whl")
    for folder in ("cloister", "docker", "docs", "experiments", "tests"):
        shutil.copytree(ROOT / folder, home / folder, ignore=ignore)
    for name in (".gitignore", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "compose.yaml"):
        shutil.copy(ROOT / name, home)
    return home


def names_in(bundle):
    return set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())


def make_kits(folder, home):
    description = home / "federation.toml"
    description.write_text(FEDERATION)
    return provision(description, folder, POLICY)


def test_the_bundle_is_our_sources_and_three_more_files(checkout):
    sources = {path.relative_to(checkout).as_posix() for path in (checkout / "cloister").rglob("*.py")}
    assert names_in(build_fab_from_disk(checkout)) == sources | {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        ".info/CONTENT",
    }


def test_what_lies_in_a_checkout_is_not_shipped_and_leaves_the_digest_alone(checkout):
    clean = build_fab_from_disk(checkout)
    for name in ("kits", "hospital-kits"):
        make_kits(checkout / name, checkout)
    run = checkout / "fetched" / "three"
    run.mkdir(parents=True)
    for name in ("config.json", "privacy.json", "rounds.jsonl", "notes.md", "secret.py", "patients.yaml"):
        (run / name).write_text("{}\n")
        (checkout / f"stray-{name}").write_text("{}\n")
    shutil.copy(checkout / "hospital-kits" / "operator" / "credentials.yaml", checkout / "cloister" / "mine.yaml")
    assert build_fab_from_disk(checkout) == clean


@pytest.fixture
def other_app(tmp_path):
    """Somebody's app without rules: Flower bundles whatever is of its kinds."""
    home = tmp_path / "other"
    home.mkdir()
    (home / "pyproject.toml").write_text(BARE_APP)
    (home / "app.py").write_text("server = client = None\n")
    return home


def test_kits_are_not_written_where_a_bundle_would_take_them(other_app, tmp_path):
    for inside in (".", "kits", "deep/er/kits"):
        with pytest.raises(ConfigError, match=r"whose bundle would carry .*issued\.json"):
            make_kits(other_app / inside, tmp_path)
    assert not list(other_app.rglob("credentials.yaml"))


def test_a_link_does_not_hide_where_the_folder_is(other_app, tmp_path):
    (tmp_path / "link").symlink_to(other_app)
    with pytest.raises(ConfigError, match="lies in the Flower app"):
        make_kits(tmp_path / "link" / "kits", tmp_path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (".gitignore", "/kits/\n"),
        ("pyproject.toml", BARE_APP.replace("[tool.flwr.app]", '[tool.flwr.app]\nfab-exclude = ["/kits/"]')),
        ("pyproject.toml", BARE_APP.replace("[tool.flwr.app]", '[tool.flwr.app]\nfab-include = ["/*.py"]')),
    ],
)
def test_where_the_bundles_rules_leave_them_out_they_are_written_and_left_out(other_app, tmp_path, file, line):
    (other_app / file).write_text(line)
    (other_app / "kits").mkdir()
    (other_app / "kits" / "old.json").write_text("{}")  # a rule that matches nothing is an error of Flower's
    make_kits(other_app / "kits", tmp_path)
    assert not [name for name in names_in(build_fab_from_disk(other_app)) if name.startswith("kits/")]


def test_one_rule_for_another_folder_does_not_do(other_app, tmp_path):
    (other_app / ".gitignore").write_text("/kits/\n")
    with pytest.raises(ConfigError, match="choose a folder outside it"):
        make_kits(other_app / "hospital-kits", tmp_path)


def test_a_project_that_is_no_flower_app_does_not_matter(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert make_kits(tmp_path / "kits", tmp_path).written
