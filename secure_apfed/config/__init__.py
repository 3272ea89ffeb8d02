"""Complete configuration of a run: one YAML file, one frozen object whose settings fit together.

The settings are declared in `secure_apfed.settings.run`, those of a method in its own file. A
`Config` is checked when it is made: its names are looked up in their tables, and settings that do
not fit together are refused, with advice. `secure_apfed.config.file` reads YAML, with errors that
name the line.
"""

from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from secure_apfed.base.names import check_parties
from secure_apfed.errors import ConfigError
from secure_apfed.settings import MethodSettings, PassiveSettings, RunSettings
from secure_apfed.settings.data import OWN_TABLES, DataSettings
from secure_apfed.settings.run import AttackChoice

__all__ = ["AttackChoice", "Config"]


class Config(RunSettings):
    """The settings of a run, which fit its method and each other.

    Examples:
        >>> from secure_apfed import Config
        >>> config = Config(
        ...     name="first",
        ...     method={"name": "votes", "epsilon": 8},
        ...     data={"dataset": "breast_cancer", "labelled": 20},
        ...     guard={"mechanism": "none"},
        ... )
        >>> config.method.epsilon, config.data.labelled, config.secure_sum.scheme
        (8.0, 20, 'ckks')
    """

    @field_validator("method", mode="before")
    @classmethod
    def _find_method_settings(cls, value: Any, info: ValidationInfo) -> MethodSettings:
        """Return the settings of the method that `value` names.

        The table of methods is imported only here, since it imports the code that trains.

        `value`: the method's name, or a mapping with it. `info`: says whether the settings are read
        from JSON.
        """
        from secure_apfed.methods import method_settings

        return method_settings(value, as_json=info.mode == "json")

    @field_validator("passives")
    @classmethod
    def _check_passive_names(
        cls, passives: dict[str, PassiveSettings]
    ) -> dict[str, PassiveSettings]:
        """Check the form of the passives' names, and that none differ only in case."""
        check_parties(name for name in passives if name != "default")
        return passives

    @field_validator("data")
    @classmethod
    def _adapt_labels_to_task(cls, data: DataSettings, info: ValidationInfo) -> DataSettings:
        """Return the data settings adapted to the task: a regression reads labels as numbers."""
        from secure_apfed.config.checks import adapt_to_task

        return adapt_to_task(data, info.data.get("task"))

    @field_validator("task", "measure", "alignment", "data", "secure_sum", "guard", "defences")
    @classmethod
    def _check_name(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the field's value after looking its name up in the field's table.

        Raises ValueError: the name is unknown.
        """
        from secure_apfed.config.checks import CHECKS

        try:
            return CHECKS[str(info.field_name)](value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the configuration from a pickle that this party made, and import the plug-ins
        that it names.

        Unpickling skips the validation that imports plug-ins, and a worker process starts without
        them.

        `state`: fields and private values, as pydantic pickles them.
        """
        from secure_apfed.config.checks import import_named_plugins

        super().__setstate__(state)
        import_named_plugins(self)

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        """Set the task's default measure, and refuse settings that do not fit task and method."""
        # Imported late: the tables import their entries, which readers of settings do not need.
        from secure_apfed.config.checks import check_task
        from secure_apfed.measures.tasks import TASKS
        from secure_apfed.methods.checks import check_method

        if "measure" not in self.model_fields_set:
            # The settings are frozen; only such a default, which depends on another field, is set.
            object.__setattr__(self, "measure", TASKS[self.task].headline)
        check_task(self)
        check_method(self)
        return self

    @model_validator(mode="after")
    def _make_split_private(self) -> Self:
        """Make test rows of own tables drawn at random if training labels are private.

        The default split by class reads labels, so its result would depend on private ones.

        Raises ValueError: the settings ask for a split by class.
        """
        if not self.are_labels_private or self.data.dataset != OWN_TABLES:
            return self
        if "split" in self.data.model_fields_set and self.data.split == "by_class":
            raise ValueError(
                "data.split: by_class draws rows by their labels, so that a label would move every "
                f"figure, and {'labels' if self.dp_sgd is None else 'dp_sgd'} would not cover that;"
                " say at_random, or leave it out"
            )
        changes = {"split": "at_random"}
        object.__setattr__(self, "data", self.data.model_copy(update=changes))
        return self
