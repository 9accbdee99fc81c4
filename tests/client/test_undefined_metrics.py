"""A metric that a site's examples do not define costs the site none of its others."""

import math

import pytest
from asking import OPEN, answer, message_of
from support import failures

from cloister.server.screening import average_metrics
from cloister.tasks.datasets.characters import Digits

SCORED = OPEN | {"task.test-fraction": 0.5, "evaluation.federated": "on"}


def scores(monkeypatch, **found):
    monkeypatch.setattr(Digits, "metrics", lambda self, y, predicted: dict(found))
    message = message_of(kind="evaluate")
    reply = answer(SCORED, {"partition-id": 0, "num-partitions": 4}, message)
    means, rejected = average_metrics([reply], [message])
    return means, [each.code for each in rejected]


def test_what_is_undefined_is_left_out(monkeypatch):
    def check(undefined):
        found = {"loss": 0.5, "accuracy": 0.75} | dict.fromkeys(undefined, math.nan)
        assert scores(monkeypatch, **found) == ({"loss": 0.5, "accuracy": 0.75}, [])

    assert not failures([("auc",), ("f1", "auc"), ()], lambda *names: check(names))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_model_that_has_diverged_is_still_seen(monkeypatch, loss):
    assert scores(monkeypatch, loss=loss, accuracy=0.1) == ({}, ["metric"])
