"""Inputs, role and storage of one party in a session.

Run by: each party, for itself. `PartyContext` is a method's only access to the party whose role it
builds: its part of the data, its settings, keys and seed, and what follows from these. That is its
untrained networks, its guard with the privacy ledger, and the bounds on what it sends. It gives no
access to other parties. `Role` is its part in a session, and `CheckpointStore` its folder.

Letters: N rows of a table or positions of the alignment, B rows of a batch, F features, D numbers
of a row that is sent, K outputs of a model.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import derive_key, fresh_key
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.alignment.positions import find_positions_in_table_order
from secure_apfed.base.names import UPDATES, ReleaseEpsilonName, log_file
from secure_apfed.base.seeds import Draws, seed_draws
from secure_apfed.contract import Contract, PassiveTerms, RepresentationBounds
from secure_apfed.data import OwnData
from secure_apfed.data.lazy_rows import select_rows
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Links
from secure_apfed.labellers import Labeller, make_labeller
from secure_apfed.learning.descent import ActiveNetworks, add_prefix, remove_prefix
from secure_apfed.learning.own_code import FreshFamily, UserFunctions, name_part_in_errors
from secure_apfed.learning.release import ActiveProtections, ChargedGuard, ContributionNoise
from secure_apfed.learning.trainers import ActiveTrainer, PassiveDescent, PassiveTrainer
from secure_apfed.measures.tasks import TASKS, Task
from secure_apfed.methods.noise_plans import (
    NoisePlan,
    make_sum_release,
    plan_updates,
    sum_and_noise,
)
from secure_apfed.methods.terms import (
    bound_representations,
    bound_sent_rows,
    derive_limits,
    find_objective,
    find_projection_size,
)
from secure_apfed.networks.models import (
    NetworkFamily,
    Shape,
    family_for,
    output_shape,
    require_scores,
)
from secure_apfed.networks.objectives import OBJECTIVES, Objective
from secure_apfed.networks.rank import count_columns, warn_if_narrow
from secure_apfed.privacy.accountants import Mechanism
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.defences import DefenceChain, gradient_defences
from secure_apfed.privacy.dp_sgd import GradientGuard, PrivateUpdates, WholeTraining
from secure_apfed.privacy.guard import (
    RepresentationGuard,
    joint_releases_statement,
    make_guard,
)
from secure_apfed.privacy.ledger import PrivacyLedger, holds_releases
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings import (
    BlackBoxSettings,
    ModelSettings,
    ObjectiveSettings,
    OwnLossSettings,
    RunSettings,
)
from secure_apfed.settings.method import GradientKind

_MAX_COUNTED_COLUMNS = 4096
"""Columns of a passive's table up to which the distinct ones are counted; wider tables are never
narrow, and counting takes long."""


@dataclass(frozen=True, kw_only=True)
class PartyCheckpoint:
    """The state of one party before a step; with its own secrets, all that it needs to resume.

    Attributes:
        run: digest (hex) of the contract of the first session; it identifies the run and its
            alignment.
        step: the next step.
        rows: the row of its table at each alignment position, (N,); empty: it has no table.
        tensors: the state of its role, by name.
        ledgers: the state of its privacy ledgers, by name.
        notes: further state as plain JSON values.
    """

    run: str
    step: int
    rows: Tensor = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    ledgers: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    notes: Mapping[str, Any] = field(default_factory=dict)


class CheckpointPart(Protocol):
    """A part of a role's state in a checkpoint: networks, ledgers, counters."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state by name."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""


class Role:
    """A party's role in a session, with its private state.

    Attributes:
        name: the party's name.
        checkpoint_parts: the parts of its state that go into its checkpoint, by prefix of their
            tensors' names.
        ledgers: the party's privacy ledgers by name, for releases and private updates.
        contribution_ledger: the one of `ledgers` that records the cost of its noisy contributions
            to sums; None: it makes none.
        prediction_networks: the party's networks for joint prediction, by name, which are stored
            after training.
    """

    name: str
    checkpoint_parts: Mapping[str, CheckpointPart] = {}
    ledgers: Mapping[str, PrivacyLedger] = {}
    contribution_ledger: PrivacyLedger | None = None
    prediction_networks: Mapping[str, nn.Module] = {}

    async def set_up(self, links: Links) -> None:
        """Run the method's exchange between alignment and training; by default none."""

    def feature_scores(self) -> Tensor | None:
        """Return the importance of each of this party's F own features, without a unit.

        The scores follow from what the role learnt, and are sent to nobody. None: the method gives
        no such scores.
        """
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return the role's state for its own checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, part in self.checkpoint_parts.items():
            tensors |= add_prefix(name, part.tensors())
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state that `tensors` returned before step `next_step`."""
        for name, part in self.checkpoint_parts.items():
            part.load_tensors(remove_prefix(name, tensors))


class CheckpointStore(Protocol):
    """A party's storage: its signed contract, its checkpoints, and how its part of the run
    ended.
    """

    def save_contract(self, contract: Contract, signatures: Mapping[str, bytes]) -> None:
        """Store the contract with the signatures of all parties."""

    def load_latest(self, max_step: int | None = None) -> PartyCheckpoint | None:
        """Return the newest checkpoint; None: there is none.

        `max_step`: the latest step that the checkpoint may have; None: any.
        """

    def list_steps(self) -> tuple[int, ...]:
        """Return the steps of the stored checkpoints, ascending."""

    def save(self, state: PartyCheckpoint) -> None:
        """Store this checkpoint, and keep the one before it."""

    def register_ledger(self, name: str, ledger: PrivacyLedger) -> None:
        """Tell the store of a privacy ledger that the party opened, whose costs it then watches."""

    def finish_part(self, contract: Contract, role: Role) -> None:
        """Record how this party's part ended, and delete what only a resumption would need."""


@dataclass(frozen=True, kw_only=True)
class PartySecrets:
    """The private inputs of one party, besides its data.

    Attributes:
        identity: the party's long-term key pair.
        noise_key: 32 secret bytes, from which the keys of all of its noise are derived.
        seed: random seed of the party's weights and dropout.
        checkpoint_store: the store of its checkpoints; None: it saves none.
        log_folder: folder of its write-ahead logs; None: keep them in memory.
        needs_durable_logs: whether answers leave this process, and so wait until the disk has
            counted them.
    """

    identity: Identity
    noise_key: bytes = field(repr=False)
    seed: int = field(repr=False)
    checkpoint_store: CheckpointStore | None = None
    log_folder: Path | None = None
    needs_durable_logs: bool = True


def fresh_secrets(
    config: RunSettings,
    name: str,
    *,
    identity: Identity | None = None,
    checkpoint_store: CheckpointStore | None = None,
    log_folder: Path | None = None,
) -> PartySecrets:
    """Return a party's secrets for a new run: random ones, or as configured from the run's seed.

    `name`: the party's name. `identity`: the party's long-term key pair; None: generate one.
    `checkpoint_store`: store of the party's state; None: it saves none. `log_folder`: folder of
    ledgers and counters; None: they stay in memory.
    """
    random_seed = int.from_bytes(fresh_key()[:8], "big") >> 1  # fits into 63 bits
    derived_key = hashlib.sha256(f"noise of {name}, seed {config.seed}".encode()).digest()
    return PartySecrets(
        identity=identity or fresh_identity(),
        noise_key=fresh_key() if config.guard.noise == "secret" else derived_key,
        seed=random_seed if config.party_seeds == "secret" else config.seed,
        checkpoint_store=checkpoint_store,
        log_folder=log_folder,
    )


@dataclass(frozen=True, kw_only=True)
class PartyContext:
    """A party's inputs to a session: settings, secrets, data and code. All but the public
    settings stays with that party.

    Attributes:
        config: the run's public settings, the same at all parties.
        name: the party's name.
        active, passives: the names of the parties with tables, public.
        secrets: the party's keys, seed and folders.
        identity_by_party: the public identity that it expects of every party, its own included.
        data_or_none: the party's part of the run's data; None: it has none (aggregator, dealer).
        aligned_rows: the row of its table at each alignment position, from an earlier session;
            None: run the intersection now.
        trained_run: digest of the contract of the run whose model predicts in this session; None:
            this session trains.
        allow_reading_all: whether the party's own configuration file accepts settings under which
            all of its columns could be reconstructed; always true if one process simulates all
            parties.
        own_code: networks, a loss and an optimiser of its own, where it brings some.
        record_contribution: called with step, alignment positions (B,) and values (B, D) of each
            contribution before the sum protects it; for the party's own record. None: no record.
    """

    config: RunSettings
    name: str
    active: str
    passives: tuple[str, ...]
    secrets: PartySecrets
    identity_by_party: Mapping[str, bytes]
    data_or_none: OwnData | None = field(default=None, repr=False)
    aligned_rows: Tensor | None = field(default=None, repr=False)
    trained_run: str | None = None
    allow_reading_all: bool = True
    own_code: UserFunctions = field(default_factory=UserFunctions, repr=False)
    record_contribution: Callable[[int, Tensor, Tensor], None] | None = None

    @property
    def data(self) -> OwnData:
        """The party's part of the data, which it must have."""
        assert self.data_or_none is not None
        return self.data_or_none

    @property
    def task(self) -> Task:
        """The task that the active's model learns.

        Raises DataError: the task needs other labels.
        """
        config = self.config
        return TASKS[config.task].from_targets(self.data.targets, loss=config.train.loss)

    @property
    def output_count(self) -> int:
        """K, the number of outputs that a model of the task gives for a row."""
        return self.task.count_outputs(len(self.data.classes))

    def features_of(self, rows: Tensor) -> Any:
        """Return the features of these rows of its table, in the order of `rows`."""
        return select_rows(self.data.table.features, rows)

    def find_positions(self, aligned_rows: Tensor, rows: Tensor) -> Tensor:
        """Return the alignment positions of these rows of its table, in the table's order.

        Rows that are not aligned are left out. `aligned_rows`: the row of its table at each of the
        N alignment positions.
        """
        return find_positions_in_table_order(aligned_rows, rows)

    def derive_key(self, purpose: bytes) -> bytes:
        """Return 32 secret bytes for one purpose, derived from the party's noise key."""
        return derive_key(self.secrets.noise_key, purpose)

    # Untrained networks, whose weights follow from the party's seed.

    def draw(self, purpose: str) -> Draws:
        """Return a context in which random numbers follow from the party's seed and `purpose`."""
        return seed_draws(self.secrets.seed, self.name, purpose)

    @cached_property
    def fresh_networks(self) -> FreshFamily | None:
        """The party's own networks as they are before training; None: it brings none.

        Each network that this family builds is a copy of one of them.
        """
        return self.own_code.copy_networks()

    def find_family(self, model: ModelSettings) -> NetworkFamily:
        """Return the family that builds this party's networks.

        It is the party's own code if there is any, otherwise the family that `model` names.
        """
        return self.own_code.find_family() or family_for(model, self.data.table.shape)

    @contextmanager
    def _draw_network_part(self, part: str) -> Iterator[None]:
        """Seed the random numbers for building one part of a network, and name the part in errors.

        `part`: such as "encoder".
        """
        with self.draw(part), name_part_in_errors(self.name, part):
            yield

    def build_encoder(
        self, model: ModelSettings, family: NetworkFamily | None = None
    ) -> tuple[nn.Module, Shape]:
        """Return an encoder for this party's rows, and the shape of its output for one row.

        `model`: settings of the network. `family`: the builder of networks; None: the party's own
        (`find_family`). Raises ModelError: the network does not take such rows.
        """
        features = self.data.table.shape
        family = family or self.find_family(model)
        with self._draw_network_part("encoder"):
            encoder = family.make_encoder(features, model)
            return encoder, output_shape(encoder, features)

    def build_head(self, model: ModelSettings, input_shape: Shape, output_count: int) -> nn.Module:
        """Return a head, which maps representations to outputs.

        `model`: settings of the network. `input_shape`: the shape of its input for one row.
        `output_count`: number of outputs for one row. Raises ModelError: the party's own head
        returns others.
        """
        with self._draw_network_part("head"):
            head = self.find_family(model).make_head(math.prod(input_shape), output_count, model)
            if self.own_code.head is not None:
                require_scores(head, input_shape, output_count, classes=self.data.classes)
        return head

    @property
    def projection_size(self) -> int | None:
        """The size of z, the linear projection of h that the active sends; None: it sends h."""
        return find_projection_size(self.config, self.passives)

    def build_networks(self, *, sends_representations: bool) -> tuple[ActiveNetworks, Shape]:
        """Return the active's networks and the shape of one row of the representation it sends.

        `sends_representations`: whether the method sends representations at all; otherwise no
        projection is built. Raises ConfigError: the party's own code has a projection, and the
        settings have none.
        """
        model = self.config.model
        projection_size = self.projection_size if sends_representations else None
        encoder, shape = self.build_encoder(model)
        head = self.build_head(model, shape, self.output_count)
        if projection_size is None:
            if sends_representations and self.own_code.projection is not None:
                raise ConfigError(
                    f"{self.name}: it brought a projection, and the run sends the encoder's whole "
                    "output; say how many numbers are sent, as model.projection: 64"
                )
            return ActiveNetworks(encoder, head), shape
        with self._draw_network_part("projection"):
            projection_module = self.own_code.make_projection(projection_size, shape)
        return ActiveNetworks(encoder, head, projection_module), (projection_size,)

    def build_active_trainer(self, protection: ActiveProtections) -> ActiveTrainer:
        """Return the active's networks with their optimiser.

        `protection`: the guard, DP-SGD noise and privacy ledgers under which they train.
        """
        table = self.data.table
        assert table.labels is not None
        networks, _ = self.build_networks(sends_representations=protection.is_sending)
        return ActiveTrainer(
            self.name,
            networks,
            features_N=table.features,
            labels_N=table.labels,
            train=self.config.train,
            seed=self.secrets.seed,
            private_updates=protection.private_updates,
            task=self.task,
            own_optimization=self.own_code.optimization,
            needs_independent_rows=protection.needs_independent_rows,
        )

    def build_active_parts(
        self, contract: Contract, rows: Tensor, *, sends_representations: bool
    ) -> "ActiveParts":
        """Return the parts from which the role of an active that trains by steps is made.

        `rows`: the row of its table at each of the N alignment positions. `sends_representations`:
        whether it sends representations of these rows; otherwise it trains as if nothing were
        aligned.
        """
        protection = self.open_active_protection(
            len(rows), sends_representations=sends_representations
        )
        return ActiveParts(
            party=self,
            contract=contract,
            trainer=self.build_active_trainer(protection),
            protection=protection,
            aligned_rows=rows if sends_representations else None,
        )

    def build_passive_trainer(
        self, terms: PassiveTerms, rows: Tensor, *, is_noised: bool, is_defended: bool
    ) -> PassiveDescent:
        """Return the object that computes a passive's gradients: a built-in objective, or the
        passive's own code.

        Args:
            terms: the passive's objective and the representations that it gets.
            rows: the row of its table at each of the N alignment positions; -1: it does not know
                the person there.
            is_noised: whether noise is added to its gradients, on which a privacy bound rests.
            is_defended: whether a defence changes its gradients.

        Raises ConfigError: the settings say that the passive brings code, and it brought none.
        Warns NarrowTableWarning: its gradients leave without noise or defence, and its table has
        few columns.
        """
        settings = terms.objective
        assert settings is not None
        if isinstance(settings, BlackBoxSettings):
            ids = self.data.table.ids
            return self.own_code.make_black_box(owner=self.name, rows_N=rows, ids=ids)
        with self._draw_network_part("objective"):
            objective = self._make_objective(settings, terms.representation.shape)
            objective.fit(self.features_of(rows[rows >= 0]))
        if not is_noised and not is_defended:
            self._warn_of_narrow_table(rows[rows >= 0], math.prod(terms.representation.shape))
        return PassiveTrainer(
            self.name,
            objective,
            # Unknown people get row 0, on which nothing is trained.
            features_N=self.features_of(rows.clamp(min=0)),
            train=self.config.train,
            seed=self.secrets.seed,
            own_optimization=self.own_code.optimization,
            needs_independent_rows=is_noised,
        )

    def _make_objective(
        self, settings: ObjectiveSettings, representation_shape: Shape
    ) -> Objective:
        """Return the passive's objective: its own loss, or a built-in one, by the settings.

        `representation_shape`: the shape of one row of the representations that it gets.
        """
        model = self.config.find_model_settings(self.name)
        if isinstance(settings, OwnLossSettings):
            return self.own_code.make_objective(
                settings,
                owner=self.name,
                representation=representation_shape,
                features=self.data.table.shape,
                model=model,
                family=self.own_code.find_family(),
            )
        objective_class: type[Objective] = OBJECTIVES[settings.name]
        return objective_class(
            settings,
            representation=representation_shape,
            features=self.data.table.shape,
            model=model,
            family=self.find_family(model),
        )

    # What the parties agree on.

    def require_passives(self) -> None:
        """Refuse settings for a passive that is not among the parties.

        Raises ConfigError: names the setting and the passives that take part.
        """
        for name in self.config.passives:
            if name != "default" and name not in self.passives:
                raise ConfigError(
                    f"passives.{name}: no passive has that name; there are "
                    f"{', '.join(self.passives)}, and default for those not named"
                )

    def require_terms(
        self, sender: str, proposed: RepresentationBounds, expected: RepresentationBounds
    ) -> None:
        """Refuse another party's terms (bounds on a row) if this party's settings give others.

        `sender`: name of the other party. `proposed`: the terms that it proposed. `expected`: the
        terms by this party's settings. Raises RemoteProtocolError: names the sender and what
        differs.
        """
        expected_values = expected.model_dump()
        proposed_values = proposed.model_dump()
        differences = [
            f"{name} {proposed_values[name]} where {value} is expected"
            for name, value in expected_values.items()
            if proposed_values[name] != value
        ]
        if differences:
            raise RemoteProtocolError(
                f"{sender} offers {self.name} representations with {', '.join(differences)} by the "
                f"settings of {self.name}; give both the same rules, guard and model"
            )

    @cached_property
    def _planned_guard(self) -> RepresentationGuard:
        """A guard used only for its bounds; it releases nothing."""
        return self.make_guard()

    def bound_representations(self, shape: Shape) -> RepresentationBounds:
        """Return the bounds on a row that the active sends; see `terms.bound_representations`."""
        projected = self.projection_size is not None
        return bound_representations(
            self.config, shape, self._planned_guard, is_projected=projected
        )

    def bound_sent_rows(self, shape: Shape) -> RepresentationBounds:
        """Return the bounds on a row that a passive sends; see `terms.bound_sent_rows`."""
        return bound_sent_rows(self.config, shape, self._planned_guard)

    def state_passive_terms(self, passive: str, bounds: RepresentationBounds) -> PassiveTerms:
        """Return the contract's terms of a passive: its objective and its weight in the sum.

        `bounds`: the bounds on the representations that it gets, also part of the terms.
        Raises ConfigError: the settings name no objective, or another kind than the method's.
        """
        return PassiveTerms(
            objective=find_objective(self.config, passive),
            weight=self.config.find_passive_settings(passive).weight,
            representation=bounds,
        )

    def describe_sum(self, session: str, shape: Shape) -> dict[str, Any]:
        """Return the public parameters of the secure sum of all passives, for the contract.

        `session`: name of this session, the same at all parties. `shape`: shape of one row of a
        contribution, without the batch axis.
        """
        config = self.config
        secure_sum, plan = sum_and_noise(config, session, self.active, self.passives, shape)
        settings = config.secure_sum.model_dump(mode="json", exclude={"threshold"})
        settings["bits"] = secure_sum.agreement.bits  # also where the settings leave it open
        noise = config.method.find_noise(config)
        if plan is not None and noise is not None:
            settings["noise"] = noise.model_dump(mode="json") | asdict(plan)
        return {**secure_sum.list_parameters(), **settings}

    # What protects the party's messages: guards, noise, defences, and their privacy ledgers.

    @property
    def has_secret_noise(self) -> bool:
        """True if noise comes from a random key; False: from the run's seed, for simulations."""
        return self.config.guard.noise == "secret"

    def make_guard(self) -> RepresentationGuard:
        """Return the guard of this party's representations, calibrated to the planned releases."""
        config = self.config
        return make_guard(
            config.guard,
            delta=config.delta,
            releases=derive_limits(config).releases,
            key=self.secrets.noise_key,
        )

    def describe_joint_releases(self) -> str:
        """Return in words the guarantee for the representations that all passives send together."""
        return joint_releases_statement(self.make_guard().describe_guarantee(), len(self.passives))

    def open_ledger(
        self,
        mechanism: Mechanism | SummedRelease | VoteResponse,
        *,
        budget: float | None,
        position_count: int,
        epsilon_name: ReleaseEpsilonName = "epsilon_x",
        name_suffix: str = "",
    ) -> PrivacyLedger:
        """Open a privacy ledger, whose write-ahead log is `ledger-NAME.jsonl`.

        Args:
            mechanism: the privacy mechanism of one release, from which the ledger computes epsilon.
            budget: the largest epsilon of a row; a release beyond it is refused. None: no limit.
            position_count: number of positions, for each of which the ledger records the cost
                separately.
            epsilon_name: the name of the ledger's epsilon, such as "epsilon_x" (privacy of
                representations).
            name_suffix: follows the party's name in NAME, where the party has another ledger.
        """
        name = self.name + name_suffix
        logs = self.secrets.log_folder
        ledger = PrivacyLedger(
            mechanism,
            delta=self.config.delta,
            budget=budget,
            rows=position_count,
            log=log_file(logs, "ledger", name, "jsonl") if logs else None,
            is_reproducible=not self.has_secret_noise,
            figure=epsilon_name,
        )
        if self.secrets.checkpoint_store is not None:
            self.secrets.checkpoint_store.register_ledger(name, ledger)
        return ledger

    def open_releases(
        self, person_count: int, guard: RepresentationGuard | None = None
    ) -> ChargedGuard:
        """Return the guard with its ledger, through which all representations of this party go.

        `person_count`: number of alignment positions. `guard`: clips and perturbs the
        representations; None: the configured one (`make_guard`).
        """
        guard = guard or self.make_guard()
        budget = self.config.guard.epsilon
        return ChargedGuard(
            guard, self.open_ledger(guard.mechanism(), budget=budget, position_count=person_count)
        )

    def open_active_protection(
        self, person_count: int, *, sends_representations: bool
    ) -> ActiveProtections:
        """Return the active's guard and DP-SGD noise with their ledgers.

        `person_count`: number of alignment positions. `sends_representations`: whether it sends
        representations.

        Raises ConfigError: the guard's releases alone exceed dp_sgd.epsilon.
        """
        config = self.config
        guard = self.make_guard()
        private = self._open_updates(guard)
        releases = self.open_releases(person_count, guard)
        whole_training = None
        if config.dp_sgd is not None and private is not None:
            whole_training = WholeTraining(
                releases=releases.ledger,
                updates=private.ledger,
                delta=config.delta,
                budget=config.dp_sgd.epsilon,
                is_reproducible=not self.has_secret_noise,
            )
        return ActiveProtections(
            charged_guard=releases,
            private_updates=private,
            whole_training=whole_training,
            is_sending=sends_representations,
        )

    def _open_updates(self, guard: RepresentationGuard) -> PrivateUpdates | None:
        """Return the clip and noise of DP-SGD updates with their ledger; None: not configured.

        `guard`: the guard of the active's representations, whose releases share the privacy budget.
        """
        settings = self.config.dp_sgd
        if settings is None:
            return None
        gradient_guard = GradientGuard(
            clip=settings.clip,
            noise_multiplier=plan_updates(self.config, settings, guard),
            key=self.secrets.noise_key,
            noise=self.config.guard.noise,
        )
        rows = len(self.data.table.ids)
        mechanism = gradient_guard.mechanism()
        ledger = self.open_ledger(mechanism, budget=None, position_count=rows, name_suffix=UPDATES)
        return PrivateUpdates(gradient_guard, ledger)

    def open_contribution_noise(
        self, shape: Shape, plan: NoisePlan, person_count: int
    ) -> ContributionNoise | None:
        """Return the noise that a passive adds to its contributions, with its ledger.

        None: the settings have no noise.

        `shape`: shape of one row of a contribution, without the batch axis. `plan`: the agreed
        noise. `person_count`: number of alignment positions.
        """
        config = self.config
        noise = config.method.find_noise(config)
        if noise is None:
            return None
        ledger = self.open_ledger(
            make_sum_release(config, self.name, shape, plan),
            budget=noise.epsilon,
            position_count=person_count,
            epsilon_name=config.method.passives_epsilon_name,
        )
        return ContributionNoise(
            deviation=plan.steps,
            key=self.derive_key(b"secure-apfed contributions v1"),
            ledger=ledger,
            is_secret=self.has_secret_noise,
        )

    def make_labeller(self, name: str, epsilon: float | None) -> Labeller:
        """Return a labeller, the rule by which a passive votes: it gives each row K class scores.

        `name`: the labeller's key in `LABELLERS`. `epsilon`: privacy cost of the labeller's
        weights, whose noise is drawn from the party's own key; None: no noise.
        """
        is_noised = epsilon is not None
        return make_labeller(
            name,
            epsilon=epsilon,
            delta=self.config.delta,
            key=self.derive_key(b"secure-apfed labeller v1") if is_noised else None,
            is_reproducible=is_noised and not self.has_secret_noise,
        )

    def make_defences(self, gradient_kind: GradientKind) -> DefenceChain:
        """Return the configured defences of one kind of gradients that this party sends.

        `gradient_kind`: the kind of gradients, such as "contributions".
        """
        key = self.derive_key(b"secure-apfed defences v1")
        defences = gradient_defences(
            self.config.defences,
            gradient_kind,
            noise=NoiseSource(key, secret=self.has_secret_noise),
            classes=len(self.data.classes),
        )
        return DefenceChain(defences)

    def _warn_of_narrow_table(self, rows: Tensor, values_per_person: int) -> None:
        """Warn a passive with few distinct columns that its contributions reveal them.

        `rows`: the aligned rows of its table. `values_per_person`: number of values about one
        person in a contribution.
        """
        table = self.data.table
        # Wider tables are never narrow, and counting their columns takes long.
        if math.prod(table.shape) <= _MAX_COUNTED_COLUMNS:
            warn_if_narrow(self.name, count_columns(table.features[rows]), values_per_person)

    def require_no_releases(self) -> None:
        """Refuse to begin a run if the party's logs already record releases of another alignment.

        A new alignment puts other people at the counted positions. Raises CheckpointError: a log
        has a release.
        """
        folder = self.secrets.log_folder
        if folder is None or self.aligned_rows is not None:
            return
        logs = [
            log_file(folder, "answers", self.name, "jsonl"),
            *(log_file(folder, "ledger", self.name + end, "jsonl") for end in ("", UPDATES)),
        ]
        log = next(filter(holds_releases, logs), None)
        if log is not None:
            raise CheckpointError(
                f"{self.name}: {self.active} restarts, and {log} counts what {self.name} "
                "released in a run whose rows stood in another order; resume that run, or choose "
                "another folder"
            )


@dataclass(frozen=True, kw_only=True)
class ActiveParts:
    """The parts from which the role of an active that trains by steps is made.

    Attributes:
        party: the active's inputs.
        contract: the session's contract.
        trainer: the active's networks, their optimiser, and its table.
        protection: its guard and privacy ledgers.
        aligned_rows: the row of its table at each of the N alignment positions; None: nothing is
            aligned.
    """

    party: PartyContext
    contract: Contract
    trainer: ActiveTrainer
    protection: ActiveProtections
    aligned_rows: Tensor | None = None
