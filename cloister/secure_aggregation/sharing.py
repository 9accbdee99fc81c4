"""Shamir's secret sharing for secrets of 16 bytes, with shares by name of the holder."""

from collections.abc import Collection, Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET = 16
"""Bytes of a secret, and of a share."""


def split(secret: bytes, holders: Collection[str], needed: int) -> dict[str, bytes]:
    """Split a secret into one share for each holder.

    Args:
        secret: 16 bytes.
        holders: names, each once.
        needed: number of shares that recover the secret, 2 to the number of holders.

    Guarantee:
        Fewer than `needed` shares are independent of the secret.

    Source:
        Shamir (1979), over GF(2¹²⁸), by pycryptodome.
    """
    shares = Shamir.split(needed, len(holders), secret, ssss=False)
    return {name: share for name, (_, share) in zip(sorted(holders), shares, strict=True)}


def combine(shares: Mapping[str, bytes], holders: Collection[str], needed: int) -> bytes:
    """Recover a secret from its shares.

    Args:
        shares: holder -> share, at least `needed` of them.
        holders: the names that the secret was split for.
        needed: number of shares that recover the secret.
    """
    places = {name: place for place, name in enumerate(sorted(holders), start=1)}
    # The interpolation must use exactly `needed` shares.
    return Shamir.combine([(places[name], shares[name]) for name in sorted(shares)[:needed]], ssss=False)
