from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from .._axes import Each, is_per_member
from .._caller import caller
from .._check import MemberMismatchError, check_integer, check_optional_function, check_positive_int, kind_text
from .._ensemble import Ensemble
from .._pytree import PyTree
from ..checkpoint import Checkpoints
from ..checkpoint._engine import as_checkpoints
from ..plan import AbstractPlan, Auto
from ..train._engine import Revive, Run, TrainState, check_checkpoint, is_batches
from ..tree import num_members
from ._shard import Finished, lost_message
from ._sharded_run import ShardedRun

_REASONS = {"callbacks": "they would be called on workers, with the members of one shard"}


def check_start(begun: Any) -> None:
    """Raises unless `begun` is an ensemble, a training state or a run."""
    if isinstance(begun, ShardedRun):
        raise TypeError(
            f"`{caller()}` needs an `Ensemble`, a training state or a run, got a ShardedRun: optimiser states are not "
            "in its files.\nTo train on from the weights, pass `run.load()`."
        )
    if not isinstance(begun, Ensemble | TrainState | Run):
        raise TypeError(f"`{caller()}` needs an `Ensemble`, a training state or a run, got {kind_text(begun)}.")


def check_shard(shard: Any, num_members: int) -> None:
    """Raises unless `shard` is at least 2 members, or 1 for an ensemble of one."""
    check_positive_int(shard, "shard")
    if shard == 1 and num_members > 1:
        raise ValueError(
            f"`{caller()}` needs `shard` of at least 2 members: one member alone is compiled to another program, with "
            "other rounding."
        )


def check_retries(retries: Any) -> int:
    """Raises unless `retries` is an integer of at least 0. Returns it."""
    return check_integer(retries, "retries", least=0)


def check_no_auto(plan: AbstractPlan) -> None:
    """Raises for `plan='auto'`, which may choose differently on each worker."""
    if isinstance(plan, Auto):
        raise TypeError(f"`{caller()}` does not take `plan='auto'`: workers that measure may choose different plans.")


def check_member_arguments(given: PyTree) -> np.ndarray:
    """Raises unless arguments agree on the number of members. Returns their ids, or positions without ensembles."""
    nodes = [node for node in jax.tree.leaves(given, is_leaf=is_per_member) if is_per_member(node)]
    nodes += [node for node in jax.tree.leaves(given, is_leaf=is_per_member) if isinstance(node, ShardedRun)]
    other = [node for node in nodes if not isinstance(node, Ensemble | Each | eqx.nn.State | ShardedRun)]
    if other:
        raise TypeError(f"`{caller()}` cannot divide {kind_text(other[0])}: pass an `Ensemble` or `Each`.")
    if not nodes:
        raise TypeError(f"`{caller()}` needs an argument with members, an `Ensemble` or `Each`; got none.")
    stateful = [node for node in nodes if isinstance(node, ShardedRun) and isinstance(node.like, tuple)]
    if stateful:
        raise TypeError(
            f"`{caller()}` cannot read members with a state from files: `fleet.predict` does, and "
            "`run.load_with_state(ids)` gives both."
        )
    of_node = lambda node: node.per_member() if isinstance(node, Each) else getattr(node, "stacked", node)
    counts = [len(node) if isinstance(node, ShardedRun) else num_members(of_node(node)) for node in nodes]
    if len(set(counts)) > 1:
        raise MemberMismatchError(f"`{caller()}` needs arguments of one number of members, got {counts}.")
    ensembles = [node for node in nodes if isinstance(node, Ensemble | ShardedRun)]
    return np.asarray(ensembles[0].ids) if ensembles else np.arange(counts[0])


def check_complete(finished: Finished) -> None:
    """Raises the last error if a shard was lost, and `KeyboardInterrupt` if the call was interrupted."""
    if finished.lost:
        error = finished.lost[-1].error
        assert error is not None
        error.add_note(lost_message(finished))
        raise error
    if finished.interrupted:
        raise KeyboardInterrupt


def check_divisible(options: dict[str, Any], plan: Any, how: Any, data: Any) -> None:
    """Raises for options of `fit` whose results depend on how members are divided."""
    for word, reason in _REASONS.items():
        if options.get(word) is not None:
            raise TypeError(f"`{caller()}` does not take `{word}`: {reason}.")
    _check_mesh_function(options.get("mesh"))
    check_no_auto(plan)
    if how == "raise":
        raise TypeError(
            f"`{caller()}` does not take `on_diverge='raise'`: other shards would still run, or would not have "
            "started.\n`run.status` says which members diverged."
        )
    if how == "revive" or (isinstance(how, Revive) and how.make is None):
        raise TypeError(
            f"`{caller()}` does not take revivals by copies: a donor would come from the same shard.\n"
            "From new initialisations: `on_diverge=ee.train.Revive(make)`."
        )
    if is_batches(data):
        raise TypeError(
            f"`{caller()}` needs `data` in arrays, or a function that makes it on the worker: an iterable of batches "
            "can be read by one worker only.\nPass `lambda ids: batches`."
        )


def _check_mesh_function(mesh: Any) -> None:
    """Raises unless `mesh` is `None` or a function that makes a mesh on the worker."""
    if isinstance(mesh, Mesh):  # which can be called too, as a decorator
        raise TypeError(
            f"`{caller()}` needs `mesh` to be a function, which makes a mesh of the devices of a worker; those of a "
            "mesh made here are this process's.\nPass `mesh=ee.make_mesh`, or `mesh=lambda: ee.make_mesh(data=2)`."
        )
    check_optional_function(mesh, "mesh", example="mesh=ee.make_mesh")


def check_folder(path: Any) -> Checkpoints | None:
    """Raises unless `path` is a path, `Checkpoints` or `None`. Returns `Checkpoints` of an absolute path.

    Workers have working directories of their own.
    """
    check_checkpoint(path)
    return None if path is None else as_checkpoints(path)
