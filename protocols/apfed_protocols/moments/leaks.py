"""Who learns what of a noisy moment, alone and together, in sentences for reports.

Run by: whoever writes a report. The proofs of the first group stand in
`apfed_protocols.moments.roles`.
"""

from dataclasses import dataclass

__all__ = ["MOMENT_LEAKS", "MomentLeaks"]


@dataclass(frozen=True, kw_only=True)
class MomentLeaks:
    """One field for each party or coalition, and what the protocol does not give.

    Attributes:
        active, aggregator, dealer, passive: what each learns that keeps to the protocol and works
            with nobody.
        malicious_active: what one learns that sends what it likes.
        active_and_aggregator, active_and_dealer, aggregator_and_dealer, active_and_passives,
            aggregator_and_passives: what coalitions learn.
        altered: what a party that deviates can do to the result, unnoticed or not.
        repeated: what a second moment costs.
    """

    active: str
    malicious_active: str
    aggregator: str
    dealer: str
    passive: str
    active_and_aggregator: str
    active_and_dealer: str
    aggregator_and_dealer: str
    active_and_passives: str
    aggregator_and_passives: str
    altered: str
    repeated: str


MOMENT_LEAKS = MomentLeaks(
    active="The moment with the noise of all passives, and nothing else of any vote. Without noise "
    "that is d K linear equations about the sums of votes, which may tell them all.",
    malicious_active="The noisy moment for any signs that it likes, chosen after it saw all else: "
    "one moment, whose sensitivity to one person is the agreed one, since a bit stands for a sign "
    "and no more. It chooses who is voted on where the passives let it: they must refuse a list "
    "that names a person twice.",
    aggregator="Nothing of votes, noise, moment or signs; sizes and times.",
    dealer="Nothing; it is sent no message.",
    passive="Nothing; it is sent public keys only.",
    active_and_aggregator="The sum of the votes of each person and the sum of the noise, in the "
    "clear: the aggregator holds both sums under masks that the active can take off. Not one "
    "passive's votes or noise, as long as two passives work with nobody; with all passives but "
    "one, the votes of that one.",
    active_and_dealer="The sum of the votes of each person in the clear, and so the sum of the "
    "noise: the dealer knows B, which alone hides the votes in what the active is sent. Not one "
    "passive's, as above.",
    aggregator_and_dealer="The active's signs. Nothing of the votes: the active's masks remain.",
    active_and_passives="The moment of the other passives' votes with the noise of these alone. A "
    "passive whose peers all work with the active is protected by its own noise only.",
    aggregator_and_passives="Nothing of the other passives' votes, even of one alone, nor of the "
    "signs: the masks shared with the active remain. With the dealer as well, the signs.",
    altered="The aggregator can add what it likes to the moment, also times the active's signs, "
    "unnoticed while the result stays in range. A passive can vote what it likes and leave out its "
    "noise, a dealer can deal what does not fit. None of it shows a vote to anybody who works with "
    "nobody. Whether the active takes an answer tells whoever altered it one bit a session, of the "
    "moment or the signs. An aggregator that answers twice or leaves out the noise, and a dealer "
    "whose shares tell B, work with the active.",
    repeated="A further moment about the same people is a further release: passives must charge "
    "each one, and draw new noise.",
)
