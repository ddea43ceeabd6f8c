from .. import _suggest
from ._aci import Aci as Aci
from ._aci import aci as aci
from ._classes import RandomisedSets as RandomisedSets
from ._classes import Sets as Sets
from ._classes import aps as aps
from ._classes import raps as raps
from ._enbpi import Enbpi as Enbpi
from ._enbpi import enbpi as enbpi
from ._jackknife import CvPlus as CvPlus
from ._jackknife import JackknifePlus as JackknifePlus
from ._jackknife import cv_plus as cv_plus
from ._jackknife import jackknife_plus_after_bootstrap as jackknife_plus_after_bootstrap
from ._label_sets import CrossConformal as CrossConformal
from ._label_sets import Lac as Lac
from ._label_sets import TopK as TopK
from ._label_sets import cross_conformal as cross_conformal
from ._label_sets import lac as lac
from ._label_sets import top_k as top_k
from ._mondrian import ClassConditional as ClassConditional
from ._mondrian import GroupConditional as GroupConditional
from ._mondrian import class_conditional as class_conditional
from ._mondrian import group_conditional as group_conditional
from ._mondrian import group_quantile as group_quantile
from ._quantile import quantile as quantile
from ._quantile import weighted_quantile as weighted_quantile
from ._risk_control import risk_control as risk_control
from ._risk_control import risk_control_steps as risk_control_steps
from ._split import Cqr as Cqr
from ._split import Normalised as Normalised
from ._split import Split as Split
from ._split import cqr as cqr
from ._split import normalised as normalised
from ._split import split as split

_suggest.explain_names(__name__)
