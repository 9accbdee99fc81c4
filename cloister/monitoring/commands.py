"""Commands `cloister watch`, `cloister dashboard` and `cloister status --check`."""

import time
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from cloister.utils.check import host_and_port


def check_once(connection: str, runs: Path) -> int:
    """Print the current problems, a line each.

    Args:
        connection: of Flower's `config.toml`; empty: no SuperLink is queried.
        runs: an `output-dir`.

    Returns:
        The exit code in the convention of monitoring plugins: 0: no problem; 1: warnings; 2: a critical problem.
    """
    from cloister.monitoring.alerts import findings
    from cloister.monitoring.snapshot import Places, look
    from cloister.utils.text import clean

    # An operator's machine may have no runs. Then only the SuperLink is queried, as by `cloister status`.
    places = Places(connection, runs if runs.is_dir() or not connection else None)
    found = findings(look(places), time.time())
    for item in found:
        typer.echo(clean(f"{item.level}: {item.kind}: {item.text}"))
    if not found:
        typer.echo("ok")
    return max((2 if item.level == "critical" else 1 for item in found), default=0)


def watch(
    connection: Annotated[str, typer.Argument()] = "",
    runs: Annotated[Path | None, typer.Option(help="An output-dir, on the machine of the ServerApp.")] = None,
    ledger: Annotated[
        list[Path] | None, typer.Option(help="A ledger whose budget is watched; may be given again.")
    ] = None,
    database: Annotated[Path | None, typer.Option(help="The SuperLink's state database, to measure its size.")] = None,
    listen: Annotated[str, typer.Option(help="Address and port of /metrics for Prometheus.")] = "127.0.0.1:9464",
    webhook: Annotated[
        str,
        typer.Option(envvar="CLOISTER_WEBHOOK", help="URL that gets JSON when something begins or ends to be wrong."),
    ] = "",
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks.")] = 60.0,
) -> None:
    """Look at a federation again and again: serve metrics for Prometheus, call a webhook when something is wrong.

    CONNECTION is a SuperLink connection of Flower's config.toml; on a node there is none.
    """
    from cloister.monitoring.metrics import Watch
    from cloister.monitoring.snapshot import Places

    address = host_and_port(listen, minimum=1)
    watching = Watch(Places(connection, runs, tuple(ledger or ()), database), webhook, typer.echo)
    watching.serve(address, every, Event())


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
    from cloister.monitoring.dashboard import serve
    from cloister.monitoring.snapshot import Places

    serve(Places(connection, runs, tuple(ledger or ())), host_and_port(listen), typer.echo)
