"""Secure training with your own networks, losses and data: one call, all parties in this process.

`train` makes a run of what it is given, the same run that a YAML file describes: alignment, secure
sum, guard, accounting and report are those of every run. It returns your own modules, trained.
Part of the composition root: `secure_apfed` gives its names to others, no module imports it.

Letters: N rows, B batch, D numbers of a representation, K classes.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch
from torch import nn

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.psi import IntersectionName
from secure_apfed.base.files import PathLike
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.data.lazy_rows import is_lazy, is_sampled
from secure_apfed.data.records import VerticalData
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.interfaces.argument_checks import (
    read_section,
    refuse_contradictions,
    refuse_misplaced_settings,
    require_parties,
)
from secure_apfed.interfaces.arguments import TRAIN_ARGUMENT_BY_PATH, name_arguments
from secure_apfed.interfaces.parties import Active, Gaussian, Passive
from secure_apfed.interfaces.party_code import OPTIMIZER_ARGUMENT_BY_SETTING, bind_rates, make_code
from secure_apfed.interfaces.training_data import count_common, make_data
from secure_apfed.interfaces.training_result import (
    PredictingNetwork,
    TrainingResult,
    describe_model,
)
from secure_apfed.interfaces.training_settings import (
    DataChoice,
    SchemeName,
    complete_train_settings,
    find_local_method,
    make_config,
    read_data_settings,
)
from secure_apfed.learning.descent import (
    EPOCH,
    MakeOptimizer,
    MakeScheduler,
    OwnOptimization,
    StepsOrEpoch,
)
from secure_apfed.learning.own_code import UserFunctions, refuse_shared_parameters
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import METHODS
from secure_apfed.runs.active_model import ActiveModel
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Recording, RunResult, load_recording
from secure_apfed.runs.run import run_in_memory
from secure_apfed.settings import ModelSettings

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult

Arguments = ParamSpec("Arguments")


def _explain_calls(
    function: Callable[Arguments, TrainingResult],
) -> Callable[Arguments, TrainingResult]:
    """Return the function with a helpful error if passives are given twice.

    Python's own error for `train(active, passive, passives=...)` would not say what to write.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **settings: Arguments.kwargs) -> TrainingResult:
        """Call the function, unless passives are given by position and by name."""
        if len(args) > 1 and "passives" in settings:
            raise ConfigError(
                "passives: the list of parties is given, and passives=... beside it; what a "
                "passive has is said by the passive itself, as Passive('lab', ids, rows, "
                "weight=0.5)"
            )
        return function(*args, **settings)

    return call


@_explain_calls
@isolate_torch_modes()
@name_arguments(TRAIN_ARGUMENT_BY_PATH)
def train(
    active: Active,
    passives: Sequence[Passive] = (),
    *,
    method: str | Mapping[str, Any] = "apfed",
    alignment: IntersectionName | Mapping[str, Any] = "auto",
    secure_sum: SchemeName | Mapping[str, Any] = "ckks",
    guard: Gaussian | Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: MakeOptimizer | Literal["sgd", "adam", "adamw"] | None = None,
    scheduler: MakeScheduler | None = None,
    scheduler_every: StepsOrEpoch = EPOCH,
    labelled: int | float | None = None,
    test_fraction: float = 0.25,
    seed: int = 0,
    folder: PathLike | None = None,
    resume: bool = False,
    baselines: bool = True,
    attacks: str | Sequence[str | Mapping[str, Any]] = (),
    on_progress: Callable[[Any], None] = lambda progress: None,
    **settings: Any,
) -> TrainingResult:
    """Train the active's networks with the passives' help, and measure.

    Args:
        active: the party with the labels.
        passives: the parties that help; none: the active trains alone.
        method: a key of `secure_apfed.methods.METHODS` that trains networks by steps.
        alignment: the protocol that finds the common people, or the section `alignment`.
        secure_sum: ckks, bfv, masked bfv, masked, recoverable, crypten or plain, each the sum that
            the function `secure_apfed.secure_sum` makes by this name; or the section `secure_sum`.
        guard: `FrozenGaussian`, `Gaussian`, or the section `guard`; None: no guarantee for what the
            active sends.
        epochs: passes over the training rows; None: 20.
        batch_size: rows of one step, at least 2; None: 128. More than there are: all of them.
        optimizer: optimizer of every party without its own: sgd, adam, adamw, or a function that
            makes an optimizer from the list of parameters; None: sgd. If the function has an
            argument `modules`, it also gets the party's modules by name (encoder, head and
            projection, or objective), to make groups of parameters. It gets `lr` if
            train={"learning_rate": ...} is given, and else uses its own rate.
        scheduler: scheduler of every party without its own: a function of the optimizer that makes
            a `torch.optim.lr_scheduler.LRScheduler`.
        scheduler_every: "epoch": schedulers step after each epoch; a number: after so many of a
            party's own steps. `ReduceLROnPlateau` reads the party's mean loss of an epoch.
        labelled: number of training rows that keep their label; below 1 it is their share; None:
            all rows that have a label.
        test_fraction: share of the active's labelled rows that are only used to measure; they are
            drawn before `labelled` applies.
        seed: seed of the split, of initial weights that are made here, and of the order of batches.
        folder: folder of the run, for its checkpoints and reports; None: nothing is written.
        resume: continue from the newest checkpoint in `folder`, with the same arguments; its
            weights are loaded into the modules.
        baselines: whether to train, for comparison, the active's own network without passives, and
            local models.
        attacks: attacks to mount on the messages of all parties, as the section `attacks`: names,
            "all", or {"name": ..., "options": {...}}. They load the aligned rows of data sets into
            memory.
        on_progress: called with each `Progress`.
        settings: further sections of a run's YAML file, such as train={"learning_rate": 0.05} or
            model={"projection": 16}.

    Returns:
        The trained networks with measures, comparisons and privacy costs. Modules of the active are
        trained in place.

    Raises:
        DataError: rows, IDs or labels do not fit; the error names the party.
        ConfigError: a setting or a module does not fit.
        ProtocolError, BudgetExhaustedError, CheckpointError: the run stops, or cannot start or
            resume, as for `secure_apfed.run`.

    Examples:
        >>> import torch
        >>> from secure_apfed import Active, Passive, train
        >>> rows = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
        >>> ids = [f"person-{number}" for number in range(80)]
        >>> labels = (rows[:, 0] + rows[:, 3] > 0).long()
        >>> active = Active("clinic", ids, rows[:, :3], labels, encoder=torch.nn.Linear(3, 4))
        >>> passives = [Passive("lab", ids, rows[:, 3:]), Passive("registry", ids, rows[:, 1:4])]
        >>> result = train(active, passives, epochs=1, secure_sum="masked", baselines=False)
        >>> result.model(rows[:5, :3]).shape  # of the active alone
        torch.Size([5, 2])
    """
    require_parties(active, passives)
    refuse_misplaced_settings(settings, inspect.signature(train).parameters)
    train_settings = read_section(settings, "train")
    train_arguments = {"epochs": epochs, "batch_size": batch_size, "optimizer": optimizer}
    method_name = method if isinstance(method, str) else str(method.get("name"))
    method_class = METHODS.get(method_name) if passives else None
    has_gradient_sum = method_class is not None and method_class.settings.has_gradient_sum
    refuse_contradictions(
        active, passives, train_arguments, guard, settings, has_gradient_sum=has_gradient_sum
    )
    parties: list[Active | Passive] = [active, *passives]
    rate_by_setting = {
        key: train_settings[key] for key in OPTIMIZER_ARGUMENT_BY_SETTING if key in train_settings
    }
    default_steps = OwnOptimization(
        optimizer=None if isinstance(optimizer, str) else bind_rates(optimizer, rate_by_setting),
        scheduler=scheduler,
        scheduler_interval=scheduler_every,
    )
    code_by_party = {
        party.name: make_code(party, default_steps, rate_by_setting) for party in parties
    }
    refuse_shared_parameters(code_by_party)
    data_choice = read_data_settings(settings)
    data, classes, kept_rows = make_data(
        active, passives, data_choice, labelled=labelled, test_fraction=test_fraction, seed=seed
    )
    untrained_code = {active.name: code_by_party[active.name].copy_fresh()}  # for the comparison
    config = make_config(
        active,
        passives,
        classes,
        method=method,
        alignment=alignment,
        secure_sum=secure_sum,
        guard=guard,
        data_choice=data_choice,
        train=complete_train_settings(train_settings, train_arguments),
        seed=seed,
        labelled=labelled,
        test_fraction=test_fraction,
        attacks=attacks,
        settings=settings,
    )
    run_folder = None if folder is None else Path(folder)
    if config.attacks:
        from apfed_attacks.table import expand_choices

        expand_choices(config.attacks)  # a wrong name is refused before the training
    common_count = count_common(data, config) if passives else None
    with warnings.catch_warnings():
        # This process has all tables, so an unsafe sum reveals nothing new to it.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        result = run_in_memory(
            config,
            run_folder,
            data=data,
            code=code_by_party,
            resume=resume,
            on_progress=on_progress,
        )
    networks = result.own_networks  # None: every party is needed to predict
    model = None
    if networks is not None:
        model = PredictingNetwork(networks.encoder, networks.head).eval()
    training_result = TrainingResult(
        networks=model,
        classes=classes,
        run=result,
        attacks=_run_attacks(config, run_folder, result),
        test_rows=torch.from_numpy(kept_rows)[data.test_rows],
        common=common_count,
        own_people=len(data.table.ids),
        _active_model=_make_active_model(model, data, result, config),
        black_boxes=tuple(party.name for party in passives if party.gradient is not None),
        model_is=describe_model(networks, active),
    )
    return (
        _add_local_scores(training_result, config, data, untrained_code)
        if baselines
        else training_result
    )


def _run_attacks(
    config: Config, folder: Path | None, result: RunResult
) -> "tuple[AttackResult, ...]":
    """Mount the configured attacks on a finished run, and return their results.

    If the run has a folder, the results are also written to it.

    `folder`: folder of the run; None: it has none. `result`: result of the run.
    """
    if not config.attacks:
        return ()
    if folder is None:
        from apfed_attacks.run import run_attacks

        return run_attacks(result.recording, config.attacks, seed=config.seed)
    from apfed_experiments.finished import mount_attacks

    return mount_attacks(folder, recording=result.recorded)


def load_training_recording(
    folder: PathLike, active: Active, passives: Sequence[Passive]
) -> Recording:
    """Load the record of a finished `train(..., folder=...)`, to mount attacks on it.

    Args:
        folder: folder of the run.
        active, passives: the parties that were passed to `train`, with their rows, labels and
            networks. The run's weights are loaded into their modules.

    Raises:
        DataError: the parties have other rows.
        CheckpointError, ModelError: the run or its networks cannot be read, as for
            `secure_apfed.attacks.load_recording`.
    """
    config = RunFolder(Path(folder)).load_config()
    data_choice = DataChoice(
        classes=config.data.explicit_classes,
        positive=config.data.positive,
        split=config.data.split,
    )
    data, _, _ = make_data(
        active,
        passives,
        data_choice,
        labelled=config.data.labelled,
        test_fraction=config.data.test_fraction,
        seed=config.seed,
    )
    return load_recording(
        folder,
        data=data,
        encoder=active.encoder,
        head=active.head,
        encoders={party.name: party.encoder for party in passives if party.encoder is not None},
    )


def _make_active_model(
    network: nn.Sequential | None, data: VerticalData, result: RunResult, config: Config
) -> ActiveModel | None:
    """Return the active's network with the encoding of its rows, so that it predicts raw rows.

    `network`: the trained network; None: every party is needed to predict, and None is returned.
    """
    if network is None:
        return None
    return ActiveModel(
        network=network,
        classes=data.classes,
        encoding=data.table.encoding,
        card={},
        threshold=result.threshold,
        task=TASKS[config.task].from_targets(data.targets),
    )


def _add_local_scores(
    result: TrainingResult,
    config: Config,
    data: VerticalData,
    untrained_code: Mapping[str, UserFunctions],
) -> TrainingResult:
    """Return the result with measures of what the active achieves without passives.

    The active's own network is trained in the same way without them. Local models are fitted, too,
    if the active's rows are flat and in memory.

    Args:
        result: result of the run with passives.
        config: settings of that run.
        data: all parties' tables.
        untrained_code: the active's code with untrained copies of its networks, by the active's
            name.
    """
    active_only = replace(data, passives=())
    local_settings = config.model_dump(mode="json", exclude_defaults=True)
    local_settings = {
        key: local_settings[key]
        for key in ("name", "seed", "data", "train", "model")
        if key in local_settings
    }
    local_settings |= {"method": {"name": find_local_method()}, "guard": {"mechanism": "none"}}
    local_settings["secure_sum"] = {"scheme": "plain"}
    local_settings["train"] = {**local_settings.get("train", {}), "labels": "joint"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoHelpWarning)
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        local_result = run_in_memory(
            Config.model_validate(local_settings), None, data=active_only, code=dict(untrained_code)
        )
    first_variant = next(iter(local_result.measures))  # the way to predict that is reported first
    local_score = local_result.measures[first_variant][local_result.measure]
    result = replace(result, alone=local_score)
    is_lazily_read = is_lazy(data.table.features) and not is_sampled(data.table.features)
    if is_lazily_read or len(data.table.shape) > 1:
        skipped_models = "the local models, which read flat rows of numbers in memory"
        return replace(result, not_tried=skipped_models)
    from apfed_experiments.baselines import find_best_local

    # Local models are built in, so settings of the user's own networks do not apply to them.
    built_in_config = config.model_copy(update={"model": ModelSettings()})
    best_name, best_score = find_best_local(built_in_config, data)
    return replace(result, best_local=best_score, best_local_name=best_name)
