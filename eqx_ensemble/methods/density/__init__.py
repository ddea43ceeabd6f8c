"""Densities of hidden units: out-of-distribution scores of trained members, without any change of their training."""

from ... import _suggest
from ._mahalanobis import GaussianDiscriminant as GaussianDiscriminant
from ._mahalanobis import Mahalanobis as Mahalanobis
from ._mahalanobis import gaussian_discriminant as gaussian_discriminant
from ._mahalanobis import mahalanobis as mahalanobis

_suggest.explain_names(__name__)
