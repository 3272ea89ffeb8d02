"""Differential privacy in a user's own training loop: one object that clips, charges (records the
privacy cost), adds noise, and reports.

Run by: the sender. Protects from: a receiver of the output that knows everything but the noise key;
and from noise without an account: each object creates a key, counts its steps, charges before it
adds noise, and stops at its budget. Clip, noise, account and guarantee are those of `guard`,
`contributions`, `randomised_response` and `ledger`.

One object serves one table in one process. Releases of the same people by two objects, or by a
restarted loop, add up, and neither object knows of the other, unless it loads the other's state.
Threads take turns; pickles and forked processes are refused. `PrivateRelease` is a layer: its
copies share its account and its key.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.checks import is_whole
from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from apfed_protocols.gradients import require_numbers
from apfed_protocols.labels import order_by_position
from apfed_protocols.randomness import ForkCheck, fresh_key
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.roles import KeepsSecrets
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.privacy import contributions as under_sum
from secure_apfed.privacy.accountants import Mechanism, calibrate_sigma
from secure_apfed.privacy.guard import GaussianGuard
from secure_apfed.privacy.ledger import PrivacyLedger, PrivacySpent
from secure_apfed.privacy.measured import check_graph, check_row_wise
from secure_apfed.privacy.noise import NoiseSource, clip_rows
from secure_apfed.privacy.randomised_response import LabelResponse

__all__ = ["PrivateContributions", "PrivateLabels", "PrivateRelease"]

_HALF_PRECISION = (torch.float16, torch.bfloat16)
_FULL_PRECISION = (torch.float32, torch.float64)
_BOOLEAN_TYPES = frozenset({bool, np.bool_})
Values = TypeVar("Values", bound=Any)
_ID_BYTES = 16
# The columns of an exported account before its N counts: ID (two words), mechanism, unprotected.
_HEAD_COLUMNS = 4
_UNPROTECTED_COLUMN = 3
_NOT_COMPILED = (
    "PrivateRelease charges and draws noise anew at each call, which a compiled graph would hold "
    "as constants; leave fullgraph=True out, or compile the parts before and after it"
)
_GRAPH_CHECKED = "looked for in the graph of the first batch alone"
_GRAPH_UNREADABLE = (
    "not measured, since the graph of the first batch is compiled or too large: call "
    "check_encoder(encoder, x)"
)
# Accounts inside `disable_noise`, and the rows that `name_rows` set for each account.
_disabled_accounts: ContextVar[tuple["_LayerAccount", ...]] = ContextVar(
    "disabled accounts", default=()
)
_rows_by_account: ContextVar[Mapping["_LayerAccount", object]] = ContextVar(
    "rows by account", default=MappingProxyType({})
)


class _ChargedAccount(KeepsSecrets):
    """A privacy account in memory, which counts its own steps and has a budget.

    It is the base of accounts in a user's own training loop.

    Args:
        release: the mechanism of one release.
        epsilon, delta: the budget of all releases of one row together.
        rows: N, rows of the table.
        owner: name of the public class, for errors.
    """

    def __init__(
        self,
        release: Mechanism | under_sum.SummedRelease,
        epsilon: float,
        delta: float,
        rows: int,
        *,
        owner: str,
    ) -> None:
        """Open a ledger in memory, and remember the process, as a forked one is refused."""
        self.epsilon = epsilon
        self.delta = delta
        self.rows = rows
        self._step = 0
        figure: Any = "epsilon_c" if isinstance(release, under_sum.SummedRelease) else "epsilon_x"
        self._ledger = PrivacyLedger(
            release, delta=delta, budget=epsilon, rows=rows, log=None, figure=figure
        )
        self._lock = threading.Lock()
        self._require_own_process = ForkCheck(f"this {owner}").require_own_process

    def get_privacy_spent(self) -> PrivacySpent:
        """Return the cost of all releases so far: `epsilon_x`, `delta`, `releases`, `trace`."""
        # Before the lock: a fork may have copied it in its locked state.
        self._require_own_process()
        with self._lock:
            return self._ledger.get_privacy_spent()

    def report(self) -> str:
        """Return in words what was spent, for whose protection, and what has no guarantee."""
        spent = self.get_privacy_spent()
        if not spent.releases:
            budget = f"epsilon {self.epsilon:g} at delta {self.delta:g}"
            return (
                f"nothing was released yet; the budget of any one of {self.rows} rows is {budget}"
            )
        return (
            f"epsilon {spent.epsilon_x:.4g} of {self.epsilon:g} spent at delta {self.delta:g}: of "
            f"any one of {self.rows} rows, replaced by any other; {spent.releases} releases of the "
            "row that was released most often"
        )

    def _charge_rows(self, rows: Tensor) -> int:
        """Charge one release of the rows at these table positions; return its step.

        A step is never returned twice, so that noise that is drawn for it is never used twice.
        """
        with self._lock:
            # Bytes sent again would be free, but noise is new at each call: a random digest makes
            # every release a new one.
            self._ledger.charge(step=self._step, rows=rows, digest=fresh_key())
            self._step += 1
            return self._step - 1


class _LayerAccount(_ChargedAccount):
    """The state that a layer and its copies share: noise key, releases of each row, and steps.

    A copy with its own key would need a second account of the same people. A copy of the key with
    its own count of steps would use the noise of a step twice. So all copies share one object.

    An account is exported as one line of counts under a random ID. Other accounts of the same
    people, such as this one before a restart, are imported as further lines. Of several lines with
    one ID the largest counts apply; lines of different IDs add up.
    """

    def __init__(
        self, guard: GaussianGuard, epsilon: float, delta: float, rows: int, *, owner: str
    ) -> None:
        """Open the account of one layer with this guard, under a random ID."""
        super().__init__(guard.mechanism(), epsilon, delta, rows, owner=owner)
        self.guard = guard
        self.encoder_check = ""  # how it was checked that the encoder mixes no rows; "": it was not
        self._unprotected_row_count = 0
        self._account_id = fresh_key()[:_ID_BYTES]
        # Imported accounts by ID: the number of unprotected rows, then N counts.
        self._imported_counts_by_id: dict[bytes, NDArray[np.int64]] = {}

    def __copy__(self) -> "_LayerAccount":
        """Return the same object: copies of a layer share one account."""
        return self

    def __deepcopy__(self, memo: object) -> "_LayerAccount":
        """Return the same object: copies of a layer share one account."""
        return self

    def __reduce__(self) -> str:
        """Refuse to serialise the noise key. Raises LocalProtocolError."""
        raise LocalProtocolError(
            "PrivateRelease holds the noise key of its party and is never serialised: save the "
            "network's state_dict(), which has its account and not its key, and load that into a "
            "network that is made anew; in another process make it there"
        )

    def add_noise(self, clipped_BD: Tensor, rows_B: Tensor) -> Tensor:
        """Charge the rows at table positions (B,), then return them (B, D) with fresh noise."""
        return self.guard.add_noise(clipped_BD, step=self._charge_rows(rows_B), rows=rows_B)

    def count_unprotected(self, row_count: int) -> None:
        """Count further rows that were returned without noise, for the report."""
        with self._lock:
            self._unprotected_row_count += row_count

    def export_lines(self) -> Tensor:
        """Return this account and the imported ones as int64, one line each, (accounts, 4 + N).

        The columns are the account's ID in two words, the noise multiplier (bits of a float64), the
        number of unprotected rows, and the number of releases of each of the N rows. The key is not
        exported.
        """
        self._require_own_process()
        with self._lock:
            own_counts = np.concatenate([[self._unprotected_row_count], self._count_own_releases()])
            counts_by_id = {self._account_id: own_counts, **self._imported_counts_by_id}
            line_heads = [
                np.concatenate([np.frombuffer(account_id, np.int64), [self._mechanism_bits]])
                for account_id in counts_by_id
            ]
            counts = np.array([*counts_by_id.values()])
            return torch.from_numpy(np.column_stack([np.array(line_heads), counts]))

    def import_lines(self, state: object) -> None:
        """Merge accounts from `state`, which `export_lines` returned.

        Of two counts of a row under one ID the larger one holds, so no count becomes lower.

        Raises CheckpointError: malformed, or of another table, clip or noise.
        """
        self._require_own_process()
        lines = self._check_lines(state)
        with self._lock:
            own_counts = self._count_own_releases()
            for line in lines:
                account_id = line[:2].tobytes()
                if account_id == self._account_id:
                    continue  # this account, at an earlier time
                counts = line[_UNPROTECTED_COLUMN:]
                known_counts = self._imported_counts_by_id.get(account_id, counts)
                self._imported_counts_by_id[account_id] = np.maximum(known_counts, counts)
            # Without the first number, which counts unprotected rows.
            imported_counts = sum(counts[1:] for counts in self._imported_counts_by_id.values())
            total_counts = torch.from_numpy(own_counts + imported_counts)
            self._ledger.load_state_dict({"counts": total_counts})

    def _check_lines(self, state: object) -> NDArray[np.int64]:
        """Return a state from `export_lines` as an array, after checking it.

        Raises CheckpointError: shape, type or noise do not match.
        """
        width = _HEAD_COLUMNS + self.rows
        if (
            not isinstance(state, Tensor)
            or state.dtype != torch.int64
            or state.ndim != 2
            or state.shape[1] != width
            or bool((state[:, _UNPROTECTED_COLUMN:] < 0).any())
        ):
            raise CheckpointError(
                f"PrivateRelease: the state is no account of {self.rows} rows, int64 of shape "
                f"(accounts, {width}), got {getattr(state, 'dtype', type(state).__name__)} of "
                f"shape {tuple(getattr(state, 'shape', ()))}; accounts are not averaged or "
                "converted with the weights: load the state as state_dict() gave it"
            )
        lines: NDArray[np.int64] = state.numpy(force=True)
        if (lines[:, 2] != self._mechanism_bits).any():
            raise CheckpointError(
                "PrivateRelease: the state counts releases under another noise than sigma "
                f"{self.guard.sigma:.4g} at clip {self.guard.clip:g}; make the layer with the "
                "clip, epsilon, delta and epochs of the one that was saved"
            )
        return lines

    def _count_own_releases(self) -> NDArray[np.int64]:
        """Return the releases of each row (N,) by this account alone.

        The ledger counts the releases of imported accounts, too, so these are subtracted.
        """
        counts: NDArray[np.int64] = self._ledger.state_dict()["counts"].numpy().copy()
        for other_counts in self._imported_counts_by_id.values():
            counts -= other_counts[1:]
        return counts

    @property
    def _mechanism_bits(self) -> int:
        """The bits of the noise multiplier as an integer, by which a state is checked to fit."""
        multiplier = np.float64(self.guard.mechanism().noise_multiplier)
        return int(multiplier.view(np.int64))

    def report(self) -> str:
        """Return the base class's report, completed by what has no guarantee.

        It names the number of unprotected rows, and how it was checked that the encoder computes
        each row from that row alone.
        """
        imported_unprotected = sum(
            int(counts[0]) for counts in self._imported_counts_by_id.values()
        )
        unprotected_row_count = self._unprotected_row_count + imported_unprotected
        exception_text = ""
        if unprotected_row_count:
            exception_text = (
                f"no guarantee for the {unprotected_row_count} rows that went through "
                "disable_noise(), unprotected; of the others: "
            )
        return (
            f"{exception_text}{super().report()}; against whoever receives them and lacks the "
            f"noise key; {self.guard.describe_guarantee()}: what a row teaches the encoder moves "
            "other rows, and labels have no guarantee; that the encoder mixes no rows of a batch "
            f"is {self.encoder_check or 'not measured: call check_encoder(encoder, x)'}"
        )


class PrivateRelease(nn.Module):
    """A layer that clips each row of h, charges its privacy cost, and adds Gaussian noise: `z =
    guard(h, rows=batch)`.

    Guarantee: that of `GaussianGuard`, (epsilon, delta) for all releases of one row together,
    replace-one, WITH THE ENCODER HELD FIXED, for an encoder that computes each row from that row
    alone; calibrated by `calibrate_sigma`. z stays in the autograd graph; its gradient is that of
    the clip. Under `torch.no_grad` and after `eval()` it protects and costs the same:
    `disable_noise()` alone switches it off.

    Batch normalisation in training, or attention over the batch, mixes rows and breaks the
    guarantee. `guard.check_encoder(encoder, X[batch])` measures this, once before training. Without
    that call the graph of the first h is checked, which does not find everything (`check_graph`).
    The report states what was checked.

    As a layer it has no parameters. In `nn.Sequential`, which passes h alone, `name_rows` names the
    rows. Copies (`copy.deepcopy`, `AveragedModel`) share one account and one noise key: what either
    releases is charged once to both. `state_dict()` has the account, not the key: loading it adds
    its releases to those counted here, and lowers none. `torch.compile` leaves it out of its
    graphs; torch runs a whole `nn.Sequential` around it uncompiled, so compile the parts before and
    after it. `nn.DataParallel`, tracing, export, pickles and forked processes are refused.

    Args:
        clip: C, the L2 bound of one row with all its numbers, in the unit of h.
        epsilon, delta: largest privacy cost of all releases of one row together.
        epochs: how often each row may be released; rows: N, of the table, such as `len(X)`.

    Attributes:
        sigma: standard deviation of the noise on each number, in the unit of h.

    Raises:
        ConfigError: a number out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from secure_apfed import PrivateRelease
        >>> guard = PrivateRelease(clip=1, epsilon=8, delta=1e-5, epochs=8, rows=100)
        >>> z = guard(torch.ones(2, 3, 4, 4), rows=[7, 9])
        >>> spent = guard.get_privacy_spent()
        >>> z.shape, round(spent.epsilon_x, 2), spent.releases
        (torch.Size([2, 3, 4, 4]), 2.39, 1)
        >>> network = nn.Sequential(nn.Linear(3, 4), guard, nn.Linear(4, 2))
        >>> with guard.name_rows([7, 9]):
        ...     scores = network(torch.ones(2, 3))
        >>> guard.get_privacy_spent().releases
        2
    """

    def __init__(
        self, *, clip: float, epsilon: float, delta: float, epochs: int, rows: int
    ) -> None:
        """Check the numbers, calibrate sigma to the planned epochs, and draw a noise key."""
        _require_numbers(self, clip=clip, epsilon=epsilon, delta=delta, epochs=epochs, rows=rows)
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        self.delta = delta
        self.epochs = epochs
        self.rows = rows
        self.sigma = calibrate_sigma(epsilon, delta, epochs, clip)
        guard = GaussianGuard(clip=clip, sigma=self.sigma, key=fresh_key())
        self._account = _LayerAccount(guard, epsilon, delta, rows, owner=type(self).__name__)
        self._release = _exclude_from_compiling(_release_rows)

    if TYPE_CHECKING:  # output and input have the same type

        def __call__(self, h: Values, rows: object = None) -> Values: ...

    def forward(self, h: Values, rows: object = None) -> Values:
        """Return z, which may be sent: of the same type, shape, dtype and device as h.

        Args:
            h: a tensor or NumPy array of shape (B, ...): float16, bfloat16 (both computed in
                float32), float32 or float64.
            rows: positions in the table of these B rows, 0..N-1: whole numbers in a tensor, array,
                list or range, or a slice. A row that occurs k times is released k times, each with
                noise of its own, and charged k times. None: those of `name_rows`.

        Raises:
            LocalProtocolError: h or rows of a wrong type, shape or range, a forked process, or a
                call by backward().
            ModelError: a row is not finite.
            PromiseError: the graph of the first h shows that its rows were mixed.
            BudgetExhaustedError: a row was released as often as planned.

        After an error nothing was charged or released.
        """
        return cast(Values, self._release(self._account, h, rows))

    @contextmanager
    def name_rows(self, rows: object) -> Iterator[None]:
        """Set the table positions of the batch for calls without `rows=`, in this thread.

        It is for networks that contain this layer and pass on h only, such as `nn.Sequential`. Each
        call inside the block is a release of its own and is charged. Copies of the layer read the
        same positions.
        """
        token = _rows_by_account.set({**_rows_by_account.get(), self._account: rows})
        try:
            yield
        finally:
            _rows_by_account.reset(token)

    def check_encoder(self, encoder: Callable[[Tensor], Any], x: Tensor) -> None:
        """Check that the encoder computes each row of x from that row alone; see `check_row_wise`.

        Nothing is charged, and the encoder is unchanged.

        Args:
            encoder: the network that computes h, in training mode; x: its input, two rows or more.

        Raises:
            PromiseError: it mixes rows; names the layer, and the change.
            LocalProtocolError: the encoder contains a `PrivateRelease`, whose noise would be
                measured.
        """
        layers = encoder.modules() if isinstance(encoder, nn.Module) else ()
        if any(isinstance(layer, PrivateRelease) for layer in layers):
            raise LocalProtocolError(
                f"PrivateRelease: the encoder that is measured, {type(encoder).__name__}, contains "
                "a PrivateRelease, and measuring would release rows; give the layers before it"
            )
        check_row_wise(encoder, x, owner=type(self).__name__)
        self._account.encoder_check = f"measured on {len(x)} rows"

    @contextmanager
    def disable_noise(self) -> Iterator[None]:
        """Switch noise and account off for evaluation, in this thread: rows are only clipped.

        The output is unprotected: its receiver reads the rows. The report counts these rows. Copies
        of the layer are switched off, too. Warns with UnsafeChoiceWarning.
        """
        message = (
            "PrivateRelease.disable_noise(): no noise, nothing counted; whoever receives these "
            "reads them"
        )
        warnings.warn(message, UnsafeChoiceWarning, stacklevel=3)
        token = _disabled_accounts.set((*_disabled_accounts.get(), self._account))
        try:
            yield
        finally:
            _disabled_accounts.reset(token)

    def get_privacy_spent(self) -> PrivacySpent:
        """Return the cost of all releases so far: `epsilon_x`, `delta`, `releases`, `trace`."""
        return self._account.get_privacy_spent()

    def report(self) -> str:
        """Return in words what was spent, for whose protection, and what has no guarantee."""
        return self._account.report()

    def get_extra_state(self) -> Tensor:
        """Return the account for `state_dict()`: how often each row was released, and no key."""
        return self._account.export_lines()

    def set_extra_state(self, state: object) -> None:
        """Merge the account of a `state_dict()` into this one; see `_LayerAccount`."""
        self._account.import_lines(state)

    def extra_repr(self) -> str:
        """Return the layer's parameters for its `repr`."""
        return (
            f"clip={self.clip:g}, epsilon={self.epsilon:g}, delta={self.delta:g}, "
            f"epochs={self.epochs}, rows={self.rows}, sigma={self.sigma:.4g}"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        """Refuse nn.DataParallel, which calls this method; raises LocalProtocolError.

        Its threads do not know which rows are in their part of the batch.
        """
        raise LocalProtocolError(
            "PrivateRelease: nn.DataParallel deals a batch out to threads, which do not know whose "
            "rows they hold; wrap the layers before it and after it, each in nn.DataParallel"
        )


def _exclude_from_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, excluded from `torch.compile`, which would make its noise a constant."""
    try:
        return torch.compiler.disable(function, reason=_NOT_COMPILED)  # type: ignore[no-any-return]
    except TypeError:  # torch 2.6 takes no reason
        return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _release_rows(account: _LayerAccount, h: Any, rows: object) -> Any:
    """Return z for one call of `PrivateRelease.forward`, which lists the errors.

    Rows are clipped, charged and noised; inside `disable_noise` they are only clipped and counted.

    `account`: the account that the layer and its copies share. `h`: a tensor or array (B, ...).
    `rows`: the B table positions as the caller passed them; None: those of `name_rows`.
    """
    account._require_own_process()
    _require_running(h)
    is_array = isinstance(h, np.ndarray) and h.dtype.kind == "f"
    # torch reads arrays in the machine's byte order only.
    values = torch.from_numpy(h.astype(h.dtype.newbyteorder("="))) if is_array else h
    if getattr(values, "dtype", None) not in _HALF_PRECISION + _FULL_PRECISION or not values.ndim:
        raise LocalProtocolError(
            "h is a tensor or NumPy array of floats of shape (B, ...), one row a person, got "
            f"{getattr(h, 'dtype', type(h).__name__)} of shape {getattr(h, 'shape', None)}"
        )
    h_BD = values.reshape(len(values), math.prod(values.shape[1:]))
    if h_BD.dtype in _HALF_PRECISION:
        h_BD = h_BD.float()
    if account in _disabled_accounts.get():
        z_BD = clip_rows(h_BD, account.guard.clip)
        account.count_unprotected(len(z_BD))
    else:
        rows_B = _parse_batch_rows(account, rows, len(h_BD))
        if torch._C._current_graph_task_id() != -1:  # autograd is running a backward pass
            raise LocalProtocolError(
                "PrivateRelease: called by backward(), which computes h again (activation "
                "checkpointing) where other noise was sent; leave this layer out of what "
                "torch.utils.checkpoint computes again"
            )
        # Both checks may raise an error, so they come before the charge.
        clipped_BD = clip_rows(h_BD, account.guard.clip)
        if not account.encoder_check and values.grad_fn is not None and len(values) > 1:
            account.encoder_check = _GRAPH_CHECKED if check_graph(values) else _GRAPH_UNREADABLE
        z_BD = account.add_noise(clipped_BD, rows_B)
    z = z_BD.to(values.dtype).reshape(values.shape)
    return z.numpy() if is_array else z


def _parse_batch_rows(account: _LayerAccount, rows: object, row_count: int) -> Tensor:
    """Return the table positions of a batch of `row_count` rows, int64 of shape (B,).

    `rows`: the positions that the caller passed to the layer; None: those of `name_rows` are used.

    Raises LocalProtocolError: positions come from both or neither, are malformed, or are not as
    many as the batch has rows.
    """
    named_rows = _rows_by_account.get().get(account)
    if rows is not None and named_rows is not None:
        raise LocalProtocolError(
            "PrivateRelease: rows are named twice, by rows= and by name_rows(); leave one out"
        )
    rows_B = _parse_positions(
        named_rows if rows is None else rows,
        table_row_count=account.rows,
        class_name="PrivateRelease",
    )
    if len(rows_B) != row_count:
        raise LocalProtocolError(
            f"PrivateRelease: h holds {row_count} rows and rows= names {len(rows_B)}; name "
            "the position of each row of h, in its order"
        )
    return rows_B


def _require_running(h: object) -> None:
    """Raise LocalProtocolError if a program is being traced, so that `h` stands for no numbers.

    A traced program would contain the noise of one call as a constant.
    """
    require_numbers({"h": h}, "PrivateRelease")
    if torch._C._is_tracing() or torch.compiler.is_compiling():
        raise LocalProtocolError(
            "PrivateRelease: a program that is traced or exported (torch.jit.trace, torch.export, "
            "ONNX) would hold one draw of the noise as a constant, and no account; export the "
            "layers before and after it"
        )


class PrivateContributions(_ChargedAccount):
    """A contributor's discrete Gaussian noise for a secure sum, and its privacy account.

    Each contributor creates one with the same arguments; all agree on
    `SumAgreement(noise=its.noise)` and add the noise that `draw_noise` returns. Guarantee and
    sources: `contributions`.

    Args:
        epsilon, delta: largest privacy cost of all contributions of one row together.
        epochs: number of contributions in which each row may be.
        rows: N, number of rows of this contributor's table.
        numbers: D, numbers of one row of a contribution; the sum clips each row's norm.
        moved: number of rows of one contribution that depend on one person: 1 if each row is about
            one person, or if there is one row; B, the batch's rows, if a loss mixes rows.
        honest: number of contributors whose noise counts, this one included: the contributors that
            every sum needs, minus the colluding ones.
        bits: fixed-point bits of the sum.

    Attributes:
        noise: standard deviation at each contributor, in steps of fixed point.

    Raises:
        ConfigError: a number out of range, or no sum carries that much noise.

    Examples:
        >>> from secure_apfed import PrivateContributions
        >>> private = PrivateContributions(
        ...     epsilon=8, delta=1e-5, epochs=10, rows=500, numbers=4, moved=1, honest=2
        ... )
        >>> private.draw_noise((2, 4), rows=[0, 7]).shape  # of the contribution for rows 0 and 7
        (2, 4)
        >>> private.get_privacy_spent().releases
        1
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        epochs: int,
        rows: int,
        numbers: int,
        moved: int,
        honest: int,
        bits: int = 16,
    ) -> None:
        """Check the numbers, calibrate the noise in steps, and draw a noise key."""
        counts_by_name = {"epochs": epochs, "rows": rows, "numbers": numbers, "moved": moved}
        _require_numbers(
            self, epsilon=epsilon, delta=delta, honest=honest, bits=bits, **counts_by_name
        )
        # The number of steps in the clip depends on the bits alone, so any clip will do here.
        steps_in_clip = FixedPoint(clip_norm=1.0, bits=bits, contributor_count=1).max_level
        sensitivity = under_sum.sensitivity_in_steps(
            steps_in_clip=steps_in_clip, columns=numbers, rows_per_person=moved
        )
        sum_facts: dict[str, Any] = {
            "honest": honest,
            "sensitivity": sensitivity,
            "numbers": moved * numbers,
        }
        self.noise = under_sum.calibrate_noise(
            epsilon=epsilon,
            delta=delta,
            releases=epochs,
            error_subject="PrivateContributions",
            **sum_facts,
        )
        self._columns = numbers
        self._rows_per_person = moved
        self._noise_source = NoiseSource(fresh_key())
        release = under_sum.SummedRelease(deviation=self.noise, **sum_facts)
        super().__init__(release, epsilon, delta, rows, owner=type(self).__name__)

    def draw_noise(
        self, shape: tuple[int, ...], rows: object = None, *, people: object = None
    ) -> NDArray[np.int64]:
        """Charge the people on whom a contribution of this shape depends, and return its noise.

        Pass either `rows` or `people`: positions in the table, as for `PrivateRelease`.

        Args:
            shape: shape of the contribution. A contribution of rank 0 or 1 is one row.
            rows: positions of people: for rank 2 or more the person of each row, in order; for one
                row all people on whom it depends. Empty only for a contribution without rows.
            people: all people on whom a contribution depends whose rows are not people, such as the
                gradient of a weight matrix; needs `moved` above 1, or one row.

        A person is charged once for every `moved` rows that depend on it; so k times if each row is
        of one person and k rows are of this one.

        Raises:
            LocalProtocolError: positions that `PrivateRelease` refuses, another number of them, or
                a contribution larger than stated.
            BudgetExhaustedError: a person was charged as often as planned.

        After an error nothing was charged. Noise is bound to the step alone (an empty digest),
        since no step is used twice.
        """
        self._require_own_process()
        row_count = self._count_rows(shape)
        charged_people = self._list_charged_people(row_count, len(shape), rows, people)
        return self._noise_source.draw_integers(
            tuple(shape), self.noise, step=self._charge_rows(charged_people), digest=b""
        )

    def _count_rows(self, shape: object) -> int:
        """Return the number of rows in a contribution of this shape; 1 for rank 0 or 1.

        Raises LocalProtocolError: no shape, or not the shape that the account was made for.
        """
        sizes: list[Any] = list(shape) if isinstance(shape, tuple | list) else [None]
        if not all(is_whole(size) and size >= 0 for size in sizes):
            raise LocalProtocolError(
                "PrivateContributions: the shape of a contribution is whole numbers from 0 on, as "
                f"(rows, numbers), got {shape!r:.80}"
            )
        has_rows = len(sizes) > 1
        row_count = sizes[0] if has_rows else 1
        columns = math.prod(sizes[1:] if has_rows else sizes)
        if columns != self._columns or 1 < self._rows_per_person < row_count:
            raise LocalProtocolError(
                f"the account is of rows of {self._columns} numbers, {self._rows_per_person} "
                f"of which a person moves, got a contribution of shape {tuple(sizes)}; make another"
            )
        return row_count

    def _list_charged_people(
        self, row_count: int, rank: int, rows: object, people: object
    ) -> Tensor:
        """Return the table positions of the people to charge for a contribution.

        If each row is about one person, a person with k rows is charged k times, and is in the
        result k times. Otherwise each person is charged once.

        Args:
            row_count, rank: number of rows and of axes of the contribution.
            rows, people: as passed to `draw_noise`.

        Raises:
            LocalProtocolError: both or neither were passed, or they do not fit the contribution.
        """
        class_name = "PrivateContributions"
        if rows is not None and people is not None:
            raise LocalProtocolError(f"{class_name}: give rows= or people=, not both")
        is_row_one_person = rank > 1 and self._rows_per_person == 1 and people is None
        if people is not None and self._rows_per_person == 1 and row_count > 1:
            raise LocalProtocolError(
                f"{class_name}: moved=1 says that each of the {row_count} rows is of one person; "
                "name the person of each with rows=, or make one with the `moved` rows that a "
                "person moves"
            )
        positions = _parse_positions(
            rows if people is None else people, table_row_count=self.rows, class_name=class_name
        )
        if people is None and rank > 1 and len(positions) != row_count:
            advice = "; where its rows are not people, name all who move it, people="
            raise LocalProtocolError(
                f"{class_name}: the contribution has {row_count} rows and rows= names "
                f"{len(positions)}; name the person of each row, in "
                f"order{'' if is_row_one_person else advice}"
            )
        if row_count and not len(positions):
            raise LocalProtocolError(
                f"{class_name}: a contribution of {row_count} rows is of nobody; name who stands "
                "in it"
            )
        # Where a person moves several rows, the sensitivity of one release covers all of them.
        return positions if is_row_one_person else positions.unique()

    def report(self) -> str:
        """Return the base class's report and the guarantee of noise under a sum, in words."""
        return f"{super().report()}; {under_sum.contributions_statement('', is_reproducible=False)}"


class PrivateLabels(KeepsSecrets):
    """The K-ary randomised response for labels: `y = PrivateLabels(epsilon=1, classes=10)(y)`.

    Guarantee: that of `LabelResponse`, for any number of epochs on the answers. The labels of a
    table are answered once: further answers would cost epsilon again, and are refused.

    Args:
        epsilon: privacy cost of each label, at delta 0, above 0 and at most 40; classes: K, at
            least 2.

    Examples:
        >>> import torch
        >>> from secure_apfed import PrivateLabels
        >>> private = PrivateLabels(epsilon=2, classes=10)
        >>> private(torch.arange(10)).shape
        torch.Size([10])
    """

    def __init__(self, *, epsilon: float, classes: int) -> None:
        """Prepare a randomised response that answers the labels of one table."""
        _require_numbers(self, epsilon=epsilon, classes=classes)
        self._response = LabelResponse(epsilon=epsilon, classes=classes)
        self._answered_rows = 0
        self._answer_lock = threading.Lock()  # taken by the first answer and never released
        self._fork_check = ForkCheck("this PrivateLabels")

    def __call__(self, labels: Values) -> Values:
        """Return an answer for each label, in the kind, shape, dtype and device of `labels`.

        Args:
            labels: integers 0..K-1 in a tensor, NumPy array, list or tuple.

        Raises:
            DataError: a label outside 0..K-1. LocalProtocolError: no such labels, a second call, or
            a forked process.
        """
        self._fork_check.require_own_process()
        array = np.asarray(labels.tolist() if isinstance(labels, Tensor) else labels)
        largest_class = self._response.classes - 1
        # The answers come in the dtype of the labels, which must hold every class.
        if (
            not isinstance(labels, Tensor | np.ndarray | list | tuple)
            or array.dtype.kind not in "biu"
            or int(np.asarray(largest_class).astype(array.dtype)) != largest_class
        ):
            raise LocalProtocolError(
                f"labels are a tensor, NumPy array, list or tuple of integers that holds 0.."
                f"{largest_class}, got {array.dtype} in a {type(labels).__name__}"
            )
        true_labels_N = torch.from_numpy(array.astype(np.int64).ravel())
        if not len(true_labels_N):
            return labels  # nothing is answered, so the labels of the table still may be
        randomised_N = self._response.randomise_labels(true_labels_N, key=fresh_key()).numpy()
        if not self._answer_lock.acquire(blocking=False):
            raise LocalProtocolError(
                "these labels were answered: train on the answers, a second one costs epsilon "
                "again; for the labels of others make another PrivateLabels"
            )
        self._answered_rows = len(randomised_N)
        randomised = randomised_N.reshape(array.shape).astype(array.dtype)
        if isinstance(labels, Tensor):
            return cast(Values, labels.new_tensor(randomised.tolist()))
        is_array = isinstance(labels, np.ndarray)
        return cast(Values, randomised if is_array else type(labels)(randomised.tolist()))

    def report(self) -> str:
        """Return the guarantee in words, and how many labels it covers."""
        return f"{self._answered_rows} labels answered; {self._response.describe_guarantee()}"


def _require_numbers(owner: object, **numbers: float) -> None:
    """Check the types of numeric arguments: `clip`, `epsilon` and `delta` may be any number.

    All others must be whole numbers from 1 on. Raises ConfigError.

    `owner`: the object that was given these arguments, for the message. `numbers`: the arguments
    by name.
    """
    for name, value in numbers.items():
        if name in ("clip", "epsilon", "delta"):
            expected = "a number"
            is_valid = isinstance(value, Real)
        else:
            expected = "a whole number from 1 on"
            is_valid = is_whole(value) and value >= 1
        if not is_valid:
            raise ConfigError(f"{type(owner).__name__}: {name} is {expected}, got {value!r}")


def _parse_positions(rows: object, *, table_row_count: int, class_name: str) -> Tensor:
    """Return a user's positions in a table of `table_row_count` rows as int64 of shape (B,).

    A position may occur several times.

    `rows`: positions as the user passed them: a tensor, array, list, range or slice. `class_name`:
    name of the class, for errors.

    Raises LocalProtocolError: not given, of a wrong type or shape, or out of range.
    """
    if rows is None:
        raise LocalProtocolError(
            f"{class_name}: say with rows= which of the {table_row_count} rows these are: their "
            "positions in the table, as TensorDataset(X, y, torch.arange(len(X))) hands them out "
            "with each batch; for rows that are only evaluated there is "
            "PrivateRelease.disable_noise()"
        )
    if isinstance(rows, slice):
        try:
            rows = range(*rows.indices(table_row_count))
        except TypeError as error:
            raise LocalProtocolError(
                f"{class_name}: rows are no slice of positions: {error}"
            ) from error
    values = rows
    if isinstance(rows, Tensor):  # NumPy does not know all of torch's types
        values = rows.numpy(force=True) if rows.dtype is torch.int64 else rows.tolist()
    positions = np.asarray(order_by_position(values, f"{class_name}: rows"))
    if not positions.size:
        positions = positions.astype(np.int64)
    elif isinstance(values, list | tuple) and not _BOOLEAN_TYPES.isdisjoint(map(type, values)):
        # NumPy makes integers of booleans among integers; a boolean is refused below.
        positions = positions.astype(np.bool_)
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise LocalProtocolError(
            f"{class_name}: rows are positions in the table, whole numbers in one list, got "
            f"{positions.dtype} of shape {positions.shape}; of a mask give mask.nonzero()"
        )
    # A dtype too small for the table's last position may have wrapped positions around.
    has_tensor = isinstance(rows, Tensor) and rows.numel()
    position_dtype = rows.numpy(force=True).dtype if has_tensor else positions.dtype  # type: ignore[attr-defined]
    if table_row_count - 1 > np.iinfo(position_dtype).max:
        raise LocalProtocolError(
            f"{class_name}: rows of {position_dtype} go up to {np.iinfo(position_dtype).max} and "
            f"the table to {table_row_count - 1}, so that positions may have wrapped around; give "
            "int64"
        )
    if len(positions) and not 0 <= positions.min() <= positions.max() < table_row_count:
        raise LocalProtocolError(
            f"{class_name}: row positions lie in 0..{table_row_count - 1}, got {positions.min()}.."
            f"{positions.max()}"
        )
    return torch.from_numpy(positions.astype(np.int64))
