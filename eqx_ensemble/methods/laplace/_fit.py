import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import _check, tree
from ..._boundary import check_row_weights
from ..._data import take_data
from ..._ensemble import Ensemble, check_ensemble, check_model_state
from ..._map import take_marked
from ..._marks import Each
from ..._pytree import PyTree
from ...train._run import Run, check_healthy
from ...train._state import trained_leaves
from ._laplace import Laplace, LaplaceMember, Setting, check_members, for_members, outputs_of, run_members, with_prior

_FITS: dict[str, Callable[[tuple[int, ...]], bool]] = {  # which shapes of a row's outputs
    "regression": lambda shape: True,
    "binary": lambda shape: math.prod(shape) == 1,
    "classification": lambda shape: len(shape) == 1 and shape[0] > 1,
}


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
    _check.check_word(likelihood, "likelihood", tuple(_FITS))
    _check.check_word(structure, "structure", ("full", "diag"))
    is_run = isinstance(ensemble, Run)
    members, state = (ensemble.ensemble, ensemble.state if state is None else state) if is_run else (ensemble, state)
    check_ensemble(members)
    given = Each(for_members(len(members), likelihood, prior_precision, noise))
    if is_run:
        every = members, state, data, row_weights, given
        members, state, data, row_weights, given = take_marked(every, np.flatnonzero(check_healthy(ensemble)))
    check_model_state(members, state)
    (x, y), num_rows = take_data(tuple(data), len(members), argument="data")
    is_own = isinstance(row_weights, Each)
    shape = (len(members), num_rows) if is_own else (num_rows,)
    rows = check_row_weights(row_weights.value if is_own else row_weights, shape).weights
    model = members[0]
    shape = _shape_of_outputs(model, x, y, state, fn, likelihood)
    setting = Setting(likelihood, structure, _choose(members, model, where), shape, fn)
    rows = Each(rows) if is_own else rows
    found = run_members(_posterior, setting, min(batch_size, num_rows), members, x, y, rows, state)
    fine = jnp.isfinite(found.stacked.values).all(axis=1) & jnp.isfinite(found.stacked.loss)
    fix = "NaN or invalid labels in the rows? Members that diverged? Pass the run instead of its ensemble."
    check_members(fine, "finite outputs and derivatives", fix)
    priors, noises = given.value
    return with_prior(Laplace(found, state), prior_precision=priors, noise=noises)


def _choose(members: Ensemble, model: PyTree, where: Callable[[Any], Any]) -> tuple[int, ...]:
    """The positions of the floating-point leaves that `where` selects and each member has of its own, not frozen."""
    leaves, treedef = jax.tree.flatten(model)
    found = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves)))))
    rows = zip(jax.tree.leaves(members.stacked, is_leaf=lambda x: x is None), trained_leaves(members), strict=True)
    own = [is_own and eqx.is_inexact_array(x) and jnp.isrealobj(x) for x, is_own in rows if x is not None]
    kept = tuple(i for i in dict.fromkeys(found) if type(i) is int and own[i])
    if not kept:
        fix = "Arrays that the members share, and those inside `train.Frozen`, have no posterior."
        needs = "`where` to select at least one real floating-point array of each member"
        raise _check.value_error(needs, "got none", fix)
    return kept


def _shape_of_outputs(model: PyTree, x: PyTree, y: Any, state: Any, fn: Any, likelihood: str) -> tuple[int, ...]:
    """The shape of a member's outputs for one row. Raises unless likelihood and targets fit it."""
    first = lambda x: jax.tree.map(lambda x: x[0, 0], x.value) if isinstance(x, Each) else x[0]
    row = jax.tree.map(first, x, is_leaf=lambda x: isinstance(x, Each))
    one = lambda x, state, model: outputs_of(fn, eqx.nn.inference_mode(model), x, state)
    out: Any = eqx.filter_eval_shape(one, row, None if state is None else tree.take(state, 0), model)
    shape = getattr(out, "shape", None)
    if shape is None or not _FITS[likelihood](shape):
        needs = f"one array of outputs per row, of the shape for `likelihood={likelihood!r}`"
        fix = "To use a part of what members return, pass `fn=lambda model, x: model(x)[0]`."
        raise _check.value_error(needs, f"got {out}", fix)
    fitting = [()] if likelihood == "classification" else [shape, (), (1,)] if math.prod(shape) == 1 else [shape]
    got = y.value.shape[2:] if isinstance(y, Each) else y.shape[1:]
    if got not in fitting:  # they would be broadcast
        fix = "Nothing is broadcast." if got != shape else "One-hot labels? Pass `jnp.argmax(y, axis=-1)`."
        got = f"expected (rows, *{fitting[0]}), got (rows, *{got})"
        raise _check.value_error("one label per row, or one target per output and row", got, fix)
    return shape


def _posterior(
    setting: Setting, size: int, model: Any, x: PyTree, y: Array, row_weights: Any, state: Any
) -> LaplaceMember:
    """The posterior of one member, from sums over batches of rows, with a prior precision of 1.

    No matrix is squared: rows of the root of the curvature are accumulated by QR decompositions. The condition number
    of a root is the square root of that of the matrix, so single precision suffices.
    """
    called = eqx.nn.inference_mode(model)
    vector, num_rows = setting.weights(model)[0], y.shape[0]
    row_weights = jnp.ones(num_rows) if row_weights is None else row_weights
    is_full, has_noise = setting.structure == "full", setting.likelihood == "regression"
    num_targets = y[0].size if has_noise else 1

    def row(x: PyTree, y: Array, counts: Array) -> tuple[Array, Array]:
        outputs, jacobian = setting.linearise(called, x, state)
        found = _loss_and_root(setting.likelihood, outputs, jacobian, y.ravel().astype(outputs.dtype))
        # Rows of weight zero may contain NaN.
        return jax.tree.map(lambda x: jnp.where(counts, x, 0), found)

    def add(sums: tuple[Array, Array, Array], rows: Array) -> tuple[tuple[Array, Array, Array], None]:
        curvature, loss, count = sums
        at = jnp.minimum(rows, num_rows - 1)
        weights = jnp.where(rows < num_rows, jnp.asarray(row_weights[at], vector.dtype), 0)
        losses, roots = jax.vmap(row)(jax.tree.map(lambda x: x[at], x), y[at], weights > 0)
        roots = (jnp.sqrt(weights)[:, None, None] * roots).reshape(-1, vector.size)
        if is_full:
            curvature = jnp.linalg.qr(jnp.concatenate([curvature, roots]), mode="r")
        else:
            curvature = curvature + jnp.sum(roots**2, axis=0)
        return (curvature, loss + weights @ losses, count + num_targets * jnp.sum(weights)), None

    zero = jnp.zeros((), vector.dtype)
    start = jnp.zeros((vector.size,) * (1 + is_full), vector.dtype), zero, zero
    rows = jnp.arange(-(-num_rows // size) * size).reshape(-1, size)
    (values, loss, count), _ = jax.lax.scan(add, start, rows)
    vectors = None
    if is_full:
        _, singular, across = jnp.linalg.svd(values)
        values, vectors = singular**2, across.T
    noise = jnp.sqrt(loss / count) if has_noise else None
    return LaplaceMember(model, values, vectors, zero + 1, noise, loss, count, setting)


def _loss_and_root(likelihood: str, outputs: Array, jacobian: Array, target: Array) -> tuple[Array, Array]:
    """The loss of a row, and `L' jacobian`, where `L L'` is the second derivative of the negative log-likelihood.

    The loss is the negative log-likelihood in nats, NaN for what is no target; for regression, whose noise is taken to
    be 1, the sum of squared errors.
    """
    if likelihood == "regression":
        return jnp.sum((outputs - target) ** 2), jacobian
    if likelihood == "binary":  # the second derivative is `p (1 - p)`, in log space for accuracy
        share = jnp.where((target >= 0) & (target <= 1), target, jnp.nan)
        yes, no = jax.nn.log_sigmoid(outputs), jax.nn.log_sigmoid(-outputs)
        return -jnp.sum(share * yes + (1 - share) * no), jnp.exp((yes + no) / 2)[:, None] * jacobian
    # The second derivative `diag(p) - p p'` has the root `(diag(p) - p p') / sqrt(p)`, column by column.
    logs, is_target = jax.nn.log_softmax(outputs), target == jnp.arange(outputs.size, dtype=outputs.dtype)
    loss = jnp.where(is_target.any(), -jnp.sum(jnp.where(is_target, logs, 0)), jnp.nan)
    return loss, jnp.exp(logs / 2)[:, None] * (jacobian - (jnp.exp(logs) @ jacobian)[None])
