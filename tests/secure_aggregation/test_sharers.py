"""A server that tells one member of other noise, or of others who have sent shares, than it tells everybody else.

On a sparse graph the victim is told that none of its peers has sent any. So it has no mask in common with anybody.
All others unmask it as a survivor: its peers hold the shares of its own mask.
"""

import numpy as np
import pytest
from secure_rounds import Round, names_of, sent, signing_key, sum_of, terms_for, vectors

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.graph import Sparse
from cloister.secure_aggregation.masks import add_masks
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import Cohort, Delivery, Signatures, Survivors
from cloister.secure_aggregation.ring import into_ring, out_of_ring
from cloister.secure_aggregation.sharing import combine

NAMES = names_of(30)
VICTIM, *OTHERS = NAMES
NUMBERS = (16, 1, 12, 10)
"""t, c, k, and the number of shares."""


class Unsigned(Member):
    """A twin that does not look at what the others were told."""

    def _require_told_the_same(self, survivors, told):
        pass


def attack(graph, kind=Member, replayed=False):
    """The victim's vector as the server finds it, and as it was."""
    terms = terms_for(30, graph=graph)
    inputs, members = vectors(NAMES, terms), Round(NAMES, terms, kind).members
    cohort = Cohort(tuple(members[name].advertise() for name in NAMES))
    shares = {name: members[name].share(cohort).sealed for name in NAMES}
    told = dict.fromkeys(OTHERS, NAMES) | {VICTIM: [name for name in NAMES if name not in shares[VICTIM]]}
    masked = {}
    for name in NAMES:
        sealed = {one: shares[one][name] for one in NAMES if name in shares[one] and name != VICTIM}
        members[name].open(Delivery(tuple(told[name]), sealed))
        masked[name] = members[name].mask(into_ring(inputs[name], 32))
    signed = {name: one.signature for name, one in masked.items() if one.signature}
    if replayed:
        other = terms_for(30, graph=graph, attempt=2)
        signed[VICTIM] = signing_key(VICTIM).sign(other.sharers(other.binding(cohort), b"", NAMES))
    survivors = sent(Survivors(tuple(NAMES), signed))
    signatures = Signatures({name: members[name].sign(survivors).signature for name in OTHERS})
    shown = {name: members[name].unmask(signatures).shares for name in shares[VICTIM]}
    own_mask = combine({name: one[VICTIM] for name, one in shown.items()}, {VICTIM, *shares[VICTIM]}, graph.needed)
    values = np.frombuffer(masked[VICTIM].payload, terms.dtype).copy()
    add_masks(values, [], [own_mask])
    return out_of_ring(values), inputs[VICTIM]


def test_a_twin_leaks_the_vector_of_whoever_was_told_of_others():
    found, was = attack(Sparse(*NUMBERS), Unsigned)
    assert np.array_equal(found, was)


@pytest.mark.parametrize("replayed", [False, True])
def test_members_refuse_a_survivor_who_was_told_of_others(replayed):
    with pytest.raises(ProtocolError, match="'site-000' has not signed the noise and the sharers"):
        attack(Sparse(*NUMBERS), replayed=replayed)


def test_a_survivor_without_a_signature_is_refused():
    terms = terms_for(30, graph=Sparse(*NUMBERS))
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

    terms = terms_for(30, graph=Sparse(*NUMBERS))
    run = Confused(NAMES, terms)
    with pytest.raises(ProtocolError, match="'site-029' has not signed the noise and the sharers"):
        run.run(vectors(NAMES, terms))
    assert run.coordinator.survivors().names == tuple(others)


def test_an_honest_round_takes_a_member_that_has_sent_no_shares():
    terms = terms_for(30, graph=Sparse(*NUMBERS))
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
