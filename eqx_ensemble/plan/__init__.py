from ._argument import AnyPlan as AnyPlan
from ._cores import Cores as Cores
from ._plans import AbstractPlan as AbstractPlan
from ._plans import Chunked as Chunked
from ._plans import Sequential as Sequential
from ._plans import Unrolled as Unrolled
from ._plans import Vmap as Vmap
