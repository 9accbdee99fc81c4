"""Makers of members' signing keys can play these members: the roster states them, and claims count them."""

import os
from itertools import combinations

import numpy as np
import pytest
from secure_rounds import names_of, next_round, roster_of, signing_key

from cloister.privacy.mechanisms.clipping import FixedClip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import add_noise, encode_client_input, without_surplus
from cloister.privacy.mechanisms.distributed.shares import Parties
from cloister.secure_aggregation.coordinator import Coordinator
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.primitives import LINK, SeedChain, into_ring, out_of_ring, seeds
from cloister.secure_aggregation.roster import Roster, decode_roster, encode_roster, opened, sign_roster
from cloister.secure_aggregation.serialization import text
from cloister.secure_aggregation.session import Complete, Terms
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ProtocolError

NAMES = names_of(4)
VICTIM, *OTHERS = names_of(8)
PARTIES = Parties(8, 5, 1)
LAYOUT = Layout.of({"w": np.zeros(16, np.float32)})
MECHANISM = DistributedMean(noise_multiplier=4.0, clip=FixedClip(1.0), parties=PARTIES)


def stated(at_site, names=NAMES):
    return Roster(roster_of(names).keys, frozenset(at_site))


def vector_of(plan, chain):
    """The victim's numbers with its share of the noise."""
    sent, update = np.zeros(16, np.float32), np.zeros(16, np.float32)
    update[0] = 1.0
    numbers = encode_client_input(Cohort.of(LAYOUT, LAYOUT.rows({"w": sent}), (LAYOUT.rows({"w": update}),)), plan)
    add_noise(numbers, plan, os.urandom, chain.seeds())
    return numbers


def test_who_has_the_other_members_keys_learns_one_vector_with_one_share_of_noise_and_that_is_what_is_counted():
    """The server plays all other members with the keys that the provisioner put into their kits."""
    roster, plan = roster_of([VICTIM, *OTHERS]), MECHANISM.plan(LAYOUT.size)
    terms = Terms("1", 1, Complete(PARTIES.threshold, PARTIES.colluding), plan.length, plan.bits)
    members = {name: Member(name, signing_key(name), roster, terms) for name in roster.keys}
    server, chain = Coordinator(roster, terms, plan.terms()), SeedChain(os.urandom(LINK), 6, 8)
    cohort = server.cohort([member.advertise() for member in members.values()])
    shares = server.deliveries([member.share(cohort) for member in members.values()])
    for name, member in members.items():
        member.open(shares[name])
    secret, nothing = vector_of(plan, chain), np.zeros(plan.length, np.int64)
    server.add(members[VICTIM].mask(into_ring(secret, plan.bits), plan.terms(), chain))
    for name in OTHERS:
        server.add(members[name].mask(into_ring(nothing, plan.bits), plan.terms()))
    survivors = server.survivors()
    signatures = server.signatures([member.sign(survivors) for member in members.values()])
    total = server.total([member.unmask(signatures) for member in members.values()])

    shown = [seeds(link, 6, 8) for link in total.revealed.values()]
    learnt = without_surplus(out_of_ring(total.values), plan.shares, 8, shown)
    assert np.array_equal(learnt, without_surplus(secret, plan.shares, 8, [chain.seeds()]))
    there = plan.shares.left(8) ** 0.5 / plan.steps
    (counted,) = MECHANISM.events(LAYOUT, by_provisioner=len(roster.by_provisioner))
    assert counted.multiplier("add-or-remove", True) <= there < MECHANISM.multiplier / 2


@pytest.mark.parametrize("number", [0, 1])
def test_as_many_as_may_collude_cost_nothing_more(number):
    assert MECHANISM.events(LAYOUT, by_provisioner=number) == MECHANISM.events(LAYOUT)


def test_a_roster_is_read_again_with_whoever_made_the_keys():
    for number in range(len(NAMES) + 1):
        for at_site in combinations(NAMES, number):
            roster = stated(at_site)
            assert (
                opened(sign_roster(roster, 3, signing_key("authority"))).roster
                == roster
                == decode_roster(encode_roster(roster))
            )
            assert set(roster.by_provisioner) == set(NAMES) - set(at_site)


def test_members_sign_who_made_the_keys():
    digests = {stated(at_site).digest for number in range(5) for at_site in combinations(NAMES, number)}
    assert len(digests) == 2 ** len(NAMES)


def test_members_whose_rosters_differ_in_that_alone_are_in_no_cohort_together():
    terms = Terms("1", 1, Complete(3, 0), 5)
    rosters = [stated(NAMES), *[stated(NAMES[:3])] * 3]
    members = [Member(name, signing_key(name), roster, terms) for name, roster in zip(NAMES, rosters, strict=True)]
    one, other = (Coordinator(roster, terms) for roster in (rosters[0], rosters[1]))
    said = [member.advertise() for member in members]
    assert [one.is_genuine(item) for item in said] == [True, False, False, False]
    assert other.cohort(said).names == tuple(NAMES[1:])


def test_an_older_roster_is_read_as_it_was_signed_and_the_provisioner_made_its_keys():
    """Also by members of an older version: they sign the same hash."""
    keys, authority = roster_of(NAMES).keys, signing_key("authority")
    content = text("roster", 7, tuple(sorted(keys.items())))
    older = text("signed roster", content, authority.sign(content))
    found = opened(older).require(authority.public_key())
    assert found.by_provisioner == tuple(NAMES) and sign_roster(found, 7, authority) == older
    terms = Terms("1", 1, Complete(3, 0), 5)
    assert next_round(terms).under(found).roster == found.digest
    assert decode_roster(text("roster told", tuple(sorted(keys.items())))) == found


@pytest.mark.parametrize(
    "entry",
    [("site-000", b"k" * 32, "provisioner"), ("site-000", b"k" * 32, ""), ("site-000", b"k" * 32, "site", "site")],
    ids=["another word", "no word", "twice"],
)
def test_another_statement_is_none(entry):
    content = text("roster", 7, (entry,))
    with pytest.raises(ProtocolError, match="no signed roster"):
        opened(text("signed roster", content, signing_key("authority").sign(content)))


def test_a_statement_about_nobody_is_refused():
    with pytest.raises(ProtocolError, match="states who made the keys of stranger, and has none"):
        stated(["stranger"])
