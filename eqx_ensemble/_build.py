import itertools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ._check import MemberMismatchError, check_key_shape, check_positive_int
from ._ensemble import Ensemble
from ._foreign import from_foreign
from ._keys import member_keys, own_key
from ._leaves import is_key, is_traced
from ._mesh import check_mesh, shard_members
from ._stack import Where, of_stacked
from ._warnings import warn
from .tree._engine import check_no_tracers


def build(
    make: Callable[..., Any],
    num_members: int | None = None,
    *,
    zip: Mapping[str, Any] | None = None,
    product: Mapping[str, Any] | None = None,
    shared: Where | None = None,
    mesh: Mesh | None = None,
    key: Any,
) -> Any:
    """Makes an ensemble: `equinox.filter_vmap(make)` over one key per member.

    **Arguments:**

    - `make`: makes one member, `make(key, **arguments)`: a model, or `(model, state)` as
        `equinox.nn.make_with_state(Model)`.
    - `num_members`: the number of members, if keys or arguments do not tell it.
    - `zip`: per-member arguments by name, each an array `(members, ...)`.
    - `product`: the same, with one member for each combination, as in `itertools.product`.
    - `shared`: selects nodes that all members share, as in `equinox.tree_at`: `lambda model: model.trunk`. They are
        those of the first member, are kept once, and are constants in training.
    - `mesh`: the devices to build on, from [`eqx_ensemble.make_mesh`][].
    - `key`: one key, whose members' keys are [`eqx_ensemble.member_keys`][]`(key, num_members)`; or those keys
        themselves, `(members,)`.

    **Returns:** the ensemble; with its stacked `equinox.nn.State` if `make` returns a state.

    **Raises:** `TypeError` for invalid keys; `ValueError` for counts that disagree; `MemberMismatchError` if `make`
    stores an array of one member in a function, or a per-member argument as a Python float.

    ```python
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.build(make, 8, key=key)  # eight members from one key
    ee.build(make, key=ee.member_keys(key, 12)[8:])  # four more of the same ensemble
    ```
    """
    if not callable(make) or (isinstance(make, eqx.Module) and not isinstance(make, eqx.Partial)):
        raise TypeError(
            f"`build` needs a function that makes one member from a key, got `{type(make).__name__}`.\n"
            "Write `build(lambda key: Model(..., key=key), num_members, key=key)`; a list of models goes to `stack`."
        )
    check_mesh(mesh)
    arguments, counts = _arguments(zip, product)
    keys, count = _keys_of(key, num_members, counts)
    call = lambda key, arguments: make(key, **arguments)
    check_floats(call, arguments)
    if mesh is not None and count % mesh.shape["members"] == 0:
        # Compiled with the keys on their devices: no device ever holds all members.
        made = eqx.filter_jit(eqx.filter_vmap(call))(*shard_members((keys, arguments), mesh))
        made = shard_members(made, mesh)
    else:
        made = eqx.filter_vmap(call)(keys, arguments)
    check_no_tracers(made)
    model, *state = made if isinstance(made, tuple) and isinstance(made[-1], eqx.nn.State) else (made,)
    model, *state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype) if eqx.is_inexact_array(x) else x, (model, *state))
    if shared is not None:
        first = lambda node: jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, node)
        model = eqx.tree_at(shared, model, replace_fn=first)
    ensemble = of_stacked(model, shared)
    if count > 1 and not arguments:
        _warn_of_equal_members(ensemble)
    return (ensemble, *state) if state else ensemble


def _arguments(zip: Mapping[str, Any] | None, product: Mapping[str, Any] | None) -> tuple[dict, dict[str, int]]:
    """The stacked per-member arguments, and the number of members by their names."""
    if zip is not None and product is not None:
        raise TypeError("`build` takes `zip` (one value per member) or `product` (all combinations), not both.")
    chosen = zip if product is None else product
    arrays = {name: jnp.asarray(from_foreign(values, name)) for name, values in (chosen or {}).items()}
    for name, x in arrays.items():
        if x.ndim == 0:
            raise ValueError(f"`build` needs one value per member in `{name}`, got one number.")
        arrays[name] = jnp.asarray(x, x.dtype)  # strongly typed
    if product is not None:
        grid = np.array(list(itertools.product(*(range(len(x)) for x in arrays.values()))))
        arrays = {name: x[grid[:, i]] for i, (name, x) in enumerate(arrays.items())}
    return arrays, {name: len(x) for name, x in arrays.items()}


def _keys_of(key: Any, num_members: int | None, counts: dict[str, int]) -> tuple[Any, int]:
    """One key per member, and their number; raises for numbers that disagree."""
    if num_members is not None:
        counts = {"num_members": check_positive_int(num_members, "num_members"), **counts}
    if shape := check_key_shape(key, wanted="one key, or one per member"):
        counts = {**counts, "key": shape[0]}
    if not counts:
        raise TypeError("`build` needs to know how many members to make: `build(make, 8, key=key)`.")
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"`build` got different numbers of members: {listed}.")
    count = next(iter(counts.values()))
    return member_keys(key, count), count


def check_floats(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raises if `make` stores a per-member number as a Python float: stacked, it would be a trained array."""
    numbers = {name: x for name, x in arguments.items() if x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.floating)}
    if not numbers:
        return
    own = {name: np.asarray(x)[0] if name in numbers else x[0] for name, x in arguments.items()}
    found: list[str] = []

    def look(key: Any) -> None:
        for path, x in jax.tree_util.tree_leaves_with_path(call(key, own)):
            if isinstance(x, np.floating | float) and not is_traced(x) and x in [own[name] for name in numbers]:
                found.append(jax.tree_util.keystr(path))

    eqx.filter_eval_shape(look, own_key())
    if found:
        raise MemberMismatchError(
            f"`build` cannot give each member a Python float of its own; `make` stores one at `{found[0]}`.\n"
            "Store `jnp.asarray(value)`, which is trained unless `trainable=` leaves it out; or pass the values as "
            "`hyper` to `fit`, and use them in the loss."
        )


def _warn_of_equal_members(ensemble: Ensemble) -> None:
    """Warns if all members are equal although they hold more than constants: `make` does not use its key."""
    leaves = zip(jax.tree.leaves(ensemble.stacked, is_leaf=lambda x: x is None), ensemble.axes, strict=True)
    is_here = lambda x: not is_traced(x) and not is_key(x) and getattr(x, "is_fully_addressable", True)
    own = [np.asarray(x) for x, axis in leaves if axis == 0 and is_here(x)]
    if own and any((x != x.flat[0]).any() for x in own if x.size) and all((x == x[:1]).all() for x in own):
        warn("`build` made members that are all equal: does `make` use its key?")
