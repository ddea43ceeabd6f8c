"""Checks of folders in which shards are saved, and of the ids to read from them."""

import errno
import os
from typing import Any

import numpy as np

from .._caller import caller
from .._check import check_path, check_sequence, kind_text
from .._ensemble import Ensemble
from ..checkpoint._engine import as_path, is_on_disk, is_sealed, kind_of

_MOST_NAMED = 8


def check_save_folder(path: Any) -> Any:
    """Raises unless `path` is a folder on a file system. Returns its absolute path."""
    check_path(path, "save")
    found = as_path(path)
    if not is_on_disk(found):
        raise TypeError(f"`{caller()}` needs a folder on a file system as `save`, got `{path}`.")
    if is_sealed(found):
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder for all shards as `save`; `{path}` is a single checkpoint written by "
            "`ee.save`.\nChoose another folder",
        )
    return found.absolute()


def check_like_of_members(like: Any) -> Any:
    """Raises unless `like` is an ensemble, or a pair of an ensemble and its state. Returns it."""
    ensemble = like[0] if isinstance(like, tuple) and len(like) == 2 else like
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"`{caller()}` needs as `like` the function that makes one member from a key, or an `Ensemble`; got "
            f"{kind_text(like)}."
        )
    return like


def check_shard_arrays(arrays: dict[str, np.ndarray], folder: Any) -> tuple[np.ndarray, np.ndarray]:
    """Raises unless the arrays of a call are the ids of its members and the sizes of its shards. Returns both."""
    found = [arrays.get(word, np.zeros(())) for word in ("ids", "sizes")]
    if [(x.ndim, x.dtype.name) for x in found] != [(1, "int32"), (1, "int64")] or found[1].sum() != len(found[0]):
        raise ValueError(
            f"`{caller()}` needs a folder of `fleet.fit(save=...)`, and `{folder}` holds something else.\n"
            "Choose another folder."
        )
    return found[0], found[1]


def check_shard_of_call(meta: Any, digest: str, path: Any) -> dict[str, Any]:
    """Raises unless the metadata are those of a shard of this call. Returns its record."""
    record = meta.get("fleet.fit") if isinstance(meta, dict) else None
    if not isinstance(record, dict) or record.get("call") != digest:
        raise ValueError(
            f"`{caller()}` cannot read `{path}`: it belongs to a different call than its folder.\n"
            "Remove it, and rerun the call of the folder."
        )
    if record.get("shard") != path.name:
        raise ValueError(
            f"`{caller()}` cannot read `{path}`: it holds `{record.get('shard')}` of this call under another name.\n"
            "Rename it back, or remove it and rerun the call."
        )
    return record


def check_stored_ids(found: np.ndarray, wanted: np.ndarray, path: Any) -> None:
    """Raises unless a file holds the members that the run read there before."""
    if not np.array_equal(found, wanted):
        raise ValueError(
            f"`{path}` holds members {ids_text(found)}, and the run needs {ids_text(wanted)} there: it was renamed or "
            "replaced.\nRerun the call of its folder."
        )


def check_has_call(folder: Any, *, there: bool) -> None:
    """Raises unless `fleet.fit` saved members in the folder."""
    if not there:
        exists = "holds no run of it" if os.path.isdir(folder) else "does not exist"
        raise FileNotFoundError(
            errno.ENOENT, f"`{caller()}` needs a folder of `fleet.fit(save=...)`, and `{folder}` {exists}"
        )


def check_some_members(count: int, folder: Any) -> None:
    """Raises unless at least one shard of the folder is complete."""
    if not count:
        raise ValueError(
            f"`{caller()}` needs at least one complete shard, and `{folder}` has none.\n"
            "Rerun the call of `fleet.fit` that started it."
        )


def check_same_size(shard: Any, sizes: np.ndarray, expected: np.ndarray, folder: Any) -> None:
    """Raises unless a resumed call divides the members as the saved one did."""
    if not np.array_equal(sizes, expected):
        raise ValueError(
            f"`{caller()}` resumes in `{folder}`, whose shards have up to {sizes.max()} members; got `shard={shard}`.\n"
            "Leave out `shard`, or save in another folder."
        )


def check_wanted_ids(ids: Any, there: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Raises unless `ids` are different ids of saved members. Returns them as an array."""
    if isinstance(ids, int | np.integer):
        raise TypeError(f"`{caller()}` needs a list of ids, got {ids}.\nWrite `ids=[{ids}]`.")
    wanted = np.asarray(ids if isinstance(ids, np.ndarray) else check_sequence(ids, "ids", of="integers"))
    if wanted.ndim != 1 or not len(wanted) or not np.issubdtype(wanted.dtype, np.integer):
        raise TypeError(
            f"`{caller()}` needs `ids` to be integers `(members,)`, at least one, got {kind_text(ids)} of shape "
            f"{wanted.shape}.\nFor members by a condition: `ids=run.ids[condition]`."
        )
    unique, counts = np.unique(wanted, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"`{caller()}` needs different `ids`; repeated: {ids_text(unique[counts > 1])}.")
    absent = wanted[~np.isin(wanted, there)]
    if len(absent):
        lost = absent[np.isin(absent, missing)]
        never = absent[~np.isin(absent, missing)]
        lines = [f"`{caller()}` found no members with some of these `ids`."]
        if len(never):
            lines.append(f"  not in this run: {ids_text(never)}")
        if len(lost):
            lines.append(f"  in incomplete shards: {ids_text(lost)}")
            lines.append("Rerun the call of `fleet.fit` to complete them.")
        raise ValueError("\n".join(lines))
    return wanted


def ids_text(ids: np.ndarray) -> str:
    """Ids in a message, at most eight of them."""
    return ", ".join(map(str, ids[:_MOST_NAMED].tolist())) + (", ..." if len(ids) > _MOST_NAMED else "")


def check_not_of_fit(folder: Any) -> None:
    """Raises if a folder holds the checkpoints of one `fit`."""
    if folder.is_dir() and kind_of(folder).name == "fit":
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder for the checkpoints of its shards, and `{folder}` is the folder of a run of "
            "`fit`.\nChoose another folder",
        )


def check_one_division(counts: set[int], folder: Any) -> None:
    """Raises for checkpoints of different divisions into shards."""
    if len(counts) > 1:
        raise ValueError(
            f"`{caller()}` cannot resume: the checkpoints in `{folder}` are from divisions into {sorted(counts)} "
            "shards, of more than one call.\nChoose another folder."
        )


def check_same_division(found: int | None, count: int, shard: int | None, folder: Any) -> None:
    """Raises unless a resumed call has as many shards as its checkpoints."""
    if found is None or found == count:
        return
    given, hint = f"this call has {count}", "Choose another folder."
    if shard is not None:
        given, hint = f"`shard={shard}` makes {count}", "Leave `shard` out, or choose another folder."
    raise ValueError(
        f"`{caller()}` cannot resume: the checkpoints in `{folder}` are from a division into {found} shards, and "
        f"{given}.\n{hint}"
    )
