from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from ... import _axes, tree
from ..._axes import Each, explain_rows
from ..._caller import caller
from ..._check import check_function, check_optional_function, check_positive_int, check_word, concrete, kind_text
from ..._ensemble import Ensemble, check_ensemble, check_model_state, check_model_state_given, take
from ..._pytree import PyTree
from ..._sharding import layout_for
from ..._warnings import warn
from ...plan import AnyPlan
from ...plan._engine import as_plan, over_members, sharded_plan
from ...train._engine import Run, Status, excluded_message
from ._check import check_finite_posterior, check_healthy, check_indices, check_per_member
from ._laplace import Laplace
from ._member import LIKELIHOODS, LaplaceMember, Problem, call
from ._selection import CURVATURES, Leaves
from ._setup import Setup, add_batch, check_outputs, check_targets, choose, factor_error, finish, member_shapes, prepare


def subnetwork(posterior: Laplace[Any], count: int) -> Each:
    """Selects the weights of each member with the largest posterior variance, as `indices` for another fit.

    **Arguments:**

    - `posterior`: a fit with `structure="diag"` or `"full"`.
    - `count`: the number of weights to select per member.

    **Returns:** an [`eqx_ensemble.Each`][] of integers `(members, count)`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (50, 2)), jnp.zeros((50, 1))
    options = {"likelihood": "regression", "where": lambda model: model, "noise": 0.1}
    laplace = ee.methods.laplace
    diagonal = laplace.fit(ensemble, data, structure="diag", **options)
    indices = laplace.subnetwork(diagonal, 10)
    posterior = laplace.fit(ensemble, data, indices=indices, **options)
    ```

    ??? cite
        [Daxberger, Nalisnick et al. 2021](https://arxiv.org/abs/2010.14689)
    """
    if not isinstance(posterior, Laplace):
        raise TypeError(f"`{caller()}` needs what `methods.laplace.fit` returned, got {kind_text(posterior)}.")
    selection = posterior.members.stacked.posterior.selection
    if not isinstance(selection, Leaves):
        raise TypeError(f'`{caller()}` needs a fit with `structure="diag"` or `"full"`: `"kron"` has no subnetworks.')
    values = posterior.members.stacked.posterior.curvature.values
    count, num_weights = check_positive_int(count, "count"), values.shape[-1]
    if count > num_weights:
        raise ValueError(f"`{caller()}` needs `count` of at most {num_weights}, the number of weights; got {count}.")

    def choose(member: LaplaceMember) -> Int[Array, " weights"]:
        own = member.posterior
        found = jnp.sort(jax.lax.top_k(own.curvature.variance(own.precision), count)[1])
        indices = getattr(own.selection, "indices", None)
        return found if indices is None else indices[found]

    return Each(over_members(choose)(posterior.members))


def fit(
    ensemble: Any,
    data: Any,
    *,
    likelihood: Literal["regression", "binary", "classification"],
    where: Callable[[Any], Any],
    structure: Literal["full", "kron", "diag"] = "full",
    prior_precision: Any = 1.0,
    noise: Any = None,
    indices: Any = None,
    row_weights: Any = None,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    batch_size: int = 256,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> Laplace[Any]:
    r"""Laplace approximation: fits a Gaussian to the posterior over some weights of each trained member.

    The posterior over the weights selected by `where` is $N(w, P^{-1})$, centred at the member's weights $w$, with

    $$P = \sum_n J_n^\top \Lambda_n J_n + \delta I$$

    over all rows: the Jacobian $J_n$ of the outputs, the second derivative $\Lambda_n$ of the negative log-likelihood,
    the precision $\delta$ of a Gaussian prior. Other weights are fixed.

    The weights should be a mode of this posterior: a **mean** loss over $N$ rows with the penalty $\frac{\lambda}{2}
    \lVert w \rVert^2$ has $\delta = N \lambda$. `optax.adamw` is not such a penalty.
    [`eqx_ensemble.methods.laplace.Laplace.optimise_prior`][] estimates a precision.

    | structure | weights | memory per member | time |
    |---|---|---|---|
    | `"full"` | any $p$, up to 32,768 | $p^2$ | rows $\cdot$ outputs $\cdot p^2 + p^3$ |
    | `"kron"` | one linear layer, $a$ to $b$ | $a^2 + b^2$ | rows $\cdot (a^2 + b^2\cdot$outputs$) + a^3 + b^3$ |
    | `"diag"` | any $p$ | $p$ | rows $\cdot$ outputs $\cdot p$ |

    On busy CPUs, `OPENBLAS_NUM_THREADS=1` in the environment can make a fit ten times faster.

    **Arguments:**

    - `ensemble`: trained members, or a run, whose best weights are used.
    - `data`: the training data, a pair of inputs and targets `(rows, ...)`, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][].
    - `likelihood`: `"regression"`: Gaussian noise. `"binary"`: one logit, labels 0 and 1. `"classification"`: logits of
        all classes, integer labels.
    - `where`: selects nodes of one member, as in `equinox.tree_at`: `lambda model: model.layers[-1]`.
    - `structure`: as above; `"kron"` is KFAC, for one `equinox.nn.Linear` that is called once per row.
    - `prior_precision`: $\delta$, one number, or `(members,)`.
    - `noise`: its standard deviation for `"regression"`, one number or `(members,)`; by default that of the residuals,
        which is too small if a member overfits.
    - `indices`: a subnetwork: positions among the selected weights, `(n,)`, or in an `Each` `(members, n)`.
    - `row_weights`: numbers or booleans `(rows,)`, or in an `Each` `(members, rows)`: for a bootstrap
        `ee.Each(ee.resample.counts(rows, num_rows))`. Rows of zero are ignored, even if NaN.
    - `state`: the stacked `equinox.nn.State`; by default that of the run.
    - `fn`: `fn(model, x)` instead of `model(x)`, or `fn(model, x, state) -> (outputs, state)`.
    - `batch_size`: rows per batch; it affects memory only.
    - `plan`, `mesh`: as for [`eqx_ensemble.map_members`][].

    **Returns:** [`eqx_ensemble.methods.laplace.Laplace`][]. To load a saved one, pass a fit to a few rows as `like`.

    **Raises:** `ValueError` that lists members whose outputs or derivatives are not finite.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 3, 8, 1, key=key), 4, key=key)
    x, labels = jax.random.normal(key, (50, 2)), jnp.arange(50) % 3
    posterior = ee.methods.laplace.fit(  # after training
        ensemble,
        (x, labels),
        likelihood="classification",
        where=lambda model: model.layers[-1],
    ).optimise_prior()
    posterior.predict(x, combine=ee.combine.mixture).shape  # (50, 3)
    posterior.sample(10, key=key)  # 40 members
    ```

    ??? cite
        [MacKay 1992](https://doi.org/10.1162/neco.1992.4.3.448); [Daxberger et al.
        2021](https://arxiv.org/abs/2106.14806); of ensembles: [Eschenhagen et al.
        2021](https://arxiv.org/abs/2111.03577)
    """
    members, state, kept, num_given = _healthy_members(ensemble, state)
    check_word(likelihood, "likelihood", tuple(LIKELIHOODS))
    check_word(structure, "structure", tuple(CURVATURES))
    check_function(where, "where", example="lambda model: model.layers[-1]")
    check_optional_function(fn, "fn", example="lambda model, x: model(x)[0]")
    check_positive_int(batch_size, "batch_size")
    check_model_state_given(members.stacked, state)
    check_model_state(state, len(members))
    chosen = choose(members, where, structure)
    like = jnp.zeros(num_given, chosen.dtype)
    precision, noises = _hyper(prior_precision, noise, likelihood, like, kept)
    data, row_weights, indices = take((data, row_weights, indices), kept)
    found, num_rows = prepare(data, len(members), row_weights)
    shape = _output_shape(members, found.x, state, fn)
    check_outputs(shape, likelihood)
    found = found._replace(y=check_targets(found.y, likelihood, shape.shape))
    indices = check_indices(indices, chosen.num_weights, structure)
    setup = Setup(structure, chosen, Problem(likelihood, fn, shape.shape))
    plan = sharded_plan(as_plan(plan), layout_for(mesh, members.stacked))
    if structure == "kron":
        error = concrete(factor_error(setup, members, found.batch(0, 1, num_rows), state))
        if error is not None and np.isfinite(error).all() and (error > 1e-2).any():  # no outer product
            raise ValueError(
                f'`{caller()}` with `structure="kron"` needs a linear layer that is called once for each row; this one '
                "is called more often, such as for each token, or its weight is used elsewhere too.\nPass "
                '`structure="full"` or `"diag"`.'
            )
    sums, size = setup.start(len(members), indices), min(batch_size, num_rows)
    for begin in range(0, num_rows, size):
        rows = found.batch(begin, size, num_rows)
        sums = add_batch(setup, plan, members, Each(sums), rows, indices, state)
    posterior = finish(setup, plan, Each(sums), indices, Each(precision), noises)
    check_finite_posterior(posterior, members.ids)
    stacked = LaplaceMember(members.stacked, posterior, setup.problem)
    shared = LaplaceMember(members.shared, jax.tree.map(lambda _: None, posterior), setup.problem)
    return Laplace(Ensemble(stacked, shared, members.ids), state)


def _healthy_members(ensemble: Any, state: Any) -> tuple[Ensemble, Any, np.ndarray, int]:
    """The members to fit (of a run, those that did not diverge), their state and positions, and the number of all."""
    if not isinstance(ensemble, Run):
        check_ensemble(ensemble)
        return ensemble, state, np.arange(len(ensemble)), len(ensemble)
    healthy = ensemble.status != Status.DIVERGED
    check_healthy(ensemble, healthy)
    state = ensemble.state if state is None else state
    if not healthy.all():
        ids = np.asarray(ensemble.ensemble.ids)[~healthy]
        warn(excluded_message(ids, healthy))
        state = take(state, healthy)
    return ensemble.healthy, state, np.flatnonzero(healthy), len(healthy)


def _hyper(
    prior_precision: Any, noise: Any, likelihood: str, like: jax.Array, kept: np.ndarray
) -> tuple[jax.Array, Any]:
    """The prior precision and noise of the fitted members."""
    precision = check_per_member("prior_precision", prior_precision, like)[kept]
    if not LIKELIHOODS[likelihood].has_noise:
        if noise is not None:
            raise TypeError(f"`{caller()}` takes `noise` for regression only: classes have none.")
        return precision, None
    return precision, None if noise is None else Each(check_per_member("noise", noise, like)[kept])


def _output_shape(ensemble: Ensemble, x: PyTree, state: Any, fn: Callable[..., Any] | None) -> Any:
    """The output of a member for one row, with shapes instead of arrays."""
    row = _axes.map_each(lambda own: jax.tree.map(lambda x: x[0, 0], own), x, shared=lambda x: x[0])
    one = lambda x, state, model: call(fn, eqx.nn.inference_mode(model), x, state)
    own_state = None if state is None else tree.take(state, 0)
    with explain_rows(x, argument="data[0]"):
        return eqx.filter_eval_shape(one, row, own_state, member_shapes(ensemble))
