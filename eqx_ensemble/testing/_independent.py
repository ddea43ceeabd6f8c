import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .. import _axes, _check, _keys
from .. import tree as _tree
from .._build import build
from .._ensemble import Ensemble
from ..plan import AbstractPlan, Chunked, Sequential, Unrolled, Vmap
from ..plan._auto import as_plan
from ..plan._plans import in_words
from ..train import fit
from ..train._optimiser import Optimiser, init_member, resolve, standard_promotion
from ._report import Check, raised, same

_PLANS = (Vmap(), Chunked(2), Sequential(), Unrolled())


def check_independent(
    make: Callable[..., Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    num_members: int = 3,
    steps: int = 20,
    batch_size: int | None = None,
    hyper: PyTree = None,
    plans: Iterable[AbstractPlan] = _PLANS,
    rtol: float = 1e-5,
    key: Any,
) -> list[Check]:
    """Checks that members of your model, trained together, end as training each alone does.

    The reference is a plain loop over one model with `equinox.filter_jit` and optax, which knows nothing of
    ensembles. Beside a member whose weights are NaN from the start, the others must not change by one bit on a CPU.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    data = jnp.ones((10, 3)), jnp.zeros((10, 1))
    ee.testing.check_independent(make, loss, optax.adam(1e-3), data, steps=5, key=key)
    ```

    **Arguments:**

    - `make`, `loss`, `optimiser`, `data`, `batch_size`, `hyper`, `key`: as for [`eqx_ensemble.build`][] and
        [`eqx_ensemble.fit`][]; rows are taken in the order given.
    - `num_members`: how many members to train.
    - `steps`: how long.
    - `plans`: the plans to train under.
    - `rtol`: how far weights may differ, relative to the largest number of each array.

    **Returns:** the checks, each printing as one line.

    **Raises:** `AssertionError` that lists all checks, when one fails.
    """
    name = "testing.check_independent"
    _check.check_number(rtol, "rtol", name=name, least=0)
    _check.positive_int(steps, "steps", name=name)
    _check.optimiser(optimiser, hyper=hyper, name=name)
    plans = [as_plan(plan) for plan in _check.check_sequence(plans, "plans", name=name, of="plans")]
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    rows = _check.rows_of_data(data, _axes.Each, num_members, argument="data", name=name)
    size = min(32, rows) if batch_size is None else batch_size
    _check.batch_fits(size, rows, name=name)

    def trained(ensemble: Ensemble, plan: AbstractPlan) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*diverged", category=UserWarning)
            return fit(
                ensemble, loss, optimiser, data, steps=steps, batch_size=size, state=state, hyper=hyper,
                order="given", plan=plan, progress=False, key=key,
            )  # fmt: skip

    batches = [jax.tree.map(lambda x, i=i: x[i : i + size], data) for i in range(0, rows, size)]
    batches = [batches[i % len(batches)] for i in range(steps)]
    states = [None] * num_members if state is None else _tree.unstack(state)
    hypers = [None] * num_members if hyper is None else _tree.unstack(jax.tree.map(jnp.asarray, hyper))
    keys = _keys.member_keys(key, ensemble.ids, purpose="loss")
    alone = [
        _alone(model, loss, optimiser, batches, *rest, member=i)
        for i, (model, *rest) in enumerate(zip(ensemble, states, hypers, keys, strict=True))
    ]
    checks, exact = [], jax.default_backend() == "cpu"
    for plan in plans:
        words, run = in_words(plan), trained(ensemble, plan)
        checks.append(same(f"{words}: together as alone", run.ensemble.unstack(), alone, rtol))
        poisoned = eqx.tree_at(lambda e: e.stacked, ensemble, _poisoned(ensemble.stacked))
        beside = trained(poisoned, plan)
        others = beside.ensemble[1:].unstack(), run.ensemble[1:].unstack()
        checks.append(same(f"{words}: beside a member of NaN", *others, 0.0 if exact else rtol))
        left = None if beside.left[0] == 0 else f"it left at step {beside.left[0]}"
        checks.append(Check(f"{words}: the member of NaN is frozen at once", left))
    return raised(checks, "check_independent")


def _alone(
    model: Any, loss: Any, optimiser: Optimiser, batches: list, state: Any, hyper: Any, key: Any, *, member: int
) -> Any:
    """A model trained as people do who have only one."""
    params, frozen = eqx.partition(model, eqx.is_inexact_array)
    opt_state = init_member(optimiser, params, hyper, jnp.int32(member))  # noise keys of its own
    transformation = optax.with_extra_args_support(resolve(optimiser, hyper))
    named = {"hyper": hyper} if _check.loss_signature(loss, stateful=state is not None, hyper=hyper, name="fit") else {}

    def value(params: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        model = eqx.combine(params, frozen)
        return (loss(model, batch, key, **named), None) if state is None else loss(model, state, batch, key, **named)

    @eqx.filter_jit
    def step(params: Any, opt_state: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        (now, new), grads = jax.value_and_grad(value, has_aux=True)(params, state, batch, key)
        value_fn = lambda params: value(params, state, batch, key)[0]
        with standard_promotion():
            updates, opt_state = transformation.update(
                grads, opt_state, params, value=now, grad=grads, value_fn=value_fn
            )
            return optax.apply_updates(params, updates), opt_state, new

    for i, batch in enumerate(batches):
        params, opt_state, state = step(params, opt_state, state, batch, jax.random.fold_in(key, i))
    return eqx.combine(params, frozen)


def _poisoned(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, stacked)
