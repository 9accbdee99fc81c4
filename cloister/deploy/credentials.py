"""Keys, certificates and operators' tokens: a small certificate authority, node keys, digests.

TLS keys are P-256, which all TLS implementations accept. Node keys are P-384 in OpenSSH format, for
`flower-supernode`. An operator's token is random, and the server stores only its digest.
"""

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cloister.utils.errors import ConfigError
from cloister.utils.files import DAY
from cloister.utils.keys import node_key

EXPIRY_WARNING_DAYS = 30
"""Remaining days of a certificate at which warnings begin."""
LOOPBACK = ("localhost", "127.0.0.1")
"""Additional addresses of every server certificate: the executor of the server's own app connects to them."""
BACKDATED = timedelta(hours=1)
"""Time by which a certificate's validity begins early, as the clocks of machines differ."""


def new_tls_key() -> bytes:
    """Generate a private key for an authority or a server, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_node_key() -> tuple[bytes, bytes]:
    """Generate a private and a public node key, in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def public_half(private: bytes, name: str) -> bytes:
    """Return the public key of a private node key, in OpenSSH format.

    Raises:
        ConfigError: it is not an EC key in OpenSSH format without a passphrase.
    """
    key = node_key(private, name)
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def checked_node_key(path: Path) -> bytes:
    """Read and validate a public node key that a site made itself.

    Raises:
        ConfigError: the file is absent, or the key is of a kind that Flower does not accept.
    """
    try:
        content = path.read_bytes()
        key = load_ssh_public_key(content)
    except OSError as error:
        raise ConfigError(f"public-key {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"public-key {path} is no public key in OpenSSH format") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"public-key {path} must be an EC key: ssh-keygen -t ecdsa -b 384")
    return content


def self_signed(key: bytes, name: str, days: int) -> bytes:
    """Issue the certificate of an authority for itself, PEM.

    It may sign servers and no other authority.
    """
    private = _loaded(key)
    subject = _named(f"{name} authority")
    builder = _builder(subject, subject, private.public_key(), datetime.now(UTC) + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)


def server_certificate(key: bytes, addresses: list[str], days: int, authority: bytes, authority_key: bytes) -> bytes:
    """Issue a server's certificate for these addresses and the loopback, PEM.

    It ends no later than the authority's certificate.
    """
    issuer, private = x509.load_pem_x509_certificate(authority), _loaded(authority_key)
    expires = min(datetime.now(UTC) + timedelta(days=days), issuer.not_valid_after_utc)
    builder = _builder(_named(addresses[0]), issuer.subject, _loaded(key).public_key(), expires)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(_alternative_names(addresses), critical=False)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
    )
    return builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)


def signing_request(key: bytes, addresses: list[str]) -> bytes:
    """Return a certificate signing request for an external authority, PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_named(addresses[0]))
    builder = builder.add_extension(_alternative_names(addresses), critical=False)
    return builder.sign(_loaded(key), hashes.SHA256()).public_bytes(Encoding.PEM)


def check_signed(certificate: bytes, authority: bytes, key: bytes, addresses: list[str]) -> None:
    """Refuse a certificate that a node of this federation would refuse.

    Args:
        certificate: PEM, the server's first, then intermediates.
        authority: PEM, the authority that nodes trust.
        key: the server's.
        addresses: that it must contain, in addition to the loopback.

    Raises:
        ConfigError: it is for another key, lacks an address or is not for servers; its chain does not lead to the
            authority, or contains a certificate that is no authority's; or a part of it is not valid at this time.
    """
    try:
        chain = x509.load_pem_x509_certificates(certificate)
        roots = x509.load_pem_x509_certificates(authority)
    except ValueError:
        raise ConfigError("certificate and ca-certificate must be PEM files of certificates") from None
    if chain[0].public_key() != _loaded(key).public_key():
        raise ConfigError("the certificate is not for the key of this server kit: sign its server.csr")
    wanted = {address.lower() for address in (*addresses, *LOOPBACK)}
    if missing := sorted(wanted - {address.lower() for address in addresses_of(certificate)}):
        raise ConfigError(f"the server's certificate is not made out for {', '.join(missing)}")
    try:
        usage = set(chain[0].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        usage = {ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & usage:
        raise ConfigError("the server's certificate is not for servers: its extended key usage lacks serverAuth")
    path = list(chain)
    for issued, issuers in zip(chain, [*([link] for link in chain[1:]), roots], strict=True):
        for issuer in issuers:
            try:
                if issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
                    issued.verify_directly_issued_by(issuer)
                    path.append(issuer)
                    break
            except (x509.ExtensionNotFound, ValueError, TypeError, InvalidSignature):
                continue
        else:
            raise ConfigError("the certificate was not issued by ca-certificate, directly or through intermediates")
    now = datetime.now(UTC)
    for link in path:
        if not link.not_valid_before_utc <= now <= link.not_valid_after_utc:
            which = "the server's certificate" if link is chain[0] else f"{link.subject.rfc4514_string()} above it"
            raise ConfigError(f"{which} has expired" if link.not_valid_after_utc < now else f"{which} is not valid yet")


def addresses_of(certificate: bytes) -> set[str]:
    """Return the host names and IP addresses of the first certificate in a PEM."""
    extensions = x509.load_pem_x509_certificate(certificate).extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    return addresses | set(names.get_values_for_type(x509.DNSName))


def expiry_of(certificate: bytes) -> datetime:
    """Return the end of the first certificate in a PEM, in UTC."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def refuse_broken(content: bytes, path: Path) -> None:
    """Refuse a file that should contain a TLS key or a certificate, but does not.

    Args:
        content: of the file.
        path: of the file; a key ends in `.key`.

    Raises:
        ConfigError: the content is invalid.
    """
    kind = "private EC key" if path.suffix == ".key" else "certificate"
    try:
        _loaded(content) if path.suffix == ".key" else x509.load_pem_x509_certificate(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Not chained: the frames of the cause contain the key.
        raise ConfigError(f"{path} is no {kind} in PEM; put the right one back, or move it away") from None


def _loaded(key: bytes) -> ec.EllipticCurvePrivateKey:
    private = load_pem_private_key(key, password=None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("not a private EC key")
    return private


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternative_names(addresses: list[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for address in dict.fromkeys([*addresses, *LOOPBACK]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    return x509.SubjectAlternativeName(names)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, expires: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - BACKDATED).not_valid_after(expires)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def expiring(paths: Sequence[Path], now: datetime) -> list[str]:
    """Return a line for each certificate that ends within a month, or has ended."""
    ends = {path.name: expiry_of(path.read_bytes()) for path in paths}
    return [
        f"certificate {name} {'ends' if end > now else 'ended'} on {end:%Y-%m-%d}: cloister provision --renew"
        for name, end in ends.items()
        if (end - now).days < EXPIRY_WARNING_DAYS
    ]


def watch(paths: Sequence[Path]) -> None:
    """Log now and every day which certificates end soon, in a thread."""

    def work() -> None:
        while True:
            for line in expiring(paths, datetime.now(UTC)):
                logging.getLogger("flwr").warning("%s", line)
            Event().wait(DAY)

    Thread(target=work, name="certificates", daemon=True).start()


DIGEST = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """Generate a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token in hex. A random token needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials_file(address: str, token: str) -> str:
    """Return a `credentials.yaml` with the token, for the `flwr` command.

    The token is for the SuperLink at `address`. The content is JSON, which is YAML. The refresh token is a placeholder
    that the command requires: tokens are not refreshed.
    """
    stored = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    entries = {
        f"flower.account-auth.{address}.{key}": b64encode(value.encode()).decode() for key, value in stored.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def token_in(credentials: bytes) -> str:
    """Return the token in a `credentials.yaml` that `credentials_file` made.

    Raises:
        ConfigError: it contains no token.
    """
    try:
        stored = json.loads(credentials)
        (token,) = (value for key, value in stored.items() if key.endswith(".oidc-access-token"))
        return b64decode(token, validate=True).decode()
    except (ValueError, AttributeError, TypeError):
        raise ConfigError("operator/credentials.yaml holds no operator's token: --remake operator") from None


def read_digests(path: Path) -> tuple[str, ...]:
    """Read the digests of the operators' tokens.

    Each line has one, with an optional comment after it.

    Raises:
        ConfigError: the file is absent or empty, or a line contains no digest.
    """
    try:
        lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"operators {path}: {error.strerror}") from None
    if not lines or not all(DIGEST.fullmatch(line) for line in lines):
        raise ConfigError(f"operators {path} must hold the SHA-256 of an operator's token on each line, at least one")
    return tuple(lines)


def is_known(token: str, digests: tuple[str, ...]) -> bool:
    """Return whether a token is an operator's, in time independent of the result."""
    found = [hmac.compare_digest(digest_of(token), digest) for digest in digests]
    return any(found)
