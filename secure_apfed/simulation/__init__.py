"""Runs of which nothing but accuracy is asked: the parties' arithmetic, without what they send.

Run by: the experimenter, for tables and studies. Parties are built as in every run, from their own
data and seeds; their networks then compute in one place, and no message is written, hashed or
accounted for, so that such a run says nothing of bytes, epsilon or leaks. A run trains step by step
as parties over the memory driver do (`together.py`), many in one process a core (`many.py`).
"""

from secure_apfed.simulation import Simulated, simulate, simulate_many, why_not

__all__ = ["Simulated", "simulate", "simulate_many", "why_not"]
