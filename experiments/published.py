"""The thesis' own accounts of DP-SGD on the clients. The product claims neither."""

from dataclasses import dataclass

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.client import recovered_multiplier


@dataclass(frozen=True)
class Setting:
    """A federation of DP-SGD clients, as the published formulas see it.

    Attributes:
        noise_multiplier: σ.
        batch_size: B.
        examples: |P|, of each client.
        epochs: E, in each round.
        participation: C, the share of the clients that train in a round.
        rounds: T.
    """

    noise_multiplier: float
    batch_size: int
    examples: int
    epochs: int
    participation: float
    rounds: int

    @property
    def local_steps(self) -> float:
        """Return the local steps of a round, k = E·|P|/B."""
        return self.epochs * self.examples / self.batch_size


def published_example(setting: Setting) -> Account:
    """Account for an example as the thesis does, by a heuristic.

    Batches are parts of a shuffled order, and the formula takes them for Poisson draws. It relies on a draw of clients,
    which the server sees, and which all steps of a round share.

    It counts T·k Gaussians of multiplier σ, Poisson-sampled with q = C·B/|P|.
    """
    rate = setting.participation * setting.batch_size / setting.examples
    event = Gaussian(setting.noise_multiplier, Sampling("poisson", rate))
    return Account().plus(event, round(setting.rounds * setting.local_steps))


def published_client(setting: Setting) -> Account:
    """Account for a client as the thesis does, by a heuristic (`PUBLISHED_CLIENT_REASONS` of the claims).

    It counts T Gaussians of multiplier σ/√k, Poisson-sampled with q = C.
    """
    multiplier = recovered_multiplier(setting.noise_multiplier, setting.local_steps)
    return Account().plus(Gaussian(multiplier, Sampling("poisson", setting.participation)), setting.rounds)
