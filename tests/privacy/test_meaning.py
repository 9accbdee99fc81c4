"""The words of a claim: bounds that hold, and sentences that claim nothing more than the claim."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from claimed import HELD, LINE
from scipy import stats
from support import failures

from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LedgerState, LocalClaim, OfSize, Statement
from cloister.privacy.claims.premises import UNBROKEN, UNCHOSEN
from cloister.privacy.claims.render import (
    NOBODY_TRAINED,
    REASONABLE,
    SIMULATED,
    best_guess,
    best_guess_of_a_part,
    meanings,
    percent,
    render,
    render_clients,
    render_largest,
    summary,
    summary_of_clients,
    tier,
)
from cloister.privacy.claims.server import ALL_RUNS, OUTSIDERS, RUN
from cloister.privacy.claims.to_json import record, record_clients, statement_of
from cloister.server.reports.html.page import figure_rows

LEDGER = LedgerState("ledger.jsonl", "0" * 64, 3, False)
OF_RUN = Figure("client", "add-or-remove", None, OUTSIDERS, RUN, 1.0, 1e-5, "pld", {"pld": 1.0, "rdp": 1.2})

NOT = Figure("client", status="heuristic", reasons=("so",), formula="σ/√k")


def stated(*figures, clients=None, **claim):
    about = {"mechanism": "global-dp", "figures": figures, "premises": HELD} | claim
    return Statement(Claim(**about), 3, "fixed", LEDGER, clients)


class TestTheBestGuess:
    def test_randomised_response_meets_it(self):
        """The truth with probability e^ε/(1 + e^ε): who believes it is right just as often."""

        def check(epsilon):
            assert best_guess(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))

        assert failures([0.1, 1.0, 4.0], check) == []

    @pytest.mark.parametrize(("epsilon", "delta"), list(itertools.product([0.0, 0.5, 3.0], [0.0, 1e-5, 0.1, 1.0])))
    def test_the_worst_mechanism_meets_it(self, epsilon, delta):
        """With δ it tells all; otherwise it is randomised response."""
        tells = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
        assert best_guess(epsilon, delta) == pytest.approx(tells)

    def test_the_best_guess_about_a_gaussian_release_stays_below(self):
        """Φ(1/2z), whatever pair of ε and δ(ε) it is described by; two clients' worth of it for a part of one."""

        def check(multiplier, epsilon):
            delta = stats.norm.cdf(1 / (2 * multiplier) - epsilon * multiplier) - math.exp(epsilon) * stats.norm.cdf(
                -1 / (2 * multiplier) - epsilon * multiplier
            )
            assert stats.norm.cdf(1 / (2 * multiplier)) <= best_guess(epsilon, delta) + 1e-12
            assert stats.norm.cdf(1 / multiplier) <= best_guess_of_a_part(epsilon, delta) + 1e-12

        assert failures(itertools.product([0.3, 1.0, 5.0], [0.1, 1.0, 5.0]), check) == []

    def test_it_grows_from_a_half_to_one(self):
        grid = [best_guess(epsilon, 1e-5) for epsilon in np.linspace(0, 800, 50)]
        assert grid == sorted(grid) and best_guess(0.0, 0.0) == 0.5 and best_guess(math.inf, 0.0) == 1
        assert best_guess_of_a_part(900.0, 1e-5) == 1

    def test_it_is_never_rounded_down(self):
        def check(probability):
            shown = float(percent(probability).removesuffix(" %"))
            assert probability * 100 - 1e-4 <= shown <= probability * 100 + 0.1

        assert failures([0.5, 0.73106, 0.9899, 0.99301, 0.999666, 1 - 1e-9, 1.0], check) == []


@pytest.mark.parametrize(
    ("epsilon", "delta", "name"),
    [
        *((0.0, 0.0, "strong"), (1.0, 1e-5, "strong"), (1.001, 1e-5, "reasonable"), (10.0, 0.01, "reasonable")),
        *((10.001, 0.0, "weak"), (math.inf, 0.0, "weak"), (0.5, 0.011, "weak")),
    ],
)
def test_the_tiers_are_those_of_the_field(epsilon, delta, name):
    assert tier(epsilon, delta) == name


class TestSentences:
    def test_a_sound_claim_says_who_against_whom_and_how_much(self):
        (told,) = meanings(stated(OF_RUN, Figure("client", epsilon=1.0, delta=1e-5, scope=ALL_RUNS)))
        assert told.guaranteed and "every client" in told.who and OUTSIDERS in told.against
        assert "not against the server" in told.against
        assert (
            "73.2 % instead of 50 %" in told.how_much
            and "person whose data is a part of a client's, it is at most 88.1 %" in told.how_much
        )
        assert all(len(each.split()) <= 30 for part in told.sentences for each in part.split(". "))

    def test_exchanging_a_client_covers_each_person_in_it(self):
        (told,) = meanings(stated(Figure("client", "replace-one", None, OUTSIDERS, RUN, 1.0, 1e-5)))
        assert "which of any two versions" in told.who and "one person" not in told.how_much

    def test_more_over_all_runs_is_said(self):
        every = Figure("client", epsilon=4.0, delta=1e-5, scope=ALL_RUNS, premises=(UNCHOSEN,))
        (told,) = meanings(stated(OF_RUN, every))
        assert (
            f"Over all runs in the ledger it is at most 98.3 % (ε = 4, δ = 1e-05, it holds if {UNCHOSEN.sentence})."
            in told.how_much
        )

    def test_a_figure_without_a_condition_names_none(self):
        (told,) = meanings(stated(OF_RUN, Figure("client", epsilon=4.0, delta=1e-5, scope=ALL_RUNS)))
        assert "Over all runs in the ledger it is at most 98.3 % (ε = 4, δ = 1e-05)." in told.how_much

    def test_a_figure_without_a_number_protects_nobody(self):
        (told,) = meanings(stated(replace(OF_RUN, epsilon=None)))
        assert not told.practical and told.who.startswith("There is a weak claim for every client")
        assert "with a probability of at most 100 % instead of 50 % (ε = inf" in told.how_much

    def test_a_guess_that_is_nearly_certain_is_called_so(self):
        (told,) = meanings(stated(replace(OF_RUN, epsilon=4.0)))
        certain = "(ε = 4, δ = 1e-05: reasonable). In this worst case the guess may be nearly certain"
        assert f"{certain}. {REASONABLE}. About one person" in told.how_much
        (weak,) = meanings(stated(replace(OF_RUN, epsilon=11.0)))
        assert "nearly certain. About one" in weak.how_much and "reasonable" not in weak.how_much
        (doubtful,) = meanings(stated(OF_RUN))
        assert "certain" not in doubtful.how_much

    def test_and_that_nothing_bounds_them(self):
        (told,) = meanings(stated(OF_RUN))
        assert "Over all runs in the ledger nothing is bounded" in told.how_much

    def test_a_ledger_of_one_run_says_nothing_of_others(self):
        every = Figure("client", epsilon=4.0, delta=1e-5, scope=ALL_RUNS, premises=(UNCHOSEN,))
        said = stated(OF_RUN, every)
        (told,) = meanings(replace(said, ledger=replace(LEDGER, lasting=False)))
        assert "all runs" not in told.how_much and "the ledger is of this run alone." in told.how_much

    def test_ledgers_of_other_names_are_said_not_to_count(self):
        renamed = replace(LEDGER, others=("ward-1", "ward-2"))
        (told,) = meanings(replace(stated(OF_RUN), ledger=renamed))
        uncounted = "Data at the same place had other names: what was released under ward-1, ward-2 is not counted"
        assert told.how_much.endswith(f". {uncounted}.")

    def test_the_budget_of_clients_is_named_and_not_counted_on(self):
        sizes = (OfSize(64, 3, (Figure("example", "add-or-remove", "so", "all", None, 12.75, 1e-5, "pld"),)),)
        claim = DpSgdClaim(
            "dp-sgd", premises=HELD, unit="example", sizes=sizes, parameters={"privacy.client-max-epsilon": 4.0}
        )
        lines = render_clients(claim)
        assert "ε = 12.75" in lines[1] and "before ε = 4 for one example is passed" in lines[-2]
        assert (
            summary_of_clients(claim) == "dp-sgd (sound, weak; this run: ε = 12.75 for one example of a client with 64)"
        )
        assert summary_of_clients(replace(claim, reasons=("no noise",))) == "dp-sgd (heuristic)"
        (told,) = meanings(stated(mechanism="none", clients=claim))
        assert "do not count on that, as each node keeps its budget itself." in told.how_much
        (without,) = meanings(stated(mechanism="none", clients=replace(claim, parameters={})))
        assert "budget" not in without.how_much and len(render_clients(replace(claim, parameters={}))) == len(lines) - 1

    def test_a_simulation_says_so_first_and_keeps_it_in_its_record(self):
        said = replace(stated(OF_RUN), simulated=True)
        assert render(said)[0] == SIMULATED and render(stated(OF_RUN)) == render(said)[1:]
        assert next(iter(record(said))) == "simulation" and statement_of(record(said)) == said
        assert "simulation" not in record(stated(OF_RUN))

    def test_a_tier_has_one_name_everywhere(self):
        def check(epsilon, name):
            said = stated(Figure("client", "add-or-remove", None, OUTSIDERS, RUN, epsilon, 1e-5))
            (told,) = meanings(said)
            assert ("a weak claim" in told.who) is (name == "weak") is not told.practical
            assert f": {name})" in told.how_much
            assert render(said)[0].endswith(f"sound, {name}") and summary(said.claim).endswith(f"(sound, {name})")

        assert failures([(0.9, "strong"), (7.999, "reasonable"), (10.1, "weak")], check) == []

    def test_where_nothing_is_guaranteed_there_is_no_number(self):
        def check(statement):
            (told,) = meanings(statement)
            assert not told.guaranteed and told.who.startswith("There is no guarantee")
            assert not [letter for letter in "".join(told.sentences) if letter.isdigit() or letter == "%"]
            claim = statement.clients or statement.claim
            assert all(reason in told.against for reason in claim.reasons)

        cases = [
            stated(mechanism="none"),
            stated(mechanism="metric", reasons=("it is steered by private data",)),
            stated(
                mechanism="none",
                clients=LocalClaim("laplace", premises=HELD, reasons=("the radius is private",)),
            ),
            stated(
                mechanism="none",
                clients=DpSgdClaim("dp-sgd", premises=HELD, reasons=("so",), unit="example", sizes=(OfSize(8, 3),)),
            ),
        ]
        assert failures(cases, check) == []

    def test_a_run_without_a_mechanism_says_what_the_server_sees(self):
        (told,) = meanings(stated(mechanism="none"))
        assert told.against == "The server, and any party that sees its records, sees every client's model."

    def test_dp_sgd_tells_of_the_size_that_costs_most(self):
        sizes = tuple(
            OfSize(size, 3, (Figure("example", "add-or-remove", "n", "all", epsilon=epsilon, delta=1e-5),))
            for size, epsilon in ((64, 2.0), (65, 3.0), (640, 1.0))
        )
        (told,) = meanings(
            stated(mechanism="none", clients=DpSgdClaim("dp-sgd", premises=HELD, unit="example", sizes=sizes))
        )
        assert "single example" in told.who and "ε = 3," in told.how_much
        whose = "that of a client with 65 examples; other sizes go down to ε = 1 with 640 examples"
        assert f". The ε of this run is {whose}." in told.how_much

    def test_the_largest_of_several_sizes_is_said_before_all_of_them(self):
        def check(epsilons, whose):
            sizes = tuple(
                OfSize(size, 3, (Figure("example", "add-or-remove", "n", "all", epsilon=epsilon, delta=1e-5),))
                for size, epsilon in epsilons.items()
            )
            claim = DpSgdClaim("dp-sgd", premises=HELD, unit="example", sizes=sizes)
            assert render_largest(claim) == whose and render_largest(DpSgdClaim("dp-sgd", premises=HELD)) == ""
            _, *lines, _, premises = render_clients(claim)
            assert (
                premises == LINE and lines[: len(epsilons) > 1] == [f"  the largest ε is {whose}"][: len(epsilons) > 1]
            )
            assert len(lines) == len(epsilons) + (len(epsilons) > 1)

        cases = [
            (
                {64: 3.0, 640: 1.0, 65: 2.0},
                "that of a client with 64 examples, the fewest that figures are given for; other sizes go down to "
                "ε = 1 with 640 examples",
            ),
            ({64: 3.0}, "that of a client with 64 examples"),
        ]
        assert failures(cases, check) == []

    def test_sizes_that_are_known_are_those_of_clients(self):
        sizes = tuple(
            OfSize(size, 3, (Figure("example", "add-or-remove", "n", "all", epsilon=epsilon, delta=1e-5),))
            for size, epsilon in ((287, 3.0), (288, 2.0))
        )
        known = DpSgdClaim("dp-sgd", premises=HELD, unit="example", sizes=sizes, known=True)
        (told,), (before,) = (
            meanings(stated(mechanism="none", clients=claim)) for claim in (known, replace(known, known=False))
        )
        assert "The ε of this run is that of a client with 287 examples; other sizes" in told.how_much
        assert "sample sizes" in before.how_much and "sample sizes" not in told.how_much
        first, largest, *_ = render_clients(known)
        assert "sizes that their nodes state" in first and "fewest" not in largest
        assert "unknown here" in render_clients(replace(known, known=False))[0]

    def test_at_how_many_clients_a_unit_is_counted_is_said(self):
        def check(unit, holders, whom):
            figure = Figure(unit, "add-or-remove", "n", "all", epsilon=1.0, delta=1e-5, holders=holders)
            claim = DpSgdClaim("dp-sgd", premises=HELD, unit=unit, sizes=(OfSize(64, 3, (figure,)),), known=True)
            (told,) = meanings(stated(mechanism="none", clients=claim))
            _, line, added, _premises = render_clients(claim)
            assert ", this run: for one" in line and "earlier runs on the same data add" in added
            assert whom in told.who
            assert (", and at all clients that hold data of it together, up to 3: against" in line) == (holders > 1)

        cases = [
            ("group", 1, "(all of one patient, or of one writer); each is at one client: it hides"),
            ("group", 3, "one writer), at all clients that hold data of it together: up to 3: it hides"),
            (
                "example",
                3,
                "protects every example, at all clients that hold data of it together: up to 3: it hides",
            ),
            ("example", 1, "protects every single example of every client: it hides"),
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("holders", [None, 1, 2])
    def test_a_group_has_the_name_of_its_column(self, holders):
        figure = Figure("group", "add-or-remove", "n", "all", epsilon=1.0, delta=1e-5, holders=holders)
        named, sizes = {"task.group": "patient"}, (OfSize(64, 3, (figure,)), OfSize(65, 3, (figure,)))
        claim = DpSgdClaim("dp-sgd", premises=HELD, unit="group", sizes=sizes, parameters=named)
        (told,) = meanings(stated(mechanism="none", clients=claim))
        said = [*told.sentences, *render_clients(claim), summary_of_clients(claim)]
        assert "one patient" in told.who and "64 patients" in told.how_much
        assert not [sentence for sentence in said if "group" in sentence]
        assert {row.unit for row in figure_rows([claim])} == {"patient"} and "64 patients" in figure_rows([claim])[
            0
        ].scope

    def test_of_clients_that_all_abstained_nothing_is_told(self):
        sizes = (OfSize(64, 0, (Figure("example", "add-or-remove", "n", "all", epsilon=0.0, delta=1e-5),)),)
        claim = DpSgdClaim("dp-sgd", premises=HELD, unit="example", sizes=sizes)
        (told,) = meanings(stated(mechanism="none", clients=claim))
        assert told.sentences == (told.who,) and told.who.startswith("No client trained")
        assert summary_of_clients(claim) == "dp-sgd (no client trained)"
        (line,) = render_clients(claim)
        assert "no client trained" in line and "sizes" not in line and "strong" not in line
        unsound = render_clients(claim.without_guarantee(["its scores left"]))
        assert unsound[0] == "clients: dp-sgd, heuristic; no client trained" and "its scores left" in unsound[1]
        assert figure_rows([claim]) == [] and record_clients(claim)["see"] == NOBODY_TRAINED

    def test_a_run_that_released_nothing_says_so(self):
        none, budget = replace(OF_RUN, epsilon=0.0), Figure("client", epsilon=2.0, delta=1e-5, scope=ALL_RUNS)
        nothing = replace(LEDGER, releases_of_this_run=0)
        spent = replace(budget, budget=True, spent=0.999)
        said = replace(stated(none, spent), rounds=0, ledger=nothing)
        (told,) = meanings(said)
        assert told.who.startswith("Nothing was released") and "99.9 % of it spent by earlier runs" in told.how_much
        assert any("nothing was released" in line for line in render(said))
        assert not any("nothing was released" in line for line in render(stated(OF_RUN)))
        (alone,) = meanings(replace(said, ledger=replace(nothing, lasting=False)))
        assert "50 %" in alone.how_much and "Earlier runs" not in alone.how_much
        (ended,) = meanings(replace(said, planned=((Gaussian(1.0), 3),)))
        assert "Nothing was released" not in ended.who, "somebody ended it: what was planned counts"

    @pytest.mark.parametrize("kind", [DpSgdClaim, LocalClaim])
    def test_what_clients_do_rests_on_premises_too(self, kind):
        figure = Figure("client", "replace-one", "n", "all", epsilon=2.0, delta=1e-5)
        figures = {"sizes": (OfSize(64, 3, (figure,)),)} if kind is DpSgdClaim else {"figures": (figure,)}
        claim = kind("own", premises=(*HELD, UNBROKEN), **figures)
        (told,) = meanings(stated(mechanism="none", clients=claim))
        assert told.who.startswith(f"If {UNBROKEN.sentence}, the run protects") and told.conditional
        assert f"; it holds if {UNBROKEN.sentence}" in render_clients(claim)[0]

    def test_the_guarantee_comes_first(self):
        local = LocalClaim(
            "gaussian", premises=HELD, figures=(Figure("client", "replace-one", "n", "all", "s", 2.0, 1e-5),)
        )
        first, second = meanings(stated(mechanism="metric", reasons=("so",), clients=local))
        assert first.guaranteed and first.about == "the clients' mechanism" and not second.guaranteed


def test_without_a_guarantee_the_console_says_why():
    lines = render(stated(mechanism="metric", reasons=("its noise is seeded", "it follows private data")))
    assert lines[1:3] == ["  not a guarantee: its noise is seeded", "  not a guarantee: it follows private data"]


def test_what_was_written_is_read_again():
    def check(statement):
        content = json.loads(json.dumps(record(statement)))
        assert record(statement_of(content)) == json.loads(json.dumps(record(statement))) == content

    cases = [
        stated(OF_RUN, unprotected=("who replies",), parameters={"privacy.noise-multiplier": 1.0}, seeded=True),
        stated(
            mechanism="none",
            clients=LocalClaim("laplace", premises=HELD, adversary="all", leakage_of_a_release=2.0),
        ),
        stated(
            mechanism="none",
            clients=LocalClaim("gaussian", premises=HELD, figures=(OF_RUN,), unprotected=("how long",)),
        ),
        stated(
            mechanism="none",
            clients=DpSgdClaim("dp-sgd", premises=HELD, unit="group", sizes=(OfSize(8, 3, (OF_RUN,), (NOT,)),)),
        ),
        stated(
            mechanism="none",
            clients=DpSgdClaim("dp-sgd", premises=HELD, unit="group", sizes=(OfSize(8, 3, (OF_RUN,)),), known=True),
        ),
    ]
    assert failures(cases, check) == []


def test_what_is_no_statement_is_refused():
    def check(content):
        with pytest.raises(ValueError, match="no statement"):
            statement_of(content)

    assert failures([{}, {"status": "running", "mechanism": "none", "claims": []}, {"claims": 3}], check) == []
