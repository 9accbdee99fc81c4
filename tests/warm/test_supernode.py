"""What becomes of a SuperNode whose connection is cut."""

import os
import sys

import httpx
import pytest
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection, start_client_internal

from cloister.deploy.warm import supernode

CUT = "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"
WRONG = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"


@pytest.mark.parametrize(("said", "gives_up"), [(CUT, False), (WRONG, True), ("[Errno 111] Connection refused", False)])
def test_a_cut_handshake_is_no_wrong_certificate(said, gives_up):
    invoker = supernode.patient(make_simple_http_retry_invoker)()
    assert invoker.should_giveup(httpx.ConnectError(said)) is gives_up


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
    supernode.main()
    assert ended == ["given up", supernode.GAVE_UP]
