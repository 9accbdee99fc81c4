"""Noise on what a client sends: counted first, within the node's limits, and nothing else of the reply leaves."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from asking import (
    CHOICE,
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    LAPLACE,
    MECHANISMS,
    OPEN,
    SOFTMAX,
    P,
    answer,
    arrays_of,
    context_of,
    entries_of,
    ledger_of_node,
    message_of,
    node_at,
    request_of_kind,
)
from support import failures

from cloister.client import ledgers
from cloister.client import noise as subject
from cloister.client.app import app
from cloister.client.noise import add_local_noise, count_leakage, limit_leakage
from cloister.client.request import EvaluateRequest, KeepRequest, Reply
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import parse
from cloister.privacy.accounting.events import Laplace, Unaccounted
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import BudgetExhausted, ConfigError, PrivacyError

NU = 5.0
NOISED = {"gaussian": GAUSSIAN, "published": LAPLACE, "laplace": LAPLACE | {"privacy.radius": 1.0}}
CHOOSING = LAPLACE | CHOICE | {"privacy.radius": 1.0}
EXACT = {k: v for k, v in CHOOSING.items() if k != "privacy.choice-epsilon"} | {"privacy.choice": "exact"}
TOLD = {"num-examples": 17, "train-loss": 0.5}


def moved(by, like=SOFTMAX):
    """A model at this distance, all of it in one parameter."""
    trained = {name: array.copy() for name, array in like.items()}
    trained["softmax/kernel"].reshape(-1)[0] += np.float32(by)
    return trained


def released(request, node, train):
    """Pass the steps that limit leakage, train and add the noise, as if nothing lay between them."""
    limit_leakage(request, node)
    count_leakage(request, node)
    return add_local_noise(train(request, node), request, node)


def sent_by(trained, settings=LAPLACE, node=None, models=(SOFTMAX,), chosen=0, number=3):
    request = request_of_kind(settings=settings, models=models, number=number)
    return released(request, node_at(settings, node), lambda *_: Reply(trained, TOLD, chosen))


def distance(one, other):
    return math.sqrt(sum(np.square(one[name].astype(float) - other[name]).sum() for name in one))


class TestWhichMechanism:
    def test_by_the_configuration(self):
        def check(settings, expected):
            assert parse(settings).privacy.client.noise_on_update == expected

        cases = [
            (OPEN, None),
            (DP_SGD, None),
            (GAUSSIAN | {"privacy.gaussian-clipping-norm": 3.0}, LocalGaussian(3.0, 2.0)),
            (LAPLACE, PublishedLaplace(NU)),
            (LAPLACE | {"privacy.per-layer": True}, PublishedLaplace(NU, True)),
            (LAPLACE | {"privacy.radius": 2.0}, LocalLaplace(2.0, NU)),
            (LAPLACE | {"privacy.radius": 2.0, "privacy.per-layer": True}, LocalLaplace(2.0, NU, True)),
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("name", ["gaussian", "laplace"])
    def test_a_bounded_update_has_no_caveats_but_those_of_the_run(self, name):
        def caveats(**changes):
            base = {"client": name, "server": "none", "radius": 1.0 if name == "laplace" else 0.0}
            privacy = PrivacyConfig(**(base | changes))
            return [*privacy.client.noise_on_update.caveats(), *privacy.circumstances.caveats()]

        assert caveats() == []
        assert "seeded" in caveats(noise_seed=3)[0]
        assert "no noise" in caveats(**{f"{name}_noise_multiplier": 0.0})[0]
        assert caveats(server="laplace-clustering") == []
        assert "privacy.choice is 'exact'" in caveats(server="laplace-clustering", choice="exact")[0]
        assert caveats(server="laplace-clustering", choice="exact", clusters=1) == []


class TestTheReply:
    def test_it_is_noised_arrays_and_nothing_else(self):
        def check(name):
            reply = sent_by(moved(1.0), NOISED[name])
            assert reply.metrics == {} and reply.chosen == 0 and list(reply.arrays) == list(SOFTMAX)
            for key, array in SOFTMAX.items():
                assert (reply.arrays[key].shape, reply.arrays[key].dtype) == (array.shape, array.dtype)
            assert distance(reply.arrays, moved(1.0)) > 0 and distance(reply.arrays, SOFTMAX) > 0

        assert failures([(name,) for name in NOISED], check) == []

    @pytest.mark.parametrize("name", ["gaussian", "laplace"])
    def test_an_update_of_any_length_is_bounded(self, name):
        """Noise without its randomness: 10³⁰ and 10 come to the same place, C or R from the start."""
        settings = NOISED[name] | {f"privacy.{name}-noise-multiplier": 1e-5, "privacy.noise-seed": 1}
        settings |= {"privacy.radius": 3.0} if name == "laplace" else {"privacy.gaussian-clipping-norm": 3.0}
        for length in (10.0, 1e30):
            assert distance(sent_by(moved(length), settings).arrays, SOFTMAX) == pytest.approx(3.0, rel=1e-2)

    @pytest.mark.parametrize("name", ["gaussian", "laplace"])
    def test_the_distance_is_from_the_hypothesis_that_was_trained(self, name):
        settings = NOISED[name] | {"privacy.server": "laplace-clustering", f"privacy.{name}-noise-multiplier": 1e-5}
        models = [SOFTMAX, moved(100.0)]
        sent = sent_by(moved(100.5), settings, models=models, chosen=1).arrays
        assert distance(sent, models[1]) == pytest.approx(0.5, rel=0.01)

    def test_how_much_noise(self):
        """Gaussian: over 650 parameters within 20 % is 7 standard errors. Laplace: its length is Gamma of mean ν·R."""
        assert distance(sent_by(moved(0), GAUSSIAN).arrays, SOFTMAX) / math.sqrt(P) == pytest.approx(2.0, rel=0.2)
        settings = LAPLACE | {"privacy.radius": 2.0}
        assert distance(sent_by(moved(0), settings).arrays, SOFTMAX) == pytest.approx(2.0 * NU, rel=0.3)

    def test_noise_that_is_to_be_repeated_is_of_one_node_and_one_round(self):
        """Two replies with the same noise would give away the difference of their updates."""
        settings, node = GAUSSIAN | {"privacy.noise-seed": 5}, {"data-path": "anywhere"}

        def sent(configured, node_id, number):
            request = request_of_kind(settings=settings, number=number)
            here = node_at(settings, configured, node_id)
            return released(request, here, lambda *_: Reply(moved(1.0))).arrays["softmax/kernel"].tobytes()

        asked = [(node, 1, 1), (node, 2, 1), (node, 1, 2), ({"partition-id": 0}, 1, 1), ({"partition-id": 3}, 1, 1)]
        assert len({sent(*asking) for asking in asked}) == len(asked)
        assert sent({"partition-id": 3}, 1, 1) == sent({"partition-id": 3}, 9, 1)
        assert sent(node, 1, 1) == sent(node, 1, 1)

    def test_memory_order_does_not_take_the_noise_away(self):
        def check(name):
            trained = moved(1.0)
            trained["softmax/kernel"] = np.asfortranarray(trained["softmax/kernel"])
            sent = sent_by(trained, NOISED[name]).arrays
            assert (sent["softmax/kernel"] != trained["softmax/kernel"]).mean() > 0.99

        assert failures([(name,) for name in NOISED], check) == []

    def test_the_models_at_hand_are_left_alone(self):
        def check(name):
            trained = moved(1.0)
            sent_by(trained, NOISED[name])
            np.testing.assert_array_equal(trained["softmax/kernel"], moved(1.0)["softmax/kernel"])

        assert failures([(name,) for name in NOISED], check) == []

    def test_other_runs_are_left_alone(self):
        def check(settings):
            trained = moved(1.0)
            assert sent_by(trained, settings) == Reply(trained, TOLD)

        assert failures([(settings,) for settings in [OPEN, GLOBAL, DP_SGD]], check) == []

    @pytest.mark.parametrize("kind", [EvaluateRequest, KeepRequest])
    def test_other_messages_are_left_alone(self, kind):
        reply = Reply(metrics={"loss": 0.5})
        request = request_of_kind(kind, LAPLACE)
        assert released(request, node_at(LAPLACE), lambda *_: reply) is reply


class TestEntropy:
    def test_noise_that_is_to_be_repeated_differs_between_clients_and_rounds(self):
        settings = LAPLACE | {"privacy.noise-seed": 4}

        def bias(owner, number):
            node = {"partition-id": owner, "num-partitions": 9}
            return tuple(sent_by(moved(1.0), settings, node, number=number).arrays["softmax/bias"])

        assert bias(0, 1) == bias(0, 1)
        assert len({bias(0, 1), bias(1, 1), bias(0, 2)}) == 3

    def test_other_noise_never_repeats(self):
        assert len({sent_by(moved(1.0), GAUSSIAN).arrays["softmax/bias"].tobytes() for _ in range(3)}) == 3


class TestLeakage:
    """Return the leakage of a Laplace release within its radius, against the node's limit and the run's."""

    @pytest.fixture
    def node(self, tmp_path):
        return {"data-identity": "ward", "ledger-dir": str(tmp_path)}

    @pytest.mark.parametrize(("radius", "counted"), [(0.0, 1.0), (2.5, 2.5)])
    def test_one_release_costs_p_over_nu(self, node, radius, counted):
        sent_by(moved(7.0), LAPLACE | {"privacy.radius": radius}, node)
        (entry,) = entries_of(node, "neighbourhood")
        assert (entry.round, entry.mechanism) == (3, "laplace")
        assert entry.event.radius == counted and entry.event.leakage == pytest.approx(P / NU)

    def test_what_is_counted_does_not_depend_on_the_update(self, tmp_path_factory):
        def check(distance):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            sent_by(moved(distance), LAPLACE, node)
            (entry,) = entries_of(node, "neighbourhood")
            assert entry.event == Laplace(P / NU, 1.0)

        assert failures([0.0, 1e-9, 1e9], check) == []

    def test_it_is_on_disk_before_anything_is_trained(self, node):
        def train(*_):
            (entry,) = entries_of(node, "neighbourhood")
            assert isinstance(entry.event, Laplace)
            raise MemoryError

        with pytest.raises(MemoryError):
            released(request_of_kind(settings=LAPLACE), node_at(LAPLACE, node), train)
        assert ledger_of_node(node).leakage() == pytest.approx(P / NU)

    def test_it_adds_up_and_survives_a_restart(self, node):
        for _ in range(3):
            sent_by(moved(1.0), node=node)
            ledgers._ledger.cache_clear()
        assert ledger_of_node(node).leakage() == pytest.approx(3 * P / NU)

    def test_the_smaller_limit_wins_to_the_last_release(self, tmp_path_factory):
        """In releases; a limit of three of them allows three, whatever adding up rounds."""

        def check(run, own, releases):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            settings, trained = LAPLACE | {"privacy.max-leakage": run * P / NU}, []
            node |= {"max-leakage": own * P / NU} if own else {}

            def train(*_):
                trained.append(1)
                return Reply(moved(1.0))

            for number in range(5):
                asked = request_of_kind(settings=settings, number=number), node_at(settings, node), train
                if number < releases:
                    assert released(*asked).arrays
                else:
                    with pytest.raises(BudgetExhausted) as refusal:
                        released(*asked)
                    assert not any(digit in str(refusal.value) for digit in "0123456789")
            assert len(trained) == releases == len(entries_of(node, "neighbourhood"))

        assert failures([(2.5, 0.0, 2), (0.0, 2.5, 2), (9.5, 1.5, 1), (1.5, 9.5, 1), (3.0, 0.0, 3)], check) == []

    def test_a_private_choice_among_hypotheses_leaks_its_epsilon(self, node):
        sent_by(moved(1.0), CHOOSING, node, models=(SOFTMAX, SOFTMAX))
        assert ledger_of_node(node).leakage() == pytest.approx(P / NU + 0.5)

    @pytest.mark.parametrize("settings", [EXACT, CHOOSING | {"privacy.choice-epsilon": 1e6}])
    def test_no_limit_allows_a_choice_that_tells_of_a_row(self, node, settings):
        """Presence of one row was told right in 20 of 20 messages: the choice itself was not counted."""
        asked = request_of_kind(settings=settings, models=(SOFTMAX, SOFTMAX))
        here = node_at(settings, node | {"max-leakage": 2 * P / NU, "min-radius": 1.0})
        with pytest.raises(BudgetExhausted):
            released(asked, here, pytest.fail)

    def test_of_two_replies_at_once_that_both_fit_by_themselves_one_is_made(self, node):
        settings = LAPLACE | {"privacy.max-leakage": 1.5 * P / NU}
        request, here = request_of_kind(settings=settings), node_at(settings, node)

        limit_leakage(request, here)
        limit_leakage(request, here)
        count_leakage(request, here)
        with pytest.raises(BudgetExhausted):
            count_leakage(request, here)
        assert len(entries_of(node, "neighbourhood")) == 1

    def test_what_a_limit_refuses_is_charged_to_no_budget(self, tmp_path_factory):
        def check(settings, message):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            limits = {"max-leakage": 1e9, "min-radius": 1.0, "max-example-epsilon": 50.0}
            for limited in (node | limits, node | limits | {"max-example-epsilon": 0.0}):
                assert answer(settings, limited, message_of(**message)).has_error()
            assert not list(Path(node["ledger-dir"]).glob("*.jsonl"))

        cases = [
            (GAUSSIAN, {}),
            (DP_SGD, {}),
            (LAPLACE | {"privacy.radius": 0.5}, {}),
            (OPEN | {"task.test-fraction": 0.2, "evaluation.federated": "on"}, {"kind": "evaluate"}),
        ]
        assert failures(cases, check) == []

    def test_a_limit_of_the_run_holds_in_a_simulation_too(self):
        settings = LAPLACE | {"privacy.max-leakage": 1.5 * P / NU}
        here = node_at(settings)
        request = request_of_kind(settings=settings)
        released(request, here, lambda *_: Reply(moved(1.0)))
        with pytest.raises(BudgetExhausted):
            released(request, here, pytest.fail)
        assert dict(here.state["leakage"]) == {
            "spent": pytest.approx(P / NU),
            "noised": pytest.approx(P / NU),
            "releases": 1,
        }

    @pytest.mark.parametrize("useless", [{"privacy.laplace-noise-multiplier": 0.0}, {"privacy.noise-seed": 7}])
    def test_what_no_limit_can_be_kept_for(self, node, useless):
        sent_by(moved(1.0), LAPLACE | useless, node)
        (entry,) = entries_of(node, "neighbourhood")
        assert isinstance(entry.event, Unaccounted) and ledger_of_node(node).leakage() == math.inf
        with pytest.raises(BudgetExhausted):
            sent_by(moved(1.0), LAPLACE | {"privacy.max-leakage": 1e9}, node)

    @pytest.mark.parametrize("useless", [{"privacy.laplace-noise-multiplier": 0.0}, {"privacy.noise-seed": 7}])
    def test_nor_does_it_fit_into_any(self, node, useless):
        with pytest.raises(BudgetExhausted):
            sent_by(moved(1.0), LAPLACE | useless, node | {"max-leakage": 1e9})

    def test_a_node_with_a_limit_takes_part_in_nothing_without_this_noise(self, tmp_path_factory):
        def check(kind, settings):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            request = (
                request_of_kind(EvaluateRequest, settings) if kind == "evaluate" else request_of_kind(settings=settings)
            )
            with pytest.raises(BudgetExhausted, match="max-leakage"):
                released(request, node_at(settings, node | {"max-leakage": 100.0}), pytest.fail)

        cases = [
            ("train", OPEN),
            ("train", GLOBAL),
            ("train", DP_SGD),
            ("train", GAUSSIAN),
            ("evaluate", LAPLACE | {"evaluation.held-out-clients": 0.5}),
        ]
        assert failures(cases, check) == []

    def test_a_limit_that_is_none(self, tmp_path_factory):
        def check(limit):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            with pytest.raises(ConfigError, match="max-leakage"):
                sent_by(moved(1.0), node=node | {"max-leakage": limit})

        assert failures([-1.0, "much", True, math.inf, math.nan], check) == []

    def test_a_limit_makes_a_node_keep_a_ledger(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        sent_by(moved(1.0), node={"max-leakage": 1000.0})
        assert len(list(tmp_path.glob(".cloister/ledgers/*.jsonl"))) == 1

    def test_a_radius_is_of_the_nodes_choosing_where_it_has_a_limit(self, tmp_path_factory):
        def check(radius, minimum, allowed):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            settings = LAPLACE | {"privacy.radius": radius}
            node |= {"max-leakage": 1e9} | ({"min-radius": minimum} if minimum else {})
            if allowed:
                assert sent_by(moved(1.0), settings, node).arrays
            else:
                with pytest.raises(PrivacyError, match="min-radius"):
                    sent_by(moved(1.0), settings, node)
                assert not list(Path(node["ledger-dir"]).glob("*"))

        assert failures([(1e-6, 0, False), (9.0, 0, False), (1.0, 2.0, False), (2.0, 2.0, True)], check) == []

    def test_a_minimum_that_is_none(self, tmp_path_factory):
        def check(minimum):
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path_factory.mktemp("node"))}
            with pytest.raises(ConfigError, match="min-radius"):
                sent_by(moved(1.0), node=node | {"min-radius": minimum})

        assert failures([-1.0, "1", True], check) == []

    def test_without_a_limit_any_radius_will_do(self):
        assert sent_by(moved(1.0), LAPLACE | {"privacy.radius": 1e-6}).arrays

    def test_a_ledger_that_cannot_be_written_is_no_release(self, tmp_path):
        (tmp_path / "a-file").write_text("")
        node = {"data-identity": "ward", "ledger-dir": str(tmp_path / "a-file" / "ledgers")}
        with pytest.raises(PrivacyError) as refused:
            released(request_of_kind(settings=LAPLACE), node_at(LAPLACE, node), pytest.fail)
        assert str(tmp_path) not in str(refused.value)


class TestExactly:
    def test_an_update_that_is_none_is_noted_for_the_node_alone(self, caplog):
        with caplog.at_level("WARNING", "cloister.client"):
            sent = sent_by({}, GAUSSIAN).arrays
        assert list(sent) == list(SOFTMAX)
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("cloister.client", "WARNING")
        assert record.message == (
            "the trained arrays are not those that training began with; what is sent is noise on the model that came"
        )

    def test_no_arrays_are_other_arrays(self):
        request = request_of_kind(settings=GAUSSIAN)
        reply = released(request, node_at(GAUSSIAN), lambda *_: Reply())
        assert list(reply.arrays) == list(SOFTMAX)

    def test_the_next_is_given_the_same(self):
        def check(settings):
            seen, request, here = [], request_of_kind(settings=settings), node_at(settings)
            released(request, here, lambda *given: seen.append(given) or Reply(moved(1.0)))
            kept = request_of_kind(KeepRequest, settings)
            released(kept, here, lambda *given: seen.append(given) or Reply())
            assert seen == [(request, here), (kept, here)]

        assert failures([(settings,) for settings in [OPEN, GAUSSIAN, LAPLACE]], check) == []

    def test_a_query_is_none_of_a_limits_business(self):
        node = {"max-leakage": 1.0}
        assert released(request_of_kind(KeepRequest), node_at(OPEN, node), lambda *_: "kept") == "kept"

    @pytest.mark.parametrize("kind", [EvaluateRequest, None])
    def test_what_a_node_with_a_limit_says(self, kind):
        request = request_of_kind(kind, LAPLACE) if kind else request_of_kind(settings=GAUSSIAN)
        with pytest.raises(BudgetExhausted) as refused:
            released(request, node_at(OPEN, {"max-leakage": 1.0}), pytest.fail)
        assert str(refused.value) == (
            "this node has a limit (max-leakage), and this would leave without the noise that it counts"
        )

    def test_what_is_counted_and_where_it_belongs(self, tmp_path_factory):
        def check(settings, event):
            tmp_path = tmp_path_factory.mktemp("case")
            node = {"data-identity": "ward", "ledger-dir": str(tmp_path)}
            request = request_of_kind(settings=LAPLACE | settings, number=4, run="nine")
            released(request, node_at(LAPLACE, node), lambda *_: Reply(moved(1.0)))
            (entry,) = ledger_of_node(node).entries
            assert (entry.event, entry.run, entry.round, entry.unit) == (event, "nine", 4, "neighbourhood")

        cases = [
            (
                {"privacy.noise-seed": 3},
                Unaccounted("the noise is seeded: whoever knows privacy.noise-seed can remove it"),
            ),
            (
                {"privacy.laplace-noise-multiplier": 0.0},
                Unaccounted("privacy.laplace-noise-multiplier is 0: there is no noise"),
            ),
            ({}, Laplace(P / NU, 1.0)),
            ({"privacy.radius": 0.25}, Laplace(P / NU / 0.25, 0.25)),
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("minimum", [-1.0, "1", True])
    def test_what_a_minimum_is(self, minimum):
        with pytest.raises(ConfigError) as refused:
            sent_by(moved(1.0), node={"min-radius": minimum})
        assert str(refused.value).startswith(f"node configuration: min-radius = {minimum!r} is not valid: it must be ")

    def test_what_a_free_radius_is(self):
        with pytest.raises(PrivacyError) as refused:
            sent_by(moved(1.0), LAPLACE | {"privacy.radius": 0.5}, {"max-leakage": 1.0, "min-radius": 1})
        assert str(refused.value) == (
            "privacy.radius = 0.5 is not of at least the min-radius of this node, which has a limit (max-leakage): a "
            "limit within a radius of any size bounds nothing"
        )

    def test_a_minimum_without_a_limit_refuses_nothing(self):
        assert sent_by(moved(1.0), LAPLACE | {"privacy.radius": 0.5}, {"min-radius": 1.0}).arrays

    def test_a_small_minimum_is_one(self):
        node = {"max-leakage": 1e9, "min-radius": 0.5}
        assert sent_by(moved(1.0), LAPLACE | {"privacy.radius": 0.5}, node).arrays

    def test_noise_that_is_to_be_repeated_is_that_of_its_name(self, monkeypatch):
        """Its stream is told from those of clusters and servers, whose seeds are below 2⁶⁴."""
        seeds = []
        monkeypatch.setattr(subject, "GaussianNoise", lambda *given: seeds.append(given) or GaussianNoise(1))
        sent_by(moved(1.0), GAUSSIAN | {"privacy.noise-seed": 5}, {"partition-id": 3}, number=2)
        digest = hashlib.sha256(b"client sends 5 3 2").digest()
        assert seeds == [(2**64 + int.from_bytes(digest[:8]),)]

    def test_of_a_node_without_a_part_by_its_id(self, monkeypatch):
        seeds = []
        monkeypatch.setattr(subject, "GaussianNoise", lambda *given: seeds.append(given) or GaussianNoise(1))
        request = request_of_kind(settings=GAUSSIAN | {"privacy.noise-seed": 5}, number=2)
        released(request, node_at(GAUSSIAN, {}, 77), lambda *_: Reply(moved(1.0)))
        assert seeds == [(2**64 + int.from_bytes(hashlib.sha256(b"client sends 5 77 2").digest()[:8]),)]

    @pytest.mark.parametrize("kind", [EvaluateRequest, KeepRequest])
    def test_nothing_is_counted_for_other_messages(self, tmp_path, kind):
        node = {"data-identity": "ward", "ledger-dir": str(tmp_path)}
        released(request_of_kind(kind, LAPLACE), node_at(LAPLACE, node), lambda *_: Reply())
        assert not list(tmp_path.iterdir())

    def test_gaussian_noise_leaks_nothing_of_that_kind(self, tmp_path):
        sent_by(moved(1.0), GAUSSIAN, {"data-identity": "ward", "ledger-dir": str(tmp_path)})
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*MECHANISMS, "published"])
def test_the_whole_app_counts_in_the_state_where_there_is_no_ledger(name):
    settings = MECHANISMS.get(name, LAPLACE)
    context = context_of(settings)
    for _ in range(2):
        arrays_of(app(message_of(), context))
    counted = sum(context.state.config_records["example-releases"].values())
    assert counted == (2 * 36 if name == "dp-sgd" else 2)
    leaked = context.state.metric_records.get("leakage", {})
    assert leaked.get("releases", 0) == (2 if settings["privacy.client"] == "laplace" else 0)
