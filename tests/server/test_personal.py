"""Runs with several hypotheses: what they equal, whom they ask, when they stop, and what a client keeps."""

import io
import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from rich.console import Console
from support import failures, random_models

from cloister.client.app import app
from cloister.client.trainers import best
from cloister.config.run import TaskConfig, parse
from cloister.flower.messages import assume_run
from cloister.server.build import build
from cloister.server.evaluation import CentralEvaluation
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.server.stopping import EarlyStopping
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.strategies.averaging import HeldOut, Sampling
from cloister.tasks import TASKS
from cloister.tasks.base import Examples
from cloister.tasks.datasets.regressions import OPTIMA
from cloister.utils.arrays import from_record, stacked, to_record, unstacked
from cloister.utils.errors import ConfigError, FederationError

LINEAR = {"task.name": "linear", "task.test-fraction": 0.0, "tensorboard": False, "keep-checkpoints": 1, "seed": 1}
CLUSTERS = {"privacy.server": "laplace-clustering"}
NOISE = CLUSTERS | {"privacy.client": "laplace", "privacy.laplace-noise-multiplier": 5.0}


def quiet():
    return ConsoleReporter(3, Console(file=io.StringIO()))


def go(folder, settings, clients=20, **more):
    return simulate(LINEAR | {"output-dir": str(folder)} | settings | more, clients, quiet())


def overheard(folder, settings, clients=20):
    """The run, the messages that were sent to clients, and what they replied."""
    heard = []

    def eavesdrop(message, context):
        reply = app(message, context)
        heard.append((message, reply))
        return reply

    config = parse(LINEAR | {"output-dir": str(folder)} | settings)
    grid = LocalGrid.simulated(eavesdrop, config.flat(), clients)
    return run(grid, config, quiet()), heard, grid


def kinds(heard, kind):
    return [(message, reply) for message, reply in heard if message.metadata.message_type == kind]


class TestSpecialCases:
    @pytest.mark.parametrize("strategy", ["fedyogi", "fedmedian"])
    def test_one_hypothesis_without_noise_is_the_strategy_itself(self, tmp_path, strategy):
        common = {"strategy.name": strategy, "num-rounds": 3, "strategy.fraction-train": 0.5}
        one = go(tmp_path, common | CLUSTERS | {"privacy.clusters": 1}, 8)
        plain = go(tmp_path, common | {"privacy.server": "none", "strategy.weighting": "uniform"}, 8)
        (model,) = unstacked(from_record(one.arrays))
        for name, array in from_record(plain.arrays).items():
            np.testing.assert_array_equal(model[name], array)

    @pytest.mark.slow
    def test_several_without_noise_are_ifca(self, tmp_path):
        """Every client trains the hypothesis of least loss on its own examples, and both optima are found."""
        outcome, heard, _ = overheard(tmp_path, CLUSTERS | {"num-rounds": 40})
        task = outcome.plan.task
        data, model = task.load(), task.build()
        for message, reply in kinds(heard, "train")[-20:]:
            hypotheses = unstacked(from_record(message.content["arrays"]))
            owner = np.flatnonzero(data.owners == message.metadata.dst_node_id - 1)
            losses = []
            for hypothesis in hypotheses:
                model.assign(hypothesis)
                losses.append(task.metrics(data.train.y[owner], model.predict(data.train.x[owner]))["loss"])
            trained = from_record(reply.content["arrays"])["linear/kernel"]
            moved = [np.linalg.norm(trained - hypothesis["linear/kernel"]) for hypothesis in hypotheses]
            assert np.argmin(moved) == np.argmin(losses)
        final = np.array([model["linear/kernel"] for model in unstacked(from_record(outcome.arrays))])
        assert np.linalg.norm(OPTIMA[:, None] - final[None], axis=2).min(axis=1).max() < 0.5

    @pytest.mark.parametrize("split", [0, 1])
    def test_models_that_all_begin_alike_are_told_apart(self, tmp_path, split):
        """Softmax regression begins at zero: of equal hypotheses every client would take the first, in every round."""
        settings = {"task.name": "digits", "task.model": "softmax", "num-rounds": 1, "privacy.clusters": 3}
        outcome = go(tmp_path, settings | CLUSTERS | {"privacy.clusters-split-round": split}, clients=6)
        with (
            np.load(outcome.directory.path / "hypothesis-1.npz") as one,
            np.load(outcome.directory.path / "hypothesis-2.npz") as two,
        ):
            assert not np.array_equal(one["softmax/kernel"], two["softmax/kernel"])


class TestChoice:
    def test_the_hypothesis_of_least_loss(self):
        task = TASKS.load("linear")(TaskConfig(name="linear"))
        model, x = task.build(), np.eye(2, dtype=np.float32)
        examples = Examples(x, x @ np.array([4, 2], np.float32))
        hypotheses = [{"linear/kernel": np.array(theta, np.float32)} for theta in ([0, 0], [4, 1], [9, 9])]
        assert best(model, hypotheses, task, examples) == 1
        np.testing.assert_array_equal(model.arrays()["linear/kernel"], [4, 1])

    def test_one_that_has_diverged_suits_nobody(self):
        task = TASKS.load("linear")(TaskConfig(name="linear"))
        examples = Examples(np.ones((3, 2), np.float32), np.zeros(3, np.float32))
        for bad in (np.nan, np.inf):
            hypotheses = [{"linear/kernel": np.array(theta, np.float32)} for theta in ([bad, 0], [9, 9])]
            with np.errstate(invalid="ignore"):
                assert best(task.build(), hypotheses, task, examples) == 1

    def test_the_server_scores_each_owner_with_the_hypothesis_that_suits_it(self):
        plan = build(parse(LINEAR | CLUSTERS))
        score = CentralEvaluation(plan.task, plan.task.build(), hypotheses=2)
        record = to_record(stacked([{"linear/kernel": theta.astype(np.float32)} for theta in OPTIMA]))
        assert score(record)["rmse"] < 0.7
        one = to_record(stacked([{"linear/kernel": OPTIMA[0].astype(np.float32)}] * 2))
        assert score(one)["rmse"] > 5

    def test_without_owners_all_test_examples_take_one(self):
        plan = build(parse({"task.name": "digits", "task.model": "softmax"} | CLUSTERS))
        score = CentralEvaluation(plan.task, plan.task.build(), hypotheses=2)
        rng = np.random.default_rng(0)
        models = [
            {"softmax/kernel": rng.normal(0, s, (64, 10)).astype(np.float32), "softmax/bias": np.zeros(10, np.float32)}
            for s in (0.1, 5.0)
        ]
        alone = CentralEvaluation(plan.task, plan.task.build())
        assert score(to_record(stacked(models))) == alone(to_record(models[0]))


class TestWhatLeaves:
    def test_noised_arrays_and_nothing_else(self, tmp_path):
        _, heard, _ = overheard(tmp_path, NOISE | {"num-rounds": 2})
        replies = [reply for _, reply in kinds(heard, "train")]
        assert len(replies) == 40
        for reply in replies:
            assert set(reply.content) == {"arrays", "metrics", "attestation"} and not dict(reply.content["metrics"])
            assert list(reply.content["arrays"]) == ["linear/kernel"]
        assert all(not list(reply.content) for _, reply in kinds(heard, "query"))

    def test_no_client_leaks_more_than_its_releases(self, tmp_path):
        settings = NOISE | {"num-rounds": 6, "strategy.fraction-train": 0.3}
        outcome, heard, grid = overheard(tmp_path, settings)
        trained = np.bincount([message.metadata.dst_node_id - 1 for message, _ in kinds(heard, "train")], minlength=20)
        np.testing.assert_allclose(grid.leakages(), 0.4 * trained)
        assert outcome.privacy["clients"]["status"] == "heuristic"

    def test_who_has_reached_the_limit_abstains_and_the_round_goes_on(self, tmp_path):
        settings = NOISE | {"num-rounds": 8, "strategy.fraction-train": 0.5, "privacy.max-leakage": 4.2}
        outcome, _, grid = overheard(tmp_path, settings)
        assert max(grid.leakages()) == pytest.approx(1.2)  # three replies of 0.4, beside three choices of 1
        refused = [rejection for done in outcome.rounds[1:] for rejection in done.measured.rejected]
        assert refused and all("limit of leakage" in rejection.detail for rejection in refused)
        assert sum(done.measured.accepted > 0 for done in outcome.rounds[1:]) >= 6

    def test_the_report_of_a_simulation(self, tmp_path):
        outcome = go(tmp_path, NOISE | {"num-rounds": 3})
        report = json.loads((outcome.directory.path / "leakage.json").read_text())
        assert report["clients"] == report["that-released"] == 20 and report["maximum"] == pytest.approx(1.2)

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"privacy.max-leakage": 1.0, "privacy.laplace-noise-multiplier": 0.0}, "cannot be kept"),
            (
                {"privacy.server": "global-dp", "strategy.weighting": "examples", "privacy.examples-cap": 5.0},
                "no example count",
            ),
        ],
    )
    def test_what_would_go_past_the_noise_is_refused(self, tmp_path, settings, says):
        with pytest.raises(ConfigError, match=says):
            go(tmp_path, NOISE | settings)


class TestHeldOut:
    def test_they_never_train_and_they_alone_are_asked_for_scores(self, tmp_path):
        outcome, heard, _ = overheard(tmp_path, NOISE | {"num-rounds": 3, "evaluation.held-out-clients": 0.25})
        training = {message.metadata.dst_node_id for message, _ in kinds(heard, "train")}
        scoring = {message.metadata.dst_node_id for message, _ in kinds(heard, "evaluate")}
        assert len(training) == 15 and len(scoring) == 5 and not training & scoring
        assert "loss" in outcome.rounds[-1].federated
        assert "scores" in " ".join(outcome.plan.claim.unprotected)

    def test_a_role_is_for_good(self):
        held = HeldOut(0.3, random.Random(0))
        first = held.split(list(range(10)))
        assert len(first[1]) == 3 and sorted(first[0] + first[1]) == list(range(10))
        grown = held.split(list(range(20)))
        assert set(first[0]) <= set(grown[0]) and set(first[1]) <= set(grown[1]) and len(grown[1]) == 6
        assert held.split(list(range(10))) == first

    def test_the_same_seed_holds_the_same_nodes_out(self):
        drawn = [HeldOut(0.4, random.Random("1 held out")).split(list(range(30)))[1] for _ in range(2)]
        assert drawn[0] == drawn[1] and drawn[0] != HeldOut(0.4, random.Random("2")).split(list(range(30)))[1]

    def test_a_share_that_holds_nobody_out_is_refused(self):
        grid = LocalGrid(lambda message, context: message, {}, [{}] * 4)
        with pytest.raises(FederationError, match="holds none of 4 nodes out"):
            Sampling(min_nodes=1, timeout=0, held_out=HeldOut(0.1)).draw(grid)


@dataclass
class Scores:
    """A score that goes where it is told to, and remembers how often it was asked."""

    losses: list
    asked: int = 0
    examples: None = None
    majority: None = None

    def __call__(self, arrays):
        self.asked += 1
        return {"loss": self.losses[min(self.asked - 1, len(self.losses) - 1)]}


class TestStopping:
    def observed(self, losses, patience=2, **first):
        stopping, models = EarlyStopping(patience, **first), random_models(len(losses))
        for number, (loss, model) in enumerate(zip(losses, models, strict=True), start=1):
            if stopping.observe(number, {} if loss is None else {"loss": loss}, to_record(model)):
                return number, stopping
        return None, stopping

    def test_the_best_round_is_kept_and_patience_counts_evaluations(self):
        def check(losses, stops, best):
            stopped, stopping = self.observed(losses)
            assert stopped == stops and stopping.best_round == best

        cases = [
            ([3, 2, 1, 0.5], None, 4),
            ([3, 2, 2.5, 2.2, 1], 4, 2),
            ([3, 2, 2, 2, 1], 4, 2),
            ([3, 4, 2, 4, 5], 5, 3),
            ([3, None, 4, None, 2, None], None, 5),
            ([3, float("nan"), float("nan")], 3, 1),
        ]
        assert failures(cases, check) == []

    def test_what_came_before_its_first_round_does_not_count(self):
        stopped, stopping = self.observed([1, 9, 9, 5, 4, 6, 6], first_round=4)
        assert stopped == 7 and stopping.best_round == 5

    def test_a_run_does_not_stop_before_its_hypotheses_are_split(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cloister.server.run.CentralEvaluation", lambda *_: Scores([9, 1, 4, 4, 4, 4, 3, 4, 4, 4]))
        split = {"num-rounds": 50, "evaluation.patience": 3, "privacy.clusters-split-round": 6}
        assert "round 6" in go(tmp_path, NOISE | split).stopped

    def test_a_score_that_is_better_at_its_most(self):
        def check(name, values, stops, best, told):
            stopping, models = EarlyStopping(2, criterion=name), random_models(len(values))
            stopped = None
            for number, (value, model) in enumerate(zip(values, models, strict=True), start=1):
                # A model that has diverged has a loss, and no area.
                scores = {"loss": number} | ({} if value is None else {name: value})
                if stopping.observe(number, scores, to_record(model)):
                    stopped = number
                    break
            assert stopped == stops
            again = EarlyStopping(2, criterion=name)
            again.load_state_dict(stopping.state_dict())
            for each in (stopping, again):
                assert (each.best_round, each.is_over) == (best, stops is not None) and told in each.why()

        cases = [
            ("auc", [0.5, 0.7, 0.6, 0.7, 0.9], 4, 2, "2 evaluations without a better auc than 0.7, that of round 2"),
            ("accuracy", [0.5, 0.7, 0.8, 0.9], None, 4, "accuracy than 0.9"),
            ("rmse", [0.5, 0.7, 0.6, 0.1], 3, 1, "rmse than 0.5"),
            ("age.rmse", [0.5, 0.7, 0.6, 0.1], 3, 1, "age.rmse than 0.5"),
            ("loss.auc", [0.5, 0.7, 0.6, 0.7, 0.9], 4, 2, "loss.auc than 0.7"),
            ("auc", [0.6, None, None], 3, 1, "auc than 0.6"),
            ("f1", [None, None], 2, 0, "2 evaluations without a number as the score 'f1'"),
        ]
        assert failures(cases, check) == []

    def test_without_patience_nothing_is_remembered(self):
        stopped, stopping = self.observed([1, 2, 3, 4], patience=0)
        assert stopped is None and stopping.best is None

    def test_a_run_returns_to_its_best_model(self, tmp_path, monkeypatch):
        scores = Scores([9, 5, 1, 4, 4, 4, 4])
        monkeypatch.setattr("cloister.server.run.CentralEvaluation", lambda *_: scores)
        outcome = go(tmp_path, NOISE | {"num-rounds": 50, "evaluation.patience": 3, "keep-checkpoints": 0})
        assert len(outcome.rounds) == 6 and "round 2" in outcome.stopped
        with np.load(outcome.directory.checkpoints / "round-00002.npz") as best:
            for name, array in from_record(outcome.arrays).items():
                np.testing.assert_array_equal(array, best[name])
        with np.load(outcome.directory.path / "hypothesis-1.npz") as saved:
            np.testing.assert_array_equal(saved["linear/kernel"], from_record(outcome.arrays)["1/linear/kernel"])

    def test_scores_are_taken_every_few_rounds_and_at_the_end(self, tmp_path, monkeypatch):
        scores = Scores([1.0])
        monkeypatch.setattr("cloister.server.run.CentralEvaluation", lambda *_: scores)
        outcome = go(tmp_path, CLUSTERS | {"num-rounds": 8, "evaluation.every": 3})
        assert [done.number for done in outcome.rounds if done.central] == [0, 3, 6, 8]

    def test_where_clients_are_asked_the_servers_score_stops_nothing(self, tmp_path, monkeypatch):
        """Not even in rounds in which none of them answers."""
        scores = Scores([0.0])
        monkeypatch.setattr("cloister.server.run.CentralEvaluation", lambda *_: scores)
        monkeypatch.setattr("cloister.server.round.RoundLoop._evaluate_on_clients", lambda *_: {})
        settings = {"num-rounds": 6, "evaluation.patience": 2, "evaluation.held-out-clients": 0.25}
        assert len(go(tmp_path, CLUSTERS | settings).rounds) == 7


class TestPersonalModels:
    def query(self, context, models):
        assume_run()
        config = ConfigRecord({"server-round": 3, "seed": 1, "hypotheses": len(models)})
        record = RecordDict({"arrays": to_record(stacked(models)), "config": config})
        return app(Message(record, 1, MessageType.QUERY), context)

    def context(self, folder, owner=0):
        node = {"partition-id": owner, "num-partitions": 20} | ({"model-dir": str(folder)} if folder else {})
        return Context(1, 1, node, RecordDict(), parse(LINEAR | NOISE).flat())

    def test_each_client_keeps_the_one_that_suits_it_where_it_lives(self, tmp_path):
        models = [{"linear/kernel": theta.astype(np.float32)} for theta in OPTIMA]
        for owner in range(4):
            reply = self.query(self.context(tmp_path / str(owner), owner), models)
            assert not reply.has_error() and not list(reply.content)
            with np.load(tmp_path / str(owner) / "model.npz") as kept:
                np.testing.assert_array_equal(kept["linear/kernel"], models[owner % 2]["linear/kernel"])
            assert (
                parse(json.loads((tmp_path / str(owner) / "config.json").read_text())["config"]).task.name == "linear"
            )

    def test_a_node_without_a_place_for_it_keeps_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        models = [{"linear/kernel": theta.astype(np.float32)} for theta in OPTIMA]
        assert not list(self.query(self.context(None), models).content)
        assert not list(tmp_path.iterdir())

    def test_a_run_ends_with_them(self, tmp_path):
        config = parse(LINEAR | CLUSTERS | {"output-dir": str(tmp_path / "runs"), "num-rounds": 25})
        nodes = [
            {"partition-id": index, "num-partitions": 6, "model-dir": str(tmp_path / str(index))} for index in range(6)
        ]
        run(LocalGrid(app, config.flat(), nodes), config, quiet())
        for index in range(6):
            with np.load(tmp_path / str(index) / "model.npz") as kept:
                assert np.linalg.norm(kept["linear/kernel"] - OPTIMA[index % 2]) < 1
