"""Content of `privacy.json` of a run; reading it gives the same statement again."""

import json
from dataclasses import replace

import pytest
from claimed import HELD
from claimed import RECORDED as PREMISES
from support import failures

from cloister.privacy.accounting.events import Gaussian, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LedgerState, LocalClaim, OfSize, Statement
from cloister.privacy.claims.premises import UNCHOSEN
from cloister.privacy.claims.to_json import NEIGHBOURS, SEE, SEE_KNOWN, record, record_clients, running, statement_of

OF_RUN = Figure("client", "add-or-remove", "so", "all", "this run", 1.0, 1e-5, "pld", {"rdp": 1.5, "pld": 1.0})
RECORDED = {
    "unit": "client",
    "relation": "add-or-remove",
    "neighbours": "so",
    "adversary": "all",
    "scope": "this run",
    "epsilon": 1.0,
    "delta": 1e-5,
    "accountant": "pld",
    "by-accountant": {"rdp": 1.5, "pld": 1.0},
}
NOT = Figure("client", status="heuristic", reasons=("one", "two"), formula="σ/√k", noise_multiplier=4.0, releases=3)
NOT_RECORDED = {
    "unit": "client",
    "status": "heuristic",
    "reasons": ["one", "two"],
    "formula": "σ/√k",
    "noise-multiplier": 4.0,
    "releases": 3,
}
CLAIM = Claim(
    "global-dp",
    premises=HELD,
    unprotected=("who replies",),
    parameters={"privacy.clipping-norm": 1.5},
    figures=(OF_RUN,),
)
HEURISTIC = Claim("metric", ("one", "two"), premises=HELD)
LEDGER = LedgerState("ledger.jsonl", "ab" * 32, 3, True, lasting=False)
STATEMENT = Statement(CLAIM, 3, "fixed, 5 of 10", LEDGER)
CONTENT = {
    "schema": 2,
    "premises": PREMISES,
    "status": "sound",
    "mechanism": "global-dp",
    "reasons": [],
    "parameters": {"privacy.clipping-norm": 1.5},
    "noise": "from the operating system's entropy",
    "rounds": 3,
    "sampling": "fixed, 5 of 10",
    "neighbours": NEIGHBOURS,
    "claims": [RECORDED],
    "unprotected": ["who replies"],
    "ledger": {
        "file": "ledger.jsonl",
        "head": "ab" * 32,
        "releases-of-this-run": 3,
        "holds-releases-without-a-guarantee": True,
        "lasting": False,
    },
}
STEPS = Repeated(Gaussian(4.0, Sampling("poisson", 0.5)), 6)

SIZES = (OfSize(8, 3, (OF_RUN,), (NOT,)), OfSize(9, 3))
DP_SGD = DpSgdClaim("dp-sgd", premises=HELD, unit="group", sizes=SIZES, known=True)
LAPLACE = LocalClaim(
    "laplace", premises=HELD, figures=(OF_RUN,), unprotected=("who replies",), adversary="all", parameters={"a": 1.0}
)
CLIENTS = [
    (
        DP_SGD,
        {
            "status": "sound",
            "premises": PREMISES,
            "mechanism": "dp-sgd",
            "reasons": [],
            "parameters": {},
            "noise": "from the operating system's entropy",
            "sizes-are-known": True,
            "see": SEE_KNOWN,
            "by-examples": [
                {"groups": 8, "rounds": 3, "claims": [RECORDED], "heuristic": [NOT_RECORDED]},
                {"groups": 9, "rounds": 3, "claims": [], "heuristic": []},
            ],
            "unprotected": [],
        },
    ),
    (
        DpSgdClaim(
            "dp-sgd",
            ("it is seeded",),
            "example",
            parameters={"a": 1.0},
            unprotected=("who replies",),
            seeded=True,
            sizes=(OfSize(64, 2),),
            premises=HELD,
        ),
        {
            "status": "heuristic",
            "premises": PREMISES,
            "mechanism": "dp-sgd",
            "reasons": ["it is seeded"],
            "parameters": {"a": 1.0},
            "noise": "seeded",
            "sizes-are-known": False,
            "see": SEE,
            "by-examples": [{"examples": 64, "rounds": 2, "claims": [], "heuristic": []}],
            "unprotected": ["who replies"],
        },
    ),
    (
        LAPLACE,
        {
            "status": "sound",
            "premises": PREMISES,
            "mechanism": "laplace",
            "reasons": [],
            "parameters": {"a": 1.0},
            "leakage-of-a-release": None,
            "unit": "client",
            "adversary": "all",
            "claims": [RECORDED],
            "unprotected": ["who replies"],
        },
    ),
    (
        LocalClaim("gaussian", premises=HELD, reasons=("no noise",), unit="example", adversary="all"),
        {
            "status": "heuristic",
            "premises": PREMISES,
            "mechanism": "gaussian",
            "reasons": ["no noise"],
            "parameters": {},
            "unit": "example",
            "adversary": "all",
            "claims": [],
            "unprotected": [],
        },
    ),
]


def read(content):
    return statement_of(json.loads(json.dumps(content)))


def test_of_a_run_that_goes_on_nothing_is_claimed():
    assert running(CLAIM) == {"status": "running", "mechanism": "global-dp", "claims": [], "see": "the ledger"}


def test_of_a_run_that_ended_everything_is_recorded():
    assert record(STATEMENT) == CONTENT


def test_a_mechanism_without_figures():
    def check(claim, changes):
        nothing = {"claims": [], "unprotected": [], "parameters": {}}
        recorded = CONTENT | nothing | changes
        if claim.mechanism == "none":
            del recorded["premises"]
        assert record(replace(STATEMENT, claim=claim)) == recorded

    cases = [
        (Claim("none"), {"status": "none", "mechanism": "none"}),
        (HEURISTIC, {"status": "heuristic", "mechanism": "metric", "reasons": ["one", "two"]}),
        (Claim("global-dp", premises=HELD, seeded=True), {"noise": "seeded"}),
    ]
    assert failures(cases, check) == []


def test_what_was_planned_and_not_released_is_recorded_event_by_event():
    said = replace(STATEMENT, planned=((Gaussian(2.0), 4), (STEPS, 2)))
    content = record(said)
    assert content.keys() - CONTENT.keys() == {"planned"}
    assert [(each["event"]["kind"], each["count"]) for each in content["planned"]] == [("gaussian", 4), ("repeated", 2)]
    assert read(content) == said


@pytest.mark.parametrize(("claim", "recorded"), CLIENTS)
def test_the_clients_own_mechanism(claim, recorded):
    assert record_clients(claim) == recorded
    said = replace(STATEMENT, clients=claim)
    assert record(said) == CONTENT | {"clients": recorded}
    assert read(record(said)) == said


def test_the_leakage_of_a_release_is_read_again():
    def check(leakage):
        said = replace(STATEMENT, clients=replace(LAPLACE, leakage_of_a_release=leakage))
        assert record(said)["clients"]["leakage-of-a-release"] == leakage
        assert read(record(said)) == said

    assert failures([2.5, None], check) == []


@pytest.mark.parametrize("claim", [Claim("none"), HEURISTIC, replace(CLAIM, seeded=True)])
def test_what_was_recorded_of_the_server_is_read_again(claim):
    said = replace(STATEMENT, claim=claim, ledger=replace(LEDGER, lasting=True))
    assert read(record(said)) == said


def test_a_record_from_before_some_facts_were_in_it_is_read_without_them():
    recorded = record(replace(STATEMENT, clients=DP_SGD))
    clients = {name: value for name, value in recorded["clients"].items() if name not in ("sizes-are-known", "noise")}
    found = read({name: value for name, value in recorded.items() if name != "noise"} | {"clients": clients})
    assert found == replace(STATEMENT, clients=replace(DP_SGD, known=False))
    local = record(replace(STATEMENT, clients=LAPLACE))
    del local["clients"]["leakage-of-a-release"]
    assert read(local) == replace(STATEMENT, clients=LAPLACE)


def test_without_sizes_the_unit_of_clients_is_not_known():
    said = replace(STATEMENT, clients=replace(DP_SGD, sizes=()))
    assert read(record(said)).clients == DpSgdClaim("dp-sgd", premises=HELD, unit="client", known=True)


def test_what_is_no_record_is_refused_by_the_kind_of_its_fault():
    def check(changes, kind):
        with pytest.raises(ValueError) as refused:
            statement_of(CONTENT | changes)
        assert str(refused.value) == f"no statement about a run's privacy: {kind}"
        assert statement_of(CONTENT) == STATEMENT

    cases = [
        ({"rounds": None, "claims": 3}, "TypeError"),
        ({"claims": [{"epsilon": 1.0, "no-field": 1}]}, "TypeError"),
        ({"ledger": ["ledger.jsonl"]}, "AttributeError"),
        ({"ledger": {"file": "ledger.jsonl"}}, "TypeError"),
        ({"planned": [{"event": {"kind": "unknown"}, "count": 1}]}, "PrivacyError"),
        ({"planned": [{"event": {"kind": "gaussian", "noise_multiplier": 1.0}}]}, "KeyError"),
        ({"clients": {"mechanism": "laplace"}}, "KeyError"),
    ]
    assert failures(cases, check) == []


def test_a_record_of_another_schema_is_refused_with_the_remedy():
    def check(schema):
        content = {name: value for name, value in CONTENT.items() if name != "schema"}
        content |= {} if schema is None else {"schema": schema}
        with pytest.raises(
            ValueError, match=f"schema {schema or 1} was found and 2 is read.*config.json beside it names"
        ):
            statement_of(content)

    assert failures([None, 1, 3], check) == []


def test_the_premises_of_one_figure_are_recorded_with_it():
    figure = replace(OF_RUN, premises=(UNCHOSEN,))
    content = record(replace(STATEMENT, claim=replace(CLAIM, figures=(figure,))))
    assert [each["name"] for each in content["claims"][0]["premises"]] == ["unchosen"]
    assert read(content).claim.figures == (figure,)
