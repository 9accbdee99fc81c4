"""Noise of the clients in place of `'auto'`: the smallest that their budget allows, from public numbers alone."""

from collections.abc import Collection, Iterable
from functools import partial

from cloister.config import variants
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import RunConfig, parse
from cloister.privacy.accounting.events import Event, Gaussian, Pure
from cloister.privacy.accounting.filters import Filter, OverflowFilter, cost, filter_for, minimum_multiplier
from cloister.privacy.dpsgd.local_steps import Holders, LocalSteps, multiplier_of_each
from cloister.utils.errors import ConfigError
from cloister.utils.text import rounded_up


def calibrated(config: RunConfig, sizes: Collection[LocalSteps] = (), shared: Collection[Holders] = ()) -> RunConfig:
    """Return the configuration with a number in place of `'auto'` for the noise of the clients.

    It is the smallest multiplier, rounded up to four digits, with which a client that trains in all rounds stays within
    `privacy.client-max-epsilon`, and with it each example or group over all clients that hold data of it. The result
    depends on the configuration and on public sizes, and on no release.

    Args:
        config: of the run.
        sizes: the private steps of each client in a round, for `dp-sgd`; empty: they are unknown.
        shared: each combination of clients that hold data of one unit; empty: each unit is at one client.

    Raises:
        ConfigError: the noise depends on unknown sizes, or no noise suffices.
    """
    client = config.privacy.client
    if not client.is_calibrated:
        return config
    if config.secure_aggregation.enabled:  # a shared step costs clients of all sizes the same
        sizes = (config.privacy.dp_sgd.steps(1, 1, 1),)
    if client.clips_gradients and not sizes:
        unit = config.task.group or "example"
        raise ConfigError(
            f"{client.noise_key} = 'auto' needs the number of {unit}s of each client, and a server has that in "
            "`cloister run` alone; for sites of N and M, set the number that `cloister plan --public-size N "
            f"--public-size M` prints with these settings, which is right if each {unit} is at one site"
        )
    found = smallest_multiplier(config.privacy, sizes, config.num_rounds, shared)
    return parse(config.flat() | {client.noise_key: rounded_up(found)})


def smallest_multiplier(
    privacy: PrivacyConfig, sizes: Collection[LocalSteps], rounds: int, shared: Collection[Holders] = ()
) -> float:
    """Return the smallest multiplier with which each client can train in all rounds.

    Args:
        privacy: with `privacy.client-max-epsilon`.
        sizes, shared: as for `calibrated`.
        rounds: number of rounds.

    Raises:
        ConfigError: no multiplier suffices, or δ does not cover the steps of all rounds.
    """
    limit, delta = privacy.client.max_epsilon, privacy.target_delta
    chosen, draws = filter_for("renyi", limit, delta), OverflowFilter()

    def spent(by: Filter, multiplier: float) -> float:
        each = events_of_clients(privacy, sizes, multiplier, shared)
        return rounds * max(sum(cost(by, event) for event in events) for events in each)

    if (overflow := spent(draws, 1.0)) > draws.limit(limit, delta):
        raise ConfigError(draws.refusal(0.0, overflow, limit, delta, "a client of this run"))
    budget = f"privacy.client-max-epsilon = {limit:g}"
    return minimum_multiplier(partial(spent, chosen), chosen.limit(limit, delta), budget)


def events_of_clients(
    privacy: PrivacyConfig, sizes: Iterable[LocalSteps], multiplier: float, shared: Iterable[Holders] = ()
) -> list[list[Event]]:
    """Return the events of one round for a unit of each known client size, and of each combination of holders.

    With noise on the update, one entry stands for every client. The list is empty if the events are unknown.

    Args:
        privacy: of the run.
        sizes, shared: as for `calibrated`.
        multiplier: of the noise.
    """
    choice: list[Event] = [Pure(privacy.choice_epsilon)] if privacy.chooses_privately else []
    if privacy.client.clips_gradients:
        holders = [*((steps,) for steps in sizes), *shared]
        return [
            [event for steps in each for event in (steps.event(multiplier_of_each(each, multiplier)), *choice)]
            for each in holders
        ]
    return [[Gaussian(multiplier), *choice]] if isinstance(privacy.client, variants.GaussianPrivacy) else []
