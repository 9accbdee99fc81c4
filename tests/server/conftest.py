"""Shorten what tests of servers do often: small federations, and pages about them."""

import pytest
from quick_runs import coarse_accounts, quick_runs  # noqa: F401

from cloister.server.reports.html.figures import Picture


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the figures of pages empty, for tests of the words: drawing takes most of the time."""
    monkeypatch.setattr("cloister.server.reports.html.figures.pictured", _empty)
    monkeypatch.setattr("cloister.server.reports.compare.page.pictured", _empty)


def _empty(name, title, description, *_):
    return Picture(title, description, "<svg></svg>")
