import re
import types
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, Int8, Key

from .. import _axes, _keys
from .._brief import known_values
from .._by_name import reduce_shared
from .._caller import caller
from .._check import check_integers_fit, is_key, is_traced, kind_text
from .._compiled import filter_jit
from .._ensemble import Ensemble, M, check_ensemble, check_model_state, check_model_state_given, take_several
from .._foreign import as_hashable
from .._ids import Ids, IdsField, as_known, stored_ids
from .._pytree import PyTree
from .._sharding import Layout, layout_for, replicate, shard_members
from .._typing import kind_of_members
from ..plan import Vmap
from ..plan._engine import sharded_plan
from ._check import check_optimiser
from ._check_member import check_state_arrays
from ._hyper import filter_hyper, hyper_arrays, hyper_of_init
from ._status import Status
from ._together import Together, bind, split_tied, spread
from ._trainable import Trainable, partition_trainable
from .compiled._optimiser import Optimiser, init_member, resolve
from .host._check import check_opt_state

# Names of numbers in the closures of optax's functions. Masks, labels and the tables of schedules have other names.
_NUMBERS = re.compile(
    r"step_size|learning_rate|.*decay(_rate)?|momentum|b[123]|eps.*|max_norm|max_delta|clipping|threshold"
    r"|(init_|end_|peak_)?value"
)
_NAMES = {"step_size": "learning_rate"}
_MASKS = ("masked", "partition", "multi_transform")


def check_no_numbers_of_members(optimiser: Optimiser, params: PyTree, hyper: PyTree, num_members: int) -> None:
    """Raises if an optax optimiser holds an array of one number per member where it takes a scalar.

    Each member's optimiser would broadcast it over the last axis of the weights. An array with the shape of all weights
    of a member is accepted as one number per weight; under a mask, the shape of some weights suffices.
    """
    if num_members == 1:  # the array acts as a scalar
        return
    if isinstance(optimiser, Together):
        for part, own in zip((optimiser.optimiser, optimiser.shared), split_tied(params, optimiser.tied), strict=True):
            check_no_numbers_of_members(part, own, hyper, num_members)
        return
    shapes = {x.shape[1:] for x in jax.tree.leaves(params)}
    for found in _arrays_of(optimiser, hyper):
        shape = found.value.shape
        is_of_weights = shape in shapes if found.is_masked else shapes == {shape}
        if shape[:1] == (num_members,) and not is_of_weights:
            word = _NAMES.get(found.name, found.name)
            raise ValueError(
                f"`{caller()}` needs an optimiser of one member; this one holds `{word}` as an array {shape}, which "
                f"optax would broadcast over the last axis of the weights.\n"
                f"One number for each of {num_members} members? Pass `hyper={{'{word}': ...}}` with the array, and the "
                f"optimiser as a function: `lambda h: optax.sgd(...)` with `h['{word}']` instead of it."
            )


class _Found(NamedTuple):
    """A value in the closure of a function; whether that is of optax, and whether it is used under a mask."""

    name: str
    value: Any
    is_of_optax: bool = False
    is_masked: bool = False


def _arrays_of(optimiser: Optimiser, hyper: PyTree) -> list[_Found]:
    if isinstance(optimiser, optax.GradientTransformation):
        return [*_arrays_in(optimiser)]
    found: list[_Found] = []
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, hyper)
    try:
        eqx.filter_eval_shape(lambda hyper: found.extend(_arrays_in(resolve(optimiser, hyper))), one)
    except Exception:  # raised again, with a note, where it is made for training
        return []
    return found


def _arrays_in(root: Any) -> Iterator[_Found]:
    """Yields the floating-point arrays in closures of optax's functions whose names are those of numbers."""
    seen, todo = set(), [_Found("", root)]
    while todo:
        one = todo.pop()
        part = one.value
        if one.is_of_optax and _NUMBERS.fullmatch(one.name) and _is_float_array(part):
            yield one
        if id(part) not in seen:
            seen.add(id(part))
            todo += _parts(one)


def _parts(one: _Found) -> list[_Found]:
    part = one.value
    if isinstance(part, tuple | list):
        return [_Found("", x, is_masked=one.is_masked) for x in part]
    if isinstance(part, dict):
        return [one._replace(name=str(key), value=x) for key, x in part.items()]
    if isinstance(part, types.MethodType):  # of `optax.MultiSteps`
        return [_Found("", x, is_masked=one.is_masked) for x in getattr(part.__self__, "__dict__", {}).values()]
    if not isinstance(part, types.FunctionType):
        return []
    module = part.__module__ or ""
    inside = module.split(".")[0] == "optax"
    masked = one.is_masked or (inside and part.__qualname__.split(".")[0] in _MASKS)
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    return [_Found(word, cell.cell_contents, inside, masked) for word, cell in cells if cell != types.CellType()]


def _is_float_array(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray) and not is_traced(x)
    return is_array and x.ndim > 0 and bool(jnp.issubdtype(x.dtype, jnp.floating))


class MemberState(eqx.Module):
    """The part of one member's training state that a step changes; stacked for all members."""

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    status: Int8[Array, "*members"]
    stopped_at: Int[Array, "*members"]
    fault: Int[Array, "*members"]


def latest_member(moving: MemberState) -> Int[Array, ""]:
    """The index of a member that trains, or stopped last; not of one that had stopped and is to train again."""
    status, stopped_at = moving.status, moving.stopped_at
    trains = (status == Status.OK) & (stopped_at < 0)
    return jnp.argmax(jnp.where(trains, jnp.iinfo(stopped_at.dtype).max, stopped_at))


class MemberConstants(eqx.Module):
    """The part of one member's training state that no step changes: frozen arrays, random key, hyper-parameters.

    `tied` tells which trained leaves are copies of shared ones that members train together.

    `opt_hyper` holds the hyper-parameters that the optimiser's state was made with, `None` for those that its `init`
    does not use: `hyper` may be replaced at any time, and `follow_hyper` compares them.
    """

    frozen: PyTree
    key: Key[Array, "*members"]
    hyper: PyTree
    opt_hyper: PyTree = None
    tied: tuple[bool, ...] = eqx.field(static=True, default=())


def _short_doc(state: "TrainState", **_: Any) -> Any:
    """The short form, in one line; print `params`, `opt_state` and others for their leaves."""
    from wadler_lindig import TextDoc

    return TextDoc(f"TrainState[{kind_of_members(state.shared)}]({', '.join(_outline(state))})")


def _outline(state: "TrainState") -> Iterator[str]:
    """The number of members, of steps, and of members that do not train, as far as they are known."""
    sizes = {x.shape[:1] for x in jax.tree.leaves(state.moving) if _axes.is_array(x)}
    yield f"num_members={sizes.pop()[0]}" if len(sizes) == 1 and sizes != {()} else "..."
    step, status = known_values(state.step), known_values(state.status)
    if step is not None:
        yield f"step={step}"
    for one in Status:
        count = 0 if status is None or one is Status.OK else (status == one).sum()
        if count:
            yield f"{one!s}={count}"


class TrainState(eqx.Module, Generic[M]):
    """The training state of all members, which a step of [`eqx_ensemble.train.make_step`][] maps to the next.

    **Attributes:**

    - `ids`: `(members,)`, the members' ids.
    - `step`: the number of steps done.

    [`eqx_ensemble.concatenate`][] joins training states.

    To replace a part: `eqx.tree_at(lambda state: state.hyper, state, new)`.
    """

    moving: MemberState
    fixed: MemberConstants
    shared: M = eqx.field(metadata=_axes.SHARED)
    step: Int[Array, ""] = eqx.field(metadata=_axes.SHARED)
    ids: Int[Array, " members"] = cast(Any, IdsField(of_model=False))

    def __init__(self, moving: MemberState, fixed: MemberConstants, shared: M, ids: Any, step: Any) -> None:
        self.moving, self.fixed, self.shared, self.ids, self.step = moving, fixed, shared, as_known(ids), step

    def __getitem__(self, index: Any) -> "TrainState[M]":
        """A smaller training state for a slice, a list of integers or a mask; it trains on as within the whole."""
        check_state_arrays(self)
        return take_several(self, index, "state")

    __pdoc__: ClassVar[Any] = _short_doc
    __reduce__: ClassVar[Any] = reduce_shared

    @property
    def ensemble(self) -> Ensemble[M]:
        """The ensemble with its current weights."""
        return ensemble_of(self, self.moving.params)

    @property
    def params(self) -> PyTree:
        """The trained arrays, each `(members, ...)`; `None` where a leaf is not trained."""
        return self.moving.params

    @property
    def opt_state(self) -> PyTree:
        """The optimiser states, each array `(members, ...)`."""
        return self.moving.opt_state

    @property
    def model_state(self) -> PyTree:
        """The stacked `equinox.nn.State` of stateful members, else `None`."""
        return self.moving.model_state

    @property
    def hyper(self) -> PyTree:
        """The hyper-parameters, each `(members, ...)`, or `None`."""
        return self.fixed.hyper

    @property
    def status(self) -> Any:  # `equinox.tree_at` passes markers through here
        """The status of every member `(members,)`, int8, each an [`eqx_ensemble.train.Status`][]."""
        return self.moving.status

    @property
    def num_members(self) -> int:
        """The number of members."""
        return self.ids.shape[0]


def ensemble_of(state: TrainState[M], params: PyTree, member: Any = None) -> Ensemble[M]:
    """The ensemble with other trained arrays; what members train together is that of the one at index `member`.

    By default of one that trains, or stopped last.
    """
    fixed, shared = state.fixed, state.shared
    if fixed.tied:
        params, copies = split_tied(params, fixed.tied)
        member = latest_member(state.moving) if member is None else member
        shared = eqx.combine(shared, jax.tree.map(lambda x: x[member], copies))
    return Ensemble(eqx.combine(params, fixed.frozen), shared, state.ids)


def check_train_state(value: Any) -> None:
    """Raises unless `value`, the first argument of a step, is a training state."""
    if not isinstance(value, TrainState):
        raise TypeError(
            "A training step is called as `state, metrics = step(state, batch)` with the state that `train.init` "
            f"made; got {kind_text(value)} as `state`."
        )


def check_state(state: TrainState, optimiser: Optimiser, *, hyper_of: str | None = None) -> None:
    """Raises unless the parts of a training state fit together, and fit the optimiser."""
    check_state_arrays(state)
    check_optimiser(optimiser, hyper=state.hyper, hyper_of=hyper_of, together=True)
    check_opt_state(state.opt_state, init_state_shapes(optimiser, state))


def init(
    ensemble: Ensemble[M],
    optimiser: Optimiser,
    *,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    trainable: Trainable = eqx.is_inexact_array,
    mesh: Mesh | None = None,
    key: Any,
) -> TrainState[M]:
    """Initialises the training state; every member gets its own optimiser state.

    The arrays are copied: `ensemble` stays valid.

    **Arguments:**

    - `ensemble`: the ensemble to train.
    - `optimiser`: the optimiser of one member, as for [`eqx_ensemble.fit`][].
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, any PyTree of arrays `(members, ...)`.
    - `trainable`: which leaves of a member are trained: a PyTree of booleans, as in `equinox.partition`, or a function
        of a leaf (without the `members` axis), which must decide by type, shape and dtype. Python floats stacked by
        `build(zip=...)` are selected by `eqx.is_inexact_array_like`, but not by `eqx.is_inexact_array`.
    - `mesh`: the devices to shard members over, by default those of the ensemble.
    - `key`: the root key of the run's random streams.

    **Returns:** the training state.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    train_state = ee.train.init(ensemble, optax.adam(1e-3), key=key)
    ```
    """
    check_ensemble(ensemble)
    layout = layout_for(mesh, ensemble.stacked)
    options = {"state": state, "hyper": hyper, "trainable": trainable}
    return first_state(ensemble, optimiser, **options, layout=layout, key=key)


def first_state(
    ensemble: Ensemble[M],
    optimiser: Optimiser,
    *,
    state: eqx.nn.State | None,
    hyper: PyTree,
    trainable: Trainable,
    layout: Layout | None,
    key: Any,
) -> TrainState[M]:
    """[`eqx_ensemble.train.init`][] on a layout, for the public function `name`."""
    check_ensemble(ensemble)
    check_integers_fit((ensemble.stacked, ensemble.shared), argument="ensemble")
    check_optimiser(optimiser, hyper=hyper, together=True)
    optimiser = as_hashable(optimiser)
    hyper = None if hyper is None else hyper_arrays(hyper, ensemble.num_members)
    check_model_state_given(ensemble.stacked, state)
    check_model_state(state, ensemble.num_members)
    shared, tied = ensemble.shared, ()
    if isinstance(optimiser, Together):
        params, frozen, shared, tied = spread(ensemble, trainable)
        optimiser = bind(optimiser, tied)
    else:
        params, frozen = partition_trainable(ensemble, trainable)
    check_no_numbers_of_members(optimiser, params, hyper, ensemble.num_members)
    key = _keys.root(key)
    keys = _keys.member_keys(key, ensemble.ids, purpose="loss")

    # Known ids are no arrays: a copy of their array would be unknown inside a compiled function.
    params, frozen, state, shared, ids = copy_arrays((params, frozen, state, shared, stored_ids(ensemble)))
    ids = ids.array if isinstance(ids, Ids) else ids

    count = ensemble.num_members
    if layout is not None:
        params, frozen, state, hyper, keys = shard_members((params, frozen, state, hyper, keys), layout)
        shared, ids = replicate((shared, ids), layout)
    opt_state, is_used = init_all(optimiser, params, hyper, ids, layout=layout)
    # NumPy, because each of these functions of JAX would compile a program.
    status, never = np.zeros(count, np.int8), np.full(count, -1, np.int32)
    moving = MemberState(params, opt_state, state, *map(_put, (status, never, never)))
    step = _put(np.int32(0))
    if layout is not None:
        moving, step = shard_members(moving, layout), replicate(step, layout)
    fixed = MemberConstants(frozen, keys, hyper, filter_hyper(hyper, is_used), tied)
    return TrainState(moving, fixed, shared, ids, step)


@filter_jit
def init_all(
    optimiser: Optimiser, params: PyTree, hyper: PyTree, ids: Int[Array, " members"], *, layout: Layout | None = None
) -> tuple[PyTree, tuple[bool, ...]]:
    """The initial optimiser states of all members, sharded like them, and which hyper-parameters they depend on."""
    one = lambda part: init_member(optimiser, *part)
    opt_state = _axes.over_leading_axis(sharded_plan(Vmap(), layout).run, one, (params, hyper, ids))
    return opt_state, hyper_of_init(optimiser, params, hyper, ids)


def init_state_shapes(optimiser: Optimiser, state: TrainState) -> PyTree:
    """The shapes and dtypes of the optimiser states that `optimiser` makes for the members of `state`."""
    return eqx.filter_eval_shape(init_all, bind(optimiser, state.fixed.tied), state.params, state.hyper, state.ids)[0]


def copy_arrays(tree: PyTree) -> PyTree:
    """Copies arrays, so that a step may donate them; strongly typed, like a step's results."""
    return jax.tree.map(_copy, tree)


def _copy(x: Any) -> Any:
    if not eqx.is_array(x):
        return x
    if is_key(x):
        return x.copy()
    if not isinstance(x, jax.Array):
        return jnp.array(x)  # a NumPy array, whose dtype JAX may not support
    is_strong = not is_traced(x) and not x.weak_type
    # `jax.device_put` does not copy arrays of which other processes hold a part.
    return _put(x) if is_strong and x.is_fully_addressable else jnp.array(x, dtype=x.dtype)


def put_new(x: Any) -> jax.Array:
    """An array of NumPy, copied to the default device; one of JAX as it is."""
    return x if isinstance(x, jax.Array) else _put(x)


def _put(x: Any) -> jax.Array:
    """A copy on the same devices, without a compiled program."""
    return jax.device_put(x, may_alias=False)
