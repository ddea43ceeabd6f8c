from ... import _suggest
from ._greedy import Greedy as Greedy
from ._greedy import Sparse as Sparse
from ._greedy import diverse as diverse
from ._greedy import elites as elites
from ._greedy import greedy as greedy
from ._greedy import sparsify as sparsify
from ._stacking import Stacking as Stacking
from ._stacking import bayesian as bayesian
from ._stacking import stacking as stacking

_suggest.explain_names(__name__)
