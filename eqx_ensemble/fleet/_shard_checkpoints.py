"""The folder in which shards save their runs during training, and its division into shards."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint._path import list_folder
from ..methods._round_folders import has_checkpoints
from ._check_saved import check_begun, check_not_of_fit, check_one_division, check_same_division
from ._divide import divide

_SHARD = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})")


class ShardCheckpoints:
    """The checkpoint folder of each shard of a call; `None` without a folder.

    A resumed call keeps the division of the folder, whatever the current number of workers.
    """

    def __init__(self, folder: Path | None, num_members: int, *, shard: int | None, resume: str, name: str) -> None:
        self._folder, self._num_members, self._shard, self._name = folder, num_members, shard, name
        self._firsts: list[int] = []
        if folder is not None:
            check_not_of_fit(folder, name=name)
            check_begun(folder, resume, begun=has_checkpoints(folder), name=name)

    def divide(self, size: int) -> list[np.ndarray]:
        """The positions of the members of each shard: as divided in the folder, otherwise of about `size`."""
        count = None if self._folder is None or self._shard is not None else self._count()
        if count is not None and count <= max(self._num_members // 2, 1):
            parts = np.array_split(np.arange(self._num_members), count)
        else:
            parts = divide(self._num_members, size)
        self.use(parts)
        return parts

    def use(self, parts: list[np.ndarray]) -> None:
        """Uses a given division; raises if the folder has another one."""
        self._firsts = [int(part[0]) for part in parts]
        if self._folder is not None:
            check_same_division(self._count(), len(parts), self._shard, self._folder, name=self._name)

    def path(self, positions: np.ndarray) -> Any:
        """The folder of the shard of the members at these positions."""
        if self._folder is None:
            return None
        return self._folder / f"shard-{self._firsts.index(int(positions[0])):05d}-of-{len(self._firsts):05d}"

    def _count(self) -> int | None:
        """The number of shards in the folder; `None` if it has none yet."""
        if self._folder is None or not self._folder.exists():
            return None
        matches = [_SHARD.fullmatch(entry.name) for entry in list_folder(self._folder)]
        counts = {int(match[2]) for match in matches if match}
        check_one_division(counts, self._folder, name=self._name)
        return counts.pop() if counts else None
