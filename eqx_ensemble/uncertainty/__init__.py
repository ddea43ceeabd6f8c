from ._decomposition import Decomposition as Decomposition
from ._entropy import decompose_entropy as decompose_entropy
from ._entropy import entropy as entropy
from ._interval import Interval as Interval
from ._interval import gaussian_interval as gaussian_interval
from ._variance import decompose_variance as decompose_variance
