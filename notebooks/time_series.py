# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Time series: forecasts with their uncertainty, week by week
#
# Eight small networks forecast the carbon dioxide over Mauna Loa, with a variance, for each of the next twenty-six
# weeks. Their mixture is evaluated on the twelve years that follow: it beats seasonal persistence at every horizon, and
# its 90 % intervals cover 85 % of the weeks after calibration.

# %% [markdown]
# In a notebook, these two lines check the shape annotations of every function below at run time. (In the program they
# are comments.)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %% fold="Imports"
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from statsmodels.datasets import co2

import eqx_ensemble as ee

# %% [markdown]
# ## Data
#
# 2,284 weekly means from 1958 to 2001, in parts per million (ppm); the 59 weeks without a measurement, none in the test
# years, are filled by linear interpolation. At the end of week $t$ the inputs are the last 52 weekly changes and the
# time of the year; targets are the differences of the next 26 weeks from week $t$.

# %%
HISTORY, HORIZONS = 52, 26

series = co2.load_pandas().data["co2"].interpolate()
level, days = series.to_numpy(), series.index.to_numpy().astype("datetime64[D]")
years = days.astype("datetime64[Y]").astype(int) + 1970
angle = 2 * np.pi * (days - days.astype("datetime64[Y]")).astype(int) / 365.25

origins = np.arange(HISTORY, len(level) - HORIZONS)
changes = np.stack([np.diff(level[t - HISTORY : t + 1]) for t in origins])
ahead = np.stack([level[t + 1 : t + HORIZONS + 1] - level[t] for t in origins])

# %% [markdown]
# ## A split in time, not shuffled
#
# Neighbouring windows share 51 of 52 weeks: in a shuffled split a test window would be between two training windows,
# and the score would measure interpolation, not forecasting. Training years come first, then calibration years,
# then test years. A window whose future extends into the next part is dropped.

# %%
begin, end = years[origins], years[origins + HORIZONS]
parts = {"train": end < 1985, "calibrate": (begin >= 1985) & (end < 1990), "test": begin >= 1990}
for name, part in parts.items():
    print(f"{name:10}{np.sum(part):6} windows, {begin[part][0]} to {begin[part][-1]}")

# Scaled by the training windows.
train, season = parts["train"], (np.sin(angle[origins]), np.cos(angle[origins]))
x = np.column_stack([changes / np.std(changes[train]), *season]).astype(np.float32)
scale = np.std(ahead[train], axis=0).astype(np.float32)
target = ahead.astype(np.float32)


# %% [markdown]
# ## One member
#
# The loss is the mean negative log-likelihood over the horizons, each forecast as a Gaussian of its own.


# %%
class Forecaster(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(HISTORY + 2, 2 * HORIZONS, width_size=64, depth=2, key=key)

    def __call__(self, x: Float[Array, " inputs"]) -> tuple[Float[Array, " horizons"], Float[Array, " horizons"]]:
        mean, raw = jnp.split(self.mlp(x), 2)
        return mean, jax.nn.softplus(raw) + 1e-3


def loss(
    model: Forecaster, batch: tuple[Float[Array, "batch inputs"], Float[Array, "batch horizons"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    mean, variance = jax.vmap(model)(x)
    return ee.scores.nll_gaussian(mean, variance, y)


key = jax.random.key(0)
ensemble = ee.build(lambda key: Forecaster(key=key), 8, key=key)
optimiser = optax.adamw(1e-3, weight_decay=1e-2)

run = ee.fit(ensemble, loss, optimiser, (x[train], target[train] / scale), epochs=20, batch_size=64, key=key)
mean, variance = run.predict(x)
mean, variance = mean * scale, variance * scale**2  # in ppm

# %% [markdown]
# ## A baseline
#
# *Seasonal persistence*: the level will change as it did after the same week last year, with the mean squared error of
# the training years as its variance. A useful forecast must beat it.

# %%
last_year = np.stack([level[t - 51 : t - 51 + HORIZONS] - level[t - 52] for t in origins]).astype(np.float32)
squared_error = np.mean((target - last_year)[train] ** 2, axis=0)
persistence = last_year[None], np.broadcast_to(squared_error, last_year.shape)[None]

# %% [markdown]
# ## Calibration by variance scaling
#
# Networks that learn their own variance are overconfident on new data. Variance scaling multiplies all variances by the
# factor that maximises the likelihood of the five calibration years, after the members are combined to one Gaussian.
# One factor for all, or one for each horizon?


# %%
def of_part(forecast: tuple, name: str) -> tuple[Float[Array, "_ rows horizons"], Float[Array, "_ rows horizons"]]:
    return tuple(jnp.asarray(values)[:, parts[name]] for values in forecast)


to_calibrate, observed = of_part((mean, variance), "calibrate"), target[parts["calibrate"]]
one_factor = ee.calibrate.variance(*to_calibrate, observed, pool="mixture")
factors = jnp.stack(
    [
        ee.calibrate.variance(*(values[..., h] for values in to_calibrate), observed[:, h], pool="mixture").scale[0]
        for h in range(HORIZONS)
    ]
)
combined = ee.combine.gaussian(mean, variance)

ways = {
    "seasonal persistence": persistence,
    "mixture, as it is": (mean, variance),
    "one factor": tuple(one_factor(mean, variance)),
    "a factor for each horizon": (combined.mean[None], combined.variance[None] * factors),
}
print(f"\nvariances are multiplied by {one_factor.scale[0]:.2f};", end=" ")
print(f"horizon by horizon, by {jnp.min(factors):.2f} to {jnp.max(factors):.2f}")

# %% [markdown]
# ## Evaluate
#
# The *CRPS*, in ppm, is the absolute error of a forecast without uncertainty; it rewards forecasts that are accurate
# and whose variance fits their error. *Coverage* is the share of weeks inside the central 90 % interval of the mixture.


# %%
def evaluate(forecast: tuple) -> tuple[np.ndarray, np.ndarray]:
    """CRPS, and whether the 90 % interval contains the target: each `(rows, horizons)`."""
    moments, y = of_part(forecast, "test"), target[parts["test"]]
    lower, upper = ee.uncertainty.gaussian_mixture_interval(*moments, level=0.9)
    crps = ee.scores.crps_gaussian_mixture(*moments, y, reduction="none")
    return np.asarray(crps), np.asarray((lower <= y) & (y <= upper))


results = {name: evaluate(forecast) for name, forecast in ways.items()}
crps_of_members = jax.vmap(lambda m, v: ee.scores.crps_gaussian(m, v, target[parts["test"]], reduction="none"))(
    *of_part((mean, variance), "test")
)

# %% [markdown]
# Every week is forecast in each of the 26 weeks before it: 600 weeks are far from 600 independent ones. The standard
# error is computed from twelve yearly means, which are nearly independent.

# %%
test_years = begin[parts["test"]]
of_years = lambda values: np.array([np.mean(values[test_years == year]) for year in np.unique(test_years)])
standard_error = lambda values: np.std(of_years(values), ddof=1) / np.sqrt(len(np.unique(test_years)))

# %% [markdown]
# ## The result

# %%
SHOWN = (1, 4, 13, 26)
at = np.array(SHOWN) - 1

print(f"\n{'CRPS, ppm, by weeks ahead':32}" + "".join(f"{weeks:>8}" for weeks in SHOWN) + f"{'all':>8}{'error':>8}")
rows = {"mean member": np.mean(crps_of_members, axis=0)} | {name: result[0] for name, result in results.items()}
for name in ("seasonal persistence", "mean member", *list(ways)[1:]):
    numbers = "".join(f"{value:8.3f}" for value in np.mean(rows[name], axis=0)[at])
    print(f"  {name:30}{numbers}{np.mean(rows[name]):8.3f}{standard_error(rows[name]):8.3f}")
gain = rows["mixture, as it is"] - rows["seasonal persistence"]
print(f"  mixture less persistence: {np.mean(gain):.3f} +- {standard_error(gain):.3f} over years")

print(
    f"\n{'COVERAGE AT 0.9, by weeks ahead':32}" + "".join(f"{weeks:>8}" for weeks in SHOWN) + f"{'all':>8}{'error':>8}"
)
for name, (_, inside) in results.items():
    numbers = "".join(f"{value:8.3f}" for value in np.mean(inside, axis=0)[at])
    print(f"  {name:30}{numbers}{np.mean(inside):8.3f}{standard_error(inside):8.3f}")

uncertainty = ee.uncertainty.decompose_variance(*of_part((mean, variance), "test"))
share = np.mean(uncertainty.epistemic, axis=0) / np.mean(uncertainty.total, axis=0)
print(f"  {'variance that is disagreement':30}" + "".join(f"{100 * value:7.0f}%" for value in share[at]))

by_year, growth = (
    of_years(results["one factor"][1]),
    of_years((level[origins + HORIZONS] - level[origins + HORIZONS - 52])[parts["test"]]),
)
print(f"\n{'COVERAGE AT 0.9, by year':26}" + "".join(f"{year:5}" for year in np.unique(test_years)))
print(f"  {'one factor':24}" + "".join(f"{value:5.2f}" for value in by_year))
print(f"  {'growth, ppm a year':24}" + "".join(f"{value:5.2f}" for value in growth))

# %% [markdown]
# - *Skill.* The mixture beats persistence at every horizon, by more than six standard errors overall, and the mean
#   member by more at longer horizons, where members disagree more.
# - *Calibration.* The mixture covers eight weeks in ten, not nine. Variances a third larger, from the calibration
#   years, give 0.85. Twenty-six factors do no better than one: 235 overlapping weeks are too few to estimate them.
# - *The remaining error* comes from single years. 1998 has the fastest rise, faster than any year of training or
#   calibration: no factor fitted to the past can predict it, nor would conformal intervals help, whose coverage holds
#   for exchangeable weeks.
#
# Limits. This is one series and twelve years. Intervals cover single weeks, not whole paths.

# %% fold="Code of the figure" alt="Forecasts of carbon dioxide with 90 % intervals, and coverage by weeks ahead"
figure, (bands, left) = plt.subplots(2, 1, figsize=(6.4, 6.8), layout="constrained", height_ratios=[3, 2])

calibrated_mean, calibrated_variance = (np.asarray(values[0]) for values in ways["one factor"])
shown = [i for i in np.flatnonzero(parts["test"])[::HORIZONS] if 1997 <= begin[i] <= 1999]
dates = np.concatenate([days[origins[i] + 1 : origins[i] + 1 + HORIZONS] for i in shown])
of_level = lambda values: np.concatenate([level[origins[i]] + values[i] for i in shown])
half_width = np.sqrt(calibrated_variance) * jax.scipy.stats.norm.ppf(0.95)
ee.plot.prediction_bands(
    np.stack([of_level(member) for member in np.asarray(mean)]),
    x=1970 + dates.astype(int) / 365.25,
    targets=of_level(target),
    intervals={0.9: (of_level(calibrated_mean - half_width), of_level(calibrated_mean + half_width))},
    ax=bands,
    color="C0",
)
bands.set(title=f"{len(shown)} forecasts of half a year each", xlabel="year", ylabel="carbon dioxide, ppm")
bands.set(ylim=(358, 378))
bands.legend(loc="upper left", ncols=2, frameon=False)

weeks = np.arange(1, HORIZONS + 1)
for (name, (_, inside)), line in zip(results.items(), (":", "--", "-", "-."), strict=True):
    left.plot(weeks, np.mean(inside, axis=0), line, color="black", label=name)
left.axhline(0.9, color="0.6", linewidth=1)
left.set(title="Coverage of the 90 % interval", xlabel="weeks ahead", ylabel="share of weeks", ylim=(0.7, 1))
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)

figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
figure.savefig(figures / "time_series.png", dpi=200)
