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
# # Mixture of experts: an ensemble as a field of a larger Module
#
# Four experts and a gate are one Module, trained by the training step of the Equinox documentation: an ensemble can be
# a field like any other layer. Where the data have several answers, experts follow different branches and the gate
# weights them.
#
# Members of an ensemble are trained independently; experts specialise by a joint loss. This is therefore one model that
# contains an ensemble. At the end it becomes a member itself: five seeds of the mixture, trained by `fit`.
#
# `python notebooks/mixture_of_experts.py` prints the table and draws the figure, in less than a minute on one core. It
# needs `pip install -e '.[examples]'` and no network.

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
figures = pathlib.Path(os.environ.get("MIXTURE_OF_EXPERTS_FIGURES", here / "figures"))

# %% [markdown]
# ## Data with several answers
#
# A cause $y$, uniform on $[0, 1]$, has the effect $x = f(y) + \varepsilon$ with
# $f(y) = 10\,(y + 0.3 \sin(2 \pi y) - 0.5)$ and $\varepsilon \sim N(0, 0.5^2)$. Predict the cause from the effect: for
# $x$ around zero there are three causes, and their mean is none of them. Because the data are synthetic, the best
# possible score is known: $p(y \mid x) \propto N(x;\, f(y),\, 0.5^2)$, normalised by a sum over a fine grid.

# %%
NOISE, NUM_EXPERTS, BATCH, EPOCHS = 0.5, 4, 100, 150
key = jax.random.key(0)


def effect(cause: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    return 10 * (cause + 0.3 * jnp.sin(2 * jnp.pi * cause) - 0.5)


def draw(rows: int, key: Key[Array, ""]) -> tuple[Float[Array, "rows 1"], Float[Array, " rows"]]:
    cause_key, noise_key = jax.random.split(key)
    cause = jax.random.uniform(cause_key, (rows,))
    return (effect(cause) + NOISE * jax.random.normal(noise_key, (rows,)))[:, None], cause


def optimum(x: Float[Array, "rows 1"], y: Float[Array, " rows"]) -> Float[Array, ""]:
    """The mean negative log-likelihood, in nats, of the density that the data were drawn from."""
    grid = (jnp.arange(4000) + 0.5) / 4000
    exponent = lambda cause: -0.5 * ((x[:, 0] - effect(cause)) / NOISE) ** 2
    log_mean = jax.nn.logsumexp(jax.vmap(exponent)(grid), axis=0) - jnp.log(4000)
    return -jnp.mean(exponent(y) - log_mean)


train_key, test_key = jax.random.split(key)
train, test = draw(1000, train_key), draw(2000, test_key)

# %% [markdown]
# ## The expert and the mixture
#
# `Mixture.experts` is an ensemble, made by `ee.build`. Calling it returns the outputs of all experts, with a leading
# `members` axis; the gate returns their weights. Both are functions of one example, as usual in Equinox, so that the
# weights are `(members,)`.


# %%
class Expert(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, width: int = 16, *, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(1, 2, width, 1, jnp.tanh, key=key)

    def __call__(self, x: Float[Array, "1"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        mean, raw = self.mlp(x)
        return mean, jax.nn.softplus(raw) + 1e-3


class Mixture(eqx.Module):
    experts: ee.Ensemble[Expert]
    gate: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        experts_key, gate_key = jax.random.split(key)
        self.experts = ee.build(lambda key: Expert(key=key), NUM_EXPERTS, key=experts_key)
        self.gate = eqx.nn.MLP(1, NUM_EXPERTS, 16, 1, jnp.tanh, key=gate_key)

    def __call__(
        self, x: Float[Array, "1"]
    ) -> tuple[Float[Array, " experts"], Float[Array, " experts"], Float[Array, " experts"]]:
        mean, variance = self.experts(x)
        return mean, variance, jax.nn.softmax(self.gate(x))


def mixture_nll(model: Mixture, x: Float[Array, "1"], y: Float[Array, ""]) -> Float[Array, ""]:
    """Negative log-likelihood of one example, in nats."""
    mean, variance, weights = model(x)
    return ee.scores.nll_gaussian_mixture(mean[:, None], variance[:, None], y[None], weights=weights)


def expert_nll(model: Expert, x: Float[Array, "1"], y: Float[Array, ""]) -> Float[Array, ""]:
    mean, variance = model(x)
    return ee.scores.nll_gaussian(mean, variance, y)


# %% [markdown]
# ## Your own training step
#
# `eqx.filter_value_and_grad` differentiates the floating-point arrays, and optax is initialised with the same ones.

# %%
optimiser = optax.adam(1e-2)


def mean_nll(
    model: eqx.Module, batch: tuple[Float[Array, "rows 1"], Float[Array, " rows"]], key: Key[Array, ""] | None = None
) -> Float[Array, ""]:
    nll = mixture_nll if isinstance(model, Mixture) else expert_nll
    return jnp.mean(jax.vmap(nll, in_axes=(None, 0, 0))(model, *batch))


@eqx.filter_jit
def step(model, opt_state, batch):
    value, gradients = eqx.filter_value_and_grad(mean_nll)(model, batch)
    updates, opt_state = optimiser.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, value


def train_own(model: eqx.Module, epochs: int) -> eqx.Module:
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(epochs):
        for start in range(0, 1000, BATCH):
            batch = tuple(values[start : start + BATCH] for values in train)
            model, opt_state, _ = step(model, opt_state, batch)
    return model


(first_key,) = ee.member_keys(key, 1)
mixture = train_own(Mixture(key=first_key), EPOCHS)
print(f"one mixture, trained by hand: {mean_nll(mixture, test):.4f} nats on new rows")

# %% [markdown]
# ## Five seeds of it
#
# A mixture is an ordinary model: `ee.build` and `ee.fit` train five of them at once. The first of the five is the one
# trained by hand, with the same key and batches. (Rounding differences between two compiled programs grow over 1,500
# steps; the two are compared after ten epochs.) Baselines are one expert alone, and a single network with as many
# parameters as the whole mixture.

# %%
options = {"batch_size": BATCH, "shuffle": False, "key": key}
makers = {
    "one expert": lambda key: Expert(key=key),
    "one network, as many parameters": lambda key: Expert(90, key=key),
    "mixture of four experts": lambda key: Mixture(key=key),
}
runs = {
    name: ee.fit(ee.build(make, 5, key=key), mean_nll, optimiser, train, epochs=EPOCHS, **options)
    for name, make in makers.items()
}


def num_parameters(model: eqx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


five = ee.build(makers["mixture of four experts"], 5, key=key)
by_hand = train_own(Mixture(key=first_key), 10)
by_fit = ee.fit(five, mean_nll, optimiser, train, epochs=10, **options).ensemble[0]
leaves = (jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) for model in (by_hand, by_fit))
difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*leaves, strict=True))
print(f"largest difference of a weight after ten epochs, by hand and by `fit`: {difference:.0e}")

# %%
best = float(optimum(*test))
print("\nNEGATIVE LOG-LIKELIHOOD on new rows, nats: parameters, mean of five seeds, standard error, worst seed")
for name, run in runs.items():
    nll = np.asarray(ee.map_members(mean_nll)(run.ensemble, test))
    error = nll.std(ddof=1) / np.sqrt(len(nll))
    print(f"{name:34}{num_parameters(run.ensemble[0]):8}{nll.mean():10.4f}{error:10.4f}{nll.max():10.4f}")

mixtures = runs["mixture of four experts"].ensemble
each = ee.map_members(lambda model: jax.vmap(mixture_nll, in_axes=(None, 0, 0))(model, *test))(mixtures)
combined = -jnp.mean(ee.combine.log_mixture(-each))
print(f"{'five mixtures, combined':34}{5 * num_parameters(mixtures[0]):8}{combined:10.4f}")
print(f"{'the density of the data':34}{0:8}{best:10.4f}")

# %% [markdown]
# ## The experts
#
# `mixture.experts` is an ordinary ensemble: index it, unstack it, call it with `ee.Batch`. Where there are three
# causes, the experts follow different branches, and the gate weights them. One expert alone follows their mean.

# %% alt="Left: means of four experts on a curve with three branches. Right: the weights of the gate"
line = jnp.linspace(-6, 6, 200)[:, None]
mean, variance = mixture.experts(ee.Batch(line))  # (experts, rows)
weights = jax.vmap(mixture)(line)[2]  # (rows, experts)
of_mixture = ee.combine.gaussian(mean, variance, weights=weights.T)  # mean and variance of the mixture, row by row

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
left.plot(train[0][:, 0], train[1], ".", color="0.8", markersize=3)
for i in range(NUM_EXPERTS):
    used = weights[:, i] > 0.1
    left.plot(jnp.where(used, line[:, 0], jnp.nan), mean[i], linewidth=2, label=f"expert {i}")
    right.plot(line[:, 0], weights[:, i], linewidth=2)
left.plot(line[:, 0], of_mixture.mean, color="black", linewidth=1, label="mean of the mixture")
alone = runs["one expert"].ensemble[0]
left.plot(line[:, 0], jax.vmap(alone)(line)[0], color="black", linestyle="--", label="one expert alone")
left.set(xlabel="effect", ylabel="cause", title="Means of the experts, where their weight is above a tenth")
left.legend(fontsize=8)
right.set(xlabel="effect", ylabel="weight", title="The gate")
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "mixture_of_experts.png", dpi=150)
print(f"figure: {figures / 'mixture_of_experts.png'}")

# %% [markdown]
# ## Limits
#
# - The scale of the input matters. With $x / 10$ as input, all experts and the gate are almost constant at first, one
#   expert dominated on most rows in some of the seeds, and the worst of five ended at -0.10 nats. Plot the gate.
# - The combination of five has a better score than their mean for any seeds, because the logarithm is concave.
# - Gates of large models send each input to one or two experts to save time. Here every expert sees every input.
# - The distance from the density of the data is due to 1,000 rows and small networks.
