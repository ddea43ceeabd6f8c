from ._bayesian import bayesian as bayesian
from ._elites import elites as elites
from ._greedy import Greedy as Greedy
from ._greedy import greedy as greedy
from ._prune import Pruned as Pruned
from ._prune import prune as prune
from ._stacking import Stacking as Stacking
from ._stacking import stacking as stacking
