"""Start-up kits: a folder for each member of a federation, with its files and only its own secrets.

    OUT/authority/     ca.key, ca.crt: signs the server's certificate; keep it off the network
    OUT/server/        certificate and key, the executor's secret, the operators' digests, start.sh; the proxy's
                       nginx.conf, and nodes.conf: the keys that it lets in
    OUT/operator/      the token for `flwr`, the nodes' public keys, register.sh, nodes.conf
    OUT/sites/NAME/    the node's key, its executor's secret, the policy, start.sh, which makes the site's signing key
    OUT/roster/        roster.key: signs the list of the sites' signing keys; not for the server's operator

A further call keeps existing files, adds missing ones, and renews only the files that its options name. Files are
written atomically, and a kit has its SHA256SUMS only while it is complete: after a full disk, run it again.

OUT/issued.json records all kits ever made. A kit that was handed over and is absent is made again, with new
unregistered keys, only on request.
"""

import secrets
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pathspec import PathSpec
from rich.console import Console

from cloister.config.io import kebab
from cloister.deploy import credentials
from cloister.deploy.credentials import EXPIRY_WARNING_DAYS
from cloister.deploy.provision import rosters, scripts
from cloister.deploy.provision.federation import Federation, Site, read_federation
from cloister.deploy.provision.folder import HEART, ISSUED, PUBLIC, SCRIPT, SECRET, Kits
from cloister.flower.control import get_filtered_fab_paths
from cloister.utils.errors import ConfigError
from cloister.utils.terminal import table


def refuse_in_bundle(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder from which an app bundle would include a file.

    Flower includes all files of a dozen kinds below a `pyproject.toml` with `[tool.flwr.app]`. The exceptions are that
    file's `fab-include` and `fab-exclude`, and the `.gitignore` beside it. Flower ignores a `.gitignore` in a
    subfolder.

    Args:
        folder: absolute, for the files.
        names: of the files, relative to it.

    Raises:
        ConfigError: an app at or above the folder would bundle a file.
    """
    for home in (folder, *folder.parents):
        try:
            rules = tomllib.loads((home / "pyproject.toml").read_text()).get("tool", {}).get("flwr", {}).get("app")
        except (OSError, ValueError):
            continue
        if not isinstance(rules, dict):
            continue
        try:
            ignored = [line.strip() for line in (home / ".gitignore").read_text("utf-8").splitlines()]
        except (OSError, ValueError):
            ignored = []  # as Flower has it
        kept = set(get_filtered_fab_paths({(folder / name).relative_to(home).as_posix(): b"" for name in names}, {}))
        for patterns in (ignored, rules.get("fab-exclude", [])):
            kept = set(PathSpec.from_lines("gitwildmatch", patterns).match_files(kept, negate=True))
        if "fab-include" in rules:
            kept = set(PathSpec.from_lines("gitwildmatch", rules["fab-include"]).match_files(kept))
        if kept:
            raise ConfigError(
                f"--output {folder} lies in the Flower app {home}, whose bundle would carry {min(kept)} to every site: "
                "choose a folder outside it"
            )


BUNDLED_KINDS = ("operator/credentials.yaml", "operator/config.toml", "sites/name/policy.toml", ISSUED)
"""Files of kinds that Flower includes in app bundles."""


@dataclass(frozen=True)
class Report:
    """Result of one call.

    Args:
        folder: of all kits.
        written: files, relative to it.
        notes: tasks left for the operator.
        expiries: certificate, relative to the folder -> its end, UTC.
    """

    folder: Path
    written: tuple[str, ...]
    notes: tuple[str, ...]
    expiries: dict[str, datetime]


def provision(
    description: Path,
    folder: Path,
    policy: str | Callable[[Federation, Site], str],
    renew: bool = False,
    renew_authority: bool = False,
    remake: Sequence[str] = (),
) -> Report:
    """Write the missing parts of the kits of a federation.

    Args:
        description: its `federation.toml`.
        folder: for the kits; made if absent.
        policy: text of the initial policy of a new site, or a function that returns it for a site of the federation.
        renew: make a new server certificate.
        renew_authority: make a new certificate of an own authority, with its old key, and of the server. Nodes with the
            old certificate trust the server until the old one ends.
        remake: members (`server`, `operator`, `sites/NAME`, or `roster` for its key) whose earlier kits are absent and
            are to be made again, with new keys.

    Guarantees: private keys and secrets are readable by their owner only, and a site's is in its kit and nowhere else.

    Raises:
        ConfigError: the description is invalid, or contradicts the folder; Flower would include files of the folder in
            an app bundle; or a file cannot be written.
    """
    federation = read_federation(description)
    _check_files_of(federation)
    kits = Kits(folder.resolve())
    refuse_in_bundle(kits.folder, BUNDLED_KINDS)
    members = ["server", "operator", *(f"sites/{site.name}" for site in federation.sites)]
    with kits.locked(lambda: kits.notes.append("another process was changing the kits, and had to end first")):
        for name in ("authority/ca.key", "authority/ca.crt", "server/server.key", "server/server.crt"):
            if kits.has(name):
                credentials.refuse_broken(kits.read(name), kits.path(name))
        kits.issued = _issued(kits, members)
        _forget(kits, [*members, "roster"], remake)
        kits.add(".gitignore", "*\n", PUBLIC)
        _write_authority(kits, federation, renew_authority)
        _write_server(kits, federation, renew or renew_authority)
        _write_operator(kits, federation)
        for site in federation.sites:
            _write_site(kits, federation, site, policy if isinstance(policy, str) else policy(federation, site))
        if federation.server.is_proxied:
            scripts.list_nodes(kits, "operator/", "server/" if kits.has(HEART["server"]) else "")
        rosters.write_roster(kits, federation.sites)
        _remember(kits, members)
        is_new = "authority/ca.crt" in kits.written
        for member in members:
            certificate = f"{member}/ca.crt"
            if kits.has("authority/ca.crt") and kits.path(member).is_dir() and (is_new or not kits.has(certificate)):
                kits.write(certificate, kits.read("authority/ca.crt"), PUBLIC)
            kits.sum_up(member)
        known = {site.name for site in federation.sites}
        for path in sorted(kits.path("operator/nodes").glob("*.pub")):
            if path.stem not in known:
                kits.notes.append(
                    f"site {path.stem} is not in federation.toml: unregister its node, then remove its kit and its key"
                )
    names = [name for name in ("authority/ca.crt", "server/server.crt") if kits.has(name)]
    expiries = {name: credentials.expiry_of(kits.read(name)) for name in names}
    return Report(kits.folder, tuple(kits.written), tuple(kits.notes), expiries)


def _check_files_of(federation: Federation) -> None:
    """Refuse shared keys of sites and absent files of an external authority, before any file is written."""
    for key, read in (("public_key", credentials.checked_node_key), ("public_signing_key", rosters.checked_key)):
        own = [path for site in federation.sites if (path := getattr(site, key))]
        if len({read(Path(path)).split()[1] for path in own}) < len(own):
            raise ConfigError(f"two sites have the same {kebab(key)}; a site is known by its key")
    for key in ("certificate", "ca_certificate"):
        if path := getattr(federation.authority, key):
            _file(path, kebab(key))


def _issued(kits: Kits, members: Sequence[str]) -> dict[str, str]:
    """Return the record of all keys ever issued, or the keys in a folder without one.

    Raises:
        ConfigError: the record cannot be read.
    """
    if not kits.has(ISSUED):
        made = {name: "" for name, heart in HEART.items() if kits.has(heart)}
        keys = kits.path("operator/nodes").glob("*.pub")
        return made | {f"sites/{path.stem}": path.read_text() for path in keys if f"sites/{path.stem}" in members}
    return kits.read_issued()


def _forget(kits: Kits, members: Sequence[str], remake: Sequence[str]) -> None:
    """Remove members from the record, as if their kits had never been made."""
    for member in remake:
        if member not in members:
            raise ConfigError(f"--remake {member!r} is none of {', '.join(members)}")
        if kits.path(HEART.get(member, member)).exists():
            raise ConfigError(f"--remake {member}: it is in {kits.folder}; move it away first")
        kits.issued.pop(member, None)
        rosters.forget(kits, member)
        if member.startswith("sites/"):
            kits.path(f"operator/nodes/{Path(member).name}.pub").unlink(missing_ok=True)
        if member == "operator":
            kits.path("server/operators.sha256").unlink(missing_ok=True)


def _remember(kits: Kits, members: Sequence[str]) -> None:
    """Add the keys that exist now to the record of all keys ever issued."""
    issued = dict(kits.issued)
    for member in members:
        public, signing = f"operator/nodes/{Path(member).name}.pub", rosters.key_file(Path(member).name)
        if member.startswith("sites/") and kits.has(public):
            issued[member] = kits.read(public).decode()
        if member.startswith("sites/") and kits.has(signing):
            issued[rosters.entry(Path(member).name)] = kits.read(signing).decode()
    issued |= {member: issued.get(member, "") for member, heart in HEART.items() if kits.has(heart)}
    kits.write_issued(issued)


def _write_authority(kits: Kits, federation: Federation, renew: bool) -> None:
    if federation.authority.kind == "external":
        if renew:
            raise ConfigError(
                "--renew-authority: the authority is external; put its new certificate in federation.toml"
            )
        if federation.authority.ca_certificate:
            content = _file(federation.authority.ca_certificate, "ca-certificate")
            if not kits.has("authority/ca.crt") or kits.read("authority/ca.crt") != content:
                kits.write("authority/ca.crt", content, PUBLIC)
        return
    if kits.has("authority/ca.crt") and not kits.has("authority/ca.key"):
        if renew:
            raise ConfigError("--renew-authority: authority/ca.key is not here")
        return
    kits.add("authority/ca.key", credentials.new_tls_key(), SECRET)
    if renew or not kits.has("authority/ca.crt"):
        key, days = kits.read("authority/ca.key"), federation.authority.days
        kits.write("authority/ca.crt", credentials.self_signed(key, federation.name, days), PUBLIC)


def _write_server(kits: Kits, federation: Federation, renew: bool) -> None:
    if kits.is_gone("server"):
        if renew:
            raise ConfigError(
                f"the server's kit is not in {kits.folder}: put it back to have a certificate for its key"
            )
        return
    kits.add("server/server.key", credentials.new_tls_key(), SECRET)
    if federation.authority.kind == "external":
        key, addresses = kits.read("server/server.key"), federation.server.addresses
        if renew or not kits.has("server/server.csr"):
            kits.write("server/server.csr", credentials.signing_request(key, addresses), PUBLIC)
        if renew or not federation.authority.certificate:
            kits.notes.append(
                "have server/server.csr signed, name certificate and ca-certificate in federation.toml, and run this "
                "again"
            )
        if federation.authority.certificate:
            signed = _file(federation.authority.certificate, "certificate")
            credentials.check_signed(signed, kits.read("authority/ca.crt"), key, addresses)
            if not kits.has("server/server.crt") or kits.read("server/server.crt") != signed:
                kits.write("server/server.crt", signed, PUBLIC)
    else:
        if renew or not kits.has("server/server.crt"):
            if not kits.has("authority/ca.key"):
                raise ConfigError(f"authority/ca.key is not in {kits.folder}: a server's certificate cannot be signed")
            key, server = kits.read("server/server.key"), federation.server
            authority = kits.read("authority/ca.crt"), kits.read("authority/ca.key")
            certificate = credentials.server_certificate(key, server.addresses, server.days, *authority)
            kits.write("server/server.crt", certificate, PUBLIC)
        named = credentials.addresses_of(kits.read("server/server.crt"))
        if missing := sorted(set(federation.server.addresses) - named):
            kits.notes.append(f"server/server.crt is not made out for {', '.join(missing)}; use --renew")
    kits.add("server/superexec.secret", secrets.token_hex(32), SECRET)
    kits.add_text("server/start.sh", scripts.server_script(federation), SCRIPT)
    if federation.server.is_proxied:
        kits.add_text(f"server/{scripts.CONFIGURATION}", scripts.configuration(federation), PUBLIC)


def _write_operator(kits: Kits, federation: Federation) -> None:
    if kits.is_gone("operator"):
        return
    is_new = not kits.has(HEART["operator"]) and not kits.has("server/operators.sha256")
    if is_new:
        token = credentials.new_token()
        kits.write("operator/credentials.yaml", credentials.credentials_file(federation.address, token), SECRET)
    if is_new or (kits.has(HEART["server"]) and not kits.has("server/operators.sha256")):
        token = credentials.token_in(kits.read("operator/credentials.yaml"))
        kits.write("server/operators.sha256", f"{credentials.digest_of(token)}  operator\n", SECRET)
    connection = scripts.connection(federation, str(kits.path("operator/ca.crt")))
    kits.add("operator/config.toml", connection, PUBLIC)
    kits.add_text("operator/register.sh", scripts.register_script(federation), SCRIPT)


def _write_site(kits: Kits, federation: Federation, site: Site, policy: str) -> None:
    """Write a site's kit.

    Its public key also goes to the operator; its private key stays in the kit.
    """
    home, public = f"sites/{site.name}", f"operator/nodes/{site.name}.pub"
    is_new = home not in kits.issued
    key = b"" if kits.has(public) else _node_key(kits, site)
    if not key and site.public_key and credentials.checked_node_key(Path(site.public_key)) != kits.read(public):
        kits.notes.append(f"{public} is not the public-key of federation.toml; remove it to have it replaced")
    # A kit that was handed over and removed here is not made again.
    is_here = is_new or kits.path(home).is_dir()
    rosters.add_site(kits, site)
    if is_here:
        kits.add(f"{home}/policy.toml", policy, PUBLIC)
        try:
            stated = tomllib.loads(kits.read(f"{home}/policy.toml").decode()).get("public-size", 0)
        except ValueError as error:
            raise ConfigError(
                f"{home}/policy.toml is no TOML file: {error}; correct it, or remove it to have a new one written"
            ) from None
        if stated and site.public_size and stated != site.public_size:
            kits.notes.append(
                f"{home}/policy.toml has public-size = {stated}, which counts, and federation.toml {site.public_size}: "
                "make them equal"
            )
        kits.add(f"{home}/superexec.secret", secrets.token_hex(32), SECRET)
        kits.add_text(f"{home}/start.sh", scripts.site_script(federation, site), SCRIPT)
    # Last: a site whose public key is there counts as one whose kit was made.
    if key:
        kits.write(public, key, PUBLIC)
        if is_new:
            kits.notes.append(f"register site {site.name}: operator/register.sh")


def _node_key(kits: Kits, site: Site) -> bytes:
    """Return the public key of a site: its own, that of its kit, or of the record.

    Without any of them, generate a key, and write the private key into the kit.
    """
    home = f"sites/{site.name}"
    private = f"{home}/node.key"
    if site.public_key:
        kits.notes.append(f"site {site.name} puts its own private key in its kit as node.key")
        return credentials.checked_node_key(Path(site.public_key))
    if kits.has(private):
        return credentials.public_half(kits.read(private), str(kits.path(private)))
    if known := kits.issued.get(home):
        return known.encode()
    private_key, public_key = credentials.new_node_key()
    kits.write(private, private_key, SECRET)
    return public_key


def _file(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"authority.{key} {path}: {error.strerror}") from None


def show(report: Report, console: Console | None = None) -> None:
    """Print the written files, the ends of certificates, and the tasks left."""
    console = console or Console()
    console.print(f"kits in {report.folder}", highlight=False, soft_wrap=True)
    for name in report.written:
        console.print(f"  wrote {name}", highlight=False, soft_wrap=True)
    if not report.written:
        console.print("  nothing to write")
    if report.expiries:
        expiries = table(("certificate", "ends", "days left"), ())
        for name, end in report.expiries.items():
            days = (end - datetime.now(UTC)).days
            expiries.add_row(name, f"{end:%Y-%m-%d}", str(days), style="red" if days < EXPIRY_WARNING_DAYS else None)
        console.print(expiries)
    for note in report.notes:
        console.print(f"• {note}", highlight=False, markup=False, soft_wrap=True)
