"""Attestations: the releases in the node's ledger, and nothing that depends on an example."""

import pytest
from asking import BALL, DP_SGD, GAUSSIAN, OPEN, answer, arrays_of, entries_of, policy_file, write_data

from cloister.client.policy import CHECKED_BUNDLE
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
