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
# # Quickstart: sixteen models for little more than the price of one
#
# Sixteen small networks are trained on handwritten digits as **one** stacked Module; where they disagree, they
# recognise a digit that is missing from the training data. A second ensemble predicts a mean and a variance from a
# table of patients.
#
# You write the model, the loss and the optimiser for *one* member. `python notebooks/quickstart.py` prints the table
# and draws the figure, in less than a minute on two cores; nothing changes on a GPU. It needs `pip install
# -e '.[examples]'` and no network.

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
from jaxtyping import Array, ArrayLike, Float, Int, Key
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import roc_auc_score

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("QUICKSTART_FIGURES", here / "figures"))

# %% [markdown]
# ## Digits, and a left-out digit
#
# 1,797 images of 8 x 8 pixels. No member is trained on a nine. The other digits are split once: for training, for early
# stopping, and for the table at the end.


# %%
def split(x, y):
    """The rows in a fixed random order, as a training, a validation and a test set."""
    rows = np.random.default_rng(0).permutation(len(x))
    parts = np.split(rows, [int(0.60 * len(x)), int(0.75 * len(x))])
    return [(jnp.asarray(x[part]), jnp.asarray(y[part])) for part in parts]


digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
seen = digits.target != 9

digits_train, digits_validation, (images, labels) = split(pixels[seen], digits.target[seen])
nines = jnp.asarray(pixels[~seen])

print(f"{len(digits_train[0])} images for training, {len(images)} for evaluation", end=", ")
print(f"{len(nines)} nines left out")

# %% [markdown]
# ### Build
#
# `make` builds one member from one key. `ee.build` maps it over keys: an array of shape `(64, 64)` in one `eqx.nn.MLP`
# has shape `(16, 64, 64)` in the ensemble.


# %%
def make(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(in_size=64, out_size=9, width_size=64, depth=2, key=key)


build_key, fit_key = jax.random.split(jax.random.key(0))
ensemble = ee.build(make, 16, key=build_key)

print("second layer of a member:", ensemble[0].layers[1].weight.shape)
print("of the ensemble:", ensemble.stacked.layers[1].weight.shape)

# %% [markdown]
# ### Call: `Batch` and `Each`
#
# A member is a function of *one* image, and so is the ensemble. Other inputs are marked: sixteen images could be a
# batch, or one image for each of the sixteen members.

# %%
one_image, sixteen_images = images[0], images[:16]

calls = {
    "ensemble(one_image)": ensemble(one_image),  # every member sees the image
    "ensemble(ee.Batch(sixteen_images))": ensemble(ee.Batch(sixteen_images)),  # every member sees every image
    "ensemble(ee.Each(sixteen_images))": ensemble(ee.Each(sixteen_images)),  # member i sees image i
}
for call, logits in calls.items():
    print(f"{call:36} {logits.shape}")

# %% [markdown]
# ### Train
#
# The loss is that of one member on one batch. There is no `members` axis in it.


# %%
def cross_entropy(
    model: eqx.nn.MLP, batch: tuple[Float[Array, "batch pixels"], Int[Array, " batch"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


# %% [markdown]
# The optimiser, too, is that of one member: `ee.fit` maps it over members. Applied to the stacked gradients,
# `clip_by_global_norm` would compute *one* norm over all sixteen, and a NaN in one of them would spread to all.
#
# With `validation` and `patience` every member stops when *its own* score stops improving, and keeps its best weights.

# %%
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def train(ensemble: ee.Ensemble, key: Key[Array, "..."]) -> ee.Run:
    return ee.fit(
        ensemble,
        cross_entropy,
        optimiser,
        digits_train,
        epochs=80,
        batch_size=32,
        validation=digits_validation,
        patience=10,
        progress=True,
        key=key,
    )


run = train(ensemble, fit_key)

for name, column in run.table().items():
    print(
        f"{name:10}",
        *(f"{value:>8.3g}" if isinstance(value, float) else f"{value:>8}" for value in column[:8].tolist()),
    )

# %% [markdown]
# ### Members are independent
#
# Member 3 trained in the ensemble is member 3 trained alone: its weights, row order and random numbers depend on the
# key and its position. The two differ at most by rounding.

# %%
keys = ee.member_keys(fit_key, 16, purpose="fit")
alone = train(ensemble[[3]], keys[3:4])
print(f"best validation loss of member 3: {run.best_score[3]:.6f} in the ensemble,", end=" ")
print(f"{alone.best_score[0]:.6f} alone")

# %% [markdown]
# An integer index gives an ordinary `eqx.nn.MLP`, to save, serve or inspect; a list or a slice a smaller ensemble.

# %%
member = run.ensemble[3]
print(type(member).__name__, "and", run.ensemble[[3, 5]].num_members, "members")

# %% [markdown]
# ### Predict
#
# `ee.predict` maps over members and rows. `ee.Stacked` is the type of a stacked model: if annotations are checked,
# `members` is one of the shapes of the call.


# %%
def log_probabilities(
    ensemble: ee.Stacked[ee.Ensemble[eqx.nn.MLP], " members"], x: Float[Array, "batch pixels"]
) -> Float[Array, "members batch classes"]:
    return jax.nn.log_softmax(ee.predict(ensemble, x))


of_digits = log_probabilities(run.ensemble, images)
of_nines = log_probabilities(run.ensemble, nines)

assert jnp.allclose(of_digits[3], jax.nn.log_softmax(jax.vmap(member)(images)), atol=1e-4)

# %% [markdown]
# ### Evaluate
#
# A score evaluates the mixture, the mean of the members' probabilities; `scores.per_member` each member alone.

# %%
digit_scores = {
    "accuracy": (ee.scores.accuracy, "higher"),
    "negative log-likelihood": (ee.scores.nll, "lower"),
    "Brier score": (ee.scores.brier, "lower"),
    "calibration error (ECE)": (ee.scores.ece, "lower"),
}
digit_rows = [
    (name, better, ee.scores.per_member(score, of_digits, labels), None, score(of_digits, labels))
    for name, (score, better) in digit_scores.items()
]

# %% [markdown]
# ### The left-out digit
#
# The entropy of the mixture has two parts. The *aleatoric* part is the members' mean entropy: they agree that the image
# is ambiguous. The *epistemic* part is their disagreement. The area under the ROC curve measures how well each
# separates nines from other digits: 0.5 is guessing, 1 is perfect.

# %%
known = ee.uncertainty.decompose_entropy(of_digits)
novel = ee.uncertainty.decompose_entropy(of_nines)


def auroc(known: Float[ArrayLike, " known"], novel: Float[ArrayLike, " novel"]) -> float:
    is_novel = np.repeat([0, 1], [len(known), len(novel)])
    return float(roc_auc_score(is_novel, np.concatenate([known, novel])))


entropy_of_members = zip(ee.uncertainty.entropy(of_digits), ee.uncertainty.entropy(of_nines), strict=True)
auroc_of_members = np.array([auroc(*entropies) for entropies in entropy_of_members])

digit_rows += [
    ("AUROC, by entropy", "higher", auroc_of_members, None, auroc(known.total, novel.total)),
    ("AUROC, by disagreement", "higher", None, None, auroc(known.epistemic, novel.epistemic)),
]

# %% [markdown]
# ## The progression of a disease
#
# 442 patients have ten measurements each, and a score of the progression after a year. All are standardised by the
# *training* patients.

# %%
diabetes = load_diabetes()
(x_train, y_train), (x_validation, y_validation), (x_test, y_test) = split(
    diabetes.data.astype(np.float32), diabetes.target.astype(np.float32)
)


def standardise_x(x: Float[Array, "batch features"]) -> Float[Array, "batch features"]:
    return (x - jnp.mean(x_train, axis=0)) / jnp.std(x_train, axis=0)


centre, scale = jnp.mean(y_train), jnp.std(y_train)


def standardise_y(y: Float[Array, " batch"]) -> Float[Array, " batch"]:
    return (y - centre) / scale


# %% [markdown]
# ### A model with a mean and a variance
#
# The second output becomes a variance by `softplus`, with a floor that keeps the logarithm in the loss finite.


# %%
class GaussianMLP(eqx.Module):
    mlp: eqx.nn.MLP
    floor: float = eqx.field(static=True)

    def __init__(self, in_size: int, *, floor: float = 1e-3, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(in_size, out_size=2, width_size=50, depth=1, key=key)
        self.floor = floor

    def __call__(self, x: Float[Array, " features"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        mean, raw = self.mlp(x)
        return mean, jax.nn.softplus(raw) + self.floor


def gaussian_nll(
    model: GaussianMLP, batch: tuple[Float[Array, "batch features"], Float[Array, " batch"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    mean, variance = jax.vmap(model)(x)
    return ee.scores.nll_gaussian(mean, variance, y)


# %%
build_key, fit_key = jax.random.split(jax.random.key(1))

diabetes_run = ee.fit(
    ee.build(lambda key: GaussianMLP(10, key=key), 16, key=build_key),
    gaussian_nll,
    optax.adam(3e-3),
    (standardise_x(x_train), standardise_y(y_train)),
    epochs=200,
    batch_size=32,
    validation=(standardise_x(x_validation), standardise_y(y_validation)),
    patience=20,
    progress=True,
    key=fit_key,
)

# %% [markdown]
# ### Predict, combine, evaluate
#
# If a member returns a tuple, `ee.predict` returns a tuple, each part with `members` in front. Sixteen Gaussians are
# combined as their *mixture*, or as the *one Gaussian* of the same mean and variance.

# %%
mean, variance = ee.predict(diabetes_run.ensemble, standardise_x(x_test))
mean, variance = mean * scale + centre, variance * scale**2

matched = ee.combine.gaussian(mean, variance)
parts = ee.uncertainty.decompose_variance(mean, variance)
band = ee.uncertainty.gaussian_interval(*matched, level=0.9)
band_of_members = ee.uncertainty.gaussian_interval(mean, variance, level=0.9)

# The mixture's distribution function at the target: 0.05 to 0.95 is its central 90 %.
below = jnp.mean(jax.scipy.stats.norm.cdf(y_test, mean, jnp.sqrt(variance)), axis=0)

diabetes_rows = [
    (
        "root mean squared error",
        "lower",
        ee.scores.per_member(ee.scores.rmse, mean, y_test),
        ee.scores.rmse(mean, y_test),
        ee.scores.rmse(mean, y_test),
    ),
    (
        "negative log-likelihood",
        "lower",
        ee.scores.per_member(ee.scores.nll_gaussian_mixture, mean, variance, y_test),
        ee.scores.nll_gaussian(*matched, y_test),
        ee.scores.nll_gaussian_mixture(mean, variance, y_test),
    ),
    (
        "CRPS",
        "lower",
        ee.scores.per_member(ee.scores.crps_gaussian_mixture, mean, variance, y_test),
        ee.scores.crps_gaussian(*matched, y_test),
        ee.scores.crps_gaussian_mixture(mean, variance, y_test),
    ),
    (
        "coverage of 90 % interval",
        "0.9",
        jax.vmap(ee.scores.coverage, in_axes=(0, 0, None))(*band_of_members, y_test),
        ee.scores.coverage(*band, y_test),
        jnp.mean((below >= 0.05) & (below <= 0.95)),
    ),
]

# %% [markdown]
# ## The result
#
# One row per score: the mean of the members' own values and their range, then the combined predictions. The last column
# counts the members that the mixture beats.


# %%
def distance_to_best(value, better):
    """The distance of a value from the best one, up to a constant."""
    return {"higher": -value, "lower": value, "0.9": abs(value - 0.9)}[better]


def print_row(name, *cells):
    widths = (8, 8, 17, 9, 8, 9)
    line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    print(f"{name:27}{line}".rstrip())


def print_rows(title, rows, *, decimals):
    def show(value):
        return "" if value is None else f"{float(value):.{decimals}f}"

    print_row(title, "better", "mean", "range", "Gaussian", "mixture", "beats")
    for name, better, members, gaussian, mixture in rows:
        alone, span, beaten = "", "", ""
        if members is not None:
            alone, span = show(np.mean(members)), f"{show(np.min(members))} to {show(np.max(members))}"
            beaten = (
                f"{np.sum(distance_to_best(mixture, better) < distance_to_best(members, better))} of {len(members)}"
            )
        print_row(f"  {name}", better, alone, span, show(gaussian), show(mixture), beaten)
    print()


confidence_of_members = jnp.exp(jnp.max(of_digits, axis=-1))
confidence = jnp.exp(jnp.max(ee.combine.mixture(of_digits), axis=-1))

print_rows(f"DIGITS, {len(labels)} test images", digit_rows, decimals=4)
print_rows(f"DIABETES, {len(y_test)} test patients", diabetes_rows, decimals=3)
print(f"Members: accuracy {ee.scores.mean_member_accuracy(of_digits, labels):.1%}", end=", ")
print(f"mean confidence {jnp.mean(confidence_of_members):.1%};", end=" ")
print(f"mixture: accuracy {ee.scores.accuracy(of_digits, labels):.1%}, mean confidence {jnp.mean(confidence):.1%}.")

# %% [markdown]
# It is a theorem that the mixture's log-likelihood and Brier score are no worse than those of the *mean* member. It
# need not beat the *best* one, nor have a lower calibration error: that of the digits became *worse*, because the
# mixture has a higher accuracy and a lower confidence than its members.
#
# The test sets are small: a coverage of 0.9 measured on 111 patients has a standard error of 0.03.

# %% alt="Four panels: learning curves, disagreement on nines, a reliability diagram, intervals of test patients"
LIGHT, TEXT, DARK = "#a3a8ad", "#5c6166", "#16325c"
plt.rcParams |= {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def draw_images(axes, title, images, captions):
    axes[1].set_title(title, loc="center", fontsize=10.5, fontweight="normal")
    for ax, image, caption in zip(axes, images, captions, strict=True):
        ax.imshow(np.reshape(image, (8, 8)), cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, color=LIGHT)
        ax.set_xlabel(caption, labelpad=2)


def draw_reliability(ax, confidence, right, *, detailed, **style):
    """The accuracy of predictions of similar confidence; in detail, with standard errors and numbers of images."""
    edges = np.array([0.5, 0.7, 0.85, 0.95])
    _, bins, counts = np.unique(np.searchsorted(edges, np.ravel(confidence)), return_inverse=True, return_counts=True)
    x, y = (np.bincount(bins, np.ravel(values)) / counts for values in (confidence, right))
    smoothed = (y * counts + 1) / (counts + 2)  # so that the error of a bin without mistakes is not zero
    ax.errorbar(x, y, np.sqrt(smoothed * (1 - smoothed) / counts) if detailed else None, **style)
    for i in range(len(counts) if detailed else 0):
        text = f"{counts[i]} images" if i == 0 else counts[i]
        ax.text(x[i], 0.36, text, color=style["color"], ha="right" if x[i] > 0.95 else "center")


predicted, predicted_of_nines = (np.argmax(ee.combine.mixture(logits), axis=-1) for logits in (of_digits, of_nines))
right_of_members, right = np.argmax(of_digits, axis=-1) == np.asarray(labels), predicted == np.asarray(labels)
order, nines_order = np.argsort(known.epistemic)[::-1], np.argsort(novel.epistemic)[::-1]

figure = plt.figure(figsize=(11.5, 8.5), layout="constrained")
figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.3])
ax = figure.add_subplot(grid[0, 0])
per_epoch = int(run.history.validation_step[0])
ee.plot.training_curves(run, stride=per_epoch, color=TEXT, ax=ax)
ee.plot.training_curves(run, curve="validation", color=DARK, ax=ax)
ax.set(yscale="log", ylabel="loss, nats", title="Sixteen members, one program")

cell = grid[0, 1].subgridspec(3, 4, width_ratios=[4.2, 1, 1, 1])
ax = figure.add_subplot(cell[:, 0])
bins = np.geomspace(1e-5, 1, 21)  # the first bin also counts smaller values
filled = {"color": "0.8", "label": f"{len(images)} other test digits"}
outline = {"color": "black", "histtype": "step", "linewidth": 2, "label": f"{len(nines)} nines"}
for values, style in ((known.epistemic, filled), (novel.epistemic, outline)):
    ax.hist(np.clip(values, 1e-5, 1), bins, weights=np.full(len(values), 100 / len(values)), **style)
ax.set(xscale="log", xlabel="disagreement (mutual information), nats", xlim=(1e-5, 1), ylabel="rows, %")
ax.legend()
ax.set_title(f"Nines, left out: AUROC {auroc(known.epistemic, novel.epistemic):.2f}")
thumbnails = [[figure.add_subplot(cell[i, j]) for j in (1, 2, 3)] for i in range(3)]
top, last, others = nines_order[:3], nines_order[-3:], order[:3]
draw_images(thumbnails[0], "nines, most disagreement", nines[top], [f"as {i}" for i in predicted_of_nines[top]])
draw_images(thumbnails[1], "nines, least disagreement", nines[last], [f"as {i}" for i in predicted_of_nines[last]])
captions = [f"{labels[i]}, as {predicted[i]}" for i in others]
draw_images(thumbnails[2], "others, most disagreement", images[others], captions)

ax = figure.add_subplot(grid[1, 0])
ax.plot([0, 1], [0, 1], color="black", lw=0.8, ls=":")
draw_reliability(ax, confidence_of_members, right_of_members, detailed=False, color=LIGHT, lw=4)
draw_reliability(ax, confidence, right, detailed=True, color=DARK, lw=2, marker="o")
ece_of_members, ece = np.mean(ee.scores.per_member(ee.scores.ece, of_digits, labels)), ee.scores.ece(of_digits, labels)
ax.text(0.69, 0.92, f"mixture,\nECE {ece:.3f}", color=DARK, ha="right")
ax.text(0.72, 0.62, f"members together,\nmean ECE {ece_of_members:.3f}", color=TEXT)
ax.set(xlim=(0.3, 1), ylim=(0.34, 1.04), xlabel="confidence", ylabel="accuracy")
ax.set_title("Averaging makes predictions less confident")

ax = figure.add_subplot(grid[1, 1])
ee.plot.prediction_bands(matched.mean[None], intervals={0.9: band}, targets=y_test, color=DARK, ax=ax)
inside = int(np.sum((band.lower <= y_test) & (y_test <= band.upper)))
ax.set(xlabel="test patients, in the order of their prediction", ylabel="disease progression")
ax.set_title(f"Diabetes: the band covers {inside} of {len(y_test)} test patients")

figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "quickstart.png", dpi=120)
print(f"figure: {figures / 'quickstart.png'}")
