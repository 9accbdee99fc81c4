"""What a client sends under `privacy.client = 'laplace'`: noise of the right size, counted first, and nothing else."""

import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from scipy import stats
from support import random_models, zeros

from cloister.client import books
from cloister.client import sanitise as subject
from cloister.client.books import books_of
from cloister.client.leakage import InContext
from cloister.client.mods import contain_errors
from cloister.client.sanitise import released, sanitise
from cloister.core.arrays import from_record, to_record
from cloister.core.config import PrivacyConfig
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.core.hypotheses import stacked
from cloister.core.identity import assume_run
from cloister.privacy.events import Laplace, Unaccounted
from cloister.privacy.laplace import LaplaceNoise

FALSE_ALARM = 1e-9
NU = 5.0
LAPLACE = {"privacy.server": "laplace-clustering", "privacy.client": "laplace", "privacy.client-noise-multiplier": NU}
START = zeros()
P = sum(array.size for array in START.values())


def moved(by, like=START):
    """A model at this distance, all of it in the kernel."""
    trained = {name: array.copy() for name, array in like.items()}
    trained["kernel"].reshape(-1)[0] += by
    return trained


def context_of(settings=LAPLACE, node=None):
    return Context(1, 1, dict(node or {}), RecordDict(), dict(settings))


def message_of(models=(START,), kind="train", number=3):
    assume_run()
    config = {"server-round": number, "seed": 1} | ({"hypotheses": len(models)} if len(models) > 1 else {})
    arrays = stacked(models) if len(models) > 1 else models[0]
    return Message(RecordDict({"arrays": to_record(arrays), "config": ConfigRecord(config)}), 1, kind)


def reply_to(message, trained, **metrics):
    content = RecordDict({"arrays": to_record(trained), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


def sent_by(trained, context=None, models=(START,), **metrics):
    message = message_of(models)
    return sanitise(message, context or context_of(), lambda *_: reply_to(message, trained, **metrics))


class Counting(InContext):
    """Keeps the events."""

    def __init__(self):
        super().__init__(context_of())
        self.events = []

    def release(self, event, run, server_round):
        self.events.append(event)
        super().release(event, run, server_round)


def released_once(trained, noise=None, start=START, **privacy):
    spending = Counting()
    config = PrivacyConfig(client="laplace", server="none", **({"client_noise_multiplier": NU} | privacy))
    return released(trained, start, config, noise or LaplaceNoise(1), spending, ("run", 1)), spending


class TestScale:
    @pytest.mark.parametrize("norm", [1e-3, 1.0, 250.0])
    def test_epsilon_is_p_over_nu_times_the_norm(self, norm):
        _, spending = released_once(moved(norm))
        (event,) = spending.events
        assert (event.epsilon, event.radius) == pytest.approx((P / (NU * norm), norm), rel=1e-6)
        assert spending.spent == pytest.approx(P / NU)

    def test_the_norm_is_over_all_arrays(self):
        trained = {name: array + 1 for name, array in START.items()}
        (event,) = released_once(trained)[1].events
        assert event.radius == pytest.approx(math.sqrt(P))

    def test_a_fixed_radius_does_not_look_at_the_update(self):
        for norm in (0.0, 1.0, 100.0):
            _, spending = released_once(moved(norm), radius=2.5)
            assert spending.events == [Laplace(P / (NU * 2.5), 2.5)]

    def test_every_array_has_its_own_radius_where_that_is_asked_for(self):
        trained = {"kernel": START["kernel"] + 2, "bias": START["bias"] - 1}
        _, spending = released_once(trained, per_layer=True)
        sizes = {name: array.size for name, array in START.items()}
        expected = [
            Laplace(sizes["kernel"] / (NU * 2 * math.sqrt(sizes["kernel"])), 2 * math.sqrt(sizes["kernel"])),
            Laplace(sizes["bias"] / (NU * math.sqrt(sizes["bias"])), math.sqrt(sizes["bias"])),
        ]
        for event, wanted in zip(spending.events, expected, strict=True):
            assert (event.epsilon, event.radius) == pytest.approx((wanted.epsilon, wanted.radius))
        assert spending.spent == pytest.approx(P / NU)

    def test_a_model_that_did_not_move_is_sent_as_it_came_and_costs_nothing(self):
        sent, spending = released_once(moved(0.0))
        assert spending.events == [] and spending.spent == 0
        for name, array in sent.items():
            np.testing.assert_array_equal(array, START[name])

    def test_an_array_that_did_not_move_is_sent_as_it_came_beside_one_that_did(self):
        sent, spending = released_once(moved(3.0), per_layer=True)
        np.testing.assert_array_equal(sent["bias"], START["bias"])
        assert len(spending.events) == 1 and (sent["kernel"] != moved(3.0)["kernel"]).any()

    def test_without_noise_nothing_is_changed_and_nothing_is_promised(self):
        sent, spending = released_once(moved(3.0), client_noise_multiplier=0.0)
        np.testing.assert_array_equal(sent["kernel"], moved(3.0)["kernel"])
        assert spending.spent == math.inf

    def test_distances_are_of_double_precision_and_leave_memory_alone(self):
        rng = np.random.default_rng(0)
        one = {"a": rng.standard_normal((300, 257)).astype(np.float32), "b": np.zeros(3, np.float32)}
        other = {"a": one["a"] + np.float32(1e-3), "b": np.ones(3, np.float32)}
        exact = math.sqrt(sum(np.square(one[n].astype(float) - other[n].astype(float)).sum() for n in one))
        assert subject.distance(list(one), one, other) == pytest.approx(exact, rel=1e-12)


class TestNoise:
    """The radius of the noise is Gamma(p, ν‖δ‖/p); twins with less or more of it are told from it."""

    DRAWS = 4000

    def radii(self, norm=2.0, **privacy):
        noise, spending = LaplaceNoise(7), Counting()
        config = PrivacyConfig(client="laplace", server="none", **({"client_noise_multiplier": NU} | privacy))
        trained = moved(norm)
        return np.array(
            [
                subject.distance(START, released(trained, START, config, noise, spending, ("run", 1)), trained)
                for _ in range(self.DRAWS)
            ]
        )

    def fits(self, radii, norm=2.0):
        return stats.kstest(radii, stats.gamma(P, scale=NU * norm / P).cdf).pvalue > FALSE_ALARM

    def test_its_law(self):
        assert self.fits(self.radii())

    def test_its_law_with_a_fixed_radius(self):
        assert self.fits(self.radii(norm=0.0, radius=2.0))

    @pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
    def test_other_noise_is_told_from_it(self, factor):
        assert not self.fits(self.radii(client_noise_multiplier=NU * factor))

    def test_a_twin_that_measures_from_the_noised_model_is_told_from_it(self, monkeypatch):
        monkeypatch.setattr(subject, "distance", lambda names, one, other: 0.5 * 2.0)
        assert not self.fits(self.radii())

    def test_every_array_has_its_own_draw_per_layer(self):
        noise, spending = LaplaceNoise(7), Counting()
        config = PrivacyConfig(client="laplace", server="none", client_noise_multiplier=NU, per_layer=True)
        trained = {name: array + np.float32(1) for name, array in START.items()}
        draws = [released(trained, START, config, noise, spending, ("run", 1)) for _ in range(self.DRAWS)]
        lengths = {
            name: np.array([np.linalg.norm((sent[name] - trained[name]).astype(float)) for sent in draws])
            for name in START
        }
        for name, radii in lengths.items():
            p = START[name].size
            assert stats.kstest(radii, stats.gamma(p, scale=NU * math.sqrt(p) / p).cdf).pvalue > FALSE_ALARM
        assert abs(stats.pearsonr(*lengths.values()).statistic) < 6 / math.sqrt(self.DRAWS)


class TestReply:
    def test_it_is_noised_arrays_and_nothing_else(self):
        models = random_models(2)
        message = message_of(models)

        def leaky(*_):
            reply = reply_to(message, moved(1.0, models[1]), hypothesis=1, loss=0.5, **{"num-examples": 17})
            reply.content["notes"] = ConfigRecord({"hospital": "north", "cluster": 1})
            reply.content["raw"] = to_record(moved(1.0, models[1]))
            reply.content["more"] = MetricRecord({"loss": 0.5})
            return reply

        content = sanitise(message, context_of(), leaky).content
        assert set(content) == {"arrays", "metrics"} and not dict(content["metrics"])
        assert list(content["arrays"]) == list(models[0])
        assert all(content["arrays"][name].shape == array.shape for name, array in models[0].items())
        assert not np.array_equal(from_record(content["arrays"])["bias"], models[1]["bias"])

    def test_the_distance_is_from_the_hypothesis_that_was_trained(self, monkeypatch):
        models = [START, moved(100.0)]
        context, events = context_of(), []
        keep = lambda self, event, *where: events.append(event.radius) or count(self, event, *where)  # noqa: E731
        count = InContext.release
        monkeypatch.setattr(InContext, "release", keep)
        sent_by(moved(0.5, models[1]), context, models, hypothesis=1)
        assert dict(context.state["leakage"])["spent"] == pytest.approx(P / NU)
        assert events == [pytest.approx(0.5)]

    @pytest.mark.parametrize("metrics", [{}, {"hypothesis": 2}, {"hypothesis": -1}, {"hypothesis": 0.0}])
    def test_a_trainer_that_does_not_say_where_it_began_releases_nothing(self, metrics):
        context = context_of()
        with pytest.raises(PrivacyError, match="nothing is released"):
            sent_by(moved(1.0), context, [START, moved(100.0)], **metrics)
        assert dict(context.state["leakage"])["spent"] == 0

    @pytest.mark.parametrize(
        "trained",
        [
            moved(1.0) | {"secret": np.ones(3, np.float32)},
            {"kernel": START["kernel"]},
            moved(1.0) | {"bias": np.ones(4, np.float32)},
        ],
        ids=["one more", "one less", "another shape"],
    )
    @pytest.mark.parametrize("radius", [0.0, 1.0])
    def test_other_arrays_than_were_sent_are_refused(self, trained, radius):
        with pytest.raises(PrivacyError, match="not those that training began with"):
            sent_by(trained, context_of(LAPLACE | {"privacy.radius": radius}))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("radius", [0.0, 1.0])
    def test_a_model_that_has_diverged_is_not_released_nor_counted(self, bad, radius):
        context = context_of(LAPLACE | {"privacy.radius": radius})
        with pytest.raises(PrivacyError, match="diverged"):
            sent_by(moved(bad), context)
        assert dict(context.state["leakage"])["spent"] == 0

    def test_the_models_at_hand_are_left_alone(self):
        trained = moved(1.0)
        sent_by(trained)
        np.testing.assert_array_equal(trained["kernel"], moved(1.0)["kernel"])

    def test_an_error_passes(self):
        message = message_of()
        reply = contain_errors(message, context_of(), lambda *_: 1 / 0)
        assert sanitise(message, context_of(), lambda *_: reply) is reply

    def test_other_runs_are_left_alone(self):
        message = message_of()
        reply = reply_to(message, moved(1.0), loss=0.5)
        assert sanitise(message, context_of({"privacy.server": "none"}), lambda *_: reply) is reply


class TestBooks:
    @pytest.fixture
    def node(self, tmp_path):
        return {"data-identity": "ward", "ledger-dir": str(tmp_path)}

    def ledger(self, node):
        return books_of(node, "digits", "").ledger

    def test_a_release_is_on_disk_before_its_noise_is_drawn(self, node, monkeypatch):
        seen = []

        def look(self_, model, epsilon, step=None):
            seen.append(epsilon)
            lines = [path.read_text() for path in Path(node["ledger-dir"]).glob("*.jsonl")]
            assert len(lines) == 1 and '"laplace"' in lines[0]

        monkeypatch.setattr(LaplaceNoise, "add", look)
        sent_by(moved(2.0), context_of(node=node))
        assert len(seen) == 1
        (entry,) = self.ledger(node).entries
        assert entry.unit == "neighbourhood" and entry.round == 3
        assert entry.event.leakage == pytest.approx(P / NU) and entry.event.radius == pytest.approx(2.0)

    def test_noise_that_fails_has_been_counted(self, node, monkeypatch):
        def fail(*_):
            raise PrivacyError("no noise")

        monkeypatch.setattr(LaplaceNoise, "add", fail)
        with pytest.raises(PrivacyError, match="no noise"):
            sent_by(moved(2.0), context_of(node=node))
        assert self.ledger(node).leakage() == pytest.approx(P / NU)

    def test_leakage_adds_up_and_survives_a_restart(self, node):
        for _ in range(3):
            sent_by(moved(1.0), context_of(node=node))
            books._ledger.cache_clear()
        assert self.ledger(node).leakage() == pytest.approx(3 * P / NU)

    @pytest.mark.parametrize(
        ("run", "own", "releases"), [(2.5, 0.0, 2), (0.0, 2.5, 2), (9.5, 1.5, 1), (1.5, 9.5, 1), (3.0, 0.0, 3)]
    )
    def test_the_smaller_limit_wins_to_the_last_release(self, node, run, own, releases):
        """In releases; a limit of three of them allows three, whatever adding up rounds."""
        settings = LAPLACE | {"privacy.max-leakage": run * P / NU}
        node = node | ({"max-leakage": own * P / NU} if own else {})
        trained = []

        def train(message, context):
            trained.append(1)
            return reply_to(message, moved(1.0))

        for number in range(5):
            message = message_of(number=number)
            if number < releases:
                assert not sanitise(message, context_of(settings, node), train).has_error()
            else:
                with pytest.raises(BudgetExhausted) as refusal:
                    sanitise(message, context_of(settings, node), train)
                assert not any(digit in str(refusal.value) for digit in "0123456789")
        assert len(trained) == releases and len(self.ledger(node).entries) == releases

    def test_a_limit_holds_against_another_process(self, node):
        """What was released elsewhere while this client trained counts."""
        settings = LAPLACE | {"privacy.max-leakage": 1.5 * P / NU}

        def slow(message, context):
            sent_by(moved(1.0), context_of(LAPLACE, node))
            return reply_to(message, moved(1.0))

        with pytest.raises(BudgetExhausted):
            sanitise(message_of(), context_of(settings, node), slow)
        assert len(self.ledger(node).entries) == 1

    def test_after_a_release_without_noise_no_limit_can_be_kept(self, node):
        sent_by(moved(1.0), context_of(LAPLACE | {"privacy.client-noise-multiplier": 0.0}, node))
        assert self.ledger(node).leakage() == math.inf
        with pytest.raises(BudgetExhausted):
            sent_by(moved(1.0), context_of(LAPLACE | {"privacy.max-leakage": 1e9}, node))

    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            ("train", {"privacy.server": "none"}),
            ("train", {"privacy.server": "global-dp"}),
            ("train", LAPLACE | {"privacy.client-noise-multiplier": 0.0}),
            ("evaluate", LAPLACE | {"evaluation.held-out-clients": 0.5}),
        ],
    )
    def test_a_node_with_a_limit_takes_part_in_nothing_without_this_noise(self, node, kind, settings):
        message = message_of(kind=kind)
        with pytest.raises(BudgetExhausted):
            sanitise(message, context_of(settings, node | {"max-leakage": 100.0}), lambda *_: pytest.fail("took part"))

    @pytest.mark.parametrize("limit", [-1.0, "much", True, math.inf, math.nan])
    def test_a_limit_that_is_none(self, node, limit):
        with pytest.raises(ConfigError, match="max-leakage"):
            sent_by(moved(1.0), context_of(node=node | {"max-leakage": limit}))

    def test_a_limit_makes_a_node_keep_books(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cloister.client.books.DEFAULT_FOLDER", str(tmp_path))
        sent_by(moved(1.0), context_of(node={"max-leakage": 100.0}))
        assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_noise_that_is_to_be_repeated_differs_between_clients_and_rounds():
    settings = LAPLACE | {"privacy.noise-seed": 4}

    def bias(owner, number):
        message = message_of(number=number)
        context = context_of(settings, {"partition-id": owner, "num-partitions": 9})
        return tuple(
            from_record(sanitise(message, context, lambda *_: reply_to(message, moved(1.0))).content["arrays"])["bias"]
        )

    assert bias(0, 1) == bias(0, 1)
    assert len({bias(0, 1), bias(1, 1), bias(0, 2)}) == 3


def test_the_record_is_of_flowers_kind():
    assert isinstance(sent_by(moved(1.0)).content["arrays"], ArrayRecord)


class TestWhatAServerMightAsk:
    def test_seeded_noise_counts_as_none(self, tmp_path):
        node = {"ledger-dir": str(tmp_path), "data-identity": "mine"}
        settings = LAPLACE | {"privacy.noise-seed": 7}
        sent_by(moved(1.0), context_of(settings, node))
        (entry,) = books_of(node, "digits", "").ledger.entries
        assert isinstance(entry.event, Unaccounted) and "seeded" in entry.event.reason

    def test_nor_does_it_fit_into_any_limit(self, tmp_path):
        node = {"ledger-dir": str(tmp_path), "data-identity": "mine", "max-leakage": 1e9}
        with pytest.raises(BudgetExhausted):
            sent_by(moved(1.0), context_of(LAPLACE | {"privacy.noise-seed": 7}, node))

    @pytest.mark.parametrize(("radius", "least", "allowed"), [(1e-6, 0, False), (1.0, 2.0, False), (2.0, 2.0, True)])
    def test_a_radius_is_of_the_nodes_choosing_where_it_has_a_limit(self, tmp_path, radius, least, allowed):
        node = {"ledger-dir": str(tmp_path), "data-identity": "mine", "max-leakage": 1e9}
        context = context_of(LAPLACE | {"privacy.radius": radius}, node | ({"min-radius": least} if least else {}))
        if allowed:
            assert not sent_by(moved(1.0), context).has_error()
        else:
            with pytest.raises(PrivacyError, match="min-radius"):
                sent_by(moved(1.0), context)

    def test_without_a_limit_any_radius_will_do(self):
        assert not sent_by(moved(1.0), context_of(LAPLACE | {"privacy.radius": 1e-6})).has_error()
