"""The privacy guarantees of a run or of one of its parties; all displays read them here.

Run by: every surface that shows an epsilon, for people or for programs (the terminal, status lines,
metrics, results, reports, tables, plans and audit logs). A guarantee is one of three: a finite
epsilon with its delta; "no guarantee", with the reason; or "nothing is sent", where nothing of that
kind leaves. An epsilon of 0 is no guarantee: it stands nowhere.

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
    "MEANING_BY_EPSILON",
    "NOTHING_SENT",
    "NO_GUARANTEE",
    "NO_PRIVACY_SPENT",
    "EpsilonName",
    "GuaranteeState",
    "Promise",
    "Spent",
    "derive_guarantee",
    "describe_epsilon",
    "find_party_guarantee",
    "find_worst_guarantee",
    "format_epsilon_title",
    "list_epsilons_by_title",
    "list_guarantees",
    "spell_epsilon",
]

EpsilonName: TypeAlias = Literal[
    "epsilon_x", "epsilon_v", "epsilon_c", "epsilon_y", "epsilon_model"
]
GuaranteeState: TypeAlias = Literal["bounded", "no guarantee", "nothing is sent"]

NO_GUARANTEE: Literal["no guarantee"] = "no guarantee"
NO_PRIVACY_SPENT = "no account, since no noise of its own is agreed"
"""Text in place of the accounts of a passive that has none, as it adds no noise of its own."""
NOTHING_SENT: Literal["nothing is sent"] = "nothing is sent"

MEANING_BY_EPSILON: Mapping[str, tuple[str, str]] = {
    "epsilon_x": ("one row's releases", "encoder"),
    "epsilon_v": ("one person's votes", "labeller"),
    "epsilon_c": ("one person in sums", "networks"),
    "epsilon_y": ("one training label", ""),
    "epsilon_model": ("one whole record", ""),
}
"""Meaning of each privacy figure by its name, and the part of the model that it holds fixed."""

_NOISELESS_REASON_BY_FACT: Mapping[str, str] = {
    "representations are summed": "sums of representations are opened without noise",
    "gradients are summed": "sums of gradients are opened without noise",
    "projections are summed": "sums of projections are opened without noise",
    "pseudo-labels are averaged": "sums of pseudo-labels are opened without noise",
    "weights are averaged": "sums of weights are opened without noise",
    "tables are decomposed": "singular vectors of all parties' rows are opened without noise",
    "passives vote": "votes are opened without noise",
}
"""Reasons why the passives' epsilon is infinite where they add no noise, by fact of the method."""
_LABEL_EXPOSURE_BY_FACT: Mapping[str, str] = {
    "labels are shown": "labels are shown to the passives as they are",
    "votes of encrypted labels are summed": "labels leave encrypted, without noise",
    "gradients are returned": "gradients that depend on labels are returned without noise",
    "pseudo-labels are averaged": "pseudo-labels that depend on labels are sent without noise",
}
"""Reasons why the active's epsilon of a label is infinite without a label mechanism, by fact of
the method."""


_UNGUARDED_REASON = "representations are sent without a guard"
_NOTHING_SENT_YET = "nothing was sent yet"
_FACTS_OF_ACTIVE_RELEASES = frozenset({"weights are averaged", "tables are decomposed"})
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
        figure: name of the epsilon, one of `MEANING_BY_EPSILON`.
        epsilon: finite and above 0; infinite: no guarantee; None: nothing of that kind is sent.
        delta: delta of the guarantee; None: unknown.
        releases: T, the most releases of one row that it covers; None: none are counted.
        party: the party whose rows it protects; empty: the party that spent most.
        why: the reason where there is no guarantee, or nothing is sent.
    """

    figure: EpsilonName
    epsilon: float | None
    delta: float | None = None
    releases: int | None = None
    party: str = ""
    why: str = ""

    @property
    def state(self) -> GuaranteeState:
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

    def format_title(self, *, names_fixed_part: bool = False) -> str:
        """Return the title of the epsilon: its name, its party, and what it covers.

        `names_fixed_part`: whether to add which part of the model the guarantee holds fixed.
        """
        return format_epsilon_title(
            self.figure, party=self.party, names_fixed_part=names_fixed_part
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values; `secure_apfed.base.files.to_json` writes infinity as "inf"."""
        return {"state": self.state, **asdict(self)}


def spell_epsilon(epsilon: float | None) -> str:
    """Return a finite epsilon as a number, an infinite one as "no guarantee", and None as "nothing
    is sent".
    """
    if epsilon is None:
        return NOTHING_SENT
    return NO_GUARANTEE if math.isinf(epsilon) else f"{epsilon:.3g}"


def list_epsilons_by_title(guarantees: Iterable[Promise]) -> dict[str, float]:
    """Return epsilons by the titles of their guarantees; infinite where there is no guarantee.

    Promises about data that are not sent have no epsilon and are left out.
    """
    return {
        guarantee.format_title(): guarantee.epsilon
        for guarantee in guarantees
        if guarantee.epsilon is not None
    }


def describe_epsilon(epsilon_name: str, epsilon: float | None) -> str:
    """Return name and value of an epsilon for a status line.

    Examples:
        >>> describe_epsilon("epsilon_x", 8.0), describe_epsilon("epsilon_c", math.inf)
        ('epsilon_x 8', 'epsilon_c no guarantee')
    """
    return f"{epsilon_name} {spell_epsilon(epsilon)}"


def format_epsilon_title(
    epsilon_name: str, *, party: str = "", names_fixed_part: bool = False
) -> str:
    """Return the title of an epsilon: its name, its party, and what it covers.

    Args:
        epsilon_name: name of the epsilon, one of `MEANING_BY_EPSILON`.
        party: the party; "": it is not named.
        names_fixed_part: whether to add which part of the model the guarantee holds fixed.

    Examples:
        >>> format_epsilon_title("epsilon_v", party="shop", names_fixed_part=True)
        "epsilon_v of shop, one person's votes, labeller held fixed"
    """
    meaning, fixed_part = MEANING_BY_EPSILON[epsilon_name]
    party_text = f" of {party}" if party else ""
    fixed_part_text = f", {fixed_part} held fixed" if names_fixed_part and fixed_part else ""
    return f"{epsilon_name}{party_text}, {meaning}{fixed_part_text}"


def list_guarantees(
    config: "RunSettings", spent: Spent, *, spent_by_passive: Mapping[str, Mapping[str, Any]]
) -> tuple[Promise, ...]:
    """Return all privacy guarantees of a run, or of its forecast.

    The first covers what leaves a party, by `config.method.epsilon_name`.

    Args:
        config: settings of the run; the facts of its method define which data each party sends.
        spent: the cost of representations, labels and the model.
        spent_by_passive: passive that adds noise to what it sends -> the privacy cost of this:
            figure (kind of epsilon), epsilon, delta and releases.
    """
    method = config.method
    feature_guarantees = [
        *_list_representation_guarantees(method, spent),
        *_list_passive_guarantees(config, spent_by_passive),
    ]
    # The one that covers a party's messages comes first.
    feature_guarantees.sort(key=lambda guarantee: guarantee.figure != method.epsilon_name)
    label_guarantee = Promise(
        figure="epsilon_y",
        epsilon=spent.epsilon_y,
        delta=spent.delta,
        why="" if math.isfinite(spent.epsilon_y) else _explain_label_exposure(config),
    )
    model_guarantee = Promise(
        figure="epsilon_model",
        epsilon=spent.epsilon_model,
        delta=spent.delta,
        why="" if math.isfinite(spent.epsilon_model) else "the model is not trained privately",
    )
    return (*feature_guarantees, label_guarantee, model_guarantee)


def _explain_label_exposure(config: "RunSettings") -> str:
    """Return why the epsilon of a training label is infinite in a run with these settings."""
    if config.train.is_exchange_label_free:
        return "no message depends on a label, but the finished model does, without noise"
    return "no label privacy and no private training"


def _list_representation_guarantees(method: "MethodSettings", spent: Spent) -> Iterator[Promise]:
    """Yield the guarantee for representations if they are sent, or that nothing is sent if the
    active
    trains without passives; else nothing.

    `spent`: the cost of the run's releases.
    """
    method_facts = method.exchange_facts
    if "representations are sent" in method_facts:
        reason = "" if math.isfinite(spent.epsilon_x) else _UNGUARDED_REASON
        yield _make_guarantee(
            "epsilon_x", spent.epsilon_x, spent.delta, spent.releases, reason=reason
        )
    elif "passives take part" not in method_facts:
        yield Promise(figure="epsilon_x", epsilon=None, why="the active trains alone")


def _list_passive_guarantees(
    config: "RunSettings", spent_by_passive: Mapping[str, Mapping[str, Any]]
) -> Iterator[Promise]:
    """Yield the guarantees for what passives send other than representations: votes or
    contributions
    to sums.

    One for each passive with a privacy cost or, if there is none, one without a guarantee.

    `spent_by_passive`: passive that adds noise -> the privacy cost of what it sends.
    """
    for passive, privacy_spent in spent_by_passive.items():
        yield derive_guarantee(privacy_spent, party=passive)
    method = config.method
    reason = _explain_missing_noise(method)
    if spent_by_passive or not reason:
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
    return next(
        (reason for fact, reason in _NOISELESS_REASON_BY_FACT.items() if fact in method_facts), ""
    )


def derive_guarantee(privacy_spent: Mapping[str, Any], *, party: str = "") -> Promise:
    """Return the guarantee that follows from one privacy cost.

    `privacy_spent`: the cost: figure (name of the epsilon), epsilon, delta and releases. `party`:
    whose messages caused it; "": not named.
    """
    epsilon = float(privacy_spent["epsilon"])
    reason = "" if math.isfinite(epsilon) else "what was charged has no finite bound"
    return _make_guarantee(
        privacy_spent["figure"],
        epsilon,
        privacy_spent["delta"],
        privacy_spent["releases"],
        party=party,
        reason=reason,
    )


def _make_guarantee(
    epsilon_name: EpsilonName,
    epsilon: float,
    delta: float | None,
    releases: int | None,
    *,
    party: str = "",
    reason: str = "",
) -> Promise:
    """Return the guarantee for an epsilon; of epsilon 0 it says that nothing was sent yet.

    Args:
        epsilon_name: name of the epsilon.
        epsilon, delta: the privacy cost.
        releases: the most releases of one row that it covers; None: not counted.
        party: whose rows it protects; "": not named.
        reason: the reason if epsilon is infinite; else "".
    """
    if epsilon == 0:
        return Promise(figure=epsilon_name, epsilon=None, party=party, why=_NOTHING_SENT_YET)
    return Promise(
        figure=epsilon_name,
        epsilon=epsilon,
        delta=delta,
        releases=releases,
        party=party,
        why=reason,
    )


def find_worst_guarantee(guarantees: Iterable[Promise], epsilon_name: str) -> Promise:
    """Return the guarantee with the largest epsilon among those for one kind of epsilon.

    `epsilon_name`: name of the epsilon, such as epsilon_x. Raises ValueError: no guarantee has this
    name.
    """
    candidates = [guarantee for guarantee in guarantees if guarantee.figure == epsilon_name]
    if not candidates:
        raise ValueError(f"nothing is promised by {epsilon_name}")
    return max(candidates, key=lambda guarantee: guarantee.epsilon or 0.0)


def find_party_guarantee(
    config: "RunSettings", role: str, spent_by_ledger: Sequence[Mapping[str, Any]]
) -> Promise:
    """Return the privacy guarantee for the people in one party's table, about what it sends.

    Args:
        config: settings of the run.
        role: role of the party in it: active, passive, aggregator or dealer.
        spent_by_ledger: privacy costs in its ledgers, without those of private updates, which send
            nothing; the highest counts.
    """
    if spent_by_ledger:
        highest_spent = max(spent_by_ledger, key=lambda account: float(account["epsilon"]))
        return derive_guarantee(highest_spent)
    if role not in ("active", "passive"):
        return Promise(figure=config.method.epsilon_name, epsilon=None, why="it holds no table")
    feature_guarantee = _find_feature_guarantee(config, role)
    if feature_guarantee is not None:
        return feature_guarantee
    label_guarantee = _find_label_guarantee(config) if role == "active" else None
    if label_guarantee is not None:
        return label_guarantee
    return Promise(
        figure=config.method.epsilon_name, epsilon=None, why="nothing of its rows leaves"
    )


def _find_feature_guarantee(config: "RunSettings", role: str) -> Promise | None:
    """Return the guarantee for the features of a party whose ledgers record no cost yet; None: it
    sends nothing that depends on its features.

    `role`: active or passive.
    """
    method = config.method
    sender = "active" if role == "active" else "passives"
    if method.representation_sender == sender:
        if config.guard.mechanism == "none":
            return Promise(figure="epsilon_x", epsilon=math.inf, why=_UNGUARDED_REASON)
        return Promise(figure="epsilon_x", epsilon=None, why=_NOTHING_SENT_YET)
    reason = _explain_missing_noise(method)
    sends_own_rows = role == "passive" or bool(_FACTS_OF_ACTIVE_RELEASES & method.exchange_facts)
    if not reason or not sends_own_rows:
        return None
    if method.find_noise(config) is not None:
        return Promise(figure=method.passives_epsilon_name, epsilon=None, why=_NOTHING_SENT_YET)
    return Promise(figure=method.passives_epsilon_name, epsilon=math.inf, why=reason)


def _find_label_guarantee(config: "RunSettings") -> Promise | None:
    """Return the guarantee for the active's labels; None: nothing that depends on them is sent."""
    reason = next(
        (
            reason
            for fact, reason in _LABEL_EXPOSURE_BY_FACT.items()
            if fact in config.method.exchange_facts
        ),
        "",
    )
    if not reason:
        return None
    if config.labels.epsilon is not None:
        return Promise(figure="epsilon_y", epsilon=config.labels.epsilon, delta=0.0)
    return Promise(figure="epsilon_y", epsilon=math.inf, why=reason)
