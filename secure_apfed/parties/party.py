"""What every party has: a name and the contract.

A party holds its own secrets and data. It reads messages, hands tensors to `secure_apfed.learning`
and writes payloads; its script (see `secure_apfed.methods`) says when, and to whom.
"""

from secure_apfed.contract import Contract

__all__ = ["Party"]


class Party:
    """Base of all parties.

    Args:
        name: in the contract.
        contract: of the session.
    """

    def __init__(self, name: str, contract: Contract) -> None:
        self.name, self.contract = name, contract
