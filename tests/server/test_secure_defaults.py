"""Members of a secure aggregation that sets none: t and c follow from the number of nodes."""

import pytest
from secure_runs import settings

from cloister.config.privacy import LARGEST_COHORT, SMALLEST, with_parties
from cloister.config.run import parse
from cloister.estimate.preview import Options, preview
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate, with_cohort
from cloister.utils.errors import ConfigError

UNSET = {"secure-aggregation.threshold": 0, "secure-aggregation.colluding": 0}
ALONE = {"privacy.server": "global-dp", "secure-aggregation.enabled": True, "task.model": "softmax"}


def test_they_satisfy_the_protocol_for_every_number_of_nodes():
    for nodes in range(SMALLEST, LARGEST_COHORT + 1):
        config = parse(settings("runs", **UNSET) | {"strategy.min-nodes": nodes})
        secure = config.secure_aggregation
        t, c = secure.threshold, secure.colluding
        assert 2 * t > nodes + c, "two lists of survivors have an honest signer in common"
        assert nodes in secure.parties.survivors() and 1 <= c < t and secure.parties.honest >= 2
        assert c == nodes - t and 3 * c < nodes <= 3 * (c + 1), "a third may collude, and as many may be lost"


def test_both_sides_have_the_same_ones():
    config = parse(settings("runs", **UNSET) | {"strategy.min-nodes": 10})
    assert parse(config.flat()) == config
    assert (config.secure_aggregation.threshold, config.secure_aggregation.colluding) == (7, 3)


@pytest.mark.parametrize("nodes", [2, 3, LARGEST_COHORT + 1, 200])
def test_nodes_from_which_neither_follows_are_refused_with_the_remedy(nodes):
    with pytest.raises(ConfigError, match=r"threshold = 0 follows from strategy.min-nodes of 4 to 100: set that to"):
        parse(settings("runs", **UNSET) | {"strategy.min-nodes": nodes})


def test_a_number_that_is_set_stays():
    config = parse(settings("runs", threshold=5, colluding=0) | {"strategy.min-nodes": 6})
    assert (config.secure_aggregation.threshold, config.secure_aggregation.colluding) == (5, 0)
    off = {"strategy.min-nodes": 10, "secure-aggregation.enabled": False}
    assert with_parties(off) == off


@pytest.mark.parametrize(("clients", "fraction", "cohort"), [(4, 1.0, 4), (20, 0.5, 10), (7, 1.0, 7)])
def test_a_simulation_knows_its_cohort(clients, fraction, cohort):
    found = parse(with_cohort(ALONE | {"strategy.fraction-train": fraction}, clients))
    assert found.strategy.min_nodes == cohort
    assert found.secure_aggregation.threshold == cohort - (cohort - 1) // 3


def test_a_run_that_only_switches_it_on_has_a_claim_against_the_server(tmp_path):
    outcome = simulate(ALONE | {"output-dir": str(tmp_path), "num-rounds": 1}, 5, ConsoleReporter(0))
    assert outcome.rounds[-1].measured.accepted == 5
    claim = outcome.statement.claim
    assert claim.is_against_server and claim.is_guaranteed
    assert claim.parameters["secure-aggregation.colluding"] == 1


def test_a_plan_shows_them():
    config = preview(ALONE, Options(6, timing=False)).config
    assert (config.secure_aggregation.threshold, config.secure_aggregation.colluding) == (5, 1)
