import math
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """A process has ended."""

    process_id: int
    code: int


class Signalled(NamedTuple):
    """A signal has come to this process."""

    number: int


class Copier:
    """Copies what a process writes, line by line, in a thread of its own, so that no process waits for another one."""

    def __init__(
        self, source: Any, target: Any, prefix: bytes, lock: threading.Lock, news: queue.SimpleQueue[Any]
    ) -> None:
        self._source, self._target, self._prefix, self._lock, self._news = source, target, prefix, lock, news
        self._reading, self._deadline = False, math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish_by(self, deadline: float) -> None:
        """Reads no more after the deadline: what a process has left behind may write for ever."""
        self._deadline = deadline

    @property
    def is_done(self) -> bool:
        """Whether all is copied, or all that remains could come from a process that was left behind.

        A terminal or a pipe that takes the lines slowly is waited for.
        """
        return not self._thread.is_alive() or (self._reading and time.monotonic() > self._deadline)

    def _chunks(self) -> Iterator[bytes]:
        while time.monotonic() < self._deadline:
            self._reading = True
            chunk = self._source.read1(2**16)
            self._reading = False
            if not chunk:
                break
            yield chunk

    def _lines(self) -> Iterator[bytes]:
        """The lines without their ends; of one that was overwritten, as a progress bar is, what it says at last."""
        held = b""
        for chunk in self._chunks():
            *ended, held = (held + chunk).split(b"\n")
            held = held[held.rfind(b"\r", 0, -1) + 1 :]
            yield from (line.removesuffix(b"\r").rpartition(b"\r")[2] for line in ended)
        if held:
            yield held.removesuffix(b"\r")

    def _run(self) -> None:
        try:
            with self._source:
                for line in self._lines():
                    with self._lock:
                        self._write(self._prefix + line + b"\n")
        except BrokenPipeError:  # the reader is gone; Python would flush the rest at exit and fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._target.fileno())
            self._news.put(Signalled(signal.SIGPIPE))

    def _write(self, text: bytes) -> None:
        """Without the buffer of the target, whose lock Python needs when it exits; the time does not count."""
        begin = time.monotonic()
        while text:
            text = text[os.write(self._target.fileno(), text) :]
        self._deadline += time.monotonic() - begin
