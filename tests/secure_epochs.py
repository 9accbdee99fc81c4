"""An epoch of secure sums from both ends: sites that store their state between messages, and what a server can undo."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from secure_rounds import roster_of, sent, signing_key

from cloister.secure_aggregation.epoch import EpochCoordinator, EpochList, EpochMember, RoundTerms
from cloister.secure_aggregation.primitives import into_ring
from cloister.secure_aggregation.session import Complete

RUN = "run-1"


def terms_of(number, threshold=3, colluding=1, length=5, bits=64, statement=b"model 1"):
    return RoundTerms(number, Complete(threshold, colluding), length, bits, statement)


class Site:
    """A member as a node runs it: a process for each message, and bytes between two messages."""

    def __init__(self, name, names, kind=EpochMember):
        self.given, self.kind, self.kept = (name, signing_key(name), roster_of(names), RUN), kind, b""

    def advertise(self, first):
        member = self.kind(*self.given)
        key = sent(member.advertise(first))
        self.kept = member.serialize()
        return key

    def pads(self, terms, found=None):
        """Take the state, make the step, store the state of the next round."""
        kept, self.kept = self.kept, b""
        member = self.kind.deserialize(*self.given, kept)
        if found is not None:
            member.agree(sent(found))
        pads = member.pads(terms)
        self.kept = member.serialize()
        return pads


def epoch_of(names, first=1, kind=EpochMember):
    """Sites that have advertised, and the coordinator of their epoch."""
    sites = {name: Site(name, names, kind) for name in names}
    keys = [site.advertise(first) for site in sites.values()]
    return sites, EpochCoordinator(RUN, roster_of(names), first, keys)


def summed(sites, coordinator, terms, inputs):
    """One round with all members of the list."""
    found = coordinator.begin(terms)
    for name in coordinator.list.names:
        pads = sites[name].pads(terms, found if found.names else None)
        coordinator.add(sent(pads.mask(into_ring(inputs[name], terms.bits))))
    return coordinator.total()


@dataclass(frozen=True)
class Sent:
    """A vector that an honest member has sent: to whom it listened, and the mask in common with each other member."""

    name: str
    found: EpochList
    terms: RoundTerms
    masks: dict

    @classmethod
    def of(cls, found, terms, pads):
        others = [name for name in found.names if name != pads.name]
        keys = iter(pads.minus + pads.plus)  # names below come first, and both are in order
        return cls(pads.name, found, terms, dict(zip(others, keys, strict=True)))


def sums_without_masks(vectors, colluders):
    """The least sets of honest vectors whose masks cancel, once masks in common with colluders are taken off.

    A mask cancels against the same mask with the other sign, which only the other member's vector has.
    """
    users = defaultdict(list)
    for place, one in enumerate(vectors):
        for other, key in one.masks.items():
            if other not in colluders:
                users[key].append(place)
    group = list(range(len(vectors)))

    def top(place):
        while group[place] != place:
            place = group[place]
        return place

    for places in users.values():
        for one, other in pairwise(places):
            group[top(one)] = top(other)
    alone = {top(place) for places in users.values() if len({vectors[p].name for p in places}) < 2 for place in places}
    parts = defaultdict(list)
    for place, one in enumerate(vectors):
        parts[top(place)].append(one)
    return [found for root, found in parts.items() if root not in alone]


def values_of(names, length=5, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-1000, 1000, length) for name in names}
