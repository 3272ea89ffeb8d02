"""The privacy promises of a run or of one of its parties; all displays read them here.

Run by: every surface that shows an epsilon, for people or for programs (the terminal, status lines,
metrics, results, reports, tables, plans and audit logs). A promise is one of three: a finite
epsilon with its delta; "no guarantee", with the reason; or "nothing is sent", where nothing of that
kind leaves. An epsilon of 0 is no promise: it stands nowhere.

In JSON an infinite epsilon is the text "inf", and the epsilon of "nothing is sent" is null.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from secure_apfed.settings.method import MethodSettings
    from secure_apfed.settings.run import RunSettings

__all__ = [
    "FIGURES",
    "NOTHING_SENT",
    "NO_ACCOUNT",
    "NO_GUARANTEE",
    "Figure",
    "Promise",
    "Spent",
    "State",
    "describe_epsilon",
    "epsilon_words",
    "figure_title",
    "list_epsilons",
    "promise_of_account",
    "promise_of_party",
    "promises_of",
    "worst_promise",
]

Figure: TypeAlias = Literal["epsilon_x", "epsilon_v", "epsilon_c", "epsilon_y", "epsilon_model"]
State: TypeAlias = Literal["bounded", "no guarantee", "nothing is sent"]

NO_GUARANTEE: Literal["no guarantee"] = "no guarantee"
NO_ACCOUNT = "no account, since no noise of its own is agreed"
"""Text in place of the accounts of a passive that has none, as it adds no noise of its own."""
NOTHING_SENT: Literal["nothing is sent"] = "nothing is sent"

FIGURES: Mapping[str, tuple[str, str]] = {
    "epsilon_x": ("one row's releases", "encoder"),
    "epsilon_v": ("one person's votes", "labeller"),
    "epsilon_c": ("one person in sums", "networks"),
    "epsilon_y": ("one training label", ""),
    "epsilon_model": ("one whole record", ""),
}
"""Meaning of each privacy figure by its name, and the part of the model that it holds fixed."""

_WITHOUT_NOISE: Mapping[str, str] = {
    "representations are summed": "sums of representations are opened without noise",
    "gradients are summed": "sums of gradients are opened without noise",
    "projections are summed": "sums of projections are opened without noise",
    "pseudo-labels are averaged": "sums of pseudo-labels are opened without noise",
    "weights are averaged": "sums of weights are opened without noise",
    "tables are decomposed": "singular vectors of all parties' rows are opened without noise",
    "passives vote": "votes are opened without noise",
}
"""Reasons why the passives' epsilon is infinite where they add no noise, by fact of the method."""
_LABELS_LEAVE: Mapping[str, str] = {
    "labels are shown": "labels are shown to the passives as they are",
    "votes of encrypted labels are summed": "labels leave encrypted, without noise",
    "gradients are returned": "gradients that depend on labels are returned without noise",
    "pseudo-labels are averaged": "pseudo-labels that depend on labels are sent without noise",
}
"""Reasons why the active's epsilon of a label is infinite without a label mechanism, by fact of
the method."""


_UNGUARDED = "representations are sent without a guard"
_NOT_YET = "nothing was sent yet"
_OWN_ROWS_OF_ALL = frozenset({"weights are averaged", "tables are decomposed"})
"""Facts of methods by which the active also releases data of its own features, as passives do."""


class Spent(Protocol):
    """The epsilons of a run or of a forecast; see `secure_apfed.privacy.ledger.PrivacySpent`."""

    @property
    def epsilon_x(self) -> float: ...

    @property
    def epsilon_y(self) -> float: ...

    @property
    def epsilon_model(self) -> float: ...

    @property
    def delta(self) -> float | None: ...

    @property
    def releases(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The privacy guarantee of a run by one epsilon, such as epsilon_x of representations.

    Attributes:
        figure: name of the epsilon, one of `FIGURES`.
        epsilon: finite and above 0; infinite: no guarantee; None: nothing of that kind is sent.
        delta: delta of the guarantee; None: unknown.
        releases: T, the most releases of one row that it covers; None: none are counted.
        party: the party whose rows it protects; empty: the party that spent most.
        why: the reason where there is no guarantee, or nothing is sent.
    """

    figure: Figure
    epsilon: float | None
    delta: float | None = None
    releases: int | None = None
    party: str = ""
    why: str = ""

    @property
    def state(self) -> State:
        """Whether the guarantee is bounded, missing, or not needed since nothing is sent."""
        if self.epsilon is None:
            return NOTHING_SENT
        return "bounded" if math.isfinite(self.epsilon) else NO_GUARANTEE

    @property
    def text(self) -> str:
        """The epsilon with delta and releases, without which it has no meaning, or the state.

        Examples:
            >>> Promise(figure="epsilon_x", epsilon=8.0, delta=1e-5, releases=10).text
            '8 at delta 1e-05, T 10'
            >>> Promise(figure="epsilon_c", epsilon=math.inf, delta=1e-5).text
            'no guarantee'
        """
        if self.epsilon is None or math.isinf(self.epsilon):
            return self.state
        delta_text = "" if self.delta is None else f" at delta {self.delta:g}"
        releases_text = "" if self.releases is None else f", T {self.releases:,}"
        return f"{self.epsilon:.3g}{delta_text}{releases_text}"

    @property
    def sentence(self) -> str:
        """The text, with the reason if there is no finite epsilon."""
        if self.state == "bounded" or not self.why:
            return self.text
        return f"{self.text}: {self.why}"

    @property
    def short(self) -> str:
        """Name and value of the epsilon only, for a status line."""
        return describe_epsilon(self.figure, self.epsilon)

    def format_title(self, *, fixed: bool = False) -> str:
        """Return the title of the epsilon: its name, its party, and what it covers.

        `fixed`: whether to add which part of the model the guarantee holds fixed.
        """
        return figure_title(self.figure, of=self.party, fixed=fixed)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; `secure_apfed.base.files.to_json` writes infinity as "inf"."""
        return {"state": self.state, **asdict(self)}


def epsilon_words(epsilon: float | None) -> str:
    """Return a finite epsilon as a number, an infinite one as "no guarantee", and None as "nothing
    is sent".
    """
    if epsilon is None:
        return NOTHING_SENT
    return NO_GUARANTEE if math.isinf(epsilon) else f"{epsilon:.3g}"


def list_epsilons(promises: Iterable[Promise]) -> dict[str, float]:
    """Return epsilons by the titles of their promises; infinite where there is no guarantee.

    Promises about data that are not sent have no epsilon and are left out.
    """
    return {
        promise.format_title(): promise.epsilon
        for promise in promises
        if promise.epsilon is not None
    }


def describe_epsilon(figure: str, epsilon: float | None) -> str:
    """Return name and value of an epsilon for a status line.

    Examples:
        >>> describe_epsilon("epsilon_x", 8.0), describe_epsilon("epsilon_c", math.inf)
        ('epsilon_x 8', 'epsilon_c no guarantee')
    """
    return f"{figure} {epsilon_words(epsilon)}"


def figure_title(figure: str, *, of: str = "", fixed: bool = False) -> str:
    """Return the title of an epsilon: its name, its party, and what it covers.

    Args:
        figure: name of the epsilon, one of `FIGURES`.
        of: the party; "": it is not named.
        fixed: whether to add which part of the model the guarantee holds fixed.

    Examples:
        >>> figure_title("epsilon_v", of="shop", fixed=True)
        "epsilon_v of shop, one person's votes, labeller held fixed"
    """
    meaning, fixed_part = FIGURES[figure]
    owner = f" of {of}" if of else ""
    assumption = f", {fixed_part} held fixed" if fixed and fixed_part else ""
    return f"{figure}{owner}, {meaning}{assumption}"


def promises_of(
    config: "RunSettings", spent: Spent, *, contributions: Mapping[str, Mapping[str, Any]]
) -> tuple[Promise, ...]:
    """Return all privacy guarantees of a run, or of its forecast.

    The first covers what leaves a party, by `config.method.epsilon_name`.

    Args:
        config: settings of the run; the facts of its method define which data each party sends.
        spent: the cost of representations, labels and the model.
        contributions: passive that adds noise to what it sends -> the privacy cost of this: figure
            (kind of epsilon), epsilon, delta and releases.
    """
    method = config.method
    feature_promises = [
        *_list_representation_promises(method, spent),
        *_list_passive_promises(config, contributions),
    ]
    # The one that covers a party's messages comes first.
    feature_promises.sort(key=lambda promise: promise.figure != method.epsilon_name)
    label_promise = Promise(
        figure="epsilon_y",
        epsilon=spent.epsilon_y,
        delta=spent.delta,
        why="" if math.isfinite(spent.epsilon_y) else _explain_label_exposure(config),
    )
    model_promise = Promise(
        figure="epsilon_model",
        epsilon=spent.epsilon_model,
        delta=spent.delta,
        why="" if math.isfinite(spent.epsilon_model) else "the model is not trained privately",
    )
    return (*feature_promises, label_promise, model_promise)


def _explain_label_exposure(config: "RunSettings") -> str:
    """Return why the epsilon of a training label is infinite in a run with these settings."""
    if config.train.meets_labels_after:
        return "no message depends on a label, but the finished model does, without noise"
    return "no label privacy and no private training"


def _list_representation_promises(method: "MethodSettings", spent: Spent) -> Iterator[Promise]:
    """Yield the promise for representations if they are sent, or that nothing is sent if the active
    trains without passives; else nothing.

    `spent`: the cost of the run's releases.
    """
    method_facts = method.exchange_facts
    if "representations are sent" in method_facts:
        reason = "" if math.isfinite(spent.epsilon_x) else _UNGUARDED
        yield _make_promise("epsilon_x", spent.epsilon_x, spent.delta, spent.releases, why=reason)
    elif "passives take part" not in method_facts:
        yield Promise(figure="epsilon_x", epsilon=None, why="the active trains alone")


def _list_passive_promises(
    config: "RunSettings", contributions: Mapping[str, Mapping[str, Any]]
) -> Iterator[Promise]:
    """Yield the promises for what passives send other than representations: votes or contributions
    to sums.

    One for each passive with a privacy cost or, if there is none, one without a guarantee.

    `contributions`: passive that adds noise -> the privacy cost of what it sends.
    """
    for passive, cost in contributions.items():
        yield promise_of_account(cost, party=passive)
    method = config.method
    reason = _explain_missing_noise(method)
    if contributions or not reason:
        return
    if method.find_noise(config) is not None:
        # There is noise, but only the passives know their costs.
        reason = "no passive has said yet what it charged"
    yield Promise(figure=method.passives_epsilon_name, epsilon=math.inf, why=reason)


def _explain_missing_noise(method: "MethodSettings") -> str:
    """Return why votes and contributions of passives have no finite epsilon, unless they add noise;
    "": the method has neither.
    """
    method_facts = method.exchange_facts
    return next((reason for fact, reason in _WITHOUT_NOISE.items() if fact in method_facts), "")


def promise_of_account(account: Mapping[str, Any], *, party: str = "") -> Promise:
    """Return the promise that follows from one privacy cost.

    `account`: the cost: figure (name of the epsilon), epsilon, delta and releases. `party`: whose
    messages caused it; "": not named.
    """
    epsilon = float(account["epsilon"])
    reason = "" if math.isfinite(epsilon) else "what was charged has no finite bound"
    return _make_promise(
        account["figure"], epsilon, account["delta"], account["releases"], party=party, why=reason
    )


def _make_promise(
    figure: Figure,
    epsilon: float,
    delta: float | None,
    releases: int | None,
    *,
    party: str = "",
    why: str = "",
) -> Promise:
    """Return the promise for an epsilon; of epsilon 0 it says that nothing was sent yet.

    Args:
        figure: name of the epsilon.
        epsilon, delta: the privacy cost.
        releases: the most releases of one row that it covers; None: not counted.
        party: whose rows it protects; "": not named.
        why: the reason if epsilon is infinite; else "".
    """
    if epsilon == 0:
        return Promise(figure=figure, epsilon=None, party=party, why=_NOT_YET)
    return Promise(
        figure=figure, epsilon=epsilon, delta=delta, releases=releases, party=party, why=why
    )


def worst_promise(promises: Iterable[Promise], figure: str) -> Promise:
    """Return the promise with the largest epsilon among those for one kind of epsilon.

    `figure`: name of the epsilon, such as epsilon_x. Raises ValueError: no promise has this name.
    """
    candidates = [promise for promise in promises if promise.figure == figure]
    if not candidates:
        raise ValueError(f"nothing is promised by {figure}")
    return max(candidates, key=lambda promise: promise.epsilon or 0.0)


def promise_of_party(
    config: "RunSettings", role: str, accounts: Sequence[Mapping[str, Any]]
) -> Promise:
    """Return the privacy guarantee for the people in one party's table, about what it sends.

    Args:
        config: settings of the run.
        role: role of the party in it: active, passive, aggregator or dealer.
        accounts: privacy costs in its ledgers, without those of private updates, which send
            nothing; the highest counts.
    """
    if accounts:
        highest_cost = max(accounts, key=lambda account: float(account["epsilon"]))
        return promise_of_account(highest_cost)
    if role not in ("active", "passive"):
        return Promise(figure=config.method.epsilon_name, epsilon=None, why="it holds no table")
    feature_promise = _find_feature_promise(config, role)
    if feature_promise is not None:
        return feature_promise
    label_promise = _find_label_promise(config) if role == "active" else None
    if label_promise is not None:
        return label_promise
    return Promise(
        figure=config.method.epsilon_name, epsilon=None, why="nothing of its rows leaves"
    )


def _find_feature_promise(config: "RunSettings", role: str) -> Promise | None:
    """Return the promise for the features of a party whose ledgers record no cost yet; None: it
    sends nothing that depends on its features.

    `role`: active or passive.
    """
    method = config.method
    side = "active" if role == "active" else "passives"
    if method.representation_sender == side:
        if config.guard.mechanism == "none":
            return Promise(figure="epsilon_x", epsilon=math.inf, why=_UNGUARDED)
        return Promise(figure="epsilon_x", epsilon=None, why=_NOT_YET)
    reason = _explain_missing_noise(method)
    sends_own_rows = role == "passive" or bool(_OWN_ROWS_OF_ALL & method.exchange_facts)
    if not reason or not sends_own_rows:
        return None
    if method.find_noise(config) is not None:
        return Promise(figure=method.passives_epsilon_name, epsilon=None, why=_NOT_YET)
    return Promise(figure=method.passives_epsilon_name, epsilon=math.inf, why=reason)


def _find_label_promise(config: "RunSettings") -> Promise | None:
    """Return the promise for the active's labels; None: nothing that depends on them is sent."""
    reason = next(
        (reason for fact, reason in _LABELS_LEAVE.items() if fact in config.method.exchange_facts),
        "",
    )
    if not reason:
        return None
    if config.labels.epsilon is not None:
        return Promise(figure="epsilon_y", epsilon=config.labels.epsilon, delta=0.0)
    return Promise(figure="epsilon_y", epsilon=math.inf, why=reason)
