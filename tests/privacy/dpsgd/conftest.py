"""What stands beside these tests, and beside those of privacy in general, can be imported by name."""

import sys
from pathlib import Path

import pytest

from cloister.privacy.dpsgd import checks

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(autouse=True)
def rows_where_they_can_be(monkeypatch):
    """Small networks are computed in rows too, so that these tests need no large ones."""
    monkeypatch.setattr(checks, "LARGE", 0)
