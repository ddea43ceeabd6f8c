"""Executors that run calls in this process, and break when they are told to."""

from concurrent.futures import BrokenExecutor, Executor, Future


class Here(Executor):
    """Runs a call when it is submitted. The calls whose numbers are in `kills` break it, as a worker's death does."""

    def __init__(self, kills=()):
        self.calls, self.kills, self.broken = [], kills, False

    def submit(self, fn, /, *args):
        future = Future()
        self.calls.append(args)
        self.broken |= len(self.calls) - 1 in self.kills
        if self.broken:
            future.set_exception(BrokenExecutor("a worker died"))
        else:
            future.set_result(fn(*args))
        return future
