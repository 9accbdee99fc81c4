"""Imports that the contracts cannot see, names that users may rely on, and files that Flower ships to a node."""

import ast
import importlib
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import FAB_MAX_SIZE
from structure import PACKAGE, ROOT, modules

import cloister

# Who may import whom: `lint-imports` checks the contracts in pyproject.toml.


def parts_of(names):
    """Return the parts of the package that these modules are or lie in."""
    return {name.split(".")[1] for name in names if "." in name}


def allowed_by_the_contracts():
    """Return, for each part of the package, the parts that it may import."""
    layers, *others = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    allowed, below = {}, set()
    for layer in reversed(layers["layers"]):
        parts = set(re.findall(r"\w+", layer))
        allowed |= {part: set(below) for part in parts}
        below |= parts
    for contract in others:
        if contract["type"] == "protected":
            for part in set(allowed) - parts_of(contract["allowed_importers"]):
                allowed[part] -= parts_of(contract["protected_modules"])
        # A contract on one module of a part leaves the part free.
        for part in set(allowed) & {name.removeprefix("cloister.") for name in contract.get("source_modules", [])}:
            allowed[part] -= parts_of(contract["forbidden_modules"])
    return allowed


def test_the_table_on_the_architecture_page_is_what_the_contracts_allow():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ((?:`\w+`(?:, )?)*) ?\|$", page, re.MULTILINE)
    told = {part: set(re.findall(r"\w+", others)) for part, others in rows}
    assert told == allowed_by_the_contracts()


def test_tables_of_plugins_name_modules_of_their_own_part():
    """A plugin in a table is an import too, only a later one, and stands there as a string."""
    named = [
        (module, plugin)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for plugin in re.findall(r"^(cloister[.\w]*):\w+$", node.value, re.MULTILINE)
    ]
    assert named
    assert not [(module.name, plugin) for module, plugin in named if plugin.split(".")[1] != module.part]


HEAVY = (
    "mlflow",
    *("tensorflow", "keras", "sklearn", "pandas", "cv2", "tensorboard", "ray", "scipy", "dp_accounting"),
    *("matplotlib", "jinja2", "numba", "torch", "safetensors"),
)


def imported_at_the_top(tree):
    """Return the packages that a module imports as soon as it is imported itself."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def test_only_files_named_for_it_import_a_framework_at_the_top():
    """DP-SGD's modules may too, but for one: they are imported when there is a model to train."""
    frameworks = {"tensorflow", "keras", "torch", "safetensors"}
    heavy = {module.name for module in modules() if imported_at_the_top(module.tree) & frameworks}
    named_for_it = {module.name for module in modules() if re.search("keras|torch", module.path.stem)}
    dp_sgd = {name for name in heavy if name.startswith("cloister.privacy.dpsgd.")} - {"cloister.privacy.dpsgd.batches"}
    others = heavy - named_for_it - dp_sgd
    assert not others


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
CRYPTOGRAPHY Premise
Account AdaptiveClip Capabilities Claim CloisterError Contributions Dataset DiscreteGaussian Distance DpSgd Examples
GaussianNoise GlobalDP KerasModel LaplaceClustering LaplaceNoise Ledger Mechanism MetricDP NumpyModel
PrivacyBudget PrivateStrategy Recipe Released RunConfig Target Task TorchModel TorchTask bounded_sum check_mechanism
clip leave_one_out noisy_mean parse simulate try_to_tell
"""
"""Names that a user imports from `cloister` itself."""


def test_the_package_exports_what_users_need_and_no_more():
    assert sorted(cloister.__all__) == sorted(["__version__", *PUBLIC.split()]) == sorted(dir(cloister))


def test_what_is_exported_is_there_under_one_name():
    """An import of a module hides a function of the same name."""
    names = [name for name in PUBLIC.split() if name != "TorchModel"]  # it imports PyTorch, an extra
    found = [getattr(cloister, name) for name in names]
    values = {"CRYPTOGRAPHY"}
    named = [getattr(each, "__name__", name).removeprefix("_") for name, each in zip(names, found, strict=True)]
    assert named == names and {name for name, each in zip(names, found, strict=True) if not callable(each)} == values
    assert not [name for name in names if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).exists()]


def test_an_unknown_name_is_the_usual_error():
    with pytest.raises(AttributeError, match="has no attribute 'FedEverything'"):
        cloister.FedEverything  # noqa: B018 - the access is the test


def test_what_the_documentation_imports_exists():
    imported = re.compile(r"^\s*(?:>>> |\.\.\. )?from (cloister[.\w]*) import ([\w, ]+)$", re.MULTILINE)
    missing = [
        (page.name, module, name)
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for module, names in imported.findall(page.read_text())
        for name in names.split(",")
        if not hasattr(importlib.import_module(module), name.split()[0])
    ]
    assert not missing


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
