"""`cloister check task` says which way DP-SGD trains a model, because of which layer, and how long a round takes."""

import re

import keras
import numpy as np
import pytest

from cloister import Dataset, Examples, KerasModel, Recipe, Task
from cloister.simulation.checking import check_task
from cloister.tasks import TASKS

layers = keras.layers
COST = re.compile(r"([\d.]+) (ms|s) a step of 16 examples, about ([\d.]+) (ms|s) a round over 160 examples$")


UNITS = {"ms": 0.001, "s": 1.0}


class Ward(Task):
    recipe = Recipe(local_epochs=3, batch_size=16, learning_rate=0.1)
    classes, input_shape, models, public = 2, (4, 3), ("rows", "turn"), True

    def load(self):
        rng = np.random.default_rng(0)
        whole = Examples(rng.random((200, 4, 3), np.float32), rng.integers(0, 2, 200))
        return Dataset(whole.take(np.arange(160)), whole.take(np.arange(160, 200)))

    def build(self):
        return KerasModel(self.network)

    def network(self):
        middle = layers.Flatten() if self.model_name == "rows" else layers.SimpleRNN(2, name="memory")
        return keras.Sequential([keras.Input((4, 3)), middle, layers.Dense(2, "softmax")])


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("rows", "in rows (the fast way); "),
        (
            "turn",
            "in turn (the slow way): layer 'memory' (SimpleRNN) is not proved to keep",
        ),
    ],
)
def test_a_check_tells_the_way_and_the_time(model, way, monkeypatch):
    monkeypatch.setitem(TASKS._table, "ward-rows", f"{__name__}:Ward")
    heard = []
    lines = list(check_task("ward-rows", None, {"task.model": model}, heard.append))
    assert [line.kind for line in lines] == ["ok"] * 5
    assert f"it can be trained with privacy.client='dp-sgd', {way}" in lines[3].text
    for line in lines[3:]:
        step, unit, whole, in_all = COST.search(line.text).groups()
        seconds, round_seconds = (
            float(step) / (1000 if unit == "ms" else 1),
            float(whole) / (1000 if in_all == "ms" else 1),
        )
        # 3 epochs of 10 steps; what is printed is rounded to a tenth.
        assert seconds * 30 == pytest.approx(round_seconds, abs=0.05 * 30 / 1000 + 0.06)
    assert heard == ["the data", "the model", "privacy.client='dp-sgd'", "one round of 2 clients"]
