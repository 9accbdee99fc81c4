"""Nodes that go on asking a SuperLink that was killed in the midst of a handshake."""

import io
import runpy
import socket
import sys
from threading import Thread
from types import ModuleType

import httpx
import pytest
from flwr.supercore import cli as supercore_cli
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.superlink import cli as superlink_cli
from flwr.superlink.grid import http_grid

from cloister.deploy import superexec
from cloister.flower import serverapp

WRONG = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
LATE = "_ssl.c:989: The handshake operation timed out"


@pytest.fixture(scope="module")
def cut() -> httpx.TransportError:
    """Make the error of a side that dies in the midst of a handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.close()

        Thread(target=die, daemon=True).start()
        with pytest.raises(httpx.TransportError) as caught:
            httpx.get(f"https://127.0.0.1:{listener.getsockname()[1]}", timeout=30)
    return caught.value


def test_a_cut_or_slow_handshake_is_no_wrong_certificate(cut):
    gives_up = serverapp.retrying(make_simple_http_retry_invoker)().should_giveup
    assert make_simple_http_retry_invoker().should_giveup(cut)
    assert not gives_up(cut)
    assert not gives_up(httpx.ConnectTimeout(LATE))
    assert not gives_up(httpx.ConnectError("[Errno 111] Connection refused"))
    assert gives_up(httpx.ConnectError(WRONG))


@pytest.mark.parametrize("task", ["", "task"])
def test_a_server_app_goes_on_after_a_cut(monkeypatch, tmp_path, cut, task):
    monkeypatch.setenv("CLOISTER_TASK", task and str(tmp_path / task))
    monkeypatch.setattr(sys, "stdin", io.StringIO("token"))
    monkeypatch.setattr(sys, "argv", ["serverapp.py"])
    monkeypatch.setattr(RuntimeHttpClient, "PullTaskInput", RuntimeHttpClient.PullTaskInput)
    asked = asks(monkeypatch, superlink_cli, "flwr_serverapp", http_grid, cut)
    runpy.run_path(str(superexec.APP), run_name="__main__")
    assert asked == [False]


def test_an_executor_goes_on_after_a_cut(monkeypatch, cut):
    monkeypatch.setitem(vars(run_superexec), "get_executor", run_superexec.get_executor)
    monkeypatch.setattr(sys, "argv", ["cloister"])
    asked = asks(monkeypatch, supercore_cli, "flower_superexec", run_superexec, cut)
    superexec.run([])
    assert asked == [False]


def asks(monkeypatch, place: ModuleType, part: str, module: ModuleType, error: Exception) -> list[bool]:
    """Put a question in the place of Flower's part: whether a module that connects gives up at an error."""
    asked = []
    monkeypatch.setattr(module, serverapp.MAKER, getattr(module, serverapp.MAKER))
    monkeypatch.setattr(place, part, lambda: asked.append(getattr(module, serverapp.MAKER)().should_giveup(error)))
    return asked
