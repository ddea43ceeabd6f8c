from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ... import _axes, tree
from ..._axes import Each, check_no_batch, check_rows_of_data, explain_rows
from ..._caller import caller
from ..._check import (
    CountedRows,
    check_array,
    check_entries,
    check_function,
    check_labels,
    check_optional_function,
    check_positive_int,
    check_row_weights,
    check_word,
    kind_text,
    value_error,
)
from ..._compiled import filter_jit
from ..._ensemble import Ensemble, check_ensemble, check_model_state, check_model_state_given, take
from ..._foreign import from_foreign_tree
from ..._pytree import PyTree
from ..._sharding import layout_for
from ..._warnings import warn
from ...plan import AbstractPlan, AnyPlan
from ...plan._engine import as_plan, over_members, sharded_plan
from ...train import DivergedError
from ...train._engine import Run, Status, excluded_message, frozen_flags
from ._laplace import Laplace, check_members, check_per_member
from ._likelihood import LIKELIHOODS
from ._member import LaplaceMember, Posterior, Problem, call

STRUCTURES = ("full", "diag")
_MOST_SQUARE = 2**15  # weights with a full covariance: 4 GiB in single precision


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

    | structure | weights $p$ | memory per member | time |
    |---|---|---|---|
    | `"full"` | up to 32,768 | $p^2$ | rows $\cdot$ outputs $\cdot p^2 + p^3$ |
    | `"diag"`, without correlations | any number | $p$ | rows $\cdot$ outputs $\cdot p$ |

    On busy CPUs, `OPENBLAS_NUM_THREADS=1` in the environment can make a fit ten times faster.

    **Arguments:**

    - `ensemble`: trained members, or a run, whose best weights are used.
    - `data`: the training data, a pair of inputs and targets `(rows, ...)`, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][].
    - `likelihood`: `"regression"`: Gaussian noise. `"binary"`: one logit, labels 0 and 1. `"classification"`: logits of
        all classes, integer labels.
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
    check_word(likelihood, "likelihood", tuple(LIKELIHOODS))
    check_word(structure, "structure", STRUCTURES)
    check_function(where, "where", example="lambda model: model.layers[-1]")
    check_optional_function(fn, "fn", example="lambda model, x: model(x)[0]")
    check_positive_int(batch_size, "batch_size")
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"`{caller()}` needs `data` to be a pair `(inputs, targets)`, got {kind_text(data)}.")
    run = ensemble if isinstance(ensemble, Run) else None
    members = ensemble if run is None else run.ensemble
    check_ensemble(members)
    state = run.state if run is not None and state is None else state
    ones = jnp.ones(len(members))
    priors = Each(check_per_member("prior_precision", prior_precision, ones))
    own = ones if LIKELIHOODS[likelihood].has_noise else None
    noises = None if noise is None else Each(check_per_member("noise", noise, own))
    if run is not None:
        given = members, state, data, row_weights, priors, noises
        members, state, data, row_weights, priors, noises = take(given, _healthy(run))
    check_model_state_given(members.stacked, state)
    check_model_state(state, len(members))
    x, y = from_foreign_tree(data[0], "data[0]"), from_foreign_tree(data[1], "data[1]")
    check_no_batch((x, y))
    num_rows = check_rows_of_data((x, y), len(members), argument="data", finite=row_weights is None)
    weights, rows = _check_weights(row_weights, num_rows, len(members))
    model = eqx.filter_eval_shape(lambda members: members.one((tree.take(members.arrays, 0), None)), members)
    positions = _choose(members, model, where, structure)
    shape = _output_shape(model, x, state, fn)
    _check_outputs(shape, likelihood)
    y = _check_targets(y, rows, likelihood, shape.shape)
    problem = Problem(likelihood, structure, positions, fn, shape.shape)
    plan = sharded_plan(as_plan(plan), layout_for(mesh, members.stacked))
    size = min(batch_size, num_rows)
    posterior = _posteriors(problem, plan, size, members, x, y, weights, state, priors, noises)
    fine = jnp.isfinite(posterior.values).all(axis=1) & jnp.isfinite(posterior.loss)
    fix = "NaN in the rows? Members that diverged? Pass the run instead of its ensemble, or `run.healthy`."
    check_members(fine, members.ids, "finite outputs and derivatives", "have others", fix)
    if posterior.noise is not None:
        fix = "Pass `noise`, the standard deviation of the targets around their means."
        check_members(posterior.noise > 0, members.ids, "residuals, which give the noise", "have none", fix)
    stacked = LaplaceMember(members.stacked, posterior, problem)
    shared = LaplaceMember(members.shared, jax.tree.map(lambda _: None, posterior), problem)
    return Laplace(Ensemble(stacked, shared, members.ids), state)


def _healthy(run: Run[Any]) -> np.ndarray:
    """The positions of the members that did not diverge. Warns of others."""
    healthy = run.status != Status.DIVERGED
    if not healthy.any():
        raise DivergedError(f"`{caller()}`: all {len(healthy)} members diverged.", run)
    if not healthy.all():
        warn(excluded_message(np.asarray(run.ensemble.ids)[~healthy], healthy))
    return np.flatnonzero(healthy)


def _check_weights(row_weights: Any, num_rows: int, num_members: int) -> tuple[Any, CountedRows]:
    """Raises for invalid row weights, shared or in an `Each`. Returns them, and which rows count."""
    own = isinstance(row_weights, Each)
    given = row_weights.per_member() if isinstance(row_weights, Each) else row_weights
    rows = check_row_weights(given, (num_members, num_rows) if own else (num_rows,))
    if rows.weights is None:
        return jnp.ones(num_rows), rows
    if rows.known is not None and not rows.known.any(axis=-1).all():
        raise value_error("`row_weights` that leave a row", "got only zeros", "Every member needs rows.")
    return Each(rows.weights) if own else rows.weights, rows


def _choose(ensemble: Ensemble, model: PyTree, where: Callable[[Any], Any], structure: str) -> tuple[int, ...]:
    """The positions of the floating-point leaves that `where` selects and each member has of its own, not frozen."""
    leaves, treedef = jax.tree.flatten(model)
    found = [i for i in jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves))))) if type(i) is int]
    marks = eqx.combine(jax.tree.map(lambda _: True, ensemble.arrays), jax.tree.map(lambda _: False, ensemble.shared))
    own = [mine and not frozen for mine, frozen in zip(jax.tree.leaves(marks), frozen_flags(marks), strict=True)]
    is_kind = lambda i, kind: jnp.issubdtype(getattr(leaves[i], "dtype", bool), kind)
    kept = tuple(i for i in dict.fromkeys(found) if own[i] and is_kind(i, jnp.floating))
    if not kept or any(is_kind(i, jnp.complexfloating) for i in found):
        raise ValueError(
            f"`{caller()}` needs `where` to select at least one floating-point array of each member, and no complex "
            "one.\nArrays that the members share, and those inside of `train.Frozen`, have no posterior."
        )
    count = sum(leaves[i].size for i in kept)
    if structure == "full" and count > _MOST_SQUARE:
        fix = 'Select fewer, or pass `structure="diag"`.'
        raise value_error(f'at most {_MOST_SQUARE} weights with `structure="full"`', f"got {count}", fix)
    return kept


def _output_shape(model: PyTree, x: PyTree, state: Any, fn: Callable[..., Any] | None) -> Any:
    """The output of a member for one row, with shapes instead of arrays."""
    row = _axes.map_each(lambda own: jax.tree.map(lambda x: x[0, 0], own), x, shared=lambda x: x[0])
    one = lambda x, state, model: call(fn, eqx.nn.inference_mode(model), x, state)
    with explain_rows(x, argument="data[0]"):
        return eqx.filter_eval_shape(one, row, None if state is None else tree.take(state, 0), model)


def _check_outputs(shape: Any, likelihood: str) -> None:
    """Raises unless the output is one floating-point array with a shape that matches the likelihood."""
    if not isinstance(shape, jax.ShapeDtypeStruct) or not jnp.issubdtype(shape.dtype, jnp.floating):
        raise TypeError(
            f"`{caller()}` needs members with one floating-point array of outputs for a row, got {shape}.\n"
            "For a part of what they return pass `fn=lambda model, x: model(x)[0]`."
        )
    needs, fits = {
        "regression": ("at least one output", shape.size > 0),
        "binary": ("one logit per row", shape.size == 1),
        "classification": ("a logit for each of two classes or more", len(shape.shape) == 1 and shape.size > 1),
    }[likelihood]
    if not fits:
        fix = 'Two logits or more are a `"classification"`, one logit, of a sigmoid, is `"binary"`.'
        raise value_error(f"members with {needs} for `likelihood={likelihood!r}`", f"got {shape.shape}", fix)


def _check_targets(targets: Any, rows: CountedRows, likelihood: str, shape: tuple[int, ...]) -> Any:
    """Raises unless targets match the outputs, in rows that count. Returns them, or an `Each`."""
    own = isinstance(targets, Each)
    array = check_array("data[1]", targets.per_member() if isinstance(targets, Each) else targets)
    batch = array.shape[: 1 + own]
    if rows.known is not None and rows.known.ndim > len(batch):
        rows = rows._replace(known=rows.known.any(axis=0))
    if likelihood == "classification":
        array = check_labels(array, jnp.zeros((*batch, *shape)), rows, argument="outputs", members=False)
    elif array.shape != (*batch, *shape) and (array.size != np.prod(batch) or np.prod(shape) != 1):
        got = f"expected {(*batch, *shape)}, got {array.shape}"
        fix = "Targets have the shape of the outputs, with the rows in front."
        raise value_error("one target per output and row", got, fix)
    elif likelihood == "binary":
        fix = "Labels -1 and 1? Pass `(labels + 1) // 2`. Soft labels are not supported."
        check_entries("labels 0 and 1", array.reshape(batch), lambda host: ~np.isin(host, (0, 1)), fix, rows)
    return Each(array) if own else array


@filter_jit
def _posteriors(problem: Problem, plan: AbstractPlan, size: int, *of_members: Any) -> Posterior:
    """The posteriors of all members."""
    of_member = lambda *own: _posterior(problem, size, *own)
    return over_members(of_member, plan=plan)(*of_members)


def _posterior(
    problem: Problem, size: int, model: PyTree, x: PyTree, y: Array, row_weights: Array, state: Any, *hyper: Any
) -> Posterior:
    """The posterior of one member, from sums over batches of rows.

    No matrix is squared: rows of the root of the curvature are accumulated by QR decompositions. The condition number
    of a root is the square root of that of the matrix, so single precision suffices.
    """
    model, likelihood, num_rows = eqx.nn.inference_mode(model), LIKELIHOODS[problem.likelihood], row_weights.shape[0]
    vector = problem.vector(model)
    num_targets = y[0].size if likelihood.has_noise else 1
    y = y if problem.likelihood == "classification" else y.reshape(num_rows, -1)

    def row(x: PyTree, y: Array, counts: Array) -> tuple[Array, Array]:
        outputs, jacobian = problem.linearise(model, x, state)
        # Rows of weight zero may contain NaN.
        found = likelihood.loss(outputs, y), likelihood.root(outputs, jacobian)
        return jax.tree.map(lambda x: jnp.where(counts, x, 0), found)

    def add(sums: tuple[Array, Array, Array], rows: Array) -> tuple[tuple[Array, Array, Array], None]:
        curvature, loss, count = sums
        x_of, y_of, given = jax.tree.map(lambda x: x[jnp.minimum(rows, num_rows - 1)], (x, y, row_weights))
        weights = jnp.where(rows < num_rows, given.astype(vector.dtype), 0)
        losses, roots = jax.vmap(row)(x_of, y_of, weights > 0)
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
    prior_precision, noise = (None if value is None else value.astype(vector.dtype) for value in hyper)
    if noise is None and likelihood.has_noise:
        noise = jnp.sqrt(loss / count)
    values, vectors = curvature, None
    if problem.structure == "full":
        _, singular, across = jnp.linalg.svd(curvature)
        values, vectors = singular**2, across.T
    return Posterior(values, vectors, prior_precision, noise, loss, count)
