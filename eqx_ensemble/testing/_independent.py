from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import _keys
from .. import tree as _tree
from .._axes import Each
from .._axes._check_rows import check_rows_of_data
from .._build import build
from .._check import check_number, check_positive_int, check_sequence
from .._ensemble import Ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..plan import AbstractPlan, Chunked, Sequential, Unrolled, Vmap
from ..plan._auto import as_plan
from ..train._check import check_optimiser
from ..train._fit import fit
from ..train._hyper import hyper_arrays
from ..train.compiled._optimiser import Optimiser
from ..train.data._check import check_batch_size
from ._alone import Alone
from ._reference import Reference
from ._report import Check, raise_failures, same

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
    """Checks that members of your model, trained together, equal those trained alone.

    The reference is a plain training loop of one model with `equinox.filter_jit` and optax, without ensembles. If
    weights differ by more than `rtol`, training alone is repeated with differently rounded weights: a
    weight whose true gradient is zero (a bias before a normalisation, for example) has rounding noise as its gradient,
    which Adam scales up, and a line search may stop elsewhere. Members may then differ from training alone by ten times
    the differences between these repetitions, in their weights and in the losses of all steps; if rounding alone
    changes the losses by more than a hundredth, the check fails as inconclusive.

    If one member has NaN weights from the start, the others must be bit for bit unchanged on a CPU, and within `rtol`
    elsewhere.

    **Arguments:**

    - `make`, `loss`, `optimiser`, `data`, `batch_size`, `hyper`, `key`: as for [`eqx_ensemble.build`][] and
        [`eqx_ensemble.fit`][]; rows are taken in the order given, and `data` cannot contain an [`eqx_ensemble.Each`][].
    - `num_members`: the number of members to train. At least two are needed for the check with NaN.
    - `steps`: the number of training steps.
    - `plans`: the plans to train under.
    - `rtol`: the tolerance for weights, relative to the largest number of each array.

    **Returns:** the checks, each printing as one line.

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
    name = "testing.check_independent"
    check_number(rtol, "rtol", name=name, least=0)
    check_positive_int(steps, "steps", name=name)
    check_optimiser(optimiser, hyper=hyper, name=name)
    plans = [as_plan(plan) for plan in check_sequence(plans, "plans", name=name, of="plans")]
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    _check_no_each(data, name=name)
    rows = check_rows_of_data(data, num_members, argument="data", name=name, finite=False)
    size = check_batch_size(batch_size, rows, name=name)

    def train(ensemble: Ensemble, plan: AbstractPlan) -> Any:
        with ignore_warnings(".*diverged"):
            return fit(
                ensemble, loss, optimiser, data, steps=steps, batch_size=size, state=state, hyper=hyper,
                order="given", plan=plan, progress=False, key=key,
            )  # fmt: skip

    batches = [jax.tree.map(lambda x, i=i: x[i : i + size], data) for i in range(0, rows, size)]
    batches = [batches[i % len(batches)] for i in range(steps)]
    states = [None] * num_members if state is None else _tree.unstack(state)
    hypers = [None] * num_members if hyper is None else _tree.unstack(hyper_arrays(hyper, num_members, name=name))
    keys = _keys.member_keys(key, ensemble.ids, purpose="loss")
    reference = Reference(
        [
            Alone(model, *rest, loss=loss, optimiser=optimiser, member=i)
            for i, (model, *rest) in enumerate(zip(ensemble, states, hypers, keys, strict=True))
        ],
        batches,
    )
    checks, exact = [], jax.default_backend() == "cpu"
    for plan in plans:
        words, run = repr(plan), train(ensemble, plan)
        checks.append(reference.check(f"{words}: trained together as alone", run, rtol))
        damaged = eqx.tree_at(lambda e: e.stacked, ensemble, _with_nan(ensemble.stacked))
        other = train(damaged, plan)
        if num_members > 1:
            others = other.ensemble[1:].unstack(), run.ensemble[1:].unstack()
            checks.append(same(f"{words}: with a member of NaN", *others, 0.0 if exact else rtol))
        problem = None if other.stopped_at[0] == 0 else f"it diverged at step {other.stopped_at[0]}"
        checks.append(Check(f"{words}: the member of NaN is frozen at once", problem))
    return raise_failures(checks, name)


def _with_nan(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, stacked)


def _check_no_each(data: PyTree, *, name: str) -> None:
    is_each = lambda x: isinstance(x, Each)
    if any(map(is_each, jax.tree.leaves(data, is_leaf=is_each))):
        raise TypeError(f"`{name}` trains all members on the same `data`: pass it without `Each`.")
