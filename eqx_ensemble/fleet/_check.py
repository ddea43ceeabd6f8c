import os
from typing import Any

from .._check import check_integer, check_positive_int, kind_text
from .._ensemble import Ensemble, Group
from ..plan import AbstractPlan, Auto, Sequential
from ..train._group_run import GroupRun
from ..train._revive import Revive
from ..train._run import Run
from ..train._state import TrainState
from ..train.data._data import is_batches

_REASONS = {
    "max_seconds": "how far members come would depend on the worker",
    "mesh": "a worker has its own devices; `make_mesh` of one process knows nothing of those of others",
    "callbacks": "they would be called on workers, with the members of one shard",
    "callback_every": "there are no `callbacks`",
    "progress": "",
}


def check_start(begun: Any, *, name: str) -> None:
    """Members that can be divided."""
    if isinstance(begun, Group | GroupRun):
        raise TypeError(f"`{name}` needs an `Ensemble`, got {kind_text(begun)}: call it for each part of the group.")
    if not isinstance(begun, Ensemble | TrainState | Run):
        raise TypeError(f"`{name}` needs an `Ensemble`, a training state or a run, got {kind_text(begun)}.")


def check_shard(shard: Any, num_members: int, plan: AbstractPlan, *, name: str) -> None:
    """A number of members, more than one where one member is another program."""
    check_positive_int(shard, "shard", name=name)
    if shard == 1 and num_members > 1 and not isinstance(plan, Sequential):
        raise ValueError(
            f"`{name}` needs `shard` of at least 2 members under {plan!r}: one member alone is compiled to another "
            "program, with other rounding.\nFor shards of one member pass `plan=ee.plan.Sequential()`."
        )


def check_retries(retries: Any, *, name: str) -> int:
    """How often a shard whose worker died is tried again."""
    return check_integer(retries, "retries", name=name, least=0)


def check_can_be_cut(options: dict[str, Any], plan: Any, how: Any, data: Any, *, name: str) -> None:
    """Options of `fit` whose results do not depend on how members are divided."""
    for word, reason in _REASONS.items():
        if reason and options.get(word) is not None:
            raise TypeError(f"`{name}` does not take `{word}`: {reason}.")
    if isinstance(plan, Auto):
        raise TypeError(f"`{name}` does not take `plan='auto'`: workers that measure may choose different plans.")
    if how == "raise":
        raise TypeError(
            f"`{name}` does not take `on_diverge='raise'`: the other shards would have gone on, or not begun.\n"
            "`run.status` tells which members diverged."
        )
    if how == "revive" or (isinstance(how, Revive) and how.make is None):
        raise TypeError(
            f"`{name}` does not take revivals by copies: a donor would come from the same shard.\n"
            "From new initialisations: `on_diverge=ee.train.Revive(make)`."
        )
    if is_batches(data):
        raise TypeError(
            f"`{name}` needs `data` in arrays, or a function that makes it on the worker: an iterable of batches can "
            "be read by one worker only.\nPass `lambda ids: batches`."
        )


def check_folder(path: Any, *, name: str) -> Any:
    """A folder on a file system, which workers share. Returns it."""
    if not isinstance(path, os.PathLike):
        raise TypeError(f"`{name}` needs a folder as `checkpoint`, got {kind_text(path)}.")
    return path
