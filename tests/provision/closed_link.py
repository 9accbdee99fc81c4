"""A SuperLink's configuration, and what a node shows when it asks one."""

from base64 import b64encode
from datetime import UTC, datetime, timedelta

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.config_loader import SuperLinkLifespanConfig


def configuration(path):
    return SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host="127.0.0.1",
        port=8000,
        insecure=True,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=False,
        fleet_api_type="",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=str(path),
        isolation="process",
        runtime_dependency_install=False,
    )


WIRE = {"content-type": "application/protobuf"}


def signed_by(private, public, late=0):
    """The headers by which a node is known, as it made them so many seconds ago."""
    now = (datetime.now(UTC) - timedelta(seconds=late)).isoformat()
    return WIRE | {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(public)).decode(),
        TIMESTAMP_HEADER: now,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, now.encode())).decode(),
    }
