import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ._copier import Copier, Ended, Signalled

_LAST_WORDS = 2.0  # seconds for the output of processes that were left behind


class Children:
    """The processes, their output, and a queue of their events."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[Ended | Signalled] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copiers: list[Copier] = []
        self._children: list[subprocess.Popen[Any]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a process."""
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # its children end with it, and only this process sends it Ctrl-C
        )
        number = len(self._children)
        self._children.append(child)
        threading.Thread(target=self._wait_for, args=(number, child), daemon=True).start()
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            self._copiers.append(Copier(source, target, f"[{number}] ".encode(), self._lock, self.news))

    def _wait_for(self, number: int, child: subprocess.Popen[Any]) -> None:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: children left by an ended process are not ended
            self.news.put(Ended(number, child.wait()))
            return
        # Not reaped: its number stays in use, so that a signal to its group cannot reach other processes.
        how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None  # `None` needs `WNOHANG`
        self.news.put(Ended(number, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status))

    def send(self, number: int) -> None:
        """Sends a signal to all processes that are not reaped, and to their children."""
        for child in self._children:
            if child.returncode is None:
                try:
                    os.killpg(child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass  # the group has just ended, for which macOS raises the latter

    def end(self) -> None:
        """Kills the remaining processes, shows their last lines, and reaps them."""
        self.send(signal.SIGKILL)
        self._show_last_lines()
        for child in self._children:
            child.wait()

    def _show_last_lines(self) -> None:
        """Waits until all lines are written, or for a signal."""
        for copier in self._copiers:
            copier.finish_by(time.monotonic() + _LAST_WORDS)
        while not all(copier.is_done for copier in self._copiers):
            with contextlib.suppress(queue.Empty):
                if isinstance(self.news.get(timeout=0.02), Signalled):
                    return
