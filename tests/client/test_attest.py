"""Attestations: the releases in the node's ledger, and nothing that depends on an example."""

import json

import pytest
from asking import BALL, DP_SGD, GAUSSIAN, OPEN, SIZED, answer, arrays_of, entries_of, policy_file, write_data

from cloister.client.ledgers import ledger_of, own_head
from cloister.client.node import node_of
from cloister.client.policy import CHECKED_BUNDLE
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.premises import Attestation, size_and_checked

DIGEST = "a" * 64


@pytest.fixture
def node(tmp_path):
    return {"data-path": str(write_data(tmp_path)), "ledger-dir": str(tmp_path / "ledgers"), "public-size": 40}


def stated(settings, node):
    reply = answer(settings, node)
    arrays_of(reply)  # it is no refusal
    record = reply.content.config_records.get("attestation")
    return record and record["attestation"]


@pytest.mark.parametrize(
    ("settings", "mechanism", "unit", "size"),
    [(DP_SGD, "dp-sgd", "example", 40), (GAUSSIAN, "gaussian", "client", 0), (BALL, "laplace", "client", 0)],
)
def test_it_states_the_releases_that_the_ledger_has(node, settings, mechanism, unit, size):
    said = stated(settings, node)
    released = tuple(entry.event for entry in entries_of(node, unit))
    assert said == Attestation(mechanism, unit, released, size).to_bytes()


def test_it_names_the_state_of_the_ledger_by_its_last_line_about_a_release(tmp_path, node):
    record = answer(DP_SGD, node).content["attestation"]
    (path,) = (tmp_path / "ledgers").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["ledger-head"] == [line for line in lines if "release" in line][-1]["hash"]


def test_a_node_without_a_ledger_names_none():
    assert answer(DP_SGD, SIZED | {"public-size": 40}).content["attestation"]["ledger-head"] == ""


def test_two_ledgers_with_the_same_lines_have_other_heads(tmp_path, node):
    """The server knows all that is in these lines but the id of the release, and could compute the head."""
    heads = [
        answer(DP_SGD, node | {"ledger-dir": str(tmp_path / name)}).content["attestation"]["ledger-head"]
        for name in ("one", "other")
    ]
    assert len(heads[0]) == 64 and heads[0] != heads[1]


def test_a_line_that_can_be_guessed_is_never_the_one_that_is_stated(tmp_path):
    """Between two statements another run may begin: its budget, hashed after a head that the server has, would show."""
    ledger = Ledger(tmp_path / "x.jsonl")
    ledger.done(ledger.open(Gaussian(1.0), "example", "run", 1, lambda: None))
    before = ledger.release_head
    ledger.limit("another run", "example", 1e-5, 4.0)
    ledger.note_place("data-1", [])
    assert ledger.release_head == before != ledger.head
    assert Ledger(ledger.path).release_head == before


def test_a_run_without_a_mechanism_on_clients_has_none(node):
    assert stated(OPEN, node) is None


@pytest.mark.parametrize("count", [3, 40, 400])
def test_it_does_not_depend_on_how_much_data_there_is(tmp_path, node, count):
    other = node | {"data-path": str(write_data(tmp_path, count, seed=1, name="other.npz"))}
    assert stated(DP_SGD, other) == stated(DP_SGD, node)


@pytest.mark.parametrize(
    ("allowed", "running", "checked"), [([DIGEST], DIGEST, True), ([], DIGEST, False), ([], "", False)]
)
def test_a_bundle_is_checked_where_the_policy_allows_it_by_its_digest(
    tmp_path, node, monkeypatch, allowed, running, checked
):
    rules = {"mechanisms": [], "min_server_noise_multiplier": None, "allowed_fabs": allowed}
    monkeypatch.setenv(CHECKED_BUNDLE, running)
    assert size_and_checked(stated(DP_SGD, node | {"policy": str(policy_file(tmp_path, **rules))})) == (40, checked)


def test_a_line_that_another_process_may_still_be_syncing_is_not_stated(tmp_path):
    node = node_of({"ledger-dir": str(tmp_path), "data-identity": "x"})
    stated = own_head(node, "linear")
    Ledger(tmp_path / "x.jsonl").open(Gaussian(1.0), "example", "run", 1, lambda: None)
    assert own_head(node, "linear") == stated != ledger_of(node, "linear").release_head
