"""Seeds of surplus noise in a hash chain: one link reveals all seeds up to a number, and none above it."""

from dataclasses import dataclass, field

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import text
from cloister.secure_aggregation.keys import derived
from cloister.secure_aggregation.written import NUMBER, Serializable, sized

LINK = 32
"""Bytes of a link of the chain, and of a seed."""


@dataclass(frozen=True)
class SeedChain(Serializable):
    """The seeds of components `lowest` to `highest` of a member's noise.

    Each link is derived from the link above it by a one-way function. So the link of component j gives the seeds of all
    components up to j.

    Args:
        top: the link of the highest component, 32 bytes from the operating system.
        lowest: number of the lowest component that can be revealed.
        highest: number of the highest component: the number of members.
    """

    top: bytes = field(repr=False, metadata=sized(LINK))
    lowest: int = field(metadata=NUMBER)
    highest: int = field(metadata=NUMBER)

    def reveal(self, survivors: int) -> bytes:
        """Return the link for this number of survivors.

        It gives the seeds of all components up to this number, and of none above. It is empty below `lowest`.

        Raises:
            ProtocolError: there are more survivors than components.
        """
        if survivors > self.highest:
            raise ProtocolError(f"{survivors} survivors, of a chain of seeds for {self.highest} at most")
        if survivors < self.lowest:
            return b""
        link = self.top
        for _ in range(self.highest - survivors):
            link = _below(link)
        return link

    def seeds(self) -> dict[int, bytes]:
        """Return the seeds of all components, for the member that makes the noise."""
        return seeds(self.top, self.lowest, self.highest)


def seeds(link: bytes, lowest: int, highest: int) -> dict[int, bytes]:
    """Return the seeds of components that a revealed link gives.

    Args:
        link: of component `highest`, as a survivor revealed it.
        lowest: number of the lowest component.
        highest: number of survivors.

    Returns:
        Number of the component -> seed of 32 bytes; empty if the link is empty.
    """
    found = {}
    for number in range(highest if link else 0, lowest - 1, -1):
        found[number] = derived(link, text("seed of noise", number), LINK)
        link = _below(link)
    return found


def _below(link: bytes) -> bytes:
    return derived(link, text("link below"), LINK)
