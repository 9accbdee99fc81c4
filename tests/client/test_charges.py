"""Charges of each kind of reply, by unit, and the budget of a node."""

from pathlib import Path

import numpy as np
import pytest
from asking import (
    BALL,
    CHOICE,
    CLUSTERED,
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    LAPLACE,
    OPEN,
    SIZED,
    SOFTMAX,
    P,
    answer,
    entries_of,
    gaussians,
    ledger_of_node,
    message_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
    write_data,
)
from support import failures

from cloister.client.budget import keep_budget
from cloister.client.costs import (
    FURTHER,
    PROMISED,
    SCORES,
    PrivacyCost,
    plan_of,
    planned_steps,
    privacy_costs_of,
    unit_of,
)
from cloister.client.ledgers import identity_of
from cloister.client.node import node_of
from cloister.client.request import EvaluateRequest, KeepRequest, TrainRequest
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import PrivacyError

NU = 5.0


def charged(settings, node, kind=None, promise=()):
    """{unit: events} of a reply."""
    more = {"promise": promise} if promise else {}
    models = [SOFTMAX] * 2 if "privacy.clusters" in settings else [SOFTMAX]
    request = request_of_kind(kind, settings) if kind else request_of_kind(settings=settings, models=models, **more)
    return {charge.unit: list(charge.events) for charge in privacy_costs_of(request, node_at(settings, node))}


@pytest.fixture
def node(tmp_path):
    return own_node(tmp_path)


class TestEachCombination:
    STEPS = Repeated(Gaussian(1.0, Sampling("bounded-poisson", 0.25)), 4)

    def test_dp_sgd(self, node):
        promise = (Gaussian(3.0),)
        assert charged(DP_SGD, node, promise=promise) == {"client": [Gaussian(3.0)], "example": [self.STEPS]}

    def test_dp_sgd_of_groups(self, node):
        found = charged(DP_SGD | {"task.group": "patient"}, node)
        assert found["group"] == [self.STEPS] and "example" not in found

    def test_dp_sgd_after_a_private_choice(self, node):
        assert charged(DP_SGD | CHOICE, node)["example"] == [self.STEPS, Pure(0.5)]

    def test_dp_sgd_that_protects_nobody(self, tmp_path_factory):
        def check(useless):
            node = own_node(tmp_path_factory.mktemp("node"))
            (event,) = charged(DP_SGD | useless, node)["example"]
            assert isinstance(event, Unaccounted)

        cases = [
            {"privacy.noise-seed": 3},
            {"privacy.dp-sgd-noise-multiplier": 0.0},
            {"privacy.server": "laplace-clustering", "privacy.choice": "exact"},
        ]
        assert failures(cases, check) == []

    def test_gaussian(self, node):
        """The client's data is zeroed by leaving it out, and exchanged by leaving out one example of it."""
        assert charged(GAUSSIAN, node) == {"client": [Gaussian(2.0)], "example": [Gaussian(1.0)]}

    def test_laplace_in_a_ball(self, node):
        assert charged(BALL, node) == {"client": [Pure(P / NU)], "example": [Pure(2 * P / NU)]}

    @pytest.mark.parametrize("settings", [GAUSSIAN, BALL])
    def test_a_private_choice_is_a_release_too(self, node, settings):
        alone, chosen = charged(settings, node), charged(settings | CHOICE, node)
        assert chosen["client"] == [*alone["client"], Pure(0.5)]
        assert chosen["example"] == [*alone["example"], Pure(1.0)]

    @pytest.mark.parametrize("settings", [GAUSSIAN, BALL])
    def test_one_hypothesis_is_no_choice(self, node, settings):
        one = settings | {"privacy.server": "laplace-clustering", "privacy.clusters": 1}
        assert charged(one, node) == charged(settings, node)

    def test_local_noise_that_protects_nobody_and_all_reasons(self, tmp_path_factory):
        def check(settings, reasons):
            node = own_node(tmp_path_factory.mktemp("node"))
            found = charged(settings, node)
            assert set(found) == {"client", "example"}
            for (event,) in found.values():
                assert isinstance(event, Unaccounted) and all(reason in event.reason for reason in reasons)

        cases = [
            (LAPLACE, ["radius is 0"]),
            (GAUSSIAN | {"privacy.noise-seed": 3}, ["seeded"]),
            (GAUSSIAN | {"privacy.gaussian-noise-multiplier": 0.0}, ["is 0: there is no noise"]),
            (BALL | {"privacy.noise-seed": 3}, ["seeded"]),
            (LAPLACE | {"privacy.noise-seed": 3}, ["radius is 0", "seeded"]),
            (GAUSSIAN | {"privacy.server": "laplace-clustering", "privacy.choice": "exact"}, ["choice is 'exact'"]),
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("settings", [OPEN, GLOBAL])
    def test_no_noise_here(self, node, settings):
        promise = (Gaussian(3.0), Gaussian(4.0))
        found = charged(settings, node, promise=promise)
        assert found["client"] == list(promise)
        assert isinstance(found["example"][0], Unaccounted)

    def test_scores_have_no_noise(self, tmp_path_factory):
        def check(settings):
            node = own_node(tmp_path_factory.mktemp("node"))
            found = charged(settings, node, EvaluateRequest)
            assert set(found) == {"client", "group" if "task.group" in settings else "example"}
            assert all(events == [Unaccounted("scores left without noise")] for events in found.values())

        cases = [(settings,) for settings in [OPEN, DP_SGD, DP_SGD | {"task.group": "patient"}, GAUSSIAN]]
        assert failures(cases, check) == []


class TestEachCharge:
    """With its mechanism and its clip, for whoever reads the ledger."""

    STEPS = Repeated(Gaussian(1.0, Sampling("bounded-poisson", 0.25)), 4)
    PROMISE = (Gaussian(3.0), Gaussian(4.0))

    def found(self, settings, node, kind=TrainRequest, number=1):
        models = [SOFTMAX] * 2 if "privacy.clusters" in settings else [SOFTMAX]
        more = {"promise": self.PROMISE} if kind is TrainRequest else {}
        request = request_of_kind(kind, settings, models=models, number=number, **more)
        return privacy_costs_of(request, node_at(settings, node))

    @pytest.mark.parametrize(("settings", "unit"), [(OPEN, "example"), (DP_SGD | {"task.group": "ward"}, "group")])
    def test_scores(self, node, settings, unit):
        scores = (Unaccounted("scores left without noise"),)
        expected = [PrivacyCost("client", scores, "scores"), PrivacyCost(unit, scores, "scores")]
        assert self.found(settings, node, EvaluateRequest) == expected

    @pytest.mark.parametrize(("number", "clip"), [(1, 2.0), (3, 0.5)])
    def test_steps_at_the_clip_of_their_round(self, node, number, clip):
        decaying = {"privacy.dp-sgd-clipping-norm": 2.0, "privacy.clipping-decay": 0.5}
        settings = DP_SGD | decaying | {"privacy.min-clipping-norm": 1e-3}
        assert self.found(settings, node, number=number) == [
            PrivacyCost("client", self.PROMISE, "as the server promised"),
            PrivacyCost("example", (self.STEPS,), "dp-sgd", clip),
        ]

    def test_steps_and_a_choice(self, node):
        (_, steps) = self.found(DP_SGD | CHOICE, node)
        assert steps == PrivacyCost("example", (self.STEPS, Pure(0.5)), "dp-sgd", 1.0)

    @pytest.mark.parametrize(
        ("rules", "believed"),
        [
            ({"mechanisms": ["dp-sgd"], "min_server_noise_multiplier": None, "max_epsilon": 9.0}, False),
            ({"mechanisms": ["dp-sgd", "metric"], "max_epsilon": 9.0}, True),
            ({"mechanisms": [], "min_server_noise_multiplier": None}, True),
        ],
    )
    @pytest.mark.parametrize("settings", [DP_SGD, OPEN])
    def test_a_promise_as_far_as_the_policy_counts_on_it(self, tmp_path, node, settings, rules, believed):
        nothing = (Unaccounted("the policy of this node counts on no noise of the server's"),)
        expected = PrivacyCost("client", self.PROMISE if believed else nothing, "as the server promised")
        assert self.found(settings, node | {"policy": str(policy_file(tmp_path, **rules))})[0] == expected

    def test_no_noise(self, node):
        unprotected = Unaccounted("privacy.client is 'none': the server sees models trained without noise")
        assert self.found(OPEN, node) == [
            PrivacyCost("client", self.PROMISE, "as the server promised"),
            PrivacyCost("example", (unprotected,)),
        ]

    def test_noise_on_what_is_sent(self, tmp_path_factory):
        def check(settings, name, clip, client, example, chooses):
            node = own_node(tmp_path_factory.mktemp("node"))
            more, twice = ((Pure(0.5),), (Pure(1.0),)) if chooses else ((), ())
            assert self.found(settings | CHOICE if chooses else settings, node) == [
                PrivacyCost("client", (client, *more), name, clip),
                PrivacyCost("example", (example, *twice), name, clip),
            ]

        cases = [
            (settings, name, clip, client, example, chooses)
            for settings, name, clip, client, example in [
                (GAUSSIAN | {"privacy.gaussian-clipping-norm": 3.0}, "gaussian", 3.0, Gaussian(2.0), Gaussian(1.0)),
                (BALL, "laplace", 2.0, Pure(P / NU), Pure(2 * P / NU)),
            ]
            for chooses in [False, True]
        ]
        assert failures(cases, check) == []

    def test_noise_that_protects_nobody(self, node):
        settings = GAUSSIAN | {"privacy.gaussian-noise-multiplier": 0.0, "privacy.noise-seed": 1}
        none = Unaccounted(
            "privacy.gaussian-noise-multiplier is 0: there is no noise; "
            "the noise is seeded: whoever knows privacy.noise-seed can remove it"
        )
        assert self.found(settings, node) == [
            PrivacyCost("client", (none,), "gaussian"),
            PrivacyCost("example", (none,), "gaussian"),
        ]

    def test_what_an_example_pays_for_what_a_client_does(self):
        for event, twice in ((Pure(0.5), Pure(1.0)), (Gaussian(3.0), Gaussian(1.5)), (Unaccounted("x"),) * 2):
            assert event.replaced() == twice

    def test_a_charge_without_more_has_no_mechanism_and_no_clip(self):
        assert (PrivacyCost("client", ()).mechanism, PrivacyCost("client", ()).clip) == ("", 0.0)

    def test_the_unit_is_what_the_run_or_the_policy_protects(self, tmp_path, node):
        rules = {"mechanisms": [], "min_server_noise_multiplier": None}
        silent = node | {"policy": str(policy_file(tmp_path / "silent", **rules))}
        grouped = node | {"policy": str(policy_file(tmp_path / "grouped", group="ward", **rules))}
        nodes = [node_at(OPEN, each) for each in (node, silent, grouped)]
        assert [unit_of(request_of_kind(), each) for each in nodes] == ["example"] * 2 + ["group"]
        assert unit_of(request_of_kind(settings=DP_SGD | {"task.group": "ward"}), nodes[1]) == "group"


class TestPlans:
    def test_the_size_is_that_of_dp_sgd_alone(self, node):
        for settings, size in ((DP_SGD, 40), (GAUSSIAN, 0), (OPEN, 0)):
            assert plan_of(request_of_kind(settings=settings), node_at(settings, node)).public_size == size

    def test_the_owner_is_who_trains(self, node):
        """A part of a benchmark, whatever its id; else the node's id."""
        parts = {plan_of(request_of_kind(), node_at(OPEN, SIZED | {"partition-id": i}, 9)).seed for i in (0, 1, 2)}
        seeds = {plan_of(request_of_kind(), node_at(OPEN, node, number)).seed for number in (0, 1, 2)}
        assert len(seeds) == 3 and parts == seeds
        assert plan_of(request_of_kind(), node_at(OPEN, node, 1)) == plan_of(request_of_kind(), node_at(OPEN, node, 1))

    def test_what_shuffled_batches_would_show(self, node):
        settings = DP_SGD | {"privacy.batch-sampling": "shuffle"}
        with pytest.raises(PrivacyError) as refused:
            planned_steps(request_of_kind(settings=settings), node_at(settings, node))
        assert str(refused.value) == (
            "privacy.batch-sampling = 'shuffle' would show how many examples this node has; use 'poisson'"
        )

    @pytest.mark.parametrize(("units", "size"), [([4, 2, 9], 3), ([], 1)])
    def test_a_simulated_client_counts_the_units_that_it_was_dealt(self, monkeypatch, units, size):
        asked = []

        def units_dealt(*given):
            asked.append(given)
            return np.array(units)

        monkeypatch.setattr("cloister.client.data.units_dealt", units_dealt)
        request = request_of_kind(settings=DP_SGD)
        assert plan_of(request, node_at(DP_SGD, SIZED)).public_size == size
        assert asked == [(request.config.task, node_of(SIZED), request.seed)]


class TestTheLedger:
    def test_everything_is_there_before_the_reply_is_made(self, node):
        with pytest.raises(MemoryError), keep_budget(request_of_kind(settings=GAUSSIAN), node_at(GAUSSIAN, node)):
            assert [entry.done for entry in entries_of(node, "client")] == [False]
            assert [entry.done for entry in entries_of(node, "example")] == [False]
            raise MemoryError
        assert not any(entry.done for entry in ledger_of_node(node).entries)

    def test_who_reads_it_finds_mechanisms_and_clips(self, node):
        answer(DP_SGD | {"privacy.dp-sgd-clipping-norm": 0.5}, node)
        (client,), (example,) = entries_of(node, "client"), entries_of(node, "example")
        assert (client.mechanism, example.mechanism, example.clip) == (PROMISED, "dp-sgd", 0.5)
        answer(GAUSSIAN | {"privacy.gaussian-clipping-norm": 0.25}, node)
        assert (entries_of(node, "client")[1].mechanism, entries_of(node, "client")[1].clip) == ("gaussian", 0.25)
        answer(BALL, node)
        assert (entries_of(node, "client")[2].mechanism, entries_of(node, "client")[2].clip) == ("laplace", 2.0)

    def test_scores_are_recorded(self, node):
        answer(OPEN | {"task.test-fraction": 0.5}, node, message_of(kind="evaluate"))
        for unit in ("client", "example"):
            (entry,) = entries_of(node, unit)
            assert entry.mechanism == SCORES and isinstance(entry.event, Unaccounted) and entry.done

    def test_a_query_is_not(self, node):
        with keep_budget(request_of_kind(KeepRequest), node_at(OPEN, node | {"max-epsilon": 1.0})):
            pass
        assert not list(Path(node["ledger-dir"]).glob("*.jsonl"))

    def test_a_simulated_client_has_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        here = node_at(GAUSSIAN, SIZED)
        with keep_budget(request_of_kind(settings=GAUSSIAN), here):
            pass
        assert not list(tmp_path.iterdir())
        assert set(here.state.config_records) == {"client-releases", "example-releases"}


class TestIdentity:
    """One ledger for one lot of data, whoever asks and by whatever name."""

    def test_data_elsewhere_is_other_data(self, tmp_path):
        one, other = (
            identity_of(node_of({"data-path": str(tmp_path / name)}), "digits") for name in ("a.npz", "b.npz")
        )
        assert one != other

    def test_however_its_path_is_written(self, tmp_path, monkeypatch):
        (tmp_path / "link").symlink_to(tmp_path)
        monkeypatch.chdir(tmp_path)
        spellings = ["a.npz", "./a.npz", "link/a.npz", str(tmp_path / "x" / ".." / "a.npz"), str(tmp_path / "a.npz")]
        assert len({identity_of(node_of({"data-path": path}), "digits") for path in spellings}) == 1

    def test_whatever_the_server_calls_the_task(self, tmp_path):
        node = {"data-path": str(tmp_path / "a.npz")}
        assert identity_of(node_of(node), "digits") == identity_of(node_of(node), "mnist")

    def test_a_name_of_the_nodes_own(self, tmp_path):
        paths = ({"data-path": str(tmp_path / name), "data-identity": "ward"} for name in ("a.npz", "b.npz"))
        assert {identity_of(node_of(node), "digits") for node in paths} == {"ward"}

    def test_parts_of_a_benchmark_are_apart(self):
        assert (
            len({identity_of(node_of({"partition-id": i}), task) for i in range(3) for task in ("digits", "mnist")})
            == 6
        )

    def test_is_the_same_in_every_version(self):
        """Under another name a node would begin an empty ledger, and its budget anew."""

        def check(node, name):
            assert identity_of(node_of(node), "digits") == name

        cases = [
            ({"data-path": "/data/ward.npz"}, "data-558a26540841"),
            ({"partition-id": 3}, "digits-568145cf44d2"),
            ({}, "digits-413a363079dd"),
        ]
        assert failures(cases, check) == []

    def test_the_paths_of_a_site_do_not_show(self, tmp_path):
        assert "secret-ward" not in identity_of(node_of({"data-path": str(tmp_path / "secret-ward.npz")}), "digits")

    def test_budgets_of_two_files_are_two(self, tmp_path):
        limit = {"max-example-epsilon": 20.0, "ledger-dir": str(tmp_path / "shared")}
        one = own_node(tmp_path, write_data(tmp_path, name="one.npz")) | limit
        other = own_node(tmp_path, write_data(tmp_path, name="other.npz")) | limit
        while not answer(GAUSSIAN, one).has_error():
            pass
        assert not answer(GAUSSIAN, other).has_error()
        assert len(list((tmp_path / "shared").glob("*.jsonl"))) == 2


def test_further_releases_of_a_message_say_so(node):
    answer(GLOBAL, node, message_of(privacy_events=gaussians(2.0, 3.0)))
    assert [entry.mechanism for entry in entries_of(node, "client")] == [PROMISED, FURTHER]


def test_a_neighbourhood_is_counted_beside(node):
    answer(BALL, node)
    assert [entry.event for entry in entries_of(node, "neighbourhood")] == [Laplace(P / NU / 2.0, 2.0)]
    assert np.isclose(ledger_of_node(node).leakage(), P / NU)


def test_clusters_without_noise_promise_nothing(node):
    found = charged(CLUSTERED | {"privacy.clusters": 2}, node)
    assert all(isinstance(event, Unaccounted) for events in found.values() for event in events)
