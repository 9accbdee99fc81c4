"""The command `cloister dashboard`."""

from pathlib import Path
from typing import Annotated

import typer

from cloister.core.address import host_and_port


def dashboard(
    connection: Annotated[str, typer.Argument()] = "",
    runs: Annotated[Path, typer.Option(help="An output-dir, on the machine of the ServerApp.")] = Path("runs"),
    ledger: Annotated[
        list[Path] | None, typer.Option(help="A ledger whose budget is shown; may be given several times.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Address and port, of the loopback; port 0: a free one.")] = "127.0.0.1:0",
) -> None:
    """Serve a page about nodes, runs, budgets and events, to be read in a browser.

    CONNECTION is a SuperLink connection of Flower's config.toml; without it, no nodes are shown.
    """
    from cloister.dashboard.serving import serve
    from cloister.watch.snapshot import Places

    serve(Places(connection, runs, tuple(ledger or ())), host_and_port(listen), typer.echo)
