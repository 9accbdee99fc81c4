"""Learning-rate schedules: their shapes, and that none is ever above the rate that was asked for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.training.plan import Schedule, TrainingPlan
from cloister.training.trainers import NumpyTrainer

RECIPE = Recipe(local_epochs=2, batch_size=4, learning_rate=0.5)


def shares(schedule, rounds, epochs=1):
    return [schedule.share(number, epoch, epochs) for number in range(1, rounds + 1) for epoch in range(epochs)]


def test_a_constant_rate_is_the_rate_itself():
    assert shares(Schedule(rounds=3), 3, epochs=2) == [1.0] * 6
    plan = TrainingPlan.of(replace(RECIPE, learning_rate=0.1), (1,))
    assert [plan.rate(epoch) for epoch in range(2)] == [0.1, 0.1]


def test_linear_and_cosine_fall_over_the_rounds_of_the_run():
    assert shares(Schedule("linear", 4), 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert shares(Schedule("linear", 2, final_share=0.5), 2, epochs=2) == pytest.approx([1, 0.875, 0.75, 0.625])
    assert shares(Schedule("cosine", 4), 4) == pytest.approx([1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4])


def test_a_warm_up_rises_and_what_follows_begins_after_it():
    assert shares(Schedule("constant", 4, warmup_rounds=2), 4) == pytest.approx([0.5, 1, 1, 1])
    assert shares(Schedule("linear", 4, warmup_rounds=2), 4, epochs=2) == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    )


def test_a_function_has_the_passed_share_of_the_rounds_after_the_warm_up():
    seen = []
    schedule = Schedule(lambda passed: seen.append(passed) or (1 - passed) ** 2, 4, warmup_rounds=2, final_share=0.5)
    assert shares(schedule, 4, epochs=2)[3:] == pytest.approx([1, 1, 0.78125, 0.625, 0.53125])
    assert seen == [0, 0.25, 0.5, 0.75]


@given(
    st.sampled_from(["constant", "linear", "cosine", lambda passed: 3 * passed - 1]),
    st.integers(1, 2**31),
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.integers(1, 1000),
    st.data(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_round_that_a_server_could_name_has_a_higher_rate(name, rounds, warmup, final, number, epochs, data):
    epoch = data.draw(st.integers(0, epochs - 1))
    assert 0 <= Schedule(name, rounds, warmup, final).share(number, epoch, epochs) <= 1


def test_the_trainer_takes_each_epoch_at_its_own_rate():
    rng = np.random.default_rng(0)
    data = Examples(rng.random((4, 3), np.float32), np.arange(4) % 2)
    plan = TrainingPlan.of(RECIPE, (1,), round=2, schedule=Schedule("linear", 4))
    assert [plan.rate(epoch) for epoch in range(2)] == pytest.approx([0.375, 0.3125])
    model, by_hand = SoftmaxRegression(3, 2), SoftmaxRegression(3, 2)
    NumpyTrainer(model, RECIPE).fit(data, plan)
    for rate in (0.375, 0.3125):
        _, gradients = by_hand.loss_and_gradients(data.x, data.y)
        for name, weight in by_hand.weights.items():
            weight -= np.float32(rate) * gradients[name]
    for name, weight in by_hand.weights.items():
        np.testing.assert_allclose(model.weights[name], weight, rtol=1e-5)


def test_the_rate_does_not_depend_on_how_much_a_client_has():
    """A client of one example and one of a thousand are at the same rate in the same epoch."""
    of = {size: TrainingPlan.of(RECIPE, (1,), public_size=size, schedule=Schedule("cosine", 9)) for size in (1, 1000)}
    assert [of[1].rate(epoch) for epoch in range(2)] == [of[1000].rate(epoch) for epoch in range(2)]
