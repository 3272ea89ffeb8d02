"""Benches: what parts cost beside their peers, run from a checkout by `python -m apfed_bench`.

They are no part of the wheel: peers, cases and scripts are for whoever works on this project.
"""

__all__: list[str] = []
