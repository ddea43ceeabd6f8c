"""Densities of hidden units: how unusual a row is for a trained member, without any change of its training."""

from ._discriminant import GaussianDiscriminant as GaussianDiscriminant
from ._discriminant import gaussian_discriminant as gaussian_discriminant
from ._mahalanobis import Mahalanobis as Mahalanobis
from ._mahalanobis import mahalanobis as mahalanobis
