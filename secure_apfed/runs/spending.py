"""The privacy cost of a run, and the text of its guarantee.

The cost of a run is the cost of the party that spent most. Run by: the experimenter, who reads
every party's ledger; and each party for its own ledgers (`ReleaseMeter`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from secure_apfed.base.names import UPDATES
from secure_apfed.config import Config
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.learning.black_box import describe_black_boxes, find_black_boxes
from secure_apfed.methods import Session
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.contributions import contributions_statement
from secure_apfed.privacy.defences import describe_defences
from secure_apfed.privacy.ledger import NOTHING_RELEASED, PrivacyLedger, PrivacySpent, cross_check
from secure_apfed.privacy.randomised_response import LabelMechanism
from secure_apfed.settings.promises import Promise, find_party_guarantee

LABEL_ASSUMPTIONS = (
    "it covers training labels in whatever this run computed from them, the finished model and the "
    "baselines beside it included, taking as public the features, who is in the table, the class "
    "names, the split into training and test rows and every setting; not covered are test labels "
    "and what is measured with them, nor attacks that were asked for, whose scores compare guesses "
    "with the true labels"
)
_SEED_CAVEAT = (
    "and label DP holds only against somebody who does not know the run's seed, since the "
    "answers are derived from it"
)


class ReleaseMeter:
    """A meter of the privacy cost of one party's releases so far.

    The guarantee is computed again only after a ledger recorded a new cost.

    Args:
        config: settings of the run.
        role: the party's role in the run: active, passive, aggregator or dealer.
    """

    def __init__(self, config: Config, role: str) -> None:
        """Start without ledgers; the party adds them as it opens them."""
        self._config = config
        self._role = role
        self._ledgers: dict[str, PrivacyLedger] = {}
        self._guarantee: Promise | None = None
        self._charges_at_guarantee = -1  # number of charges when it was computed

    def add_ledger(self, name: str, ledger: PrivacyLedger) -> None:
        """Include a ledger from now on, unless it counts private updates (DP-SGD).

        Updates release nothing by themselves. `name`: name of the ledger, which says what it
        counts.
        """
        if not name.endswith(UPDATES):
            self._ledgers[name] = ledger
            self._guarantee = None

    @property
    def charges(self) -> int:
        """The number of batches whose cost was recorded in this session, repeats included."""
        return sum(ledger.charges for ledger in self._ledgers.values())

    @property
    def promise(self) -> Promise:
        """The party's privacy guarantee at the cost so far, by its most expensive ledger."""
        if self._guarantee is None or self._charges_at_guarantee != self.charges:
            self._charges_at_guarantee = self.charges
            self._guarantee = find_party_guarantee(
                self._config,
                self._role,
                [ledger.summarise_cost() for ledger in self._ledgers.values()],
            )
        return self._guarantee


def compute_run_cost(
    session: Session, label_mechanism: LabelMechanism, *, delta: float
) -> PrivacySpent:
    """Return the privacy cost of the party that spent most.

    The costs of private training (DP-SGD) and of the label mechanism are included.

    `label_mechanism`: the run's label mechanism. `delta`: delta of the cost if no ledger in this
    process counts releases.
    """
    spent = find_worst_spent(_list_release_ledgers(session))
    if spent is None:
        spent = _compute_remote_cost(session, delta)
    if session.active_role.dp_sgd_training:
        spent = session.active_role.dp_sgd_training.add_training_cost(spent)
    return spent if label_mechanism.unsafe else spent.include_labels(label_mechanism)


def _compute_remote_cost(session: Session, delta: float) -> PrivacySpent:
    """Return the privacy cost of a run in which no ledger in this process counts representations.

    If passives in other processes send representations, it is the highest cost that they reported;
    epsilon is infinite until all have reported. Epsilon is also infinite if something is sent that
    no ledger of representations counts, and zero if nothing is sent.

    `delta`: delta of the cost.
    """
    no_cost = PrivacySpent.for_no_release(delta=delta)
    method = session.party_session.party.config.method
    method_facts = method.exchange_facts
    if "tables are decomposed" in method_facts:
        reason = "singular vectors of all parties' rows were opened without noise"
    elif "passives send representations" in method_facts and not session.helpers:
        # All passives run in other processes, and report the cost of their representations.
        cost_by_passive = {
            name: cost
            for name, costs in session.reported_costs.items()
            for cost in costs
            if cost.figure == "epsilon_x"
        }
        unreported = [name for name in session.contract.passives if name not in cost_by_passive]
        if not unreported:
            worst_passive = max(cost_by_passive, key=lambda name: cost_by_passive[name].epsilon)
            return cost_by_passive[worst_passive].to_privacy_cost(worst_passive)
        reason = f"{' and '.join(unreported)} did not say yet what was charged there"
    elif method.epsilon_name != "epsilon_x":
        reason = (
            f"no representation is sent; what else leaves is counted by {method.epsilon_name} alone"
        )
    else:
        return no_cost
    return replace(no_cost, epsilon_x=math.inf, mu=math.inf, accountants={}, trace=(reason,))


def add_cross_checks(spent: PrivacySpent, session: Session) -> PrivacySpent:
    """Return the cost with the epsilons that other installed privacy accountants compute.

    This takes seconds. The cost is returned unchanged if epsilon_x is zero or infinite.

    `spent`: the cost by this library's own accountant.
    """
    worst_ledger = _pick_worst_ledger(_list_release_ledgers(session))
    if not 0 < spent.epsilon_x < math.inf:
        return spent
    if worst_ledger is not None:
        return replace(spent, accountants=worst_ledger.cross_check())
    if not (spent.releases and 0 < spent.mu < math.inf):
        return spent
    # Passives in other processes report only their total: mu of T releases is sqrt(T) times the mu
    # of one release.
    release = GaussianRelease(noise_multiplier=math.sqrt(spent.releases) / spent.mu)
    return replace(
        spent, accountants=cross_check(release, releases=spent.releases, delta=spent.delta)
    )


def find_worst_spent(ledgers: Iterable[PrivacyLedger]) -> PrivacySpent | None:
    """Return the cost of the ledger with the highest epsilon; None: there is no ledger."""
    worst_ledger = _pick_worst_ledger(ledgers)
    return worst_ledger.get_privacy_spent() if worst_ledger else None


def _pick_worst_ledger(ledgers: Iterable[PrivacyLedger]) -> PrivacyLedger | None:
    """Return the ledger with the highest epsilon; None: there is no ledger."""
    return max(ledgers, key=lambda ledger: ledger.get_privacy_spent().epsilon_x, default=None)


def _list_release_ledgers(session: Session) -> list[PrivacyLedger]:
    """Return the ledgers in this process that count releases of representations.

    Ledgers of private updates (DP-SGD) and of contributions to secure sums are left out.
    """
    updates = (
        session.active_role.dp_sgd_training.updates if session.active_role.dp_sgd_training else None
    )
    other_ledgers = (updates, *session.contribution_ledgers.values())
    return [ledger for ledger in session.ledgers.values() if ledger not in other_ledgers]


def describe_guarantee(config: Config, session: Session, label_mechanism: LabelMechanism) -> str:
    """Return all protections of the run in words: what each covers, and what is not protected.

    `label_mechanism`: the run's label mechanism.
    """
    # Whoever knows the seed of a run knows noise that follows from it.
    is_reproducible = config.guard.noise != "secret"
    learner = session.active_role
    other_guarantees = describe_defences(config.defences, config.method)
    passives_vote = "passives vote" in config.method.exchange_facts
    if session.contract.secure_sum.get("noise") and not passives_vote:
        sum_class = find_sum_class(config.secure_sum)
        other_guarantees.insert(
            0, contributions_statement(sum_class.leaks.single, is_reproducible=is_reproducible)
        )
    other_guarantees += describe_black_boxes(find_black_boxes(session.contract.passives))
    return join_guarantees(
        learner.guarantee,
        label_mechanism,
        is_training_private=learner.dp_sgd_training is not None,
        is_reproducible=is_reproducible,
        other_guarantees=other_guarantees,
    )


def join_guarantees(
    release_guarantee: str,
    label_mechanism: LabelMechanism,
    *,
    is_training_private: bool,
    is_reproducible: bool = False,
    other_guarantees: Sequence[str] = (),
) -> str:
    """Return the guarantee of a run in words.

    Args:
        release_guarantee: the guarantee of noise on representations or of private training, or
            `NOTHING_RELEASED`.
        label_mechanism: the run's label mechanism.
        is_training_private: whether training is private (DP-SGD), so that `release_guarantee`
            covers labels.
        is_reproducible: whether noise and randomised labels follow from the run's seed. Then
            nothing is guaranteed against somebody who knows the seed.
        other_guarantees: sentences on other protections.
    """
    sentences = [release_guarantee]
    if not math.isinf(label_mechanism.epsilon):
        sentences += [label_mechanism.describe_guarantee(), LABEL_ASSUMPTIONS]
        if is_reproducible:
            sentences.append(_SEED_CAVEAT)
    elif not is_training_private and release_guarantee != NOTHING_RELEASED:
        sentences.append(
            label_mechanism.describe_guarantee()
        )  # it says that labels are not protected
    return "; ".join([*sentences, *other_guarantees])
