"""Gradient-boosted trees on the labelled rows."""

from secure_apfed.solo.interface import SoloTask
from secure_apfed.solo.scikit import Classifier, scale_of

__all__ = ["GradientBoosting"]

_MOST_IN_A_LEAF = 20
_ROUNDS = 60
_LEAVES = 8


class GradientBoosting:
    """Leaves hold at least n / (4 K) rows, up to 20: few labels would never be cut otherwise."""

    name, title = "gradient_boosting", "Gradient boosting"

    def fit(self, task: SoloTask) -> Classifier:
        from sklearn.ensemble import HistGradientBoostingClassifier

        scale = scale_of(task)
        least = min(max(len(task.labels) // (4 * task.classes), 1), _MOST_IN_A_LEAF)
        model = HistGradientBoostingClassifier(
            max_iter=_ROUNDS,
            max_leaf_nodes=_LEAVES,
            min_samples_leaf=least,
            early_stopping=False,
            random_state=task.state(self.name),
        )
        return Classifier(
            scale, model.fit(scale.transform(task.labelled_rows), task.labels), task.classes
        )
