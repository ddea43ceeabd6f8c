from .. import _suggest
from ._folds import Folds as Folds
from ._folds import folds as folds
from ._folds import from_splits as from_splits
from ._held_out import HeldOut as HeldOut
from ._held_out import out_of_bag as out_of_bag
from ._held_out import out_of_bag_mean as out_of_bag_mean
from ._held_out import out_of_fold as out_of_fold
from ._weights import bayesian_weights as bayesian_weights
from ._weights import bootstrap as bootstrap
from ._weights import counts as counts
from ._weights import poisson_weights as poisson_weights
from ._weights import subsets as subsets

_suggest.explain_names(__name__)
