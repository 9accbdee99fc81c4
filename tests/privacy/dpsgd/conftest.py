"""What stands beside these tests, and beside those of privacy in general, can be imported by name."""

import sys
from pathlib import Path

import pytest

from cloister.privacy.dpsgd import clipped_sums
from cloister.privacy.dpsgd.strides import stride

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(autouse=True)
def every_layer_is_known(request, monkeypatch):
    """Trials are tested by themselves, as if every layer and loss were known; not with the mark `known_layers`."""
    from examples_of_dpsgd import as_if_known  # found by the path above

    if not request.node.get_closest_marker("known_layers"):
        as_if_known(monkeypatch)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch):
    """Two graphs for rows in the place of up to 13: each takes seconds to compile."""
    monkeypatch.setattr(clipped_sums, "FEWER", max(clipped_sums.FEWER, stride() // 2))
