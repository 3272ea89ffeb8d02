"""The privacy cost of a run, as that of the party that spent most, and the text of its guarantee.

Run by: the experimenter, who reads every party's ledger.
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
from secure_apfed.settings.promises import Promise, promise_of_party

LABEL_ASSUMPTIONS = (
    "it covers training labels in whatever this run computed from them, the finished model and the "
    "baselines beside it included, taking as public the features, who is in the table, the class "
    "names, the split into training and test rows and every setting; not covered are test labels "
    "and what is measured with them, nor attacks that were asked for, whose scores compare guesses "
    "with the true labels"
)
_SEEDED = (
    "and label DP holds only against somebody who does not know the run's seed, since the "
    "answers are derived from it"
)


class ReleaseMeter:
    """A meter of what one party's releases have cost so far, recomputed only after a new cost was
    recorded.

    Args:
        config: settings of the run.
        role: the party's role in it: active, passive, aggregator or dealer.
    """

    def __init__(self, config: Config, role: str) -> None:
        """Start without ledgers; the party adds them as it opens them."""
        self._config = config
        self._role = role
        self._ledgers: dict[str, PrivacyLedger] = {}
        self._promise: Promise | None = None
        self._charges_at_promise = -1  # number of charges when it was computed

    def add_ledger(self, name: str, ledger: PrivacyLedger) -> None:
        """Include this ledger from now on, unless it is one of private updates (DP-SGD), which
        release nothing by themselves.
        """
        if not name.endswith(UPDATES):
            self._ledgers[name] = ledger
            self._promise = None

    @property
    def charges(self) -> int:
        """The number of batches whose cost was recorded in this session, repeats included."""
        return sum(ledger.charges for ledger in self._ledgers.values())

    @property
    def promise(self) -> Promise:
        """The party's privacy guarantee at the cost so far, by its most expensive ledger."""
        if self._promise is None or self._charges_at_promise != self.charges:
            self._charges_at_promise = self.charges
            self._promise = promise_of_party(
                self._config,
                self._role,
                [ledger.summarise_cost() for ledger in self._ledgers.values()],
            )
        return self._promise


def spent_in(session: Session, labels: LabelMechanism, *, delta: float) -> PrivacySpent:
    """Return the cost of the party that spent most, with private training and labels included.

    `labels`: the run's label mechanism. `delta`: used if nobody releases anything.
    """
    spent = find_worst_spent(_list_release_ledgers(session))
    if spent is None:
        spent = _compute_remote_cost(session, delta)
    if session.learner.training:
        spent = session.learner.training.add_training_cost(spent)
    return spent if labels.unsafe else spent.include_labels(labels)


def _compute_remote_cost(session: Session, delta: float) -> PrivacySpent:
    """Return the cost if no ledger in this process counts releases of representations.

    Where passives release them, it is the highest that they reported. Epsilon is infinite until
    all have reported, and where something is released that no ledger counts.

    `delta`: delta at which epsilon is computed.
    """
    nothing = PrivacySpent.for_no_release(delta=delta)
    method = session.party_session.party.config.method
    method_facts = method.facts
    if "tables are decomposed" in method_facts:
        reason = "singular vectors of all parties' rows were opened without noise"
    elif "passives send representations" in method_facts and not session.helpers:
        charged = {
            name: account
            for name, accounts in session.charged.items()
            for account in accounts
            if account.figure == "epsilon_x"
        }
        unreported = [name for name in session.contract.passives if name not in charged]
        if not unreported:
            worst = max(charged, key=lambda name: charged[name].epsilon)
            return charged[worst].to_privacy_cost(worst)
        reason = f"{' and '.join(unreported)} did not say yet what was charged there"
    elif method.figure != "epsilon_x":
        reason = f"no representation is sent; what else leaves is counted by {method.figure} alone"
    else:
        return nothing
    return replace(nothing, epsilon_x=math.inf, mu=math.inf, accountants={}, trace=(reason,))


def add_cross_checks(spent: PrivacySpent, session: Session) -> PrivacySpent:
    """Return the cost with the epsilon that every installed accountant computes; takes seconds.

    `spent`: the cost by this library's own accountant.
    """
    worst = _pick_worst_ledger(_list_release_ledgers(session))
    if not 0 < spent.epsilon_x < math.inf:
        return spent
    if worst is not None:
        return replace(spent, accountants=worst.cross_check())
    if not (spent.releases and 0 < spent.mu < math.inf):
        return spent
    # Of passives in other processes only the total is known: mu of T releases is sqrt(T) times
    # that of one.
    release = GaussianRelease(noise_multiplier=math.sqrt(spent.releases) / spent.mu)
    return replace(
        spent, accountants=cross_check(release, releases=spent.releases, delta=spent.delta)
    )


def find_worst_spent(ledgers: Iterable[PrivacyLedger]) -> PrivacySpent | None:
    """Return the cost of the ledger with the highest epsilon; None: there is no ledger."""
    worst = _pick_worst_ledger(ledgers)
    return worst.get_privacy_spent() if worst else None


def _pick_worst_ledger(ledgers: Iterable[PrivacyLedger]) -> PrivacyLedger | None:
    """Return the ledger with the highest epsilon; None: there is none."""
    return max(ledgers, key=lambda ledger: ledger.get_privacy_spent().epsilon_x, default=None)


def _list_release_ledgers(session: Session) -> list[PrivacyLedger]:
    """Return the ledgers of representations, without those of private updates and contributions."""
    updates = session.learner.training.updates if session.learner.training else None
    other_ledgers = (updates, *session.contribution_ledgers.values())
    return [ledger for ledger in session.ledgers.values() if ledger not in other_ledgers]


def guarantee_text(config: Config, session: Session, labels: LabelMechanism) -> str:
    """Return all protections of the run in words: what each covers, and what is not protected."""
    seeded = config.guard.noise != "secret"
    learner = session.learner
    others = describe_defences(config.defences, config.method)
    passives_vote = "passives vote" in config.method.facts
    if session.contract.secure_sum.get("noise") and not passives_vote:
        kind = find_sum_class(config.secure_sum)
        others.insert(0, contributions_statement(kind.leaks.single, seeded=seeded))
    others += describe_black_boxes(find_black_boxes(session.contract.passives))
    return guarantee_of(
        learner.guarantee,
        labels,
        private_training=learner.training is not None,
        seeded=seeded,
        also=others,
    )


def guarantee_of(
    released: str,
    labels: LabelMechanism,
    *,
    private_training: bool,
    seeded: bool = False,
    also: Sequence[str] = (),
) -> str:
    """Return the guarantee of a run in words.

    Args:
        released: the guarantee of noise on representations or of private training, or
            `NOTHING_RELEASED`.
        labels: the run's label mechanism.
        private_training: whether `released` covers labels already.
        seeded: whether noise and randomised labels follow from the run's seed, against whose owner
            nothing is guaranteed.
        also: sentences on other protections.
    """
    parts = [released]
    if not math.isinf(labels.epsilon):
        parts += [labels.describe_guarantee(), LABEL_ASSUMPTIONS, *([_SEEDED] if seeded else [])]
    elif not private_training and released != NOTHING_RELEASED:
        parts.append(labels.describe_guarantee())
    return "; ".join([*parts, *also])
