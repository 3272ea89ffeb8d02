"""Checks that the names in settings exist in their tables, and that the settings fit together.

Settings are names and numbers, and import none of the tables; `Config` imports these checks when it
is made. Settings that concern classes are refused for other tasks.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from secure_apfed.alignment import check_alignment
from secure_apfed.data.catalogue import check_data, labels_are_numbers, take_dataset
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.labellers import take_labeller
from secure_apfed.measures.table import MEASURES, list_measure_names
from secure_apfed.measures.tasks import TASKS, Classification, Regression
from secure_apfed.privacy.defences import take_defence
from secure_apfed.privacy.guard import GUARDS
from secure_apfed.settings import RunSettings, describe_unknown_name
from secure_apfed.settings.data import OWN_TABLES, DataSettings


def _find_measure(name: str) -> str:
    """Return the measure's name unchanged. Raises ConfigError: the name is unknown; suggests the
    nearest.
    """
    if name not in MEASURES:
        raise ConfigError(describe_unknown_name(name, MEASURES))
    return name


def _return_after_check(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a function that runs `check` on settings and returns them unchanged, as entries of
    `CHECKS` do.
    """

    def check_and_return(value: Any) -> Any:
        check(value)
        return value

    return check_and_return


def _check_data(data: DataSettings) -> DataSettings:
    """Return data settings with the data set's name in the catalogue, after checking the partition.

    The data set of a plug-in is imported.
    """
    resolved = take_dataset(data)
    check_data(resolved)
    return resolved


CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "task": lambda name: TASKS.import_entry(name, setting="task"),
    "measure": _find_measure,
    "alignment": _return_after_check(check_alignment),
    "data": _check_data,
    "secure_sum": _return_after_check(find_sum_class),
    "guard": _return_after_check(
        lambda guard: GUARDS.import_entry(guard.mechanism, setting="mechanism")
    ),
    "defences": _return_after_check(lambda choices: [*map(take_defence, choices)]),
}
"""Checks of a run's settings, by name of the section or setting.

Each returns the value, with names as they stand in the tables of choices; it raises `ConfigError`
for an unknown name, with the nearest.
"""


def import_named_plugins(config: RunSettings) -> None:
    """Import the plug-ins that settings name.

    Used in a worker process, which receives settings that another process has checked.
    """
    from secure_apfed.methods import METHODS

    METHODS.import_entry(config.method.name, setting="method")
    for name in config.method.labeller_names:
        take_labeller(name)
    TASKS.import_entry(config.task, setting="task")
    take_dataset(config.data)
    config.note_attacks()
    CHECKS["guard"](config.guard)
    CHECKS["defences"](config.defences)


def adapt_to_task(data: DataSettings, task: str | None) -> DataSettings:
    """Return the data settings; for a task that predicts numbers, with labels of users' own tables
    read as numbers, unless classes are set.

    `task`: name of the task; None: its own check failed, so that nothing is adapted.
    """
    task_type = TASKS.get(task or "")
    if task_type is None or not task_type.learns_numbers:
        return data
    if data.dataset != OWN_TABLES or data.classes:
        return data
    return data.model_copy(update={"classes": "numbers"})


def check_task(config: RunSettings) -> None:
    """Raise ValueError with the first problem if task, measure, labels and parties do not fit
    together.
    """
    first_problem = next(_list_problems(config), None)
    if first_problem is not None:
        raise ValueError(first_problem)


def _list_problems(config: RunSettings) -> Iterator[str]:
    """Yield a message for each fault of task, measure, labels and parties."""
    task = TASKS[config.task]
    has_numeric_labels = labels_are_numbers(config.data)
    parties = config.data.parties or {}
    if config.data.dataset == OWN_TABLES and config.method.has_passives and len(parties) < 2:
        yield (
            f"data.parties: method {config.method.name} needs at least two parties, got "
            f"{', '.join(parties)}; add those that help, or choose a method without passives"
        )
    measured_tasks = MEASURES[config.measure].tasks
    if task.measured_as not in measured_tasks:
        yield (
            f"measure: {config.measure} is a measure of {' and '.join(measured_tasks)}, and "
            f"task is {config.task}; use {', '.join(list_measure_names(task.measured_as))}"
        )
    if has_numeric_labels and not task.learns_numbers:
        yield (
            f"task: the labels of data.dataset {config.data.dataset} are numbers and no classes; "
            "say task: regression, or task: poisson for counts"
        )
    if task.learns_numbers and not has_numeric_labels:
        yield (
            f"task: {config.task} predicts numbers, and the labels of data.dataset "
            f"{config.data.dataset} are classes; take a set of numbers (of your own tables leave "
            "data.classes out), or another task"
        )
    if task is not Regression and config.train.loss != "squared":
        yield f"train.loss: {config.train.loss} is of task: regression; leave it out"
    if task is not Classification:
        yield from _list_class_settings(config)


def _list_class_settings(config: RunSettings) -> Iterator[str]:
    """Yield a message for each setting that concerns classes, for a task without classes."""
    advice = f"and task is {config.task}; leave it out"
    if config.labels.mechanism != "none":
        yield f"labels.mechanism: {config.labels.mechanism} answers with classes, {advice}"
    if config.train.class_weights != "none":
        yield f"train.class_weights: they are of classes, {advice}"
    if config.threshold is not None:
        yield f"threshold: it decides between two classes, {advice}"
    if config.calibration not in ("auto", "none"):
        yield f"calibration: it is of probabilities of two classes, {advice}"
    if config.train.spread_labels:
        yield f"train.spread_labels: classes are spread, {advice}"
    if config.dp_sgd is not None:
        yield (
            "dp_sgd: the model card of this task holds figures of the training rows without the "
            f"noise of dp_sgd (task is {config.task}); leave dp_sgd out, or take task: "
            "classification"
        )
