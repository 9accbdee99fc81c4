"""A signature holds for one reply of one node to one message, and for nothing else that the key signs."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import dsa, ec
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from support import failures

from cloister.utils import keys
from cloister.utils.keys import HALF, MAX_PUBLIC_KEY, SIGNATURE, Answered

ANSWERED = Answered(7, 2**63 + 1, "a" * 64)
KEY = ec.generate_private_key(ec.SECP384R1())
PUBLIC = public_key_to_bytes(KEY.public_key())
VALUE = b"salt and header and parts"


def raw(encoded):
    """A signature in DER as a reply carries it."""
    return b"".join(number.to_bytes(HALF, "big") for number in keys.decode_dss_signature(encoded))


def test_the_reply_of_the_node_is_signed():
    def check(curve):
        key = ec.generate_private_key(curve)
        signature = ANSWERED.signer(key)(VALUE)
        public = public_key_to_bytes(key.public_key())
        assert len(signature) == SIGNATURE and len(public) <= MAX_PUBLIC_KEY
        assert ANSWERED.is_signed(VALUE, signature, public)

    assert failures([ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], check) == []


def test_a_signature_of_another_reply_is_refused():
    def check(other):
        signature = replace(ANSWERED, **other).signer(KEY)(VALUE)
        assert not ANSWERED.is_signed(VALUE, signature, PUBLIC)

    assert failures([{"run": 8}, {"node": 2}, {"message": "b" * 64}], check) == []


def test_changed_content_is_refused():
    assert not ANSWERED.is_signed(VALUE + b"!", ANSWERED.signer(KEY)(VALUE), PUBLIC)


def test_the_key_of_another_node_is_refused():
    other = ec.generate_private_key(ec.SECP384R1())
    assert not ANSWERED.is_signed(VALUE, ANSWERED.signer(other)(VALUE), PUBLIC)


@pytest.mark.parametrize("domain", [b"", b"cloister: another use\n"])
def test_a_signature_of_another_domain_is_refused(domain):
    fields = ANSWERED._with(VALUE).removeprefix(keys.DOMAIN)
    assert not ANSWERED.is_signed(VALUE, raw(sign_message(KEY, domain + fields)), PUBLIC)
    assert ANSWERED.is_signed(VALUE, raw(sign_message(KEY, keys.DOMAIN + fields)), PUBLIC)


def test_what_flower_signs_with_the_key_begins_with_no_letter_of_the_domain():
    """A signature in a header of a request is one of a time, and no reply has the bytes of a time."""
    assert now().isoformat()[0].isdigit() and keys.DOMAIN[:1].isalpha()


def test_what_is_no_signature_is_refused():
    def check(signature):
        assert not ANSWERED.is_signed(VALUE, signature, PUBLIC)

    assert failures([b"", bytes(SIGNATURE), b"\xff" * SIGNATURE, bytes(SIGNATURE + 1)], check) == []


LONG = public_key_to_bytes(dsa.generate_private_key(1024).public_key())


def test_a_listed_key_that_is_none_refuses_its_node():
    def check(public_key):
        assert not ANSWERED.is_signed(VALUE, ANSWERED.signer(KEY)(VALUE), public_key)

    assert failures([b"", b"\x00" * 33, LONG], check) == []


def test_a_long_key_is_not_read(monkeypatch):
    """A node chooses the key that is listed; to read one of another kind can take minutes."""
    monkeypatch.setattr(keys, "load_pem_public_key", pytest.fail)
    assert len(LONG) > MAX_PUBLIC_KEY and not ANSWERED.is_signed(VALUE, bytes(SIGNATURE), LONG)
