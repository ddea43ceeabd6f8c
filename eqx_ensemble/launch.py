"""Several processes on this machine that run one program: `python -m eqx_ensemble.launch -n 2 script.py`.

JAX starts no processes, and what does needs Open MPI, PyTorch or a cluster. With a loop of a shell instead, one process
that fails leaves the others waiting for JAX's timeouts, lines of all are mixed, and Ctrl-C leaves some behind: that is
what this program is for, and no more.
"""

import argparse
import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .distributed._environment import OURS

_LAST_WORDS = 2.0  # seconds for what processes that are left behind still write


class _Ended(NamedTuple):
    process_id: int
    code: int


class _Signalled(NamedTuple):
    number: int


class _Copier:
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
            self._news.put(_Signalled(signal.SIGPIPE))

    def _write(self, text: bytes) -> None:
        """Without the buffer of the target, whose lock Python needs when it exits; the time does not count."""
        begin = time.monotonic()
        while text:
            text = text[os.write(self._target.fileno(), text) :]
        self._deadline += time.monotonic() - begin


class _Children:
    """The processes, what they write, and the news of them."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[_Ended | _Signalled] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copiers: list[_Copier] = []
        self._children: list[subprocess.Popen[Any]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts one more."""
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # of its own: what it starts ends with it, and Ctrl-C comes from here alone
        )
        number = len(self._children)
        self._children.append(child)
        threading.Thread(target=self._wait_for, args=(number, child), daemon=True).start()
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            self._copiers.append(_Copier(source, target, f"[{number}] ".encode(), self._lock, self.news))

    def _wait_for(self, number: int, child: subprocess.Popen[Any]) -> None:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: what an ended process has left is not ended
            self.news.put(_Ended(number, child.wait()))
            return
        # Without reaping it: its number stays taken, so that a signal to its group reaches nobody else.
        how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None  # that is for `WNOHANG`
        self.news.put(_Ended(number, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status))

    def send(self, number: int) -> None:
        """Sends a signal to the processes that still run, and to what all have started."""
        for child in self._children:
            if child.returncode is None:
                try:
                    os.killpg(child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass  # all of it has ended just now, which macOS calls the second

    def end(self) -> None:
        """Ends all that is left, shows its last lines, and forgets it."""
        self.send(signal.SIGKILL)
        self._show_last_lines()
        for child in self._children:
            child.wait()

    def _show_last_lines(self) -> None:
        """Returns when the lines of all are written, or at a signal."""
        for copier in self._copiers:
            copier.finish_by(time.monotonic() + _LAST_WORDS)
        while not all(copier.is_done for copier in self._copiers):
            with contextlib.suppress(queue.Empty):
                if isinstance(self.news.get(timeout=0.02), _Signalled):
                    return


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, grace: float) -> int:
    """Runs the processes to their end and returns the exit code for all.

    The first one that fails is named, and ends the others: by SIGTERM, and by SIGKILL if they still run `grace`
    seconds later. The first Ctrl-C is passed on, the second ends them in the same way. What a process has started and
    left behind ends when all have ended.
    """
    children = _Children()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Before the first process is there: a signal that came while they are started would leave some behind.
    before = {
        number: signal.signal(number, lambda number, frame: children.news.put(_Signalled(number))) for number in numbers
    }
    try:
        for environment in environments:
            children.start(command, environment)
        return _watch(children, len(environments), grace)
    finally:
        children.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(children: _Children, running: int, grace: float) -> int:
    code, deadline, interrupted = 0, None, False
    while running:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            news = children.news.get(timeout=left)
        except queue.Empty:
            children.send(signal.SIGKILL)
            deadline = None
            continue
        if isinstance(news, _Ended):
            running -= 1
            failed = news.code != 0 and code == 0
            if failed:
                code = news.code if news.code > 0 else 128 - news.code
        elif news.number == signal.SIGINT and not interrupted and deadline is None:
            interrupted, code = True, 130
            children.send(signal.SIGINT)
            continue
        else:
            failed = deadline is None
            code = code or 128 + news.number
        if failed and running:
            children.send(signal.SIGTERM)
            deadline = time.monotonic() + grace
        if failed and isinstance(news, _Ended):
            print(exit_message(news.process_id, news.code, others=running), file=sys.stderr, flush=True)
    return code


def environment_of(number: int, *, processes: int, devices: int | None, port: int) -> dict[str, str]:
    """The environment of one process."""
    variables = {name: value for name, value in os.environ.items() if name not in OURS}
    if processes > 1:
        variables |= dict(zip(OURS, (f"127.0.0.1:{port}", str(processes), str(number)), strict=True))
        variables["PYTHONUNBUFFERED"] = "1"  # lines are shown when they are written
    if devices is not None:
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        variables.setdefault("JAX_PLATFORMS", "cpu")
    elif processes > 1:
        variables.setdefault("JAX_LOCAL_DEVICE_IDS", str(number))  # of GPUs, one each
    return variables


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_ensemble.launch",
        usage="%(prog)s -n PROCESSES [--devices DEVICES] [--grace SECONDS] [-m] PROGRAM [ARGUMENTS ...]",
        description="Run a program in several processes on this machine that find each other, and show what they "
        "write with their number in front. For programs that call `distributed.initialise`.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument("--devices", type=int, help="how many virtual CPU devices each has (default: what JAX finds)")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL (default: 5)")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as in `python -m`")
    parser.add_argument("program", metavar="PROGRAM", help="the script")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="what is passed to it")
    options = parser.parse_args(arguments)
    try:
        check_launch(options.processes, options.devices, options.grace, None if options.module else options.program)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, with the arguments of its line."""
    options = _parse_arguments(arguments)
    program = ["-m", options.program] if options.module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    if options.processes == 1:
        os.execve(sys.executable, command, environment_of(0, processes=1, devices=options.devices, port=0))
    check_process_groups()
    port = _free_port()
    environments = [
        environment_of(number, processes=options.processes, devices=options.devices, port=port)
        for number in range(options.processes)
    ]
    return run(command, environments, grace=options.grace)


def check_launch(processes: int, devices: int | None, grace: float, script: str | None) -> None:
    """Checks the options of the command line."""
    if processes < 1:
        raise ValueError(f"-n needs at least 1 process, got {processes}")
    if devices is not None and devices < 1:
        raise ValueError(f"--devices needs at least 1, got {devices}")
    if not (math.isfinite(grace) and grace >= 0):
        raise ValueError(f"--grace needs a number of seconds, got {grace:g}")
    if script is not None and not os.path.isfile(script):
        raise ValueError(f"there is no file {script!r}; a module is run by `-m`")


def check_process_groups() -> None:
    """Checks that the system can end a process with all that it has started."""
    if not hasattr(os, "killpg"):
        raise NotImplementedError(
            "`python -m eqx_ensemble.launch` ends processes in groups, which this system does not have.\n"
            "Start the processes yourself, and pass `coordinator`, `num_processes` and `process_id` to "
            "`distributed.initialise`."
        )


def exit_message(process_id: int, code: int, *, others: int) -> str:
    """The message for a process that failed."""
    how = f"failed with exit code {code}"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {known.get(-code, f'signal {-code}')}"
    rest = f"; ending the {'other process' if others == 1 else f'{others} other processes'}" if others else ""
    return f"eqx_ensemble.launch: process {process_id} {how}{rest}."


if __name__ == "__main__":
    sys.exit(main())
