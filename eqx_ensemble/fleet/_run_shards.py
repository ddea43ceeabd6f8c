"""The loop over shards: submits and collects them, and retries those whose workers died up to a limit."""

import concurrent.futures as futures
import contextlib
import functools as ft
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .._caller import caller
from .._check import check_optional_flag
from .._progress import progress_line
from .._warnings import warn
from ._check import check_retries, check_shard
from ._divide import default_size, divide
from ._engines import Engine, open_engine
from ._serialise import ArrayRef, dumps, loads, refs_of
from ._shard import Finished, Shard, ShardReport, members_text
from ._worker import Attempt, Outcome, Task, run_shard, settings

# Errors of the user's code are values in an `Outcome`, so what a future raises is about its worker. A pool breaks for
# all of its shards at once, and does not say which one killed it, for example by the memory that it takes. Counted for
# all, such a shard would have innocent ones abandoned; counted for none, it would break pools forever. Hence the
# suspects run one at a time, and only a shard that broke a pool alone is charged.
#
# Few shards are in flight, since their arguments are in memory, and each is a suspect if the pool breaks. A second one
# per worker waits there while the first runs.

_DIVERGED = re.compile(r"member\(s\) diverged")


class WarnOnce:
    """Repeats each warning of the workers once, without those about divergence, which the caller combines."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._seen and not _DIVERGED.search(text):
                self._seen.add(text)
                warn(text)


_SHOWN = ("stopped", "diverged")  # in the progress line


class Hooks(NamedTuple):
    """What the caller's process does when a shard ends.

    **Attributes:**

    - `progress`: whether to show a progress line.
    - `keep`: what to keep of a shard's result.
    - `count`: the number of members with each status, from what is kept.
    - `on_shard`: called with a report on each shard.
    """

    progress: bool | None = None
    keep: Callable[[Shard, Any], Any] = lambda shard, result: result
    count: Callable[[Any], dict[str, int]] = lambda result: {}
    on_shard: Callable[[ShardReport], Any] | None = None


def run_shards(
    engine: Engine, task: Task, shards: Iterable[Shard], arrays: list[Any], *, retries: int, hooks: Hooks
) -> Finished:
    """Runs all shards.

    **Arguments:**

    - `arrays`: arrays in `task` and in shards that are sent to each worker once.
    - `hooks`: what to do when a shard ends.

    **Raises:** the error of a shard, with a note that names its members; the other shards are cancelled.
    """
    check_optional_flag(hooks.progress, "progress")
    work = _Work(engine, retries, refs_of(arrays))
    work.queue.extend(shards)
    total = sum(len(shard.positions) for shard in work.queue)
    with (
        engine.share([np.asarray(array) for array in arrays]) as shared,
        progress_line(show=hooks.progress, description="fleet", unit="member", total=total) as line,
    ):
        work.task, work.shared = dumps(task, work.numbers), shared
        totals: Counter[str] = Counter()
        try:
            while work.queue or work.in_flight:
                work.submit()
                ended = [(shard, hooks.keep(shard, x.result), x.seconds) for shard, x in work.collect(arrays)]
                work.results.extend((shard, kept) for shard, kept, _ in ended)
                for shard, kept, seconds in ended:
                    counts = hooks.count(kept)
                    totals.update(counts)
                    line.set_postfix({word: totals[word] for word in _SHOWN if word in totals}, refresh=False)
                    line.update(len(shard.positions))
                    work.report(shard, hooks.on_shard, seconds, counts)
                work.report_lost(hooks.on_shard)
        except KeyboardInterrupt:
            _cancel(work)
            work.collect_done(arrays, hooks.keep)
            return _in_order(work, interrupted=True)
        except BaseException:
            _cancel(work)
            raise
    return _in_order(work, interrupted=False)


class _Work:
    """The queued, running and completed shards of a call."""

    def __init__(self, engine: Engine, retries: int, numbers: dict[int, ArrayRef]) -> None:
        self.engine, self.retries, self.numbers = engine, retries, numbers
        self.queue: deque[Shard] = deque()
        self.in_flight: dict[futures.Future[Any], Shard] = {}
        self.results: list[tuple[Shard, Any]] = []
        self.lost: list[ShardReport] = []
        self.task, self.shared = b"", []
        self._broken: BaseException | None = None
        self._settings = settings()
        self._warn_once = WarnOnce()
        self._failures: Counter[int] = Counter()
        self._attempts: Counter[int] = Counter()
        self._suspects: set[int] = set()
        self._unreported: list[ShardReport] = []

    def submit(self) -> None:
        """Submits shards. Shards that were running when the executor broke run one at a time: any may be the cause."""
        if self.queue and self._broken is not None:
            self._restart(self._broken)
        most = 1 if self._suspects else _most_in_flight(self.engine)
        while self.queue and len(self.in_flight) < most:
            shard = self.queue.popleft()
            own = dumps(shard.own(), self.numbers)
            attempt = Attempt(self._failures[shard.number], self._settings)
            self._attempts[shard.number] += 1
            try:
                self.in_flight[self.engine.submit(run_shard, self.task, own, attempt, *self.shared)] = shard
            except futures.BrokenExecutor as error:  # it broke after the last wait
                failed: futures.Future[Any] = futures.Future()
                failed.set_exception(error)
                self.in_flight[failed] = shard
                break
            except RuntimeError as error:
                if "shutdown" in str(error):
                    error.add_note(f"`{caller()}` needs an executor that is open: call it inside the `with` block.")
                raise

    def collect(self, arrays: list[Any]) -> list[tuple[Shard, Outcome]]:
        """Waits for a shard to end. Returns completed shards, and requeues those whose workers died."""
        found, broken = [], False
        failed: list[tuple[Shard, BaseException]] = []
        try:
            done = self.engine.wait(self.in_flight) if self.in_flight else set()  # none after all were abandoned
        except futures.BrokenExecutor as error:
            failed += [(shard, error) for shard in self.in_flight.values()]
            broken, done = True, set()
            self.in_flight.clear()
        for future in sorted(done, key=lambda future: self.in_flight[future].number):
            shard = self.in_flight.pop(future)
            error = futures.CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                failed.append((shard, error))
                broken |= isinstance(error, futures.BrokenExecutor)
                continue
            outcome = loads(future.result(), arrays)
            self._warn_once(outcome.warnings)
            if outcome.error is not None:
                outcome.error.add_note(f"`{caller()}` was running {members_text(shard.ids)} on a worker.")
                raise outcome.error
            self._suspects.discard(shard.number)
            found.append((shard, outcome))
        if broken:
            error = next(e for _, e in failed if isinstance(e, futures.BrokenExecutor))
            failed += [(shard, error) for shard in self.in_flight.values()]
            self.in_flight.clear()
        self._retry(failed, broken=broken)
        return found

    def _retry(self, failed: list[tuple[Shard, BaseException]], *, broken: bool) -> None:
        alone = len(failed) == 1 or not broken
        for shard, error in sorted(failed, key=lambda pair: pair[0].number, reverse=True):
            self._failures[shard.number] += alone
            if self._failures[shard.number] > self.retries:
                self._suspects.discard(shard.number)
                self._abandon(shard, error)
                continue
            if broken:
                self._suspects.add(shard.number)
            self.queue.appendleft(shard)
        if broken:
            self._broken = failed[0][1]

    def _restart(self, error: BaseException) -> None:
        """Restarts the executor; abandons all shards if that is not possible."""
        self._broken = None
        hopeless = len(self.lost) > 1 and not self.results  # no worker has completed a shard
        if hopeless or not self.engine.restart():
            for shard in self.queue:
                self._abandon(shard, error)
            self.queue.clear()

    def _abandon(self, shard: Shard, error: BaseException) -> None:
        report = ShardReport(shard.number, shard.ids, self._attempts[shard.number], np.nan, {}, error)
        self.lost.append(report)
        self._unreported.append(report)

    def report(self, shard: Shard, on_shard: Any, seconds: float, counts: dict[str, int]) -> None:
        """Calls `on_shard` for a completed shard."""
        if on_shard is not None:
            on_shard(ShardReport(shard.number, shard.ids, self._attempts[shard.number], seconds, counts, None))

    def report_lost(self, on_shard: Any) -> None:
        """Calls `on_shard` for the shards abandoned since the last call."""
        unreported, self._unreported = self._unreported, []
        for report in unreported:
            if on_shard is not None:
                on_shard(report)

    def collect_done(self, arrays: list[Any], keep: Callable[[Shard, Any], Any]) -> None:
        """Collects the results that are available, without waiting for others."""
        taken = {shard.number for shard, _ in self.results}
        for future, shard in self.in_flight.items():
            is_there = future.done() and not future.cancelled() and future.exception() is None
            outcome = loads(future.result(), arrays) if is_there and shard.number not in taken else None
            if outcome is not None and outcome.error is None:
                self.results.append((shard, keep(shard, outcome.result)))


def _most_in_flight(engine: Engine) -> int:
    """The number of shards that are submitted at once; the next ones wait where others run."""
    try:
        return 2 * engine.num_workers()
    except futures.BrokenExecutor:
        return 1  # whose submission fails


def _cancel(work: _Work) -> None:
    """Cancels all shards, and ends those that run if this call started their workers."""
    running = sum(not (future.cancel() or future.done()) for future in work.in_flight)
    with contextlib.suppress(UserWarning):  # where warnings are errors: the one that ends the call is raised
        work.engine.abort(running)


def _in_order(work: _Work, *, interrupted: bool) -> Finished:
    """The completed and the abandoned shards, by number."""
    results = sorted(work.results, key=lambda pair: pair[0].number)
    return Finished(results, sorted(work.lost, key=lambda report: report.number), interrupted)


# One call over shards: opens the engine, divides the members, and closes what it opened.


class Call(NamedTuple):
    """A call of `fn(common, own)` on workers; `part(positions)` makes the argument `own` of each shard.

    `arrays` are leaves of `common` and of the parts that are sent to each worker once.
    """

    fn: Callable[[Any, Any], Any]
    common: Any
    part: Callable[[np.ndarray], Any]
    arrays: list[Any]
    ids: np.ndarray


def run_call(
    call: Call,
    executor: Any,
    *,
    shard: int | None,
    workers: int | None,
    retries: int,
    hooks: Hooks,
    start: Callable[[int], list[tuple[int, np.ndarray]]] | None = None,
) -> Finished:
    """Runs a call on an executor. `start(size)` returns the numbered shards to run; by default all of them."""
    retries, count = check_retries(retries), len(call.ids)
    if shard is not None:
        check_shard(shard, count)
    with open_engine(executor, workers) as engine:
        size = default_size(count, engine.num_workers()) if shard is None else shard
        numbered = list(enumerate(divide(count, size))) if start is None else start(size)
        shards = [
            Shard(number, positions, call.ids[positions], ft.partial(call.part, positions))
            for number, positions in numbered
        ]
        task = Task(call.fn, call.common)
        return run_shards(engine, task, shards, call.arrays, retries=retries, hooks=hooks)
