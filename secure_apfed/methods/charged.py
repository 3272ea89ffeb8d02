"""The signed reports on their privacy accounts that helpers send the active at each checkpoint.

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
"""Bytes of packed accounts at most."""
_PURPOSE = b"charged v1"
"""Domain separation: a signature with this prefix cannot pass for one on something else."""


class ChargedAccount(BaseModel):
    """A privacy account: the cost that one party's ledger has recorded, for one kind of epsilon.

    Attributes:
        figure: the kind of epsilon, as in `secure_apfed.settings.promises.FIGURES`.
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

    def to_account(self, party: str) -> dict[str, Any]:
        """Return the account as a dictionary like that of `PrivacyLedger.summarise_cost`.

        Its "trace" is a sentence that says that `party` reported these numbers.
        """
        return {**self.model_dump(exclude={"mu"}), "trace": [self._describe_report(party)]}

    def to_privacy_cost(self, party: str) -> PrivacySpent:
        """Return the account as a `PrivacySpent`, like `PrivacyLedger.get_privacy_spent`.

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
        """Return the account as a sentence, which says that `party` reported it."""
        return (
            f"{party} says that it charged {self.figure} {self.epsilon:.4g} at delta "
            f"{self.delta:g}, for {self.releases} releases of one row at most"
        )


_ACCOUNTS: TypeAdapter[tuple[ChargedAccount, ...]] = TypeAdapter(
    Annotated[tuple[ChargedAccount, ...], Field(strict=False, max_length=2)]
)


def pack_accounts(ledgers: Iterable[tuple[str, PrivacyLedger]]) -> bytes:
    """Return a party's privacy accounts as bytes: the cost that each of its ledgers has recorded.

    `ledgers`: pairs of a ledger's name and the ledger. Ledgers of DP-SGD updates are left out,
    since updates leave no party.
    """
    accounts = []
    for name, ledger in ledgers:
        if not name.endswith(UPDATES):
            spent = ledger.get_privacy_spent()
            accounts.append(
                {
                    "figure": ledger.figure,
                    "epsilon": spent.epsilon_x,
                    "delta": spent.delta,
                    "releases": spent.releases,
                    "mu": spent.mu,
                }
            )
    packed: bytes = msgpack.packb(accounts)
    return packed


def collect_accounts(
    charged: Mapping[str, Sequence[ChargedAccount]],
    *,
    among: Iterable[str],
    silent: Mapping[str, int],
) -> dict[str, dict[str, Any]]:
    """Return the reported privacy cost of each passive's votes or contributions, by passive name.

    If some passives reported and another did not, the latter gets an infinite epsilon. The account
    of a passive that stopped answering gets a remark in its "trace".

    Args:
        charged: mapping from passive name to the accounts that it signed last.
        among: the names of all passives.
        silent: mapping from the name of a passive that stopped answering to the step in which it
            did.
    """
    accounts = {
        name: account.to_account(name)
        for name, reported in charged.items()
        for account in reported
        if account.figure != "epsilon_x"  # epsilon_x is the cost of representations
    }
    if accounts:
        # Kind of epsilon and delta are expected to be the same at all passives.
        example = next(iter(accounts.values()))
        unreported = {**example, "epsilon": math.inf, "releases": 0}
        for name in among:
            if name not in charged:
                accounts[name] = {**unreported, "trace": [f"{name} never said what it charged"]}
    for name in accounts.keys() & silent.keys():
        remark = f"it fell silent in step {silent[name]}, and what it charged since is not known"
        accounts[name]["trace"].append(remark)
    return accounts


def parse_accounts(payload: bytes, *, sender: str) -> Sequence[ChargedAccount]:
    """Decode the privacy accounts that `pack_accounts` packed.

    `payload`: the packed accounts. `sender`: name of the party that sent them, for the error.
    Raises RemoteProtocolError: they are malformed.
    """
    try:
        if len(payload) > _MAX_BYTES:
            raise ValueError("too long")
        return _ACCOUNTS.validate_python(msgpack.unpackb(payload))
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError) as error:
        raise RemoteProtocolError(
            f"checkpoint: {sender} sent no accounts where it says that it has saved; it runs "
            "another version, or deviates"
        ) from error


class Statement(BaseModel):
    """A party's signed privacy accounts before a step; anybody can verify the signature.

    Attributes:
        identity: the party's long-term public key, hex.
        contract: SHA-256 of the session's contract, hex.
        step: the training step before which the party had these costs.
        signed: the accounts as the party packed them, hex.
        signature: the party's signature over contract, step and accounts, hex.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    contract: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    step: Annotated[int, Field(ge=0, lt=2**63)]
    signed: Annotated[str, Field(pattern="^([0-9a-f]{2})*$", max_length=2 * _MAX_BYTES)]
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]

    def verify_accounts(self, party: str) -> Sequence[ChargedAccount]:
        """Verify the signature and return the accounts.

        Raises RemoteProtocolError: `party` did not sign them, or they are no accounts.
        """
        try:
            verify_signature(
                bytes.fromhex(self.identity),
                bytes.fromhex(self.signature),
                _PURPOSE,
                *_encode_parts(bytes.fromhex(self.contract), self.step, bytes.fromhex(self.signed)),
                signer=party,
            )
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"checkpoint: {party} did not sign what came as its account before step "
                f"{self.step}, by the key by which it is known, for this contract and step: it was "
                f"altered, is of another session or step, or is somebody else's; ask {party} for "
                "its public identity"
            ) from error
        return parse_accounts(bytes.fromhex(self.signed), sender=party)

    def as_json(self, party: str) -> dict[str, Any]:
        """Return the statement for a JSON file, with its accounts in readable form, too.

        The signature covers only the packed form in `signed`. `party`: name of its signer.
        """
        accounts = [account.model_dump() for account in self.verify_accounts(party)]
        return {
            STATEMENT.number_key: STATEMENT.current_number,
            **self.model_dump(),
            "accounts": accounts,
        }


def sign_accounts(
    ledgers: Iterable[tuple[str, PrivacyLedger]], identity: Identity, contract: bytes, step: int
) -> bytes:
    """Return a party's packed privacy accounts with its signature, as bytes.

    `ledgers`: pairs of a ledger's name and the ledger. `identity`: the party's long-term key pair.
    `contract`: the digest of the session's contract. `step`: the step that runs next.
    """
    accounts = pack_accounts(ledgers)
    signature = identity.sign(_PURPOSE, *_encode_parts(contract, step, accounts))
    packed: bytes = msgpack.packb([accounts, signature])
    return packed


def parse_statement(
    payload: bytes, *, sender: str, identity: str, contract: bytes, step: int
) -> Statement:
    """Decode and verify a statement that `sign_accounts` made for this contract and step.

    `payload`: the packed accounts with their signature. `sender`: name of the party that sent it,
    for errors. `identity`: the sender's long-term public key, hex. `contract`: the digest of the
    session's contract. `step`: the step that runs next.

    Raises RemoteProtocolError: the statement is malformed, or not signed by this identity.
    """
    # A payload that is too long is not decoded. Its empty signature fails the pattern of
    # `Statement`, which raises the error below.
    accounts = signature = b""
    try:
        if len(payload) <= 2 * _MAX_BYTES:
            accounts, signature = msgpack.unpackb(payload)
        statement = Statement(
            identity=identity,
            contract=contract.hex(),
            step=step,
            signed=accounts.hex(),
            signature=signature.hex(),
        )
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            f"checkpoint: {sender} sent no signed accounts where it says that it has saved; it "
            "runs another version, or deviates"
        ) from error
    # Called only for its exceptions: a bad signature or malformed accounts.
    statement.verify_accounts(sender)
    return statement


def _encode_parts(contract: bytes, step: int, accounts: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the byte strings that the signature covers."""
    return contract, step.to_bytes(8, "big"), accounts
