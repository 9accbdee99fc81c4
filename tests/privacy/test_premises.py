"""Premises of a claim, and the effect of an open one."""

import pytest
from support import failures

from cloister.privacy.claims.claim import Claim, Figure, LedgerState, Statement
from cloister.privacy.claims.premises import APART, BUNDLE, Premise, condition, explained, of_transport
from cloister.privacy.claims.render import limits_of, meanings, render
from cloister.privacy.claims.server import RUN
from cloister.privacy.claims.to_json import record, statement_of
from cloister.utils.errors import PrivacyError

LEDGER = LedgerState("ledger.jsonl", "0" * 64, 1, False)
STANDING = Premise("kernels", "kernels are steady", "the machine", "assumed", standing=True)


def said(premises, **more):
    return Statement(Claim("global-dp", premises=tuple(premises), **more), 1, "fixed", LEDGER)


def test_what_each_transport_contributes():
    def check(simulated, gated, packed, known):
        found = of_transport(simulated, gated, packed)
        assert [premise.name for premise in found] == ["apart", "authentic", "instructed"]
        assert tuple(premise.known for premise in found) == known

    cases = [
        (True, False, False, ("enforced", "enforced", "enforced")),
        (False, True, True, ("enforced", "enforced", "enforced")),
        (False, True, False, ("assumed", "enforced", "enforced")),
        (False, False, True, ("assumed", "assumed", "assumed")),
        (False, False, False, ("assumed", "assumed", "assumed")),
    ]
    assert failures(cases, check) == []


def test_one_premise_that_the_run_does_not_show_makes_the_claim_conditional():
    def check(known, status):
        claim = Claim("global-dp", premises=(BUNDLE.known_as("enforced"), APART.known_as(known), STANDING))
        assert claim.status == status and claim.is_guaranteed

    cases = [("enforced", "sound"), ("attested", "sound"), ("stated", "conditional"), ("assumed", "conditional")]
    assert failures(cases, check) == []


def test_a_premise_does_not_make_a_claim_of_none():
    assert Claim("none", premises=(APART,)).status == "none"
    assert Claim("global-dp", ("it is seeded",), premises=(APART,)).status == "heuristic"


def test_a_premise_is_known_in_one_of_four_ways():
    with pytest.raises(PrivacyError, match="known = 'hoped'"):
        APART.known_as("hoped")


def test_an_open_premise_stands_in_the_first_line():
    """Over Flower's SuperLink another client learns which data a client holds; the run said `sound`."""
    first, *_ = render(said(of_transport(False, False, False)))
    assert first == (
        "privacy: global-dp, conditional; it holds if no node learns from the SuperLink, while its database has room, "
        "who takes part, what another node sent, or whether a guess of it is right, and each reply comes from the node "
        "that was asked, and each message that a node answers comes from the server of its run"
    )
    assert "conditional" not in render(said(of_transport(False, True, True)))[0]


def test_and_in_the_first_sentence_of_the_report():
    figure = Figure("client", "add-or-remove", adversary="the others", scope=RUN, epsilon=1.0, delta=1e-5)
    told = meanings(said(of_transport(False, False, False), figures=(figure,)))[0]
    assert told.sentences[0].startswith("If no node learns from the SuperLink") and told.conditional
    assert "comes from the server of its run, the run protects every client" in told.who
    enforced = meanings(said(of_transport(False, True, True), figures=(figure,)))[0]
    assert enforced.who.startswith("The run protects every client") and not enforced.conditional


def test_tables_and_entries_of_a_report_have_the_limits_of_a_claim():
    claim = Claim("global-dp", premises=of_transport(False, True, False), not_covered="the clients of 1 of 3 replies")
    first, second = limits_of(claim)
    assert first.startswith("it holds if no node learns") and second == f"no claim about {claim.not_covered}"


def test_premises_that_are_enforced_are_no_condition():
    assert condition([APART.known_as("enforced"), STANDING]) == ""


def test_the_record_holds_them_and_is_read_again():
    content = record(said((APART, BUNDLE.known_as("attested"))))
    assert content["status"] == "conditional"
    assert [(one["name"], one["known"]) for one in content["premises"]] == [
        ("apart", "assumed"),
        ("bundle", "attested"),
    ]
    assert record(statement_of(content)) == content


def test_the_record_names_the_clients_that_it_is_not_about():
    content = record(said((APART,), not_covered="clients that replied otherwise"))
    assert content["not-covered"] == "clients that replied otherwise"
    assert record(statement_of(content)) == content


def test_premises_are_explained_with_how_each_is_known():
    assert explained([BUNDLE, STANDING]) == (
        f"{BUNDLE.sentence} (bundle: assumed); kernels are steady (kernels: standing assumption)"
    )
