from .. import _suggest
from ._arrays import broadcast_from_first as broadcast_from_first
from ._arrays import to_host as to_host
from ._collectives import is_first as is_first

_suggest.explain_names(__name__)
