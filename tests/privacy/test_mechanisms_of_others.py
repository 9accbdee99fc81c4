"""Properties that another package's mechanism states are checked where that is possible."""

import dataclasses

import pytest
from private_strategies import LAYOUT, budget_in
from support import all_nodes, content, grid_of, one_round, random_models, zeros

from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.mechanisms.clipping import FixedClip
from cloister.privacy.mechanisms.gaussian import GaussianMean
from cloister.server.private_strategy import PrivateStrategy
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.utils.arrays import from_record
from cloister.utils.errors import PrivacyError

CHANGED = r"^mechanism 'global-dp' changed what a round costs$"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(GaussianMean):
    """A right mechanism, of which one answer is changed."""

    priced: tuple = (Gaussian(1.0),)
    against: tuple = ()
    later: float = 0.0
    skips: bool = False
    public: bool = False
    public_later: bool = False

    def events(self, layout, sampling):
        return tuple(dataclasses.replace(event, sampling=sampling) for event in self.priced)

    def caveats(self):
        return self.against

    @property
    def skips_empty_rounds(self):
        return self.skips

    @property
    def needs_public_cohort(self):
        return self.public

    def release(self, contributions):
        priced = (Gaussian(self.later),) if self.later else self.priced
        following = dataclasses.replace(self, priced=priced, public=self.public_later)
        return dataclasses.replace(super().release(contributions), following=following)


def strategy(inner=None, budget=None, **options):
    odd = Odd(noise_multiplier=1.0, clip=FixedClip(1.0), **options)
    return PrivateStrategy(inner or all_nodes(), odd, budget=budget)


def played(made, count=3):
    models = random_models(count)
    return one_round(made, grid_of(lambda node, _: content(models[node - 1]), count), zeros())


def test_one_that_claims_nothing_leaves_a_line_all_the_same(tmp_path):
    """Otherwise the next run on this data would claim as if this one had not been."""
    budget = budget_in(tmp_path)
    played(strategy(budget=budget, priced=(), against=("it is a sketch",)))
    assert [entry.event for entry in budget.ledger.entries] == [Unaccounted("it is a sketch")]


def test_one_that_claims_that_rounds_cost_nothing_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match=r"^mechanism 'global-dp' claims that a round costs nothing$"):
        played(strategy(priced=()))


@pytest.mark.parametrize("later", [0.5, 50.0])
def test_one_that_changes_its_price_ends_the_run(tmp_path, later):
    """The worst cost of a run is stated before it begins, and counted from its last mechanism when it ends early."""
    budget = budget_in(tmp_path)
    made = strategy(budget=budget, later=later)
    with pytest.raises(PrivacyError, match=CHANGED):
        played(made)
    assert made.events(LAYOUT) == (Gaussian(1.0),), "what is claimed of the run must not follow the change"
    assert [entry.event for entry in budget.ledger.entries] == [Gaussian(1.0)]


@pytest.mark.parametrize("first", [False, True])
def test_one_whose_price_rests_on_another_cohort_ends_the_run(first):
    """The run asks once, before it begins, whether the number of clients may be secret."""
    played(strategy(public=first, public_later=first))
    with pytest.raises(PrivacyError, match=CHANGED):
        played(strategy(public=first, public_later=not first))


def test_a_draw_is_counted_for_one_release_only():
    inner = FedAvg(train=Sampling(0.5, min_nodes=1, kind="poisson"))
    assert strategy(inner).events(LAYOUT)[0].sampling.kind == "poisson"
    with pytest.raises(PrivacyError, match=r"^mechanism 'global-dp' counts the draw of a round for several releases$"):
        strategy(inner, priced=(Gaussian(1.0), Gaussian(2.0))).events(LAYOUT)


def test_under_a_guarantee_a_round_without_replies_releases_noise():
    models = [zeros(), zeros()]
    grid = grid_of(lambda node, _: _gone(), len(models))
    arrays, _ = one_round(strategy(skips=True), grid, zeros())
    assert any((array != 0).any() for array in from_record(arrays).values())


def _gone():
    raise RuntimeError("gone")
