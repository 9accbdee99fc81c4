"""The architectures of `architectures.py` as tasks: the check, a plain run, one with global DP, one with DP-SGD.

python benchmarks/architectures_as_tasks.py [NAME ...]

Each run has two clients and one round on random numbers. Three networks also have BatchNormalization, as Keras' pages
write them.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
from architectures import ARCHITECTURES, keras
from dpsgd import seconds
from machine import load, machine

from cloister import Dataset, Examples, KerasModel, Recipe, Target, Task, simulate
from cloister.client.trainers import ModelAndTrainer
from cloister.config.run import parse
from cloister.simulation.checking import check_task
from cloister.tasks import TASKS
from cloister.training.plan import TrainingPlan
from cloister.utils.errors import CloisterError

COPIES, BATCH, CLIENTS, REPEATS = 2, 32, 2, 7
"""The random examples are too few for two clients, so each occurs twice."""
RUNS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"privacy.server": "none"},
    "global-dp": {"privacy.server": "global-dp"},
    "dp-sgd": {"privacy.server": "none", "privacy.client": "dp-sgd"},
}
TARGETS: Mapping[str, Any] = {
    "u_net": Target(shape=(32, 32), classes=3),
    "autoencoder": {"picture": Target("mse", shape=(28, 28, 1)), "class": Target(classes=10, weight=0.1)},
    "gru": Target("mse", shape=(1,)),
}
"""Targets other than one label of each example."""
LEFT_OUT = ("several_labels", "batch_normalization", "own_dense", "lstm", "own_residual", "own_resnet", "small_cnn")
NAMES = [name for name in ARCHITECTURES if name not in LEFT_OUT]
NORMALIZED = {f"{name}_batch_norm": name for name in ("mini_xception", "conv1d", "resnet")}
"""Networks with BatchNormalization in place of GroupNormalization."""


def task_of(name: str) -> type[Task]:
    """Return the task of an architecture."""
    build, x, y, _ = ARCHITECTURES[NORMALIZED.get(name, name)]
    x, y = keras.tree.map_structure(lambda array: np.concatenate([array] * COPIES), (x, y))
    named = x if isinstance(x, dict) else {"x": x}
    shapes = {key: array.shape[1:] for key, array in named.items()}
    stated = TARGETS.get(NORMALIZED.get(name, name))

    def network() -> Any:
        inputs = {key: keras.Input(shapes[key], dtype=named[key].dtype.name, name=key) for key in named}
        given = inputs if named is x else inputs["x"]
        with _batch_normalized() if name in NORMALIZED else contextlib.nullcontext():
            return keras.Model(given, build(given))

    class Architecture(Task):
        recipe = Recipe(1, BATCH, 0.01)
        models = ("network",)
        bundled = public = True
        classes = 0 if stated else int(y.max()) + 1
        target = stated
        input_shape = shapes if named is x else shapes["x"]
        input_dtype = next(iter(named.values())).dtype.name

        def load(self) -> Dataset:
            return Dataset(train=Examples(x, y), test=Examples(x, y))

        def build(self) -> KerasModel:
            return KerasModel(network)

    return Architecture


@contextlib.contextmanager
def _batch_normalized() -> Iterator[None]:
    with patch.object(keras.layers, "GroupNormalization", lambda groups: keras.layers.BatchNormalization()):
        yield


def checked(name: str, said: Callable[[str], None]) -> str:
    """Return the outcome of `cloister check task`: ok, or fault; tell of all lines that are not ok."""
    lines = list(check_task(name))
    for line in lines:
        if line.kind != "ok":
            said(f"check: {line}")
    return "fault" if any(line.kind == "fault" for line in lines) else "ok"


def ran(settings: Mapping[str, Any], kind: str, said: Callable[[str], None]) -> str:
    """Return the outcome of a run: ok, not finite, refused or failed; tell why."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        common = {"num-rounds": 1, "tensorboard": False, "output-dir": folder, "privacy.ledger-dir": folder}
        try:
            outcome = simulate({**settings, **common}, CLIENTS)
        except CloisterError as refusal:
            said(f"{kind}: {refusal}")
            return "refused"
        except Exception:
            said(f"{kind}: {traceback.format_exc()}")
            return "failed"
    last = outcome.rounds[-1]
    finite = all(np.isfinite(array.numpy()).all() for array in outcome.arrays.values())
    scored = np.isfinite(list((last.central or {"loss": np.nan}).values())).all()
    if outcome.stopped or not (finite and scored):
        said(f"{kind}: {outcome.stopped or f'the model or its scores are not finite: {last.central}'}")
        return outcome.ended if outcome.stopped else "not finite"
    return "ok"


def timed(name: str) -> list[str]:
    """Return the seconds of a start of DP-SGD with its first epoch, and the ratio of its step to a plain one."""
    made, starts = {}, {}
    for kind in ("plain", "dp-sgd"):
        begun, config = time.perf_counter(), parse({**RUNS[kind], "task.name": name})
        bench = ModelAndTrainer(config.task, config.client, config.privacy)
        trainer, examples = bench.trainer, TASKS.load(name)(config.task).load().train
        plan = TrainingPlan.of(Recipe(1, BATCH, 0.01), (0, 0, 0))
        made[kind] = lambda trainer=trainer, examples=examples, plan=plan: trainer.fit(examples, plan)
        made[kind]()
        starts[kind] = time.perf_counter() - begun
    taken = seconds(made, REPEATS)
    busy = {kind: statistics.median(processor for _, processor in own) for kind, own in taken.items()}
    return [f"{starts['plain']:.1f}", f"{starts['dp-sgd']:.1f}", f"{busy['dp-sgd'] / busy['plain']:.1f}×"]


def row(name: str, said: Callable[[str], None]) -> list[str]:
    """Return the cells of a row."""
    cells = [name, checked(name, said)]
    cells += [ran({**settings, "task.name": name}, kind, said) for kind, settings in RUNS.items()]
    return cells + (timed(name) if cells[-1] == "ok" else ["", "", ""])


def main() -> None:
    """Print a row for each architecture as it ends; on standard error, what was refused or noted, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join([*NAMES, *NORMALIZED])}")
    names = parser.parse_args().names or [*NAMES, *NORMALIZED]
    globals().update({name: task_of(name) for name in names})
    TASKS._builtin.update({name: f"{__name__}:{name}" for name in names})
    machine()
    head = ["model", "check", *RUNS, "start plain, s", "start, s", "step/plain"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    for name in names:
        notes: list[str] = []
        cells = row(name, notes.append)
        print(f"| {' | '.join(cells)} |", flush=True)
        for note in notes:
            print(f"{name}, {note}", file=sys.stderr, flush=True)
    print(f"\nload {load()} at the end")


if __name__ == "__main__":
    main()
