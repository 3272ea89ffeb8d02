"""Short messages that two parties of a sum pass each other through a third, one a step.

Run by: passives and the active; the aggregator relays. Protects from: everybody between the
two ends, who can neither read, alter nor replay a message, nor pass on one that answers another
step, message or shape. Does not give: delivery.

Pair seeds as in `pairwise`. A message is sealed by AES-256-GCM under a key for its direction,
with the step as the nonce: each end sends the other one message a step, and steps only go up.
Fingerprint, binding digest, shape and both names are in the associated data.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocols.errors import RemoteProtocolError
from protocols.randomness import derive_key
from protocols.seal import SEAL_OVERHEAD_BYTES
from protocols.sums.agreement import StepBinding
from protocols.sums.pairwise import PairwiseSeeds

__all__ = ["SEAL_OVERHEAD_BYTES", "StepSeals"]

_NONCE_BYTES = 12


class StepSeals(PairwiseSeeds):
    """One party's seals to and from each of its peers; for the arguments see `PairwiseSeeds`."""

    def seal(self, peer: str, binding: StepBinding, shape: tuple[int, int], text: bytes) -> bytes:
        """Seal `text` for `peer`; call it once for each peer and step."""
        associated = self._associated(self.me, peer, binding, shape)
        return self._cipher(self.me, peer).encrypt(_nonce(binding), text, associated)

    def open(self, peer: str, binding: StepBinding, shape: tuple[int, int], sealed: bytes) -> bytes:
        """Return what `peer` sealed for this party.

        Raises:
            RemoteProtocolError: it was altered, or belongs to another step, message, shape,
                agreement or pair of parties.
        """
        associated = self._associated(peer, self.me, binding, shape)
        try:
            return self._cipher(peer, self.me).decrypt(_nonce(binding), sealed, associated)
        except InvalidTag as error:
            raise RemoteProtocolError(
                f"what {peer} sealed for {self.me} in step {binding.step} does not authenticate: "
                f"it was altered on the way, or {self._frames.agreement.receiver} sent the two "
                "different representations"
            ) from error

    def _cipher(self, sender: str, recipient: str) -> AESGCM:
        peer = recipient if sender == self.me else sender
        names = (sender.encode(), recipient.encode())
        return AESGCM(derive_key(self._seed(peer), b"step seal", *names))

    def _associated(
        self, sender: str, recipient: str, binding: StepBinding, shape: tuple[int, int]
    ) -> bytes:
        parts = (
            self._frames.fingerprint,
            binding.digest,
            *(size.to_bytes(8, "big") for size in shape),
            sender.encode(),
            recipient.encode(),
        )
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _nonce(binding: StepBinding) -> bytes:
    return binding.step.to_bytes(_NONCE_BYTES, "big")
