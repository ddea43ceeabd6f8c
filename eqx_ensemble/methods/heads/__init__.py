"""Heads: the parameters that a last layer predicts, and the losses to train them.

Losses take the predictions of ONE member on one batch, as in a loss of `eqx_ensemble.fit`. Functions without targets
accept any leading axes, including `members`. Several parameters are arrays of one shape: `loss(*head(raw), targets)`.
"""

from ._classification import decompose_dirichlet as decompose_dirichlet
from ._classification import dirichlet as dirichlet
from ._classification import dirichlet_loss as dirichlet_loss
from ._classification import vacuity as vacuity
from ._regression import MixtureComponents as MixtureComponents
from ._regression import MixtureDensity as MixtureDensity
from ._regression import NormalInverseGamma as NormalInverseGamma
from ._regression import decompose_evidential as decompose_evidential
from ._regression import evidential_loss as evidential_loss
from ._regression import mixture_components as mixture_components
from ._regression import mixture_density as mixture_density
from ._regression import mixture_density_loss as mixture_density_loss
from ._regression import mixture_density_moments as mixture_density_moments
from ._regression import normal_inverse_gamma as normal_inverse_gamma
from ._regression import pinball_loss as pinball_loss
from ._regression import sort_quantiles as sort_quantiles
