"""Private set intersection: who is in several tables, without showing who else is in one."""

from apfed_protocols.psi.backends import SET_INTERSECTIONS
from apfed_protocols.psi.tables import align, choose_protocol, count_common, share_membership

__all__ = ["SET_INTERSECTIONS", "align", "choose_protocol", "count_common", "share_membership"]
