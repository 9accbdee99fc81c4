"""Roster of a federation: the sites' public signing keys, signed by a key that is in no kit.

    OUT/roster/roster.key       signs rosters: its owner can invent sites, so the server's operator must not have it
    OUT/roster/roster.pub       its public key, and
    OUT/roster/roster.signed    the newest roster: both in the kits of the sites and of the operator
    OUT/roster/keys/NAME.pub    the public signing key of a site, as it was collected there

The server's kit contains none of these files. A server receives the roster from the sites, and no party has to trust
its copy.

A site makes its signing key when it first starts, and no kit has one. In older kits the provisioner made the signing
keys, so it can sign as those sites. So the roster states of each key whether the site made it.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.deploy.provision.federation import Site
from cloister.deploy.provision.folder import FOLDER, ISSUED, PUBLIC, ROSTER_KEY, SECRET, Kits
from cloister.flower import flower_home
from cloister.secure_aggregation.roster import Roster, SignedRoster, opened, sign_roster
from cloister.utils.errors import ConfigError, ProtocolError
from cloister.utils.keys import (
    REMEDY,
    fingerprint,
    new_signing_key,
    provisioner_of,
    public_half,
    signing_key,
    verifying_key,
)

AUTHORITY, SIGNED = "roster.pub", "roster.signed"
"""Files in the folder `roster`, and in the kits of the sites and of the operator."""


def key_file(name: str) -> str:
    """Return the path of a site's public signing key in the folder of all kits."""
    return f"roster/keys/{name}.pub"


def entry(name: str) -> str:
    """Return the record's key for the public signing key of a site.

    Its value is empty for a removed site.
    """
    return f"signing/{name}"


def own(name: str) -> str:
    """Return the record's key for a public signing key that the site made itself."""
    return f"signing-key-of-its-own/{name}"


def checked_key(path: Path) -> bytes:
    """Read and validate a public signing key that a site made itself.

    Raises:
        ConfigError: the file is absent, or contains no Ed25519 key in OpenSSH format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"signing key {path}: {error.strerror}") from None
    verifying_key(content, f"signing key {path}")
    return content


def forget(kits: Kits, member: str) -> None:
    """Forget the signed rosters, or a site's signing key, as if they had never existed.

    A signing key that the site made itself stays: no kit contains it.
    """
    if member == "roster":
        for name in (AUTHORITY, SIGNED):
            kits.path(f"roster/{name}").unlink(missing_ok=True)
    elif member.startswith("sites/"):
        name = Path(member).name
        if kits.issued.get(entry(name)) != kits.issued.get(own(name)):
            kits.issued.pop(entry(name), None)
            kits.path(key_file(name)).unlink(missing_ok=True)


def add_site(kits: Kits, site: Site) -> None:
    """Store the public signing key of a site if it is missing.

    Args:
        kits: folder of all kits.
        site: of the federation.
    """
    name = site.name
    if kits.issued.get(entry(name)) == "":
        kits.notes.append(
            f"site {name} was taken off the roster: take it out of federation.toml, or --remake sites/{name}"
        )
    elif not kits.has(key_file(name)):
        if site.public_signing_key:
            kits.notes.append(f"site {name} puts its own private signing key in its kit as signing.key")
            key = checked_key(Path(site.public_signing_key))
        else:
            key = _in_kit(kits, name) or kits.issued.get(entry(name), "").encode()
        if key:
            kits.write(key_file(name), key, PUBLIC)
        else:
            kits.notes.append(
                f"site {name} is not on the roster: put the signing.pub that its first start writes here as "
                f"{key_file(name)}, and run this again"
            )
    elif site.public_signing_key and checked_key(Path(site.public_signing_key)) != kits.read(key_file(name)):
        kits.notes.append(f"{key_file(name)} is not the public-signing-key of federation.toml; remove it to replace it")


def _in_kit(kits: Kits, name: str) -> bytes:
    """Return the public half of the signing key in an older kit.

    It is empty if this folder has no such kit.
    """
    private = f"sites/{name}/signing.key"
    return public_half(signing_key(kits.read(private), str(kits.path(private)))) if kits.has(private) else b""


def write_roster(kits: Kits, sites: Sequence[Site]) -> None:
    """Sign a roster of the sites with keys, and copy it into the kits in this folder.

    An equal roster is not signed again.

    Args:
        kits: folder of all kits.
        sites: of the federation.

    Raises:
        ConfigError: a file contains no public key, or two sites have the same one.
    """
    if kits.is_gone("roster"):
        return
    if not kits.has(ROSTER_KEY):
        kits.write(ROSTER_KEY, new_signing_key(), SECRET)
    kits.path("roster/keys").mkdir(mode=FOLDER, exist_ok=True)
    keys = {}
    for site in sites:
        if kits.has(key_file(site.name)) and kits.issued.get(entry(site.name)) != "":
            content = kits.read(key_file(site.name))
            keys[site.name] = _raw(content, str(kits.path(key_file(site.name))))
            _note_maker(kits, site, content)
    if keys:
        _sign(kits, keys)
    _spread(kits, ["operator", *(f"sites/{site.name}" for site in sites)])


def _note_maker(kits: Kits, site: Site, content: bytes) -> None:
    """Record a key that the site made itself.

    It is the key of federation.toml, or a key that replaced the key of the record. Older kits contain private keys made
    by the provisioner. A folder without a record may have had such kits.
    """
    key, known = _raw(content, site.name), kits.issued.get(entry(site.name))
    if (inside := _in_kit(kits, site.name)) and _raw(inside, site.name) == key:
        return
    is_stated = site.public_signing_key and _raw(checked_key(Path(site.public_signing_key)), site.name) == key
    is_new = _raw(known.encode(), site.name) != key if known else not kits.has(f"roster/{SIGNED}") or kits.has(ISSUED)
    if (is_stated or is_new) and kits.issued.get(own(site.name)) != content.decode():
        kits.issued[own(site.name)] = content.decode()
        told = fingerprint(verifying_key(content, site.name))
        kits.notes.append(f"site {site.name} has made the signing key {told}: compare that with what it has printed")


def replace(kits: Kits, name: str, path: Path, expected: str = "") -> str:
    """Replace the key of a site on the roster, and sign a new roster.

    Args:
        kits: folder of all kits.
        name: of the site.
        path: file of its new public signing key.
        expected: fingerprint that the site has communicated; empty: it is not compared.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: the site is not on the roster, the key has another fingerprint or belongs to another site, or the
            key that signs rosters is absent.
    """
    keys, content = dict(_newest(kits).roster.keys), checked_key(path)
    if name not in keys:
        raise ConfigError(f"no site {name!r} is on the roster; there are: {', '.join(keys) or 'none'}")
    found = fingerprint(verifying_key(content, str(path)))
    if expected and found != expected:
        raise ConfigError(f"--signing-fingerprint {expected!r} is not that of {path}, which is {found}")
    keys[name] = _raw(content, str(path))
    if others := [other for other, key in keys.items() if key == keys[name] and other != name]:
        raise ConfigError(f"the key {path} is that of {others[0]}; the site has to make a new one")
    kits.write(key_file(name), content, PUBLIC)
    _change(kits, {entry(name): content.decode(), own(name): content.decode()}, keys)
    return found


def strike(kits: Kits, name: str) -> bool:
    """Remove a site from the roster permanently, and sign a new roster.

    Args:
        kits: folder of all kits.
        name: of the site.

    Returns:
        Whether it was on the roster.

    Raises:
        ConfigError: the roster in this folder was not signed by the key in this folder.
    """
    if not kits.has(ROSTER_KEY):
        return False
    keys = dict(_newest(kits).roster.keys)
    was_there = keys.pop(name, None) is not None
    if was_there:
        kits.path(key_file(name)).unlink(missing_ok=True)
        _change(kits, {entry(name): ""}, keys)
    return was_there


def roster_in(kit: Path) -> SignedRoster | None:
    """Return the roster in an operator's kit, or None if there is none.

    It is verified by the kit's public roster key.

    Raises:
        ConfigError: the file is no roster, or has the signature of another key.
    """
    signed, authority = kit / SIGNED, kit / AUTHORITY
    try:
        if not signed.is_file():
            return None
        return _genuine(signed.read_bytes(), verifying_key(authority.read_bytes(), str(authority)), str(signed))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def on_roster() -> list[dict[str, str]]:
    """Return the sites on the roster in the operator's kit, for `cloister status`.

    Each has `name`, `fingerprint` and `made-by`.

    Raises:
        ConfigError: the file is no roster, or has the signature of another key than the kit's public roster key.
    """
    signed = roster_in(flower_home())
    keys = sorted(signed.roster.keys.items()) if signed else []
    return [
        {
            "name": name,
            "fingerprint": fingerprint(Ed25519PublicKey.from_public_bytes(key)),
            "made-by": "the provisioner" if signed and name in signed.roster.by_provisioner else "the site",
        }
        for name, key in keys
    ]


def _change(kits: Kits, recorded: Mapping[str, str], keys: Mapping[str, bytes]) -> None:
    """Record the change of a site's key, then sign.

    If a call is interrupted between the two, the next one completes it.
    """
    kits.issued = {**kits.read_issued(), **recorded}
    kits.write_issued(kits.issued)
    _sign(kits, keys)
    here = ["operator", *sorted(f"sites/{path.name}" for path in kits.path("sites").glob("*") if path.is_dir())]
    _spread(kits, here)
    for member in here:
        kits.sum_up(member)


def _sign(kits: Kits, keys: Mapping[str, bytes]) -> None:
    """Sign a roster with these keys and their makers, if the newest one differs."""
    records = {name: kits.issued.get(own(name)) for name in keys}
    at_site = frozenset(name for name, made in records.items() if made and _raw(made.encode(), name) == keys[name])
    try:
        roster = Roster(dict(keys), at_site)
    except ProtocolError as error:
        raise ConfigError(f"{kits.path('roster/keys')}: {error}") from None
    if roster.by_provisioner:
        kits.notes.append(f"counted as working with the server: {provisioner_of(roster.by_provisioner)}; {REMEDY}")
    before = _newest(kits) if kits.has(f"roster/{SIGNED}") else None
    if before is not None and before.roster == roster:
        return
    # By the clock, so that numbers grow even if a roster was lost.
    serial = max(int(time.time()), before.serial + 1 if before else 1)
    kits.write(f"roster/{SIGNED}", sign_roster(roster, serial, _authority(kits)), PUBLIC)
    kits.notes.append(f"the roster has changed: give roster/{SIGNED} to every site and operator")


def _newest(kits: Kits) -> SignedRoster:
    """Return the newest roster, verified by the key in this folder.

    A roster of another key is refused, so that this folder does not sign it again.
    """
    if not kits.has(ROSTER_KEY) or not kits.has(f"roster/{SIGNED}"):
        raise ConfigError(f"{ROSTER_KEY} and a roster signed with it are not in {kits.folder}; run this where they are")
    return _genuine(kits.read(f"roster/{SIGNED}"), _authority(kits).public_key(), str(kits.path(f"roster/{SIGNED}")))


def _genuine(content: bytes, authority: Ed25519PublicKey, place: str) -> SignedRoster:
    try:
        signed = opened(content)
        signed.require(authority)
    except ProtocolError as error:
        raise ConfigError(f"{place}: {error}") from None
    return signed


def _spread(kits: Kits, kits_here: Sequence[str]) -> None:
    """Copy the roster and its public key into the kits in this folder."""
    kits.add(f"roster/{AUTHORITY}", public_half(_authority(kits)), PUBLIC)
    for member in kits_here:
        for name in (AUTHORITY, SIGNED) if kits.has(f"roster/{SIGNED}") else (AUTHORITY,):
            content, place = kits.read(f"roster/{name}"), f"{member}/{name}"
            if kits.path(member).is_dir() and not (kits.has(place) and kits.read(place) == content):
                kits.write(place, content, PUBLIC)


def _authority(kits: Kits) -> Ed25519PrivateKey:
    """Return the key in this folder that signs rosters."""
    return signing_key(kits.read(ROSTER_KEY), str(kits.path(ROSTER_KEY)))


def _raw(content: bytes, place: str) -> bytes:
    return verifying_key(content, place).public_bytes_raw()
