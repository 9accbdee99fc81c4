"""Report of provisioning on the console."""

from datetime import UTC, datetime

from rich.console import Console

from cloister.core.terminal import table
from cloister.deploy.certificates import EXPIRY_WARNING_DAYS
from cloister.deploy.kits import Report


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
