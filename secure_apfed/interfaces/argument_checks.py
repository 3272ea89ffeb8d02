"""Checks of the arguments of `train`, before any data is read.

Each error says what to write instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.parties import Active, Contrastive, Gaussian, Passive, Reconstruction
from secure_apfed.settings import Settings
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.training import ModelSettings, TrainSettings


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
    given: Mapping[str, Any],
    guard: Gaussian | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *,
    sums_gradients: bool,
) -> None:
    """Raise ConfigError if a setting is given in two ways, one of which would be ignored.

    Args:
        active, passives: the parties, some with modules of their own.
        given: arguments of `train` that are also keys of the section `train`, by name; None: the
            argument is not given.
        guard: the argument `guard`.
        settings: the sections of settings that were passed to `train`.
        sums_gradients: whether the method adds up the passives' gradients.
    """
    train_settings = read_section(settings, "train")
    for name, value in given.items():
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
    ignored_keys = _list_ignored_model_keys(active, passives, sums_gradients=sums_gradients)
    for key, value in read_section(settings, "model").items():
        if key in ignored_keys:
            module_name = "head" if key in ("dropout", "head") else "encoder"
            module = getattr(active, module_name)
            raise ConfigError(
                f"model={{{key!r}: {value!r}}} is of a built-in network, and {active.name} brings "
                f"its own {module_name}={type(module).__name__}; leave one out"
            )


def _list_ignored_model_keys(
    active: Active, passives: Sequence[Passive], *, sums_gradients: bool
) -> list[str]:
    """Return the keys of the section `model` that describe no network which is built in this run.

    They are ignored, because the active brings its own encoder or head. Passives' built-in encoders
    and decoders, which the section describes, too, may still need them.
    """
    own_losses = [party for party in passives if party.gradient is None]
    builds_encoder = any(
        isinstance(party.loss, Contrastive) and not (party.loss.encoder or party.encoder)
        for party in own_losses
    )
    builds_decoder = any(
        isinstance(party.loss, Reconstruction) and party.loss.decoder is None
        for party in own_losses
    )
    ignored = list[str]()
    if active.encoder is not None:
        ignored.append("network")
        if not builds_encoder:
            ignored += ["random_features", "sequences"]
        # In methods that do not sum gradients, all parties agree on the representation's width.
        if not builds_encoder and sums_gradients:
            ignored.append("representation")
        if not builds_encoder and not builds_decoder and active.head is not None:
            ignored.append("hidden")
    if active.head is not None:
        ignored += ["dropout", "head"]
    return ignored


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


def refuse_misplaced_settings(settings: Mapping[str, Any], arguments: Iterable[str]) -> None:
    """Raise ConfigError for an argument of `train` that is no section of settings.

    If it is a key of a section, the error names the section. Otherwise it names the most similar
    argument, section or key.

    `settings`: the further keyword arguments of `train`, which should be sections. `arguments`:
    names of the arguments that `train` declares.
    """
    sections: Mapping[str, type[Settings]] = {"train": TrainSettings, "model": ModelSettings}
    for name, value in settings.items():
        if name in Config.model_fields and not (name == "labels" and isinstance(value, str)):
            continue
        key = "learning_rate" if name == "lr" else name
        for section, kind in sections.items():
            if key in kind.model_fields:
                raise ConfigError(
                    f"train: {name} is no argument; say {section}={{{key!r}: {value!r}}}"
                )
        # How each known name is written in a call of `train`.
        spellings = {known: f"{known}=..." for known in [*arguments, *Config.model_fields]}
        for section, kind in sections.items():
            for inner in kind.model_fields:
                spellings.setdefault(inner, f"{section}={{{inner!r}: ...}}")
        nearest = get_close_matches(name, list(spellings), n=1, cutoff=0.6)
        guess = f"did you mean {spellings[nearest[0]]}?" if nearest else "leave it out"
        raise ConfigError(
            f"train: {name}={value!r:.60} is neither an argument nor a section of settings; {guess}"
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
            kind = attack if isinstance(attack, type) else type(attack)
            raise ConfigError(
                f"attacks: expected the names of attacks, got {kind.__name__} itself; name it as "
                f"attacks=['{kind.__module__}:{kind.__qualname__}']"
            )


def require_used(
    passives: Sequence[Passive], settings: type[MethodSettings], *, title: str
) -> None:
    """Raise ConfigError if a passive brings an encoder or a loss that the method does not use.

    `settings`: class of the method's settings, which states facts about the method. `title`: name
    of the method, for the error.
    """
    sends_outputs = settings.representation_sender == "passives" or settings.has_representation_sum
    for party in passives:
        reads_encoder = sends_outputs or isinstance(party.loss, Contrastive)
        if party.encoder is not None and not reads_encoder:
            raise ConfigError(
                f"{party.name}: it brought an encoder, and under method {title} passives send no "
                "output of one; hand it to the loss, as loss=Contrastive(encoder=...) or an "
                "nn.Module that holds it, or leave it out"
            )
        if settings.has_gradient_sum or party.gradient is not None:
            continue
        if party.loss != Reconstruction() or party.weight != 1.0 or party.row_wise:
            raise ConfigError(
                f"{party.name}: it brought a loss, its weight or row_wise, and under method "
                f"{title} passives train on none; leave them out, or take method apfed"
            )
