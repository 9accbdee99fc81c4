"""The nginx of this machine, if any, and its port in a test."""

import os
import shutil
from pathlib import Path

import pytest

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def require_nginx() -> None:
    """Skip the test where there is no nginx; with REQUIRE_NGINX=1 fail."""
    if not NGINX and os.environ.get("REQUIRE_NGINX") == "1":
        pytest.fail("REQUIRE_NGINX=1, but nginx is not installed")
    if not NGINX:
        pytest.skip("nginx is not installed")


def on_loopback(kit: Path) -> None:
    """Have the proxy of a server's kit listen on this machine alone."""
    path = kit / "nginx.conf"
    text = path.read_text()
    assert "        listen " in text
    path.write_text(text.replace("        listen ", "        listen 127.0.0.1:"))
