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
# # Which ensemble? Eight kinds of one network, compared
#
# Seeds, bootstraps, prior functions, SWAG, stochastic-gradient MCMC, repulsion, TabM and Laplace are trained from the
# same small network on the same 235 households. Where there are data all predict alike; far from the data their
# uncertainties differ up to ninefold, and one table lists scores and costs.
#
# The data are incomes and food expenditures of Belgian households, collected by Engel in 1857. Few earn more than 2,000
# francs: beyond, an ensemble should be uncertain.

# %% [markdown]
# In a notebook, these two lines check the shape annotations of every function below at run time. (In the program they
# are comments.)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %% fold="Imports"
import pathlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from statsmodels.datasets import engel

import eqx_ensemble as ee

# %% [markdown]
# ## Data
#
# Every third household is held out. Inputs, targets and scores are standardised by the training rows. The grid extends
# far beyond the data.

# %%
table = engel.load_pandas().data.sample(frac=1, random_state=0)
income, food = (table[name].to_numpy(np.float32) for name in ("income", "foodexp"))
held_out = np.arange(len(income)) % 3 == 0


def scale(values: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
    """Standardised: mean 0 and standard deviation 1 in the training rows."""
    return (values - values[~held_out].mean()) / values[~held_out].std()


x, y = scale(income)[:, None], scale(food)
train, test = (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
num_rows = len(train[1])
grid = np.linspace(-3, 12, 151, dtype=np.float32)[:, None]
far = grid[:, 0] > x.max()
print(f"{num_rows} households to train, {len(test[1])} to test; incomes up to {income.max():.0f} francs")

# %% [markdown]
# ## One member
#
# A small network predicts a mean and a variance. The loss is the negative log-posterior per row, with a Gaussian prior
# on the weights, for training, sampling and repulsion.

# %%
MEMBERS, STEPS = 8, 1500
key, adam = jax.random.key(0), optax.adam(3e-3)


def make(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(1, 2, 32, 2, key=key)


def likelihood(model: Callable, batch: tuple, key: Key[Array, ""]) -> Float[Array, ""]:
    x, y = batch
    mean, variance = as_gaussian(jax.vmap(model)(x))
    return ee.scores.nll_gaussian(mean, variance, y)


def as_gaussian(outputs: Float[Array, "*batch 2"]) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + 1e-3


def loss(model: Callable, batch: tuple, key: Key[Array, ""]) -> Float[Array, ""]:
    return likelihood(model, batch, key) + ee.methods.priors.gaussian_penalty(model, num_rows=num_rows)


ensemble = ee.build(make, MEMBERS, key=key)
options = {"batch_size": 32, "key": key, "progress": False}

# %% [markdown]
# ## Eight ensembles
#
# **Seeds**: members differ in their initial weights and row orders.


# %%
def seeds() -> ee.Ensemble:
    return ee.fit(ensemble, loss, adam, train, steps=STEPS, **options).ensemble


# %% [markdown]
# **Bootstraps**: each member is trained on rows drawn with replacement.


# %%
def bootstraps() -> ee.Ensemble:
    rows = ee.resample.bootstrap(num_rows, MEMBERS, key=key)
    return ee.fit(ensemble, loss, adam, train, rows=rows, steps=STEPS, **options).ensemble


# %% [markdown]
# **Prior functions**: each member includes a random network that is never trained.


# %%
def with_prior(key: Key[Array, ""]) -> ee.methods.priors.RandomisedPrior:
    own, prior = jax.random.split(key)
    return ee.methods.priors.RandomisedPrior(make(own), make(prior), scale=3.0)


def prior_functions() -> ee.Ensemble:
    members = ee.build(with_prior, MEMBERS, key=key)
    return ee.fit(members, loss, adam, train, steps=STEPS, **options).ensemble


# %% [markdown]
# **SWAG**: one member, trained for as many steps as all above; samples of a Gaussian fitted to its last weights.


# %%
def swag() -> ee.Ensemble:
    steps = MEMBERS * STEPS
    optimiser = ee.methods.trajectory.swag(adam, rank=20, start=3 * steps // 4, every=steps // 160)
    run = ee.fit(ensemble[:1], loss, optimiser, train, steps=steps, **options)
    return ee.methods.trajectory.sample(run, MEMBERS, key=key)


# %% [markdown]
# **Chains**: the seeds continue as chains of stochastic-gradient MCMC (SGHMC), with five samples per chain.


# %%
def chains() -> ee.Ensemble:
    begun = ee.fit(ensemble, loss, adam, train, steps=STEPS // 2, **options).ensemble
    sampler = ee.methods.sampling.sghmc(1e-4, num_rows=num_rows, friction=0.1, key=key)
    optimiser = ee.methods.trajectory.snapshots(sampler, 5, start=STEPS // 4, every=STEPS // 20)
    run = ee.fit(begun, loss, optimiser, train, steps=STEPS // 2, **options)
    return ee.methods.trajectory.snapshot_ensemble(run)


# %% [markdown]
# **Repulsion**: members repel each other's predictions, on the rows of the batch and on random inputs. Each step moves
# the outputs of all members along their directions, which the transposed Jacobian maps to weights.


# %%
def loss_of_outputs(outputs: Float[Array, "rows 2"], y: Float[Array, " batch"]) -> Float[Array, ""]:
    mean, variance = as_gaussian(outputs)
    prior = jnp.sum(outputs[len(y) :] ** 2) / (2 * 3.0**2)  # outputs of the order 3
    return ee.scores.nll_gaussian(mean[: len(y)], variance[: len(y)], y) + prior / num_rows


def repulsion() -> ee.Ensemble:
    params, fixed = eqx.partition(ensemble.stacked, eqx.is_inexact_array)
    flat = lambda x: x.reshape(MEMBERS, -1)

    def step(state: tuple, batch: tuple) -> tuple:
        (params, opt_state), (x, y, anywhere) = state, batch
        of_one = lambda params: jax.vmap(eqx.combine(params, fixed))(jnp.concatenate([x, anywhere]))
        outputs, pull_back = jax.vjp(jax.vmap(of_one), params)
        scores = -num_rows * jax.vmap(jax.grad(loss_of_outputs), (0, None))(outputs, y)
        directions = ee.methods.particles.wgd(flat(outputs), flat(scores)).reshape(outputs.shape)
        updates, opt_state = adam.update(pull_back(-directions / num_rows)[0], opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    rng = np.random.default_rng(0)
    rows = rng.integers(num_rows, size=(STEPS, 32))
    anywhere = rng.uniform(-3, 12, size=(STEPS, 32, 1)).astype(np.float32)
    (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), (train[0][rows], train[1][rows], anywhere))
    return ee.from_stacked(eqx.combine(params, fixed))


# %% [markdown]
# **TabM**: one model of eight sub-members, which share all weights except one factor of the first layer and the heads.


# %%
def tabm() -> ee.Ensemble:
    def make_joint(key: Key[Array, ""]) -> ee.methods.efficient.JointEnsemble:
        own, convert = jax.random.split(key)
        return ee.methods.efficient.tabm(make(own), MEMBERS, key=convert)

    joint = ee.build(make_joint, 1, key=key)
    mean_loss = ee.methods.efficient.mean_loss(likelihood)
    return ee.fit(joint, mean_loss, optax.adamw(3e-3), train, steps=STEPS, **options).ensemble


# %% [markdown]
# **Laplace**: one member, and the Gaussian posterior of its last layer. It predicts the mean, with one noise variance
# for all rows, chosen by the marginal likelihood.


# %%
def make_mean(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(1, 1, 32, 2, key=key)


def squared_error(model: eqx.nn.MLP, batch: tuple, key: Key[Array, ""]) -> Float[Array, ""]:
    x, y = batch
    errors = jax.vmap(model)(x) - y
    noise = 0.4
    prior = ee.methods.priors.gaussian_penalty(model, num_rows=num_rows)
    return jnp.mean(errors**2) / (2 * noise**2) + prior


def laplace() -> ee.methods.laplace.Laplace:
    data = train[0], train[1][:, None]
    run = ee.fit(ee.build(make_mean, 1, key=key), squared_error, adam, data, steps=MEMBERS * STEPS, **options)
    last = lambda model: model.layers[-1]
    posterior = ee.methods.laplace.fit(run, data, likelihood="regression", noise=0.4, where=last)
    return posterior.optimise_prior(fit_noise=True)


# %% [markdown]
# ## Predictions
#
# The Gaussians of all members for given inputs, and the bytes of the weights that a prediction needs:


# %%
def predict(
    found: ee.Ensemble | ee.methods.laplace.Laplace, x: Float[np.ndarray, "rows 1"]
) -> tuple[Float[Array, "members rows"], Float[Array, "members rows"]]:
    if isinstance(found, ee.methods.laplace.Laplace):
        mean, variance = found.predict(x)
        return mean[..., 0], variance[..., 0]
    raw = ee.predict(found, x)
    if raw.ndim == 4:  # one model of several sub-members
        raw = ee.methods.efficient.as_members(raw)
    return as_gaussian(raw)


def kilobytes(found: ee.Ensemble | ee.methods.laplace.Laplace) -> float:
    arrays = jax.tree.leaves(eqx.filter(found, eqx.is_inexact_array))
    return sum(a.nbytes for a in arrays) / 1000


METHODS = {
    "seeds": seeds,
    "bootstraps": bootstraps,
    "prior functions": prior_functions,
    "SWAG": swag,
    "chains of SGHMC": chains,
    "repulsion of outputs": repulsion,
    "TabM": tabm,
    "Laplace": laplace,
}
found = {}
print("\nWHICH ENSEMBLE, of 8 x 1,500 steps")
print(f"{'':22}{'NLL':>7}{'CRPS':>7}{'coverage':>10}{'std, far':>10}{'kB':>7}{'components':>12}")
for name, train_all in METHODS.items():
    found[name] = train_all()
    mean, variance = predict(found[name], test[0])
    low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)
    scores = [
        ee.scores.nll_gaussian_mixture(mean, variance, test[1]),
        ee.scores.crps_gaussian_mixture(mean, variance, test[1]),
        ee.scores.coverage(low, high, test[1]),
    ]
    spread = predict(found[name], grid[far])[0].std(axis=0).mean()  # of the members' means
    if isinstance(found[name], ee.methods.laplace.Laplace):
        covariance = found[name].outputs(grid[far]).covariance
        spread = jnp.sqrt(covariance[..., 0, 0]).mean()
    nll, crps, coverage = (float(score) for score in scores)
    cost = f"{kilobytes(found[name]):7.0f}{len(mean):12}"
    print(f"{name:22}{nll:7.3f}{crps:7.3f}{coverage:10.2f}{spread:10.2f}{cost}")

# %% [markdown]
# `std, far` is the standard deviation of the means, beyond the largest income in the data, in standard deviations of
# the expenditures: the ensemble's epistemic uncertainty.

# %% fold="Code of the figure" alt="Data, members' means and 90 % intervals of eight ensembles"
figure, axes = plt.subplots(4, 2, figsize=(6.4, 8.2), sharex=True, sharey=True, layout="constrained")
for (name, ensemble_of), ax in zip(found.items(), axes.flat, strict=True):
    mean, variance = predict(ensemble_of, grid)
    low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)
    ax.fill_between(grid[:, 0], low, high, color="0.85", label="90 % interval of the mixture")
    lines = ax.plot(grid[:, 0], mean.T, color="tab:blue", lw=0.6, alpha=0.6)
    ax.plot(*(part.ravel() for part in train), ".", color="0.3", ms=2, label="households")
    lines[0].set_label("members' means")
    ax.set(title=name, ylim=(-4, 10))
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
for ax in axes[-1]:
    ax.set_xlabel("income, standardised")
figure.supylabel("expenditure for food, standardised")
figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
figure.savefig(figures / "which_ensemble.png", dpi=200)

# %% [markdown]
# ## Interpretation
#
# - **Where there are data, predictions are similar.** Laplace has a worse NLL: one noise variance for all incomes is
#   too large for the poor and too small for the rich.
# - **Far from the data they differ.** SWAG and seeds extend the same line, with little uncertainty. Bootstraps and
#   chains spread four to five times as far as seeds: bootstraps contain different rich households or none, and chains
#   visit all slopes that the data allow. The others are in between; for prior functions and repulsion this depends on
#   their scales, which are a choice and not a result.
# - **Cost.** All had 12,000 gradient steps of one network. TabM predicts with fewer weights than three seeds, Laplace
#   with one model and a covariance, chains with forty models.
# - **Limits.** One split of 235 rows, with one input, nothing tuned: do not rank methods by it.
#
# | goal | use |
# |---|---|
# | better predictions and calibrated probabilities, if you can train several models | seeds |
# | uncertainty where rows are few, from the data alone | bootstraps, chains |
# | members that differ far from the data, by an amount that you choose | prior functions, repulsion |
# | an ensemble from one long training run | SWAG, snapshots |
# | an ensemble from one trained model | Laplace of its last layer |
# | little memory at prediction | TabM, or distillation of any of them |
