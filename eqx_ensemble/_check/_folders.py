"""What is said of a folder that is not the checkpoint it was taken for."""

import errno
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from ._disks import names


def no_checkpoint(path: Any, *, name: str) -> None:
    """There is a folder at `path`."""
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"`{name}` found no checkpoint at `{path}`")
    if not os.path.isdir(path):
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"`{name}` needs the folder that `save` wrote, and `{path}` is a file.\nFiles of "
            "`equinox.tree_serialise_leaves` and safetensors files are read by `eqx_ensemble.load_members`",
        )


def not_a_checkpoint(path: Any, kind: str, found: Sequence[str], *, name: str) -> NoReturn:
    """The error for a folder without a checkpoint: what it is, and which function reads it.

    **Arguments:** `kind`, one of those in `_KINDS`; `found`, the names in the folder that show it, in order.
    """
    what, way = _KINDS[kind]
    fields = {"names": names(found), "count": len(found), "first": found[0] if found else "", "path": str(path)}
    fields["last"] = found[-1] if found else ""
    what, way = what.format(**fields), way.format(**fields)
    raise FileNotFoundError(
        errno.ENOENT,
        f"`{name}` needs the folder of one checkpoint, as `save` writes it, and `{path}` is {what}.\n{way}",
    )


_KINDS = {
    "fit": (
        "the folder of a run of `fit` ({count} checkpoints, the last one `{last}`)",
        "The same call of `fit` with `checkpoint={path!r}` gives the run; to load the ensemble without it, keep it "
        "with `eqx_ensemble.save(path, run.ensemble)`",
    ),
    "run": (
        "a folder of `checkpoint.Checkpoints` ({count} checkpoints, the last one `{last}`)",
        "`eqx_ensemble.checkpoint.Checkpoints({path!r}).restore(like)` reads the newest; `load` reads one of them, "
        "`{path}/{last}`",
    ),
    "members": (
        "a folder of `export_members` ({count} files, the first one `{first}`)",
        "`eqx_ensemble.load_members(sorted(pathlib.Path({path!r}).glob('member-*')), like)` reads them",
    ),
    "files": (
        "a folder with files of single models ({names})",
        "`eqx_ensemble.load_members(paths, like)` reads files of `equinox.tree_serialise_leaves` and of safetensors",
    ),
    "checkpoints": ("a folder that holds checkpoints ({names})", "`load` reads one of them, `{path}/{first}`"),
    "orbax": (
        "a checkpoint that Orbax wrote alone",
        "`orbax.checkpoint` reads it; `load` reads what `eqx_ensemble.save(..., format='orbax')` wrote",
    ),
    "empty": ("an empty folder", "Check the path, and whether the checkpoint was copied or removed"),
    "other": ("another folder (it holds {names})", "Check the path"),
}


def not_of_fit(path: Any, folder: Any, *, name: str) -> NoReturn:
    """The error for one checkpoint of a run, where a model is wanted."""
    raise ValueError(
        f"`{name}` needs a checkpoint of an ensemble or a model, and `{path}` is one of a run of `fit`: it holds the "
        f"whole training state.\nThe same call of `fit` with `checkpoint={str(folder)!r}` gives the run; to load the "
        "ensemble without it, keep it with `eqx_ensemble.save(path, run.ensemble)`."
    )
