"""The loop over shards: submits, collects, repeats those whose workers died, and gives up after so many tries."""

import concurrent.futures as futures
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .._progress import progress_line
from .._warnings import warn
from ._engines import Engine
from ._settings import settings
from ._travel import dumps, loads
from ._worker import Attempt, Task, run_shard

_MOST_NAMED = 8
_DIVERGED = re.compile(r"member\(s\) diverged")


class Shard(NamedTuple):
    """Some members: the number of the shard, their positions, their ids, and what only they need."""

    number: int
    positions: np.ndarray
    ids: np.ndarray
    own: Callable[[], Any]


class Finished(NamedTuple):
    """The results of the shards that were done, in their order; of those given up why; whether Ctrl-C ended it."""

    results: list[tuple[Shard, Any]]
    lost: list[tuple[Shard, BaseException]]
    interrupted: bool


def run_shards(
    engine: Engine,
    task: Task,
    shards: Iterable[Shard],
    arrays: list[np.ndarray],
    *,
    retries: int,
    progress: bool | None,
    report: Callable[[Any], dict[str, str]],
    follow: Callable[[Shard, Any], Iterable[Shard]] | None = None,
    name: str,
) -> Finished:
    """Runs all shards.

    **Arguments:**

    - `arrays`: those in `task` and in shards that every worker is given once.
    - `report`: what the progress line shows, of the result of a shard.
    - `follow`: called with each shard that is done and its result, or `None` if it is given up. Returns shards to run.

    **Raises:** the error of a shard, with a note that names its members; the others are cancelled then.
    """
    work = _Work(engine, retries, {id(array): i for i, array in enumerate(arrays)}, name)
    work.queue.extend(shards)
    total = None if follow else sum(len(shard.positions) for shard in work.queue)
    with (
        engine.share(arrays) as shared,
        progress_line(show=progress, description="fleet", unit="member", total=total) as line,
    ):
        work.task, work.shared = dumps(task, work.numbers, name=name), shared
        try:
            while work.queue or work.open:
                work.submit()
                given_up = len(work.lost)
                for shard, result in work.collect():
                    line.set_postfix(report(result), refresh=False)
                    line.update(len(shard.positions))
                    work.queue.extend(follow(shard, result) if follow else ())
                for shard, _ in work.lost[given_up:]:
                    work.queue.extend(follow(shard, None) if follow and not work.ended else ())
        except KeyboardInterrupt:
            work.cancel()
            work.collect_done()
            return work.result(interrupted=True)
        except BaseException:
            work.cancel()
            raise
    return work.result(interrupted=False)


class _Work:
    """The shards to do, those that are open, and those that are done."""

    def __init__(self, engine: Engine, retries: int, numbers: dict[int, int], name: str) -> None:
        self.engine, self.retries, self.numbers, self.name = engine, retries, numbers, name
        self.queue: deque[Shard] = deque()
        self.open: dict[futures.Future[Any], Shard] = {}
        self.results: list[tuple[Shard, Any]] = []
        self.lost: list[tuple[Shard, BaseException]] = []
        self.task, self.shared = b"", []
        self.ended = False  # no executor is left
        self._settings = settings()
        self._told: set[str] = set()
        self._failures: Counter[int] = Counter()
        self._suspects: set[int] = set()

    def submit(self) -> None:
        """Fills the executor. Shards that were open when one broke are tried alone: one of them may be the cause."""
        most = 1 if self._suspects else self.engine.num_open()
        while self.queue and len(self.open) < most:
            shard = self.queue.popleft()
            own = dumps(shard.own(), self.numbers, name=self.name)
            attempt = Attempt(self._failures[shard.number], self._settings)
            try:
                self.open[self.engine.submit(run_shard, self.task, own, attempt, *self.shared)] = shard
            except futures.BrokenExecutor as error:  # it broke since the last wait
                failed: futures.Future[Any] = futures.Future()
                failed.set_exception(error)
                self.open[failed] = shard
                break

    def collect(self) -> list[tuple[Shard, Any]]:
        """Waits for a shard. Returns those that are done, and queues those whose workers died."""
        done, _ = futures.wait(self.open, return_when=futures.FIRST_COMPLETED)
        found, failed, broken = [], [], False
        for future in sorted(done, key=lambda future: self.open[future].number):
            shard = self.open.pop(future)
            error = futures.CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                failed.append((shard, error))
                broken |= isinstance(error, futures.BrokenExecutor)
                continue
            outcome = loads(future.result())
            self._warn(outcome.warnings)
            if outcome.error is not None:
                outcome.error.add_note(f"`{self.name}` was running {members_text(shard.ids)} on a worker.")
                raise outcome.error
            self._suspects.discard(shard.number)
            self.results.append((shard, outcome.result))
            found.append((shard, outcome.result))
        if broken:
            error = next(e for _, e in failed if isinstance(e, futures.BrokenExecutor))
            failed += [(shard, error) for shard in self.open.values()]
            self.open.clear()
        self._repeat(failed, broken=broken)
        return found

    def _warn(self, texts: Iterable[str]) -> None:
        """Warns of what a worker was warned of, once; of members that diverged the caller does, of all in one."""
        for text in texts:
            if text not in self._told and not _DIVERGED.search(text):
                self._told.add(text)
                warn(text)

    def _repeat(self, failed: list[tuple[Shard, BaseException]], *, broken: bool) -> None:
        alone = len(failed) == 1 or not broken
        for shard, error in sorted(failed, key=lambda pair: pair[0].number, reverse=True):
            self._failures[shard.number] += alone
            if self._failures[shard.number] > self.retries:
                self._suspects.discard(shard.number)
                self.lost.append((shard, error))
                continue
            if broken:
                self._suspects.add(shard.number)
            self.queue.appendleft(shard)
        hopeless = len(self.lost) > 1 and not self.results  # no worker has ended any shard
        if broken and self.queue and (hopeless or not self.engine.restart()):
            self.lost += [(shard, failed[0][1]) for shard in self.queue]
            self.queue.clear()
            self.ended = True

    def cancel(self) -> None:
        """Cancels what is open."""
        for future in self.open:
            future.cancel()

    def collect_done(self) -> None:
        """Takes the results that are there, without waiting for others."""
        taken = {shard.number for shard, _ in self.results}
        for future, shard in self.open.items():
            is_there = future.done() and not future.cancelled() and future.exception() is None
            outcome = loads(future.result()) if is_there and shard.number not in taken else None
            if outcome is not None and outcome.error is None:
                self.results.append((shard, outcome.result))

    def result(self, *, interrupted: bool) -> Finished:
        """What was done, in the order of the shards."""
        in_order = lambda pairs: sorted(pairs, key=lambda pair: pair[0].number)
        return Finished(in_order(self.results), in_order(self.lost), interrupted)


def members_text(ids: np.ndarray) -> str:
    """`the members 0, 1, 2`, the first of them."""
    listed = ", ".join(map(str, ids[:_MOST_NAMED].tolist()))
    return f"the members {listed}" + (f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else "")


def lost_message(finished: Finished, *, name: str) -> str:
    """The warning, or the error, that members are missing from a result."""
    missing = np.concatenate([shard.ids for shard, _ in finished.lost]) if finished.lost else np.zeros(0, int)
    lines = [f"`{name}` returns without {members_text(missing)}: their workers died."] if len(missing) else []
    if finished.interrupted:
        lines.append(f"`{name}` was interrupted: members of shards that were not done are missing.")
    if finished.lost:
        error = finished.lost[-1][1]
        lines.append(f"The last error was {type(error).__name__}: {error}")
    if finished.lost and not finished.results:
        lines.append(
            "No shard was done: do the workers start? A script whose executor spawns processes needs "
            "`if __name__ == '__main__':`."
        )
    return "\n".join(lines)
