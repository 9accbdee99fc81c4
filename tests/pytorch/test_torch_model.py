"""Which arrays of a module are sent, what its outputs mean, and what a saved file holds."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch_tasks import Frozen, Normalised, Scans, Small, made, model  # noqa: E402

from cloister.tasks.making import frozen_digest, model_of  # noqa: E402
from cloister.tasks.targets import Target  # noqa: E402
from cloister.tasks.torch_model import TorchModel  # noqa: E402
from cloister.training.plan import TrainingPlan  # noqa: E402
from cloister.training.torch_trainer import TorchTrainer  # noqa: E402
from cloister.utils.errors import ConfigError, DataError  # noqa: E402
from cloister.utils.state import STATE, Coordinates  # noqa: E402

pytestmark = pytest.mark.torch
STATISTICS = [f"{STATE}1.running_mean", f"{STATE}1.running_var"]


def built_by(network, **attributes):
    return type("Own", (Small,), {"build": lambda self: network(), **attributes})


def trained(own, task, seed=(1, 1)):
    TorchTrainer(own, task.recipe).fit(task.load().train, TrainingPlan.of(task.recipe, seed))
    return own


class TestArrays:
    def test_parameters_are_sent_and_written_float_buffers_are_state(self):
        own = model(Normalised)
        weights = ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
        assert list(own.arrays()) == weights + STATISTICS
        assert own.frozen() == {}

    def test_a_frozen_part_in_evaluation_mode_has_no_state_and_stays(self):
        own, task = model(Frozen), made(Frozen)
        before, digest = own.frozen(), frozen_digest(own)
        assert list(own.arrays()) == ["1.weight", "1.bias"]
        assert {"0.0.weight", "0.1.running_mean", "0.1.num_batches_tracked"} < set(before)
        trained(own, task)
        assert frozen_digest(own) == digest == frozen_digest(model_of(task))
        for name, array in own.frozen().items():
            np.testing.assert_array_equal(array, before[name])

    def test_a_count_of_batches_starts_each_training_anew(self):
        """Without momentum it is the weight of a batch in the running mean."""
        task = made(built_by(lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))))
        own = model_of(task)
        start, ends = own.arrays(), []
        for _ in range(2):
            own.assign(start)
            ends.append(trained(own, task).arrays())
        np.testing.assert_array_equal(*(end[f"{STATE}0.running_mean"] for end in ends))

    def test_a_running_mean_that_the_trial_would_not_move_is_state(self):
        """Behind a dead ReLU each batch has the mean 0, which a running mean begins with."""

        def dead():
            first = nn.Linear(6, 1)
            nn.init.constant_(first.weight, -1.0)
            nn.init.constant_(first.bias, -1.0)
            return nn.Sequential(first, nn.ReLU(), nn.BatchNorm1d(1), nn.Linear(1, 3))

        assert f"{STATE}2.running_mean" in model_of(made(built_by(dead))).arrays()

    def test_state_of_a_layer_has_its_own_variance_as_unit(self):
        names = [f"{STATE}{layer}.running_{kind}" for layer in (1, 3) for kind in ("mean", "var")]
        values = dict(zip(names, ([0.0] * 2, [4.0] * 2, [0.0] * 2, [9.0] * 2), strict=True))
        from cloister.utils.arrays import Layout

        arrays = {name: np.array(value, np.float32) for name, value in values.items()}
        layout = Layout.of(arrays)
        spreads = Coordinates.of(layout, layout.rows(arrays)).spreads
        np.testing.assert_allclose([spreads[place][0] for place in range(4)], [4, 4, 9, 9], rtol=1e-3)

    def test_state_can_stay_at_the_site(self):
        own = model(Normalised, statistics="local")
        assert [*own.kept()] == STATISTICS
        assert not set(STATISTICS) & set(own.arrays())
        new = own.kept()
        trained(own, made(Normalised))
        assert not np.array_equal(own.kept()[STATISTICS[0]], new[STATISTICS[0]])
        own.assign_kept(None)
        np.testing.assert_array_equal(own.kept()[STATISTICS[0]], new[STATISTICS[0]])

    def test_a_model_without_state_cannot_keep_any(self):
        with pytest.raises(ConfigError, match="training writes no buffer"):
            model(Small, statistics="local")

    def test_lazy_modules_get_their_shapes_from_the_task(self):
        own = model(built_by(lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))))
        assert own.arrays()["0.weight"].shape == (4, 6)

    @pytest.mark.parametrize(
        ("network", "says"),
        [
            (lambda: nn.Linear(6, 3).bfloat16(), "bfloat16 cannot be sent"),
            (lambda: Secretive(), "no tensor, and cannot be saved without pickle"),
        ],
    )
    def test_what_cannot_be_sent_or_saved_is_refused_at_the_start(self, network, says):
        with pytest.raises(ConfigError, match=says):
            model_of(made(built_by(network)))


class Secretive(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass


class TestOutputs:
    def test_predictions_are_probabilities_of_logits(self):
        own, x = model(), made().load().test.x
        logits = own.module(torch.from_numpy(x))
        np.testing.assert_allclose(own.predict(x), torch.softmax(logits, 1).detach().numpy(), atol=1e-6)

    def test_classes_may_be_on_axis_1_or_the_last(self):
        target = Target(shape=(5,), classes=2)
        first = built_by(lambda: nn.Unflatten(1, (2, 3)), classes=0, target=Target(shape=(3,), classes=2))
        last = built_by(lambda: nn.Unflatten(1, (3, 2)), classes=0, target=Target(shape=(3,), classes=2))
        x = np.arange(12, dtype=np.float32).reshape(2, 6)
        y = np.array([[0, 1, 1], [1, 0, 0]])
        assert target.output_shape == (5, 2)
        for kind, logits in ((first, x.reshape(2, 2, 3).transpose(0, 2, 1)), (last, x.reshape(2, 3, 2))):
            own = model_of(made(kind))
            expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            np.testing.assert_allclose(own.predict(x), expected, rtol=1e-5)
            (losses,) = own.losses(own.expected(y), own.module(own.given(x)))
            chosen = np.take_along_axis(expected, y[..., None], -1)[..., 0]
            np.testing.assert_allclose(losses.numpy(), -np.log(chosen).mean(1), rtol=1e-5)

    def test_the_loss_of_training_is_the_one_that_is_scored(self):
        def check(target, outputs, y):
            kind = built_by(lambda: nn.Linear(6, outputs), classes=0, target=target)
            task = made(kind)
            own, x = model(kind), np.random.default_rng(0).random((4, 6), np.float32)
            (losses,) = own.losses(own.expected(y), own.module(own.given(x)))
            np.testing.assert_allclose(losses.detach().numpy(), task.losses(y, own.predict(x)), rtol=1e-4)

        check(Target("binary-cross-entropy", shape=(2,)), 2, np.array([[0, 1], [1, 0], [1, 1], [0, 0]]))
        check(Target("mse"), 1, np.arange(4.0))
        check(Target("mae", shape=(2, 2)), 4, np.arange(16.0).reshape(4, 2, 2))
        check(Target(lambda y, out: functional.huber_loss(out, y, reduction="none")), 1, np.arange(4.0))

    def test_outputs_of_another_shape_are_refused_and_not_broadcast(self):
        own = model_of(made(built_by(lambda: nn.Linear(6, 4), classes=0, target=Target("mse"))))
        with pytest.raises(ConfigError, match=r"outputs of shape \(4,\) for each example, expected \(\)"):
            own.losses(own.expected(np.zeros(4)), torch.zeros((4, 4)))

    def test_several_inputs_and_outputs_go_by_name(self):
        own, task = model(Scans), made(Scans)
        data = task.load()
        before = task.metrics(data.test.y, own.predict(data.test.x))["loss"]
        assert task.metrics(data.test.y, trained(own, task).predict(data.test.x))["loss"] < before
        assert own.predict(data.test.x).dtype.names == ("stage", "volume")

    def test_outputs_of_other_names_are_refused(self):
        own = model(Scans)
        with pytest.raises(ConfigError, match=r"\('stage', 'age'\); return a dict of 'stage', 'volume'"):
            own.losses([], {"stage": torch.zeros(1), "age": torch.zeros(1)})

    def test_an_own_loss_trains_and_the_task_s_scores(self):
        class Smoothed(Small):
            def build(self):
                smoothed = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)
                return TorchModel(super().build, loss=lambda y, out: smoothed(out, y))

        own, task = model(Smoothed), made(Smoothed)
        y = task.load().test.y
        predicted = own.predict(task.load().test.x)
        np.testing.assert_allclose(predicted.sum(1), 1, rtol=1e-5)
        (losses,) = own.losses(own.expected(y), own.module(own.given(task.load().test.x)))
        assert not np.allclose(losses.detach().numpy(), task.losses(y, predicted))


class TestFile:
    def test_plain_pytorch_loads_it_with_the_frozen_part(self, tmp_path):
        task = made(Frozen)
        own = trained(model(Frozen), task)
        own.save(tmp_path / "model.safetensors")
        plain = task.build()
        plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
        x = task.load().test.x
        with torch.no_grad():
            found = torch.softmax(plain.eval()(torch.from_numpy(x)), 1).numpy()
        np.testing.assert_allclose(found, own.predict(x), atol=1e-6)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

    def test_its_header_names_class_and_task(self, tmp_path):
        model(Scans).save(tmp_path / "model.safetensors")
        content = (tmp_path / "model.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        assert header["__metadata__"] == {
            "format": "pt",
            "class": "torch_tasks.Network",
            "task": "digits",
            "model": "net",
        }

    def test_tied_and_transposed_parameters(self, tmp_path):
        def tied():
            network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
            network[1].weight = network[0].weight
            network[2].weight = nn.Parameter(torch.randn(6, 3).T)
            return network

        own, other = (model(built_by(tied), seed) for seed in (1, 2))
        assert "1.weight" not in own.arrays()
        own.save(tmp_path / "model.safetensors")
        other.load(tmp_path / "model.safetensors")
        x = made().load().test.x
        np.testing.assert_array_equal(own.predict(x), other.predict(x))
        tied().load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", struct.pack("<Q", 1 << 60), b"other"])
    def test_another_file_is_refused_and_no_pickle_is_read(self, tmp_path, content, monkeypatch):
        def never(*_, **__):
            raise AssertionError

        monkeypatch.setattr("pickle.load", never)
        monkeypatch.setattr("torch.load", never)
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        if content == b"other":
            model(Scans).save(path)
        with pytest.raises(DataError, match="holds no model of this task"):
            model().load(path)


class TestRandomNumbers:
    def test_nothing_depends_on_pytorch_s_generator_or_moves_it(self):
        task, ends = made(Normalised), []
        for seed in (5, 6):
            own = model_of(task)
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            own.initialise(1)
            trained(own, task).predict(task.load().test.x)
            assert torch.equal(torch.get_rng_state(), state)
            ends.append(own.arrays()["0.weight"])
        np.testing.assert_array_equal(*ends)

    def test_masks_of_dropout_follow_the_seed_of_the_plan(self):
        task = made(Normalised)
        plain = replace(task.recipe, local_epochs=1, batch_size=96)  # one batch, in any order
        own, ends = model(Normalised), []
        start = own.arrays()
        for seed in ((1, 1), (1, 1), (1, 2)):
            own.assign(start)
            TorchTrainer(own, plain).fit(task.load().train, TrainingPlan.of(plain, seed))
            ends.append(own.arrays()["0.weight"])
        np.testing.assert_array_equal(*ends[:2])
        assert not np.allclose(ends[0], ends[2])
