"""The contract that every built-in task keeps, on a little data of its kind."""

import numpy as np
import pytest
from mri import SIZE, folders
from support import failures
from test_owners import charges, twenty_hospitals
from test_tasks import hospital

from cloister.client.data import local_data
from cloister.client.node import node_of
from cloister.config.run import TaskConfig
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Recipe
from cloister.tasks.datasets import characters, patients
from cloister.tasks.splits import with_validation
from cloister.utils.errors import DataError


def no_files(folder):
    return {}


def scans(folder):
    folders(folder, 10)
    return {"image_size": SIZE}


def four_hospitals(folder):
    rows = [f"{40 + row},1,4,140,0,0,1,112,1,3,2,?,?,{row % 2}" for row in range(20)]
    for name in patients.HOSPITALS:
        hospital(folder, *rows, name=f"processed.{name}.data")
    return {}


def payments(folder):
    charges(folder, twenty_hospitals())
    return {}


def digits_of_writers(folder):
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    arrays = {"x_train": images[:20], "y_train": labels[:20], "x_test": images[20:], "y_test": labels[20:]}
    np.savez(folder / "mnist.npz", **arrays)
    np.savez(folder / characters.WRITERS, train_writer=np.arange(20) % 4, test_writer=np.arange(20) % 4 + 9)
    return {}


def emnist_files(folder):
    labels = np.repeat(np.arange(62), 10).astype(np.uint8)
    np.savez(folder / "emnist_byclass_test.npz", x=np.full((620, 28, 28), 255, np.uint8), y=labels)
    return {}


def characters_of_writers(folder):
    labels = np.repeat(np.arange(62), 10).astype(np.uint8)
    np.savez(folder / "femnist.npz", x=np.full((620, 28, 28), 255, np.uint8), y=labels, writer=np.arange(620) % 20)
    return {}


DATA = {
    "alzheimer-mri": scans,
    "breast-cancer": no_files,
    "digits": no_files,
    "emnist": emnist_files,
    "femnist": characters_of_writers,
    "heart-disease": four_hospitals,
    "hospital-charges": payments,
    "linear": no_files,
    "mnist": digits_of_writers,
    "mnist-writers": digits_of_writers,
}
BUILT_IN = [name for name in TASKS.names() if TASKS.load(name).__module__.startswith("cloister.")]
MODELS = [(name, model) for name in BUILT_IN for model in TASKS.load(name).models]


def test_every_built_in_task_is_here():
    assert sorted(DATA) == BUILT_IN


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Each task by its name, on its data, and the settings that it was made of."""
    found = {}
    for name in BUILT_IN:
        folder = tmp_path_factory.mktemp(name)
        settings = DATA[name](folder) | {"data_path": "" if DATA[name] is no_files else str(folder)}
        found[name] = TASKS.load(name)(TaskConfig(name=name, test_fraction=0.2, **settings)), settings
    return found


@pytest.fixture(scope="module")
def loaded(tasks):
    return {name: task.load() for name, (task, _) in tasks.items()}


def parts(data: Dataset):
    return [part for part in (data.train, data.test, data.validation) if part is not None]


def test_what_it_loads_is_of_its_shape_and_the_same_every_time(tasks, loaded):
    def check(name):
        (task, _), first = tasks[name], loaded[name]
        again = task.load()
        for part, same in zip(parts(first), parts(again), strict=True):
            assert len(part) and part.x.shape[1:] == task.input_shape and part.x.dtype == np.float32
            assert part.y.dtype == (np.int64 if task.classes else np.float32)
            assert task.usable(part).all() and np.array_equal(part.x, same.x) and np.array_equal(part.y, same.y)
        assert first.owners is None or first.owners.shape == first.train.y.shape
        assert first.test_owners is None or first.test_owners.shape == first.test.y.shape
        assert (
            isinstance(task.recipe, Recipe) and task.models and task.image_shape in (None, task.input_shape[:2], (8, 8))
        )

    assert not failures(BUILT_IN, check)


def test_a_simulated_client_has_a_part_of_it(tasks, loaded):
    def check(name):
        task, _ = tasks[name]
        whole = {row.tobytes() for row in np.ascontiguousarray(loaded[name].train.x)}
        own = local_data(task.config, node_of({"partition-id": 1, "num-partitions": 2}), 3)
        assert len(own.train) and {row.tobytes() for row in np.ascontiguousarray(own.train.x)} <= whole

    assert not failures(BUILT_IN, check)


def test_a_node_s_own_archive_is_read_as_it_was_written(tasks, loaded, tmp_path):
    def check(name):
        (task, _), path = tasks[name], tmp_path / "own.npz"
        few = loaded[name].train.take(np.arange(4))
        np.savez(path, x=few.x, y=few.y)
        found = task.read(path)
        assert np.array_equal(found.x, few.x) and np.array_equal(found.y, few.y)
        np.savez(path, x=few.x[:, :1], y=few.y) if few.x.shape[1] > 1 else np.savez(path, x=few.x, y=few.y - 99)
        with pytest.raises(DataError, match="data-path"):
            task.read(path)

    assert not failures(BUILT_IN, check)


def test_its_loss_is_the_mean_of_its_losses_and_its_scores_are_numbers(tasks, loaded):
    def check(name):
        task, _ = tasks[name]
        y, rng = loaded[name].test.y, np.random.default_rng(0)
        scores = rng.dirichlet(np.ones(task.classes), len(y)) if task.classes else rng.normal(size=len(y))
        metrics = task.metrics(y, scores)
        assert metrics["loss"] == pytest.approx(task.losses(y, scores).mean(), rel=1e-5)
        assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
        assert task.strata(y).shape == y.shape

    assert not failures(BUILT_IN, check)


def test_the_server_can_train_on_some_examples_and_score_on_others(tasks, loaded):
    def check(name):
        (task, _), before = tasks[name], loaded[name]
        data = with_validation(task, before)
        assert len(data.validation) and len(data.test) and data.train.x.shape == before.train.x.shape
        assert len(data.validation) + len(data.test) == len(before.test) + len(before.validation or ())

    assert not failures(BUILT_IN, check)


@pytest.mark.slow
def test_its_models_predict_what_it_scores(tasks, loaded):
    def check(name, model):
        _, settings = tasks[name]
        task, test = TASKS.load(name)(TaskConfig(name=name, model=model, **settings)), loaded[name].test
        built = task.build()
        scores = built.predict(test.x)
        assert scores.shape[0] == len(test) and scores.ndim == (2 if task.classes else 1)
        assert np.isfinite(task.metrics(test.y, scores)["loss"])

    assert not failures(MODELS, check)
