"""The signed reports on their privacy accounts that helpers send the active at each checkpoint.

Run by: every passive, of its own ledgers, and by the active, which reads it. Figures only, and all
of them follow from the settings and from how often rows were asked for, which the active knows; so
the run's result can state what was charged where no ledger but the active's own is at hand. A
report is signed for this contract and step with the passive's long-term identity, so the passive
cannot deny it later. It is not verified: a deviating passive may report anything about its own
people's protection.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import Identity, verify_signature
from secure_apfed.base.formats import STATEMENT
from secure_apfed.base.names import UPDATES, ReleaseFigure
from secure_apfed.privacy.ledger import PrivacyLedger, PrivacySpent

_MAX_BYTES = 4096
_PURPOSE = b"charged v1"


class ChargedAccount(BaseModel):
    """An account of what one party spent on one privacy figure so far.

    Attributes:
        figure: what epsilon is called, as in `secure_apfed.settings.promises.FIGURES`.
        epsilon: at delta, of the row with the most `releases`; infinite without noise.
        mu: the same in Gaussian DP; infinite for other mechanisms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    figure: ReleaseFigure
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    releases: Annotated[int, Field(ge=0, lt=2**31)]
    mu: Annotated[float, Field(ge=0)] = math.inf

    def to_account(self, party: str) -> dict[str, Any]:
        """Return the account as `PrivacyLedger.summarise_cost` does, with the party that reported
        it.
        """
        return {**self.model_dump(exclude={"mu"}), "trace": [self._describe_report(party)]}

    def to_privacy_cost(self, party: str) -> PrivacySpent:
        """Return the cost as `PrivacyLedger.get_privacy_spent` does, with the party that reported
        it.
        """
        return PrivacySpent(
            epsilon_x=self.epsilon,
            delta=self.delta,
            releases=self.releases,
            mu=self.mu,
            trace=(self._describe_report(party),),
        )

    def _describe_report(self, party: str) -> str:
        """Return the report as a sentence, which says that the figures are the party's own."""
        return (
            f"{party} says that it charged {self.figure} {self.epsilon:.4g} at delta "
            f"{self.delta:g}, for {self.releases} releases of one row at most"
        )


_ALL: TypeAdapter[tuple[ChargedAccount, ...]] = TypeAdapter(
    Annotated[tuple[ChargedAccount, ...], Field(strict=False, max_length=2)]
)


def pack_accounts(ledgers: Iterable[tuple[str, PrivacyLedger]]) -> bytes:
    """Encode a party's privacy ledgers by name as its report; ledgers of private updates stay
    local.
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
    """Return the reported accounts of votes or contributions of parties in other processes.

    `among`: the helpers. `silent`: those that fell silent, with the step. If others reported and
    one of these did not, nothing is promised for it. `charged`: accounts by passive, as each signed
    them.
    """
    accounts = {
        name: account.to_account(name)
        for name, reported in charged.items()
        for account in reported
        if account.figure != "epsilon_x"
    }
    if accounts:
        unknown = {**next(iter(accounts.values())), "epsilon": math.inf, "releases": 0}
        for name in among:
            if name not in charged:
                accounts[name] = {**unknown, "trace": [f"{name} never said what it charged"]}
    for name in accounts.keys() & silent.keys():
        remark = f"it fell silent in step {silent[name]}, and what it charged since is not known"
        accounts[name]["trace"].append(remark)
    return accounts


def parse_accounts(payload: bytes, *, sender: str) -> Sequence[ChargedAccount]:
    """Decode a report made by `pack_accounts`. Raises RemoteProtocolError: it is malformed.

    `payload`: the message's bytes.
    """
    try:
        if len(payload) > _MAX_BYTES:
            raise ValueError("too long")
        return _ALL.validate_python(msgpack.unpackb(payload))
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError) as error:
        raise RemoteProtocolError(
            f"checkpoint: {sender} sent no accounts where it says that it has saved; it runs "
            "another version, or deviates"
        ) from error


class Statement(BaseModel):
    """A party's signed report of the privacy that it had spent before a step; anybody can verify
    it.

    Attributes:
        identity: its long-term public key; contract: SHA-256 of the session's; both hex.
        signed: the accounts as it packed them, hex; signature: of contract, step and these.
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
        """Return the statement with its accounts in readable form; only `signed` is verified."""
        accounts = [account.model_dump() for account in self.verify_accounts(party)]
        return {STATEMENT.key: STATEMENT.number, **self.model_dump(), "accounts": accounts}


def sign_accounts(
    ledgers: Iterable[tuple[str, PrivacyLedger]], identity: Identity, contract: bytes, step: int
) -> bytes:
    """Sign a party's packed accounts for the contract of this digest and the step they precede.

    `ledgers`: with their names.
    """
    accounts = pack_accounts(ledgers)
    signature = identity.sign(_PURPOSE, *_encode_parts(contract, step, accounts))
    packed: bytes = msgpack.packb([accounts, signature])
    return packed


def parse_statement(
    payload: bytes, *, sender: str, identity: str, contract: bytes, step: int
) -> Statement:
    """Decode and verify a statement that `sign_accounts` made for this contract and step.

    `payload`: the message's bytes.

    Raises RemoteProtocolError: it is malformed, or not signed by this identity.
    """
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
    statement.verify_accounts(sender)
    return statement


def _encode_parts(contract: bytes, step: int, accounts: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the byte strings that the signature covers."""
    return contract, step.to_bytes(8, "big"), accounts
