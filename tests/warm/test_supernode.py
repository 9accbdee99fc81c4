"""What becomes of a SuperNode that gives up."""

import os
import sys

from flwr.supernode import fleet_http_connection, start_client_internal

from cloister.deploy.warm import supernode


def test_a_supernode_that_gives_up_ends(monkeypatch):
    """Its threads go on; whoever supervises it would take it for one that works."""
    ended = []
    monkeypatch.setattr(supernode, "flower_supernode", lambda: ended.append("given up"))
    monkeypatch.setattr(supernode, "start_parent_process_monitor", lambda _: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["supernode", "0.5", "5"])
    for module, name in [
        (start_client_internal, "_pull_and_store_message"),
        (start_client_internal, "time"),
        (fleet_http_connection, "make_simple_http_retry_invoker"),
    ]:
        monkeypatch.setattr(module, name, getattr(module, name))
    flowers = fleet_http_connection.make_simple_http_retry_invoker
    supernode.main()
    assert fleet_http_connection.make_simple_http_retry_invoker is not flowers
    assert ended == ["given up", supernode.GAVE_UP]
