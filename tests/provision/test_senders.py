"""A long request is read, and parsed, from a registered node, the app of a task, or an operator; from nobody else."""

from dataclasses import replace

import pytest
from closed_link import WIRE, configuration, signed_by
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, NOOP_FEDERATION_ID, TASK_TOKEN_HEADER, TaskType
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from starlette.testclient import TestClient

from cloister.deploy.credentials import digest_of
from cloister.deploy.superlink.app import closed_app
from cloister.deploy.superlink.door import MAX_UNAUTHENTICATED
from cloister.deploy.superlink.operators import OperatorsOnly

LONG = bytes(MAX_UNAUTHENTICATED + 1)
"""No protobuf: whoever is known hears so."""
OBJECT, ANNOUNCED = "/v1/fleet/push-object", "/v1/fleet/push-messages"
APPS, OPERATORS = "/v1/runtime/push-messages", "/v1/control/start-run"


@pytest.fixture
def parsed(monkeypatch):
    """The sizes of requests that were parsed."""
    sizes, parse = [], ProtobufTranslationMiddleware._parse_request

    def noted(body, kind):
        sizes.append(len(body))
        return parse(body, kind)

    monkeypatch.setattr(ProtobufTranslationMiddleware, "_parse_request", staticmethod(noted))
    return sizes


@pytest.fixture(scope="module")
def app(flower_of_the_module, tmp_path_factory):
    """Share one SuperLink between these tests: a refused request changes nothing."""
    config = configuration(tmp_path_factory.mktemp("superlink") / "state.db")
    return closed_app(replace(config, authn_plugin=OperatorsOnly((digest_of("token"),))))


@pytest.fixture(scope="module")
def superlink(app):
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def registered(superlink):
    """The keys of a node."""
    private, public = generate_key_pairs()
    body = RegisterNodeFleetRequest(public_key=public_key_to_bytes(public)).SerializeToString()
    answer = superlink.post("/v1/fleet/register-node", content=body, headers=signed_by(private, public))
    assert answer.status_code == 200
    return private, public


def is_read(superlink, parsed, path, headers, body=LONG):
    """Whether a request is read; else its sender is told that he is not known."""
    status = superlink.post(path, content=body, headers=headers).status_code
    assert status == (400 if parsed else 401)
    return bool(parsed)


@pytest.mark.parametrize("path", [OBJECT, ANNOUNCED])
def test_a_registered_node_is_known(superlink, parsed, registered, path):
    assert is_read(superlink, parsed, path, signed_by(*registered))


@pytest.mark.parametrize("path", [OBJECT, ANNOUNCED])
@pytest.mark.parametrize("kind", ["nobody", "stranger", "late", "forged", "no base64", "no key", "in pieces"])
def test_another_one_is_not(superlink, parsed, registered, path, kind):
    stranger = generate_key_pairs()
    headers, body = signed_by(*registered), LONG
    if kind == "nobody":
        headers = WIRE
    elif kind == "stranger":
        headers = signed_by(*stranger)
    elif kind == "late":
        headers = signed_by(*registered, late=3600)
    elif kind == "forged":
        headers = signed_by(*stranger) | {FLEET_HTTP_PUBLIC_KEY_HEADER: headers[FLEET_HTTP_PUBLIC_KEY_HEADER]}
    elif kind == "no base64":
        headers = headers | {FLEET_HTTP_PUBLIC_KEY_HEADER: "?"}
    elif kind == "no key":
        headers = headers | {FLEET_HTTP_PUBLIC_KEY_HEADER: "AAAA"}
    else:
        headers, body = WIRE, iter([LONG[:MAX_UNAUTHENTICATED], LONG[MAX_UNAUTHENTICATED:]])
    assert not is_read(superlink, parsed, path, headers, body)


def test_a_short_request_is_read_from_anybody(superlink, parsed):
    assert superlink.post(OBJECT, content=LONG[1:], headers=WIRE).status_code == 400 and parsed == [MAX_UNAUTHENTICATED]


def test_an_app_is_known_by_the_token_of_its_task(app, superlink, parsed):
    state = app.app.app.state.linkstate_factory.state()
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    (found,) = state.get_run_info(run_ids=[run])
    token = state.claim_task(found.primary_task_id)
    assert state.activate_task(found.primary_task_id)
    assert not is_read(superlink, parsed, APPS, WIRE)
    assert not is_read(superlink, parsed, APPS, WIRE | {TASK_TOKEN_HEADER: "another"})
    assert is_read(superlink, parsed, APPS, WIRE | {TASK_TOKEN_HEADER: token})


def test_an_operator_is_known_by_a_token(superlink, parsed):
    assert not is_read(superlink, parsed, OPERATORS, WIRE)
    assert not is_read(superlink, parsed, OPERATORS, WIRE | {"authorization": "Bearer another"})
    assert is_read(superlink, parsed, OPERATORS, WIRE | {"authorization": "Bearer token"})
