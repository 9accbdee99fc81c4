"""What is said before the tests begin."""

import pytest

FAST = "not slow and not docker"
MINUTES = 7
"""That the tests which are `FAST` take at most, on two idle cores."""


@pytest.fixture(autouse=True)
def no_bundle_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm node leaves in the environment which bundle it runs; a test must not find another test's."""
    monkeypatch.delenv("CLOISTER_CHECKED_BUNDLE", raising=False)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """How long it will take, and what is left out."""
    if config.getoption("markexpr") != FAST:
        return []
    return [
        f"all of them: at most {MINUTES} minutes on two idle cores; one after another: -n 0",
        "left out: tests that take minutes or start servers (-m slow), and those of the containers (-m docker)",
    ]
