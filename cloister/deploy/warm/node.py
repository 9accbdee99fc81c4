"""Command `cloister warm-node`: a SuperNode with warm clients."""

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from logging import INFO, WARNING

from cloister.client.node import NodeConfig, node_of
from cloister.client.policy import policy_of
from cloister.client.round_state import FolderStore
from cloister.config.io import read_options
from cloister.deploy.warm.executor import FRAMEWORKS, Executor, Link, is_tested, sources, warm_up
from cloister.deploy.warm.probe import SuperLinkProbe, probe_superlink
from cloister.deploy.warm.supernode import GAVE_UP, SIGNALLED
from cloister.flower import TESTED_WITH, log
from cloister.flower.supernode import parse_config_args, parser_of_supernode
from cloister.utils.errors import ConfigError, FederationError, PolicyError
from cloister.utils.files import expanded

SUPERNODE = "flower-supernode"
POLLS = (0.1, 5.0)
"""Seconds between two polls for messages: just after one, and in the long run."""


def run_node(
    options: Sequence[str], frameworks: Sequence[str] = tuple(FRAMEWORKS), polls: tuple[float, float] = POLLS
) -> int:
    """Run a SuperNode and its clients until the SuperNode ends or a signal ends both.

    Args:
        options: of `flower-supernode`, passed on unchanged. `--isolation` is set here.
        frameworks: to import in advance where they are installed: some 500 MB each, shared by all messages.
        polls: seconds between two polls for messages, just after one and in the long run.

    Returns:
        The exit status of the SuperNode.

    Raises:
        ConfigError: an option is not for this command; the node configuration has invalid keys, which the message
            names; its `secure-state` is not a folder for secrets; or another process has its port.
        FederationError: the SuperNode's certificate is not trusted, the clocks of this machine and the SuperLink are
            too far apart, or the SuperLink refused this node.
        PolicyError: the node's policy cannot be read, or cannot be enforced with this flwr.
    """
    ours = _read(options)
    if not 0 < polls[0] <= polls[1]:
        raise ConfigError(f"--fastest-poll = {polls[0]:g} must be above 0 and at most --slowest-poll = {polls[1]:g}")
    node = _configured(ours.node_config or "")
    policy = policy_of(node.policy)
    if node.data_path and not expanded(node.data_path).exists():
        # The node starts anyway. Data may arrive later, and the server must not learn whether it exists.
        log(
            WARNING,
            "data-path: there is no file or folder at %s; until there is, this node trains on nothing: where it noises "
            "what it sends it answers with noise alone, and the server is not told",
            expanded(node.data_path).absolute(),
        )
    _look_at_superlink(ours)
    if not is_tested():
        if policy is not None and policy.allowed_fabs:
            raise PolicyError(f"allowed-fabs cannot be enforced with this flwr, only with {' or '.join(TESTED_WITH)}")
        # In place of this process: a signal to it is then one to the SuperNode.
        os.execvp(SUPERNODE, [SUPERNODE, *options])
    _refuse_used_port(ours)
    _clear_secrets(node)
    pauses = [f"{seconds:g}" for seconds in polls]
    program = [sys.executable, "-P", "-m", "cloister.deploy.warm.supernode"]
    # The SuperNode alone holds the end that is written to: when it ends, the executor reads that.
    woken, wakes = os.pipe()
    supernode = subprocess.Popen([*program, *pauses, str(wakes), *options, "--isolation", "process"], pass_fds=[wakes])
    os.close(wakes)
    asked: list[int] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        _end(supernode)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        # Before the imports: if files change in the meantime, they do not match a bundle.
        imported = sources()
        warm_up(frameworks)
        log(INFO, "warm: clients of this node are forked from process %s", os.getpid())
        executor = Executor(_link(ours), imported, lambda: policy_of(node.policy), woken)
        executor.serve(lambda: supernode.poll() is None)
    finally:
        _end(supernode)
        os.close(woken)
        _clear_secrets(node)
    status = supernode.wait()
    if status in (SIGNALLED, GAVE_UP) and not asked:
        if (found := _probed(ours)) and found.refusal:
            raise FederationError(f"the SuperLink refused this node: {found.refusal}")
        raise FederationError(
            "the SuperNode gave up, and its log says why; after a refusal (401) this node's key is not registered "
            "there, or was unregistered"
        )
    return status


def _configured(text: str) -> NodeConfig:
    """Return the node configuration, and refuse parts that are not pairs.

    Flower ignores them, even a site's policy.

    Args:
        text: pairs, or the path of a TOML file.

    Raises:
        ConfigError: part of it is no pair, or a key is invalid.
    """
    try:
        if not text.endswith(".toml"):
            read_options("--node-config", text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return node_of(parse_config_args([text] if text else None))


def _clear_secrets(node: NodeConfig) -> None:
    """Remove the stored state of secure aggregations.

    A restarted node has dropped out of them.

    Raises:
        NodeConfigError: its folder is not suitable for secrets.
    """
    if node.secure_state:
        FolderStore(node.secure_state).clear()


def _look_at_superlink(ours: argparse.Namespace) -> None:
    """Log warnings about the SuperLink, and raise an error if it would refuse the node.

    Raises:
        FederationError: its clock and that of this machine are too far apart.
    """
    found = _probed(ours)
    for line in found.warnings if found else ():
        log(WARNING, "%s", line)
    if found and found.refusal:
        raise FederationError(found.refusal)


def _probed(ours: argparse.Namespace) -> SuperLinkProbe | None:
    certificates = ours.root_certificates and str(expanded(ours.root_certificates))
    return probe_superlink(ours.superlink, certificates, ours.insecure)


def _read(options: Sequence[str]) -> argparse.Namespace:
    """Parse the options as `flower-supernode` does: abbreviated, repeated and deprecated ones too."""
    parser: argparse.ArgumentParser = parser_of_supernode()
    parser.prog = "cloister warm-node"
    parser.usage = "cloister warm-node [OPTIONS]; --help lists them"
    parser.set_defaults(isolation="")
    ours = parser.parse_args(list(options))
    if ours.isolation:
        raise ConfigError(f"--isolation = {ours.isolation!r}: cloister warm-node has clients of its own; leave it out")
    if bool(ours.ssl_certfile) != bool(ours.ssl_ca_certfile):
        raise ConfigError("--ssl-certfile and --ssl-ca-certfile belong together: clients check the one by the other")
    return ours


def _link(ours: argparse.Namespace) -> Link:
    host = "127.0.0.1" if ours.host in ("0.0.0.0", "") else "[::1]" if ours.host == "::" else ours.host
    file = ours.superexec_auth_secret_file
    secret = expanded(file).read_bytes() if file else None
    return Link(f"{host}:{ours.port}", str(expanded(ours.ssl_ca_certfile)) if ours.ssl_certfile else "", secret)


def _refuse_used_port(ours: argparse.Namespace) -> None:
    """Refuse a port on which another process listens, such as the node of a second site on this machine.

    Raises:
        ConfigError: names another port.
    """
    family = socket.AF_INET6 if ":" in ours.host else socket.AF_INET
    try:
        socket.create_server((ours.host, ours.port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {ours.port} is in use on this machine, perhaps by another site's node; a second site takes "
                f"another port: CLOISTER_PORT={ours.port + 1} ./start.sh"
            ) from None


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        process.terminate()
