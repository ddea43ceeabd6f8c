"""Which optimisers and transforms of optax are silently wrong when they are given stacked parameters?

Three members with data of their own train 20 steps: each of them alone; all as one stacked tree, whose optimiser sees a
leading `members` axis and the gradient of the sum of losses; and by `train.make_step`. A transform is wrong if a weight
ends at another value than alone. A NaN in one member's targets spreads if a weight of another member is not finite.
"""

import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, counted, module_at, script

import eqx_ensemble as ee

MEMBERS, STEPS, TOLERANCE = 3, 20, 1e-5

# They do what the transforms, functions or masks that they are given do.
WRAPPERS = {
    "apply_if_finite", "chain", "conditionally_mask", "conditionally_transform", "contrib.split_real_and_imaginary",
    "flatten", "freeze", "inject_hyperparams", "inject_stateful_hyperparams", "masked", "multi steps",
    "multi_transform", "named_chain", "partition", "selective_transform", "snapshot", "stateless",
    "stateless_with_tree_map", "with_extra_args_support",
}  # fmt: skip
# Their noise differs between one key and several, so that nothing is to be compared.
NOISY = {"add_noise", "noisy_sgd", "contrib.hutchinson_estimator_diag_hessian", "contrib.sophia"}
# The public names of optax, and how each is made: what the tests use.
CASES = pathlib.Path(__file__).parent.parent / "tests/train/optax_cases.py"
QUICK = ["adam", "clip_by_global_norm", "lamb"]


def measure(quick: bool) -> Report:
    report, census = Report("optax on stacked parameters"), module_at(CASES)
    names = QUICK if quick else [name for name in census.TRAINED if name not in WRAPPERS | NOISY]
    wrong, spread, ours, failed = [], [], [], []
    for name in names:
        with jax.enable_x64("lbfgs" in name), warnings.catch_warnings():  # a line search compares
            warnings.simplefilter("ignore")
            optimiser, (params, x, y) = census.optimiser(name), _problem()
            of_one, of_all = (_training(name, optimiser, loss) for loss in (_loss, _total))
            members = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(MEMBERS)]
            alone = ee.tree.stack([of_one(p, x[:, i], y[:, i]) for i, p in enumerate(members)])
            ours += [name] * _differ(_ours(optimiser, params, x, y), alone)
            try:
                stacked, broken = (of_all(params, x, targets) for targets in (y, y.at[:, -1].set(jnp.nan)))
            except Exception as error:
                failed.append(f"{name} ({type(error).__name__})")
                continue
        wrong += [name] * _differ(stacked, alone)
        spread += [name] * any(not np.isfinite(leaf[:-1]).all() for leaf in jax.tree.leaves(broken))
    report.facts |= {
        "wrong": ", ".join(wrong),
        "one NaN spreads": ", ".join(spread),
        "raise an error": ", ".join(failed) or "none",
    }
    report.rows += [
        counted("transforms of optax on stacked parameters", "silently wrong", len(wrong), len(names)),
        counted("one member's NaN, stacked parameters", "spreads to the others", len(spread), len(names)),
        counted("the same by `train.make_step`", "wrong", len(ours), len(names), target="<= 0"),
    ]
    return report


def _problem() -> tuple[Any, jax.Array, jax.Array]:
    """Stacked parameters, and the data of every step and member, whose targets have scales of their own."""

    def make(key):
        first, bias, second = jax.random.split(key, 3)
        shapes = {"first": (first, (4, 6)), "bias": (bias, (6,)), "second": (second, (6, 4))}
        return {name: jax.random.normal(key, shape) / 2 for name, (key, shape) in shapes.items()}

    params = jax.vmap(make)(jax.random.split(jax.random.key(0), MEMBERS))
    x, y = (jax.random.normal(key, (STEPS, MEMBERS, 8, 4)) for key in jax.random.split(jax.random.key(1)))
    return params, x, y * jnp.array([0.3, 1.0, 4.0]).reshape(1, MEMBERS, 1, 1)


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"] - y) ** 2)


def _total(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(_loss)(params, x, y))


def _training(name: str, optimiser: Any, loss: Any) -> Any:
    """A function of parameters and data that trains, whose program is compiled once."""
    transform = optax.with_extra_args_support(optimiser)

    @jax.jit
    def step(params, state, x, y):
        value_fn = lambda params: loss(params, x, y)
        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {} if name == "contrib.sam" else {"value": value, "grad": grad, "value_fn": value_fn}
        updates, state = transform.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def train(params, x, y):
        state = transform.init(params)
        for i in range(STEPS):
            params, state = step(params, state, x[i], y[i])
        return params

    return train


def _ours(optimiser: Any, params: Any, x: jax.Array, y: jax.Array) -> Any:
    state = ee.train.init(ee.from_stacked(params), optimiser, key=jax.random.key(2))
    step = ee.train.make_step(lambda params, batch, key: _loss(params, *batch), optimiser)
    for i in range(STEPS):
        state, _ = step(state, (ee.Each(x[i]), ee.Each(y[i])))
    return state.ensemble.stacked


def _differ(found: Any, expected: Any) -> bool:
    """Whether a leaf differs by more than rounding, relative to its largest number."""
    far = lambda a, b: not float(jnp.max(jnp.abs(a - b))) <= TOLERANCE * float(jnp.max(jnp.abs(b)))
    return any(jax.tree.leaves(jax.tree.map(far, found, expected)))


if __name__ == "__main__":
    script(measure)
