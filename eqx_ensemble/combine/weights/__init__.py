from ... import _suggest
from ._bayesian import bayesian as bayesian
from ._diverse import diverse as diverse
from ._elites import elites as elites
from ._greedy import Greedy as Greedy
from ._greedy import greedy as greedy
from ._sparsify import Sparse as Sparse
from ._sparsify import sparsify as sparsify
from ._stacking import Stacking as Stacking
from ._stacking import stacking as stacking

_suggest.explain_names(__name__)
