import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _keys
from .. import tree as _tree
from .._axes import Each, check_rows_of_data
from .._build import build
from .._caller import caller
from .._check import check_number, check_positive_int, check_sequence, is_key, is_member_array
from .._promotion import standard_promotion
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..plan import AbstractPlan, Chunked, Sequential, Unrolled, Vmap
from ..plan._engine import as_plan
from ..train._engine import (
    Optimiser,
    check_batch_size,
    check_loss_signature,
    check_optimiser,
    fit,
    hyper_arrays,
    init,
    init_member,
    resolve,
)


class _Check(NamedTuple):
    """A property, and how it failed, if it did."""

    name: str
    problem: str | None

    def __str__(self) -> str:
        return f"ok      {self.name}" if self.problem is None else f"FAILED  {self.name}: {self.problem}"


def _same(
    name: str, got: PyTree, expected: PyTree, rtol: float, *, slack: Mapping[str, float] | None = None, noun: str = ""
) -> _Check:
    """Checks that two trees hold the same arrays, within `rtol` or `slack` of each array's largest number."""
    problem = _unlike(got, expected)
    if problem is not None:
        return _Check(name, problem)
    for where, distance in _distances(got, expected).items():
        allowed = max(rtol, (slack or {}).get(where, 0.0))
        if not distance <= allowed:
            return _Check(name, f"at {noun}`{where}`: relative distance {distance:.2g}, at most {allowed:.2g} allowed")
    return _Check(name, None)


def _unlike(got: PyTree, expected: PyTree) -> str | None:
    """Why the arrays of two trees cannot be compared, or `None`."""
    ours, theirs = _arrays(got), _arrays(expected)
    if list(ours) != list(theirs):
        return "they hold different arrays"
    for (where, x), y in zip(ours.items(), theirs.values(), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"at `{where}`: {y.dtype}{y.shape} became {x.dtype}{x.shape}"
    return None


def _distances(got: PyTree, expected: PyTree) -> dict[str, float]:
    """The distance of each array from the expected one, relative to the largest number of the latter."""
    ours, theirs = _arrays(got), _arrays(expected)
    return {where: _distance(x, theirs[where]) for where, x in ours.items()}


def _arrays(tree: PyTree) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, is_member_array))
    return {jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if is_key(x) else x) for path, x in found}


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.size == 0 or np.array_equal(x, y):
        return 0.0
    x, y = (z.astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y))
    with np.errstate(invalid="ignore"):  # infinite numbers give NaN, which always fails
        return float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), np.finfo(np.float64).tiny))


class _Trained(NamedTuple):
    """A model after training, and its losses `(steps,)`."""

    model: Any
    losses: np.ndarray


class _Alone:
    """One member, trained without this library: `equinox.filter_jit`, optax and a loop."""

    def __init__(
        self,
        model: Any,
        state: Any,
        hyper: Any,
        key: Any,
        *,
        loss: Callable[..., Any],
        optimiser: Optimiser,
        member: int,
    ) -> None:
        self._params, self._frozen = eqx.partition(model, eqx.is_inexact_array)
        self._opt_state = init_member(optimiser, self._params, hyper, jnp.int32(member))  # its own noise keys
        self._state, self._key = state, key
        transformation = optax.with_extra_args_support(resolve(optimiser, hyper))
        stateful = state is not None
        named = {"hyper": hyper} if check_loss_signature(loss, stateful=stateful, hyper=hyper) else {}

        def value(params: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
            model = eqx.combine(params, self._frozen)
            return loss(model, state, batch, key, **named) if stateful else (loss(model, batch, key, **named), None)

        @eqx.filter_jit
        def step(params: Any, opt_state: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any, Any]:
            (now, new), grads = jax.value_and_grad(value, has_aux=True)(params, state, batch, key)
            value_fn = lambda params: value(params, state, batch, key)[0]
            with standard_promotion():
                updates, opt_state = transformation.update(
                    grads, opt_state, params, value=now, grad=grads, value_fn=value_fn
                )
                return optax.apply_updates(params, updates), opt_state, new, now

        self._step = step

    def train(self, batches: list, *, nudge: int | None = None) -> _Trained:
        """Trains the member; `nudge` seeds a random change of all weights by one rounding before every step."""
        params, opt_state, state, losses = self._params, self._opt_state, self._state, []
        for i, batch in enumerate(batches):
            if nudge is not None:
                params = _perturb(params, jax.random.fold_in(jax.random.key(nudge), i))
            params, opt_state, state, value = self._step(
                params, opt_state, state, batch, jax.random.fold_in(self._key, i)
            )
            losses.append(value)
        return _Trained(eqx.combine(params, self._frozen), np.asarray(jnp.stack(losses)))


@eqx.filter_jit
def _perturb(params: PyTree, key: Any) -> PyTree:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, max(len(leaves), 1))
    perturbed = [
        x * (1 + float(jnp.finfo(x.dtype).eps) * jax.random.rademacher(k, x.shape, x.dtype))
        for x, k in zip(leaves, keys[: len(leaves)], strict=True)
    ]
    return jax.tree.unflatten(treedef, perturbed)


_REPEATS = 3
_MARGIN = 10  # one rounding may move training further than the largest of a few others
_CHAOS = 1e-2  # the relative effect of rounding on losses above which they are inconclusive


class _Reference:
    """Every member trained alone, and the effect of rounding on each."""

    def __init__(self, members: list[_Alone], batches: list) -> None:
        self._members, self._batches = members, batches
        self._expected = self._train_alone(None)

    def _train_alone(self, nudge: int | None) -> dict[str, PyTree]:
        trained = [member.train(self._batches, nudge=nudge) for member in self._members]
        return {"model": [one.model for one in trained], "losses": [one.losses for one in trained]}

    @functools.cached_property
    def _rounding_effects(self) -> dict[str, dict[str, float]]:
        """The effect of rounding on training alone, for every leaf of models and losses.

        A weight whose true gradient is zero (a bias in front of a normalisation, the bias of the keys of an attention)
        has rounding noise as its gradient, which Adam scales up to steps of full length. A line search may accept
        another point. No other training can be closer than these repetitions.
        """
        found: dict[str, dict[str, float]] = {part: {} for part in self._expected}
        for nudge in range(_REPEATS):
            for part, tree in self._train_alone(nudge).items():
                for path, distance in _distances(tree, self._expected[part]).items():
                    found[part][path] = float(np.maximum(found[part].get(path, 0.0), distance))  # NaN stays
        return found

    def check(self, name: str, run: Any, rtol: float) -> _Check:
        """Checks that the members of a run equal those trained alone."""
        models = run.ensemble.unstack()
        check = _same(name, models, self._expected["model"], rtol)
        if check.problem is None or _unlike(models, self._expected["model"]):
            return check
        again = _same(name, self._train_alone(None), self._expected, rtol)
        if again.problem is not None:
            return _Check(
                name, f"training alone is not the same twice, {again.problem}: does the loss draw without its key?"
            )
        largest = max(self._rounding_effects["losses"].values())
        if not largest <= _CHAOS:
            text = f"{check.problem}; this is inconclusive, because rounding alone changes the losses by {largest:.2g}"
            return _Check(name, f"{text}: take fewer steps, or a larger `eps` of the optimiser")
        losses = list(np.asarray(run.history.loss))
        check = _same(name, models, self._expected["model"], rtol, slack=self._slack("model"))
        if check.problem is not None:
            return check
        return _same(name, losses, self._expected["losses"], rtol, slack=self._slack("losses"), noun="the losses ")

    def _slack(self, part: str) -> dict[str, float]:
        return {path: _MARGIN * moved for path, moved in self._rounding_effects[part].items()}


_PLANS = (Vmap(), Chunked(2), Sequential(), Unrolled())


def check_independent(
    make: Callable[..., Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    num_members: int = 3,
    steps: int = 20,
    batch_size: int | None = None,
    hyper: PyTree = None,
    plans: Iterable[AbstractPlan] = _PLANS,
    rtol: float = 1e-5,
    key: Any,
) -> None:
    """Checks that members of your model are what `make` gives alone, and trained together equal those trained alone.

    The reference is a plain training loop of one model with `equinox.filter_jit` and optax. If weights differ by more
    than `rtol`, training alone is repeated with differently rounded weights, and members may differ by ten times as
    much as these repetitions do. If rounding alone changes the losses by more than a hundredth, the check fails as
    inconclusive.

    If one member has NaN weights from the start, the others must be bit for bit unchanged on a CPU, and within `rtol`
    elsewhere. Under `Vmap`, members are also trained on batches whose memory is overwritten after each step, and with a
    loss that is a Module, or from a state whose `hyper` was replaced.

    **Arguments:**

    - `make`, `loss`, `optimiser`, `data`, `batch_size`, `hyper`, `key`: as for [`eqx_ensemble.build`][] and
        [`eqx_ensemble.fit`][]; rows are taken in the order given, and `data` cannot contain an [`eqx_ensemble.Each`][].
    - `num_members`: the number of members to train; at least two for the check with NaN.
    - `steps`: the number of training steps.
    - `plans`: the plans to train under.
    - `rtol`: the tolerance for weights, relative to the largest number of each array.

    **Raises:** `AssertionError` that lists all checks if one fails.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    data = jnp.ones((10, 3)), jnp.zeros((10, 1))
    ee.testing.check_independent(make, loss, optax.adam(1e-3), data, steps=5, key=key)
    ```
    """
    check_number(rtol, "rtol", least=0)
    check_positive_int(steps, "steps")
    check_optimiser(optimiser, hyper=hyper)
    plans = [as_plan(plan) for plan in check_sequence(plans, "plans", of="plans")]
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    _check_no_each(data)
    rows = check_rows_of_data(data, num_members, argument="data", finite=False)
    size = check_batch_size(batch_size, rows)

    begin = {"state": state, "hyper": hyper}
    in_order = {"batch_size": size, "shuffle": False}

    def train(ensemble: Any, loss: Any, data: PyTree, plan: AbstractPlan = Vmap(), **options: Any) -> Any:  # noqa: B008
        with ignore_warnings(".*diverged"):
            return fit(ensemble, loss, optimiser, data, steps=steps, plan=plan, progress=False, key=key, **options)

    batches = [jax.tree.map(lambda x, i=i: x[i : i + size], data) for i in range(0, rows, size)]
    batches = [batches[i % len(batches)] for i in range(steps)]
    states = [None] * num_members if state is None else _tree.unstack(state)
    hypers = [None] * num_members if hyper is None else _tree.unstack(hyper_arrays(hyper, num_members))
    keys = _keys.member_keys(key, ensemble.ids, purpose="loss")
    reference = _Reference(
        [
            _Alone(model, *rest, loss=loss, optimiser=optimiser, member=i)
            for i, (model, *rest) in enumerate(zip(ensemble, states, hypers, keys, strict=True))
        ],
        batches,
    )
    alone = [make(key) for key in _keys.member_keys(key, num_members)]
    models = alone if state is None else [model for model, _ in alone]
    checks = [_same("each member equals what `make` gives alone", ensemble.unstack(), models, rtol)]
    exact = jax.default_backend() == "cpu"
    for plan in plans:
        words, run = repr(plan), train(ensemble, loss, data, plan, **begin, **in_order)
        checks.append(reference.check(f"{words}: trained together as alone", run, rtol))
        damaged = eqx.tree_at(lambda e: e.stacked, ensemble, _with_nan(ensemble.stacked))
        other = train(damaged, loss, data, plan, **begin, **in_order)
        if num_members > 1:
            others = other.ensemble[1:].unstack(), run.ensemble[1:].unstack()
            checks.append(_same(f"{words}: with a member of NaN", *others, 0.0 if exact else rtol))
        problem = None if other.stopped_at[0] == 0 else f"it diverged at step {other.stopped_at[0]}"
        checks.append(_Check(f"{words}: the member of NaN is frozen at once", problem))

    ways = {"batches whose memory is filled again": train(ensemble, loss, _refill(batches), **begin)}
    if hyper is None:
        held = eqx.Partial(lambda _, *args: loss(*args), jnp.zeros(()))
        ways["a loss that is a Module"] = train(ensemble, held, data, **begin, **in_order)
    else:
        hyper = hyper_arrays(hyper, num_members)
        others = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), hyper)
        first = init(ensemble, optimiser, state=state, hyper=others, key=key)
        first = eqx.tree_at(lambda state: state.hyper, first, hyper)
        ways["hyper-parameters that were changed"] = train(first, loss, data, **in_order)
    checks += [reference.check(f"with {words}: trained together as alone", run, rtol) for words, run in ways.items()]
    if any(check.problem is not None for check in checks):
        raise AssertionError("\n".join([f"`{caller()}`:", *map(str, checks)]))


def _refill(batches: list[PyTree]) -> Iterator[PyTree]:
    """The batches, each in memory that is overwritten when the next one is drawn, as some loaders do."""
    for batch in batches:
        own = jax.tree.map(lambda x: x if is_key(x) else np.array(x), batch)
        yield own
        for x in jax.tree.leaves(own):
            if isinstance(x, np.ndarray):
                x.fill(0)


def _with_nan(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.at[0].set(jnp.nan) if eqx.is_inexact_array(x) else x, stacked)


def _check_no_each(data: PyTree) -> None:
    is_each = lambda x: isinstance(x, Each)
    if any(map(is_each, jax.tree.leaves(data, is_leaf=is_each))):
        raise TypeError(f"`{caller()}` trains all members on the same `data`: pass it without `Each`.")
