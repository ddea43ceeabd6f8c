from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._brief import brief_doc
from .._caller import caller
from .._check import check_number, value_error
from .._leaves import as_column
from .._warnings import warn
from .._weighting import class_log_odds
from ._numbers import FlatRows, Pool, Pooling, flat_rows

Kind = Literal["vector", "matrix", "platt", "beta"]


class Temperature(eqx.Module):
    """Fitted temperature scaling.

    **Attributes:**

    - `temperature`: `(groups,)`; above 1 for overconfident predictions.
    - `pooling`: that of the fit.
    """

    temperature: Float[Array, " groups"]
    pooling: Pooling

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, logits: kinds.Logits) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        logs = self.pooling.logs(logits)
        return jax.nn.log_softmax(logs / as_column(self.temperature, logs.ndim).astype(logs.dtype), axis=-1)


class Calibration(eqx.Module):
    """A fitted calibration that is linear in functions of the probabilities of a row.

    **Attributes:**

    - `coefficients`: `(groups, classes, features)`. For `"vector"`, a class's scale and bias; for `"matrix"`, a row of
        the matrix and the bias; for `"platt"`, its slope and offset; for `"beta"`, its $a$, $b$ and $c$.
    - `kind`: the function that fitted it.
    - `pooling`: that of the fit.
    """

    coefficients: Float[Array, "groups classes features"]
    pooling: Pooling
    kind: Kind = eqx.field(static=True)

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, logits: kinds.Logits) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        logs = self.pooling.logs(logits)
        flat = logs.reshape(logs.shape[0], -1, logs.shape[-1])
        x, by = _features(flat, self.kind), self.coefficients.astype(logs.dtype)
        if self.kind == "matrix":
            margins = jnp.matmul(x, by.mT, precision=jax.lax.Precision.HIGHEST)
        else:
            margins = jnp.sum(x * by[:, None], axis=-1)
        margins = margins if self.kind in _SOFTMAX else jax.nn.log_sigmoid(margins)
        return jax.nn.log_softmax(margins, axis=-1).reshape(logs.shape)


_SOFTMAX = ("vector", "matrix")  # the others fit each class against the rest


def _features(logs: Float[Array, "*batch classes"], kind: Kind) -> Float[Array, "..."]:
    """`(*batch, classes, features)`, whose products with coefficients sum to margins; `(*batch, features)` for all."""
    one = jnp.ones_like(logs)
    if kind == "vector":
        return jnp.stack([logs, one], axis=-1)
    if kind == "matrix":
        return jnp.concatenate([logs, one[..., :1]], axis=-1)
    odds = class_log_odds(logs)
    return jnp.stack([odds, one] if kind == "platt" else [logs, odds - logs, one], axis=-1)


def _minimise(loss: Callable, start: np.ndarray, bounds: Any = None) -> tuple[np.ndarray, bool]:
    from scipy import optimize  # here, because it takes long to import

    flat = lambda x: (lambda value, grad: (value, np.ravel(grad)))(*loss(x.reshape(start.shape)))
    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": 1e-15, "gtol": 1e-9}
    found = optimize.minimize(flat, np.ravel(start), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return found.x.reshape(start.shape), found.success


def _fit(rows: FlatRows, kind: Kind, penalties: tuple[float, float] = (0, 0)) -> Calibration:
    """Minimises the mean loss in double precision, of each group of predictions alone."""
    each = np.asarray(_features(rows.logs, kind), np.float64)[:, rows.mask]
    hits, share = rows.hits[rows.mask], (rows.share / rows.share.sum())[rows.mask, None]
    goal, num_classes = hits.astype(np.float64), hits.shape[-1]
    if kind == "platt":  # Platt's targets: a minimum also exists for separable rows
        count = np.sum(rows.share[rows.mask, None] * hits, axis=0)
        goal = np.where(hits, (count + 1) / (count + 2), 1 / (rows.share.sum() - count + 2))
    start = np.eye(num_classes, num_classes + 1) if kind == "matrix" else np.ones((num_classes, each.shape[-1]))
    start[:, -1] = 0
    apart = ~np.eye(num_classes, num_classes + 1, dtype=bool)
    price = np.zeros(start.shape)
    if kind == "matrix":
        price = np.where(apart, penalties[0] / (num_classes * (num_classes - 1)), 0.0)
        price[:, -1] = penalties[1] / num_classes
    bounds = [(0, None), (0, None), (None, None)] * num_classes if kind == "beta" else None
    best = []
    for x in each:
        # In units of similar curvature, so that few steps are taken.
        unit = 1 / np.sqrt(np.maximum(np.mean(x**2, axis=0), 1e-30) + 2 * price)

        def loss(scaled: np.ndarray, x: np.ndarray = x, unit: np.ndarray = unit) -> tuple[float, np.ndarray]:
            by = scaled * unit
            margins = x @ by.T if kind == "matrix" else np.einsum("ncf,cf->nc", x, by)
            of_row, slope = _losses(margins, goal, kind)
            grad = (share * slope).T @ x if kind == "matrix" else np.einsum("nc,ncf->cf", share * slope, x)
            return np.sum(share * of_row) + np.sum(price * by**2), unit * (grad + 2 * price * by)

        found, flat = _minimise(loss, start / unit, bounds)
        by = found * unit
        margins = x @ by.T if kind == "matrix" else np.einsum("ncf,cf->nc", x, by)
        right = (margins == margins.max(-1, keepdims=True)) if kind in _SOFTMAX else margins > 0
        # If all rows are right, larger coefficients are always better.
        separable = kind != "platt" and not price.any() and (right == hits).all(axis=None if kind in _SOFTMAX else 0)
        if not flat or np.any(separable):
            warn(
                f"`{caller()}`: no minimum was reached. If the rows are separable, none exists: fit on more rows, use "
                "a calibration with fewer parameters, or `calibrate.matrix` with penalties."
            )
        best.append(by)
    return Calibration(jnp.asarray(np.stack(best), rows.logs.dtype), rows.pooling, kind)


def _losses(margins: np.ndarray, goal: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, or of each class against the rest, and the slopes in the margins."""
    if kind in _SOFTMAX:
        logs = margins - np.logaddexp.reduce(margins, axis=-1, keepdims=True)
        return -np.sum(goal * logs, axis=-1, keepdims=True), np.exp(logs) - goal
    return np.logaddexp(0, margins) - goal * margins, 0.5 * (1 + np.tanh(margins / 2)) - goal


def temperature(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Temperature:
    r"""Temperature scaling: logits are divided by one number, fitted to held-out labels by maximum likelihood.

    The most likely classes do not change. The mean of $-\log \mathrm{softmax}(z / T)_y$ over rows is convex in $1 / T$.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`, logits or log-probabilities, finite, for rows that the members were not
        trained on.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `pool`: `"members"` fits one temperature per member; combine them afterwards. `"mixture"` fits one temperature to
        the log-probabilities of the mixture.
    - `weights`: of the members in the mixture, `(members,)`.
    - `row_weights`: `(*batch,)`, booleans, or numbers: a row of weight 2 counts twice.

    **Returns:**

    [`eqx_ensemble.calibrate.Temperature`][].

    **Raises:**

    - `ValueError` if no optimum exists: every label already is the most likely class, or the labels are no more likely
        than by chance.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4]))
    labels = jnp.array([0, 0, 0, 1])  # right in 75 % of the rows
    fitted = ee.calibrate.temperature(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, 0]  # [0.75, 0.25]
    ```

    ??? cite
        [Guo et al. 2017](https://arxiv.org/abs/1706.04599)
    """
    rows = flat_rows(logits, labels, pool, weights, row_weights)
    logs, hits = np.asarray(rows.logs, np.float64)[:, rows.mask], rows.hits[rows.mask]
    share, found = (rows.share / rows.share.sum())[rows.mask], []
    for i, group in enumerate(logs):
        gaps = group - group[hits][:, None]
        whose = f"member {i}: " if pool == "members" else ""
        if (gaps <= 0).all():
            got = "every label already is the most likely class, so the likelihood increases as the temperature goes "
            got, fix = f"{whose}{got}to zero", "Fit on more rows, with at least one wrong prediction."
            raise value_error("labels for which an optimal temperature exists", got, fix)
        if share @ gaps.mean(axis=-1) >= 0:
            got = (
                f"{whose}the labels are no more likely than by chance, so the likelihood increases with the temperature"
            )
            fix = "Are the labels in the order of the rows?"
            raise value_error("labels for which an optimal temperature exists", got, fix)
        found.append(_best_temperature(gaps, share))
    dtype = rows.logs.dtype
    return Temperature(jnp.asarray(found, dtype), rows.pooling)


def _best_temperature(gaps: np.ndarray, share: np.ndarray) -> float:
    """The root of the slope of the mean loss, which increases in `1 / T`, in units of the largest gap."""
    from scipy import optimize, special

    unit = np.max(np.abs(gaps))
    gaps = gaps / unit

    def slope(log_inverse: float) -> float:
        return share @ np.sum(special.softmax(np.exp(log_inverse) * gaps, axis=-1) * gaps, axis=-1)

    return float(unit / np.exp(optimize.brentq(slope, -40, 40, xtol=1e-12)))


def vector(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Calibration:
    r"""Vector scaling: a scale and a bias for the log-probability of each class, fitted by maximum likelihood.

    The mean of $-\log \mathrm{softmax}(w \odot \log p + b)_y$ over rows is convex in $w$ and $b$, and is minimised by
    SciPy's L-BFGS from $w = 1, b = 0$. An arbitrary offset of a row's logits has no effect.

    **Arguments:** as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Calibration`][]. Warns if no minimum was reached; none exists for separable rows.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4 + [[0.2, 0.8]] * 4]))
    labels = jnp.array([0, 0, 0, 1, 0, 0, 1, 1])
    fitted = ee.calibrate.vector(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::4]  # [[0.75, 0.25], [0.5, 0.5]]
    ```

    ??? cite
        [Guo et al. 2017](https://arxiv.org/abs/1706.04599)
    """
    return _fit(flat_rows(logits, labels, pool, weights, row_weights), "vector")


def matrix(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    off_diagonal_penalty: float = 0.0,
    bias_penalty: float = 0.0,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Calibration:
    r"""Matrix scaling of log-probabilities, which is Dirichlet calibration.

    The mean of $-\log \mathrm{softmax}(W \log p + b)_y$ over rows, plus $\lambda$ times the mean square of the entries
    of $W$ off its diagonal and $\mu$ times that of $b$, is minimised from the identity. With many classes and few rows
    it overfits without penalties.

    **Arguments:**

    - `off_diagonal_penalty`, `bias_penalty`: $\lambda$ and $\mu$, non-negative: choose them by cross-validation.
    - the others: as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Calibration`][], with the warning of `vector`. Without penalties, only predictions are
    unique.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4 + [[0.2, 0.8]] * 4]))
    labels = jnp.array([0, 0, 0, 1, 0, 0, 1, 1])
    fitted = ee.calibrate.matrix(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::4]  # [[0.75, 0.25], [0.5, 0.5]]
    ```

    ??? cite
        [Kull et al. 2019](https://arxiv.org/abs/1910.12656)
    """
    check_number(off_diagonal_penalty, "off_diagonal_penalty", least=0)
    check_number(bias_penalty, "bias_penalty", least=0)
    rows = flat_rows(logits, labels, pool, weights, row_weights)
    return _fit(rows, "matrix", (off_diagonal_penalty, bias_penalty))


def platt(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Calibration:
    r"""Platt scaling: a logistic regression of the labels on the log-odds of each class.

    $p = 1 / (1 + \exp(-(a s + b)))$ for the log-odds $s$, with Platt's targets $(N_+ + 1) / (N_+ + 2)$ and $1 / (N_- +
    2)$ instead of 1 and 0: a minimum then also exists for separable rows. The loss is convex.

    **Arguments:** as for [`eqx_ensemble.calibrate.temperature`][]. For binary probabilities `p` pass
    `jnp.log(jnp.stack([1 - p, p], axis=-1))`, for binary logits `jnp.stack([jnp.zeros_like(logit), logit], axis=-1)`.

    **Returns:**

    [`eqx_ensemble.calibrate.Calibration`][].

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1], [0.1, 0.9]] * 20]))
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 0] * 5)
    fitted = ee.calibrate.platt(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, 0]  # [0.727, 0.273]: targets are smoothed
    ```

    ??? cite
        Platt 1999; numerics: [Lin et al. 2007](https://doi.org/10.1007/s10994-007-5018-6)
    """
    return _fit(flat_rows(logits, labels, pool, weights, row_weights), "platt")


def beta(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Calibration:
    r"""Beta calibration: log-odds $a \ln p - b \ln(1 - p) + c$ with $a, b \ge 0$, fitted by maximum likelihood.

    These are the log-odds of a class if its probability has one Beta distribution in rows of the class and another in
    other rows. Unlike Platt scaling, it leaves calibrated probabilities unchanged, but it needs more rows.

    **Arguments:** as for [`eqx_ensemble.calibrate.platt`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Calibration`][]. Warns if no optimum exists: the probabilities of a class separate its rows
    from the others, or all rows or no rows are of the class.

    ```python
    p = jnp.array([0.2, 0.2, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9])
    logits = jnp.log(jnp.stack([1 - p, p], axis=-1))[None]
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 1])
    fitted = ee.calibrate.beta(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::2, 1]  # [0.47, 0.54, 0.75, 0.75]
    ```

    ??? cite
        [Kull et al. 2017](https://proceedings.mlr.press/v54/kull17a.html)
    """
    return _fit(flat_rows(logits, labels, pool, weights, row_weights), "beta")
