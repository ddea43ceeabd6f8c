from .. import _suggest
from . import adapters as adapters
from . import alignment as alignment
from . import density as density
from . import distillation as distillation
from . import efficient as efficient
from . import heads as heads
from . import laplace as laplace
from . import particles as particles
from . import population as population
from . import priors as priors
from . import sampling as sampling
from . import sngp as sngp
from . import soups as soups
from . import trajectory as trajectory
from ._cross_fit import CrossFit as CrossFit
from ._cross_fit import cross_fit as cross_fit
from ._halving import hyperband as hyperband
from ._halving import successive_halving as successive_halving
from ._pbt import Population as Population
from ._pbt import population_based_training as population_based_training

_suggest.explain_names(__name__)
