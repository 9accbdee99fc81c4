"""Keys that strangers show are read if a node can have such a key."""

import pytest
from cryptography.hazmat.primitives.asymmetric import dh, ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.routers.fleet import node_auth
from support import failures

from cloister.deploy.superlink.gate import NodeKeys


def pem(key):
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def read(monkeypatch):
    """Return the parts that are read of accepted keys."""
    found = []
    plain = node_auth.bytes_to_public_key
    monkeypatch.setattr(node_auth, "bytes_to_public_key", lambda key: found.append(key) or plain(key))
    NodeKeys().install()
    return found


def test_those_that_a_node_can_have(read):
    for number, curve in enumerate((ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()), start=1):
        key = ec.generate_private_key(curve).public_key()
        assert node_auth.bytes_to_public_key(public_key_to_bytes(key)) == key and len(read) == number


OTHERS = {
    "Diffie-Hellman": lambda: pem(dh.generate_parameters(2, 512).generate_private_key().public_key()),
    "RSA": lambda: pem(rsa.generate_private_key(65537, 1024).public_key()),
    "Ed25519": lambda: pem(ed25519.Ed25519PrivateKey.generate().public_key()),
    "another curve": lambda: pem(ec.generate_private_key(ec.BrainpoolP384R1()).public_key()),
    "no key": lambda: b"key",
    "several": lambda: 2 * pem(ec.generate_private_key(ec.SECP384R1()).public_key()),
    "a long one": lambda: b"-----BEGIN PUBLIC KEY-----\n" + b"A" * 2**16 + b"\n-----END PUBLIC KEY-----\n",
}


def test_others_are_refused_unread(read):
    def check(kind):
        with pytest.raises(ValueError, match="no key of a node"):
            node_auth.bytes_to_public_key(OTHERS[kind]())
        assert not read

    assert failures(OTHERS, check) == []
