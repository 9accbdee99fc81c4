"""What a round of secure aggregation costs: processor time of a client and of the server, and bytes.

python benchmarks/secure_aggregation.py [members] [parameters]

All members run one after another in this process. One in ten drops out before it sends its masked input. Then all make
steps of one epoch, in a ring of 64 bits. Each stores its state as bytes between two messages.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

from cloister.secure_aggregation.coordinator import Coordinator
from cloister.secure_aggregation.epoch import EpochCoordinator, EpochKey, EpochMember, MaskedVector, RoundTerms
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.messages import Message
from cloister.secure_aggregation.primitives import into_ring, out_of_ring
from cloister.secure_aggregation.roster import Roster, public_bytes
from cloister.secure_aggregation.serialization import Serializable
from cloister.secure_aggregation.session import Complete, Terms

SERVER, STEPS = "server", 20
Result = TypeVar("Result")


class Meter:
    """Processor seconds by party and step, and bytes that went up and down, by party."""

    def __init__(self) -> None:
        """Nothing has been counted yet."""
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()

    def of(self, party: str, step: str, work: Callable[[], Result]) -> Result:
        """Do something and count its processor time."""
        start = time.process_time()
        result = work()
        self.seconds[party, step] += time.process_time() - start
        return result

    def send(self, party: str, step: str, message: Serializable) -> None:
        """Count the bytes of a message that a member sends, and the time to write it down."""
        self.up[party] += len(self.of(party, step, message.encode))

    def get(self, party: str, message: Serializable) -> None:
        """Count the bytes of a message that a member gets."""
        self.down[party] += len(message.encode())


def round_of(members: int, parameters: int, meter: Meter) -> None:
    """Run one round, and see that the sum is right."""
    names = [f"site-{number:04}" for number in range(members)]
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    roster = Roster({name: public_bytes(key) for name, key in keys.items()})
    graph = Complete(members * 7 // 10, members // 5)
    terms = Terms("benchmark", 1, graph, parameters)
    parties = {name: Member(name, keys[name], roster, terms) for name in names}
    server = Coordinator(roster, terms)
    values = into_ring(np.arange(parameters) % 1000 - 500, 32)

    def answers(step: str, told: Callable[[str], tuple[Message, ...]], among: list[str]) -> list:
        found = []
        for name in among:
            for message in told(name):
                meter.get(name, message)
            more = (values,) if step == "mask" else ()
            made = meter.of(name, step, lambda n=name, m=more: getattr(parties[n], step)(*told(n), *m))
            meter.send(name, step, made)
            found.append(made)
        return found

    advertised = answers("advertise", lambda _: (), names)
    cohort = meter.of(SERVER, "cohort", lambda: server.cohort(advertised))
    shares = answers("share", lambda _: (cohort,), names)
    deliveries = meter.of(SERVER, "deliveries", lambda: server.deliveries(shares))
    left = names[: members - members // 10]
    for name in left:
        meter.get(name, deliveries[name])
        meter.of(name, "open", lambda n=name: parties[n].open(deliveries[n]))
        (masked,) = answers("mask", lambda _: (), [name])
        meter.of(SERVER, "add", lambda m=masked: server.add(m))
    survivors = meter.of(SERVER, "survivors", server.survivors)
    signed = answers("sign", lambda _: (survivors,), left)
    signatures = meter.of(SERVER, "signatures", lambda: server.signatures(signed))
    shown = answers("unmask", lambda _: (signatures,), left)
    total = meter.of(SERVER, "total", lambda: server.total(shown))
    assert np.array_equal(out_of_ring(total.values), (np.arange(parameters) % 1000 - 500) * len(left))


def steps_of(members: int, parameters: int, first: Meter, later: Meter) -> None:
    """Make steps of one epoch, the first with its exchange of keys, and see that each sum is right."""
    names = [f"site-{number:04}" for number in range(members)]
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    roster = Roster({name: public_bytes(key) for name, key in keys.items()})
    graph, model = Complete(members * 7 // 10, members // 5), {"w": np.zeros(parameters, np.float32)}
    kept: dict[str, bytes] = {}
    values = np.arange(parameters) % 1000 - 500

    def terms(number: int) -> RoundTerms:
        return RoundTerms.about(number, graph, parameters, 64, b"", model)

    def begun(name: str) -> EpochKey:
        member = EpochMember(name, keys[name], roster, "benchmark")
        key = member.advertise(1)
        kept[name] = member.serialize()
        return key

    def stepped(name: str, number: int) -> MaskedVector:
        member = EpochMember.deserialize(name, keys[name], roster, "benchmark", kept[name])
        if told.names:
            member.agree(told)
        pads = member.pads(terms(number))
        kept[name] = member.serialize()
        return pads.mask(into_ring(values, 64))

    advertised = []
    for name in names:
        advertised.append(first.of(name, "step", lambda n=name: begun(n)))
        first.send(name, "step", advertised[-1])
    server = first.of(SERVER, "step", lambda: EpochCoordinator("benchmark", roster, 1, advertised))
    for number in range(1, STEPS + 1):
        meter = first if number == 1 else later
        told = meter.of(SERVER, "step", lambda n=number: server.begin(terms(n)))
        for name in names:
            meter.get(name, told)
            masked = meter.of(name, "step", lambda n=name, r=number: stepped(n, r))
            meter.send(name, "step", masked)
            meter.of(SERVER, "step", lambda m=masked: server.add(m))
        total = meter.of(SERVER, "step", server.total)
        assert np.array_equal(out_of_ring(total), values * members)


def main() -> None:
    """Measure and print."""
    members, parameters = (int(given) for given in (sys.argv[1:] + ["20", "1200000"][len(sys.argv) - 1 :]))
    meter = Meter()
    round_of(members, parameters, meter)
    table = Table("who", "step", "processor seconds")
    steps = ("advertise", "share", "open", "mask", "sign", "unmask")
    # The first site answers to the end.
    for step in steps:
        table.add_row("a client", step, f"{meter.seconds['site-0000', step]:.3f}")
    table.add_row("a client", "all", f"{sum(meter.seconds['site-0000', step] for step in steps):.3f}")
    for (party, step), seconds in meter.seconds.items():
        if party == SERVER:
            table.add_row(party, step, f"{seconds:.3f}")
    plain = 4 * parameters
    table.add_row("a client", "bytes up, of plain FedAvg's", f"{meter.up['site-0000'] / plain:.3f}")
    table.add_row("a client", "bytes down, beside the model", f"{meter.down['site-0000'] / plain:.3f}")
    first, later = Meter(), Meter()
    steps_of(members, parameters, first, later)
    for title, found, count in (("first step of an epoch", first, 1), ("later step", later, STEPS - 1)):
        for party in ("site-0000", SERVER):
            who = SERVER if party == SERVER else "a client"
            table.add_row(who, title, f"{found.seconds[party, 'step'] / count:.4f}")
        table.add_row("a client", f"{title}, bytes up", f"{found.up['site-0000'] / count / plain:.3f}")
        table.add_row("a client", f"{title}, bytes down", f"{found.down['site-0000'] / count / plain:.3f}")
    Console().print(f"{members} members, {parameters} parameters")
    Console().print(table)


if __name__ == "__main__":
    main()
