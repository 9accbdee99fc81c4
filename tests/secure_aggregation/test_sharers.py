"""A server that tells one member of other noise, or of others who have sent shares, than it tells everybody else."""

import numpy as np
import pytest
from secure_rounds import Round, names_of, sent, signing_key, sum_of, terms_for, vectors

from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import Cohort, Delivery, Signatures, Survivors
from cloister.secure_aggregation.primitives import into_ring
from cloister.utils.errors import ProtocolError

NAMES = names_of(6)
VICTIM, *OTHERS = NAMES


class Unsigned(Member):
    """A twin that does not look at what the others were told."""

    def _require_told_the_same(self, survivors, told):
        pass


@pytest.mark.parametrize("replayed", [False, True])
def test_members_refuse_a_survivor_who_was_told_of_others(replayed):
    """A signature of another round does not help: it is of other terms."""
    terms = terms_for(6)
    inputs, members = vectors(NAMES, terms), Round(NAMES, terms).members
    cohort = Cohort(tuple(members[name].advertise() for name in NAMES))
    shares = {name: members[name].share(cohort).sealed for name in NAMES}
    told = dict.fromkeys(OTHERS, NAMES) | {VICTIM: NAMES[:4]}
    signed = {}
    for name in NAMES:
        sealed = {one: shares[one][name] for one in told[name] if name != one}
        members[name].open(Delivery(tuple(told[name]), sealed))
        signed[name] = members[name].mask(into_ring(inputs[name], 32)).signature
    if replayed:
        other = terms_for(6, round=2)
        signed[VICTIM] = signing_key(VICTIM).sign(other.sharers(other.binding(cohort), b"", NAMES))
    for name in OTHERS:
        with pytest.raises(ProtocolError, match="'site-000' has not signed the noise and the sharers"):
            members[name].sign(sent(Survivors(tuple(NAMES), signed)))


def test_a_survivor_without_a_signature_is_refused():
    terms = terms_for(6)
    run = Round(NAMES, terms)
    run.send = lambda message: Survivors(message.names) if isinstance(message, Survivors) else sent(message)
    with pytest.raises(ProtocolError, match="has not signed the noise and the sharers"):
        run.run(vectors(NAMES, terms))


def test_the_coordinator_goes_on_without_who_was_told_of_others():
    *others, last = NAMES

    class Confused(Round):
        def masked(self, name, delivery, numbers):
            told = Delivery(delivery.sharers[1:], {}) if name == last else delivery
            return super().masked(name, told, numbers)

    terms = terms_for(6)
    run = Confused(NAMES, terms)
    with pytest.raises(ProtocolError, match="'site-005' has not signed the noise and the sharers"):
        run.run(vectors(NAMES, terms))
    assert run.coordinator.survivors().names == tuple(others)


def test_an_honest_round_takes_a_member_that_has_sent_no_shares():
    terms = terms_for(6)
    inputs = vectors(NAMES, terms)
    transcript = Round(NAMES, terms).run(inputs, {NAMES[3]: "share"})
    assert np.array_equal(sum_of(transcript), sum(inputs[name] for name in NAMES if name != NAMES[3]))


def unmasked_with_other_noise(kind):
    """One of four survivors is told other terms of the noise, and asked for no signature; three are enough."""
    names = names_of(4)
    terms = terms_for(4, threshold=3, colluding=1)
    round_, inputs = Round(names, terms, kind), vectors(names, terms)
    cohort = round_.coordinator.cohort([round_.members[name].advertise() for name in names])
    deliveries = round_.coordinator.deliveries([round_.members[name].share(cohort) for name in names])
    noise = dict.fromkeys(names, b"deviation 8") | {names[0]: b"deviation 1"}
    for name in names:
        round_.members[name].open(deliveries[name])
    known = {name: round_.members[name].mask(into_ring(inputs[name], 32), noise[name]).signature for name in names}
    survivors = Survivors(tuple(names), known)
    signed = Signatures({name: round_.members[name].sign(survivors).signature for name in names[1:]})
    return [round_.members[name].unmask(signed) for name in names[1:]]


def test_survivors_with_other_noise_are_refused_though_nobody_needs_their_signature():
    with pytest.raises(ProtocolError, match="'site-000' has not signed the noise and the sharers"):
        unmasked_with_other_noise(Member)
    assert len(unmasked_with_other_noise(Unsigned)) == 3
