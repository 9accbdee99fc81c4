"""Supervisor of a server app: restarts the app if it is killed, up to a number of times.

The app is not restarted if it ends by itself or on request. The state for a restart is in a folder of the task, which
outlives the supervisor and the executor. A new supervisor of that folder continues the task. Run as a file.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

APP = Path(__file__).parents[1] / "flower" / "serverapp.py"
"""The program of each task; `start.sh` finds its processes by this name."""
KILLED = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT}
"""Signals that end a process without cleanup. A kernel without memory sends the first."""
TASK, LOCK, STARTS, RUN = "task.json", "lock", "starts", "run"
"""Files of a task's folder: its command; lock of its supervisor and app; a byte for each start; the run directory."""
PR_SET_PDEATHSIG = 1


class Supervisor:
    """Supervisor of one program.

    Args:
        command: of the program.
        token: written to its standard input.
        folder: of its task; removed after the last run of the program.
    """

    def __init__(self, command: Sequence[str], token: str, folder: Path) -> None:
        self.command, self.token, self.folder = command, token, folder
        self.asked = False
        self._process: subprocess.Popen[str] | None = None

    def run(self, resumes: int, held: Sequence[int] = ()) -> int:
        """Run the program until it ends by itself or on request, or has no restarts left.

        Args:
            resumes: largest number of restarts, by all supervisors of this folder together.
            held: open files that the program inherits.

        Returns:
            Its exit status, negative if a signal ended it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        environment = os.environ | {"CLOISTER_TASK": str(self.folder), "CLOISTER_RUN_FILE": str(self.folder / RUN)}
        supervisor, status = os.getpid(), -int(signal.SIGKILL)
        while -status in KILLED and not self.asked:
            with (self.folder / STARTS).open("ab") as starts:
                if starts.tell() > resumes:
                    break
                starts.write(b"x")
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                env=environment,
                text=True,
                pass_fds=held,
                preexec_fn=lambda: end_with(supervisor),
            )
            if self.asked:
                self._process.send_signal(signal.SIGINT)
            try:
                self._process.communicate(f"{self.token}\n")
            except BrokenPipeError:
                self._process.wait()
            status = self._process.returncode
        # Renamed first, so that a partly removed folder is not taken for a task.
        ended = self.folder.rename(self.folder.with_name(f"ended-{self.folder.name}"))
        shutil.rmtree(ended, ignore_errors=True)
        return status

    def _pass_on(self, *_: object) -> None:
        """Ask the program to end, by SIGINT.

        A service manager may have signalled the program too, and a second SIGTERM would kill it.
        """
        self.asked = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies.

    The parent's successor starts it again.

    Args:
        parent: process id; it may be dead already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, executor: int) -> int:
    """Supervise the app of a task, as soon as no other process holds its lock.

    Args:
        folder: of the task.
        executor: process that started this one.

    Returns:
        The exit status.
    """
    end_with(executor)
    try:
        with (folder / LOCK).open("rb") as lock:
            # The app holds the lock too: it may briefly outlive a killed supervisor.
            fcntl.flock(lock, fcntl.LOCK_EX)
            task = json.loads((folder / TASK).read_text())
            command = [sys.executable, "-P", str(APP), *task["arguments"]]
            return 1 if Supervisor(command, task["token"], folder).run(task["resumes"], [lock.fileno()]) else 0
    except FileNotFoundError:
        return 0  # the previous holder of the lock has completed the task


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
