"""The commands of `cloister site`. What they need of Flower is imported by the one that runs."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cloister.core.errors import ConfigError

site = typer.Typer(help="Sites by name, at a SuperLink: FLWR_HOME is the operator's kit.", no_args_is_help=True)

Connection = Annotated[str, typer.Argument(help="A SuperLink connection of Flower's config.toml.")]
SiteName = Annotated[str, typer.Argument(help="Of the site.")]
NewKey = Annotated[Path | None, typer.Option("--key", help="Its public key; by default nodes/NAME.pub of the kit.")]
Expected = Annotated[
    str, typer.Option("--fingerprint", help="Of the key, as the site told it: anything else is refused.")
]


@site.command("list")
def list_sites(connection: Connection) -> None:
    """Show every site that was ever registered: its state, since when, and the fingerprint of its key."""
    from cloister.core.text import clean
    from cloister.deploy.control import control

    with control(connection) as opened:
        for node in opened.nodes():
            typer.echo(clean(f"{node.who}  {node.status}  {node.since or 'never seen'}  {node.fingerprint}"))


@site.command()
def approve(connection: Connection, name: SiteName, key: NewKey = None, expected: Expected = "") -> None:
    """Let a new site in. Compare the fingerprint with the site on another way than its key came."""
    from cloister.deploy.control import control
    from cloister.deploy.sites import approve, key_file

    with control(connection) as opened:
        found = approve(opened, name, key or key_file(name), expected)
    typer.echo(f"{name}: registered with the key {found}")


@site.command()
def rotate(connection: Connection, name: SiteName, key: NewKey = None, expected: Expected = "") -> None:
    """Let a site in with a new key, and refuse its old one."""
    from cloister.deploy.control import control
    from cloister.deploy.sites import key_file, rotate

    with control(connection) as opened:
        found = rotate(opened, name, key or key_file(name), expected)
    typer.echo(f"{name}: registered with the key {found}; its old key is refused from now on")


@site.command()
def remove(connection: Connection, name: SiteName) -> None:
    """Send a site away: its key is refused from now on, also on open connections, and never gets in again."""
    from cloister.deploy.control import control
    from cloister.deploy.sites import key_file, remove

    with control(connection) as opened:
        for node in remove(opened, name):
            typer.echo(f"{name}: refused from now on (key {node.fingerprint})")
    with suppress(ConfigError):  # the kit has no key of a node that Flower's own command has named
        key_file(name).unlink(missing_ok=True)
    typer.echo("take it out of federation.toml, so that no kit is made for it again")
