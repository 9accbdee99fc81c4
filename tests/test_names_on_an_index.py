"""Names of ours on a package index are other people's: nothing that Cloister writes or ships asks an index for them."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cloister.scaffold.package import GROUPS, write_package

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"cloister", "cloister-fl"}
AS_FLOWER_DOES = """
import json, sys
from flwr.supercore.superexec.dependency_installer import install_app_dependencies

for folder in json.loads(sys.argv[1]):
    print("app", folder, flush=True)
    install_app_dependencies(folder, launch_id=folder)
"""


def wheel(folder, name, version, *facts):
    """An empty package."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        facts = "\n".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *facts])
        archive.writestr(f"{stem}.dist-info/METADATA", facts + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def required():
    """Every requirement of the project, with its extra; those for the project itself are among them."""
    extras = PROJECT["optional-dependencies"]
    listed = [("", PROJECT["dependencies"]), *extras.items()]
    return [(extra, Requirement(each)) for extra, all_of_it in listed for each in all_of_it]


class Index:
    """A package index on this machine: version 99 of both names, and every package that the project needs.

    Attributes:
        asked: names of packages that it was asked for.
    """

    def __init__(self, folder):
        self.folder, self.asked = folder, set()
        self.files = {name: wheel(folder, name, "99") for name in OURS}
        for _, each in required():
            lowest = next((spec.version for spec in each.specifier if spec.operator in (">=", "==")), "1")
            provides = [f"Provides-Extra: {extra}" for extra in each.extras]
            self.files.setdefault(each.name, wheel(folder, each.name, lowest, *provides))
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(folder / "cache"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
        }

    def serve(self, handler):
        """Answer one request."""
        kind, name = handler.path.strip("/").split("/")
        if is_page := kind == "names":
            self.asked.add(name)
            path = self.files.get(name)
            body = f'<html><body><a href="/files/{path.name}">{path.name}</a></body></html>'.encode() if path else b""
        else:
            path = self.folder / name
            body = path.read_bytes()
        handler.send_response(200 if path else 404)
        handler.send_header("Content-Type", "text/html" if is_page else "application/octet-stream")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def run(self, *command):
        """Run a command to which this is the only index; return its output and the names it asked for."""
        self.asked.clear()
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr, set(self.asked)


@pytest.fixture
def index(tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    made = Index(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            made.serve(self)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/names"
    made.environment |= {"UV_DEFAULT_INDEX": address, "PIP_INDEX_URL": address}
    yield made
    server.shutdown()
    server.server_close()


def copied(source, folder, listed="[]"):
    """A project of this repository where tools may write beside its pyproject.toml."""
    folder.mkdir(parents=True)
    project = (source / "pyproject.toml").read_text().replace("dependencies = []", f"dependencies = {listed}")
    (folder / "pyproject.toml").write_text(project)
    (folder / "README.md").write_text("")
    return folder


def packages(folder):
    return [write_package(kind, f"my-{kind}", "csv", folder / kind) for kind in GROUPS]


def test_flower_asks_for_none_before_it_runs_an_app_of_ours(index, tmp_path):
    """By its own installer: the checkout with its extras, and the examples."""
    names = [path.parent.name for path in (ROOT / "examples").glob("*/pyproject.toml") if "flwr" in path.read_text()]
    apps = [copied(ROOT, tmp_path / "checkout"), *(copied(ROOT / "examples" / name, tmp_path / name) for name in names)]
    assert len(apps) == 4
    told, asked = index.run(sys.executable, "-c", AS_FLOWER_DOES, json.dumps(list(map(str, apps))))
    assert told.count("installed successfully") == len(apps)
    assert {"tensorflow", "scikit-learn", "numba"} <= asked and not asked & OURS


def test_flower_fetches_those_that_an_app_lists(index, tmp_path):
    """The control: the tests here would see it."""
    app = copied(ROOT / "examples" / "wrapped", tmp_path / "app", json.dumps(sorted(OURS)))
    told, asked = index.run(sys.executable, "-c", AS_FLOWER_DOES, json.dumps([str(app)]))
    assert asked == OURS and "cloister==99" in told and "cloister-fl==99" in told


def test_uv_asks_for_none_to_resolve_what_cloister_new_writes(index, tmp_path):
    tasks = [
        path.parent for path in (ROOT / "examples").glob("*/pyproject.toml") if "cloister.tasks" in path.read_text()
    ]
    made = [*packages(tmp_path / "made"), *(copied(each, tmp_path / each.name) for each in sorted(tasks))]
    asked = [index.run(sys.executable, "-m", "uv", "lock", "--project", str(each))[1] for each in made]
    assert asked == [{"pytest", "tensorflow", "keras"}] + [{"pytest"}] * (len(GROUPS) - 1) + [
        {"scikit-learn"},
        {"torch", "safetensors"},
    ]


@pytest.mark.slow
def test_pip_asks_for_none_when_it_installs_what_cloister_new_writes(index, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-build-isolation"]
    told, asked = index.run(*install, *(f"{made}[test]" for made in packages(tmp_path)))
    assert "Would install" in told and asked == {"pytest", "tensorflow", "keras"}
    made = copied(tmp_path / "strategy", tmp_path / "older", '["cloister-fl"]')
    told, asked = index.run(*install, str(made))
    assert "cloister-fl-99" in told, "the control"


@pytest.mark.slow
def test_pip_finds_the_extras_of_an_extra_in_the_project_itself(index, tmp_path):
    facts = [f"Provides-Extra: {extra}" for extra in PROJECT["optional-dependencies"]]
    facts += [f"Requires-Dist: {each}" + (f' ; extra == "{extra}"' if extra else "") for extra, each in required()]
    own = wheel(tmp_path, PROJECT["name"], PROJECT["version"], *facts)
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    told, asked = index.run(*install, f"{own}[dev]")
    assert f"cloister-fl-{PROJECT['version']}" in told and "numba" in asked and not asked & OURS


def test_remedies_name_the_distribution_and_an_extra_that_it_has():
    """`pip install 'cloister-fl[parquet]'` is about the package that is installed."""
    found = []
    for path in [*(ROOT / "cloister").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        found += re.findall(r"pip install '([\w-]+)\[([\w,-]+)\]'", path.read_text())
    assert {name for name, _ in found} == {PROJECT["name"]} == {"cloister-fl"}
    assert {extra for _, extras in found for extra in extras.split(",")} <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("there", ["nothing", "a package of other people"])
def test_a_made_package_says_that_cloister_is_missing(tmp_path, kind, there):
    made = write_package(kind, "my-thing", "csv", tmp_path / "made")
    other = "None" if there == "nothing" else "type(sys)('cloister')"
    code = f"import sys; sys.modules['cloister'] = {other}; import my_thing"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=made, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: cloister-fl is missing: install its checkout or its wheel first; no package index has it"
    )
