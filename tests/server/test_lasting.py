"""Runs that leave a ledger that later runs go by."""

import json

import pytest
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.ledger_location import KEPT_BY, NOT_KEPT, draws_are_seen, is_simulated
from cloister.server.polling_grid import PollingGrid
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.datasets.characters import Digits
from cloister.utils.errors import BudgetExhausted, PrivacyError

SETTINGS = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "client.local-epochs": 1,
    "client.batch-size": 64,
    "tensorboard": False,
    "num-rounds": 1,
}


def go(tmp_path, **changes):
    settings = SETTINGS | {"output-dir": str(tmp_path)} | changes
    with (tmp_path / "said.txt").open("a") as said:
        return simulate(settings, 2, ConsoleReporter(1, Console(file=said, width=200)))


def shared(tmp_path):
    return list((tmp_path / "ledgers").glob("*")) if (tmp_path / "ledgers").exists() else []


@pytest.mark.parametrize("changes", [{}, {"privacy.server": "none", "privacy.noise-multiplier": 0.05}])
def test_a_simulation_on_public_data_keeps_its_ledger_to_itself_and_says_so(tmp_path, changes):
    outcome = go(tmp_path, **changes)
    assert not shared(tmp_path)
    ledger = Ledger(outcome.directory.path / "ledger.jsonl")
    assert ledger.entries and {entry.run for entry in ledger.entries} == {outcome.directory.path.name}
    facts = json.loads((outcome.directory.path / "privacy.json").read_text())["ledger"]
    assert (
        facts["lasting"] is False
        and facts["head"] == ledger.head
        and facts["releases-of-this-run"] == len(ledger.entries)
    )
    said = (tmp_path / "said.txt").read_text()
    assert NOT_KEPT in said and KEPT_BY in said


def test_so_that_runs_without_a_guarantee_are_in_no_later_ones_way(tmp_path):
    go(tmp_path, **{"privacy.server": "metric"})
    outcome = go(tmp_path, **{"privacy.max-epsilon": 50.0})
    assert len(outcome.rounds) == 2 and not outcome.stopped


@pytest.mark.parametrize(
    "asked", [{"privacy.max-epsilon": 50.0}, {"privacy.data-identity": "ward"}, {"privacy.ledger-dir": "{}/ledgers"}]
)
def test_each_of_three_keys_brings_the_lasting_ledger_back(tmp_path, asked):
    asked = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in asked.items()}
    for count in (1, 2):
        outcome = go(tmp_path, **asked)
        (path,) = shared(tmp_path)
        assert len({entry.run for entry in Ledger(path).entries}) == count
        assert Ledger(outcome.directory.path / "ledger.jsonl").head == Ledger(path).head
    assert NOT_KEPT not in (tmp_path / "said.txt").read_text()


def test_a_run_without_a_mechanism_is_in_the_ledger_that_a_budget_is_kept_in(tmp_path):
    """It could not be told which data it was about: the next budget was kept as if there had been no such run."""
    named = {"privacy.data-identity": "ward", "privacy.ledger-dir": str(tmp_path / "ledgers")}
    go(tmp_path, **named, **{"privacy.max-epsilon": 50.0})
    unguarded = {"privacy.server": "laplace-clustering", "privacy.noise-multiplier": 0.05}
    (path,), runs = shared(tmp_path), set(tmp_path.iterdir())
    before = path.read_bytes()
    with pytest.raises(
        PrivacyError, match=r"ε = 50 at δ = 1e-05 for one client, 9.* % of it left.*close-budget = true"
    ):
        go(tmp_path, **named, **unguarded)
    assert path.read_bytes() == before and set(tmp_path.iterdir()) == runs, "nothing was begun"
    go(tmp_path, **named, **unguarded, **{"privacy.close-budget": True})
    assert "that ends the budget which is kept there: ε = 50" in (tmp_path / "said.txt").read_text()
    assert [type(entry.event).__name__ for entry in Ledger(path).entries][:2] == ["Gaussian", "Unaccounted"]
    go(tmp_path, **named, **unguarded)  # there is none left to end
    with pytest.raises(BudgetExhausted, match="nothing can be claimed"):
        go(tmp_path, **named, **{"privacy.max-epsilon": 50.0})


@pytest.mark.parametrize(
    ("public", "server", "closes"),
    [(False, "none", True), (False, "global-dp", False)],
)
def test_a_run_says_at_its_start_that_no_budget_can_be_kept_after_it(tmp_path, monkeypatch, public, server, closes):
    monkeypatch.setattr(Digits, "public", public)
    changes = {"privacy.server": server, "privacy.noise-multiplier": 0.05, "evaluation.federated": "off"}
    go(tmp_path, **changes)
    before, begun, _ = (tmp_path / "said.txt").read_text().partition("round   1/1")
    assert begun and ("no run on it can keep a privacy.max-epsilon" in before) is closes


def test_a_run_that_the_clients_noise_protects_is_not_said_to_break_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(Digits, "public", False)
    none = {"privacy.server": "none", "privacy.noise-multiplier": 0.05}
    go(tmp_path, **none, **{"privacy.client": "gaussian", "evaluation.federated": "off"})
    line = " ".join((tmp_path / "said.txt").read_text().split())
    assert "the server's budget for whole clients (privacy.max-epsilon)" in line
    assert "the clients' own budgets are not concerned" in line
    assert "without a guarantee" not in line


def test_data_that_is_not_public_has_a_lasting_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(Digits, "public", False)
    go(tmp_path)
    assert len(shared(tmp_path)) == 1


class Own(Digits):
    """As somebody would write who takes the digits' model for other images."""


def test_a_subclass_of_a_public_task_is_not_taken_for_public(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS._table, "own", f"{__name__}:Own")
    go(tmp_path, **{"task.name": "own"})
    assert len(shared(tmp_path)) == 1


def test_every_built_in_task_is_about_public_data():
    for name in TASKS.names():
        task = TASKS.load(name)
        if task.__module__.startswith("cloister."):
            assert vars(task)["public"] is True, name


def nodes_with_files(tmp_path):
    import numpy as np

    data = Digits(parse({}).task).load().train
    for number in range(2):
        rows = np.arange(number, 200, 2)
        np.savez(tmp_path / f"{number}.npz", x=data.x[rows], y=data.y[rows])
    return [{"data-path": str(tmp_path / f"{n}.npz"), "ledger-dir": str(tmp_path / f"node-{n}")} for n in range(2)]


@pytest.mark.parametrize("beside", [{}, {"partition-id": 0, "num-partitions": 2}])
def test_nodes_with_files_of_their_own_keep_ledgers_and_so_does_their_server(tmp_path, beside):
    nodes = [node | beside for node in nodes_with_files(tmp_path)]
    config = parse(SETTINGS | {"output-dir": str(tmp_path)})
    grid = LocalGrid(app, config.flat(), nodes)
    run(grid, config, ConsoleReporter(1, Console(quiet=True)))
    assert len(shared(tmp_path)) == 1
    assert all(list((tmp_path / f"node-{number}").glob("*.jsonl")) for number in range(2))


def test_flowers_simulation_is_one_and_its_deployment_is_none():
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    in_memory = InMemoryGrid.__new__(InMemoryGrid)
    assert is_simulated(in_memory) and is_simulated(PollingGrid(in_memory))
    nodes = [{"partition-id": 0, "num-partitions": 1}]
    assert is_simulated(PollingGrid(LocalGrid(app, {}, nodes)))

    class Deployed(LocalGrid):
        is_simulated = False

    assert not is_simulated(PollingGrid(Deployed(app, {}, nodes)))


def test_a_name_of_data_that_changes_is_said_at_the_start_and_in_the_claim(tmp_path):
    """A budget that is spent under one name begins anew under the next: not without a word."""
    first, second = (go(tmp_path, **{"privacy.data-identity": name}) for name in ("first", "second"))
    assert "others" not in first.privacy["ledger"] and second.privacy["ledger"]["others"] == ["first"]
    said = (tmp_path / "said.txt").read_text()
    assert "warning: the data at this place has ledgers under other names too: first." in said
    assert "data at the same place had other names: what was released under first is not counted" in said
    assert Ledger(tmp_path / "ledgers" / "first.jsonl").others == ("second",)


def test_of_a_transport_that_is_not_known_nodes_may_learn_the_draws():
    assert draws_are_seen(object()) and not draws_are_seen(LocalGrid.simulated(lambda *_: None, {}, 2))
