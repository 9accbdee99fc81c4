"""The view of a server and a colluder does not tell which of two inputs with the same sum an honest client had."""

from dataclasses import replace

import numpy as np
import pytest
from secure_epochs import terms_of
from secure_rounds import Round, names_of, roster_of, signing_key, terms_for
from secure_twins import Repeating, Unpaired, key_of, stripped

from cloister.secure_aggregation.epoch import EpochList, EpochMember
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.primitives import add_masks, combine, into_ring

NAMES = names_of(4)
VICTIM, HONEST, DROPPED, COLLUDER = NAMES
TERMS = terms_for(4, threshold=3, colluding=1, length=4)
WORLDS = ({VICTIM: 900, HONEST: 100}, {VICTIM: 100, HONEST: 900})
"""Two inputs of the victim; another honest client makes the sum the same."""


class HalfMasked(Member):
    """A twin whose masks end in the middle of the vector."""

    def _masked(self, state, values):
        return np.concatenate([super()._masked(state, values)[:2], values[2:]])


class PairedWithOne(Member):
    """A twin that has a mask in common with one peer only, who colludes."""

    def _masks(self, state, partners):
        return super()._masks(state, frozenset({COLLUDER}))


def view(kind, world):
    """The numbers in what the server gets, once everything that it can take off is off, beside the messages' bytes.

    One member drops out with its masked input on the way, so that its key is recovered.
    """
    round_ = Round(NAMES, TERMS, kind)
    colluder = type("Colluder", (Repeating, kind), {})(COLLUDER, signing_key(COLLUDER), round_.roster, TERMS)
    round_.members[COLLUDER] = colluder
    inputs = {name: np.full(4, WORLDS[world].get(name, 0)) for name in NAMES}
    transcript = round_.run(inputs, {DROPPED: "mask"})
    assert set(transcript.total.values.tolist()) == {1000} or kind is not Member
    shares = {name: {holder: one.shares[name] for holder, one in transcript.shown.items()} for name in NAMES}
    recovered = {name: combine(held, NAMES, 3) for name, held in shares.items()}
    keys = {DROPPED: recovered[DROPPED], COLLUDER: key_of(colluder)}
    left = [
        stripped(transcript.masked[name], TERMS, transcript.cohort, name, recovered[name], chosen)
        for name in (VICTIM, HONEST)
        for chosen in (keys, {COLLUDER: keys[COLLUDER]}, {})
    ]
    sealed = b"".join(one for name in (VICTIM, HONEST) for one in transcript.shares[name].sealed.values())
    raw = np.frombuffer(b"".join(transcript.masked[name].payload for name in (VICTIM, HONEST)) + sealed, np.uint8)
    return np.concatenate([np.concatenate(left) / 2.0**31, raw / 256])


class Unmasked(EpochMember):
    """A twin whose only mask is in common with the colluder, whose name is the last."""

    def pads(self, terms):
        found = super().pads(terms)
        return replace(found, plus=found.plus[-1:], minus=())


class Still(EpochMember):
    """A twin that masks every round as the first."""

    def pads(self, terms):
        if not hasattr(self, "first"):
            self.first = super().pads(terms)
        return self.first


def view_of_an_epoch(kind, world):
    """The numbers in what the server gets of two rounds, without the colluder's masks, and beside the bytes.

    In the second round the two honest clients have each other's input.
    """
    members = {name: kind(name, signing_key(name), roster_of(NAMES), "run-1") for name in NAMES}
    found = EpochList({name: member.advertise(1) for name, member in members.items()})
    for member in members.values():
        member.agree(found)
    left, raw = [], b""
    for number in (1, 2):
        inputs = WORLDS[world ^ (number == 2)]
        terms = terms_of(number, threshold=3, colluding=1, length=4, bits=32)
        total = np.zeros(4, np.uint32)
        for name in NAMES:
            pads = members[name].pads(terms)
            vector = pads.mask(into_ring(np.full(4, inputs.get(name, 0)), 32))
            values = np.frombuffer(vector.payload, np.uint32)
            total += values
            if name in (VICTIM, HONEST):
                own = values.copy()
                add_masks(own, (), pads.plus[-1:])
                left += [own, values]
                raw += vector.payload
        assert set(total.tolist()) == {1000} or kind is not EpochMember
    first, second = np.array(left[:4]), np.array(left[4:])
    numbers = np.concatenate([first, second, second - first]).view(np.int32)
    return np.concatenate([numbers.ravel() / 2.0**31, np.frombuffer(raw, np.uint8) / 256])


def features(views):
    """Linear, and by size: a number that is small where its mask is missing stands out."""
    return np.hstack([views, np.log2(np.abs(views) + 2.0**-40)])


def right_answers(kind, train, test, view=view):
    """Return the share of new transcripts about which a distinguisher that was trained on others is right."""
    worlds = np.arange(train + test) % 2
    known = features(np.array([view(kind, world) for world in worlds]))
    centre, scale = known[:train].mean(axis=0), known[:train].std(axis=0) + 1e-12
    known = (known - centre) / scale
    # Ridge regression: there are about as many features as transcripts.
    gram = known[:train].T @ known[:train] + 10 * np.eye(known.shape[1])
    weights = np.linalg.solve(gram, known[:train].T @ (2.0 * worlds[:train] - 1))
    return float(np.mean((known[train:] @ weights > 0) == worlds[train:]))


def chance(test):
    """Six standard deviations of the share of right answers of a fair coin: fewer than one false alarm in 10⁸."""
    return 6 * 0.5 / np.sqrt(test)


@pytest.mark.slow
def test_a_distinguisher_stays_at_chance():
    assert abs(right_answers(Member, 200, 200) - 0.5) < chance(200)


@pytest.mark.slow
@pytest.mark.parametrize("twin", [Unpaired, HalfMasked, PairedWithOne])
def test_the_distinguisher_wins_against_a_twin(twin):
    assert right_answers(twin, 100, 60) > 0.5 + chance(60)


@pytest.mark.slow
def test_a_distinguisher_of_two_rounds_of_an_epoch_stays_at_chance():
    assert abs(right_answers(EpochMember, 200, 200, view_of_an_epoch) - 0.5) < chance(200)


@pytest.mark.slow
@pytest.mark.parametrize("twin", [Unmasked, Still])
def test_the_distinguisher_wins_against_an_epoch_of_a_twin(twin):
    assert right_answers(twin, 100, 60, view_of_an_epoch) > 0.5 + chance(60)
