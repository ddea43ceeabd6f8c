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
# # Active learning: which label to query?
#
# Images on which the members of an ensemble disagree are queried first (BALD). In ten experiments on real digits this
# saves about a fifth of 200 labels compared with random queries, but none before the first hundred.
#
# The criterion is the mutual information of label and member, the epistemic part of `ee.uncertainty.decompose_entropy`.
# All strategies are compared on the same splits and first labels.
#
# `python notebooks/active_learning.py` prints the tables and draws the figure, in about a minute on one core. It needs
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
figures = pathlib.Path(os.environ.get("ACTIVE_LEARNING_FIGURES", here / "figures"))

# %% [markdown]
# ## Data
#
# 1,797 digits of 8 x 8 pixels: a pool of 1,000 whose labels can be queried, and 797 for the test. We start with 20
# random labels and query 20 more in each round. The last of ten rounds trains on 200 labels. Every seed splits the
# images differently.

# %%
NUM_MEMBERS, NUM_SEEDS, ASKED, ROUNDS, POOL = 6, 10, 20, 10, 1000

pixels, digits = load_digits(return_X_y=True)
pixels, digits = (pixels / 16).astype(np.float32), digits.astype(np.int32)

split = np.stack([np.random.default_rng(seed).permutation(len(digits)) for seed in range(NUM_SEEDS)])
pool, test = split[:, :POOL], split[:, POOL:]  # (seeds, rows): indices of images

# %% [markdown]
# ## All seeds in one program
#
# Model and loss are those of one member. The seeds of an experiment are members like any others: one call of `fit`
# trains 10 seeds x 6 members = 60 networks. A member's row of `rows=` selects its images.
#
# The labelled set grows, and an array of another length would compile another program in every round. The labelled rows
# are therefore repeated up to a length of 200: one program serves all rounds and all strategies, because loss,
# optimiser and shapes are the same.


# %%
def make(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 10, 48, 1, key=key)


def loss(
    model: eqx.nn.MLP, batch: tuple[Float[Array, "rows 64"], Int[Array, " rows"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


key = jax.random.key(0)
optimiser = optax.adamw(3e-3, weight_decay=1e-2)
untrained = ee.build(make, NUM_SEEDS * NUM_MEMBERS, key=key)


def train_on(labelled: Int[np.ndarray, "seeds labels"]) -> ee.Ensemble[eqx.nn.MLP]:
    """Sixty members: those of the first seed, those of the second, and so on."""
    rows = np.stack([np.resize(own, ASKED * ROUNDS) for own in labelled])
    data = pixels, digits
    rows = np.repeat(rows, NUM_MEMBERS, axis=0)
    return ee.fit(untrained, loss, optimiser, data, rows=rows, epochs=40, batch_size=50, key=key).ensemble


def predict_seeds(
    ensemble: ee.Ensemble[eqx.nn.MLP], images: Int[np.ndarray, "seeds images"]
) -> Float[Array, "seeds members images 10"]:
    """Logits of every seed's members for that seed's own images."""
    own = ee.Each(jnp.repeat(pixels[images], NUM_MEMBERS, axis=0))
    logits = ee.map_members(lambda model, x: jax.vmap(model)(x))(ensemble, own)
    return logits.reshape(NUM_SEEDS, NUM_MEMBERS, *logits.shape[1:])


# %% [markdown]
# ## Three query strategies
#
# - *random*: any image without a label;
# - *entropy*: where the mean prediction is least certain, whatever the reason;
# - *BALD*: where the members disagree.
#
# `decompose_entropy` returns total, aleatoric and epistemic entropy, and `jax.vmap` maps it over the seeds.


# %%
def scores_of(
    strategy: str, logits: Float[Array, "seeds members images 10"], turn: int
) -> Float[Array, "seeds images"]:
    if strategy == "random":
        return jax.random.uniform(jax.random.fold_in(key, turn), (NUM_SEEDS, POOL))
    entropy = jax.vmap(ee.uncertainty.decompose_entropy)(logits)
    return entropy.total if strategy == "entropy" else entropy.epistemic


def choose(
    scores: Float[Array, "seeds images"], known: Bool[np.ndarray, "seeds images"]
) -> Int[np.ndarray, "seeds asked"]:
    """The unlabelled images of the largest scores, for each seed: positions in its pool."""
    return np.argsort(np.where(known, -np.inf, scores), axis=1)[:, -ASKED:]


def evaluate(ensemble: ee.Ensemble[eqx.nn.MLP]) -> tuple[Float[Array, " seeds"], Float[Array, " seeds"]]:
    """Accuracy and negative log-likelihood (nats) of the mixture, for every seed."""
    logits = predict_seeds(ensemble, test)
    labels = jnp.asarray(digits[test])
    return jax.vmap(ee.scores.accuracy)(logits, labels), jax.vmap(ee.scores.nll)(logits, labels)


def learn(strategy: str) -> Float[np.ndarray, "rounds 2 seeds"]:
    chosen = np.tile(np.arange(ASKED), (NUM_SEEDS, 1))  # the first images of a shuffled pool
    curve = []
    for turn in range(ROUNDS):
        ensemble = train_on(np.take_along_axis(pool, chosen, axis=1))
        curve.append(np.stack(evaluate(ensemble)))
        known = np.zeros((NUM_SEEDS, POOL), bool)
        np.put_along_axis(known, chosen, values=True, axis=1)
        scores = scores_of(strategy, predict_seeds(ensemble, pool), turn)
        chosen = np.concatenate([chosen, choose(scores, known)], axis=1)
    return np.stack(curve)


curves = {strategy: learn(strategy) for strategy in ("random", "entropy", "BALD")}

# %% [markdown]
# ## The curves
#
# All strategies share the first 20 labels, so that their first entries are equal. Both uncertainty strategies are worse
# than random at first: six networks trained on twenty images disagree on atypical ones, and the twenty selected at once
# resemble each other. From about 140 labels on both are better. The standard errors are those of the paired
# *difference* from random, on the same splits.

# %%
labels = ASKED * np.arange(1, ROUNDS + 1)
shown = [0, 1, 3, 5, 7, 9]


def mean_and_error(difference: Float[np.ndarray, "*rounds seeds"]) -> tuple[Float[np.ndarray, "*rounds"], ...]:
    """Mean over seeds and its standard error."""
    mean, error = difference.mean(-1), difference.std(-1, ddof=1) / np.sqrt(NUM_SEEDS)
    return np.asarray(mean), np.asarray(error)


print("\nACCURACY by number of labels, mean of ten seeds")
print(f"{'labels':24}" + "".join(f"{labels[i]:9d}" for i in shown))
for strategy, curve in curves.items():
    print(f"{strategy:24}" + "".join(f"{curve[i, 0].mean():9.4f}" for i in shown))
for strategy in ("entropy", "BALD"):
    gain, error = mean_and_error(curves[strategy][:, 0] - curves["random"][:, 0])
    print(f"{strategy + ' minus random':24}" + "".join(f"{gain[i]:9.4f}" for i in shown))
    print(f"{'standard error, ' + strategy:24}" + "".join(f"{error[i]:9.4f}" for i in shown))

print("\nNEGATIVE LOG-LIKELIHOOD by number of labels, nats, mean of ten seeds")
for strategy, curve in curves.items():
    print(f"{strategy:24}" + "".join(f"{curve[i, 1].mean():9.4f}" for i in shown))

# %% [markdown]
# How many labels does a strategy need for the accuracy that random labels reach with 200? We interpolate each seed's
# curve linearly between rounds. A curve need not rise everywhere: we take the best accuracy so far. Seeds that never
# reach it count as 200.

# %%
print("\nLABELS for the accuracy of 200 random ones: mean of ten seeds, standard error, seeds that save any")
for strategy in ("entropy", "BALD"):
    needed = []
    for seed in range(NUM_SEEDS):
        so_far = np.maximum.accumulate(curves[strategy][:, 0, seed])
        goal = curves["random"][-1, 0, seed]
        needed.append(np.interp(goal, so_far, labels) if so_far[-1] >= goal else 200.0)
    mean, error = mean_and_error(np.array(needed))
    print(f"{strategy:24}{mean:9.1f}{error:9.1f}{np.sum(np.array(needed) < 200):9d}")

# %% alt="Left: accuracy by number of labels for random, entropy and BALD. Right: the gain over random labels"
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for i, (strategy, curve) in enumerate(curves.items()):
    mean, error = mean_and_error(curve[:, 0])
    left.plot(labels, mean, color=f"C{i}", marker="o", label=strategy)
    left.fill_between(labels, mean - error, mean + error, color=f"C{i}", alpha=0.2)
    if strategy != "random":
        gain, error = mean_and_error(curve[:, 0] - curves["random"][:, 0])
        right.errorbar(labels + i, gain, error, color=f"C{i}", marker="o", capsize=3, label=strategy)
left.set(xlabel="labels", ylabel="accuracy", title="Accuracy: mean of ten seeds and its error")
left.legend()
right.axhline(0, color="black", linewidth=0.8)
right.set(xlabel="labels", ylabel="accuracy minus that of random", title="The same splits, seed by seed")
right.legend()
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "active_learning.png", dpi=150)
print(f"figure: {figures / 'active_learning.png'}")

# %% [markdown]
# ## Limits
#
# - With few labels a random sample, which covers all digits, is better.
# - Entropy of the mean prediction, for which one network would suffice, is as good as disagreement here. BALD is meant
#   for data with label noise, where an image may be uncertain for all members but uninformative; digits have little.
# - The twenty images of a round are selected independently. Methods that select them jointly avoid near duplicates.
# - These are ten seeds on one small data set. In practice, neither the test labels nor the best strategy are known.
