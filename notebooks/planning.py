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
# # Planning: an ensemble of learnt dynamics in a `lax.scan` rollout
#
# Eight networks learn the dynamics of a pendulum from a few hundred noisy steps. A planner then optimises sequences of
# torques on the learnt dynamics.
#
# Errors accumulate over the steps of a plan, and a search for the cheapest plan selects
# those whose cost the model underestimates. The mean of an ensemble is a better model, and the disagreement of its
# members shows which plans are uncertain. We measure the cost of episodes, and the excess of the cost of plans over
# their predicted cost.
#
# The ensemble is trained by `ee.fit` with early stopping for every member, sorted by its validation scores, and called
# inside a `lax.scan`. Planning on the true dynamics gives the best possible result of this planner.
#
# This page is a notebook and a program: `python notebooks/planning.py` prints the tables and writes the figure. It
# needs `pip install -e '.[examples]'`, no network, and less than a minute on one core.

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
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Key

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("PLANNING_FIGURES", here / "figures"))

# %% [markdown]
# ## The pendulum
#
# The state is the angle from the top and the angular velocity. The motor is too weak to lift the pendulum directly. The
# cost of a step is the squared angle, with small costs for speed and torque.

# %%
NUM_MEMBERS, EPISODE, HORIZON, NUM_PLANS, NOISE = 8, 80, 20, 64, 0.02
key = jax.random.key(0)

State = Float[Array, "2"]
Torque = Float[Array, ""]


def cost(state: State, torque: Torque) -> Float[Array, ""]:
    from_top = (state[0] + jnp.pi) % (2 * jnp.pi) - jnp.pi
    return from_top**2 + 0.1 * state[1] ** 2 + 0.001 * torque**2


def advance(state: State, torque: Torque) -> State:
    angle, velocity = state
    velocity = jnp.clip(velocity + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * velocity, velocity])


# %% [markdown]
# ## Data: six episodes of random torques
#
# Episodes start with a hanging pendulum, and measurements are noisy. None comes near the top, where the pendulum is to
# stay: the model must extrapolate. The last episode is for validation.


# %%
def play_randomly(
    key: Key[Array, ""],
) -> tuple[Float[Array, "steps 2"], Float[Array, " steps"], Float[Array, "steps 2"]]:
    """States, torques, and the measured next states."""
    start_key, torque_key, noise_key = jax.random.split(key, 3)
    torques = 2 * jax.random.uniform(torque_key, (EPISODE,), minval=-1)

    def one_step(state, torque):
        following = advance(state, torque)
        return following, (state, following)

    start = jnp.array([jnp.pi, 0.0]) + jax.random.uniform(start_key, (2,), minval=-1)
    _, (states, following) = jax.lax.scan(one_step, start, torques)
    return states, torques, following + NOISE * jax.random.normal(noise_key, following.shape)


keys = jax.random.split(key, 6)
seen = jax.vmap(play_randomly)(keys)
train = jax.tree.map(lambda x: x[:5].reshape(5 * EPISODE, *x.shape[2:]), seen)
validation = jax.tree.map(lambda x: x[5], seen)
nearest = jnp.min(jnp.abs((seen[0][..., 0] + jnp.pi) % (2 * jnp.pi) - jnp.pi))
print(f"{len(train[1])} steps to train on; the nearest to the top was {nearest:.2f} rad")

# %% [markdown]
# ## One member
#
# A member predicts the change of the state in one step. Its loss is the mean squared error of that change, in units
# of `SCALE`.

# %%
SCALE = jnp.array([0.2, 1.0])


class Dynamics(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(4, 2, 32, 2, jax.nn.swish, key=key)

    def __call__(self, state: State, torque: Torque) -> State:
        angle, velocity = state
        seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), velocity / 8, torque / 2])
        return state + SCALE * self.mlp(seen)


def loss(
    model: Dynamics,
    batch: tuple[Float[Array, "rows 2"], Float[Array, " rows"], Float[Array, "rows 2"]],
    key: Key[Array, ""] | None = None,
) -> Float[Array, ""]:
    state, torque, following = batch
    return jnp.mean(((jax.vmap(model)(state, torque) - following) / SCALE) ** 2)


# %% [markdown]
# ## Training, with early stopping for each member
#
# Every member has its own bootstrap sample and row order, and stops when its validation error has not improved for
# twenty epochs. It keeps its best weights. `run.best(5)` are the five members with the lowest validation errors.

# %%
rows = ee.resample.bootstrap(len(train[1]), NUM_MEMBERS, key=key)
untrained = ee.build(lambda key: Dynamics(key=key), NUM_MEMBERS, key=key)
options = {"validation": validation, "patience": 20, "batch_size": 50, "key": key}
run = ee.fit(untrained, loss, optax.adam(3e-3), train, rows=rows, epochs=150, **options)
ensemble = run.best(5)
for member, (step, score) in enumerate(zip(run.best_step, run.best_score, strict=True)):
    print(f"member {member}: best after {step} steps, validation error {score:.1e}")

# %% [markdown]
# ## A rollout is a scan
#
# `predicted_cost` rolls one member forward and is a function of one member. `ee.map_members` maps it over all members:
# each follows its own predicted states, so that their disagreement grows along the plan.


# %%
def predicted_cost(
    model: Callable[[State, Torque], State], state: State, torques: Float[Array, " horizon"]
) -> Float[Array, ""]:
    """The sum of costs of a plan."""

    def one_step(state, torque):
        return model(state, torque), cost(state, torque)

    final, costs = jax.lax.scan(one_step, state, torques)
    return jnp.sum(costs) + cost(final, jnp.zeros(()))


predicted_costs = ee.map_members(predicted_cost)  # (members,)


def mean_cost(state: State, torques: Float[Array, " horizon"]) -> Float[Array, ""]:
    return jnp.mean(predicted_costs(ensemble, state, torques))


def careful_cost(state: State, torques: Float[Array, " horizon"]) -> Float[Array, ""]:
    """The mean of the members and one standard deviation of them."""
    mean, variance = ee.combine.moments(predicted_costs(ensemble, state, torques))
    return mean + jnp.sqrt(variance)


def true_cost(state: State, torques: Float[Array, " horizon"]) -> Float[Array, ""]:
    return predicted_cost(advance, state, torques)


# %% [markdown]
# ## The planner
#
# The cross-entropy method: draw plans from a Gaussian, fit it to the best of them, and repeat. The first torque of the
# final mean is applied, and the rest initialises the next plan. The whole episode is one scan.


# %%
def plan(
    objective: Callable[..., Float[Array, ""]], state: State, mean: Float[Array, " horizon"], key: Key[Array, ""]
) -> Float[Array, " horizon"]:
    std = jnp.full(HORIZON, 1.5)
    for i in range(2):
        noise = jax.random.normal(jax.random.fold_in(key, i), (NUM_PLANS, HORIZON))
        plans = jnp.clip(mean + std * noise, -2, 2)
        costs = jax.vmap(objective, in_axes=(None, 0))(state, plans)
        elite = plans[jnp.argsort(costs)[:8]]
        mean, std = jnp.mean(elite, axis=0), jnp.std(elite, axis=0) + 0.1
    return mean


def play(
    objective: Callable[..., Float[Array, ""]], start: State, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, " steps"]]:
    """The cost of an episode, the excess over the predicted costs of its plans, and the angles."""

    def one_step(carry, key):
        state, torques = carry
        torques = plan(objective, state, torques, key)
        surprise = true_cost(state, torques) - objective(state, torques)
        following = advance(state, torques[0])
        shifted = jnp.append(torques[1:], 0.0)
        return (following, shifted), (cost(state, torques[0]), surprise, state[0])

    first = start, jnp.zeros(HORIZON)
    _, (costs, surprise, angles) = jax.lax.scan(one_step, first, jax.random.split(key, EPISODE))
    return jnp.sum(costs), jnp.mean(surprise), angles


# %% [markdown]
# ## Four episodes each
#
# All planners start in the same four states, with the same random numbers. `map_members` also maps whole episodes: each
# of the eight members plans alone, in one program.

# %%
starts = jnp.array([jnp.pi, 0.0]) + jax.random.uniform(jax.random.key(1), (4, 2), minval=-0.5, maxval=0.5)
play_keys = jax.random.split(jax.random.key(2), 4)


def play_all(objective: Callable[..., Float[Array, ""]]) -> tuple[Array, Array, Array]:
    return jax.vmap(lambda start, key: play(objective, start, key))(starts, play_keys)


play_alone = ee.map_members(lambda model: play_all(lambda *plan: predicted_cost(model, *plan)))
alone = eqx.filter_jit(play_alone)(run.ensemble)  # (members, episodes, ...)
found = {
    "five members, mean": eqx.filter_jit(play_all)(mean_cost),
    "five members, careful": eqx.filter_jit(play_all)(careful_cost),
    "the true dynamics": eqx.filter_jit(play_all)(true_cost),
}
resting = jnp.sum(jax.vmap(lambda x: cost(x, jnp.zeros(())))(starts)) / 4 * EPISODE

print("\nCOST OF AN EPISODE: mean of four, the worst episode, surprise (true minus predicted cost of a plan)")
by_member = np.asarray(alone[0]).mean(axis=1)
for name, member in {"best member": np.argmin(by_member), "worst member": np.argmax(by_member)}.items():
    print(f"{name:28}{by_member[member]:9.1f}{alone[0][member].max():9.1f}{alone[1][member].mean():9.2f}")
print(f"{'a member, mean of eight':28}{by_member.mean():9.1f}{alone[0].max():9.1f}{alone[1].mean():9.2f}")
for name, (costs, surprise, _) in found.items():
    print(f"{name:28}{costs.mean():9.1f}{costs.max():9.1f}{surprise.mean():9.2f}")
print(f"{'hanging still':28}{resting:9.1f}")

# %% alt="Left: height of the tip in four episodes per planner. Right: by how much plans cost more than predicted"
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
seconds = 0.05 * np.arange(EPISODE)
for i, (name, (_, _, angles)) in enumerate(found.items()):
    height = np.cos(np.asarray(angles))
    left.plot(seconds, height.T, color=f"C{i}", linewidth=0.6, alpha=0.5)
    left.plot(seconds, height.mean(axis=0), color=f"C{i}", linewidth=2, label=name)
left.set(xlabel="seconds", ylabel="height of the tip", title="Four episodes, and their mean")
left.legend(fontsize=8)
surprises = np.sort(np.asarray(alone[1]).mean(axis=1))
right.bar(range(NUM_MEMBERS), surprises, color="0.7", label="one member plans alone")
for i, (name, (_, surprise, _)) in enumerate(found.items()):
    right.axhline(float(surprise.mean()), color=f"C{i}", label=name)
right.set(xlabel="members, sorted", ylabel="true minus predicted cost", title="Surprise: by how much plans cost more")
right.legend(fontsize=8)
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "planning.png", dpi=150)
print(f"figure: {figures / 'planning.png'}")

# %% [markdown]
# ## Limits
#
# - All planners swing the pendulum up. Their costs above that of planning on the true dynamics differ: for one member
#   the excess is four times that for five. Plans cost more than predicted; the standard deviation of the members,
#   by which careful planning adds to the cost, makes up for the difference.
# - These are four episodes of a small task. The best member was selected by the reported episodes; validation errors,
#   which are known beforehand, may select another.
# - An agent would now retrain on the steps of its own plans. We plan only with data of random torques.
# - Members that extrapolate in the same way agree, and may be wrong: disagreement does not bound the error.
