"""Attacks on a training loop that is not ours: what its arrays give away, beside what luck gives.

Run by: whoever holds the arrays of all parties. One call is one curious adversary, which follows
the loop and reads what reached it; attacks, baselines, decoys and scores are those of our runs.

Letters: A rows, B rows of a step, D numbers of a representation, F features.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_attacks.decoys import compute_guesses
from apfed_attacks.interface import NOT_ATTACKED, Attack, AttackResult, Target
from apfed_attacks.pace import OnProgress, OutOfTime, Pace, watch_in_terminal
from apfed_attacks.scoring import DECOY, Truth, score_guess
from apfed_attacks.table import ATTACKS, full_suite, prepare_attack
from apfed_attacks.view import AdversaryView, AttackError, Exchange, Knowledge, KnownRows
from apfed_protocols.labels import column_names, order_by_position
from secure_apfed.base.seeds import isolate_torch_modes, shuffle_rows
from secure_apfed.config import AttackChoice
from secure_apfed.data import UNLABELLED
from secure_apfed.exchange import Envelope, Kind, pack_tensors

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Evaluation", "Finding", "evaluate"]

Step: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # rows (B,), h (B, D), gradients (B, D)
_ADVERSARY = "adversary"
_OTHER = "the other party"
_RECEIVER = "whoever receives h"
_MAKER = "whoever makes h and gets gradients back"
_SIGNIFICANCE_LEVEL = 0.005
# Cheaper options of attacks that train networks for long, used where the caller names no attacks.
_QUICK_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "semi_supervised": {"iterations": 300, "decay": 0.99},
    "unpaired_inversion": {"iterations": 300, "starts": 1},
}
_ARGUMENTS = {
    "labels": "the class of each row, to score what it guesses",
    "features": "those of the party that made h, to score what it guesses",
    "gradients": "those that the party that made h received for it",
    "steps": "with h of two passes over the rows or more",
}


@dataclass(frozen=True)
class Finding:
    """A finding of one attack, with one set of options.

    Attributes:
        results: one for each exchange of releases between rows, like those of our own runs; the
            metric is the balanced accuracy of labels, whose chance is one over the classes, or R^2.
        reader: who mounts it, in words.
    """

    results: tuple[AttackResult, ...]
    reader: str = "whoever sees what was sent"

    @property
    def result(self) -> AttackResult:
        """Return the result of the first exchange."""
        return self.results[0]

    @property
    def score(self) -> float:
        """Return the metric of the attack's best variant."""
        return float(self.result.score[str(self.result.metric)] or 0)

    @property
    def null(self) -> tuple[float, ...]:
        """Return what luck gives: the best of baselines and decoys, for each exchange."""
        return tuple(self.score - (result.advantage or 0) for result in self.results)

    @property
    def baseline(self) -> float:
        """Return the best score of the same knowledge without h (what was sent) and gradients."""
        metric = str(self.result.metric)
        baselines = self.result.baselines.items()
        return max(figures[metric] or 0 for name, figures in baselines if not name.endswith(DECOY))

    @property
    def advantage(self) -> float:
        """Return the score minus the mean of what luck gives."""
        return self.score - float(np.mean(self.null))

    @property
    def is_significant(self) -> bool:
        """Whether chance gives such a score less than once in 200 times (p < 0.005).

        Where nothing leaks, score and null are draws of one distribution, so that the score lies in
        the null's prediction interval for one more draw (Student's t). It must be above that, and
        by 1 / sqrt(scored rows) above the null's mean, since a null may hardly vary.
        """
        spread = float(np.std(self.null, ddof=1)) * math.sqrt(1 + 1 / len(self.null))
        quantile = float(scipy.stats.t.isf(_SIGNIFICANCE_LEVEL, len(self.null) - 1))
        smallest = math.sqrt(1 / self.result.counts["scored"])
        return self.advantage > max(quantile * spread, smallest)

    @property
    def verdict(self) -> str:
        """Return the verdict in a few words: what was found by which variant, or that nothing
        was.
        """
        target = self.result.target
        variant = self.result.variant
        return f"{target} found by {variant}" if self.is_significant else "nothing found"

    @property
    def sentence(self) -> str:
        """Return the verdict as a sentence for readers who do not know the attacks.

        It says how well this attack guesses, and how well the same knowledge does without what was
        sent.
        """
        target = self.result.target
        known = self.result.counts["known"]
        reader = self.reader
        known_text = f" and knows {known:,} rows already" if known else ""
        score = self.score
        null = float(np.mean(self.null))
        if target == "labels":
            score_text = f"guesses {score:.0%} of the labels right"
            score_text += f" where guessing without what was sent gets {null:.0%}"
            score_text += " (mean over classes)"
        else:
            score_text = (
                f"reconstructs the other party's {target} with R2 {score:.2f} where guessing"
            )
            score_text += f" without what was sent gets {null:.2f} (1 is everything)"
        if self.is_significant:
            return (
                f"{target.capitalize()} leak: {reader}{known_text} {score_text}, by {self._name}."
            )
        return (
            f"No leak of {target} was found: with its best attack {reader}{known_text} "
            f"{score_text}, by {self._name}. Other attacks may find more."
        )

    @property
    def _name(self) -> str:
        """The attack's name with spaces, for sentences."""
        return self.result.attack.replace("_", " ")

    def as_json(self) -> dict[str, Any]:
        """Return the metrics by name, as a row of the table has them; `null` is the mean over
        exchanges.
        """
        result = self.result
        described = {
            "attack": result.attack,
            "known": result.counts["known"],
            "metric": result.metric,
        }
        metrics = {name: getattr(self, name) for name in ("score", "baseline", "advantage")}
        return {**described, **metrics, "null": float(np.mean(self.null)), "verdict": self.verdict}


@dataclass(frozen=True)
class Evaluation:
    """The findings of `evaluate`.

    Attributes:
        findings: one for each attack that applied and each set of its options.
        lacking: a sentence that says why an attack was not mounted, by the attack's name.
        not_tried: a sentence that says how long an attack would have taken that did not fit into
            `seconds`, by name and options.
    """

    findings: tuple[Finding, ...]
    lacking: Mapping[str, str]
    not_tried: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, attack: str) -> Finding:
        """Return an attack's finding with the highest advantage.

        Raises AttackError: the attack was not mounted.
        """
        matches = [finding for finding in self.findings if finding.result.attack == attack]
        if not matches:
            raise AttackError(self._explain_attack(attack))
        return max(matches, key=lambda finding: finding.advantage)

    def find_worst(self, target: Target) -> Finding | None:
        """Return the finding that reveals most of this target; None: it was not attacked.

        A significant leak comes before one of higher advantage that luck may explain.
        """
        findings = [finding for finding in self.findings if finding.result.target == target]
        return max(
            findings, key=lambda finding: (finding.is_significant, finding.advantage), default=None
        )

    @property
    def verdicts(self) -> tuple[str, ...]:
        """One sentence for each target: how much leaks to whom, or that it was not attacked and
        why.
        """
        targets: list[Target] = ["labels", "features"]
        targets += [finding.result.target for finding in self.findings]
        finding_by_target = {target: self.find_worst(target) for target in targets}
        return tuple(
            finding.sentence if finding is not None else self._describe_omission(target)
            for target, finding in finding_by_target.items()
        )

    def explain_omission(self, attack: str | None = None) -> str:
        """Return why this attack was not mounted; None: a line for each attack that was not.

        Raises AttackError: the attack was mounted, or no attack has this name.
        """
        if attack is None:
            reasons = {**self.lacking, **self.not_tried}
            return "\n".join(f"{name}: {reason}" for name, reason in reasons.items())
        if attack in self.lacking or self._list_not_tried(attack):
            return self._explain_attack(attack)
        if any(finding.result.attack == attack for finding in self.findings):
            raise AttackError(f"{attack} was mounted: see evaluation[{attack!r}]")
        raise AttackError(self._explain_attack(attack))

    def _explain_attack(self, attack: str) -> str:
        """Return why this attack was not mounted, one line for each set of options."""
        if attack in self.lacking:
            return f"{attack}: {self.lacking[attack]}"
        not_tried = self._list_not_tried(attack)
        return "\n".join(not_tried) if not_tried else f"{attack}: was not asked for"

    def _list_not_tried(self, attack: str) -> list[str]:
        """Return a line for each set of options of this attack that did not fit into the budget."""
        names = [name for name in self.not_tried if name.partition(" ")[0] == attack]
        return [f"{name}: not tried, {self.not_tried[name]}" for name in names]

    def _describe_omission(self, target: str) -> str:
        """Return a sentence that this target was not attacked, with the commonest reason.

        The reason that attacks did not fit into the budget comes first, then missing arguments.
        """
        names = [name for name in self.lacking if ATTACKS[name].target == target]
        over_budget = [
            title for title in self.not_tried if ATTACKS[title.split()[0]].target == target
        ]
        counts = Counter(self.lacking[name] for name in names)
        needs = [reason for reason in counts if reason.startswith("needs ")]
        if over_budget:
            reason = f"{len(over_budget)} attacks did not fit into the seconds given"
        else:
            reason = max(
                needs or counts,
                key=lambda candidate: counts[candidate],
                default="none was asked for",
            )
        return f"{target.capitalize()}: {NOT_ATTACKED}, so nothing is known of a leak ({reason})."

    def as_json(self) -> dict[str, Any]:
        """Return verdicts, findings and reasons as plain values."""
        return {
            "verdicts": list(self.verdicts),
            "findings": [finding.as_json() for finding in self.findings],
            "lacking": {**self.lacking},
            "not_tried": {**self.not_tried},
        }

    def to_frame(self) -> "pd.DataFrame":
        """Return a table with one row for each finding."""
        import pandas as pd

        return pd.DataFrame([finding.as_json() for finding in self.findings])

    def __str__(self) -> str:
        """Return the verdicts, a table of findings, and what was not mounted or tried."""
        lines = [*self.verdicts, ""]
        if self.findings:
            frame = self.to_frame()
            lines.append(frame.to_string(index=False, float_format="{:.3f}".format))
        if self.lacking:
            needed = Counter(_short_reason(reason) for reason in self.lacking.values())
            counted = ", ".join(f"{reason} ({count})" for reason, count in needed.most_common())
            lines.append(
                f"Not mounted, {len(self.lacking)} attacks: {counted}; .explain_omission() says "
                "each."
            )
        if self.not_tried:
            names = ", ".join(self.not_tried)
            lines.append(f"Not tried, since the seconds given were spent: {names}.")
        return "\n".join([*lines, "A failed attack proves no privacy."])


def _short_reason(reason: str) -> str:
    """Return a reason shortened for the summary: to the missing argument, or to "nothing to read
    here".
    """
    return reason.partition(",")[0] if reason.startswith("needs ") else "nothing to read here"


@isolate_torch_modes()
def evaluate(
    *,
    h: Any,
    labels: Any = None,
    features: Any = None,
    own: Any = None,
    gradients: Any = None,
    known: Any = None,
    steps: Any = None,
    attacks: Iterable[str | AttackChoice] | None = None,
    exchanges: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Mount every attack that the arrays of a foreign loop give something to read.

    Arrays are of numpy, torch, pandas or nested lists. Rows are positions: what has an index goes
    by it where that holds the positions, in any order, and is refused otherwise.

    Without `gradients` the adversary is a party that received h, and guesses labels and features
    that it does not have. With them it is the party that made h and got the gradients of the task
    loss on it, as a passive of split learning, and guesses labels.

    Args:
        h: (A, ...) what the adversary received or made, a row for each label; or of several steps
            [(rows, (B, ...)), ...], or [(B, ...), ...] beside `steps`. A step that repeats a row
            begins the next pass over the rows. Rows are flattened.
        labels: (A,) classes, for scoring. The adversary knows the share of each, and the `known`.
        features: (A, ...) private features of the party that made h, also for scoring.
        own: (A, ...) the adversary's own features of the same rows. Without them what these reveal
            counts as found in h.
        gradients: what came back for h, in the same form; a step may have None.
        known: positions, or a mask (A,), of rows whose label and features the adversary knows.
            None: as many as each attack's options say (labels: 0, 1, 4 and 40 of each class),
            drawn by the seed.
        steps: the row positions (B,), 0 to A - 1, of each step of h.
        attacks: names of `ATTACKS`, mounted with their usual options, or choices with options of
            their own; None: all, of which those that train networks for long do so for less.
        exchanges: number of exchanges of releases between rows, for the null; 2 or more.
        seed: seed of all random draws; global generators are neither read nor moved.
        device: where attacks compute.
        seconds: a budget for all attacks together. The shortest run first; what does not fit is
            named in `Evaluation.not_tried`. It may be passed by one pass of one attack.
        on_progress: called with an `EvaluationProgress` before each attack and after each pass, the
            first time with a forecast. None: a line of standard error, where that is a terminal.

    Raises:
        AttackError: arrays do not belong together, hold NaN, or leave nothing to guess.
        ConfigError: an attack is unknown.
    """
    _check_arguments(labels, features, steps, exchanges=exchanges, seed=seed, seconds=seconds)
    loop = _parse_loop(h, labels, features, own, gradients, known, steps)
    planned, lacking = _plan_attacks(loop, attacks, seed=seed, device=torch.device(device))

    def attack_once(attack: Attack, view: AdversaryView, note_pass: Callable[[], None]) -> Finding:
        """Return the finding of one attack, with its guesses scored for every exchange of releases.

        `note_pass`: function to call after each run of the attack.
        """
        guesses = compute_guesses(attack, view, seed, exchanges, note_pass)
        results = tuple(score_guess(attack, view, guess, loop.truth, seed) for guess in guesses)
        return Finding(results, _MAKER if loop.has_gradients else _RECEIVER)

    with watch_in_terminal(on_progress) as report:
        named_attacks = [(_format_title(attack), attack) for attack, _ in planned]
        pace = Pace(named_attacks, exchanges=exchanges, budget=seconds, on_progress=report)
        findings, not_tried = _mount_in_turn(planned, pace, attack_once, lacking)
    mounted = {finding.result.attack for finding in findings}
    rest = {name: reason for name, reason in lacking.items() if name not in mounted}
    return Evaluation(findings, rest, not_tried)


def _check_arguments(
    labels: Any, features: Any, steps: Any, *, exchanges: int, seed: int, seconds: float | None
) -> None:
    """Raise AttackError if an argument of `evaluate` that is no array is wrong; the message names
    it.
    """
    if type(seed) is not int or not isinstance(steps, Sequence | Tensor | np.ndarray | None):
        received = f"{seed!r} and a {type(steps).__name__}"
        raise AttackError(f"seed= is an integer, and steps= a list of positions, got {received}")
    if (labels is None and features is None) or exchanges < 2:
        raise AttackError("give labels= or features=, to score guesses by, and 2 exchanges or more")
    if seconds is not None and not _is_positive(seconds):
        raise AttackError(f"seconds= is a number above 0, or None for no budget, got {seconds!r}")


@dataclass(frozen=True)
class _Loop:
    """A foreign loop's arrays, checked.

    Attributes:
        truth: classes, labels and private features, by which guesses are scored.
        known: positions of rows that the adversary knows; None: each attack draws them.
        own: the adversary's own features (A, F), by its name.
        envelopes: messages by number of the pass over the rows.
        has_gradients: whether the adversary received gradients.
        needs: a sentence on each missing argument, by its name.
    """

    truth: Truth
    known: Tensor | None
    own: Mapping[str, Tensor]
    envelopes: Mapping[int, tuple[Envelope, ...]]
    has_gradients: bool
    needs: Mapping[str, str]


def _parse_loop(
    h: Any, labels: Any, features: Any, own: Any, gradients: Any, known: Any, steps: Any
) -> _Loop:
    """Return the arrays of a call of `evaluate`, in one form.

    The arguments are explained there.

    Raises AttackError: the arrays do not match each other.
    """
    class_names, classes = ((), None) if labels is None else _parse_classes(labels)
    rows = len(_parse_array("features", features) if classes is None else classes)
    private = None if features is None else _parse_table("features", features, rows)
    parsed = list(_parse_steps(h, gradients, steps, rows))
    widths = {h_BD.shape[1] for _, h_BD, _ in parsed}
    widths |= {gradient_BD.shape[1] for *_, gradient_BD in parsed if gradient_BD is not None}
    if len(widths) > 1:
        raise AttackError(f"h, gradients: expected rows of one length, got {sorted(widths)}")
    has_gradients = gradients is not None
    envelopes = _build_envelopes(parsed, rows, has_gradients)
    is_given = {
        "labels": labels is not None,
        "features": features is not None,
        "gradients": has_gradients,
        "steps": len(envelopes) > 1,
    }
    return _Loop(
        truth=Truth(
            classes=len(class_names),
            labels=(
                torch.full((rows,), UNLABELLED) if classes is None else torch.from_numpy(classes)
            ),
            training_positions=torch.cat([rows_B for rows_B, *_ in parsed]).unique(),
            features={} if private is None else {_OTHER: private},
        ),
        known=None if known is None else _parse_positions("known", known, rows).unique(),
        own={} if own is None else {_ADVERSARY: _parse_table("own", own, rows)},
        envelopes=envelopes,
        has_gradients=has_gradients,
        needs={
            name: f"needs {name}=, {explanation}"
            for name, explanation in _ARGUMENTS.items()
            if not is_given[name]
        },
    )


def _plan_attacks(
    loop: _Loop,
    attacks: Iterable[str | AttackChoice] | None,
    *,
    seed: int,
    device: torch.device,
) -> tuple[list[tuple[Attack, AdversaryView]], dict[str, str]]:
    """Return the attacks that apply, each with its view, and why others do not, by name.

    `loop`: the checked arrays. `attacks`: names or choices of attacks; None: all. `seed`: seed of
    all random draws. `device`: where attacks compute.
    """
    lacking = dict[str, str]()
    planned = list[tuple[Attack, AdversaryView]]()
    for attack in _prepare_attacks(attacks, draws_known_rows=loop.known is None):
        view = AdversaryView(
            role="passive" if "passive" in attack.roles else attack.roles[0],
            parties=(_ADVERSARY,),
            behaviour="curious",
            description=Exchange(
                name="this loop",
                released_by="passives" if loop.has_gradients else "active",
                returns_gradients=loop.has_gradients,
            ),
            envelopes=loop.envelopes,
            features=loop.own,
            knowledge=Knowledge(classes=loop.truth.classes, victim=_OTHER),
            iterations=attack.iterations,
            device=device,
        )
        reasons = [
            *map(loop.needs.get, attack.needs),
            attack.explain_inapplicability(view),
            loop.needs.get(attack.target),
        ]
        try:
            first_reason = next(filter(None, reasons), None)
            if first_reason is not None:
                raise AttackError(first_reason)
            knowledge = _add_known_rows(attack, loop.truth, loop.known, view.knowledge, seed)
        except AttackError as error:
            lacking.setdefault(attack.name, str(error))
        else:
            planned.append((attack, replace(view, knowledge=knowledge)))
    return planned, lacking


def _mount_in_turn(
    planned: Sequence[tuple[Attack, AdversaryView]],
    pace: Pace,
    attack_once: Callable[[Attack, AdversaryView, Callable[[], None]], Finding],
    lacking: dict[str, str],
) -> tuple[tuple[Finding, ...], dict[str, str]]:
    """Return the findings in the order planned, and why other attacks did not fit into the budget.

    Args:
        planned: attacks with their views.
        pace: clock that decides their order, and whether one still fits.
        attack_once: function that mounts one attack; its last argument is to be called after each
            run of the attack.
        lacking: dictionary that gets the reason of an attack that turns out not to apply.
    """
    findings = dict[int, Finding]()
    not_tried = dict[str, str]()
    for number in pace.run_order:
        attack, view = planned[number]
        try:
            with pace.time_attack(number) as note_pass:
                findings[number] = attack_once(attack, view, note_pass)
        except OutOfTime as error:
            not_tried[_format_title(attack)] = str(error)
        except AttackError as error:
            lacking.setdefault(attack.name, str(error))
    pace.report_end()
    return tuple(findings[number] for number in sorted(findings)), not_tried


def _is_positive(seconds: Any) -> bool:
    """Return whether a value is a number above 0; a boolean is no number."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    return is_number and float(seconds) > 0


def _format_title(attack: Attack) -> str:
    """Return the attack's name and the options that are not its defaults."""
    options = attack.model_dump(exclude_defaults=True)
    options_text = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"{attack.name} ({options_text})" if options_text else attack.name


def _prepare_attacks(
    requested: Iterable[str | AttackChoice] | None, *, draws_known_rows: bool
) -> Iterator[Attack]:
    """Yield the attacks to mount.

    A choice is mounted with its options. A name stands for the attack with each of its usual sets
    of options, which differ in how many rows are known. If the caller says which rows are known
    (`draws_known_rows` is False), it stands for the attack with its default options.

    `requested`: names and choices; one name; or None: all attacks, some with cheaper options.
    """
    if isinstance(requested, str):
        requested = [requested]
    quick_options = _QUICK_OPTIONS if requested is None else {}
    for item in ATTACKS if requested is None else requested:
        if isinstance(item, AttackChoice):
            yield prepare_attack(item)
            continue
        choices = full_suite([item]) if draws_known_rows else [AttackChoice(name=item)]
        for choice in choices:
            options = {**choice.options, **quick_options.get(choice.name, {})}
            yield prepare_attack(AttackChoice(name=choice.name, options=options))


def _add_known_rows(
    attack: Attack, truth: Truth, positions: Tensor | None, knowledge: Knowledge, seed: int
) -> Knowledge:
    """Return the adversary's knowledge with the rows whose label and features it knows.

    `truth`: labels and features of all rows. `positions`: positions of the known rows; None: the
    seed draws as many as the attack's options say.

    Raises AttackError: so many are drawn that nothing is left to guess.
    """
    training_rows = truth.training_positions
    training_labels = truth.labels[training_rows]
    rows_by_class = [training_rows[training_labels == k] for k in range(truth.classes)]
    if positions is None:
        labelled = _draw_known_rows(rows_by_class, attack.labels_per_class, seed)
        shadow = _draw_known_rows([training_rows], attack.shadow_rows, seed)
    else:
        labelled = shadow = positions
    features = truth.features.get(_OTHER)
    return replace(
        knowledge,
        labels=KnownRows(labelled, truth.labels[labelled]),
        priors=truth.compute_class_priors() if rows_by_class and attack.priors else None,
        shadow=KnownRows() if features is None else KnownRows(shadow, features[shadow]),
    )


def _draw_known_rows(groups: list[Tensor], count: int, seed: int) -> Tensor:
    """Return `count` rows of each group of positions, sorted together.

    Raises AttackError: a group has no more rows than these.
    """
    if count and any(len(rows) <= count for rows in groups):
        raise AttackError(f"of {min(map(len, groups))} rows {count} known ones leave none over")
    chosen_by_group = [shuffle_rows(rows, seed, "attacks", "known")[:count] for rows in groups]
    # Without labels there is no class, and so no group.
    no_rows = torch.empty(0, dtype=torch.int64)
    return torch.cat([no_rows, *chosen_by_group]).sort().values


def _build_envelopes(
    steps: list[Step], rows: int, has_gradients: bool
) -> dict[int, tuple[Envelope, ...]]:
    """Return the messages that the adversary sent and received, by number of the pass over the
    rows.

    A step that repeats a row begins the next pass.

    `steps`: rows, h and gradients of each step. `rows`: number of rows. `has_gradients`: whether
    gradients came back, so that the adversary is the party that made h.
    """
    maker, reader = (_ADVERSARY, _OTHER) if has_gradients else (_OTHER, _ADVERSARY)
    passes = [list[Envelope]()]
    in_this_pass = torch.zeros(rows, dtype=torch.bool)
    for step, (rows_B, h_BD, gradient_BD) in enumerate(steps):
        if in_this_pass[rows_B].any():
            passes.append([])
            in_this_pass[:] = False
        in_this_pass[rows_B] = True
        sent = [(Kind.REPRESENTATIONS, maker, reader, {"rows": rows_B, "z": h_BD})]
        if gradient_BD is not None:
            sent.append((Kind.GRADIENTS, reader, maker, {"gradient": gradient_BD}))
        for kind, sender, receiver, tensors in sent:
            message = Envelope(
                session="foreign",
                step=step,
                kind=kind,
                sender=sender,
                receiver=receiver,
                sequence=step,
                payload=pack_tensors(tensors),
            )
            passes[-1].append(message)
    return {number: tuple(messages) for number, messages in enumerate(passes)}


def _parse_steps(h: Any, gradients: Any, steps: Any, rows: int) -> Iterator[Step]:
    """Yield (rows (B,), h (B, D), gradients (B, D) or None) of each step, from all accepted forms.

    `h`, `gradients`: arrays of `evaluate`. `steps`: row positions of each step; None: they are in
    `h`, or there is one step. `rows`: number of rows.

    Raises AttackError: arrays do not match step by step.
    """
    if steps is None and _has_pairs(h):
        steps, h = zip(*h, strict=True)
    if steps is None:
        steps = [range(rows)]
        h = [h]
        gradients = None if gradients is None else [gradients]
    if _has_pairs(gradients):
        gradient_rows, gradients = zip(*gradients, strict=True)
        if list(map(list, gradient_rows)) != list(map(list, steps)):
            raise AttackError("gradients: expected those of the rows of h, step by step")
    gradients = [None] * len(steps) if gradients is None else gradients
    if not len(h) == len(steps) == len(gradients) > 0:
        received = f"{len(steps)} steps, {len(h)} of h and {len(gradients)} of gradients"
        raise AttackError(f"h, gradients: expected one array for each step, got {received}")
    _require_one_order(h, gradients)
    for step, (rows_B, h_B, gradient_B) in enumerate(zip(steps, h, gradients, strict=True)):
        rows_B = _parse_positions(f"step {step}", rows_B, rows)
        h_BD = _parse_table(f"h, step {step}", h_B, len(rows_B))
        gradient_BD = None
        if gradient_B is not None:
            gradient_BD = _parse_table(f"gradients, step {step}", gradient_B, len(rows_B))
        yield rows_B, h_BD, gradient_BD


def _has_pairs(values: Any) -> bool:
    """Return whether this is a list of (rows, array) pairs, one for each step."""
    if not isinstance(values, list | tuple) or not values:
        return False
    return all(type(pair) is tuple and len(pair) == 2 and np.ndim(pair[1]) > 0 for pair in values)


def _require_one_order(h: Any, gradients: Any) -> None:
    """Raise AttackError if data frames of two steps have other columns, or another order of
    columns.

    `h`, `gradients`: one array for each step; only data frames have names of columns.
    """
    arrays = [*h, *(() if gradients is None else gradients)]
    columns = [names for values in arrays if (names := column_names(values)) is not None]
    for names in columns[1:]:
        if names != columns[0]:
            raise AttackError(
                f"h, gradients: the columns of one step are {', '.join(names[:5])}, and of another "
                f"{', '.join(columns[0][:5])}; give all in one order of columns"
            )


def _parse_array(name: str, values: Any) -> NDArray[Any]:
    """Return a caller's array as a NumPy array; rows with an index are put in the order of
    positions.

    `name`: name of the argument, for errors.

    Raises AttackError: the values are no array.
    """
    values = order_by_position(values, name, error=AttackError)
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float32 if values.is_floating_point() else None)
    try:
        return np.atleast_1d(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise AttackError(f"{name}: expected an array, got {type(values).__name__}") from error


def _parse_table(name: str, values: Any, rows: int) -> Tensor:
    """Return a caller's array as numbers (A, F), in float32 as most loops compute.

    `name`: name of the argument, for errors. `rows`: A, the expected number of rows.

    Raises AttackError: the number of rows differs, or a number is not finite.
    """
    array = _parse_array(name, values)
    if array.dtype.kind not in "biuf" or not array.size or len(array) != rows:
        received = f"{array.dtype} of shape {array.shape}"
        raise AttackError(f"{name}: expected {rows} rows of numbers, got {received}")
    array = array.reshape(rows, -1).astype(np.float32)
    is_finite = np.isfinite(array).all(axis=1)
    if not is_finite.all():
        raise AttackError(f"{name}: row {int(is_finite.argmin())} holds NaN or an infinite number")
    return torch.from_numpy(array)


def _parse_classes(labels: Any) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
    """Return the classes, sorted, and the index (A,) of each row's class among them.

    Raises AttackError: these labels are no classes, or fewer than two.
    """
    array = _parse_array("labels", labels)
    if array.dtype == object:
        # Missing labels (None or NaN, which is not equal to itself) are refused below.
        array = np.array(
            ["nan" if label is None or label != label else str(label) for label in array]
        )
    names, indices = np.unique(array, return_inverse=True)
    are_whole = array.dtype.kind != "f" or bool((names == np.rint(names)).all())
    if array.ndim != 1 or not are_whole or "nan" in names:
        received = f"{array.dtype} of shape {array.shape}, {names[-3:]}"
        raise AttackError(
            f"labels: expected a class of each row, integers or texts, got {received}"
        )
    if len(names) < 2:
        raise AttackError(f"labels: expected 2 classes or more, got {len(names)}")
    return tuple(names.tolist()), indices.astype(np.int64)


def _parse_positions(name: str, values: Any, rows: int) -> Tensor:
    """Return row positions as int64.

    `values`: positions, or a mask (A,) that is True at them. `name`: name of the argument, for
    errors. `rows`: number of rows.

    Raises AttackError: a position is no integer from 0 to `rows` - 1.
    """
    array = _parse_array(name, values)
    if array.dtype == bool and array.shape == (rows,):
        array = np.flatnonzero(array)
    are_whole = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
    if not are_whole or (array.size and not 0 <= array.min() <= array.max() < rows):
        received = f"{array.dtype} of shape {array.shape}, {np.unique(array)[[0, -1]]}"
        raise AttackError(f"{name}: expected positions, integers 0 to {rows - 1}, got {received}")
    return torch.from_numpy(array.astype(np.int64))
