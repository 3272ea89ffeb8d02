"""Experiments: configurations, the main job, benches, and the tables and pictures made of them.

Run as `python -m apfed_experiments`; the packages below do not know of it.
"""

__all__: list[str] = []
