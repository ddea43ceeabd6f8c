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
# # A contextual bandit: Thompson sampling with members
#
# An agent sees a digit, names a class, and learns only whether it was right. In ten runs of 1,000 images, playing the
# best arm of a random member (Thompson sampling) makes a third fewer mistakes than playing the arm of the largest mean
# prediction: 367 ± 12 instead of 559 ± 22, if the members have randomised priors, and 485 ± 20 if they have not.
#
# `python notebooks/bandit.py` prints the tables and draws the figure, in less than a minute on two cores. It needs
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
from jaxtyping import Array, ArrayLike, Float, Int, Key
from sklearn.datasets import load_digits

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("BANDIT_FIGURES", here / "figures"))

# %% [markdown]
# ## The problem
#
# This is classification with less information. The agent names one of ten classes, and its reward is one if it was
# right and zero if not; it is never told the class. Images come in twenty rounds of 50, in an order of the seed's own,
# and rewards are known at the end of a round. The regret is the number of wrong answers so far.

# %%
NUM_MEMBERS, NUM_SEEDS, ROUND, NUM_ROUNDS, ARMS = 8, 10, 50, 20, 10
NUM_IMAGES = ROUND * NUM_ROUNDS

pixels, digits = load_digits(return_X_y=True)
pixels, digits = (pixels / 16).astype(np.float32), digits.astype(np.int32)
order = np.stack([np.random.default_rng(seed).permutation(len(digits))[:NUM_IMAGES] for seed in range(NUM_SEEDS)])

# %% [markdown]
# ## One member
#
# A network predicts the reward of every arm, and is trained on the squared error of the arm that was played. A member
# may have a randomised prior function: a fixed random network that is added to the trained one. Where the data say
# nothing of an arm, members then differ like their priors.


# %%
def make(key: Key[Array, ""], scale: Float[ArrayLike, ""]) -> ee.methods.priors.RandomisedPrior:
    network, prior = (eqx.nn.MLP(64, ARMS, 32, 1, key=key) for key in jax.random.split(key))
    return ee.methods.priors.RandomisedPrior(network, prior, scale=scale)


def loss(
    model: ee.methods.priors.RandomisedPrior,
    batch: tuple[Float[Array, "rows 64"], Int[Array, " rows"], Float[Array, " rows"]],
    key: Key[Array, ""],
) -> Float[Array, ""]:
    x, arm, reward = batch
    predicted = jnp.take_along_axis(jax.vmap(model)(x), arm[:, None], axis=1)[:, 0]
    return jnp.mean((predicted - reward) ** 2)


# %% [markdown]
# ## All policies and seeds in one program
#
# Four policies of ten seeds with eight members each are 320 networks, and one ensemble. They differ in the scale of
# their prior, which `build` takes from `zip=`, and in their data: a member's row of `rows=` selects the images, arms
# and rewards of its own policy and seed. The history grows; as everywhere where shapes should stay, it is repeated up
# to its final length.

# %%
POLICIES = {"greedy": 0.0, "epsilon-greedy": 0.0, "Thompson, seeds alone": 0.0, "Thompson, with priors": 1.0}
NUM_AGENTS = len(POLICIES) * NUM_SEEDS

key = jax.random.key(0)
optimiser = optax.adamw(1e-2, weight_decay=1e-3)
scales = jnp.repeat(jnp.array(list(POLICIES.values())), NUM_SEEDS * NUM_MEMBERS)
untrained = ee.build(make, NUM_AGENTS * NUM_MEMBERS, zip={"scale": scales}, key=key)
seen = np.tile(pixels[order], (len(POLICIES), 1, 1)).reshape(-1, 64)  # (agents * images, 64)


@eqx.filter_jit
def predict_rewards(
    ensemble: ee.Ensemble, images: Float[Array, "seeds images 64"]
) -> Float[Array, "policies seeds members images arms"]:
    own = jnp.tile(jnp.repeat(images, NUM_MEMBERS, axis=0), (len(POLICIES), 1, 1))
    rewards = ee.map_members(lambda model, x: jax.vmap(model)(x))(ensemble, ee.Each(own))
    return rewards.reshape(len(POLICIES), NUM_SEEDS, NUM_MEMBERS, *rewards.shape[1:])


# %% [markdown]
# ## Policies
#
# - *greedy*: the arm of the largest mean prediction;
# - *epsilon-greedy*: the same, but one answer in ten is random;
# - *Thompson*: for every image one member is drawn, and its best arm is played. This is `ee.acquire.thompson`, whose
#   candidates are the arms, mapped over the images.


# %%
def thompson(predictions: Float[Array, "members arms"], key: Key[Array, ""]) -> Int[Array, ""]:
    return ee.acquire.thompson(predictions, 1, mode="max", key=key)[0]


@jax.jit
def choose(
    rewards: Float[Array, "policies seeds members images arms"], key: Key[Array, ""]
) -> Int[Array, "policies seeds images"]:
    shape = NUM_SEEDS, ROUND
    coin, arm, member = jax.random.split(key, 3)
    best = jnp.argmax(jnp.mean(rewards[:2], axis=2), axis=-1)
    explored = jnp.where(jax.random.uniform(coin, shape) < 0.1, jax.random.randint(arm, shape, 0, ARMS), best[1])
    per_image = jax.vmap(jax.vmap(thompson, in_axes=(1, 0)))
    drawn = [per_image(own, jax.random.split(member, shape)) for own in rewards[2:]]
    return jnp.stack([best[0], explored, *drawn])


# %% [markdown]
# ## Twenty rounds
#
# A round predicts, plays and continues the training of all members: `fit` takes the training state of the last round.


# %%
def play() -> Float[np.ndarray, "policies seeds images"]:
    arms = np.zeros((len(POLICIES), NUM_SEEDS, NUM_IMAGES), np.int32)
    rewards = np.zeros(arms.shape, np.float32)
    start = NUM_IMAGES * np.repeat(np.arange(NUM_AGENTS), NUM_MEMBERS)[:, None]
    ensemble = state = untrained
    for turn in range(NUM_ROUNDS):
        now = slice(turn * ROUND, (turn + 1) * ROUND)
        images = order[:, now]
        predicted = predict_rewards(ensemble, jnp.asarray(pixels[images]))
        arms[..., now] = choose(predicted, jax.random.fold_in(key, turn))
        rewards[..., now] = arms[..., now] == digits[images]
        rows = start + np.resize(np.arange(now.stop), NUM_IMAGES)
        data = seen, arms.ravel(), rewards.ravel()
        run = ee.fit(state, loss, optimiser, data, rows=rows, epochs=4, batch_size=50, progress=False, key=key)
        ensemble, state = run.ensemble, run.train_state
    return rewards


rewards = play()
guesses = np.random.default_rng(0).integers(0, ARMS, order.shape) == digits[order]
found = dict(zip(("uniform", *POLICIES), (guesses.astype(np.float32), *rewards), strict=True))
curves = {name: np.asarray(ee.acquire.regret(own, 1.0, mode="max").cumulative) for name, own in found.items()}

# %% [markdown]
# ## Regret
#
# An agent that is never right about a class has no reason to try it again: all its rewards for that arm are zeros. The
# greedy agent ends with six classes of ten. Random answers find one more, and cost one answer in ten. Members trained
# on the same few zeros still differ about an arm that was hardly tried, so that now and then one of them plays it.
# Prior functions keep this difference up: with them Thompson sampling ends with nine classes.
#
# Images and seeds are the same for all policies, and differences of regrets are paired by seed.

# %%
shown = [100, 200, 500, 1000]


def mean_and_error(values: Float[np.ndarray, " seeds *images"]) -> tuple[Float[ArrayLike, "*images"], ...]:
    """Mean over seeds and its standard error."""
    return values.mean(0), values.std(0, ddof=1) / np.sqrt(NUM_SEEDS)


print("\nREGRET: wrong answers so far, mean of ten seeds and its standard error")
print(f"{'images':24}" + "".join(f"{images:15d}" for images in shown))
for name, curve in curves.items():
    mean, error = mean_and_error(curve)
    print(f"{name:24}" + "".join(f"{mean[i - 1]:9.1f}{error[i - 1]:6.1f}" for i in shown))

labels = digits[order]
print("\nTHE LAST 200 IMAGES: accuracy; classes mostly right; their errors")
for name in curves:
    right = found[name][:, -200:]
    most = [[right[i, labels[i, -200:] == digit].mean() > 0.5 for digit in range(ARMS)] for i in range(NUM_SEEDS)]
    accuracy, known = mean_and_error(right.mean(1)), mean_and_error(np.sum(most, axis=1).astype(float))
    print(f"{name:24}{accuracy[0]:9.3f}{accuracy[1]:9.3f}{known[0]:9.1f}{known[1]:9.1f}")

print("\nREGRET MINUS THAT WITH PRIORS: mean, standard error, seeds with more")
for name, curve in list(curves.items())[:-1]:
    more = curve[:, -1] - curves["Thompson, with priors"][:, -1]
    mean, error = mean_and_error(more)
    print(f"{name:24}{mean:9.1f}{error:9.1f}{np.sum(more > 0):9d}")

# %% alt="Left: wrong answers by images seen, for five policies. Right: share of right answers in each round"
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
images = np.arange(1, NUM_IMAGES + 1)
for i, (name, curve) in enumerate(curves.items()):
    mean, error = mean_and_error(curve)
    left.plot(images, mean, color=f"C{i}", label=name)
    left.fill_between(images, mean - error, mean + error, color=f"C{i}", alpha=0.2, linewidth=0)
    mean, error = mean_and_error(found[name].reshape(NUM_SEEDS, NUM_ROUNDS, ROUND).mean(2))
    right.plot(images[ROUND - 1 :: ROUND], mean, color=f"C{i}", marker="o", markersize=3)
    right.fill_between(images[ROUND - 1 :: ROUND], mean - error, mean + error, color=f"C{i}", alpha=0.2, linewidth=0)
left.set(xlabel="images", ylabel="wrong answers so far", title="Regret: mean of ten seeds and its error")
left.legend()
right.set(xlabel="images", ylabel="accuracy", title="Accuracy in each round")
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "bandit.png", dpi=150)
print(f"figure: {figures / 'bandit.png'}")

# %% [markdown]
# ## Limits
#
# - Classes are worth more than rewards: told the classes of 200 images, similar networks are right more often than all
#   policies here ([active learning](active_learning.md)).
# - The gain of prior functions over seeds alone is five standard errors here, and was two with other random numbers.
# - Rewards are predicted by their mean, with a squared error. In trials with a cross-entropy on the reward, Thompson
#   sampling with priors was no better than greedy play.
# - Scale of the priors, learning rate and length of training are not tuned, and one data set is one data set.
# - The agents learn after every 50 images. `fit` continues all members together, and the repeated history weights
#   images a little differently from round to round.
