"""The stored model of the active, which predicts from its own features without other parties.

Two files: parameters as safetensors, and a JSON card that says what they are, how features are
encoded, and what the run promised about privacy. A table is read, predicted and written some rows
at a time, so that it may be larger than memory; nothing is sent to anybody.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from secure_apfed.base.files import PathLike, load_bytes, load_json, refuse_replacing_input, to_csv
from secure_apfed.base.formats import MODEL_CARD
from secure_apfed.base.peer_text import quote_text
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config.plain_yaml import load_text, parse_yaml
from secure_apfed.data import ColumnEncoding, FeatureEncoding, TargetScale, load_blocks
from secure_apfed.data.encoding import CellCounts
from secure_apfed.data.frames import require_dense
from secure_apfed.data.inputs import ColumnDrift, DriftMeter
from secure_apfed.data.row_sources import make_features
from secure_apfed.errors import DataError, ModelError
from secure_apfed.learning.descent import remove_prefix
from secure_apfed.learning.own_code import ModuleSource, OwnCode, OwnFamily
from secure_apfed.measures.tasks import TASKS, Classification, Task
from secure_apfed.networks.models import family_for, output_shape
from secure_apfed.runs.folder import RunFolder
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.plugins import CODE_NAME, reading_settings
from secure_apfed.settings.training import ModelSettings
from secure_apfed.solo.fitted import FittedModel, rebuild_modules


class _NetworkCard(BaseModel):
    """The part of a model card from which the network is built."""

    encoding: FeatureEncoding
    model: ModelSettings
    task: str = Classification.name
    classes: tuple[str, ...]
    targets: TargetScale | None = None
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(frozen=True)
class SoloModel:
    """The model that the active stores: encoder and head, ready to predict from its features alone.

    Attributes:
        classes: names in the order of the outputs; empty of a regression.
        encoding: turns the active's raw features into the encoder's input.
        card: everything that is known about the model, JSON-able.
        threshold: probability from which the second of two classes is predicted; None: the
            likeliest class is predicted.
        task: the learning task, which defines what its outputs are.
    """

    network: nn.Module = field(repr=False)
    classes: tuple[str, ...]
    encoding: FeatureEncoding = field(repr=False)
    card: dict[str, Any] = field(repr=False)
    threshold: float | None = None
    task: Task = field(default_factory=Classification)

    def decide_classes(self, probabilities_NK: Tensor) -> Tensor:
        """Return the indices (N,) in `classes` decided by these probabilities, with the threshold
        if set.
        """
        if self.threshold is None:
            return probabilities_NK.argmax(1)
        return (probabilities_NK[:, 1] >= self.threshold).long()

    @isolate_torch_modes()
    @torch.no_grad()
    def predict(self, features: Any) -> Tensor:
        """Return the predictions for rows (N, *shape), such as probabilities (N, K).

        `features`: a tensor, an array or a list of encoded rows, which rows of arrays are as they
        stand; or a frame with the columns of training, which is encoded.

        Raises:
            DataError: they are no numbers, or a frame does not fit.
            ModelError: they have another shape.
        """
        if isinstance(features, pd.DataFrame):
            return self.predict_frame(features)
        if not isinstance(features, Tensor):
            features = _read_features(features)
        if tuple(features.shape[1:]) != self.encoding.shape:
            raise ModelError(
                f"this model reads rows of shape {self.encoding.shape}, "
                f"got {tuple(features.shape[1:])}"
            )
        weights = next(chain(self.network.parameters(), self.network.buffers()))
        scores_NK: Tensor = self.network(features.to(weights.device, weights.dtype))
        return self.task.decode_outputs(scores_NK)

    def predict_frame(self, frame: pd.DataFrame) -> Tensor:
        """Return the predictions for raw rows, in float64; other columns are ignored.

        Raises DataError: a column of training is missing, or its cells do not fit.
        """
        if not isinstance(self.encoding, ColumnEncoding):
            raise DataError(
                f"this model reads arrays of rows of shape {self.encoding.shape}, got a frame; "
                "give frame.to_numpy()"
            )
        require_dense(frame, party="the input")
        counts = CellCounts()
        features = self.encoding.encode(frame, counts=counts)
        counts.warn_of_unseen_cells(source="the input")
        return self.predict(features).double()


def _read_features(rows: Any) -> Tensor:
    """Return rows of an array, a list or a data set as a tensor. Raises DataError."""
    if isinstance(rows, list | tuple):
        try:
            rows = np.asarray(rows, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the rows to predict are a {type(rows).__name__} of other things than rows of "
                "numbers of one length; give numpy.array(rows)"
            ) from error
    features = make_features(rows, party="the input")
    return features if isinstance(features, Tensor) else features[:]


@isolate_torch_modes()
def load_model(
    path: PathLike, *, encoder: ModuleSource | None = None, head: ModuleSource | None = None
) -> SoloModel:
    """Load the model of a finished run folder.

    Args:
        encoder: what made a user-defined encoder: the class or function that makes it, or a
            module. A folder never says which code to import.
        head: what made a user-defined head, in the same forms; None: one linear layer.

    Raises:
        CheckpointError: no finished run there, or its files were altered since.
        ModelError: the method has no model of its own, or the files do not fit together.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from secure_apfed import Config, load_model, run
        >>> config = Config(
        ...     name="alone",
        ...     method="single_view",
        ...     data={"dataset": "breast_cancer"},
        ...     train={"epochs": 1},
        ...     guard={"mechanism": "none"},
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     result = run(config, f"{folder}/alone")
        ...     model = load_model(f"{folder}/alone")
        >>> model.classes
        ('malignant', 'benign')
    """
    path = Path(path)
    folder = RunFolder(path)
    folder.check_digests(folder.config, folder.card, folder.model)
    card = load_json(folder.card, dict[str, Any], file_format=MODEL_CARD)
    if not card.get("predicts_alone"):
        raise ModelError(
            f"{path} holds a run of {quote_text(card.get('method'))}, whose model needs "
            "every party to predict; docs/which-method.md says which predict alone"
        )
    parts = load_json(folder.card, _NetworkCard, file_format=MODEL_CARD)
    if not folder.model.exists():
        raise ModelError(f"{folder.model} is missing; the run did not finish")
    stored = load_bytes(folder.model)
    task = _build_task(parts, folder.card)
    outputs = task.count_outputs(len(parts.classes))
    try:
        _require_own_parts(parts.model, encoder=encoder, head=head)
        own = OwnFamily(OwnCode(encoder=encoder, head=head)) if encoder or head else None
        network = _build_network(parts, load(stored), outputs, own)
    except (ModelError, OverflowError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{folder.model} and {folder.card.name} do not make a model: {error}"
        ) from error
    if parts.threshold is not None and len(parts.classes) != 2:
        raise ModelError(
            f"{folder.card} has a threshold between {len(parts.classes)} classes; it decides "
            "between two: restore the file from a copy"
        )
    return SoloModel(network, parts.classes, parts.encoding, card, parts.threshold, task)


def _require_own_parts(
    model: ModelSettings, *, encoder: ModuleSource | None, head: ModuleSource | None
) -> None:
    """Raise ModelError unless the caller passed code for exactly the parts that need it.

    `model`: settings that say which parts of the network are user-defined. `encoder`,
    `head`: arguments of `load_model`; None: not passed.
    """
    if encoder is not None and not model.is_own:
        raise ModelError(
            f"its encoder is of this library ({model.network}), not code of one's own; leave "
            "encoder=... (--encoder) out"
        )
    if head is not None and model.head_network is None:
        raise ModelError(
            "its head is of this library, not code of one's own; leave head=... (--head) out"
        )
    if head is None and model.head_network is not None and (encoder or not model.is_own):
        raise ModelError(
            "its head is code of one's own, too; load it by load_model(folder, encoder=..., "
            "head=...), or a command's --head module:Name"
        )


def _build_task(parts: _NetworkCard, card: Path) -> Task:
    """Return the task that a model card names. Raises ModelError: unknown, or it does not fit the
    card's classes.

    `card`: path of the card, for errors.
    """
    if CODE_NAME.fullmatch(parts.task):
        with reading_settings(own=False):
            TASKS.take_name(parts.task, key=f"{card}: task")
    if parts.task not in TASKS or (parts.targets is None) is not bool(parts.classes):
        raise ModelError(
            f"{card} tells of task {quote_text(parts.task, maximum=40)}, {len(parts.classes)} "
            f"classes and {'no' if parts.targets is None else 'a'} scale of targets, which is no "
            "model of "
            f"this version; tasks are {', '.join(TASKS)}: restore the file from a copy"
        )
    try:
        return TASKS[parts.task].from_targets(parts.targets)
    except DataError as error:
        raise ModelError(f"{card}: {error}") from error


def _build_network(
    parts: _NetworkCard, tensors: Mapping[str, Tensor], outputs: int, own: OwnFamily | None
) -> nn.Module:
    """Build encoder and head from a card; allocate no more memory than the tensors need.

    Args:
        parts: the card.
        tensors: the stored parameters, by name.
        outputs: number of outputs of the head.
        own: makes networks from the caller's code; None: the card names a built-in family.

    Raises:
        ModelError: parameters of mixed types, or they do not fit the card.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ModelError(
            f"parameters are all float32 or all float64, got {sorted(map(str, dtypes))}"
        )
    shape = parts.encoding.shape
    # On the meta device parameters take no memory; a user-defined network may need real ones.
    device = torch.device("cpu" if own else "meta")

    def build_parts(state: Mapping[str, Tensor]) -> tuple[nn.Module, nn.Module]:
        """Return the encoder with these tensors, and a head of the size of its output."""
        family = own or family_for(parts.model, shape)
        with device:
            encoder = family.make_encoder(shape, parts.model)
        # The output's shape is found with real parameters: on the meta device that would load
        # torch's compiler.
        encoder.load_state_dict(remove_prefix("encoder", state), assign=True)
        size = math.prod(output_shape(encoder, shape))
        with device:
            return encoder, family.make_head(size, outputs, parts.model)

    encoder, head = rebuild_modules(tensors, build_parts)
    if isinstance(encoder, FittedModel):
        encoder.require_shape(math.prod(shape), outputs)
    elif isinstance(head, nn.Sequential) and isinstance(head[0], FittedModel):
        head[0].require_shape(math.prod(output_shape(encoder, shape)), outputs)
    nn.ModuleDict({"encoder": encoder, "head": head}).load_state_dict(tensors, assign=True)
    return nn.Sequential(encoder, head).eval()


_Write = Callable[[pd.DataFrame], None]


@contextmanager
def _open_csv_writer(path: Path) -> Iterator[_Write]:
    """Yield a function that appends frames to a CSV file, with a header before the first."""
    with path.open("w", encoding="utf-8", newline="") as file:

        def write_frame(frame: pd.DataFrame) -> None:
            file.write(to_csv(frame, header=not file.tell()))

        yield write_frame


@contextmanager
def _open_json_writer(path: Path) -> Iterator[_Write]:
    """Yield a function that appends frames to one JSON list of objects."""
    with path.open("w", encoding="utf-8", newline="") as file:

        def write_frame(frame: pd.DataFrame) -> None:
            # Not by pandas, which rounds numbers. Numbers that are not finite become null.
            finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
            rows = finite.where(finite.notna(), None).to_dict("records")
            text = json.dumps(rows, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            items = text.removeprefix("[").removesuffix("]")
            file.write(("," if file.tell() else "[") + items)

        yield write_frame
        file.write("]" if file.tell() else "[]")


@contextmanager
def _open_parquet_writer(path: Path) -> Iterator[_Write]:
    """Yield a function that appends frames to a Parquet file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writers: list[Any] = []

        def write_frame(frame: pd.DataFrame) -> None:
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if not writers:
                # Only the first frame says which columns there are.
                writers.append(stack.enter_context(ParquetWriter(path, table.schema)))
            writers[0].write_table(table)

        yield write_frame


_KINDS = {".csv": _open_csv_writer, ".parquet": _open_parquet_writer, ".json": _open_json_writer}


@contextmanager
def row_writer(path: Path) -> Iterator[_Write]:
    """Yield a function that appends frames of equal columns to a CSV, Parquet or JSON file.

    In CSV an apostrophe precedes a text that a spreadsheet would take for a formula. The file is
    written under a temporary name, and renamed when complete; a failure leaves none.
    """
    if path.suffix not in _KINDS:
        raise DataError(f"{path}: expected a name that ends in {', '.join(_KINDS)}")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _KINDS[path.suffix](partial) as write:
            yield write
        partial.chmod(0o600)  # predictions about people are private to the owner
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}); check the folder") from error
    finally:
        with suppress(OSError):
            partial.unlink()


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """A comparison of predicted rows with those of training.

    Attributes:
        rows: number of predicted rows.
        drift: the change of each column; empty for images, whose encoding has no statistics.
    """

    rows: int
    drift: tuple[ColumnDrift, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"columns": [{**asdict(column), "notable": column.notable} for column in self.drift]}


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The predictions for the rows of a file.

    Attributes:
        ids: IDs of the rows; without IDs their numbers from 0.
        outputs: probabilities (N, K) of `classes`, or predicted numbers (N,).
        what: name of a predicted number.
        compared: the rows, with those of training.
        classes: names; empty for numbers.
        decided: indices (N,) of the decided classes; None: numbers.
    """

    ids: tuple[str, ...]
    outputs: Tensor
    what: str
    compared: RowComparison
    classes: tuple[str, ...] = ()
    decided: Tensor | None = None

    def to_frame(self) -> pd.DataFrame:
        """Return each row's ID, class and the probability of every class, or ID and number."""
        if self.decided is None:
            return pd.DataFrame({"id": self.ids, self.what: self.outputs.tolist()})
        decided = [self.classes[index] for index in self.decided.tolist()]
        shares = zip(self.classes, self.outputs.T.tolist(), strict=True)
        columns = {f"p({name})": column for name, column in shares}
        return pd.DataFrame({"id": self.ids, "class": decided, **columns})

    def as_json(self) -> dict[str, Any]:
        """Return the predictions and the comparison of rows as JSON values."""
        rows = self.to_frame()
        if self.decided is None:
            return {**self.compared.as_json(), "predictions": rows.to_dict("records")}
        predicted = [
            {"id": name, "class": best, "probabilities": shares}
            for name, best, *shares in rows.itertuples(index=False, name=None)
        ]
        return {"classes": list(self.classes), **self.compared.as_json(), "predictions": predicted}

    def write_file(self, path: Path) -> None:
        with row_writer(path) as write:
            write(self.to_frame())


@isolate_torch_modes()
def predict_file(
    folder: Path,
    path: Path,
    *,
    id_columns: Sequence[str] | None = None,
    encoder: ModuleSource | None = None,
    head: ModuleSource | None = None,
) -> Predictions:
    """Predict the rows of a file (CSV, Parquet, .npy or IDX) with the model of a finished run.

    `id_columns`: columns that identify rows; None: those of training, if it used own tables.
    `encoder`, `head`: what made user-defined parts of the model, as `load_model` takes them.
    """
    predictor = _Predictor(load_model(folder, encoder=encoder, head=head))
    blocks = list(predictor.predict_blocks(path, _find_id_columns(folder, id_columns)))
    ids = tuple(itertools.chain.from_iterable(names for names, _ in blocks))
    predictions = predictor.build_predictions(ids, torch.cat([outputs for _, outputs in blocks]))
    return replace(predictions, compared=predictor.compare_rows())


@isolate_torch_modes()
def predict_into(
    folder: Path,
    path: Path,
    output: Path,
    *,
    id_columns: Sequence[str] | None = None,
    encoder: ModuleSource | None = None,
    head: ModuleSource | None = None,
) -> RowComparison:
    """Predict the rows of a file into another file, which appears when it is complete.

    `folder`: folder of the finished run. `path`: file of the rows. `output`: file to write.
    `id_columns`: columns that identify rows; None: those of training. `encoder`, `head`: what made
    user-defined parts of the model.

    Raises ConfigError: `output` is the input, or a file of the model, which it would replace.
    """
    refuse_replacing_input(output, "--output", path, folder)
    predictor = _Predictor(load_model(folder, encoder=encoder, head=head))
    with row_writer(output) as write:
        for ids, outputs in predictor.predict_blocks(path, _find_id_columns(folder, id_columns)):
            write(predictor.build_predictions(ids, outputs).to_frame())
    return predictor.compare_rows()


class _Predictor:
    """A model with statistics that compare the rows it predicted so far with its training rows."""

    def __init__(self, model: SoloModel) -> None:
        """Start without rows; drift is measured only for an encoding of columns."""
        self.model = model
        self._rows = 0
        encoding = model.encoding
        self._drift = DriftMeter(encoding) if isinstance(encoding, ColumnEncoding) else None

    def predict_blocks(
        self, path: Path, id_columns: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield IDs and predictions of a file's rows in blocks, and count their drift.

        `id_columns`: columns that identify rows.
        """
        counts = None if self._drift is None else self._drift.counts
        blocks = load_blocks(path, self.model.encoding, id_columns=id_columns, counts=counts)
        for ids, features in blocks:
            outputs = self.model.predict(features)
            self._rows += len(ids)
            if self._drift is not None:
                self._drift.add_batch(features)
            yield ids, outputs

    def build_predictions(self, ids: tuple[str, ...], outputs: Tensor) -> Predictions:
        """Return predictions, with the decided classes if the task has classes.

        `outputs`: probabilities (B, K), or predicted numbers (B,).
        """
        quantity = self.model.task.tells
        compared = RowComparison(rows=len(ids))
        predictions = Predictions(ids=ids, outputs=outputs, what=quantity, compared=compared)
        if outputs.ndim == 1:
            return predictions
        return replace(
            predictions, classes=self.model.classes, decided=self.model.decide_classes(outputs)
        )

    def compare_rows(self) -> RowComparison:
        drift = () if self._drift is None else self._drift.compute_drifts()
        return RowComparison(rows=self._rows, drift=drift)


def _find_id_columns(folder: Path, id_columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that identify rows: the given ones, or those of the run's active table.

    `folder`: folder of the run. `id_columns`: columns that the caller named; None: not given.
    """
    files = RunFolder(folder)
    if id_columns is not None or not files.config.exists():
        return tuple(id_columns or ())
    raw, _ = parse_yaml(load_text(files.config), str(files.config))
    try:  # only the part on data: the whole configuration would import the methods' modules
        data = DataSettings.model_validate(raw["data"])
    except (KeyError, TypeError, ValidationError):
        data = files.load_config().data  # raises an error with file and line
    return () if data.parties is None else data.id_columns(data.active)
