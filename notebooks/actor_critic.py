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
# # Actor-critic: an ensemble of critics inside an agent
#
# Reinforcement learning: a soft actor-critic agent swings up a pendulum with ten critics in one `Ensemble`. Their
# targets are the minimum of two random members of a slow copy, the target network (REDQ). A whole run is one compiled
# program, and `ee.map_members` maps it over eight agents.

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
from jaxtyping import Array, Float, Int, Key

import eqx_ensemble as ee

# %% [markdown]
# ## The environment: a pendulum, in JAX
#
# The motor is too weak to lift the pendulum directly: it must swing. The reward is minus the squared angle from the
# top, with small costs for speed and torque. An episode has 200 steps of 0.05 s.

# %%
NUM_CRITICS, DISCOUNT, TAU, BATCH = 10, 0.97, 0.02, 64
WARM_UP, STEPS, EPISODE, EVALUATE_EVERY = 400, 2500, 200, 500

Physics = Float[Array, "2"]  # angle from the top, angular velocity
Observation = Float[Array, "3"]
Action = Float[Array, "1"]


def observe(physics: Physics) -> Observation:
    angle, velocity = physics
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), velocity / 8])


def reset(key: Key[Array, ""]) -> Physics:
    return jax.random.uniform(key, (2,), minval=-1) * jnp.array([jnp.pi, 1.0])


def advance(physics: Physics, action: Action) -> tuple[Physics, Float[Array, ""]]:
    angle, velocity = physics
    torque = 2 * action[0]
    from_top = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -0.1 * (from_top**2 + 0.1 * velocity**2 + 0.001 * torque**2)
    velocity = jnp.clip(velocity + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * velocity, velocity]), reward


# %% [markdown]
# ## One critic, one actor
#
# Both are functions of one observation. The actor draws an action, squashed to $[-1, 1]$, and returns its
# log-density.


# %%
class Critic(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(4, "scalar", 48, 2, key=key)

    def __call__(self, observation: Observation, action: Action) -> Float[Array, ""]:
        return self.mlp(jnp.concatenate([observation, action]))


class Actor(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        self.mlp = eqx.nn.MLP(3, 2, 48, 2, key=key)

    def __call__(self, observation: Observation, *, key: Key[Array, ""]) -> tuple[Action, Float[Array, ""]]:
        mean, log_std = self.mlp(observation)
        log_std = jnp.clip(log_std, -5, 1)
        noise = jax.random.normal(key)
        raw = mean + jnp.exp(log_std) * noise
        log_squash = 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw)[None], -0.5 * noise**2 - 0.5 * jnp.log(2 * jnp.pi) - log_std - log_squash

    def mode(self, observation: Observation) -> Action:
        return jnp.tanh(self.mlp(observation)[:1])


# %% [markdown]
# ## The agent
#
# `critics` is a training state, `targets` an ensemble, both fields of an ordinary Module. The loss is written for one
# critic: `make_step` trains all, each with its own optimiser state.


# %%
class Transition(eqx.Module):
    observation: Float[Array, "*rows 3"]
    action: Float[Array, "*rows 1"]
    reward: Float[Array, "*rows"]
    following: Float[Array, "*rows 3"]


def critic_loss(
    critic: Critic, batch: tuple[Transition, Float[Array, " rows"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    seen, target = batch
    return jnp.mean((jax.vmap(critic)(seen.observation, seen.action) - target) ** 2)


adam = optax.adam(2e-3)
critic_step = ee.train.make_step(critic_loss, adam)


class Agent(eqx.Module):
    actor: Actor
    log_temperature: Float[Array, ""]
    opt_state: optax.OptState
    critics: ee.train.TrainState[Critic]
    targets: ee.Ensemble[Critic]

    def __init__(self, *, key: Key[Array, ""]):
        actor_key, critic_key, loss_key = jax.random.split(key, 3)
        self.actor, self.log_temperature = Actor(key=actor_key), jnp.array(-2.0)
        self.opt_state = adam.init(eqx.filter((self.actor, self.log_temperature), eqx.is_inexact_array))
        self.targets = ee.build(lambda key: Critic(key=key), NUM_CRITICS, key=critic_key)
        self.critics = ee.train.init(self.targets, adam, key=loss_key)


# %% [markdown]
# ## The two updates
#
# `agent.targets[pair]` is an ensemble of two members, by indices that are drawn in the compiled program. `ee.Batch`
# marks a batch axis. The target is shared by all ten critics; one per critic, `(10, rows)`, would be `ee.Each(target)`.


# %%
def draw_actions(
    actor: Actor, observations: Float[Array, "rows 3"], key: Key[Array, ""]
) -> tuple[Float[Array, "rows 1"], Float[Array, " rows"]]:
    keys = jax.random.split(key, len(observations))
    return jax.vmap(lambda observation, key: actor(observation, key=key))(observations, keys)


def update_critics(agent: Agent, seen: Transition, in_minimum: Int[Array, ""], key: Key[Array, ""]) -> Agent:
    action_key, pair_key = jax.random.split(key)
    action, log_prob = draw_actions(agent.actor, seen.following, action_key)
    pair = jax.random.choice(pair_key, NUM_CRITICS, (2,), replace=False)
    pair = jnp.where(in_minimum == 1, pair[0], pair)  # the same critic twice: no minimum
    future = jnp.min(agent.targets[pair](ee.Batch(seen.following), ee.Batch(action)), axis=0)
    target = seen.reward + DISCOUNT * (future - jnp.exp(agent.log_temperature) * log_prob)
    critics, _ = critic_step(agent.critics, (seen, target))
    targets = ee.tree.polyak(agent.targets, critics.ensemble, TAU)
    return eqx.tree_at(lambda a: (a.critics, a.targets), agent, (critics, targets))


def update_actor(agent: Agent, seen: Transition, key: Key[Array, ""]) -> Agent:
    critics = agent.critics.ensemble

    def loss(learnt: tuple[Actor, Float[Array, ""]]) -> Float[Array, ""]:
        actor, log_temperature = learnt
        action, log_prob = draw_actions(actor, seen.observation, key)
        value = jnp.mean(critics(ee.Batch(seen.observation), ee.Batch(action)), axis=0)
        entropy_gap = jax.lax.stop_gradient(-log_prob + 1)  # the target of the entropy is minus one nat
        actor_loss = jnp.mean(jax.lax.stop_gradient(jnp.exp(log_temperature)) * log_prob - value)
        return actor_loss + jnp.exp(log_temperature) * jnp.mean(entropy_gap)

    learnt = agent.actor, agent.log_temperature
    updates, opt_state = adam.update(eqx.filter_grad(loss)(learnt), agent.opt_state)
    new = (*eqx.apply_updates(learnt, updates), opt_state)
    return eqx.tree_at(lambda a: (a.actor, a.log_temperature, a.opt_state), agent, new)


# %% [markdown]
# ## A run
#
# The carry of `jax.lax.scan` must consist of arrays, but an agent also contains activation functions:
# `ee.train.scan_steps` accepts it.


# %%
def act(physics: Physics, action: Action, t: Int[Array, ""], key: Key[Array, ""]) -> tuple[Physics, Transition]:
    """One step of the environment; a new episode begins every 200 steps."""
    following, reward = advance(physics, action)
    seen = Transition(observe(physics), action, reward, observe(following))
    return jnp.where((t + 1) % EPISODE == 0, reset(key), following), seen


def act_randomly(physics: Physics, t: Int[Array, ""], key: Key[Array, ""]) -> tuple[Physics, Transition]:
    action_key, reset_key = jax.random.split(jax.random.fold_in(key, t))
    return act(physics, jax.random.uniform(action_key, (1,), minval=-1), t, reset_key)


def mean_return(actor: Actor, key: Key[Array, ""]) -> Float[Array, ""]:
    """The sum of rewards of the most likely actions, mean of twenty episodes."""
    start = jax.vmap(reset)(jax.random.split(key, 20))
    play = lambda physics, _: jax.vmap(lambda one: advance(one, actor.mode(observe(one))))(physics)
    return jnp.mean(jnp.sum(jax.lax.scan(play, start, length=EPISODE)[1], axis=0))


def run(key: Key[Array, ""], in_minimum: Int[Array, ""]) -> tuple[Float[Array, " times"], Float[Array, ""]]:
    """The returns during training, and the mean error of the critics' values at its end."""
    agent_key, reset_key, random_key, steps_key, test_key = jax.random.split(key, 5)
    physics, first = jax.lax.scan(
        lambda physics, t: act_randomly(physics, t, random_key), reset(reset_key), jnp.arange(WARM_UP)
    )
    memory = jax.tree.map(lambda rows: jnp.concatenate([rows, jnp.zeros((STEPS, *rows.shape[1:]))]), first)

    def one_step(carry, t):
        agent, memory, physics = carry
        keys = jax.random.split(jax.random.fold_in(steps_key, t), 5)
        action, _ = agent.actor(observe(physics), key=keys[0])
        physics, seen = act(physics, action, t, keys[1])
        memory = jax.tree.map(lambda rows, row: rows.at[WARM_UP + t].set(row), memory, seen)
        drawn = jax.random.randint(keys[2], (BATCH,), 0, WARM_UP + t + 1)
        batch = jax.tree.map(lambda rows: rows[drawn], memory)
        agent = update_critics(agent, batch, in_minimum, keys[3])
        agent = update_actor(agent, batch, keys[4])
        return (agent, memory, physics), None

    def chunk(carry, ts):
        carry, _ = ee.train.scan_steps(one_step, carry, ts)
        return carry, mean_return(carry[0].actor, test_key)

    ts = jnp.arange(STEPS).reshape(-1, EVALUATE_EVERY)
    (agent, *_), returns = ee.train.scan_steps(chunk, (Agent(key=agent_key), memory, physics), ts)
    return returns, value_error(agent, test_key)


# %% [markdown]
# The value of a state and an action is the discounted sum of future rewards and entropies. We
# sum them over 400 steps: the error of the critics' mean over the first fifty shows whether they overestimate.


# %%
def value_error(agent: Agent, key: Key[Array, ""]) -> Float[Array, ""]:
    start_key, play_key = jax.random.split(key)
    temperature = jnp.exp(agent.log_temperature)

    def play(physics, key):
        observation = jax.vmap(observe)(physics)
        action, log_prob = draw_actions(agent.actor, observation, key)
        value = jnp.mean(agent.critics.ensemble(ee.Batch(observation), ee.Batch(action)), axis=0)
        physics, reward = jax.vmap(advance)(physics, action)
        return physics, (value, reward, temperature * log_prob)

    start = jax.vmap(reset)(jax.random.split(start_key, 20))
    _, (value, reward, cost) = jax.lax.scan(play, start, jax.random.split(play_key, 400))

    def backwards(future, now):
        reward, cost = now
        value = reward + DISCOUNT * future
        return value - cost, value

    _, observed = jax.lax.scan(backwards, jnp.zeros(20), (reward, cost), reverse=True)
    return jnp.mean((value - observed)[:50])


# %% [markdown]
# ## Two rules for the target, four seeds each
#
# One random critic, without a minimum, or the minimum of a random pair. `ee.map_members` maps a whole run over keys and
# rules, which are marked `ee.Each`: eight agents with ten critics each, in one program.

# %%
rules = {"one random critic": 1, "minimum of a random pair": 2}
keys = jax.random.split(jax.random.key(0), 4)
run_all = eqx.filter_jit(ee.map_members(run))
returns, errors = run_all(ee.Each(jnp.tile(keys, 2)), ee.Each(jnp.repeat(jnp.array([1, 2]), 4)))
found = dict(
    zip(rules, zip(np.asarray(returns).reshape(2, 4, -1), np.asarray(errors).reshape(2, 4), strict=True), strict=True)
)

untrained = np.asarray(ee.map_members(lambda key: mean_return(Actor(key=key), key))(ee.Each(keys)))
print("\nRETURN of the last evaluation: mean of four seeds, standard error, worst seed")
for name, (returns, _) in found.items():
    last = returns[:, -1]
    print(f"{name:28}{last.mean():10.1f}{last.std(ddof=1) / 2:10.1f}{last.min():10.1f}")
print(f"{'an untrained actor':28}{untrained.mean():10.1f}{untrained.std(ddof=1) / 2:10.1f}{untrained.min():10.1f}")

print("\nERROR OF THE VALUES, predicted minus observed: mean of four seeds, standard error")
for name, (_, error) in found.items():
    print(f"{name:28}{error.mean():10.2f}{error.std(ddof=1) / 2:10.2f}")

# %% fold="Code of the figure" alt="Return of eight agents by steps, and errors of their critics' values"
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.8), width_ratios=[3, 2], layout="constrained")
times = np.arange(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY)
for i, (name, (returns, error)) in enumerate(found.items()):
    left.plot(times, returns.T, color=f"C{i}", linewidth=0.8, alpha=0.5)
    left.plot(times, returns.mean(axis=0), color=f"C{i}", linewidth=2, label=name)
    right.plot(np.full(4, i), error, "o", color=f"C{i}")
left.set(xlabel="steps in the environment", ylabel="return", title="Seeds and their mean")
right.axhline(0, color="black", linewidth=0.8)
right.set(xlim=(-0.5, 1.5), xticks=(0, 1), xticklabels=("random", "minimum"), ylabel="predicted minus observed")
right.set(title="Error of the values")
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
figure.savefig(figures / "actor_critic.png", dpi=200)

# %% [markdown]
# ## Limits
#
# - The minimum lowers the targets, for tasks where critics overestimate. Here even a random critic does not at the end,
#   and both rules solve the task: four seeds of a small task are not conclusive.
# - REDQ makes twenty updates of the critics per environment step, this page one.
# - All mapped agents run in lockstep.
