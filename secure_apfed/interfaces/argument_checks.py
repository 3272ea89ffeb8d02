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
    """Return a section of the settings. Raises ConfigError: the section is no mapping."""
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
    """Refuse settings that are given in two ways, of which one would be ignored.

    `given`: arguments that stand for keys of `train`; None: not given. `sums_gradients`: whether
    the method adds up the passives' gradients.

    Raises:
        ConfigError: names both.
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
    builds_encoder = any(
        isinstance(party.loss, Contrastive) and not (party.loss.encoder or party.encoder)
        for party in passives
        if party.gradient is None
    )
    builds_decoder = any(
        isinstance(party.loss, Reconstruction) and party.loss.decoder is None
        for party in passives
        if party.gradient is None
    )
    ignored = list[str]()
    if active.encoder is not None:
        ignored.append("network")
        ignored += [] if builds_encoder else ["random_features", "sequences"]
        if not builds_encoder and sums_gradients:  # other methods agree on its width
            ignored.append("representation")
        ignored += [] if builds_encoder or builds_decoder or active.head is None else ["hidden"]
    if active.head is not None:
        ignored += ["dropout", "head"]
    for key, value in read_section(settings, "model").items():
        if key in ignored:
            part = "head" if key in ("dropout", "head") else "encoder"
            raise ConfigError(
                f"model={{{key!r}: {value!r}}} is of a built-in network, and {active.name} brings "
                f"its own {part}={type(getattr(active, part)).__name__}; leave one out"
            )


def require_parties(active: Active, passives: Sequence[Passive]) -> None:
    """Raise ConfigError unless the arguments are an `Active` and a list of `Passive`s, with texts
    as names.
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
    """Refuse a name that is neither an argument nor a section, or a key given as an argument.

    `settings`: the arguments that `train` does not name itself. `arguments`: names of the others.

    Raises:
        ConfigError: names the section that it belongs in, or the nearest name.
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
        known_names = [*arguments, *Config.model_fields]
        ways = {argument: f"{argument}=..." for argument in known_names}
        for section, kind in sections.items():
            for inner in kind.model_fields:
                ways.setdefault(inner, f"{section}={{{inner!r}: ...}}")
        nearest = get_close_matches(name, list(ways), n=1, cutoff=0.6)
        guess = f"did you mean {ways[nearest[0]]}?" if nearest else "leave it out"
        raise ConfigError(
            f"train: {name}={value!r:.60} is neither an argument nor a section of settings; {guess}"
        )


def refuse_attack_classes(attacks: object) -> None:
    """Refuse an attack's class where its name is expected. Raises ConfigError: says the name."""
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

    `settings`: the method's settings class, with its facts. `title`: name of the method, for the
    error.
    """
    sends = settings.representations_from == "passives" or settings.sums_representations
    for party in passives:
        reads_encoder = sends or isinstance(party.loss, Contrastive)
        if party.encoder is not None and not reads_encoder:
            raise ConfigError(
                f"{party.name}: it brought an encoder, and under method {title} passives send no "
                "output of one; hand it to the loss, as loss=Contrastive(encoder=...) or an "
                "nn.Module that holds it, or leave it out"
            )
        if settings.sums_gradients or party.gradient is not None:
            continue
        if party.loss != Reconstruction() or party.weight != 1.0 or party.row_wise:
            raise ConfigError(
                f"{party.name}: it brought a loss, its weight or row_wise, and under method "
                f"{title} passives train on none; leave them out, or take method apfed"
            )
