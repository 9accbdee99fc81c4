"""`cloister warm-node`: a SuperNode with warm clients, as one command."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from logging import INFO
from pathlib import Path

from flwr.common.config import parse_config_args
from flwr.supercore import log
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from cloister.client.policy import policy_of
from cloister.core.errors import ConfigError, PolicyError
from cloister.warm.executor import TESTED_WITH, Executor, Link, is_tested, warm_up

SUPERNODE = "flower-supernode"


def run_node(options: Sequence[str], keras: bool = True) -> int:
    """Run a SuperNode and its clients until it ends or a signal ends both.

    Args:
        options: of `flower-supernode`, passed on as they are. `--isolation` is chosen here.
        keras: import Keras beforehand: some 500 MB, shared by all messages. Tasks without a network need none.

    Returns:
        The exit status of the SuperNode.

    Raises:
        ConfigError: an option is not for this command.
        FederationError: the SuperNode's certificate is not one to be trusted.
        PolicyError: the node's policy cannot be read, or cannot be enforced with this flwr.
    """
    ours = _read(options)
    node = parse_config_args([ours.node_config] if ours.node_config else None)
    policy = policy_of(node)
    if not is_tested():
        if policy is not None and policy.allowed_fabs:
            raise PolicyError(f"allowed-fabs cannot be enforced with this flwr, only with {TESTED_WITH}")
        # In place of this process: a signal to it is then one to the SuperNode.
        os.execvp(SUPERNODE, [SUPERNODE, *options])
    supernode = subprocess.Popen(
        [sys.executable, "-P", "-m", "cloister.warm.supernode", *options, "--isolation", "process"]
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(supernode))
    try:
        warm_up(keras)
        log(INFO, "warm: clients of this node are forked from process %s", os.getpid())
        Executor(_link(ours), lambda: policy_of(node)).serve(lambda: supernode.poll() is None)
    finally:
        _end(supernode)
    return supernode.wait()


def _read(options: Sequence[str]) -> argparse.Namespace:
    """The options as `flower-supernode` itself reads them: abbreviated, repeated and deprecated ones too."""
    parser: argparse.ArgumentParser = _parse_args_run_supernode()
    parser.prog = "cloister warm-node"
    parser.set_defaults(isolation="")
    ours = parser.parse_args(list(options))
    if ours.isolation:
        raise ConfigError(f"--isolation = {ours.isolation!r}: cloister warm-node has clients of its own; leave it out")
    if bool(ours.ssl_certfile) != bool(ours.ssl_ca_certfile):
        raise ConfigError("--ssl-certfile and --ssl-ca-certfile belong together: clients check the one by the other")
    return ours


def _link(ours: argparse.Namespace) -> Link:
    host = "127.0.0.1" if ours.host in ("0.0.0.0", "") else "[::1]" if ours.host == "::" else ours.host
    secret = None
    if ours.superexec_auth_secret_file:
        secret = load_superexec_auth_secret(secret_file=ours.superexec_auth_secret_file)
    return Link(
        f"{host}:{ours.port}", str(Path(ours.ssl_ca_certfile).expanduser()) if ours.ssl_certfile else "", secret
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        process.terminate()
