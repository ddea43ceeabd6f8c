"""Checks for your own models: does what holds for ensembles hold for this one?"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from . import _check, _keys
from . import tree as _tree
from ._build import build
from ._ensemble import Ensemble, concatenate, stack
from .plan import AbstractPlan, Chunked, Sequential, Vmap
from .train import fit
from .train._optimiser import Optimiser, init_member, resolve, standard_promotion

_PLANS = (Vmap(), Chunked(2), Sequential())


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, and what is wrong, or `None`. It prints as one line."""

    name: str
    problem: str | None

    def __str__(self) -> str:
        return f"ok      {self.name}" if self.problem is None else f"FAILED  {self.name}: {self.problem}"


def check_ensemble(
    make: Callable[..., Any], x: PyTree = None, *, num_members: int = 4, rtol: float = 1e-5, key: Any
) -> list[Check]:
    """Checks that a model can be a member: that building, taking apart and calling an ensemble of it are faithful.

    ```python
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    for check in ee.testing.check_ensemble(make, jnp.ones(3), key=key):
        print(check)
    ```

    **Arguments:**

    - `make`: makes one member from one key, as for [`eqx_ensemble.build`][].
    - `x`: one example; if given, the ensemble is called as well. A member that takes more is wrapped in a function.
    - `num_members`: how many members to build.
    - `rtol`: how far outputs may differ, relative to the largest number of each array.
    - `key`: the root key.

    **Returns:** the checks, each printing as one line.

    **Raises:** `AssertionError` that lists all checks, when one fails.
    """
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    alone = [make(key) for key in _keys.member_keys(key, num_members)]
    models = [one[0] if state is not None else one for one in alone]
    middle = num_members // 2

    checks = [
        _same("each member is what `make` gives alone", ensemble.unstack(), models, rtol),
        _same("stacking the members gives the ensemble", stack(ensemble.unstack()), ensemble, 0.0),
        _same("an index gives a member", ensemble[middle], ensemble.unstack()[middle], 0.0),
        _same("a mask keeps members and their ids", ensemble[ensemble.ids != 0], ensemble[1:], 0.0),
        _same("parts put together give the whole", concatenate([ensemble[:1], ensemble[1:]]), ensemble, 0.0),
        _same("it passes through `filter_jit`", eqx.filter_jit(lambda tree: tree)(ensemble), ensemble, 0.0),
        _differ("members with other keys are other models", ensemble),
    ]
    if x is not None:
        checks += _calls(ensemble, state, x, rtol)
    return _raised(checks, "check_ensemble")


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
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    rows = len(jax.tree.leaves(data)[0])
    size = min(32, rows) if batch_size is None else batch_size

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
        run = trained(ensemble, plan)
        checks.append(_same(f"{plan}: together as alone", run.ensemble.unstack(), alone, rtol))
        poisoned = eqx.tree_at(lambda e: e.stacked, ensemble, _poisoned(ensemble.stacked))
        beside = trained(poisoned, plan)
        others = beside.ensemble[1:].unstack(), run.ensemble[1:].unstack()
        checks.append(_same(f"{plan}: beside a member of NaN", *others, 0.0 if exact else rtol))
        left = None if beside.left[0] == 0 else f"it left at step {beside.left[0]}"
        checks.append(Check(f"{plan}: the member of NaN is frozen at once", left))
    return _raised(checks, "check_independent")


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


def _calls(ensemble: Ensemble, state: Any, x: PyTree, rtol: float) -> list[Check]:
    states = [()] * len(ensemble) if state is None else [(one,) for one in _tree.unstack(state)]
    rest = () if state is None else (state,)
    outputs = [model(x, *own) for model, own in zip(ensemble, states, strict=True)]
    return [_same("calling it calls every member", ensemble(x, *rest), _tree.stack(outputs), rtol)]


def _poisoned(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, stacked)


def _same(name: str, got: PyTree, expected: PyTree, rtol: float) -> Check:
    got, expected = (jax.tree_util.tree_flatten_with_path(eqx.filter(x, eqx.is_array))[0] for x in (got, expected))
    if [path for path, _ in got] != [path for path, _ in expected]:
        return Check(name, "they hold different arrays")
    for (path, x), (_, y) in zip(got, expected, strict=True):
        x, y = (np.asarray(jax.random.key_data(z) if _check.is_key(z) else z) for z in (x, y))
        if x.shape != y.shape or x.dtype != y.dtype:
            return Check(name, f"at `{jax.tree_util.keystr(path)}`: {y.dtype}{y.shape} became {x.dtype}{x.shape}")
        distance = _distance(x, y)
        if not distance <= rtol:
            where = jax.tree_util.keystr(path)
            return Check(name, f"at `{where}`: relative distance {distance:.2g}, at most {rtol:.2g} allowed")
    return Check(name, None)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.size == 0 or np.array_equal(x, y):
        return 0.0
    x, y = (z.astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y))
    return float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), np.finfo(np.float64).tiny))


def _differ(name: str, ensemble: Ensemble) -> Check:
    arrays = [x for x in jax.tree.leaves(ensemble.stacked) if eqx.is_inexact_array(x)]
    distinct = any(len(np.unique(np.asarray(x, np.float64).reshape(len(x), -1), axis=0)) == len(x) for x in arrays)
    return Check(name, None if distinct or not arrays else "all members have the same arrays")


def _raised(checks: list[Check], name: str) -> list[Check]:
    if any(check.problem is not None for check in checks):
        raise AssertionError("\n".join([f"`{name}`:", *map(str, checks)]))
    return checks
