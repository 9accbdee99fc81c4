"""Warm clients: forked processes that run the app of their bundle, and nothing of each other's."""

import hashlib
import json
import os
import select
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path

import httpx
import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp.client_app import LoadClientAppError
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.runtime import run_clientapp as clientapp
from support import failures

from cloister.client.app import app
from cloister.client.policy import CHECKED_BUNDLE, Policy
from cloister.client.trainers import PRIVATE_TRAINERS
from cloister.deploy.warm import executor, node
from cloister.flower.messages import assume_run
from cloister.privacy.mechanisms.discrete.tables import tables_of
from cloister.tasks import TASKS
from cloister.training.trainers import TRAINERS
from cloister.utils import registry
from cloister.utils.errors import ConfigError, FederationError, PolicyError

BUNDLE = b"an app bundle"
DIGEST = hashlib.sha256(BUNDLE).hexdigest()


def sha(bundle):
    return hashlib.sha256(bundle).hexdigest()


ENDS = {"pass": 0, "sys.exit(3)": 3, "sys.exit('no')": 1, "raise KeyError": 1}
CHILDREN = """
import atexit, json, os, sys
from cloister.deploy.warm import executor
import numpy  # what stands for a heavy library
mark = id(numpy)
atexit.register(lambda: print("the end of the parent"))

def draw(end, *bundle):
    executor._compile_nothing()
    if bundle:
        executor._forget_app()
        sys.path.insert(0, *bundle)
    import cloister, numpy
    from cloister.privacy.mechanisms.noise import GaussianNoise
    noise = GaussianNoise().standard_normal(4).tolist()
    from cloister.privacy.mechanisms.discrete.sampler import kernel
    os.write(end, json.dumps([cloister.__file__, id(numpy) == mark, noise, kernel().NAME]).encode())

def status(work):
    child = os.fork()
    if not child:
        executor._as_child(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def drawn(*bundle):
    read, write = os.pipe()
    assert status(lambda: draw(write, *bundle)) == 0
    return json.loads(os.read(read, 10_000))  # the next child has no copy of it

bundle, *statements = sys.argv[1:]
print(json.dumps({
    "own": [drawn(), drawn()],
    "bundle": [drawn(bundle), drawn(bundle)],
    "statuses": {statement: status(lambda: exec(statement)) for statement in statements},
}))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder of a bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    folder.joinpath("cloister").symlink_to(Path(executor.__file__).parents[2])
    return folder


@pytest.fixture(scope="module")
def children(unpacked):
    """Output of a process about its children: two draw by its own app, two by a bundle's, others run a statement.

    Each that draws says where its app is from, whether libraries are shared, its noise, and its kernel.
    """
    command = [sys.executable, "-c", CHILDREN, str(unpacked), *ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, *others = done.stdout.splitlines()
    return json.loads(first) | {"afterwards": others}


def test_a_child_has_the_app_of_its_bundle_and_the_libraries_of_its_parent(children, unpacked):
    (first, warm, noise, kernel), (second, warm_too, other_noise, _) = children["bundle"]
    assert first == second == str(unpacked / "cloister" / "__init__.py")
    assert warm and warm_too and noise != other_noise
    assert kernel == "numpy", "nothing is compiled for one message"


def test_children_with_the_app_of_their_parent_have_noise_of_their_own(children):
    (first, _, noise, kernel), (_, _, other_noise, _) = children["own"]
    assert first == str(Path(executor.__file__).parents[2] / "__init__.py")
    assert noise != other_noise and kernel == "numpy"


def test_a_child_ends_where_its_work_ends(children):
    assert children["statuses"] == ENDS and children["afterwards"] == ["the end of the parent"]


def test_a_child_need_not_read_the_entry_points_of_all_packages(monkeypatch):
    registries = TASKS, TRAINERS, PRIVATE_TRAINERS
    monkeypatch.setattr(executor.gc, "freeze", lambda: None)
    monkeypatch.setattr(executor.importlib, "import_module", lambda name: None)
    for plugins in registries:
        monkeypatch.delitem(vars(plugins), "_table", raising=False)
    executor.warm_up([])
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail(f"{group} was read again"))
    assert all(plugins.names() for plugins in registries)


class TestBundles:
    def policy(self, *fabs):
        return Policy.model_validate({"mechanisms": [], "tasks": ["digits"], "allowed-fabs": list(fabs)})

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv(CHECKED_BUNDLE, "")

    def test_a_listed_bundle_runs_and_is_vouched_for(self):
        assert executor._allowed(BUNDLE, self.policy("0" * 64, DIGEST)) == DIGEST
        assert os.environ[CHECKED_BUNDLE] == DIGEST

    def test_another_one_is_refused_before_it_is_unpacked(self):
        with pytest.raises(PolicyError, match="is not in allowed-fabs"):
            executor._allowed(BUNDLE, self.policy("0" * 64))
        assert not os.environ[CHECKED_BUNDLE]

    def test_without_a_list_any_bundle_runs(self):
        assert executor._allowed(BUNDLE, None) == executor._allowed(BUNDLE, self.policy()) == DIGEST


def test_with_another_flower_clients_start_cold(monkeypatch):
    called = []
    monkeypatch.setattr(executor.flwr, "__version__", "1.99.0")
    # In its place, not below it: a child of this process would outlive a SIGTERM to it.
    monkeypatch.setattr(node.os, "execvp", lambda *call: called.append(call) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        node.run_node(["--insecure", "--port", "9100"])
    assert called == [("flower-supernode", ["flower-supernode", "--insecure", "--port", "9100"])]


def test_with_another_flower_a_node_that_pins_bundles_does_not_start(monkeypatch, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(f'mechanisms = []\ntasks = ["digits"]\nallowed-fabs = ["{DIGEST}"]\n')
    monkeypatch.setattr(executor.flwr, "__version__", "1.99.0")
    monkeypatch.setattr(node.os, "execvp", lambda *_: pytest.fail("it started"))
    with pytest.raises(PolicyError, match=r"allowed-fabs cannot be enforced with this flwr, only with 1\.41 or 1\.42"):
        node.run_node(["--insecure", "--node-config", f'policy="{policy}"'])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_another_site_has_is_refused_with_the_variable_of_the_kit(monkeypatch, host):
    monkeypatch.setattr(node.subprocess, "Popen", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr(node, "_look_at_superlink", lambda _: None)
    with socket.create_server((host, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port} is in use .* CLOISTER_PORT={port + 1} \./start\.sh"):
            node.run_node(["--insecure", "--superlink", "127.0.0.1:1", "--host", host, "--port", str(port)])


@pytest.mark.parametrize("there", [True, False])
def test_data_that_is_not_there_is_said_when_the_node_starts(tmp_path, monkeypatch, there):
    """Under noise of its own such a node answers as if nothing had happened, and no run shows it."""
    said, place = [], tmp_path / "scans"
    if there:
        place.mkdir()
    monkeypatch.setattr(node, "log", lambda level, text, *values: said.append(text % values))
    monkeypatch.setattr(executor.flwr, "__version__", "1.99.0")
    monkeypatch.setattr(node.os, "execvp", lambda *_: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        node.run_node(["--insecure", "--port", "9100", "--node-config", f'data-path="{place}"'])
    warned = [line for line in said if line.startswith(f"data-path: there is no file or folder at {place};")]
    assert len(warned) == (not there)


class TestWhatIsLoaded:
    """A bundle that is allowed, and a server that would have another one loaded."""

    @pytest.fixture
    def bundle(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(clientapp, "install_from_fab", clientapp.install_from_fab)
        monkeypatch.setattr(clientapp, "get_load_client_app_fn", clientapp.get_load_client_app_fn)
        monkeypatch.setattr(sys, "path", sys.path[:])
        # This process is no child: other tests need what it has imported.
        monkeypatch.setattr(executor, "_forget_app", lambda: None)
        (tmp_path / "private").mkdir()
        return self.built(tmp_path, "vetted")

    @pytest.fixture(autouse=True)
    def modules(self):
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            if name.startswith("pinned"):
                del sys.modules[name]

    def built(self, tmp_path, mark, version="1.0.0"):
        project = tmp_path / mark / "pinned"
        project.mkdir(parents=True)
        (project / "pinned.py").write_text(
            f"from flwr.clientapp import ClientApp\napp = ClientApp()\napp.mark = {mark!r}\n"
        )
        (project / "pyproject.toml").write_text(
            f'[project]\nname = "pinned"\nversion = "{version}"\ndescription = ""\nlicense = {{ file = "LICENSE" }}\n'
            'dependencies = ["flwr>=1.41.0"]\n'
            '[tool.flwr.app]\npublisher = "p"\nfab-format-version = 1\nflwr-version-target = "1.41.0"\n'
            '[tool.flwr.app.components]\nserverapp = "pinned:app"\nclientapp = "pinned:app"\n'
        )
        (project / "LICENSE").write_text("MIT\n")
        return build_fab_from_disk(project)

    @pytest.fixture(autouse=True)
    def known(self):
        self.known = executor.Known()

    def loaded(self, tmp_path, bundle, digest, version="1.0.0", policy=True):
        """Do the work of `run_clientapp` with a bundle and the names that the server gives."""
        listed = Policy.model_validate({"mechanisms": [], "tasks": ["digits"], "allowed-fabs": [sha(bundle)]})
        executor.load_only_what_is_allowed(lambda: listed if policy else None, tmp_path / "private", {}, self.known)
        clientapp.install_from_fab(bundle, skip_prompt=True)
        load = clientapp.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        return load("p/pinned", version, digest)

    def test_it_is_the_bundle_that_was_looked_at(self, bundle, tmp_path):
        assert self.loaded(tmp_path, bundle, sha(bundle)).mark == "vetted"

    def test_and_not_one_that_another_run_has_left_behind(self, bundle, tmp_path):
        other = self.built(tmp_path, "planted")
        clientapp.install_from_fab(other, skip_prompt=True)
        assert self.loaded(tmp_path, bundle, sha(other)).mark == "vetted"

    def test_nor_a_folder_that_was_tampered_with(self, bundle, tmp_path):
        shared = clientapp.install_from_fab(bundle, skip_prompt=True)
        module = shared / "pinned.py"
        module.write_text(module.read_text().replace("vetted", "tampered"))
        assert self.loaded(tmp_path, bundle, sha(bundle)).mark == "vetted"

    def test_nor_one_of_another_version(self, bundle, tmp_path):
        clientapp.install_from_fab(self.built(tmp_path, "planted", "2.0.0"), skip_prompt=True)
        with pytest.raises(LoadClientAppError, match="mismatch"):
            self.loaded(tmp_path, bundle, sha(bundle), version="2.0.0")

    def test_one_of_the_package_that_is_installed_is_not_unpacked(self, bundle, tmp_path, monkeypatch):
        monkeypatch.setattr(executor, "is_installed", lambda *about: about == (bundle, {}, False))
        assert self.loaded(tmp_path, bundle, sha(bundle)) is app and not any((tmp_path / "private").iterdir())

    def test_nor_into_a_folder_in_which_something_lies(self, bundle, tmp_path):
        (tmp_path / "private" / "apps").mkdir()
        with pytest.raises(PolicyError, match="was not empty"):
            self.loaded(tmp_path, bundle, sha(bundle))

    def learn_from_a_child(self, work):
        """Do the work in a child of this process, and learn what it tells."""
        child = os.fork()
        if not child:
            try:
                work()
                self.known.tell()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.known.learn()

    def test_later_children_know_that_it_is_installed(self, bundle, tmp_path, monkeypatch):
        monkeypatch.setattr(executor, "is_installed", lambda *about: about[0] == bundle)
        self.learn_from_a_child(lambda: self.loaded(tmp_path, bundle, sha(bundle)))
        assert self.known.bundles == {sha(bundle)}

    def test_the_code_of_another_one_tells_the_parent_nothing(self, bundle, tmp_path):
        def write_to_all_pipes():
            self.loaded(tmp_path, bundle, sha(bundle))
            for number in (self.known._read_end, self.known._write_end):
                with suppress(OSError):
                    os.write(number, b"0" * 64 + b"\n")
                with suppress(OSError):
                    Path(f"/proc/self/fd/{number}").write_bytes(b"0" * 64 + b"\n")

        self.learn_from_a_child(write_to_all_pipes)
        assert not self.known.bundles

    def test_tables_of_a_childs_scales_are_computed_once(self):
        scale = Fraction(123457, 3)

        def compute():
            self.known.note("0" * 64, is_equal=True)
            tables_of(scale)

        self.learn_from_a_child(compute)
        before = tables_of.cache_info().misses
        tables_of(scale)
        assert tables_of.cache_info().misses == before


def replies_after_a_death(monkeypatch, is_taken):
    """Return a SuperNode's number of replies, long after a client died that may have taken its message."""
    assume_run()
    state = InMemoryNodeState(InMemoryObjectStore())
    message = Message(RecordDict(), 1, "train")
    message.metadata.__dict__.update(_run_id=7, _src_node_id=2, _message_id="m")
    state.set_node_id(1)
    state.store_message(message)
    task = state.create_task(TaskType.CLIENT_APP, 7)
    assert state.claim_task(task) and state.activate_task(task)
    if is_taken:
        assert state.get_messages_legacy(run_ids=[7], is_reply=False, limit=1)
    later = datetime.now(UTC) + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(in_memory_corestate, "now", lambda: later)
        return len(state.get_messages_legacy(is_reply=True))


class TestServing:
    """The executor against answers of a SuperNode."""

    @pytest.fixture
    def serve(self, monkeypatch):
        def served(answers, children=(), has_begun=False):
            called, answers = [], iter(answers)

            class Client:
                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    pass

                def __getattr__(self, name):
                    return lambda request: called.append((name, request))

                def PullTaskInput(self, request):
                    called.append(("PullTaskInput", request))
                    if has_begun:
                        raise httpx.HTTPStatusError("it has begun", request=None, response=None)

                def AcquireTask(self, request):
                    answer = next(answers)
                    if isinstance(answer, Exception):
                        raise answer
                    kind = answer if answer in request.supported_task_types else None
                    return AcquireTaskResponse(task=Task(type=kind), token="t") if kind else AcquireTaskResponse()

            monkeypatch.setattr(executor.Link, "client", lambda _: Client())
            monkeypatch.setattr(executor.Link, "client_of_task", lambda *_: Client())
            monkeypatch.setattr(executor.Executor, "fork", lambda _, token: called.append(("fork", token)))
            with suppress(StopIteration):
                executor.Executor(executor.Link("node:1"), {}, children=dict(children)).serve(lambda: True)
            return called

        monkeypatch.setattr(executor, "POLL_SECONDS", 0.0)
        return served

    def test_clients_are_forked(self, serve):
        assert serve(["", TaskType.CLIENT_APP]) == [("fork", "t")]

    def test_an_idle_executor_asks_for_a_task_as_soon_as_the_supernode_wakes_it(self, monkeypatch):
        woken, wakes = os.pipe()
        idle = executor.Executor(executor.Link("node:1"), {}, woken=woken)
        monkeypatch.setattr(executor, "IDLE_SECONDS", 60.0)
        os.write(wakes, b"xx")
        idle._rest()  # at once
        assert not select.select([woken], [], [], 0)[0]  # all that was said is heard
        os.close(wakes)
        os.close(woken)

    def test_and_looks_by_itself_where_the_supernode_says_nothing_more(self, monkeypatch):
        woken, wakes = os.pipe()
        idle, slept = executor.Executor(executor.Link("node:1"), {}, woken=woken), []
        os.close(wakes)
        monkeypatch.setattr(executor.time, "sleep", slept.append)
        idle._rest()
        idle._rest()
        assert slept == [executor.POLL_SECONDS]
        os.close(woken)

    def test_a_task_of_an_agent_is_answered_with_an_error(self, serve):
        called = serve([TaskType.AGENT_APP, TaskType.CLIENT_APP])
        assert [name for name, _ in called] == ["PullTaskInput", "PullMessages", "PushTaskOutput", "fork"]
        assert called[2][1].sub_status == "failed"

    @pytest.mark.parametrize("has_begun", [False, True])
    @pytest.mark.parametrize("how", ["exit 0", "exit 1", "kill -9 $$"])
    def test_the_message_of_a_child_that_died_is_taken(self, serve, tmp_path, how, has_begun):
        child = subprocess.Popen(["sh", "-c", how])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        called = serve(["", ""], {child.pid: executor.Child(tmp_path / "bundle", "t")}, has_begun)
        child.returncode = 0
        assert [name for name, _ in called] == ([] if how == "exit 0" else ["PullTaskInput", "PullMessages"])

    def test_flower_answers_for_a_message_that_was_taken_alone(self, monkeypatch):
        assert [replies_after_a_death(monkeypatch, is_taken) for is_taken in (False, True)] == [0, 1]

    def test_silence_is_told_once(self, serve, caplog):
        refused = httpx.ConnectError("connection refused")
        serve([refused, refused, "", refused])
        assert caplog.text.count("no SuperNode answers at node:1 yet") == 2

    def test_a_certificate_of_somebody_else_ends_it(self, serve):
        refused = httpx.ConnectError("certificate verify failed")
        refused.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
        with pytest.raises(FederationError, match="node:1 is not to be trusted"):
            serve([refused])


@pytest.mark.parametrize("deaf", [False, True])
def test_no_child_outlives_its_executor(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr(executor, "LEAVE_SECONDS", 1.0)
    asking = executor.Executor(executor.Link("node:1"), {})
    folder = tmp_path / "bundle"
    folder.mkdir()
    child = subprocess.Popen(["sh", "-c", f"trap '{'' if deaf else 'exit 0'}' TERM; echo; while :; do sleep 0.1; done"],
                             stdout=subprocess.PIPE)  # fmt: skip
    child.stdout.readline()  # it listens, or does not
    asking.children[child.pid] = executor.Child(folder, "t")

    class Broken:
        def __enter__(self):
            raise KeyError("anything")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(executor.Link, "client", lambda _: Broken())
    with pytest.raises(KeyError):
        asking.serve(lambda: True)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert not asking.children and not folder.exists()
    child.stdout.close()
    child.returncode = 0


class TestOptions:
    def test_the_executor_finds_the_supernode(self):
        def check(options, address):
            assert node._link(node._read(options)).address == address

        cases = [
            ([], "127.0.0.1:9094"),
            (["--port", "9100"], "127.0.0.1:9100"),
            (["--host", "0.0.0.0", "--port=9100", "--superlink", "x:1"], "127.0.0.1:9100"),
            (["--host", "::"], "[::1]:9094"),
            (["--host", "node.site"], "node.site:9094"),
        ]
        assert failures(cases, check) == []

    def test_tls_of_the_supernode_is_checked(self, tmp_path):
        options = ["--ssl-certfile", "a.pem", "--ssl-keyfile", "a.key", "--ssl-ca-certfile", str(tmp_path / "ca.pem")]
        assert node._link(node._read(options)).certificates == str(tmp_path / "ca.pem")
        with pytest.raises(ConfigError, match="belong together"):
            node._read(options[:4])

    def test_isolation_is_chosen_here(self):
        with pytest.raises(ConfigError, match="leave it out"):
            node._read(["--isolation", "subprocess"])

    def test_a_node_whose_policy_cannot_be_read_does_not_start(self):
        for option in ("--node-config", "--node-conf", "--nod"):
            with pytest.raises(PolicyError, match="cannot be read"):
                node.run_node([option, 'policy="/nowhere/policy.toml"'])

    def test_the_last_of_several_counts_as_it_does_for_the_supernode(self):
        with pytest.raises(PolicyError, match="cannot be read"):
            node.run_node(["--node-config", "a=1", "--node-conf", 'policy="/nowhere/policy.toml"'])

    def test_isolation_is_found_under_any_name(self):
        with pytest.raises(ConfigError, match="leave it out"):
            node._read(["--isol", "process"])

    def test_names_of_before_are_understood(self):
        link = node._link(node._read(["--appio-ssl-certfile", "a.pem", "--appio-ssl-ca-certfile", "/ca.pem"]))
        assert link.certificates == "/ca.pem"

    def test_a_shared_secret(self, tmp_path):
        (tmp_path / "secret").write_bytes(b"0123456789abcdef0123456789abcdef")
        link = node._link(node._read(["--superexec-auth-secret-file", str(tmp_path / "secret")]))
        assert link.secret == b"0123456789abcdef0123456789abcdef"
