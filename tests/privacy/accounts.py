"""Ways to draw clients, and what rounds of Gaussian noise are counted as."""

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling


def poisson(q):
    """Each client by itself, with probability q."""
    return Sampling("poisson", probability=q)


def cohorts(cohort, population):
    """So many of a population."""
    return Sampling("without-replacement", cohort=cohort, population=population)


def account(z, sampling=UNSAMPLED, rounds=1, relation="add-or-remove"):
    """Return the account of `rounds` rounds with noise multiplier z."""
    return Account(relation=relation).plus(Gaussian(z, sampling), rounds)
