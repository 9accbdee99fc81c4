"""Frequent requests of nodes and server apps are answered as Flower would, without its way there."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from anyio import fail_after, run, to_thread
from closed_link import WIRE, configuration, signed_by
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import (
    FLEET_HTTP_SIGNATURE_HEADER,
    NOOP_FEDERATION_ID,
    TASK_TOKEN_HEADER,
    TaskType,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.main import create_app
from httpx import ASGITransport, AsyncClient
from starlette.testclient import TestClient
from support import failures

from cloister.deploy.superlink import serve as app_module
from cloister.deploy.superlink.serve import closed_app
from cloister.flower.superlink import OFTEN, Shortcut

pytestmark = pytest.mark.usefixtures("flower_as_it_was")


@pytest.fixture(scope="module")
def two_ways(flower_of_the_module, tmp_path_factory):
    """Flower's SuperLink, and the same one behind our shortcut, whose calls are listed."""
    app, taken = create_app(configuration(tmp_path_factory.mktemp("ways") / "state.db"), SuperLinkLifespan), []

    async def flower(scope, receive, send):
        taken.append(scope["path"])
        await app(scope, receive, send)

    flower.state = app.state
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, TestClient(Shortcut(flower), raise_server_exceptions=False), taken


@pytest.fixture(scope="module")
def node(two_ways):
    """A node that takes part: its keys and its id."""
    private, public = generate_key_pairs()
    key, headers = public_key_to_bytes(public), signed_by(private, public)
    for path, kind in (("register-node", RegisterNodeFleetRequest), ("activate-node", ActivateNodeRequest)):
        body = kind(public_key=key, heartbeat_interval=30) if "activate" in path else kind(public_key=key)
        answer = two_ways[0].post(f"/v1/fleet/{path}", content=body.SerializeToString(), headers=headers)
    return private, public, ActivateNodeResponse.FromString(answer.content).node_id


@pytest.fixture(scope="module")
def token(two_ways):
    """Of a task of a run: what its app shows."""
    state = two_ways[0].app.state.linkstate_factory.state()
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    (found,) = state.get_run_info(run_ids=[run])
    shown = state.claim_task(found.primary_task_id)
    assert state.activate_task(found.primary_task_id)
    return shown


STRANGE = {"unsigned", "forged", "late", "stranger", "in another's name"}


class TestShortcut:
    @pytest.mark.parametrize(
        "kind", ["genuine", "unsigned", "forged", "late", "stranger", "in another's name", "no protobuf", "other media"]
    )
    def test_a_node_is_answered_as_by_flower(self, two_ways, node, kind):
        def check(path):
            flower, short, taken = two_ways
            taken.clear()
            private, public, number = node
            request = PROTOBUF_REQUEST_TYPES["POST", path]()
            request.node.node_id = number + (kind == "in another's name")
            if kind == "stranger":
                private, public = generate_key_pairs()
            headers = signed_by(private, public, late=400 if kind == "late" else 0)
            if kind == "forged":
                headers[FLEET_HTTP_SIGNATURE_HEADER] = signed_by(*generate_key_pairs())[FLEET_HTTP_SIGNATURE_HEADER]
            headers = WIRE if kind == "unsigned" else headers
            headers = headers | ({"content-type": "text/plain"} if kind == "other media" else {})
            body = b"\xff" if kind == "no protobuf" else request.SerializeToString()
            wanted, found = (client.post(path, content=body, headers=headers) for client in (flower, short))
            assert (found.status_code, found.content) == (wanted.status_code, wanted.content)
            assert dict(found.headers) == dict(wanted.headers)
            assert (wanted.status_code == 401) == (kind in STRANGE)
            assert path not in taken

        assert failures([path for path in OFTEN if path.startswith("/v1/fleet/")], check) == []

    @pytest.mark.parametrize("kind", ["genuine", "without token", "wrong token", "two tokens", "other version"])
    def test_an_app_is_answered_as_by_flower(self, two_ways, token, kind):
        def check(path):
            flower, short, taken = two_ways
            taken.clear()
            tokens = {"without token": [], "wrong token": ["0"], "two tokens": [token, token]}.get(kind, [token])
            told = {"package_version_value": "1.0.0"} if kind == "other version" else {}
            version = RuntimeVersionMetadata.from_local_component("ServerApp", **told).as_metadata()
            headers = [*WIRE.items(), *version, *((TASK_TOKEN_HEADER, one) for one in tokens)]
            request = PROTOBUF_REQUEST_TYPES["POST", path]().SerializeToString()
            wanted, found = (client.post(path, content=request, headers=headers) for client in (flower, short))
            assert (found.status_code, found.content) == (wanted.status_code, wanted.content)
            assert dict(found.headers) == dict(wanted.headers)
            assert (wanted.status_code == 401) == ("token" in kind)
            assert ("version" in wanted.text) == (kind == "other version")
            assert path not in taken

        assert failures([path for path in OFTEN if path.startswith("/v1/runtime/")], check) == []

    def test_a_heartbeat_and_a_look_succeed(self, two_ways, node):
        private, public, number = node
        short, owner = two_ways[1], Node(node_id=number)
        beat = SendNodeHeartbeatRequest(node=owner, heartbeat_interval=30).SerializeToString()
        answer = short.post("/v1/fleet/send-node-heartbeat", content=beat, headers=signed_by(private, public))
        assert SendNodeHeartbeatResponse.FromString(answer.content).success
        look = PullMessagesRequest(node=owner).SerializeToString()
        answer = short.post("/v1/fleet/pull-messages", content=look, headers=signed_by(private, public))
        assert answer.status_code == 200 and answer.content == b""

    def test_a_heartbeat_does_not_wait_for_messages(self, two_ways, node):
        private, public, number = node
        beat = SendNodeHeartbeatRequest(node=Node(node_id=number), heartbeat_interval=30).SerializeToString()

        async def answer_while_all_threads_work():
            threads = to_thread.current_default_thread_limiter()
            for _ in range(int(threads.total_tokens)):
                await threads.acquire_on_behalf_of(object())
            transport = ASGITransport(app=Shortcut(two_ways[0].app))
            async with AsyncClient(transport=transport, base_url="http://superlink") as client:
                with fail_after(20):
                    headers = signed_by(private, public)
                    return await client.post("/v1/fleet/send-node-heartbeat", content=beat, headers=headers)

        assert run(answer_while_all_threads_work).status_code == 200

    def test_all_else_goes_flowers_way(self, two_ways):
        flower, short, taken = two_ways
        for path in ("/health", "/v1/fleet/pull-messages"):
            taken.clear()
            wanted, found = (client.get(path) for client in (flower, short))
            assert (found.status_code, found.content) == (wanted.status_code, wanted.content) and taken == [path]

    @pytest.mark.parametrize("log", [None, object()])
    def test_it_is_not_taken_past_a_log_of_events(self, tmp_path, log, monkeypatch):
        monkeypatch.setattr(app_module, "create_app", lambda *_: None)
        app = closed_app(replace(configuration(tmp_path / "state.db"), fleet_event_log_plugin=log))
        assert isinstance(app, Shortcut) == (log is None)

    def test_it_is_not_taken_past_what_an_extension_adds_to_the_application(self, tmp_path, monkeypatch):
        class Extension:
            def __init__(self, app):
                self.app = app

            async def __call__(self, scope, receive, send):
                taken.append(scope["path"])
                await self.app(scope, receive, send)

        taken, path = [], "/v1/fleet/pull-messages"
        extension = SimpleNamespace(configure_app=lambda app: app.add_middleware(Extension))
        monkeypatch.setitem(sys.modules, "flwr.ee.superlink.extensions", extension)
        client = TestClient(closed_app(configuration(tmp_path / "state.db")), raise_server_exceptions=False)
        assert client.post(path, content=b"", headers=WIRE).status_code == 401 and taken == [path]
