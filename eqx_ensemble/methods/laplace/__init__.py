"""Laplace approximations: a Gaussian posterior over some weights of each member, centred at the trained weights."""

from ._fit import fit as fit
from ._laplace import Laplace as Laplace
from ._laplace import Outputs as Outputs
from ._laplace import with_prior as with_prior
