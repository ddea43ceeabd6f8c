"""`fit` once more: single members, one after another, in a plain loop of Equinox and optax.

Row orders are those of `plain_orders`, from the documented keys; donors of revived members are read from the run.
"""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import relaxed, step_key
from ..train.plain_orders import plain_permutation
from .problem import KEY


@ft.cache
def programs(loss, score, optimiser, trainable, *, stateful, has_aux, score_has_aux, hyper):
    """The compiled step and score of one member; cached, so that cases with the same functions compile them once."""

    def call(fn, aux, params, frozen, state, own, batch, key):
        named = {"hyper": own} if hyper and fn is loss else {}
        out = fn(eqx.combine(params, frozen), *((state,) if stateful else ()), batch, key, **named)
        value, *more = out if stateful or aux else (out,)
        return value, (more[0] if stateful else None, more[-1] if aux else None)

    def optax_of(own):
        return optimiser(own) if hyper else optimiser

    @eqx.filter_jit
    def init(params, own):
        with relaxed():
            return optax_of(own).init(params)

    @eqx.filter_jit
    def step(params, frozen, state, opt_state, own, batch, key):
        with relaxed():
            one = lambda params: call(loss, has_aux, params, frozen, state, own, batch, key)
            (value, (state, aux)), gradient = eqx.filter_value_and_grad(one, has_aux=True)(params)
            updates, opt_state = optax_of(own).update(gradient, opt_state, params)
            return eqx.apply_updates(params, updates), state, opt_state, value, aux

    @eqx.filter_jit
    def validate(params, frozen, state, own, batch, key):
        model = eqx.nn.inference_mode(eqx.combine(params, frozen))
        params, frozen = eqx.partition(model, eqx.is_array)
        return call(score or loss, score_has_aux, params, frozen, state, own, batch, key)[0]

    return init, step, validate, lambda model: eqx.partition(model, trainable)


@dataclasses.dataclass
class Member:
    """One member, and what became of it. Losses and auxiliary outputs stand at the number of steps done."""

    id: int
    params: Any
    frozen: Any
    state: Any
    hyper: Any
    opt_state: Any = None
    status: Status = Status.OK
    stopped_at: int = -1
    fault: str = ""
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    aux: dict[int, Any] = dataclasses.field(default_factory=dict)
    scores: list[tuple[int, float, bool]] = dataclasses.field(default_factory=list)  # at, score, while it trained
    best: tuple[Any, Any] | None = None
    best_score: float = np.inf  # of the smallest: scores to be maximised are negated
    best_step: int = -1
    bar: float = np.inf
    best_smoothed: float = np.inf
    average: tuple[float, float] = (0.0, 0.0)  # sums of scores and of their weights, at ends of epochs
    waited: int = 0
    scored_at: int = -1

    def forget_best(self):
        self.best, self.best_score, self.best_step = None, np.inf, -1
        self.bar, self.waited, self.scored_at = np.inf, 0, -1
        self.best_smoothed, self.average = np.inf, (0.0, 0.0)

    def last_finite(self, first, end):
        """The last step after `first` and up to `end` with a finite loss; -1 if there is none."""
        return max((step for step, x in self.losses.items() if first < step <= end and np.isfinite(x)), default=-1)

    def stop(self, step):
        if self.status == Status.OK:
            self.status, self.stopped_at = Status.STOPPED, step


class Reference:
    """All members of a case `call`, as they are after `step` steps.

    `margin` is the smallest distance of a score from a threshold that decided: what is decided by a rounding is not
    compared. `revived` are the revivals of the run, whose donors are taken from there; `timed_out` the members that its
    time limits stopped, by step.
    """

    def __init__(self, call, ensemble, state, *, revived, timed_out):
        self.call, self.step, self.margin = call, 0, np.inf
        self.timed_out = timed_out
        self.donors = {(event.member, event.step): event.donor for event in revived}
        self.revived, self.segments, self.first_step = [], [], 0
        names = ("stateful", "has_aux", "score_has_aux", "hyper")
        self.init, self.train, self.score, partition = programs(
            call.loss,
            call.score_fn,
            call.optimiser,
            call.trainable,
            **{name: bool(getattr(call, name)) for name in names},
        )
        self.partition = partition
        states = ee.tree.unstack(state) if call.stateful else [None] * len(ensemble)
        self.members = []
        for i, (model, own) in enumerate(zip(ensemble.unstack(), states, strict=True)):
            hyper = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), call.hyper)
            member = Member(int(ensemble.ids[i]), *partition(model), own, hyper)
            member.opt_state = self.init(member.params, member.hyper)
            self.members.append(member)

    @property
    def training(self):
        return [member for member in self.members if member.status == Status.OK]

    def rows(self, i):
        """The rows of the data that the next step of member `i` sees."""
        call, member = self.call, self.members[i]
        own = np.arange(call.num_rows) if call.rows is None else call.rows[i]
        epoch, position = divmod(self.step, call.per_epoch)
        if call.shuffle:
            of_member = call.shuffle != "shared"
            keys = ee.member_keys(KEY, [member.id] if of_member else 1, purpose="rows" if of_member else "shared rows")
            own = own[plain_permutation(np.asarray(jax.random.key_data(keys))[0], epoch, len(own))]
        return own[position * call.batch_size :][: call.batch_size]

    def run(self, stop, *, ends_early=False):
        """Trains up to `stop` steps, as one call of `fit` does; one that `ends_early` does not validate what trains."""
        begun, validated = self.step, False
        self.revive()
        while self.step < stop and self.training:
            for i, member in enumerate(self.members):
                if member.status == Status.OK:
                    self.take_step(i, member)
            self.step += 1
            self.stop_at_limits()
            validated = self.call.validation is not None and self.step % self.call.per_epoch == 0
            if validated:
                self.validate(training=True, epoch_ends=True)
            for i in self.timed_out.get(self.step, []):
                self.members[i].stop(self.step)
            self.revive()
            for i in self.call.stopping_at(self.step):
                self.members[i].stop(self.step)
        if self.call.validation is not None and not validated:
            self.validate(training=not ends_early, epoch_ends=False)
        self.segments.append((begun, self.last_step))

    @property
    def last_step(self):
        """The steps done; if no member trains any more, those of the last that did."""
        if self.training:
            return self.step
        return max(self.first_step + 1, *(member.last_finite(0, self.step) for member in self.members))

    def forget_records(self):
        """What a continued training state does not have of the run before it."""
        self.revived, self.segments, self.first_step = [], [], self.step
        for member in self.members:
            member.forget_best()
            member.losses, member.aux, member.scores = {}, {}, []

    def columns(self):
        """For every column of the history with a finite loss, the step of each member that it shows; -1 for none."""
        found = {}
        for begun, stop in self.segments:
            every = {"all": 1, "last": stop}.get(self.call.history, self.call.history)
            ends = [step for step in range(begun + 1, stop + 1) if step % every == 0 or step == stop]
            for first, end in zip([begun, *ends], ends, strict=False):
                found[end] = [member.last_finite(first, end) for member in self.members]
        return {end: sources for end, sources in found.items() if max(sources) >= 0}

    def take_step(self, i, member):
        batch = self.call.batch(i, self.rows(i))
        key = step_key(KEY, member.id, self.step)
        params, state, opt_state, value, aux = self.train(
            member.params, member.frozen, member.state, member.opt_state, member.hyper, batch, key
        )
        member.losses[self.step + 1], member.aux[self.step + 1] = float(value), aux
        paths = [jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(params)
                 if not np.isfinite(x).all()]  # fmt: skip
        if not np.isfinite(value) or paths:
            member.status, member.stopped_at = Status.DIVERGED, self.step
            member.fault = "loss" if not np.isfinite(value) else paths[0]
        else:
            member.params, member.state, member.opt_state = params, state, opt_state

    def stop_at_limits(self):
        for i, member in enumerate(self.members):
            if (
                self.call.max_steps is not None
                and np.broadcast_to(self.call.max_steps, len(self.members))[i] <= self.step
            ):
                member.stop(self.step)

    def validate(self, *, training, epoch_ends):
        call = self.call
        sign = -1 if call.mode == "max" else 1
        for i, member in enumerate(self.members):
            trains = member.status == Status.OK and training
            stopped = member.status == Status.STOPPED and member.stopped_at != member.scored_at
            if not (trains or stopped):
                continue
            at = self.step if trains else member.stopped_at
            key = step_key(KEY, member.id, at)
            value = float(self.score(member.params, member.frozen, member.state, member.hyper, call.validated(i), key))
            member.scores.append((at, value, trains))
            member.scored_at = at
            value *= sign
            total, weight = (call.smooth * x + new for x, new in zip(member.average, (value, 1), strict=True))
            smoothed = total / weight
            if self.below(smoothed, member.best_smoothed - call.min_delta):
                member.best, member.best_score, member.best_step = (member.params, member.state), value, at
                member.best_smoothed = smoothed
            if not (trains and epoch_ends):
                continue
            member.average = total, weight
            closer = self.below(smoothed, member.bar - call.min_delta)
            member.bar, member.waited = (smoothed, 0) if closer else (member.bar, member.waited + 1)
            target = None if call.target is None else sign * np.broadcast_to(call.target, len(self.members))[i]
            reached = target is not None and not self.below(target, value)
            if reached or (call.patience is not None and member.waited >= call.patience):
                member.stop(self.step)

    def below(self, value, bound):
        self.margin = min(self.margin, abs(value - bound))
        return value < bound

    def revive(self):
        """Diverged members become a copy of the run's donor, or start afresh, without best weights."""
        call = self.call
        if call.on_diverge not in ("donor", "fresh"):
            return
        lost = [m for m in self.members if m.status == Status.DIVERGED and self.times(m) < call.most]
        healthy = {member.id: dataclasses.replace(member) for member in self.training}
        for member in lost:
            if call.on_diverge == "fresh":
                made = call.fresh()
                model, member.state = made if call.stateful else (made, None)
                member.params, member.frozen = self.partition(model)
                member.hyper = call.perturb(member.hyper, None) if call.perturb else member.hyper
                member.opt_state = self.init(member.params, member.hyper)
                donor = None
            else:
                if not healthy:
                    return
                assert (member.id, self.step) in self.donors, f"member {member.id} is revived after step {self.step}"
                donor = self.donors[member.id, self.step]
                assert donor in healthy, f"member {donor} trains after step {self.step}"
                for name in ("params", "frozen", "state", "opt_state", "hyper"):
                    setattr(member, name, getattr(healthy[donor], name))
                member.hyper = call.perturb(member.hyper, None) if call.perturb else member.hyper
                member.opt_state = call.follow(member.opt_state, member.hyper)
            member.status, member.stopped_at, member.fault = Status.OK, -1, ""
            member.forget_best()
            self.revived.append((member.id, self.step, donor))
        self.stop_at_limits()

    def times(self, member):
        return sum(member.id == other for other, _, _ in self.revived)
