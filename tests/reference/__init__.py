"""A plain reference of the DeepSeek-V4.1 text model, written from its formulas.

The whole prompt is computed at once, in float64 unless told otherwise: no cache, no batching, no
vLLM. Speed does not matter here, being readable does. Vision, DSpark and activation quantisation
are out of scope.
"""

from reference.config import Config
from reference.model import Reference, load
from reference.output import Output

__all__ = ["Config", "Output", "Reference", "load"]
