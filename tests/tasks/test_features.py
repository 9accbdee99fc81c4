"""Frozen features: each a function of its own example, made once, and the same wherever a model is used."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401

from cloister.config.run import TaskConfig, parse
from cloister.predict import predict
from cloister.simulation.simulate import simulate
from cloister.tasks import features
from cloister.tasks.base import Task
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.features import FeatureTask, normalised
from cloister.tasks.making import model_of, named_task
from cloister.tasks.recipe import transforms_of
from cloister.utils.errors import ConfigError, DataError

WIDTH = 81 * 2 * 2


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("CLOISTER_CACHE", raising=False)
    monkeypatch.setattr(features, "_kept", {})


@pytest.fixture
def made(monkeypatch):
    """How many examples were scattered."""
    calls = []
    real = features.Scattering.__call__
    monkeypatch.setattr(features.Scattering, "__call__", lambda *given: calls.append(1) or real(*given))
    return lambda: [len(calls), calls.clear()][0]


def digits(**settings):
    return named_task(TaskConfig(name="digits", features="scattering", **settings))


def images(count=6, seed=0):
    return np.random.default_rng(seed).random((count, 64)).astype(np.float32)


def file_of(folder, x, y=None, name="own.npz"):
    np.savez(folder / name, x=x, y=np.arange(len(x)) % 10 if y is None else y)
    return folder / name


# One example alone


def test_features_of_an_example_depend_on_no_other_one():
    task, x = digits(), images(9)
    together = task.prepared(x)
    alone = np.concatenate([task.prepared(x[i : i + 1]) for i in range(9)])
    np.testing.assert_array_equal(together, alone)
    x[3] *= 1e30
    np.testing.assert_array_equal(np.delete(task.prepared(x), 3, axis=0), np.delete(together, 3, axis=0))


def test_a_file_gives_features_that_depend_on_no_other_row(tmp_path):
    x = images(9)
    whole = digits().read(file_of(tmp_path, x, name="all.npz")).x
    np.testing.assert_array_equal(digits().read(file_of(tmp_path, x[2:], name="some.npz")).x, whole[2:])


def test_each_group_has_mean_0_and_variance_1():
    groups = normalised(images(1)[0] * 7 + 3, 4).reshape(4, -1)
    np.testing.assert_allclose(groups.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(groups.var(axis=1), 1, atol=1e-3)
    scattered = digits().prepared(images()).reshape(6, 27, -1)
    np.testing.assert_allclose(scattered.mean(axis=2), 0, atol=1e-5)


def test_features_have_a_bounded_norm_for_any_input():
    for scale in (0.0, 1e-30, 1.0, 1e15):
        assert np.linalg.norm(normalised(np.float32(scale) * images(1), 4)) <= 8.001


def test_a_row_without_features_is_left_out_alone(tmp_path):
    x = images()
    x[4] = np.nan
    examples = digits().rows(file_of(tmp_path, x))
    assert digits().usable(examples).tolist() == [True] * 4 + [False, True]
    np.testing.assert_array_equal(examples.x[5], digits().prepared(x[5:])[0])


def test_a_file_of_another_shape_is_refused_in_the_words_of_the_raw_task(tmp_path):
    path = file_of(tmp_path, np.ones((3, 65)))
    for read in (digits().read, digits().rows):
        with pytest.raises(DataError, match=r"inputs of shape \(64,\), found \(65,\)"):
            read(path)


# Made once


def test_a_file_is_kept_beside_the_data_and_used_again(tmp_path, made):
    path = file_of(tmp_path, images())
    first = np.array(digits().read(path).x)
    assert made() == 6
    again = digits().read(path).x
    assert made() == 0
    np.testing.assert_array_equal(again, first)
    assert len(list((tmp_path / ".cloister-cache" / "features").glob("*.npy"))) == 1


def test_changed_data_has_other_features(tmp_path, made):
    x = images()
    digits().read(file_of(tmp_path, x))
    x[2, 5] += 0.5
    found = digits().read(file_of(tmp_path, x)).x
    assert made() == 12
    np.testing.assert_array_equal(found, digits().prepared(x))


def test_a_damaged_file_is_made_anew(tmp_path, made):
    path = file_of(tmp_path, images())
    first = np.array(digits().read(path).x)
    (kept,) = (tmp_path / ".cloister-cache" / "features").glob("*.npy")
    for content in (kept.read_bytes()[:-4], b"", b"\x93NUMPY"):
        kept.unlink()
        kept.write_bytes(content)
        np.testing.assert_array_equal(digits().read(path).x, first)


def test_another_user_cannot_read_the_file(tmp_path):
    digits().read(file_of(tmp_path, images()))
    assert (tmp_path / ".cloister-cache" / "features").stat().st_mode & 0o077 == 0


def test_data_without_a_folder_is_kept_in_memory(made):
    first = digits().load()
    count = made()
    again = digits().load()
    assert count == 1797 and made() == 0
    assert again.train.x is first.train.x


# A run, and its model


def test_the_head_is_linear_and_needs_no_framework():
    code = (
        "import sys\n"
        "from cloister.config.run import parse\n"
        "from cloister.tasks.making import model_of, named_task\n"
        "task = named_task(parse({'task.name': 'digits', 'task.features': 'scattering'}).task)\n"
        "print(sum(array.size for array in model_of(task).arrays().values()), task.load().train.x.shape[1])\n"
        "assert not {'tensorflow', 'keras', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout.split()) == (0, [str(10 * WIDTH + 10), str(WIDTH)]), done.stderr


def test_a_head_on_mnist_has_39_700_parameters():
    head = model_of(named_task(TaskConfig(name="mnist", features="scattering")))
    assert sum(array.size for array in head.arrays().values()) == 39_700


def test_predictions_on_raw_inputs_are_those_that_the_run_scored(tmp_path):
    settings = {
        "task.name": "digits",
        "task.features": "scattering",
        "output-dir": str(tmp_path),
        "run-name": "one",
        "num-rounds": 1,
        "seed": 1,
        "privacy.server": "none",
        "privacy.client": "dp-sgd",
        "privacy.dp-sgd-noise-multiplier": 0.5,
        "client.batch-size": 128,
        "client.learning-rate": 1.0,
    }
    simulate(settings, 2)
    test = Digits(TaskConfig(name="digits")).load().test
    found = predict(tmp_path / "one", file_of(tmp_path, test.x, test.y))
    scored = json.loads((tmp_path / "one" / "rounds.jsonl").read_text().splitlines()[-1])
    assert found.metrics["accuracy"] > 0.6
    assert f'"accuracy": {found.metrics["accuracy"]}' in json.dumps(scored)


def test_features_are_no_pictures_to_augment():
    assert transforms_of(digits()) == {}


def test_a_model_that_features_replace_is_refused():
    with pytest.raises(ConfigError, match=r"task\.model must be one of softmax, keras .* got 'mlp'"):
        digits(model="mlp")


def test_a_task_may_have_a_head_of_its_own():
    class Own(Digits):
        def build_head(self, features):
            from cloister.tasks.numpy_models import SoftmaxRegression

            assert self.model_name == "mlp"
            return SoftmaxRegression(features, 10)

    task = FeatureTask(Own(TaskConfig(name="digits", model="mlp")), TaskConfig(name="digits", features="scattering"))
    assert model_of(task).arrays()["softmax/kernel"].shape == (WIDTH, 10)


def test_targets_without_classes_need_a_head_of_the_task():
    class Angle(Digits):
        classes, target = 0, features.Target("mse")

    task = FeatureTask(Angle(TaskConfig(name="digits")), TaskConfig(name="digits", features="scattering"))
    with pytest.raises(ConfigError, match=r"write its build_head\(features\)"):
        task.build()


def test_scattering_needs_images():
    with pytest.raises(ConfigError, match=r"needs images, and task 'breast-cancer' has inputs of shape \(30,\)"):
        named_task(TaskConfig(name="breast-cancer", features="scattering"))


def test_colours_are_scattered_each_by_itself():
    class Coloured(Digits):
        input_shape, image_shape = (8, 8, 3), None

    class First(Coloured):
        input_shape, channels_first = (3, 8, 8), True

    last, first = (
        FeatureTask(kind(TaskConfig(name="digits")), TaskConfig(name="digits", features="scattering"))
        for kind in (Coloured, First)
    )
    x = np.random.default_rng(0).random((2, 8, 8, 3)).astype(np.float32)
    assert last.input_shape == (3 * WIDTH,)
    np.testing.assert_array_equal(last.prepared(x), first.prepared(np.moveaxis(x, -1, 1)))


# A model in a file


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A network with batch normalisation in a file."""
    from cloister.tasks.keras_model import import_keras

    keras = import_keras()
    keras.utils.set_random_seed(0)
    path = tmp_path_factory.mktemp("backbone") / "backbone.keras"
    layers = [keras.Input((64,)), keras.layers.Dense(12, "relu"), keras.layers.BatchNormalization()]
    keras.Sequential(layers).save(path)
    return path


def key_of(path):
    return f"{path}@{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_keras_model_gives_features_of_each_example_alone(backbone):
    task = named_task(TaskConfig(name="digits", features=key_of(backbone)))
    x = images(5)
    together = task.prepared(x)
    assert together.shape == (5, 12)
    np.testing.assert_array_equal(together, np.concatenate([task.prepared(x[i : i + 1]) for i in range(5)]))


def test_a_file_with_another_digest_is_refused(backbone):
    other = f"{backbone}@{'0' * 64}"
    with pytest.raises(ConfigError, match=r"backbone.keras has SHA-256 \w{12}…, and the run states 000000000000…"):
        named_task(TaskConfig(name="digits", features=other))


def test_another_model_has_other_features_in_another_file(backbone, tmp_path):
    from cloister.tasks.keras_model import import_keras

    keras, changed, data = import_keras(), tmp_path / "changed.keras", file_of(tmp_path, images())
    model = keras.saving.load_model(backbone)
    model.set_weights([weight + 0.1 for weight in model.get_weights()])
    model.save(changed)
    one, other = (
        named_task(TaskConfig(name="digits", features=key_of(path))).read(data).x for path in (backbone, changed)
    )
    assert not np.allclose(one, other)
    assert len(list((tmp_path / ".cloister-cache" / "features").glob("*.npy"))) == 2


def test_a_machine_may_have_its_files_in_another_folder(backbone, monkeypatch):
    elsewhere = key_of(backbone).replace(str(backbone.parent), "/nowhere")
    monkeypatch.setenv("CLOISTER_FEATURES", str(backbone.parent))
    assert named_task(TaskConfig(name="digits", features=elsewhere)).input_shape == (12,)
    monkeypatch.delenv("CLOISTER_FEATURES")
    with pytest.raises(ConfigError, match=r"/nowhere/backbone.keras cannot be read .* CLOISTER_FEATURES names"):
        named_task(TaskConfig(name="digits", features=elsewhere))


def test_a_model_of_other_inputs_or_no_model_is_refused(backbone, tmp_path):
    with pytest.raises(ConfigError, match=r"one input of shape \(30,\) .* found inputs \[\(64,\)\]"):
        named_task(TaskConfig(name="breast-cancer", features=key_of(backbone)))
    (tmp_path / "odd.keras").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"odd.keras is no Keras model"):
        named_task(TaskConfig(name="digits", features=key_of(tmp_path / "odd.keras")))


def test_the_keras_head_is_the_linear_one():
    head = model_of(digits(model="keras"))
    np.testing.assert_allclose(head.predict(digits().prepared(images())), 0.1, rtol=1e-5)


def test_text_that_names_no_extractor_is_refused():
    for text in ("wavelets", "backbone.keras", "backbone.keras@123", f"backbone.pkl@{'0' * 64}"):
        with pytest.raises(ConfigError, match=r"task\.features = .* is not valid"):
            parse({"task.features": text})


def test_a_task_without_features_prepares_nothing():
    task, x = named_task(TaskConfig(name="digits")), images()
    assert isinstance(task, Task) and task.raw is task and task.prepared(x) is x
