from .. import _suggest
from ._index import num_members as num_members
from ._index import take as take
from ._index import unstack as unstack
from ._stack import concatenate as concatenate
from ._stack import replace as replace
from ._stack import stack as stack
from ._sum import polyak as polyak
from ._sum import weighted_mean as weighted_mean
from ._sum import weighted_sum as weighted_sum

_suggest.explain_names(__name__)
