"""Pseudo-labels: a curious passive of MMVFL or FedMV reads labels off what it is sent of them.

Run by: one passive, or several that pool what they have. In every round the active sends the
common pseudo-labels Z of all aligned training rows, which the labels draw (MMVFL, Eq. 14; FedMV,
Eq. 10): column k speaks of class k, so the largest column of the last round is the guess, and
nothing has to be known. A few known labels teach a probe on the columns.

Letters: N rows, C classes.
"""

from dataclasses import replace

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe, guess_labels
from apfed_attacks.view import AdversaryView, Observed, epochs_asked, over_time, pseudo_labels

__all__ = ["PseudoLabels"]


class PseudoLabels(LabelProbe):
    """The largest column; probes with known labels, or clusters without any, on all columns.

    Attacks use Z of the last round and, of many epochs, their mean, alone and with the own features
    x. Baselines are those of model completion. Reference: the first round's Z, which is random.
    """

    name = "pseudo_labels"
    suite = ({"labels_per_class": 0}, {"labels_per_class": 4})

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.opens != "pseudo-labels":
            return f"{view.description}: no pseudo-labels are sent"
        if not _epochs(view):
            return "the transcript kept no pseudo-labels; set transcript.keep to first_and_last"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        epochs = _epochs(view)
        found = over_time(pseudo_labels, view, epochs)
        first, sent = found.pop("first"), {"z": found.pop("last")}
        sent |= {f"{name} z": seen for name, seen in found.items()}
        positions = self.choose(view, sent["z"].positions, seed)
        x_NF = self.own(view, positions, seed)
        columns = {name: self.scaled(seen.at(positions), seed) for name, seen in sent.items()}
        guess = guess_labels(
            view, positions, attacks=columns, fused={"z": (columns["z"], x_NF)},
            baselines={"x": x_NF}, seed=seed,
        )  # fmt: skip

        def read(seen: Observed) -> Prediction:
            """(N, C) as they are: the columns are the classes in order."""
            return Prediction(seen.at(guess.positions).numpy(force=True))

        largest = {f"largest of {name}": read(seen) for name, seen in sent.items()}
        before = {"largest of the first z": read(first)} if len(epochs) > 1 else {}
        return replace(guess, attacks={**largest, **guess.attacks}, references=before)


def _epochs(view: AdversaryView) -> tuple[int, ...]:
    return epochs_asked(view, lambda request: request.z is not None)
