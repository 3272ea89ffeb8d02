"""Logistic regression on the labelled rows, its strength chosen by cross-validation of them."""

from secure_apfed.solo.interface import SoloTask
from secure_apfed.solo.scikit import Classifier, best_strength, logistic, scale_of

__all__ = ["Logistic"]


class Logistic:
    name, title = "logistic", "Logistic regression"

    def fit(self, task: SoloTask) -> Classifier:
        scale = scale_of(task)
        scaled_nF = scale.transform(task.labelled_rows)
        strength = best_strength(scaled_nF, task.labels, task.seed)
        return Classifier(scale, logistic(strength).fit(scaled_nF, task.labels), task.classes)
