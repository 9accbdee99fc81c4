"""Fixtures for tests of a SuperLink in this process."""

import os

import pytest
from databases import Copies
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import SuperLink, nodes_of

from cloister.deploy.superlink.gate import (
    AppMessages,
    Gate,
    GateKnown,
    RevokedKeys,
    RunningRuns,
    record_no_totals,
)


@pytest.fixture(autouse=True)
def databases_are_copied(monkeypatch):
    """A new database has its tables at once."""
    monkeypatch.setattr(sql_mixin, "run_migrations", Copies())


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch):
    """Kits are a hundred files; none of them has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def flower_as_it_was(monkeypatch):
    """Restore Flower's functions after the test."""
    put_back(monkeypatch)


@pytest.fixture(scope="module")
def flower_of_the_module():
    """As `flower_as_it_was`, for a SuperLink that all tests of a module share."""
    with pytest.MonkeyPatch.context() as patch:
        put_back(patch)
        patch.setattr(sql_mixin, "run_migrations", Copies())
        yield


def put_back(monkeypatch):
    """Have Flower's own functions restored when the patch ends."""
    for module, names in [
        (fleet_handlers, (*Gate.names, *RunningRuns.names)),
        (runtime_handlers, (*GateKnown.names, *AppMessages.names)),
        (control_handlers, RevokedKeys.names),
        (sql_mixin, ("SQLITE_PRAGMAS",)),
    ]:
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sql_mixin.SqlMixin, "session", sql_mixin.SqlMixin.session)
    for state in (SqlLinkState, InMemoryLinkState):
        for name in ("store_traffic", "add_clientapp_runtime"):
            monkeypatch.setattr(state, name, getattr(state, name))


@pytest.fixture
def gate(monkeypatch):
    """Flower's functions behind the gate, until the test is over."""
    put_back(monkeypatch)
    app = AppMessages()
    gate = Gate(app)
    for each in (gate, GateKnown(), app):
        each.install()
    record_no_totals()
    return gate


@pytest.fixture
def link(tmp_path):
    """Flower's SuperLink with two nodes, and with a state on disk."""
    return SuperLink(str(tmp_path / "state.db"))


@pytest.fixture
def nodes(link):
    """Those of the SuperLink."""
    return nodes_of(link)
