"""Modules of other libraries, by library."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .cases import Case, Lazy, Unfit, uniform, values

diffrax = Lazy("diffrax")
base = Lazy("flowjax.distributions")
distributions = Lazy("distreqx.distributions")
bijectors = Lazy("distreqx.bijectors")
flows = Lazy("flowjax.flows")
lineax = Lazy("lineax")
paramax = Lazy("paramax")
lora = Lazy("quax.examples.lora")
quax = Lazy("quax")
sympy = Lazy("sympy")
sympy2jax = Lazy("sympy2jax")


class Field(eqx.Module):
    """A vector field for the terms of diffrax."""

    mlp: eqx.nn.MLP

    def __init__(self, key, out=2):
        self.mlp = eqx.nn.MLP(2, out, 4, 1, jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.mlp(y)


def solve(solver, **options):
    """A neural ODE; the solver is a field of it."""

    def call(model, y):
        terms, solver = model
        return diffrax.diffeqsolve(terms, solver, 0.0, 0.5, 0.25, y, max_steps=8, **options).ys

    return Case(lambda key: (diffrax.ODETerm(Field(key)), getattr(diffrax, solver)()), values(2), call, rtol=1e-4)


def solve_adaptively(model, y):
    control = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    return diffrax.diffeqsolve(model, diffrax.Tsit5(), 0.0, 0.5, 0.25, y, stepsize_controller=control).ys


def control_path(key):
    times = jnp.linspace(0.0, 1.0, 4)
    return times, uniform(key, 4, 2)


def noisy_terms(key):
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.25, shape=(2,), key=jax.random.fold_in(key, 1))
    drift = diffrax.ODETerm(Field(key))
    return diffrax.MultiTerm(drift, diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(2), noise))


DIFFRAX = {
    "Heun": solve("Heun"),
    "PIDController": Case(lambda key: diffrax.ODETerm(Field(key)), values(2), solve_adaptively, rtol=1e-4),
    "ControlTerm": Case(
        lambda key: diffrax.ControlTerm(Field(key, 4), diffrax.LinearInterpolation(*control_path(key))),
        values(2),
        lambda term, y: (term.vf(0.0, y, None), term.contr(0.0, 0.5)),
    ),
    "MultiTerm": Case(noisy_terms, values(2), lambda terms, y: terms.vf(0.0, y, None)[0]),
    "VirtualBrownianTree": Case(
        lambda key: diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.25, shape=(2,), key=key),
        jnp.array(0.5),
        lambda path, t: path.evaluate(t),
    ),
}


def density(make, x=None):
    return Case(make, values(3) if x is None else x, lambda distribution, x: distribution.log_prob(x))


def diagonal(key):
    return bijectors.DiagLinear(uniform(key, 3))


def normal(key):
    return distributions.Normal(uniform(key, 3), uniform(jax.random.fold_in(key, 1), 3))


DISTREQX = {
    "MixtureSameFamily": density(
        lambda key: distributions.MixtureSameFamily(
            distributions.Categorical(logits=uniform(key, 3)),
            eqx.filter_vmap(distributions.Normal)(uniform(key, 3), jnp.ones(3)),
        ),
        values(),
    ),
    "Transformed": density(
        lambda key: distributions.Transformed(distributions.Independent(normal(key)), diagonal(key))
    ),
}

FLOWJAX = {
    name: Case(
        lambda key, name=name: getattr(flows, name)(
            key, base_dist=base.Normal(jnp.zeros(3)), flow_layers=2, nn_width=4
        ),
        values(3),
        lambda flow, x: flow.log_prob(x),
        rtol=1e-4,  # log-densities are sums of terms that cancel
    )
    for name in ("coupling_flow", "masked_autoregressive_flow")
}


def product(make, x=None):
    return Case(make, values(3) if x is None else x, lambda operator, x: operator.mv(x))


def matrix(key):
    return lineax.MatrixLinearOperator(uniform(key, 3, 3) + 3 * jnp.eye(3))


def solution(name, make=matrix, *options):
    """A solver of a linear system, and the system."""

    def call(model, x):
        operator, solver = model
        return lineax.linear_solve(operator, x, solver).value

    return Case(lambda key: (make(key), getattr(lineax, name)(*options)), values(3), call, rtol=1e-3)


LINEAX = {
    "FunctionLinearOperator": product(
        lambda key: lineax.FunctionLinearOperator(eqx.nn.Linear(3, 3, use_bias=False, key=key), jnp.zeros(3))
    ),
    "LU": solution("LU"),
}


def with_lora(key):
    linear = eqx.nn.MLP(3, 2, 4, 1, key=key)
    return lora.loraify(linear, rank=1, scale=1.0, key=jax.random.fold_in(key, 1))


QUAX = {
    "LoraArray": Case(with_lora, values(3), lambda model, x: quax.quaxify(model)(x)),
}


def symbolic(key):
    x = sympy.symbols("x")
    module = sympy2jax.SymbolicModule(1.5 * sympy.sin(2.5 * x) + sympy.Rational(1, 2))
    return jax.tree.map(lambda leaf: leaf * uniform(key) if eqx.is_inexact_array(leaf) else leaf, module)


SYMPY = {"SymbolicModule": Case(symbolic, jnp.array(0.3), lambda module, x: module(x=x))}

LIBRARIES: dict[str, dict[str, Any]] = {
    "flowjax": FLOWJAX,
    "diffrax": DIFFRAX,
    "distreqx": DISTREQX,
    "lineax": LINEAX,
    "quax": QUAX,
    "sympy2jax": SYMPY,
}


def closure(key):
    weight = uniform(key, 3)
    return lambda *args: weight


HIDDEN = (
    "the function closes over an array of one member, which `jax.vmap` cannot map: make the array a field of a Module"
)
UNFIT = {
    "`Lambda` of a closure, of equinox.nn": Unfit(
        lambda key: eqx.nn.Lambda(closure(key)), "closure variable `weight`", HIDDEN
    ),
    "`ODETerm` of a closure, of diffrax": Unfit(
        lambda key: diffrax.ODETerm(closure(key)), "closure variable `weight`", HIDDEN
    ),
    "`Parameterize` of a closure, of paramax": Unfit(
        lambda key: paramax.Parameterize(closure(key)), "closure variable `weight`", HIDDEN
    ),
}
