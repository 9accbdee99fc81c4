"""The unmasked sum is the sum of the survivors' inputs, exactly, whoever drops out when."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from secure_rounds import PHASES, Round, names_of, signing_key, sum_of, terms_for, vectors

from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import SealedShares
from cloister.secure_aggregation.primitives import SeedChain, into_ring, out_of_ring, seeds
from cloister.utils.errors import ProtocolError, RoundAbandoned


@st.composite
def schedules(draw, largest):
    """A cohort, a threshold, and who drops out before which phase."""
    members = draw(st.integers(3, largest))
    threshold = draw(st.integers(members // 2 + 1, members))
    gone = draw(st.dictionaries(st.sampled_from(names_of(members)), st.sampled_from(PHASES), max_size=members // 2))
    return members, threshold, gone


def left(names, gone, phase):
    return [name for name in names if name not in gone or PHASES.index(gone[name]) > PHASES.index(phase)]


def check(schedule):
    members, threshold, gone = schedule
    names = names_of(members)
    terms = terms_for(members, threshold)
    inputs = vectors(names, terms, seed=members)
    if len(left(names, gone, "unmask")) < threshold:
        with pytest.raises(RoundAbandoned):
            Round(names, terms).run(inputs, gone)
        return
    transcript = Round(names, terms).run(inputs, gone)
    survivors = left(names, gone, "mask")
    assert list(transcript.total.survivors) == survivors
    assert np.array_equal(sum_of(transcript), sum(inputs[name] for name in survivors))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedules(6))
def test_the_sum_is_exact_for_any_dropouts(schedule):
    check(schedule)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedules(6))
def test_the_sum_is_exact_for_many_schedules(schedule):
    check(schedule)


@pytest.mark.slow
def test_the_sum_is_exact_for_many_members():
    members = 40
    names, rng = names_of(members), np.random.default_rng(members)
    terms = terms_for(members, (2 * members) // 3 + 1, members // 20)
    inputs = vectors(names, terms)
    gone = dict(zip(rng.permutation(names).tolist(), list(PHASES) * 2))
    transcript = Round(names, terms).run(inputs, gone)
    assert np.array_equal(sum_of(transcript), sum(inputs[name] for name in left(names, gone, "mask")))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_may_reach_the_ends_of_the_ring(bits):
    names, edge = names_of(3), 2 ** (bits - 1)
    terms = terms_for(3, length=2, bits=bits)
    inputs = {
        names[0]: np.array([edge - 5, 6 - edge]),
        names[1]: np.array([3, -4]),
        names[2]: np.array([1, -2]),
    }
    assert sum_of(Round(names, terms).run(inputs)).tolist() == [edge - 1, -edge]


def test_an_attempt_below_the_threshold_ends_and_is_not_made_again():
    names = names_of(4)
    terms = terms_for(4, 3)
    round_ = Round(names, terms)
    with pytest.raises(RoundAbandoned, match="2 members have sent a masked input; the threshold is 3"):
        round_.run(vectors(names, terms), {names[0]: "mask", names[1]: "mask"})
    with pytest.raises(ProtocolError, match="out of turn"):
        round_.coordinator.survivors()
    with pytest.raises(ProtocolError, match="out of turn"):
        round_.members[names[3]].advertise()


def test_survivors_reveal_the_seeds_of_their_surplus_and_no_other():
    names, gone = names_of(5), {"site-001": "mask", "site-002": "unmask"}
    chains = {name: SeedChain(name.encode().rjust(32), lowest=4, highest=5) for name in names}
    terms = terms_for(5, 3)
    total = Round(names, terms, chains=chains).run(vectors(names, terms), gone).total
    # Four survive; the one who vanishes in the last phase leaves its surplus in.
    assert total.survivors == ("site-000", "site-002", "site-003", "site-004")
    assert set(total.revealed) == {"site-000", "site-003", "site-004"}
    for name, link in total.revealed.items():
        assert seeds(link, 4, 4) == {4: chains[name].seeds()[4]}
        assert chains[name].seeds()[5] not in seeds(link, 4, 5).values()


def test_a_chain_gives_all_seeds_below_what_is_revealed():
    chain = SeedChain(bytes(32), lowest=3, highest=9)
    for survivors in range(3, 10):
        below = {number: seed for number, seed in chain.seeds().items() if number <= survivors}
        assert seeds(chain.reveal(survivors), 3, survivors) == below
    assert len(set(chain.seeds().values())) == 7
    assert chain.reveal(2) == b"" and seeds(b"", 3, 2) == {}
    with pytest.raises(ProtocolError, match="10 survivors"):
        chain.reveal(10)


def test_members_with_different_terms_of_the_noise_do_not_unmask():
    names = names_of(4)
    terms = terms_for(4, 3)
    round_ = Round(names, terms, noise=b"sigma 1")
    inputs = vectors(names, terms)

    def told_otherwise(name, delivery, numbers, masked=round_.masked):
        round_.noise = b"sigma 1" if name in names[:2] else b"sigma 0"
        return masked(name, delivery, numbers)

    round_.masked = told_otherwise
    with pytest.raises(ProtocolError, match="'site-002' has not signed the noise and the sharers"):
        round_.run(inputs)


class SealsNonsense(Member):
    """A member whose sealed shares most of its peers cannot open, and `honest` ones can."""

    honest = 0

    def share(self, cohort):
        sealed = super().share(cohort).sealed
        return SealedShares(
            self.name, {n: one if i < self.honest else bytes(60) for i, (n, one) in enumerate(sealed.items())}
        )


def round_with_nonsense(members, terms, honest):
    """A round in which the first member seals nonsense for all but some."""
    names = names_of(members)
    round_ = Round(names, terms)
    round_.members[names[0]] = SealsNonsense(names[0], signing_key(names[0]), round_.roster, terms)
    round_.members[names[0]].honest = honest
    return round_


@pytest.mark.parametrize("phase", ["mask", "sign", None])
def test_is_exact_though_some_cannot_open_what_a_member_has_sealed(phase):
    """As many as need it hold a share: it may have survived, and may have dropped out."""
    terms = terms_for(6, 4)
    inputs, first = vectors(names_of(6), terms), names_of(6)[0]
    gone = {first: phase} if phase else {}
    transcript = round_with_nonsense(6, terms, 4).run(inputs, gone)
    assert np.array_equal(sum_of(transcript), sum(inputs[name] for name in inputs if (name, phase) != (first, "mask")))


def test_is_unknown_if_too_few_can_open_what_a_member_has_sealed_and_the_member_is_named():
    terms = terms_for(6, 4)
    with pytest.raises(RoundAbandoned, match="3 shares of a secret of 'site-000' were shown; it takes 4"):
        round_with_nonsense(6, terms, 2).run(vectors(names_of(6), terms))


def test_the_input_is_left_as_it_is():
    names = names_of(3)
    terms = terms_for(3)
    inputs = vectors(names, terms)
    ring = {name: into_ring(numbers, 32) for name, numbers in inputs.items()}
    round_ = Round(names, terms)

    def masked(name, delivery, _):
        round_.members[name].open(delivery)
        return round_.members[name].mask(ring[name])

    round_.masked = masked
    transcript = round_.run(inputs)
    assert all(np.array_equal(out_of_ring(ring[name]), inputs[name]) for name in names)
    assert all(transcript.masked[name].payload != ring[name].tobytes() for name in names)
