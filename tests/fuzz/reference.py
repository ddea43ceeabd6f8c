"""`fit` once more: one member after another, in a plain loop of Equinox and optax over the stream of its rows."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import numpy as np

from eqx_ensemble._keys import tag
from eqx_ensemble.train import Status

from ..factories import relaxed
from ..train.plain_orders import plain_permutation
from .problem import loss_of, score_of


@dataclasses.dataclass
class Member:
    """One member, and what became of it."""

    params: Any
    frozen: Any
    state: Any
    key: Any
    hyper: Any
    opt_state: Any = None
    step: int = 0
    status: int = Status.OK
    losses: list = dataclasses.field(default_factory=list)
    aux: list = dataclasses.field(default_factory=list)
    scores: list = dataclasses.field(default_factory=list)
    best: Any = None
    best_score: float = np.inf  # of the smallest: scores to be maximised are negated
    best_step: int = -1
    waited: int = 0


class Reference:
    """The members of a call. `margin` is the smallest distance of a score from a threshold that decided."""

    def __init__(self, call, models, states, keys):
        self.call, self.margin = call, np.inf
        self.loss = loss_of(stateful=call.stateful, has_aux=call.has_aux, hyper=call.hyper is not None)
        self.judge = score_of(stateful=call.stateful) if call.mode == "max" else self.loss
        self.members = []
        for i, (model, state) in enumerate(zip(models, states, strict=True)):
            params, frozen = eqx.partition(model, call.trainable)
            hyper = None if call.hyper is None else {name: np.float32(x[i]) for name, x in call.hyper.items()}
            member = Member(params, frozen, state, keys[i], hyper)
            with relaxed():
                member.opt_state = self.optax_of(hyper).init(params)
            self.members.append(member)
        self.programs()

    def optax_of(self, hyper):
        return self.call.optimiser(hyper) if hyper is not None else self.call.optimiser

    def programs(self):
        call = self.call

        def value(fn, model, state, batch, key, hyper):
            named = {} if hyper is None or fn is not self.loss else {"hyper": hyper}
            out = fn(model, state, batch, key, **named) if call.stateful else fn(model, batch, key, **named)
            first, *more = out if isinstance(out, tuple) else (out,)
            return first, (more[0] if call.stateful else None, more[-1] if call.has_aux and fn is self.loss else None)

        @eqx.filter_jit
        def step(params, frozen, state, opt_state, hyper, batch, key):
            one = lambda params: value(self.loss, eqx.combine(params, frozen), state, batch, key, hyper)
            (loss, (state, aux)), grads = eqx.filter_value_and_grad(one, has_aux=True)(params)
            with relaxed():
                updates, opt_state = self.optax_of(hyper).update(grads, opt_state, params)
                params = eqx.apply_updates(params, updates)
            return params, state, opt_state, loss, aux

        @eqx.filter_jit
        def score(params, frozen, state, hyper, batch, key):
            model = eqx.nn.inference_mode(eqx.combine(params, frozen))
            return value(self.judge, model, state, batch, key, hyper)[0]

        self.step, self.score = step, score

    def run(self, length):
        """Trains for `length` steps, as one call of `fit` does."""
        done = 0
        while done < length and any(member.status == Status.OK for member in self.members):
            done = self.part(done, length)

    def part(self, done, length):
        call = self.call
        size = math.ceil(call.epoch / math.ceil(call.epoch / call.longest)) if call.kind == "arrays" else call.longest
        count = min(call.epoch - done % call.epoch, size, length - done)
        ends = (done + count) % call.epoch == 0 or done + count == length
        for i, member in enumerate(self.members):
            if member.status == Status.OK:
                self.train(i, member, done, count)
            else:
                member.losses += [np.nan] * count
                member.aux += [None] * count
                member.scores += [np.nan] if ends and call.validation is not None else []
                continue
            if ends and call.validation is not None:
                self.validate(i, member)
            if call.most is not None and member.status == Status.OK and member.step >= call.most[i]:
                member.status = Status.STOPPED
        return done + count

    def train(self, i, member, done, count):
        now, losses = (member.params, member.state, member.opt_state), []
        for number, step in enumerate(range(member.step, member.step + count)):
            place = step if self.call.kind == "arrays" else done + number  # another call gets the first batch again
            batch = self.call.batch(i, self.rows(i, member, place))
            key = jax.random.fold_in(jax.random.fold_in(member.key, tag("loss")), step)
            *now, loss, aux = self.step(now[0], member.frozen, *now[1:], member.hyper, batch, key)
            losses.append(float(loss))
            member.aux.append(aux)
        member.losses += losses
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(now[0])) and np.isfinite(losses).all()
        if finite:
            member.params, member.state, member.opt_state = now
            member.step += count
        else:
            member.status = Status.DIVERGED

    def rows(self, i, member, step):
        """The rows of a step: of the endless stream of permutations."""
        call = self.call
        own = np.arange(call.num_rows) if call.rows is None else call.rows[i]
        words = np.asarray(jax.random.key_data(jax.random.fold_in(member.key, tag("rows"))))
        order = lambda epoch: plain_permutation(words, epoch, len(own)) if call.shuffle else np.arange(len(own))
        places = range(step * call.batch_size, (step + 1) * call.batch_size)
        return own[[order(place // len(own))[place % len(own)] for place in places]]

    def validate(self, i, member):
        call, sign = self.call, -1 if self.call.mode == "max" else 1
        score = np.nan
        if member.status == Status.OK:
            args = (member.params, member.frozen, member.state, member.hyper, call.validated(i), member.key)
            score = float(self.score(*args))
            value, bound = sign * score, member.best_score - call.min_delta
            self.look(value, bound)
            if value < bound:
                member.best, member.best_score, member.best_step = (member.params, member.state), value, member.step
                member.waited = 0
            else:
                member.waited += 1
            stops = call.patience is not None and member.waited >= call.patience
            if call.target is not None:
                self.look(value, sign * call.target)
                stops = stops or value <= sign * call.target
            member.status = Status.STOPPED if stops else Status.OK
        member.scores.append(score)

    def look(self, value, bound):
        if np.isfinite(bound) and np.isfinite(value):
            self.margin = min(self.margin, abs(value - bound))
