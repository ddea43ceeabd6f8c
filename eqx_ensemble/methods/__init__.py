from . import population as population
from . import priors as priors
from ._cross_fit import CrossFit as CrossFit
from ._cross_fit import cross_fit as cross_fit
from ._halving import hyperband as hyperband
from ._halving import successive_halving as successive_halving
from ._pbt import Population as Population
from ._pbt import population_based_training as population_based_training
