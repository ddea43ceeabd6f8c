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
# # Unseen classes: uncertainty on classes that were left out of training
#
# We train thirty-two small networks on handwritten digits without the eights and the nines, and evaluate them on all
# ten digits. There are four questions: what are the parts of the uncertainty, how well does it detect the eights and
# nines, how much does it help to reject uncertain images, and are the probabilities calibrated?
#
# This page is a notebook and a program: `python notebooks/unseen_classes.py` prints the tables and writes the figure.
# It needs `pip install 'eqx_ensemble[examples]'`, no network, and about a minute on two cores.

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
# Scikit-learn ships 1,797 images of 8 x 8 pixels. The eights and nines are set aside: nothing is trained, calibrated
# or selected on them. Of the other images 200 are for training, 500 for calibration, and the rest for the evaluation.
# The training set is small because with more images there would be almost no errors to study.

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
# Model and loss are those of one member. Members differ only in their initial weights and in the order of their rows:
# a deep ensemble. They are trained until they are overconfident, as large networks usually are; members that stop
# early gain less from calibration.

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
# The entropy of the mixture, *total*, has two parts. The *aleatoric* part is the members' mean entropy: the image is
# ambiguous to each of them. The *epistemic* part is due to their disagreement, the mutual information between label and
# member: each may be confident, but in a different label. All three are in nats; the total is at most log 8 = 2.08.
#
# For many rows and members, all logits need not be in memory at once. `predict` combines the members' logits batch by
# batch (and for some members at a time, with a budget `memory=`), and keeps only the sums.


# %%
def decompose(x: np.ndarray) -> ee.uncertainty.Decomposition:
    return ee.predict(run.ensemble, x, combine=ee.uncertainty.decompose_entropy)


known, novel = decompose(test[0]), decompose(unseen)

# %% [markdown]
# The result is the same as from the logits of all members, which this page also needs. It is also the same if one half
# of the members is processed after the other, or on another machine: partial results can be merged.

# %%
logits, logits_unseen = ee.predict(run.ensemble, test[0]), ee.predict(run.ensemble, unseen)

entropies = ee.combine.streaming(ee.uncertainty.decompose_entropy)
halves = [entropies.update(None, ee.predict(run.ensemble[half], test[0])) for half in (slice(0, 16), slice(16, 32))]
for other in (ee.uncertainty.decompose_entropy(logits), entropies.finish(entropies.merge(*halves))):
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(known, other, strict=True))

print(f"\n{'MEAN ENTROPY, nats':28}{'total':>10}{'aleatoric':>12}{'epistemic':>12}")
for name, parts in (("  digits 0 to 7", known), ("  eights and nines", novel)):
    print(f"{name:28}{jnp.mean(parts.total):10.3f}{jnp.mean(parts.aleatoric):12.3f}{jnp.mean(parts.epistemic):12.3f}")

# %% [markdown]
# Both parts are larger for the unseen digits. The names should not be taken literally: an image that is unlike all
# training data is not "noisy", but much of its entropy is called aleatoric. The parts describe these members, not the
# data.

# %% [markdown]
# ## Which score detects the unseen digits?
#
# Any measure of uncertainty ranks images. Three numbers measure how well a ranking separates unseen from seen images:
#
# - *AUROC*, the probability that an unseen image scores higher than a seen one; 0.5 is guessing.
# - *AUPR*, the area under precision and recall with the unseen as positives; guessing gives their share of the images.
# - *FPR95*, the share of the seen images that is rejected at the threshold which detects 95 % of the unseen; lower is
#   better. (Papers differ in which of the two kinds is the positive one. Here it is the unseen.)
#
# The standard error comes from the Bayesian bootstrap, with two hundred weightings of the images. It measures
# variation over images, not over training runs or left-out digits.


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
# One member alone has a confidence, an entropy and an energy, but no disagreement. Thirty-two members are also sixteen
# pairs, eight groups of four or four of eight: disjoint groups, trained independently, whose standard deviation
# measures the variation over training runs.

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

print(f"\n{'AUROC, by number of members':32}" + "".join(f"{size:>16}" for size in SIZES))
for i, name in enumerate(names):
    shown = [f"{np.mean(areas[size][:, i]):.3f} +- {np.std(areas[size][:, i]):.3f}" for size in SIZES[:-1]]
    shown = ["" if "nan" in cell else cell for cell in shown]
    print(f"  {name:30}" + "".join(f"{cell:>16}" for cell in shown) + f"{areas[32][0, i]:>16.3f}")

# %% [markdown]
# When this page was written, more members made the scores less variable rather than much better. The mean area rises
# by less than one hundredth from one member to thirty-two. The standard deviation over training runs, which one run
# alone does not show, is about halved by eight members for the total entropy, and more than halved for the energy. A
# group of eight is, on average, within 0.003 of all thirty-two.

# %% [markdown]
# ## Selective prediction
#
# *Selective prediction* rejects the images of highest uncertainty and predicts the rest. The risk-coverage curve gives
# the share of wrong predictions among those that are made. The area under it, AURC, is the mean of that share over all
# coverages; lower is better. We compute it twice: for the digits 0 to 7, and for all images, where every prediction
# for an eight or a nine is wrong. The risk of predicting *all* images is then at least the share of eights and nines.


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
# Predictions with a confidence of 90 % should be correct nine times in ten. *Temperature scaling* divides the logits by
# one number, fitted on the 500 calibration images. It can be applied in two different ways: to each member before their
# probabilities are averaged, or to the mixture. Averaging makes probabilities less extreme, so that a mixture of
# calibrated members tends to be underconfident.

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
# Eights and nines are one choice. Here are five at once: forty members, eight for each pair of digits left out. Each
# member has its own rows in the shared data, so that all forty train as one program. They have ten outputs; a member
# only learns that the outputs of its two left-out digits are small.

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
# # The result

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
# ## Conclusions
#
# When this page was written, the tables showed the following.
#
# - *Which score.* The epistemic part detects the unseen digits a little better than the total entropy, whichever pair
#   is left out. The energy, which depends on the size of the logits and not on probabilities, is best for eights and
#   nines and worst for two other pairs. One left-out pair does not decide which score is best.
# - *Votes.* The share of other votes is a poor score: on more than 5 % of the unseen images all members vote alike.
#   This is its lowest value, so that every seen image is rejected with them: an FPR95 of 1.
# - *Selection.* The ensemble makes as many mistakes as its members, but its uncertainty ranks them better: it has a
#   smaller AURC than the mean member. On the most confident 90 % of the digits it makes about a quarter of the
#   mistakes.
# - *Calibration.* Members are overconfident. So is their mixture, but less: its temperature is lower. One temperature
#   for the mixture gives the best likelihood, but the gain is no larger than its standard error: the test set is too
#   small to prove it. The calibration errors (ECE, 15 bins) differ little, and with 17 wrong predictions among 743 they
#   are themselves uncertain by about half a per cent. With the ten bins of the figure, the order of the two mixtures is
#   reversed.
#
# Limits. Temperatures are fitted to seen digits, and calibrate predictions for seen digits. For eights and nines the
# mean confidence of the calibrated mixture is still three quarters, and every prediction is wrong: calibration on
# in-distribution data does not calibrate predictions out of distribution. Nor is an AUROC of 0.9 enough for a reliable
# filter: the threshold that detects 95 % of the unseen images rejects a third or more of the others. And small images
# of digits are an easy case: neither the numbers nor the ranking of the scores can be assumed for other data.

# %% [markdown]
# # The figure
#
# The histograms have logarithmic heights: most of the seen digits are in the first bar, with almost no uncertainty,
# and so are a third or more of the unseen ones. No threshold on these scores can detect those images. In the
# reliability diagrams nearly all images are in the last bar; bars of a few images mean little.


# %%
figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
options = {"labels": ("digits 0 to 7", "eights and nines"), "unit": "nats"}
for ax, part, title in zip(
    axes[0],
    ("aleatoric", "epistemic"),
    ("Aleatoric: the members' mean entropy", "Epistemic: their disagreement"),
    strict=False,
):
    ee.plot.uncertainty_histogram(getattr(known, part), getattr(novel, part), ax=ax, **options)
    ax.set(title=title, xlabel=f"{part} part of the entropy, nats", yscale="log")

steps = axes[0, 2]
for i, (name, marker) in enumerate(zip(names, "os^", strict=True)):
    middle = np.array([np.mean(areas[size][:, i]) for size in SIZES])
    deviation = np.array([np.std(areas[size][:, i]) for size in SIZES])
    deviation[-1] = np.nan  # of one group
    steps.errorbar(np.array(SIZES) * 1.04 ** (i - 1), middle, deviation, marker=marker, capsize=3, label=name)
steps.set_xscale("log", base=2)
steps.set(title="More members: less variable", xlabel="members", xticks=SIZES, xticklabels=SIZES, ylabel="AUROC")
steps.legend()

selective_axes = axes[1, 0]
styles = {"color": "black", "marker": "None"}
for among, line in (("all images", "-"), ("digits 0 to 7", "--")):
    for label, chosen, width in (
        (f"ensemble, {among}", everything, 2.0),
        (f"one member, {among}", everything[:1], 0.7),
    ):
        points = ee.scores.risk_coverage(*selection(chosen, among=among))
        ee.plot.risk_coverage(*points, ax=selective_axes, label=label, linestyle=line, linewidth=width, **styles)
selective_axes.set(title="Rejecting the least certain", ylabel="share of wrong predictions")

for ax, name, title in (
    (axes[1, 1], "not calibrated", "The mixture as it is"),
    (axes[1, 2], "combined, then the mixture", "The mixture at its temperature"),
):
    ee.plot.reliability_diagram(variants[name](logits), test[1], num_bins=10, ax=ax)
    ax.set_title(title)

figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "unseen_classes.png", dpi=150)
print(f"\nfigure: {figures / 'unseen_classes.png'}")
