"""The header of a test session, and fixtures for all tests."""

import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from flwr.supercore.task_identity import TaskIdentity

from cloister.server import run

MARKS = ("slow", "runtimes", "docker", "long", "torch")
FAST = " and ".join(f"not {mark}" for mark in MARKS)
MINUTES = 8
"""That the tests which are `FAST` take at most, on two idle cores."""


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker of the fast tests, or of PyTorch's, one thread: threads of two workers wait for each other."""
    if hasattr(config, "workerinput") and config.getoption("markexpr") == FAST:
        os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    if config.getoption("markexpr").startswith("torch") and find_spec("torch"):
        # Triton, which PyTorch's optimizers import, ends a process that imported TensorFlow before it.
        import torch._dynamo

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_bundle_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm node leaves in the environment which bundle it runs; a test must not find another test's."""
    monkeypatch.delenv("CLOISTER_CHECKED_BUNDLE", raising=False)


@pytest.fixture(autouse=True)
def no_run_was_assumed() -> None:
    """Flower keeps the run of a process in its class; a test that relies on another's fails when it runs first."""
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = None


WRITE_PAGE = run._write_page


@pytest.fixture(autouse=True, scope="session")
def runs_end_without_a_page() -> Iterator[None]:
    """Hundreds of tests run small federations; a page for each of them would double their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_write_page", _no_page)
        yield


def _no_page(path: Path) -> None:
    """Write nothing."""


@pytest.fixture
def runs_end_with_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the page: a run ends as it does for a user."""
    monkeypatch.setattr(run, "_write_page", WRITE_PAGE)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, nor look through them afterwards: all of them are kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m MARK` import only files with that word: to import all of them takes half a minute."""
    mark = config.getoption("markexpr")
    return True if mark in MARKS and collection_path.is_file() and mark not in _words(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: one that began last would keep one core busy and leave the others idle.

    Raises:
        pytest.UsageError: a file has a test with a mark, and not its word.
    """
    for item in items:
        for mark in MARKS:
            if item.get_closest_marker(mark) and mark not in _words(item.path):
                raise pytest.UsageError(f"{item.path}: `-m {mark}` passes over it; write the word {mark!r} there")
    items.sort(key=_minutes, reverse=True)


@cache
def _words(path: Path) -> frozenset[str]:
    """Return the words of a file of Python; `mostly_slow` is two."""
    return frozenset(re.findall(r"[^\W_]+", path.read_text()) if path.suffix == ".py" else ())


def _minutes(item: pytest.Item) -> int:
    """Return the minutes that its mark gives; 0: less than one."""
    return max(
        (mark.kwargs.get("minutes", 0) for mark in item.iter_markers() if mark.name in ("slow", "runtimes")), default=0
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the expected minutes, and the tests that are left out."""
    if config.getoption("markexpr") != FAST:
        return []
    return [
        f"all of them: at most {MINUTES} minutes on two idle cores; one after another: -n 0",
        "left out, and in CONTRIBUTING.md: -m slow, -m runtimes (servers), -m docker (containers), -m torch, -m long",
    ]
