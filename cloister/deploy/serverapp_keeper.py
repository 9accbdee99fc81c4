"""Keep a server app going: start it again if it is killed outright, at most so many times.

A process that dies by itself, or is asked to end, has had its last words and is left in peace. Run as a file.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

APP = Path(__file__).with_name("serverapp_kept.py")
KILLED = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT}
"""Signals after which a process had no last words. The first is that of a kernel without memory."""


class Keeper:
    """Starts one program, again and again if need be.

    Args:
        command: of the program.
        token: is given to it on its standard input.
    """

    def __init__(self, command: Sequence[str], token: str) -> None:
        self.command, self.token = command, token
        self.asked = False
        self._process: subprocess.Popen[str] | None = None

    def keep(self, resumes: int) -> int:
        """Run the program to an end that was its own.

        Args:
            resumes: how often it is started again at most.

        Returns:
            Its exit status, negative if it was a signal that ended it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        with tempfile.TemporaryDirectory(prefix="cloister-task-") as folder:
            status = self._run(folder)
            while -status in KILLED and resumes and not self.asked:
                resumes -= 1
                print(f"the server app was killed ({signal.Signals(-status).name}) and is started again", flush=True)
                status = self._run(folder)
        return status

    def _run(self, folder: str) -> int:
        environment = os.environ | {"CLOISTER_TASK": folder, "CLOISTER_RUN_FILE": str(Path(folder) / "run")}
        self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, env=environment, text=True)
        if self.asked:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(f"{self.token}\n")
        except BrokenPipeError:
            self._process.wait()
        return self._process.returncode

    def _pass_on(self, *_: Any) -> None:
        """Ask the program to end. By SIGINT: a service manager may have asked it too, and SIGTERM twice cuts it off."""
        self.asked = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    resumes, *arguments = sys.argv[1:]
    keeper = Keeper([sys.executable, "-P", str(APP), *arguments], sys.stdin.readline().strip())
    sys.exit(keeper.keep(int(resumes)) and 1)
