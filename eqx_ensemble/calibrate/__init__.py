from .. import _suggest
from ._affine import Matrix as Matrix
from ._affine import Vector as Vector
from ._affine import matrix as matrix
from ._affine import vector as vector
from ._isotonic import Histogram as Histogram
from ._isotonic import Isotonic as Isotonic
from ._isotonic import histogram as histogram
from ._isotonic import isotonic as isotonic
from ._logistic import Beta as Beta
from ._logistic import Platt as Platt
from ._logistic import beta as beta
from ._logistic import platt as platt
from ._temperature import Temperature as Temperature
from ._temperature import Variance as Variance
from ._temperature import temperature as temperature
from ._temperature import variance as variance

_suggest.explain_names(__name__)
