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
# # Unseen classes: out-of-distribution (OOD) detection with an ensemble
#
# Thirty-two small networks are trained on handwritten digits without the eights and nines. Their disagreement detects
# the unseen digits better than chance and better than votes, but no score detects all of them: where all members agree
# on something wrong, no threshold helps.
#
# `python notebooks/unseen_classes.py` prints the tables and draws the figures, in about a minute on two cores. It needs
# `pip install -e '.[examples]'` and no network.

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
from jaxtyping import Array, Bool, Float, Int, Key
from sklearn.datasets import load_digits

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("UNSEEN_CLASSES_FIGURES", here / "figures"))

# %% [markdown]
# ## Data
#
# Of 1,797 images the eights and nines are set aside: nothing is fitted to them. Of the others 200 are for training
# (with more there would be almost no errors to study), 500 for calibration.

# %%
NUM_MEMBERS, UNSEEN = 32, (8, 9)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)

is_unseen = np.isin(labels, UNSEEN)
x, y, unseen = pixels[~is_unseen], labels[~is_unseen], pixels[is_unseen]
train, held_out, test = ((x[part], y[part]) for part in (slice(0, 200), slice(200, 700), slice(700, None)))
print(
    f"{len(train[0])} images for training, {len(held_out[0])} for calibration, {len(test[0])} for evaluation,", end=" "
)
print(f"and {len(unseen)} of digits that no member has seen")

# %% [markdown]
# ## Train
#
# Members differ in their initial weights and row orders: a deep ensemble. They are trained until they are
# overconfident.

# %%
key = jax.random.key(0)


def make(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(in_size=64, out_size=8, width_size=64, depth=2, key=key)


def cross_entropy(
    model: eqx.nn.MLP, batch: tuple[Float[Array, "batch pixels"], Int[Array, " batch"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


optimiser = optax.adamw(2e-3)
run = ee.fit(ee.build(make, NUM_MEMBERS, key=key), cross_entropy, optimiser, train, epochs=200, batch_size=25, key=key)
assert (run.status == ee.train.Status.OK).all()

# %% [markdown]
# ## Two kinds of uncertainty
#
# The entropy of the mixture, *total*, has two parts, in nats: *aleatoric*, the members' mean entropy, and *epistemic*,
# their disagreement. `predict` combines batch by batch, so that all logits need not be in memory at once.


# %%
def decompose(x: np.ndarray) -> ee.uncertainty.Decomposition:
    return ee.predict(run.ensemble, x, combine=ee.uncertainty.decompose_entropy)


known, novel = decompose(test[0]), decompose(unseen)

# %%
logits, logits_unseen = ee.predict(run.ensemble, test[0]), ee.predict(run.ensemble, unseen)

at_once = ee.uncertainty.decompose_entropy(logits)
assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(known, at_once, strict=True))

print(f"\n{'MEAN ENTROPY, nats':28}{'total':>10}{'aleatoric':>12}{'epistemic':>12}")
for name, parts in (("  digits 0 to 7", known), ("  eights and nines", novel)):
    print(f"{name:28}{jnp.mean(parts.total):10.3f}{jnp.mean(parts.aleatoric):12.3f}{jnp.mean(parts.epistemic):12.3f}")

# %% [markdown]
# Both parts are larger for the unseen digits. They describe these members, not the data: an image that is unlike all
# training data is not "noisy", but much of its entropy is called aleatoric.

# %% [markdown]
# ## Which score detects the unseen digits?
#
# - *AUROC*: the probability that an unseen image scores higher than a seen one; 0.5 is guessing.
# - *AUPR*: the area under precision and recall with the unseen as positives; guessing gives their share.
# - *FPR95*: the share of seen images rejected at the threshold which detects 95 % of the unseen; lower is better.
#
# The standard error is over images, by the Bayesian bootstrap.


# %%
of_entropy = ee.uncertainty.decompose_entropy
measures = {
    "least confidence": ee.uncertainty.least_confidence,
    "entropy, total": lambda logits: of_entropy(logits).total,
    "entropy, aleatoric part": lambda logits: of_entropy(logits).aleatoric,
    "entropy, epistemic part": lambda logits: of_entropy(logits).epistemic,
    "share of other votes": ee.uncertainty.variation_ratio,
    "energy of the logits": ee.uncertainty.free_energy,
}

everything = jnp.concatenate([logits, logits_unseen], axis=1)
positive = jnp.arange(everything.shape[1]) >= len(test[0])
weightings = ee.resample.bayesian_weights(len(positive), 200, key=key)


def standard_error(score: Float[Array, " batch"], positive: Bool[Array, " batch"]) -> float:
    """The standard error of the area under the ROC curve, over images."""
    return float(jnp.std(jax.vmap(lambda w: ee.scores.auroc(score, positive, row_weights=w))(weightings)))


by_score = {}
for name, measure in measures.items():
    score = measure(everything)
    rankings = (f(score, positive) for f in (ee.scores.auroc, ee.scores.aupr, ee.scores.fpr_at_tpr))
    by_score[name] = [*map(float, rankings), standard_error(score, positive)]

# %% [markdown]
# ## How many members are needed?
#
# Thirty-two members are also sixteen pairs, eight groups of four or four of eight: the mean over groups, and the
# standard deviation over training runs.

# %%
SIZES = (1, 2, 4, 8, 32)


names = ("entropy, total", "entropy, epistemic part", "energy of the logits")


def of_groups(size: int) -> Float[np.ndarray, "groups scores"]:
    """The areas under the ROC curve of every group of this many members."""
    groups = jnp.reshape(everything, (-1, size, *everything.shape[1:]))
    scores = jax.vmap(lambda group: jnp.stack([measures[name](group) for name in names]))(groups)
    of_score = jax.vmap(lambda score: ee.scores.auroc(score, positive))
    return np.array(jax.vmap(of_score)(scores))


areas = {size: of_groups(size) for size in SIZES}
areas[1][:, 1] = np.nan  # for one member the epistemic part is zero for every image

print(f"\n{'AUROC, by number of members':28}" + "".join(f"{size:>13}" for size in SIZES[:-1]) + f"{SIZES[-1]:>7}")
for i, name in enumerate(names):
    shown = [f"{np.mean(areas[size][:, i]):.3f}, {np.std(areas[size][:, i]):.3f}" for size in SIZES[:-1]]
    shown = ["" if "nan" in cell else cell for cell in shown]
    print(f"  {name:26}" + "".join(f"{cell:>13}" for cell in shown) + f"{areas[32][0, i]:>7.3f}")

# %% [markdown]
# More members make the scores less variable rather than much better: a group of eight is, on average, within 0.003 of
# all.

# %% [markdown]
# ## Selective prediction
#
# The images of highest uncertainty are rejected. AURC is the mean share of wrong predictions over all coverages; lower
# is better. Every prediction for an eight or a nine is wrong.


# %%
def wrong(logits: Float[Array, "members batch 8"], labels: Int[np.ndarray, " batch"]) -> Float[Array, " batch"]:
    return 1.0 - ee.scores.accuracy(logits, labels, reduction="none")


def selection(logits: Float[Array, "members batch 8"], *, among: str) -> tuple[Array, Array]:
    """The uncertainty by which rows are rejected, and which predictions are wrong."""
    uncertainty = of_entropy(logits).total
    is_wrong = jnp.concatenate([wrong(logits[:, : len(test[0])], test[1]), jnp.ones(len(unseen))])
    rows = slice(None) if among == "all images" else slice(len(test[0]))
    return uncertainty[rows], is_wrong[rows]


def areas_of(among: str) -> tuple[Float[Array, " members"], Float[Array, ""]]:
    """The areas under the risk-coverage curves of each member alone, and of all together."""
    area = lambda logits: ee.scores.aurc(*selection(logits, among=among))
    return jax.vmap(lambda member: area(member[None]))(everything), area(everything)


selective = {among: areas_of(among) for among in ("digits 0 to 7", "all images")}
curve = ee.scores.risk_coverage(*selection(everything, among="digits 0 to 7"))
at_90 = float(np.interp(0.9, curve.coverage, curve.risk))

# %% [markdown]
# ## Are the probabilities calibrated?
#
# *Temperature scaling* divides the logits by one number, fitted on the calibration images: for each member before their
# probabilities are averaged, or for the mixture.

# %%
logits_held_out = ee.predict(run.ensemble, held_out[0])
before = ee.calibrate.temperature(logits_held_out, held_out[1], pool="members")
after = ee.calibrate.temperature(logits_held_out, held_out[1], pool="mixture")

print(
    f"\ntemperatures of the members: {jnp.min(before.temperature):.2f} to {jnp.max(before.temperature):.2f};", end=" "
)
print(f"of the mixture: {after.temperature[0]:.2f}")

variants = {
    "not calibrated": lambda logits: logits,
    "every member, then combined": before,
    "combined, then the mixture": after,
}


def evaluate(name: str) -> tuple[float, ...]:
    """Accuracy, negative log-likelihood, calibration error, confidence in unseen digits, and AUROC by entropy."""
    of_all = variants[name](everything)
    calibrated, calibrated_unseen = of_all[:, : len(test[0])], of_all[:, len(test[0]) :]
    return (
        float(ee.scores.accuracy(calibrated, test[1])),
        float(ee.scores.nll(calibrated, test[1])),
        float(ee.scores.ece(calibrated, test[1])),
        float(1 - jnp.mean(ee.uncertainty.least_confidence(calibrated_unseen))),
        float(ee.scores.auroc(of_entropy(of_all).total, positive)),
    )


per_variant = {name: evaluate(name) for name in variants}
nll = lambda name: ee.scores.nll(variants[name](logits), test[1], reduction="none")
gains = {name: ee.scores.bootstrap(nll(name) - nll("not calibrated"), key=key) for name in (*variants,)[1:]}
mean_member = [
    float(jnp.mean(ee.scores.per_member(score, logits, test[1])))
    for score in (ee.scores.accuracy, ee.scores.nll, ee.scores.ece)
]
mean_member += [
    float(1 - jnp.mean(jax.vmap(lambda member: ee.uncertainty.least_confidence(member[None]))(logits_unseen))),
    float(np.mean(areas[1][:, 0])),
]

# %% [markdown]
# ## Other digits left out
#
# Five pairs at once: forty members, eight for each pair of digits left out. Each has its own rows in the shared data,
# so that all forty train as one program.

# %%
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
first, rest = (pixels[:700], labels[:700]), (pixels[700:], labels[700:])

without = [np.flatnonzero(~np.isin(first[1], pair))[:200] for pair in PAIRS]
rows = np.repeat(np.stack(without), 8, axis=0)  # (40, 200)
ten_outputs = ee.build(lambda key: eqx.nn.MLP(64, 10, 64, 2, key=key), len(rows), key=key)
pairs_run = ee.fit(ten_outputs, cross_entropy, optimiser, first, rows=rows, epochs=200, batch_size=25, key=key)

logits_by_pair = jnp.reshape(ee.predict(pairs_run.ensemble, rest[0]), (len(PAIRS), 8, -1, 10))
by_pair = {}
for pair, logits_of_pair in zip(PAIRS, logits_by_pair, strict=True):
    parts, left_out = of_entropy(logits_of_pair), np.isin(rest[1], pair)
    of_pair = (parts.total, parts.aleatoric, parts.epistemic, ee.uncertainty.free_energy(logits_of_pair))
    by_pair[pair] = [float(ee.scores.auroc(measure, left_out)) for measure in of_pair]

# %% [markdown]
# ## The result

# %%
print(f"\n{'UNSEEN DIGITS, by score':32}{'AUROC':>8}{'error':>8}{'AUPR':>8}{'FPR95':>8}")
for name, (auroc, aupr, fpr95, error) in by_score.items():
    print(f"  {name:30}{auroc:8.3f}{error:8.3f}{aupr:8.3f}{fpr95:8.3f}")
print(f"  {'guessing':30}{0.5:8.3f}{'':8}{np.mean(positive):8.3f}{0.95:8.3f}")

print(f"\n{'AUROC, by pair left out':32}{'total':>10}{'aleatoric':>12}{'epistemic':>12}{'energy':>9}")
for (a, b), (total, aleatoric, epistemic, energy) in by_pair.items():
    print(f"  {f'{a} and {b}':30}{total:10.3f}{aleatoric:12.3f}{epistemic:12.3f}{energy:9.3f}")

print(f"\n{'SELECTION, AURC':32}{'mean member':>12}{'their range':>18}{'ensemble':>10}")
for among, (alone, together) in selective.items():
    print(f"  {among:30}{np.mean(alone):12.4f}{f'{np.min(alone):.4f} to {np.max(alone):.4f}':>18}{together:10.4f}")
print(f"  wrong among digits 0 to 7: {curve.risk[-1]:.4f} of all, {at_90:.4f} of the most confident 90 %")

heads = ("accuracy", "NLL", "ECE", "unseen at", "AUROC")
print(f"\n{'CALIBRATION':32}" + "".join(f"{head:>10}" for head in heads))
for name, values in ({"mean member, not calibrated": mean_member} | per_variant).items():
    print(f"  {name:30}" + "".join(f"{value:10.4f}" for value in values))

for name, gain in gains.items():
    print(f"  NLL of '{name}' less 'not calibrated': {gain.estimate:.4f} +- {gain.standard_error:.4f}")

# %% [markdown]
# - *Which score.* The epistemic part is a little better than the total entropy, whichever pair is left out. The energy
#   of the logits is best for eights and nines and worst for two other pairs: one left-out pair does not decide.
# - *Votes.* On more than 5 % of the unseen images all members vote alike: at an FPR95 of 1, every seen image is
#   rejected with them.
# - *Selection.* The ensemble makes as many mistakes as its members, but ranks them better.
# - *Calibration.* Members are overconfident, their mixture less so. One temperature for the mixture has the best
#   likelihood, by no more than its standard error.
#
# Limits. For eights and nines the mean confidence of the calibrated mixture is still three quarters: calibration on
# seen classes does not calibrate predictions for others. Digits are an easy case: neither the numbers nor the ranking
# of the scores can be assumed for other data.

# %% [markdown]
# ## The figures
#
# The histograms have logarithmic heights: a third or more of the unseen digits are in the first bar, with almost no
# uncertainty.


# %% alt="Left: epistemic uncertainty of seen and of unseen digits. Right: AUROC by number of members"
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
bins = np.linspace(0, max(np.max(known.epistemic), np.max(novel.epistemic)), 21)
filled = {"color": "0.8", "label": "digits 0 to 7"}
outline = {"color": "black", "histtype": "step", "linewidth": 2, "label": "eights and nines"}
for values, style in ((known.epistemic, filled), (novel.epistemic, outline)):
    left.hist(values, bins, weights=np.full(len(values), 100 / len(values)), **style)
left.set(title="Disagreement of 32 members", xlabel="epistemic part of the entropy, nats", yscale="log")
left.set_ylabel("rows, %")
left.legend()

for i, (name, marker) in enumerate(zip(names, "os^", strict=True)):
    middle = np.array([np.mean(areas[size][:, i]) for size in SIZES])
    deviation = np.array([np.std(areas[size][:, i]) for size in SIZES])
    deviation[-1] = np.nan  # of one group
    right.errorbar(np.array(SIZES) * 1.04 ** (i - 1), middle, deviation, marker=marker, capsize=3, label=name)
right.set_xscale("log", base=2)
right.set(title="More members: less variable", xlabel="members", xticks=SIZES, xticklabels=SIZES, ylabel="AUROC")
right.legend()

figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "unseen_classes.png", dpi=150)

# %% alt="Risk-coverage curves, and reliability diagrams of the mixture before and after temperature scaling"
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for among, line in (("all images", "-"), ("digits 0 to 7", "--")):
    for label, chosen, width in (
        (f"ensemble, {among}", everything, 2.0),
        (f"one member, {among}", everything[:1], 0.7),
    ):
        coverage, risk = ee.scores.risk_coverage(*selection(chosen, among=among))
        axes[0].plot(coverage, risk, label=label, linestyle=line, linewidth=width, color="black")
        axes[0].hlines(risk[-1], 0, 1, linestyle=":", linewidth=0.8, color="black")  # rejecting at random
axes[0].set(title="Rejecting the least certain", xlabel="share of images that are predicted", xlim=(0, 1))
axes[0].set_ylabel("share of wrong predictions")
axes[0].legend()

for ax, name, title in (
    (axes[1], "not calibrated", "The mixture as it is"),
    (axes[2], "combined, then the mixture", "The mixture at its temperature"),
):
    ee.plot.reliability_diagram(variants[name](logits), test[1], num_bins=10, ax=ax)
    ax.set_title(title)

figure.savefig(figures / "unseen_classes-2.png", dpi=150)
print(f"\nfigure: {figures / 'unseen_classes.png'}")
