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
# # Differential equations: an ensemble of neural ODEs
#
# Each member is a vector field, solved by [diffrax](https://docs.kidger.site/diffrax/): a neural ODE. Eight of them are
# built and trained like any other ensemble, and every member solves its own equation. They are trained on short, noisy
# trajectories of a system whose solution is known in closed form, and evaluated at later times and from other initial
# states.
#
# This page is a notebook and a program: `python notebooks/neural_ode.py` prints the tables and writes the figure. It
# needs `pip install 'eqx_ensemble[examples]'`, no network, and about a minute on one core.

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

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Key

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("NEURAL_ODE_FIGURES", here / "figures"))

# %% [markdown]
# ## A system with a known solution
#
# In polar coordinates $\dot r = r (1 - r^2)$ and $\dot \varphi = 1$: all solutions rotate, and approach the circle
# $r = 1$. With $r(0) = r_0$ the radius is $r(t) = (1 + (r_0^{-2} - 1)\, e^{-2t})^{-1/2}$.
#
# We observe 48 solutions at 9 times up to $t = 2$, with noise of standard deviation 0.05. All start inside the circle,
# with radii from 0.2 to 0.8.

# %%
NUM_MEMBERS, NOISE = 8, 0.05
key = jax.random.key(0)

Times = Float[Array, " times"]
Points = Float[Array, "rows 2"]
Paths = Float[Array, "rows times 2"]


def solution(start: Float[Array, "2"], times: Times) -> Float[Array, "times 2"]:
    radius = jnp.linalg.norm(start)
    angle = jnp.arctan2(start[1], start[0]) + times
    radii = (1 + (radius**-2 - 1) * jnp.exp(-2 * times)) ** -0.5
    return radii[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def draw(rows: int, least: float, most: float, times: Times, key: Key[Array, ""]) -> tuple[Points, Paths]:
    """Initial states with radii between two bounds, and noisy observations."""
    radius_key, angle_key, noise_key = jax.random.split(key, 3)
    radius = jax.random.uniform(radius_key, (rows,), minval=least, maxval=most)
    angle = jax.random.uniform(angle_key, (rows,), maxval=2 * jnp.pi)
    start = radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    paths = jax.vmap(solution, in_axes=(0, None))(start, times)
    return start, paths + NOISE * jax.random.normal(noise_key, paths.shape)


seen_times = jnp.linspace(0.0, 2.0, 9)
train = draw(48, 0.2, 0.8, seen_times, jax.random.key(1))
validation = draw(12, 0.2, 0.8, seen_times, jax.random.key(2))

# %% [markdown]
# ## One member
#
# The member solves its equation from one initial state, and returns means and variances of the observations at the
# given times. The noise variance is one parameter, learnt together with the vector field.


# %%
class NeuralODE(eqx.Module):
    field: eqx.nn.MLP
    log_variance: Float[Array, ""]

    def __init__(self, *, key: Key[Array, ""]):
        self.field = eqx.nn.MLP(2, 2, 32, 2, jnp.tanh, key=key)
        self.log_variance = jnp.array(-2.0)

    def __call__(
        self, times: Times, start: Float[Array, "2"]
    ) -> tuple[Float[Array, "times 2"], Float[Array, "times 2"]]:
        mean = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Heun(),
            t0=0.0,
            t1=times[-1],
            dt0=0.25,
            y0=start,
            saveat=diffrax.SaveAt(ts=times),
            max_steps=64,
        ).ys
        return mean, jnp.broadcast_to(jnp.exp(self.log_variance), mean.shape)


def loss(model: NeuralODE, batch: tuple[Points, Paths], key: Key[Array, ""] | None = None) -> Float[Array, ""]:
    start, observed = batch
    mean, variance = jax.vmap(model, in_axes=(None, 0))(seen_times, start)
    return ee.scores.nll_gaussian(mean, variance, observed)


# %% [markdown]
# ## Training
#
# We call `ee.build` and `ee.fit` as for any other model. Solvers are loops inside the compiled step, which run over all
# members together.

# %%
untrained = ee.build(lambda key: NeuralODE(key=key), NUM_MEMBERS, key=key)
options = {"validation": validation, "patience": 60, "batch_size": 16, "key": key}
run = ee.fit(untrained, loss, optax.adam(optax.cosine_decay_schedule(1e-2, 900)), train, epochs=300, **options)
ensemble = run.ensemble
print("learnt standard deviations of the noise:", *np.round(np.exp(0.5 * np.asarray(ensemble.stacked.log_variance)), 3))

# %% [markdown]
# ## Three questions
#
# We evaluate times and initial states as in training; the same initial states up to $t = 8$; and initial states outside
# the circle, which are not in the training data. Times are shared by all rows, but initial states are a batch, and
# marked as such: `ensemble(times, ee.Batch(start))` is `(members, rows, times, 2)`.
#
# The error is relative to the closed-form solution. The coverage is that of new, noisy observations by intervals of the
# mixture at level 0.9.

# %%
later = jnp.linspace(2.0, 8.0, 13)
questions = {
    "as in training": (0.2, 0.8, seen_times),
    "later": (0.2, 0.8, later),
    "from outside": (1.5, 2.0, seen_times),
}
answers = {}
print("\nERROR: mean member, mean of the members, their disagreement, coverage at 0.9")
for i, (name, (least, most, times)) in enumerate(questions.items()):
    start, observed = draw(40, least, most, times, jax.random.key(10 + i))
    truth = jax.vmap(solution, in_axes=(0, None))(start, times)
    mean, variance = ensemble(times, ee.Batch(start))
    answers[name] = start
    each = jnp.sqrt(jnp.mean((mean - truth) ** 2, axis=(1, 2, 3)))
    together = jnp.sqrt(jnp.mean((mean.mean(axis=0) - truth) ** 2))
    disagreement = jnp.sqrt(jnp.mean(ee.combine.moments(mean)[1]))
    low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)
    inside = jnp.mean((low <= observed) & (observed <= high))
    print(f"{name:20}{each.mean():10.4f}{together:10.4f}{disagreement:10.4f}{inside:10.3f}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for ax, (name, start) in zip(axes, answers.items(), strict=True):
    times = questions[name][2]
    line = jnp.linspace(0.0, times[-1], 100)
    exact = solution(start[0], line)
    for member in ensemble(line, start[0])[0]:
        ax.plot(*member.T, color="C0", linewidth=0.8, alpha=0.7)
    ax.plot(*exact.T, color="black", linestyle="--", label="closed form")
    ax.plot(*train[1].reshape(-1, 2).T, ".", color="0.8", markersize=2, zorder=0)
    ax.set(title=name, aspect="equal", xlim=(-2.2, 2.2), ylim=(-2.2, 2.2))
axes[0].legend(fontsize=8)
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "neural_ode.png", dpi=150)
print(f"figure: {figures / 'neural_ode.png'}")

# %% [markdown]
# ## Limits
#
# - With an adaptive solver all vectorised members run as long as the slowest. We use fixed steps; for adaptive ones try
#   `plan=ee.plan.Sequential()`.
# - Beyond the data the members disagree several times as much as within, but their common error grows more: their
#   intervals are too narrow there. Disagreement is a warning, not a guarantee.
# - A vector field with the symmetry of the system would extrapolate without an ensemble. We deliberately use none.
