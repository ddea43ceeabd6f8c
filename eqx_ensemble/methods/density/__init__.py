"""Densities of hidden units: out-of-distribution scores of trained members, without any change of their training."""

from ._density import GaussianDiscriminant as GaussianDiscriminant
from ._density import Mahalanobis as Mahalanobis
from ._density import gaussian_discriminant as gaussian_discriminant
from ._density import mahalanobis as mahalanobis
