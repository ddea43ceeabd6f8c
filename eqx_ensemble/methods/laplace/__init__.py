"""Laplace approximations: a Gaussian posterior of some weights of each member, around the trained ones."""

from ._fit import fit as fit
from ._laplace import Laplace as Laplace
from ._member import Outputs as Outputs
from ._replace import replace as replace
from ._subnetwork import subnetwork as subnetwork
