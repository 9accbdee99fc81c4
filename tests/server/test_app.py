"""Flower's view of a ServerApp that cannot go on."""

import logging

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from cloister.client.app import app as client
from cloister.server.app import main
from cloister.simulation.grid import LocalGrid
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.faults import SAMPLE
from cloister.utils.crash import Crash

SECRET = "9731.25"


def raised(tmp_path, **settings):
    flat = {"task.model": "softmax", "num-rounds": 1, "tensorboard": False, "output-dir": str(tmp_path)} | settings
    context = Context(1, 0, {}, RecordDict(), flat)
    with pytest.raises(Crash) as caught:
        main(LocalGrid.simulated(client, flat, 2), context)
    return caught.value


def logged(error):
    """As Flower logs what a ServerApp raises."""
    record = logging.LogRecord("flwr", logging.ERROR, "", 0, "ServerApp raised an exception", (), None)
    record.exc_info = (type(error), error, error.__traceback__)
    return logging.Formatter("%(levelname)s: %(message)s").format(record)


def test_an_error_of_configuration_is_one_line(tmp_path):
    lines = logged(raised(tmp_path, **{"num-rounds": 0})).splitlines()
    assert lines == [
        "ERROR: ServerApp raised an exception",
        "cloister.utils.crash.Crash: ConfigError: num-rounds = 0 is not valid: it must be greater than 0",
    ]
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_names_its_place_and_no_value(tmp_path, monkeypatch):
    def metrics(self, y, scores):
        if len(y) <= SAMPLE:  # the few that a task is tried on before a run
            return {"loss": 1.0}
        raise KeyError(f"{np.full(3, float(SECRET))}")

    monkeypatch.setattr(Digits, "metrics", metrics)
    text = logged(raised(tmp_path))
    assert f"KeyError at {__file__}:" in text and SECRET not in text and "Traceback (most" not in text
    (written,) = tmp_path.glob("*/traceback-*.txt")
    assert str(written) in text and SECRET not in written.read_text()
