from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import _check, tree
from ..._data import take_data
from ..._ensemble import Ensemble, check_ensemble, check_model_state
from ..._map import take_marked
from ..._marks import Each
from ..._pytree import PyTree
from ...train._run import Run, check_healthy
from ...train._state import trained_leaves
from ._laplace import Laplace, check_members, check_per_member, run_members
from ._likelihood import LIKELIHOODS
from ._member import LaplaceMember, Posterior, Problem, call

STRUCTURES = ("full", "diag")


def fit(
    ensemble: Any,
    data: Any,
    *,
    likelihood: Literal["regression", "binary", "classification"],
    where: Callable[[Any], Any],
    structure: Literal["full", "diag"] = "full",
    prior_precision: Any = 1.0,
    noise: Any = None,
    row_weights: Any = None,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    batch_size: int = 256,
) -> Laplace[Any]:
    r"""Laplace approximation: fits a Gaussian to the posterior over some weights of each trained member.

    The posterior over the weights selected by `where` is $N(w, P^{-1})$, centred at the member's weights $w$, with

    $$P = \sum_n J_n^\top \Lambda_n J_n + \delta I$$

    over all rows: the Jacobian $J_n$ of the outputs, the second derivative $\Lambda_n$ of the negative log-likelihood,
    the precision $\delta$ of a Gaussian prior. Other weights are fixed.

    The weights should be a mode of this posterior: a **mean** loss over $N$ rows with the penalty $\frac{\lambda}{2}
    \lVert w \rVert^2$ has $\delta = N \lambda$. `optax.adamw` is not such a penalty.
    [`eqx_ensemble.methods.laplace.Laplace.optimise_prior`][] estimates a precision.

    | structure | memory for $p$ weights of a member | time |
    |---|---|---|
    | `"full"` | $p^2$ | rows $\cdot$ outputs $\cdot p^2 + p^3$ |
    | `"diag"`, without correlations | $p$ | rows $\cdot$ outputs $\cdot p$ |

    On busy CPUs, `OPENBLAS_NUM_THREADS=1` in the environment can make a fit ten times faster.

    **Arguments:**

    - `ensemble`: trained members, or a run, whose best weights are used.
    - `data`: the training data, a pair of inputs and targets `(rows, ...)`, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][].
    - `likelihood`: `"regression"`: Gaussian noise. `"binary"`: one logit, labels 0 and 1 or probabilities of 1.
        `"classification"`: logits of all classes, integer labels.
    - `where`: selects nodes of one member, as in `equinox.tree_at`: `lambda model: model.layers[-1]` for the last
        layer, `lambda model: model` for all weights.
    - `structure`: as above.
    - `prior_precision`: $\delta$, one number, or `(members,)`.
    - `noise`: its standard deviation for `"regression"`, one number or `(members,)`; by default that of the residuals,
        which is too small if a member overfits.
    - `row_weights`: numbers or booleans `(rows,)`, or in an `Each` `(members, rows)`: for a bootstrap
        `ee.Each(ee.resample.counts(rows, num_rows))`. Rows of zero are ignored, even if NaN.
    - `state`: the stacked `equinox.nn.State`; by default that of the run.
    - `fn`: `fn(model, x)` instead of `model(x)`, or `fn(model, x, state) -> (outputs, state)`.
    - `batch_size`: rows per batch; it affects memory only.

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
    _check.check_word(likelihood, "likelihood", tuple(LIKELIHOODS))
    _check.check_word(structure, "structure", STRUCTURES)
    _check.check_function(where, "where", example="lambda model: model.layers[-1]")
    _check.check_positive_int(batch_size, "batch_size")
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise _check.type_error("`data` as a pair `(inputs, targets)`", f"got {_check.kind_text(data)}", "Pass both.")
    is_run = isinstance(ensemble, Run)
    members, state = (ensemble.ensemble, ensemble.state if state is None else state) if is_run else (ensemble, state)
    check_ensemble(members)
    ones = jnp.ones(len(members))
    priors = check_per_member("prior_precision", prior_precision, ones)
    noises = None if noise is None else check_per_member("noise", noise, ones if likelihood == "regression" else None)
    if is_run:
        given = members, state, data, row_weights, priors, noises
        healthy = np.flatnonzero(check_healthy(ensemble))
        members, state, data, row_weights, priors, noises = take_marked(given, healthy)
    check_model_state(members, state)
    (x, y), num_rows = take_data(tuple(data), len(members), argument="data")
    own = isinstance(row_weights, Each)
    shape = (len(members), num_rows) if own else (num_rows,)
    rows = _check.check_row_weights(row_weights.value if own else row_weights, shape)
    weights = jnp.ones(num_rows) if rows.weights is None else Each(rows.weights) if own else rows.weights
    model = members[0]
    positions = _choose(members, model, where)
    problem = Problem(likelihood, structure, positions, fn, _output_shape(model, x, state, fn, likelihood))
    y = _check_targets(y, rows, likelihood, problem.shape)
    of_members = members, (x, y, weights), state, priors, noises
    posterior = run_members(_posterior, problem, min(batch_size, num_rows), *of_members)
    fine = jnp.isfinite(posterior.values).all(axis=1) & jnp.isfinite(posterior.loss)
    fix = "NaN or other labels in the rows? Members that diverged? Pass the run instead of its ensemble."
    check_members(fine, "finite outputs and derivatives", "have others", fix)
    if posterior.noise is not None:
        fix = "Pass `noise`, the standard deviation of the targets around their means."
        check_members(posterior.noise > 0, "residuals, which give the noise", "have none", fix)
    stacked = LaplaceMember(members.stacked, posterior, problem)
    of_posterior = [None if x is None else 0 for x in jax.tree.leaves(posterior, is_leaf=lambda x: x is None)]
    return Laplace(Ensemble(stacked, (*members.axes, *of_posterior)), state)


def _choose(members: Ensemble, model: PyTree, where: Callable[[Any], Any]) -> tuple[int, ...]:
    """The positions of the floating-point leaves that `where` selects and each member has of its own, not frozen."""
    leaves, treedef = jax.tree.flatten(model)
    found = [i for i in jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves))))) if type(i) is int]
    rows = zip(jax.tree.leaves(members.stacked, is_leaf=lambda x: x is None), trained_leaves(members), strict=True)
    own = [is_own for x, is_own in rows if x is not None]
    is_kind = lambda i, kind: jnp.issubdtype(getattr(leaves[i], "dtype", bool), kind)
    kept = tuple(i for i in dict.fromkeys(found) if own[i] and is_kind(i, jnp.floating))
    if not kept or any(is_kind(i, jnp.complexfloating) for i in found):
        fix = "Arrays that the members share, and those inside of `train.Frozen`, have no posterior."
        needs = "`where` to select at least one floating-point array of each member, and no complex one"
        raise _check.value_error(needs, f"got {len(kept)} of the former", fix)
    return kept


def _output_shape(model: PyTree, x: PyTree, state: Any, fn: Any, likelihood: str) -> tuple[int, ...]:
    """The shape of a member's outputs for one row. Raises unless the likelihood can have them."""
    first = lambda x: jax.tree.map(lambda x: x[0, 0], x.value) if isinstance(x, Each) else x[0]
    row = jax.tree.map(first, x, is_leaf=lambda x: isinstance(x, Each))
    one = lambda x, state, model: call(fn, eqx.nn.inference_mode(model), x, state)
    found: Any = eqx.filter_eval_shape(one, row, None if state is None else tree.take(state, 0), model)
    if not isinstance(found, jax.ShapeDtypeStruct) or not jnp.issubdtype(found.dtype, jnp.floating):
        fix = "For a part of what they return pass `fn=lambda model, x: model(x)[0]`."
        raise _check.type_error("members with one floating-point array of outputs for a row", f"got {found}", fix)
    fits = {"binary": found.size == 1, "classification": len(found.shape) == 1 and found.size > 1}
    if not fits.get(likelihood, True):
        fix = '`"binary"` is for one logit per row, `"classification"` for a logit for each of two classes or more.'
        raise _check.value_error(f"outputs that fit `likelihood={likelihood!r}`", f"got {found.shape}", fix)
    return found.shape


def _check_targets(targets: Any, rows: _check.CountedRows, likelihood: str, shape: tuple[int, ...]) -> Any:
    """Raises unless targets match the outputs, in rows that count. Returns them, or an `Each`."""
    own = isinstance(targets, Each)
    array = _check.check_array("data[1]", targets.value if own else targets)
    batch = array.shape[: 1 + own]
    if rows.known is not None and rows.known.ndim > len(batch):
        rows = rows._replace(known=rows.known.any(axis=0))
    if likelihood == "classification":
        array = _check.check_labels(array, jnp.zeros((*batch, *shape)), rows, argument="outputs", members=False)
    elif array.shape != (*batch, *shape) and (array.size != np.prod(batch) or np.prod(shape) != 1):
        got = f"expected {(*batch, *shape)}, got {array.shape}"
        raise _check.value_error(
            "one target per output and row", got, "Their shape is that of the outputs of all rows."
        )
    return Each(array) if own else array


def _posterior(problem: Problem, size: int, model: Any, data: tuple, state: Any, prior: Array, noise: Any) -> Posterior:
    """The posterior of one member, from sums over batches of rows.

    No matrix is squared: rows of the root of the curvature are accumulated by QR decompositions. The condition number
    of a root is the square root of that of the matrix, so single precision suffices.
    """
    model, likelihood = eqx.nn.inference_mode(model), LIKELIHOODS[problem.likelihood]
    x, y, row_weights = data
    vector, num_rows = problem.weights(model)[0], row_weights.shape[0]
    num_targets = y[0].size if likelihood.has_noise else 1
    y = y if problem.likelihood == "classification" else y.reshape(num_rows, -1)

    def row(x: PyTree, y: Array, counts: Array) -> tuple[Array, Array]:
        outputs, jacobian = problem.linearise(model, x, state)
        # Rows of weight zero may contain NaN.
        found = likelihood.loss(outputs, y), likelihood.root(outputs, jacobian)
        return jax.tree.map(lambda x: jnp.where(counts, x, 0), found)

    def add(sums: tuple[Array, Array, Array], rows: Array) -> tuple[tuple[Array, Array, Array], None]:
        curvature, loss, count = sums
        at = jnp.minimum(rows, num_rows - 1)
        weights = jnp.where(rows < num_rows, jnp.asarray(row_weights[at], vector.dtype), 0)
        losses, roots = jax.vmap(row)(jax.tree.map(lambda x: x[at], x), y[at], weights > 0)
        roots = (jnp.sqrt(weights)[:, None, None] * roots).reshape(-1, vector.size)
        if problem.structure == "full":
            curvature = jnp.linalg.qr(jnp.concatenate([curvature, roots]), mode="r")
        else:
            curvature = curvature + jnp.sum(roots**2, axis=0)
        return (curvature, loss + weights @ losses, count + num_targets * jnp.sum(weights)), None

    zero = jnp.zeros((), vector.dtype)
    curvature = jnp.zeros((vector.size,) * (2 if problem.structure == "full" else 1), vector.dtype)
    rows = jnp.arange(-(-num_rows // size) * size).reshape(-1, size)
    (curvature, loss, count), _ = jax.lax.scan(add, (curvature, zero, zero), rows)
    if likelihood.has_noise:
        noise = (jnp.sqrt(loss / count) if noise is None else noise).astype(vector.dtype)
    values, vectors = curvature, None
    if problem.structure == "full":
        _, singular, across = jnp.linalg.svd(curvature)
        values, vectors = singular**2, across.T
    return Posterior(values, vectors, prior.astype(vector.dtype), noise, loss, count)
