"""Random fits of calibrations, compared with SciPy's minima, scikit-learn, or their definitions."""

import jax.numpy as jnp
import numpy as np
from scipy import optimize, special

from eqx_ensemble import calibrate

from .conformal_cases import FLOATS, draw_kept, draw_regression
from .draws import Case


def _calibrated(d, kinds):
    """Logits and labels, of which a third are random, on 64 rows, options, and the logs and labels of each group."""
    d.rows = 64
    logits = d.numbers("logits", d.members, d.rows, d.classes, kinds=kinds, dtypes=FLOATS)
    d.own = np.ones(d.rows)
    labels = np.where(d.rng.random(d.rows) < 0.4, logits.mean(0).argmax(-1), d.rng.integers(0, d.classes, d.rows))
    pool = d.pick("pool", "members", "mixture")
    d.share = np.full((d.members, 1), 1 / d.members)
    weights = d.weighted_members() if pool == "mixture" else {}
    row_weights, kept = draw_kept(d)
    logs = special.log_softmax(d.wide(logits), -1)
    if pool == "mixture":
        logs = special.logsumexp(logs, axis=0, b=d.share[..., None])[None]
    arguments = {"logits": d.spoil(logits, members=1), "labels": np.where(kept, labels, 0)} | weights | row_weights
    return logits, logs, labels, kept, arguments, pool


def calibrated(name):
    def case(d):
        logits, logs, labels, kept, arguments, pool = _calibrated(
            d, ("normal",) if name == "isotonic" else ("normal", "ties")
        )
        want = np.stack([CALIBRATORS[name](group, labels, kept) for group in logs])
        if np.isnan(want).any():
            return None
        fitted = getattr(calibrate, name)(**arguments, pool=pool)  # not while tracing
        fn = lambda new, **arguments: jnp.exp(fitted(new))
        return Case(fn, {"new": logits} | arguments, {}, want, rtol=2e-3, atol=2e-3)

    return case


def _minimum(loss, start, **options):
    return optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-9}, **options).x


def _temperature(logs, labels, kept):
    loss = lambda t: -np.mean(special.log_softmax(np.exp(t) * logs, -1)[np.arange(64), labels][kept])
    best = optimize.minimize_scalar(loss, bounds=(-12, 6), method="bounded", options={"xatol": 1e-9}).x
    # Without an optimum that is far from the ends there is an error.
    return special.softmax(np.exp(best) * logs, -1) if -6 < best < 3 else np.full(logs.shape, np.nan)


def _vector(logs, labels, kept):
    classes = logs.shape[-1]
    scaled = lambda p: p[:classes] * logs + p[classes:]
    loss = lambda p: -np.mean(special.log_softmax(scaled(p), -1)[np.arange(64), labels][kept])
    return special.softmax(scaled(_minimum(loss, np.r_[np.ones(classes), np.zeros(classes)])), -1)


def _each_class(calibrator):
    def calibrated(logs, labels, kept):
        found = [calibrator(logs[:, c], labels == c, kept) for c in range(logs.shape[-1])]
        if len(found) == 2:
            found[0] = 1 - found[1]
        found = np.stack(found, -1)
        total = found.sum(-1, keepdims=True)
        return np.where(total == 0, 1 / found.shape[-1], found / np.where(total == 0, 1, total))

    return calibrated


def _platt(logs, hits, kept):
    odds, count = logs - np.log1p(-np.exp(logs)), np.sum(hits & kept)
    targets = np.where(hits, (count + 1) / (count + 2), 1 / (np.sum(~hits & kept) + 2))
    loss = lambda p: np.mean((np.logaddexp(0, p[0] * odds + p[1]) - targets * (p[0] * odds + p[1]))[kept])
    return special.expit(np.dot(_minimum(loss, np.array([1.0, 0.0])), [odds, np.ones(64)]))


def _isotonic(logs, hits, kept):
    from sklearn.isotonic import IsotonicRegression

    p = np.exp(logs).astype(np.float32).astype(np.float64)
    return IsotonicRegression(out_of_bounds="clip").fit(p[kept], hits[kept]).predict(p)


def variance(d):
    mean, targets = draw_regression(d, d.members)
    v, pool = np.exp(d.rng.normal(size=mean.shape)).astype(mean.dtype), d.pick("pool", "members", "mixture")
    weights = d.weighted_members() if pool == "mixture" else {}
    row_weights, kept = draw_kept(d)
    m, wide, y = d.wide(mean), d.wide(v), d.wide(targets)
    if pool == "mixture":
        centre = (d.share * m).sum(0)
        m, wide = centre[None], (d.share * (wide + (m - centre) ** 2)).sum(0)[None]
    factor = np.mean(((y - m) ** 2 / wide)[:, kept], axis=1)
    if (factor < 1e-3).any():
        return None
    arrays = {"mean": d.spoil(mean, members=1), "variance": d.spoil(v, members=1), "targets": targets}
    arrays |= weights | row_weights
    return Case(lambda **arrays: calibrate.variance(**arrays, pool=pool).scale, arrays, {}, factor)


CALIBRATORS = {
    "temperature": _temperature,
    "vector": _vector,
    "platt": _each_class(_platt),
    "isotonic": _each_class(_isotonic),
}
CALIBRATE = {"variance": variance} | {name: calibrated(name) for name in CALIBRATORS}
