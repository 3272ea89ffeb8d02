"""What a report says of attacks: one row each, also of those that did not apply."""

from dataclasses import dataclass

from attacks.interface import AttackResult
from experiments.report import words
from experiments.report.folder import RunFolder
from experiments.report.names import attack_title, plain, value_told

__all__ = ["AttackRow", "attacks_of"]

_BY_CLASS = "recall of class "


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """One attack by one adversary in words; `reason` where it said nothing."""

    title: str
    adversary: str
    knowledge: str
    metric: str = ""
    attack: str = ""
    variant: str = ""
    baseline: str = ""
    baseline_name: str = ""
    advantage: str = ""
    scored: str = ""
    risk: str = ""
    reason: str = ""


def attacks_of(run: RunFolder) -> tuple[AttackRow, ...]:
    """Return all attacks, also those that did not apply."""
    return tuple(_attack_row(one) for one in run.attacks or ())


def _attack_row(one: AttackResult) -> AttackRow:
    knowledge = ", ".join(
        f"{plain(name)} {value_told(value)}" for name, value in one.knowledge.items()
    )
    row = {"title": attack_title(one), "adversary": one.adversary, "knowledge": knowledge}
    if not one.applicable or one.advantage is None:
        return AttackRow(**row, reason=one.reason or "not applicable")
    metric, baseline = str(one.metric), str(one.baseline)
    return AttackRow(
        **row,
        metric=plain(metric),
        attack=f"{one.score[metric]:.3f}",
        variant=str(one.variant),
        baseline=f"{one.baselines[baseline][metric]:.3f}",
        baseline_name=baseline,
        advantage=words.signed(one.advantage),
        scored=words.count(one.counts.get("scored", 0)),
        risk=_risk(one),
    )


def _risk(one: AttackResult) -> str:
    """The unevenness in a line: the extreme decile, and the classes from worst to best."""
    classes = {
        name.removeprefix(_BY_CLASS): value
        for name, value in one.risk.items()
        if name.startswith(_BY_CLASS)
    }
    told = [f"{name} {value:.2f}" for name, value in one.risk.items() if _BY_CLASS not in name]
    if classes:
        most, least = max(classes, key=classes.__getitem__), min(classes, key=classes.__getitem__)
        told.append(
            f"recall from {classes[least]:.2f} (class {least}) to {classes[most]:.2f} "
            f"(class {most})"
        )
    return "; ".join(told)
