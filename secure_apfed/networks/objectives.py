"""Objectives of passives, given the active's representations and their own features.

A new objective is one class, its settings in `secure_apfed.settings.training`, and one line in
`OBJECTIVES`.

Letters: B batch (N' in the paper), N rows, F features, D numbers of the representation, K clusters.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.base.seeds import draws_nothing
from secure_apfed.errors import ModelError
from secure_apfed.networks.models import (
    NetworkFamily,
    Shape,
    check_layer_size,
    family_for,
    make_projection,
    output_shape,
)
from secure_apfed.settings import (
    ClusteringSettings,
    ContrastiveSettings,
    ModelSettings,
    ReconstructionSettings,
)


def contrastive_loss(
    active_BD: Tensor, passive_BD: Tensor, *, temperature: float = 1.0, anchors: str = "both"
) -> Tensor:
    """Return the contrastive loss between two parties' representations of the same people.

    Source: APFed, Eqs. (14) to (16), with the cosine similarity of Eq. (15). Each anchor (a row of
    one party) should be most similar to the same person's row of the other party, among all other
    rows of both parties.

    Args:
        active_BD, passive_BD: representations by the active and by the passive, D numbers for each
            of B people in the same order.
        temperature: tau, which divides the similarities; Eq. (14) prints it as lambda.
        anchors: "active": the rows of `active_BD` are anchors, as in Eq. (14); "both": the rows of
            `passive_BD`, too, so that the mean is over 2B anchors, as in the authors' release.

    Raises ModelError: the shapes differ, or `anchors` has another value.
    """
    if active_BD.dim() != 2 or active_BD.shape != passive_BD.shape:
        raise ModelError(
            "contrasted views are two matrices of one shape, got "
            f"{tuple(active_BD.shape)} and {tuple(passive_BD.shape)}"
        )
    if anchors not in ("active", "both"):
        raise ModelError(f"anchors are active or both, got {anchors!r}")
    row_count = len(active_BD)
    both_2BD = F.normalize(torch.cat([active_BD, passive_BD]), dim=1)
    anchor_count = 2 * row_count if anchors == "both" else row_count
    scores = both_2BD[:anchor_count] @ both_2BD.T / temperature
    anchors_range = torch.arange(anchor_count, device=scores.device)
    # An anchor is not compared with itself; its positive is the same person in the other view.
    scores = scores.index_put((anchors_range, anchors_range), scores.new_full((), -torch.inf))
    # Row i of one view and row i of the other are B apart in the concatenation.
    positive_columns = (anchors_range + row_count) % (2 * row_count)
    return F.cross_entropy(scores, positive_columns)


class Objective(nn.Module):
    """A passive's loss in APFed: a module from z and own features to a scalar, the mean over rows.

    z are the representations that the active sent, in the order of the passive's rows. The
    constructor raises ModelError if the networks do not fit the shapes.

    Attributes:
        row_wise: whether the gradient of a row depends on this row's features alone, with fitted
            parts held fixed. Under `secure_sum.noise`, noise is then calibrated to one row, and the
            property is tested on the first batch; otherwise noise is calibrated to a whole batch.
    """

    row_wise: ClassVar[bool] = False

    def fit(self, features_N: Tensor) -> None:
        """Prepare the objective on the passive's own rows, once before the first step.

        By default nothing is done. `features_N`: the N rows of the people whom the passive shares
        with the active.
        """


@draws_nothing
class Contrastive(Objective):
    """The objective of APFed-C: the contrastive loss between z and the passive's encoded rows.

    z are the active's representations. Eq. (13) has an encoder alone; the linear projection to the
    size of z is taken from the authors' release.
    """

    row_wise: ClassVar[bool] = False

    def __init__(
        self,
        settings: ContrastiveSettings,
        *,
        representation: Shape,
        features: Shape,
        model: ModelSettings,
        family: NetworkFamily | None = None,
    ) -> None:
        """Build the passive's encoder, and a projection to the size of z.

        Args:
            settings: temperature and anchors.
            representation: shape of one row of z.
            features: shape of one of the passive's rows.
            model: settings of its network.
            family: builds the encoder; None: the one that `model` names.
        """
        super().__init__()
        self._settings = settings
        family = family or family_for(model, features)
        self.encoder = family.make_encoder(features, model)
        encoded = output_shape(self.encoder, features)
        self.projection = make_projection(math.prod(representation), encoded)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        """Return the contrastive loss between z and the passive's encoded rows.

        `z_BD`: the active's representations of B people. `features_B`: the passive's rows of them.
        """
        p_BD = self.projection(self.encoder(features_B))
        return contrastive_loss(
            z_BD.flatten(1),
            p_BD,
            temperature=self._settings.temperature,
            anchors=self._settings.anchors,
        )


@draws_nothing
class Reconstruction(Objective):
    """The objective of APFed-R: the squared error with which z reconstructs the passive's rows.

    z are the active's representations. The error is a mean over batch and features. Eq. (12) leaves
    the norm L_q open and names the L2 norm; the authors' release takes its square.
    """

    row_wise: ClassVar[bool] = True

    def __init__(
        self,
        settings: ReconstructionSettings,
        *,
        representation: Shape,
        features: Shape,
        model: ModelSettings,
        family: NetworkFamily | None = None,
    ) -> None:
        """Build the decoder from z to the passive's rows.

        Args:
            settings: the objective's settings, which have no key beyond its name.
            representation: shape of one row of z.
            features: shape of one of the passive's rows.
            model: settings of its network.
            family: builds the decoder; None: the one that `model` names.

        Raises ModelError: the decoder's output has another shape than the passive's rows.
        """
        super().__init__()
        family = family or family_for(model, features)
        self.decoder = family.make_decoder(representation, features, model)
        decoded = output_shape(self.decoder, representation)
        if decoded != features:
            raise ModelError(
                f"the decoder turns representations of shape {representation} into {decoded}, but "
                f"this passive's rows have shape {features}; end a decoder of your own in "
                f"{math.prod(features)} numbers of this shape; else send a projection "
                "(model.projection), or use views of one size"
            )

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        """Return the mean squared error of the rows that are reconstructed from z."""
        return F.mse_loss(self.decoder(z_BD), features_B)


class Clustering(Objective):
    """An objective of our own: z should predict a person's cluster in the passive's features.

    APFed allows any loss of a passive, with two examples (Section 4); this loss follows none of its
    equations.

    The loss is the cross-entropy between a linear read-out of z and soft targets p. Except for a
    constant, it is KL(p || read-out) of Deep Embedded Clustering (Xie, Girshick and Farhadi, ICML
    2016, Eq. 2). Its target distribution is used, too (Eq. 3): p_ij is proportional to q_ij^2 /
    f_j. Here q_ij is the soft assignment of row i to cluster j, and f_j the sum of q_ij over all
    rows.

    There are two deviations. Centres come from k-means on the unchanged features, once; if targets
    moved with z, they could all become one. And q_ij is proportional to exp(-d_ij^2 / s^2), with d
    the distance to a centre and s^2 the mean squared distance to the nearest centre. DEC's Student
    kernel (Eq. 1), made for ten embedded dimensions, is nearly flat in many dimensions.

    A contribution reveals a person's cluster; the centres do not leave the passive.

    Attributes:
        centres_KF: the centres of the K clusters.
        spread: s^2, the mean squared distance to the nearest centre.
        sizes_K: f_j, the sum of the soft assignments to each cluster.
    """

    row_wise: ClassVar[bool] = True
    centres_KF: Tensor  # noqa: N815
    spread: Tensor
    sizes_K: Tensor  # noqa: N815

    def __init__(
        self,
        settings: ClusteringSettings,
        *,
        representation: Shape,
        features: Shape,
        model: ModelSettings,
        family: NetworkFamily | None = None,
    ) -> None:
        """Build the linear read-out, with cluster centres of zero until `fit`.

        Args:
            settings: the number of clusters.
            representation: shape of one row of z.
            features: shape of one of the passive's rows.
            model, family: unused; every objective takes them.
        """
        super().__init__()
        clusters = settings.clusters
        check_layer_size(math.prod(representation), clusters)
        check_layer_size(math.prod(features), clusters)
        self.readout = nn.Linear(math.prod(representation), clusters)
        self.register_buffer("centres_KF", torch.zeros(clusters, math.prod(features)))
        self.register_buffer("spread", torch.ones(()))  # mean squared distance to the centres
        self.register_buffer("sizes_K", torch.ones(clusters))

    def fit(self, features_N: Tensor) -> None:
        """Compute centres, spread and sizes of the clusters by k-means.

        `features_N`: the passive's N rows. Raises ModelError: there are fewer different rows than
        clusters.
        """
        from sklearn.cluster import KMeans

        x_NF = features_N.flatten(1).double().cpu()
        clusters = len(self.centres_KF)
        if (distinct_rows := len(x_NF.unique(dim=0))) < clusters:
            raise ModelError(
                f"{clusters} clusters need as many different rows of people whom this passive "
                f"shares, got {distinct_rows}; lower objective.clusters of it under passives"
            )
        # The caller seeds torch's generator, so that runs repeat.
        seed = int(torch.randint(2**31 - 1, ()))
        # `n_init`: k-means takes the best of 10 starts.
        kmeans = KMeans(clusters, n_init=10, random_state=seed).fit(x_NF.numpy())
        centres_KF = torch.from_numpy(kmeans.cluster_centers_)
        self.centres_KF = centres_KF
        self.spread = torch.tensor(kmeans.inertia_ / len(x_NF))
        self.spread.clamp_(min=torch.finfo(torch.float32).tiny)
        self.sizes_K = self._assign_clusters(x_NF).sum(0)

    def _assign_clusters(self, features_B: Tensor) -> Tensor:
        """Return soft assignments of B rows to the K cluster centres, (B, K); a row sums to 1."""
        squared_distance_BK = torch.cdist(features_B.flatten(1), self.centres_KF).square()
        return F.softmax(-squared_distance_BK / self.spread, dim=1)

    def compute_targets(self, features_B: Tensor) -> Tensor:
        """Return the soft targets of B rows over the K clusters, (B, K); a row sums to 1.

        They are more certain than the assignments, and large clusters count less.
        """
        weighted_BK = self._assign_clusters(features_B).square() / self.sizes_K
        return weighted_BK / weighted_BK.sum(1, keepdim=True)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        """Return the cross-entropy between the read-out of z and the rows' soft targets."""
        return F.cross_entropy(self.readout(z_BD.flatten(1)), self.compute_targets(features_B))


# Subclasses of `Objective`, typed as Any since each takes settings of its own. A passive's own loss
# is `secure_apfed.learning.own_code.OwnObjective`.
OBJECTIVES: Mapping[str, Any] = {
    "reconstruction": Reconstruction,
    "contrastive": Contrastive,
    "clustering": Clustering,
}
