"""The conditions that a claim rests on, and how each of them is known.

A claim is (events → ε) × (premises of this mechanism, this runtime, this transport). Mechanisms and transports declare
theirs. Console, `privacy.json`, reports, dashboard and `docs/threat-model.md` render the same values. An open premise
makes a claim conditional; its sentence then stands in the first line.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, get_args

from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.events import to_json as event_to_json
from cloister.utils.errors import PluginError, PrivacyError
from cloister.utils.files import JsonTable

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
        """Return whether the run does not show that it holds."""
        return not self.standing and self.known in ("stated", "assumed")

    def known_as(self, known: Known) -> "Premise":
        """Return the same premise, known in another way."""
        return replace(self, known=known)


class Contributor:
    """The base of what a claim rests on: the mechanisms of servers and of clients, and transports.

    Attributes:
        premises: that the class contributes to a claim. A subclass declares or inherits them.

    Raises:
        PluginError: a subclass has none; its definition fails, and so does the import of its module.
    """

    premises: ClassVar[tuple[Premise, ...]] = ()

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        found = cls.premises
        if not abstract and not (found and isinstance(found, tuple) and all(isinstance(one, Premise) for one in found)):
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__} has premises = {found!r}, and a claim must rest on some: declare "
                "premises = (cloister.CRYPTOGRAPHY,) in the class, with a cloister.Premise for each further condition"
            )


APART = Premise(
    "apart",
    "no node learns from the SuperLink, while its database has room, who takes part, what another node sent, or "
    "whether a guess of it is right",
    "the SuperLink",
    "assumed",
)
AUTHENTIC = Premise("authentic", "each reply comes from the node that was asked", "the SuperLink", "assumed")
INSTRUCTED = Premise(
    "instructed", "each message that a node answers comes from the server of its run", "the SuperLink", "assumed"
)
CARRIED = (APART, AUTHENTIC, INSTRUCTED)
"""The premises of every claim about the way of messages."""
BUNDLE = Premise("bundle", "each site's node runs code that the site has checked", "the site's operator", "assumed")
ROSTER = Premise(
    "roster", "the signer of the roster does not work with the server", "the signer of the roster", "assumed"
)
KEYS = Premise(
    "keys", "each member made its own signing key, or counts as colluding", "the member's operator", "assumed"
)
UNBROKEN = Premise(
    "unbroken",
    "the run was not broken off, and resumed, because of what had been released",
    "the server's operator",
    "assumed",
)
UNCHOSEN = Premise(
    "unchosen",
    "no run was chosen, ended early or resumed by what had been released",
    "the server's operator",
    "assumed",
)
BUDGET_FIXED = Premise(
    "budget-fixed", "no budget was set or changed because of what had been released", "the server's operator", "assumed"
)
EARLIER = Premise("earlier", "the premises of the other runs in the ledger hold", "their operators", "assumed")

CRYPTOGRAPHY = Premise(
    "cryptography",
    "ciphers, signatures, hashes and the operating system's random numbers hold",
    "their authors",
    "assumed",
    standing=True,
)
KERNELS = Premise(
    "kernels",
    "TensorFlow and PyTorch compute equal calls equally, and each row of a batch by itself, as on x86-64 in the graphs "
    "that `cloister check kernels` tries; PyTorch modules in turn keep nothing of a unit outside themselves",
    "the site's operator",
    "assumed",
    standing=True,
)
KEY_AGREEMENT = Premise(
    "key-agreement",
    "an X25519 key that two members share, and keys derived from it, are secret to all others",
    "their authors",
    "assumed",
    standing=True,
)
TIME = Premise(
    "time",
    "the time of a reply tells nothing about its units (min-reply-seconds above the longest training)",
    "the site's operator",
    "assumed",
    standing=True,
)
COLLUSION = Premise(
    "collusion", "no more members collude with the server than the claim names", "the members", "assumed", standing=True
)


def of_transport(simulated: bool, gated: bool, packed: bool, signed: bool = False) -> tuple[Premise, ...]:
    """Return the premises about the way of messages.

    Args:
        simulated: whether one process plays all parties, and no message leaves it.
        gated: whether the SuperLink refuses a node what belongs to another one.
        packed: whether all messages of the run were salted values.
        signed: whether the server checked a signature of the node under each reply that counted. The node that was
            asked attests it then: no other client can, which is the adversary of a claim that rests on it.
    """
    apart: Known = "enforced" if simulated or (gated and packed) else "assumed"
    authentic: Known = "enforced" if simulated or gated else "attested" if signed else "assumed"
    instructed: Known = "enforced" if simulated or gated else "assumed"
    return APART.known_as(apart), AUTHENTIC.known_as(authentic), INSTRUCTED.known_as(instructed)


def of_runtime(in_process: bool) -> tuple[Premise, ...]:
    """Return the premises about parties, which hold where one process plays all of them; none elsewhere.

    Args:
        in_process: whether messages reach their nodes without a SuperLink.
    """
    return tuple(premise.known_as("enforced") for premise in (BUNDLE, ROSTER, KEYS)) if in_process else ()


def known_by(premises: Iterable[Premise], shown: Iterable[Premise]) -> tuple[Premise, ...]:
    """Return premises, each known as transport and runtime show it.

    Args:
        premises: of a claim.
        shown: by transport and runtime. A premise that the claim does not rest on adds nothing.
    """
    by_name = {premise.name: premise for premise in shown}
    return tuple(by_name.get(premise.name, premise) for premise in premises)


def listed(premises: Iterable[Premise]) -> str:
    """Return all premises by name with how they are known, then the standing assumptions.

    Args:
        premises: of a claim.
    """
    found = tuple(premises)
    own = ", ".join(f"{premise.name} {premise.known}" for premise in found if not premise.standing)
    standing = ", ".join(premise.name for premise in found if premise.standing)
    return "; ".join(filter(None, (own, standing and f"standing assumptions: {standing}")))


def explained(premises: Iterable[Premise]) -> str:
    """Return all premises in words, each with its name and how it is known.

    Args: as `listed`.
    """
    return "; ".join(
        f"{each.sentence} ({each.name}: {'standing assumption' if each.standing else each.known})" for each in premises
    )


def named(premises: Iterable[Premise]) -> str:
    """Return the names of the open premises; empty without any."""
    return ", ".join(premise.name for premise in premises if premise.is_open)


def condition(premises: Iterable[Premise]) -> str:
    """Return the open premises as one condition; empty without any."""
    found = [premise.sentence for premise in premises if premise.is_open]
    return f"it holds if {', and '.join(found)}" if found else ""


def to_json(premises: Iterable[Premise]) -> list[dict[str, object]]:
    """Return premises as `privacy.json` holds them."""
    return [asdict(premise) for premise in premises]


def from_json(content: Iterable[JsonTable]) -> tuple[Premise, ...]:
    """Return the premises that `to_json` wrote.

    Raises:
        TypeError: a field is missing or unknown.
        PrivacyError: a premise is known in no such way.
    """
    return tuple(Premise(**fields) for fields in content)


MAX_BYTES = 1 << 16
"""Longest attestation that is read; one of Cloister has 300 bytes."""
MAX_SIZE = 10**9
"""Largest public size of a node."""


@dataclass(frozen=True)
class Attestation:
    """The releases in one reply, as its node states them.

    Attributes:
        mechanism: of the client, as in `privacy.client`.
        unit: whose protection the events are about.
        events: of this reply, about one unit.
        size: public number of units that the events were computed for; 0: they depend on none.
        group: the array that names the group of a row; empty: a row is a unit.
        checked: whether the policy names the app bundle by its digest. The bundle's own code says so.
    """

    mechanism: str
    unit: str
    events: tuple[Event, ...]
    size: int = 0
    group: str = ""
    checked: bool = False

    def to_bytes(self) -> bytes:
        """Return the attestation as a message carries it."""
        return json.dumps(vars(self) | {"events": [event_to_json(event) for event in self.events]}).encode()


def size_and_checked(content: bytes) -> tuple[int, bool] | None:
    """Return the two fields of an attestation that its node decides; None if the content has none.

    Args:
        content: of a message; a client may write anything.
    """
    try:
        fields = json.loads(content)
        size, checked = fields["size"], fields["checked"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    valid = type(size) is int and 0 <= size <= MAX_SIZE and type(checked) is bool
    return (size, checked) if valid else None
