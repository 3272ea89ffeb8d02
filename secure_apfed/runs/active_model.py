"""The stored model of the active, which predicts from its own features without other parties.

A model is two files: parameters as safetensors, and a JSON card that describes them, the encoding
of features, and the run's privacy guarantees. A table is read, predicted and written some rows at a
time, so that it may be larger than memory. Nothing is sent to anybody.

Letters: N rows, B rows of a block, K classes.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from secure_apfed.baselines.fitted import FittedModel, rebuild_modules
from secure_apfed.config.plain_yaml import load_text, parse_yaml
from secure_apfed.data import ColumnEncoding, FeatureEncoding, TargetScale, load_blocks
from secure_apfed.data.encoding import CellCounts
from secure_apfed.data.frames import require_dense
from secure_apfed.data.inputs import ColumnDrift, DriftMeter
from secure_apfed.data.row_sources import make_features
from secure_apfed.errors import DataError, ModelError
from secure_apfed.learning.descent import remove_prefix
from secure_apfed.learning.own_code import ModuleSource, OwnFamily, UserFunctions
from secure_apfed.measures.tasks import TASKS, Classification, Task
from secure_apfed.networks.models import family_for, output_shape
from secure_apfed.runs.folder import RunFolder
from secure_apfed.settings import ModelSettings
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.plugins import IMPORT_PATH, reading_settings


class _NetworkCard(BaseModel):
    """The fields of a model card that are needed to build the network.

    Attributes:
        encoding: how raw features become the encoder's input.
        model: settings of the networks.
        task: name of the learning task.
        classes: names of the classes; empty for a regression.
        targets: mean and scale of labels that are numbers; None: labels are classes.
        threshold: probability from which the second of two classes is predicted; None: the
            likeliest class is predicted.
    """

    encoding: FeatureEncoding
    model: ModelSettings
    task: str = Classification.name
    classes: tuple[str, ...]
    targets: TargetScale | None = None
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(frozen=True)
class ActiveModel:
    """The model that the active stores: encoder and head, ready to predict from its features alone.

    Attributes:
        network: the encoder followed by the head.
        classes: names in the order of the outputs; empty for a regression.
        encoding: turns the active's raw features into the encoder's input.
        card: the model card, in JSON values.
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
        """Return the index in `classes` of each row's predicted class, (N,).

        With a threshold this is the second class if its probability reaches it, else the first.
        Without a threshold it is the likeliest class.
        """
        if self.threshold is None:
            return probabilities_NK.argmax(1)
        return (probabilities_NK[:, 1] >= self.threshold).long()

    @isolate_torch_modes()
    @torch.no_grad()
    def predict(self, features: Any) -> Tensor:
        """Return the predictions for N rows: probabilities (N, K), or predicted numbers (N,).

        `features`: a frame with the columns of training, which is encoded; or rows that are encoded
        already, (N, *shape), as a tensor, an array or a list. Rows of a model that was trained on
        arrays need no encoding.

        Raises:
            DataError: the rows are no numbers, or the frame does not fit.
            ModelError: the rows have another shape.
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
    """Return rows of an array, a list or a data set as a tensor.

    Raises DataError: they are not rows of numbers.
    """
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
) -> ActiveModel:
    """Load the model of a finished run.

    Args:
        path: folder of the run.
        encoder: the class or function that makes a user-defined encoder, or a module; None: the
            encoder is built in. It is an argument because a folder must not decide which code is
            imported.
        head: the class or function that makes a user-defined head, or a module; None: the head is
            built in.

    Raises:
        CheckpointError: there is no finished run, or its files were altered since.
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
    folder.check_digests(folder.config, folder.model_card, folder.model)
    card = load_json(folder.model_card, dict[str, Any], file_format=MODEL_CARD)
    if not card.get("predicts_alone"):
        raise ModelError(
            f"{path} holds a run of {quote_text(card.get('method'))}, whose model needs "
            "every party to predict; docs/which-method.md says which predict alone"
        )
    network_card = load_json(folder.model_card, _NetworkCard, file_format=MODEL_CARD)
    if not folder.model.exists():
        raise ModelError(f"{folder.model} is missing; the run did not finish")
    stored_tensors = load_bytes(folder.model)
    task = _build_task(network_card, folder.model_card)
    output_count = task.count_outputs(len(network_card.classes))
    try:
        _require_own_parts(network_card.model, encoder=encoder, head=head)
        own_family = (
            OwnFamily(UserFunctions(encoder=encoder, head=head)) if encoder or head else None
        )
        network = _build_network(network_card, load(stored_tensors), output_count, own_family)
    except (ModelError, OverflowError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{folder.model} and {folder.model_card.name} do not make a model: {error}"
        ) from error
    if network_card.threshold is not None and len(network_card.classes) != 2:
        raise ModelError(
            f"{folder.model_card} has a threshold between {len(network_card.classes)} classes; it "
            "decides between two: restore the file from a copy"
        )
    return ActiveModel(
        network,
        network_card.classes,
        network_card.encoding,
        card,
        network_card.threshold,
        task,
    )


def _require_own_parts(
    model: ModelSettings, *, encoder: ModuleSource | None, head: ModuleSource | None
) -> None:
    """Raise ModelError unless the caller passed code for exactly the user-defined networks.

    `model`: settings, which say whether encoder and head are user-defined. `encoder`, `head`: the
    code that the caller passed; None: not passed.
    """
    if encoder is not None and not model.is_user_defined:
        raise ModelError(
            f"its encoder is of this library ({model.network}), not code of one's own; leave "
            "encoder=... (--encoder) out"
        )
    if head is not None and model.head_network is None:
        raise ModelError(
            "its head is of this library, not code of one's own; leave head=... (--head) out"
        )
    if head is None and model.head_network is not None and (encoder or not model.is_user_defined):
        raise ModelError(
            "its head is code of one's own, too; load it by load_model(folder, encoder=..., "
            "head=...), or a command's --head module:Name"
        )


def _build_task(network_card: _NetworkCard, path: Path) -> Task:
    """Return the learning task that a model card names.

    `path`: path of the card, for errors.

    Raises ModelError: the task is unknown, or does not fit the card's classes and targets.
    """
    name = network_card.task
    class_count = len(network_card.classes)
    has_targets = network_card.targets is not None
    if IMPORT_PATH.fullmatch(name):
        # The card may come from somebody else, who must not name code to import.
        with reading_settings(are_own=False):
            TASKS.import_entry(name, setting=f"{path}: task")
    # A model either has classes, or predicts numbers in the scale of its targets.
    if name not in TASKS or has_targets is bool(class_count):
        raise ModelError(
            f"{path} tells of task {quote_text(name, maximum=40)}, {class_count} "
            f"classes and {'a' if has_targets else 'no'} scale of targets, which is no "
            "model of "
            f"this version; tasks are {', '.join(TASKS)}: restore the file from a copy"
        )
    try:
        return TASKS[name].from_targets(network_card.targets)
    except DataError as error:
        raise ModelError(f"{path}: {error}") from error


def _build_network(
    network_card: _NetworkCard,
    tensors: Mapping[str, Tensor],
    output_count: int,
    own_family: OwnFamily | None,
) -> nn.Module:
    """Return the network that a card describes: encoder and head, with the stored parameters.

    No more memory is allocated than the tensors need, since the card may come from somebody else.

    Args:
        network_card: the fields of the model card.
        tensors: the stored parameters, by name.
        output_count: number of outputs of the head.
        own_family: makes networks from the caller's code; None: the card names a built-in family.

    Raises:
        ModelError: parameters have mixed types, or do not fit the card.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ModelError(
            f"parameters are all float32 or all float64, got {sorted(map(str, dtypes))}"
        )
    input_shape = network_card.encoding.shape
    # The stored model may contain fitted local models in place of the networks that the function
    # builds, or before the head.
    encoder, head = rebuild_modules(
        tensors,
        partial(
            _build_encoder_and_head,
            network_card=network_card,
            output_count=output_count,
            own_family=own_family,
        ),
    )
    if isinstance(encoder, FittedModel):
        encoder.require_shape(math.prod(input_shape), output_count)
    elif isinstance(head, nn.Sequential) and isinstance(head[0], FittedModel):
        head[0].require_shape(math.prod(output_shape(encoder, input_shape)), output_count)
    nn.ModuleDict({"encoder": encoder, "head": head}).load_state_dict(tensors, assign=True)
    return nn.Sequential(encoder, head).eval()


def _build_encoder_and_head(
    tensors: Mapping[str, Tensor],
    *,
    network_card: _NetworkCard,
    output_count: int,
    own_family: OwnFamily | None,
) -> tuple[nn.Module, nn.Module]:
    """Return the encoder with the stored parameters, and a head whose parameters are not set yet.

    Args:
        tensors: stored parameters by name; the encoder's names begin with "encoder.".
        network_card: the fields of the model card.
        output_count: number of outputs of the head.
        own_family: makes networks from the caller's code; None: the card names a built-in family.
    """
    input_shape = network_card.encoding.shape
    family = own_family or family_for(network_card.model, input_shape)
    # On the meta device new parameters take no memory; a user-defined network may need real ones.
    initial_device = torch.device("cpu" if own_family else "meta")
    with initial_device:
        encoder = family.make_encoder(input_shape, network_card.model)
    # This replaces the new parameters. The output's shape is computed with the stored ones, since
    # torch would load its compiler to compute it on the meta device.
    encoder.load_state_dict(remove_prefix("encoder", tensors), assign=True)
    representation_size = math.prod(output_shape(encoder, input_shape))
    with initial_device:
        head = family.make_head(representation_size, output_count, network_card.model)
    return encoder, head


_AppendFrame = Callable[[pd.DataFrame], None]


@contextmanager
def _open_csv_writer(path: Path) -> Iterator[_AppendFrame]:
    """Yield a function that appends frames to a CSV file, with a header before the first."""
    with path.open("w", encoding="utf-8", newline="") as file:

        def write_frame(frame: pd.DataFrame) -> None:
            """Append a frame; the header comes before the first row of the file."""
            file.write(to_csv(frame, header=not file.tell()))

        yield write_frame


@contextmanager
def _open_json_writer(path: Path) -> Iterator[_AppendFrame]:
    """Yield a function that appends frames to a JSON file, which is one list of objects."""
    with path.open("w", encoding="utf-8", newline="") as file:

        def write_frame(frame: pd.DataFrame) -> None:
            """Append a frame's rows to the list."""
            # Not written by pandas, which rounds numbers. Infinity and NaN become null.
            finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
            rows = finite.where(finite.notna(), None).to_dict("records")
            text = json.dumps(rows, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            items = text.removeprefix("[").removesuffix("]")
            file.write(("," if file.tell() else "[") + items)

        yield write_frame
        file.write("]" if file.tell() else "[]")


@contextmanager
def _open_parquet_writer(path: Path) -> Iterator[_AppendFrame]:
    """Yield a function that appends frames to a Parquet file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writer: Any = None

        def write_frame(frame: pd.DataFrame) -> None:
            """Append a frame; the first one decides the columns of the file."""
            nonlocal writer
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:  # the columns are known only now
                writer = stack.enter_context(ParquetWriter(path, table.schema))
            writer.write_table(table)

        yield write_frame


_WRITER_BY_SUFFIX = {
    ".csv": _open_csv_writer,
    ".parquet": _open_parquet_writer,
    ".json": _open_json_writer,
}


@contextmanager
def row_writer(path: Path) -> Iterator[_AppendFrame]:
    """Yield a function that appends frames of equal columns to a CSV, Parquet or JSON file.

    In CSV an apostrophe precedes a text that a spreadsheet would take for a formula. The file is
    written under a temporary name, and renamed when it is complete; after a failure there is no
    file.

    Raises DataError: the name ends in none of these formats, or the file cannot be written.
    """
    if path.suffix not in _WRITER_BY_SUFFIX:
        raise DataError(f"{path}: expected a name that ends in {', '.join(_WRITER_BY_SUFFIX)}")
    partial_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _WRITER_BY_SUFFIX[path.suffix](partial_path) as write:
            yield write
        partial_path.chmod(0o600)  # predictions about people are private to the owner
        partial_path.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}); check the folder") from error
    finally:
        with suppress(OSError):
            partial_path.unlink()


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """A comparison of predicted rows with the rows of training.

    Attributes:
        rows: number of predicted rows.
        drift: the change of each column; empty for images, whose encoding has no statistics.
    """

    rows: int
    drift: tuple[ColumnDrift, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the drift of each column as JSON values."""
        return {
            "columns": [
                {**asdict(column), "notable": column.notable_differences} for column in self.drift
            ]
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The predictions for the rows of a file.

    Attributes:
        ids: IDs of the rows; if the file has no IDs, the rows' numbers from 0.
        outputs: probabilities (N, K) of `classes`, or predicted numbers (N,).
        what: name of the predicted quantity, used for numbers.
        compared: comparison of the rows with the rows of training.
        classes: names of the classes; empty if numbers are predicted.
        decided: index of each row's predicted class, (N,); None: numbers are predicted.
    """

    ids: tuple[str, ...]
    outputs: Tensor
    what: str
    compared: RowComparison
    classes: tuple[str, ...] = ()
    decided: Tensor | None = None

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with each row's ID, class and probability of every class.

        If numbers are predicted, the columns are the ID and the number.
        """
        if self.decided is None:
            return pd.DataFrame({"id": self.ids, self.what: self.outputs.tolist()})
        names = [self.classes[index] for index in self.decided.tolist()]
        probabilities = {
            f"p({name})": column
            for name, column in zip(self.classes, self.outputs.T.tolist(), strict=True)
        }
        return pd.DataFrame({"id": self.ids, "class": names, **probabilities})

    def as_json(self) -> dict[str, Any]:
        """Return the predictions and the comparison of rows as JSON values."""
        rows = self.to_frame()
        if self.decided is None:
            return {**self.compared.as_json(), "predictions": rows.to_dict("records")}
        predicted = [
            {"id": row_id, "class": class_name, "probabilities": probabilities}
            for row_id, class_name, *probabilities in rows.itertuples(index=False, name=None)
        ]
        return {"classes": list(self.classes), **self.compared.as_json(), "predictions": predicted}

    def write_file(self, path: Path) -> None:
        """Write the frame of `to_frame` to a CSV, Parquet or JSON file."""
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

    Args:
        folder: folder of the run.
        path: file of the rows.
        id_columns: columns that identify rows; None: the ID columns of training, if the run used
            the user's own tables.
        encoder, head: the classes or functions that made user-defined parts of the model, or such
            modules; None: the parts are built in.

    Raises: the errors of `load_model` and `load_blocks`.
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
    """Predict the rows of a file, and write the predictions to another file block by block.

    Return the comparison of the rows with the rows of training. The file appears when it is
    complete.

    Args:
        folder: folder of the finished run.
        path: file of the rows.
        output: file to write.
        id_columns: columns that identify rows; None: the ID columns of training, if the run used
            the user's own tables.
        encoder, head: the classes or functions that made user-defined parts of the model, or such
            modules; None: the parts are built in.

    Raises:
        ConfigError: `output` is the input, or a file of the model, which it would replace.
        DataError: the rows do not fit the model, or the file cannot be written.
    """
    refuse_replacing_input(output, "--output", path, folder)
    predictor = _Predictor(load_model(folder, encoder=encoder, head=head))
    with row_writer(output) as write:
        for ids, outputs in predictor.predict_blocks(path, _find_id_columns(folder, id_columns)):
            write(predictor.build_predictions(ids, outputs).to_frame())
    return predictor.compare_rows()


class _Predictor:
    """A model that also compares the rows that it predicts with its training rows."""

    def __init__(self, model: ActiveModel) -> None:
        """Start without rows; rows are compared only if the model has an encoding of columns."""
        self.model = model
        self._row_count = 0
        encoding = model.encoding
        self._drift = DriftMeter(encoding) if isinstance(encoding, ColumnEncoding) else None

    def predict_blocks(
        self, path: Path, id_columns: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield IDs and predictions of a file's rows in blocks, and add the rows to the comparison.

        `id_columns`: columns that identify rows.
        """
        counts = None if self._drift is None else self._drift.cell_counts
        blocks = load_blocks(path, self.model.encoding, id_columns=id_columns, cell_counts=counts)
        for ids, features in blocks:
            outputs = self.model.predict(features)
            self._row_count += len(ids)
            if self._drift is not None:
                self._drift.add_batch(features)
            yield ids, outputs

    def build_predictions(self, ids: tuple[str, ...], outputs: Tensor) -> Predictions:
        """Return the predictions for B rows, with the decided classes if the task has classes.

        They are not compared with training rows yet. `outputs`: probabilities (B, K), or predicted
        numbers (B,).
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
        """Return the comparison of all rows predicted so far with the rows of training."""
        drift = () if self._drift is None else self._drift.compute_drifts()
        return RowComparison(rows=self._row_count, drift=drift)


def _find_id_columns(folder: Path, id_columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that identify rows: `id_columns`, or the ID columns of the active's table.

    The result is empty if the run did not use the user's own tables.

    `folder`: folder of the run. `id_columns`: columns that the caller named; None: none was named.
    """
    run_folder = RunFolder(folder)
    if id_columns is not None or not run_folder.config.exists():
        return tuple(id_columns or ())
    settings, _ = parse_yaml(load_text(run_folder.config), str(run_folder.config))
    try:  # only the part on data: the whole configuration would import the methods' modules
        data = DataSettings.model_validate(settings["data"])
    except (KeyError, TypeError, ValidationError):
        data = run_folder.load_config().data  # raises an error with file and line
    return () if data.parties is None else data.find_id_columns(data.active)
