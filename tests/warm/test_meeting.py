"""Clocks that are apart: a node says so and fails, at its start and when it is refused."""

import os
import shutil
import ssl
import subprocess
import sys
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support import failures

from cloister.deploy import credentials
from cloister.deploy.warm import node, probe
from cloister.deploy.warm.supernode import GAVE_UP, SIGNALLED
from cloister.utils.errors import FederationError

COMMAND = [sys.executable, "-c", "from cloister.cli import app; app()", "warm-node"]


@contextmanager
def superlink(ahead=0.0, tls=None):
    """Answer as a SuperLink does, with a clock that is so many seconds ahead; host:port."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/health"
            self.send_response_only(200)
            self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_difference_is_known_to_about_a_second():
    for ahead in (0.0, 8.0, -400.0):
        with superlink(ahead) as address:
            began = time.monotonic()
            found = probe.probe_superlink(address, None, insecure=True)
            took = time.monotonic() - began  # next to nothing, but where a processor was busy with something else
        assert found is not None and abs(found.ahead + ahead) < 1.5 + took and found.days is None


def test_what_flower_would_refuse_is_refused_and_what_is_strange_is_said():
    def check(ahead, refused, warned):
        found = probe.SuperLinkProbe(ahead)
        assert (bool(found.refusal), bool(found.warnings)) == (refused, warned)
        assert all("NTP" in line for line in [*found.warnings, found.refusal] if line)

    cases = [
        (0.4, False, False),
        (3.0, False, True),
        (-3.0, False, True),
        (-290.0, False, True),
        (5.0, True, False),
        (8.0, True, False),
        (-306.0, True, False),
    ]
    assert failures(cases, check) == []


def test_who_cannot_be_reached_is_left_to_the_supernode():
    for address in ("127.0.0.1:1", "nonsense", "localhost"):
        assert probe.probe_superlink(address, None, insecure=True) is None


class TestCertificate:
    @pytest.fixture
    def signed(self, tmp_path):
        """A server's TLS for so many days, and the authority's certificate."""

        def made(days):
            authority_key, key = credentials.new_tls_key(), credentials.new_tls_key()
            authority = credentials.self_signed(authority_key, "x", 400)
            certificate = credentials.server_certificate(key, ["localhost"], days, authority, authority_key)
            for name, content in {"ca.crt": authority, "s.crt": certificate, "s.key": key}.items():
                (tmp_path / name).write_bytes(content)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
            return context, str(tmp_path / "ca.crt")

        return made

    @pytest.mark.parametrize(("days", "said"), [(10, ["the SuperLink's certificate ends in 10 days"]), (60, [])])
    def test_its_end_is_said_a_month_before(self, signed, days, said):
        tls, authority = signed(days)
        with superlink(tls=tls) as address:
            found = probe.probe_superlink(address, authority, insecure=False)
        assert [line.split(":")[0] for line in found.warnings] == said

    def test_an_operator_is_warned_by_the_name_of_the_connection(self, signed, tmp_path, monkeypatch):
        tls, authority = signed(10)
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        with superlink(tls=tls) as address:
            link = f'address = "{address}"\nroot-certificates = "{authority}"\n'
            (tmp_path / "config.toml").write_text(f"[superlink.hospital]\n{link}")
            assert len(probe.warnings_of("hospital")) == 1

    def test_an_operator_hears_of_a_clock_that_would_keep_a_node_out(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        (tmp_path / "config.toml").write_text('[superlink.hospital]\naddress = "localhost:1"\ninsecure = true\n')
        for ahead, said in ((10.0, ["10 s ahead of"]), (-400.0, ["400 s behind"]), (0.0, [])):
            monkeypatch.setattr(probe, "probe_superlink", lambda *_, ahead=ahead: probe.SuperLinkProbe(ahead))
            found = probe.warnings_of("hospital")
            assert len(found) == len(said) and all(words in line for words, line in zip(said, found, strict=True))

    def test_one_of_another_authority_tells_nothing(self, signed):
        tls, _ = signed(60)
        with superlink(tls=tls) as address:
            assert probe.probe_superlink(address, None, insecure=False) is None


class TestNode:
    @pytest.fixture(params=[GAVE_UP, SIGNALLED])
    def refused_by(self, request, monkeypatch):
        """The error of a node whose SuperNode ended by itself after the clocks went apart by so much."""

        class SuperNode:
            def __init__(self, command, **_):
                pass

            def poll(self):
                return request.param

            wait = terminate = poll

        monkeypatch.setattr(node.signal, "signal", lambda *_: None)
        monkeypatch.setattr(node.subprocess, "Popen", SuperNode)
        monkeypatch.setattr(node, "warm_up", lambda _: None)
        monkeypatch.setattr(node.Executor, "serve", lambda *_: None)

        def run(later):
            found = iter([probe.SuperLinkProbe(0.0), later])
            monkeypatch.setattr(node, "probe_superlink", lambda *_: next(found))
            with pytest.raises(FederationError) as error:
                node.run_node(["--insecure", "--superlink", "127.0.0.1:1"])
            return str(error.value)

        return run

    def test_that_is_refused_later_says_that_it_is_the_clock(self, refused_by):
        assert "8 s ahead of" in refused_by(probe.SuperLinkProbe(8.2))

    @pytest.mark.parametrize("later", [probe.SuperLinkProbe(0.1), None])
    def test_or_that_it_is_not(self, refused_by, later):
        assert "not registered there, or was unregistered" in refused_by(later)


def fake_time(offset):
    if not shutil.which("faketime"):
        pytest.skip("there is no faketime on this machine (apt-get install faketime)")
    return ["faketime", "-f", offset]


def test_a_node_with_a_wrong_clock_fails_at_once_with_the_reason():
    with superlink() as address:
        done = subprocess.run(
            [*fake_time("+8s"), *COMMAND, "--insecure", "--superlink", address],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"FLWR_TELEMETRY_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=480,
        )
    assert done.returncode == 1
    assert "8 s ahead of" in done.stderr and "NTP" in done.stderr and "Traceback" not in done.stderr
