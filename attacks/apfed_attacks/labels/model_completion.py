"""A1, model completion: a curious passive reads labels out of the representations it got.

Run by: one passive, or several that pool what they have. It collects the representations of
the last epoch by alignment position and completes the model that it lacks, a head, from the
few labels that it knows; without labels it clusters. In TVFL the representations are those
that the passive itself computed and sent, whose encoder the label gradients trained (passive
model completion; Fu et al., 2022, Label Inference Attacks Against Vertical Federated Learning).

Its probes are supervised; `semi_supervised` trains as that paper does, also the encoder.
"""

from apfed_attacks.columns import beside
from apfed_attacks.interface import Guess
from apfed_attacks.labels.completion import LabelProbe, fresh_columns, guess_labels
from apfed_attacks.view import AdversaryView, over_time, representations

__all__ = ["ModelCompletion"]


class ModelCompletion(LabelProbe):
    """Probes with known labels, or clusters without any.

    Attacks use h, and h together with the own features x. Baselines: the majority class, and the
    same probes or clusters on x alone and, where h is of its own network, on what this network
    makes of x before training. Reference: the same on h of the first kept epoch, which
    shows what training added to the leak; it was released too, so it takes no part in the
    advantage.
    """

    name = "model_completion"

    def run(self, view: AdversaryView, seed: int) -> Guess:
        seen = over_time(representations, view, view.epochs)
        positions = self.choose(view, seen["last"].positions, seed)
        h_NF, first_NF = (self.scaled(seen[name].at(positions), seed) for name in ("last", "first"))
        x_NF = self.own(view, positions, seed)
        baselines = {"x": x_NF}
        fresh = fresh_columns(view, positions, seed)
        if fresh is not None:
            fresh_NF = self.scaled(fresh, seed)
            name = "fresh own network"
            baselines |= {name: fresh_NF, **beside(name, fresh_NF, x_NF)}
        return guess_labels(
            view, positions, attacks={"h": h_NF}, fused={"h": (h_NF, x_NF)}, baselines=baselines,
            references={"h of the first epoch": first_NF} if len(view.epochs) > 1 else {},
            seed=seed,
        )  # fmt: skip
