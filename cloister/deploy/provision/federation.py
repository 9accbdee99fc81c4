"""Description of a federation, `federation.toml`, with strict validation."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from cloister.config.io import Count, Heading, Section, Whole, read_toml
from cloister.utils.files import expanded

LABEL = r"[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*")
NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")
Name = Annotated[str, Field(pattern=NAME.pattern)]
"""Name that is used for folders, common names and words of a command line."""


def _address(value: str) -> str:
    """Return a normalized address for a certificate.

    Raises:
        ValueError: it is neither a host name nor the address of one host.
    """
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        if not HOST_NAME.fullmatch(value) or re.fullmatch(r"[\d.]+", value):
            raise ValueError(f"{value!r} is neither a host name nor an IP address (no https://, no port)") from None
        return value.lower()
    if address.is_unspecified:
        raise ValueError(f"{value!r} means every interface; give the address by which sites reach the server")
    return str(address)


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("it must be one line of printable characters")
    return value


class Server(Section):
    """Address of the SuperLink.

    Args:
        addresses: host names and IP addresses the certificate is made out for; sites and operators use the first.
        port: on which sites and operators reach it.
        superlink: host:port at which the SuperLink listens behind the proxy; with the number `port` there is no proxy.
        days: the certificate is valid.
    """

    addresses: Annotated[list[Annotated[str, AfterValidator(_address)]], Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    superlink: Annotated[str, Field(pattern=r"^[\w.-]+:[1-9][0-9]{0,4}$")] = "127.0.0.1:8001"
    days: Annotated[int, Field(ge=1, le=3650)] = 365

    @model_validator(mode="after")
    def _agree(self) -> "Server":
        # nginx compares the names in a certificate, and none of its addresses.
        if self.is_proxied and self.verified_name not in ("localhost", *self.addresses):
            raise ValueError(f"superlink = {self.superlink!r}: its host must be 127.0.0.1, or a name in addresses")
        return self

    @property
    def is_proxied(self) -> bool:
        """Return whether a proxy stands in front of the SuperLink."""
        return int(self.superlink.rpartition(":")[2]) != self.port

    @property
    def verified_name(self) -> str:
        """Return the name in the server's certificate by which the proxy knows the SuperLink."""
        host = self.superlink.rpartition(":")[0]
        return "localhost" if host == "127.0.0.1" else host


class Authority(Section):
    """Authority that signs the server's certificate.

    Args:
        kind: `own` makes a certificate authority; `external` writes a signing request for an existing one.
        days: validity of an own authority.
        certificate: signed by the external authority, PEM, with its intermediates; empty until there is one.
        ca_certificate: of the external authority, PEM.
    """

    kind: Literal["own", "external"] = "own"
    days: Annotated[int, Field(ge=1, le=36500)] = 3650
    certificate: str = ""
    ca_certificate: str = ""

    @model_validator(mode="after")
    def _agree(self) -> "Authority":
        if self.kind == "own" and (self.certificate or self.ca_certificate):
            raise ValueError("certificate and ca-certificate belong to kind = 'external'")
        if bool(self.certificate) != bool(self.ca_certificate):
            raise ValueError("certificate and ca-certificate come together")
        return self


class Site(Section):
    """Member with data: a file of its own, or a part of a benchmark for trials.

    Args:
        name: of the kit's folder, and of the node at the SuperLink.
        data_path: path of the site's data on the machine of its node.
        public_size: stated number of its examples (or groups), which dp-sgd needs. 0: its policy states it.
        partition_id: part of a benchmark, from 0.
        num_partitions: number of parts.
        public_key: of a node key that the site made itself. Its private key stays at the site.
        public_signing_key: of a signing key that the site made itself. Its private key stays at the site.
    """

    name: Name
    data_path: Annotated[str, AfterValidator(_one_line)] = ""
    public_size: Whole = 0
    partition_id: Whole | None = None
    num_partitions: Count | None = None
    public_key: str = ""
    public_signing_key: str = ""

    @model_validator(mode="after")
    def _agree(self) -> "Site":
        partition = self.partition_id is not None and self.num_partitions is not None
        either = self.partition_id is not None or self.num_partitions is not None
        if bool(self.data_path) == either or partition != either:
            raise ValueError(f"site {self.name!r} needs data-path, or partition-id and num-partitions")
        if partition and self.public_size:
            raise ValueError(f"site {self.name!r}: public-size = {self.public_size} is for a site with a data-path")
        if partition and (self.partition_id or 0) >= (self.num_partitions or 0):
            raise ValueError(f"site {self.name!r}: partition-id must be below num-partitions")
        return self


class Federation(Section):
    """Server, authority and sites.

    Args:
        name: of the connection that `flwr run . NAME` uses, and of the certificate authority.
        server: address of the SuperLink.
        authority: signs the server's certificate.
        sites: one or more; names are unique.
        tasks: allowed by the initial policy of a new site.
        group: array or column with the owner of each row, in the initial policy of a new site; empty: rows are people.
    """

    name: Name
    server: Server
    authority: Authority = Authority()
    sites: Annotated[list[Site], Field(min_length=1)]
    tasks: Annotated[list[Name], Field(min_length=1)] = Field(default_factory=lambda: ["digits"])
    group: Heading = ""

    @model_validator(mode="after")
    def _agree(self) -> "Federation":
        names = [site.name for site in self.sites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"site names must be unique; twice: {', '.join(twice)}")
        return self

    @property
    def address(self) -> str:
        """Return `host:port` of the server for sites and operators."""
        host = self.server.addresses[0]
        return f"[{host}]:{self.server.port}" if ":" in host else f"{host}:{self.server.port}"


def read_federation(path: Path) -> Federation:
    """Read the description of a federation; relative paths in it start at its folder.

    Raises:
        ConfigError: the file is absent, or has invalid keys, which the message names with their values.
    """
    federation, base = read_toml(Federation, path, str(path)), path.resolve().parent

    def absolute(value: str) -> str:
        return str(base / expanded(value)) if value else ""

    keys = ("public_key", "public_signing_key")
    sites = [site.model_copy(update={key: absolute(getattr(site, key)) for key in keys}) for site in federation.sites]
    signed = {name: absolute(getattr(federation.authority, name)) for name in ("certificate", "ca_certificate")}
    return federation.model_copy(update={"sites": sites, "authority": federation.authority.model_copy(update=signed)})
