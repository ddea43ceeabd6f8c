from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _keys
from .. import tree as _tree
from .._axes import Each
from .._axes._check_rows import check_rows_of_data
from .._build import build
from .._check import check_number, check_positive_int, check_sequence, is_typed_key
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..plan import AbstractPlan, Chunked, Sequential, Unrolled, Vmap
from ..plan._auto import as_plan
from ..train._check import check_optimiser
from ..train._fit import fit
from ..train._opt_hyper import hyper_arrays
from ..train._state import init
from ..train.compiled._optimiser import Optimiser
from ..train.data._check import check_batch_size
from ._reference import Alone, Reference
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
    elsewhere. Under `Vmap`, members are also trained on batches whose memory is overwritten after each step, and with a
    loss that is a Module, or from a state whose `hyper` was replaced.

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

    begin = {"state": state, "hyper": hyper}
    in_order = {"batch_size": size, "order": "given"}

    def train(ensemble: Any, loss: Any, data: PyTree, plan: AbstractPlan = Vmap(), **options: Any) -> Any:  # noqa: B008
        with ignore_warnings(".*diverged"):
            return fit(ensemble, loss, optimiser, data, steps=steps, plan=plan, progress=False, key=key, **options)

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
        words, run = repr(plan), train(ensemble, loss, data, plan, **begin, **in_order)
        checks.append(reference.check(f"{words}: trained together as alone", run, rtol))
        damaged = eqx.tree_at(lambda e: e.stacked, ensemble, _with_nan(ensemble.stacked))
        other = train(damaged, loss, data, plan, **begin, **in_order)
        if num_members > 1:
            others = other.ensemble[1:].unstack(), run.ensemble[1:].unstack()
            checks.append(same(f"{words}: with a member of NaN", *others, 0.0 if exact else rtol))
        problem = None if other.stopped_at[0] == 0 else f"it diverged at step {other.stopped_at[0]}"
        checks.append(Check(f"{words}: the member of NaN is frozen at once", problem))

    ways = {"batches whose memory is filled again": train(ensemble, loss, _refill(batches), **begin)}
    if hyper is None:
        held = eqx.Partial(lambda _, *args: loss(*args), jnp.zeros(()))
        ways["a loss that is a Module"] = train(ensemble, held, data, **begin, **in_order)
    else:
        hyper = hyper_arrays(hyper, num_members, name=name)
        others = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), hyper)
        first = init(ensemble, optimiser, state=state, hyper=others, key=key)
        first = eqx.tree_at(lambda state: state.hyper, first, hyper)
        ways["hyper-parameters that were changed"] = train(first, loss, data, **in_order)
    checks += [reference.check(f"with {words}: trained together as alone", run, rtol) for words, run in ways.items()]
    return raise_failures(checks, name)


def _refill(batches: list[PyTree]) -> Iterator[PyTree]:
    """The batches, each in memory that is overwritten when the next one is drawn, as some loaders do."""
    for batch in batches:
        own = jax.tree.map(lambda x: x if is_typed_key(x) else np.array(x), batch)
        yield own
        for x in jax.tree.leaves(own):
            if isinstance(x, np.ndarray):
                x.fill(0)


def _with_nan(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, stacked)


def _check_no_each(data: PyTree, *, name: str) -> None:
    is_each = lambda x: isinstance(x, Each)
    if any(map(is_each, jax.tree.leaves(data, is_leaf=is_each))):
        raise TypeError(f"`{name}` trains all members on the same `data`: pass it without `Each`.")
