from ._arrays import broadcast_from_first as broadcast_from_first
from ._arrays import is_first as is_first
from ._arrays import to_host as to_host
