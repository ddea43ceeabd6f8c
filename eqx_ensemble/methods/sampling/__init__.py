"""Sampling from a posterior by stochastic-gradient MCMC, and diagnostics of the chains.

The samplers are optax optimisers: each member is a chain with independent noise.
"""

from ... import _suggest
from ._diagnostics import Diagnostics as Diagnostics
from ._diagnostics import diagnostics as diagnostics
from ._sgld import cyclical_temperature as cyclical_temperature
from ._sgld import psgld as psgld
from ._sgld import sghmc as sghmc
from ._sgld import sgld as sgld

_suggest.explain_names(__name__)
