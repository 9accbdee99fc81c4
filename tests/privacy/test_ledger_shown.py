"""The whole of what `cloister ledger show` prints, as a site's officer reads it."""

from pathlib import Path

import pytest
from forged_ledgers import write

from cloister.privacy.accounting import ledger as module
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.report import print_ledger
from cloister.utils.errors import ConfigError
from cloister.utils.text import at_most

RUN = "12105499748529253695"
FIXED = "it holds if no run was chosen, ended early or resumed by what had been released"
CHOSEN = "also if later runs were chosen by what earlier ones released"


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """An empty folder, on a day that is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.time, "time", lambda: 1_700_000_000.5)


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return the printed lines, without the blanks at their ends."""

    def lines(ledger, delta=1e-5, relation="add-or-remove", columns=200):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_ledger(ledger, delta, relation)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return lines


def site():
    """A ledger with a release of every kind, and with budgets that were set and changed."""
    ledger = Ledger(Path("[site] ledger.jsonl"))
    for run, unit, epsilon, kind in (
        ("first", "example", 4.0, "renyi"),
        ("first", "client", 9.0, "gaussian"),
        ("[b]second[/b]", "client", 5.1234567, "gaussian"),
        ("first", "group", 2.0, "renyi"),
        ("second", "group", 0.0, "renyi"),
    ):
        ledger.limit(run, unit, 1e-5, epsilon, kind)
    steps = Repeated(Gaussian(1.0, Sampling("poisson", 0.0256)), 40)
    few = Gaussian(4.0, Sampling("without-replacement", cohort=3, population=900))
    for number, (event, unit, mechanism, finish) in enumerate(
        (
            (steps, "example", "dp-sgd, [as] asked", True),
            (few, "client", "as the server promised", False),
            (Unaccounted("[scores] left without noise"), "group", "scores", True),
            (Unaccounted("this node counts on no noise of the server's"), "group", "as the server promised", True),
            (Unaccounted("[scores] left without noise"), "group", "scores", True),
            (Laplace(0.5, 2.0), "neighbourhood", "laplace", True),
        ),
        start=8,
    ):
        release = ledger.open(event, unit, RUN, number, allow=lambda: None, mechanism=mechanism)
        if finish:
            ledger.done(release)
    return ledger


def bounds(ledger, unit, relation, delta):
    account = ledger.account(unit, relation, insiders=True)
    return "; ".join(f"ε = {at_most(account.epsilon(delta, name))} by {name}" for name in ("rdp", "pld"))


def test_releases_then_reasons_then_budgets_then_what_they_amount_to(shown):
    """One page: brackets stay, reasons have numbers, what has no bound comes last."""
    ledger = site()
    of_clients = 4 / 4**2 / ledger.filter_of("client").limit(5.1234567, 1e-5)
    order = ledger.filter_of("example")
    of_examples = ledger.account("example").renyi(order.order) / order.limit(4.0, 1e-5)
    assert shown(ledger) == [
        "[site] ledger.jsonl",
        "opened     round unit          run                  mechanism              "
        "event                                         handed on",
        f"2023-11-14 8     example       {RUN} dp-sgd, [as] asked     "
        "40 times gaussian, z = 1, poisson 0.0256      yes",
        f"2023-11-14 9     client        {RUN} as the server promised "
        "gaussian, z = 4, 3 of 900                     unknown: counts",
        f"2023-11-14 10    group         {RUN} scores                 "
        "no guarantee (1)                              yes",
        f"2023-11-14 11    group         {RUN} as the server promised "
        "no guarantee (2)                              yes",
        f"2023-11-14 12    group         {RUN} scores                 "
        "no guarantee (1)                              yes",
        f"2023-11-14 13    neighbourhood {RUN} laplace                "
        "laplace, ε = 0.5 per unit, leakage 1 within 2 yes",
        "no guarantee (1), unit group, 2 releases: [scores] left without noise",
        "no guarantee (2), unit group, 1 release: this node counts on no noise of the server's",
        f"budget from 2023-11-14, run first, unit example: ε = 4 at δ = 1e-05, kept by {order}",
        "budget from 2023-11-14, run first, unit client: ε = 9 at δ = 1e-05, kept by Gaussian DP",
        "budget from 2023-11-14, run [b]second[/b], unit client: ε = 5.12346 at δ = 1e-05, kept by Gaussian DP",
        f"budget from 2023-11-14, run first, unit group: ε = 2 at δ = 1e-05, kept by {ledger.filter_of('group')}",
        f"budget from 2023-11-14, run second, unit group: none, kept by {ledger.filter_of('group')}",
        f"client, add-or-remove, δ = 1e-05: {bounds(ledger, 'client', 'add-or-remove', 1e-5)}; {FIXED}",
        f"client, add-or-remove: ε ≤ 5.12346 at δ = 1e-05, {CHOSEN}; {at_most(100 * of_clients, 3)} % spent",
        f"example, add-or-remove, δ = 1e-05: {bounds(ledger, 'example', 'add-or-remove', 1e-5)}; {FIXED}",
        f"example, add-or-remove: ε ≤ 4 at δ = 1e-05, {CHOSEN}; {at_most(100 * of_examples, 3)} % spent",
        "neighbourhood: leakage 1 within it",
        "group, add-or-remove: no ε bounds these releases",
    ]


def test_where_one_is_exchanged_each_amount_is_that_of_the_relation(shown):
    """At the δ that is asked for; what a budget had room for when one is left out may pass it."""
    ledger = site()
    of_clients = 4 / 4**2 / ledger.filter_of("client").limit(5.1234567, 1e-5)
    assert shown(ledger, 1e-6, "replace-one")[-6:] == [
        f"client, replace-one, δ = 1e-06: {bounds(ledger, 'client', 'replace-one', 1e-6)}; {FIXED}",
        f"client, replace-one: ε ≤ 5.12346 at δ = 1e-05, {CHOSEN}; {at_most(100 * of_clients, 3)} % spent",
        f"example, replace-one, δ = 1e-06: {bounds(ledger, 'example', 'replace-one', 1e-6)}; {FIXED}",
        "example, replace-one: more is spent than the budget of ε = 4 at δ = 1e-05",
        "neighbourhood: leakage 1 within it",
        "group, replace-one: no ε bounds these releases",
    ]


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        (
            RUN,
            [
                "                                             mecha",
                "opened     round unit   run                  nism  event  handed on",
                f"2023-11-14 1     client {RUN} the   gaussi unknown: counts",
                "                                             mecha an, z",
                "                                             nism  = 1.5",
                "                                             of",
                "                                             this",
                "                                             serve",
                "                                             r",
            ],
        ),
        (
            RUN + "0",
            [
                "opened     round unit   run        mechanism   event      handed on",
                "2023-11-14 1     client 1210549974 the         gaussian,  unknown: counts",
                "                        8529253695 mechanism   z = 1.5",
                "                        0          of this",
                "                                   server",
            ],
        ),
    ],
)
def test_in_a_narrow_window_days_units_and_numbers_of_runs_stay_whole(shown, run, lines):
    """Names that people choose may be broken, and nothing is left out."""
    ledger = Ledger(Path("ledger.jsonl"))
    ledger.open(Gaussian(1.5), "client", run, 1, allow=lambda: None, mechanism="the mechanism of this server")
    found = shown(ledger, columns=74)
    assert found[:-1] == ["ledger.jsonl", *lines] and len(found[-1]) > 74


def test_a_ledger_without_releases_has_budgets_alone(shown):
    ledger = Ledger(Path("ledger.jsonl"))
    ledger.limit("run", "client", 1e-6, 0.123456789)
    head = "opened round unit run mechanism event handed on"
    assert shown(ledger) == [
        "ledger.jsonl",
        head,
        "budget from 2023-11-14, run run, unit client: ε = 0.123457 at δ = 1e-06, kept by Gaussian DP",
    ]


def test_what_costs_nothing_is_within_a_budget_without_room(shown):
    """A Rényi filter of an order for ε = 8 has no room for ε = 0.001."""
    ledger = Ledger(Path("ledger.jsonl"))
    for epsilon in (8.0, 0.001):
        ledger.limit("run", "client", 1e-5, epsilon, "renyi")
    write(Path("ledger.jsonl"), [Pure(1e-200)])
    ledger.refresh()
    assert shown(ledger)[-1] == f"client, add-or-remove: ε ≤ 0.001 at δ = 1e-05, {CHOSEN}; 0 % spent"


@pytest.mark.parametrize(
    ("delta", "relation", "refusal"),
    [
        (1e-5, "swap", "relation must be one of add-or-remove, replace-one; got 'swap'"),
        (0.0, "add-or-remove", "delta must be above 0 and below 1, got 0.0"),
        (1.0, "replace-one", "delta must be above 0 and below 1, got 1.0"),
    ],
)
def test_what_is_no_question_is_refused_before_anything_is_shown(capsys, delta, relation, refusal):
    with pytest.raises(ConfigError) as refused:
        print_ledger(Ledger(Path("ledger.jsonl")), delta, relation)
    assert str(refused.value) == refusal and not capsys.readouterr().out
