"""Sums of an epoch: what they are, what a hostile server gets, and what it gets from twins that lack one part."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from secure_epochs import RUN, Sent, Site, epoch_of, summed, sums_without_masks, terms_of, values_of
from secure_rounds import names_of, roster_of, sent, signing_key

from cloister.secure_aggregation import epoch
from cloister.secure_aggregation.epoch import (
    ROUNDS,
    EpochCoordinator,
    EpochKey,
    EpochList,
    EpochMember,
    RoundTerms,
    _Chained,
)
from cloister.secure_aggregation.primitives import derived, into_ring, out_of_ring
from cloister.secure_aggregation.serialization import text
from cloister.secure_aggregation.session import Complete
from cloister.utils.errors import ProtocolError, RoundAbandoned

NAMES = names_of(5)
VICTIM, COLLUDER = NAMES[0], NAMES[-1]
T, C = 4, 1


def terms(number, **other):
    return terms_of(number, T, C, **other)


# Sums.


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_of_every_round_is_that_of_all_vectors(bits):
    sites, coordinator = epoch_of(NAMES, first=7)
    for number in range(7, 11):
        inputs = values_of(NAMES, seed=number)
        total = summed(sites, coordinator, terms(number, bits=bits), inputs)
        assert np.array_equal(out_of_ring(total), sum(inputs.values()))


def test_an_epoch_has_its_rounds_and_no_more():
    sites, coordinator = epoch_of(NAMES)
    inputs = values_of(NAMES)
    for number in range(1, ROUNDS + 1):
        summed(sites, coordinator, terms(number), inputs)
    with pytest.raises(ProtocolError, match=f"round {ROUNDS + 1} is next"):
        coordinator.begin(terms(ROUNDS + 1))
    with pytest.raises(ProtocolError, match=f"round {ROUNDS + 1} is next"):
        sites[VICTIM].pads(terms(ROUNDS + 1))


def test_a_silent_member_leaves_no_sum_and_ends_the_epoch():
    sites, coordinator = epoch_of(NAMES)
    coordinator.begin(terms(1))
    for name in NAMES[1:]:
        coordinator.add(sites[name].pads(terms(1), coordinator.list).mask(np.zeros(5, np.uint64)))
    with pytest.raises(RoundAbandoned, match=VICTIM):
        coordinator.total()
    with pytest.raises(ProtocolError, match="out of turn"):
        coordinator.begin(terms(2))


def test_members_with_another_context_are_found_before_a_sum_is_made():
    sites, coordinator = epoch_of(NAMES)
    coordinator.begin(terms(1))
    pads = sites[VICTIM].pads(terms(1, statement=b"model 2"), coordinator.list)
    with pytest.raises(ProtocolError, match="another context"):
        coordinator.add(pads.mask(np.zeros(5, np.uint64)))


def test_a_member_counts_once():
    sites, coordinator = epoch_of(NAMES)
    coordinator.begin(terms(1))
    vector = sites[VICTIM].pads(terms(1), coordinator.list).mask(np.zeros(5, np.uint64))
    coordinator.add(vector)
    with pytest.raises(ProtocolError, match="not any more"):
        coordinator.add(vector)


def test_members_that_others_would_refuse_are_left_out():
    keys = [Site(name, NAMES).advertise(1) for name in NAMES]
    stranger = Site("x", ["x"]).advertise(1)
    of_low_order = EpochMember(*Site(COLLUDER, NAMES).given)
    signed = epoch._advertised(RUN, roster_of(NAMES), 1, COLLUDER, bytes(32))
    weak = EpochKey(COLLUDER, bytes(32), of_low_order._key.sign(signed))
    coordinator = EpochCoordinator(RUN, roster_of(NAMES), 1, [*keys[:-1], stranger, weak])
    assert coordinator.list.names == tuple(NAMES[:-1])


# Refusals of a member.


@pytest.mark.parametrize("number", [1, 3])
def test_a_round_out_of_turn_is_refused_and_ends_the_epoch(number):
    sites, coordinator = epoch_of(NAMES)
    summed(sites, coordinator, terms(1), values_of(NAMES))
    with pytest.raises(ProtocolError, match="round 2 is next"):
        sites[VICTIM].pads(terms(number))
    assert sites[VICTIM].kept == b""


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[:1]])
def test_a_list_below_the_threshold_is_refused(names):
    sites, _ = epoch_of(NAMES)
    found = EpochList({name: sites[name].advertise(1) for name in names})
    with pytest.raises(ProtocolError, match="must have 4 to 6 members"):
        sites[VICTIM].pads(terms(1), found)


def test_a_later_round_of_a_higher_threshold_is_refused():
    sites, coordinator = epoch_of(NAMES)
    summed(sites, coordinator, terms(1), values_of(NAMES))
    with pytest.raises(ProtocolError, match="must have 6"):
        sites[VICTIM].pads(terms_of(2, threshold=6, colluding=1))


def forged(change):
    """A list in which one key is not what the others' owners have signed for this epoch."""
    sites, coordinator = epoch_of(NAMES)
    return sites[VICTIM], EpochList({**coordinator.list.keys, **change(coordinator.list.keys)})


FORGED = {
    "of another party": lambda keys: {NAMES[1]: replace(keys[NAMES[1]], key=keys[NAMES[2]].key)},
    "of another member": lambda keys: {NAMES[1]: keys[NAMES[2]]},
    "of another first round": lambda keys: {NAMES[1]: Site(NAMES[1], NAMES).advertise(2)},
    "of a stranger": lambda keys: {"x": Site("x", ["x"]).advertise(1)},
    "of another run": lambda keys: {NAMES[1]: EpochMember(*Site(NAMES[1], NAMES).given[:3], "run-2").advertise(1)},
    "of another roster": lambda keys: {NAMES[1]: Site(NAMES[1], NAMES[:3]).advertise(1)},
    "of its own, but an earlier one": lambda keys: {VICTIM: Site(VICTIM, NAMES).advertise(1)},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_list_is_refused_with_a_key(kind):
    victim, found = forged(FORGED[kind])
    with pytest.raises(ProtocolError, match=r"has not signed its key for this epoch|another key for it"):
        victim.pads(terms(1), found)
    assert victim.kept == b""


def test_a_state_is_refused_after_a_change_of_the_roster():
    sites, coordinator = epoch_of(NAMES)
    summed(sites, coordinator, terms(1), values_of(NAMES))
    sites[VICTIM].given = (VICTIM, signing_key(VICTIM), roster_of(NAMES[:4]), RUN)
    with pytest.raises(ProtocolError, match="belongs to another name, roster or run"):
        sites[VICTIM].pads(terms(2))


def test_a_member_that_lost_its_state_can_only_begin_anew():
    sites, coordinator = epoch_of(NAMES)
    summed(sites, coordinator, terms(1), values_of(NAMES))
    sites[VICTIM].kept = b""
    with pytest.raises(ProtocolError, match="no state of a member"):
        sites[VICTIM].pads(terms(2))
    assert sites[VICTIM].advertise(2).key != coordinator.list.keys[VICTIM].key


# A hostile server: any messages, in any order, to members that each have one vector more to lose.


class Unwound(EpochMember):
    """A twin that keeps its links, and takes part in a round as often as it is asked to."""

    def pads(self, terms):
        state = self._steps.take(_Chained)
        self._steps.leave(replace(state, number=terms.number))
        pads = super().pads(terms)
        self._steps.leave(state)
        return pads


class AnyList(EpochList):
    """A list on which nothing depends."""

    def binding(self, run, roster, first):
        return bytes(32)


class Listless(EpochMember):
    """A twin whose masks do not depend on the list."""

    def agree(self, found):
        super().agree(AnyList(found.keys))


class AnyModel(EpochMember):
    """A twin whose masks do not depend on the statement."""

    def pads(self, terms):
        return super().pads(replace(terms, statement=b""))


class Unthresholded(EpochMember):
    """A twin that takes part in lists of any length."""

    def pads(self, terms):
        return super().pads(terms_of(terms.number, 2, 0, statement=terms.statement))


def hostile(kind, seed, waves=6):
    """All vectors that honest members have sent to a server that draws its messages at random.

    In each wave it may ask for new keys; then it asks all honest members for a vector, most of them for the same one.
    Some get another model, round or key; two may get lists that lack each other; earlier messages come again.
    """
    rng = np.random.default_rng(seed)
    honest = NAMES[:-1]
    sites = {name: Site(name, NAMES, kind) for name in NAMES}
    keys = {name: [] for name in NAMES}
    agreed, told, vectors, number = {}, [], [], 1
    for wave in range(waves):
        if not wave or rng.random() < 0.3:
            number = 1
            for name, site in sites.items():
                keys[name].append(site.advertise(1))
            chosen = set(NAMES) - set(rng.choice(NAMES, rng.integers(3), replace=False))
            found = {name: keys[name][-1] for name in NAMES if name in chosen}
        apart = set(rng.choice(honest, 2, replace=False)) if rng.random() < 0.4 else set()
        messages = []
        for name in rng.permutation(honest):
            own = {one: key for one, key in found.items() if one == name or name not in apart or one not in apart}
            if rng.random() < 0.03:
                own[NAMES[1]] = keys[NAMES[1]][0]
            other = number if rng.random() < 0.9 else int(rng.integers(1, 4))
            statement = b"model 1" if rng.random() < 0.9 else b"model 2"
            messages.append((name, terms(other, statement=statement), EpochList(own)))
        told += messages
        messages += [told[place] for place in rng.integers(len(told), size=2)]
        for name, sends, own in messages:
            kept = sites[name].kept
            is_first = b"_Advertised" in kept
            with suppress(ProtocolError):
                pads = sites[name].pads(sends, own if is_first else None)
                agreed[name] = own if is_first else agreed[name]
                vectors.append(Sent.of(agreed[name], sends, pads))
            # Here a refusal costs nothing: so this server can try more.
            sites[name].kept = sites[name].kept or kept
        number += 1
    return vectors


def pads_used_twice(vectors):
    used = [(one.name, key) for one in vectors for key in one.masks.values()]
    return len(used) - len(set(used))


def unlike(vectors):
    """Sums without masks that are none of one context, over the honest members of one list of t or more."""
    found = sums_without_masks(vectors, {COLLUDER})
    return [
        part
        for part in found
        if len({(one.found.encode(), one.terms.number, one.terms.statement) for one in part}) > 1
        or {one.name for one in part} != set(part[0].found.names) - {COLLUDER}
        or len(part) < T - C
    ]


SEEDS = range(30)


def test_a_hostile_server_gets_no_mask_twice_and_sums_of_whole_lists_alone():
    found = [hostile(EpochMember, seed) for seed in SEEDS]
    assert not any(map(pads_used_twice, found))
    assert not any(map(unlike, found))
    assert sum(len(sums_without_masks(vectors, {COLLUDER})) for vectors in found) > 0


def test_a_hostile_server_gets_masks_twice_from_a_twin_that_keeps_its_links():
    assert any(pads_used_twice(hostile(Unwound, seed)) for seed in SEEDS)


@pytest.mark.parametrize("twin", [Listless, AnyModel, Unthresholded])
def test_a_hostile_server_gets_other_sums_from(twin):
    assert any(unlike(hostile(twin, seed)) for seed in SEEDS)


# Secrets that are read later.


def masks_from(site, terms, binding):
    """The masks of a round that follow from the stored links."""
    member = EpochMember.deserialize(*site.given, site.kept)
    state = member._steps.take(_Chained)
    return {derived(link, text("mask", terms.context(binding))) for link in state.links.values()}


@pytest.mark.parametrize(("kind", "found"), [(EpochMember, 0), (Unwound, len(NAMES) - 1)])
def test_a_reader_of_the_state_finds_masks_of_earlier_rounds_of_a_twin_alone(kind, found):
    sites, coordinator = epoch_of(NAMES, kind=kind)
    pads = sites[VICTIM].pads(terms(1), coordinator.list)
    read = masks_from(sites[VICTIM], terms(1), coordinator.list.binding(RUN, roster_of(NAMES), 1))
    assert len(read & {*pads.plus, *pads.minus}) == found


def test_an_old_state_put_back_gives_masks_of_its_own_epoch_alone():
    sites, coordinator = epoch_of(NAMES)
    old = sites[VICTIM].kept
    first = sites[VICTIM].pads(terms(1), coordinator.list)
    sites[VICTIM].kept = old
    again = sites[VICTIM].pads(terms(1), coordinator.list)
    assert (first.plus, first.minus) == (again.plus, again.minus)  # so its owner counts as one of the c
    later = {name: site.advertise(2) for name, site in sites.items() if name != VICTIM}
    with_old = EpochList({**later, VICTIM: coordinator.list.keys[VICTIM]})
    with pytest.raises(ProtocolError, match=f"{VICTIM}' is not on the roster, or has not signed its key"):
        sites[NAMES[1]].pads(terms(2), with_old)


MODEL = {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3), "bias": np.zeros(3, np.float32)}
OTHER_MODELS = [
    {**MODEL, "bias": np.array([0, 0, -0.0], np.float32)},
    {**MODEL, "bias": np.zeros(3, np.float64)},
    {**MODEL, "kernel": MODEL["kernel"].reshape(3, 2)},
    {"bias": MODEL["bias"], "kernel": MODEL["kernel"]},
    {"kernel": MODEL["kernel"], "offset": MODEL["bias"]},
]


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_another_model_is_another_context(model):
    graph, binding = Complete(T, C), bytes(32)
    told, other = (RoundTerms.about(1, graph, 9, 64, b"noise", each) for each in (MODEL, model))
    assert told.context(binding) != other.context(binding)
    assert told == RoundTerms.about(1, graph, 9, 64, b"noise", {name: array.copy() for name, array in MODEL.items()})


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"graph": Complete(T, 0)},
        {"graph": Complete(3, C)},
        {"length": 6},
        {"bits": 32},
        {"statement": b""},
    ],
)
def test_every_term_is_in_the_context(change):
    assert replace(terms(1), **change).context(bytes(32)) != terms(1).context(bytes(32))


# Two rounds in a row.


def test_two_rounds_have_no_mask_in_common():
    sites, coordinator = epoch_of(NAMES)
    first = sites[VICTIM].pads(terms(1), coordinator.list)
    second = sites[VICTIM].pads(terms(2))
    assert not {*first.plus, *first.minus} & {*second.plus, *second.minus}


def test_a_vector_of_another_shape_is_refused():
    sites, coordinator = epoch_of(NAMES)
    pads = sites[VICTIM].pads(terms(1), coordinator.list)
    with pytest.raises(ProtocolError, match="must be 5 numbers"):
        pads.mask(into_ring(np.zeros(4, np.int64), 64))


def test_messages_survive_their_bytes():
    sites, coordinator = epoch_of(NAMES)
    assert sent(coordinator.list) == coordinator.list
    vector = sites[VICTIM].pads(terms(1), coordinator.list).mask(np.zeros(5, np.uint64))
    assert sent(vector) == vector
