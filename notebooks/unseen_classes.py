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
# # Unseen classes: what an ensemble knows that it does not know
#
# We train thirty-two small networks on handwritten digits from which the eights and the nines were taken away. Then we
# show them all ten digits. Four questions follow: what is the uncertainty made of, how well does it find the eights and
# nines, what is it worth to refuse to answer, and are the probabilities true?
#
# This page is a notebook and a program: `python notebooks/unseen_classes.py` prints the tables and writes the figure.
# It needs `pip install 'eqx_ensemble[examples]'`, no network, and about a minute on two cores.

# %% [markdown]
# In a notebook, these two lines check the shape annotations of every function below while it runs. (In the program
# they are comments.)

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
# Scikit-learn ships 1,797 images of 8 x 8 pixels. The eights and nines are set aside: no member is trained on them,
# nothing is calibrated on them, nothing is chosen by them. Of the other images 200 are to train on, 500 to calibrate
# on, and the rest is to judge by. So few to train on, because with more there would be next to no errors to study.

# %%
NUM_MEMBERS, UNSEEN = 32, (8, 9)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)

is_unseen = np.isin(labels, UNSEEN)
x, y, unseen = pixels[~is_unseen], labels[~is_unseen], pixels[is_unseen]
train, held_out, test = ((x[part], y[part]) for part in (slice(0, 200), slice(200, 700), slice(700, None)))
print(f"{len(train[0])} images to train on, {len(held_out[0])} to calibrate on, {len(test[0])} to judge by,", end=" ")
print(f"and {len(unseen)} of digits that no member has seen")

# %% [markdown]
# ## Train
#
# Model and loss are those of one member. Members differ in their first weights and in the order of their rows, and in
# nothing else: a deep ensemble. They are trained for long, until they are surer than they should be, as large networks
# usually are; members that stop early have less to gain from calibration.

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
# The entropy of the mixture, *total*, has two parts. *Aleatoric* is the entropy that members have on average: each of
# them finds the image unclear. *Epistemic* is what their disagreement adds, the mutual information between label and
# member: each may be sure, but of different things. All three are in nats; the total is at most log 8 = 2.08.
#
# For many rows and many members the logits of all need not be held at once. `predict` combines the members' logits
# batch by batch of rows (and some members at a time, where a budget `memory=` asks for it), and keeps the sums alone.


# %%
def decomposed(x: np.ndarray) -> ee.uncertainty.Decomposition:
    return ee.predict(run.ensemble, x, combine=ee.uncertainty.decompose_entropy)


known, novel = decomposed(test[0]), decomposed(unseen)

# %% [markdown]
# It is the same as from the logits of all members, which this page also needs. It is the same, too, if half of the
# members are seen first and the other half later, or elsewhere: partial results merge.

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
# Both parts are larger for the unseen digits. The names promise more than a network keeps: an image that is unlike all
# training data has no business looking "noisy", and yet much of its entropy is called aleatoric. The parts are
# statements about these members, not about the world.

# %% [markdown]
# ## Which score finds the unseen digits?
#
# Any measure of uncertainty ranks images. Three numbers say how well a ranking parts unseen from seen:
#
# - *AUROC*, the probability that an unseen image scores higher than a seen one; 0.5 is guessing.
# - *AUPR*, the area under precision and recall with the unseen as positives; guessing gives their share of the images.
# - *FPR95*, the share of the seen images that is refused at the threshold which finds 95 % of the unseen; lower is
#   better. (Papers differ in which of the two kinds is the positive one. Here it is the unseen.)
#
# The standard error comes from two hundred weightings of the images, the Bayesian bootstrap. It says what other images
# would change, not what other training runs or other left-out digits would.


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
    """Of the area under the ROC curve, other images being drawn."""
    return float(jnp.std(jax.vmap(lambda w: ee.scores.auroc(score, positive, row_weights=w))(weightings)))


by_score = {}
for name, measure in measures.items():
    score = measure(everything)
    rankings = (f(score, positive) for f in (ee.scores.auroc, ee.scores.aupr, ee.scores.fpr_at_tpr))
    by_score[name] = [*map(float, rankings), standard_error(score, positive)]

# %% [markdown]
# ## How many members does it take?
#
# One member alone has a confidence, an entropy and an energy, but no disagreement. Thirty-two members are also sixteen
# pairs, eight fours or four eights: disjoint groups, trained independently, whose spread shows what another training
# run would change.

# %%
SIZES = (1, 2, 4, 8, 32)


names = ("entropy, total", "entropy, epistemic part", "energy of the logits")


def of_groups(size: int) -> Float[np.ndarray, "groups scores"]:
    """The areas under the ROC curve of every group of so many members."""
    groups = jnp.reshape(everything, (-1, size, *everything.shape[1:]))
    scores = jax.vmap(lambda group: jnp.stack([measures[name](group) for name in names]))(groups)
    of_score = jax.vmap(lambda score: ee.scores.auroc(score, positive))
    return np.array(jax.vmap(of_score)(scores))


areas = {size: of_groups(size) for size in SIZES}
areas[1][:, 1] = np.nan  # of one member the epistemic part is zero for every image

print(f"\n{'AUROC, by number of members':32}" + "".join(f"{size:>16}" for size in SIZES))
for i, name in enumerate(names):
    shown = [f"{np.mean(areas[size][:, i]):.3f} +- {np.std(areas[size][:, i]):.3f}" for size in SIZES[:-1]]
    shown = ["" if "nan" in cell else cell for cell in shown]
    print(f"  {name:30}" + "".join(f"{cell:>16}" for cell in shown) + f"{areas[32][0, i]:>16.3f}")

# %% [markdown]
# When this page was written, more members were steadier rather than much better. The mean area rises by less than one
# hundredth from one member to thirty-two. The spread between training runs, which one run alone cannot know of, is
# about halved by eight members for the total entropy, and more than halved for the energy. A group of eight is, on
# average, within 0.003 of all thirty-two.

# %% [markdown]
# ## Refusing to answer
#
# *Selective prediction*: refuse the images of highest uncertainty and answer the rest. The risk-coverage curve gives
# the share of wrong answers among those that are given. The area under it, AURC, is the mean of that share over all
# coverages; lower is better. We look twice: at digits that could be right, and at all images together, in which every
# answer to an eight or a nine is wrong. No refusal can then push the risk of answering *all* images below their share.


# %%
def wrong(logits: Float[Array, "members batch 8"], labels: Int[np.ndarray, " batch"]) -> Float[Array, " batch"]:
    return 1.0 - ee.scores.accuracy(logits, labels, reduction="none")


def refusal(logits: Float[Array, "members batch 8"], *, among: str) -> tuple[Array, Array]:
    """What it refuses by, and what it would have got wrong."""
    uncertainty = of_entropy(logits).total
    is_wrong = jnp.concatenate([wrong(logits[:, : len(test[0])], test[1]), jnp.ones(len(unseen))])
    rows = slice(None) if among == "all images" else slice(len(test[0]))
    return uncertainty[rows], is_wrong[rows]


def areas_of(among: str) -> tuple[Float[Array, " members"], Float[Array, ""]]:
    """The areas under the risk-coverage curves of each member alone, and of all together."""
    area = lambda logits: ee.scores.aurc(*refusal(logits, among=among))
    return jax.vmap(lambda member: area(member[None]))(everything), area(everything)


selective = {among: areas_of(among) for among in ("digits 0 to 7", "all images")}
curve = ee.scores.risk_coverage(*refusal(everything, among="digits 0 to 7"))
at_90 = float(np.interp(0.9, curve.coverage, curve.risk))

# %% [markdown]
# ## Are the probabilities true?
#
# A member that says 90 % should be right nine times in ten. *Temperature scaling* divides the logits by one number,
# fitted on the 500 images that were kept for it. There are two places to do it, and they are not the same: every member
# by itself, before their probabilities are averaged; or the mixture, after. Averaging makes probabilities less extreme,
# so that a mixture of calibrated members tends to be less sure than it should be.

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


def judged(name: str) -> tuple[float, ...]:
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


per_variant = {name: judged(name) for name in variants}
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
# Eights and nines are one choice. Here are five, at once: forty members, eight for each pair of digits left out. Each
# member has rows of its own in the shared data, so that all forty train as one program. They have ten outputs; those of
# the two digits that a member never saw learn only to be small.

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

print(f"\n{'REFUSING, AURC':32}{'mean member':>12}{'their range':>18}{'ensemble':>10}")
for among, (alone, together) in selective.items():
    print(f"  {among:30}{np.mean(alone):12.4f}{f'{np.min(alone):.4f} to {np.max(alone):.4f}':>18}{together:10.4f}")
print(f"  wrong among digits 0 to 7: {curve.risk[-1]:.4f} of all, {at_90:.4f} of the surest 90 %")

heads = ("accuracy", "NLL", "ECE", "unseen at", "AUROC")
print(f"\n{'CALIBRATION':32}" + "".join(f"{head:>10}" for head in heads))
for name, values in ({"mean member, not calibrated": mean_member} | per_variant).items():
    print(f"  {name:30}" + "".join(f"{value:10.4f}" for value in values))

for name, gain in gains.items():
    print(f"  NLL of '{name}' less 'not calibrated': {gain.estimate:.4f} +- {gain.standard_error:.4f}")

# %% [markdown]
# ## What to make of it
#
# When this page was written, these could be read from the tables.
#
# - *Which score.* The epistemic part finds the unseen digits a little better than the total entropy, whichever pair is
#   left out. The energy, which looks at the size of the logits and not at probabilities, is best for eights and nines
#   and worst for two other pairs. One left-out pair decides nothing.
# - *Votes.* The share of other votes is a poor score: on more than 5 % of the unseen images all members vote alike,
#   there is nothing below such a tie, and so every seen image is refused with them: an FPR95 of 1.
# - *Refusing.* The ensemble makes as many mistakes as its members, but knows better which they are: it has a smaller
#   AURC than the mean member. Whoever answers only the surest 90 % of the digits makes about a quarter of the mistakes.
# - *Calibration.* Members are too sure, and so is their mixture, less so: its temperature is lower. One temperature for
#   the mixture gives the best likelihood, but the gain is no larger than its standard error: the test images are too
#   few to prove it. The calibration errors (ECE, 15 bins) lie close together, and with 17 wrong answers among 743 they
#   are themselves uncertain by about half a per cent. The ten bins of the figure put the two mixtures in the other
#   order.
#
# What it does *not* show. Temperatures are fitted to seen digits, and they are true for seen digits. Of an eight or a
# nine the calibrated mixture is still three quarters sure on average, and wrong every time: no calibration on familiar
# data makes a probability true on unfamiliar ones. An AUROC of 0.9 is no guard either: the threshold that finds 95 %
# of the unseen images refuses a third or more of the good ones. And small images of digits are an easy case: neither
# numbers nor ranking carry over to other data without being measured there.

# %% [markdown]
# # The figure
#
# The histograms have logarithmic heights: most of the seen digits are in the first bar, where no doubt is left, and a
# third or more of the unseen ones with them. Those are the images that no threshold on these scores can find. In the
# reliability diagrams nearly all images are in the last bar; bars of a few images mean little.


# %%
figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
options = {"labels": ("digits 0 to 7", "eights and nines"), "unit": "nats"}
for ax, part, title in zip(
    axes[0], ("aleatoric", "epistemic"), ("The members' own doubt", "Their disagreement"), strict=False
):
    ee.plot.uncertainty_histogram(getattr(known, part), getattr(novel, part), ax=ax, **options)
    ax.set(title=title, xlabel=f"{part} part of the entropy, nats", yscale="log")

steps = axes[0, 2]
for i, (name, marker) in enumerate(zip(names, "os^", strict=True)):
    middle = np.array([np.mean(areas[size][:, i]) for size in SIZES])
    spread = np.array([np.std(areas[size][:, i]) for size in SIZES])
    spread[-1] = np.nan  # of one group
    steps.errorbar(np.array(SIZES) * 1.04 ** (i - 1), middle, spread, marker=marker, capsize=3, label=name)
steps.set_xscale("log", base=2)
steps.set(title="More members: steadier", xlabel="members", xticks=SIZES, xticklabels=SIZES, ylabel="AUROC")
steps.legend()

refusing = axes[1, 0]
styles = {"color": "black", "marker": "None"}
for among, line in (("all images", "-"), ("digits 0 to 7", "--")):
    for label, chosen, width in (
        (f"ensemble, {among}", everything, 2.0),
        (f"one member, {among}", everything[:1], 0.7),
    ):
        points = ee.scores.risk_coverage(*refusal(chosen, among=among))
        ee.plot.risk_coverage(*points, ax=refusing, label=label, linestyle=line, linewidth=width, **styles)
refusing.set(title="Refusing the least certain", ylabel="share of given answers that is wrong")

for ax, name, title in (
    (axes[1, 1], "not calibrated", "The mixture as it is"),
    (axes[1, 2], "combined, then the mixture", "The mixture at its temperature"),
):
    ee.plot.reliability_diagram(variants[name](logits), test[1], num_bins=10, ax=ax)
    ax.set_title(title)

figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "unseen_classes.png", dpi=150)
print(f"\nfigure: {figures / 'unseen_classes.png'}")
