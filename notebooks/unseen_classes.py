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
# # Unseen classes: out-of-distribution (OOD) detection with an ensemble
#
# Thirty-two small networks, trained on handwritten digits without the eights and nines, detect these by their
# disagreement: better than by chance or by votes, but not all of them. Where all members agree on something wrong, no
# threshold helps.

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
from jaxtyping import Array, Bool, Float, Int, Key
from sklearn.datasets import load_digits

import eqx_ensemble as ee

# %% [markdown]
# ## Data
#
# Nothing is fitted to the eights and nines. 200 other images are for training: with more there would be almost no
# errors to study.

# %%
NUM_MEMBERS, UNSEEN = 32, (8, 9)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)

is_unseen = np.isin(labels, UNSEEN)
x, y, unseen = pixels[~is_unseen], labels[~is_unseen], pixels[is_unseen]
train, test = (x[:200], y[:200]), (x[200:], y[200:])
print(f"{len(train[0])} images for training, {len(test[0])} for evaluation, {len(unseen)} of unseen digits")

# %% [markdown]
# ## Train
#
# A deep ensemble: members differ in their initial weights and row orders.

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

# %% [markdown]
# ## Two kinds of uncertainty
#
# The entropy of the mixture, *total*, has two parts, in nats: *aleatoric*, the members' mean entropy, and *epistemic*,
# their disagreement.

# %%
of_entropy = ee.uncertainty.decompose_entropy
logits, logits_unseen = run.predict(test[0]), run.predict(unseen)
known, novel = of_entropy(logits), of_entropy(logits_unseen)
print(f"\n{'MEAN ENTROPY, nats':28}{'total':>10}{'aleatoric':>12}{'epistemic':>12}")
for name, parts in (("  digits 0 to 7", known), ("  eights and nines", novel)):
    print(f"{name:28}{jnp.mean(parts.total):10.3f}{jnp.mean(parts.aleatoric):12.3f}{jnp.mean(parts.epistemic):12.3f}")

# %% [markdown]
# Both parts are larger for the unseen digits. They describe these members, not the data: an image that is unlike all
# training data is not "noisy", but much of its entropy is called aleatoric.
#
# ## Which score detects the unseen digits?
#
# - *AUROC*: the probability that an unseen image scores higher than a seen one; 0.5 is guessing.
# - *AUPR*: the area under precision and recall with the unseen as positives; guessing gives their share.
# - *FPR95*: the share of seen images rejected at the threshold which detects 95 % of the unseen; lower is better.


# %%
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

print(f"\n{'UNSEEN DIGITS, by score':32}{'AUROC':>8}{'error':>8}{'AUPR':>8}{'FPR95':>8}")
for name, (auroc, aupr, fpr95, error) in by_score.items():
    print(f"  {name:30}{auroc:8.3f}{error:8.3f}{aupr:8.3f}{fpr95:8.3f}")
print(f"  {'guessing':30}{0.5:8.3f}{'':8}{np.mean(positive):8.3f}{0.95:8.3f}")

# %% [markdown]
# ## How many members are needed?
#
# Thirty-two members are also sixteen pairs, eight groups of four or four of eight: mean and standard deviation over
# groups.

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
# More members make the scores less variable rather than much better: eight are, on average, within 0.003 of all.
#
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
print(f"\n{'SELECTION, AURC':32}{'mean member':>12}{'their range':>18}{'ensemble':>10}")
for among, (alone, together) in selective.items():
    print(f"  {among:30}{np.mean(alone):12.4f}{f'{np.min(alone):.4f} to {np.max(alone):.4f}':>18}{together:10.4f}")

# %% [markdown]
# ## Other digits left out
#
# Eight members for each of five pairs: each has its own rows in the shared data, and all forty train as one program.

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

print(f"\n{'AUROC, by pair left out':32}{'total':>10}{'aleatoric':>12}{'epistemic':>12}{'energy':>9}")
for (a, b), (total, aleatoric, epistemic, energy) in by_pair.items():
    print(f"  {f'{a} and {b}':30}{total:10.3f}{aleatoric:12.3f}{epistemic:12.3f}{energy:9.3f}")


# %% [markdown]
# ## What the scores detect
#
# - *Which score.* The epistemic part is a little better than the total entropy, whichever pair is left out. The energy
#   of the logits is best for eights and nines, and worst for 2 and 3 and for 4 and 5: one pair does not decide.
# - *Votes.* All members vote alike on more than 5 % of the unseen images: an FPR95 of 1.
# - *Selection.* The ensemble makes about as many mistakes as its members, but ranks them better.
# - *What is left.* Four in ten of the unseen digits are in the first bar of the histogram, with almost no uncertainty.
#
# Limits. Digits are an easy case: neither the numbers nor the ranking of the scores can be assumed for other data.

# %% fold="Code of the figure" alt="Epistemic uncertainty, AUROC by members, and risk by coverage"
panels = [["histogram", "sizes"], ["risk", "risk"]]
figure, axes = plt.subplot_mosaic(panels, figsize=(6.4, 6.2), layout="constrained")
ax = axes["histogram"]
bins = np.linspace(0, max(np.max(known.epistemic), np.max(novel.epistemic)), 21)
filled = {"color": "0.8", "label": "digits 0 to 7"}
outline = {"color": "black", "histtype": "step", "linewidth": 2, "label": "eights and nines"}
for values, style in ((known.epistemic, filled), (novel.epistemic, outline)):
    ax.hist(values, bins, weights=np.full(len(values), 100 / len(values)), **style)
ax.set(title="Disagreement", xlabel="epistemic entropy, nats", ylabel="images, %", yscale="log")
ax.legend(frameon=False)

ax = axes["sizes"]
for i, (name, marker) in enumerate(zip(names, "os^", strict=True)):
    middle = np.array([np.mean(areas[size][:, i]) for size in SIZES])
    deviation = np.array([np.std(areas[size][:, i]) for size in SIZES])
    deviation[-1] = np.nan  # of one group
    label = name.replace("entropy, ", "").replace(" of the logits", "")
    ax.errorbar(np.array(SIZES) * 1.04 ** (i - 1), middle, deviation, marker=marker, capsize=3, label=label)
ax.set_xscale("log", base=2)
ax.set(title="More members", xlabel="members", xticks=SIZES, xticklabels=SIZES, ylabel="AUROC", ylim=(0.84, 0.99))
ax.legend(frameon=False, loc="upper right")

ax = axes["risk"]
for among, line in (("all images", "-"), ("digits 0 to 7", "--")):
    for label, chosen, color in (("ensemble", everything, "black"), ("one member", everything[:1], "C1")):
        coverage, risk = ee.scores.risk_coverage(*selection(chosen, among=among))
        ax.plot(100 * coverage, 100 * risk, line, label=f"{label}, {among}", color=color)
ax.set(title="Rejecting the least certain", xlabel="images that are predicted, %", ylabel="wrong, %", xlim=(0, 100))
ax.legend(frameon=False, loc="upper left")

figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
figure.savefig(figures / "unseen_classes.png", dpi=200)
