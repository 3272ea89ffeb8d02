"""Views of adversaries: what one adversary saw and knows, the only input of an attack.

Run by: the experimenter, who cuts the recording of a run into views (`apfed_attacks.recorded`), or
code that is not ours, from its own messages. A view holds what the coalition itself sent or
received and its members' own features, so no attack can touch a victim's state by accident. The
functions below read one, row by row.

Letters: A aligned rows, N observed ones, U those asked about, B batch, D numbers of a
representation, F features, K classes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.lazy_names import make_former_name
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack_tensors
from secure_apfed.settings import describe_unknown_name

if TYPE_CHECKING:
    from apfed_protocols.sums.frames import Frame
    from secure_apfed.settings import ObjectiveSettings, TrainSettings

__all__ = [
    "AdversaryView",
    "AgreedTerms",
    "AttackError",
    "Behaviour",
    "Candidates",
    "Exchange",
    "GuessError",
    "Knowledge",
    "KnownRows",
    "Observed",
    "Opened",
    "PlayedAttack",
    "Request",
    "Role",
    "Sent",
    "Side",
    "VoteRequest",
    "collect_gradients",
    "collect_opened_sums",
    "collect_pseudo_labels",
    "collect_releases",
    "collect_representations",
    "collect_votes",
    "combine_epochs",
    "draw_weights_anew",
    "find_vote_request",
    "iter_batches",
    "iter_contributions",
    "iter_requests",
    "list_epochs_by_request",
    "list_opened_epochs",
    "list_released_positions",
    "list_seen_positions",
]

Role: TypeAlias = Literal["passive", "active", "aggregator", "outsider"]
Behaviour: TypeAlias = Literal["curious", "malicious"]
Side: TypeAlias = Literal["active", "passives"]
Sent: TypeAlias = Literal["shown", "encrypted"]
Opened: TypeAlias = Literal[
    "gradients",
    "representations",
    "projections",
    "pseudo-labels",
    "weights",
    "sum of votes",
    "singular vectors",
]
_CPU = torch.device("cpu")
# Types and numbers of axes of released rows: vectors, or convolution maps of 1 or 2 dimensions.
_LAYOUTS = tuple(
    (dtype, dimensions) for dtype in (torch.float32, torch.float64) for dimensions in (2, 4, 3)
)
_NO_ROWS = torch.empty(0, dtype=torch.int64)
_ROWS = TensorSpec(torch.int64, (None,))
# The tensors that a request about rows may have.
_REQUEST_FORMS = ({"rows": _ROWS}, {"rows": _ROWS, "z": TensorSpec(torch.float64, (None, None))})


def _move_floats(values: Tensor, device: torch.device) -> Tensor:
    """Move floating-point values to the device; positions, labels and masks stay on the CPU."""
    return values.to(device) if values.is_floating_point() else values


def _move_all_floats(tensors: Mapping[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    """Move all floating-point tensors of a mapping to the device; others stay."""
    return {name: _move_floats(values, device) for name, values in tensors.items()}


class AttackError(ApfedError):
    """An attack was set up or scored in a way that would make its metrics untrue."""


class GuessError(AttackError):
    """The guess of an attack cannot be scored: its code is at fault, and not what leaked."""


@dataclass(frozen=True, eq=False)
class KnownRows:
    """The labels (n,) or a victim's features (n, F) of n rows that the adversary knows beforehand.

    `positions` (n,) are int64 alignment positions, each once. (An alignment position is the same
    person at all parties.)
    """

    positions: Tensor = _NO_ROWS
    values: Tensor = _NO_ROWS

    def __len__(self) -> int:
        """Return the number of known rows."""
        return len(self.positions)


@dataclass(frozen=True, eq=False, repr=False)
class Candidates:
    """Rows of which the adversary asks whether they trained the model, in any order.

    Attributes:
        features, labels: features (n, ...) and labels (n,) of the rows.
        train: the active's training settings, as far as the adversary knows.
    """

    features: Tensor
    labels: Tensor
    train: "TrainSettings"

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.labels)


@dataclass(frozen=True, eq=False, kw_only=True)
class Knowledge:
    """The declared knowledge of the adversary beyond what it saw; None: it does not know it.

    Attributes:
        classes: K, number of classes.
        victim: the party whose labels or features are attacked.
        labels: rows of which it knows the label.
        priors: the share of each class among the training rows.
        shadow: rows of which it knows the victim's features.
        architecture: makes the victim's networks, rows -> scores (N, K), with fresh weights.
        encoder: the victim's network itself, rows of features -> representations.
        candidates: people of whom it wants to know whether they trained the model.
        alike: trains on own rows (n, ...) and labels (n,) as a party of the run would without
            others, and returns a function rows -> scores (N, K).
        public: party -> (P, ...) features of P people outside the training, of whom the adversary
            knows all features; row k is the same person in each.
        order: step -> (B,) positions of the rows that were contributed, which any passive could
            reveal to the aggregator.
    """

    classes: int
    victim: str | None = None
    labels: KnownRows = field(default_factory=KnownRows)
    priors: tuple[float, ...] | None = None
    shadow: KnownRows = field(default_factory=KnownRows)
    architecture: Callable[[], nn.Module] | None = field(default=None, repr=False)
    encoder: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    candidates: Candidates | None = None
    alike: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]] | None = field(
        default=None, repr=False
    )
    public: Mapping[str, Tensor] = field(default_factory=dict)
    order: Mapping[int, Tensor] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> Self:
        """Return this knowledge with its features on the device."""
        candidates = self.candidates
        if candidates is not None:
            candidates = replace(candidates, features=_move_floats(candidates.features, device))
        return replace(
            self,
            shadow=replace(self.shadow, values=_move_floats(self.shadow.values, device)),
            candidates=candidates,
            public=_move_all_floats(self.public, device),
        )


@dataclass(frozen=True, kw_only=True)
class AgreedTerms:
    """What the contract says about one passive; every party knows it.

    `weight`: lambda_p of its objective. `clip`: the L2 bound of a row of its contribution; None: it
    does not clip.
    """

    objective: "ObjectiveSettings"
    weight: float
    clip: float | None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of the parties while they train, as far as an attack must know it.

    Whatever is not stated does not happen. For split learning, say, it is
    `Exchange(name="split learning", released_by="passives", returns_gradients=True)`.

    Attributes:
        name: name of the method or protocol, for results and reasons.
        released_by: who releases representations of its own features, row by row; the active
            sends the same to every passive.
        returns_gradients: whether each passive gets, row by row, the gradient of the task loss on
            what it released or added to a sum.
        opens: what the active decrypts of all passives together, and of none alone: a sum of
            "gradients" of their objectives or of "representations"; an average of
            "pseudo-labels", to the active's of which each passive returns its own, or of "weights";
            "projections" of all people; the "sum of votes"; the left "singular vectors" of all
            parties' tables. `AdversaryView.revealed` has it.
        labels: how the active's labels go to the passives with a request for votes.
        aligned: whether a position is the same person at all parties that have a row there. False
            where parties have different people, or the active trains alone.

    Raises:
        ValueError: an unknown word.
    """

    name: str
    released_by: Side | None = None
    returns_gradients: bool = False
    opens: Opened | None = None
    labels: Sent | None = None
    aligned: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError if `released_by`, `opens` or `labels` has an unknown word."""
        for name, kind in (("released_by", Side), ("opens", Opened), ("labels", Sent)):
            word = getattr(self, name)
            if word not in (None, *get_args(kind)):
                raise ValueError(f"Exchange: {name}: {describe_unknown_name(word, get_args(kind))}")

    def __str__(self) -> str:
        """Return the name of the method or protocol."""
        return self.name


@dataclass(frozen=True, eq=False)
class PlayedAttack:
    """What a malicious adversary did in a live run.

    Attributes:
        attack: name of the attack.
        notes: what the adversary noted for itself during the run, by name.
    """

    attack: str
    notes: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class AdversaryView:
    """The view of an adversary: everything that an attack may use.

    Numbers (features, representations, sums, networks) lie on `device`, and so does what the
    functions here read. Positions, labels and masks lie on the CPU, and may index them.

    Attributes:
        parties: the adversary, which has the `role`, and after it those that collude with it.
        behaviour: "curious" follows the protocol; "malicious" chose what it sent.
        envelopes: epoch -> what the coalition sent and received, in that order.
        revealed: step -> (B, D) what the active decoded (`Exchange.opens`), its rows in the order
                of that step's representations or request; of gradients the sum of lambda_p B
                dL_p/dz.
                No message holds it: where sums are encrypted only the active's own record does.
        terms_by_passive: passive -> what it does by contract; empty where it contributes to no sum.
        deviation: what the adversary did in place of its part; None: it kept to the protocol.
        attributed_positions: (A,) for each position the one that its releases are attributed to, in
            a decoy (`apfed_attacks.run`); None: this is no decoy.
        features: member -> (A, ...) its own features; row k is alignment position k, NaN where
            it does not hold that person. Read them by `apfed_attacks.columns.select_own_columns`.
        labels: member that trains on labels -> (A,) its own, int64, negative where a row has none.
        presence: party -> (A,) bool: the people of whom it has a row, as far as the coalition
            knows. A party that is not listed has a row of all, as every party has without pairwise
            alignment.
        networks: member -> its own network, as training left it, where it sends what that makes of
            its features, or adds it to a sum; an attack trains copies. Where parties average
            weights, their average, rows -> scores (N, K).
        answers: the finished model as an outsider may query it: rows of the active's features
            -> log-probabilities of the classes, (n, K).
        iterations: maximum number of iterations of any optimiser that the attack runs.
    """

    role: Role
    parties: tuple[str, ...]
    behaviour: Behaviour
    description: Exchange
    envelopes: Mapping[int, tuple[Envelope, ...]] = field(repr=False)
    revealed: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    terms_by_passive: Mapping[str, AgreedTerms] = field(default_factory=dict)
    deviation: PlayedAttack | None = None
    attributed_positions: Tensor | None = field(default=None, repr=False)
    features: Mapping[str, Tensor] = field(repr=False)
    labels: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    presence: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    networks: Mapping[str, nn.Module] = field(default_factory=dict, repr=False)
    answers: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    knowledge: Knowledge
    iterations: int = 300
    device: torch.device = _CPU

    held = make_former_name("held", "presence")
    opened = make_former_name("opened", "revealed")
    agreed = make_former_name("agreed", "terms_by_passive")
    played = make_former_name("played", "deviation")

    def __post_init__(self) -> None:
        """Move features, revealed sums, networks and knowledge to the device."""
        if self.is_decoy:  # made from a view that has moved them
            return
        device = self.device
        deviation = self.deviation
        if deviation is not None:
            deviation = replace(deviation, notes=_move_all_floats(deviation.notes, device))
        moved = {
            "features": _move_all_floats(self.features, device),
            "revealed": _move_all_floats(self.revealed, device),
            "networks": {name: network.to(device) for name, network in self.networks.items()},
            "knowledge": self.knowledge.to(device),
            "deviation": deviation,
        }
        for name, value in moved.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def name(self) -> str:
        """Return the names of all members."""
        return " + ".join(self.parties)

    @property
    def is_decoy(self) -> bool:
        """Whether releases are attributed to other rows than their own, to make a baseline.

        Baselines that read no release are the same then, and need no second fit.
        """
        return self.attributed_positions is not None

    def attribute_positions(self, positions: Tensor) -> Tensor:
        """Return the positions (N,) of the rows that releases of these positions are attributed to.

        They are the same, except in a decoy (`is_decoy`).
        """
        return (
            positions if self.attributed_positions is None else self.attributed_positions[positions]
        )

    def has_rows(self, party: str | None, positions: Tensor) -> Tensor:
        """Return a mask (N,) of the `positions` of which the party has a row.

        Without pairwise alignment every party has a row of all. `party`: name; None: a row of all.
        """
        # A mask over all A alignment positions; None: the party has a row of each.
        present_A = None if party is None else self.presence.get(party)
        if present_A is None:
            return torch.ones(len(positions), dtype=torch.bool)
        return present_A[positions]

    def iter_messages(self, kind: Kind, epoch: int | None = None) -> Iterator[Envelope]:
        """Yield the messages of a kind that the coalition saw, of one epoch or of all, in order."""
        for number in sorted(self.envelopes) if epoch is None else [epoch]:
            yield from (sent for sent in self.envelopes.get(number, ()) if sent.kind is kind)

    def epochs_with(self, kind: Kind) -> tuple[int, ...]:
        """Return the epochs with a message of this kind, ascending."""
        return tuple(
            epoch for epoch in sorted(self.envelopes) if any(self.iter_messages(kind, epoch))
        )

    @property
    def epochs(self) -> tuple[int, ...]:
        """Return the epochs in which representations were released, ascending."""
        return self.epochs_with(Kind.REPRESENTATIONS)

    def list_senders(self, epoch: int) -> frozenset[str]:
        """Return the names of those who released representations in this epoch, as far as the
        coalition saw.
        """
        return frozenset(sent.sender for sent in self.iter_messages(Kind.REPRESENTATIONS, epoch))


@dataclass(frozen=True, eq=False)
class Observed:
    """The values of N rows that the adversary observed, (N, D); maps of convolutions are flattened.

    They were released, returned as gradients, or decrypted. `positions` (N,) are int64 alignment
    positions, ascending, each once.
    """

    positions: Tensor
    z: Tensor

    def select_positions(self, positions: Tensor) -> Tensor:
        """Return the values of these positions, (n, D); all must have been observed."""
        rows = torch.searchsorted(self.positions, positions)  # `self.positions` ascends
        return self.z[rows]


@dataclass(frozen=True, eq=False)
class Request:
    """A request of the active to a passive about B rows.

    Attributes:
        receiver, step: name of the passive, and number of the step.
        rows: alignment positions of the rows, (B,).
        z: the pseudo-labels that the request carries, (B, K); None: it carries none.
    """

    receiver: str
    step: int
    rows: Tensor
    z: Tensor | None


@dataclass(frozen=True, eq=False)
class VoteRequest:
    """A request for votes.

    Attributes:
        rows: positions (U,) of all rows, as the sender wrote them; a reader of the votes has to
            apply `AdversaryView.attribute_positions` to them.
        labelled_rows: positions (n,) of those with a label.
        labels: labels (n,) of the labelled rows, if they were sent unencrypted; else None.
    """

    rows: Tensor
    labelled_rows: Tensor
    labels: Tensor | None


def draw_weights_anew(networks: nn.Module) -> None:
    """Draw all weights of networks again, in place, by each module's `reset_parameters`.

    Raises:
        AttackError: a module has parameters and no such method.
    """
    for module in networks.modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise AttackError(
                f"the weights of a {type(module).__name__} cannot be drawn anew; give it a "
                "reset_parameters method"
            )
        reset()


def collect_representations(view: AdversaryView, epoch: int, sender: str | None = None) -> Observed:
    """Return the latest release of each position in `epoch`, by `sender` or, if None, by all.

    Representations of several senders (TVFL's passives) are concatenated in the order of their
    names, for the positions that all of them released.

    Raises:
        AttackError: the view holds no release of the epoch.
        RemoteProtocolError: a payload does not hold rows and representations.
    """
    releases = [
        (message.sender, rows, h) for message, rows, h in _iter_releases(view, epoch, sender)
    ]
    return _stack_latest(view, "representations", epoch, releases)


def collect_gradients(view: AdversaryView, epoch: int) -> Observed:
    """Return the gradients of the task loss that passives of the coalition received in `epoch`.

    The rows of a gradient are those of the representations that it is for. If the representations
    went into a sum, they are those of the request for them.
    """
    gradients = []
    for message, rows_B in _match_gradients(view, epoch):
        gradient_BD = _unpack_tensors(view, message, "gradient")["gradient"].flatten(1)
        gradients.append((message.receiver, rows_B, gradient_BD))
    return _stack_latest(view, "gradients", epoch, gradients)


def _match_gradients(view: AdversaryView, epoch: int) -> Iterator[tuple[Envelope, Tensor]]:
    """Yield each gradient of an epoch with the rows (B,) of the request or release that it is for.

    Gradients without one are left out.
    """
    returned = list(view.iter_messages(Kind.GRADIENTS, epoch))
    if not returned:
        return
    rows_by_passive_and_step = {
        (request.receiver, request.step): request.rows for request in iter_requests(view, epoch)
    }
    for sent, rows_B, _ in _iter_releases(view, epoch):
        rows_by_passive_and_step[sent.sender, sent.step] = rows_B
    for message in returned:
        answered_B = rows_by_passive_and_step.get((message.receiver, message.step))
        if answered_B is not None:
            yield message, answered_B


def iter_batches(view: AdversaryView, epoch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (step, rows (B,), representations (B, D)) of an epoch, each step once.

    A sender sends the same to several receivers in a step.
    """
    steps_seen = set()
    for message, rows_B, h_BD in _iter_releases(view, epoch):
        if message.step not in steps_seen:
            steps_seen.add(message.step)
            yield message.step, rows_B, h_BD


def iter_contributions(view: AdversaryView, sender: str) -> "Iterator[tuple[Tensor, Frame]]":
    """Yield the rows (B,) and the message (frame) of each contribution of `sender` to a sum.

    All recorded epochs are read. The rows are known from `Knowledge.order`. These messages are left
    out: those of steps that it does not list, those that are no frame of a sum, and those with
    another number of rows.
    """
    from apfed_protocols.sums.frames import Frame  # most attacks read no sum

    for message in view.iter_messages(Kind.CONTRIBUTION):
        rows_B = view.knowledge.order.get(message.step)
        if message.sender != sender or rows_B is None:
            continue
        try:
            frame = Frame.parse(message.payload, sender=sender)
        except RemoteProtocolError:
            continue
        if frame.rows == len(rows_B):
            yield view.attribute_positions(rows_B), frame


_MIN_EPOCHS_OF_MEAN = 3  # of two epochs, the first and the last are all there is


def combine_epochs(
    read: Callable[[AdversaryView, int], Observed], view: AdversaryView, epochs: Iterable[int]
) -> dict[str, Observed]:
    """Return the "first" and the "last" value of each position over these ascending epochs.

    A row may be missing from an epoch (a batch with too few aligned rows is not sent). The result
    has all rows of all epochs, so that an attack and its decoy are about the same ones. With three
    epochs or more there is also the "mean", in which noise averages out that is new in each epoch.
    A transcript usually stores only the first and the last epoch; the network learnt between them,
    so that their mean would be of neither.

    `read`: function that returns the values observed in one epoch, of M of the N positions.
    """
    observed_by_epoch = [read(view, epoch) for epoch in epochs]
    if not observed_by_epoch:
        raise AttackError("no representation was recorded")
    positions = torch.cat([observed.positions for observed in observed_by_epoch]).unique()
    # Pairs of the rows (M,) among all N positions that one epoch observed, and their values (M, D).
    rows_and_values = [
        (torch.searchsorted(positions, observed.positions), observed.z)
        for observed in observed_by_epoch
    ]
    _, any_values_MD = rows_and_values[0]
    last_ND = any_values_MD.new_zeros(len(positions), any_values_MD.shape[1])
    first_ND = last_ND.clone()
    total_ND = torch.zeros_like(last_ND, dtype=torch.float64)
    count_N1 = torch.zeros_like(total_ND[:, :1])
    for rows_M, values_MD in rows_and_values:
        last_ND[rows_M] = values_MD  # later epochs overwrite earlier ones
        total_ND[rows_M] += values_MD.double()
        count_N1[rows_M] += 1
    for rows_M, values_MD in reversed(rows_and_values):
        first_ND[rows_M] = values_MD  # earlier epochs overwrite later ones
    z_by_name = {"first": first_ND, "last": last_ND}
    if len(observed_by_epoch) >= _MIN_EPOCHS_OF_MEAN:
        z_by_name["mean"] = total_ND / count_N1
    return {name: Observed(positions, z_ND) for name, z_ND in z_by_name.items()}


def collect_releases(view: AdversaryView, sender: str | None = None) -> dict[str, Observed]:
    """Return the last representation of each position as "h".

    With three epochs or more, "mean h" is their mean over the epochs.
    """
    combined = combine_epochs(partial(collect_representations, sender=sender), view, view.epochs)
    names = {"h": "last", "mean h": "mean"}
    return {name: combined[source] for name, source in names.items() if source in combined}


def iter_requests(view: AdversaryView, epoch: int) -> Iterator[Request]:
    """Yield the requests of an epoch that are about rows; other messages of this kind are left out.

    Pseudo-labels of another number of rows than the request's are ignored.
    """
    for message in view.iter_messages(Kind.REQUEST, epoch):
        for expected in _REQUEST_FORMS:
            try:
                tensors, _ = unpack_tensors(message.payload, expected, sender=message.sender)
            except RemoteProtocolError:
                continue
            rows_B = view.attribute_positions(tensors["rows"])
            z_BK = tensors.get("z")
            if z_BK is not None:
                z_BK = z_BK.to(view.device) if len(z_BK) == len(rows_B) else None
            yield Request(message.receiver, message.step, rows_B, z_BK)
            break


def list_released_positions(view: AdversaryView) -> Tensor:
    """Return the positions (N,) of which the view holds any representation, ascending."""
    return _join_positions(rows_B for _, rows_B, _ in _iter_releases(view))


def list_seen_positions(view: AdversaryView) -> tuple[Tensor, Tensor]:
    """Return two sets of positions, ascending: those that were released or requested, and those
    with a reply.

    A reply is a gradient, pseudo-labels, or a sum that was revealed.
    """
    requested = [request for epoch in view.envelopes for request in iter_requests(view, epoch)]
    answered_rows = [
        item.rows for item in requested if item.z is not None or item.step in view.revealed
    ]
    answered_rows += [
        rows_B for epoch in view.envelopes for _, rows_B in _match_gradients(view, epoch)
    ]
    answered_rows += [view.attribute_positions(rows_B) for rows_B in view.knowledge.order.values()]
    observed_rows = [list_released_positions(view), *(request.rows for request in requested)]
    vote_request = find_vote_request(view)
    if vote_request is not None:
        observed_rows.append(vote_request.rows)
    return _join_positions(observed_rows), _join_positions(answered_rows)


def collect_pseudo_labels(view: AdversaryView, epoch: int) -> Observed:
    """Return the pseudo-labels that the active sent in `epoch`, the last ones of each position."""
    sent = [
        ("", request.rows, request.z)
        for request in iter_requests(view, epoch)
        if request.z is not None
    ]
    return _stack_latest(view, "pseudo-labels", epoch, sent)


def list_epochs_by_request(
    view: AdversaryView, condition: Callable[[Request], bool]
) -> tuple[int, ...]:
    """Return the epochs, ascending, with a request that meets the condition."""
    return tuple(
        epoch for epoch in sorted(view.envelopes) if any(map(condition, iter_requests(view, epoch)))
    )


def list_opened_epochs(view: AdversaryView) -> tuple[int, ...]:
    """Return the epochs, ascending, of which the view has decrypted values for each row."""
    if view.description.opens == "projections":
        return (0,) if view.revealed else ()
    return list_epochs_by_request(view, lambda request: request.step in view.revealed)


def collect_opened_sums(view: AdversaryView, epoch: int) -> Observed:
    """Return what the active decrypted for each position that it requested in `epoch`."""
    if view.description.opens == "projections":  # one sum over all people, without positions
        opened_ND = view.revealed[min(view.revealed)]
        all_positions = view.attribute_positions(torch.arange(len(opened_ND)))
        return _stack_latest(view, "sums", epoch, [("", all_positions, opened_ND)])
    rows = {
        request.step: request.rows
        for request in iter_requests(view, epoch)
        if request.step in view.revealed
    }
    sums = [("", rows_B, view.revealed[step]) for step, rows_B in rows.items()]
    return _stack_latest(view, "sums", epoch, sums)


def find_vote_request(view: AdversaryView) -> VoteRequest | None:
    """Return the first request for votes in the view; None: there is none."""
    is_shown = view.description.labels == "shown"
    message = next(view.iter_messages(Kind.LABELS if is_shown else Kind.ENCRYPTED_LABELS), None)
    if message is None:
        return None
    label_form = {"labels": _ROWS} if is_shown else {}
    expected = {"rows": _ROWS, "labelled": _ROWS, **label_form}
    payload = message.payload if is_shown else _parse_clear_ballot(message)
    tensors, _ = unpack_tensors(payload, expected, sender=message.sender)
    return VoteRequest(tensors["rows"], tensors["rows"][tensors["labelled"]], tensors.get("labels"))


def _parse_clear_ballot(message: Envelope) -> bytes:
    """Return the unencrypted part of a request with encrypted labels, packed.

    It holds the rows, and which of them are labelled.

    Raises RemoteProtocolError: the request has no such part.
    """
    try:
        ballot, _ = msgpack.unpackb(message.payload, max_bin_len=len(message.payload))
    except (ValueError, TypeError, msgpack.UnpackException):
        ballot = None
    if type(ballot) is not bytes:
        raise RemoteProtocolError(f"{message.sender} sent no ballot with encrypted labels")
    return ballot


def collect_votes(view: AdversaryView) -> dict[str, Observed]:
    """Return the votes that the active read; empty if none were requested.

    A vote is a class score of each of K classes, (U, K). The result is their "sum" or, by passive,
    its randomised votes as unit vectors.
    """
    request = find_vote_request(view)
    if request is None:
        return {}
    positions, order = view.attribute_positions(request.rows).sort()
    if view.description.opens == "sum of votes":
        opened = view.revealed
        return {"sum": Observed(positions, opened[min(opened)][order])} if opened else {}
    answers_by_passive: dict[str, Observed] = {}
    for message in view.iter_messages(Kind.VOTES):
        # Each vote is a class index of each of the U requested rows.
        expected = {"votes": TensorSpec(torch.int16, (len(positions),))}
        tensors, _ = unpack_tensors(message.payload, expected, sender=message.sender)
        answer_UK = nn.functional.one_hot(tensors["votes"].long(), view.knowledge.classes)
        answer = Observed(positions, answer_UK.double().to(view.device)[order])
        answers_by_passive.setdefault(message.sender, answer)
    return answers_by_passive


def _iter_releases(
    view: AdversaryView, epoch: int | None = None, sender: str | None = None
) -> Iterator[tuple[Envelope, Tensor, Tensor]]:
    """Yield the messages with representations, with their rows (B,) and values (B, D).

    `epoch`: epoch of the messages; None: all epochs. `sender`: name of the sender; None: all
    senders.
    """
    for message in view.iter_messages(Kind.REPRESENTATIONS, epoch):
        if sender in (None, message.sender):
            tensors = _unpack_tensors(view, message, "z", rows=_ROWS)
            yield message, view.attribute_positions(tensors["rows"]), tensors["z"].flatten(1)


def _unpack_tensors(
    view: AdversaryView, message: Envelope, name: str, **others: TensorSpec
) -> dict[str, Tensor]:
    """Return the tensors of a message: `name`, on the view's device, and the `others`.

    `name` holds vectors or convolution maps of float32 or float64.

    Raises RemoteProtocolError: the payload has other tensors. Raises AttackError: numbers are not
    finite.
    """
    refusals = []
    for dtype, dimensions in _LAYOUTS:
        expected = {name: TensorSpec(dtype, (None,) * dimensions), **others}
        try:
            tensors, _ = unpack_tensors(message.payload, expected, sender=message.sender)
        except RemoteProtocolError as refusal:
            refusals.append(refusal)
            continue
        if not bool(torch.isfinite(tensors[name]).all()):
            raise AttackError(
                f"{message.sender} sent {message.kind} in step {message.step} that are not finite; "
                "there is nothing to fit"
            )
        return {**tensors, name: tensors[name].to(view.device)}
    raise refusals[0]


def _join_positions(rows: Iterable[Tensor]) -> Tensor:
    """Return all positions of these rows, ascending, each once."""
    positions: Tensor = torch.cat([_NO_ROWS, *rows]).unique()
    return positions


def _stack_latest(
    view: AdversaryView, subject: str, epoch: int, batches: Iterable[tuple[str, Tensor, Tensor]]
) -> Observed:
    """Return the last vector of each row.

    Vectors of several parties are concatenated in the order of their names, for the rows that all
    of them have.

    Args:
        subject, epoch: what the vectors are, and of which epoch, for the error.
        batches: (party, rows (B,), vectors (B, D)), in the order of time.

    Raises:
        AttackError: there are no batches.
    """
    batches_by_party = defaultdict[str, list[tuple[Tensor, Tensor]]](list)
    for party, rows_B, values_BD in batches:
        batches_by_party[party].append((rows_B, values_BD))
    if not batches_by_party:
        raise AttackError(f"{view.name} holds no {subject} of epoch {epoch}")
    blocks = []
    for _, batches_of_party in sorted(batches_by_party.items()):
        rows, z_ND = (torch.cat(parts) for parts in zip(*batches_of_party, strict=True))
        # np.unique returns the first occurrence, so the order is reversed to find the last.
        positions, index = np.unique(rows.flip(0).numpy(), return_index=True)
        latest_ND = z_ND.flip(0)[torch.from_numpy(index)]
        blocks.append(Observed(torch.from_numpy(positions), latest_ND))
    common = torch.from_numpy(reduce(np.intersect1d, [block.positions.numpy() for block in blocks]))
    return Observed(common, torch.cat([block.select_positions(common) for block in blocks], dim=1))
