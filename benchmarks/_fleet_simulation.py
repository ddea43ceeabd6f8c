"""Simulates shards of members on workers that fail: how much longer does it take than without failures and waste?"""

import heapq
import itertools
from collections import deque
from typing import NamedTuple

import numpy as np


class Policy(NamedTuple):
    """How members are divided and saved: members of a shard, seconds between two checkpoints, `None` for none."""

    shard: int
    interval: float | None


class Fleet(NamedTuple):
    """Workers, with exponential lifetimes in seconds; one restart, one save; the spread of their speeds."""

    workers: int = 1000
    life: float = 6 * 3600.0
    restart: float = 60.0
    save: float = 2.0
    spread: float = 0.2


def overhead(fleet: Fleet, policy: Policy, members: int, seconds: float, *, seed: int) -> float:
    """The time until all are done, over that of workers without failures that share the work evenly, less 1.

    `seconds` are those of one member on a worker of speed 1.
    """
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(1 - fleet.spread, 1 + fleet.spread, fleet.workers)
    sizes = [len(part) for part in np.array_split(np.arange(members), -(-members // policy.shard))]
    queue, idle = deque(size * seconds for size in sizes), []
    events: list[tuple[float, int, int, float]] = []  # when, order, worker, what is left of a shard; -1: starts
    order, done, now = itertools.count(), 0, 0.0

    def begin(worker: int) -> None:
        left = queue.popleft()
        need = left / speeds[worker]
        pieces = 0 if policy.interval is None else int(need // policy.interval)
        end, fails = need + pieces * fleet.save, rng.exponential(fleet.life)
        if fails >= end:
            heapq.heappush(events, (now + end, next(order), worker, 0.0))
            return
        kept = 0.0 if policy.interval is None else policy.interval * int(fails // (policy.interval + fleet.save))
        heapq.heappush(events, (now + fails, next(order), worker, left - kept * speeds[worker]))

    idle = list(range(fleet.workers))
    while done < len(sizes):
        while idle and queue:
            begin(idle.pop())
        now, _, worker, left = heapq.heappop(events)
        if left > 0:
            queue.append(left)
            heapq.heappush(events, (now + fleet.restart, next(order), worker, -1.0))
        else:
            done += left == 0
            idle.append(worker)
    return now / (members * seconds / speeds.sum()) - 1


def checkpoint_overhead(fleet: Fleet, interval: float, seconds: float, *, seed: int, draws: int = 1000) -> float:
    """The mean time of one long shard on a worker that fails, over its work, less 1."""
    times = [_time_of_shard(fleet, interval, seconds, rng) for rng in _generators(seed, draws)]
    return float(np.mean(times)) / seconds - 1


def _generators(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(own) for own in np.random.SeedSequence(seed).spawn(count)]


def _time_of_shard(fleet: Fleet, interval: float, left: float, rng: np.random.Generator) -> float:
    total = 0.0
    while True:
        end, fails = left + fleet.save * int(left // interval), rng.exponential(fleet.life)
        if fails >= end:
            return total + end
        left -= interval * int(fails // (interval + fleet.save))
        total += fails + fleet.restart


def young(fleet: Fleet) -> float:
    """The interval between checkpoints that costs least, to first order: Young (1974)."""
    return (2 * fleet.save * fleet.life) ** 0.5


def daly(fleet: Fleet) -> float:
    """The same to higher order: Daly (2006), for saves that are short beside a life."""
    ratio = fleet.save / (2 * fleet.life)
    return (2 * fleet.save * fleet.life) ** 0.5 * (1 + ratio**0.5 / 3 + ratio / 9) - fleet.save
