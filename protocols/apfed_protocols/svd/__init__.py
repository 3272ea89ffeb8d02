"""FedSVD: the singular vectors of a table whose columns lie with several parties, under masks.

A dealer without data draws orthogonal masks; a server decomposes what is masked, and only the
receiver takes the mask off the left singular vectors. Source: Chai et al. 2022 (KDD), sections 3.2
and 3.3, in the five exchanges of APC-VFL, Appendix E.3.
"""

from apfed_protocols.svd.agreement import SvdAgreement
from apfed_protocols.svd.frames import SvdFrames
from apfed_protocols.svd.roles import SvdDealer, SvdOwner, SvdReceiver, SvdServer

__all__ = [
    "SvdAgreement",
    "SvdDealer",
    "SvdFrames",
    "SvdOwner",
    "SvdReceiver",
    "SvdServer",
]
