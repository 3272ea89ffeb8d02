"""A party's votes: its labeller gives them, and is tested first where an epsilon relies on it.

Run by: a passive that votes, the active that states what votes cost, and the active whose joint
model labels rows. Letters: U rows, n labelled ones, F features, K classes.
"""

import numpy as np

from secure_apfed.labellers.guarantee import VoteMechanism, compute_table_guarantee
from secure_apfed.labellers.kinds import Floats, Integers, Labeller, LinearLabeller, harden_votes
from secure_apfed.labellers.measured import check_votes, require_short


class Voter:
    """The object by which a party makes all its votes: its labeller, tested if need be.

    A vote is one row of class scores. If an epsilon relies on the labeller's declared properties,
    these are tested on the rows to label before votes are returned.

    Attributes:
        labeller: the rule by which the party votes.
    """

    def __init__(
        self, labeller: Labeller, *, owner: str, is_tested: bool, has_hard_votes: bool
    ) -> None:
        """Take the labeller.

        Args:
            labeller: the rule by which the party votes.
            owner: name of the party, for errors.
            is_tested: whether an epsilon relies on the labeller's declared properties.
            has_hard_votes: whether each vote names one class; otherwise votes are shares of the
                classes.
        """
        self.labeller = labeller
        self._owner = owner
        self._is_tested = is_tested
        self._has_hard_votes = has_hard_votes

    def describe_guarantee(self, vote_mechanism: VoteMechanism | None, *, delta: float) -> str:
        """Return in words what noise on the votes guarantees for a passive's table.

        `vote_mechanism`: the mechanism by which votes are revealed; None: they have no noise.
        """
        if vote_mechanism is None:
            return "no guarantee: votes are opened without noise (epsilon is infinite)"
        return compute_table_guarantee(
            self.labeller, vote_mechanism, delta=delta
        ).describe_guarantee()

    def cast_votes(
        self,
        features_UF: Floats,
        labelled_n: Integers,
        labels_n: Integers,
        classes: int,
        *,
        request: bytes,
    ) -> Floats:
        """Return the votes on all rows, (U, K), each without the row's own label.

        Args:
            features_UF: F features of U rows.
            labelled_n, labels_n: indices and labels of the n labelled rows.
            classes: K, number of classes.
            request: the bytes of the request for votes, from which noise on the labeller's weights
                is derived.

        Raises PromiseError: the labeller breaks a declared property.
        """
        arguments = features_UF, labelled_n, labels_n, classes
        if self._is_tested:
            check_votes(self.labeller, *arguments, owner=self._owner)
        votes_UK = self.labeller.for_request(request).label_without_own(*arguments)
        if self._is_tested:
            # `check_votes` has tested a sample of the rows only.
            require_short(self.labeller, votes_UK, owner=self._owner)
        return harden_votes(votes_UK) if self._has_hard_votes else votes_UK

    def label_rows(
        self, features_UF: Floats, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes in which a labelled row uses its own label, too, (U, K).

        `features_UF`: F features of U rows. `labelled_n`, `labels_n`: indices and labels of the n
        labelled rows. `classes`: K. Raises PromiseError: the labeller breaks a declared property.
        """
        arguments = features_UF, labelled_n, labels_n, classes
        if self._is_tested:
            check_votes(self.labeller, *arguments, owner=self._owner, is_without_own_label=False)
        votes_UK = self.labeller.label_rows(*arguments)
        return harden_votes(votes_UK) if self._has_hard_votes else votes_UK

    def compute_matrix(self, features_UF: Floats, labelled_n: Integers, classes: int) -> Floats:
        """Return the matrix of a linear labeller, (U, n): votes are its product with the labels.

        `features_UF`: F features of U rows. `labelled_n`: indices of the n labelled rows.
        `classes`: number of classes. Raises PromiseError: the labeller breaks a declared property.
        """
        labeller = self.labeller
        assert isinstance(labeller, LinearLabeller)
        if self._is_tested:
            # The check needs some labels, and the party does not know the true ones.
            labels_n = np.arange(len(labelled_n)) % classes
            check_votes(labeller, features_UF, labelled_n, labels_n, classes, owner=self._owner)
        matrix_Un = labeller.compute_matrix_without_own(features_UF, labelled_n)
        if self._is_tested:
            require_short(labeller, matrix_Un, owner=self._owner)
        return matrix_Un
