"""Who may import whom, what an import costs, which names the world may rely on, and what Flower ships to a node."""

import ast
import importlib
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import FAB_MAX_SIZE
from structure import modules

import cloister

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cloister"

MAY_IMPORT = {
    "core": {"core"},
    "config": {"core", "privacy", "config"},
    "privacy": {"core", "privacy"},
    "secure_aggregation": {"core", "secure_aggregation"},
    "strategies": {"core", "strategies"},
    "tasks": {"core", "config", "tasks"},
    "aggregation": {"core", "privacy", "secure_aggregation", "aggregation"},
    "audits": {"core", "config", "privacy", "aggregation", "tasks", "local", "audits"},
    "client": {"core", "config", "tasks", "privacy", "secure_aggregation", "client"},
    "server": {"core", "config", "tasks", "privacy", "secure_aggregation", "strategies", "aggregation", "server"},
    "deploy": {"core", "config", "client", "tasks", "secure_aggregation", "deploy"},
    "local": {"core", "config", "tasks", "client", "server", "privacy", "local"},
    "scaffold": {"core", "scaffold"},
    "plan": {"core", "config", "client", "server", "local", "privacy", "plan"},
    "bench": {"core", "config", "tasks", "client", "server", "local", "privacy", "aggregation", "bench"},
    "watch": {"core", "privacy", "server", "deploy", "watch"},
    "dashboard": {"core", "server", "deploy", "watch", "dashboard"},
    "predict": {"core", "config", "tasks", "predict"},
    "sweep": {"core", "config", "server", "local", "sweep"},
    "cli": {
        "core",
        "config",
        "privacy",
        "client",
        "server",
        "local",
        "plan",
        "bench",
        "predict",
        "sweep",
        "audits",
        "deploy",
        "scaffold",
        "watch",
        "dashboard",
    },
}
"""Folder (or file) of `cloister` -> the parts of `cloister` that it may import, inside functions too."""


def imports_of(tree, module):
    """Every module that a file imports, wherever in the file: absolute names, with the names they are asked for."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(module):
    """`cloister.audits.sensitivity` -> `privacy`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


FILES = {module_of(module.path): imports_of(module.tree, module_of(module.path)) for module in modules()}
NAMED = re.compile(r"^(cloister[.\w]*):\w+$", re.MULTILINE)
"""A plugin in a table is an import too, only a later one."""
PLUGINS = {
    module_of(module.path): {
        match.group(1)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in NAMED.finditer(node.value)
    }
    for module in modules()
}
REACHES = {module: FILES[module] | PLUGINS[module] for module in FILES}


def importers_of(*prefixes):
    """The modules that import all of these."""

    def reaches(module, prefix):
        return any(name == prefix or name.startswith(prefix + ".") for name in REACHES[module])

    return {module for module in REACHES if all(reaches(module, prefix) for prefix in prefixes)}


def test_the_reader_of_imports_sees_all_kinds():
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef h():\n    from i.j import k\n"
    assert imports_of(ast.parse(source), "p.q") == {"a.b", "c.d", "p.e", "p.f.g", "i.j.k"}


FACE = {"cloister.__init__"}
"""What users import from. It reaches into every room, on demand, and no room reaches into it."""


def test_nothing_of_ours_imports_from_the_face():
    faces = {f"cloister.{name}" for name in cloister.__all__} - {"cloister.__version__"}
    assert not {module for module in FILES if faces & FILES[module]}


def test_the_architecture_page_has_the_same_rules():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ((?:`\w+`(?:, )?)*) ?\|$", page, re.MULTILINE)
    told = {part: set(re.findall(r"\w+", others)) for part, others in rows}
    assert told == {part: others - {part} for part, others in MAY_IMPORT.items()}


def test_every_part_has_rules():
    assert {layer_of(module) for module in FILES} - {"", "__init__", "__main__"} == set(MAY_IMPORT)


@pytest.mark.parametrize("module", REACHES)
def test_no_arrow_runs_the_wrong_way(module):
    layer = layer_of(module)
    if module in FACE:
        return
    allowed = MAY_IMPORT.get(layer, set())
    wrong = {name for name in REACHES[module] if name.startswith("cloister.") and layer_of(name) not in allowed}
    assert not wrong, f"{module} ({layer}) may import {sorted(allowed)} only, not {sorted(wrong)}"


def test_only_build_joins_strategies_and_privacy():
    assert importers_of("cloister.strategies", "cloister.aggregation") - FACE == {"cloister.server.build"}


def test_clients_know_nothing_of_aggregation():
    assert not {module for module in importers_of("cloister.aggregation") if layer_of(module) == "client"}


def test_only_local_runs_their_plans_their_costs_and_the_command_join_client_and_server():
    both = importers_of("cloister.client", "cloister.server") - FACE
    assert {layer_of(module) for module in both} <= {"local", "plan", "bench", "cli"}
    assert "cloister.local.simulation" in both


def test_the_mathematics_of_privacy_knows_no_flower():
    flower = {module for module in importers_of("flwr") if layer_of(module) == "privacy"}
    assert flower == set()


TENSORFLOW = {module for module in FILES if module.startswith("cloister.privacy.dpsgd.")} - {
    "cloister.privacy.dpsgd.batches"
}
"""DP-SGD's modules, which are imported when a model is there to be trained."""
HEAVY = (
    "mlflow",
    *("tensorflow", "keras", "sklearn", "pandas", "cv2", "tensorboard", "ray", "scipy", "dp_accounting"),
    *("matplotlib", "jinja2", "numba"),
)


def test_only_files_named_for_it_import_keras_or_tensorflow_at_the_top():
    for module in modules():
        top = {
            name.split(".")[0]
            for node in module.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imports_of(node, module_of(module.path))
        }
        if "keras" not in module.path.stem and module_of(module.path) not in TENSORFLOW:
            assert not top & {"tensorflow", "keras"}, module.path


def test_the_apps_and_the_command_start_without_anything_heavy():
    script = (
        "import sys; import cloister.server.app, cloister.client.app, cloister.cli;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# Names that the world may rely on.

PUBLIC = """
Account AdaptiveClip Capabilities Claim CloisterError Contributions Dataset DiscreteGaussian Distance DpSgd Examples
GaussianNoise GlobalDP KerasModel LaplaceClustering LaplaceNoise Ledger Mechanism MetricDP NumpyModel
PrivacyBudget PrivateStrategy Recipe Released RunConfig Task bounded_sum check_mechanism clip leave_one_out
noisy_mean parse simulate try_to_tell
"""
"""What a user imports from `cloister` itself."""


def test_the_package_exports_what_users_need_and_no_more():
    assert sorted(cloister.__all__) == sorted(["__version__", *PUBLIC.split()]) == sorted(dir(cloister))


@pytest.mark.parametrize("name", PUBLIC.split())
def test_what_is_exported_is_there_under_one_name(name):
    """A function that shares its name with a module would be hidden by it as soon as somebody imports that."""
    assert getattr(cloister, name).__name__.removeprefix("_") == name
    assert not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).exists()


def test_an_unknown_name_is_the_usual_error():
    with pytest.raises(AttributeError, match="has no attribute 'FedEverything'"):
        cloister.FedEverything  # noqa: B018 - the access is the test


def test_what_the_documentation_imports_exists():
    imported = re.compile(r"^\s*(?:>>> |\.\.\. )?from (cloister[.\w]*) import ([\w, ]+)$", re.MULTILINE)
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for module, found in imported.findall(page.read_text()):
            for name in found.split(","):
                assert hasattr(importlib.import_module(module), name.strip().split(" ")[0]), (page, module, name)


# What Flower ships to a node.


@pytest.fixture(scope="module")
def bundle():
    return build_fab_from_disk(ROOT)


def test_the_bundle_is_small_enough_for_flower(bundle):
    assert len(bundle) <= FAB_MAX_SIZE == 10 * 1024 * 1024


def test_the_bundle_holds_every_module(bundle):
    shipped = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    assert "cloister/server/app.py" in shipped
    # Flower drops some names (test_*.py, lib/, build/): a module called so would be missing on a node.
    assert {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")} <= shipped


def test_the_bundle_holds_no_data(bundle):
    names = zipfile.ZipFile(io.BytesIO(bundle)).namelist()
    kinds = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
    assert {Path(name).suffix for name in names if name != ".info/CONTENT" and Path(name).stem != "LICENSE"} <= kinds
    assert not [name for name in names if name.split("/")[0] in ("runs", "data", "shared", ".venv", ".git")]
    largest = max(zipfile.ZipFile(io.BytesIO(bundle)).infolist(), key=lambda item: item.file_size)
    assert largest.file_size < 500_000, f"{largest.filename} looks like data"


def test_the_bundle_holds_the_shipped_configuration(bundle):
    text = zipfile.ZipFile(io.BytesIO(bundle)).read("pyproject.toml").decode()
    assert 'serverapp = "cloister.server.app:app"' in text and 'clientapp = "cloister.client.app:app"' in text
    assert "[tool.flwr.app.config.privacy]" in text
