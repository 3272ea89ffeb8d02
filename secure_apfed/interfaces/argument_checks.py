"""Checks of the arguments of `train`, before any data is read.

Each error says what to write instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.parties import Active, Contrastive, Gaussian, Passive, Reconstruction
from secure_apfed.settings import MethodSettings, ModelSettings, Settings, TrainSettings


def read_section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of one section of the settings; empty if it is missing.

    Raises ConfigError: the section is no mapping.
    """
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{name}: expected a mapping of settings, as {name}={{...}}; got {section!r}"
        )
    return dict(section)


def refuse_contradictions(
    active: Active,
    passives: Sequence[Passive],
    train_arguments: Mapping[str, Any],
    guard: Gaussian | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *,
    has_gradient_sum: bool,
) -> None:
    """Raise ConfigError if a setting is given in two ways, one of which would be ignored.

    Args:
        active, passives: the parties, some with modules of their own.
        train_arguments: arguments of `train` that are also keys of the section `train`, by name;
            None: the argument is not given.
        guard: the argument `guard`.
        settings: the sections of settings that were passed to `train`.
        has_gradient_sum: whether the method adds up the passives' gradients.
    """
    train_settings = read_section(settings, "train")
    for name, value in train_arguments.items():
        if value is not None and name in train_settings:
            raise ConfigError(
                f"{name}={value!r} and train={{{name!r}: {train_settings[name]!r}}} are both "
                "given; leave one out"
            )
    if isinstance(guard, Gaussian) and "delta" in settings and guard.delta != settings["delta"]:
        raise ConfigError(
            f"delta={settings['delta']!r} and guard={type(guard).__name__}(delta={guard.delta!r}) "
            f"differ; say {type(guard).__name__}(..., delta={settings['delta']!r}) alone"
        )
    ignored_keys = _list_ignored_model_keys(active, passives, has_gradient_sum=has_gradient_sum)
    for key, value in read_section(settings, "model").items():
        if key in ignored_keys:
            module_name = "head" if key in ("dropout", "head") else "encoder"
            module = getattr(active, module_name)
            raise ConfigError(
                f"model={{{key!r}: {value!r}}} is of a built-in network, and {active.name} brings "
                f"its own {module_name}={type(module).__name__}; leave one out"
            )


def _list_ignored_model_keys(
    active: Active, passives: Sequence[Passive], *, has_gradient_sum: bool
) -> list[str]:
    """Return the keys of the section `model` that describe no network which is built in this run.

    They are ignored, because the active brings its own encoder or head. Passives' built-in encoders
    and decoders, which the section describes, too, may still need them.
    """
    passives_with_loss = [party for party in passives if party.gradient is None]
    needs_built_in_encoder = any(
        isinstance(party.loss, Contrastive) and not (party.loss.encoder or party.encoder)
        for party in passives_with_loss
    )
    needs_built_in_decoder = any(
        isinstance(party.loss, Reconstruction) and party.loss.decoder is None
        for party in passives_with_loss
    )
    ignored_keys = list[str]()
    if active.encoder is not None:
        ignored_keys.append("network")
        if not needs_built_in_encoder:
            ignored_keys += ["random_features", "sequences"]
        # In methods that do not sum gradients, all parties agree on the representation's width.
        if not needs_built_in_encoder and has_gradient_sum:
            ignored_keys.append("representation")
        if not needs_built_in_encoder and not needs_built_in_decoder and active.head is not None:
            ignored_keys.append("hidden")
    if active.head is not None:
        ignored_keys += ["dropout", "head"]
    return ignored_keys


def require_parties(active: Active, passives: Sequence[Passive]) -> None:
    """Raise ConfigError unless the arguments are an `Active` and a list of `Passive` objects.

    Their names must be texts.
    """
    if not isinstance(active, Active):
        raise ConfigError(
            f"active: expected secure_apfed.Active(name, ids, rows, labels, ...), got "
            f"{type(active).__name__}"
        )
    if isinstance(passives, Passive) or not isinstance(passives, Sequence):
        raise ConfigError(
            "passives: expected a list of secure_apfed.Passive(name, ids, rows, ...), got "
            f"{type(passives).__name__}; write [passive] for one"
        )
    for position, passive in enumerate(passives):
        if not isinstance(passive, Passive):
            raise ConfigError(
                f"passives[{position}]: expected secure_apfed.Passive(name, ids, rows, ...), got "
                f"{type(passive).__name__}"
            )
    parties: list[Any] = [active, *passives]
    for party in parties:
        if not isinstance(party.name, str):
            raise ConfigError(
                f"a party's name is a text, as 'clinic'; got {type(party.name).__name__}"
            )


def refuse_misplaced_settings(settings: Mapping[str, Any], argument_names: Iterable[str]) -> None:
    """Raise ConfigError for an argument of `train` that is no section of settings.

    If it is a key of a section, the error names the section. Otherwise it names the most similar
    argument, section or key.

    `settings`: the further keyword arguments of `train`, which should be sections.
    `argument_names`: names of the arguments that `train` declares.
    """
    class_by_section: Mapping[str, type[Settings]] = {
        "train": TrainSettings,
        "model": ModelSettings,
    }
    for name, value in settings.items():
        # The section `labels` is a mapping; a text is meant for the key `labels` of `train`.
        is_key_of_train = name == "labels" and isinstance(value, str)
        if name in Config.model_fields and not is_key_of_train:
            continue
        corrected_name = "learning_rate" if name == "lr" else name
        for section, kind in class_by_section.items():
            if corrected_name in kind.model_fields:
                raise ConfigError(
                    f"train: {name} is no argument; say {section}={{{corrected_name!r}: {value!r}}}"
                )
        # How each known name is written in a call of `train`.
        call_text_by_name = {
            known_name: f"{known_name}=..."
            for known_name in [*argument_names, *Config.model_fields]
        }
        for section, kind in class_by_section.items():
            for section_key in kind.model_fields:
                call_text_by_name.setdefault(section_key, f"{section}={{{section_key!r}: ...}}")
        nearest = get_close_matches(name, list(call_text_by_name), n=1, cutoff=0.6)
        advice = f"did you mean {call_text_by_name[nearest[0]]}?" if nearest else "leave it out"
        raise ConfigError(
            f"train: {name}={value!r:.60} is neither an argument nor a section of settings; "
            f"{advice}"
        )


def refuse_attack_classes(attacks: object) -> None:
    """Raise ConfigError if an attack is given as a class or an object; the error says its name.

    `attacks`: the argument `attacks` of `train`.
    """
    if isinstance(attacks, str) or not isinstance(attacks, Sequence):
        attacks = [attacks]
    for choice in attacks:
        attack = choice.get("name") if isinstance(choice, Mapping) else choice
        if not isinstance(attack, str):
            attack_class = attack if isinstance(attack, type) else type(attack)
            raise ConfigError(
                f"attacks: expected the names of attacks, got {attack_class.__name__} itself; name "
                f"it as attacks=['{attack_class.__module__}:{attack_class.__qualname__}']"
            )


def refuse_unused_code(
    passives: Sequence[Passive], method_settings: type[MethodSettings], *, method_name: str
) -> None:
    """Raise ConfigError if a passive brings an encoder or a loss that the method does not use.

    `method_settings`: class of the method's settings, which states facts about the method.
    `method_name`: name of the method, for the error.
    """
    has_encoder_outputs = (
        method_settings.representation_sender == "passives"
        or method_settings.has_representation_sum
    )
    for party in passives:
        is_encoder_used = has_encoder_outputs or isinstance(party.loss, Contrastive)
        if party.encoder is not None and not is_encoder_used:
            raise ConfigError(
                f"{party.name}: it brought an encoder, and under method {method_name} passives "
                "send no "
                "output of one; hand it to the loss, as loss=Contrastive(encoder=...) or an "
                "nn.Module that holds it, or leave it out"
            )
        if method_settings.has_gradient_sum or party.gradient is not None:
            continue
        if party.loss != Reconstruction() or party.weight != 1.0 or party.row_wise:
            raise ConfigError(
                f"{party.name}: it brought a loss, its weight or row_wise, and under method "
                f"{method_name} passives train on none; leave them out, or take method apfed"
            )
