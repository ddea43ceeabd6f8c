from .. import _suggest
from .._combination import AbstractCombination as AbstractCombination
from .._combination import streaming as streaming
from . import weights as weights
from ._classes import mean_logits as mean_logits
from ._classes import mixture as mixture
from ._classes import vote as vote
from ._moments import Gaussian as Gaussian
from ._moments import gaussian as gaussian
from ._moments import log_mixture as log_mixture
from ._moments import mean as mean
from ._moments import moments as moments
from ._moments import product_gaussian as product_gaussian
from ._robust import QuantileSketch as QuantileSketch
from ._robust import median as median
from ._robust import trimmed_mean as trimmed_mean

_suggest.explain_names(__name__)
