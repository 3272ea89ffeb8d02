"""Settings of what protects representations and labels: guard, DP-SGD, noisy labels, and defences
without a guarantee, one class for each entry of `DEFENCES`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from secure_apfed.settings import Settings, describe_unknown_name, protects, suggest_name
from secure_apfed.settings.plugins import (
    IMPORT_PATH,
    ImportPath,
    expand_name,
    list_installed_plugins,
)

# Bounds outside which float32 cannot hold a clipped row and its noise side by side.
SMALLEST_CLIP = 1e-6
LARGEST_CLIP = 1e6
# Beyond it a replacement is so rare that 64-bit probabilities round it to none.
LARGEST_LABEL_EPSILON = 40.0

_GUARDS = ("none", "gaussian", "frozen_gaussian")
"""Built-in mechanisms of the guard."""


class GuardSettings(Settings):
    """The guard, which clips and perturbs representations before they are sent, and its strength.

    Attributes:
        mechanism: a key of `GUARDS`, or package.module:Name; there is no default, so that no
            protection is an explicit choice.
        clip: C, the L2 bound of a row.
        sigma: the standard deviation of the noise on each number; or give epsilon. Give one of
            both.
        epsilon: the privacy cost of all releases of one row over the planned run (replace-one,
            encoder held fixed); sigma is calibrated to it.
        noise: "secret" draws a fresh key; "reproducible_insecure" derives it from the seed, so
            everybody who knows the seed can remove the noise. It is for experiments.
    """

    mechanism: Annotated[
        Literal["none", "gaussian", "frozen_gaussian"] | ImportPath,
        protects(
            "the active",
            other="representations, if any, are sent without noise",
            order=(("gaussian", "frozen_gaussian"), "none"),
        ),
    ]
    clip: Annotated[
        float, protects("the active", higher="rows may be longer for the same noise")
    ] = Field(1.0, ge=SMALLEST_CLIP, le=LARGEST_CLIP)
    sigma: Annotated[float | None, protects("the active", lower="less noise is in what leaves")] = (
        Field(None, gt=0)
    )
    epsilon: Annotated[
        float | None, protects("the active", higher="less noise is in what leaves")
    ] = Field(None, gt=0)
    noise: Annotated[
        Literal["secret", "reproducible_insecure"],
        protects(
            "the active",
            other="anybody who knows the seed can remove the noise",
            order=("secret", "reproducible_insecure"),
        ),
    ] = "secret"

    @field_validator("mechanism", mode="before")
    @classmethod
    def _resolve_mechanism(cls, mechanism: object) -> object:
        """Return a built-in guard's name, or the import path of a plug-in.

        Raises ValueError: neither of them; suggests the nearest name.
        """
        if not isinstance(mechanism, str) or mechanism in _GUARDS:
            return mechanism
        code = expand_name(mechanism, "guards")
        if not IMPORT_PATH.fullmatch(code):
            known = (*_GUARDS, *list_installed_plugins("guards"))
            suggestion = suggest_name(mechanism, known, cutoff=0.7)
            advice = f"; {suggestion}" if suggestion else ""
            raise ValueError(
                f"expected one of {', '.join(map(repr, known))}, got {mechanism[:60]!r}{advice}"
            )
        return code

    @model_validator(mode="after")
    def _check_one_strength(self) -> Self:
        """Refuse sigma or epsilon without a guard, and a guard with both or neither."""
        strengths = [name for name in ("sigma", "epsilon") if getattr(self, name) is not None]
        if self.mechanism == "none" and strengths:
            raise ValueError(
                f"guard none adds no noise, but {' and '.join(strengths)} was given; "
                "say mechanism: gaussian or leave it out"
            )
        if self.mechanism != "none" and len(strengths) != 1:
            raise ValueError(
                f"guard {self.mechanism} needs exactly one of sigma and epsilon, "
                f"got {' and '.join(strengths) or 'neither'}"
            )
        return self


class DpSgdSettings(Settings):
    """DP-SGD on everything that the active trains; noise is that of the guard.

    Attributes:
        clip: C, the L2 bound of one example's gradient, with the passives' row.
        noise_multiplier: the standard deviation of the noise on the sum, divided by C, as in
            Opacus; or set epsilon, one of both.
        epsilon: the privacy cost of one record with its label in the whole training (replace-one);
            the noise is calibrated to it, together with the cost of the guard's releases.
    """

    clip: Annotated[
        float, protects("the active", higher="one record may move an update further")
    ] = Field(1.0, ge=SMALLEST_CLIP, le=LARGEST_CLIP)
    noise_multiplier: Annotated[
        float | None, protects("the active", lower="less noise is in what is learnt")
    ] = Field(None, gt=0)
    epsilon: Annotated[
        float | None, protects("the active", higher="less noise is in what is learnt")
    ] = Field(None, gt=0)

    @model_validator(mode="after")
    def _check_one_strength(self) -> Self:
        """Refuse both or neither of noise_multiplier and epsilon."""
        if (self.noise_multiplier is None) == (self.epsilon is None):
            count_text = "neither" if self.epsilon is None else "both"
            raise ValueError(
                f"dp_sgd needs exactly one of noise_multiplier and epsilon, got {count_text}"
            )
        return self


class LabelSettings(Settings):
    """The mechanism that randomises the active's training labels before anything is trained on
    them.

    Test labels are unchanged, since they train nothing. The randomness comes from the active's
    noise key, so under `guard.noise: reproducible_insecure` anyone who knows the seed can repeat
    it.

    Attributes:
        mechanism: a key of `LABEL_MECHANISMS`; under lp_mst half of the training rows join after
            half of the epochs.
        epsilon: epsilon_y of each training label, replace-one, with delta 0, for the whole run.
    """

    mechanism: Annotated[
        Literal["none", "randomised_response", "lp_mst"],
        protects(
            "the active",
            other="training reads true labels",
            order=(("randomised_response", "lp_mst"), "none"),
        ),
    ] = "none"
    epsilon: Annotated[
        float | None, protects("the active", higher="fewer labels are randomised")
    ] = Field(None, gt=0, le=LARGEST_LABEL_EPSILON)

    @model_validator(mode="after")
    def _check_one_strength(self) -> Self:
        """Refuse an epsilon without a mechanism, and a mechanism without one."""
        if self.mechanism == "none" and self.epsilon is not None:
            raise ValueError(
                "labels.mechanism none changes no label, but epsilon was given; say mechanism: "
                "randomised_response"
            )
        if self.mechanism != "none" and self.epsilon is None:
            raise ValueError(
                f"labels.mechanism {self.mechanism} needs epsilon, got none; say epsilon: 1.0"
            )
        return self


class CompressionSettings(Settings):
    """Top-k by magnitude.

    Attributes:
        keep: the share of a batch's numbers that are kept, at least one number.
    """

    kind: Literal["compression"] = "compression"
    keep: Annotated[float, protects("the active", higher="more of a gradient is sent")] = Field(
        0.1, gt=0, le=1
    )


class MarvellSettings(Settings):
    """Optimal perturbation.

    Attributes:
        strength: s; the noise's expected squared norm is at most s |g1 - g0|^2 for each row. Here
            g1 and g0 are the classes' mean gradients in the batch.
    """

    kind: Literal["marvell"] = "marvell"
    strength: Annotated[
        float, protects("the active", lower="gradients tell labels more surely")
    ] = Field(4.0, gt=0, le=1e6)


class PluginDefence(Settings):
    """A defence outside of this package, as package.module:Name; keys other than `kind` are its
    `options`.
    """

    kind: Annotated[ImportPath, protects("nobody")]
    options: Annotated[dict[str, Any], protects("nobody")] = {}

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, content: Any) -> Any:
        """Return the settings of a plug-in defence in the form that this class declares.

        All keys but `kind` are moved into `options`, unless that is given. A name that an installed
        package declares is replaced by its import path.

        `content`: settings as they are written. Raises ValueError: no such defence is known.
        """
        if not isinstance(content, Mapping):
            return content
        code = expand_name(content["kind"], "defences")
        if not IMPORT_PATH.fullmatch(code):
            raise ValueError(
                describe_unknown_name(code, (*_DEFENCES, *list_installed_plugins("defences")))
            )
        if "options" in content:
            return {**content, "kind": code}
        return {"kind": code, "options": {key: content[key] for key in content if key != "kind"}}


_DEFENCES = ("compression", "marvell")
"""Built-in kinds of defence."""
_PLUG_IN_TAG = "package.module:Name"
"""The tag of all other kinds."""


# Named after the key: pydantic quotes the name of this function where the key is missing.
def kind(defence: Any) -> Any:
    """Return the tag by which pydantic picks the class of a defence's settings: a built-in kind, or
    the one tag of all plug-ins.

    Any other kind is returned as it is, so that pydantic's error lists the known ones.

    `defence`: settings of the defence: a mapping, or an object that was validated before.
    """
    name = defence.get("kind") if isinstance(defence, Mapping) else getattr(defence, "kind", None)
    if not isinstance(name, str) or name in _DEFENCES:
        return name
    is_plug_in = IMPORT_PATH.fullmatch(name) or list_installed_plugins("defences")
    return _PLUG_IN_TAG if is_plug_in else name


DefenceSettings = Annotated[
    Annotated[CompressionSettings, Tag("compression")]
    | Annotated[MarvellSettings, Tag("marvell")]
    | Annotated[PluginDefence, Tag(_PLUG_IN_TAG)],
    Discriminator(kind),
]
"""The settings of any defence, told apart by `kind`."""
