"""A server that knows more than it should and takes it off a masked vector, and members that lack a check."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import numpy as np

from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.primitives import add_masks, out_of_ring, pair_key, private_key
from cloister.secure_aggregation.session import Steps
from cloister.utils.errors import ProtocolError


def stripped(masked, terms, cohort, owner, own_mask, keys):
    """A masked vector without its owner's mask and without those in common with members whose keys are known.

    Args:
        keys: name -> seed of the key for masks; or the owner's own seed, under its name, which gives all of them.
    """
    values = np.frombuffer(masked.payload, terms.dtype).copy()
    public = {one.name: one.mask_key for one in cohort.advertisements}
    others = [name for name in cohort.names if name != owner and (name in keys or owner in keys)]
    common = {
        name: pair_key(private_key(keys[owner]), public[name], terms.binding(cohort), owner, name)
        if owner in keys
        else pair_key(private_key(keys[name]), public[owner], terms.binding(cohort), owner, name)
        for name in others
    }
    above = [key for name, key in common.items() if name > owner]
    below = [key for name, key in common.items() if name < owner]
    add_masks(values, below, [own_mask, *above])
    return out_of_ring(values)


class Unforgetting(Steps):
    """Steps that can be made as often as one likes."""

    def __init__(self, first):
        self.states = {type(first): first}

    def leave(self, state):
        self.states[type(state)] = state

    def take(self, kind):
        return self.states[kind]


class Repeating(Member):
    """A twin that makes each step as often as it is asked to."""

    def __init__(self, *given):
        super().__init__(*given)
        self._steps = Unforgetting(self._steps.take(object))


class Held:
    """An attribute that whoever reads it has read before anybody goes on, if two may read it at the same time."""

    def __init__(self, value):
        self.value, self.readers = value, Barrier(2, timeout=0.5)

    def __get__(self, owner, kind=None):
        found = self.value
        with suppress(BrokenBarrierError):  # the other one is not let in
            self.readers.wait()
        return found

    def __set__(self, owner, value):
        self.value = value


def both(take):
    """Return how many of two threads get their part at the same time."""

    def taken(_):
        try:
            return take() is not None
        except ProtocolError:
            return False

    with ThreadPoolExecutor(2) as threads:
        return sum(threads.map(taken, range(2)))


def key_of(colluder):
    """The seed of a colluder's key, as it has told the server."""
    return next(state.mask_seed for state in colluder._steps.states.values() if hasattr(state, "mask_seed"))


class Unpaired(Member):
    """A twin without masks that peers have in common."""

    def _masks(self, state, partners):
        return super()._masks(state, frozenset())
