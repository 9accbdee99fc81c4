"""The parts of the protocol: masks, shares, graphs, messages, steps, and what is left in memory."""

import gc
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_rounds import Round, names_of, next_round, roster_of, signing_key, terms_for, vectors
from secure_twins import Held, both
from support import every, failures

from cloister.secure_aggregation import member as member_module
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import (
    Advertisement,
    Cohort,
    Delivery,
    MaskedInput,
    SealedShares,
    Signatures,
    Survivors,
    SurvivorSignature,
    Unmasking,
)
from cloister.secure_aggregation.primitives import BLOCK, add_masks, combine, into_ring, out_of_ring, split
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.serialization import read, text
from cloister.secure_aggregation.session import Complete, Steps
from cloister.utils.errors import ConfigError, ProtocolError, RoundAbandoned

# Masks.


@pytest.mark.parametrize("bits,length", [(32, 1), (32, BLOCK // 4 + 3), (64, 7), (64, BLOCK // 4 + 1)])
def test_a_mask_is_the_keystream_of_its_key(bits, length):
    keys = [bytes([number] * 16) for number in range(3)]
    values = into_ring(np.arange(length), bits)
    expected = values.copy()
    for key, sign in zip(keys, (1, 1, -1)):
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(values.nbytes))
        expected += np.frombuffer(stream, values.dtype) * values.dtype.type(sign % 2**bits)
    add_masks(values, keys[:2], keys[2:])
    assert np.array_equal(values, expected)
    add_masks(values, keys[2:], keys[:2])
    assert np.array_equal(out_of_ring(values), np.arange(length))


def test_a_ring_has_32_or_64_bits():
    with pytest.raises(ConfigError, match="bits must be one of 32, 64"):
        terms_for(3, bits=16)


# Shares.


def test_as_many_shares_as_needed_give_the_secret_back_whoever_holds_them():
    secret, holders = bytes(range(16)), names_of(6)
    shares = split(secret, holders, 4)
    for chosen in (holders[:4], holders[2:], holders):
        assert combine({name: shares[name] for name in chosen}, holders, 4) == secret
    assert combine({name: shares[name] for name in holders[:3]}, holders, 3) != secret


# The graph.


def test_a_threshold_permits_one_list_of_survivors():
    assert Complete(67, 10).honest == 57
    for members in (67, 123):
        Complete(67, 10).require(members)
    for members in (66, 124):
        with pytest.raises(ProtocolError, match=f"must have 67 to 123 members, .* found {members}"):
            Complete(67, 10).require(members)


# What is written down.

NAME = st.text(min_size=1, max_size=20)
NAMES = st.lists(NAME, max_size=5, unique=True).map(lambda names: tuple(sorted(names)))


def by_name(size):
    return st.dictionaries(NAME, st.binary(min_size=size, max_size=size), max_size=4)


KEY = st.binary(min_size=32, max_size=32)
SIGNATURE = st.binary(min_size=64, max_size=64)
ADVERTISEMENT = st.builds(Advertisement, NAME, KEY, KEY, SIGNATURE)
MESSAGES = st.one_of(
    ADVERTISEMENT,
    st.lists(ADVERTISEMENT, max_size=3, unique_by=lambda one: one.name).map(
        lambda ones: Cohort(tuple(sorted(ones, key=lambda one: one.name)))
    ),
    st.builds(SealedShares, NAME, by_name(60)),
    st.builds(Delivery, NAMES, by_name(60)),
    st.builds(MaskedInput, NAME, st.binary(max_size=40)),
    st.builds(Survivors, NAMES),
    st.builds(SurvivorSignature, NAME, SIGNATURE),
    st.builds(Signatures, by_name(64)),
    st.builds(Unmasking, NAME, by_name(16), KEY | st.just(b"")),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(MESSAGES, st.data())
def test_a_message_has_one_encoding_and_everything_else_is_refused(message, data):
    written = message.encode()
    assert type(message).decode(written) == message
    place = data.draw(st.integers(0, len(written) - 1))
    for other in (
        written[:place],
        written + b"b",
        written[:place] + bytes([written[place] ^ data.draw(st.integers(1, 255))]) + written[place + 1 :],
    ):
        try:
            found = type(message).decode(other)
        except ProtocolError:
            continue
        assert found.encode() == other and found != message


WRONG = {
    "a name twice": (lambda: Survivors(("a", "a")), "each must be there once"),
    "names out of order": (lambda: Survivors(("b", "a")), "names must be in order"),
    "an empty name": (lambda: Survivors(("",)), "1 to 200 characters"),
    "a long name": (lambda: Survivors(("a" * 201,)), "1 to 200 characters"),
    "too many names": (lambda: Survivors(tuple(f"{number:05}" for number in range(10_001))), "at most 10000"),
    "a list": (lambda: Survivors(["a"]), "must be in a tuple"),
    "a short key": (
        lambda: Advertisement("a", bytes(31), bytes(32), bytes(64)),
        "mask_key must have 32 bytes, found 31",
    ),
    "a long share": (lambda: Unmasking("a", {"b": bytes(17)}), "shares must have 16 bytes, found 17"),
    "text for bytes": (lambda: MaskedInput("a", "text"), "must be bytes, found str"),
    "half a link": (lambda: Unmasking("a", {}, bytes(16)), "revealed must have 32 bytes, found 16"),
    "no mapping": (lambda: Signatures(("a", bytes(64))), "signatures must be a mapping by name, found tuple"),
    "another message": (lambda: Survivors.decode(Signatures({}).encode()), "the bytes are no Survivors"),
    "no advertisement": (lambda: Cohort((b"nothing",)), "the bytes are no Advertisement"),
    "a key of another size on a roster": (lambda: Roster({"a": bytes(31)}), "must have 32 bytes; not so: a"),
}


def test_a_message_is_refused_with():
    def check(case):
        make, reason = WRONG[case]
        with pytest.raises(ProtocolError, match=reason):
            make()

    assert failures(WRONG, check) == []


@pytest.mark.parametrize("names", ["ba", "aa"])
def test_a_mapping_is_written_in_order_and_without_repetition(names):
    pairs = [(name, bytes(64)) for name in names]
    assert Signatures.decode(text("Signatures", ("", *sorted(set(pairs))))) == Signatures(dict(pairs))
    with pytest.raises(ProtocolError, match="not the one way to write"):
        Signatures.decode(text("Signatures", ("", *pairs)))


def test_different_items_never_have_the_same_text():
    several = [
        (b"ab", b"c"),
        (b"a", b"bc"),
        (b"abc",),
        ("ab", "c"),
        (b"ab", "c"),
        ((b"ab",), b"c"),
        ((b"ab", b"c"),),
        (1, 2),
        (12,),
    ]
    assert len({text("label", *items) for items in several}) == len(several)
    assert text("one", 1) != text("other", 1)
    assert [read("label", text("label", *items)) for items in several] == several
    with pytest.raises(ValueError, match="no other"):
        read("other", text("label", 1))


# Steps, and what is left.


def test_a_coordinator_takes_no_masked_input_that_it_does_not_expect():
    names = names_of(3)
    terms = terms_for(3)
    round_ = Round(names, terms)
    cohort = round_.coordinator.cohort([round_.members[name].advertise() for name in names])
    round_.coordinator.deliveries([round_.members[name].share(cohort) for name in names])
    told = terms.sharers(terms.binding(cohort), b"", names)
    signatures = {name: signing_key(name).sign(told) for name in names}
    round_.coordinator.add(MaskedInput(names[0], bytes(20), signatures[names[0]]))
    for wrong, reason in (
        (MaskedInput(names[0], bytes(20), signatures[names[0]]), "not expected, or not any more"),
        (MaskedInput("stranger", bytes(20)), "not expected"),
        (MaskedInput(names[1], bytes(19)), "must have 20 bytes, found 19"),
        (MaskedInput(names[1], bytes(20)), "has not signed the noise and the sharers"),
        (MaskedInput(names[1], bytes(20), signatures[names[0]]), "has not signed the noise and the sharers"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            round_.coordinator.add(wrong)
    round_.coordinator.add(MaskedInput(names[1], bytes(20), signatures[names[1]]))
    expected = Survivors(tuple(names[:2]), {name: signatures[name] for name in names[:2]})
    assert round_.coordinator.survivors() == expected


def test_a_coordinator_leaves_out_who_is_not_genuine():
    names = names_of(4)
    terms = terms_for(4, 3)
    round_ = Round(names, terms)
    advertised = [round_.members[name].advertise() for name in names[:3]]
    replayed = Member(names[3], signing_key(names[3]), roster_of(names), next_round(terms)).advertise()
    assert round_.coordinator.cohort([*advertised, replayed]).names == tuple(names[:3])
    shares = [round_.members[name].share(Cohort(tuple(advertised))) for name in names[:3]]
    few = SealedShares(names[0], dict(list(shares[0].sealed.items())[:1]))
    with pytest.raises(RoundAbandoned, match="2 members have sent shares"):
        round_.coordinator.deliveries([few, *shares[1:]])


def test_a_wrong_share_of_a_key_does_not_pass_for_the_sum():
    names = names_of(4)
    terms = terms_for(4, 3)
    round_ = Round(names, terms)

    class Lying(Member):
        def unmask(self, signatures):
            shown = super().unmask(signatures)
            return Unmasking(self.name, {**shown.shares, names[3]: bytes(16)})

    round_.members[names[0]] = Lying(names[0], signing_key(names[0]), round_.roster, terms)
    with pytest.raises(RoundAbandoned, match="do not give the key"):
        round_.run(vectors(names, terms), {names[3]: "mask"})


def reachable(thing):
    """All bytes and secret keys that an object holds on to, by whatever way; of keys, their kind."""
    seen, waiting, found = set(), [thing], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type) or callable(one) or type(one).__name__ == "module":
            continue
        seen.add(id(one))
        if isinstance(one, bytes | X25519PrivateKey):
            found.add(one if isinstance(one, bytes) else X25519PrivateKey)
        waiting += gc.get_referents(one)
    return found


@pytest.fixture
def secrets(monkeypatch):
    """Collect all that members draw from the operating system."""
    drawn, real = [], member_module.urandom
    monkeypatch.setattr(member_module, "urandom", lambda size: drawn.append(real(size)) or drawn[-1])
    return drawn


@pytest.mark.parametrize("ending", ["unmasked", "refused"])
def test_nothing_of_an_attempt_is_left_in_a_member(secrets, ending):
    names = names_of(3)
    terms = terms_for(3)
    round_ = Round(names, terms)
    one = round_.members[names[0]]
    cohort = round_.coordinator.cohort([round_.members[name].advertise() for name in names])
    assert {secrets[0], secrets[1]} <= reachable(vars(one))
    if ending == "refused":
        with pytest.raises(ProtocolError):
            one.share(Cohort(cohort.advertisements[:1]))
    else:
        shares = {name: round_.members[name].share(cohort) for name in names}
        deliveries = round_.coordinator.deliveries(shares.values())
        for name in names:
            round_.coordinator.add(round_.masked(name, deliveries[name], np.zeros(5, np.int64)))
        # Once the vector is masked, no key is needed any more.
        assert not {*secrets, X25519PrivateKey} & reachable(vars(one))
        survivors = round_.coordinator.survivors()
        signatures = round_.coordinator.signatures([round_.members[name].sign(survivors) for name in names])
        one.unmask(signatures)
    assert one._steps._state is None
    assert not {*secrets, X25519PrivateKey} & reachable(vars(one))


def test_of_two_threads_that_make_a_step_one_gets_the_state():
    class Slow(Steps):
        _state = Held(None)

    steps = Slow("state")
    assert both(lambda: steps.take(str)) == 1


def test_a_member_can_be_neither_copied_nor_saved():
    one = Member("a", signing_key("a"), roster_of(["a"]), terms_for(3))
    with pytest.raises(ProtocolError, match="could be used twice"):
        pickle.dumps(one._steps)
    with pytest.raises((ProtocolError, TypeError)):
        pickle.dumps(one)


STEPS = {
    "advertise": lambda one: one.advertise(),
    "share": lambda one: one.share(Cohort(())),
    "open": lambda one: one.open(Delivery((), {})),
    "mask": lambda one: one.mask(np.zeros(5, "<u4")),
    "sign": lambda one: one.sign(Survivors(())),
    "unmask": lambda one: one.unmask(Signatures({})),
}


@every(STEPS)
def test_a_step_out_of_turn_is_refused(step):
    one = Member("a", signing_key("a"), roster_of(["a"]), terms_for(3))
    if step == "advertise":
        one.advertise()
    with pytest.raises(ProtocolError, match="out of turn"):
        STEPS[step](one)
