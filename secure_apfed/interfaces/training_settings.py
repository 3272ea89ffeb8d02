"""The settings of a run, as its YAML file would state them, from the arguments of `train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from secure_apfed.config import Config
from secure_apfed.config.file import load_config_values
from secure_apfed.config.plain_yaml import KeyPath
from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.argument_checks import (
    read_section,
    refuse_attack_classes,
    refuse_unused_code,
)
from secure_apfed.interfaces.arguments import TRAIN_ARGUMENT_BY_PATH, describe_argument
from secure_apfed.interfaces.parties import Active, Contrastive, Gaussian, Passive, Reconstruction
from secure_apfed.methods import METHODS
from secure_apfed.settings import suggest_name
from secure_apfed.settings.data import OWN_TABLES, DataSettings

SchemeName: TypeAlias = Literal[
    "ckks", "bfv", "masked bfv", "masked", "recoverable", "crypten", "plain"
]
SUM_SECTION_BY_NAME: Mapping[SchemeName, Mapping[str, str]] = {
    "ckks": {"scheme": "ckks"},
    "bfv": {"scheme": "bfv"},
    "masked bfv": {"scheme": "bfv", "masks": "pairwise"},
    "masked": {"scheme": "plain", "masks": "pairwise"},
    "recoverable": {"scheme": "plain", "masks": "recoverable"},
    "crypten": {"scheme": "crypten"},
    "plain": {"scheme": "plain"},
}
"""Sections `secure_sum` of a run's YAML file, by the short names that `secure_apfed.secure_sum`
also takes."""


def complete_train_settings(
    section: Mapping[str, Any], train_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the section `train` with the arguments of `train` that are also keys of it.

    Defaults are filled in. Unless the section says otherwise, the model is evaluated only after the
    last epoch.

    `train_arguments`: these arguments by name; None: not given. An optimizer that is a function is
    no setting, and left out.
    """
    given_arguments = {
        name: value
        for name, value in train_arguments.items()
        if value is not None and (name != "optimizer" or isinstance(value, str))
    }
    complete_section = {"epochs": 20, "batch_size": 128, **given_arguments, **section}
    if isinstance(complete_section["epochs"], int) and complete_section["epochs"] > 0:
        complete_section.setdefault("evaluate_every", complete_section["epochs"])
    return complete_section


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """The settings of the section `data` that apply to rows that a program passes.

    Attributes:
        classes: the labels in the order of the scores; empty: sorted.
        positive: the positive one of two classes, which is put last; None: the last one is
            positive.
        split: how test rows and labelled rows are drawn: keeping the classes' shares, or at random.
    """

    classes: tuple[str, ...] = ()
    positive: str | None = None
    split: Literal["by_class", "at_random"] = "by_class"


_FILES_ONLY_ADVICE = "it is of rows that a run's file names; leave it out, or use secure_apfed.run"
_FEWER_ROWS_ADVICE = "hand in these rows and IDs alone"
_MISSING_ADVICE = "say missing='mean' or missing='drop' of that Active or Passive"
_ADVICE_BY_KEY: Mapping[str, str] = {
    "labelled": "say labelled=",
    "test_fraction": "say test_fraction=",
    **dict.fromkeys(("limit", "rows", "rows_per_class"), _FEWER_ROWS_ADVICE),
    **dict.fromkeys(
        ("overlap", "aligned"), "parties share the people whose IDs they hand in: change the IDs"
    ),
    **dict.fromkeys(("missing", "parties"), _MISSING_ADVICE),
    "active": "its name is the first argument of Active(...)",
    "id_column": "hand in the column as ids of Active and Passive",
    "label_column": "hand in the column as labels of Active",
    "columns": "hand in frames of these columns alone",
    "date_formats": "convert the column first, as pandas.to_datetime(column, format=...)",
}
"""Settings of `data` that do not apply to rows that a program passes -> what to do instead."""


def read_data_settings(settings: Mapping[str, Any]) -> DataChoice:
    """Return the settings of the section `data`.

    Raises ConfigError: a setting is unknown, not valid, or does not apply to rows that a program
        passes; the error says what to do instead.
    """
    section = read_section(settings, "data")
    known_keys = list(DataSettings.model_fields)
    for key, value in section.items():
        if key in DataChoice.__dataclass_fields__:
            continue
        if key in known_keys:
            advice = _ADVICE_BY_KEY.get(key, _FILES_ONLY_ADVICE)
        else:
            nearest = suggest_name(key, known_keys)
            advice = f"{nearest or 'leave it out;'} known here: classes, positive, split"
        raise ConfigError(
            f"data={{{key!r}: {value!r:.60}}} does not apply to rows that are handed in; {advice}"
        )
    split = section.get("split", "by_class")
    classes = section.get("classes") or ()
    if split not in ("by_class", "at_random"):
        raise ConfigError(f"data={{'split': {split!r}}}: expected 'by_class' or 'at_random'")
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise ConfigError(
            f"data={{'classes': {classes!r}}}: expected the list of all classes, in order"
        )
    positive = section.get("positive")
    return DataChoice(
        classes=tuple(str(name) for name in classes),
        positive=None if positive is None else str(positive),
        split=split,
    )


def _describe_loss(party: Passive) -> dict[str, Any]:
    """Return the section `objective` of a passive's settings, which names its loss."""
    loss = party.loss
    if party.gradient is not None:
        return {"name": "black_box"}
    if isinstance(loss, Reconstruction):
        return {"name": "reconstruction"}
    if isinstance(loss, Contrastive):
        return {"name": "contrastive", "temperature": loss.temperature}
    return {"name": "own", "row_wise": party.row_wise}


def make_config(
    active: Active,
    passives: Sequence[Passive],
    classes: Sequence[Any],
    *,
    method: str | Mapping[str, Any],
    alignment: str | Mapping[str, Any],
    secure_sum: SchemeName | Mapping[str, Any],
    guard: Gaussian | Mapping[str, Any] | None,
    data_choice: DataChoice,
    train: Mapping[str, Any],
    seed: int,
    labelled: float | None,
    test_fraction: float,
    attacks: str | Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Config:
    """Return the settings of the run, as its YAML file would state them.

    Args:
        active, passives: the parties, as the user passed them.
        classes: the labels in the order of the scores.
        data_choice: settings of the section `data`.
        train: the complete section `train`.
        settings: further sections.
        method, alignment, secure_sum, guard, labelled, test_fraction, seed, attacks: the arguments
            of the function `train`.

    Raises ConfigError: a setting is wrong, or a party brought code that the method does not use.
    """
    party_names = [active.name, *(party.name for party in passives)]
    if not passives:
        method = find_local_method()
    data: dict[str, Any] = {
        "dataset": OWN_TABLES,
        "active": active.name,
        "parties": {name: {} for name in party_names},
        "classes": [str(name) for name in classes],
        "labelled": labelled,
        "test_fraction": test_fraction,
    }
    if data_choice.split != "by_class":
        data["split"] = data_choice.split
    if data_choice.positive is not None:
        data["positive"] = data_choice.positive
    refuse_attack_classes(attacks)
    settings_of_run: dict[str, Any] = {
        "name": "training",
        "seed": seed,
        "method": {"name": method} if isinstance(method, str) else dict(method),
        "data": data,
        "train": dict(train),
        "secure_sum": _read_sum(secure_sum),
        "alignment": {"protocol": alignment} if isinstance(alignment, str) else dict(alignment),
        "guard": _read_guard(guard),
        "attacks": attacks if isinstance(attacks, str) else [*attacks],
    }
    if isinstance(guard, Gaussian):
        settings_of_run["delta"] = guard.delta
    if alignment == "auto":
        del settings_of_run["alignment"]
    settings_of_run |= {
        name: value for name, value in settings.items() if name not in ("data", "train")
    }
    model = read_section(settings, "model")
    network = "auto" if active.encoder is None else "own"
    settings_of_run["model"] = {"network": network, **model}
    if active.head is not None:
        settings_of_run["model"]["head_network"] = "own"
    method_name = settings_of_run["method"]["name"]
    method_class = METHODS.get(method_name)
    has_gradient_sum = method_class is not None and method_class.settings.has_gradient_sum
    if active.projection is not None and passives and not has_gradient_sum:
        raise ConfigError(
            f"{active.name}: it brought a projection, which method {method_name} does "
            "not send; leave it out, or train with apfed, apfed_r or apfed_c"
        )
    if method_class is not None:
        refuse_unused_code(passives, method_class.settings, method_name=method_name)
    settings_of_run["passives"] = {
        party.name: _describe_passive(party, model, has_gradient_sum=has_gradient_sum)
        for party in passives
    }
    describe_place = partial(_describe_setting, settings_of_run, guard=guard, passives=passives)
    return load_config_values(settings_of_run, describe_place=describe_place)


def _describe_setting(
    settings: Mapping[str, Any],
    path: KeyPath,
    *,
    guard: Gaussian | Mapping[str, Any] | None,
    passives: Sequence[Passive],
) -> str | None:
    """Return how the caller wrote a setting, such as FrozenGaussian(epsilon=0), for an error.

    "" means that the error needs no place, and None that it names another place already.

    Args:
        settings: all settings of the run.
        path: keys that lead to the setting in `settings`.
        guard: the argument `guard` of `train`.
        passives: the passives, as the user passed them.
    """
    if not path:
        return ""
    section = settings.get(str(path[0]))
    value = section.get(path[1]) if len(path) == 2 and isinstance(section, Mapping) else None
    if (argument := TRAIN_ARGUMENT_BY_PATH.get(path)) is not None:
        return f"{argument}={value!r}"
    last_key = str(path[-1])
    if isinstance(guard, Gaussian) and path[0] in ("guard", "delta"):
        name = type(guard).__name__
        if not hasattr(guard, last_key):
            return f"guard={name}(...)"
        return f"guard={name}({last_key}={getattr(guard, last_key)!r})"
    if path[0] == "passives" and len(path) > 2:
        if path[2] == "model":
            return None
        return _describe_passive_setting(str(path[1]), last_key, passives)
    if path[0] in ("method", "alignment") and len(path) == 1 and isinstance(section, Mapping):
        key = "name" if path[0] == "method" else "protocol"
        return f"{path[0]}={section.get(key)!r}"
    return describe_argument(path, section)


def _describe_passive_setting(name: str, key: str, passives: Sequence[Passive]) -> str:
    """Return how the caller wrote the setting `key` of the passive `name`."""
    party = next((party for party in passives if party.name == name), None)
    if key == "temperature" and party is not None:  # a setting of its loss
        loss = f"loss=Contrastive(temperature={getattr(party.loss, key, None)!r})"
        return f"Passive({name!r}, {loss})"
    return f"Passive({name!r}, {key}={getattr(party, key, '...')!r})"


def _describe_passive(
    party: Passive, model: Mapping[str, Any], *, has_gradient_sum: bool
) -> dict[str, Any]:
    """Return the settings of a passive; networks that it does not bring are built in.

    `model`: the section `model` of the run. `has_gradient_sum`: whether passives have losses in the
    run's method.

    Raises ConfigError: the passive brings a gradient, but passives have no losses in this method.
    """
    if party.gradient is not None and not has_gradient_sum:
        raise ConfigError(
            f"{party.name}: it brings a gradient, and this method sums none of passives; take "
            "method apfed, or leave it out"
        )
    network = "auto" if party.encoder is None else "own"
    description: dict[str, Any] = {"model": {**model, "network": network}}
    if has_gradient_sum:
        description |= {"objective": _describe_loss(party), "weight": party.weight}
    return description


def find_local_method() -> str:
    """Return the name of the method in which the active trains without passives."""
    return next(name for name, method in METHODS.items() if not method.settings.has_passives)


def _read_sum(secure_sum: SchemeName | Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `secure_sum`, from a short name or the section itself.

    Raises ConfigError: the name is unknown.
    """
    if isinstance(secure_sum, Mapping):
        return dict(secure_sum)
    if secure_sum not in SUM_SECTION_BY_NAME:
        raise ConfigError(
            f"secure_sum: expected {', '.join(SUM_SECTION_BY_NAME)}, or the section of a run's "
            f"YAML file as a mapping; got {secure_sum!r}"
        )
    return dict(SUM_SECTION_BY_NAME[secure_sum])


def _read_guard(guard: Gaussian | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the section `guard`, from an object or the section itself.

    Raises ConfigError: it is neither.
    """
    if guard is None:
        return {"mechanism": "none"}
    if isinstance(guard, Gaussian):
        return guard.as_settings()
    if not isinstance(guard, Mapping):
        raise ConfigError(
            "guard: expected FrozenGaussian(epsilon=...), Gaussian(...), None, or the section of a "
            f"run's YAML file as a mapping; got {guard!r}"
        )
    return dict(guard)
