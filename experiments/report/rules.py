"""Who can read what: the one table of it, from which reports and the threat model are made.

A rule says what the receiver of one kind of message reads of it, what protects the sender,
and what remains open. Only what a curious party learns by following the protocol stands
here; coalitions and limits of the whole run are in `coalitions`.
"""

from experiments.report.entries import Role, Rule, Situation
from secure_apfed.errors import ApfedError
from secure_apfed.exchange.envelope import Kind

__all__ = ["RULES", "rule_for"]

_INTERSECTION = "Set intersection: an ID that only one party has stays unknown to the others."
_MEMBERSHIP = "Membership in the common intersection, and what the protocol tells beyond it."
_DEALS = "It deals random numbers and gets no share of an ID."
_WITH_ANY_PARTY = "Together with any party it could open what that party's peers hide."
_AS_IT_IS = (
    "The row positions of every batch and the active's representation of each row, as it is."
)
_NOISED = (
    "The row positions of every batch and a clipped and noised representation of each row, for "
    "every time that it is used (frozen: always the same)."
)
_GUARD = "The guard: each row's releases together cost the stated epsilon_x."
_FEATURES_OPEN = (
    "Features of the active can be guessed from it, and a label as far as the features tell it."
)
_WHO = "Who takes part, and when."
_WHO_AND_ALTERS = f"{_WHO} It can alter the sum without being noticed."
_TASK_GRADIENT = "The gradient of the active's task loss for each row."

RULES: tuple[Rule, ...] = (
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.ACTIVE, pairwise=True,
        reads="How many IDs each passive has; afterwards which of its own rows each of them has.",
        protects=_INTERSECTION, remains="Its overlap with every passive.",
    ),
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.PASSIVE, pairwise=True,
        reads="How many IDs the active has; afterwards which of its own rows the active has, and "
        "how many people the active shares with any passive.",
        protects="Set intersection, and positions that say nothing of other people.",
        remains="Its overlap with the active, and in which batches there are other people.",
    ),
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.ACTIVE,
        reads="How many IDs each passive has; afterwards which of its own rows are common to all.",
        protects=_INTERSECTION, remains=_MEMBERSHIP,
    ),
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.PASSIVE,
        reads="How many IDs the active has; afterwards which of its own rows are common to all.",
        protects=_INTERSECTION, remains=_MEMBERSHIP,
    ),
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.DEALER, pairwise=True,
        reads="About how large each party's set is, and how many IDs each passive shares with the "
        "active.",
        protects=_DEALS, remains=_WITH_ANY_PARTY,
    ),
    Rule(
        kind=Kind.ALIGNMENT, receiver=Role.DEALER,
        reads="About how large each party's set is, and how many IDs are common to all.",
        protects=_DEALS, remains=_WITH_ANY_PARTY,
    ),
    Rule(
        kind=Kind.SUM_SETUP, receiver=Role.ACTIVE,
        reads="Public parameters of the sum.", protects="They hold no secret.", remains="Nothing.",
    ),
    Rule(
        kind=Kind.SUM_SETUP, receiver=Role.PASSIVE,
        reads="Public parameters of the sum and, where it encrypts, the active's public key.",
        protects="They hold no secret.", remains="Nothing.",
    ),
    Rule(
        kind=Kind.SUM_SETUP, receiver=Role.AGGREGATOR,
        reads="Public parameters of the sum.",
        protects="It gets no key that opens anything.", remains="Nothing.",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=False,
        private=True,
        reads=_AS_IT_IS,
        protects="Features: nothing but the network itself, epsilon_x is infinite. Labels: private "
        "training, at epsilon_y.",
        remains=_FEATURES_OPEN,
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=True,
        private=True,
        reads=_NOISED,
        protects="The guard and private training: every release and the finished model together "
        "cost a record the stated epsilon_model, and its label epsilon_y.",
        remains="A label can be guessed as far as the features tell it.",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=False,
        label_dp=True,
        reads=_AS_IT_IS,
        protects="Features: nothing but the network itself, epsilon_x is infinite. Training "
        "labels: the encoder has learnt from randomised ones only.",
        remains=_FEATURES_OPEN,
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=False,
        reads=_AS_IT_IS, protects="Nothing but the network itself: epsilon is infinite.",
        remains="Labels and features of the active can be guessed from it (see the attacks).",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=True,
        label_dp=True,
        reads=_NOISED,
        protects="The guard: each row's releases together cost the stated epsilon_x. The label "
        "mechanism: the encoder has learnt from randomised training labels only, at epsilon_y.",
        remains="epsilon_x holds for one row's own releases with the encoder held fixed. A label "
        "can be guessed as far as the features tell it.",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.PASSIVE, methods=("apfed",), guarded=True,
        reads=_NOISED, protects=_GUARD,
        remains="It holds for one row's own releases with the encoder held fixed. Labels are not "
        "covered: they shape the encoder that every release comes from.",
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("plain",),
        reads="Every passive's gradient in the clear.",
        protects="Nothing: `plain` without masks is no secure sum.",
        remains="From gradients a passive's features can be rebuilt. It can alter the sum without "
        "being noticed.",
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("ckks", "bfv"),
        reads="One ciphertext of each passive and step: its size and time, and a digest of what it "
        "answers.",
        protects="Encryption, whose only secret key is at the active. Contributions that answer "
        "different representations are not added.",
        remains="Who takes part, and when. It can alter the sum without being noticed, and leave "
        "passives out of it.",
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("bfv + pairwise masks",),
        reads="One ciphertext of each passive and step: its size and time.",
        protects="BFV encryption, whose only secret key is at the active, over masks that the "
        "passives share in pairs. The masks cancel only if all answer the same representations.",
        remains=_WHO_AND_ALTERS,
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("plain + pairwise masks",),
        reads="One masked vector of each passive and step, as good as random: its size and time.",
        protects="Masks that the passives share in pairs, and one more that each shares with the "
        "active. They cancel only if all answer the same representations.",
        remains=_WHO_AND_ALTERS,
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("plain + recoverable masks",),
        reads="One masked vector of each passive and step, as good as random: its size and time; "
        "public keys for the next step, and sealed shares that it passes on.",
        protects="Masks that the passives share in pairs, one of each passive's own, and one more "
        "that each shares with the active. They come off only if all answer the same "
        "representations.",
        remains="Who takes part, and when. It can alter the sum without being noticed, and call a "
        "passive silent that is not.",
    ),
    Rule(
        kind=Kind.SUM_REQUEST, receiver=Role.PASSIVE, sums=("plain + recoverable masks",),
        reads="Which passives are counted in the step; their public keys for the next one, and the "
        "shares that they sealed for it.",
        protects="A share alone says nothing of the secret.", remains="Who fell silent, and when.",
    ),
    Rule(
        kind=Kind.SUM_ANSWER, receiver=Role.AGGREGATOR, sums=("plain + recoverable masks",),
        reads="Of each counted passive the seed of its own mask, of each silent one the key of its "
        "masks with others; for this step only.",
        protects="No passive answers both about one passive, nor twice about one step, nor where "
        "fewer than the threshold are counted.",
        remains="Together with more than 2 threshold - M - 1 passives it could open single "
        "contributions. Telling passives different sets, it may once get a sum of fewer passives "
        "than the threshold, never of one.",
    ),
    Rule(
        kind=Kind.CONTRIBUTION, receiver=Role.AGGREGATOR, sums=("crypten",),
        reads="From each passive for each other one a sealed key, which stands for a share of its "
        "gradient: its size and time.",
        protects="Seals between the passives, which open only where both answer the same "
        "representations.",
        remains=_WHO,
    ),
    Rule(
        kind=Kind.SUM_REQUEST, receiver=Role.PASSIVE, sums=("crypten",),
        reads="One share of every other passive's gradient, as good as random.",
        protects="Additive sharing: without all of its shares a gradient is uniform.", remains=_WHO,
    ),
    Rule(
        kind=Kind.SUM_ANSWER, receiver=Role.AGGREGATOR, sums=("crypten",),
        reads="One share of the sum of each passive, sealed for the active: its size and time.",
        protects="The seal between that passive and the active.",
        remains="It can withhold a sum, not alter it.",
    ),
    Rule(
        kind=Kind.SUM, receiver=Role.ACTIVE, noisy=True,
        reads="The sum of all passives' weighted and clipped gradients with the noise of each.",
        protects="The noise of honest passives: each charges what its sums cost one person.",
        remains="It holds with the passives' networks held fixed.",
    ),
    Rule(
        kind=Kind.SUM, receiver=Role.ACTIVE, passives=(1, 1),
        reads="The gradient of the only passive, row by row.",
        protects="Only the passive's clip: a sum over one party hides nothing.",
        remains="The passive's features can be rebuilt from its gradients.",
    ),
    Rule(
        kind=Kind.SUM, receiver=Role.ACTIVE, passives=(2, 1 << 30), pairwise=True,
        reads="The sum of the passives' clipped gradients for each row; zeros from those that do "
        "not know the person.",
        protects="The sum, for a person that several passives know.",
        remains="For a person that one passive alone knows, it is that passive's gradient. An "
        "active that deviates trains one passive alone with such people: between two sums for one "
        "batch, in two sessions, only that passive's gradient then changes.",
    ),
    Rule(
        kind=Kind.SUM, receiver=Role.ACTIVE, passives=(2, 1 << 30),
        reads="The sum of all passives' weighted and clipped gradients, row by row.",
        protects="The secure sum: it never receives one passive's part.",
        remains="A sum weakens, and does not end, what gradients tell about passives' features.",
    ),
    Rule(
        kind=Kind.REQUEST, receiver=Role.PASSIVE, methods=("tvfl",),
        reads="The row positions of every batch.", protects="Nothing.",
        remains="When and how often a person's row is used.",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.ACTIVE, methods=("tvfl",), guarded=False,
        reads="The passive's own representation of every row of every batch, as it is.",
        protects="Nothing but the network itself: epsilon is infinite.",
        remains="The passive's features can be rebuilt from it.",
    ),
    Rule(
        kind=Kind.REPRESENTATIONS, receiver=Role.ACTIVE, methods=("tvfl",), guarded=True,
        reads="A clipped and noised representation of every row, for every time that it "
        "is used (frozen: always the same).",
        protects=_GUARD, remains="It holds for one row's own releases with the encoder held fixed.",
    ),
    Rule(
        kind=Kind.GRADIENTS, receiver=Role.PASSIVE, methods=("tvfl",), label_dp=True,
        reads=_TASK_GRADIENT,
        protects="The label mechanism: the loss is that of the randomised label.",
        remains="Its direction and norm give the randomised label away, which is the true one as "
        "often as epsilon_y lets it be.",
    ),
    Rule(
        kind=Kind.GRADIENTS, receiver=Role.PASSIVE, methods=("tvfl",),
        reads=_TASK_GRADIENT, protects="Nothing; a defence, where one is on, has no guarantee.",
        remains="Its direction and norm give the labels away.",
    ),
)  # fmt: skip


def rule_for(kind: Kind, receiver: Role, situation: Situation) -> Rule:
    """Return what `receiver` learns of messages of this kind.

    Raises:
        ApfedError: the table does not say; a report without it would hide something.
    """
    for rule in RULES:
        if (rule.kind, rule.receiver) == (kind, receiver) and rule.holds(situation):
            return rule
    raise ApfedError(
        f"nothing says what the {receiver} learns of {kind} in {situation}; "
        "add a rule to experiments.report.rules"
    )
