"""Settings of training: networks, optimiser, batches, the passives' part, the sum, the rules."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import Field, field_validator, model_validator

from secure_apfed.settings import (
    EACH_ALONE,
    THE_ACTIVE,
    Settings,
    SilentPassive,
    describe_unknown_name,
    protects,
)
from secure_apfed.settings.plugins import (
    IMPORT_PATH,
    ImportPath,
    expand_name,
    list_installed_plugins,
    require_import_path,
)

__all__ = [
    "DEVICE",
    "IMPORT_PATH",
    "BlackBoxSettings",
    "ClusteringSettings",
    "ContrastiveSettings",
    "ModelSettings",
    "NoiseSettings",
    "ObjectiveSettings",
    "OwnLossSettings",
    "PassiveSettings",
    "ReconstructionSettings",
    "RuleSettings",
    "SumSettings",
    "TrainSettings",
    "require_import_path",
]

Width = Annotated[int, Field(ge=1, le=65536)]
MAX_PARAMETERS = 2**28
"""Largest number of parameters of one layer, or of a network between layers of configured widths:
1 GiB of float32."""
_AUTO_REPRESENTATION_SIZE = 32  # of a representation
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
"""Pattern of the device on which a party computes, as its settings name it."""
# Numbers that names of model.projection count as, where protection is compared.
_NUMBER_BY_PROJECTION: Mapping[str, float] = {"auto": 64, "none": math.inf}
# The value of rules.minimum_spread for null, if a row has 8 numbers or more.
_DEFAULT_MINIMUM_SPREAD = 0.0005
# Secure sums, the most protective first. Single contributions are read by: nobody; active and
# aggregator together, under some conditions; active and aggregator together; the aggregator alone.
_SUMS_BY_STRENGTH = (
    ("crypten", "bfv + pairwise masks", "plain + pairwise masks"),
    "plain + recoverable masks",
    ("ckks", "bfv"),
    "plain",
)


def _format_sum_name(settings: "SumSettings") -> str:
    """Return the name by which `_SUMS_BY_STRENGTH` and `SECURE_SUMS` have this secure sum:
    scheme and masks, as "plain + pairwise masks".
    """
    masks = "" if settings.masks == "none" else f" + {settings.masks} masks"
    return f"{settings.scheme}{masks}"


def _is_weight_positive(settings: "PassiveSettings") -> bool:
    """Return whether a passive contributes to sums: its weight (lambda_p of Eq. 8) is above 0."""
    return settings.weight > 0


def _find_comparable_network(settings: "ModelSettings") -> str:
    """Return the network for comparisons of protection: all user-defined ones count the same."""
    return "own" if IMPORT_PATH.fullmatch(settings.network) else settings.network


class ModelSettings(Settings):
    """The family of networks that a party uses, and their sizes.

    Attributes:
        network: a key of `NETWORKS`, or "auto": the paper's convolutions for images, else a
            perceptron. Images have at least 7 (grey) or 8 (colour) rows and columns. Or code of the
            party's own, such as my_nets:resnet (`secure_apfed.learning.own_code`); "own": each
            party passes it, or names it in its own file. "glm" is a generalised linear model
            (docs/generalised-linear-models.md).
        hidden: widths of the hidden layers (mlp, selu and enriched only).
        representation: the size of the encoder's output; "auto" is 32 (glm: 1), but at most half of
            each passive's distinct columns. Of enriched it is the part besides the row itself, of
            cross_view the passives' sums, of gru one direction of one view. A larger number than
            half of a passive's columns is refused there.
        projection: the size of the linear projection that is sent to the passives; "none" sends the
            encoder's output; "auto" is 64, but "none" for a plain (unprotected) APFed-R. So does
            the authors' release.
        sequences: [steps, channels] of each view (gru only). A view has 1 + steps * channels
            columns, of which the first says how many steps are in use.
        random_features: the number of random features besides the row itself (random_features and
            cross_view only).
        dropout: dropout between the two layers of the head (release: 0.5).
        head: widths of the head's hidden layers (selu only); none: one linear layer.
        head_network: code of the active's own head, such as my_nets:head; "own": the active passes
            it, or names it in its own file; null: one linear layer after a network of its own.
    """

    network: Annotated[
        Literal[
            "auto",
            "conv_mnist",
            "conv_cifar",
            "mlp",
            "selu",
            "enriched",
            "linear",
            "glm",
            "random_features",
            "cross_view",
            "identity",
            "gru",
            "own",
        ]
        | ImportPath,
        protects(
            "the active",
            other="a row can be computed from what is sent of it",
            order=(
                ("auto", "conv_mnist", "conv_cifar", "mlp", "selu", "gru"),
                ("linear", "glm"),
                ("random_features", "cross_view", "enriched", "identity", "own"),
            ),
            read=_find_comparable_network,
        ),
    ] = "auto"
    hidden: Annotated[tuple[Width, ...], Field(max_length=64), protects("nobody")] = (64,)
    representation: Annotated[
        Width | Literal["auto"],
        protects(
            "everybody",
            higher="more numbers of each row are sent, or summed",
            numbers={"auto": _AUTO_REPRESENTATION_SIZE},
        ),
    ] = "auto"
    projection: Annotated[
        Width | Literal["auto", "none"],
        protects(
            "the active", higher="more numbers of each row are sent", numbers=_NUMBER_BY_PROJECTION
        ),
    ] = "auto"
    sequences: Annotated[
        tuple[tuple[Width, Width], ...], Field(max_length=64), protects("nobody")
    ] = ()
    random_features: Annotated[Width, protects("nobody")] = 300
    dropout: Annotated[float, protects("nobody")] = Field(0.5, ge=0, lt=1)
    head: Annotated[tuple[Width, ...], Field(max_length=64), protects("nobody")] = ()
    head_network: Annotated[Literal["own"] | ImportPath | None, protects("nobody")] = None

    @field_validator("head_network", mode="before")
    @classmethod
    def _check_head(cls, head: object) -> object:
        """Return the value unchanged. Raises ValueError: a text that is neither "own" nor an import
        path.
        """
        return require_import_path(head) if isinstance(head, str) and head != "own" else head

    @field_validator("network", mode="before")
    @classmethod
    def _resolve_network(cls, network: object) -> object:
        """Return a built-in network's name, or the import path of a user-defined one.

        Raises ValueError: neither of them; names the nearest name, or the form of such a path.
        """
        # The annotation is a union of the built-in names (a Literal) and import paths.
        built_in_literal = get_args(cls.model_fields["network"].annotation)[0]
        built_in_names = get_args(built_in_literal)
        if not isinstance(network, str) or network in built_in_names:
            return network
        import_path = expand_name(network, "networks")
        is_like_path = ":" in import_path or "." in import_path
        if not is_like_path:
            raise ValueError(
                describe_unknown_name(
                    import_path, (*built_in_names, *list_installed_plugins("networks"))
                )
            )
        return require_import_path(import_path)

    @model_validator(mode="after")
    def _check_parameter_count(self) -> Self:
        """Refuse networks with too many parameters before one is built, since another party may
        have proposed them.
        """
        parameter_count = self.min_parameter_count
        if parameter_count > MAX_PARAMETERS:
            raise ValueError(
                f"these layers have {parameter_count:,} parameters, expected {MAX_PARAMETERS:,} at "
                "most; take fewer or narrower ones in hidden, head, sequences, random_features or "
                "representation"
            )
        return self

    @property
    def is_user_defined(self) -> bool:
        """True if the network is user-defined."""
        return _find_comparable_network(self) == "own"

    @property
    def min_parameter_count(self) -> int:
        """The number of parameters that do not depend on the width of the data: between hidden
        layers, of the head, from random features, and of the GRUs of sequences.
        """
        representation_size = self.representation_size
        hidden_weights = sum(
            inputs * outputs for inputs, outputs in pairwise((*self.hidden, representation_size))
        )
        head_weights = sum(inputs * outputs for inputs, outputs in pairwise(self.head))
        random_feature_weights = 0
        if self.network in ("random_features", "cross_view"):
            random_feature_weights = self.random_features * representation_size
        # A bidirectional GRU has 3 gates in each of 2 directions.
        gru_weights = sum(
            steps * channels + 6 * representation_size * (channels + representation_size + 2)
            for steps, channels in self.sequences
        )
        return hidden_weights + head_weights + random_feature_weights + gru_weights

    @property
    def representation_size(self) -> int:
        """D, the size of the encoder's output; an upper limit where parties may agree on less."""
        if self.representation != "auto":
            return self.representation
        return 1 if self.network == "glm" else _AUTO_REPRESENTATION_SIZE


class ReconstructionSettings(Settings):
    """Eq. (12) with a squared norm: mean squared error of the decoder to the passive's view."""

    name: Literal["reconstruction"] = "reconstruction"


class ContrastiveSettings(Settings):
    """Eqs. (14) to (16).

    Attributes:
        anchors: "active" is the paper's Eq. (14), "both" the authors' release, which is symmetric
            over the two views. That is over 2N anchors.
        temperature: the temperature tau, above 0.
    """

    name: Literal["contrastive"] = "contrastive"
    anchors: Annotated[Literal["both", "active"], protects("nobody")] = "both"
    temperature: Annotated[float, protects("nobody")] = Field(1.0, gt=0)


class ClusteringSettings(Settings):
    """The settings of the clustering objective, in addition to the paper's two objectives; see
    `secure_apfed.networks.objectives.Clustering`.

    Attributes:
        clusters: K', the number of cluster centres of the passive's own features; it needs at least
            as many distinct rows.
    """

    name: Literal["clustering"] = "clustering"
    clusters: Annotated[int, protects("nobody")] = Field(10, ge=2, le=4096)


class OwnLossSettings(Settings):
    """The settings of a passive's own loss: (z, own rows) -> scalar
    (`secure_apfed.learning.own_code`).

    Attributes:
        code: the code of the loss, such as my_losses:cosine; null: the party passes it, or names it
            in its own file. Other keys are settings of its class.
        row_wise: whether the gradient of a row depends on that row alone. Under `secure_sum.noise`
            a person is then charged for one row, and the first batch is checked; false charges a
            person for a whole batch.
    """

    name: Literal["own"] = "own"
    code: Annotated[ImportPath | None, protects("nobody")] = None
    options: Annotated[dict[str, Any], protects("nobody")] = {}
    row_wise: Annotated[
        bool, protects("the passives", other="a person is charged for one row", order=(False, True))
    ] = False


class BlackBoxSettings(Settings):
    """The settings of a passive with a black-box gradient (`secure_apfed.learning.black_box`).

    Under `secure_sum.noise` a person is charged for a whole batch.

    Attributes:
        code: the code that returns gradients, such as my_losses:cosine; null: the party passes it,
            or names it in its own file.
    """

    row_wise: ClassVar[bool] = False

    name: Literal["black_box"] = "black_box"
    code: Annotated[ImportPath | None, protects("nobody")] = None


ObjectiveSettings = Annotated[
    ReconstructionSettings
    | ContrastiveSettings
    | ClusteringSettings
    | OwnLossSettings
    | BlackBoxSettings,
    Field(discriminator="name"),
]


_OBJECTIVES = ("reconstruction", "contrastive", "clustering", "own", "black_box")

LastInput: TypeAlias = Literal["x", "h", "x_and_h", "pupils"]
LAST_INPUTS: tuple[LastInput, ...] = ("x", "pupils")


class TrainSettings(Settings):
    """The settings of training at every party. The defaults of the optimiser are the paper's
    (Tables 3, 4).

    Attributes:
        epochs: the number of passes over the active's training rows.
        batch_size: the number of the active's rows in one step.
        optimizer: the optimiser of all networks of all parties; autoencoders of a method have their
            own.
        learning_rate: the learning rate of each party.
        momentum: the momentum of SGD. Adam's moments decay as its authors say.
        weight_decay: the L2 terms of Eqs. (6) and (7), on all networks; under adamw each step
            shrinks the weights by it. See Loshchilov and Hutter 2019.
        schedule_steps: the number of a party's own steps, with warm-up, over which a cosine lowers
            its learning rate to 0. It stays there (Loshchilov and Hutter 2017, without restarts).
            Null: it is constant.
        warmup_steps: the number of steps over which the learning rate rises linearly before that.
        max_gradient_norm: the L2 bound of a party's parameter gradient in one step; null: none. The
            paper has none. Guarded representations are noisy and long: then a bound keeps a
            passive's training from diverging.
        use_unaligned: whether rows outside the intersection train the active with its own loss.
        labels: "joint": the task loss and the passives' gradients train the encoder together (Eq.
            8); "after": only the passives' gradients train it, no message depends on a label, and
            local models learn the labels at the end. See `secure_apfed.methods.local_models`.
        local_models: which local models learn the labels under `labels: after`: of the features
            ("x"), of their representation ("h"), of both ("x_and_h"), or "pupils", models of the
            features that also learn from the answers to each training row
            (`secure_apfed.methods.sum_students`). Models of "x" are used if held-out labels show
            that they are better than the others.
        combine: how these local models become one: the "mean" of their probabilities, that of the
            best three by held-out labels, or the "best" one.
        spread_labels: whether labels are spread over the representations of all training rows after
            training, to fit the head's last layer; for few labels. Both belong to the active.
        evaluate_every: epochs between two test evaluations; the last is always evaluated.
        patience: the number of epochs without a lower validation loss after which training ends.
            Null: it ends with its last epoch. The validation rows are a tenth of the labelled
            training rows; the active learns nothing else from them. A threshold that is chosen
            reads them, too.
        keep_best: whether the active keeps its networks of the epoch with the lowest validation
            loss.
        class_weights: "balanced" gives all classes equal weight in the task loss. It uses the
            labels that the active trains on; "none": all rows weigh the same.
        loss: the loss of `task: regression`, in standard deviations of the labels. Huber is squared
            below one of them and linear above. Classes take the cross-entropy.
        device: "auto" takes a GPU if there is one; or "cpu", "cuda", "cuda:1". Attacks on the
            finished run use it, too.
        precision: the precision of the networks' arithmetic; what is sent is never narrower than
            float32.
    """

    epochs: Annotated[
        int, protects("everybody", higher="each row is answered once more an epoch")
    ] = Field(300, ge=1)
    batch_size: Annotated[int, protects("nobody")] = Field(128, ge=2)
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], protects("nobody")] = "sgd"
    learning_rate: Annotated[float, protects("nobody")] = Field(1e-3, gt=0)
    momentum: Annotated[float, protects("nobody")] = Field(0.9, ge=0, lt=1)
    weight_decay: Annotated[float, protects("nobody")] = Field(1e-4, ge=0)
    schedule_steps: Annotated[int | None, protects("nobody")] = Field(None, ge=1)
    warmup_steps: Annotated[int, protects("nobody")] = Field(0, ge=0)
    max_gradient_norm: Annotated[float | None, protects("nobody")] = Field(None, gt=0)
    use_unaligned: Annotated[bool, THE_ACTIVE, protects("nobody")] = True
    labels: Annotated[
        Literal["joint", "after"],
        THE_ACTIVE,
        protects("the active", other="what is sent depends on labels", order=("after", "joint")),
    ] = "joint"
    local_models: Annotated[
        tuple[LastInput, ...], Field(min_length=1, max_length=4), THE_ACTIVE, protects("nobody")
    ] = LAST_INPUTS
    combine: Annotated[Literal["mean", "mean_of_three", "best"], THE_ACTIVE, protects("nobody")] = (
        "mean_of_three"
    )
    spread_labels: Annotated[bool, THE_ACTIVE, protects("nobody")] = False
    evaluate_every: Annotated[int, Field(ge=1), THE_ACTIVE, protects("nobody")] = 1
    patience: Annotated[Annotated[int, Field(ge=1)] | None, THE_ACTIVE, protects("nobody")] = None
    keep_best: Annotated[bool, THE_ACTIVE, protects("nobody")] = False
    class_weights: Annotated[Literal["none", "balanced"], THE_ACTIVE, protects("nobody")] = "none"
    loss: Annotated[Literal["squared", "absolute", "huber"], THE_ACTIVE, protects("nobody")] = (
        "squared"
    )
    device: Annotated[str, EACH_ALONE] = "auto"
    precision: Annotated[Literal["float32", "float64", "bfloat16"], protects("nobody")] = "float32"

    @property
    def is_exchange_label_free(self) -> bool:
        """True if labels train nothing before the last exchange with the passives."""
        return self.labels == "after"

    @property
    def has_unaligned_rows_in_batches(self) -> bool:
        """Whether rows that no passive has are in the batches of the exchange.

        Under `labels: after` there is no task loss, so that they would train nothing; local models
        use them afterwards.
        """
        return self.use_unaligned and not self.is_exchange_label_free

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        """Return the device unchanged. Raises ValueError: it is not auto, cpu, cuda or cuda:N."""
        if not DEVICE.fullmatch(device):
            raise ValueError(f"expected auto, cpu, cuda or one GPU, as cuda:1; got {device!r}")
        return device

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Refuse a warm-up longer than the schedule, and keep_best without patience."""
        if self.schedule_steps is not None and self.warmup_steps >= self.schedule_steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} leave none of {self.schedule_steps} "
                "schedule_steps to fall in; take fewer"
            )
        if self.keep_best and self.patience is None:
            raise ValueError(
                "keep_best: the best epoch is told by held-out rows; say how long to wait for a "
                "better one, as patience: 10"
            )
        return self


class PassiveSettings(Settings):
    """A passive's settings, which all parties agree on.

    Attributes:
        objective: the passive's loss; null takes that of the method (apfed_r, apfed_c). Or a loss
            of its own, such as my_losses:cosine.
        weight: lambda_p >= 0 of Eq. (8), which the passive applies. The active cannot change it.
        model: the passive's networks; null takes the run's `model`.
        allow_reading_all: whether sums may contain more numbers for a person than half of the
            passive's distinct columns, if they are linear in these columns. Their reader, who knows
            a few people, can then read all columns of everybody. If parties run in separate
            processes, the passive's own file must say so, too.
    """

    objective: ObjectiveSettings | None = None
    weight: Annotated[
        float,
        protects(
            "the passives",
            other="a passive that adds nothing hides nobody in the sum",
            order=(True, False),
            read=_is_weight_positive,
        ),
    ] = Field(1.0, ge=0)
    model: ModelSettings | None = None
    allow_reading_all: Annotated[
        bool,
        protects(
            "the passives", other="readers of a sum can read all their columns", order=(False, True)
        ),
    ] = False

    @field_validator("objective", mode="before")
    @classmethod
    def _resolve_objective(cls, objective: object) -> object:
        """Return an objective's settings as a mapping, if it is given by name or is user-defined.

        User-defined code becomes the objective `own`; all other keys but row_wise become its
        options. Anything else is returned as it is, and pydantic checks it.

        `objective`: a name, a mapping with a name, or settings.
        """
        content = {"name": objective} if isinstance(objective, str) else objective
        if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
            return objective
        name = content["name"]
        if name in _OBJECTIVES:
            return content
        code = expand_name(name, "objectives")
        if not IMPORT_PATH.fullmatch(code):
            declared = list_installed_plugins("objectives")
            if declared:
                raise ValueError(describe_unknown_name(name, (*_OBJECTIVES, *declared)))
            return content  # pydantic's error then lists the built-in objectives
        own_loss: dict[str, Any] = {"name": "own", "code": code}
        own_loss["options"] = {
            key: value for key, value in content.items() if key not in ("name", "row_wise")
        }
        if "row_wise" in content:
            own_loss["row_wise"] = content["row_wise"]
        return own_loss


class NoiseSettings(Settings):
    """Discrete Gaussian noise that every passive adds to its contributions under the sum.

    Attributes:
        sigma: the standard deviation of each passive's noise on each number, in units of `clip`; or
            give epsilon. Give one of both.
        epsilon: the privacy cost of one person in all contributions of a passive; the noise is
            calibrated to it, and the run stops before it is exceeded.
    """

    sigma: Annotated[
        float | None, protects("the passives", lower="less noise is in what they add")
    ] = Field(None, gt=0)
    epsilon: Annotated[
        float | None, protects("the passives", higher="less noise is in what they add")
    ] = Field(None, gt=0)

    @model_validator(mode="after")
    def _check_one_strength(self) -> Self:
        """Refuse other than exactly one of sigma and epsilon."""
        if (self.sigma is None) == (self.epsilon is None):
            raise ValueError("noise needs exactly one of sigma and epsilon")
        return self


class SumSettings(Settings):
    """The settings of the secure sum of the passives' contributions.

    Attributes:
        scheme: what encrypts or shares the gradients; with `masks` it names a pair of
            `SECURE_SUMS`.
        masks: what is added to the gradients first.
        clip: C, the L2 bound of one row of lambda_p dl_p/dz (of the row's own loss); null: no clip
            (only if nothing is quantised). It applies before the mean over the batch.
        bits: fixed-point bits of one value, 2 to 24; null: as many as fit into the bytes that 16
            bits need. Votes, averages and sums under noise use 16: the last digits of votes and
            averages reveal what one passive gave, and noise exceeds the rounding error.
        allow_single_passive: whether one passive is allowed, whose gradient the "sum" then is.
        threshold: under recoverable masks, the number of passives that a sum needs. Training
            continues without silent passives until fewer are left. It is above half of all; null:
            all, or two thirds plus one under `rules.silent_passive: recover`. Below all, the active
            alone can read one passive's part from two sums. Other sums need every passive.
        noise: differential privacy for the passives' features; null: none.
    """

    scheme: Annotated[
        str,
        protects(
            "the passives",
            other="fewer parties together, or one alone, can read single contributions",
            order=(*_SUMS_BY_STRENGTH,),
            read=_format_sum_name,
        ),
    ] = Field("ckks", max_length=32)
    masks: Annotated[str, protects("nobody")] = Field("none", max_length=32)
    clip: Annotated[
        float | None, protects("everybody", higher="one row, or one party, may move a sum further")
    ] = Field(1.0, gt=0)
    bits: Annotated[
        int | None, protects("the passives", higher="sums are told more finely", null=16)
    ] = Field(None, ge=2, le=24)
    allow_single_passive: Annotated[
        bool,
        protects(
            "the passives",
            other="the active reads the only passive's contribution",
            order=(False, True),
        ),
    ] = False
    threshold: Annotated[
        int | None, protects("the passives", lower="fewer passives suffice for a sum", null="most")
    ] = Field(None, ge=1)
    noise: NoiseSettings | None = None


class RuleSettings(Settings):
    """The rules that a passive checks before it answers, and the active before it continues.

    Attributes:
        minimum_batch: the smallest number of aligned rows that a passive answers in one batch. The
            active trains alone on a smaller batch.
        minimum_spread: how much the directions of a batch's rows must differ, 0 to 1; null is
            0.0005, and 0 (no rule) below 8 numbers a row. There honest rows may lie as close. See
            `learning/release.py`. The active trains alone on a batch of its own that differs less,
            and warns.
        spare_answers: how many answers about a row are allowed beyond one for each epoch, over all
            sessions of the run. They are for epochs that are interrupted and repeated. The same
            answer again is free, and on a CPU it is the same; it counts on a GPU, under noise,
            under recoverable masks with a threshold below all passives, and at a passive that does
            not know everybody.
        refused_sums: how many sums the active may have refused before the run can no longer be
            resumed. It may be raised when resuming. Whoever altered these sums learnt something of
            the passives' numbers, which a resumed run computes again (see docs/threat-model.md).
        silent_passive: what happens when a passive falls silent, see docs/when-a-party-dies.md;
            null: recover if `secure_sum.threshold` is set, else stop. See
            `secure_apfed.contract.Contract`, too.
        patience_s: the unit of patience with a silent party, in seconds; null: each party's own
            `timeout_s`. Parties that restart by themselves wait as long for each other.
        restarts: how often each party may restart the session by itself; 0: somebody must resume
            the run. Sessions resume from the newest checkpoint that all parties have. Repeated
            steps may count again (see `spare_answers`).
    """

    minimum_batch: Annotated[int, protects("the passives", lower="fewer rows hide each other")] = (
        Field(2, ge=2)
    )
    minimum_spread: Annotated[
        float | None,
        protects(
            "the passives",
            lower="an active that chooses its rows reads more of their sum",
            null=_DEFAULT_MINIMUM_SPREAD,
        ),
    ] = Field(None, ge=0, lt=1)
    spare_answers: Annotated[
        int, protects("the passives", higher="a row may be answered more often, to more questions")
    ] = Field(2, ge=0)
    refused_sums: Annotated[
        int,
        Field(ge=0),
        THE_ACTIVE,
        protects("the passives", higher="who alters sums may learn more by refusals"),
    ] = 0
    silent_passive: Annotated[
        SilentPassive | None,
        protects(
            "the passives",
            other="sums of fewer passives are revealed",
            order=(("stop", "wait", None), "recover"),
        ),
    ] = None
    patience_s: Annotated[float | None, protects("nobody")] = Field(None, gt=0, le=86_400)
    restarts: Annotated[
        int,
        protects(
            "the passives", higher="more sessions may answer rows again, within spare_answers"
        ),
    ] = Field(0, ge=0, le=10_000)

    @model_validator(mode="after")
    def _check_waiting_ends(self) -> Self:
        """Refuse to wait for silent passives without a time limit and restarts."""
        if self.silent_passive == "wait" and (self.patience_s is None or not self.restarts):
            raise ValueError(
                "silent_passive: wait says for how long, and a passive whose process died comes "
                "back in a new session only; give patience_s in seconds and restarts of 1 or more, "
                "as patience_s: 600, restarts: 10"
            )
        return self
