"""One party's audit log: every envelope that it sent or received, each line chained to the last.

`log.py` writes it, `lines.py` says what a line is, `reading.py` verifies a log that may be
anybody's, and `comparing.py` holds two parties' logs of one link against each other.
"""

from secure_apfed.audit_log.comparing import Comparison, Direction, Parting, compare_logs
from secure_apfed.audit_log.lines import FILE_NAME
from secure_apfed.audit_log.log import AuditLog, Meter
from secure_apfed.audit_log.reading import Flow, Summary, verify_log

__all__ = [
    "FILE_NAME",
    "AuditLog",
    "Comparison",
    "Direction",
    "Flow",
    "Meter",
    "Parting",
    "Summary",
    "compare_logs",
    "verify_log",
]
