from ._classes import mixture as mixture
from ._classes import vote as vote
from ._gaussian import Gaussian as Gaussian
from ._gaussian import gaussian as gaussian
from ._mean import mean as mean
