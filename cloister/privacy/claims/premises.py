"""The conditions that a claim rests on, and how each of them is known.

A claim is (events → ε) × (premises of this mechanism, this runtime, this transport). Console, `privacy.json` and report
render the same values. An open premise makes a claim conditional; its sentence then stands in the first line.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from cloister.core.errors import PrivacyError

Known = Literal["enforced", "attested", "stated", "assumed"]
"""By this code in this run; by a party other than the adversary, with its reply; by an operator; not at all."""


@dataclass(frozen=True)
class Premise:
    """A condition that a claim rests on.

    Attributes:
        name: of the premise.
        sentence: what holds, to be read behind "it holds if".
        by: who sees to it.
        known: how.
        standing: whether it is one of the threat model, which every run rests on; it does not lower the status.
    """

    name: str
    sentence: str
    by: str
    known: Known
    standing: bool = False

    def __post_init__(self) -> None:
        if self.known not in get_args(Known):
            raise PrivacyError(f"premise {self.name}: known = {self.known!r}; one of {', '.join(get_args(Known))}")

    @property
    def is_open(self) -> bool:
        """Whether the run does not show that it holds."""
        return not self.standing and self.known in ("stated", "assumed")

    def known_as(self, known: Known) -> "Premise":
        """Return the same premise, known in another way."""
        return replace(self, known=known)


APART = Premise(
    "apart",
    "no node learns from the SuperLink who takes part, what another node sent, or whether a guess of it is right",
    "the SuperLink",
    "assumed",
)
AUTHENTIC = Premise("authentic", "each reply comes from the node that was asked", "the SuperLink", "assumed")
BUNDLE = Premise("bundle", "each site's node runs code that the site has checked", "the site's operator", "assumed")
ROSTER = Premise(
    "roster", "the signer of the roster does not work with the server", "the signer of the roster", "assumed"
)


def of_transport(simulated: bool, gated: bool, packed: bool) -> tuple[Premise, ...]:
    """Return the premises about the way of messages.

    Args:
        simulated: whether one process plays all parties, and no message leaves it.
        gated: whether the SuperLink refuses a node what belongs to another one.
        packed: whether all messages of the run were salted values.
    """
    apart: Known = "enforced" if simulated or (gated and packed) else "assumed"
    authentic: Known = "enforced" if simulated or gated else "assumed"
    return APART.known_as(apart), AUTHENTIC.known_as(authentic)


def condition(premises: Iterable[Premise]) -> str:
    """Return the open premises as one condition; empty without any."""
    found = [premise.sentence for premise in premises if premise.is_open]
    return f"it holds if {', and '.join(found)}" if found else ""


def to_json(premises: Iterable[Premise]) -> list[dict[str, Any]]:
    """Return premises as `privacy.json` holds them."""
    return [asdict(premise) for premise in premises]


def from_json(content: Iterable[dict[str, Any]]) -> tuple[Premise, ...]:
    """Return the premises that `to_json` wrote.

    Raises:
        TypeError: a field is missing or unknown.
        PrivacyError: a premise is known in no such way.
    """
    return tuple(Premise(**fields) for fields in content)
