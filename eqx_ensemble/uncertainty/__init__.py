from .. import _suggest
from ._entropy import decompose_entropy as decompose_entropy
from ._entropy import entropy as entropy
from ._entropy import jensen_shannon as jensen_shannon
from ._entropy import pairwise_kl as pairwise_kl
from ._out_of_distribution import free_energy as free_energy
from ._out_of_distribution import least_confidence as least_confidence
from ._pairs import disagreement as disagreement
from ._pairs import error_correlation as error_correlation
from ._pairs import pairwise_disagreement as pairwise_disagreement
from ._pairs import q_statistic as q_statistic
from ._pairs import variation_ratio as variation_ratio
from ._quantile import Interval as Interval
from ._quantile import gaussian_interval as gaussian_interval
from ._quantile import gaussian_mixture_interval as gaussian_mixture_interval
from ._quantile import gaussian_mixture_quantile as gaussian_mixture_quantile
from ._quantile import interval as interval
from ._quantile import quantile as quantile
from ._sample import sample_class_mixture as sample_class_mixture
from ._sample import sample_gaussian_mixture as sample_gaussian_mixture
from ._variance import Ambiguity as Ambiguity
from ._variance import Decomposition as Decomposition
from ._variance import decompose_nll as decompose_nll
from ._variance import decompose_squared_error as decompose_squared_error
from ._variance import decompose_variance as decompose_variance

_suggest.explain_names(__name__)
