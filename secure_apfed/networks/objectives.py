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
from secure_apfed.settings.training import (
    ClusteringSettings,
    ContrastiveSettings,
    ModelSettings,
    ReconstructionSettings,
)


def contrastive_loss(
    a_BD: Tensor, p_BD: Tensor, *, temperature: float = 1.0, anchors: str = "both"
) -> Tensor:
    """Return the contrastive loss of two views of the same people: APFed, Eqs. (14) to (16), with
    the cosine similarity of Eq. (15).

    The denominator of anchor i runs over the other rows of its own view and all rows of the other
    view.

    Args:
        a_BD, p_BD: the views, one row a person in the same order; of the active and the passive.
        temperature: tau, which divides the similarities; Eq. (14) prints it as lambda.
        anchors: "active": the rows of `a_BD`, as in Eq. (14); "both": also those of `p_BD`, and
            the mean is over 2B anchors, as in the release.

    Raises ModelError: other shapes or anchors.
    """
    if a_BD.dim() != 2 or a_BD.shape != p_BD.shape:
        raise ModelError(
            "contrasted views are two matrices of one shape, got "
            f"{tuple(a_BD.shape)} and {tuple(p_BD.shape)}"
        )
    if anchors not in ("active", "both"):
        raise ModelError(f"anchors are active or both, got {anchors!r}")
    rows = len(a_BD)
    both_2BD = F.normalize(torch.cat([a_BD, p_BD]), dim=1)
    count = 2 * rows if anchors == "both" else rows
    scores = both_2BD[:count] @ both_2BD.T / temperature
    anchor = torch.arange(count, device=scores.device)
    # An anchor is not compared with itself; its positive is the same person in the other view.
    scores = scores.index_put((anchor, anchor), scores.new_full((), -torch.inf))
    # Row i of one view and row i of the other are B apart in the concatenation.
    positive = (anchor + rows) % (2 * rows)
    return F.cross_entropy(scores, positive)


class Objective(nn.Module):
    """A passive's loss: a module (z, own features) -> scalar, the mean over rows.

    z are the representations that the active sent, in the same row order. Construction raises
    ModelError if the networks do not fit the shapes.

    Attributes:
        row_wise: whether the gradient of a row depends on that row's features alone, with fitted
            parts fixed. Under `secure_sum.noise` a person's privacy cost is then that of one row,
            and this property is tested on the first batch; otherwise it is that of a whole batch.
    """

    row_wise: ClassVar[bool] = False

    def fit(self, features_N: Tensor) -> None:
        """Prepare the objective on the passive's own rows, once before the first step.

        By default nothing is done.

        `features_N`: (N, *shape), of the people whom it shares with the active.
        """


@draws_nothing
class Contrastive(Objective):
    """The objective of APFed-C: the contrastive loss of z and the passive's own encoded rows.

    Eq. (13) has the encoder alone; the linear projection to the size of z is that of the release.
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
            representation: shape of z of one row.
            features: shape of one of the passive's rows.
            model: settings of its network.
            family: makes the encoder; None: the one that `model` names.
        """
        super().__init__()
        self._settings = settings
        family = family or family_for(model, features)
        self.encoder = family.make_encoder(features, model)
        encoded = output_shape(self.encoder, features)
        self.projection = make_projection(math.prod(representation), encoded)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        """Return the contrastive loss between z and the passive's own projections.

        `features_B`: the passive's rows of the batch.
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
    """The objective of APFed-R: mean squared error of the passive's own view, mean over batch and
    features.

    Eq. (12) leaves the norm L_q open and names the L2 norm; its square is what the release takes.
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
        """Build the decoder.

        Args:
            settings: the objective's settings, which have no key beyond its name.
            representation: shape of z of one row.
            features: shape of one of the passive's rows.
            model: settings of its network.
            family: makes the decoder; None: the one that `model` names.

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
        return F.mse_loss(self.decoder(z_BD), features_B)


class Clustering(Objective):
    """An objective that is not from the paper: z should predict a person's cluster in the passive's
    own features.

    APFed allows any loss of a passive, with two examples (Section 4); this loss follows none of its
    equations.

    The loss is the cross-entropy of a linear read-out of z against soft targets p, which is
    KL(p || read-out) of Deep Embedded Clustering but for a constant (Xie, Girshick and Farhadi,
    ICML 2016, Eq. 2), with its target distribution (Eq. 3): p_ij as q_ij^2 / f_j, where f_j is the
    sum of q_ij over all rows. Deviations: centres are those of k-means on the features as they are,
    computed once and not learnt, since targets that moved with z could all become one; and q_ij is
    as exp(-d_ij^2 / s^2), s^2 being the mean of the squared distance d to the nearest centre, where
    DEC's Student kernel (Eq. 1), made for ten embedded dimensions, is nearly flat in many.

    A contribution reveals a person's cluster; the centres do not leave the passive.
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
            representation: shape of z of one row.
            features: shape of one of the passive's rows.
            model, family: unused; every objective takes them.
        """
        super().__init__()
        clusters = settings.clusters
        check_layer_size(math.prod(representation), clusters)
        check_layer_size(math.prod(features), clusters)
        self.readout = nn.Linear(math.prod(representation), clusters)
        self.register_buffer("centres_KF", torch.zeros(clusters, math.prod(features)))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("sizes_K", torch.ones(clusters))

    def fit(self, features_N: Tensor) -> None:
        """Compute the cluster centres. Raises ModelError: fewer different rows than clusters.

        `features_N`: the passive's rows.
        """
        from sklearn.cluster import KMeans

        x_NF = features_N.flatten(1).double().cpu()
        clusters = len(self.centres_KF)
        if (different := len(x_NF.unique(dim=0))) < clusters:
            raise ModelError(
                f"{clusters} clusters need as many different rows of people whom this passive "
                f"shares, got {different}; lower objective.clusters of it under passives"
            )
        # From torch's generator, which the caller seeds, so that runs repeat.
        seed = int(torch.randint(2**31 - 1, ()))
        # Of 10 starts the best is kept.
        kmeans = KMeans(clusters, n_init=10, random_state=seed).fit(x_NF.numpy())
        centres_KF = torch.from_numpy(kmeans.cluster_centers_)
        self.centres_KF = centres_KF
        self.spread = torch.tensor(kmeans.inertia_ / len(x_NF))
        self.spread.clamp_(min=torch.finfo(torch.float32).tiny)
        self.sizes_K = self._assign_clusters(x_NF).sum(0)

    def _assign_clusters(self, features_B: Tensor) -> Tensor:
        """Return soft assignments q (B, K) of rows to the K cluster centres."""
        squared_distance_BK = torch.cdist(features_B.flatten(1), self.centres_KF).square()
        return F.softmax(-squared_distance_BK / self.spread, dim=1)

    def compute_targets(self, features_B: Tensor) -> Tensor:
        """Return the soft targets p (B, K) of these rows over the K clusters; each sums to 1."""
        weighted_BK = self._assign_clusters(features_B).square() / self.sizes_K
        return weighted_BK / weighted_BK.sum(1, keepdim=True)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.cross_entropy(self.readout(z_BD.flatten(1)), self.compute_targets(features_B))


# Of `Objective`. Any: each takes its own settings. A loss of the passive's own is
# `secure_apfed.learning.own_code.OwnObjective`.
OBJECTIVES: Mapping[str, Any] = {
    "reconstruction": Reconstruction,
    "contrastive": Contrastive,
    "clustering": Clustering,
}
