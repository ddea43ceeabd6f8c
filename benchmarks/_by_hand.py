"""The same training without this library: written by hand with Equinox and optax.

Each function returns `train(rows)`: it trains from the initial weights over epochs of rows, as `Problem.own_rows`
yields them, and returns the losses of every step.
"""

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _problems import Problem

Train = Callable[[Iterable[np.ndarray]], Any]


def scan_of_epoch(problem: Problem) -> Train:
    """One donated `lax.scan` per epoch over data on the device, the row order drawn on the host."""
    params, static, optimiser = *eqx.partition(problem.ensemble().stacked, eqx.is_inexact_array), problem.adam
    data = jax.tree.map(jnp.asarray, (problem.x, problem.y))

    def member(params: Any, opt_state: Any, rows: Any, data: Any) -> Any:
        batch = jax.tree.map(lambda x: x[rows], data)
        loss_of = lambda params: problem.loss(eqx.combine(params, static), batch, None)
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def epoch(carry: Any, rows: Any, data: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            *carry, loss = jax.vmap(member, in_axes=(0, 0, 0, None))(*carry, rows, data)
            return tuple(carry), loss

        return jax.lax.scan(step, carry, rows)

    epoch = jax.jit(epoch, donate_argnums=0)

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        carry = jax.tree.map(jnp.array, params), jax.vmap(optimiser.init)(params)
        losses = []
        for rows in rows_of_epochs:
            carry, loss = epoch(carry, rows, data)
            losses.append(loss)
        return losses

    return train


def scan_with_patience(problem: Problem, held_out: tuple[np.ndarray, np.ndarray], patience: int) -> Train:
    """The same, with validation at the end of an epoch, best weights, and members that stop by patience."""
    params, static, optimiser = *eqx.partition(problem.ensemble().stacked, eqx.is_inexact_array), problem.adam
    data, held_out = jax.tree.map(jnp.asarray, ((problem.x, problem.y), held_out))
    loss_of = lambda params, batch: problem.loss(eqx.combine(params, static), batch, None)

    def member(carry: Any, rows: Any) -> Any:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, jax.tree.map(lambda x: x[rows], data))
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def judge(trained: Any, before: Any) -> Any:
        kept, best, best_score, waited = before
        trains = waited < patience
        choose = lambda chosen, new, old: jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)
        kept = choose(trains, trained, kept)
        score = loss_of(kept[0], held_out)
        better = trains & (score < best_score)
        waited = jnp.where(better, 0, waited + trains)
        return (kept, choose(better, kept[0], best), jnp.where(better, score, best_score), waited), score

    @ft.partial(jax.jit, donate_argnums=0)
    def epoch(state: Any, rows: Any) -> Any:
        trained, losses = jax.lax.scan(jax.vmap(member), state[0], rows)
        state, scores = jax.vmap(judge)(trained, state)
        return state, losses, scores

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        copied = lambda: jax.tree.map(jnp.array, params)
        first, count = (copied(), jax.vmap(optimiser.init)(params)), problem.num_members
        state = first, copied(), jnp.full(count, jnp.inf), jnp.zeros(count, jnp.int32)
        losses = []
        for rows in rows_of_epochs:
            state, loss, _ = epoch(state, rows)
            losses.append(loss)
        return losses

    return train


def step_of_one(problem: Problem) -> Any:
    """A step of one model on a batch."""

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(problem.loss)(model, batch, None)
        updates, opt_state = optimiser.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    optimiser = problem.adam
    return step


def idiomatic(problem: Problem) -> Train:
    """A `filter_jit` of a `filter_vmap`ped step per batch, batches made on the host: as the Equinox docs suggest."""
    first, step = problem.ensemble().stacked, eqx.filter_jit(eqx.filter_vmap(step_of_one(problem)))

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        models, losses = first, []
        opt_state = eqx.filter_vmap(problem.adam.init)(eqx.filter(models, eqx.is_inexact_array))
        for rows in rows_of_epochs:
            for own in rows:
                models, opt_state, loss = step(models, opt_state, (problem.x[own], problem.y[own]))
                losses.append(loss)
        return losses

    return train


def loop_of_members(problem: Problem) -> Train:
    """A Python loop over members; each step of a member is a call of one `filter_jit`ted function."""
    first, step, init = problem.ensemble().unstack(), eqx.filter_jit(step_of_one(problem)), problem.adam.init

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        members, losses = [(model, init(eqx.filter(model, eqx.is_inexact_array))) for model in first], []
        for rows in rows_of_epochs:
            for own in rows:
                for i, member in enumerate(members):
                    *members[i], loss = step(*member, (problem.x[own[i]], problem.y[own[i]]))
                    losses.append(loss)
        return losses

    return train
