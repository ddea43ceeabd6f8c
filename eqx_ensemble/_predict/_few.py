"""The fast path for few rows: a compiled program of flat arrays, cached by the structure of the arguments.

Most checks of `predict` depend on structures, shapes and dtypes only. A program is cached once they and a first call
have passed; further calls skip the checks, and take a tenth of the time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _check
from .._axes import is_per_member, leaf_kinds, program_key
from .._code import Code
from .._ensemble import Ensemble
from .._foreign import own_array
from .._pytree import PyTree
from ..plan import AbstractPlan
from ._batch import MemberCall, PredictionInputs, predict_batch, size_of_few

_MOST_PROGRAMS = 512  # each keeps compiled programs, one for each power of two
_INTEGERS_OF_64_BITS = [np.dtype("int64"), np.dtype("uint64")]  # may not fit: checked by value, at every call


class FewRows(NamedTuple):
    """The arguments of `predict` for at most a batch of rows, as flat lists.

    **Attributes:**

    - `key`: all that a program depends on, except for the number of rows.
    - `arrays`: those of the ensemble and the state.
    - `rows`: those of `x`, `(rows, ...)`.
    - `num_rows`, `batch_size`: the former is at most the latter.
    """

    key: Hashable
    arrays: list[Any]
    rows: list[Any]
    num_rows: int
    batch_size: int


class FewProgram(NamedTuple):
    """A compiled prediction of an ensemble for few rows."""

    call: Callable[[list[Any], list[Any]], PyTree]
    plan: AbstractPlan
    num_members: int
    code: Code | None


_PROGRAMS: OrderedDict[Hashable, FewProgram] = OrderedDict()
_LOCK = threading.Lock()


def few_rows(
    ensemble: Any, x: PyTree, state: Any, *, fn: Any, inference: Any, plan: Any, batch_size: Any
) -> FewRows | None:
    """The arguments as flat lists; `None` without a fast path, as for several devices, or rows not on a CPU."""
    if type(ensemble) is not Ensemble or type(batch_size) is not int or type(inference) not in (bool, type(None)):
        return None
    if _check.is_inside_transformation():
        return None
    rows, structure_of_rows = jax.tree.flatten(x)
    if not rows or not all(map(_is_rows, rows)):
        return None
    num_rows = rows[0].shape[0]
    if not 1 <= num_rows <= batch_size or any(x.shape[0] != num_rows for x in rows):
        return None
    leaves, structure = jax.tree.flatten((ensemble, state))
    arrays, kinds = [], []
    for leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray):
            if not _is_plain(leaf):
                return None
            arrays.append(leaf)
            kinds.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, np.generic):
            return None
        else:
            kinds.append(leaf)
    kinds.extend(leaf_kinds(leaves))
    kinds_of_rows = tuple((x.shape[1:], x.dtype) for x in rows)
    key = structure, tuple(kinds), structure_of_rows, kinds_of_rows, fn, inference, type(plan), plan
    try:
        hash(key)
    except TypeError:  # by a field or an option
        return None
    return FewRows(key, arrays, rows, num_rows, batch_size)


def find_program(few: FewRows) -> FewProgram | None:
    """The cached program for these arguments, if any, and if its code has not been edited since."""
    with _LOCK:
        program = _PROGRAMS.get(few.key)
        if program is None:
            return None
        _PROGRAMS.move_to_end(few.key)
    return program if program.code is None or program.code.is_current() else None


def keep_program(few: FewRows, program: FewProgram) -> None:
    """Caches a program for further calls."""
    with _LOCK:
        _PROGRAMS[few.key] = program
        while len(_PROGRAMS) > _MOST_PROGRAMS:
            _PROGRAMS.popitem(last=False)


def can_keep_program(plan: AbstractPlan, x: PyTree) -> bool:
    """Whether the plan is fixed, and all rows are shared by the members."""
    return plan.choice is plan and not any(map(is_per_member, jax.tree.leaves(x, is_leaf=is_per_member)))


def make_program(plan: AbstractPlan, call: MemberCall, inputs: PredictionInputs) -> FewProgram:
    """The program for these inputs, and for others of the same structure."""
    leaves, structure = jax.tree.flatten((inputs.ensemble, inputs.state))
    rest = [None if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves]
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    structure_of_rows = jax.tree.structure(inputs.x)

    def run(arrays: list[Any], rows: list[Any]) -> PyTree:
        remaining = iter(arrays)
        merged = [next(remaining) if own else leaf for own, leaf in zip(is_array, rest, strict=True)]
        ensemble, state = jax.tree.unflatten(structure, merged)
        x = jax.tree.unflatten(structure_of_rows, rows)
        return predict_batch(plan, call, PredictionInputs(ensemble, x, state, None), jnp.arange(rows[0].shape[0]))

    *_, code = program_key((inputs.ensemble, inputs.state, call.fn, plan))
    return FewProgram(eqx.filter_jit(run), plan, inputs.ensemble.num_members, code)


def run_program(program: FewProgram, few: FewRows) -> PyTree:
    """The predictions for all rows, padded to a power of two by repeating the last one."""
    size = size_of_few(few.num_rows, few.batch_size)
    rows = [own_array(x) if size == few.num_rows else _pad(x, size) for x in few.rows]
    return program.call(few.arrays, rows)


def _is_plain(x: Any) -> bool:
    """Whether an array is concrete, on one device, and passes every check by its shape and dtype alone."""
    if isinstance(x, np.ndarray):
        return type(x) is np.ndarray and x.dtype not in _INTEGERS_OF_64_BITS
    return not _check.is_traced(x) and isinstance(x.sharding, SingleDeviceSharding)


def _is_rows(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0 or not _is_plain(x):
        return False
    if isinstance(x, np.ndarray):
        return True
    if _check.is_typed_key(x) or x.aval.weak_type:
        return False
    return all(device.platform == "cpu" for device in x.sharding.device_set)


def _pad(x: Any, size: int) -> Any:
    host = np.asarray(x)
    padded = np.empty((size, *host.shape[1:]), host.dtype)
    padded[: len(host)], padded[len(host) :] = host, host[-1]
    return jax.device_put(padded, x.sharding) if isinstance(x, jax.Array) and x.committed else padded
