from typing import TYPE_CHECKING

from ._jaxlib import warn_of_jaxlib as _warn_of_jaxlib
from ._lazy import import_when_used as _import_when_used
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import acquire as acquire
    from . import calibrate as calibrate
    from . import combine as combine
    from . import conformal as conformal
    from . import distributed as distributed
    from . import fleet as fleet
    from . import methods as methods
    from . import plan as plan
    from . import plot as plot
    from . import resample as resample
    from . import scores as scores
    from . import sklearn as sklearn
    from . import sweep as sweep
    from . import testing as testing
    from . import train as train
    from . import tree as tree
    from . import uncertainty as uncertainty
    from ._build import build as build
    from ._check import CheckpointCorruptError as CheckpointCorruptError
    from ._check import MemberMismatchError as MemberMismatchError
    from ._ensemble import Ensemble as Ensemble
    from ._keys import member_keys as member_keys
    from ._load import Contents as Contents
    from ._load import contents as contents
    from ._load import load as load
    from ._map import map_members as map_members
    from ._marks import Batch as Batch
    from ._marks import Each as Each
    from ._mesh import make_mesh as make_mesh
    from ._predict import predict as predict
    from ._save import save as save
    from ._stack import average_parameters as average_parameters
    from ._stack import concatenate as concatenate
    from ._stack import from_stacked as from_stacked
    from ._stack import stack as stack
    from ._typing import Stacked as Stacked
    from .train._fit import fit as fit
    from .train._run import Run as Run
else:
    __getattr__, __dir__, __all__ = _import_when_used(
        __name__,
        subpackages="acquire calibrate combine conformal distributed fleet methods plan plot resample "
        "scores sklearn sweep testing train tree uncertainty".split(),
        names={
            "_build": ["build"],
            "_check": ["CheckpointCorruptError", "MemberMismatchError"],
            "_ensemble": ["Ensemble"],
            "_keys": ["member_keys"],
            "_load": ["Contents", "contents", "load"],
            "_map": ["map_members"],
            "_marks": ["Batch", "Each"],
            "_mesh": ["make_mesh"],
            "_predict": ["predict"],
            "_save": ["save"],
            "_stack": ["average_parameters", "concatenate", "from_stacked", "stack"],
            "_typing": ["Stacked"],
            "train._fit": ["fit"],
            "train._run": ["Run"],
        },
    )

_warn_of_jaxlib()
