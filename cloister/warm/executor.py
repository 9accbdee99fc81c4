"""Flower's executor, with processes that are forked instead of started.

A process that has imported everything heavy, and computed nothing, asks the SuperNode for tasks. For each it forks a
child, which runs `flwr-clientapp`'s own function once and ends: what a client computes, and above all its noise, never
lives longer than its message.
"""

import gc
import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn

import flwr
import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime import run_clientapp as clientapp

from cloister.client.policy import CHECKED_BUNDLE, Policy
from cloister.core.errors import PolicyError

TESTED_WITH = "1.41.0"
"""The flwr whose internals this package relies on; with any other, clients start cold."""
POLL_SECONDS = 0.2
APP = "cloister"
"""The package that Flower ships: what a child runs comes from the bundle of its run, not from this process."""
LIBRARIES = ("cloister.client.app", "cloister.privacy.accounting", "dp_accounting", "sklearn.datasets", "pandas")


@dataclass(frozen=True)
class Link:
    """How to reach the SuperNode.

    Attributes:
        address: host:port of its Runtime API.
        certificates: path of the CA certificate that vouches for it; empty: plain HTTP.
        secret: shared with it; None if it asks for none.
    """

    address: str
    certificates: str = ""
    secret: bytes | None = None

    def client(self) -> RuntimeHttpClient:
        """A client that may ask for tasks."""
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if self.secret is not None:
            methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
            interceptors.append(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=methods))
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=not self.certificates,
            root_certificates=self.root(),
            interceptors=interceptors,
        )

    def root(self) -> bytes | None:
        """The CA certificate, or None for plain HTTP."""
        return Path(self.certificates).read_bytes() if self.certificates else None


def warm_up(keras: bool) -> None:
    """Import what clients need, without computing anything: a process forked after a computation may hang."""
    for name in LIBRARIES:
        importlib.import_module(name)
    if keras:
        from cloister.tasks.backend import import_keras

        import_keras()
    # What is frozen is not touched by a child's collector, so that its memory stays shared.
    gc.collect()
    gc.freeze()


@dataclass
class Executor:
    """Asks for tasks and has each run in a process of its own.

    Args:
        link: to the SuperNode.
        policy: gives the policy in force, whose `allowed-fabs` is enforced before anything of a bundle runs.
    """

    link: Link
    policy: Callable[[], Policy | None] = lambda: None
    children: set[int] = field(default_factory=set)

    def serve(self, going_on: Callable[[], bool]) -> None:
        """Run tasks as long as `going_on`; then end the children."""
        with self.link.client() as client:
            while going_on():
                self._reap()
                if not (token := _next_task(client)):
                    time.sleep(POLL_SECONDS)
                    continue
                self.fork(token)
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    def fork(self, token: str) -> None:
        """Run a task in a child of this process."""
        child = os.fork()
        if not child:
            _as_child(lambda: self._run(token, os.getppid()))
        self.children.add(child)

    def _run(self, token: str, parent: int) -> None:
        """Be `flwr-clientapp` for one task."""
        install = vars(clientapp)["install_from_fab"]
        vars(clientapp)["install_from_fab"] = lambda bundle, **options: install(
            _allowed(bundle, self.policy()), **options
        )
        _forget_app()
        clientapp.run_clientapp(
            runtime_api_address=self.link.address,
            token=token,
            insecure=not self.link.certificates,
            certificates=self.link.root(),
            parent_pid=parent,
            runtime_dependency_install=False,
        )

    def _reap(self) -> None:
        for child in list(self.children):
            if os.waitpid(child, os.WNOHANG)[0]:
                self.children.discard(child)


def is_tested() -> bool:
    """Whether this is the flwr whose internals are known; if not, it is said in the log."""
    if flwr.__version__ == TESTED_WITH:
        return True
    log(WARNING, "warm clients were tested with flwr %s, this is %s: clients start cold", TESTED_WITH, flwr.__version__)
    return False


def _next_task(client: RuntimeHttpClient) -> str:
    """The token of a task to run; empty if there is none, or if the SuperNode cannot be reached now."""
    try:
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.TransportError:
        return ""
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            return ""
        raise
    return str(answer.token) if answer.HasField("task") else ""


def _as_child(work: Callable[[], None]) -> NoReturn:
    """Do the work and end, without anything that the parent has planned for its own end."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        log(ERROR, "a client failed", exc_info=error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_app() -> None:
    """Unload this process' own copy of the app: the child imports that of its bundle, as a cold client would."""
    for name in [name for name in sys.modules if name == APP or name.startswith(APP + ".")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _allowed(bundle: bytes, policy: Policy | None) -> bytes:
    """A bundle whose code may run here; that it was looked at is left in the environment for the policy's mod.

    Raises:
        PolicyError: the policy does not list it.
    """
    digest = hashlib.sha256(bundle).hexdigest()
    if policy is not None and policy.allowed_fabs and digest not in policy.allowed_fabs:
        raise PolicyError(f"refused by the policy of this node: app bundle {digest[:12]} is not in allowed-fabs")
    os.environ[CHECKED_BUNDLE] = digest
    log(INFO, "running app bundle %s", digest[:12])
    return bundle
