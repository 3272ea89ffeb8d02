"""Audits: what an attacker that knows everything else proves about a claim of privacy.

`secure-apfed study audit [--quick]` is the slow one. `retraining`: half of a thousand retrainings
have a record and half have its replacement; a score is read from what the others receive, and how
well it tells the two apart bounds mu below (`bounds`). With the guard alone the bound exceeds the
row-release figure: the other rows tell of the record through the encoder. With DP-SGD on it stays
under the claim. `votes` plays labellers and openings in two such worlds. The fast audit of a
release path, which reports hold, is `release`.
"""

__all__: list[str] = []
