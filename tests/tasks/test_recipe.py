"""The recipe of a run: what the configuration says, what the task says, and what neither may."""

from dataclasses import replace

import numpy as np
import pytest
from support import failures
from test_faults import made

from cloister.config.run import parse
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.faults import faults_of_attributes
from cloister.tasks.numpy_models import LinearRegression, SoftmaxRegression
from cloister.tasks.recipe import recipe_of
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import NumpyTrainer, weighted_gradients
from cloister.utils.errors import ConfigError

OWN = Recipe(
    local_epochs=2,
    batch_size=8,
    learning_rate=0.1,
    schedule="cosine",
    warmup_rounds=1,
    class_weights=(1.0, 2.0, 3.0),
    callbacks=list,
)


def resolved(task, **keys):
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    config = parse({"privacy.server": "none"} | flat)
    return recipe_of(task, config.client, config.privacy)


def test_auto_takes_the_task_s_recipe():
    assert resolved(made(recipe=OWN)) == OWN


def test_a_run_says_otherwise():
    task = made(recipe=OWN, transforms={"jitter": lambda example, rng: example})
    found = resolved(
        task,
        client__schedule="linear",
        client__final_rate_share=0.1,
        client__class_weights="1, 1,0.5",
        client__loss_scale=2.0,
        client__augmentation="jitter",
        client__callbacks=False,
        client__warmup_rounds=0,
    )
    assert found == replace(
        OWN,
        schedule="linear",
        final_rate_share=0.1,
        class_weights=(1.0, 1.0, 0.5),
        loss_scale=2.0,
        augmentation=("jitter",),
        callbacks=None,
        warmup_rounds=0,
    )


def test_an_empty_text_says_none():
    found = resolved(made(recipe=replace(OWN, augmentation=("x",))), client__class_weights="", client__augmentation="")
    assert found.class_weights == found.augmentation == ()


def test_what_does_not_fit_is_refused():
    def check(keys, says):
        with pytest.raises(ConfigError) as refused:
            resolved(made(recipe=OWN), **keys)
        assert str(refused.value).startswith(says)

    assert not failures(
        [
            (
                {"client__class_weights": "1,2"},
                "client.class-weights has 2 numbers, and task 'digits' takes one for each of its 3",
            ),
            (
                {"client__augmentation": "flip"},
                "client.augmentation = 'flip' is no transform of task 'digits', which has n",
            ),
            ({"client__augmentation": "jitter,jitter"}, "client.augmentation names a transform more than once"),
            ({"privacy__client": "dp-sgd"}, "privacy.client = 'dp-sgd' refuses the Keras callbacks of this task"),
            ({"privacy__client": "gaussian"}, "privacy.client = 'gaussian' refuses the Keras callbacks"),
            ({"privacy__client": "laplace"}, "privacy.client = 'laplace' refuses the Keras callbacks"),
        ],
        check,
    )


def test_without_its_callbacks_a_task_trains_under_a_mechanism():
    assert resolved(made(recipe=OWN), privacy__client="dp-sgd", client__callbacks=False).callbacks is None
    assert resolved(made(recipe=OWN), privacy__server="global-dp").callbacks is list


def test_a_recipe_that_no_run_could_ask_for_is_a_fault_of_the_task():
    def check(changes):
        task = made(recipe=replace(OWN, **changes))
        (fault,) = map(str, faults_of_attributes(task))
        assert fault.startswith("recipe: client.") and fault.endswith("; change it in the task's recipe")
        with pytest.raises(ConfigError, match="client"):
            resolved(task)

    assert not failures(
        [
            {"schedule": "cosinus"},
            {"schedule": lambda passed: 1 + passed},
            {"schedule": lambda passed: float("nan")},
            {"final_rate_share": 1.5},
            {"warmup_rounds": -1},
            {"class_weights": (1.0, 0.0, 1.0)},
            {"class_weights": (1.0, float("inf"), 1.0)},
            {"loss_scale": float("nan")},
            {"augmentation": ("flop",)},
        ],
        check,
    )


class TestWeights:
    RNG = np.random.default_rng(0)
    BATCH = Examples(RNG.random((9, 4), np.float32), np.arange(9) % 3)

    def by_hand(self, model, weights):
        found = [model.loss_and_gradients(self.BATCH.x[i : i + 1], self.BATCH.y[i : i + 1]) for i in range(9)]
        loss = np.mean([w * loss for w, (loss, _) in zip(weights, found, strict=True)])
        kernel = np.mean([w * own["softmax/kernel"] for w, (_, own) in zip(weights, found, strict=True)], axis=0)
        return loss, kernel

    def test_the_gradient_is_the_mean_of_weighted_gradients(self):
        model = SoftmaxRegression(4, 3)
        model.weights["softmax/kernel"][:] = self.RNG.normal(size=(4, 3))
        loss, gradients = weighted_gradients(model, self.BATCH, replace(OWN, loss_scale=0.5))
        expected = self.by_hand(model, np.array([0.5, 1.0, 1.5])[self.BATCH.y])
        assert loss == pytest.approx(expected[0], rel=1e-5)
        np.testing.assert_allclose(gradients["softmax/kernel"], expected[1], rtol=1e-4, atol=1e-6)

    def test_the_trainer_descends_on_it(self):
        model, plan = SoftmaxRegression(4, 3), TrainingPlan(1, 9, 0.2, 0.0, (1,))
        NumpyTrainer(model, replace(OWN, callbacks=None)).fit(self.BATCH, plan)
        _, kernel = self.by_hand(SoftmaxRegression(4, 3), np.array([1.0, 2.0, 3.0])[self.BATCH.y])
        np.testing.assert_allclose(model.weights["softmax/kernel"], -0.2 * kernel, rtol=1e-4, atol=1e-6)

    def test_a_scale_is_for_regressions_too(self):
        model = LinearRegression(4)
        target = Examples(self.BATCH.x, self.BATCH.y.astype(np.float32))
        plain, scaled = (
            weighted_gradients(model, target, Recipe(1, 9, 0.2, loss_scale=scale))[1] for scale in (1.0, 3.0)
        )
        np.testing.assert_allclose(scaled["linear/kernel"], 3 * plain["linear/kernel"], rtol=1e-6)

    def test_a_label_of_no_class_changes_the_weight_of_no_other(self):
        labels = np.array([0, 9, 2, -4])
        found = OWN.weights(Examples(np.zeros((4, 1), np.float32), labels))
        np.testing.assert_array_equal(
            found[[0, 2]], OWN.weights(Examples(np.zeros((2, 1), np.float32), labels[[0, 2]]))
        )

    def test_models_in_numpy_call_no_callbacks(self):
        with pytest.raises(ConfigError, match=r"use client\.callbacks = false"):
            NumpyTrainer(SoftmaxRegression(4, 3), OWN)
