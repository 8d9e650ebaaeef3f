"""A plain reference of the DeepSeek-V4.1 text model and its DSpark draft layers, written from their formulas.

The whole prompt is computed at once, in float64 unless told otherwise: no cache, no batching, no
vLLM. Speed does not matter here, being readable does. `vision.py` computes what images become.
Activation quantisation is out of scope.
"""

from reference.config import Config
from reference.dspark import Draft, DraftReference
from reference.model import Reference, load
from reference.output import Output

__all__ = ["Config", "Draft", "DraftReference", "Output", "Reference", "load"]
