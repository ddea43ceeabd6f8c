"""SNGP: members whose uncertainty grows with the distance from the training data.

A network with bounded spectral norms, and a Gaussian process in random features as its last layer.
"""

from ._model import SNGP as SNGP
from ._model import SNGPOutput as SNGPOutput
from ._model import mean_field as mean_field
from ._model import update_covariance as update_covariance
from ._spectral import bound_spectral_norm as bound_spectral_norm
