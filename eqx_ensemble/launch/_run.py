import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from ._check import exit_message
from ._children import Children
from ._copier import Ended, Signalled


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, grace: float) -> int:
    """Runs the processes to their end and returns the exit code for all.

    The first failure is reported, and the other processes are ended: by SIGTERM, and by SIGKILL if they still run
    `grace` seconds later. The first Ctrl-C is passed on, the second ends them in the same way. Children that a process
    left behind are ended after all processes.
    """
    children = Children()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Set before the first process starts: a signal during the start would leave some behind.
    before = {
        number: signal.signal(number, lambda number, frame: children.news.put(Signalled(number))) for number in numbers
    }
    try:
        for environment in environments:
            children.start(command, environment)
        return _watch(children, len(environments), grace)
    finally:
        children.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(children: Children, running: int, grace: float) -> int:
    code, deadline, interrupted = 0, None, False
    while running:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            news = children.news.get(timeout=left)
        except queue.Empty:
            children.send(signal.SIGKILL)
            deadline = None
            continue
        if isinstance(news, Ended):
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
        if failed and isinstance(news, Ended):
            print(exit_message(news.process_id, news.code, others=running), file=sys.stderr, flush=True)
    return code
