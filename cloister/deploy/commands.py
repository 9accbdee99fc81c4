"""Commands of `cloister site`. Each imports the parts of Flower that it needs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from cloister.deploy.provision.folder import HEART, ISSUED, Kits
from cloister.utils.errors import ConfigError

site = typer.Typer(
    help="Sites by NAME, at a SuperLink: CONNECTION is one of Flower's config.toml, FLWR_HOME the operator's kit.",
    no_args_is_help=True,
)

Connection = Annotated[str, typer.Argument()]
SiteName = Annotated[str, typer.Argument()]
NewKey = Annotated[Path | None, typer.Option("--key", help="Its public key; by default nodes/NAME.pub of the kit.")]
Expected = Annotated[
    str, typer.Option("--fingerprint", help="Of the key, as the site told it: anything else is refused.")
]
NewSigningKey = Annotated[
    Path | None, typer.Option("--signing-key", help="Its public signing key: a new roster is signed with it.")
]
ExpectedSigning = Annotated[
    str,
    typer.Option("--signing-fingerprint", help="Of the signing key, as the site told it: anything else is refused."),
]


@contextmanager
def _alone() -> Iterator[Kits]:
    """Hold the lock of the kits during the block, and print their notes.

    Two operators at the same kits would each see a state of before, and undo what the other did. At the end the proxy's
    list of keys is that of the operator's kit, if it has one.
    """
    from cloister.deploy.provision.scripts import NODES, list_nodes
    from cloister.flower import flower_home

    home = flower_home().resolve()
    together = home.name == "operator" and (home.parent / ISSUED).is_file()
    kits = Kits(home.parent if together else home)
    with kits.locked(lambda: typer.echo("waiting for another operator's command to end", err=True)):
        yield kits
        if kits.has((operator := "operator/" if together else "") + NODES):
            list_nodes(kits, operator, "server/" if together and kits.has(HEART["server"]) else "")
            for member in ("operator", "server") if together else ():
                kits.sum_up(member)
        for note in kits.notes:
            typer.echo(note)


@site.command("list")
def list_sites(connection: Connection) -> None:
    """Show every site that was ever registered: its state, since when, and the fingerprint of its key."""
    from cloister.deploy.sites import control
    from cloister.utils.text import clean

    with control(connection) as opened:
        for node in opened.nodes():
            typer.echo(clean(f"{node.who}  {node.status}  {node.since or 'never seen'}  {node.fingerprint}"))


@site.command()
def approve(connection: Connection, name: SiteName, key: NewKey = None, expected: Expected = "") -> None:
    """Let a new site in. Compare the fingerprint with the site on another way than its key came."""
    from cloister.deploy.sites import approve, control, keep_key, key_file

    with _alone(), control(connection) as opened:
        found = approve(opened, name, key or key_file(name), expected)
        keep_key(name, key or key_file(name))
    typer.echo(f"{name}: registered with the key {found}")


@site.command()
def rotate(
    connection: Connection,
    name: SiteName,
    key: NewKey = None,
    expected: Expected = "",
    signing: NewSigningKey = None,
    expected_signing: ExpectedSigning = "",
) -> None:
    """Let a site in with a new key, and refuse its old one; with --signing-key alone the node's key stays."""
    from cloister.deploy.provision.rosters import replace
    from cloister.deploy.sites import control, keep_key, key_file, rotate

    with _alone() as kits:
        if signing is not None:
            typer.echo(f"{name}: on the roster with the signing key {replace(kits, name, signing, expected_signing)}")
        if signing is None or key is not None:
            with control(connection) as opened:
                found = rotate(opened, name, key or key_file(name), expected)
            keep_key(name, key or key_file(name))
            typer.echo(f"{name}: registered with the key {found}; its old key is refused from now on")


@site.command()
def remove(connection: Connection, name: SiteName) -> None:
    """Send a site away: its key is refused from now on, also on open connections, and never gets in again.

    It is taken off the roster too, where the key that signs rosters is.
    """
    from cloister.deploy.provision.rosters import roster_in, strike
    from cloister.deploy.sites import control, key_file, remove

    with _alone() as kits:
        if strike(kits, name):
            typer.echo(f"{name}: taken off the roster")
        with control(connection) as opened:
            for node in remove(opened, name):
                typer.echo(f"{name}: refused from now on (key {node.fingerprint})")
        with suppress(ConfigError):  # a node that Flower's own command registered may have a name without a key file
            own = key_file(name)
            own.unlink(missing_ok=True)
            if (left := roster_in(own.parents[1])) and name in left.roster.keys:
                typer.echo(f"{name}: on the roster still; have its signer run cloister provision without this site")
    typer.echo("take it out of federation.toml, so that no kit is made for it again")
