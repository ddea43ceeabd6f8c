from .. import _suggest
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
from ._independent import Bootstraps as Bootstraps
from ._independent import Dropout as Dropout
from ._independent import Seeds as Seeds
from ._joint import MIMO as MIMO
from ._joint import BatchEnsemble as BatchEnsemble
from ._joint import Masksembles as Masksembles
from ._joint import Packed as Packed
from ._joint import TabM as TabM
from ._paths import SWAG as SWAG
from ._paths import Snapshots as Snapshots
from ._pbt import Population as Population
from ._pbt import population_based_training as population_based_training
from ._posteriors import Laplace as Laplace
from ._protocol import AbstractMethod as AbstractMethod
from ._protocol import Posterior as Posterior

_suggest.explain_names(__name__)
