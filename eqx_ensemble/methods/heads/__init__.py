"""Heads: the parameters that a last layer predicts, and the losses to train them.

Losses take the predictions of ONE member on one batch, as in a loss of `eqx_ensemble.fit`. Functions without targets
accept any leading axes, including `members`.
"""

from ._dirichlet import decompose_dirichlet as decompose_dirichlet
from ._dirichlet import dirichlet as dirichlet
from ._dirichlet import dirichlet_loss as dirichlet_loss
from ._dirichlet import vacuity as vacuity
from ._evidential import NormalInverseGamma as NormalInverseGamma
from ._evidential import decompose_evidential as decompose_evidential
from ._evidential import evidential_loss as evidential_loss
from ._evidential import normal_inverse_gamma as normal_inverse_gamma
from ._mixture_density import MixtureComponents as MixtureComponents
from ._mixture_density import MixtureDensity as MixtureDensity
from ._mixture_density import mixture_components as mixture_components
from ._mixture_density import mixture_density as mixture_density
from ._mixture_density import mixture_density_loss as mixture_density_loss
from ._mixture_density import mixture_density_moments as mixture_density_moments
from ._mixture_density import pinball_loss as pinball_loss
from ._mixture_density import sort_quantiles as sort_quantiles
