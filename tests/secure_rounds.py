"""A secure aggregation from both ends: members, a coordinator, and who drops out when."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from cloister.client.keys import make_key
from cloister.deploy.provision import rosters
from cloister.secure_aggregation.coordinator import Coordinator
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.primitives import into_ring, out_of_ring
from cloister.secure_aggregation.roster import Roster, public_bytes
from cloister.secure_aggregation.session import Complete, Terms

PHASES = ("advertise", "share", "mask", "sign", "unmask")


@lru_cache(maxsize=1024)
def signing_key(name):
    """The long-term key of a name, the same in every round."""
    return Ed25519PrivateKey.from_private_bytes(name.encode().rjust(32, b"."))


def openssh(key):
    """The two halves of a key, as files of a site have them."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def collect(folder, *names):
    """Let sites make their signing keys, as their first starts do, and put the public halves where kits are made."""
    for name in names:
        state = folder / "sites" / name / "state"
        state.mkdir(parents=True, exist_ok=True)
        make_key(state)
        (folder / rosters.key_file(name)).write_bytes((state / "signing.pub").read_bytes())


def names_of(members):
    return [f"site-{number:03}" for number in range(members)]


def roster_of(names):
    return Roster({name: public_bytes(signing_key(name)) for name in names})


@lru_cache
def roster_of_all(members):
    return roster_of(names_of(members))


def terms_for(members, threshold=None, colluding=0, length=5, graph=None, **other):
    graph = graph or Complete(threshold or members // 2 + 1, colluding)
    terms = Terms("run-1", other.pop("round", 1), graph, length, **other)
    return terms.under(roster_of_all(members))


def vectors(names, terms, seed=0):
    """A vector of whole numbers for each name, small enough for their sum."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-1000, 1000, terms.length) for name in names}


@dataclass(frozen=True)
class Transcript:
    """All that the server has sent and received, and what it made of it."""

    cohort: object
    shares: dict
    deliveries: dict
    masked: dict
    survivors: object
    signatures: object
    shown: dict
    total: object


class Round:
    """One attempt with honest parties, as far as they answer: `gone` names who drops out before which phase.

    Every message goes through its bytes, as it would over a network.
    """

    def __init__(self, names, terms, kind=Member, noise=b"", chains=None):
        self.names, self.terms, self.noise, self.chains = names, terms, noise, chains or {}
        self.roster, self.send = roster_of(names), sent
        self.members = {n: kind(n, signing_key(n), self.roster, terms) for n in names}
        self.coordinator = Coordinator(self.roster, terms, noise)

    def run(self, inputs, gone=None):
        members, server = self.members, self.coordinator
        last = {name: PHASES.index(phase) for name, phase in (gone or {}).items()}

        def there(phase, among):
            return [name for name in among if last.get(name, len(PHASES)) > PHASES.index(phase)]

        cohort = server.cohort([self.send(members[n].advertise()) for n in there("advertise", self.names)])
        shares = {n: self.send(members[n].share(self.send(cohort))) for n in there("share", cohort.names)}
        deliveries = server.deliveries(shares.values())
        masked = {n: self.send(self.masked(n, deliveries[n], inputs[n])) for n in there("mask", deliveries)}
        for one in masked.values():
            server.add(one)
        survivors = server.survivors()
        signed = [self.send(members[n].sign(self.send(survivors))) for n in there("sign", survivors.names)]
        signatures = server.signatures(signed)
        shown = {n: self.send(members[n].unmask(self.send(signatures))) for n in there("unmask", signatures.signatures)}
        total = server.total(shown.values())
        return Transcript(cohort, shares, deliveries, masked, survivors, signatures, shown, total)

    def masked(self, name, delivery, numbers):
        values = into_ring(numbers, self.terms.bits)
        self.members[name].open(self.send(delivery))
        return self.members[name].mask(values, self.noise, self.chains.get(name))


def sent(message):
    """A message as it arrives."""
    return type(message).decode(message.encode())


def next_round(terms):
    return replace(terms, round=terms.round + 1)


def sum_of(transcript):
    """Return the server's knowledge, as whole numbers."""
    return out_of_ring(transcript.total.values)
