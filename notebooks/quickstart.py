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
# # Start here
#
# From a list of models to calibrated predictions in ten minutes, with two deep ensembles on real data. One reads
# handwritten digits and disagrees on a digit that it has never seen; the other predicts the course of a disease, with
# intervals that contain about nine patients in ten.
#
# ## Install
#
# There is no release on PyPI yet: install from a clone of the repository. This page is a program, which runs in less
# than a minute on two CPU cores and draws the figure in `notebooks/figures/`. (Squares are stops, dots the weights that
# are kept.)
#
# ```bash
# pip install -e '.[examples]'
# python notebooks/quickstart.py
# ```

# %% [markdown]
# In a notebook, these two lines check the shape annotations of every function below at run time. (In the program they
# are comments.)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %%
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_diabetes, load_digits

import eqx_ensemble as ee

# %% [markdown]
# ## The data
#
# 1,797 images of 8 x 8 pixels. The nines are left out: no member is trained on one.

# %%
digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
nines, others = pixels[digits.target == 9], digits.target != 9
order = np.random.default_rng(0).permutation(np.flatnonzero(others))
train, validate, test = ((pixels[rows], digits.target[rows]) for rows in np.split(order, [970, 1212]))


# %% [markdown]
# ## From a list of models to one
#
# A member is an Equinox Module, written for *one* image.


# %%
def make(key):
    return eqx.nn.MLP(64, 9, width_size=64, depth=2, key=key)


models = [make(key) for key in jax.random.split(jax.random.key(0), 16)]
ensemble = ee.stack(models)
print(models[0].layers[1].weight.shape, "->", ensemble.stacked.layers[1].weight.shape)

# %% [markdown]
# Sixteen models are one Module, whose arrays have a leading `members` axis. The list is not needed: `build` calls
# `make` for all members at once.

# %%
ensemble = ee.build(make, 16, key=jax.random.key(0))
x, y = test
print("one image           ", ensemble(x[0]).shape)
print("a batch of images   ", ensemble(ee.Batch(x)).shape)
print("an image per member ", ensemble(ee.Each(x[:16])).shape)

# %% [markdown]
# An ensemble is called like a member. Batch axes are marked, never guessed from a size: sixteen images could be a batch
# or one for each member. `ensemble[3]` is an ordinary `eqx.nn.MLP`, `ensemble[:8]` a smaller ensemble.
#
# ## Train a deep ensemble, with early stopping
#
# You write loss and optimiser for one member. With `validation` and `patience` each member stops when *its own* score
# stops improving, and keeps its best weights.


# %%
def loss(model, batch, key):
    x, y = batch
    logits = jax.vmap(model)(x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


options = dict(batch_size=32, key=jax.random.key(1))
run = ee.fit(
    ensemble,
    loss,
    optax.adamw(1e-3),
    train,
    epochs=80,
    validation=validate,
    patience=10,
    **options,
)
print("best after steps", *run.best_step)

# %% [markdown]
# Members do not notice each other: with the same key and data, member 3 trained alone is the same model, to float
# rounding.
#
# ## Are sixteen better than one?
#
# Predictions have a leading `members` axis. Scores are those of the mixture, the mean of the members' probabilities;
# `per_member` gives each member's own. NLL is the negative log-likelihood, in nats.

# %%
logits = run.predict(x)  # (members, rows, classes)
for name in ("accuracy", "nll", "brier", "ece"):
    score = getattr(ee.scores, name)
    alone = ee.scores.per_member(score, logits, y)
    print(f"{name:9} members {alone.min():.3f} to {alone.max():.3f}", end=", ")
    print(f"mean {alone.mean():.3f}, mixture {score(logits, y):.3f}")

# %% [markdown]
# The mixture's NLL and Brier score are never worse than the members' mean: that is a theorem. It need not beat the best
# member, and its calibration error (ECE) may even be larger: averaging makes predictions less confident.
#
# ## Where members disagree
#
# The entropy of the mixture has two parts: *aleatoric*, the members' mean entropy, and *epistemic*, their disagreement.

# %%
known = ee.uncertainty.decompose_entropy(logits)
novel = ee.uncertainty.decompose_entropy(run.predict(nines))
for name, parts in {"other digits": known, "nines": novel}.items():
    aleatoric, epistemic = parts.aleatoric.mean(), parts.epistemic.mean()
    print(f"{name:12} aleatoric {aleatoric:.3f}, epistemic {epistemic:.3f} nats")
is_nine = np.repeat([False, True], [len(x), len(nines)])
auroc = ee.scores.auroc(jnp.concatenate([known.epistemic, novel.epistemic]), is_nine)
print(f"a nine has the larger epistemic part with probability {auroc:.2f}")

# %% [markdown]
# Uncertainty detects most of the unseen digits, not all of them: see [Unseen classes](../examples/unseen_classes.md).
#
# ## A mean and a variance
#
# 442 patients have ten measurements each, and a measure of disease progression after one year. Members now return a
# mean and a variance. 160 patients are for training, 60 for early stopping, 110 for calibration, 112 for testing.

# %%
features, progression = load_diabetes(return_X_y=True)
order = np.random.default_rng(1).permutation(442)
train, validate, calibrate, test = np.split(order, [160, 220, 330])
x = (features / features[train].std(axis=0)).astype(np.float32)
y = (progression - progression[train].mean()) / progression[train].std()
y = y.astype(np.float32)


class Gaussian(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key):
        self.mlp = eqx.nn.MLP(10, 2, width_size=50, depth=1, key=key)

    def __call__(self, x):
        mean, raw = self.mlp(x)
        return mean, jax.nn.softplus(raw) + 1e-3


def gaussian_nll(model, batch, key):
    x, y = batch
    mean, variance = jax.vmap(model)(x)
    return ee.scores.nll_gaussian(mean, variance, y)


patients = ee.build(lambda key: Gaussian(key=key), 16, key=jax.random.key(2))
data = patients, gaussian_nll, optax.adam(3e-3), (x[train], y[train])
validation = x[validate], y[validate]
runs = {
    "60 epochs": ee.fit(*data, epochs=60, **options),
    "stopped early": ee.fit(*data, epochs=60, validation=validation, patience=10, **options),
}

# %% [markdown]
# ## Calibrate
#
# A 90 % interval should contain nine test patients in ten. Three intervals for each run, from the one Gaussian of the
# mixture's mean and variance:
#
# - *as predicted*;
# - *scaled*: variances are multiplied by one factor, fitted on the calibration patients;
# - *conformal*: for exchangeable patients the interval contains the target with a probability of at least 90 %, however
#   poor the model.


# %%
def intervals(run):
    held_out, new = run.predict(x[calibrate]), run.predict(x[test])
    scale = ee.calibrate.variance(*held_out, y[calibrate], pool="mixture")
    centre, combined = ee.combine.gaussian(*held_out), ee.combine.gaussian(*new)
    scaled = combined.mean, scale.scale[0] * combined.variance
    std = jnp.sqrt(centre.variance)
    split = ee.conformal.split(centre.mean, y[calibrate], level=0.9, scale=std)
    return {
        "as predicted": ee.uncertainty.gaussian_interval(*combined, level=0.9),
        "scaled": ee.uncertainty.gaussian_interval(*scaled, level=0.9),
        "conformal": split(combined.mean, jnp.sqrt(combined.variance)),
    }


for name, run_of in runs.items():
    mean, variance = run_of.predict(x[test])
    nll = ee.scores.nll_gaussian_mixture
    alone = ee.scores.per_member(nll, mean, variance, y[test])
    print(f"{name}: NLL of members {alone.min():.2f} to {alone.max():.2f}", end=", ")
    print(f"of the mixture {nll(mean, variance, y[test]):.2f}")
    parts = ee.uncertainty.decompose_variance(mean, variance)
    total, epistemic = parts.total.mean(), parts.epistemic.mean()
    print(f"  variance {total:.2f}, of it epistemic {epistemic:.2f}", end="; ")
    print(f"squared error {jnp.mean((mean.mean(axis=0) - y[test]) ** 2):.2f}")
    for kind, (low, high) in intervals(run_of).items():
        coverage, width = ee.scores.coverage(low, high, y[test]), jnp.mean(high - low)
        print(f"  {kind:13} coverage {coverage:.2f}, mean width {width:.2f}")

# %% [markdown]
# Sixty epochs on 160 patients are too many: the predicted variance is a third of the squared error. Members agree and
# are wrong together, so that no disagreement shows it. Only held-out patients do. One factor mends the coverage, but
# not the means: intervals of members that stop early are narrower. With 112 test patients a coverage of 0.9 has a
# standard error of 0.03. For classes, use `ee.calibrate.temperature(logits, labels, pool="mixture")` and
# `ee.conformal.sets`.

# %% [markdown]
# ## Save and load

# %%
figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
ee.save(figures / "digits.eqx", run.ensemble)
same = ee.load(figures / "digits.eqx", make)
two = ee.load(figures / "digits.eqx", make, members=[0, 3])  # reads no others
print(same.num_members, "members, and", two.num_members)
print("the same:", bool(jnp.array_equal(same(nines[0]), run.ensemble(nines[0]))))

# %% [markdown]
# The file contains arrays and checksums, no code. A killed `fit` with `checkpoint=`
# [resumes](../saving.md) bit for bit.

# %% fold="Code of the figure" alt="Loss curves, disagreement on nines and others, intervals of patients"
panels = [["curves", "nines"], ["patients", "patients"]]
figure, axes = plt.subplot_mosaic(panels, figsize=(6.4, 5.6), layout="constrained")
ax = axes["curves"]
stride = int(run.history.validation_step[0])
ee.plot.training_curves(run, stride=stride, color="0.5", ax=ax)
ee.plot.training_curves(run, curve="validation", color="C0", ax=ax)
ax.get_legend().remove()
ax.text(1200, 0.2, "validation", color="C0")
ax.text(300, 0.01, "training", color="0.4")
ax.set(yscale="log", ylabel="loss, nats", title="Sixteen members")

ax = axes["nines"]
bins = np.geomspace(1e-5, 1, 16)
filled = dict(color="0.75", label="other digits")
outline = dict(color="black", histtype="step", linewidth=2, label="nines")
for values, style in ((known.epistemic, filled), (novel.epistemic, outline)):
    shares = np.full(len(values), 100 / len(values))
    ax.hist(np.clip(values, 1e-5, 1), bins, weights=shares, **style)
ax.set(xscale="log", xlabel="disagreement, nats", ylabel="images, %", ylim=(0, 55))
ax.set(title="A digit left out")
ax.legend(loc="upper left", frameon=False)

ax = axes["patients"]
stopped = runs["stopped early"]
centre = ee.combine.gaussian(*stopped.predict(x[test])).mean[None]
bands = {0.9: intervals(stopped)["conformal"]}
ee.plot.prediction_bands(centre, intervals=bands, targets=y[test], color="C0", ax=ax)
ax.set(title="Conformal 90 % intervals", ylabel="progression, standardised")
ax.set(xlabel="112 test patients, by prediction", ylim=(-2.8, 5.2))
ax.legend(loc="upper left", ncols=2, frameon=False)
figure.savefig(figures / "quickstart.png", dpi=200)

# %% [markdown]
# ## What to do next
#
# | you want to | read |
# |---|---|
# | see every part of the library in small programs | [All of eqx_ensemble](all.md) |
# | compare this with hand-written JAX, or keep your own training loop | [Own loops](loops.md) |
# | choose the number of members, the method, the score | [Choosing](choosing.md) |
# | avoid mistakes that raise no error | [Silent mistakes](mistakes.md) |
# | tune learning rates and other hyperparameters | [Hyperparameter search](../examples/population.md) |
# | find a short program for a common task | [Recipes](../recipes/index.md) |
# | see whole studies, with limits | [Examples](../examples/index.md) |
# | use multi-GPU machines or several hosts | [Several devices and processes](../scale.md) |
# | know when another library is the better choice | [Comparison with alternatives](compared.md) |
