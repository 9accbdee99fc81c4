"""The three sentences about a mechanism, word for word, as an officer reads them."""

import math
from dataclasses import replace

import pytest
from claimed import HELD
from support import failures

from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LedgerState, LocalClaim, OfSize, Statement
from cloister.privacy.claims.premises import BUDGET_FIXED, UNCHOSEN
from cloister.privacy.claims.render import (
    REASONABLE,
    Meaning,
    best_guess,
    best_guess_of_a_part,
    meanings,
    percent,
    summary_of_clients,
    weakest,
)
from cloister.privacy.claims.server import ALL_RUNS, RUN
from cloister.privacy.mechanisms.distributed.shares import COLLUDING

NO_BOUND = (
    "No number bounds how much a guess about one client or one person can improve: treat the models as if they had "
    "been trained without protection."
)
NOTHING = "There is nothing to guess from."
UNHELPED = "A guess between two equally likely datasets is right with a probability of 50 %, as before (ε = 0)."
LEFT_OUT = (
    "An adversary may know everything else, and take two cases for equally likely: the data was used, or it was not. A "
    "guess which of the two it was is right with a probability of at most "
)
EXCHANGED = LEFT_OUT.replace("the data was used, or it was not", "either version was used")
OF_A_PART = ". About one person whose data is a part of a client's, it is at most "
ALONE = ". Other runs on this data are not counted, as the ledger is of this run alone."
NO_SERVER = (
    "The claim holds against the models' readers, and not against the server, which sees every update before it is "
    "noised."
)
SIZES = (
    " Client sizes are unknown to the server: these are sample sizes. A client's own ledger has its spending. "
    "`cloister plan --public-size N` computes the figure of a client that states N. "
    "A client as a whole is hardly protected"
)
LEDGER = LedgerState("ledger.jsonl", "0" * 64, 3, False)
OF_RUN = Figure("client", "add-or-remove", None, "the models' readers", RUN, 1.0, 1e-5)
OF_ALL = replace(OF_RUN, scope=ALL_RUNS, epsilon=2.0)
A_CLIENT = (
    "The run protects every client, with everything it holds: it hides whether the data of one client was used at all."
)


def stated(*figures, clients=None, rounds=3, ledger=LEDGER, **claim):
    about = {"mechanism": "global-dp", "figures": figures, "premises": HELD} | claim
    return Statement(Claim(**about), rounds, "fixed", ledger, clients)


def of_clients(claim):
    return stated(mechanism="none", clients=claim)


def dp_sgd(epsilons, rounds=3, unit="example", **claim):
    """Return the claim of clients of these sizes, each with its ε."""
    sizes = tuple(
        OfSize(size, rounds, (Figure(unit, "add-or-remove", None, "all", None, epsilon, 1e-5),))
        for size, epsilon in epsilons.items()
    )
    return DpSgdClaim("dp-sgd", premises=HELD, unit=unit, sizes=sizes, **claim)


def local(*figures, **claim):
    return LocalClaim("gaussian", premises=HELD, figures=figures, **claim)


def without(about, why):
    return Meaning(about, False, f"There is no guarantee from {about}.", why, NO_BOUND)


HEURISTIC = "adds noise, but this is no guarantee against anybody:"
CERTAIN = ". In this worst case the guess may be nearly certain"
REASONED = f"{CERTAIN}. {REASONABLE}"
OF_THE_SERVER = [
    (
        stated(mechanism="none"),
        Meaning(
            "the server's mechanism",
            False,
            "There is no guarantee: the run used no mechanism that protects privacy.",
            "The server, and any party that sees its records, sees every client's model.",
            NO_BOUND,
        ),
    ),
    (
        stated(mechanism="metric", reasons=("its noise is seeded", "it follows private data")),
        without(
            "the server's mechanism",
            f"The mechanism metric {HEURISTIC} its noise is seeded; and it follows private data.",
        ),
    ),
    (
        stated(replace(OF_ALL, scope="strangers")),
        without(
            "the server's mechanism",
            f"The mechanism global-dp {HEURISTIC} it released nothing that could be counted.",
        ),
    ),
]


def of_server(*, who=A_CLIENT, against=NO_SERVER, practical=True, how_much):
    return Meaning("the server's mechanism", True, who, against, how_much, practical)


def nothing_released(*figures, lasting=True):
    ledger = replace(LEDGER, releases_of_this_run=0, lasting=lasting)
    return stated(replace(OF_RUN, epsilon=0.0), *figures, rounds=0, ledger=ledger)


ABOUT_ONE = f"{LEFT_OUT}73.2 % instead of 50 % (ε = 1, δ = 1e-05: strong){OF_A_PART}88.1 %"
NONE_LEFT = "Nothing was released: no round was run, and the model is the one that the run began with."
UNBOUNDED = ". Over all runs in the ledger nothing is bounded, as earlier ones released without a guarantee."
EARLIER = "Earlier runs in the ledger keep their own claims: all together ε = 2, δ = 1e-05"
OF_THE_SERVER += [
    (stated(OF_RUN, replace(OF_ALL, epsilon=1.0)), of_server(how_much=f"{ABOUT_ONE}.")),
    (stated(OF_RUN, replace(OF_ALL, epsilon=None)), of_server(how_much=f"{ABOUT_ONE}{UNBOUNDED}")),
    (
        stated(replace(OF_RUN, scope="strangers", epsilon=9.0), OF_RUN, OF_ALL),
        of_server(how_much=f"{ABOUT_ONE}. Over all runs in the ledger it is at most 88.1 % (ε = 2, δ = 1e-05)."),
    ),
    (
        stated(
            replace(OF_RUN, premises=(BUDGET_FIXED,)),
            replace(OF_ALL, premises=(UNCHOSEN,)),
        ),
        of_server(
            how_much=f"{ABOUT_ONE}. This holds if {BUDGET_FIXED.sentence}. Over all runs in the ledger it is at most "
            f"88.1 % (ε = 2, δ = 1e-05, it holds if {UNCHOSEN.sentence})."
        ),
    ),
    (
        stated(OF_RUN),
        of_server(
            how_much=f"{ABOUT_ONE}. Over all runs in the ledger nothing is bounded, as earlier ones released without a "
            "guarantee."
        ),
    ),
    (
        stated(OF_RUN, OF_ALL, ledger=replace(LEDGER, lasting=False), parameters={COLLUDING: 0}),
        of_server(
            against="The claim holds against the models' readers; the server sees sums of updates alone.",
            how_much=ABOUT_ONE + ALONE,
        ),
    ),
    (
        stated(replace(OF_RUN, unit="example", relation="replace-one", epsilon=4.0), OF_ALL, unit="example"),
        of_server(
            who="The run protects every single example of every client: it hides which of any two versions of it was "
            "used for one example.",
            how_much=f"{EXCHANGED}98.3 % instead of 50 % (ε = 4, δ = 1e-05: reasonable){REASONED}.",
        ),
    ),
    (
        stated(replace(OF_RUN, relation="replace-one", epsilon=7.999, delta=0.0), OF_ALL),
        of_server(
            who="The run protects every client, with everything it holds: it hides which of any two versions of it was "
            "used for one client.",
            how_much=f"{EXCHANGED}99.97 % instead of 50 % (ε = 7.999, δ = 0: reasonable){REASONED}.",
        ),
    ),
    (
        stated(replace(OF_RUN, epsilon=4.0), OF_ALL),
        of_server(
            how_much=f"{LEFT_OUT}98.3 % instead of 50 % (ε = 4, δ = 1e-05: reasonable){REASONED}{OF_A_PART}99.97 %.",
        ),
    ),
    (
        stated(replace(OF_RUN, unit="ward", epsilon=0.0, delta=0.0), replace(OF_ALL, epsilon=0.0, delta=0.0)),
        of_server(
            who="The run protects ward: it hides whether the data of one ward was used at all.",
            how_much=f"{LEFT_OUT}50.0 % instead of 50 % (ε = 0, δ = 0: strong).",
        ),
    ),
    (
        stated(replace(OF_RUN, epsilon=0.0, delta=0.0), replace(OF_ALL, epsilon=0.5, delta=0.0)),
        of_server(
            how_much=f"{LEFT_OUT}50.0 % instead of 50 % (ε = 0, δ = 0: strong){OF_A_PART}50.0 %. Over "
            "all runs in the ledger it is at most 62.3 % (ε = 0.5, δ = 0).",
        ),
    ),
    (
        stated(replace(OF_RUN, delta=0.05), replace(OF_ALL, epsilon=1.0)),
        of_server(
            who="There is a weak claim for every client, with everything it holds: it hardly hides whether the data of "
            "one client was used at all.",
            practical=False,
            how_much=f"{LEFT_OUT}74.5 % instead of 50 % (ε = 1, δ = 0.05: weak){OF_A_PART}90.3 %.",
        ),
    ),
    (
        stated(replace(OF_RUN, unit="example", relation="replace-one", epsilon=4.59, delta=0.05), OF_ALL),
        of_server(
            who="There is a weak claim for every single example of every client: it hardly hides which of any two "
            "versions of it was used for one example.",
            how_much=f"{EXCHANGED}99.05 % instead of 50 % (ε = 4.59, δ = 0.05: weak){CERTAIN}.",
            practical=False,
        ),
    ),
    (
        stated(replace(OF_RUN, unit="example", epsilon=0.0, delta=0.97), replace(OF_ALL, epsilon=0.0)),
        of_server(
            who="There is a weak claim for every single example of every client: it hardly hides whether the data of "
            "one example was used at all.",
            how_much=f"{LEFT_OUT}98.5 % instead of 50 % (ε = 0, δ = 0.97: weak){CERTAIN}.",
            practical=False,
        ),
    ),
    *(
        (nothing_released(*others, lasting=lasting), of_server(who=NONE_LEFT, against=NOTHING, how_much=how_much))
        for others, lasting, how_much in (
            ((), True, UNHELPED),
            ((OF_ALL,), False, UNHELPED),
            ((replace(OF_ALL, epsilon=0.0),), True, UNHELPED),
            ((OF_ALL,), True, f"{EARLIER}."),
            (
                (replace(OF_ALL, budget=True, spent=0.12345),),
                True,
                f"{EARLIER} (a budget, 12.4 % of it spent by earlier runs).",
            ),
            (
                (replace(OF_ALL, budget=True, spent=0.0),),
                True,
                f"{EARLIER} (a budget, 0 % of it spent by earlier runs).",
            ),
        )
    ),
]


def test_about_the_server():
    def check(statement, told):
        assert meanings(statement) == (told,) and told.sentences == (told.who, told.against, told.how_much)

    assert failures(OF_THE_SERVER, check) == []


def by_clients(how_much, who=None, practical=True):
    who = who or (
        "The run protects every single example of every client: it hides whether the data of one example was used at "
        "all."
    )
    return Meaning("the clients' mechanism", True, who, "The claim holds against all.", how_much, practical)


EXCHANGED_CLIENT = A_CLIENT.replace(
    "whether the data of one client was used at all", "which of any two versions of it was used for one client"
)
LOCAL = Figure("client", "replace-one", None, "all", "this run", 2.0, 1e-5)
BUDGET = {"privacy.client-max-epsilon": 4.0}
ASKED = (
    " Nodes were asked to stop training before ε = 4 for one {} is passed (privacy.client-max-epsilon); the figures "
    "do not count on that, as each node keeps its budget itself."
)
ABOUT_A_CLIENT = f"{EXCHANGED}88.1 % instead of 50 % (ε = 2, δ = 1e-05: reasonable)"
SUM = " Earlier runs on the same data add to the ε of this run: each site's own ledger has the sum."
OF_TWO = ". The ε of this run is that of a client with 65 examples; other sizes go down to ε = 0 with 64 examples."
OF_THE_CLIENTS = [
    (
        local(replace(LOCAL, unit="example", epsilon=3.0), LOCAL, replace(LOCAL, epsilon=0.0)),
        by_clients(
            f"{ABOUT_A_CLIENT}.{SUM}",
            EXCHANGED_CLIENT,
        ),
    ),
    (
        local(LOCAL, parameters=BUDGET),
        by_clients(
            f"{ABOUT_A_CLIENT}.{SUM}{ASKED.format('client')}",
            EXCHANGED_CLIENT,
        ),
    ),
    (
        dp_sgd({64: 0.0, 65: 2.0}),
        by_clients(f"{LEFT_OUT}88.1 % instead of 50 % (ε = 2, δ = 1e-05: reasonable){OF_TWO}{SIZES}.{SUM}"),
    ),
    (
        dp_sgd({64: 0.0, 65: 2.0}, known=True, parameters=BUDGET),
        by_clients(
            f"{LEFT_OUT}88.1 % instead of 50 % (ε = 2, δ = 1e-05: reasonable){OF_TWO} By Rényi DP no client has a size "
            f"that costs more. A client as a whole is hardly protected.{SUM}{ASKED.format('example')}"
        ),
    ),
    (
        dp_sgd({8: 12.75}, unit="group", known=True),
        by_clients(
            f"{LEFT_OUT}100 % instead of 50 % (ε = 12.75, δ = 1e-05: weak){CERTAIN}. "
            "The ε of this run is that of a client with 8 groups. By Rényi DP no client has a size that costs more. A "
            f"client as a whole is hardly protected.{SUM}",
            "There is a weak claim for every group of examples (all of one patient, or of one writer) of every client; "
            "one at several clients loses what each of them costs, together: it hardly hides whether the data of "
            "one group was used at all.",
            practical=False,
        ),
    ),
    (
        dp_sgd({64: 0.0}, rounds=0),
        Meaning(
            "the clients' mechanism",
            True,
            "No client trained: nothing that follows from its data left any of them.",
            "",
            "",
        ),
    ),
    (
        local(LOCAL, reasons=("its seed is known",)),
        without("the clients' mechanism", f"The mechanism gaussian {HEURISTIC} its seed is known."),
    ),
    (
        local(),
        without(
            "the clients' mechanism", f"The mechanism gaussian {HEURISTIC} it released nothing that could be counted."
        ),
    ),
]


@pytest.mark.parametrize(("claim", "told"), OF_THE_CLIENTS)
def test_about_the_clients(claim, told):
    """The server without a mechanism has no sentences of its own then."""
    assert meanings(of_clients(claim)) == (told,)


def test_the_servers_come_before_the_clients_unless_they_alone_guarantee_nothing():
    unsound = local(reasons=("so",))
    for figures, reasons, clients, found in (
        ((OF_RUN,), (), local(LOCAL), [("server", True), ("clients", True)]),
        ((OF_RUN,), (), unsound, [("server", True), ("clients", False)]),
        ((), ("so",), unsound, [("server", False), ("clients", False)]),
        ((), ("so",), local(LOCAL), [("clients", True), ("server", False)]),
    ):
        told = meanings(stated(*figures, reasons=reasons, clients=clients))
        assert [(each.about.split()[1].split("'")[0], each.guaranteed) for each in told] == found


def test_the_clients_in_a_few_words():
    """Select the weakest figure about the unit that the claim protects."""

    def check(claim, summary, epsilon):
        found = weakest(claim)
        assert summary_of_clients(claim) == summary and (found and found.epsilon) == epsilon

    cases = [
        (local(), "gaussian (sound)", None),
        (local(reasons=("so",)), "gaussian (heuristic)", None),
        (local(LOCAL, reasons=("so",)), "gaussian (heuristic)", None),
        (local(replace(LOCAL, epsilon=None), Figure("neighbourhood", epsilon=3.0)), "gaussian (sound)", None),
        (
            local(replace(LOCAL, epsilon=0.5), LOCAL),
            "gaussian (sound, reasonable; this run: ε = 2 for one client)",
            2.0,
        ),
        (
            local(replace(LOCAL, epsilon=0.0), replace(LOCAL, epsilon=0.5)),
            "gaussian (sound, strong; this run: ε = 0.5 for one client)",
            0.5,
        ),
        (dp_sgd({}), "dp-sgd (sound)", None),
        (dp_sgd({64: 0.0}, rounds=0), "dp-sgd (no client trained)", 0.0),
        (
            dp_sgd({64: 0.5, 65: 0.0}),
            "dp-sgd (sound, strong; this run: ε = 0.5 for one example of a client with 64)",
            0.5,
        ),
        (
            dp_sgd({64: 2.0, 65: 3.0}, unit="group"),
            "dp-sgd (sound, reasonable; this run: ε = 3 for one group of a client with 65)",
            3.0,
        ),
        (
            dp_sgd({64: 9.0, 65: 3.0}),
            "dp-sgd (sound, reasonable; this run: ε = 9 for one example of a client with 64)",
            9.0,
        ),
    ]
    assert failures(cases, check) == []


def test_a_share_has_one_more_digit_from_99_percent_on_and_none_at_100():
    def check(probability, shown):
        assert percent(probability) == shown

    cases = [
        (0.5, "50.0 %"),
        (0.731, "73.1 %"),
        (0.73101, "73.2 %"),
        (0.98991, "99.0 %"),
        (0.99, "99.00 %"),
        (0.99011, "99.02 %"),
        (0.99989, "99.99 %"),
        (0.99991, "100 %"),
        (1.0, "100 %"),
    ]
    assert failures(cases, check) == []


def test_about_a_part_of_a_client_two_steps_count():
    """(2ε, (1 + e^ε)δ), and a δ above 1 is none."""

    def check(epsilon, delta, guess):
        assert best_guess_of_a_part(epsilon, delta) == pytest.approx(guess, rel=1e-12) and guess <= 1

    cases = [
        (0.0, 0.0, 0.5),
        (math.log(2), 0.1, 0.86),
        (1.0, 0.5, 1.0),
        (0.0, 0.25, 0.75),
        (20.5, 0.0, 1.0),
        (900.0, 1e-5, 1.0),
    ]
    assert failures(cases, check) == []


def test_a_guess_that_is_as_sure_as_doubt_allows_is_not_called_nearly_certain(monkeypatch):
    for bound, said in ((best_guess(1.0, 1e-5), False), (0.73, True)):
        monkeypatch.setattr("cloister.privacy.claims.render.NEARLY_CERTAIN", bound)
        (told,) = meanings(stated(OF_RUN))
        assert ("nearly certain" in told.how_much) == said
