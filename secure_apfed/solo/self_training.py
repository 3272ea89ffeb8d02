"""Self-training: logistic regression labels the rows that it is sure of, and learns from them.

Source: D. Yarowsky, ACL 1995, as in scikit-learn.
"""

import numpy as np

from secure_apfed.solo.interface import SoloTask
from secure_apfed.solo.scikit import Classifier, best_strength, logistic, scale_of

__all__ = ["SelfTraining"]

_SURE = 0.9
_MOST_STRENGTH = 1.0
"""Of the regression: a looser one is sure of everything at once."""
_ROUNDS = 10


class SelfTraining:
    name, title = "self_training", "Self-training"

    def fit(self, task: SoloTask) -> Classifier:
        from sklearn.semi_supervised import SelfTrainingClassifier

        scale = scale_of(task)
        scaled_NF = scale.transform(task.features)
        strength = best_strength(scaled_NF[task.labelled], task.labels, task.seed)
        model = logistic(min(strength, _MOST_STRENGTH))
        if len(task.labelled) == len(scaled_NF):
            model.fit(scaled_NF[task.labelled], task.labels)
            return Classifier(scale, model, task.classes)
        labels_N = np.full(len(scaled_NF), -1)
        labels_N[task.labelled] = task.labels
        taught = SelfTrainingClassifier(model, threshold=_SURE, max_iter=_ROUNDS)
        return Classifier(scale, taught.fit(scaled_NF, labels_N), task.classes)
