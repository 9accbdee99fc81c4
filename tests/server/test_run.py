"""A run, from its settings to what it leaves behind."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import ArrayRecord
from rich.console import Console
from support import failures, zeros

import cloister
from cloister.client.app import app
from cloister.client.data import handing_out
from cloister.config.run import TaskConfig, parse
from cloister.server.build import build, data_identity
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.rundir import RunDirectory, refuse_name
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Recipe, Task
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.numpy_models import NumpyModel
from cloister.tasks.targets import Target
from cloister.utils.arrays import to_record
from cloister.utils.errors import CloisterError, ConfigError, DataError, FederationError, PluginError
from cloister.utils.files import atomic_path
from cloister.utils.rows import as_rows

FAST = {"task.model": "softmax", "num-rounds": 3, "seed": 3, "client.local-epochs": 2}


def quiet(**more):
    return ConsoleReporter(3, Console(file=open("/dev/null", "w"), **more))


def go(tmp_path, settings=None, clients=4):
    return simulate(FAST | {"output-dir": str(tmp_path)} | (settings or {}), clients, quiet())


class TestWhatIsLeftBehind:
    @pytest.fixture(scope="class")
    def outcome(self, tmp_path_factory):
        return go(tmp_path_factory.mktemp("runs"))

    def test_the_configuration_with_versions_and_a_hash(self, outcome):
        facts = json.loads((outcome.directory.path / "config.json").read_text())
        assert facts["config"]["task.model"] == "softmax" and facts["seed"] == 3
        assert facts["config-sha256"] == parse(facts["config"]).digest()
        assert facts["versions"]["flwr"] and facts["versions"]["cloister-fl"] == cloister.__version__

    def test_a_line_a_round(self, outcome):
        lines = [json.loads(line) for line in (outcome.directory.path / "rounds.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        last = lines[-1]
        assert last["central"]["accuracy"] > 0.5
        assert last["measured"]["noise_std"] > 0 and last["measured"]["distance"] > 0
        assert last["measured"]["accepted"] == 4 and last["seconds"]["total"] > 0

    def test_checkpoints_of_the_last_rounds(self, outcome):
        names = sorted(path.name for path in outcome.directory.checkpoints.iterdir())
        assert names == ["round-00001.npz", "round-00002.npz", "round-00003.npz"]
        with np.load(outcome.directory.checkpoints / "round-00003.npz") as saved:
            for name, array in outcome.arrays.items():
                np.testing.assert_array_equal(saved[name], array.numpy())

    def test_the_model_loads_without_cloister(self, outcome):
        with np.load(outcome.directory.path / "model.npz") as saved:
            assert saved["softmax/kernel"].shape == (64, 10)

    def test_the_claim_does_not_claim_too_much(self, outcome):
        claim = json.loads((outcome.directory.path / "privacy.json").read_text())
        assert claim["status"] == "heuristic" and claim["reasons"] and claim["rounds"] == 3
        assert claim["claims"] == []

    def test_tensorboard_reads_the_events(self, outcome):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(outcome.directory.path / "tensorboard"))
        events.Reload()
        assert [point.step for point in events.Scalars("central/accuracy")] == [0, 1, 2, 3]
        assert len(events.Scalars("privacy/noise-std")) == 3

    def test_the_path_is_absolute(self, outcome):
        assert outcome.directory.path.is_absolute()


def test_equal_seeds_give_equal_models_where_there_is_no_noise(tmp_path):
    first, second = (go(tmp_path, {"privacy.server": "none"}) for _ in range(2))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array.numpy(), second.arrays[name].numpy())


def test_a_seed_does_not_seed_the_noise(tmp_path):
    first, second = (go(tmp_path) for _ in range(2))
    assert not np.array_equal(*(outcome.arrays["softmax/bias"].numpy() for outcome in (first, second)))


def test_a_noise_seed_does_and_is_stamped(tmp_path):
    first, second = (go(tmp_path, {"privacy.noise-seed": 1}) for _ in range(2))
    np.testing.assert_array_equal(*(outcome.arrays["softmax/bias"].numpy() for outcome in (first, second)))
    claim = json.loads((first.directory.path / "privacy.json").read_text())
    assert claim["noise"] == "seeded" and any("seeded" in reason for reason in claim["reasons"])


@pytest.mark.parametrize("server", ["global-dp", "metric"])
def test_private_clients_send_neither_counts_nor_metrics(tmp_path, server):
    from cloister.client.app import app

    replies = []

    def eavesdrop(message, context):
        replies.append(app(message, context))
        return replies[-1]

    config = parse(FAST | {"output-dir": str(tmp_path), "privacy.server": server})
    run(LocalGrid.simulated(eavesdrop, config.flat(), 4), config, quiet())
    assert len(replies) == 12
    for reply in replies:
        assert set(reply.content) == {"arrays", "metrics"} and not dict(reply.content["metrics"])


def test_federated_evaluation_is_on_without_privacy_and_by_name_with_it(tmp_path):
    assert "accuracy" in go(tmp_path, {"privacy.server": "none"}).rounds[-1].federated
    assert not go(tmp_path).rounds[-1].federated
    outcome = go(tmp_path, {"evaluation.federated": "on"})
    assert "accuracy" in outcome.rounds[-1].federated
    assert "scores" in " ".join(outcome.plan.claim.unprotected)


@pytest.mark.parametrize("error", [OverflowError("math range error"), ConfigError("no price"), ValueError("order")])
def test_numbers_without_a_claim_end_a_run_before_anybody_trains(tmp_path, monkeypatch, error):
    asked = []
    settings = {"privacy.server": "none", "privacy.client": "dp-sgd", "client.batch-size": 32}
    config = parse(FAST | settings | {"output-dir": str(tmp_path)})

    def claim(*_):
        raise error

    monkeypatch.setattr("cloister.server.run.client_claim", claim)
    with pytest.raises(type(error)):
        run(LocalGrid.simulated(lambda message, context: asked.append(message), config.flat(), 4), config, quiet())
    assert not asked and not [*tmp_path.iterdir()]


class TestOneClearError:
    def test_of_the_configuration(self, tmp_path):
        def check(settings, error, says):
            with pytest.raises(error, match=says):
                go(tmp_path, settings)

        cases = [
            ({"task.name": "digit"}, PluginError, "task.name = 'digit'; did you mean 'digits'.; known: .*digits"),
            ({"strategy.name": "fedsgd"}, PluginError, "strategy.name = 'fedsgd'; .*known: .*fedavg"),
            ({"privacy.distance": "l7"}, PluginError, "privacy.distance = 'l7'; .*known: cosine"),
            ({"task.model": "cnn"}, ConfigError, "task.model must be one of mlp, softmax"),
            ({"strategy.momentum": 0.5}, ConfigError, "strategy.momentum = 0.5 is not an option of 'fedavg'"),
            ({"strategy.name": "fedavgm", "strategy.momentum": "high"}, ConfigError, "strategy.momentum = 'high'"),
            ({"strategy.name": "fedavgm", "strategy.momentum": 1.5}, ConfigError, "strategy.momentum must be"),
            ({"strategy.name": "fedmedian"}, ConfigError, "privacy.placement = 'update'"),
            ({"client.optimizer": "adam"}, ConfigError, "client.optimizer must be 'sgd'"),
            ({"task.name": "mnist", "task.model": "auto", "task.data-path": "nowhere"}, DataError, "nowhere"),
            ({"task.name": "heart-disease"}, CloisterError, "task.data-path"),
            ({"run-name": "../up"}, ConfigError, "run-name"),
            ({"num-rounds": 0}, ConfigError, "num-rounds = 0"),
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("clients", [0, 1])
    def test_of_too_few_clients(self, tmp_path, clients):
        with pytest.raises(ConfigError, match=f"clients = {clients} is fewer than strategy.min-nodes = 2"):
            go(tmp_path, clients=clients)

    def test_one_client_will_do_when_asked_for(self, tmp_path):
        assert go(tmp_path, {"strategy.min-nodes": 1}, clients=1).rounds[-1].measured.accepted == 1

    def test_a_directory_is_called_by_its_mechanisms(self, tmp_path):
        def check(settings, ending):
            plan = build(parse(FAST | {"output-dir": str(tmp_path), "run-name": ""} | settings))
            assert RunDirectory.create(plan).name.endswith(f"-digits-fedavg-{ending}")

        cases = [
            ({"privacy.server": "none"}, "none"),
            ({"privacy.server": "none", "privacy.client": "dp-sgd"}, "dp-sgd"),
            ({"privacy.server": "global-dp", "privacy.client": "gaussian"}, "global-dp-gaussian"),
        ]
        assert failures(cases, check) == []

    def test_of_a_run_name_that_is_taken(self, tmp_path):
        go(tmp_path, {"run-name": "mine"})
        with pytest.raises(ConfigError, match="run-name = 'mine' is taken"):
            go(tmp_path, {"run-name": "mine"})

    def test_of_a_taken_run_name_before_any_task_is_loaded(self, tmp_path, monkeypatch):
        (tmp_path / "mine").mkdir()
        settings = FAST | {"output-dir": str(tmp_path), "run-name": "mine"}
        monkeypatch.setattr("cloister.server.run.prepare", lambda *_, **__: pytest.fail("the task was loaded"))
        grid = LocalGrid.simulated(app, parse(settings).flat(), 2)
        with pytest.raises(ConfigError, match="exists; choose another or leave it empty"):
            run(grid, parse(settings), quiet())
        monkeypatch.setattr(
            "cloister.simulation.simulate.refuse_what_clients_would", lambda *_: pytest.fail("data was read")
        )
        with pytest.raises(ConfigError, match="run-name = 'mine' is taken"):
            simulate(settings, 2, quiet())

    @pytest.mark.parametrize(
        ("how", "told"), [("no-replies", True), ("too-few-nodes", True), ("as-asked", False), ("budget", False)]
    )
    def test_of_a_taken_run_name_with_how_to_go_on_with_that_run(self, tmp_path, how, told):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "privacy.json").write_text(json.dumps({"ended": {"how": how, "why": ""}}))
        with pytest.raises(ConfigError, match="choose another or leave it empty") as refused:
            refuse_name(parse(FAST | {"output-dir": str(tmp_path), "run-name": "mine"}))
        assert (f"resume = {str(tmp_path / 'mine')!r} goes on with that run" in str(refused.value)) is told

    @pytest.mark.parametrize("content", ["", "[]", '{"ended": 3}', '{"ended": {"how": ["disk"]}}'])
    def test_of_a_taken_run_name_whatever_lies_there(self, tmp_path, content):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "privacy.json").write_text(content)
        with pytest.raises(ConfigError, match="exists; choose another or leave it empty"):
            refuse_name(parse(FAST | {"output-dir": str(tmp_path), "run-name": "mine"}))

    def test_of_a_place_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="output-dir"):
            go(tmp_path, {"output-dir": str(tmp_path / "file" / "runs")})


def test_a_run_without_any_reply_stops_and_says_why(tmp_path):
    def broken(message, context):
        raise ValueError("row 17: salary 1234567")

    config = parse(FAST | {"output-dir": str(tmp_path)})
    with pytest.raises(FederationError, match="no reply counted in round 1: error"):
        run(LocalGrid.simulated(broken, config.flat(), 2), config, quiet())


def test_one_failing_client_does_not_stop_the_others(tmp_path):
    from cloister.client.app import app

    def flaky(message, context):
        if context.node_id == 3:
            raise MemoryError
        return app(message, context)

    config = parse(FAST | {"output-dir": str(tmp_path)})
    outcome = run(LocalGrid.simulated(flaky, config.flat(), 4), config, quiet())
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [3, 3, 3]
    assert {item.node_id for done in outcome.rounds[1:] for item in done.measured.rejected} == {3}


def test_a_checkpoint_that_fails_half_way_leaves_the_last_one(tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(b"whole")

    def fail():
        with atomic_path(path) as partial:
            partial.write_bytes(b"ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("keep", "left"), [(2, 2), (0, 5)])
def test_only_the_newest_checkpoints_are_kept(tmp_path, keep, left):
    directory = RunDirectory.create(build(parse({"output-dir": str(tmp_path)})))
    record: ArrayRecord = to_record(zeros())
    for number in range(5):
        directory.checkpoint(number, record)
        directory.prune(keep)
    names = sorted(path.name for path in directory.checkpoints.iterdir())
    assert len(names) == left and names[-1] == "round-00004.npz"


def test_the_narrator_tells_the_contract_the_rounds_and_the_result(tmp_path, capsys):
    simulate(FAST | {"output-dir": str(tmp_path)}, 4)
    said = capsys.readouterr().out
    assert "privacy        metric" in said and "heuristic" in said and "because" in said
    assert said.count("round ") >= 4 and "noise std" in said and "accuracy" in said
    assert said.count(f"run directory  {tmp_path}") == 2
    assert f"settings       num-rounds=3 seed=3 output-dir='{tmp_path}' task.model='softmax'" in said


def test_data_in_another_place_is_other_data_to_a_budget(tmp_path):
    """Two data sets of one task share no budget, and the same place is the same data however it is written."""

    def identity(path="", task="heart-disease"):
        return data_identity(parse({"task.name": task, "task.data-path": str(path)}))

    first = identity(tmp_path / "a")
    assert len({identity(), first, identity(tmp_path / "b"), identity(tmp_path / "a", "digits")}) == 4
    assert identity(tmp_path / "b" / ".." / "a") == first
    assert str(tmp_path) not in first and first.startswith("heart-disease-")


class Elsewhere(Digits):
    """A task whose benchmark is not on the server."""

    def load(self):
        raise DataError("task.data-path = '' must be a folder with the images")


@pytest.mark.parametrize("central", ["auto", False, True])
def test_a_server_without_examples_scores_nothing_unless_it_is_told_to(tmp_path, monkeypatch, caplog, central):
    monkeypatch.setitem(TASKS._table, "elsewhere", f"{__name__}:Elsewhere")
    settings = {"task.name": "elsewhere", "task.model": "softmax", "privacy.server": "none", "num-rounds": 1}
    settings |= {"evaluation.central": central, "evaluation.federated": "off"}
    config = parse(settings | {"output-dir": str(tmp_path), "tensorboard": False})
    grid = LocalGrid.simulated(app, config.flat(), 2)
    parts = [Digits(TaskConfig()).load().train.take(rows) for rows in np.split(np.arange(40), 2)]
    with handing_out(parts), pytest.raises(DataError) if central is True else nullcontext():
        outcome = run(grid, config, ConsoleReporter(1, Console(quiet=True)))
    if central is True:
        return
    assert outcome.ended == "as-asked" and not outcome.rounds[-1].central
    assert ("not scored on the server" in caplog.text) == (central == "auto")


class Sums(NumpyModel):
    """Two outputs: the sum of the inputs, and whether it is large."""

    def __init__(self):
        self.weights = {"bias": np.zeros(2, np.float32)}

    def initialise(self, seed):
        self.weights["bias"][:] = 0

    def predict(self, x):
        total = x.sum(axis=1)
        likely = 1 / (1 + np.exp(-self.weights["bias"][1] - total))
        return as_rows({"sum": total + self.weights["bias"][0], "large": likely})

    def loss_and_gradients(self, x, y):
        found = self.predict(x)
        residual = np.stack([found["sum"] - y["sum"], found["large"] - y["large"]], axis=1)
        return float(np.square(residual).mean()), {"bias": residual.mean(axis=0)}


class TwoOutputs(Task):
    recipe = Recipe(local_epochs=1, batch_size=8, learning_rate=0.1)
    input_shape, models, public = (3,), ("sums",), True
    target = {"sum": Target("mse"), "large": Target("binary-cross-entropy")}  # noqa: RUF012

    def load(self):
        x = np.random.default_rng(0).standard_normal((40, 3), np.float32)
        examples = Examples(x, {"sum": x.sum(axis=1), "large": (x.sum(axis=1) > 0).astype(np.int64)})
        return Dataset(examples, examples)

    def build(self):
        return Sums()


class NotFinite(TwoOutputs):
    """Its model is not finite once it is trained."""

    def build(self):
        model = Sums()
        predict = model.predict
        model.predict = lambda x: predict(x * (np.nan if model.weights["bias"].any() else 1))
        return model


def test_a_run_with_several_outputs_ends(tmp_path, monkeypatch):
    settings = {"num-rounds": 1, "privacy.server": "none", "task.model": "sums", "tensorboard": False}
    monkeypatch.setattr("cloister.tasks.making.TASKS.load", lambda name: TwoOutputs)
    assert simulate(settings | {"output-dir": str(tmp_path)}, 2, quiet()).ended == "as-asked"
    monkeypatch.setattr("cloister.tasks.making.TASKS.load", lambda name: NotFinite)
    with pytest.raises(CloisterError, match=r"model.npz cannot be used: weights or predictions are NaN"):
        simulate(settings | {"output-dir": str(tmp_path)}, 2, quiet())
