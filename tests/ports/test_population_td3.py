"""Population-based training of TD3 agents: each has its own hyper-parameters, key, memory and environment.

Source: github.com/adaptive-intelligent-robotics/QDax at 46b8fee, `qdax/baselines/pbt.py` (lines 84 to 124) and
`qdax/baselines/td3_pbt.py` (361 to 389, 408 to 418, 489 to 514). They have 84 lines of code; here 22, from `train` to
`ported`. A population by hand, as below, needs as few: only its agents must be split into arrays and functions.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_same

MEMBERS, BEST, WORST, STEPS, ROUNDS, BATCH, DELAY, TAU = 4, 2, 2, 6, 3, 4, 2, 0.05
NAMES = "discount", "policy_lr", "critic_lr", "exploration"
LOWER, UPPER = jnp.array([0.9, 3e-5, 3e-5, 0.0]), jnp.array([1.0, 3e-3, 3e-3, 0.2])  # as in the program


class Critic(eqx.Module):
    """Two values, each linear in products of position and action."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(5, 1, key=first), eqx.nn.Linear(5, 1, key=second)

    def __call__(self, position, action):
        x = jnp.stack([position, action, position**2, action**2, position * action])
        return jnp.concatenate([self.first(x), self.second(x)])


class Agent(eqx.Module):
    policy: eqx.nn.Linear
    critic: Critic
    targets: tuple[eqx.nn.Linear, Critic]
    policy_state: optax.OptState
    critic_state: optax.OptState
    hyper: dict[str, jax.Array]
    steps: jax.Array
    key: jax.Array

    def __init__(self, key):
        policy_key, critic_key, hyper_key, self.key = jax.random.split(key, 4)
        self.policy = eqx.nn.Linear(1, 1, key=policy_key)
        self.critic = Critic(critic_key)
        self.targets = self.policy, self.critic
        self.policy_state, self.critic_state = map(adam_init, self.targets)
        self.hyper = draw_hyper(hyper_key)
        self.steps = jnp.array(0)


class Memory(NamedTuple):
    rows: jax.Array  # position, action, reward, next position
    count: jax.Array


def adam_init(model):
    return optax.adam(1.0).init(eqx.filter(model, eqx.is_array))


def draw_hyper(key):
    return dict(zip(NAMES, LOWER + (UPPER - LOWER) * jax.random.uniform(key, (len(NAMES),)), strict=True))


def resample(agent):
    key, hyper_key = jax.random.split(agent.key)
    return eqx.tree_at(lambda agent: (agent.hyper, agent.key), agent, (draw_hyper(hyper_key), key))


def descend(model, state, gradient, rate):
    updates, state = optax.adam(rate).update(gradient, state)
    return eqx.apply_updates(model, updates), state


def move(target, model):
    return jax.tree.map(lambda x, y: (1 - TAU) * x + TAU * y if eqx.is_array(x) else x, target, model)


def act(policy, position):
    return jnp.tanh(policy(position[None])[0])


def learn(agent, memory, rows, noise):
    """A step of TD3 of one agent; its policy moves in every second step."""
    position, action, reward, after = memory.rows[(rows * memory.count).astype(int)].T
    policy_target, critic_target = agent.targets
    following = jnp.clip(jax.vmap(lambda x: act(policy_target, x))(after) + 0.5 * noise, -1, 1)
    target = reward + agent.hyper["discount"] * jnp.min(jax.vmap(critic_target)(after, following), axis=1)

    def critic_loss(critic):
        return jnp.sum(jnp.mean((jax.vmap(critic)(position, action) - target[:, None]) ** 2, axis=0))

    def policy_loss(policy):
        return -jnp.mean(jax.vmap(lambda x: agent.critic(x, act(policy, x))[0])(position))

    loss, gradient = eqx.filter_value_and_grad(critic_loss)(agent.critic)
    critic, critic_state = descend(agent.critic, agent.critic_state, gradient, agent.hyper["critic_lr"])
    gradient = eqx.filter_grad(policy_loss)(agent.policy)
    policy, policy_state = descend(agent.policy, agent.policy_state, gradient, agent.hyper["policy_lr"])
    new = policy, policy_state, move(policy_target, policy)
    old = agent.policy, agent.policy_state, policy_target
    is_time = agent.steps % DELAY == 0
    policy, policy_state, policy_target = jax.tree.map(
        lambda x, y: jnp.where(is_time, x, y) if eqx.is_array(x) else x, new, old
    )
    targets = policy_target, move(critic_target, critic)
    parts = lambda a: (a.policy, a.critic, a.targets, a.policy_state, a.critic_state, a.steps)
    new = policy, critic, targets, policy_state, critic_state, agent.steps + 1
    return eqx.tree_at(parts, agent, new), loss


def iterate(agent, position, memory):
    """One step of an environment whose reward is to be near 0, and one of the agent."""
    key, draws_key = jax.random.split(agent.key)
    draws = jax.random.uniform(draws_key, (2 * BATCH + 1,))  # all noise is uniform, for quick compilation
    action = act(agent.policy, position) + agent.hyper["exploration"] * (2 * draws[0] - 1)
    after = position + 0.3 * jnp.clip(action, -1, 1)
    row = jnp.stack([position, action, -(after**2), after])
    memory = Memory(memory.rows.at[memory.count].set(row), memory.count + 1)
    agent = eqx.tree_at(lambda agent: agent.key, agent, key)
    agent, loss = learn(agent, memory, draws[1 : BATCH + 1], 2 * draws[BATCH + 1 :] - 1)
    return agent, after, memory, loss


def mean_return(agent):
    play = lambda position, _: (position + 0.3 * act(agent.policy, position), -(position**2))
    return jnp.sum(jax.lax.scan(play, jnp.array(1.0), length=8)[1])


@jax.jit
def select(returns, key):
    order = jnp.argsort(-returns)
    return order[-WORST:], jax.random.choice(key, order[:BEST], (WORST,))


def first_world():
    return jnp.linspace(-1, 1, MEMBERS), Memory(jnp.zeros((MEMBERS, STEPS * ROUNDS, 4)), jnp.zeros(MEMBERS, int))


def by_hand(population):
    position, memory = first_world()

    def train(agent, position, memory):
        arrays, static = eqx.partition(agent, eqx.is_array)

        def body(carry, _):
            arrays, position, memory = carry
            agent, position, memory, loss = iterate(eqx.combine(arrays, static), position, memory)
            return (eqx.filter(agent, eqx.is_array), position, memory), loss

        (arrays, position, memory), losses = jax.lax.scan(body, (arrays, position, memory), length=STEPS)
        return eqx.combine(arrays, static), position, memory, losses

    train_all, returns_of, resample_all = (eqx.filter_jit(eqx.filter_vmap(fn)) for fn in (train, mean_return, resample))
    history = []
    for key in jax.random.split(jax.random.key(1), ROUNDS):
        population, position, memory, losses = train_all(population, position, memory)
        returns = returns_of(population)
        worst, donors = select(returns, key)
        old, new = (population, memory), (resample_all(population), memory)
        put = lambda x, y, at=worst, of=donors: x.at[at].set(y[of]) if eqx.is_array(x) else x
        population, memory = jax.tree.map(put, old, new)
        history.append((losses, returns))
    return population, position, memory, history


@eqx.filter_jit
@ee.map_members
def train(agent, world):
    def step(carry, _):
        agent, (position, memory) = carry
        agent, position, memory, loss = iterate(agent, position, memory)
        return (agent, (position, memory)), loss

    return ee.train.scan_steps(step, (agent, world), length=STEPS)


returns_of, resample_all = eqx.filter_jit(ee.map_members(mean_return)), eqx.filter_jit(ee.map_members(resample))


def ported(population):
    world, history = first_world(), []
    for key in jax.random.split(jax.random.key(1), ROUNDS):
        (population, (position, memory)), losses = train(population, ee.Each(world))
        returns = returns_of(population)
        worst, donors = select(returns, key)
        memory = memory.value
        copies = ee.tree.take((resample_all(population).stacked, memory), donors)
        stacked, memory = ee.tree.replace((population.stacked, memory), worst, copies)
        population, world = ee.from_stacked(stacked), (position, memory)
        history.append((losses, returns))
    return population, *world, history


@pytest.mark.slow
def test_the_same_population():
    """Bit for bit: `map_members` is `vmap`."""
    population = ee.build(Agent, MEMBERS, key=jax.random.key(0))
    *expected, history = by_hand(population.stacked)
    trained, *world, own_history = ported(population)
    assert_same((trained.stacked, *world), expected)
    assert_same(own_history, history)
    policies = trained.stacked.policy.weight
    assert len(np.unique(policies[:, 0, 0])) < MEMBERS
