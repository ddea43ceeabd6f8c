"""Modules of flowjax: bijections, distributions and flows."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .cases import Case, Lazy, uniform, values

bijections = Lazy("flowjax.bijections")
distributions = Lazy("flowjax.distributions")
flows = Lazy("flowjax.flows")


def transform(bijection, x):
    return bijection.transform_and_log_det(x)


def log_prob(distribution, x):
    return distribution.log_prob(x)


def of(make, *shape):
    return Case(make, values(*shape), transform)


def affine(key):
    return bijections.Affine(uniform(key, 3), uniform(jax.random.fold_in(key, 1), 3))


def scale(key):
    return bijections.Scale(uniform(key, 3))


def spline(key):
    """Knots that differ between members: the untrained spline is the identity."""
    made = bijections.RationalQuadraticSpline(knots=4, interval=2)
    return jax.tree.map(lambda x: x + uniform(key, *x.shape) if eqx.is_inexact_array(x) else x, made)


def coupling(key):
    return bijections.Coupling(key, transformer=bijections.Affine(), untransformed_dim=1, dim=3, nn_width=4, nn_depth=1)


def autoregressive(key):
    return bijections.MaskedAutoregressive(key, transformer=bijections.Affine(), dim=3, nn_width=4, nn_depth=1)


def embed(key):
    return eqx.nn.MLP(2, 3, 4, 1, key=key)


BIJECTIONS = {
    "AdditiveCondition": Case(
        lambda key: bijections.AdditiveCondition(embed(key), (3,), (2,)),
        (values(3), values(2)),
        lambda bijection, x: bijection.transform_and_log_det(*x),
    ),
    "Affine": of(affine, 3),
    "BlockAutoregressiveNetwork": of(
        lambda key: bijections.BlockAutoregressiveNetwork(key, dim=3, depth=1, block_dim=2), 3
    ),
    "Chain": of(lambda key: bijections.Chain([affine(key), bijections.Tanh((3,))]), 3),
    "Concatenate": of(lambda key: bijections.Concatenate([affine(key), scale(key)]), 6),
    "Coupling": of(coupling, 3),
    "DiscreteCosine": of(lambda key: bijections.Chain([affine(key), bijections.DiscreteCosine((3,))]), 3),
    "EmbedCondition": Case(
        lambda key: bijections.EmbedCondition(bijections.AdditiveCondition(lambda x: x, (3,), (3,)), embed(key), (2,)),
        (values(3), values(2)),
        lambda bijection, x: bijection.transform_and_log_det(*x),
    ),
    "Exp": of(lambda key: bijections.Chain([affine(key), bijections.Exp((3,))]), 3),
    "Flip": of(lambda key: bijections.Chain([affine(key), bijections.Flip((3,))]), 3),
    "Householder": of(lambda key: bijections.Householder(uniform(key, 3)), 3),
    "Identity": of(lambda key: bijections.Chain([affine(key), bijections.Identity((3,))]), 3),
    "Indexed": of(lambda key: bijections.Indexed(scale(key), jnp.array([0, 2, 3]), (4,)), 4),
    "Invert": of(lambda key: bijections.Invert(affine(key)), 3),
    "LeakyTanh": of(lambda key: bijections.Chain([affine(key), bijections.LeakyTanh(1.0, (3,))]), 3),
    "Loc": of(lambda key: bijections.Loc(uniform(key, 3)), 3),
    "MaskedAutoregressive": of(autoregressive, 3),
    "NumericalInverse": of(lambda key: bijections.NumericalInverse(affine(key), lambda bijection, y, condition: y), 3),
    "Permute": of(lambda key: bijections.Chain([affine(key), bijections.Permute(jnp.array([2, 0, 1]))]), 3),
    "Planar": of(lambda key: bijections.Planar(key, dim=3, negative_slope=0.1), 3),
    "Power": of(lambda key: bijections.Chain([bijections.Exp((3,)), bijections.Power(2.0, (3,)), scale(key)]), 3),
    "RationalQuadraticSpline": of(spline),
    "Reshape": of(lambda key: bijections.Reshape(affine(key), (3, 1)), 3, 1),
    "Sandwich": of(lambda key: bijections.Sandwich(affine(key), bijections.LeakyTanh(1.0, (3,))), 3),
    "Scale": of(scale, 3),
    "Scan": of(lambda key: bijections.Scan(eqx.filter_vmap(affine)(jax.random.split(key, 2))), 3),
    "Sigmoid": of(lambda key: bijections.Chain([affine(key), bijections.Sigmoid((3,))]), 3),
    "SoftPlus": of(lambda key: bijections.Chain([affine(key), bijections.SoftPlus((3,))]), 3),
    "Stack": of(lambda key: bijections.Stack([affine(key), scale(key)]), 2, 3),
    "Tanh": of(lambda key: bijections.Chain([affine(key), bijections.Tanh((3,))]), 3),
    "TriangularAffine": of(
        lambda key: bijections.TriangularAffine(uniform(key, 3), jnp.eye(3) + jnp.tril(uniform(key, 3, 3))), 3
    ),
    "Vmap": of(lambda key: bijections.Vmap(affine(key), axis_size=2), 2, 3),
}


def of_two(name, *more):
    """A distribution of a location and a scale, and perhaps a shape."""

    def make(key):
        parameters = [uniform(jax.random.fold_in(key, i), 3) for i in range(2)]
        return getattr(distributions, name)(*more, *parameters)

    return Case(make, values(3), log_prob)


def positive(make):
    return Case(make, 0.5 + 0.4 * values(3), log_prob)


def second(key):
    return uniform(jax.random.fold_in(key, 1), 3)


DISTRIBUTIONS = {name: of_two(name) for name in ("Normal", "Gumbel", "Cauchy", "Laplace", "Logistic")}
DISTRIBUTIONS |= {
    "StudentT": of_two("StudentT", 3.0),
    "StandardNormal": Case(
        lambda key: distributions.Transformed(distributions.StandardNormal((3,)), affine(key)), values(3), log_prob
    ),
    "Transformed": Case(
        lambda key: distributions.Transformed(distributions.Normal(uniform(key, 3)), affine(key)), values(3), log_prob
    ),
    "LogNormal": positive(lambda key: distributions.LogNormal(uniform(key, 3), second(key))),
    "Exponential": positive(lambda key: distributions.Exponential(uniform(key, 3))),
    "Gamma": positive(lambda key: distributions.Gamma(uniform(key, 3), second(key))),
    "Beta": positive(lambda key: distributions.Beta(uniform(key, 3), second(key))),
    "Uniform": Case(lambda key: distributions.Uniform(-uniform(key, 3) - 1, uniform(key, 3) + 1), values(3), log_prob),
    "MultivariateNormal": Case(
        lambda key: distributions.MultivariateNormal(uniform(key, 3), jnp.eye(3) * (1 + uniform(key))),
        values(3),
        log_prob,
    ),
    "VmapMixture": Case(
        lambda key: distributions.VmapMixture(eqx.filter_vmap(distributions.Normal)(uniform(key, 4)), jnp.ones(4)),
        values(),
        log_prob,
    ),
}


def flow(name, **options):
    def make(key):
        base = distributions.Normal(jnp.zeros(3))
        return getattr(flows, name)(key, base_dist=base, **options)

    return Case(make, values(3), log_prob, rtol=1e-4)  # log-densities are sums of terms that cancel


small = {"flow_layers": 2, "nn_width": 4}
FLOWS = {
    "coupling_flow": flow("coupling_flow", **small),
    "masked_autoregressive_flow": flow("masked_autoregressive_flow", **small),
    "block_neural_autoregressive_flow": flow("block_neural_autoregressive_flow", nn_block_dim=2),
    "planar_flow": flow("planar_flow", flow_layers=2, nn_width=4, nn_depth=1, negative_slope=0.1),
    "triangular_spline_flow": flow("triangular_spline_flow", flow_layers=2, knots=4),
}
CASES = BIJECTIONS | DISTRIBUTIONS | FLOWS
