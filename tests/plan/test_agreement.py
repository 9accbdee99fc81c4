"""A plan says, to the last digit, what the run claims when it is over."""

import json

import pytest
from planned import DP_SGD, GLOBAL, TINY, Uniformly, claimed, planned, run

from cloister.client.ledgers import InMemoryLedger
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.mechanisms import MECHANISMS
from cloister.simulation.grid import LocalGrid
from cloister.utils.errors import BudgetExhausted

GLOBAL = GLOBAL | {"privacy.noise-multiplier": 1.7}
TINY = TINY | {"num-rounds": 3}
METRIC = {"privacy.server": "metric", "privacy.noise-multiplier": 1.7}
PRIVATE = METRIC | {"privacy.distance-release": "private"}
FEW = {"strategy.fraction-train": 0.5, "strategy.min-nodes": 1}
POISSON = FEW | {"strategy.sampling": "poisson"}
LAPLACE = {"privacy.server": "none", "privacy.client": "laplace", "privacy.laplace-noise-multiplier": 400.0}
CASES = {
    "none": {"privacy.server": "none"},
    "fixed clip": GLOBAL | {"num-rounds": 11},
    "adaptive clip": GLOBAL | {"privacy.clipping": "adaptive", "privacy.clipping-count-noise-multiplier": 4.0},
    "noise that can be repeated": GLOBAL | {"privacy.noise-seed": 3},
    "rule": GLOBAL | {"privacy.placement": "rule", "strategy.name": "fedmedian"},
    "trimmed mean": GLOBAL | {"privacy.placement": "rule", "strategy.name": "fedtrimmedavg"},
    "model": GLOBAL | {"privacy.placement": "model"},
    "exact distance": METRIC,
    "private distance": PRIVATE,
    "part of the clients": GLOBAL | FEW,
    "plugin": {"privacy.server": "uniformly", "privacy.options": "epsilon=1.5"},
    "scores of clients": GLOBAL | {"evaluation.federated": "on"},
    "gaussian": {"privacy.server": "none", "privacy.client": "gaussian"},
    "laplace": LAPLACE | {"privacy.radius": 1.0},
    "laplace by layer": LAPLACE | {"privacy.radius": 1.0, "privacy.per-layer": True, "privacy.max-leakage": 2.0},
    "laplace as published": LAPLACE,
    "clusters": LAPLACE | {"privacy.server": "laplace-clustering", "privacy.radius": 1.0},
    "automatic noise": GLOBAL | {"privacy.noise-multiplier": "auto", "privacy.max-epsilon": 5.0},
    "a budget that ends the run": GLOBAL | {"privacy.max-epsilon": 3.0, "num-rounds": 5},
}
SLOW = {
    "registered clients": GLOBAL | FEW | {"privacy.population": 4, "seed": -1},
    "adaptive clip of a sum": GLOBAL
    | {"privacy.clipping": "adaptive", "privacy.clipping-count-noise-multiplier": 4.0, "strategy.min-nodes": 4}
    | {"secure-aggregation.enabled": True, "secure-aggregation.threshold": 3, "secure-aggregation.colluding": 1},
    "distance of a sum": PRIVATE
    | {"privacy.distance": "rms", "privacy.max-distance": 1.5, "strategy.min-nodes": 4}
    | {"secure-aggregation.enabled": True, "secure-aggregation.threshold": 3, "secure-aggregation.colluding": 1},
    "secret draws": GLOBAL | POISSON,
    "secret draws under a private distance": PRIVATE | POISSON,
    "dp-sgd": DP_SGD,
    "dp-sgd below global-dp": DP_SGD | GLOBAL,
    "dp-sgd of shuffled batches": DP_SGD | {"privacy.batch-sampling": "shuffle"},
    "clusters of gaussians": {
        "privacy.server": "laplace-clustering",
        "privacy.client": "gaussian",
        "privacy.noise-seed": -1,
    },
}
OF_ONE_NOISE = ("fixed clip", "adaptive clip", "rule", "model", "plugin")
"""Cases in which all rounds have the noise of the first one."""
PARAMETERS = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The plugin, as its entry point would register it."""
    monkeypatch.setitem(MECHANISMS._table, "uniformly", f"{Uniformly.__module__}:Uniformly")


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_claim_is_the_one_that_was_planned(tmp_path, name):
    settings = TINY | {"output-dir": str(tmp_path)} | (CASES | SLOW)[name]
    before = planned(settings)
    outcome = run(settings)
    assert before["privacy"] == claimed(outcome)
    assert before["rounds"] == outcome.privacy["rounds"]
    assert bool(before["stops"]) == (outcome.ended == "budget") == (name == "a budget that ends the run")
    if name in OF_ONE_NOISE:
        noise, first = before["noise"]["server"], outcome.rounds[1].measured
        assert noise["minimum-std"] == noise["maximum-std"] == first.noise_std > 0
        assert noise["multiplier"] == first.noise_multiplier


def test_every_kind_of_claim_is_compared(tmp_path):
    """Sound and heuristic ones, and those of clients: a comparison of nothing with nothing would pass as well."""
    names = ("none", "fixed clip", "plugin", "model", "exact distance", "laplace")
    status = {name: planned(TINY | {"output-dir": str(tmp_path)} | CASES[name]) for name in names}
    epsilons = {name: [claim["epsilon"] for claim in told["privacy"]["claims"]] for name, told in status.items()}
    assert len(epsilons["fixed clip"]) == 2
    assert epsilons["plugin"][0] > 1 and not epsilons["model"] and not epsilons["exact distance"]
    assert {told["privacy"]["status"] for told in status.values()} == {"none", "sound", "heuristic"}
    assert len(status["laplace"]["privacy"]["clients"]["claims"]) == 3


def test_a_plan_of_sites_is_conditional_and_one_of_a_simulation_has_the_runs_premises(tmp_path):
    settings = TINY | DP_SGD | {"output-dir": str(tmp_path)}
    for told, status in ((planned(settings), "sound"), (planned(settings, sizes=(300,)), "conditional")):
        (found,) = {told["privacy"]["clients"]["status"], told["by-size"]["status"]}
        assert found == status and ("simulation" in told["privacy"]) == (status == "sound")


def test_the_last_digit_can_tell():
    """1/z² of eleven rounds, added up in another way than the ledger does, gives another ε."""
    one_by_one, at_once = Account([Gaussian(1.7)] * 11), Account().plus(Gaussian(1.7), 11)
    assert one_by_one.epsilon(1e-5, "pld") != at_once.epsilon(1e-5, "pld")
    assert CASES["fixed clip"]["num-rounds"] == 11 and GLOBAL["privacy.noise-multiplier"] == 1.7


def test_earlier_runs_on_the_same_data_count(tmp_path):
    settings = TINY | GLOBAL | {"output-dir": str(tmp_path), "privacy.data-identity": "ward-7"}
    fresh = planned(settings)
    run(settings)
    again = planned(settings)
    assert again["privacy"] == claimed(run(settings))
    everything = [told["privacy"]["claims"][1]["epsilon"] for told in (fresh, again)]
    assert everything[0] < everything[1], "the earlier run was not counted"


def test_a_budget_that_is_spent_leaves_no_rounds(tmp_path):
    settings = TINY | GLOBAL | {"output-dir": str(tmp_path), "privacy.max-epsilon": 3.0, "num-rounds": 5}
    run(settings)
    told = planned(settings, timing=True)
    assert told["rounds"] == 0 and "before round 1" in told["stops"]
    (budget,) = told["budgets"]
    assert budget["before"] == budget["after"] > 0.5 and budget["more"] == 0
    assert told["privacy"]["rounds"] == 0
    with pytest.raises(BudgetExhausted, match=r"not one round fits privacy\.max-epsilon = 3"):
        run(settings)
    with pytest.raises(BudgetExhausted, match="is spent"):
        planned(settings | {"privacy.noise-multiplier": "auto", "privacy.max-epsilon": 2.0})


def test_what_a_budget_has_left_is_what_the_run_leaves(tmp_path):
    settings = TINY | GLOBAL | {"output-dir": str(tmp_path), "privacy.max-epsilon": 9.0}
    (budget,) = planned(settings)["budgets"]
    outcome = run(settings)
    assert budget["after"] == outcome.plan.budget.share() and budget["rounds"] == 3 and budget["before"] == 0.0
    further = run(settings | {"num-rounds": 99})
    assert len(further.rounds) - 1 == budget["more"] > 2 and further.ended == "budget"


def test_canaries_thin_the_noise_as_in_the_run(tmp_path):
    settings = TINY | GLOBAL | {"privacy.canaries": 6, "output-dir": str(tmp_path)}
    noise, first = planned(settings)["noise"]["server"], run(settings).rounds[1].measured
    assert noise["minimum-std"] == pytest.approx(first.noise_std)
    without = planned(settings | {"privacy.canaries": 0})["noise"]["server"]
    assert noise["minimum-std"] == pytest.approx(without["minimum-std"] * 4 / 7)


def test_the_noise_of_a_distance_lies_within_what_was_planned(tmp_path):
    for settings in (PRIVATE, METRIC, METRIC | {"privacy.max-distance": 0.3}):
        settings = TINY | {"output-dir": str(tmp_path)} | settings
        noise = planned(settings)["noise"]["server"]
        for done in run(settings).rounds[1:]:
            assert noise["minimum-std"] * (1 - 1e-12) <= done.measured.noise_std <= noise["maximum-std"] * (1 + 1e-12)
    assert noise["minimum-std"] == pytest.approx(1.7 * 2.0 / 4 / 0.3)


def test_curves_are_what_rounds_tell(tmp_path):
    settings = TINY | GLOBAL | {"output-dir": str(tmp_path), "num-rounds": 5}
    (series,) = planned(settings)["by-round"]
    outcome = run(settings)
    told = [json.loads(line)["measured"]["epsilon"] for line in (lines(outcome)[1:])]
    assert [point["value"] for point in series["points"]] == told
    assert [point["round"] for point in series["points"]] == [1, 2, 3, 4, 5]


def lines(outcome):
    return (outcome.directory.path / "rounds.jsonl").read_text().splitlines()


def test_a_run_that_ends_early_claims_no_more(tmp_path):
    """By what was released (its noise makes models worse and worse), or because clients are gone."""
    hopeless = {"privacy.clipping-norm": 50.0, "evaluation.patience": 1, "num-rounds": 20}
    settings = TINY | GLOBAL | hopeless | {"output-dir": str(tmp_path)}
    before, outcome = planned(settings)["privacy"]["claims"][0]["epsilon"], run(settings)
    # A run of 20 rounds that each happen to be better than the one before is not to be expected.
    assert len(outcome.rounds) - 1 < 20 and "counted for all rounds" in outcome.privacy["claims"][0]["counts"]
    assert outcome.privacy["claims"][0]["epsilon"] == pytest.approx(before, rel=1e-14)


@pytest.mark.slow
def test_sizes_of_clients_are_those_that_they_account_for(tmp_path, monkeypatch):
    """Each simulated client counts its own releases: the plan's figure for its size is what they come to."""
    grids = []

    class Kept(LocalGrid):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            grids.append(self)

    settings = TINY | DP_SGD | {"output-dir": str(tmp_path), "client.batch-size": 250, "num-rounds": 1}
    told = planned(settings, clients=2)["by-size"]
    monkeypatch.setattr("cloister.simulation.simulate.LocalGrid", Kept)
    run(settings, clients=2)
    spent = {
        round(1 / account.epsilon(1e-5), 9)
        for context in grids[-1]._contexts.values()
        if not (account := InMemoryLedger(context.state).account("example", "add-or-remove", insiders=False)).is_empty
    }
    figures = [size["claims"][0]["by-accountant"]["rdp"] for size in told["by-examples"]]
    assert {round(1 / epsilon, 9) for epsilon in figures} == spent
    assert sum(told["clients-of-size"].values()) == 2
