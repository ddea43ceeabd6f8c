"""Random calls of combinations, and their values by definition."""

import numpy as np
from scipy import special

from eqx_ensemble import combine, uncertainty

from .draws import Case

CLASS_KINDS = ("normal", "steep", "impossible")


def of_values(name, value, kinds=("normal", "ties", "far"), *, per_row=True, argument="values", **options):
    def case(d):
        values = d.numbers("values", d.members, d.rows, kinds=kinds)
        arguments = d.weighted_members(per_row=per_row)
        want = value(d.share, d.wide(values), **options)
        arrays = {argument: d.spoil(values, members=1)} | arguments
        return Case(getattr(combine, name, None) or getattr(uncertainty, name), arrays, options, want)

    return case


def of_logits(name, value, kinds=CLASS_KINDS):
    def case(d):
        logits = d.logits(kinds)
        arguments = d.weighted_members(per_row=name in PER_ROW)
        with np.errstate(divide="ignore", invalid="ignore"):
            want = value(d.share[..., None], d.wide(logits))
        arrays = {"logits": d.spoil(logits, members=1)} | arguments
        return Case(getattr(combine, name, None) or getattr(uncertainty, name), arrays, {}, want)

    return case


PER_ROW = ("mixture", "mean_logits", "vote")


def _mean_logits(w, x):
    w = np.broadcast_to(w, x.shape)
    logs = np.where(w == 0, 0, special.log_softmax(x, -1))
    return special.log_softmax(np.where(w == 0, 0, w * logs).sum(0), -1)


def _votes(w, x):
    return (w * np.eye(x.shape[-1])[x.argmax(-1)]).sum(0)


def _entropies(w, x):
    each = special.entr(special.softmax(x, -1)).sum(-1)
    total = special.entr((w * special.softmax(x, -1)).sum(0)).sum(-1)
    expected = (w[..., 0] * each).sum(0)
    return total, expected, total - expected


def _quantile(w, x, levels):
    """The value where the cumulative weight reaches the level, or the midpoint to the next if it is equal."""
    w, found = np.broadcast_to(w, x.shape), []
    for column, own in zip(x.T, w.T, strict=True):
        order = np.argsort(column, kind="stable")
        order = order[own[order] > 0]
        share = np.cumsum(own[order]) / own.sum()
        low = np.searchsorted(share, np.array(levels) - 1e-9)
        high = np.searchsorted(share, np.array(levels) + 1e-9)
        last = len(order) - 1
        low, high = (column[order][np.minimum(index, last)] for index in (low, high))
        found.append(np.where(low == high, low, (low + high) / 2))
    return np.array(found).T


def _trimmed(w, x, cut):
    w, found = np.broadcast_to(w, x.shape), []
    for column, own in zip(x.T, w.T, strict=True):
        order = np.argsort(column, kind="stable")
        order = order[own[order] > 0]
        edges = np.clip(np.append(0, np.cumsum(own[order]) / own.sum()), cut, 1 - cut)
        kept = np.where(np.diff(edges) < 1e-6, 0, np.diff(edges))
        found.append(np.average(column[order][kept > 0], weights=kept[kept > 0]))
    return np.array(found)


def gaussians(name):
    def case(d):
        mean = d.numbers("mean", d.members, d.rows)
        variance = np.exp(d.rng.normal(size=mean.shape)).astype(mean.dtype)
        arguments = d.weighted_members()
        m, v, w = d.wide(mean), d.wide(variance), d.share
        centre = (w * m).sum(0)
        if name == "decompose_variance":
            noise, between = (w * v).sum(0), (w * (m - centre) ** 2).sum(0)
            want = noise + between, noise, between
        elif name == "gaussian":
            want = centre, (w * (v + (m - centre) ** 2)).sum(0)
        else:
            precision = (w / v).sum(0)
            want = (w * m / v).sum(0) / precision, 1 / precision
        arrays = {"mean": d.spoil(mean, members=1), "variance": d.spoil(variance, members=1)} | arguments
        return Case(getattr(combine, name, None) or getattr(uncertainty, name), arrays, {}, want)

    return case


def _pairwise_kl(w, x):
    p, logs = special.softmax(x, -1), special.log_softmax(x, -1)
    pairs = (p[:, None] * (logs[:, None] - logs[None])).sum(-1)
    return (w[:, None, :, 0] * w[None, ..., 0] * pairs).sum((0, 1))


def with_targets(name):
    """The parts of an error: of the ensemble, of the members, and the ambiguity between."""

    def case(d):
        of_classes = name == "decompose_nll"
        x = d.logits(("normal", "steep")) if of_classes else d.numbers("predictions", d.members, d.rows)
        y = d.labels() if of_classes else d.numbers("targets", d.rows, dtypes=(np.float32, np.float64))
        arguments, wide, w = d.weighted_members(), d.wide(x), d.share
        if of_classes:
            at = lambda logs: -np.take_along_axis(logs, y.astype(int)[..., None], -1)[..., 0]
            each = np.stack([at(special.log_softmax(member, -1)) for member in wide])
            ensemble = at(_mean_logits(w[..., None], wide))
        else:
            each, ensemble = (wide - d.wide(y)) ** 2, ((w * wide).sum(0) - d.wide(y)) ** 2
        members = (w * each).sum(0)
        spoilt = d.spoil(x, members=1)
        arrays = {"logits": spoilt, "labels": y} if of_classes else {"predictions": spoilt, "targets": y}
        want = ensemble, members, members - ensemble
        return Case(getattr(uncertainty, name), arrays | arguments, {}, want, atol=2e-4)

    return case


def _moments(w, x):
    centre = (w * x).sum(0)
    return centre, (w * (x - centre) ** 2).sum(0)


ORDERED = ("normal", "ties", "far", "infinite")
COMBINATIONS = {
    "mean": of_values("mean", lambda w, x: (w * x).sum(0)),
    "moments": of_values("moments", _moments, per_row=False),
    "log_mixture": of_values(
        "log_mixture", lambda w, x: special.logsumexp(x, axis=0, b=np.broadcast_to(w, x.shape)),
        argument="log_densities",
    ),
    "median": of_values(
        "median", lambda w, x: _quantile(w, x, [0.5])[0], ORDERED, per_row=False
    ),
    "quantile": of_values(
        "quantile", lambda w, x, levels: _quantile(w, x, levels), ORDERED, per_row=False,
        levels=np.array([0.1, 0.25, 0.5, 0.75, 1.0]),
    ),
    "trimmed_mean": of_values("trimmed_mean", _trimmed, per_row=False, cut=0.2),
    "mixture": of_logits("mixture", lambda w, x: special.logsumexp(special.log_softmax(x, -1), axis=0, b=w)),
    "mean_logits": of_logits("mean_logits", _mean_logits),
    "vote": of_logits("vote", _votes),
    "decompose_entropy": of_logits("decompose_entropy", _entropies),
    "disagreement": of_logits("disagreement", lambda w, x: 1 - (_votes(w, x) ** 2).sum(-1)),
    "jensen_shannon": of_logits("jensen_shannon", lambda w, x: _entropies(w, x)[2]),
    "pairwise_kl": of_logits("pairwise_kl", _pairwise_kl, ("normal",)),
    "variation_ratio": of_logits("variation_ratio", lambda w, x: 1 - _votes(w, x).max(-1)),
    "least_confidence": of_logits(
        "least_confidence", lambda w, x: 1 - (w * special.softmax(x, -1)).sum(0).max(-1)
    ),
    "free_energy": of_logits("free_energy", lambda w, x: -(w[..., 0] * special.logsumexp(x, -1)).sum(0)),
    **{name: with_targets(name) for name in ("decompose_squared_error", "decompose_nll")},
    "decompose_variance": gaussians("decompose_variance"),
    "gaussian": gaussians("gaussian"),
    "product_gaussian": gaussians("product_gaussian"),
}  # fmt: skip
