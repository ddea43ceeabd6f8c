from ._curvature import AbstractCurvature
from ._diagonal import DiagonalCurvature
from ._full import FullCurvature
from ._kronecker import KroneckerCurvature

CURVATURES: dict[str, type[AbstractCurvature]] = {
    "full": FullCurvature,
    "kron": KroneckerCurvature,
    "diag": DiagonalCurvature,
}
