from ._artefact import Artefact as Artefact
from ._export import export as export
from ._export import export_onnx as export_onnx
