"""Modules of other libraries, by library."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import flows
from .cases import Case, Lazy, Unfit, uniform, values

diffrax = Lazy("diffrax")
distributions = Lazy("distreqx.distributions")
bijectors = Lazy("distreqx.bijectors")
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
    **{name: solve(name) for name in ("Euler", "Heun", "Midpoint", "Ralston", "Bosh3", "Tsit5", "Dopri5", "Dopri8")},
    "ReversibleHeun": solve("ReversibleHeun"),
    "Kvaerno3": Case(
        lambda key: diffrax.ODETerm(Field(key)),
        values(2),
        lambda term, y: (
            diffrax.diffeqsolve(
                term,
                diffrax.Kvaerno3(),
                0.0,
                0.5,
                0.25,
                y,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
            ).ys
        ),
        rtol=1e-3,  # roots are found to 1e-3
    ),
    "PIDController": Case(lambda key: diffrax.ODETerm(Field(key)), values(2), solve_adaptively, rtol=1e-4),
    "ODETerm": Case(lambda key: diffrax.ODETerm(Field(key)), values(2), lambda term, y: term.vf(0.0, y, None)),
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
    "UnsafeBrownianPath": Case(
        lambda key: diffrax.UnsafeBrownianPath(shape=(2,), key=key),
        jnp.array(0.5),
        lambda path, t: path.evaluate(jnp.array(0.0), t),
    ),
    "LinearInterpolation": Case(
        lambda key: diffrax.LinearInterpolation(*control_path(key)), jnp.array(0.3), lambda path, t: path.evaluate(t)
    ),
    "CubicInterpolation": Case(
        lambda key: diffrax.CubicInterpolation(
            control_path(key)[0], diffrax.backward_hermite_coefficients(*control_path(key))
        ),
        jnp.array(0.3),
        lambda path, t: path.evaluate(t),
    ),
}


def density(make, x=None):
    return Case(make, values(3) if x is None else x, lambda distribution, x: distribution.log_prob(x))


def forward(make, x=None):
    return Case(make, values(3) if x is None else x, lambda bijector, x: bijector.forward_and_log_det(x))


def diagonal(key):
    return bijectors.DiagLinear(uniform(key, 3))


def normal(key):
    return distributions.Normal(uniform(key, 3), uniform(jax.random.fold_in(key, 1), 3))


inside = 0.5 + 0.4 * values(3)
DISTREQX = {
    "Normal": density(normal),
    "Logistic": density(lambda key: distributions.Logistic(uniform(key, 3), uniform(key, 3))),
    "Uniform": density(lambda key: distributions.Uniform(-uniform(key, 3) - 1, uniform(key, 3) + 1)),
    "Gamma": density(lambda key: distributions.Gamma(uniform(key, 3), uniform(key, 3)), inside),
    "Beta": density(lambda key: distributions.Beta(uniform(key, 3), uniform(key, 3)), inside),
    "Bernoulli": density(lambda key: distributions.Bernoulli(logits=uniform(key, 3)), jnp.array([0, 1, 1])),
    "Categorical": density(lambda key: distributions.Categorical(logits=uniform(key, 3)), jnp.array(1)),
    "OneHotCategorical": density(
        lambda key: distributions.OneHotCategorical(logits=uniform(key, 3)), jnp.array([0.0, 1.0, 0.0])
    ),
    "Independent": density(lambda key: distributions.Independent(normal(key))),
    "MixtureSameFamily": density(
        lambda key: distributions.MixtureSameFamily(
            distributions.Categorical(logits=uniform(key, 3)),
            eqx.filter_vmap(distributions.Normal)(uniform(key, 3), jnp.ones(3)),
        ),
        values(),
    ),
    "MultivariateNormalDiag": density(
        lambda key: distributions.MultivariateNormalDiag(uniform(key, 3), uniform(key, 3))
    ),
    "MultivariateNormalTri": density(
        lambda key: distributions.MultivariateNormalTri(uniform(key, 3), jnp.eye(3) + jnp.tril(uniform(key, 3, 3)))
    ),
    "MultivariateNormalFullCovariance": density(
        lambda key: distributions.MultivariateNormalFullCovariance(uniform(key, 3), jnp.eye(3) * (1 + uniform(key)))
    ),
    "MultivariateNormalFromBijector": density(
        lambda key: distributions.MultivariateNormalFromBijector(uniform(key, 3), diagonal(key))
    ),
    "Transformed": density(
        lambda key: distributions.Transformed(distributions.Independent(normal(key)), diagonal(key))
    ),
    "Block": forward(lambda key: bijectors.Block(bijectors.ScalarAffine(uniform(key, 3), uniform(key, 3)), ndims=1)),
    "Chain": forward(
        lambda key: bijectors.Chain([bijectors.Tanh(), bijectors.ScalarAffine(uniform(key), uniform(key))])
    ),
    "DiagLinear": forward(diagonal),
    "ScalarAffine": forward(lambda key: bijectors.ScalarAffine(uniform(key, 3), uniform(key, 3))),
    "Shift": forward(lambda key: bijectors.Shift(uniform(key, 3))),
    "Sigmoid": forward(lambda key: bijectors.Chain([bijectors.Sigmoid(), bijectors.Shift(uniform(key, 3))])),
    "Tanh": forward(lambda key: bijectors.Chain([bijectors.Tanh(), bijectors.Shift(uniform(key, 3))])),
    "TriangularLinear": forward(lambda key: bijectors.TriangularLinear(jnp.eye(3) + jnp.tril(uniform(key, 3, 3)))),
    "UnconstrainedAffine": forward(
        lambda key: bijectors.UnconstrainedAffine(jnp.eye(3) * (1 + uniform(key)), uniform(key, 3))
    ),
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


def triangular(key):
    return lineax.MatrixLinearOperator(jnp.eye(3) + jnp.tril(uniform(key, 3, 3)), lineax.lower_triangular_tag)


def definite(key):
    root = uniform(key, 3, 3)
    return lineax.MatrixLinearOperator(root @ root.T + jnp.eye(3), lineax.positive_semidefinite_tag)


def tridiagonal(key):
    return lineax.TridiagonalLinearOperator(3 + uniform(key, 3), uniform(key, 2), uniform(key, 2))


LINEAX = {
    "MatrixLinearOperator": product(matrix),
    "DiagonalLinearOperator": product(lambda key: lineax.DiagonalLinearOperator(uniform(key, 3))),
    "TridiagonalLinearOperator": product(tridiagonal),
    "FunctionLinearOperator": product(
        lambda key: lineax.FunctionLinearOperator(eqx.nn.Linear(3, 3, use_bias=False, key=key), jnp.zeros(3))
    ),
    "JacobianLinearOperator": product(lambda key: lineax.JacobianLinearOperator(Nonlinear(key), values(3))),
    "TaggedLinearOperator": product(lambda key: lineax.TaggedLinearOperator(matrix(key), lineax.symmetric_tag)),
    "AddLinearOperator": product(lambda key: matrix(key) + matrix(jax.random.fold_in(key, 1))),
    "ComposedLinearOperator": product(lambda key: matrix(key) @ matrix(jax.random.fold_in(key, 1))),
    "MulLinearOperator": product(lambda key: matrix(key) * uniform(key)),
    "LU": solution("LU"),
    "QR": solution("QR"),
    "SVD": solution("SVD"),
    "Cholesky": solution("Cholesky", definite),
    "CG": solution("CG", definite, 1e-6, 1e-6),
    "GMRES": solution("GMRES", matrix, 1e-6, 1e-6),
    "BiCGStab": solution("BiCGStab", definite, 1e-6, 1e-6),
    "Triangular": solution("Triangular", triangular),
    "Tridiagonal": solution("Tridiagonal", tridiagonal),
}


class Nonlinear(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)

    def __call__(self, x, args):
        return jnp.tanh(self.linear(x))


def with_lora(key):
    linear = eqx.nn.MLP(3, 2, 4, 1, key=key)
    return lora.loraify(linear, rank=1, scale=1.0, key=jax.random.fold_in(key, 1))


QUAX = {
    "LoraArray": Case(with_lora, values(3), lambda model, x: quax.quaxify(model)(x)),
    "Quaxify": Case(lambda key: quax.quaxify(with_lora(key)), values(3)),
}


def symbolic(key):
    x = sympy.symbols("x")
    module = sympy2jax.SymbolicModule(1.5 * sympy.sin(2.5 * x) + sympy.Rational(1, 2))
    return jax.tree.map(lambda leaf: leaf * uniform(key) if eqx.is_inexact_array(leaf) else leaf, module)


SYMPY = {"SymbolicModule": Case(symbolic, jnp.array(0.3), lambda module, x: module(x=x))}

LIBRARIES: dict[str, dict[str, Any]] = {
    "flowjax": flows.CASES,
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
