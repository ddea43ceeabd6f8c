from .. import _suggest
from ._batch import batch_expected_improvement as batch_expected_improvement
from ._batch import batch_probability_of_improvement as batch_probability_of_improvement
from ._greedy import Picks as Picks
from ._improvement import confidence_bound as confidence_bound
from ._improvement import expected_improvement as expected_improvement
from ._improvement import log_expected_improvement as log_expected_improvement
from ._improvement import probability_of_improvement as probability_of_improvement
from ._information import bald as bald
from ._information import batch_bald as batch_bald
from ._information import power_bald as power_bald
from ._regret import Regret as Regret
from ._regret import regret as regret
from ._thompson import thompson as thompson

_suggest.explain_names(__name__)
