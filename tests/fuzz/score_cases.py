"""Random calls of scores and combinations, and their values by definition, in NumPy's float64."""

import numpy as np
from scipy import special, stats

from eqx_ensemble import scores

from .draws import Case


def _mixture(d, logits):
    with np.errstate(divide="ignore"):
        return special.logsumexp(special.log_softmax(d.wide(logits), -1), axis=0, b=d.share[..., None])


def _drawn_logits(d, kinds=("normal", "steep", "impossible"), *, weights=True, per_row=True):
    """Spoilt logits and labels, the arguments for both kinds of weights, and the mixture's log-probabilities."""
    logits, labels = d.logits(kinds), d.labels()
    options = (d.weighted_members(per_row=per_row) if weights else {}) | d.counted_rows()
    logs = _mixture(d, logits)
    return {"logits": d.spoil(logits, members=1), "labels": d.spoil(labels, members=0, fill=0)} | options, logs


def of_classes(name, rows, kinds=("normal", "steep", "impossible")):
    def case(d):
        arrays, logs = _drawn_logits(d, kinds)
        options, want = d.reduced(rows(logs, arrays["labels"]))
        return Case(getattr(scores, name), arrays, options, want)

    return case


def _one_hot(logs, labels):
    return np.eye(logs.shape[-1])[labels]


def _rank_of_label(logs, labels):
    return (logs > np.take_along_axis(logs, labels[:, None].astype(int), -1)).sum(-1)


def top_k(d):
    arrays, logs = _drawn_logits(d, ("normal",))
    k = d.pick("k", 1, 2)
    options, want = d.reduced(1.0 * (_rank_of_label(logs, arrays["labels"]) < k))
    return Case(scores.top_k_accuracy, arrays, options | {"k": k}, want)


def member_accuracy(d):
    arrays, _ = _drawn_logits(d, ("normal",))
    options, want = d.reduced((d.share * (d.wide(arrays["logits"]).argmax(-1) == arrays["labels"])).sum(0))
    return Case(scores.mean_member_accuracy, arrays, options, want)


def balanced(d):
    arrays, logs = _drawn_logits(d, ("normal",))
    hit, labels = logs.argmax(-1) == arrays["labels"], arrays["labels"]
    groups = [np.flatnonzero((labels == c) & (d.own > 0)) for c in range(d.classes)]
    recall = [np.average(hit[rows], weights=d.own[rows]) for rows in groups if rows.size]
    return Case(scores.balanced_accuracy, arrays, {}, np.mean(recall))


def _gaps(d, p, hits, bins):
    index = np.minimum(np.maximum(np.ceil(p * bins) - 1, 0), bins - 1).astype(int)
    rows = [np.flatnonzero((index == k) & (d.own > 0)) for k in range(bins)]
    return [(d.own[r].sum() / d.own.sum(), np.average(hits[r] - p[r], weights=d.own[r])) for r in rows if r.size]


def calibration(name):
    def case(d):
        arrays, logs = _drawn_logits(d, ("normal",))
        bins = d.pick("num_bins", 1, 3, 7)
        gaps = _gaps(d, np.exp(logs.max(-1)), logs.argmax(-1) == arrays["labels"], bins)
        want = max(abs(gap) for _, gap in gaps) if name == "mce" else sum(n * abs(gap) for n, gap in gaps)
        if name == "classwise_ece":
            truth = _one_hot(logs, arrays["labels"])
            each = [_gaps(d, np.exp(logs[:, c]), truth[:, c], bins) for c in range(d.classes)]
            want = np.mean([sum(n * abs(gap) for n, gap in gaps) for gaps in each])
        return Case(getattr(scores, name), arrays, {"num_bins": bins}, want)

    return case


def brier_parts(d):
    arrays, logs = _drawn_logits(d, ("normal", "steep"))
    fn = lambda **arrays: (lambda p: p.reliability - p.resolution + p.uncertainty + p.within_bins)(
        scores.decompose_brier(**arrays, num_bins=3, binning=d.pick("binning", "width", "mass"))
    )
    return Case(fn, arrays, {}, d.mean(((np.exp(logs) - _one_hot(logs, arrays["labels"])) ** 2).sum(-1)))


def _points(d, kinds=("normal", "ties", "far"), name="samples"):
    samples = d.numbers("samples", d.members, d.rows, kinds=kinds)
    targets = d.numbers("targets", d.rows, kinds=kinds, dtypes=(np.float32, np.float64, np.float16))
    if d.pick("targets", "floats", "integers") == "integers":
        targets = np.round(targets.astype(np.float64)).astype(np.int32)
    arguments = d.weighted_members() | d.counted_rows()
    spoilt = d.spoil(samples, members=1)
    arrays = {name: spoilt, "targets": targets} | arguments
    return arrays, d.wide(samples), d.wide(targets)


def of_points(name, rows, argument="samples"):
    def case(d):
        arrays, x, y = _points(d, name=argument)
        options, want = d.reduced(rows(d.share, x, y))
        return Case(getattr(scores, name), arrays, options, want, atol=1e-4)

    return case


def of_errors(name, value):
    def case(d):
        arrays, x, y = _points(d, name="predictions")
        return Case(getattr(scores, name), arrays, {}, value(d, x, y), atol=1e-4)

    return case


def _r2(d, x, y):
    error, total = d.mean(((d.share * x).sum(0) - y) ** 2), d.mean((y - d.mean(y)) ** 2)
    return 1 - error / total


def _crps(w, x, y):
    return (w * abs(x - y)).sum(0) - (w[:, None] * w[None] * abs(x[:, None] - x[None])).sum((0, 1)) / 2


def r2(d):
    arrays, x, y = _points(d, name="predictions")
    if np.ptp(y[d.own > 0]) == 0:  # not defined
        return None
    return Case(scores.r2, arrays, {}, _r2(d, x, y), rtol=1e-3, atol=1e-2)


def of_gaussians(name, rows, *, members=True):
    def case(d):
        shape = (d.members, d.rows) if members else (d.rows,)
        mean, variance = d.numbers("mean", *shape, kinds=("normal",)), d.numbers("variance", *shape, kinds=("normal",))
        variance = np.exp(variance.astype(np.float64)).astype(variance.dtype)
        targets = d.numbers("targets", d.rows, kinds=("normal", "ties"))
        arguments = (d.weighted_members() if members else {}) | d.counted_rows()
        wide = [d.wide(x) for x in (mean, variance, targets)]
        arrays = {"mean": d.spoil(mean, members=int(members)), "variance": d.spoil(variance, members=int(members))}
        options, want = d.reduced(rows(d.share, *wide))
        return Case(getattr(scores, name), arrays | {"targets": targets} | arguments, options, want)

    return case


def _nll(w, m, v, y):
    return -special.logsumexp(stats.norm.logpdf(y, m, np.sqrt(v)), axis=0, b=w if np.ndim(m) > 1 else None)


def _expected_distance(m, v):
    s = np.sqrt(v)
    return 2 * s * stats.norm.pdf(m / s) + m * (2 * stats.norm.cdf(m / s) - 1)


def _crps_mixture(w, m, v, y):
    if m.ndim == 1:
        m, v, w = m[None], v[None], np.ones((1, 1))
    pairs = _expected_distance(m[:, None] - m[None], v[:, None] + v[None])
    return (w * _expected_distance(y - m, v)).sum(0) - (w[:, None] * w[None] * pairs).sum((0, 1)) / 2


def _ends(d):
    ends = [d.numbers(name, d.rows, kinds=("normal", "ties")) for name in ("first", "second")]
    ends = [x.astype(ends[0].dtype) for x in ends]
    low, high = np.minimum(*ends), np.maximum(*ends)
    return low, high, d.numbers("targets", d.rows, kinds=("ties", "normal"), dtypes=(ends[0].dtype, np.float32))


def intervals(name, rows, *, targets=True):
    def case(d):
        low, high, y = _ends(d)
        arguments = d.counted_rows()
        options, want = d.reduced(rows(d.wide(low), d.wide(high), d.wide(y)))
        arrays = {"lower": d.spoil(low, members=0), "upper": d.spoil(high, members=0)}
        return Case(getattr(scores, name), arrays | arguments | ({"targets": y} if targets else {}), options, want)

    return case


def pinball(d):
    q, y, level = d.numbers("quantiles", d.rows), d.numbers("targets", d.rows), d.level()
    arguments, gap = d.counted_rows(), d.wide(y) - d.wide(q)
    options, want = d.reduced(np.maximum(level * gap, (level - 1) * gap))
    return Case(scores.pinball, {"quantiles": q, "targets": y} | arguments, options | {"level": level}, want)


def sets(name, rows, *, labels=True):
    def case(d):
        chosen, own = d.rng.random((d.rows, d.classes)) < 0.5, {"labels": d.labels()} if labels else {}
        arguments = d.counted_rows()
        options, want = d.reduced(1.0 * rows(chosen, own.get("labels")))
        return Case(getattr(scores, name), {"sets": chosen} | own | arguments, options, want)

    return case


def by_group(d):
    values, groups, arguments = d.numbers("values", d.rows), d.rng.integers(0, 3, d.rows), d.counted_rows()
    rows = [np.flatnonzero((groups == g) & (d.own > 0)) for g in range(3)]
    means = [np.average(d.wide(values)[r], weights=d.own[r]) if r.size else np.nan for r in rows]
    arrays = {"values": d.spoil(values, members=0), "groups": groups} | arguments
    return Case(scores.by_group, arrays, {"num_groups": 3}, (np.array(means), np.array([r.size for r in rows])))


def ranking(name):
    """Against scikit-learn, which takes no infinities: it gets ranks."""

    def case(d):
        from sklearn import metrics

        if d.rows == 1:
            return None
        values, positives = d.numbers("scores", d.rows, kinds=("normal", "ties", "infinite")), d.positives()
        arguments = d.counted_rows(keep=2)
        arrays = {"scores": d.spoil(values, members=0), "positives": positives} | arguments
        kept = d.own > 0
        ranks = stats.rankdata(d.wide(values)[kept], method="dense")
        taken = positives[kept], ranks
        if name == "fpr_at_tpr":
            level = d.level()
            false, true, _ = metrics.roc_curve(*taken, sample_weight=d.own[kept], drop_intermediate=False)
            return Case(scores.fpr_at_tpr, arrays, {"level": level}, false[true >= level - 1e-9].min())
        fn = {"auroc": metrics.roc_auc_score, "aupr": metrics.average_precision_score}[name]
        return Case(getattr(scores, name), arrays, {}, fn(*taken, sample_weight=d.own[kept]))

    return case


def _risks(d, values, losses):
    """Coverage and risk at each row that counts: tied rows have the mean weight and the mean loss."""
    kept = np.flatnonzero(d.own > 0)
    kept = kept[np.argsort(values[kept], kind="stable")]
    weight, loss = np.empty(kept.size), np.empty(kept.size)
    for value in np.unique(values[kept]):
        tied = values[kept] == value
        weight[tied] = d.own[kept][tied].mean()
        loss[tied] = np.average(losses[kept][tied], weights=d.own[kept][tied])
    covered = np.cumsum(weight)
    return covered / covered[-1], np.cumsum(weight * loss) / covered, weight


def selective(name):
    def case(d):
        values, losses = d.numbers("values", d.rows, kinds=("normal", "ties", "infinite")), d.numbers("losses", d.rows)
        arguments = d.counted_rows(weights=name == "aurc")
        wide = d.wide(values), d.wide(losses)
        _, risk, weight = _risks(d, *wide)
        want = np.average(risk, weights=weight)
        if name == "excess_aurc":
            want = max(want - _risks(d, wide[1], wide[1])[1].mean(), 0)
        arrays = {"uncertainty": d.spoil(values, members=0), "losses": d.spoil(losses, members=0)} | arguments
        return Case(getattr(scores, name), arrays, {}, want, atol=1e-4)

    return case


def pit_error(d):
    values = np.abs(np.tanh(d.numbers("values", d.rows, kinds=("normal",)).astype(np.float64))).astype(np.float32)
    arguments, levels = d.counted_rows(), np.arange(1, 10) / 10
    gaps = np.array([d.mean(1.0 * (values <= level)) for level in levels]) - levels
    kind = d.pick("kind", "absolute", "squared")
    want = np.mean(abs(gaps)) if kind == "absolute" else np.sum(gaps**2)
    arrays = {"values": d.spoil(values, members=0)} | arguments
    return Case(scores.quantile_calibration_error, arrays, {"num_levels": 9, "kind": kind}, want)


SCORES = {
    "nll": of_classes("nll", lambda logs, y: -np.take_along_axis(logs, y[:, None].astype(int), -1)[:, 0]),
    "brier": of_classes("brier", lambda logs, y: ((np.exp(logs) - _one_hot(logs, y)) ** 2).sum(-1)),
    "accuracy": of_classes("accuracy", lambda logs, y: 1.0 * (logs.argmax(-1) == y), ("normal",)),
    "ranked_probability": of_classes(
        "ranked_probability", lambda logs, y: (np.cumsum(np.exp(logs) - _one_hot(logs, y), -1)[:, :-1] ** 2).sum(-1)
    ),
    "top_k_accuracy": top_k,
    "balanced_accuracy": balanced,
    "mean_member_accuracy": member_accuracy,
    **{name: calibration(name) for name in ("ece", "mce", "classwise_ece")},
    "decompose_brier": brier_parts,
    "crps": of_points("crps", _crps),
    "mae": of_points("mae", lambda w, x, y: abs((w * x).sum(0) - y), "predictions"),
    "rmse": of_errors("rmse", lambda d, x, y: np.sqrt(d.mean(((d.share * x).sum(0) - y) ** 2))),
    "mean_member_rmse": of_errors(
        "mean_member_rmse", lambda d, x, y: d.share[:, 0] @ [np.sqrt(d.mean((member - y) ** 2)) for member in x]
    ),
    "r2": r2,
    "nll_gaussian_mixture": of_gaussians("nll_gaussian_mixture", _nll),
    "nll_gaussian": of_gaussians(
        "nll_gaussian", lambda w, m, v, y: -stats.norm.logpdf(y, m, np.sqrt(v)), members=False
    ),
    "crps_gaussian_mixture": of_gaussians("crps_gaussian_mixture", _crps_mixture),
    "crps_gaussian": of_gaussians("crps_gaussian", _crps_mixture, members=False),
    "coverage": intervals("coverage", lambda low, high, y: 1.0 * ((low <= y) & (y <= high))),
    "width": intervals("width", lambda low, high, y: high - low, targets=False),
    "pinball": pinball,
    "set_coverage": sets("set_coverage", lambda chosen, y: chosen[np.arange(len(y)), y]),
    "set_size": sets("set_size", lambda chosen, _: chosen.sum(-1), labels=False),
    "by_group": by_group,
    **{name: ranking(name) for name in ("auroc", "aupr", "fpr_at_tpr")},
    **{name: selective(name) for name in ("aurc", "excess_aurc")},
    "quantile_calibration_error": pit_error,
}
