"""Replies that are added up as they come: the same model, bit for bit, the same verdicts, and nothing that is kept."""

import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message
from flwr.common.constant import ErrorCode
from support import all_nodes, content, failures, flat, grid_of, one_round, random_models
from test_clipping import cohort_of

from cloister.privacy.mechanisms.clipping import AdaptiveClip, clip
from cloister.privacy.mechanisms.gaussian import GaussianMean, global_dp
from cloister.privacy.mechanisms.grid import Adder, Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import Total, noisy_mean, noisy_total
from cloister.server import screening
from cloister.server.canaries import Canaries
from cloister.server.private_strategy import GlobalDP, MetricDP, PrivateStrategy
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import to_record
from cloister.utils.errors import ConfigError, PrivacyError

SENT, *MODELS = random_models(24, 0.1)


def strategy(**options):
    return GlobalDP(all_nodes(), **{"noise_multiplier": 0.7, "clipping_norm": 0.5, "noise": GaussianNoise(3)} | options)


OPTIONS = {
    "fixed": dict,
    "adaptive": lambda: {"clipping_norm": AdaptiveClip(0.5)},
    "weighted": lambda: {"examples_cap": 12.0},
    "much noise": lambda: {"noise_multiplier": 1e5},
    "little noise": lambda: {"noise_multiplier": 1e-4},
}


@pytest.fixture(params=[1, 5])
def few(request, monkeypatch):
    """Return the number of replies that are added up at once."""
    size = sum(array.size for array in SENT.values())
    monkeypatch.setattr(screening, "NUMBERS_AT_ONCE", request.param * size)
    monkeypatch.setattr(screening, "TOGETHER", 0)
    return request.param


def played(made, order=None):
    """Three rounds, in which replies come in some order."""
    arrays = SENT
    for number in (1, 2, 3):
        models = MODELS if order is None else [MODELS[i] for i in order]
        counts = range(1, 24) if order is None else [i + 1 for i in order]
        grid = grid_of(lambda node, _: content(models[node - 1], counts[node - 1]), len(models))  # noqa: B023
        arrays = one_round(made, grid, arrays, number)[0]
        arrays = {name: array.numpy() for name, array in arrays.items()}
    return np.concatenate([array.ravel() for array in arrays.values()]), made


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_model_is_that_of_all_replies_together(options, few, monkeypatch):
    streamed, made = played(strategy(**options()))
    turned, _ = played(strategy(**options()), np.random.default_rng(1).permutation(23).tolist())
    monkeypatch.setattr(GaussianMean, "intake", lambda *_: None)
    together, other = played(strategy(**options()))
    np.testing.assert_array_equal(streamed, together)
    np.testing.assert_array_equal(turned, together)
    assert made.measured == other.measured and made.mechanism == other.mechanism


def odd_replies(messages):
    """Return possible replies: an error, NaN, one node twice, a stranger, other shapes, no count, silence."""

    def reply(message, model=MODELS[0], count=3):
        return Message(content(model, count), reply_to=message)

    stranger = reply(messages[0])
    stranger.metadata.__dict__["_src_node_id"] = 77
    return [
        reply(messages[0]),
        Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=messages[1]),
        reply(messages[2], {**MODELS[1], "bias": np.full(3, np.nan, np.float32)}),
        reply(messages[3], MODELS[2]),
        reply(messages[3], MODELS[3]),
        stranger,
        reply(messages[4], {**MODELS[1], "bias": np.zeros(4, np.float32)}),
        reply(messages[5], count=-1),
        reply(messages[6], {**MODELS[1], "bias": np.full(3, 1e30, np.float32)}),
        reply(messages[8], MODELS[4], 7),
    ]


def test_the_same_replies_are_rejected_for_the_same_reasons(few, monkeypatch):
    def judged():
        made = strategy()
        messages = list(made.configure_train(1, to_record(SENT), ConfigRecord(), grid_of(None, 9)))
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        arrays, _ = made.aggregate_train(1, iter(odd_replies(messages)))
        return made.measured, flat(arrays)

    streamed, model = judged()
    monkeypatch.setattr(GaussianMean, "intake", lambda *_: None)
    together, other = judged()
    codes = ["error", "non-finite", "duplicate", "shape", "weight", "non-finite", "missing", "missing", "unsolicited"]
    assert streamed == together and streamed.accepted == 3
    assert sorted(each.code for each in streamed.rejected) == sorted(codes[:7] + codes[8:])
    np.testing.assert_array_equal(model, other)


def test_replies_are_not_kept(few):
    made, seen, most = strategy(), [], 0
    grid = grid_of(lambda node, _: content({name: array + node for name, array in SENT.items()}), 60)
    messages = list(made.configure_train(1, to_record(SENT), ConfigRecord(), grid))

    def watched():
        nonlocal most
        for reply in grid.send_and_receive(messages):
            seen.append(weakref.ref(reply.content["arrays"]["kernel"].numpy().base))
            most = max(most, sum(each() is not None for each in seen))
            yield reply

    received = made.receive(watched())
    assert len(received.cohort) == 60 and not received.cohort.rows and not received.accepted
    # The first few are kept until others come: a round of few is released in the pass that adds them.
    assert most <= 2 * few
    assert made.aggregate_train(1, received)[0] is not None


def test_replies_that_are_held_already_are_added_up_at_once(few, monkeypatch):
    taken = []
    monkeypatch.setattr(Total, "add", lambda total, cohort: taken.append(len(cohort)))
    made, grid = strategy(), grid_of(lambda node, _: content(MODELS[node]), 10)
    for held, parts in ((list, [10]), (iter, [few] * (10 // few))):
        messages = list(made.configure_train(1, to_record(SENT), ConfigRecord(), grid))
        made.receive(held(grid.send_and_receive(messages)))
        assert taken == parts
        taken.clear()


MECHANISM = global_dp(noise_multiplier=1.0, clipping_norm=1.0)
KEPT = {
    "a distance": lambda: MetricDP(all_nodes(), noise_multiplier=1.0, clipping_norm=1.0),
    "a median": lambda: GlobalDP(all_nodes(FedMedian), noise_multiplier=1.0, clipping_norm=1.0, placement="rule"),
    "what a strategy makes of all": lambda: strategy(placement="model"),
    "canaries": lambda: PrivateStrategy(all_nodes(), MECHANISM, canaries=Canaries.drawn(4, seed=1)),
}


def test_what_has_to_see_all_replies_does():
    def check(make):
        made = make()
        grid = grid_of(lambda node, _: content(MODELS[node]), 5)
        messages = list(made.configure_train(1, to_record(SENT), ConfigRecord(), grid))
        received = made.receive(grid.send_and_receive(messages))
        assert received.intake is None and len(received.cohort.rows) == len(received.accepted) == 5

    assert failures(KEPT.values(), check) == []


def test_no_reply_at_all_is_noise(few):
    made = strategy(noise_multiplier=2.0)
    grid = grid_of(lambda node, _: content({**SENT, "bias": np.full(3, np.nan, np.float32)}), 4)
    arrays, _ = one_round(made, grid, SENT)
    assert made.measured.accepted == 0 and (flat(arrays) != np.concatenate([a.ravel() for a in SENT.values()])).all()


class TestTotal:
    """A sum in parts."""

    def cohort(self):
        return clip(cohort_of(MODELS, SENT), 0.5)

    def parts(self, cohort, size, z=0.7):
        grid = Grid.of(0.5, z, len(cohort))
        total = Total(grid, cohort.layout, cohort.sent)
        for start in range(0, len(cohort), size):
            total.add(cohort.take(np.arange(start, min(start + size, len(cohort)))))
        return np.concatenate(noisy_total(total, z, 9, GaussianNoise(1)).model)

    @pytest.mark.usefixtures("poisoned_memory")
    def test_is_that_of_the_whole(self):
        def check(size):
            cohort = self.cohort()
            whole = np.concatenate(noisy_mean(cohort, 0.7, 9, GaussianNoise(1)).model)
            np.testing.assert_array_equal(self.parts(cohort, size), whole)

        assert failures([1, 2, 7, 22, 23], check) == []

    def test_a_part_with_a_contribution_that_is_too_long_is_added_once(self):
        """It is taken back to the last bit, however long it was, and added with that contribution shortened."""
        cohort, factors = self.cohort(), np.ones(23)

        def check(factor, z, size):
            factors[[3, 11, 22]] = factor
            long = replace(cohort, factors=cohort.factors * factors)
            whole = np.concatenate(noisy_mean(long, z, 9, GaussianNoise(1)).model)
            np.testing.assert_array_equal(self.parts(long, size, z), whole)
            far = np.linalg.norm(whole - self.parts(cohort, size, z))
            assert 0 < far < 3 * 2 * 0.5 / 9

        assert failures(product([1.001, 40.0, 1e20, np.nan], [0.7, 0.0], [1, 4, 23]), check) == []

    def test_a_part_that_is_not_taken_back_shows(self, monkeypatch):
        cohort = self.cohort()
        long = replace(cohort, factors=cohort.factors * 1.001)
        right, add_up = self.parts(long, 4), Adder.add_up
        monkeypatch.setattr(Adder, "add_up", lambda *given: None if given[6:] == (-1,) else add_up(*given))
        assert (self.parts(long, 4) != right).any()

    @pytest.mark.usefixtures("poisoned_memory")
    def test_sums_that_leave_narrow_integers_are_exact(self):
        """A number is a share of the bound such that 124 of them fill 32 bits."""

        def check(size):
            cohort = clip(cohort_of([{name: array - np.sign(array) for name, array in SENT.items()}] * 200, SENT), 0.5)
            total = Total(Grid.of(0.5, 0.0626, len(cohort)), cohort.layout, cohort.sent)
            for start in range(0, len(cohort), size):
                total.add(cohort.take(np.arange(start, start + size)))
            alone = Total(total.grid, cohort.layout, cohort.sent)
            alone.add(cohort.take(np.array([0])))
            assert np.abs(alone.whole()).min() * 125 > 1 << 31
            np.testing.assert_array_equal(total.whole(), 200 * alone.whole())

        assert failures([1, 50, 200], check) == []

    def test_less_noise_than_is_asked_for_is_refused(self):
        """As of a mechanism that decides in its release how much noise there is, when the sum is made already."""
        cohort = self.cohort()
        total = Total(Grid.of(0.5, 0.7, 23), cohort.layout, cohort.sent)
        with pytest.raises(PrivacyError) as refused:
            noisy_total(total, 0.8, 9, GaussianNoise(1))
        assert str(refused.value) == "more noise was asked for than the sum was made for: its grid has less"
        with pytest.raises(ConfigError) as refused:
            noisy_total(total, 0.7, 0, GaussianNoise(1))
        assert str(refused.value) == "cohort_size must be > 0, got 0"

    def test_a_part_that_is_lost_shows(self, monkeypatch):
        right = self.parts(self.cohort(), 7)
        monkeypatch.setattr(Total, "add", lambda total, cohort: setattr(total, "_first", cohort))
        assert (self.parts(self.cohort(), 7) != right).any()
