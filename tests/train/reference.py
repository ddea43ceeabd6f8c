"""A fit of ONE member as a plain loop of Equinox and optax, with the rules of epochs; of the library only `permute`."""

import dataclasses
import math
import zlib
from typing import Any

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


@dataclasses.dataclass
class Fitted:
    """What a fit of one member gives; `losses`, `means` and `scores` hold NaN after it has stopped.

    `means` and `auxs` have one entry per part. `margin` is the smallest difference of a score to what decided about it.
    """

    params: Any
    frozen: Any
    opt_state: Any
    state: Any
    hyper: Any
    kept: Any
    losses: list = dataclasses.field(default_factory=list)
    means: list = dataclasses.field(default_factory=list)
    auxs: list = dataclasses.field(default_factory=list)
    scores: list = dataclasses.field(default_factory=list)
    best_score: float = np.inf
    best_step: int = -1
    waited: int = 0
    step: int = 0
    status: int = 0
    loss: float = np.nan
    score: float = np.nan
    margin: float = np.inf

    @property
    def model(self):
        return eqx.combine(self.params, self.frozen)

    @property
    def best(self):
        return eqx.combine(self.kept[0] if self.best_step >= 0 else self.params, self.frozen)

    @property
    def best_state(self):
        return self.kept[1] if self.best_step >= 0 else self.state


def _call(fn, model, state, batch, key, hyper):
    named = {"hyper": hyper} if "hyper" in fn.__code__.co_varnames else {}
    return fn(model, batch, key, **named) if state is None else fn(model, state, batch, key, **named)


@eqx.filter_jit
def _step(loss, optimiser, has_aux, params, frozen, opt_state, state, hyper, batch, key, index):
    key = jax.random.fold_in(jax.random.fold_in(key, tag("loss")), index)

    def value(params):
        out = _call(loss, eqx.combine(params, frozen), state, batch, key, hyper)
        value, *more = out if isinstance(out, tuple) else (out,)
        return value, (more.pop(0) if state is not None else None, more[0] if has_aux else None)

    (value_now, (state, aux)), grads = eqx.filter_value_and_grad(value, has_aux=True)(params)
    optimiser = optax.with_extra_args_support(optimiser if hyper is None else optimiser(hyper))
    with relaxed():
        updates, opt_state = optimiser.update(grads, opt_state, params, value=value_now, grad=grads)
        params = optax.apply_updates(params, updates)
    return params, opt_state, state, value_now, aux


@eqx.filter_jit
def _judge(score, model, state, batch, key, hyper):
    out = _call(score, eqx.nn.inference_mode(model), state, batch, key, hyper)
    return out[0] if isinstance(out, tuple) else out


class Member:
    """One model and how it is trained: `loss(model, batch, key)`, or with a state and hyper-parameters."""

    def __init__(self, loss, optimiser, *, hyper=None, score=None, has_aux=False, trainable=eqx.is_inexact_array):
        self.loss, self.optimiser, self.hyper, self.score = loss, optimiser, hyper, score or loss
        self.has_aux, self.trainable = has_aux, trainable

    def begin(self, model, state=None, mode="min"):
        """What has not been trained."""
        params, frozen = eqx.partition(model, self.trainable)
        with relaxed():
            opt_state = (self.optimiser if self.hyper is None else self.optimiser(self.hyper)).init(params)
        worst = np.inf if mode == "min" else -np.inf
        return Fitted(params, frozen, opt_state, state, self.hyper, (params, state), best_score=worst)

    def fit(
        self, model, data, *, steps, key, batch_size=32, rows=None, shuffle=True, state=None, validation=None,
        patience=None, mode="min", min_delta=0.0, target=None, most=None, batches=None, decay=None,
        told=None, longest=512,
    ):  # fmt: skip
        """Trains for `steps` steps a model, or what a fit before gave. `rows` are the member's own, `most` the steps
        after which it stops at the end of a part, and `told` at that of an epoch; `batches` are those of a pass, in
        place of data; `decay(hyper)` is called after each epoch. Parts have at most `longest` steps.
        """
        now = dataclasses.replace(model) if isinstance(model, Fitted) else self.begin(model, state, mode)
        for name in ("losses", "means", "auxs", "scores"):
            setattr(now, name, [*getattr(now, name)])
        first, sign, done = now.step, 1 if mode == "min" else -1, 0
        if batches is None:
            count = len(jax.tree.leaves(data)[0]) if rows is None else len(rows)
            size = min(batch_size, count)
            epoch = -(-count // size)
            part = math.ceil(epoch / math.ceil(epoch / longest))
            stream = stream_of(key, (first + steps) * size, count, shuffle=shuffle)
            stream = stream if rows is None else np.asarray(rows)[stream]
            batch_of = lambda i: jax.tree.map(lambda x: x[stream[(first + i) * size : (first + i + 1) * size]], data)
        else:
            epoch, part = len(batches), longest
            batch_of = lambda i: batches[i % epoch]
        while done < steps:
            number = min(epoch - done % epoch, part, steps - done)
            ends = (done + number) % epoch == 0 or done + number == steps
            before, own, auxs, trains = (now.params, now.opt_state, now.state), [], [], now.status == 0
            for i in range(done, done + number) if trains else ():
                now.params, now.opt_state, now.state, value, aux = _step(
                    self.loss, self.optimiser, self.has_aux, now.params, now.frozen, now.opt_state, now.state,
                    now.hyper, batch_of(i), key, jnp.int32(first + i),
                )  # fmt: skip
                own.append(float(value))
                auxs.append(aux)
            if trains:
                finite = all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(now.params))
                now.loss = float(np.mean(own))
                if finite and np.isfinite(own).all():
                    now.step += number
                else:
                    (now.params, now.opt_state, now.state), now.status = before, 2
            now.losses += own or [np.nan] * number
            now.means.append(now.loss if trains else np.nan)
            now.auxs.append(auxs or [None] * number)
            if ends and validation is not None:
                now.scores.append(self._judge(now, validation, key, sign, patience, min_delta, target))
            limits = [x for x in (most, told if ends else None) if x is not None]
            if now.status == 0 and limits and now.step >= min(limits):
                now.status = 1
            if ends and decay is not None:
                now.hyper = decay(now.hyper)
            done += number
        return now

    def _judge(self, now, validation, key, sign, patience, min_delta, target):
        if now.status:
            return np.nan
        now.score = score = float(_judge(self.score, now.model, now.state, validation, key, now.hyper))
        limit = sign * now.best_score - min_delta
        better = sign * score < limit
        ties = [limit] if target is None else [limit, sign * target]
        near = [abs(sign * score - tie) / (1 + abs(score)) for tie in ties if np.isfinite(tie)]
        now.margin = min([now.margin, *near])
        now.waited = 0 if better else now.waited + 1
        if better:
            now.kept, now.best_score, now.best_step = (now.params, now.state), score, now.step
        if (patience is not None and now.waited >= patience) or (target is not None and sign * score <= sign * target):
            now.status = 1
        return score
