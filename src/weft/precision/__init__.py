"""Which dtype where: the policies, and what is computed by them outside of modules.

policies.py   Precision, LossScaling, and the policies with names
power_sgd.py  PowerSGD: gradients that are approximated on their way between ranks
scopes.py     autocast and creation_dtype: code outside of modules

Tested by: tests/precision, tests/transforms/test_with_precision.py
"""

from weft.precision.policies import LOW, NAMED, LossScaling, PolicyName, Precision, PrecisionOffer, named_policy
from weft.precision.power_sgd import PowerSGD
from weft.precision.scopes import autocast, creation_dtype

__all__ = [
    "LOW",
    "NAMED",
    "LossScaling",
    "PolicyName",
    "PowerSGD",
    "Precision",
    "PrecisionOffer",
    "autocast",
    "creation_dtype",
    "named_policy",
]
