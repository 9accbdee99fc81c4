"""Commands for operators: of nodes, SuperLinks, kits, ledgers and monitoring.

A command imports Flower and TensorFlow only when it runs.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.deploy.provision.folder import HEART, Kits
from cloister.utils.check import host_and_port
from cloister.utils.errors import ConfigError, LedgerError
from cloister.utils.text import at_most

if TYPE_CHECKING:
    from cloister.privacy.accounting.ledger import Ledger

FAILED = 1
"""Exit code of a command that failed."""


def status(
    connection: Annotated[str, typer.Argument()] = "",
    output: Annotated[Path, typer.Option("--runs", help="An output-dir, or one run directory.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="For a monitor: say what is wrong; exit code 0: nothing, 1: warnings, 2: more."),
    ] = False,
) -> None:
    """Show the nodes and runs of a SuperLink, and how far the newest run in output-dir is; exit code 1 if it died.

    CONNECTION is a SuperLink connection of Flower's config.toml.
    """
    if check:
        raise typer.Exit(check_once(connection, output))
    from cloister.deploy.provision.rosters import on_roster
    from cloister.deploy.sites import living_nodes
    from cloister.deploy.warm.probe import warnings_of
    from cloister.monitoring.snapshot import Places, look
    from cloister.server.reports.status import as_json, newest_run, run_state, superlink_runs, told

    run = run_state(newest_run(output)) if output.is_dir() or not connection else None
    seen = look(Places(runs=output if output.is_dir() else None))
    if run is not None and seen.hides_progress and not run.hides_progress:
        run = run.without_ledger()
    budgets = {} if seen.hides_progress else seen.spent
    superlink = None
    if connection:
        nodes = living_nodes(connection)
        superlink = {"warnings": warnings_of(connection), "nodes": nodes, "runs": superlink_runs(connection)}
        superlink["roster"] = on_roster()
    typer.echo(as_json(run, superlink, budgets) if json else "\n".join(told(run, superlink, budgets)))
    if run is not None and run.state == "dead":
        raise typer.Exit(FAILED)


def check_once(connection: str, runs: Path) -> int:
    """Print the current problems, a line each.

    Args:
        connection: of Flower's `config.toml`; empty: no SuperLink is queried.
        runs: an `output-dir`.

    Returns:
        The exit code in the convention of monitoring plugins: 0: no problem; 1: warnings; 2: a critical problem.
    """
    from cloister.monitoring.snapshot import Places, findings, look
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


def warm_node(
    context: typer.Context,
    keras: Annotated[bool, typer.Option(help="Import Keras beforehand, where installed, for tasks in it.")] = True,
    torch: Annotated[bool, typer.Option(help="Import PyTorch beforehand, where installed, for tasks in it.")] = True,
    fastest_poll: Annotated[float, typer.Option(help="Seconds between looks for messages, just after one.")] = 0.1,
    slowest_poll: Annotated[float, typer.Option(help="Seconds between looks for messages, in the long run.")] = 5.0,
) -> None:
    """Run a SuperNode whose clients start at once; takes the options of flower-supernode."""
    from cloister.deploy.warm.node import run_node

    frameworks = [name for name, wanted in (("keras", keras), ("torch", torch)) if wanted]
    raise typer.Exit(run_node(context.args, frameworks, (fastest_poll, slowest_poll)))


def provision_kits(
    description: Annotated[Path, typer.Argument()],
    output: Annotated[Path, typer.Option(help="Folder for the kits.")] = Path("kits"),
    renew: Annotated[bool, typer.Option("--renew", help="Make a new server certificate.")] = False,
    renew_authority: Annotated[
        bool, typer.Option("--renew-authority", help="Make new certificates of our own authority and of the server.")
    ] = False,
    remake: Annotated[
        list[str] | None,
        typer.Option(help="server, operator or sites/NAME: make a kit anew that was made before and is not here."),
    ] = None,
) -> None:
    """Write a start-up kit for the server, the operator and each site; again: add what is missing.

    DESCRIPTION is a federation.toml: the server, the authority and the sites.
    """
    from cloister.deploy.provision.kits import provision, show
    from cloister.deploy.provision.scripts import policy_for

    show(provision(description, output, policy_for, renew, renew_authority, remake or []))


def superlink(
    context: typer.Context,
    operators: Annotated[Path, typer.Option(help="File of SHA-256 digests of operators' tokens.")],
    max_database: Annotated[int, typer.Option(min=1, help="Largest size of the state database, in megabytes.")] = 8000,
) -> None:
    """Flower's SuperLink, which takes orders from provisioned operators only; other options are flower-superlink's."""
    from cloister.deploy.superlink.serve import serve

    serve(operators, context.args, max_database)


def superexec(
    context: typer.Context,
    resume: Annotated[int, typer.Option(min=0, help="How often a server app that is killed resumes its run.")] = 0,
    tasks: Annotated[
        Path | None, typer.Option(help="With --resume: folder where the next executor finds what this one has begun.")
    ] = None,
) -> None:
    """Flower's executor of server apps, with tasks' tokens kept out of arguments; options are flower-superexec's."""
    from cloister.deploy.superexec import run

    run(context.args, resume, tasks)


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
    from cloister.deploy.sites import kits_of_operator

    kits, together = kits_of_operator()
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


ledger = typer.Typer(help="Read the ledger of a server or a node: PATH is a ledger.jsonl file.", no_args_is_help=True)

LedgerPath = Annotated[Path, typer.Argument()]


@ledger.command()
def verify(
    path: LedgerPath,
    head: Annotated[str, typer.Option(help="A last hash noted earlier, which the ledger must contain.")] = "",
    anchors: Annotated[Path | None, typer.Option(help="File of anchors kept elsewhere, to verify.")] = None,
    key: Annotated[Path | None, typer.Option(help="With --anchors: the public key of the ledger's owner.")] = None,
) -> None:
    """Check that no line was changed, removed or swapped; with --head or --anchors, that none was cut off either."""
    from cloister.privacy.accounting.anchors import read_anchors, verify_anchors
    from cloister.privacy.accounting.ledger import GENESIS

    if key and not anchors:
        raise ConfigError("--key has no effect without --anchors")
    opened = _opened(path)
    if opened.head == GENESIS and not head and not anchors:
        raise LedgerError(
            f"{path}: there is no whole line to verify: no release was recorded here, or its lines were cut off. A "
            "head or anchors that were kept elsewhere tell which"
        )
    typer.echo(f"{path}: unbroken; {len(opened.entries)} releases; last hash {opened.head}")
    if head:
        if not re.fullmatch("[0-9a-f]{64}", head):
            raise ConfigError(f"--head {head!r} is not valid: a last hash has 64 hexadecimal digits")
        if head not in opened.heads():
            raise LedgerError(
                f"{opened.path}: no line has the hash {head}: lines were cut off, or it is of another ledger"
            )
        typer.echo("no line that was there when --head was noted has been cut off")
    if anchors:
        if key is None:
            raise ConfigError("--anchors needs --key: the public key of the ledger's owner")
        found = read_anchors(anchors)
        count = verify_anchors(opened, found, key)
        if not count:
            raise ConfigError(f"--anchors {anchors}: none of its {len(found)} anchors is by {key}")
        typer.echo(
            f"{count} anchors by {key}: nothing that was there when they were signed was cut off or written anew"
        )
    if not head and not anchors:
        typer.echo(
            "the file cannot show whether lines were cut off at its end: note the last hash elsewhere, and check it "
            "later with --head; or have anchors kept elsewhere, and check them with --anchors"
        )


@ledger.command()
def anchor(
    path: LedgerPath,
    key: Annotated[Path, typer.Option(help="The owner's private key: node.key of a site, server.key of the server.")],
    to: Annotated[Path | None, typer.Option(help="File to which the anchor is appended.")] = None,
    post: Annotated[str, typer.Option(help="URL that gets the anchor as JSON.")] = "",
) -> None:
    """Sign the last hash of a ledger. Its keeper can later detect whether lines were cut off."""
    from cloister.privacy.accounting.anchors import anchored, hand_over

    made = anchored(_opened(path), key)
    hand_over(made, to, post)
    typer.echo(made.line)


@ledger.command()
def show(
    path: LedgerPath,
    delta: Annotated[float, typer.Option(help="δ at which ε is computed.")] = 1e-5,
    relation: Annotated[str, typer.Option(help="add-or-remove, or replace-one.")] = "add-or-remove",
) -> None:
    """List the releases and their total cost."""
    from cloister.privacy.claims.report import print_ledger

    print_ledger(_opened(path), delta, relation)


@ledger.command()
def leakage(paths: Annotated[list[Path], typer.Argument()]) -> None:
    """Print the leakage of each client that noises its own model, and a summary.

    PATHS are the ledgers of the clients, one each.
    """
    from cloister.privacy.claims.report import leakage_report, render_leakage

    spent = [_opened(path).leakage() for path in paths]
    for path, leaked in zip(paths, spent, strict=True):
        typer.echo(f"{path}: {at_most(leaked, 6)}")
    for line in render_leakage(leakage_report(spent)):
        typer.echo(line)


def _opened(path: Path) -> "Ledger":
    from cloister.privacy.accounting.ledger import Ledger

    if not path.is_file():
        raise LedgerError(f"no ledger at {path}")
    return Ledger(path)
