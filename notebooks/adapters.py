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
# # Adapters: eight members that fine-tune one frozen model
#
# A network that reads upright digits is fine-tuned on 80 tilted, noisy ones. Eight members with low-rank adapters
# (LoRA) on one frozen base predict as well as one fine-tuned copy of the whole network, and a little worse than eight.
#
# `python notebooks/adapters.py` prints the table and draws the figure, in less than a minute on two cores. It needs
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
from jaxtyping import Array, Float, Key
from scipy.ndimage import rotate
from sklearn.datasets import load_digits

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("ADAPTERS_FIGURES", here / "figures"))

# %% [markdown]
# ## Data
#
# The base sees 600 upright images of 0 to 7. All others are turned by 25 ± 10 degrees and noisy: 80 to fine-tune, 80 to
# validate, the rest to test. Eights and nines, tilted alike, are unknown to all models.

# %%
key, rng = jax.random.key(0), np.random.default_rng(0)
digits = load_digits()
order = rng.permutation(len(digits.target))
images, labels = digits.images[order] / 16, digits.target[order].astype(np.int32)
known = labels < 8


def flat(images: Float[np.ndarray, "rows 8 8"]) -> Float[np.ndarray, "rows 64"]:
    return images.reshape(-1, 64).astype(np.float32)


def shift(images: Float[np.ndarray, "rows 8 8"]) -> Float[np.ndarray, "rows 64"]:
    angles = rng.normal(25, 10, len(images))
    turned = [rotate(image, angle, reshape=False, order=1) for image, angle in zip(images, angles, strict=True)]
    return flat(np.stack(turned) + rng.normal(0, 0.2, images.shape))


upright = flat(images[known]), labels[known]
shifted, unknown = shift(images[known][600:]), shift(images[~known])
train, validation, test = (
    (shifted[rows], labels[known][600:][rows]) for rows in (slice(80), slice(80, 160), slice(160, None))
)

# %% [markdown]
# ## The base


# %%
def make(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 8, 128, 2, key=key)


def cross_entropy(model: eqx.nn.MLP, batch: tuple, key: Key[Array, ""]) -> Float[Array, ""]:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


options = {"epochs": 60, "batch_size": 20, "key": key, "progress": False}
before = upright[0][:600], upright[1][:600]
base = ee.fit(ee.build(make, 1, key=key), cross_entropy, optax.adam(1e-3), before, **options).ensemble[0]

# %% [markdown]
# ## Members on one base
#
# All methods are fine-tuned by the same call. Twenty-four members try three learning rates at once, eight each, and
# validation images choose the rate and the epoch: the base is in memory once for all of them.

# %%
MEMBERS, RATES = 8, (3e-3, 1e-2, 3e-2)
rates = np.repeat(RATES, MEMBERS).astype(np.float32)
adapters, last = ee.methods.adapters, lambda model: model.layers[-1]

ways = {
    "whole copies": ee.stack([base] * len(rates)),
    "low_rank, rank 1": adapters.low_rank(base, len(rates), rank=1, key=key),
    "low_rank, rank 4": adapters.low_rank(base, len(rates), rank=4, key=key),
    "low_rank, rank 16": adapters.low_rank(base, len(rates), rank=16, key=key),
    "bias_only": adapters.bias_only(base, len(rates)),
    "layers_only, the last": adapters.layers_only(base, len(rates), where=last),
}


def fine_tune(ensemble: ee.Ensemble) -> ee.Ensemble:
    """The eight members of the learning rate with the best validation likelihood."""
    optimiser = lambda hyper: optax.adam(hyper["lr"])
    run = ee.fit(
        ensemble,
        cross_entropy,
        optimiser,
        train,
        hyper={"lr": rates},
        validation=validation,
        **options,
    )
    groups = [run.ensemble[i : i + MEMBERS] for i in range(0, len(rates), MEMBERS)]
    return min(groups, key=lambda group: float(ee.scores.nll(ee.predict(group, validation[0]), validation[1])))


# %% [markdown]
# ## Scores
#
# Of the mixture of all eight, and of a member alone, on average: negative log-likelihood, calibration error, accuracy,
# and how well the entropy tells unknown digits from known ones (AUROC).

# %%
inputs = np.concatenate([test[0], unknown])
is_unknown = np.arange(len(inputs)) >= len(test[0])


def evaluate(logits: Float[Array, "members rows 8"]) -> Float[np.ndarray, "4"]:
    of_known = logits[:, : len(test[0])]
    entropy = ee.uncertainty.entropy(ee.combine.mixture(logits))
    scores = [score(of_known, test[1]) for score in (ee.scores.nll, ee.scores.ece, ee.scores.accuracy)]
    return np.array([*map(float, scores), float(ee.scores.auroc(entropy, is_unknown))])


def kilobytes(ensemble: ee.Ensemble) -> float:
    arrays = jax.tree.leaves(eqx.filter(ensemble, eqx.is_inexact_array))
    return sum(x.nbytes for x in arrays) / 1e3


tuned = {name: fine_tune(ensemble) for name, ensemble in ways.items()}
logits = {name: ee.predict(ensemble, inputs) for name, ensemble in tuned.items()}
size = {name: kilobytes(ensemble) for name, ensemble in tuned.items()}
together = {name: evaluate(of_all) for name, of_all in logits.items()}
alone = {
    name: np.mean([evaluate(of_all[i : i + 1]) for i in range(MEMBERS)], axis=0) for name, of_all in logits.items()
}
frozen = evaluate(jax.vmap(base)(inputs)[None])

print(f"\nFINE-TUNING, 8 members  {'kB':>8}{'NLL':>8}{'alone':>8}{'ECE':>8}{'accuracy':>10}{'AUROC':>8}")
for name, (nll, ece, accuracy, auroc) in together.items():
    print(f"{name:24}{size[name]:8.0f}{nll:8.3f}{alone[name][0]:8.3f}{ece:8.3f}{accuracy:10.3f}{auroc:8.3f}")
nll, ece, accuracy, auroc = frozen
print(
    f"{'the frozen base':24}{size['whole copies'] / 8:8.0f}{nll:8.3f}{nll:8.3f}{ece:8.3f}{accuracy:10.3f}{auroc:8.3f}"
)

# %% [markdown]
# A member merges into an ordinary network, which predicts the same:

# %%
adapted = tuned["low_rank, rank 4"]
merged = adapters.merge(adapted[0])
assert type(merged.layers[0]) is eqx.nn.Linear
np.testing.assert_allclose(jax.vmap(merged)(inputs), logits["low_rank, rank 4"][0], atol=1e-3)

# %% alt="Left: negative log-likelihood and bytes of eight members, and of one, per method. Right: tilted digits"
figure, (ax, example) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained")
for i, name in enumerate(tuned):
    ax.plot([size[name]] * 2, [alone[name][0], together[name][0]], color=f"C{i}", lw=1)
    ax.plot(size[name], alone[name][0], "o", mfc="white", color=f"C{i}")
    ax.plot(size[name], together[name][0], "o", color=f"C{i}", label=name)
ax.set(xscale="log", xlabel="kB of eight members", ylabel="NLL of tilted digits")
ax.set(title="Filled: mixture of eight; empty: a member alone")
ax.set_xticks([100, 200, 400, 800], labels=["100", "200", "400", "800"])
ax.minorticks_off()
ax.legend(fontsize=8)
rows = [upright[0][600:605], shifted[:5]]
frames = [[np.pad(image.reshape(8, 8), 1, constant_values=0.5) for image in row] for row in rows]
example.imshow(np.block(frames), cmap="gray_r", vmin=0, vmax=1)
example.set(title="Digits before, and as tilted", xticks=[], yticks=[])
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "adapters.png", dpi=150)
print(f"\nfigure: {figures / 'adapters.png'}")

# %% [markdown]
# ## What to choose
#
# When this page was written:
#
# - *Whole copies are best* where they fit: here the base has 26,000 weights. Ranks 4 and 16 come close with a fifth
#   and a half of the bytes. Their share falls with the width of the layers: for sixteen members of rank 8 on a
#   transformer of 100 million
#   weights, weights and moments of Adam are [half of those of one whole
#   copy](../recipes/pretrained.md#what-it-costs).
# - *The mixture is what makes adapters good.* Members alone are poor, whatever their rank, and their mixture is better
#   by 0.2 to 0.5 nats. Choose learning rates and ranks by the score of the mixture, as here.
# - *Biases and the last layer are not enough* for this shift, which changes what the first layer should see.
# - *Members that start equal stay alike.* Adapters of biases have no random part: eight are as one. The matrices of
#   `low_rank` are drawn per member, and so are the paths that they take.
#
# Limits. This is one draw of the data. Over five (`python benchmarks/adapters.py --parts quality`) the mixture of rank
# 16 is worse than that of whole copies by 0.10 ± 0.04 nats, and as good as one copy. BatchEnsemble, which also trains
# the weights that its members share, is as good as whole copies, with a sixth of their weights. Nothing but learning
# rates was tuned. Eight networks trained on the 80 images from scratch are nearly as good as whole copies: where a base
# is worth no more than this, train from scratch.
