"""Keep a server app going: start it again if it is killed outright, at most so many times.

A process that dies by itself, or is asked to end, has had its last words and is left in peace. What is needed to start
it again lies in a folder of its task, which outlives the supervisor and the executor: whoever starts a supervisor for
that folder goes on with the task. Run as a file.
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
from typing import Any

APP = Path(__file__).parents[1] / "flower" / "serverapp.py"
"""What is started for each task; `start.sh` knows its processes by this name."""
KILLED = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT}
"""Signals after which a process had no last words. The first is that of a kernel without memory."""
TASK, LOCK, STARTS, RUN = "task.json", "lock", "starts", "run"
"""Files of a task's folder: what to start; held while anybody is at it; a byte for each start; the run directory."""
PR_SET_PDEATHSIG = 1


class Supervisor:
    """Starts one program, again and again if need be.

    Args:
        command: of the program.
        token: is given to it on its standard input.
        folder: of its task; removed when the program has come to an end of its own.
    """

    def __init__(self, command: Sequence[str], token: str, folder: Path) -> None:
        self.command, self.token, self.folder = command, token, folder
        self.asked = False
        self._process: subprocess.Popen[str] | None = None

    def run(self, resumes: int, held: Sequence[int] = ()) -> int:
        """Run the program to an end that was its own.

        Args:
            resumes: how often it is started again at most, by all supervisors of this folder together.
            held: open files that the program inherits.

        Returns:
            Its exit status, negative if it was a signal that ended it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        status: int = -signal.SIGKILL
        while -status in KILLED and not self.asked and self._may_start(resumes):
            status = self._run_once(held)
        # In one step: what is half removed is no task any more.
        ended = self.folder.rename(self.folder.with_name(f"ended-{self.folder.name}"))
        shutil.rmtree(ended, ignore_errors=True)
        return status

    def _may_start(self, resumes: int) -> bool:
        """Whether the program was started less often than it may be; it is counted before it starts."""
        with (self.folder / STARTS).open("ab") as starts:
            if starts.tell() > resumes:
                return False
            starts.write(b"x")
            return True

    def _run_once(self, held: Sequence[int]) -> int:
        environment = os.environ | {"CLOISTER_TASK": str(self.folder), "CLOISTER_RUN_FILE": str(self.folder / RUN)}
        supervisor = os.getpid()
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
        return self._process.returncode

    def _pass_on(self, *_: Any) -> None:
        """Ask the program to end. By SIGINT: a service manager may have asked it too, and SIGTERM twice cuts it off."""
        self.asked = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: whoever comes after the parent starts it anew.

    Args:
        parent: process id; it may be dead already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, executor: int) -> int:
    """Keep the app of a task, once nobody else is at it.

    Args:
        folder: of the task.
        executor: the process that this one was started by.

    Returns:
        The exit status.
    """
    end_with(executor)
    try:
        with (folder / LOCK).open("rb") as lock:
            # The app holds it too: it may outlive a supervisor that was killed, by a moment.
            fcntl.flock(lock, fcntl.LOCK_EX)
            task = json.loads((folder / TASK).read_text())
            command = [sys.executable, "-P", str(APP), *task["arguments"]]
            return 1 if Supervisor(command, task["token"], folder).run(task["resumes"], [lock.fileno()]) else 0
    except FileNotFoundError:
        return 0  # whoever held the lock has brought the task to its end


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
