"""A server that does not keep to the protocol: what it gets from a member, and from a twin that lacks one check.

The victim is `site-000`. The server has the last site on its side, and always wants the victim's vector. Each attack is
a function that gives the vector back that the server has found, and is run against members and against broken twins.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from secure_rounds import (
    Round,
    names_of,
    next_round,
    roster_of,
    sent,
    signing_key,
    sum_of,
    terms_for,
    vectors,
)
from secure_twins import Repeating, Unpaired, key_of, stripped
from support import every, failures

from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import Cohort, Delivery, Signatures, Survivors
from cloister.secure_aggregation.primitives import combine, into_ring, private_key
from cloister.secure_aggregation.roster import Roster, opened, public_bytes, sign_roster
from cloister.secure_aggregation.serialization import text
from cloister.secure_aggregation.session import Complete, Terms
from cloister.utils.errors import ProtocolError, RoundAbandoned
from cloister.utils.keys import fingerprint

NAMES = names_of(4)
VICTIM, *OTHERS = NAMES
COLLUDER = NAMES[-1]
TERMS = terms_for(4, threshold=3, colluding=1)
INPUTS = vectors(NAMES, TERMS)
SECRET = INPUTS[VICTIM]


# Keys that are not their owners'.


class Believer(Roster):
    """A roster that takes every signature of anybody for genuine."""

    def has_signed(self, name, signature, signed):
        return True


class Open(Roster):
    """A roster that lets strangers in."""

    def has_signed(self, name, signature, signed):
        return name not in self.keys or super().has_signed(name, signature, signed)


class Roundless(Terms):
    """Terms whose signed keys are good for every round."""

    def advertisement(self, name, mask_key, seal_key):
        return Terms.advertisement(terms_for(4, 3, 1), name, mask_key, seal_key)


def attack_by_keys(victim, spies, terms):
    """Tell the victim keys whose secrets the server knows; open the shares that the victim sends to their owners."""
    told = sorted([victim.advertise(), *(advertisement for _, advertisement in spies)], key=lambda one: one.name)
    cohort = Cohort(tuple(told))
    sealed = sent(victim.share(sent(cohort))).sealed
    shares, keys = {}, {}
    for spy, _ in spies:
        spy._terms, spy._roster = terms, Believer({})
        spy.share(cohort)
        state = spy._steps.take(object)
        shares[spy.name] = dict(spy._opened(state, Delivery((), {VICTIM: sealed[spy.name]})))[VICTIM].of_mask
        keys[spy.name] = state.keys.mask_seed
    victim.open(Delivery(cohort.names, {}))
    masked = sent(victim.mask(into_ring(SECRET, 32)))
    own_mask = combine(shares, cohort.names, terms.graph.threshold)
    return stripped(masked, terms, cohort, VICTIM, own_mask, keys)


def spies_named(names, key_of, terms=TERMS):
    """Parties whose state the server knows, and their keys."""
    spies = [Member(name, key_of(name), roster_of(NAMES), terms) for name in names]
    return [(spy, spy.advertise()) for spy in spies]


def of_the_server(name):
    return signing_key("server")


KEYS = {
    "swapped": (OTHERS, of_the_server, TERMS, Believer, Terms),
    # Genuine keys of an earlier round, whose secrets have leaked since.
    "replayed": (OTHERS, signing_key, TERMS, Roster, Roundless),
    "of strangers": (["x-1", "x-2", "x-3"], of_the_server, next_round(TERMS), Open, Terms),
}


@pytest.mark.parametrize("attack", KEYS)
def test_keys_are_refused_that_are(attack):
    names, key_of, made_for, _, _ = KEYS[attack]
    terms = next_round(TERMS)
    victim = Member(VICTIM, signing_key(VICTIM), roster_of(NAMES), terms)
    with pytest.raises(ProtocolError, match="not on the roster, or has not signed its keys for this attempt"):
        attack_by_keys(victim, spies_named(names, key_of, made_for), terms)
    assert_nothing_is_left(victim)


@pytest.mark.parametrize("attack", KEYS)
def test_a_twin_leaks_to_keys_that_are(attack):
    names, key_of, made_for, roster, kind = KEYS[attack]
    terms = kind("run-1", 2, TERMS.graph, TERMS.length, roster=TERMS.roster)
    twin = Member(VICTIM, signing_key(VICTIM), roster(roster_of(NAMES).keys), terms)
    assert np.array_equal(attack_by_keys(twin, spies_named(names, key_of, made_for), terms), SECRET)


def assert_nothing_is_left(member):
    assert member._steps._state is None


OTHER = [{"run": "run-2"}, {"round": 3}, {"length": 6}, {"bits": 64}]
OTHER += [{"graph": Complete(4, 1)}, {"graph": Complete(3, 0)}]


@every(OTHER)
def test_keys_for_other_terms_are_refused(change):
    victim = Member(VICTIM, signing_key(VICTIM), roster_of(NAMES), TERMS)
    others = spies_named(OTHERS, signing_key, replace(TERMS, **change))
    with pytest.raises(ProtocolError, match="has not signed its keys for this attempt"):
        attack_by_keys(victim, others, TERMS)


# Survivors.


class OtherKind(Repeating):
    """A twin that shows the other share of each survivor when it is asked again."""

    asked = 0

    def unmask(self, signatures):
        shown = super().unmask(signatures)
        self.asked += 1
        if self.asked == 1:
            return shown
        held = next(
            state for state in self._steps.states.values() if hasattr(state, "held") and hasattr(state, "noise")
        ).held
        return type(shown)(self.name, {name: one.of_key for name, one in held.items()})


class Careless(Complete):
    """A graph that takes any threshold."""

    def require(self, members):
        pass


class Standing:
    """A round in which all masked inputs have arrived, as the server sees it, with what it has been shown since."""

    def __init__(self, kind=Member, terms=TERMS, names=NAMES):
        self.round, self.terms = Round(names, terms, kind), terms
        # Whoever colludes does as often as the server likes what it likes.
        colluder = kind if issubclass(kind, Repeating) else type("Colluder", (Repeating, kind), {})
        self.round.members[COLLUDER] = colluder(COLLUDER, signing_key(COLLUDER), self.round.roster, terms)
        self.members, server = self.round.members, self.round.coordinator
        self.cohort = server.cohort([self.members[name].advertise() for name in names])
        self.sealed = {name: self.members[name].share(self.cohort) for name in names}
        self.deliveries = server.deliveries(self.sealed.values())
        self.masked = {name: self.round.masked(name, self.deliveries[name], INPUTS[name]) for name in names}
        self.masks, self.keys = {}, {}

    def signed(self, told):
        """Tell each member a list of survivors, and have it signed."""
        known = {name: one.signature for name, one in self.masked.items()}
        return {name: self.members[name].sign(Survivors(tuple(list_), known)).signature for name, list_ in told.items()}

    def show(self, asked, survivors, signatures):
        """Ask members for their shares, and keep them by what they are said to be."""
        for name in asked:
            self.keep(name, survivors, self.members[name].unmask(Signatures(signatures)))

    def keep(self, holder, survivors, shown):
        for owner, share in shown.shares.items():
            kept = self.masks if owner in survivors else self.keys
            kept.setdefault(owner, {})[holder] = share

    def found(self, kept, owner):
        if len(kept.get(owner, {})) < self.terms.graph.threshold:
            return None
        return combine(kept[owner], self.cohort.names, self.terms.graph.threshold)

    def leak(self):
        """The victim's vector, as far as the shares that were shown give it away."""
        own_mask = self.found(self.masks, VICTIM)
        keys = {name: seed for name in self.cohort.names if (seed := self.found(self.keys, name))}
        assert own_mask is not None
        keys[COLLUDER] = key_of(self.members[COLLUDER])
        return stripped(self.masked[VICTIM], self.terms, self.cohort, VICTIM, own_mask, keys)


WITHOUT = [name for name in NAMES if name != VICTIM]


def attack_by_a_second_list(kind):
    """First the victim has survived; once that is unmasked it has not, so that its key is asked for."""
    server = Standing(kind)
    signatures = server.signed(dict.fromkeys(NAMES, NAMES))
    server.show(NAMES, NAMES, signatures)
    signatures = server.signed(dict.fromkeys(WITHOUT, WITHOUT))
    server.show(WITHOUT, WITHOUT, signatures)
    return server.leak()


def attack_by_signing_twice(kind):
    """Both lists are signed before either is unmasked."""
    server = Standing(kind)
    with_victim = server.signed(dict.fromkeys(NAMES, NAMES))
    without = server.signed(dict.fromkeys(WITHOUT, WITHOUT))
    server.show(WITHOUT, WITHOUT, without)
    server.signed(dict.fromkeys(NAMES, NAMES))
    server.show(NAMES, NAMES, with_victim)
    return server.leak()


def attack_by_a_second_unmasking(kind):
    """The same list and the same signatures again, for the other kind of share."""
    server = Standing(kind)
    signatures = server.signed(dict.fromkeys(NAMES, NAMES))
    server.show(NAMES, NAMES, signatures)
    server.show(NAMES, WITHOUT, signatures)
    return server.leak()


REPEATED = {
    "both kinds of share": (attack_by_a_second_list, Repeating),
    "two survivor lists": (attack_by_signing_twice, Repeating),
    "a second unmasking": (attack_by_a_second_unmasking, OtherKind),
}


@pytest.mark.parametrize("attack", REPEATED)
def test_a_member_refuses_to_give(attack):
    with pytest.raises(ProtocolError, match="out of turn"):
        REPEATED[attack][0](Member)


@pytest.mark.parametrize("attack", REPEATED)
def test_a_twin_leaks_by_giving(attack):
    run, twin = REPEATED[attack]
    assert np.array_equal(run(twin), SECRET)


def test_a_member_shows_one_share_of_each_peer_and_of_the_right_kind():
    names = names_of(5)
    terms = terms_for(5, threshold=3)
    transcript = Round(names, terms).run(vectors(names, terms), {names[1]: "mask"})
    assert all(set(shown.shares) == set(names) for shown in transcript.shown.values())
    # A share of a key and one of a mask together with others of either kind give neither secret.
    shares = {holder: shown.shares[names[1]] for holder, shown in transcript.shown.items()}
    public = {one.name: one.mask_key for one in transcript.cohort.advertisements}
    recovered = private_key(combine(shares, names, 3)).public_key().public_bytes_raw()
    assert recovered == public[names[1]]


def attack_by_two_lists_for_two_groups(graph):
    """Some are told that the victim has survived, others that it has not."""
    server = Standing(terms=terms_for(4, graph=graph))
    told = server.signed({name: NAMES for name in NAMES if name != NAMES[2]})
    without = server.signed(dict.fromkeys((NAMES[2], COLLUDER), WITHOUT))
    # Whoever has signed one list is said to have signed the other.
    server.show([NAMES[2], COLLUDER], WITHOUT, {**told, **without})
    server.signed({COLLUDER: NAMES})
    server.show([VICTIM, NAMES[1]], NAMES, told)
    return server.leak()


def attack_by_few_survivors(graph):
    """The victim is told that nobody but it and the colluder has survived."""
    server = Standing(terms=terms_for(4, graph=graph))
    pair = [VICTIM, COLLUDER]
    signatures = server.signed(dict.fromkeys(pair, pair))
    server.show(pair, pair, signatures)
    return server.leak()


def attack_by_a_small_cohort(graph):
    """The victim is told that nobody but it and the colluder takes part."""
    pair = [VICTIM, COLLUDER]
    server = Standing(terms=terms_for(4, graph=graph).under(roster_of(pair)), names=pair)
    signatures = server.signed(dict.fromkeys(pair, pair))
    server.show(pair, pair, signatures)
    return server.leak()


COUNTED = {
    "two lists for two groups": (attack_by_two_lists_for_two_groups, "2 survivors have signed"),
    "survivors below the threshold": (attack_by_few_survivors, "2 survivors; the threshold is 3"),
    "a cohort below the threshold": (attack_by_a_small_cohort, "a cohort must have .* found 2"),
}


@pytest.mark.parametrize("attack", COUNTED)
def test_a_member_refuses(attack):
    run, reason = COUNTED[attack]
    with pytest.raises((ProtocolError, RoundAbandoned), match=reason):
        run(Complete(3, 1))


@pytest.mark.parametrize("attack", COUNTED)
def test_a_threshold_that_is_too_low_leaks_by(attack):
    assert np.array_equal(COUNTED[attack][0](Careless(2, 1)), SECRET)


def test_a_threshold_that_allows_two_lists_is_refused():
    for threshold, colluding in [(2, 0), (2, 1), (3, 2), (4, 4), (5, 0)]:
        with pytest.raises(ProtocolError, match=f"a threshold of {threshold} with {colluding} colluding"):
            Complete(threshold, colluding).require(4)


# Another round's messages.


class Static(Member):
    """A twin that seals shares under keys that last, without saying which round they are of."""

    def _seal_key(self, state, peer, mine):
        return hashlib.sha256("".join(sorted((self.name, peer.name))).encode()).digest()[:16], b""


def attack_by_shares_of_another_round(kind):
    """Unmask a round; in the next, deliver its shares once more and say that the victim has dropped out."""
    first = Standing(kind)
    first.show(NAMES, NAMES, first.signed(dict.fromkeys(NAMES, NAMES)))
    second = Round(NAMES, next_round(TERMS), kind)
    cohort = second.coordinator.cohort([second.members[name].advertise() for name in NAMES])
    deliveries = second.coordinator.deliveries([second.members[name].share(cohort) for name in NAMES])
    known = {}
    for name in WITHOUT:
        old = {**deliveries[name].sealed, VICTIM: first.sealed[VICTIM].sealed[name]}
        known[name] = second.masked(name, Delivery(deliveries[name].sharers, old), INPUTS[name]).signature
    signatures = {name: second.members[name].sign(Survivors(tuple(WITHOUT), known)).signature for name in WITHOUT}
    for name in WITHOUT:
        first.keep(name, WITHOUT, second.members[name].unmask(Signatures(signatures)))
    return first.leak()


def test_a_member_does_not_show_shares_of_another_round():
    assert not np.array_equal(attack_by_shares_of_another_round(Member), SECRET)


def held_of(server, name, delivery):
    """The peers whose shares a member has, once it has opened what was delivered."""
    server.members[name].open(delivery)
    return set(server.members[name]._steps._state.held) - {name}


def test_a_twin_leaks_by_shares_of_another_round():
    assert np.array_equal(attack_by_shares_of_another_round(Static), SECRET)


def test_shares_for_another_receiver_are_not_held():
    server = Round(NAMES, TERMS)
    cohort = server.coordinator.cohort([server.members[name].advertise() for name in NAMES])
    deliveries = server.coordinator.deliveries([server.members[name].share(cohort) for name in NAMES])
    swapped = {**deliveries[VICTIM].sealed, NAMES[1]: deliveries[NAMES[2]].sealed[NAMES[1]]}
    assert held_of(server, VICTIM, Delivery(deliveries[VICTIM].sharers, swapped)) == set(NAMES[2:])


def test_a_members_own_shares_do_not_come_back_as_those_of_a_peer():
    """It would show a share of its own key when the peer drops out, and one of its own mask to its other peers."""
    server = Round(NAMES, TERMS)
    cohort = server.coordinator.cohort([server.members[name].advertise() for name in NAMES])
    sealed = {name: server.members[name].share(cohort).sealed for name in NAMES}
    assert not held_of(server, VICTIM, Delivery(tuple(NAMES), {NAMES[1]: sealed[VICTIM][NAMES[1]]}))


def test_members_who_were_told_different_keys_do_not_open_each_others_shares():
    server = Round(NAMES, TERMS)
    told = {name: server.members[name].advertise() for name in NAMES}
    other = Member(COLLUDER, signing_key(COLLUDER), server.roster, TERMS).advertise()
    cohorts = {name: Cohort(tuple(told.values())) for name in NAMES}
    cohorts[NAMES[1]] = Cohort((*list(told.values())[:-1], other))
    sealed = {name: server.members[name].share(cohorts[name]) for name in NAMES[:-1]}
    got = {NAMES[1]: sealed[NAMES[1]].sealed[VICTIM]}
    assert not held_of(server, VICTIM, Delivery(tuple(NAMES), got))


# What else is refused.


def told_cohort(change):
    """Tell the victim a cohort that is not what it should be."""
    server = Round(NAMES, TERMS)
    told = {name: server.members[name].advertise() for name in NAMES}
    server.members[VICTIM].share(Cohort(tuple(one for _, one in sorted(change(told, server).items()))))


def with_old_keys_of_the_victim(told, server):
    return {**told, VICTIM: Member(VICTIM, signing_key(VICTIM), server.roster, TERMS).advertise()}


def with_one_key_twice(told, server, terms=TERMS):
    mask_key, seal_key = told[NAMES[1]].mask_key, told[COLLUDER].seal_key
    signature = signing_key(COLLUDER).sign(terms.advertisement(COLLUDER, mask_key, seal_key))
    return {**told, COLLUDER: type(told[VICTIM])(COLLUDER, mask_key, seal_key, signature)}


def with_a_key_of_low_order(told, server, terms=TERMS):
    mask_key, seal_key = told[COLLUDER].mask_key, bytes(32)
    signature = signing_key(COLLUDER).sign(terms.advertisement(COLLUDER, mask_key, seal_key))
    return {**told, COLLUDER: type(told[VICTIM])(COLLUDER, mask_key, seal_key, signature)}


COHORTS = {
    "other keys for the member itself": (with_old_keys_of_the_victim, "has other keys for it"),
    "one key twice": (with_one_key_twice, "have the same key"),
    "a key of low order": (with_a_key_of_low_order, "no key to agree with"),
    "without the member": (lambda told, _: {n: told[n] for n in WITHOUT}, "lacks this member"),
    "too few members": (lambda told, _: {n: told[n] for n in (VICTIM, COLLUDER)}, "a cohort must have .* found 2"),
}


def test_a_cohort_is_refused_with():
    def check(case):
        change, reason = COHORTS[case]
        with pytest.raises(ProtocolError, match=reason):
            told_cohort(change)

    assert failures(COHORTS, check) == []


@pytest.mark.parametrize("change", [with_one_key_twice, with_a_key_of_low_order])
def test_the_coordinator_tells_no_cohort_that_members_refuse_with(change):
    """Another's key may have been taken, or lost: both members are left out."""
    names = names_of(6)
    terms = terms_for(6, threshold=4, colluding=1)
    server = Round(names, terms)
    told = {name: server.members[name].advertise() for name in names}
    told[COLLUDER] = change(told, server, terms)[COLLUDER]
    without = {COLLUDER} | ({NAMES[1]} if change is with_one_key_twice else set())
    cohort = server.coordinator.cohort(told.values())
    assert set(cohort.names) == set(names) - without
    assert all(server.members[name].share(cohort) for name in cohort.names)


def test_a_cohort_is_refused_that_leaves_room_for_two_lists():
    names = names_of(5)
    members = {name: Member(name, signing_key(name), roster_of(names), TERMS) for name in names}
    cohort = Cohort(tuple(member.advertise() for member in members.values()))
    with pytest.raises(ProtocolError, match=r"a cohort must have .* found 5"):
        members[VICTIM].share(cohort)


def test_survivors_are_refused_without_the_member_or_with_a_stranger():
    for survivors in (WITHOUT, [*WITHOUT, "site-999"], [*NAMES, "site-999"]):
        with pytest.raises(ProtocolError, match="lacks this member, or has a member that was not there before"):
            Standing().signed({VICTIM: survivors})


def test_signatures_of_others_than_the_survivors_do_not_count():
    server = Standing()
    told = NAMES[:3]
    signatures = server.signed(dict.fromkeys(told[:2], told))
    signatures[COLLUDER] = signing_key(COLLUDER).sign(server.members[VICTIM]._steps._state.signed)
    with pytest.raises(ProtocolError, match="2 survivors have signed"):
        server.show([VICTIM], told, dict(sorted(signatures.items())))


def test_shares_from_nobody_in_particular_are_refused():
    server = Round(NAMES, TERMS)
    cohort = server.coordinator.cohort([server.members[name].advertise() for name in NAMES])
    deliveries = server.coordinator.deliveries([server.members[name].share(cohort) for name in NAMES])
    with pytest.raises(ProtocolError, match="not among the members that have sent some"):
        server.masked(VICTIM, Delivery(tuple(NAMES[:3]), deliveries[VICTIM].sealed), SECRET)


@pytest.mark.parametrize("wrong", [np.zeros(4, "<u4"), np.zeros(5, "<u8"), np.zeros(5, "<i4")])
def test_a_vector_must_be_as_the_terms_say(wrong):
    server = Round(NAMES, TERMS)
    cohort = server.coordinator.cohort([server.members[name].advertise() for name in NAMES])
    deliveries = server.coordinator.deliveries([server.members[name].share(cohort) for name in NAMES])
    server.members[VICTIM].open(deliveries[VICTIM])
    with pytest.raises(ProtocolError, match="the vector must be 5 numbers of uint32"):
        server.members[VICTIM].mask(wrong)


# The roster.


AUTHORITY = signing_key("authority")


def test_a_roster_that_was_cut_is_refused():
    signed = sign_roster(roster_of(NAMES), 7, AUTHORITY)
    assert opened(signed).require(AUTHORITY.public_key(), oldest=7) == roster_of(NAMES)
    cut = sign_roster(roster_of(NAMES[:2]), 7, signing_key("server"))
    with pytest.raises(ProtocolError, match="signature of the authority"):
        opened(cut).require(AUTHORITY.public_key())
    for place in (len(signed) - 1, len(signed) // 2):
        changed = signed[:place] + bytes([signed[place] ^ 1]) + signed[place + 1 :]
        with pytest.raises(ProtocolError, match=r"no signed roster|signature of the authority"):
            opened(changed).require(AUTHORITY.public_key())
    with pytest.raises(ProtocolError, match="no signed roster"):
        opened(signed[:-1]).require(AUTHORITY.public_key())


def test_an_old_roster_is_refused():
    signed = sign_roster(roster_of(NAMES), 7, AUTHORITY)
    with pytest.raises(ProtocolError, match="serial number 7; the oldest that is taken is 8"):
        opened(signed).require(AUTHORITY.public_key(), oldest=8)


def met_with_other_rosters(kind):
    """The victim knows everybody; the others have a roster with one more, who takes no part."""
    terms, more = kind("run-1", 1, TERMS.graph, TERMS.length), roster_of([*NAMES, "invented"])
    members = {name: Member(name, signing_key(name), more, terms) for name in WITHOUT}
    members[VICTIM] = Member(VICTIM, signing_key(VICTIM), roster_of(NAMES), terms)
    members[VICTIM].share(Cohort(tuple(members[name].advertise() for name in NAMES)))


def test_members_with_different_rosters_do_not_meet():
    with pytest.raises(ProtocolError, match="has not signed its keys for this attempt"):
        met_with_other_rosters(Terms)


def test_a_twin_meets_members_with_another_roster():
    class Rosterless(Terms):
        def under(self, roster):
            return self

    met_with_other_rosters(Rosterless)


@pytest.mark.parametrize(
    "entries",
    [(("b", bytes(32)), ("a", bytes([1] * 32))), (("a", "text"),), ("ab",), ((b"a", bytes(32)),), 7],
    ids=["out of order", "a key of text", "a word", "a name of bytes", "a number"],
)
def test_what_is_signed_and_no_roster_is_refused(entries):
    content = text("roster", 7, entries)
    with pytest.raises(ProtocolError, match="no signed roster"):
        opened(text("signed roster", content, AUTHORITY.sign(content)))


def test_one_key_is_one_member():
    with pytest.raises(ProtocolError, match="two names on the roster have the same key"):
        Roster({"a": bytes(32), "b": bytes(32)})


def test_a_pinned_roster_has_the_pinned_keys_only():
    keys = roster_of(NAMES).keys
    pins = {name: fingerprint(signing_key(name).public_key()) for name in NAMES}
    assert roster_of(NAMES).pinned(pins) == roster_of(NAMES)
    with pytest.raises(ProtocolError, match="'site-001'"):
        Roster({**keys, NAMES[1]: public_bytes(signing_key("server"))}).pinned(pins)
    with pytest.raises(ProtocolError, match="'stranger'"):
        Roster({**keys, "stranger": public_bytes(signing_key("server"))}).pinned(pins)


# Zeros.


def attack_by_zeros(kind):
    """All others give zeros. What is left of two honest vectors once all is taken off that the server can take off?"""
    terms = terms_for(4, threshold=3, colluding=1, length=4000)
    names = NAMES
    round_ = Round(names, terms, kind)
    colluder = Repeating(COLLUDER, signing_key(COLLUDER), round_.roster, terms)
    round_.members[COLLUDER] = colluder
    inputs = dict.fromkeys(names, np.zeros(4000, np.int64)) | {VICTIM: np.arange(4000)}
    transcript = round_.run(inputs)
    left = []
    for name in (VICTIM, NAMES[1]):
        shares = {holder: shown.shares[name] for holder, shown in transcript.shown.items()}
        own_mask = combine(shares, names, 3)
        masked, keys = transcript.masked[name], {COLLUDER: key_of(colluder)} if kind is Member else {}
        left.append(stripped(masked, terms, transcript.cohort, name, own_mask, keys))
    return inputs[VICTIM], transcript, left


def test_zeros_of_all_others_show_the_sum_and_nothing_else():
    secret, transcript, (victim, other) = attack_by_zeros(Member)
    # The sum is the victim's vector: against this, nothing but noise helps.
    assert np.array_equal(sum_of(transcript), secret)
    for left in (victim, other):
        high = np.mean(left > 0)
        assert abs(high - 0.5) < 6 * 0.5 / np.sqrt(left.size)


def test_a_twin_leaks_vectors_where_all_others_are_zero():
    secret, _, (victim, other) = attack_by_zeros(Unpaired)
    assert np.array_equal(victim, secret) and not other.any()
