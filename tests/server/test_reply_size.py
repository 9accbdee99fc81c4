"""The size of a reply is bounded by that of the model."""

from types import SimpleNamespace

import numpy as np
from flwr.app import Array, ArrayRecord

from cloister.server import run as running
from cloister.server.polling_grid import FACTOR, MAX_NAMES, SLACK, MaximumSize


def test_it_follows_the_model_of_the_run(monkeypatch):
    monkeypatch.setattr(running, "MAXIMUM", maximum := MaximumSize())
    loop, model = SimpleNamespace(run=lambda *_: None), Array(np.zeros(8, np.float32))
    running.run_rounds(loop, ArrayRecord({"w": model}), 1)
    assert maximum.arrays == FACTOR * len(model.data) + SLACK and maximum.total == maximum.arrays + MAX_NAMES
