"""Budgets: spent over all runs on the same data, on the server and on a node, and never passed."""

import json
import re
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from rich.console import Console
from support import failures

from cloister.client.app import app
from cloister.client.ledgers import identity_of
from cloister.client.node import node_of
from cloister.client.request import promised
from cloister.config.run import parse
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.filters import filter_for
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.premises import UNCHOSEN
from cloister.privacy.claims.render import render
from cloister.privacy.claims.server import ALL_PLANNED
from cloister.server.build import build, data_identity
from cloister.server.checkpoint import settings_of
from cloister.server.polling_grid import Transport
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.tasks.datasets.characters import Digits
from cloister.utils.errors import BudgetExhausted, CloisterError, ConfigError, FederationError, PrivacyError
from cloister.utils.wire import CONFIG, PROMISE

SOUND = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "client.local-epochs": 1,
    "client.batch-size": 64,
    "tensorboard": False,
    "num-rounds": 4,
}


@pytest.fixture(autouse=True)
def digits_that_nobody_else_has(monkeypatch):
    """Budgets are about data that is to be remembered."""
    monkeypatch.setattr(Digits, "public", False)


def silent(rounds=4):
    return ConsoleReporter(rounds, Console(quiet=True))


def go(tmp_path, **changes):
    settings = SOUND | {"output-dir": str(tmp_path)} | {key.replace("__", "."): value for key, value in changes.items()}
    return simulate({key.replace("_", "-"): value for key, value in settings.items()}, 4, silent())


def ledger_of(tmp_path, **changes):
    return Ledger(tmp_path / "ledgers" / f"{data_identity(parse(SOUND | changes))}.jsonl")


def test_a_run_stops_before_the_round_that_would_pass_the_budget(tmp_path, capsys):
    settings = SOUND | {"output-dir": str(tmp_path), "privacy.max-epsilon": 4.0}
    outcome = simulate(settings, 4)
    assert 0 < len(outcome.rounds) - 1 < 4
    assert "stopped before round" in outcome.stopped and "past the budget of 4" in outcome.stopped
    assert outcome.stopped in " ".join(capsys.readouterr().out.split("\n"))
    with np.load(outcome.directory.path / "model.npz") as saved:
        for name, array in outcome.arrays.items():
            np.testing.assert_array_equal(saved[name], array.numpy())
    assert outcome.privacy["claims"][0]["epsilon"] <= 4.0
    assert outcome.privacy["rounds"] == len(outcome.rounds) - 1


def test_a_budget_that_not_one_round_fits_is_refused_with_the_noise_that_does(tmp_path):
    with pytest.raises(BudgetExhausted, match=r"not one round fits privacy\.max-epsilon = 0\.5 at") as refused:
        go(tmp_path, privacy__noise_multiplier=0.3, privacy__max_epsilon=0.5)
    assert not list(tmp_path.iterdir()), "nothing was begun"
    noise = float(re.search(r"privacy.noise-multiplier of (\S+) or more for 4 rounds", str(refused.value)).group(1))
    assert len(go(tmp_path, privacy__noise_multiplier=noise, privacy__max_epsilon=0.5).rounds) == 5


@pytest.mark.slow
def test_a_budget_of_clients_that_not_one_round_fits_is_refused_with_the_noise_that_does(tmp_path):
    settings = {"privacy__server": "none", "privacy__client": "dp-sgd", "privacy__client_max_epsilon": 0.5}
    # One seed, since what a round costs a client follows from how many examples it has.
    settings |= {"privacy__noise_multiplier": 0.05, "privacy__clipping_norm": 2.0, "seed": 1}
    with pytest.raises(BudgetExhausted, match=r"not one round fits privacy\.client-max-epsilon = 0\.5 at") as refused:
        go(tmp_path, **settings)
    assert not list(tmp_path.iterdir()), "nothing was begun"
    noise = float(re.search(r"dp-sgd-noise-multiplier of (\S+) or more for 4 rounds", str(refused.value)).group(1))
    outcome = go(tmp_path, **settings, privacy__dp_sgd_noise_multiplier=noise)
    assert len(outcome.rounds) == 5 and all(done.measured.accepted == 4 for done in outcome.rounds[1:])


def test_the_next_run_on_the_same_data_goes_on_where_the_last_one_stopped(tmp_path):
    first = go(tmp_path, privacy__max_epsilon=4.0)
    begun = set(tmp_path.iterdir())
    with pytest.raises(
        BudgetExhausted, match=r"earlier runs have left [0-9.]+ %; use a larger budget, or privacy.noise-"
    ):
        go(tmp_path, privacy__max_epsilon=4.0)
    assert len(first.rounds) > 1 and set(tmp_path.iterdir()) == begun, "no run directory is left behind"
    with pytest.raises(BudgetExhausted, match=r"max-epsilon = 0\.5 .* earlier runs have left 0 %; use a larger budget"):
        go(tmp_path, privacy__max_epsilon=0.5)
    third = go(tmp_path, privacy__max_epsilon=4.0, privacy__data_identity="other")
    assert len(third.rounds) == len(first.rounds)


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_a_calibrated_run_spends_its_budget_and_the_ledger_says_the_same(tmp_path, strategy):
    outcome = go(tmp_path, strategy__name=strategy, privacy__noise_multiplier="auto", privacy__max_epsilon=6.0)
    assert len(outcome.rounds) == 5 and not outcome.stopped
    claim, everything = outcome.privacy["claims"]
    assert 0.95 * 6.0 < claim["epsilon"] <= 6.0
    assert everything["epsilon"] == 6.0 and everything["filter"] == "Gaussian DP" and "condition" not in everything
    assert 0.99 < everything["spent"] <= 1.0
    account = ledger_of(tmp_path).account("client")
    assert best_epsilon(account, 1e-5)[0] == pytest.approx(claim["epsilon"])
    written = json.loads((outcome.directory.path / "privacy.json").read_text())
    assert written == outcome.privacy
    assert Ledger(outcome.directory.path / "ledger.jsonl").head == ledger_of(tmp_path).head


def test_a_run_over_secret_draws_is_calibrated_to_the_filter_that_counts_them(tmp_path):
    few = {"strategy__fraction_train": 0.5, "strategy__min_nodes": 1, "strategy__sampling": "poisson", "num_rounds": 2}
    outcome = go(tmp_path, privacy__noise_multiplier="auto", privacy__max_epsilon=6.0, **few)
    assert len(outcome.rounds) == 3 and not outcome.stopped
    (budget,) = ledger_of(tmp_path).budgets
    assert budget.filter == filter_for("renyi", 6.0, 1e-5)
    run, everything = outcome.privacy["claims"]
    assert run["epsilon"] <= 6.0 == everything["epsilon"] and 0.99 < everything["spent"] <= 1.0
    assert "Rényi DP of order" in everything["filter"]
    with pytest.raises(
        BudgetExhausted, match=r"not one round fits privacy\.max-epsilon = 6 .* earlier runs have left 0\."
    ):
        go(tmp_path, privacy__max_epsilon=6.0, **few)


def test_a_budget_that_was_raised_says_on_what_it_rests(tmp_path):
    go(tmp_path, privacy__max_epsilon=4.0, num_rounds=1)
    outcome = go(tmp_path, privacy__max_epsilon=9.0, num_rounds=1)
    everything = outcome.privacy["claims"][1]
    known = {premise["name"]: premise["known"] for premise in everything["premises"]}
    assert everything["epsilon"] == 9.0 and known["budget-fixed"] == "assumed"
    (line,) = (line for line in render(outcome.statement) if "all runs in the ledger" in line)
    assert (
        "ε ≤ 9 at δ = 1e-05" in line
        and "also if later runs were chosen by what earlier ones released" in line
        and "% spent" in line
    )


def test_a_budget_for_what_has_no_guarantee_is_refused(tmp_path):
    def check(changes, reason):
        with pytest.raises(ConfigError, match=rf"privacy\.max-epsilon = 5 .*{reason}"):
            go(tmp_path, privacy__max_epsilon=5.0, **changes)

    cases = [
        ({"privacy__server": "metric"}, "distance"),
        ({"privacy__placement": "model"}, "placement"),
        ({"privacy__noise_seed": 3}, "seeded"),
        ({"privacy__noise_multiplier": 0.0}, "no noise"),
    ]
    assert failures(cases, check) == []


def test_releases_without_a_guarantee_cannot_be_budgeted_afterwards(tmp_path):
    go(tmp_path, privacy__server="metric", num_rounds=1)
    with pytest.raises(BudgetExhausted, match="releases for which nothing can be claimed"):
        go(tmp_path, privacy__max_epsilon=50.0)
    with pytest.raises(CloisterError):  # nor can noise be calibrated to a budget
        go(tmp_path, privacy__max_epsilon=50.0, privacy__noise_multiplier="auto")


def test_a_sound_run_after_a_heuristic_one_claims_for_itself_alone(tmp_path):
    first = go(tmp_path, privacy__server="metric", num_rounds=1).privacy
    assert first["status"] == "heuristic" and first["claims"] == [] and first["reasons"]
    facts = go(tmp_path, num_rounds=1).privacy
    assert [claim["scope"] for claim in facts["claims"]] == ["this run"]
    assert facts["ledger"]["holds-releases-without-a-guarantee"]


@pytest.mark.slow
def test_a_run_that_its_releases_ended_early_is_counted_to_its_planned_end(tmp_path):
    """ε of the rounds that there were is no guarantee where what they released decided how many there are."""
    whole = Account([Gaussian(2.0)] * 40).epsilon(1e-5, "pld")
    short = go(tmp_path, num_rounds=40, evaluation__patience=1, privacy__data_identity="b")
    assert short.ended == "as-asked" and short.privacy["rounds"] < 40
    for claim in short.privacy["claims"]:
        assert claim["epsilon"] == pytest.approx(whole) and "planned" in claim["counts"]
    assert ALL_PLANNED in "".join(render(short.statement))
    again = go(tmp_path, num_rounds=40, evaluation__patience=1, privacy__data_identity="b")
    both = Account([Gaussian(2.0)] * (short.privacy["rounds"] + 40)).epsilon(1e-5, "pld")
    assert again.privacy["claims"][1]["epsilon"] == pytest.approx(both)


@pytest.mark.parametrize(("sampling", "amplifies"), [("fixed", False), ("poisson", True)])
def test_silence_and_time_are_said_to_be_covered_by_no_claim_however_clients_are_drawn(sampling, amplifies):
    settings = SOUND | {"strategy.sampling": sampling, "strategy.fraction-train": 0.5}
    replies, times = build(parse(settings)).claim.unprotected[:2]
    assert "which of them replied, and when, to the server and its network" in replies
    assert "to every client of the next one: a client that is silent or slow shows in it" in times
    assert ("the draw amplifies nothing against clients who measure it" in times) is amplifies


def test_a_sound_run_says_what_it_claims(tmp_path):
    outcome = go(tmp_path, num_rounds=2)
    facts = outcome.privacy
    assert facts["status"] == "sound" and facts["reasons"] == [] and facts["rounds"] == 2
    assert facts["noise"] == "from the operating system's entropy" and len(facts["unprotected"]) == 3
    run, everything = facts["claims"]
    assert run["scope"] == "this run" and everything["scope"] == "all runs in the ledger"
    for claim in (run, everything):
        assert claim["unit"] == "client" and claim["relation"] == "add-or-remove" and claim["delta"] == 1e-5
        assert claim["epsilon"] == min(claim["by-accountant"].values()) == claim["by-accountant"]["pld"]
    assert "counts" not in run
    assert "premises" not in run and [one["name"] for one in everything["premises"]] == ["unchosen"]
    assert [UNCHOSEN.sentence in line for line in render(outcome.statement)[2:4]] == [False, True]
    assert facts["ledger"]["head"] == ledger_of(tmp_path).head and facts["ledger"]["releases-of-this-run"] == 2
    again = go(tmp_path, num_rounds=2).privacy["claims"]
    assert again[0]["epsilon"] == pytest.approx(run["epsilon"]) and again[1]["epsilon"] > 1.3 * run["epsilon"]


def test_without_a_mechanism_nothing_is_claimed_and_no_later_budget_can_be(tmp_path):
    none = {"privacy.server": "none", "task.model": "softmax", "num-rounds": 1, "tensorboard": False}
    outcome = simulate(none | {"output-dir": str(tmp_path)}, 4, silent())
    facts = outcome.privacy
    assert facts["status"] == "none" and facts["claims"] == []
    assert facts["ledger"]["holds-releases-without-a-guarantee"]
    assert any("every client's model" in item for item in facts["unprotected"])
    entry, _ = ledger_of(tmp_path).entries
    assert isinstance(entry.event, Unaccounted) and "noised no update" in entry.event.reason
    with pytest.raises(BudgetExhausted, match="nothing can be claimed"):
        simulate(
            SOUND | {"output-dir": str(tmp_path), "privacy.max-epsilon": 3.0, "privacy.noise-multiplier": "auto"},
            4,
            silent(),
        )


def test_a_distance_far_below_1_is_calibrated_for_too(tmp_path):
    """It multiplies the noise beyond what an accountant takes; what is counted is less, and nothing breaks off."""
    private = {"privacy__server": "metric", "privacy__distance_release": "private", "num_rounds": 2}
    noise = {
        "privacy__noise_multiplier": "auto",
        "privacy__distance_noise_multiplier": 8.0,
        "privacy__max_epsilon": 8.0,
    }
    spent = go(tmp_path, privacy__clipping_norm=0.05, **private, **noise).privacy["claims"][0]["epsilon"]
    assert 7.5 < spent <= 8.0


def test_scores_that_left_without_noise_count_in_later_runs(tmp_path):
    go(tmp_path, evaluation__federated="on", num_rounds=1)
    (path,) = tmp_path.glob("*/privacy.json")
    during = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert during["status"] == "heuristic" and during["claims"] == []
    assert any("scores of the model" in reason for reason in during["reasons"])
    later = go(tmp_path, num_rounds=1).privacy
    assert later["ledger"]["holds-releases-without-a-guarantee"]
    assert [claim["scope"] for claim in later["claims"]] == ["this run"]


def test_an_adaptive_clip_pays_for_its_bits(tmp_path):
    """z = 2 and z_b = 4 are together one release with (1/4 + 1/16)^(-½) = 1.789."""
    go(tmp_path, privacy__clipping="adaptive", privacy__clipping_count_noise_multiplier=4.0)
    multipliers = [entry.event.noise_multiplier for entry in ledger_of(tmp_path).entries]
    assert multipliers == pytest.approx([1.7888543819998317] * 4)


def test_a_private_distance_is_accounted_for_at_the_least_noise_it_can_have(tmp_path):
    private = {"privacy__server": "metric", "privacy__distance_release": "private", "num_rounds": 2}
    outcome = go(tmp_path, **private)
    first = outcome.privacy["claims"][0]
    limit = 2 * 2.0 / 2**0.5
    multipliers = [entry.event.noise_multiplier for entry in Ledger(outcome.directory.path / "ledger.jsonl").entries]
    assert multipliers == pytest.approx([1.0, 2.0 / limit] * 2)
    assert all(done.measured.noise_multiplier >= 2.0 / limit - 1e-12 for done in outcome.rounds[1:])
    assert first["epsilon"] == pytest.approx(outcome.rounds[-1].measured.epsilon)
    later = go(tmp_path, privacy__noise_multiplier=50.0, num_rounds=1).privacy
    assert later["claims"][1]["epsilon"] > first["epsilon"]
    calibrated = go(
        tmp_path, privacy__max_epsilon=60.0, privacy__noise_multiplier="auto", privacy__data_identity="c", **private
    )
    assert len(calibrated.rounds) == 3 and calibrated.privacy["claims"][0]["epsilon"] <= 60.0


def test_a_private_distance_under_a_moving_clip_needs_a_ceiling(tmp_path):
    moving = {"privacy__server": "metric", "privacy__distance_release": "private", "privacy__clipping": "adaptive"}
    with pytest.raises(ConfigError, match=r"needs privacy\.max-distance"):
        go(tmp_path, **moving)
    assert go(tmp_path, privacy__max_distance=1.0, num_rounds=2, **moving).privacy["status"] == "sound"


def test_scores_of_clients_cannot_be_budgeted(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot cover evaluation\.federated"):
        go(tmp_path, privacy__max_epsilon=5.0, evaluation__federated="on")


def test_a_run_that_is_under_way_claims_nothing(tmp_path):
    from cloister.privacy.claims.to_json import running

    seen = []

    def spying(message, context):
        (path,) = tmp_path.glob("*/privacy.json")
        seen.append(json.loads(path.read_text()))
        return app(message, context)

    config = parse(SOUND | {"output-dir": str(tmp_path)})
    outcome = run(LocalGrid.simulated(spying, config.flat(), 3), config, silent())
    assert seen[0] == running(outcome.plan.claim) == seen[-1] and seen[0]["claims"] == []


def test_amplification_is_claimed_for_a_poisson_draw_and_for_a_registered_population(tmp_path):
    few = {"strategy__fraction_train": 0.5, "strategy__min_nodes": 1, "num_rounds": 1}
    plain = go(tmp_path, privacy__data_identity="a", **few).privacy
    poisson = go(tmp_path, privacy__data_identity="b", strategy__sampling="poisson", **few).privacy
    registered = go(tmp_path, privacy__data_identity="c", privacy__population=4, **few).privacy
    assert poisson["claims"][0]["epsilon"] < plain["claims"][0]["epsilon"]
    assert "amplification accounted for" in poisson["sampling"] and "no amplification" in plain["sampling"]
    insider, _, stranger = registered["claims"]
    assert insider["relation"] == "replace-one" and "accounted for" in registered["sampling"]
    assert stranger["epsilon"] < insider["epsilon"] and "no client" in stranger["adversary"]


@pytest.mark.parametrize("gated", [True, False])
def test_draws_that_nodes_can_learn_of_amplify_nothing(tmp_path, gated):
    """Over Flower's own SuperLink totals and names of objects tell who was drawn."""
    config = parse(SOUND | {"output-dir": str(tmp_path), "num-rounds": 1, "strategy.sampling": "poisson"})
    grid = LocalGrid.simulated(app, config.flat(), 4)
    grid.transport = Transport(packed=True, gated=gated)
    outcome = run(grid, config, silent())
    assert {entry.event.sampling.kind for entry in outcome.plan.budget.ledger.entries} == {
        "poisson" if gated else "none"
    }


def test_a_run_that_goes_on_over_another_superlink_amplifies_nothing_either(tmp_path):
    """Rounds that were planned count as the rounds before do, of which nodes may have learnt the draws."""

    class Dying(LocalGrid):
        rounds = 0

        def send_and_receive(self, messages, *, timeout=None):
            self.rounds += 1
            if self.rounds == 2 and not self.transport.gated:
                raise RuntimeError
            return super().send_and_receive(messages, timeout=timeout)

    changes = {"output-dir": str(tmp_path), "run-name": "r", "num-rounds": 2, "strategy.sampling": "poisson"}
    config = parse(SOUND | changes)
    for gated in (False, True):
        grid = Dying.simulated(app, config.flat(), 4)
        grid.transport = Transport(packed=True, gated=gated)
        with nullcontext() if gated else pytest.raises(RuntimeError):
            outcome = run(grid, config, silent())
        config = parse(settings_of(tmp_path / "r"))
    assert {entry.event.sampling.kind for entry in outcome.plan.budget.ledger.entries} == {"none"}


@pytest.mark.slow
def test_a_draw_that_a_seed_decides_amplifies_nothing(tmp_path):
    """The seed tells who took part. `poisson` is drawn from the operating system all the same."""
    few = {"strategy__fraction_train": 0.5, "strategy__min_nodes": 1, "num_rounds": 1, "seed": 3}
    seeded = go(tmp_path, privacy__data_identity="a", privacy__population=4, **few)
    assert "no amplification claimed" in seeded.privacy["sampling"]
    assert {entry.event.sampling.kind for entry in seeded.plan.budget.ledger.entries} == {"none"}
    runs = [go(tmp_path, strategy__sampling="poisson", **few | {"num_rounds": 12}) for _ in range(2)]
    first, second = ([done.measured.asked for done in run.rounds[1:]] for run in runs)
    assert first != second, "the same seed drew the same cohorts"
    assert not any({"asked", "accepted", "rejected"} & set(item) for item in measured(runs[0])), "the draw is no secret"


def measured(outcome):
    return [json.loads(line).get("measured", {}) for line in lines(outcome.directory.path / "rounds.jsonl")]


def lines(path):
    return path.read_text().splitlines()


def test_a_population_is_all_nodes_and_no_others(tmp_path):
    for population, says in ((3, "registers the nodes"), (5, "4 nodes are connected after")):
        with pytest.raises(FederationError, match=says):
            go(tmp_path, privacy__population=population, node_timeout=0.2, strategy__min_nodes=1)


def test_a_run_that_breaks_off_claims_the_round_that_was_released(tmp_path):
    """The release was sent to be scored when the round failed: it got out, and nobody wrote the round down."""
    from cloister.server import round

    class Broken(round.RoundLoop):
        def _evaluate_on_clients(self, number):
            if number == 3:
                raise KeyboardInterrupt
            return super()._evaluate_on_clients(number)

    private = {"privacy.server": "metric", "privacy.distance-release": "private", "output-dir": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cloister.server.run.RoundLoop", Broken)
        simulate(SOUND | private, 4, silent())
    (path,) = tmp_path.glob("*/privacy.json")
    facts = json.loads(path.read_text())
    assert facts["rounds"] == 3 and facts["ledger"]["releases-of-this-run"] == 6
    # Whoever broke it off may have seen the models: all four rounds count.
    whole = go(tmp_path, **{"privacy__server": "metric", "privacy__distance_release": "private", "num_rounds": 4})
    assert facts["claims"][0]["epsilon"] == pytest.approx(whole.privacy["claims"][0]["epsilon"])


def nodes(tmp_path, **budgets):
    return [
        {"partition-id": i, "num-partitions": 3, "ledger-dir": str(tmp_path / f"node-{i}")} | budgets.get(f"n{i}", {})
        for i in range(3)
    ]


def federated(tmp_path, node_configs, **changes):
    config = parse(SOUND | {"output-dir": str(tmp_path)} | changes)
    return run(LocalGrid(app, config.flat(), node_configs), config, silent())


def node_entries(tmp_path, node):
    (path,) = (tmp_path / f"node-{node}").glob("*.jsonl")
    return [entry for entry in Ledger(path).entries if entry.unit == "client"]


def test_a_node_whose_budget_is_spent_abstains_and_the_round_goes_on(tmp_path):
    outcome = federated(tmp_path, nodes(tmp_path, n1={"max-epsilon": 4.0}))
    accepted = [done.measured.accepted for done in outcome.rounds[1:]]
    assert accepted[0] == 3 and accepted[-1] == 2
    (rejection,) = outcome.rounds[-1].measured.rejected
    assert (
        rejection.node_id == 2
        and "BudgetExhausted" in rejection.detail
        and "no budget of this node covers this round" in rejection.detail
    )
    assert len(node_entries(tmp_path, 1)) == accepted.count(3)
    assert len(node_entries(tmp_path, 0)) == 4
    assert all(entry.event.noise_multiplier == 2.0 for entry in node_entries(tmp_path, 0))


def test_a_nodes_budget_holds_over_runs(tmp_path):
    configs = nodes(tmp_path, n1={"max-epsilon": 4.0})
    federated(tmp_path, configs)
    spent = len(node_entries(tmp_path, 1))
    outcome = federated(tmp_path, configs)
    assert all(done.measured.accepted == 2 for done in outcome.rounds[1:])
    assert len(node_entries(tmp_path, 1)) == spent


def test_a_node_with_a_budget_takes_no_part_in_what_has_no_guarantee(tmp_path):
    outcome = federated(tmp_path, nodes(tmp_path, n1={"max-epsilon": 4.0}), **{"privacy.server": "metric"})
    assert all(done.measured.accepted == 2 for done in outcome.rounds[1:])


def test_a_node_with_a_budget_lets_no_scores_out(tmp_path):
    """They carry no noise: no budget covers them."""
    outcome = federated(tmp_path, nodes(tmp_path, n1={"max-epsilon": 40.0}), **{"evaluation.federated": "on"})
    for done in outcome.rounds[1:]:
        assert done.measured.accepted == 3 and done.federated
        (unscored,) = done.unscored
        assert unscored.node_id == 2 and "without noise" in unscored.detail


def test_a_private_distance_costs_a_node_two_releases_a_round(tmp_path):
    """At the least multipliers there can be: a node cannot know better."""
    private = {"privacy.server": "metric", "privacy.distance-release": "private", "num-rounds": 2}
    outcome = federated(tmp_path, nodes(tmp_path), **private)
    entries = node_entries(tmp_path, 0)
    assert [entry.round for entry in entries] == [1, 1, 2, 2]
    assert [entry.event.noise_multiplier for entry in entries[:2]] == [1.0, pytest.approx(2.0 / (4 / np.sqrt(2)))]
    assert outcome.rounds[1].measured.noise_multiplier >= entries[1].event.noise_multiplier


@pytest.mark.parametrize("broken", ["ledger", "budget"])
def test_a_node_names_none_of_its_folders(tmp_path, broken):
    configs = nodes(tmp_path, n1={"max-epsilon": 1e-6} if broken == "budget" else {})
    if broken == "ledger":
        federated(tmp_path, configs, **{"num-rounds": 1})
        (path,) = (tmp_path / "node-1").glob("*.jsonl")
        path.write_text("{}\n")
    else:
        configs[1]["ledger-dir"] = f"{tmp_path}/x/../node-1"
    outcome = federated(
        tmp_path, configs, **{"num-rounds": 1} | ({"privacy.server": "metric"} if broken == "budget" else {})
    )
    (rejection,) = outcome.rounds[1].measured.rejected
    assert ("LedgerError" if broken == "ledger" else "no budget of this node covers this round") in rejection.detail
    assert tmp_path.name not in rejection.detail


def test_a_node_knows_its_data_however_the_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {
        identity_of(node_of({"data-path": str(path)}), "mnist")
        for path in ("data.npz", "./x/../data.npz", tmp_path / "data.npz", "~/data.npz")
    }
    assert len(names) == 1
    assert identity_of(node_of({"data-path": "other.npz"}), "mnist") not in names
    assert identity_of(node_of({"data-path": "data.npz", "data-identity": "ward-7"}), "mnist") == "ward-7"


def test_a_node_takes_no_part_where_the_promise_cannot_be_read(tmp_path):
    def lied_to(message, context):
        if context.node_id == 2:
            told = ConfigRecord({**message.content.config_records[CONFIG], PROMISE: "much"})
            message.content = RecordDict({**message.content, CONFIG: told})
        return app(message, context)

    config = parse(SOUND | {"output-dir": str(tmp_path), "num-rounds": 1})
    grid = LocalGrid(lied_to, config.flat(), [dict(node) for node in nodes(tmp_path)])
    (rejection,) = run(grid, config, silent()).rounds[1].measured.rejected
    assert rejection.node_id == 2 and "PrivacyError: 'privacy-events' in the server's message" in rejection.detail
    assert not (tmp_path / "node-1").exists() and len(node_entries(tmp_path, 0)) == 1


def test_a_nodes_budget_must_be_a_number(tmp_path, caplog):
    wrong = {"max-epsilon": "little", "target-delta": "little"}
    outcome = federated(tmp_path, nodes(tmp_path, n1=wrong), **{"num-rounds": 1})
    (rejection,) = outcome.rounds[1].measured.rejected
    assert "NodeConfigError: details are in the log of the node" in rejection.detail
    for key in wrong:
        assert f"{key} = 'little' is not valid: it must be a valid number" in caplog.text
    assert not (tmp_path / "node-1").exists() and "little" not in rejection.detail


ODD = [[], "much", 3.0, ["{" * 999], ["[" * 999], ["null"], [b"{}"]]
ODD_EVENTS = (
    {"kind": "gaussian", "noise_multiplier": -1.0},
    {"kind": "gaussian", "noise_multiplier": float("nan")},
    {"kind": "gaussian", "noise_multiplier": True},
    {"kind": "gaussian", "noise_multiplier": 2.0, "sampling": {"kind": "poisson", "probability": 0.1}},
    {"kind": "pure", "epsilon": float("inf")},
    {"kind": "gaussian"},
)


def test_a_promise_that_cannot_be_read_is_refused():
    """Leave what can be read, and is no promise, to tests/privacy/test_promises.py."""

    def check(promise):
        with pytest.raises(PrivacyError, match="'privacy-events' in the server's message"):
            promised({"privacy-events": promise})

    assert failures([*ODD, *([json.dumps(event)] for event in ODD_EVENTS)], check) == []
