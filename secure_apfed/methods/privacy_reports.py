"""The signed reports on their privacy costs that helpers send the active at each checkpoint.

Run by: every passive, on its own ledgers, and by the active, which reads the reports. A report has
only numbers that follow from the settings and from how often rows were requested, which the active
knows. The run's result can thus state the privacy cost that a passive recorded in a ledger of
another process. A report is signed for this contract and step with the passive's long-term
identity, so the passive cannot deny it later. It is not verified: a deviating passive may report
anything about its own people's protection.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import Identity, verify_signature
from secure_apfed.base.formats import STATEMENT
from secure_apfed.base.names import UPDATES, ReleaseEpsilonName
from secure_apfed.privacy.ledger import PrivacyLedger, PrivacySpent

_MAX_BYTES = 4096
"""Bytes of packed costs at most."""
_PURPOSE = b"charged v1"
"""Domain separation: a signature with this prefix cannot pass for one on something else."""


class ReportedCost(BaseModel):
    """The privacy cost that one party's ledger has recorded, for one kind of epsilon.

    Attributes:
        figure: the kind of epsilon, as in `promises.MEANING_BY_EPSILON`.
        epsilon: the privacy cost, at `delta`, of the row that was released most often; infinite
            without noise.
        releases: how often that row was released.
        mu: privacy cost of the same releases in Gaussian DP; infinite for other mechanisms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    figure: ReleaseEpsilonName
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    releases: Annotated[int, Field(ge=0, lt=2**31)]
    mu: Annotated[float, Field(ge=0)] = math.inf

    def to_cost_summary(self, party: str) -> dict[str, Any]:
        """Return the cost as a dictionary like that of `PrivacyLedger.summarise_cost`.

        Its "trace" is a sentence that says that `party` reported these numbers.
        """
        return {**self.model_dump(exclude={"mu"}), "trace": [self._describe_report(party)]}

    def to_privacy_cost(self, party: str) -> PrivacySpent:
        """Return the cost as a `PrivacySpent`, like `PrivacyLedger.get_privacy_spent`.

        Its trace is a sentence that says that `party` reported these numbers. `epsilon_x` has the
        epsilon of any kind.
        """
        return PrivacySpent(
            epsilon_x=self.epsilon,
            delta=self.delta,
            releases=self.releases,
            mu=self.mu,
            trace=(self._describe_report(party),),
        )

    def _describe_report(self, party: str) -> str:
        """Return the cost as a sentence, which says that `party` reported it."""
        return (
            f"{party} says that it charged {self.figure} {self.epsilon:.4g} at delta "
            f"{self.delta:g}, for {self.releases} releases of one row at most"
        )


_COSTS: TypeAdapter[tuple[ReportedCost, ...]] = TypeAdapter(
    Annotated[tuple[ReportedCost, ...], Field(strict=False, max_length=2)]
)


def pack_costs(ledgers: Iterable[tuple[str, PrivacyLedger]]) -> bytes:
    """Return a party's privacy costs as bytes: the cost that each of its ledgers has recorded.

    `ledgers`: pairs of a ledger's name and the ledger. Ledgers of DP-SGD updates are left out,
    since updates leave no party.
    """
    costs = []
    for name, ledger in ledgers:
        if not name.endswith(UPDATES):
            spent = ledger.get_privacy_spent()
            costs.append(
                {
                    "figure": ledger.figure,
                    "epsilon": spent.epsilon_x,
                    "delta": spent.delta,
                    "releases": spent.releases,
                    "mu": spent.mu,
                }
            )
    packed: bytes = msgpack.packb(costs)
    return packed


def summarise_reported_costs(
    costs_by_passive: Mapping[str, Sequence[ReportedCost]],
    *,
    passives: Iterable[str],
    silence_step_by_passive: Mapping[str, int],
) -> dict[str, dict[str, Any]]:
    """Return the reported privacy cost of each passive's votes or contributions, by passive name.

    If some passives reported and another did not, the latter gets an infinite epsilon. The cost
    of a passive that stopped answering gets a remark in its "trace".

    Args:
        costs_by_passive: mapping from passive name to the costs that it signed last.
        passives: the names of all passives.
        silence_step_by_passive: mapping from the name of a passive that stopped answering to the
            step in which it did.
    """
    summary_by_passive = {
        name: cost.to_cost_summary(name)
        for name, reported_costs in costs_by_passive.items()
        for cost in reported_costs
        if cost.figure != "epsilon_x"  # epsilon_x is the cost of representations
    }
    if summary_by_passive:
        # Kind of epsilon and delta are expected to be the same at all passives.
        example = next(iter(summary_by_passive.values()))
        unreported = {**example, "epsilon": math.inf, "releases": 0}
        for name in passives:
            if name not in costs_by_passive:
                summary_by_passive[name] = {
                    **unreported,
                    "trace": [f"{name} never said what it charged"],
                }
    for name in summary_by_passive.keys() & silence_step_by_passive.keys():
        step = silence_step_by_passive[name]
        remark = f"it fell silent in step {step}, and what it charged since is not known"
        summary_by_passive[name]["trace"].append(remark)
    return summary_by_passive


def parse_costs(payload: bytes, *, sender: str) -> Sequence[ReportedCost]:
    """Decode the privacy costs that `pack_costs` packed.

    `payload`: the packed costs. `sender`: name of the party that sent them, for the error.
    Raises RemoteProtocolError: they are malformed.
    """
    try:
        if len(payload) > _MAX_BYTES:
            raise ValueError("too long")
        return _COSTS.validate_python(msgpack.unpackb(payload))
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError) as error:
        raise RemoteProtocolError(
            f"checkpoint: {sender} sent no accounts where it says that it has saved; it runs "
            "another version, or deviates"
        ) from error


class SignedReport(BaseModel):
    """A party's signed report of its privacy costs before a step; anybody can verify the signature.

    Attributes:
        identity: the party's long-term public key, hex.
        contract: SHA-256 of the session's contract, hex.
        step: the training step before which the party had these costs.
        signed: the costs as the party packed them, hex.
        signature: the party's signature over contract, step and costs, hex.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    contract: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    step: Annotated[int, Field(ge=0, lt=2**63)]
    signed: Annotated[str, Field(pattern="^([0-9a-f]{2})*$", max_length=2 * _MAX_BYTES)]
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]

    def verify_costs(self, party: str) -> Sequence[ReportedCost]:
        """Verify the signature and return the reported costs.

        Raises RemoteProtocolError: `party` did not sign them, or they are no costs.
        """
        try:
            verify_signature(
                bytes.fromhex(self.identity),
                bytes.fromhex(self.signature),
                _PURPOSE,
                *_encode_signed_parts(
                    bytes.fromhex(self.contract), self.step, bytes.fromhex(self.signed)
                ),
                signer=party,
            )
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"checkpoint: {party} did not sign what came as its account before step "
                f"{self.step}, by the key by which it is known, for this contract and step: it was "
                f"altered, is of another session or step, or is somebody else's; ask {party} for "
                "its public identity"
            ) from error
        return parse_costs(bytes.fromhex(self.signed), sender=party)

    def as_json(self, party: str) -> dict[str, Any]:
        """Return the report for a JSON file, with its costs in readable form, too.

        The signature covers only the packed form in `signed`. `party`: name of its signer.
        """
        cost_dictionaries = [account.model_dump() for account in self.verify_costs(party)]
        return {
            STATEMENT.number_key: STATEMENT.current_number,
            **self.model_dump(),
            "accounts": cost_dictionaries,
        }


def sign_report(
    ledgers: Iterable[tuple[str, PrivacyLedger]], identity: Identity, contract: bytes, step: int
) -> bytes:
    """Return a party's packed privacy costs with its signature, as bytes.

    `ledgers`: pairs of a ledger's name and the ledger. `identity`: the party's long-term key pair.
    `contract`: the digest of the session's contract. `step`: the step that runs next.
    """
    packed_costs = pack_costs(ledgers)
    signature = identity.sign(_PURPOSE, *_encode_signed_parts(contract, step, packed_costs))
    packed: bytes = msgpack.packb([packed_costs, signature])
    return packed


def parse_report(
    payload: bytes, *, sender: str, identity: str, contract: bytes, step: int
) -> SignedReport:
    """Decode and verify a signed report that `sign_report` made for this contract and step.

    `payload`: the packed costs with their signature. `sender`: name of the party that sent it,
    for errors. `identity`: the sender's long-term public key, hex. `contract`: the digest of the
    session's contract. `step`: the step that runs next.

    Raises RemoteProtocolError: the report is malformed, or not signed by this identity.
    """
    # A payload that is too long is not decoded. Its empty signature fails the pattern of
    # `SignedReport`, which raises the error below.
    packed_costs = signature = b""
    try:
        if len(payload) <= 2 * _MAX_BYTES:
            packed_costs, signature = msgpack.unpackb(payload)
        report = SignedReport(
            identity=identity,
            contract=contract.hex(),
            step=step,
            signed=packed_costs.hex(),
            signature=signature.hex(),
        )
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            f"checkpoint: {sender} sent no signed accounts where it says that it has saved; it "
            "runs another version, or deviates"
        ) from error
    # Called only for its exceptions: a bad signature or malformed costs.
    report.verify_costs(sender)
    return report


def _encode_signed_parts(
    contract: bytes, step: int, packed_costs: bytes
) -> tuple[bytes, bytes, bytes]:
    """Return the byte strings that the signature covers."""
    return contract, step.to_bytes(8, "big"), packed_costs
