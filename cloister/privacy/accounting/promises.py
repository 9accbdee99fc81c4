"""Wire format of a server's promise for a round: events, which hold for every mechanism."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import DistributedGaussian, Event, Gaussian, Pure, Repeated, from_json, to_json
from cloister.privacy.accounting.vocabulary import UNSAMPLED

MAX_EVENTS = 16
"""Most releases of one round that a node reads."""
MAX_LENGTH = 1000
"""Most characters of one release."""


def to_wire(events: Iterable[Event]) -> list[str]:
    """Return the releases of a round as strings for a message, without draws."""
    return [json.dumps(to_json(undrawn(event))) for event in events]


def from_wire(content: object) -> tuple[Event, ...]:
    """Return the releases of a message from the server, the strict inverse of `to_wire`.

    Raises:
        PrivacyError: the content is no list of releases with noise, or one of them claims a draw.
    """
    if not isinstance(content, Sequence) or isinstance(content, str) or not 0 < len(content) <= MAX_EVENTS:
        raise PrivacyError(f"what the server promises must be a list of 1 to {MAX_EVENTS} events")
    events = []
    for item in content:
        if not isinstance(item, str) or len(item) > MAX_LENGTH:
            raise PrivacyError(f"an event that the server promises must be a string of at most {MAX_LENGTH} characters")
        try:
            event = from_json(json.loads(item))
        except (ValueError, RecursionError):
            raise PrivacyError("an event that the server promises is no JSON") from None
        if not _has_noise(event) or undrawn(event) != event:
            raise PrivacyError("an event that the server promises must have noise, and count no draw of clients")
        events.append(event)
    return tuple(events)


def multiplier_of(promise: Iterable[Event]) -> float:
    """Return z of one Gaussian release with this total cost; 0: no bound.

    Gaussians add up by 1/z² = Σ 1/zᵢ². A pure ε counts as the Gaussian that bounds it (`Account.mu_squared`).
    """
    account = Account(promise)
    return 0.0 if account.is_empty else account.mu_squared() ** -0.5


def _has_noise(event: Event) -> bool:
    if isinstance(event, Repeated):
        return _has_noise(event.event)
    return isinstance(event, Pure | DistributedGaussian) or (isinstance(event, Gaussian) and event.noise_multiplier > 0)


def undrawn(event: Event) -> Event:
    """Return the event without a draw, which costs at least as much."""
    if isinstance(event, Repeated):
        return replace(event, event=replace(event.event, sampling=UNSAMPLED))
    return replace(event, sampling=UNSAMPLED) if isinstance(event, Gaussian) else event
