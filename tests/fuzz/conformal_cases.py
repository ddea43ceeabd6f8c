"""Random fits of conformal functions, and what they are by definition, in NumPy's float64."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from scipy import special

from eqx_ensemble import conformal

from .draws import Case

FLOATS = (np.float32, np.float32, np.float64)


def _rank(level, count):
    exact = Fraction(level).limit_denominator(1000)
    return -(-(count + 1) * exact.numerator // exact.denominator)


def _at_rank(values, rank):
    return np.append(np.sort(values), np.inf)[min(rank - 1, len(values))]


def draw_kept(d):
    arguments = d.counted_rows(weights=False)
    return arguments, d.own > 0


def quantile(d):
    scores, level = d.numbers("scores", d.rows, kinds=("normal", "ties", "infinite")), d.level()
    row_weights, kept = draw_kept(d)
    rank = _rank(level, kept.sum())
    want = _at_rank(d.wide(scores)[kept], rank)
    arrays = {"scores": d.spoil(scores, members=0)} | row_weights
    return Case(conformal.quantile, arrays, {"level": level}, want, rtol=1e-6)


def weighted_quantile(d):
    scores, level = d.numbers("scores", d.rows, kinds=("normal", "ties", "infinite")), d.level()
    _, kept = draw_kept(d)
    kind = d.pick("row_weights", "equal", "random")
    own = np.ones(d.rows) if kind == "equal" else d.rng.exponential(size=d.rows)
    new = np.array([1.0, 0.3, 40.0])
    order = np.argsort(d.wide(scores)[kept], kind="stable")
    reached, values = np.cumsum(own[kept][order]), np.append(d.wide(scores)[kept][order], np.inf)
    want = values[np.searchsorted(reached, level * (reached[-1] + new) * (1 - 1e-9))]
    arrays = {"scores": d.spoil(scores, members=0, fill=np.inf), "ratios": np.where(kept, own, 0), "new_ratios": new}
    return Case(conformal.weighted_quantile, arrays, {"level": level}, want, rtol=1e-6)


def group_quantile(d):
    scores, level, groups = (
        d.numbers("scores", d.rows, kinds=("normal", "ties")),
        d.level(),
        d.rng.integers(0, 3, d.rows),
    )
    row_weights, kept = draw_kept(d)
    each = [d.wide(scores)[kept & (groups == g)] for g in range(3)]
    want = np.array([_at_rank(own, _rank(level, own.size)) for own in each])
    arrays = {"scores": d.spoil(scores, members=0), "groups": groups} | row_weights
    return Case(conformal.quantile, arrays, {"level": level, "num_groups": 3}, want, rtol=1e-6)


def draw_regression(d, *shape):
    """Predictions, and targets at many equal distances from their mean, which rounding must not move outside."""
    predictions = d.numbers("predictions", *shape, d.rows, dtypes=FLOATS)
    errors = d.numbers("errors", d.rows, kinds=("normal", "ties"), dtypes=FLOATS) * d.rng.choice([0.1, 1.3])
    targets = predictions.reshape(-1, d.rows)[0] + errors
    return predictions, targets.astype(d.pick("targets", *FLOATS))


def split(name):
    def case(d):
        predictions, targets = draw_regression(d)
        scale = np.exp(d.rng.normal(size=d.rows)).astype(predictions.dtype)
        level, (row_weights, kept) = d.level(), draw_kept(d)
        x, y, rank = d.wide(predictions), d.wide(targets), _rank(level, kept.sum())
        given = [predictions, scale] if name == "normalised" else [predictions]
        wide = d.wide(scale) if name == "normalised" else np.ones(d.rows)
        radius = _at_rank((abs(y - x) / wide)[kept], rank) * wide

        def fn(new, fill, targets, row_weights=None):
            options = {"level": level, "scale": fill[1] if len(fill) > 1 else None, "row_weights": row_weights}
            return conformal.split(fill[0], targets, **options)(*new)

        spoilt = [np.where(kept, x, value) for x, value in zip(given, (np.nan, -1.0)[: len(given)], strict=True)]
        arrays = {"new": given, "fill": [x.astype(predictions.dtype) for x in spoilt], "targets": targets} | row_weights
        return Case(fn, arrays, {}, (x - radius, x + radius))

    return case


def cqr(d):
    low, targets = draw_regression(d)
    high, level, ends = low + np.float32(0.7), d.level(), d.pick("ends", "together", "each")
    row_weights, kept = draw_kept(d)
    low64, high64, y = d.wide(low), d.wide(high), d.wide(targets)
    rank = _rank(level if ends == "together" else (1 + Fraction(level).limit_denominator(1000)) / 2, kept.sum())
    below, above = low64 - y, y - high64
    if ends == "together":
        below = above = np.maximum(below, above)
    margins = [_at_rank(m[kept], rank) for m in (below, above)]
    fn = lambda **arrays: conformal.cqr(**arrays, level=level, ends=ends)(low, high)
    arrays = {"low": low, "high": high, "targets": targets} | row_weights
    return Case(fn, arrays, {}, (low64 - margins[0], high64 + margins[1]))


def left_out(name):
    """CV+, jackknife+ and EnbPI with members of which each held some rows out."""

    def case(d):
        d.rows = 64
        predictions, targets = draw_regression(d, d.members)
        unseen = np.arange(d.rows) % d.members == np.arange(d.members)[:, None]
        unseen = unseen | (d.members == 1)
        d.own = np.ones(d.rows)
        level, (row_weights, kept) = d.level(), draw_kept(d)
        x, y = d.wide(predictions), d.wide(targets)
        held = predictions[np.argmax(unseen, axis=0), np.arange(d.rows)]
        rank = _rank(level, kept.sum())
        fit = {"jackknife": conformal.jackknife_plus, "enbpi": conformal.enbpi}[name]
        fn = lambda new, **arrays: fit(**arrays, level=level)(new)
        arrays = {"new": predictions, "held_out": held, "targets": targets, "unseen": unseen}
        arrays |= row_weights if name == "jackknife" else {"targets": np.where(kept, targets, np.nan)}
        member = np.argmax(unseen, axis=0)
        r = (y - x[member, np.arange(d.rows)])[kept]
        if name == "jackknife":
            each = x[member[kept]]  # (rows, new)
            upper = np.array([_at_rank(column, rank) for column in (each + abs(r)[:, None]).T])
            lower = -np.array([_at_rank(column, rank) for column in (-each + abs(r)[:, None]).T])
        else:
            share = np.mean(unseen[:, kept], axis=1)
            exact = Fraction(level).limit_denominator(1000)
            size, r = kept.sum() * exact.numerator // exact.denominator, np.sort(r)
            widths = np.round(r[size:] - r[: len(r) - size], 6)
            if np.sum(widths == widths.min()) > 1:
                return None  # the shortest is not unique
            first = np.argmin(widths)
            lower, upper = ((share @ x) + end for end in (r[first], r[first + size]))
        return Case(fn, arrays, {}, (lower, upper), rtol=1e-4, atol=1e-4)

    return case


def sets(name):
    def case(d):
        logits, labels, level = d.logits(("normal", "ties", "steep"), members=False), d.labels(), d.level()
        row_weights, kept = draw_kept(d)
        p = special.softmax(d.wide(logits), -1)
        score = {
            "lac": lambda: 1 - p,
            "aps": lambda: p + (p[:, None] * (p[:, None] > p[..., None] + 1e-12)).sum(-1),
            "top_k": lambda: 1.0 * (p[:, None] >= p[..., None]).sum(-1),
        }[name]()
        rank = _rank(level, kept.sum())
        threshold = _at_rank(score[np.arange(d.rows), labels][kept], rank)
        clear = abs(score - threshold) > 1e-5  # others may round to either side

        def fn(new, row_weights=None, **arrays):
            found = conformal.sets(**arrays, level=level, score=name, row_weights=row_weights)(new)
            covered = found[np.arange(d.rows), labels.astype(int)][kept].sum()
            return jnp.where(clear, found, False), covered >= min(rank, kept.sum())

        spoilt = np.where(kept[:, None], logits, np.nan).astype(logits.dtype)
        arrays = {"new": logits, "logits": spoilt, "labels": labels} | row_weights
        return Case(fn, arrays, {}, (clear & (score <= threshold), True))

    return case


CONFORMAL = {
    "quantile": quantile,
    "weighted_quantile": weighted_quantile,
    "group_quantile": group_quantile,
    "cqr": cqr,
    **{name: split(name) for name in ("split", "normalised")},
    **{name: left_out(name) for name in ("jackknife", "enbpi")},
    **{name: sets(name) for name in ("lac", "aps", "top_k")},
}
