"""The worth of each passive's help: the same run is repeated once without each passive.

Run by: the experimenter, who has all parties in one process. Leave-one-out: a passive's worth is
what the active's model loses on the test rows if this passive takes no part and every other setting
is the same. It depends on who else takes part: of two passives with the same information each is
worth nothing while the other stays. So worths do not add up to the worth of all, and are no Shapley
values.

Protects nobody: every further training is a run of its own. Between organisations its epsilons are
charged again, and two sums that differ by one passive show its part (`who_learns.md`).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator

from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from secure_apfed.base.names import PartyName
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.measures.intervals import estimate_gain
from secure_apfed.measures.table import find_measure
from secure_apfed.methods.terms import make_sum
from secure_apfed.runs.outcome import Count, RunResult, StoredResult
from secure_apfed.runs.run import run
from secure_apfed.settings import TranscriptSettings

__all__ = [
    "PassiveWorth",
    "WhoHelped",
    "check_leaving_out",
    "leave_out",
    "leave_out_settings",
    "measure_worth",
]


class PassiveWorth(StoredResult):
    """The worth of one passive in one run: the gain of its model over the model without it.

    Attributes:
        passive: the passive's name.
        without: the run's measure of the model that was trained without this passive; None:
            undefined on the test rows.
        value: how much better the model with all passives is, above 0 if this passive helped; None:
            undefined, or the two runs were measured on different test rows.
        low, high: paired 95 % interval of `value` over the test rows; None without a value.
        wire_bytes: bytes that this passive adds to the run, on all links.
    """

    passive: PartyName
    without: float | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    wire_bytes: int


class WhoHelped(StoredResult):
    """The worth of every passive in one run; the file `who-helped.json`.

    Attributes:
        measure: the main measure of the run.
        reached: value of the measure with all passives; None: undefined on the test rows.
        rows: number of test rows.
        party_seeds: the setting `party_seeds`: only with "shared_for_comparison" are initial
            weights the same in all trainings.
        seconds: total time of all trainings without a passive.
    """

    measure: Annotated[str, AfterValidator(lambda name: find_measure(name).name)]
    reached: float | None
    rows: Count
    party_seeds: Literal["secret", "shared_for_comparison"]
    passives: tuple[PassiveWorth, ...]
    seconds: float


def check_leaving_out(config: Config, passives: Sequence[str]) -> None:
    """Raise ConfigError, before any training, if not every passive can be left out once.

    This is so if the method has no passives, if only one takes part, or if the others could not
    train under the same secure sum.

    `passives`: names of all passives that take part.
    """
    method = config.method
    if not method.has_passives or not passives:
        raise ConfigError(
            f"who helped: in method {method.name} the active trains alone, and nobody can be left "
            "out; choose a method with passives, such as apfed_r or votes"
        )
    if len(passives) == 1:
        raise ConfigError(
            f"who helped: {passives[0]} is the only passive, and without it nobody helps; its "
            "worth is the gain over the best that the active does alone, which "
            "`secure-apfed run CONFIG --seeds 5` measures"
        )
    for passive in passives:
        _require_trainable(config, passive, [name for name in passives if name != passive])


def _require_trainable(config: Config, left_out: str, other_passives: Sequence[str]) -> None:
    """Raise ConfigError if the other passives could not train without the one that is left out.

    `left_out`: name of the passive that is left out. `other_passives`: names of the other passives.
    """
    method = config.method
    contributing_passives = [
        name for name in other_passives if config.find_passive_settings(name).weight > 0
    ]
    has_sum = method.has_secure_sum or method.vote_protocol == "encrypted"
    # A sum of one contribution reveals it.
    is_single_contribution = len(other_passives) == 1 or len(contributing_passives) == 1
    if has_sum and is_single_contribution and not config.secure_sum.allow_single_passive:
        only_contributor = (
            contributing_passives[0] if len(contributing_passives) == 1 else other_passives[0]
        )
        raise ConfigError(
            f"who helped: without {left_out} the sum is {only_contributor}'s part alone, which "
            "secure_sum.allow_single_passive forbids to open; take one more passive, or, where "
            "this process plays all parties for a measurement, add --set "
            "secure_sum.allow_single_passive=true"
        )
    if not method.has_secure_sum:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            # Only the errors are needed: a sum of too few parties is refused before any training.
            make_sum(leave_out_settings(config, left_out), "who helped", "active", other_passives)
    except (ConfigError, LocalProtocolError) as error:
        raise ConfigError(f"who helped: without {left_out}: {error}") from error


def leave_out_settings(config: Config, passive: str) -> Config:
    """Return the settings of the same run without this passive and its tables.

    No attack is run, and no messages are stored for attacks.
    """
    tables = config.data.parties
    other_tables = None
    if tables is not None:
        other_tables = {name: table for name, table in tables.items() if name != passive}
    labels_at = tuple(name for name in config.data.labels_at if name != passive)
    data = config.data.model_copy(update={"parties": other_tables, "labels_at": labels_at})
    settings_by_passive = {
        name: party_settings for name, party_settings in config.passives.items() if name != passive
    }
    return config.model_copy(
        update={
            "name": f"{config.name}-without-{passive}",
            "data": data,
            "passives": settings_by_passive,
            "attacks": (),
            "tradeoff": {},
            "transcript": TranscriptSettings(keep="none"),
        }
    )


def leave_out(data: VerticalData, passive: str) -> VerticalData:
    """Return the same data without the table of this passive."""
    return replace(
        data,
        passives=tuple(table for table in data.passives if table.name != passive),
        labels_at=tuple(name for name in data.labels_at if name != passive),
    )


def measure_worth(
    result: RunResult, *, on_done: Callable[[int, int], None] = lambda done, total: None
) -> WhoHelped:
    """Train once more without each passive, and measure how much worse the model becomes.

    Args:
        result: result of a run in which one process ran all parties; it is not changed.
        on_done: called with the number of finished trainings and their total.

    Raises:
        ConfigError: no passive can be left out (`check_leaving_out`), the parties ran in separate
            processes, or the run was resumed.
        DataError: there is no test row to measure on.

    Examples:
        >>> from secure_apfed import Config, measure_worth, run
        >>> config = Config(
        ...     name="first",
        ...     method="apfed_r",
        ...     data={"dataset": "breast_cancer"},
        ...     model={"projection": 4},
        ...     train={"epochs": 1},
        ...     guard={"mechanism": "none"},
        ...     secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        ... )
        >>> worth = measure_worth(run(config, None))
        >>> [each.passive for each in worth.passives]
        ['passive-1', 'passive-2']
    """
    if result.recorded is None:
        raise ConfigError(
            "who helped: each party ran in a process of its own, and nobody holds all tables to "
            "train again without one; run it with --transport memory where all tables may lie "
            "together, else agree on one more run without the passive in question"
        )
    if result.sessions > 1:
        raise ConfigError(
            f"who helped: the run was played in {result.sessions} sessions, and what it sent again "
            "counts again, so that nothing compares with trainings of one session; measure it with "
            "`secure-apfed study who-helped CONFIG`"
        )
    config = result.recorded.config
    data = result.recorded.data
    check_leaving_out(config, [table.name for table in data.passives])
    variant = next(iter(result.accuracy))  # the inference variant that the run reports first
    if variant not in result.test_scores or not len(result.test_scores[variant].truth):
        raise DataError(
            "who helped: the run measured no test row; have some with labels (data.test_fraction), "
            "or, with a VerticalClassifier, compare its cross_val_score with that of one whose "
            "passives lack one"
        )
    start_time = time.monotonic()
    worths = []
    for done, table in enumerate(data.passives):
        on_done(done, len(data.passives))
        worths.append(_measure_without(config, data, table.name, result, variant))
    on_done(len(data.passives), len(data.passives))
    return WhoHelped(
        measure=result.measure,
        reached=_replace_nan(result.scores[variant]),
        rows=len(result.test_scores[variant].truth),
        party_seeds=config.party_seeds,
        passives=tuple(worths),
        seconds=time.monotonic() - start_time,
    )


def _measure_without(
    config: Config, data: VerticalData, passive: str, result: RunResult, variant: str
) -> PassiveWorth:
    """Train without one passive, and compare the model with the model that all passives helped.

    Args:
        config: settings of the run with all passives.
        data: the tables of all parties.
        passive: the passive to leave out.
        result: result of the run with all passives.
        variant: the inference variant (way to predict) whose test predictions are compared.

    Raises ConfigError: the other passives cannot train without this one.
    """
    try:
        with _merge_warnings(passive):
            result_without = run(
                leave_out_settings(config, passive), None, data=leave_out(data, passive)
            )
    except ConfigError as error:
        raise ConfigError(f"who helped: without {passive}: {error}") from error
    gain = None
    if variant in result_without.test_scores:
        measure = find_measure(result.measure)
        gain = estimate_gain(
            result.test_scores[variant], result_without.test_scores[variant], measure
        )
    return PassiveWorth(
        passive=passive,
        without=_replace_nan(result_without.scores[variant]),
        value=None if gain is None else gain.value,
        low=None if gain is None else _replace_nan(gain.low),
        high=None if gain is None else _replace_nan(gain.high),
        wire_bytes=result.wire_bytes - result_without.wire_bytes,
    )


@contextmanager
def _merge_warnings(passive: str) -> Iterator[None]:
    """Collect the warnings of the `with` block, and issue one warning of each kind after it.

    This is the first of its kind, with the name of the passive that is left out and the number of
    further ones.
    """
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", UnsafeChoiceWarning)  # the run itself has warned of it
        yield
    messages_by_type: dict[type[Warning], list[str]] = {}
    for warning in caught_warnings:
        messages_by_type.setdefault(warning.category, []).append(str(warning.message))
    for warning_type, (first, *repeats) in messages_by_type.items():
        suffix = f" (and {len(repeats)} more of this kind)" if repeats else ""
        warnings.warn(f"without {passive}: {first}{suffix}", warning_type, stacklevel=2)


def _replace_nan(value: float) -> float | None:
    """Return a number for a JSON file: None in place of NaN."""
    return None if math.isnan(value) else value
