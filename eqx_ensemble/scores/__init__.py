"""Scores of predictions, which are arrays with a leading `members` axis.

Every score takes `row_weights`, a boolean or a number of zero or more for each row: rows of weight zero are ignored
whatever they hold, such as a target of NaN or a label of -1. With `reduction="mean"` it is the mean over rows; with
`"none"` there is one value per row, NaN where it is ignored.
"""

from ._binning import BrierDecomposition as BrierDecomposition
from ._binning import brier as brier
from ._binning import decompose_brier as decompose_brier
from ._binning import ranked_probability as ranked_probability
from ._bootstrap import Bootstrap as Bootstrap
from ._bootstrap import bootstrap as bootstrap
from ._bootstrap import per_member as per_member
from ._calibration import classwise_ece as classwise_ece
from ._calibration import ece as ece
from ._calibration import ence as ence
from ._calibration import mce as mce
from ._calibration import quantile_calibration_error as quantile_calibration_error
from ._calibration import sharpness as sharpness
from ._calibration import squared_calibration_error as squared_calibration_error
from ._classification import accuracy as accuracy
from ._classification import balanced_accuracy as balanced_accuracy
from ._classification import joint_nll as joint_nll
from ._classification import mean_member_accuracy as mean_member_accuracy
from ._classification import nll as nll
from ._classification import top_k_accuracy as top_k_accuracy
from ._distributions import crps as crps
from ._distributions import crps_gaussian as crps_gaussian
from ._distributions import crps_gaussian_mixture as crps_gaussian_mixture
from ._distributions import nll_gaussian as nll_gaussian
from ._distributions import nll_gaussian_mixture as nll_gaussian_mixture
from ._distributions import threshold_weighted_crps as threshold_weighted_crps
from ._groups import ByGroup as ByGroup
from ._groups import by_group as by_group
from ._groups import class_conditional_coverage as class_conditional_coverage
from ._groups import size_stratified_coverage as size_stratified_coverage
from ._multivariate import dawid_sebastiani as dawid_sebastiani
from ._multivariate import energy_score as energy_score
from ._multivariate import variogram_score as variogram_score
from ._pit import pit as pit
from ._pit import pit_gaussian_mixture as pit_gaussian_mixture
from ._pit import pit_histogram as pit_histogram
from ._pit import rank_histogram as rank_histogram
from ._ranking import PrecisionRecallCurve as PrecisionRecallCurve
from ._ranking import RiskCoverage as RiskCoverage
from ._ranking import RocCurve as RocCurve
from ._ranking import aupr as aupr
from ._ranking import aurc as aurc
from ._ranking import auroc as auroc
from ._ranking import excess_aurc as excess_aurc
from ._ranking import fpr_at_tpr as fpr_at_tpr
from ._ranking import precision_recall_curve as precision_recall_curve
from ._ranking import risk_coverage as risk_coverage
from ._ranking import roc_curve as roc_curve
from ._regression import coverage as coverage
from ._regression import interval_score as interval_score
from ._regression import mae as mae
from ._regression import mean_member_rmse as mean_member_rmse
from ._regression import pinball as pinball
from ._regression import r2 as r2
from ._regression import rmse as rmse
from ._regression import set_coverage as set_coverage
from ._regression import set_size as set_size
from ._regression import width as width
