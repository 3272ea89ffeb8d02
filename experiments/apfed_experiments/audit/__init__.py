"""The slow audit: what retraining a thousand times proves about a claim of privacy.

`secure-apfed audit [--quick]`: in each case half of the retrainings have a record
and half have its replacement; a score is read from what the others receive, and how well it tells
the two apart bounds mu below (`bounds`). With the guard alone the bound exceeds the row-release
figure: the other rows tell of the record through the encoder. With DP-SGD on it stays under the
claim. Cases of votes (`vote_cases`) play labellers and openings in two such worlds. The fast audit
of a release path is `secure_apfed.privacy.audit`.
"""

from apfed_experiments.audit import CaseResult, run_audit
from apfed_experiments.audit.votes import VoteResult

__all__ = ["CaseResult", "VoteResult", "run_audit"]
