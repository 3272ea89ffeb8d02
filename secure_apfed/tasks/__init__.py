"""Tasks: what the active's model learns and says. A new one is one file and one line in the table.

Which methods take a task is a fact of theirs (`MethodSettings.tasks`). See docs/add-a-task.md.
"""

from collections.abc import Mapping
from types import MappingProxyType

from secure_apfed.tasks.anomaly import Anomaly
from secure_apfed.tasks.classification import Classification, task_loss
from secure_apfed.tasks.interface import Task, scored_rows
from secure_apfed.tasks.regression import LOSSES, Regression

__all__ = [
    "LOSSES",
    "TASKS",
    "Anomaly",
    "Classification",
    "Regression",
    "Task",
    "scored_rows",
    "task_loss",
]

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {task.name: task for task in (Classification, Regression, Anomaly)}
)
"""By name, as `task` of a run's settings has them."""
