from collections.abc import Callable
from typing import Any


class PairwiseMerge:
    """Merges the partial results of shards as they arrive, in a fixed order.

    A binary tree over shard numbers: neighbours are merged first, then pairs of these. Each late shard delays only
    about as many partial results as the logarithm of the number of shards.
    """

    def __init__(self, merge: Callable[[Any, Any], Any]) -> None:
        self._merge = merge
        self._waiting: dict[tuple[int, int], Any] = {}

    def add(self, number: int, part: Any) -> None:
        """Adds the partial result of a shard."""
        level = 0
        while (level, number ^ 1) in self._waiting:
            other = self._waiting.pop((level, number ^ 1))
            part = self._merge(part, other) if number % 2 == 0 else self._merge(other, part)
            level, number = level + 1, number // 2
        self._waiting[level, number] = part

    def result(self) -> Any:
        """The merged result of all shards; `None` if there are none."""
        total = None
        for level, number in sorted(self._waiting, key=lambda at: at[1] << at[0]):
            total = self._merge(total, self._waiting[level, number])
        return total
