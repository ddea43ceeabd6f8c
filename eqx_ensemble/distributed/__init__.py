from .. import _suggest
from ._arrays import broadcast_from_first as broadcast_from_first
from ._arrays import to_host as to_host
from ._initialise import Processes as Processes
from ._initialise import initialise as initialise
from ._initialise import is_first as is_first
from ._initialise import shutdown as shutdown

_suggest.explain_names(__name__)
