"""Attacks on a training loop that is not ours: what its arrays give away, beside what chance gives.

Run by: whoever holds the arrays of all parties, to judge a loop of any method and framework. One
call is one curious adversary, which follows the loop and reads what reached it. Its view, the
knowledge that it is told, baselines, decoys and scores are those of the attacks on runs of ours.

Letters: A rows, B rows of a step, D numbers of a representation, F features.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor

from apfed_attacks import ATTACKS
from apfed_attacks.interface import Attack, AttackResult
from apfed_attacks.recorded import class_priors, draw_features, draw_labels
from apfed_attacks.run import full_suite, guesses, prepare
from apfed_attacks.scoring import DECOY, Truth, score
from apfed_attacks.view import AdversaryView, AttackError, Exchange, Knowledge, KnownRows
from secure_apfed.config import AttackChoice
from secure_apfed.data import UNLABELLED
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.seeds import undisturbed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Evaluation", "Finding", "evaluate"]

Step: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # rows (B,), h (B, D), gradients (B, D)
_ADVERSARY, _OTHER = "adversary", "the other party"
_BY_CHANCE = 0.005  # how often a verdict says "found" where there is nothing
_SHOWN = ("attack", "target", "known", "metric", "score", "baseline", "null", "advantage")
_RECEIVED = "the party that received h"


@dataclass(frozen=True, eq=False)
class Finding:
    """What one attack, with one set of options, found.

    Attributes:
        results: as of a run of ours, one for each exchange of releases between rows: the attack,
            its variants and baselines are the same in all, the decoys others.
    """

    results: tuple[AttackResult, ...] = field(repr=False)

    @property
    def attack(self) -> str:
        return self.results[0].attack

    @property
    def metric(self) -> str:
        """Balanced accuracy of labels (chance: one over the classes), R^2 of features."""
        return str(self.results[0].metric)

    @property
    def score(self) -> float:
        """Of the best variant, by the metric."""
        return float(self.results[0].score[self.metric] or 0.0)

    @property
    def baseline(self) -> float:
        """The best that the same knowledge gives without h and gradients."""
        own = self.results[0].baselines.items()
        return max(one[self.metric] or 0.0 for name, one in own if not name.endswith(DECOY))

    @property
    def null(self) -> tuple[float, ...]:
        """The best of baselines and decoys, for each exchange: what luck gives."""
        return tuple(self.score - (result.advantage or 0.0) for result in self.results)

    @property
    def advantage(self) -> float:
        return self.score - float(np.mean(self.null))

    @property
    def found(self) -> bool:
        """Whether the score is above what luck gives once in 200 times.

        Where nothing leaks, score and null are exchangeable, so that the score is one more draw of
        the null: it must be above the prediction interval of one (Student's t), and by more than
        one over the root of the scored rows, for a null that hardly varies.
        """
        null, scored = np.array(self.null), self.results[0].counts["scored"]
        if len(null) < 2:
            return False
        far = float(student.isf(_BY_CHANCE, len(null) - 1))
        margin = far * float(null.std(ddof=1)) * (1 + 1 / len(null)) ** 0.5
        return self.advantage > max(margin, scored**-0.5)

    @property
    def verdict(self) -> str:
        """In words. A failed attack proves no privacy."""
        if not self.found:
            return "nothing found"
        what = f"{self.results[0].target} found, best by {self.results[0].variant}"
        return f"{what}: {self.score:.2f} where luck gives {np.mean(self.null):.2f}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; `results` in full."""
        known = self.results[0].counts["known"]
        figures = {name: getattr(self, name) for name in ("metric", "score", "baseline")}
        return {
            "attack": self.attack, "target": self.results[0].target, "known": known, **figures,
            "null": list(self.null), "advantage": self.advantage, "found": self.found,
            "verdict": self.verdict, "results": [result.as_json() for result in self.results],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        findings: of the attacks that applied, in the order of `apfed_attacks.ATTACKS`; one attack
            may have several, with more and with fewer known rows.
        lacking: attack -> a sentence: why it was not mounted.
    """

    findings: tuple[Finding, ...]
    lacking: Mapping[str, str] = field(repr=False)

    @cached_property
    def worst(self) -> Mapping[str, Finding]:
        """The finding of each attack with the highest advantage."""
        ascending = sorted(self.findings, key=lambda one: one.advantage)
        return {one.attack: one for one in ascending}

    def __getitem__(self, attack: str) -> Finding:
        """Return the worst finding of an attack. AttackError: it was not mounted."""
        if attack not in self.worst:
            raise AttackError(f"{attack}: {self.lacking.get(attack, 'it was not asked for')}")
        return self.worst[attack]

    def to_frame(self) -> "pd.DataFrame":
        """One line for each finding; `null` is the mean over the exchanges."""
        import pandas as pd

        lines = [one.as_json() | {"null": float(np.mean(one.null))} for one in self.findings]
        return pd.DataFrame(lines, columns=[*_SHOWN, "verdict"])

    def as_json(self) -> dict[str, Any]:
        found = [one.as_json() for one in self.findings]
        return {"findings": found, "lacking": dict(self.lacking)}

    def __str__(self) -> str:
        table = self.to_frame().to_string(index=False, float_format="{:.3f}".format)
        lacking = [f"{name}: {reason}" for name, reason in self.lacking.items()]
        return "\n".join([table, "Not mounted:", *lacking, "A failed attack proves no privacy."])


@undisturbed()
def evaluate(
    *,
    h: Any,
    labels: Any = None,
    features: Any = None,
    own: Any = None,
    gradients: Any = None,
    known: Any = None,
    steps: Any = None,
    attacks: str | Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    exchanges: int = 5,
    seconds: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Mount every attack that the arrays of a foreign training loop give something to read.

    Arrays are of numpy, torch, pandas or nested lists. Without `gradients` the adversary is the
    party that received h, and guesses labels and features that it does not have. With them it is
    the party that made h and got gradients of the task loss back, as a passive of split learning,
    and guesses the labels.

    Args:
        h: what the adversary received, or sent: (A, ...), a row for each of `labels`; or of several
            steps [(rows, (B, ...)), ...], or [(B, ...), ...] beside `steps`. Rows are flattened. A
            step that repeats a row of its pass begins the next pass over the rows.
        labels: (A,) classes, for scoring; the adversary is told those that are `known`, and the
            share of each class.
        features: (A, F) private features of the party that made h, for scoring, likewise.
        own: (A, F) the adversary's own features of the same rows; without them baselines know
            nothing but `known` and the shares.
        gradients: what came back for h, in the same form and shapes; a step may have None.
        known: positions in 0 to A - 1, or a mask (A,), of rows whose label and features the
            adversary knows. None: as many as each attack's options say, drawn by the seed; for
            labels 0, 1, 4 and 40 of each class.
        steps: the row positions (B,) of each step of h.
        attacks: names of `ATTACKS`, or name -> options; None: all, with their usual options.
        exchanges: how often releases are exchanged between rows for the null, at least 2.
        seconds: attacks that have not begun by then are not mounted. One is not stopped.
        seed: of known rows, exchanges and attacks; no global generator is read or moved.
        device: where numbers lie while attacks compute.

    Raises:
        AttackError: arrays do not belong together, hold NaN, or leave nothing to guess.
        ConfigError: an attack or one of its options is unknown.
    """
    begun = time.monotonic()
    choices = _choices(attacks, drawn=known is None)
    if exchanges < 2:
        raise AttackError(f"exchanges: a null takes 2 or more, got {exchanges}")
    loop = _Loop.of(h, labels, features, own, gradients, known, steps, seed, torch.device(device))
    findings, lacking = list[Finding](), dict[str, str]()
    for attack in map(prepare, choices):
        reason = loop.lacks(attack)
        if reason is None and seconds is not None and time.monotonic() - begun > seconds:
            reason = f"not begun within seconds={seconds:g}"
        if reason is None:
            try:
                findings.append(loop.attacked(attack, exchanges))
            except AttackError as error:
                reason = str(error)
        if reason is not None:
            lacking.setdefault(attack.name, reason)
    for one in findings:
        lacking.pop(one.attack, None)
    return Evaluation(tuple(findings), lacking)


def _choices(
    attacks: str | Iterable[str] | Mapping[str, Mapping[str, Any]] | None, *, drawn: bool
) -> list[AttackChoice]:
    """What to mount; where known rows are not drawn, options that count them say nothing."""
    if isinstance(attacks, Mapping):
        return [AttackChoice(name=name, options=dict(of)) for name, of in attacks.items()]
    names = [attacks] if isinstance(attacks, str) else list(ATTACKS if attacks is None else attacks)
    found: list[AttackChoice] = []
    for choice in full_suite(names):
        counted = () if drawn else ("labels_per_class", "shadow_rows")
        options = {name: value for name, value in choice.options.items() if name not in counted}
        if (plain := AttackChoice(name=choice.name, options=options)) not in found:
            found.append(plain)
    return found


@dataclass(frozen=True, eq=False)
class _Loop:
    """The arrays, checked: what the adversary saw, `passes`, and the truth."""

    passes: Sequence[Sequence[Step]]
    truth: Truth
    classes: tuple[str, ...]
    own: Tensor | None
    known: Tensor | None
    answered: bool
    seed: int
    device: torch.device

    @classmethod
    def of(
        cls, h: Any, labels: Any, features: Any, own: Any, gradients: Any, known: Any, steps: Any,
        seed: int, device: torch.device,
    ) -> "_Loop":  # fmt: skip
        if labels is None and features is None:
            raise AttackError("labels, features: give one of them, to score what is guessed")
        if features is not None and gradients is not None:
            raise AttackError(
                "features, gradients: who received gradients made h itself and has its features; "
                f"for {_RECEIVED} call evaluate again with features= and without gradients="
            )
        table = None if features is None else _table("features", features)
        names: NDArray[Any] = np.array([])
        if labels is not None:
            names, labels = _classes(labels)
        rows = len(table if labels is None else labels)
        if table is not None:
            _expect_rows("features", table, rows)
        if own is not None:
            own = _table("own", own)
            _expect_rows("own", own, rows)
        seen = _steps(h, gradients, steps, rows)
        if labels is None:
            labels = np.full(rows, UNLABELLED)
        trained = torch.cat([rows_B for rows_B, *_ in seen]).unique()
        truth = Truth(
            classes=len(names), labels=torch.from_numpy(labels.astype(np.int64)), trained=trained,
            features={} if table is None else {_OTHER: table},
        )  # fmt: skip
        if known is not None:
            known = torch.from_numpy(np.unique(_positions("known", known, rows)))
        return cls(
            _passes(seen, rows), truth, tuple(map(str, names)), own, known, gradients is not None,
            seed, device,
        )  # fmt: skip

    def lacks(self, attack: Attack) -> str | None:
        """Return what an attack lacks here, in a sentence, or None."""
        if attack.behaviour == "malicious":
            return "its adversary deviates in a live run, and these arrays are of a finished loop"
        if attack.target == "labels" and not self.classes:
            return "needs labels=, to score what it guesses"
        if attack.reads == "gradients" and not self.answered:
            return "needs gradients=, those that the party that made h received for it"
        if attack.reads == "several epochs" and len(self.passes) < 2:
            return "needs h of two passes over the rows or more, as [(rows, h), ...] or with steps="
        if attack.reads not in ("gradients", "several epochs", "representations"):
            return f"reads {attack.reads}, which is not among the arrays that evaluate takes"
        if attack.target == "features" and self.answered:
            return f"is mounted by {_RECEIVED}; gradients= came to the one that made it"
        if attack.target == "features" and not self.truth.features:
            return "needs features=, those of the party that made h, to score what it guesses"
        return None

    def attacked(self, attack: Attack, exchanges: int) -> Finding:
        view = self.view(attack)
        if (reason := attack.why_not(view)) is not None:
            raise AttackError(reason)
        found = guesses(attack, view, self.seed, exchanges=exchanges)
        scored = (score(attack, view, guess, self.truth, self.seed) for guess in found)
        return Finding(tuple(scored))

    def view(self, attack: Attack) -> AdversaryView:
        labels, shadow = self.told(attack)
        knowledge = Knowledge(
            classes=self.truth.classes,
            victim=_OTHER,
            labels=labels,
            priors=class_priors(self.truth) if attack.priors and self.classes else None,
            shadow=shadow,
        )
        return AdversaryView(
            role="passive",
            parties=(_ADVERSARY,),
            behaviour="curious",
            description=Exchange(
                name="this loop",
                released_by="passives" if self.answered else "active",
                returns_gradients=self.answered,
            ),
            envelopes=self.envelopes,
            features={} if self.own is None else {_ADVERSARY: self.own},
            knowledge=knowledge,
            iterations=attack.iterations,
            device=self.device,
        )

    def told(self, attack: Attack) -> tuple[KnownRows, KnownRows]:
        """Labels and features that the adversary knows: those given, or drawn as of a run."""
        truth, nothing, features = self.truth, KnownRows(), self.truth.features.get(_OTHER)
        if self.known is not None:
            at = self.known
            return (
                KnownRows(at, truth.labels[at]) if self.classes else nothing,
                nothing if features is None else KnownRows(at, features[at]),
            )
        labels, rows, seed = attack.labels_per_class, attack.shadow_rows, self.seed
        if attack.target == "labels":
            return draw_labels(truth, truth.trained, self.classes, labels, seed), nothing
        return nothing, draw_features(truth, truth.trained, _OTHER, rows, seed)

    @cached_property
    def envelopes(self) -> Mapping[int, tuple[Envelope, ...]]:
        """The messages that the adversary would have seen, by pass."""
        maker, reader = (_ADVERSARY, _OTHER) if self.answered else (_OTHER, _ADVERSARY)
        found, step = dict[int, tuple[Envelope, ...]](), 0
        for number, steps in enumerate(self.passes):
            messages = list[Envelope]()
            for rows_B, h_BD, gradient_BD in steps:
                sent: list[tuple[Kind, str, str, dict[str, Tensor]]] = [
                    (Kind.REPRESENTATIONS, maker, reader, {"rows": rows_B, "z": h_BD})
                ]
                if gradient_BD is not None:
                    sent.append((Kind.GRADIENTS, reader, maker, {"gradient": gradient_BD}))
                messages += [
                    Envelope(
                        session="foreign", step=step, kind=kind, sender=sender, receiver=receiver,
                        sequence=2 * step + at, payload=pack(tensors),
                    )
                    for at, (kind, sender, receiver, tensors) in enumerate(sent)
                ]  # fmt: skip
                step += 1
            found[number] = tuple(messages)
        return found


def _steps(h: Any, gradients: Any, steps: Any, rows: int) -> list[Step]:
    """Bring h and gradients, whole or by step, into steps."""
    if steps is None and _in_pairs(h):
        steps, h = [pair[0] for pair in h], [pair[1] for pair in h]
        if _in_pairs(gradients):
            if [list(pair[0]) for pair in gradients] != [list(at) for at in steps]:
                raise AttackError("gradients: expected the rows of h, step by step, got others")
            gradients = [pair[1] for pair in gradients]
    if steps is None:
        whole = _table("h", h)
        _expect_rows("h", whole, rows)
        steps, h = [range(rows)], [whole]
        gradients = None if gradients is None else [gradients]
    gradients = [None] * len(steps) if gradients is None else gradients
    for name, of in (("h", h), ("gradients", gradients)):
        if len(of) != len(steps):
            raise AttackError(f"{name}: expected one array for each of {len(steps)} steps, got "
                              f"{len(of)}")  # fmt: skip
    found: list[Step] = []
    for number, (at, h_B, gradient_B) in enumerate(zip(steps, h, gradients, strict=True)):
        rows_B = torch.from_numpy(_positions(f"steps[{number}]", at, rows))
        h_BD = _table(f"h of step {number}", h_B)
        _expect_rows(f"h of step {number}", h_BD, len(rows_B))
        if found and h_BD.shape[1] != found[0][1].shape[1]:
            width = found[0][1].shape[1]
            raise AttackError(f"h of step {number}: expected {width} numbers a row as in step 0, "
                              f"got {h_BD.shape[1]}")  # fmt: skip
        gradient_BD = None
        if gradient_B is not None:
            gradient_BD = _table(f"gradients of step {number}", gradient_B)
            if gradient_BD.shape != h_BD.shape:
                raise AttackError(f"gradients of step {number}: expected the shape of h, "
                                  f"{tuple(h_BD.shape)}, got {tuple(gradient_BD.shape)}")  # fmt: skip
        found.append((rows_B, h_BD, gradient_BD))
    if not found:
        raise AttackError("h: expected at least one step, got none")
    return found


def _passes(steps: Sequence[Step], rows: int) -> list[list[Step]]:
    found, seen = [list[Step]()], torch.zeros(rows, dtype=torch.bool)
    for step in steps:
        if seen[step[0]].any():
            found.append([])
            seen[:] = False
        seen[step[0]] = True
        found[-1].append(step)
    return found


def _in_pairs(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(one, tuple) and len(one) == 2 and np.ndim(one[1]) > 0 for one in values
    )


def _array(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise AttackError(f"{name}: expected an array, got {type(values).__name__}") from error


def _table(name: str, values: Any) -> Tensor:
    """Numbers (N, F), rows flattened; float64 stays, all else becomes float32."""
    array = _array(name, values)
    if array.ndim == 0 or not array.size or array.dtype.kind not in "biuf":
        raise AttackError(
            f"{name}: expected rows of numbers, got {array.dtype} of shape {array.shape}"
        )
    array = array.reshape(len(array), -1)
    array = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    if not (whole := np.isfinite(array).all(axis=1)).all():
        raise AttackError(f"{name}: row {int(whole.argmin())} holds NaN or an infinite number")
    return torch.from_numpy(array)


def _classes(labels: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """The classes, sorted, and which of them each row is of."""
    array = _array("labels", labels)
    wrong = "labels: expected a class for each row, (A,), as integers, booleans or texts, got "
    if array.ndim != 1 or not array.size:
        raise AttackError(f"{wrong}{array.dtype} of shape {array.shape}")
    if array.dtype == object:
        array = array.astype(str)
    if array.dtype.kind == "f" and not (np.isfinite(array) & (array == np.rint(array))).all():
        raise AttackError(f"{wrong}fractions or NaN; no attack guesses numbers or missing labels")
    names, places = np.unique(array, return_inverse=True)
    if len(names) < 2:
        raise AttackError(f"labels: all {len(array)} rows are of class {names[0]}; there is "
                          "nothing to guess")  # fmt: skip
    return names, places


def _positions(name: str, values: Any, rows: int) -> NDArray[np.int64]:
    array = _array(name, values)
    if array.dtype.kind == "b" and array.shape == (rows,):
        array = np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise AttackError(
            f"{name}: expected row positions, integers, got {array.dtype} of shape {array.shape}"
        )
    if array.size and not 0 <= array.min() <= array.max() < rows:
        raise AttackError(
            f"{name}: expected positions in 0 to {rows - 1}, got {array.min()} to {array.max()}"
        )
    return array.astype(np.int64)


def _expect_rows(name: str, table: Tensor, rows: int) -> None:
    if len(table) != rows:
        raise AttackError(f"{name}: expected {rows} rows, got {len(table)}")
