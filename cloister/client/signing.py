"""What a site signs with in secure aggregations."""

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.client.node import NodeConfig
from cloister.secure_aggregation.roster import Roster


@dataclass(frozen=True)
class Identity:
    """Who a site is in secure aggregations.

    Args:
        name: of the site on the roster.
        key: its long-term key.
        roster: of all who may take part.
    """

    name: str
    key: Ed25519PrivateKey = field(repr=False)
    roster: Roster


def identity(node: NodeConfig) -> Identity | None:
    """Who this site is; None: nodes have no signing keys yet."""
    return None
