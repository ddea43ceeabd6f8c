from ._bayesian import bayesian as bayesian
from ._elites import elites as elites
from ._greedy import Greedy as Greedy
from ._greedy import greedy as greedy
from ._sparsify import Sparse as Sparse
from ._sparsify import sparsify as sparsify
from ._stacking import Stacking as Stacking
from ._stacking import stacking as stacking
