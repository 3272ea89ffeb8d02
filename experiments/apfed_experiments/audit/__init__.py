"""Audits: what an attacker that knows everything else proves about a claim of privacy.

`secure-apfed study audit [--quick]` is the slow one. `retraining`: half of a thousand retrainings
have a record (world 0) and half have its replacement (world 1); a score is computed from what the
others receive, and how well it separates the two bounds mu below (`bounds`). With the guard alone
(clip and noise of representations) the bound exceeds the claim for the releases of one row: the
other rows reveal the record through the encoder. With DP-SGD on it stays under the claim. `votes`
runs labellers (semi-supervised rules by which passives vote) and their noise in two such worlds.
The fast audit of a release path, which reports contain, is `release`.
"""

__all__: list[str] = []
