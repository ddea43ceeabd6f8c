"""A fit of ONE member as a plain loop of Equinox and optax, with the rules of epochs; of the library only `permute`."""

import math
import zlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqx_ensemble.train._order import permute

from ..factories import relaxed


def tag(purpose):
    return zlib.crc32(purpose.encode())


def key_of_member(key, member):
    """The key of a member in training."""
    return jax.random.fold_in(jax.random.fold_in(key, tag("fit")), member)


def stream_of(key, count, num_rows, *, shuffle=True):
    """The first `count` rows of a member: an endless stream of permutations."""
    passes = -(-count // num_rows)
    if not shuffle:
        return np.resize(np.arange(num_rows), count)
    words = jax.random.key_data(jax.random.fold_in(key, tag("rows")))
    every = jnp.arange(num_rows, dtype=jnp.int32)
    drawn = [np.asarray(permute(words, jnp.int32(epoch), every, num_rows)) for epoch in range(passes)]
    return np.concatenate(drawn)[:count]


class Fitted(NamedTuple):
    """What a fit of one member gives; `losses` and `scores` hold NaN after it has stopped."""

    model: Any
    state: Any
    best: Any
    losses: np.ndarray
    scores: np.ndarray
    best_score: float
    best_step: int
    step: int
    status: int


class Member:
    """One model and how it is trained: `loss(model, batch, key)`, or with a state and hyper-parameters."""

    def __init__(self, loss, optimiser, *, stateful=False, hyper=None, score=None, trainable=eqx.is_inexact_array):
        self.stateful, self.hyper, self.trainable = stateful, hyper, trainable
        self.optimiser = optax.with_extra_args_support(optimiser if hyper is None else optimiser(hyper))
        named = {} if hyper is None else {"hyper": hyper}
        call = lambda fn, *args: fn(*args, **named) if "hyper" in fn.__code__.co_varnames else fn(*args)

        def value(params, frozen, state, batch, key):
            model = eqx.combine(params, frozen)
            return call(loss, model, state, batch, key) if stateful else (call(loss, model, batch, key), None)

        @eqx.filter_jit
        def step(params, frozen, opt_state, state, batch, key):
            (value_now, after), grads = eqx.filter_value_and_grad(value, has_aux=True)(
                params, frozen, state, batch, key
            )
            with relaxed():
                updates, opt_state = self.optimiser.update(grads, opt_state, params, value=value_now, grad=grads)
                params = optax.apply_updates(params, updates)
            return params, opt_state, after, value_now

        def judge(model, state, validation, key):
            model = eqx.nn.inference_mode(model)
            args = (model, state, validation, key) if stateful else (model, validation, key)
            out = call(score or loss, *args)
            return out[0] if isinstance(out, tuple) else out

        self.step, self.judge = step, eqx.filter_jit(judge)

    def fit(
        self, model, data, *, steps, key, batch_size=32, rows=None, shuffle=True, state=None, validation=None,
        patience=None, mode="min", min_delta=0.0, target=None, most=None,
    ):  # fmt: skip
        """Trains for `steps` steps. `rows` are the member's own, `most` the steps after which it stops."""
        count = len(jax.tree.leaves(data)[0]) if rows is None else len(rows)
        size = min(batch_size, count)
        epoch = -(-count // size)
        part = math.ceil(epoch / math.ceil(epoch / 512))
        stream = stream_of(key, steps * size, count, shuffle=shuffle)
        stream = stream if rows is None else np.asarray(rows)[stream]
        params, frozen = eqx.partition(model, self.trainable)
        with relaxed():
            opt_state = self.optimiser.init(params)
        sign = 1 if mode == "min" else -1
        best, best_score, best_step, waited = (params, state), sign * np.inf, -1, 0
        losses, scores, done, step, status = [], [], 0, 0, 0
        while done < steps:
            number = min(epoch - done % epoch, part, steps - done)
            ends = (done + number) % epoch == 0 or done + number == steps
            before, own = (params, opt_state, state), []
            if status == 0:
                for i in range(done, done + number):
                    batch = jax.tree.map(lambda x, i=i: x[stream[i * size : (i + 1) * size]], data)
                    own_key = jax.random.fold_in(jax.random.fold_in(key, tag("loss")), i)
                    params, opt_state, state, value = self.step(params, frozen, opt_state, state, batch, own_key)
                    own.append(float(value))
                finite = all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(params))
                if not (finite and np.isfinite(own).all()):
                    (params, opt_state, state), status = before, 2
                else:
                    step += number
            losses += own or [np.nan] * number
            if ends and validation is not None:
                score = np.nan
                if status == 0:
                    score = float(self.judge(eqx.combine(params, frozen), state, validation, key))
                    better = sign * score < sign * best_score - min_delta
                    waited = 0 if better else waited + 1
                    if better:
                        best, best_score, best_step = (params, state), score, step
                    if (patience is not None and waited >= patience) or (
                        target is not None and sign * score <= sign * target
                    ):
                        status = 1
                elif len(own):
                    score = np.nan
                scores.append(score)
            if status == 0 and most is not None and step >= most:
                status = 1
            done += number
        if best_step < 0:
            best = params, state
        whole = lambda params: eqx.combine(params, frozen)
        return Fitted(
            whole(params),
            state,
            whole(best[0]),
            np.array(losses),
            np.array(scores),
            best_score,
            best_step,
            step,
            status,
        )
