"""Coefficients to start from, before anything has been measured."""

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.table import CostTable

PUBLISHED = Cost(alpha=0.066, beta=5.70e-5, gamma=8.812e-9)
"""A dense model's. The program scheduling of vllm-project/router takes 0.066 + 0.0570 k + 0.004406 k^2 seconds for k
thousand uncached tokens: beta = 0.0570 / 10^3, gamma / 2 = 0.004406 / 10^6. Any engine is faster or slower: fit it."""

PRIORS = CostTable(
    costs={"default": PUBLISHED},
    sources={"default": "vllm-project/router, defaults of its program scheduling"},
)
