"""The program `cloister`, also as `python -m cloister`: Ctrl-C ends it in one line, even while it imports libraries."""

import sys

from cloister.utils.crash import INTERRUPTED, interrupts, record_interrupts


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: always, with the command's exit code.
    """
    record_interrupts()
    try:
        from cloister.cli import app

        app()
    except SystemExit:
        raise
    except BaseException:
        if not interrupts:
            raise
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
