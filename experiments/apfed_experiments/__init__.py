"""Experiments: configurations, the main job, benches, and the tables and pictures made of them.

`secure-apfed study` and its neighbours play them; the packages below do not know of it.
"""

__all__: list[str] = []
