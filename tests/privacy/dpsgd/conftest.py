"""What stands beside these tests, and beside those of privacy in general, can be imported by name."""

import sys
from pathlib import Path

import pytest

from cloister.privacy.dpsgd import checks, in_rows
from cloister.privacy.dpsgd.strides import stride

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(autouse=True)
def rows_where_they_can_be(monkeypatch):
    """Small networks are computed in rows too, so that these tests need no large ones."""
    monkeypatch.setattr(checks, "LARGE", 0)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch):
    """Two graphs for rows in the place of up to 13: each takes seconds to compile."""
    monkeypatch.setattr(in_rows, "FEWER", max(in_rows.FEWER, stride() // 2))
