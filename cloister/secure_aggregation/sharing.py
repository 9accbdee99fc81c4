"""Shamir's shares of a secret of 16 bytes, by name of the holder."""

from collections.abc import Collection, Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET = 16
"""Bytes of a secret, and of a share."""


def split(secret: bytes, holders: Collection[str], needed: int) -> dict[str, bytes]:
    """Cut a secret into one share for each holder.

    Args:
        secret: 16 bytes.
        holders: names, each once.
        needed: how many shares give the secret back, 2 to the number of holders.

    Guarantee:
        Fewer than `needed` shares are independent of the secret.

    Source:
        Shamir (1979), over GF(2¹²⁸), as pycryptodome has it.
    """
    shares = Shamir.split(needed, len(holders), secret, ssss=False)
    return {name: share for name, (_, share) in zip(sorted(holders), shares, strict=True)}


def combine(shares: Mapping[str, bytes], holders: Collection[str], needed: int) -> bytes:
    """Put a secret together again.

    Args:
        shares: holder -> share, at least `needed` of them.
        holders: the names that the secret was cut for.
        needed: how many shares give the secret back.
    """
    places = {name: place for place, name in enumerate(sorted(holders), start=1)}
    # One share more would be another polynomial.
    return Shamir.combine([(places[name], shares[name]) for name in sorted(shares)[:needed]], ssss=False)
