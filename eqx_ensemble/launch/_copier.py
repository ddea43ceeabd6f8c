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
    """The launcher has received a signal."""

    number: int


class Copier:
    """Copies the output of a process, line by line, in a separate thread, so that processes do not block each other."""

    def __init__(
        self, source: Any, target: Any, prefix: bytes, lock: threading.Lock, news: queue.SimpleQueue[Any]
    ) -> None:
        self._source, self._target, self._prefix, self._lock, self._news = source, target, prefix, lock, news
        self._reading, self._deadline = False, math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish_by(self, deadline: float) -> None:
        """Stops reading after the deadline: children that a process left behind may write for ever."""
        self._deadline = deadline

    @property
    def is_done(self) -> bool:
        """Whether everything is copied, except for output of processes that were left behind.

        Slow terminals and pipes are waited for.
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
        """The lines without line ends; of a line that was overwritten, such as a progress bar, the last text."""
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
        """Writes past the target's buffer, whose lock Python needs at exit; the time is added to the deadline."""
        begin = time.monotonic()
        while text:
            text = text[os.write(self._target.fileno(), text) :]
        self._deadline += time.monotonic() - begin
