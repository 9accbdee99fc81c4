"""What tests of a SuperLink in this process share."""

import os

import pytest
from databases import Copies
from flwr.supercore import sql_mixin
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.superlink.routers.fleet import node_auth
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import SuperLink, nodes_of

from cloister.deploy.superlink.abandoned import Sending
from cloister.deploy.superlink.apart import OwnMessages
from cloister.deploy.superlink.node_keys import NodeKeys
from cloister.deploy.superlink.retries import RetryWhenBusy
from cloister.deploy.superlink.revoked import RevokedKeys
from cloister.deploy.superlink.runs import RunningRuns
from cloister.deploy.superlink.unfinished import WholeReplies


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
    """What is put in the place of Flower's functions is taken away after the test."""
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
        (fleet_handlers, (*OwnMessages.names, *RunningRuns.names)),
        (runtime_handlers, (*WholeReplies.names, *Sending.names, *RetryWhenBusy.names)),
        (control_handlers, RevokedKeys.names),
        (node_auth, NodeKeys.names),
        (sql_mixin, ("SQLITE_PRAGMAS",)),
    ]:
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sql_mixin.SqlMixin, "session", sql_mixin.SqlMixin.session)


@pytest.fixture
def guarded(monkeypatch):
    """Flower's functions keep every node to its own objects, until the test is over."""
    for name in OwnMessages.names:  # Abandoned.names among them
        monkeypatch.setattr(fleet_handlers, name, getattr(fleet_handlers, name))
    own = OwnMessages()
    own.install()
    return own


@pytest.fixture
def link(guarded):
    """A SuperLink with two nodes."""
    link = SuperLink(FLWR_IN_MEMORY_DB_NAME)
    link.own = guarded
    return link


@pytest.fixture
def nodes(link):
    """Those of the SuperLink."""
    return nodes_of(link)
