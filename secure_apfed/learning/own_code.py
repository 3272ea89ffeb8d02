"""A party's own code: networks, a loss and an optimiser beyond those of the settings.

A party passes modules (`secure_apfed.train`), or names code in its own settings, such as `network:
my_nets:resnet` and `objective: my_losses:cosine`. No other party can name it:
`refuse_user_functions` refuses names of code that a peer proposes, before anything is imported.

An `nn.Module` is trained as it is. A function that makes one is called under the run's seed, with
as many of `features` (the shape of a row, or of what a head reads) and `classes` as it takes. A
loss is called with z (B, *shape) and the party's own rows, and returns a scalar, their mean loss.

Letters: B batch, D values of a representation, N rows, K classes.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from secure_apfed.errors import ApfedError, ConfigError, ModelError
from secure_apfed.learning.black_box import BlackBox, GradientFunction
from secure_apfed.learning.descent import (
    EPOCH,
    MakeOptimizer,
    MakeScheduler,
    OwnOptimization,
    StepsOrEpoch,
)
from secure_apfed.networks.models import (
    NETWORKS,
    Shape,
    family_for,
    make_projection,
    output_shape,
)
from secure_apfed.networks.objectives import Objective
from secure_apfed.settings import (
    BlackBoxSettings,
    ModelSettings,
    OwnLossSettings,
    PassiveSettings,
    RunSettings,
    Settings,
)
from secure_apfed.settings.data import ROWS_BY_OWN_CODE, PartySettings
from secure_apfed.settings.plugins import IMPORT_PATH, ImportPath, expand_name, import_callable

ModuleSource: TypeAlias = nn.Module | Callable[..., Any]
LossSource: TypeAlias = nn.Module | Callable[..., Any]


class UserFunctionSettings(Settings):
    """The names of code in a party's own settings file, as package.module:Name; null: no code.

    Networks and losses may instead have a name that an installed package declares.

    Attributes:
        network: the encoder, if the run says `network: own`.
        head_network: the active's head.
        projection: the active's projection, if the run says how many values (D) it sends for a row.
        decoder: the decoder of a passive that reconstructs.
        objective: a passive's loss, if the run says `objective: {name: own}`.
        objective_options: the settings of this loss, if it is a class with settings.
        gradient: a passive's (step, rows, z) -> gradient, if it says `objective: black_box`.
        optimizer: a function of the party's parameters that returns its optimiser, or of its
            `modules` by name.
        scheduler: a function of that optimiser that returns its scheduler.
        scheduler_every: "epoch", or the number of the party's steps after which the scheduler takes
            one.
        rows: a function that returns the party's rows, if its table says `rows: own`; see
            `secure_apfed.data.row_sources`.
    """

    network: ImportPath | None = None
    head_network: ImportPath | None = None
    projection: ImportPath | None = None
    decoder: ImportPath | None = None
    objective: ImportPath | None = None
    objective_options: dict[str, Any] = {}
    gradient: ImportPath | None = None
    optimizer: ImportPath | None = None
    scheduler: ImportPath | None = None
    scheduler_every: Annotated[int, Field(ge=1)] | Literal["epoch"] = EPOCH
    rows: ImportPath | None = None

    @field_validator("network", "head_network", "projection", "decoder", mode="before")
    @classmethod
    def _expand_network(cls, name: object) -> object:
        """Replace the name of an installed plug-in by its import path."""
        return expand_name(name, "networks") if isinstance(name, str) else name

    @field_validator("objective", mode="before")
    @classmethod
    def _expand_objective(cls, name: object) -> object:
        """Replace the name of an installed plug-in by its import path."""
        return expand_name(name, "objectives") if isinstance(name, str) else name


@dataclass(frozen=True, kw_only=True, eq=False)
class UserFunctions:
    """A party's own networks, loss and optimiser; None: the run's settings decide.

    Attributes:
        encoder: network from a row to its representation.
        head: network from a representation to K class scores; None: one linear layer.
        projection: network from a representation to the D values that are sent for a row, (B, D),
            if the settings configure D; None: one linear layer.
        decoder: network from z (B, *shape) to own rows, at a passive that reconstructs; None: a
            perceptron.
        objective: the loss of a passive, or a whole `Objective`, or a class of these.
        objective_options: keys of the settings of `objective`, if that is a class with settings.
        gradient: black-box function of a passive, (step, rows, z) -> gradient of each row.
        optimizer: function from the parameters that the party trains, as `torch.optim.AdamW`, or
            from its `modules` by name, to the optimizer.
        scheduler: function from the optimizer to its scheduler, which takes a step after every
            epoch, or after every `scheduler_every` of the party's own steps.
    """

    encoder: ModuleSource | None = field(default=None, repr=False)
    head: ModuleSource | None = field(default=None, repr=False)
    projection: ModuleSource | None = field(default=None, repr=False)
    decoder: ModuleSource | None = field(default=None, repr=False)
    objective: LossSource | None = field(default=None, repr=False)
    objective_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    gradient: GradientFunction | None = field(default=None, repr=False)
    optimizer: MakeOptimizer | None = field(default=None, repr=False)
    scheduler: MakeScheduler | None = field(default=None, repr=False)
    scheduler_every: StepsOrEpoch = EPOCH

    def __post_init__(self) -> None:
        """Check that each part is a module or a function, and that modules can be trained.

        Raises ConfigError: a part is neither, or a module has parameters that cannot be trained.
        """
        for name, source in vars(self).items():
            if name in ("objective_options", "scheduler_every") or source is None:
                continue
            if not callable(source):
                raise ConfigError(
                    f"{name}: code of one's own is {_EXPECTED.get(name, _A_MODULE)}, got "
                    f"{type(source).__name__}"
                )
            if isinstance(source, nn.Module):
                _require_trainable(name, source)
        interval: object = self.scheduler_every
        if interval != EPOCH and (not isinstance(interval, int) or interval < 1):
            raise ConfigError(
                'scheduler_every: expected "epoch" or a number of steps of 1 or more, got '
                f"{self.scheduler_every!r}"
            )

    @property
    def optimization(self) -> OwnOptimization:
        """The party's own optimizer and scheduler."""
        return OwnOptimization(
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scheduler_interval=self.scheduler_every,
        )

    @classmethod
    def from_settings(
        cls, settings: UserFunctionSettings, *, code_folder: Path | None = None
    ) -> Self:
        """Import the code that a party's own settings name, and return it.

        Args:
            settings: the names of the code.
            code_folder: the settings file's folder, whose modules may be named; None: the working
                directory.

        Raises ConfigError: a named module, or a name in it, does not exist.
        """
        function_by_key = {
            key: import_callable(name, setting=key, code_folder=code_folder)
            for key, name in settings
            if isinstance(name, str) and key not in ("rows", "scheduler_every")
        }
        # A run trains copies of imported modules, so that the next run in this process starts from
        # the same weights.
        modules = {
            key: code for key, code in function_by_key.items() if isinstance(code, nn.Module)
        }
        function_by_key |= copy.deepcopy(modules)
        return cls(
            encoder=function_by_key.get("network"),
            head=function_by_key.get("head_network"),
            projection=function_by_key.get("projection"),
            decoder=function_by_key.get("decoder"),
            objective=function_by_key.get("objective"),
            objective_options=settings.objective_options,
            gradient=function_by_key.get("gradient"),
            optimizer=function_by_key.get("optimizer"),
            scheduler=function_by_key.get("scheduler"),
            scheduler_every=settings.scheduler_every,
        )

    def copy_fresh(self) -> Self:
        """Return the same code with copies of its networks, which can be trained independently.

        If encoder and head share weights, their copies share weights, too. Raises ConfigError: a
        module cannot be copied.
        """
        network_by_role = {
            "encoder": self.encoder,
            "head": self.head,
            "projection": self.projection,
        }
        modules: dict[str, Any] = {
            name: part for name, part in network_by_role.items() if isinstance(part, nn.Module)
        }
        try:
            return replace(self, **copy.deepcopy(modules))
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"{' and '.join(modules)}: no copy can be made of it, with which it is compared "
                f"untrained: {type(error).__name__}: {error}; hand in a function that makes it, "
                "or remove what is no leaf of its graph, as by torch.nn.utils.prune.remove"
            ) from error

    def find_family(self) -> "OwnFamily | None":
        """Return a family that builds the party's own networks; None: it brings no networks."""
        has_networks = any(part is not None for part in (self.encoder, self.head, self.decoder))
        return OwnFamily(self) if has_networks else None

    def make_objective(
        self, settings: OwnLossSettings, *, owner: str, **arguments: Any
    ) -> Objective:
        """Return the party's own loss as an objective.

        Args:
            settings: what the party declares about its loss: whether it is `row_wise`, that is
                whether a row's loss depends on no other row.
            owner: name of the party, for errors.
            arguments: the other arguments that a class of objectives may take: `representation`,
                `features`, `model` and `family`, as built-in ones do.

        Raises ConfigError: the party brought no loss, or options that its class does not take.
        """
        if self.objective is None:
            raise ConfigError(
                f"passives.{owner}.objective: it is own, and {owner} brought no loss; hand one in "
                "(secure_apfed.train), or name it in its own file, as objective: my_losses:cosine"
            )
        loss = self.objective
        options = self._read_options(loss, owner)
        if isinstance(loss, type) and issubclass(loss, nn.Module):
            loss = make_module(loss, settings=options, **arguments)
        if isinstance(loss, Objective):
            # The declared `row_wise` determines the privacy cost, so the same value is tested.
            loss.row_wise = settings.row_wise  # type: ignore[misc]
            return loss
        return OwnObjective(loss, settings, owner=owner)

    def _read_options(self, loss: Any, owner: str) -> Settings | None:
        """Return the options of the party's loss, as an object of the class that it declares.

        A class of losses declares its options by an attribute `settings`; without it, the result
        is None. `loss`: the party's loss, or its class. `owner`: name of the party, for errors.

        Raises ConfigError: options are given, but the loss declares no settings class, or one
        without these keys.
        """
        # Imported here, since this module's layer may not import modules that read files.
        from secure_apfed.config.file import read_options

        key = f"passives.{owner}.objective"
        settings_class = getattr(loss, "settings", None) if isinstance(loss, type) else None
        if isinstance(settings_class, type) and issubclass(settings_class, Settings):
            return read_options(settings_class, self.objective_options, key=key)
        if self.objective_options:
            raise ConfigError(
                f"{key}: its loss takes no options, got {', '.join(self.objective_options)}; leave "
                "them out, or declare `settings` in a class of objectives"
            )
        return None

    def make_black_box(self, *, owner: str, rows_N: Tensor, ids: Sequence[str]) -> BlackBox:
        """Return the party's own gradient function as a trainer.

        Args:
            owner: name of the party, for errors.
            rows_N: position in the party's list of each aligned person, -1 for unknown ones.
            ids: the party's list of IDs.

        Raises ConfigError: the party brought no such function.
        """
        source: Any = self.gradient
        if source is None:
            raise ConfigError(
                f"passives.{owner}.objective: it is black_box, and {owner} brought no gradient; "
                "hand one in (secure_apfed.train), or name it in its own file, as code: {gradient: "
                '"my_registry:gradient"}'
            )
        gradient = source() if isinstance(source, type) else source
        return BlackBox(owner, gradient, rows_N=rows_N, ids=ids)

    def make_projection(self, size: int, representation: Shape) -> nn.Module:
        """Return the projection, from a representation to the numbers that are sent for a row.

        It is the party's own, or a linear layer. `size`: how many numbers are sent.
        `representation`: the shape of one row's representation. Raises ModelError: the party's own
        projection has another output size.
        """
        if self.projection is None:
            return make_projection(size, representation)
        projection = make_module(self.projection, features=representation)
        shape = output_shape(projection, representation)
        if shape != (size,):
            raise ModelError(
                f"it makes {shape} of a representation {representation}, and the run sends "
                f"({size},); say so, as model.projection: {math.prod(shape)}, or end it with "
                "nn.Flatten() or a layer of that width"
            )
        return projection

    def copy_networks(self) -> "FreshFamily | None":
        """Return a family that builds copies of the party's networks; None: it brings none."""
        return None if self.encoder is None else FreshFamily(self.copy_fresh())

    def copy_encoder(self) -> Self:
        """Return a copy of this code without its head, for a model with another head."""
        return replace(self.copy_fresh(), head=None)

    def list_modules(self) -> list[nn.Module]:
        """Return the parts that are modules, not functions."""
        sources = (self.encoder, self.head, self.projection, self.decoder, self.objective)
        return [source for source in sources if isinstance(source, nn.Module)]


class OwnFamily:
    """A family that builds a party's own networks; missing ones are built from the settings."""

    def __init__(self, functions: UserFunctions) -> None:
        """Take the party's code, which has its networks."""
        self._functions = functions

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return the party's own encoder, or a built-in one by the settings."""
        if self._functions.encoder is None:
            return family_for(settings, features).make_encoder(features, settings)
        return make_module(self._functions.encoder, features=features)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return the party's own head.

        Without one it is a linear layer if the encoder is the party's own, otherwise a built-in
        head by the settings. `size`: numbers of a representation. `classes`: number of scores.
        """
        if self._functions.head is None and self._functions.encoder is None:
            return family_for(settings, (size,)).make_head(size, classes, settings)
        if self._functions.head is None:
            return nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
        return make_module(self._functions.head, features=(size,), classes=classes)

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return the party's own decoder, or a perceptron."""
        if self._functions.decoder is None:
            return NETWORKS["mlp"].make_decoder(representation, features, settings)
        return make_module(self._functions.decoder, features=features)


class FreshFamily(OwnFamily):
    """A family that builds a new copy of the party's untrained networks each time.

    A head may share weights with its encoder, so both come from one copy of the code:
    `make_encoder` makes the copy, and the next call of `make_head` uses it up.
    """

    def __init__(self, functions: UserFunctions) -> None:
        """Take the party's code, whose networks are copied."""
        super().__init__(functions)
        self._copy: OwnFamily | None = None  # whose head is still to be made

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Copy the party's code, and return the copy's encoder."""
        self._copy = OwnFamily(self._functions.copy_fresh())
        return self._copy.make_encoder(features, settings)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return the head of the copy that the last `make_encoder` made, or of a new one."""
        copied = self._copy or OwnFamily(self._functions.copy_fresh())
        self._copy = None
        return copied.make_head(size, classes, settings)


_IN_PLACE = "leaf Variable that requires grad is being used in an in-place"
"""Part of torch's error on operations in place."""
_CHANGES_Z = "its loss changes z in place; take z.clone(), or operations that do not end in _"


class OwnObjective(Objective):
    """A passive's own loss as an objective; its results are checked at each call."""

    is_own: ClassVar[bool] = True
    row_wise: ClassVar[bool] = False

    def __init__(self, loss: LossSource, settings: OwnLossSettings, *, owner: str) -> None:
        """Take the loss, and the party's declaration whether it is `row_wise`.

        A loss is row-wise if a row's loss depends on no other row. `owner`: name of the party, for
        errors.
        """
        super().__init__()
        self._loss = loss  # if it is a module, this registers its parameters for training
        self._owner = owner
        self.row_wise = settings.row_wise  # type: ignore[misc]  # of this loss, not of the class

    def fit(self, features_N: Tensor) -> None:
        """Call the loss's own `fit` with the party's rows, if it has one."""
        prepare = getattr(self._loss, "fit", None)
        if callable(prepare):
            prepare(features_N)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        """Return the loss of a batch of B rows, a scalar, after checking it.

        `z_BD`: the received representations. `features_B`: the party's own rows.

        Raises ModelError: the loss is not one finite number, sends no gradient to z, changes z, or
        calls `backward` itself.
        """
        version = z_BD._version  # torch counts operations in place by it
        gradient = z_BD.grad
        loss = self._require_number(self._call_loss(z_BD, features_B))
        if z_BD.grad is not gradient:
            raise ModelError(
                f"{self._owner}: its loss calls backward() itself, which is done for it; return "
                "the loss alone"
            )
        if z_BD._version != version:
            raise ModelError(f"{self._owner}: {_CHANGES_Z}")
        if z_BD.requires_grad and not loss.requires_grad:
            raise ModelError(
                f"{self._owner}: its loss does not depend on z, or detaches it, so that no "
                "gradient reaches the active; compute it from z without .detach() and no_grad()"
            )
        if not bool(loss.isfinite()):
            raise ModelError(
                f"{self._owner}: its loss is {loss.item()}; lower train.learning_rate, or mend the "
                "loss"
            )
        return loss.reshape(())

    def _call_loss(self, z_BD: Tensor, features_B: Tensor) -> Any:
        """Return the result of the party's loss, unchecked.

        Raises ModelError: the loss fails, or changes z in place.
        """
        try:
            return self._loss(z_BD, features_B)
        except (ApfedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if _IN_PLACE in str(error):
                raise ModelError(f"{self._owner}: {_CHANGES_Z}") from error
            raise ModelError(
                f"{self._owner}: its loss failed on z of shape {tuple(z_BD.shape)} and own rows of "
                f"shape {tuple(features_B.shape)}: {type(error).__name__}: {error}; it is called "
                "as loss(z, own rows), and model.projection says how many numbers z has"
            ) from error

    def _require_number(self, loss: Any) -> Tensor:
        """Return the loss if it is a tensor of one real number; otherwise raise ModelError."""
        if isinstance(loss, tuple | list | Mapping):
            raise ModelError(
                f"{self._owner}: its loss returns a {type(loss).__name__} of {len(loss)}; expected "
                "one number, the mean over the rows of the batch: return the loss alone"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"{self._owner}: its loss returns one number, the mean over the rows of the batch; "
                f"got {got}; end it with .mean()"
            )
        if loss.is_complex():
            raise ModelError(
                f"{self._owner}: its loss is a complex number, and no gradient can be taken of it; "
                "end it with .abs() or .real"
            )
        return loss


def refuse_user_functions(config: RunSettings, *, source: str) -> None:
    """Raise ConfigError if settings from another party name code.

    `source`: the sender of the settings, in words for the error.
    """
    named = sorted(list_user_functions(config))
    if named:
        raise ConfigError(
            f"{source} names code of a party's own ({', '.join(named)}); only the party that runs "
            "it may: write network: own, objective: {name: own}, or rows: own, and let each party "
            "name its code in its own party.yaml; all other plug-ins are for runs that one process "
            "plays"
        )


SettingsT = TypeVar("SettingsT", bound=RunSettings)


def split_user_functions(
    config: SettingsT, active: str, passives: Sequence[str]
) -> tuple[SettingsT, dict[str, UserFunctionSettings]]:
    """Split settings into common ones without names of code, and each party's names of code.

    The common settings have "own" in place of a name. `config`: settings that may name code of all
    parties, as in a simulation. `active`, `passives`: the parties' names. Returns the common
    settings, and a mapping from party name to its names of code.
    """
    settings_by_party = config.data.parties or {}
    row_source_by_party = {
        name: _pick_function_name(table.rows_import_path or "")
        for name, table in settings_by_party.items()
    }
    functions_by_party = {
        active: UserFunctionSettings(
            network=_pick_function_name(config.model.network),
            head_network=_pick_function_name(config.model.head_network or ""),
            rows=row_source_by_party.get(active),
        )
    }
    default_settings = config.passives.get("default", PassiveSettings())
    for name in passives:
        functions_by_party[name] = _list_passive_functions(
            config.passives.get(name, default_settings),
            run_network=config.model.network,
            row_source=row_source_by_party.get(name),
        )
    # The settings that other parties read have "own" in place of names of code.
    shared_passives = {
        name: _hide_user_functions(settings) for name, settings in config.passives.items()
    }
    shared_sections = {"model": _hide_network(config.model), "passives": shared_passives}
    if any(row_source_by_party.values()):
        shared_parties = {name: _hide_rows(table) for name, table in settings_by_party.items()}
        shared_sections["data"] = config.data.model_copy(update={"parties": shared_parties})
    return config.model_copy(update=shared_sections), functions_by_party


def _list_passive_functions(
    settings: PassiveSettings, *, run_network: str, row_source: str | None
) -> UserFunctionSettings:
    """Return a passive's names of code.

    `settings`: the passive's settings. `run_network`: the run's network, which the passive has
    unless it has a model of its own. `row_source`: name of the code that makes its rows; None:
    there is none.
    """
    objective = settings.objective
    network = run_network if settings.model is None else settings.model.network
    return UserFunctionSettings(
        network=_pick_function_name(network),
        objective=objective.code if isinstance(objective, OwnLossSettings) else None,
        objective_options=getattr(objective, "options", {}),
        gradient=objective.code if isinstance(objective, BlackBoxSettings) else None,
        rows=row_source,
    )


def _pick_function_name(name: str) -> str | None:
    """Return a setting's value if it names code, as package.module:Name; otherwise None."""
    return name if IMPORT_PATH.fullmatch(name) else None


def _hide_rows(table: PartySettings) -> PartySettings:
    """Return a party's table settings with `rows: own` in place of the name of code."""
    return (
        table
        if table.rows_import_path is None
        else table.model_copy(update={"rows": ROWS_BY_OWN_CODE})
    )


def _hide_network(model: ModelSettings) -> ModelSettings:
    """Return network settings with "own" in place of names of code."""
    shared_fields: dict[str, object] = {"head_network": "own" if model.head_network else None}
    if IMPORT_PATH.fullmatch(model.network):
        shared_fields["network"] = "own"
    return model.model_copy(update=shared_fields)


def _hide_user_functions(settings: PassiveSettings) -> PassiveSettings:
    """Return a passive's settings with "own" in place of names of code, and without its options."""
    shared_fields: dict[str, object] = {}
    if settings.model is not None:
        shared_fields["model"] = _hide_network(settings.model)
    objective = settings.objective
    if isinstance(objective, OwnLossSettings):
        shared_fields["objective"] = objective.model_copy(update={"code": None, "options": {}})
    elif isinstance(objective, BlackBoxSettings):
        shared_fields["objective"] = objective.model_copy(update={"code": None})
    return settings.model_copy(update=shared_fields)


def list_user_functions(config: RunSettings) -> Mapping[str, str]:
    """Return all names of code in settings (package.module:Name), by dotted settings key."""
    name_by_key = _list_networks("model", config.model)
    name_by_key |= {
        "method": config.method.name,
        "task": config.task,
        "data.dataset": config.data.dataset,
    }
    name_by_key |= {
        f"data.parties.{name}.rows": table.rows_import_path
        for name, table in (config.data.parties or {}).items()
        if table.rows_import_path is not None
    }
    name_by_key |= {f"method.labeller {name}": name for name in config.method.labeller_names}
    name_by_key["guard.mechanism"] = config.guard.mechanism
    name_by_key |= {
        f"defences.{position}.kind": defence.kind
        for position, defence in enumerate(config.defences)
    }
    for name, passive in config.passives.items():
        if passive.model is not None:
            name_by_key |= _list_networks(f"passives.{name}.model", passive.model)
        function_name = getattr(passive.objective, "code", None)
        if function_name:
            name_by_key[f"passives.{name}.objective.code"] = function_name
    return {key: value for key, value in name_by_key.items() if IMPORT_PATH.fullmatch(value)}


def _list_networks(key: str, model: ModelSettings) -> dict[str, str]:
    """Return the names of the networks in these settings, by dotted settings key.

    `key`: the dotted key of `model` itself.
    """
    name_by_key = {f"{key}.network": model.network}
    if model.head_network:
        name_by_key[f"{key}.head_network"] = model.head_network
    return name_by_key


def refuse_shared_parameters(functions_by_party: Mapping[str, UserFunctions]) -> None:
    """Raise ConfigError if two parties share parameters, since each must train its own.

    `functions_by_party`: each party's code.
    """
    owner_by_parameter: dict[int, str] = {}
    for party, user_functions in functions_by_party.items():
        for module in user_functions.list_modules():
            for parameter in module.parameters():
                first_owner = owner_by_parameter.setdefault(id(parameter), party)
                if first_owner != party:
                    raise ConfigError(
                        f"{first_owner} and {party} hand in modules that share parameters; each "
                        "party trains its own: make a second module, or copy it with copy.deepcopy"
                    )


@contextmanager
def name_part_in_errors(owner: str, part: str) -> Iterator[None]:
    """Put a party's name and one part of its code before the texts of ModelErrors in the block."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{owner}: its {part}: {error}") from error


_A_MODULE = "an nn.Module or a function"
_EXPECTED: Mapping[str, str] = {
    "gradient": "a function (step, rows, z) -> gradient",
    "optimizer": "a function of the parameters, as torch.optim.AdamW or functools.partial of it",
    "scheduler": "a function of the optimizer, as lambda optimizer: StepLR(optimizer, 100)",
}
"""What a part of a party's code must be, in words, by name of the part; all other parts are modules
or functions (`_A_MODULE`)."""


def _require_trainable(name: str, module: nn.Module) -> None:
    """Raise ConfigError if a module's parameters cannot be trained or stored.

    `name`: the part of a party's code, such as "encoder", for the error.
    """
    kind = type(module).__name__
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigError(
            f"{name}: {kind} has parameters without numbers (on torch's meta device); fill them "
            "first, as with to_empty() and reset_parameters()"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{name}: {kind} is compiled by torch.jit, whose parameters cannot be trained from "
            "outside; hand in the nn.Module that it was made of"
        )
    for key, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name}: state_dict() of {kind} has {key}, a {type(value).__name__}; checkpoints "
                "hold tensors alone: keep it in a buffer, or leave it out of get_extra_state()"
            )


def make_module(module_or_factory: ModuleSource, **arguments: Any) -> nn.Module:
    """Return the module `module_or_factory` itself, or the module that the function
    `module_or_factory` makes.

    The function gets only those `arguments` for which it has a parameter.

    Raises ModelError: the function fails, or its result is not a module.
    """
    if isinstance(module_or_factory, nn.Module):
        return module_or_factory
    name = getattr(module_or_factory, "__name__", type(module_or_factory).__name__)
    try:
        module = module_or_factory(**_pick_arguments(module_or_factory, arguments))
    except ApfedError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name} cannot be made: {type(error).__name__}: {error}; it is called with those of "
            f"{', '.join(arguments)} that it names: give other arguments defaults, or hand in the "
            "module that it makes"
        ) from error
    # `nn.Module.__init__` creates `_parameters`.
    if isinstance(module, nn.Module) and "_parameters" not in vars(module):
        raise ModelError(
            f"{name} makes a module whose __init__ does not begin with super().__init__(), so "
            "that it has no parameters; call it first"
        )
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} makes a {type(module).__name__}, expected an nn.Module; return the network"
        )
    return module


def _pick_arguments(source: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` for which the function `source` has a parameter."""
    try:
        parameters = inspect.signature(source).parameters
    except (TypeError, ValueError):  # a builtin function has no signature
        return {}
    return {name: value for name, value in arguments.items() if name in parameters}
