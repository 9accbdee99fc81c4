"""Bundles that are the installed package, and bundles that only look like it."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
from flwr.cli.build import build_fab_from_disk

from cloister.deploy.warm import executor

ROOT = Path(__file__).parents[2]
FILE = "cloister/client/app.py"


def bundle_of(files):
    held = BytesIO()
    with ZipFile(held, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


@pytest.fixture(scope="module")
def imported():
    return executor.sources()


def test_the_bundle_that_flower_builds_of_the_package_is(imported):
    assert executor.is_installed(build_fab_from_disk(ROOT), imported)


def test_what_is_no_code_does_not_matter(imported):
    assert executor.is_installed(bundle_of(imported | {"README.md": b"other", "pyproject.toml": b""}), imported)


def test_one_that_differs_is_not(imported):
    changed = {
        "longer": imported | {FILE: imported[FILE] + b"#"},
        "same length": imported | {FILE: imported[FILE].replace(b"train", b"trajn", 1)},
        "one more": imported | {"cloister/more.py": b""},
        "beside the package": imported | {"numpy.py": b""},
        "one less": {name: content for name, content in imported.items() if name != FILE},
        "none": {},
    }
    assert not [name for name, files in changed.items() if executor.is_installed(bundle_of(files), imported)]


def test_nor_one_of_a_package_that_was_upgraded_on_disk_since_it_was_imported(imported, monkeypatch):
    monkeypatch.setattr(executor, "sources", lambda: imported | {FILE: b"upgraded"})
    assert not executor.is_installed(bundle_of(imported), imported)
    assert not executor.is_installed(bundle_of(imported | {FILE: b"upgraded"}), imported)


def test_a_known_one_is_not_read_again(imported, monkeypatch):
    monkeypatch.setattr(ZipFile, "read", lambda *_: pytest.fail("read"))
    assert executor.is_installed(bundle_of(imported), imported, is_known=True)


def test_nor_is_a_known_one_after_an_upgrade_on_disk(imported, monkeypatch):
    monkeypatch.setattr(executor, "sources", lambda: imported | {FILE: b"upgraded"})
    assert not executor.is_installed(bundle_of(imported), imported, is_known=True)


def test_one_of_other_sizes_is_not_read(imported, monkeypatch):
    monkeypatch.setattr(ZipFile, "read", lambda *_: pytest.fail("read"))
    assert not executor.is_installed(bundle_of(imported | {FILE: bytes(10**6)}), imported)


RANDOM = """
import os, secrets, sys
import numpy as np
from cloister.deploy.warm import executor
for name in [name for name in sys.modules if name.startswith("cloister")]:
    del sys.modules[name]

def watched(make):
    def draw(*given, **named):
        frame = sys._getframe(1)
        assert not frame.f_globals.get("__name__", "").startswith("cloister"), frame.f_globals["__name__"]
        return make(*given, **named)
    return draw

for module, names in {os: ["urandom"], secrets: ["token_bytes", "randbits", "SystemRandom"],
                      np.random: ["default_rng", "SeedSequence", "PCG64", "Philox", "MT19937"]}.items():
    for name in names:
        setattr(module, name, watched(getattr(module, name)))
executor.warm_up([])
print("warm")
"""


@pytest.mark.slow
def test_nothing_random_is_made_when_the_package_is_imported():
    """It would be the same in every child."""
    done = subprocess.run([sys.executable, "-c", RANDOM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "warm\n", done.stderr[-2000:]
