"""From a budget to the noise and to the rounds: what is printed stays within the budget, and wastes little of it."""

from dataclasses import replace

import pytest
from planned import CLIENTS, DP_SGD, GLOBAL, TINY, planned, run

from cloister.config.run import parse
from cloister.estimate.budget import Within, for_all, within_server
from cloister.estimate.render import _all_within
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.filters import filter_for
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.server.prepare import prepare
from cloister.utils.errors import ConfigError, PrivacyError

GAUSSIAN = {"privacy.server": "none", "privacy.client": "gaussian"}
LAPLACE = {"privacy.server": "none", "privacy.client": "laplace", "privacy.radius": 1.0}
SIGMA = "privacy.dp-sgd-noise-multiplier"


def drawn(q):
    return {} if q == 1 else {"strategy.sampling": "poisson", "strategy.fraction-train": q, "strategy.min-nodes": 1}


def found(tmp_path, epsilon, rounds=30, q=1.0, **changes):
    settings = TINY | GLOBAL | drawn(q) | {"num-rounds": rounds, "output-dir": str(tmp_path)}
    settings |= {f"privacy.{key.replace('_', '-')}": value for key, value in changes.items()}
    (answer,) = within_server(settings, prepare(parse(settings)), epsilon)
    return answer


@pytest.mark.parametrize("q", [1.0, 0.02])
def test_the_rounds_that_a_multiplier_allows(tmp_path, q):
    rounds = found(tmp_path, 8.0, q=q).rounds
    sampling = UNSAMPLED if q == 1 else Sampling("poisson", probability=q)
    chosen = filter_for("gaussian" if q == 1 else "renyi", 8.0, 1e-5)
    spent = [chosen.spent(Account().plus(Gaussian(2.0, sampling), n)) for n in (rounds, rounds + 1)]
    assert spent[0] <= chosen.limit(8.0, 1e-5) < spent[1]


@pytest.mark.parametrize(
    ("epsilon", "q"),
    [
        *((epsilon, 1.0) for epsilon in (0.1, 1.0, 8.0, 50.0)),
        (1.0, 0.02),
        *(pytest.param(epsilon, 0.02, marks=pytest.mark.slow) for epsilon in (0.1, 8.0, 50.0)),
    ],
)
def test_what_is_printed_stays_within_the_budget_and_wastes_little(tmp_path, epsilon, q):
    z = found(tmp_path, epsilon, q=q).noise
    sampling = UNSAMPLED if q == 1 else Sampling("poisson", probability=q)
    chosen = filter_for("gaussian" if q == 1 else "renyi", epsilon, 1e-5)
    spent = chosen.spent(Account().plus(Gaussian(z, sampling), 30))
    assert 0.95 * chosen.limit(epsilon, 1e-5) < spent <= chosen.limit(epsilon, 1e-5)


def test_a_smaller_delta_needs_more_noise(tmp_path):
    assert found(tmp_path, 1.0, 1, target_delta=1e-9).noise > found(tmp_path, 1.0, 1).noise


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"target_delta": 0.0}, ConfigError, r"privacy\.target-delta"),
        ({"q": 2.0}, ConfigError, r"strategy\.fraction-train"),
        ({"placement": "model"}, ConfigError, r"privacy\.max-epsilon = 1 is a budget for a guarantee"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        found(tmp_path, 1.0, **changes)


@pytest.mark.parametrize("q", [1.0, 0.02])
def test_where_no_round_fits_the_smallest_budget_for_all_is_named(tmp_path, q):
    answer = found(tmp_path, 0.01, q=q, noise_multiplier=0.8)
    assert answer.rounds == 0 and answer.is_nothing
    assert found(tmp_path, answer.smallest, q=q, noise_multiplier=0.8).rounds >= 30
    assert found(tmp_path, 0.999 * answer.smallest, q=q, noise_multiplier=0.8).rounds < 30
    assert not found(tmp_path, answer.smallest, q=q).is_nothing and found(tmp_path, 8.0, q=q).smallest is None


def test_no_budget_is_named_that_bounds_nothing(tmp_path):
    assert found(tmp_path, 0.01, noise_multiplier=1e-3).smallest is None


def test_without_noise_no_round_fits(tmp_path):
    with pytest.raises((ConfigError, PrivacyError), match=r"privacy\.max-epsilon"):
        found(tmp_path, 1.0, noise_multiplier=0.0)


def test_a_run_with_that_budget_has_that_many_rounds(tmp_path):
    settings = TINY | GLOBAL | {"output-dir": str(tmp_path)}
    (answer,) = planned(settings, epsilon=4.0)["within"]
    budgeted = settings | {"privacy.max-epsilon": 4.0}
    ended = run(budgeted | {"num-rounds": 50})
    assert ended.ended == "budget" and len(ended.rounds) - 1 == answer["rounds"] == 3
    fitted = run(budgeted | {"privacy.noise-multiplier": answer["noise"], "privacy.data-identity": "other"})
    assert fitted.ended == "as-asked" and len(fitted.rounds) - 1 == 2
    assert fitted.plan.budget.share() > 0.99


@pytest.mark.parametrize(
    ("mechanism", "budget", "epsilon", "rounds"),
    [
        (GAUSSIAN | {"privacy.gaussian-noise-multiplier": 2.0}, "privacy.client-max-epsilon", 5.0, 4),
        (LAPLACE | {"privacy.laplace-noise-multiplier": 400.0}, "privacy.max-leakage", 5.0, 3),
    ],
)
def test_clients_with_that_budget_reply_in_that_many_rounds(tmp_path, mechanism, budget, epsilon, rounds):
    settings = TINY | mechanism | {"output-dir": str(tmp_path), budget: epsilon, "num-rounds": rounds + 1}
    told = planned(settings, epsilon=epsilon)
    (answer,), (allowed,) = told["within"], told["budgets"]
    assert answer["rounds"] == allowed["rounds"] == rounds and allowed["more"] == 0
    assert answered(settings) == rounds
    assert answered(settings | {answer["key"]: answer["noise"]}) == rounds + 1
    assert answered(settings | {answer["key"]: 0.99 * answer["noise"]}) == rounds


def answered(settings):
    """In how many rounds all clients replied: those in which none does count nothing."""
    outcome = run(settings | {"strategy.min-replies": 0})
    return sum(done.measured.accepted == CLIENTS for done in outcome.rounds[1:])


def test_clients_of_several_sizes_get_the_answer_of_those_who_need_the_most_noise():
    server = Within("client", "the server's", "privacy.noise-multiplier", 1.5, "", 3)
    small = Within("example", "a client's with 38 examples", SIGMA, 2.135, "", 0, 12.84)
    large = Within("example", "a client's with 39 examples", SIGMA, 2.095, "", 2)
    together = replace(small, whose="every client's")
    assert for_all([server, large, small]) == (server, together) and for_all([small]) == (small,)
    told = list(_all_within([server, large, small]))
    assert len(told) == 4 and told[-1] == f"every client's: {SIGMA}=2.135 for all rounds"
    none = replace(large, noise=None, why="no noise does", rounds=0, smallest=None)
    (found,) = for_all([small, none])
    assert found.is_nothing and found.why == "no noise does" and found.noise is found.smallest is None


@pytest.mark.slow
def test_examples_with_that_budget_are_trained_on_in_that_many_rounds(tmp_path):
    settings = TINY | DP_SGD | {"output-dir": str(tmp_path), "privacy.client-max-epsilon": 0.8, "num-rounds": 6}
    told = planned(settings, epsilon=0.8)
    assert {answer["unit"] for answer in told["within"]} == {"example"}
    fewest = min(answer["rounds"] for answer in told["within"])
    assert fewest == min(allowed["rounds"] for allowed in told["budgets"])
    assert 1 < fewest < 6 and answered(settings) == fewest
    most = max(answer["noise"] for answer in told["within"])
    assert answered(settings | {SIGMA: most}) == 6
