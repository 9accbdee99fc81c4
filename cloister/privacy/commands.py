"""Commands of `cloister ledger`; each imports its own dependencies."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.utils.errors import ConfigError, LedgerError
from cloister.utils.text import at_most

if TYPE_CHECKING:
    from cloister.privacy.accounting.ledger import Ledger

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
