import itertools
from collections.abc import Callable, Mapping
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jax.sharding import Mesh

from .. import _axes, _keys
from .._check import MemberMismatchError, check_key, check_sequence, is_key, is_readable, is_traced
from .._ensemble import (
    Ensemble,
    M,
    Where,
    check_no_text_arrays,
    check_selection,
    from_stacked,
    mark_numbers,
    warn_of_equal_members,
)
from .._pytree import PyTree
from .._sharding import Layout, layout_for, replicate, shard_members, warn_of_padding
from .._warnings import warn
from ..plan import Vmap
from ..plan._engine import sharded_plan
from ..tree._engine import check_no_tracers
from ._check import check_arguments, check_count, check_keys, check_made, check_signature, explain_make

# Keys whose random numbers are compiled for one member, so that the first `build` of a process takes half as long.
#
# XLA takes about three times as long to compile threefry under `jax.vmap` as for one key, and hardly longer inside
# `jax.lax.map`, which draws the same bits for one member after another.

MOST_MEMBERS = 128
"""For more members, a call after the first would be slower than under `jax.vmap`."""


def can_draw_by_member(keys: jax.Array) -> bool:
    """Whether `keys` are concrete threefry keys, on one CPU device, and not too many."""
    if is_traced(keys) or len(keys) > MOST_MEMBERS or len(keys.devices()) > 1:
        return False
    return all(device.platform == "cpu" for device in keys.devices())


def draw_by_member(keys: jax.Array) -> jax.Array:
    """The same keys, which under `jax.vmap` draw for one member after another."""
    return jax.random.wrap_key_data(jax.random.key_data(keys), impl=_BY_MEMBER)  # pyright: ignore[reportArgumentType]


def restore_keys(tree: Any, keys: jax.Array) -> Any:
    """Replaces keys made by `draw_by_member`, such as `keys`, by ordinary keys in `tree`."""
    ordinary = lambda x: jax.random.wrap_key_data(jax.random.key_data(x), impl="threefry2x32")
    return jax.tree.map(lambda x: ordinary(x) if is_key(x) and x.dtype == keys.dtype else x, tree)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    draw: Callable[[jax.Array], jax.Array] = lambda key: _THREEFRY.random_bits(key, bit_width, shape)

    @custom_vmap
    def draw_by_member(key: jax.Array) -> jax.Array:
        return draw(key)

    @draw_by_member.def_vmap
    def _(num_keys: int, _: Any, keys: jax.Array) -> tuple[jax.Array, bool]:
        few = num_keys <= MOST_MEMBERS  # a constructor may split its key into many
        return jax.lax.map(draw_by_member, keys) if few else jax.vmap(draw)(keys), True

    return draw_by_member(key)


_THREEFRY: Any = threefry_prng_impl
_BY_MEMBER: Any = define_prng_impl(
    key_shape=_THREEFRY.key_shape,
    seed=_THREEFRY.seed,
    split=_THREEFRY.split,
    random_bits=_random_bits,
    fold_in=_THREEFRY.fold_in,
    name=_THREEFRY.name,  # for `jax.random.key_impl`
    tag=_THREEFRY.tag,
)


Arguments = Mapping[str, Any]
"""Per-member arguments of a constructor: a name and its values, one per member."""


@overload
def build(
    make: Callable[..., tuple[M, eqx.nn.State]],
    num_members: int | None = None,
    *,
    ids: Any = None,
    keys: Any = None,
    zip: Arguments | None = None,
    product: Arguments | None = None,
    shared: Where | None = None,
    mesh: Mesh | None = None,
    key: Any = None,
) -> tuple[Ensemble[M], eqx.nn.State]: ...
@overload
def build(
    make: Callable[..., M],
    num_members: int | None = None,
    *,
    ids: Any = None,
    keys: Any = None,
    zip: Arguments | None = None,
    product: Arguments | None = None,
    shared: Where | None = None,
    mesh: Mesh | None = None,
    key: Any = None,
) -> Ensemble[M]: ...
def build(
    make: Callable[..., Any],
    num_members: int | None = None,
    *,
    ids: Any = None,
    keys: Any = None,
    zip: Arguments | None = None,
    product: Arguments | None = None,
    shared: Where | None = None,
    mesh: Mesh | None = None,
    key: Any = None,
) -> Ensemble[Any] | tuple[Ensemble[Any], eqx.nn.State]:
    """Builds an [`eqx_ensemble.Ensemble`][] from the constructor of one member.

    `make(key)` runs once under `equinox.filter_vmap`; each member equals, bit for bit, the model that `make` returns
    for its key alone, except that weakly typed arrays (`jnp.asarray(2.0)`) become strongly typed.

    **Arguments:**

    - `make`: makes one member from one key. It may return `(module, state)`, as `equinox.nn.make_with_state` does.
    - `num_members`: the number of members, unless other arguments determine it.
    - `ids`: the members' ids `(members,)`, which determine their keys; by default `0, 1, 2, ...`.
    - `keys`: one key per member `(members,)` instead of `key`.
    - `zip`: per-member arguments, `make(key, **arguments)`, each with a leading `members` axis. A float per member (a
        dropout rate, a scale) is a constant in training; store `jnp.asarray(scale)` to train it. Your own loop sees an
        array.
    - `product`: per-member arguments, one member per combination, as in `itertools.product`.
    - `shared`: selects nodes that all members use, as in `equinox.tree_at`: `lambda model: model.trunk`. They are those
        of the first member, and constants in training: [shared arrays](../how-it-runs.md#shared-arrays).
    - `mesh`: the devices to build on, from [`eqx_ensemble.make_mesh`][].
    - `key`: the root key; member keys are [`eqx_ensemble.member_keys`][]`(key, ids)`.

    **Returns:** the ensemble; with its stacked `equinox.nn.State` if `make` returns a state. A warning is issued if
    members are equal because `make` does not use its key, or because keys are equal.

    **Raises:** `TypeError` for invalid keys, for NumPy arrays of strings or objects, and if shapes or Python branches
    of `make` depend on its key; `ValueError` for counts that disagree, and for integers that overflow JAX's type;
    `MemberMismatchError` if `make` stores an array of one member in a function.

    ```python
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.build(make, 8, key=key)  # eight members from one key
    ee.build(make, keys=jax.random.split(key, 8))  # keys of your own
    # four more members of the same ensemble
    ee.build(make, ids=range(8, 12), key=key)

    noisy = lambda key, p: eqx.nn.Dropout(p)
    ee.build(noisy, zip={"p": [0.1, 0.2, 0.5]}, key=key)  # three members
    ```
    """
    if isinstance(make, list | tuple):
        raise TypeError("`build` makes members from a function; a list of models is stacked by `stack(models)`.")
    if not callable(make):
        raise TypeError(f"`build` needs a function that makes one member from a key, got {make!r}.")
    arguments, counted = _arguments(zip, product)
    check_signature(make, arguments)
    count = check_count(
        num_members=num_members,
        ids=None if ids is None else len(check_sequence(ids, "ids", of="integers")),
        keys=None if keys is None else check_keys(keys),
        **counted,
    )
    ids = _keys.member_ids(count if ids is None else np.asarray(ids))
    if keys is None:
        check_key(key)
        keys = _keys.member_keys(key, ids)
    else:
        if key is not None:
            raise TypeError("`build` takes `keys` (one per member) or `key` (one for all), not both.")
        keys = keys if is_key(keys) else jax.random.wrap_key_data(jnp.asarray(keys))

    layout = layout_for(mesh)

    def make_one(key: Any, **arguments: Any) -> Any:
        one = make(key, **arguments)
        check_made(make, one)
        check_no_text_arrays(one)
        return one

    with explain_make(make):
        made = (
            _vmap_make(make_one, keys, arguments)
            if layout is None
            else _make_on_mesh(make_one, keys, arguments, layout)
        )
    check_no_tracers(made)
    warn_of_equal_members(made, keys, arguments)
    model, *state = made if _is_stateful(made) else (made,)
    numbers = _numbers(make, keys, arguments, model)
    ensemble = _as_ensemble(model, ids, shared, numbers)
    return (ensemble, _axes.strip_weak_types(state[0])) if state else ensemble


def _is_stateful(made: Any) -> bool:
    return isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State)


def _vmap_make(make: Callable[..., Any], keys: Any, arguments: dict[str, jax.Array]) -> Any:
    make_all = eqx.filter_vmap(lambda key, arguments: make(key, **arguments))
    if can_draw_by_member(keys):
        own = draw_by_member(keys)
        try:
            return restore_keys(make_all(own, arguments), own)
        except Exception:  # `make` may combine these keys with others, in its own ways; its own errors recur below
            pass
    return make_all(keys, arguments)


def _make_on_mesh(make: Callable[..., Any], keys: Any, arguments: dict[str, jax.Array], layout: Layout) -> Any:
    """Initialises the members on their own devices."""
    warn_of_padding(len(keys), layout)
    one = lambda part: make(part[0], **part[1])
    build = lambda parts: _axes.over_leading_axis(sharded_plan(Vmap(), layout).run, one, parts)
    try:
        made = eqx.filter_jit(build)(replicate((keys, arguments), layout))
        check_no_tracers(made)
    except (jax.errors.JAXTypeError, MemberMismatchError) as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        warn(
            "`build` cannot compile this constructor: its members are made on one device and sharded afterwards. "
            f"{text}"
        )
        made = _vmap_make(make, keys, arguments)
    return shard_members(made, layout)


def _numbers(make: Callable[..., Any], keys: Any, arguments: dict[str, jax.Array], stacked: PyTree) -> PyTree:
    """Flags the leaves that `make` stores as floats, not arrays, given the numbers of one member."""
    if not any(x.ndim == 1 for x in arguments.values()):
        return jax.tree.map(lambda _: False, stacked)
    # NumPy scalars replace Python numbers: they also have the attributes of the arrays that `make` was given.
    number = lambda x: (np.asarray(x) if is_readable(x) else np.zeros(1, x.dtype))[0]
    own = {name: number(x) if x.ndim == 1 else x[0] for name, x in arguments.items()}
    found = set()

    def look(key: Any) -> None:
        made = make(key, **own)
        made = made[0] if _is_stateful(made) else made
        for path, leaf in jax.tree_util.tree_leaves_with_path(made):
            if isinstance(leaf, np.generic | float) and jnp.issubdtype(np.result_type(leaf), jnp.floating):
                found.add(path)

    try:
        jax.eval_shape(look, keys[0])
    except jax.errors.JAXTypeError:  # `make` needs concrete values that do not depend on the key
        jax.vmap(look)(keys[:1])
    return jax.tree_util.tree_map_with_path(lambda path, _: path in found, stacked)


def _as_ensemble(stacked: Any, ids: Any, shared: Where | None, numbers: PyTree) -> Ensemble[Any]:
    if shared is not None:
        stacked = check_selection(lambda tree: eqx.tree_at(shared, tree, replace_fn=_first), stacked)
    ensemble = from_stacked(stacked, ids=ids, shared=shared)
    return Ensemble(ensemble.stacked, mark_numbers(ensemble.stacked, ensemble.shared, numbers), ensemble.ids)


def _first(node: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, node)


def _arguments(zip: Arguments | None, product: Arguments | None) -> tuple[dict[str, jax.Array], dict[str, int]]:
    """The stacked per-member arguments, and the number of members that each of them determines."""
    chosen = check_arguments(zip, product)
    option = "zip" if product is None else "product"
    as_array = lambda name, values: _axes.as_array(values, path=f"{option}[{name!r}]")
    arrays = {name: as_array(name, values) for name, values in chosen.items()}
    if product is None:
        return arrays, {f"zip[{name!r}]": len(values) for name, values in arrays.items()}
    grid = np.array(list(itertools.product(*(range(len(values)) for values in arrays.values()))))
    return {name: values[grid[:, i]] for i, (name, values) in enumerate(arrays.items())}, {"product": len(grid)}
