# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Normalising flows: an ensemble of densities
#
# Six flows of [flowjax](https://github.com/danielward27/flowjax) are an ensemble like any other, and their mixture is a
# density again. The data come from a density in closed form, so that the distance of each model from the truth is known
# in nats; where data are rare, the flows disagree.
#
# `python notebooks/density.py` prints the tables and draws the figure, in less than a minute on one core. It needs `pip
# install -e '.[examples]'` and no network.

# %% [markdown]
# In a notebook, these two lines check the shape annotations of every function below at run time. (In the program they
# are comments.)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %%
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flowjax.distributions import AbstractDistribution, Normal
from flowjax.flows import coupling_flow
from jaxtyping import Array, Float, Key

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("DENSITY_FIGURES", here / "figures"))

# %% [markdown]
# ## Data
#
# A curved density: $x_1 \sim N(0, 1)$ and $x_2 \mid x_1 \sim N(x_1^2 - 1,\, 0.5^2)$. Its entropy is $\log(2 \pi e) +
# \log 0.5 = 2.145$ nats, and no model has a lower expected negative log-likelihood.

# %%
NUM_MEMBERS, STD = 6, 0.5
key = jax.random.key(0)


def draw(rows: int, key: Key[Array, ""]) -> Float[Array, "rows 2"]:
    first, second = jax.random.normal(key, (2, rows))
    return jnp.stack([first, first**2 - 1 + STD * second], axis=1)


def true_log_density(x: Float[Array, "rows 2"]) -> Float[Array, " rows"]:
    normal = jax.scipy.stats.norm.logpdf
    return normal(x[:, 0]) + normal(x[:, 1], x[:, 0] ** 2 - 1, STD)


train_key, validation_key, test_key = jax.random.split(key, 3)
train, validation, test = draw(500, train_key), draw(300, validation_key), draw(4000, test_key)

# %% [markdown]
# ## One flow
#
# Constructor and loss are those of one flow. flowjax wraps parameters, for example non-trainable ones: `log_prob`
# unwraps them, and their gradient is zero.


# %%
def make(key: Key[Array, ""]) -> AbstractDistribution:
    return coupling_flow(key, base_dist=Normal(jnp.zeros(2)), flow_layers=5, nn_width=24)


def loss(flow: AbstractDistribution, x: Float[Array, "rows 2"], key: Key[Array, ""]) -> Float[Array, ""]:
    """Mean negative log-likelihood, in nats."""
    return -jnp.mean(flow.log_prob(x))


untrained = ee.build(make, NUM_MEMBERS, key=key)
options = {"validation": validation, "patience": 10, "batch_size": 50, "key": key}
run = ee.fit(untrained, loss, optax.adam(3e-3), train, epochs=100, **options)

# %% [markdown]
# ## The mixture
#
# The mixture of the members' densities is a density. `ee.combine.log_mixture` computes its logarithm; weights may
# come from the validation rows, by stacking. The Kullback-Leibler divergence from the truth is the expectation of
# $\log p - \log q$, which we estimate on the same test rows for all.


# %%
def log_densities(x: Float[Array, "rows 2"]) -> Float[Array, "members rows"]:
    return ee.predict(run.ensemble, x, fn=lambda flow, x: flow.log_prob(x))


on_test, on_validation = log_densities(test), log_densities(validation)
truth = true_log_density(test)
stacked = ee.combine.stacking(on_validation).weights
found = {
    "mean flow": on_test.mean(axis=0),
    "the best flow in validation": on_test[jnp.argmin(run.best_score)],
    "mixture": ee.combine.log_mixture(on_test),
    "mixture, stacked weights": ee.combine.log_mixture(on_test, weights=stacked),
    "one Gaussian": jax.scipy.stats.multivariate_normal.logpdf(test, train.mean(axis=0), jnp.cov(train.T)),
    "the density of the data": truth,
}
print("\nDIVERGENCE FROM THE TRUTH, nats: negative log-likelihood, divergence, its standard error")
for name, log_density in found.items():
    gap = np.asarray(truth - log_density)
    print(f"{name:30}{-log_density.mean():9.4f}{gap.mean():9.4f}{gap.std(ddof=1) / np.sqrt(len(gap)):9.4f}")
print(f"\nentropy in closed form: {np.log(2 * np.pi * np.e) + np.log(STD):.4f}")
print("steps of the best weights:", *run.best_step, " weights by stacking:", *np.round(np.asarray(stacked), 2))

# %% [markdown]
# ## Normalisation
#
# The mixture, like each member, integrates to one, as a sum over a fine grid shows. With a wrong Jacobian, or the mean
# of logarithms instead of the logarithm of the mean, it would not.

# %%
side = jnp.linspace(-6, 14, 400)
grid = jnp.stack(jnp.meshgrid(jnp.linspace(-5, 5, 400), side), axis=-1).reshape(-1, 2)
cell = (10 / 399) * (20 / 399)
on_grid = log_densities(grid)
masses = jnp.exp(on_grid).sum(axis=1) * cell
total = jnp.exp(ee.combine.log_mixture(on_grid)).sum() * cell
print(
    f"\nMASS on the grid, of one\nmembers, least          {masses.min():.4f}"
    f"\nmembers, most           {masses.max():.4f}"
)
print(f"mixture                 {total:.4f}\nmean of logarithms      {jnp.exp(on_grid.mean(axis=0)).sum() * cell:.4f}")

# %% [markdown]
# ## Where the flows disagree
#
# We compute the standard deviation of the members' log-densities, on test rows sorted by their true density. Where data
# are rare the flows are wrong and disagree.

# %%
disagreement = jnp.sqrt(ee.combine.moments(on_test)[1])
error = jnp.abs(ee.combine.log_mixture(on_test) - truth)
rank = jnp.argsort(jnp.argsort(truth)) / len(truth)
print("\nBY TRUE DENSITY: disagreement of the flows, error of the mixture's log-density")
for name, part in {"lowest tenth": rank < 0.1, "middle": abs(rank - 0.5) < 0.05, "highest tenth": rank >= 0.9}.items():
    print(f"{name:24}{disagreement[part].mean():9.3f}{error[part].mean():9.3f}")

# %% alt="Contours of the true density, contours of the mixture of six flows, and a map of their disagreement"
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", sharex=True, sharey=True)
square = lambda values: np.asarray(values).reshape(400, 400)
first, second = square(grid[:, 0]), square(grid[:, 1])
axes[0].plot(*train.T, ".", color="0.6", markersize=3)
levels = np.exp(np.linspace(-9, -1.5, 7))
for ax, values, title in [
    (axes[0], jnp.exp(true_log_density(grid)), "The truth, and 500 rows of it"),
    (axes[1], jnp.exp(ee.combine.log_mixture(on_grid)), "The mixture of six flows"),
]:
    ax.contour(first, second, square(values), levels=levels, cmap="viridis")
    ax.set(title=title, xlabel="$x_1$", xlim=(-4, 4), ylim=(-4, 10))
spread = jnp.clip(jnp.sqrt(ee.combine.moments(on_grid)[1]), 0, 5)
picture = axes[2].contourf(first, second, square(spread), levels=20, cmap="magma")
axes[2].set(title="Disagreement, nats", xlabel="$x_1$")
figure.colorbar(picture, ax=axes[2])
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "density.png", dpi=150)
print(f"figure: {figures / 'density.png'}")

# %% [markdown]
# ## Limits
#
# - A mixture of six flows costs six times as much to evaluate as one flow. A larger flow with more careful
#   regularisation may be as good as the mixture of small ones.
# - By the concavity of the logarithm the mixture has a better score than the mean flow; a single flow may be better
#   still.
# - Disagreement follows density here, in two dimensions. In many dimensions flows may agree on images unlike any they
#   were trained on.
