"""The contract of a run: what all parties agree on before the first step.

Every party has the same contract. Its digest salts the key of every link and is therefore in the
authentication of every message: parties with different contracts cannot talk. A later session of
the same run (after a restart) has a contract of its own.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from secure_apfed.base.names import Name, check_parties
from secure_apfed.settings import FollowsFrom, ObjectiveSettings, Settings, SilentPassive, protects

AGGREGATOR = "aggregator"
# Others build networks of a size that a party offers.
_MAX_NUMBERS_PER_ROW = 2**24
PartyRole: TypeAlias = Literal["active", "passive", "aggregator", "dealer"]


class Participant(Settings):
    """A party of the contract.

    Attributes:
        name: the party's name.
        role: the party's role.
        identity: its long-term Ed25519 public key, hex, whose private key signs the contract.
        public_key: its X25519 public key, hex, from which the keys of its links in this session are
            derived.
    """

    name: Annotated[Name, protects("nobody")]
    role: Annotated[PartyRole, protects("nobody")]
    identity: Annotated[str, protects("nobody")] = Field(pattern="^[0-9a-f]{64}$")
    public_key: Annotated[str, protects("nobody")] = Field(pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        """Check a party's name; an aggregator or a dealer may be named like its role."""
        if self.name != self.role:
            check_parties([self.name])
        return self


class RepresentationBounds(Settings):
    """The form and bounds of the representations that a party sends; others are refused.

    Attributes:
        shape: shape of the representation of one row.
        dtype: type of its numbers.
        minimum_norm, maximum_norm: bounds of the L2 norm of one row's representation.
        minimum_spread: how much the rows of a batch must differ in direction, from 0 (any batch) to
            1; the passives demand it of the active.
        rows: number of this party's training rows, if the method averages weights by row counts;
            else null.
        features: SHA-256 (hex) of the description of its feature columns (see
            `secure_apfed.data.PartyTable.layout`), if the method averages weights of features, so
            that all parties must have the same columns; else null.
    """

    shape: Annotated[
        tuple[PositiveInt, ...], FollowsFrom(("model.representation", "model.projection"))
    ] = Field(min_length=1)
    dtype: Annotated[Literal["float32", "float64"], FollowsFrom(("train.precision",))]
    minimum_norm: Annotated[float, FollowsFrom(("guard.mechanism",))] = Field(
        ge=0, allow_inf_nan=False
    )
    maximum_norm: Annotated[float, FollowsFrom(("guard.clip",))] = Field(gt=0, allow_inf_nan=False)
    minimum_spread: Annotated[float, FollowsFrom(("rules.minimum_spread",))] = Field(
        0.0, ge=0, lt=1
    )
    rows: Annotated[int | None, protects("nobody")] = Field(None, ge=1, le=2**40)
    features: Annotated[str | None, protects("nobody")] = Field(None, pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        """Refuse rows of too many numbers, and a minimum norm above the maximum.

        Other parties build networks of the size that this party offers.
        """
        if math.prod(self.shape) > _MAX_NUMBERS_PER_ROW:
            raise ValueError(
                f"a row has at most {_MAX_NUMBERS_PER_ROW} numbers, got the shape {self.shape}"
            )
        if self.minimum_norm > self.maximum_norm:
            raise ValueError(
                f"minimum_norm {self.minimum_norm:g} is above maximum_norm {self.maximum_norm:g}"
            )
        return self


class PassiveTerms(Settings):
    """The task of one passive in training.

    Attributes:
        objective: the passive's own objective; null if the method gives it none, as joint training.
        weight: lambda_p, the factor by which the passive multiplies its gradients.
        representation: form and bounds of the representations that the passive receives or sends.
    """

    objective: ObjectiveSettings | None
    weight: Annotated[float, FollowsFrom(("passives.*.weight",))] = Field(ge=0)
    representation: RepresentationBounds


class AnsweredSteps(Settings):
    """A range of steps whose secure sums have contributions of the same passives.

    Attributes:
        first, last: the first and the last of these steps, both included.
        passives: the passives that contributed together, in the contract's order.
    """

    first: Annotated[int, protects("nobody")] = Field(ge=0, lt=2**63, strict=True)
    last: Annotated[int, protects("nobody")] = Field(ge=0, lt=2**63, strict=True)
    passives: Annotated[tuple[Name, ...], protects("nobody")] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_step_order(self) -> Self:
        """Raise ValueError if the first step is after the last."""
        if self.first > self.last:
            raise ValueError(f"steps go from the first to the last, got {self.first}, {self.last}")
        return self


class Resumption(Settings):
    """The step from which a session resumes an interrupted run.

    Attributes:
        run: digest of the contract of the run's first session, hex, which identifies the run.
        step: the first step of the resumed session.
        answered: ranges of later steps that passives answered in an earlier session, in rising
            order. They are answered again by the same passives only: the difference of two sums
            among other passives would reveal single contributions.
    """

    run: Annotated[str, protects("nobody")] = Field(pattern="^[0-9a-f]{64}$")
    step: Annotated[int, protects("nobody")] = Field(ge=0, strict=True)
    answered: Annotated[tuple[AnsweredSteps, ...], protects("nobody")] = ()

    @model_serializer(mode="wrap")
    def _omit_empty_answered(self, dump_fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit an empty `answered`, so that stored contracts keep their digests."""
        fields: dict[str, Any] = dump_fields(self)
        if not self.answered:
            del fields["answered"]
        return fields


class Contract(Settings):
    """The document that all parties sign before a session; it cannot change during it.

    Attributes:
        session: unique name of the session; every message names it, and every contribution to a
            secure sum is bound to it.
        participants: all parties.
        passives: by passive, the terms of its task.
        settings: the settings that all parties must share (`Settings.collect_terms`).
        secure_sum: public parameters of the secure sum; empty if the method uses none.
        minimum_batch: the number of rows below which a passive refuses a batch.
        epochs, batch_size: they limit the requests that a passive has to answer, and the rows of
            one request.
        spare_answers: how often a passive answers about one row in addition to once in each epoch,
            over all sessions of the run.
        silent_passive: what happens if a passive stops answering within a step. "stop": the run
            ends for all. "wait": the session ends, and all start another one, in which they wait
            for the passive. "recover": the session continues without it, as long as the secure
            sum's threshold of passives is left; the passive may come back at a checkpoint.
        patience_s: seconds of one unit of patience (see `secure_apfed.exchange.Awaited`); null:
            each party's own `timeout_s`.
        restarts: how many new sessions a party may start without its operator, after a session
            ended since a party stopped answering, or so that a party may come back.
        resumes: the step from which all continue, each from its own checkpoint; null: from the
            start.
        predicts: the run (digest of its first contract, hex) whose model makes joint predictions in
            this session; null: the session trains.
    """

    schema_version: Literal[2] = 2
    session: Annotated[str, protects("nobody")] = Field(min_length=1, max_length=256)
    participants: tuple[Participant, ...]
    passives: dict[str, PassiveTerms]
    settings: Annotated[dict[str, Any], FollowsFrom(("*",))]
    secure_sum: Annotated[
        dict[str, Any], FollowsFrom(("secure_sum.scheme", "secure_sum.clip", "secure_sum.bits"))
    ]
    minimum_batch: Annotated[int, FollowsFrom(("rules.minimum_batch",))] = Field(ge=1)
    epochs: Annotated[int, FollowsFrom(("train.epochs",))] = Field(ge=1)
    batch_size: Annotated[int, FollowsFrom(("train.batch_size",))] = Field(ge=1)
    spare_answers: Annotated[int, FollowsFrom(("rules.spare_answers",))] = Field(0, ge=0)
    silent_passive: Annotated[SilentPassive, FollowsFrom(("rules.silent_passive",))] = "stop"
    patience_s: Annotated[float | None, FollowsFrom(("rules.patience_s",))] = Field(
        None, gt=0, le=86_400
    )
    restarts: Annotated[int, FollowsFrom(("rules.restarts",))] = Field(0, ge=0)
    resumes: Resumption | None = None
    predicts: Annotated[str | None, protects("nobody")] = Field(None, pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check_parties(self) -> Self:
        """Raise ValueError if two names are equal up to case, or terms and passives differ."""
        names = [item.name for item in self.participants]
        if len({name.casefold() for name in names}) != len(names):
            raise ValueError(f"participants are all different, got {', '.join(names)}")
        if set(self.passives) != set(self.list_names("passive")):
            raise ValueError(
                f"terms are for the passives {', '.join(self.list_names('passive')) or 'none'}, "
                f"got {', '.join(self.passives) or 'none'}"
            )
        return self

    @property
    def document(self) -> bytes:
        """The contract as canonical JSON: equal contracts have equal bytes at all parties."""
        content = self.model_dump(mode="json")
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the contract's canonical JSON, 32 bytes; all link keys depend on it."""
        return hashlib.sha256(b"secure-apfed contract v1" + self.document).digest()

    @property
    def run(self) -> str:
        """The identifier of the run: the digest of its first session's contract, hex."""
        return self.resumes.run if self.resumes else self.digest.hex()

    @property
    def is_at_start(self) -> bool:
        """True if no step of the run was trained in an earlier session.

        Values that are revealed once in a run are revealed in such a session.
        """
        return self.resumes is None or self.resumes.step == 0

    def find_contributors(self, step: int) -> tuple[str, ...] | None:
        """Return the passives that answered this step together in an earlier session.

        Returns None if no earlier session answered the step.
        """
        answered_ranges = self.resumes.answered if self.resumes else ()
        # The last range that begins at or before the step; ranges are in rising order.
        range_index = bisect_right(answered_ranges, step, key=lambda steps: steps.first) - 1
        if range_index < 0 or step > answered_ranges[range_index].last:
            return None
        return answered_ranges[range_index].passives

    def select_contributors(self, step: int, present_passives: Sequence[str]) -> list[str]:
        """Return which present passives answer this step.

        They are all, unless an earlier session answered the step: then exactly the passives that
        answered it answer it again. Two sums among different passives would reveal
        single contributions by their difference.

        Raises PartyLeftError: one of them is not present.
        """
        contributors = self.find_contributors(step)
        if contributors is None:
            return list(present_passives)
        missing_contributors = [name for name in contributors if name not in present_passives]
        if missing_contributors:
            missing_names = " and ".join(missing_contributors)
            raise PartyLeftError(
                f"training: resume once {missing_names} is back: step {step} was answered among "
                f"{', '.join(contributors)} in an earlier session, and without {missing_names} the "
                f"two sums would differ by what {missing_names} contributed",
                missing_parties=tuple(missing_contributors),
            )
        return [name for name in present_passives if name in contributors]

    def list_names(self, role: str) -> tuple[str, ...]:
        """Return the names of the parties of one role, in the contract's order."""
        return tuple(item.name for item in self.participants if item.role == role)

    @property
    def active(self) -> str:
        """The name of the active. Raises RemoteProtocolError: there is none, or several."""
        names = self.list_names("active")
        if len(names) != 1:
            raise RemoteProtocolError(f"a contract names one active party, got {list(names)}")
        return names[0]
