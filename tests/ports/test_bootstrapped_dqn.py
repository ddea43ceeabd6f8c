"""Bootstrapped DQN with prior functions: Q-networks in a list, one of which acts in an episode.

Source: github.com/google-deepmind/bsuite, `bsuite/baselines/jax/boot_dqn/agent.py` at effafc0, lines 52 to 201. Its
initial states, its step, and the updates of networks and targets have 34 lines of code; here 13, `Ported` and the list
of networks. The loss of one network and the loop of the agent stay as they are.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

STATES, ACTIONS, MEMBERS, BATCH = 4, 2, 3, 8
DISCOUNT, NOISE_SCALE, PRIOR_SCALE, MASK_PROB, TARGET_PERIOD = 0.9, 0.1, 3.0, 0.5, 3
ADAM = optax.adam(1e-2)
KEY = jax.random.key(0)


class QNetwork(eqx.Module):
    net: eqx.nn.MLP
    prior: eqx.nn.MLP

    def __init__(self, key):
        net_key, prior_key = jax.random.split(key)
        self.net = eqx.nn.MLP(STATES, ACTIONS, 8, 1, key=net_key)
        self.prior = eqx.nn.MLP(STATES, ACTIONS, 8, 1, key=prior_key)

    def __call__(self, state):
        return self.net(state) + PRIOR_SCALE * jax.lax.stop_gradient(self.prior(state))


def td_loss(model, batch, key=None):
    target, (before, action, reward, discount, after), mask, noise = batch
    value = jax.vmap(lambda x, a: model(x)[a])(before, action)
    future = jnp.max(jax.vmap(target)(after), axis=1)
    error = reward + NOISE_SCALE * noise + DISCOUNT * discount * future - value
    return jnp.mean(mask * error**2)


class ByHand:
    def __init__(self, nets, targets):
        states = [ADAM.init(eqx.filter(net, eqx.is_array)) for net in nets]
        self.members = [[net, target, state, 0] for net, target, state in zip(nets, targets, states, strict=True)]

    @staticmethod
    @eqx.filter_jit
    def step(net, target, state, transitions, mask, noise):
        gradient = eqx.filter_grad(td_loss)(net, (target, transitions, mask, noise))
        updates, state = ADAM.update(gradient, state)
        return eqx.apply_updates(net, updates), state

    def update(self, transitions, mask, noise):
        for k, (net, target, state, count) in enumerate(self.members):
            net, state = self.step(net, target, state, transitions, mask[:, k], noise[:, k])
            self.members[k] = [net, net if (count + 1) % TARGET_PERIOD == 0 else target, state, count + 1]

    def member(self, k):
        return self.members[k][0]


class Ported:
    def __init__(self, nets, targets):
        self.target = ee.stack(targets)
        self.state = ee.train.init(ee.stack(nets), ADAM, key=KEY)
        self.step = ee.train.make_step(td_loss, ADAM)

    def update(self, transitions, mask, noise):
        own = ee.Each(mask, axis=1), ee.Each(noise, axis=1)
        self.state, _ = self.step(self.state, (self.target, transitions, *own))
        if self.state.step[0] % TARGET_PERIOD == 0:
            self.target = self.state.ensemble

    def member(self, k):
        return self.state.ensemble[k]


@eqx.filter_jit
def act(net, at):
    return jnp.argmax(net(jnp.eye(STATES)[at]))


def play(agent, steps=20):
    """A walk along four states, to the right for a reward; every episode is that of another member."""
    rng, replay, actions = np.random.default_rng(0), [], []
    active, at = agent.member(0), 0
    for t in range(steps):
        action = int(act(active, jnp.array(at)))
        after = min(at + 1, STATES - 1) if action else max(at - 1, 0)
        ended = t % 5 == 4
        draws = rng.binomial(1, MASK_PROB, MEMBERS).astype(np.float32), rng.normal(size=MEMBERS).astype(np.float32)
        row = np.eye(STATES)[at], action, after == STATES - 1, not ended, np.eye(STATES)[after]
        replay.append((*row, *draws))
        actions.append(action)
        at = 0 if ended else after
        if ended:
            active = agent.member(rng.integers(MEMBERS))
        if len(replay) >= BATCH:
            rows = [replay[i] for i in rng.integers(len(replay), size=BATCH)]
            *transitions, mask, noise = map(np.stack, zip(*rows, strict=True))
            kinds = np.float32, np.int32, np.float32, np.float32, np.float32
            agent.update([x.astype(kind) for x, kind in zip(transitions, kinds, strict=True)], mask, noise)
    return actions


@pytest.mark.slow
def test_the_same_agent():
    """To rounding: under `vmap` products are rounded in another order."""
    keys = jax.random.split(KEY, 2 * MEMBERS)
    networks = [QNetwork(key) for key in keys[:MEMBERS]], [QNetwork(key) for key in keys[MEMBERS:]]
    expected, agent = ByHand(*networks), Ported(*networks)
    actions = play(expected)
    assert play(agent) == actions
    assert 0 < sum(actions) < len(actions)
    for k, (net, target, _, count) in enumerate(expected.members):
        assert_close(agent.state.ensemble[k], net, 1e-4)
        assert_close(agent.target[k], target, 1e-4)
        assert agent.state.step[k] == count
