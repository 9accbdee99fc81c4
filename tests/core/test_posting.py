"""Sending JSON to an address that somebody configured."""

import json
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from support import failures

from cloister.utils.errors import FederationError
from cloister.utils.posting import post

PIECE, PIECES = 1 << 20, 64


@contextmanager
def served(handler):
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/secret-token"
        finally:
            server.shutdown()
            thread.join()


class Taker(BaseHTTPRequestHandler):
    """Takes what is posted, and answers with more than anybody wants to read."""

    def do_POST(self):
        self.server.taken = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.written = 0
        self.send_response(200 if self.server.taken["good"] else 403)
        self.end_headers()
        with suppress(OSError):
            for _ in range(PIECES):
                self.wfile.write(b" " * PIECE)
                self.server.written += PIECE

    def log_message(self, *_):
        pass


def test_the_body_of_an_answer_is_not_read():
    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        post(f"http://127.0.0.1:{server.server_port}", {"good": True})
        thread.join()
    assert server.taken == {"good": True} and server.written < PIECE * PIECES


def test_a_refusal_is_an_error_without_the_address():
    with served(Taker) as url, pytest.raises(FederationError, match="not taken: HTTPStatusError") as error:
        post(url, {"good": False})
    assert "secret" not in str(error.value)


def test_what_cannot_be_reached_is_one_too():
    def check(url):
        with pytest.raises(FederationError) as error:
            post(url, {})
        assert "secret" not in str(error.value)

    assert failures(["http://127.0.0.1:1/secret", "https://[::secret", "secret"], check) == []
