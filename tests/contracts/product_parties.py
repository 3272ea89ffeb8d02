"""All parties of a sum of products in one process, for tests."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.products import ProductAgreement, ProductReceiver, SumOfProducts

Matrix = NDArray[np.float64]


def agreement(passives: int = 2, **changes: Any) -> ProductAgreement:
    usual: dict[str, Any] = {"people": 30, "columns": 3, "labelled": 4}
    return ProductAgreement(
        session="test",
        receiver="active",
        aggregator="aggregator",
        contributors=tuple(f"passive_{k}" for k in range(1, passives + 1)),
        **{**usual, **changes},
    )


def labels(agreed: ProductAgreement, seed: int = 0) -> Matrix:
    """One-hot rows."""
    classes = np.random.default_rng(seed).integers(agreed.columns, size=agreed.labelled)
    one_hot: Matrix = np.eye(agreed.columns)[classes]
    return one_hot


def matrices(agreed: ProductAgreement, seed: int = 0) -> dict[str, Matrix]:
    """Rows of either sign whose magnitudes add up to the bound."""
    rng = np.random.default_rng(seed)
    shape = agreed.people, agreed.labelled
    return {
        name: rng.dirichlet(np.ones(shape[1]), shape[0])
        * rng.choice([-1.0, 1.0], shape)
        * agreed.row_bound
        for name in agreed.contributors
    }


class ProductParties:
    """The roles after setup; the passives hold the request unless it is kept back."""

    def __init__(
        self, agreed: ProductAgreement, labels_nK: Any = None, *, accept: bool = True
    ) -> None:
        self.sum = SumOfProducts(agreed)
        self.labels = labels(agreed) if labels_nK is None else labels_nK
        self.receiver: ProductReceiver = self.sum.make_receiver(self.labels)
        self.aggregator = self.sum.make_aggregator()
        self.contributors = {name: self.sum.make_contributor(name) for name in agreed.contributors}
        converse(
            {
                agreed.receiver: self.receiver,
                agreed.aggregator: self.aggregator,
                **self.contributors,
            }
        )
        if accept:
            request = (
                self.make_audited_request() if agreed.candidates else self.receiver.make_request()
            )
            for role in self.contributors.values():
                role.accept_request(request)

    def toss_coin(self) -> dict[str, bytes]:
        """Toss the coin; return what each passive says then."""
        commitment = self.receiver.get_commitment()
        converse({name: role.toss_coin(commitment) for name, role in self.contributors.items()})
        return {name: role.pack_challenge() for name, role in self.contributors.items()}

    def make_audited_request(self) -> bytes:
        return self.receiver.make_request(self.toss_coin())

    def answers(self, block: int, rows: Mapping[str, Matrix], **noise: Any) -> dict[str, bytes]:
        people = self.sum.get_block_people(block)
        return {
            name: role.answer_block(block, rows[name][people.start : people.stop], **noise)
            for name, role in self.contributors.items()
        }

    def compute_sum(self, rows: Mapping[str, Matrix]) -> NDArray[np.float64]:
        """Compute what the sum of products must be, in steps of fixed point."""
        scale = self.sum.fixed_point.max_level / self.sum.product_agreement.row_bound
        return np.asarray(sum(np.rint(A * scale) for A in rows.values()) @ self.labels)

    def open_sum(self, rows: Mapping[str, Matrix]) -> NDArray[np.float64]:
        """Run the protocol over all blocks; return the sum in steps of fixed point."""
        scale = self.sum.fixed_point.max_level / self.sum.product_agreement.row_bound
        blocks = [
            self.receiver.open_block(
                block, self.aggregator.combine_block(block, self.answers(block, rows))
            )
            for block in range(self.sum.block_count)
        ]
        return (np.concatenate(blocks) * scale).astype(np.float64)
