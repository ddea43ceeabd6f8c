"""The folder in which shards save their runs while they train, and the shards that it is of."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint._path import list_folder
from ..methods._round_folders import has_checkpoints
from ._check_saved import check_begun, check_one_division, check_same_division
from ._cut import divide

_SHARD = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})")


class ShardCheckpoints:
    """Where each shard of a call saves its run; nowhere without a folder.

    A call that goes on has the shards that the folder is of, whatever the number of workers now.
    """

    def __init__(self, folder: Path | None, num_members: int, *, shard: int | None, resume: str, name: str) -> None:
        self._folder, self._num_members, self._shard, self._name = folder, num_members, shard, name
        self._firsts: list[int] = []
        if folder is not None:
            check_begun(folder, resume, begun=has_checkpoints(folder), name=name)

    def divide(self, size: int) -> list[np.ndarray]:
        """The positions of the members of each shard: of about `size`, or those that the folder is of."""
        count = None if self._folder is None or self._shard is not None else self._count()
        if count is not None and count <= max(self._num_members // 2, 1):
            parts = np.array_split(np.arange(self._num_members), count)
        else:
            parts = divide(self._num_members, size)
        self.use(parts)
        return parts

    def use(self, parts: list[np.ndarray]) -> None:
        """Takes shards that are given; raises if the folder is of others."""
        self._firsts = [int(part[0]) for part in parts]
        if self._folder is not None:
            check_same_division(self._count(), len(parts), self._shard, self._folder, name=self._name)

    def path(self, positions: np.ndarray) -> Any:
        """The folder of the shard of the members at these positions."""
        if self._folder is None:
            return None
        return self._folder / f"shard-{self._firsts.index(int(positions[0])):05d}-of-{len(self._firsts):05d}"

    def _count(self) -> int | None:
        """How many shards the folder is of; `None` if it has none yet."""
        if self._folder is None or not self._folder.exists():
            return None
        matches = [_SHARD.fullmatch(entry.name) for entry in list_folder(self._folder)]
        counts = {int(match[2]) for match in matches if match}
        check_one_division(counts, self._folder, name=self._name)
        return counts.pop() if counts else None
