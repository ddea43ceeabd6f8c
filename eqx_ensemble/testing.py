"""Checks that the guarantees for ensembles hold for your own models."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._build import build
from ._data import take_data
from ._keys import member_keys, tag
from ._pytree import PyTree
from ._warnings import ignore_warnings
from .plan import AnyPlan, Blocks, Vmap
from .train._fit import fit
from .train._member import call
from .train._optimiser import first_state, update
from .train._program import hyper_arrays

__all__ = ["check_independent"]


def check_independent(
    make: Callable[..., Any],
    loss: Callable[..., Any],
    optimiser: Any,
    data: PyTree,
    *,
    num_members: int = 4,
    steps: int = 20,
    batch_size: int = 32,
    hyper: PyTree = None,
    plans: Sequence[AnyPlan] = (Vmap(), Blocks(2)),
    rtol: float = 1e-5,
    key: Any,
) -> None:
    """Checks that members of an ensemble train as they would alone, for your own model, loss and optimiser.

    Every member is compared with a plain loop of `equinox.filter_value_and_grad` and the optimiser over one model. Then
    one member gets weights of NaN: the others must be bit for bit unchanged on a CPU, and within `rtol` elsewhere.

    Weights whose true gradient is zero, such as a bias in front of a normalisation, follow rounding errors under
    optimisers like Adam: check such models with `optax.sgd`.

    **Arguments:**

    - `make`, `loss`, `optimiser`, `data`, `batch_size`, `hyper`, `key`: as for [`eqx_ensemble.build`][] and
        [`eqx_ensemble.fit`][]; rows are taken in the order given, and `data` is shared by all members.
    - `num_members`: the number of members, at least two.
    - `steps`: the number of training steps.
    - `plans`: the plans to train under.
    - `rtol`: the tolerance for weights, relative to the largest number of each array.

    **Raises:** `AssertionError` that lists all checks if one fails.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    data = jnp.ones((10, 3)), jnp.zeros((10, 1))
    ee.testing.check_independent(make, loss, optax.adam(1e-3), data, steps=5, key=key)
    ```
    """
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    data, num_rows = take_data(data, num_members, argument="data")
    size = min(batch_size, num_rows)
    hyper = None if hyper is None else hyper_arrays(hyper, num_members)
    keys = member_keys(key, num_members, purpose="fit")
    alone = [
        train_alone(make, loss, optimiser, data, size, steps, member_keys(key, num_members)[i], keys[i],
                    None if hyper is None else jax.tree.map(lambda x, i=i: x[i], hyper))
        for i in range(num_members)
    ]  # fmt: skip
    options = {"steps": steps, "batch_size": size, "shuffle": False, "state": state, "hyper": hyper, "key": key}
    problems = []
    for plan in plans:
        with ignore_warnings(".*diverged"):
            run = fit(ensemble, loss, optimiser, data, plan=plan, progress=False, **options)
            broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, ensemble)
            other = fit(broken, loss, optimiser, data, plan=plan, progress=False, **options)
        for i, model in enumerate(alone):
            problems += _differences(f"{plan}: member {i} trained together and alone", run.ensemble[i], model, rtol)
        exact = 0.0 if jax.default_backend() == "cpu" else rtol
        problems += _differences(f"{plan}: beside a member of NaN", other.ensemble[1:], run.ensemble[1:], exact)
    if problems:
        raise AssertionError("\n".join(["`check_independent` found differences:", *problems]))


def train_alone(
    make: Callable[..., Any], loss: Callable[..., Any], optimiser: Any, data: PyTree, size: int, steps: int,
    build_key: Any, key: Any, hyper: Any,
) -> Any:  # fmt: skip
    """One model trained by a plain loop, on the rows in their order."""
    made = make(build_key)
    has_state = isinstance(made, tuple) and isinstance(made[-1], eqx.nn.State)
    model, state = made if has_state else (made, None)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = first_state(optimiser, params, hyper, key)
    own = jax.random.fold_in(key, tag("loss"))
    num_rows = jax.tree.leaves(data)[0].shape[0]

    @eqx.filter_jit
    def step(params: PyTree, opt_state: PyTree, state: Any, batch: PyTree, key: Any) -> Any:
        def value_of(params: PyTree) -> Any:
            out = call(loss, eqx.combine(params, static), state, batch, key, hyper)
            return out if state is not None else (out, None)

        (value, state_after), grads = eqx.filter_value_and_grad(value_of, has_aux=True)(params)
        after, opt_state = update(optimiser, grads, opt_state, params, value, lambda p: value_of(p)[0], hyper)
        return after, opt_state, state_after

    for i in range(steps):
        rows = np.arange(i * size, (i + 1) * size) % num_rows
        batch = jax.tree.map(lambda x, rows=rows: x[rows], data)
        params, opt_state, state = step(params, opt_state, state, batch, jax.random.fold_in(own, i))
    return eqx.combine(params, static)


def _differences(what: str, got: PyTree, expected: PyTree, rtol: float) -> list[str]:
    found = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        if eqx.is_inexact_array(x):
            scale = np.abs(np.asarray(y)).max(initial=0)
            error = np.abs(np.asarray(x) - np.asarray(y)).max(initial=0)
            if not error <= rtol * scale:
                found.append(f"  {what}: `{jax.tree_util.keystr(path)}` differs by {error:.3g} of {scale:.3g}")
    return found
