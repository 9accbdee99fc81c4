"""Noise that clients add to their updates or gradients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cloister.core.arrays import Layout, from_record
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace
from cloister.server.prepare import Prepared


@dataclass(frozen=True)
class NoiseOnClient:
    """Noise of a client.

    Attributes:
        mechanism: its name.
        multiplier: in units of the bound.
        std: standard deviation on one number; None: it depends on the data.
        on: description of that number.
    """

    mechanism: str
    multiplier: float
    std: float | None
    on: str


def noise_on_clients(prepared: Prepared) -> Iterator[NoiseOnClient]:
    """Yield the noise of a client in the first round; empty if clients add none.

    Args:
        prepared: the run.
    """
    client = prepared.plan.config.privacy.client
    if not client.is_on:
        return
    z, mechanism = client.noise_multiplier, client.noise_on_update
    if client.clips_gradients:
        yield NoiseOnClient(client.name, z, z * client.bound, "a number of the sum of a batch's gradients")
    elif isinstance(mechanism, LocalGaussian):
        yield NoiseOnClient(client.name, z, z * client.bound, "a weight that a client sends")
    elif isinstance(mechanism, LocalLaplace):
        layout = Layout.of(prepared.plan.strategy.expected_reply(from_record(prepared.initial)))
        joint = zip(layout.names, layout.sizes, strict=True) if mechanism.per_layer else [("the model", layout.size)]
        for name, size in joint:
            std = math.sqrt(size + 1) / size * z * mechanism.radius
            yield NoiseOnClient(client.name, z, std, f"a weight of {name} that a client sends")
    else:
        yield NoiseOnClient(client.name, z, None, "a weight that a client sends")
