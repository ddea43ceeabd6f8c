"""Sampling from a posterior by stochastic-gradient MCMC, and diagnostics of the chains.

The samplers are optax optimisers: each member is a chain with independent noise.
"""

from ._diagnostics import Diagnostics as Diagnostics
from ._diagnostics import diagnostics as diagnostics
from ._langevin import cyclical_temperature as cyclical_temperature
from ._langevin import psgld as psgld
from ._langevin import sghmc as sghmc
from ._langevin import sgld as sgld
