"""Optimizers of PyTorch by name and by function, losses of a whole batch, minibatches, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tasks import Normalised, Small, made, model  # noqa: E402

from cloister.tasks.base import Examples  # noqa: E402
from cloister.tasks.making import model_of  # noqa: E402
from cloister.tasks.recipe import recipe_faults  # noqa: E402
from cloister.tasks.targets import Target  # noqa: E402
from cloister.training.plan import Schedule, TrainingPlan  # noqa: E402
from cloister.training.torch_trainer import TorchTrainer, optimizer_of  # noqa: E402
from cloister.utils.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch


def moved(recipe, own=None, **changes):
    """The weights before and after a training of one step, by name."""
    own, data = own or model(), made().some(24, 0)
    before = own.arrays()
    plan = TrainingPlan(
        **({"epochs": 1, "batch_size": 24, "learning_rate": 0.1, "proximal_mu": 0, "seed": (1,)} | changes)
    )
    TorchTrainer(own, replace(recipe, learning_rate=0.1)).fit(data, plan)
    return before, own.arrays()


class TestOptimizers:
    @pytest.mark.parametrize(
        "name",
        [
            *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw"),
            *("asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"),
        ],
    )
    def test_each_optimizer_of_pytorch_trains_by_its_name(self, name):
        before, after = moved(replace(Small.recipe, optimizer=name))
        assert not np.array_equal(before["0.weight"], after["0.weight"])

    @pytest.mark.parametrize("name", ["lbfgs", "sparseadam", "muon"])
    def test_one_that_cannot_train_the_model_is_refused_at_the_start(self, name):
        with pytest.raises(
            ConfigError, match=rf"client\.optimizer = '{name}' cannot train this model: .*use sgd or adam"
        ):
            TorchTrainer(model(), replace(Small.recipe, optimizer=name))

    def test_options_act_under_the_names_of_pytorch_and_betas_by_number(self):
        options = {"beta_2": 0.9, "weight_decay": 0.5, "amsgrad": True}
        recipe = replace(Small.recipe, optimizer="adam", optimizer_options=options)
        (group,) = optimizer_of(recipe, model().trained.values()).param_groups
        assert group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.5 and group["amsgrad"]

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"momentum": 0.9}, "'adam' has no option 'momentum'; it has eps, weight_decay, amsgrad"),
            ({"lr": 0.1}, "lr has no effect, as client.learning-rate sets it"),
            ({"maximize": True}, "maximize has no effect"),
            ({"amsgrad": 1.0}, "amsgrad = 1.0 is not valid: it must be true or false"),
            ({"beta_1": 7.0}, "beta_1=7.0 is not valid"),
            ({"fused": True}, "no option 'fused'"),
        ],
    )
    def test_what_it_lacks_is_refused_by_name(self, options, says):
        with pytest.raises(ConfigError, match=r"^client\.optimizer-options: ") as refused:
            TorchTrainer(model(), replace(Small.recipe, optimizer="adam", optimizer_options=options))
        assert says in str(refused.value)

    def test_a_function_may_make_one_and_its_groups_keep_their_ratio(self):
        def make(parameters, rate):
            return torch.optim.SGD([{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}], lr=rate)

        recipe = replace(Small.recipe, optimizer=make)
        assert list(recipe_faults(made(), recipe)) == []
        before, after = moved(recipe)
        plain_before, plain_after = moved(Small.recipe)
        np.testing.assert_array_equal(after["0.weight"], before["0.weight"])
        np.testing.assert_array_equal(after["2.weight"], plain_after["2.weight"])
        assert not np.array_equal(plain_after["0.weight"], plain_before["0.weight"])

    def test_a_function_that_makes_no_optimizer_is_refused(self):
        with pytest.raises(ConfigError, match="must return an optimizer of PyTorch, found an object of type NoneType"):
            TorchTrainer(model(), replace(Small.recipe, optimizer=lambda parameters, rate: None))

    def test_the_rate_of_an_epoch_is_that_of_the_plan(self):
        plan = {"epochs": 2, "schedule": Schedule("linear", 1, final_share=0.0)}
        both, half = moved(Small.recipe, **plan), moved(Small.recipe, epochs=1)
        own = model()
        own.assign(half[1])
        again = moved(Small.recipe, own, learning_rate=0.05)
        np.testing.assert_allclose(both[1]["0.weight"], again[1]["0.weight"], atol=1e-6)


def test_callbacks_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="callbacks are those of Keras, and a PyTorch model has none"):
        TorchTrainer(model(), replace(Small.recipe, callbacks=list))


def test_the_root_of_a_batch_s_mean_is_minimised():
    """The gradient of √(mean of squares) is that of the mean over twice the root; the scale multiplies the root."""

    class Rooted(Small):
        classes, target = 0, Target("rmse")

        def some(self, count, seed):
            x = np.random.default_rng(seed).random((count, 6), np.float32)
            return Examples(x, x.sum(axis=1))

        def build(self):
            return nn.Linear(6, 1)

    task, own = made(Rooted), model(Rooted)
    data, before = task.some(24, 0), own.arrays()
    residual = data.x @ before["weight"][0] + before["bias"][0] - data.y
    slope = 3 * data.x.T @ residual / 24 / np.sqrt(np.square(residual).mean())
    recipe = replace(task.recipe, loss_scale=3.0)
    loss = TorchTrainer(own, recipe).fit(data, TrainingPlan(1, 24, 0.1, 0.0, (1,)))
    np.testing.assert_allclose(own.arrays()["weight"][0], before["weight"][0] - 0.1 * slope, rtol=1e-4)
    assert loss == pytest.approx(3 * np.sqrt(np.square(residual).mean()), rel=1e-5)


def test_a_single_last_example_joins_the_batch_before_it_where_batches_are_normalised():
    own = model(Normalised)
    parts = TorchTrainer(own, Normalised.recipe)._minibatches(np.arange(9), 4)
    assert [len(part) for part in parts] == [4, 5]
    TorchTrainer(own, Normalised.recipe).fit(made().some(9, 0), TrainingPlan(1, 4, 0.1, 0.0, (1,)))
    assert [len(part) for part in TorchTrainer(model(), Small.recipe)._minibatches(np.arange(9), 4)] == [4, 4, 1]


def test_no_gradient_of_a_client_stays_in_the_module():
    own = model()
    moved(Small.recipe, own)
    assert all(each.grad is None for each in own.module.parameters())


def test_a_submodule_in_evaluation_mode_stays_so_in_training():
    class Still(Small):
        def build(self):
            return nn.Sequential(nn.Linear(6, 3), nn.Dropout(1.0).eval())

    before, after = moved(Still.recipe, model(Still))
    assert not np.array_equal(before["0.weight"], after["0.weight"])


def test_pictures_are_changed_along_height_and_width():
    class Pictures(Small):
        input_shape = (2, 4, 5)

    from cloister.tasks.recipe import transforms_of

    picture, rng = np.arange(40, dtype=np.float32).reshape(2, 4, 5), np.random.default_rng(0)
    flip = transforms_of(made(Pictures))["flip"]
    found = {flip(picture, rng).tobytes() for _ in range(20)}
    assert found == {picture.tobytes(), np.ascontiguousarray(picture[:, :, ::-1]).tobytes()}


def test_items_of_a_dataset_become_examples():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"scan": torch.full((1, 2), float(index)), "age": index}, index % 2

    rows = made().examples(Items(), groups=np.array([7, 7, 8]))
    np.testing.assert_array_equal(rows.x["scan"], np.arange(3.0)[:, None, None] * np.ones((3, 1, 2)))
    np.testing.assert_array_equal(rows.x["age"], np.arange(3))
    np.testing.assert_array_equal(rows.y, [0, 1, 0])
    np.testing.assert_array_equal(rows.groups, [7, 7, 8])


def test_a_loss_function_of_tensors_scores_arrays_too():
    class Robust(Small):
        classes, target = 0, Target(lambda y, out: nn.functional.huber_loss(out, y, reduction="none"))

    task = made(Robust)
    assert task.losses(np.zeros(3), np.full(3, 2.0)) == pytest.approx(1.5)
    assert model_of(made(type("Own", (Robust,), {"build": lambda self: nn.Linear(6, 1)}))).predict(
        np.zeros((2, 6), np.float32)
    ).shape == (2,)
