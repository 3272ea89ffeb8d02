"""What parties learn who pool what they hold, and what no run guarantees.

Run by: the report, and the threat model, which repeats these tables.
"""

from experiments.report.entries import Coalition, Limit, Situation

__all__ = ["COALITIONS", "LIMITS", "coalitions_in", "limits_in"]

COALITIONS: tuple[Coalition, ...] = (
    Coalition(
        methods=("apfed",), sums=("ckks", "bfv"), passives=(2, 1 << 30),
        who="active and aggregator",
        learns="Every single passive's gradient: the active's key opens what the aggregator holds.",
    ),
    Coalition(
        methods=("apfed",), sums=("bfv + pairwise masks", "plain + pairwise masks"),
        passives=(2, 1 << 30),
        who="active and aggregator",
        learns="The sum only: the masks among the passives remain.",
    ),
    Coalition(
        methods=("apfed",), sums=("plain + recoverable masks",), passives=(2, 1 << 30),
        who="active and aggregator",
        learns="In one step the sum only. But with a threshold below M they can call a passive "
        "silent that is not, send the same batch again, and read it out of two sums: exactly "
        "where the others' gradients are the same, and roughly where their networks moved on.",
    ),
    Coalition(
        methods=("apfed",), sums=("crypten",), passives=(2, 1 << 30),
        who="active and aggregator",
        learns="The sum only: every passive keeps a share of each gradient from them.",
    ),
    Coalition(
        methods=("apfed",), passives=(2, 2), who="active and one of the two passives",
        learns="The other passive's gradient, with its noise where there is noise under the sum: "
        "the sum minus the own part.",
    ),
    Coalition(
        methods=("apfed",), passives=(3, 1 << 30), who="active and all passives but one",
        learns="The remaining passive's gradient, likewise; fewer passives learn the sum of the "
        "others.",
    ),
    Coalition(
        methods=("apfed",), passives=(2, 1 << 30), who="passives among themselves",
        learns="No further representation (all receive the same bytes), but they can pool their "
        "features in an attack.",
    ),
    Coalition(
        methods=("tvfl",), passives=(2, 1 << 30), who="passives among themselves",
        learns="Several gradients of the same row's loss, which tell its label more surely.",
    ),
)  # fmt: skip

_COMPUTED = (
    "The figures are of real numbers and of noise drawn at random. What is computed is "
    "pseudo-random (AES-256), added in float64 and rounded to a grid of about a tenth of the "
    "noise's deviation, which hides what floating point leaves in the low bits. The error that "
    "remains, below 4e-14 (1 + C / sigma) a number in total variation (C: clip, sigma: noise), "
    "costs 1 + e^epsilon times that in delta and is not added to it. Noise that is derived from "
    "the seed is not rounded."
)

_STOPPED = (
    "That a run stopped everybody sees, and no epsilon covers it: without DP-SGD a row whose "
    "representation is not finite stops it."
)

LIMITS: tuple[Limit, ...] = (
    Limit(
        label_dp=False, private=False,
        sentence="Labels have no differential privacy: epsilon_y is infinite, for what is sent and "
        "for the finished model, which is fitted to them.",
    ),
    Limit(
        label_dp=True,
        sentence="epsilon_y speaks of one training label of the active being another one. It takes "
        "as public: the features, who is in the table, the class names, the split into training "
        "and test rows (without an official one it is drawn class by class, so that a label moves "
        "it, unless data.split is at_random) and every setting, those chosen by looking at "
        "accuracy included.",
    ),
    Limit(
        label_dp=True,
        sentence="Test labels are not randomised. They train nothing, but whatever is said of "
        "test accuracy was computed from them and has no epsilon.",
    ),
    Limit(
        sentence="Every epsilon is of this run alone, and of one row. Other runs on the same "
        "people, a copy of the run's folder that goes on by itself, a person with several IDs, and "
        "settings that were chosen by training several times cost anew, and nothing here adds that "
        "up: the squares of mu add up for rows and records, epsilon_y adds up for labels, which "
        "every run answers anew.",
    ),
    Limit(
        methods=("apfed", "tvfl"), guarded=True, private=False,
        sentence="The guarantee is one of row releases with the encoder held fixed. It is not "
        "differentially private training: the weights, and the encoding of features (means, "
        "scales, categories), are fitted to every row without noise, and a changed record moves "
        "the representations of other rows.",
    ),
    Limit(methods=("apfed", "tvfl"), guarded=True, sentence=_COMPUTED),
    Limit(guarded=False, private=True, sentence=_COMPUTED),
    Limit(methods=("single_view",), guarded=True, private=True, sentence=_COMPUTED),
    Limit(methods=("apfed", "tvfl"), guarded=True, sentence=_STOPPED),
    Limit(guarded=False, private=True, sentence=_STOPPED),
    Limit(methods=("single_view",), guarded=True, private=True, sentence=_STOPPED),
    Limit(
        methods=("apfed",), guarded=False, private=True,
        sentence="Representations are sent without noise, so epsilon_model, which counts what the "
        "passives receive as well, is not claimed.",
    ),
    Limit(
        private=True,
        sentence="epsilon_model takes as public: who is in the table and aligned, the split, the "
        "batches, every setting, and the encoding of features (means, scales, categories), which "
        "is fitted to the training rows unless one was given, and stands in the model card. "
        "Training losses and checkpoints are not covered; test rows are not either.",
    ),
    Limit(
        private=False,
        sentence="The finished model has no guarantee for whole records: epsilon_model is not "
        "claimed. Whoever can query it or read its weights may test whether a row was in the "
        "training data.",
    ),
    Limit(
        methods=("apfed", "tvfl"), pairwise=False,
        sentence="Which people are in the intersection is known to every party, and so are the "
        "sizes of the tables.",
    ),
    Limit(
        methods=("apfed",), pairwise=True,
        sentence="The active knows its overlap with each passive, and each passive its own with "
        "the active; the sizes of the tables are known. Rows that one passive alone knows give the "
        "active that passive's gradients.",
    ),
    Limit(
        methods=("apfed", "tvfl"),
        sentence="A party that lies about its own IDs, features or gradients is not detected while "
        "its messages keep to the rules: a passive can worsen the model, any party can try IDs "
        "(`alignment.maximum_ids` bounds how many in one intersection, `alignment.history`, where "
        "one is kept, the number of intersections; under `ecdh` no minimum keeps the active from "
        "learning of them).",
    ),
    Limit(
        methods=("apfed",),
        sentence="Whoever alters a sum (the aggregator, but not under crypten; or a passive that "
        "puts in other numbers than agreed) sees whether the active takes it, at least from the "
        "run that goes on or stops. With the first refusal the active throws its keys away: a "
        "session of S steps tells at most log2(S + 1) bits, under ckks and bfv without masks of "
        "one contribution, else of a sum; sessions that end otherwise and are resumed add their "
        "steps to S. Under ckks and bfv all S questions may be about one number, since a "
        "ciphertext names no step; under the other sums each is about another. A number has about "
        "18 bits. A resumed run has other keys, but computes the same numbers, and each session "
        "that is stopped and resumed may tell as much again: under ckks and bfv two or "
        "three tell a number (one does where S is beyond a hundred thousand), under the others "
        "about twenty. So a run that ended by a refused sum is not resumed unless "
        "`rules.refused_sums` (0) allows as many refusals as all its sessions counted. A new run "
        "with the same seed, or from a copy of the folder, is not counted.",
    ),
    Limit(
        methods=("tvfl",),
        sentence="A passive cannot tell the gradient of the task from one that makes its encoder "
        "easier to invert (attack `hijack`).",
    ),
    Limit(
        methods=("apfed",), guarded=True,
        sentence="The guard's noise protects the active from the passives. It does not protect the "
        "passives from the active.",
    ),
    Limit(
        methods=("apfed",), noisy=True,
        sentence="The noise under the sum bounds what the active learns of one person's features "
        "at one passive, with that passive's networks held fixed, and by the noise of honest "
        "passives alone. The networks are fitted without noise, as is the encoding of features, "
        "and a changed person moves later answers for others.",
    ),
    Limit(
        methods=("apfed",), sums=("plain", "ckks", "bfv"), noisy=True,
        sentence="Whoever reads single contributions (under plain the aggregator; under ckks and "
        "bfv active and aggregator together, or the active where the aggregator leaves "
        "passives out) sees each with the noise of one passive alone, for which no epsilon is "
        "claimed.",
    ),
    Limit(
        methods=("apfed", "tvfl"), defended=True,
        sentence="The defences of this run are empirical: they make known attacks worse, none has "
        "an epsilon or any other guarantee, and somebody who knows of them may adapt.",
    ),
    Limit(
        methods=("apfed",), noisy=False,
        sentence="Gradients carry no noise: what the active may compute from their sum has no "
        "epsilon. One that chooses its representations reads more of them than one that follows "
        "the protocol. Batches that point in one direction or in few are refused (under pairwise "
        "alignment a passive whose own people's part does so answers with zeros); one of which "
        "less than half does, or that spreads a little more, is not.",
    ),
    Limit(
        methods=("apfed",), noisy=False,
        sentence="Where a row of a representation has as many numbers as the passives that "
        "reconstruct have features together, an active that knows about as many people wholly "
        "reads the others out of the sum almost exactly (docs/leaks.md): send a smaller "
        "projection, or have gradients noised.",
    ),
    Limit(
        methods=("apfed", "tvfl"),
        sentence="This run played all parties in one process, so nothing kept them apart but the "
        "protocol: it measures and simulates. Only parties on separate machines keep secrets.",
    ),
    Limit(
        sentence="A failed attack proves no privacy: a stronger one, or one with more knowledge, "
        "may succeed.",
    ),
)  # fmt: skip


def coalitions_in(situation: Situation) -> tuple[Coalition, ...]:
    """Return the coalitions that exist in this situation."""
    return tuple(entry for entry in COALITIONS if entry.holds(situation))


def limits_in(situation: Situation) -> tuple[str, ...]:
    """Return what a run in this situation does not guarantee."""
    return tuple(entry.sentence for entry in LIMITS if entry.holds(situation))
