"""The event of a round of DP-SGD has the steps that are taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps
from cloister.privacy.mechanisms.selection import ReleaseContext
from cloister.utils.errors import ConfigError, PrivacyError

sizes = st.integers(1, 60)
many = settings(max_examples=100, deadline=None, derandomize=True)


def test_a_way_to_draw_that_there_is_not_is_refused():
    with pytest.raises(ConfigError) as refused:
        LocalSteps(10, 5, 1, sampling="rotating")
    assert str(refused.value) == "batch_sampling must be one of poisson, shuffle; got 'rotating'"


@many
@given(sizes, sizes, st.integers(1, 4))
def test_as_many_poisson_batches_as_the_event_counts(examples, batch_size, epochs):
    steps = LocalSteps(examples, batch_size, epochs)
    event = steps.event(2.0)
    assert isinstance(event, Repeated)
    assert len(list(steps.batches(1))) == event.count == epochs * -(-examples // batch_size)
    assert event.event == Gaussian(2.0, Sampling("bounded-poisson", min(1.0, batch_size / examples)))


@many
@given(sizes, sizes, st.integers(1, 4))
def test_a_shuffled_epoch_has_an_example_at_most_once_and_costs_one_release(examples, batch_size, epochs):
    steps = LocalSteps(examples, batch_size, epochs, "shuffle")
    batches = list(steps.batches(1))
    assert len(batches) == steps.count
    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        taken = np.concatenate(batches[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert len(np.unique(taken)) == len(taken) == min(batch_size, examples) * per_epoch
    assert steps.event(2.0) == Repeated(Gaussian(2.0), epochs)


def test_poisson_batches_have_the_rate_that_is_accounted_for():
    steps = LocalSteps(1000, 100, 40)
    taken = np.array([np.isin(np.arange(1000), batch) for batch in steps.batches(3)])
    assert taken.shape == (400, 1000)
    # 400,000 draws: five standard deviations are 0.0024.
    assert taken.mean() == pytest.approx(steps.rate, abs=0.0024)
    assert len({batch.sum() for batch in taken}) > 20


@pytest.mark.parametrize("kind", ["poisson", "shuffle"])
def test_batches_of_two_rounds_differ_unless_seeded(kind):
    steps = LocalSteps(200, 20, 1, kind)
    first, second = ([batch.tolist() for batch in steps.batches()] for _ in range(2))
    assert first != second
    assert [batch.tolist() for batch in steps.batches(4)] == [batch.tolist() for batch in steps.batches(4)]


def test_a_poisson_epoch_costs_less_than_a_shuffled_one():
    poisson, shuffle = (
        Account([LocalSteps(600, 100, 1, kind).event(4.0)]).epsilon(1e-5) for kind in ("poisson", "shuffle")
    )
    assert poisson < 0.5 * shuffle


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 1, 1), "examples must be > 0, got 0"),
        ((1, 0, 1), "batch_size must be > 0, got 0"),
        ((1, 1, 0), "local_epochs must be > 0, got 0"),
    ],
)
def test_nothing_to_train_on_is_refused(numbers, said):
    with pytest.raises(ConfigError) as refused:
        LocalSteps(*numbers)
    assert str(refused.value) == said


class TestUnitsThatAreThere:
    """The public number of units sets rate and steps; who is drawn are those that are there."""

    def test_are_drawn_from_whatever_number_is_public(self):
        steps = LocalSteps(100, 20, 5)
        for present, expected, kept in ((1000, 1000, 100), (7, 7, 7), (None, 100, 100)):
            batches = list(steps.batches(2, present))
            assert len(batches) == 25 and set(np.concatenate(batches)) <= set(range(expected))
            assert len(set(np.concatenate(batches))) <= kept, "of more units as many as are stated take part in a round"
            assert len(np.concatenate(batches)) == pytest.approx(5 * kept, abs=6 * np.sqrt(4 * kept))

    def test_others_take_part_in_another_round(self):
        rounds = [set(np.concatenate(list(LocalSteps(100, 20, 5).batches(None, 1000)))) for _ in range(2)]
        assert rounds[0] != rounds[1] and max(map(max, rounds)) > 500

    def test_would_show_in_a_shuffled_order(self):
        steps = LocalSteps(10, 5, 1, "shuffle")
        with pytest.raises(PrivacyError) as refused:
            steps.batches(1, 9)
        assert str(refused.value) == (
            "privacy.batch-sampling = 'shuffle' needs a public number of units; use 'poisson'"
        )
        for present in (None, 10):
            assert sorted(np.concatenate(list(steps.batches(1, present)))) == list(range(10))


@many
@given(st.floats(0.1, 10), st.floats(0, 0.9), st.floats(1e-6, 5), st.integers(1, 30))
def test_the_clip_decays_as_the_published_loop_does(high, decay, low, rounds):
    mechanism = LocalDpSgd(1.0, high, decay, low)
    norm = high
    for number in range(1, rounds + 1):
        norm = max(norm, low)
        assert mechanism.clipping_norm_in(number) == pytest.approx(norm, rel=1e-9)
        norm = norm - norm * decay
    assert mechanism.clipping_norm_in(0) == mechanism.clipping_norm_in(1) == max(high, low)


@pytest.mark.parametrize("unit", [{}, {"privacy.group-cap": 3}])
def test_it_tells_its_parameters_by_the_keys_of_the_configuration(unit):
    settings = {
        "privacy.dp-sgd-noise-multiplier": 1.5,
        "privacy.dp-sgd-clipping-norm": 0.4,
        "privacy.clipping-decay": 0.1,
        "privacy.min-clipping-norm": 0.2,
        "privacy.batch-sampling": "shuffle",
    }
    mechanism = LocalDpSgd(1.5, 0.4, 0.1, 0.2, "shuffle", unit.get("privacy.group-cap", 0))
    assert mechanism.parameters() == settings | unit


class TestNothingIsClaimed:
    @pytest.mark.parametrize(
        ("mechanism", "circumstances", "reason"),
        [
            (LocalDpSgd(0.0, 1.0), ReleaseContext(), "dp-sgd-noise-multiplier is 0"),
            (LocalDpSgd(1.0, 1.0), ReleaseContext(seeded=True), "the noise is seeded"),
            (LocalDpSgd(1.0, 1.0), ReleaseContext(hypotheses=2, private=False), "found out without noise"),
        ],
    )
    def test_and_the_reason_is_recorded(self, mechanism, circumstances, reason):
        (event,) = circumstances.events(mechanism.caveats(), pytest.fail)
        assert isinstance(event, Unaccounted) and reason in event.reason

    def test_and_so_are_all_reasons(self):
        events = [
            ReleaseContext(seeded=seeded).events(LocalDpSgd(noise, 1.0).caveats(), pytest.fail)
            for noise, seeded in [(0.0, False), (1.0, True), (0.0, True)]
        ]
        reasons = [event.reason for (event,) in events]
        assert reasons[2] == "; ".join(reasons[:2])

    @pytest.mark.parametrize(("hypotheses", "choices"), [(1, ()), (3, (Pure(0.5),))])
    def test_but_with_noise_it_is_and_so_is_a_private_choice(self, hypotheses, choices):
        circumstances, event = (
            ReleaseContext(hypotheses=hypotheses, choice_epsilon=0.5),
            LocalSteps(10, 5, 1).event(1.0),
        )
        assert circumstances.events([], lambda: [event]) == (event, *choices)


def test_batches_whose_roundings_are_not_bounded_are_refused():
    """The server chooses the size of a batch; only public numbers decide."""
    with pytest.raises(ConfigError) as refused:
        LocalSteps(65537, 65537, 1)
    assert str(refused.value) == "client.batch-size must be at most 65536 with DP-SGD, got 65537"
    assert LocalSteps(65536, 10**6, 1).rate == 1 and LocalSteps(10**6, 65536, 1).count == 16
