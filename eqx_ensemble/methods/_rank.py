from itertools import combinations
from typing import Any, Literal

import numpy as np

from .._check import check_word
from .._table import table_of

SURE = 0.975  # significant at 5 %, two-sided
MANY = np.arange(1, 1001)  # seeds to plan with
_NO_SCORES = ("method", "seed", "fold", "train_rows", "test_rows", "compile_seconds", "run_seconds")


def rank(columns: Any, score: str, baseline: str | None = None, *, mode: Literal["min", "max"] = "min") -> Any:
    r"""Ranks methods, and says how sure their order is, and how many seeds would make it so.

    Two methods differ in a fold with a seed by $d_{fs} = \delta + u_f + e_{fs}$. More seeds average the noise $e$ of
    training, but not the variation $u$ of folds. With $F$ folds of $S$ seeds, a variance $s_m^2$ of the means of folds
    and a variance $s_e^2$ within folds, the mean difference has

    $$\mathrm{error}^2 = \frac{s_m^2}{F} + \frac{n_2}{n_1} \max \left( s_m^2 - \frac{s_e^2}{S}, 0 \right)$$

    with $n_2$ test and $n_1$ training rows. The second term, that of Nadeau and Bengio, is there because folds share
    rows, so that their $u$ are correlated; with one seed, $s_e$ is taken to be 0. The probability is that of Student's
    $t$ with $F - 1$ degrees of freedom: a correlated Bayesian t-test.

    **Arguments:**

    - `columns`: from [`eqx_ensemble.methods.compare`][].
    - `score`: the name of a score.
    - `baseline`: the name of a method; without one, all pairs are compared.
    - `mode`: `"min"` if less is better, else `"max"`.

    **Returns:** a table, as [`eqx_ensemble.Run.table`][], best first, of one row for each pair; with a baseline, for
    each method, itself included:

    - `method`, `baseline`, and `mean`, of the method's scores.
    - `difference` of the method from the baseline, and its standard `error`.
    - `probability` that the method is better. Above .975 or below .025 the difference is significant at 5 %.
    - `seeds` per fold that would make it significant, if means and variances stayed: a rough estimate after few seeds.
      Infinite, above 1,000: more folds or rows are needed. NaN with one seed, unless that is enough.

    Fits that diverged are left out, with their partners. With one fold, all figures are about its rows alone: that
    other rows would give the same order, no number of seeds can show.

    ```python
    fits = [("one", 1.0), ("two", 0.6), ("one", 1.3), ("two", 0.8), ("one", 1.1), ("two", 0.5)]
    columns = {
        "method": [name for name, _ in fits],
        "seed": [0] * 6,
        "fold": [0, 0, 1, 1, 2, 2],
        "train_rows": [60] * 6,
        "test_rows": [30] * 6,
        "rmse": [rmse for _, rmse in fits],
    }
    ee.methods.rank(columns, "rmse", "one")["probability"]  # 0.98 for "two"
    ```

    ??? cite
        [Nadeau and Bengio 2003](https://doi.org/10.1023/A:1024068626366),
        [Corani and Benavoli 2015](https://doi.org/10.1007/s10994-015-5486-z)
    """
    check_word(mode, "mode", ("min", "max"))
    check_word(score, "score", [name for name in columns if name not in _NO_SCORES])
    of = lambda name: np.asarray(columns[name])
    names, fits = zip(*(np.unique(of(name), return_inverse=True) for name in ("method", "fold", "seed")), strict=True)
    scores = np.full([len(values) for values in names], np.nan)
    scores[fits] = of(score)
    ratio, sign = np.mean(of("test_rows")) / np.mean(of("train_rows")), 1 if mode == "max" else -1
    methods = names[0].tolist()
    if len(methods) < 2:
        raise ValueError(f"`rank` compares two methods or more, got {methods}.")
    if baseline is not None:
        check_word(baseline, "baseline", methods)
    means = np.array([np.mean(own[~np.isnan(own)]) if np.any(own == own) else np.nan for own in scores])
    order = np.argsort(-sign * means, kind="stable")
    pairs = combinations(order, 2) if baseline is None else ((i, methods.index(baseline)) for i in order)
    rows = [
        {"method": methods[i], "baseline": methods[j], "mean": means[i]}
        | _compare_pair(scores[i], scores[j], ratio, sign)
        for i, j in pairs
    ]
    return table_of({name: np.array([row[name] for row in rows]) for name in rows[0]})


@np.errstate(divide="ignore", invalid="ignore")
def _compare_pair(own: np.ndarray, other: np.ndarray, ratio: float, sign: int) -> dict[str, float]:
    """What two methods' scores `(folds, seeds)` say; NaNs are left out, and what cannot be known is NaN."""
    from scipy.special import stdtr  # JAX depends on it, too

    gaps = own - other
    gaps = gaps[~np.isnan(gaps).all(axis=1)]
    counts = np.sum(~np.isnan(gaps), axis=1)
    folds, most = np.float64(len(gaps)), counts.max(initial=0)
    seeds = folds / np.sum(1 / counts)  # the harmonic mean, as in an analysis of unweighted means
    means = np.nansum(gaps, axis=1) / counts
    mean = np.sum(means) / folds
    total = np.sum((means - mean) ** 2) / (folds - 1)
    within = np.nansum((gaps - means[:, None]) ** 2) / (counts.sum() - folds)
    between = np.maximum(total - np.nan_to_num(within) / seeds, 0)

    def judge(total: Any, seeds: Any) -> tuple[Any, Any]:
        """The error and the probability, if means of folds, each of so many seeds, vary by `total`."""
        if folds == 1:
            error, freedom = np.sqrt(within / seeds), seeds - 1
        else:
            error, freedom = np.sqrt(total / folds + ratio * between), folds - 1
        return error, np.where(mean == 0, 0.5, stdtr(freedom, sign * mean / error))

    error, better = judge(total, seeds)
    enough = MANY[_is_sure(judge(between + within / MANY, MANY)[1])]
    needed = enough[0] if len(enough) else np.nan if np.isnan(within) else np.inf
    needed = np.fmin(needed, most) if _is_sure(better) else np.maximum(needed, most + 1)
    return {"difference": mean, "error": error, "probability": float(better), "seeds": float(needed)}


def _is_sure(probability: Any) -> Any:
    return np.abs(probability - 0.5) >= SURE - 0.5
