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
    from ._axes import AbstractPerMember as AbstractPerMember
    from ._axes import Batch as Batch
    from ._axes import Each as Each
    from ._build import build as build
    from ._check import CheckpointCorruptError as CheckpointCorruptError
    from ._check import MemberMismatchError as MemberMismatchError
    from ._ensemble import Ensemble as Ensemble
    from ._ensemble import average_parameters as average_parameters
    from ._ensemble import concatenate as concatenate
    from ._ensemble import from_stacked as from_stacked
    from ._ensemble import stack as stack
    from ._keys import member_keys as member_keys
    from ._load import Contents as Contents
    from ._load import contents as contents
    from ._load import load as load
    from ._predict import predict as predict
    from ._prune import prune_members as prune_members
    from ._save import save as save
    from ._sharding import make_mesh as make_mesh
    from ._typing import Stacked as Stacked
    from .plan._engine import map_members as map_members
    from .train._engine import Run as Run
    from .train._engine import fit as fit
else:
    __getattr__, __dir__, __all__ = _import_when_used(
        __name__,
        subpackages="acquire calibrate combine conformal distributed fleet methods plan plot resample "
        "scores sklearn sweep testing train tree uncertainty".split(),
        names={
            "_axes": ["AbstractPerMember", "Batch", "Each"],
            "_build": ["build"],
            "_check": ["CheckpointCorruptError", "MemberMismatchError"],
            "_ensemble": ["Ensemble", "average_parameters", "concatenate", "from_stacked", "stack"],
            "_keys": ["member_keys"],
            "_load": ["Contents", "contents", "load"],
            "_predict": ["predict"],
            "_prune": ["prune_members"],
            "_save": ["save"],
            "_typing": ["Stacked"],
            "plan._map": ["map_members"],
            "_sharding": ["make_mesh"],
            "train._fit": ["fit"],
            "train._run": ["Run"],
        },
    )

_warn_of_jaxlib()
