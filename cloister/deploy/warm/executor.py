"""Executor for Flower that forks client processes instead of starting them.

One process imports the heavy libraries and computes nothing. It asks the SuperNode for tasks, and forks a child for
each. The child runs `flwr-clientapp`'s own function once and ends. So all computed state, above all noise, ends with
its message. A child loads exactly the verified bundle, from a folder that no other process writes to. Flower's own
loader finds a bundle by names from the server, in a folder that all runs share. If the bundle's source equals that of
the installed package, the bundle is not loaded: the parent has imported the same code already. Such a child tells the
parent what spares later children work (`Known`): public facts, which the parent computes or holds itself.
"""

import gc
import hashlib
import importlib
import os
import select
import shutil
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZipFile

import flwr
import httpx
from flwr.clientapp import ClientApp

import cloister
from cloister.client.policy import CHECKED_BUNDLE, Policy
from cloister.flower import TESTED_WITH, log
from cloister.flower.executor import (
    RuntimeHttpClient,
    RuntimeVersionHttpInterceptor,
    ShowsToken,
    SubStatus,
    SuperExecAuthHttpInterceptor,
    TaskType,
    runtime_pb2,
)
from cloister.flower.executor import run_clientapp as clientapp
from cloister.privacy.mechanisms.discrete.tables import COMPUTED, tables_of
from cloister.utils.crash import missing_extra
from cloister.utils.errors import FederationError, PolicyError
from cloister.utils.files import quiet_libraries

SUFFIX = ".py"
POLL_SECONDS = 0.2
"""Seconds between two looks for the end of a child, and for tasks of a SuperNode that does not wake the executor."""
IDLE_SECONDS = 2.0
"""Seconds between two looks for tasks without a child, of a SuperNode that wakes the executor."""
PIPE_BYTES = 2**16
"""Capacity of a pipe: one read of as many bytes empties it."""
LEAVE_SECONDS = 5.0
"""Grace period of children between SIGTERM and SIGKILL."""
APP = "cloister"
"""Package in Flower's app bundles. A child imports its bundle's copy, unless both are equal."""
LIBRARIES = (
    "cloister.client.app",
    "cloister.privacy.accounting.account",
    "dp_accounting",
    "sklearn.datasets",
    "pandas",
)
FRAMEWORKS = {"torch": ("torch._dynamo", "safetensors.torch"), "keras": ("tensorflow", "keras")}
"""Framework of a task -> modules that its clients import, in the order of imports.

PyTorch's optimizers import `torch._dynamo`, which with Triton ends a process that imported TensorFlow before.
"""
COMPILED = "cloister.privacy.mechanisms.discrete.numba_kernel"
"""Numba kernel. It returns the same numbers as the NumPy code, slightly faster."""


@dataclass(frozen=True)
class Link:
    """Address and credentials of the SuperNode.

    Attributes:
        address: host:port of its Runtime API.
        certificates: path of the CA certificate for the SuperNode; empty for plain HTTP.
        secret: shared with it; None if it requires none.
    """

    address: str
    certificates: str = ""
    secret: bytes | None = None

    def client(self) -> RuntimeHttpClient:
        """Return a client that may request tasks."""
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if self.secret is not None:
            methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
            interceptors.append(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=methods))
        return self._connected(interceptors)

    def client_of_task(self, token: str) -> RuntimeHttpClient:
        """Return a client that may act for the task with this token."""
        return self._connected([RuntimeVersionHttpInterceptor(component_name="SuperExec"), ShowsToken(token)])

    def _connected(self, interceptors: list[Any]) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=not self.certificates,
            root_certificates=self.root(),
            interceptors=interceptors,
        )

    def root(self) -> bytes | None:
        """Return the CA certificate, or None for plain HTTP."""
        return Path(self.certificates).read_bytes() if self.certificates else None


def warm_up(frameworks: Sequence[str]) -> None:
    """Import the libraries of clients without computing anything.

    If this process computes first, its forked children may hang. So PyTorch starts its threads in each child, and a
    child alone initialises CUDA, which a fork does not survive. Plugins that are installed later need a restart.

    Args:
        frameworks: names of `FRAMEWORKS`; of these, the installed ones are imported.

    Raises:
        PluginError: two plugins claim one name.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    from cloister.client.trainers import PRIVATE_TRAINERS
    from cloister.tasks import TASKS
    from cloister.training.trainers import TRAINERS

    for plugins in (TASKS, TRAINERS, PRIVATE_TRAINERS):
        plugins.names()  # reads the entry points of all installed packages
    for name in [name for framework, names in FRAMEWORKS.items() if framework in frameworks for name in names]:
        try:
            with quiet_libraries():
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not missing_extra(error):
                raise
    # Garbage collection in a child skips frozen objects. So parent and child keep sharing their memory.
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Child:
    """Process of one task.

    Attributes:
        folder: of its own.
        token: of the task.
    """

    folder: Path
    token: str


class Known:
    """Facts from children: which bundles equal the package, and which scales of exact noise need tables.

    Children write them to a pipe. A child first closes both its ends if its bundle differs from the package. So each
    fact comes from code that the parent has imported itself. Other code of the node's user is trusted as the node is.

    Attributes:
        bundles: digests of bundles that children found equal to the package.
    """

    def __init__(self) -> None:
        self.bundles: set[str] = set()
        self._equal = ""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def note(self, bundle: str, is_equal: bool) -> None:
        """Note in a child whether its bundle equals the package; if not, this child tells nothing."""
        os.close(self._read_end)
        COMPUTED.clear()
        if is_equal:
            self._equal = bundle
        else:
            os.close(self._write_end)

    def tell(self) -> None:
        """Send the parent the digest of this child's equal bundle, and the scales whose tables it computed."""
        line = " ".join([self._equal, *map(str, COMPUTED)]).encode() + b"\n"
        if self._equal and len(line) <= select.PIPE_BUF:  # a longer line could mix with another child's
            os.write(self._write_end, line)

    def learn(self) -> None:
        """Read in the parent what children sent, and compute the tables."""
        with suppress(BlockingIOError):
            for line in os.read(self._read_end, PIPE_BYTES).decode().splitlines():
                bundle, *scales = line.split()
                self.bundles.add(bundle)
                for scale in scales:
                    tables_of(Fraction(scale))


@dataclass
class Executor:
    """Executor that requests tasks and runs each in a separate process.

    Args:
        link: to the SuperNode.
        imported: `sources()` at the time when this process imported the package.
        policy: returns the policy in force. Its `allowed-fabs` is enforced before any code of a bundle runs.
        woken: pipe to which the SuperNode writes when there is a task; None: it does not.
    """

    link: Link
    imported: Mapping[str, bytes]
    policy: Callable[[], Policy | None] = lambda: None
    woken: int | None = None
    children: dict[int, Child] = field(default_factory=dict)
    reachable: bool = True
    known: Known = field(default_factory=Known)

    def serve(self, going_on: Callable[[], bool]) -> None:
        """Run tasks while `going_on()` is true, then end the children.

        They receive SIGTERM. Those that still run after `LEAVE_SECONDS` are killed.

        Raises:
            FederationError: the SuperNode's certificate is not trusted.
        """
        try:
            with self.link.client() as client:
                while going_on():
                    for token in self._reap():
                        self._give_up(token)
                    self.known.learn()
                    if (answer := self._asked(client)) is None:
                        self._rest()
                    elif answer.task.type == TaskType.CLIENT_APP:
                        self.fork(answer.token)
                    else:
                        self._refuse(answer.token)
        finally:
            for child in self.children:
                os.kill(child, signal.SIGTERM)
            deadline = time.monotonic() + LEAVE_SECONDS
            while self.children and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self._reap()
            for child in list(self.children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self._forget(child)

    def _rest(self) -> None:
        """Wait for the next look, or until the SuperNode has a task or has ended."""
        if self.woken is None or not self.reachable:
            time.sleep(POLL_SECONDS)
            return
        pause = POLL_SECONDS if self.children else IDLE_SECONDS
        if select.select([self.woken], [], [], pause)[0] and not os.read(self.woken, PIPE_BYTES):
            self.woken = None  # it has ended

    def fork(self, token: str) -> None:
        """Run a task in a child of this process, with a folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="cloister-"))
        child = os.fork()
        if not child:
            _as_child(lambda: self._run(token, os.getppid(), folder))
        self.children[child] = Child(folder, token)

    def _run(self, token: str, parent: int, folder: Path) -> None:
        """Run `flwr-clientapp`'s function for one task."""
        _compile_nothing()
        load_only_what_is_allowed(self.policy, folder, self.imported, self.known)
        try:
            clientapp.run_clientapp(
                runtime_api_address=self.link.address,
                token=token,
                insecure=not self.link.certificates,
                certificates=self.link.root(),
                parent_pid=parent,
                runtime_dependency_install=False,
            )
        finally:  # Flower's function ends by SystemExit
            self.known.tell()

    def _asked(self, client: RuntimeHttpClient) -> runtime_pb2.AcquireTaskResponse | None:
        """Return a task and its token, or None.

        None: there is no task, or the SuperNode fails or cannot be reached. Only the first failed connection is logged.
        """
        kinds = [TaskType.CLIENT_APP, TaskType.AGENT_APP]
        try:
            answer = client.AcquireTask(runtime_pb2.AcquireTaskRequest(supported_task_types=kinds))
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error:
                raise
            self.reachable = True
            return None
        except httpx.TransportError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, ssl.SSLCertVerificationError):
                    told = f"the SuperNode at {self.link.address} is not to be trusted: {error}"
                    raise FederationError(told) from None
                cause = cause.__cause__ or cause.__context__
            if self.reachable:
                log(WARNING, "no SuperNode answers at %s yet: %s", self.link.address, error)
            self.reachable = False
            return None
        self.reachable = True
        return answer if answer.HasField("task") and answer.token else None

    def _refuse(self, token: str) -> None:
        """Answer a task of another kind with an error.

        An unanswered task would block all later messages.
        """
        log(ERROR, "refused a task that is none of a client: a warm node runs no agents")
        with suppress(httpx.HTTPError), self.link.client_of_task(token) as client:
            client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
            client.PullMessages(runtime_pb2.PullAppMessagesRequest())
            details = "this node runs clients only"
            client.PushTaskOutput(runtime_pb2.PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=details))

    def _give_up(self, token: str) -> None:
        """Pull a task's message if its child died before pulling it.

        Flower reports a failure only for a pulled message. If a begun task has no report, the SuperNode waits for it
        forever, and polls for no other message.
        """
        with suppress(httpx.HTTPError), self.link.client_of_task(token) as client:
            with suppress(httpx.HTTPStatusError):  # as from a task that had begun
                client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
            client.PullMessages(runtime_pb2.PullAppMessagesRequest())

    def _reap(self) -> list[str]:
        """Remove the children that have ended, and return the tokens of the failed ones."""
        failed = []
        for number, child in list(self.children.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                self._forget(number)
                failed += [child.token] if status else []
        return failed

    def _forget(self, child: int) -> None:
        shutil.rmtree(self.children.pop(child).folder, ignore_errors=True)


def is_tested() -> bool:
    """Return whether clients can start warm with this release of Flower, and log it if not."""
    if flwr.__version__.rpartition(".")[0] in TESTED_WITH:
        return True
    tested = " and ".join(TESTED_WITH)
    log(WARNING, "warm clients were tested with flwr %s, this is %s: clients start cold", tested, flwr.__version__)
    return False


def _as_child(work: Callable[[], None]) -> NoReturn:
    """Run the work and end the process, without the parent's exit handlers."""
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
    """Unload this process's copy of the app.

    The child then imports its bundle's copy, as a cold client would.
    """
    for name in [name for name in sys.modules if name == APP or name.startswith(APP + ".")]:
        if name != COMPILED:
            del sys.modules[name]
    importlib.invalidate_caches()


def _compile_nothing() -> None:
    """Block the compiled module.

    Compilation takes seconds, and a child ends after one message.
    """
    vars(sys)["modules"][COMPILED] = None


def load_only_what_is_allowed(
    policy: Callable[[], Policy | None], folder: Path, imported: Mapping[str, bytes], known: Known
) -> None:
    """Make this process load the app of a bundle that the policy allows, and no other.

    The server's statements about the bundle (name, version, digest) have no influence. If its name or version differs
    from the run's, Flower's loader raises an error.

    Args:
        policy: returns the policy in force.
        folder: an empty one, in which the bundle is unpacked.
        imported: source files that this process has imported. An equal bundle is not unpacked.
        known: receives whether the bundle is equal.
    """
    names = vars(clientapp)
    unpack, loader = names["install_from_fab"], names["get_load_client_app_fn"]
    # Path of the unpacked, verified bundle. None: the bundle equals the installed package, and stays packed.
    looked_at: list[Path | None] = []

    def install(bundle: bytes, **_: object) -> None:
        if any(folder.iterdir()):
            raise PolicyError("the folder for an app bundle was not empty")
        digest = _allowed(bundle, policy())
        is_equal = is_installed(bundle, imported, digest in known.bundles)
        known.note(digest, is_equal)
        if is_equal:
            looked_at.append(None)
        else:
            _forget_app()
            looked_at.append(unpack(bundle, install_dir=folder, skip_prompt=True))

    def get_load(**_: object) -> Callable[[str, str, str], ClientApp]:
        (path,) = looked_at
        if path is None:
            return _imported_app
        return loader(default_app_ref="", app_path=str(path), multi_app=True)

    names["install_from_fab"], names["get_load_client_app_fn"] = install, get_load


def _imported_app(*_: str) -> ClientApp:
    """Return the client app of the imported package.

    The package has only one, so the app name of a bundle does not matter.
    """
    from cloister.client.app import app

    return app


def _allowed(bundle: bytes, policy: Policy | None) -> str:
    """Return the digest of a bundle that the policy allows.

    The digest is stored in the environment for `enforce_policy`.

    Raises:
        PolicyError: the policy does not list it.
    """
    digest = hashlib.sha256(bundle).hexdigest()
    if policy is not None and policy.allowed_fabs and digest not in policy.allowed_fabs:
        raise PolicyError(f"refused by the policy of this node: app bundle {digest[:12]} is not in allowed-fabs")
    os.environ[CHECKED_BUNDLE] = digest
    log(INFO, "running app bundle %s", digest[:12])
    return digest


def sources() -> dict[str, bytes]:
    """Return the Python files of the installed package by their names in a bundle."""
    # Every child reads all files. `Path.rglob` takes nearly twice as long.
    package = cloister.__path__[0]
    start = len(os.path.dirname(package)) + 1
    found = {}
    for folder, _, names in os.walk(package):
        for path in [f"{folder}/{name}" for name in names if name.endswith(SUFFIX)]:
            with open(path, "rb", buffering=0) as file:
                found[path[start:]] = file.read()
    return found


def is_installed(bundle: bytes, imported: Mapping[str, bytes], is_known: bool = False) -> bool:
    """Return whether a bundle and the installed package have the same Python files.

    They are compared byte for byte.

    Args:
        bundle: an app bundle of Flower, a zip archive.
        imported: `sources()` at import time. The files on disk are compared too: after an upgrade, a client would
            import those.
        is_known: an earlier comparison found this bundle equal to `imported`.
    """
    if is_known:
        return dict(imported) == sources()
    with ZipFile(BytesIO(bundle)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(SUFFIX)]
        # Compare sizes first, so that a huge bundle is not read into memory.
        if {member.filename: member.file_size for member in members} != {n: len(s) for n, s in imported.items()}:
            return False
        carried = {member.filename: archive.read(member) for member in members}
    return carried == dict(imported) == sources()
