"""The end of a SuperNode that gives up."""

import os
import signal
import sys

from flwr.supernode import fleet_http_connection, start_client_internal

from cloister.deploy.warm import supernode


def test_a_supernode_that_gives_up_ends(monkeypatch):
    """Its threads go on; whoever supervises it would take it for one that works."""
    ended = []
    monkeypatch.setattr(supernode, "command", {"flower-supernode": lambda: ended.append("given up")}.get)
    monkeypatch.setattr(supernode, "_end_with", lambda _: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["supernode", "0.5", "5", "-1"])
    for module, name in [
        (start_client_internal, "_pull_and_store_message"),
        (start_client_internal, "pull_objects"),
        (start_client_internal, "time"),
        (fleet_http_connection, "make_simple_http_retry_invoker"),
    ]:
        monkeypatch.setattr(module, name, getattr(module, name))
    flowers = fleet_http_connection.make_simple_http_retry_invoker
    supernode.main()
    assert fleet_http_connection.make_simple_http_retry_invoker is not flowers
    assert ended == ["given up", supernode.GAVE_UP]


def test_a_supernode_ends_with_its_parent(monkeypatch):
    """Without its executor it would take messages that no client works on."""
    parents, signals = [7, 7, 1], []
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(supernode.time, "sleep", lambda _: None)
    monkeypatch.setattr(signal, "raise_signal", signals.append)
    supernode._end_with(7)
    assert (parents, signals) == ([], [signal.SIGINT])
