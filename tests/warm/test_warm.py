"""Warm clients: forked processes that run the app of their bundle, and nothing of each other's."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.client.policy import CHECKED_BUNDLE, Policy
from cloister.core.errors import ConfigError, PolicyError
from cloister.warm import executor, node

BUNDLE = b"an app bundle"
DIGEST = hashlib.sha256(BUNDLE).hexdigest()

CHILDREN = """
import json, os, sys
from cloister.warm import executor
import numpy  # what stands for a heavy library
mark = id(numpy)

def draw(end):
    executor._forget_app()
    sys.path.insert(0, sys.argv[1])
    import cloister, numpy
    from cloister.privacy.noise import GaussianNoise
    noise = GaussianNoise().standard_normal(4).tolist()
    os.write(end, json.dumps([cloister.__file__, id(numpy) == mark, noise]).encode())

for _ in range(2):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        executor._as_child(lambda: draw(write))
    assert os.waitpid(child, 0)[1] == 0
    print(os.read(read, 10_000).decode())
"""


def test_a_child_has_the_app_of_its_bundle_and_the_libraries_of_its_parent(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    bundle.joinpath("cloister").symlink_to(Path(executor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(bundle)], capture_output=True, text=True, timeout=120, check=True
    )
    (first, warm, noise), (second, warm_too, other_noise) = map(json.loads, done.stdout.splitlines())
    assert first == second == str(bundle / "cloister" / "__init__.py")
    assert warm and warm_too and noise != other_noise


@pytest.mark.parametrize(
    ("statement", "status"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("raise KeyError", 1)]
)
def test_a_child_ends_where_its_work_ends(statement, status):
    script = (
        "import atexit, sys; from cloister.warm import executor\n"
        "atexit.register(lambda: print('the end of the parent'))\n"
        f"def work():\n    {statement}\n"
        "executor._as_child(work)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status and not done.stdout


class TestBundles:
    def policy(self, *fabs):
        return Policy.model_validate({"mechanisms": [], "tasks": ["digits"], "allowed-fabs": list(fabs)})

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv(CHECKED_BUNDLE, "")

    def test_a_listed_bundle_runs_and_is_vouched_for(self):
        assert executor._allowed(BUNDLE, self.policy("0" * 64, DIGEST)) == BUNDLE
        assert os.environ[CHECKED_BUNDLE] == DIGEST

    def test_another_one_is_refused_before_it_is_unpacked(self):
        with pytest.raises(PolicyError, match="is not in allowed-fabs"):
            executor._allowed(BUNDLE, self.policy("0" * 64))
        assert not os.environ[CHECKED_BUNDLE]

    @pytest.mark.parametrize("policy", [None, "empty"])
    def test_without_a_list_any_bundle_runs(self, policy):
        assert executor._allowed(BUNDLE, policy and self.policy()) == BUNDLE


def test_with_another_flower_clients_start_cold(monkeypatch):
    called = []
    monkeypatch.setattr(executor.flwr, "__version__", "1.99.0")
    monkeypatch.setattr(node.subprocess, "call", lambda command: called.append(command) or 7)
    assert node.run_node(["--insecure", "--port", "9100"]) == 7
    assert called == [["flower-supernode", "--insecure", "--port", "9100"]]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "address"),
        [
            ([], "127.0.0.1:9094"),
            (["--port", "9100"], "127.0.0.1:9100"),
            (["--host", "0.0.0.0", "--port=9100", "--superlink", "x:1"], "127.0.0.1:9100"),
            (["--host", "::"], "[::1]:9094"),
            (["--host", "node.site"], "node.site:9094"),
        ],
    )
    def test_the_executor_finds_the_supernode(self, options, address):
        assert node._link(node._read(options)).address == address

    def test_tls_of_the_supernode_is_checked(self, tmp_path):
        options = ["--ssl-certfile", "a.pem", "--ssl-keyfile", "a.key", "--ssl-ca-certfile", str(tmp_path / "ca.pem")]
        assert node._link(node._read(options)).certificates == str(tmp_path / "ca.pem")
        with pytest.raises(ConfigError, match="belong together"):
            node._read(options[:4])

    def test_isolation_is_chosen_here(self):
        with pytest.raises(ConfigError, match="leave it out"):
            node._read(["--isolation", "subprocess"])

    def test_a_node_whose_policy_cannot_be_read_does_not_start(self):
        with pytest.raises(PolicyError, match="cannot be read"):
            node.run_node(["--node-config", 'policy="/nowhere/policy.toml"'])

    def test_a_shared_secret(self, tmp_path):
        (tmp_path / "secret").write_bytes(b"0123456789abcdef0123456789abcdef")
        link = node._link(node._read(["--superexec-auth-secret-file", str(tmp_path / "secret")]))
        assert link.secret == b"0123456789abcdef0123456789abcdef"
