"""The active's model as an ONNX file, which predicts from raw columns without this library.

The encoding is part of the graph. Each raw column is an input of its own, (N, 1): numbers as
float64, dates as days since 1970-01-01, durations as days, categories as texts. Images are one
input, (N, C, H, W), not cut into strips. The outputs are `output_label` (N,), texts, and
`output_probability` (N, K). For a regression the output is `output_prediction` (N,), float64, in
the unit of the labels.

An empty number is NaN; an empty category is a text such as "" or "NA". A graph cannot refuse a row.
If `secure_apfed.data.ColumnEncoding` would refuse it, the outputs are NaN and the label is the
empty text. The same holds for unknown texts that the encoding would first convert, which a graph
cannot: texts with blanks at their ends, texts that may not be in Unicode form NFC, and numbers,
times and moments in another spelling (`secure_apfed.data.frames.normalise_spelling`).

Letters: N rows, K classes, C channels, H height, W width.
"""

import functools
import itertools
import logging
import math
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apfed_protocols.ids import EMPTY_CELL_TEXTS
from apfed_protocols.installing import install_extra
from secure_apfed.base.files import write_atomically
from secure_apfed.data import ColumnEncoding, ImageEncoding
from secure_apfed.data.encoding import ArrayEncoding, CategoricalColumn, Column
from secure_apfed.data.frames import BLANK, RESPELLABLE_PATTERN
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.measures.tasks import Classification
from secure_apfed.runs.active_model import ActiveModel

_OPSET = 20  # version of ONNX's operators
# ONNX's numbers of element types.
_FLOAT = 1
_INT64 = 7
_TEXT = 8
_BOOL = 9
_DOUBLE = 11
_FEATURES = "encoding/features"  # no column of a table may have such a name
_LABEL = "output_label"
_PROBABILITIES = "output_probability"
_PREDICTION = "output_prediction"
_INNER_NAME_PREFIXES = ("encoding/", "network/")  # beginnings of names inside the graph


def write_onnx(model: ActiveModel, path: Path) -> None:
    """Write the model as an ONNX file, after a check by ONNX's own checker.

    Raises:
        ConfigError: the extra `onnx` is not installed.
        ModelError: a column has a name that the graph uses itself, or the model has no encoding of
            columns or images.
    """
    _check_names(model)
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter asks for it
    except ImportError as error:
        raise ConfigError(
            f"writing ONNX needs {error.name}; run: {install_extra('onnx')}"
        ) from error
    if isinstance(model.encoding, ArrayEncoding):
        raise ModelError(
            "the model reads rows as its party has them, and nothing is encoded; export its "
            "network itself by torch.onnx.export"
        )
    network = _export_network(model)
    encoding = _build_encoding(onnx.helper, model.encoding)
    encoding.ir_version = network.ir_version
    joined_model = onnx.compose.merge_models(
        encoding,
        network,
        io_map=[(_FEATURES, _FEATURES)],
        prefix2="network/",
    )
    _name_outputs(onnx.helper, joined_model, model)
    properties = {"task": model.task.name}
    if model.classes:
        properties = {"classes": "\n".join(model.classes), **properties}
    onnx.helper.set_model_props(joined_model, properties)
    onnx.checker.check_model(joined_model, full_check=True)
    write_atomically(path, joined_model.SerializeToString())


def _check_names(model: ActiveModel) -> None:
    """Raise ModelError if a column has a name that the graph uses itself."""
    if not isinstance(model.encoding, ColumnEncoding):
        return
    for column in model.encoding.columns:
        if column.name in (_LABEL, _PROBABILITIES, _PREDICTION) or column.name.startswith(
            _INNER_NAME_PREFIXES
        ):
            raise ModelError(
                f"column {column.name!r} has a name that an ONNX graph of ours needs for itself; "
                "rename it in the table, and train again"
            )


class _PredictingModule(nn.Module):
    """A module that computes the same as `ActiveModel.predict`, as torch's exporter needs it.

    It computes in the precision of the network's parameters.
    """

    def __init__(self, model: ActiveModel) -> None:
        """Store a model's network and task, and set the network to evaluation mode."""
        super().__init__()
        self.network = model.network
        self.task = model.task
        self.eval()

    def forward(self, features_N: Tensor) -> Tensor:
        """Return predictions for encoded features (N, ...).

        They are probabilities (N, K) as float32, or predicted numbers (N,) as float64.
        """
        typed_N = features_N.to(next(self.network.parameters()).dtype)
        outputs_N = self.task.decode_outputs(self.network(typed_N))
        return outputs_N.double() if outputs_N.ndim == 1 else outputs_N.float()


def _export_network(model: ActiveModel) -> Any:
    """Return the ONNX model from encoded features to predictions, made by torch's exporter."""
    rows = torch.export.Dim("rows")
    with _silence_exporter():
        program = torch.onnx.export(
            _PredictingModule(model),
            (torch.zeros(2, *model.encoding.shape),),  # an example input of two rows
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=({0: rows},),
            input_names=[_FEATURES],
            output_names=["predictions"],
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide messages of torch's exporter about its internals and optional packages in this block.

    Other warnings pass.
    """
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)


def _build_encoding(helper: Any, encoding: ColumnEncoding | ImageEncoding) -> Any:
    """Return the ONNX model from raw values to encoded features.

    `helper`: the module `onnx.helper`, which is an optional package.
    """
    graph = _Graph(helper)
    if isinstance(encoding, ColumnEncoding):
        column_features = [
            graph.add_column(index, column, encoding)
            for index, column in enumerate(encoding.columns)
        ]
        joined_features = graph.add_node("Concat", column_features, "encoding/joined", axis=1)
        graph.add_input_checks(joined_features, _FEATURES)
    else:
        graph.add_image_input(encoding)
    output = helper.make_tensor_value_info(_FEATURES, _FLOAT, ["rows", *encoding.shape])
    graph_proto = helper.make_graph(
        graph.nodes, "encoding", graph.inputs, [output], graph.constants
    )
    # Version 3 of the operators for machine learning, which encode categories.
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph_proto, opset_imports=opsets)


def _make_character_class(belongs: Callable[[str], object]) -> str:
    """Return a regular expression (RE2) for one character for which `belongs` is true.

    It is a class of ranges of Unicode characters. Surrogates (U+D800 to U+DFFF) are no characters
    and are left out.
    """
    codes = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    matching = [code for code in codes if belongs(chr(code))]
    # Group consecutive codes: there code minus index is constant.
    groups = itertools.groupby(enumerate(matching), lambda pair: pair[1] - pair[0])
    code_ranges = [[code for _, code in group] for _, group in groups]
    return (
        "["
        + "".join(
            f"\\x{{{code_range[0]:x}}}-\\x{{{code_range[-1]:x}}}" for code_range in code_ranges
        )
        + "]"
    )


@functools.cache
def _build_blank_pattern() -> str:
    """Return a regular expression for one of the characters that `str.strip` removes."""
    return _make_character_class(str.isspace)


@functools.cache
def _build_non_nfc_pattern() -> str:
    """Return a regular expression for texts that may not be in Unicode form NFC.

    Such a text has a character that NFC replaces, or may compose with the character before it.
    """
    decompositions = (unicodedata.decomposition(chr(code)) for code in range(sys.maxunicode + 1))
    # A decomposition that begins with "<" is a compatibility one, which NFC does not use.
    canonical_decompositions = (text.split() for text in decompositions if not text.startswith("<"))
    # The second character of each pair, which NFC may compose with the first.
    composing_characters = {
        chr(int(codes[1], 16)) for codes in canonical_decompositions if len(codes) == 2
    }
    composing_characters.update(
        map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)))
    )  # Hangul

    def may_change(character: str) -> bool:
        """Return whether NFC replaces a character, or may compose it with the one before."""
        return character in composing_characters or not unicodedata.is_normalized("NFC", character)

    return f"(?s).*{_make_character_class(may_change)}.*"


class _Graph:
    """An ONNX graph under construction.

    Attributes:
        nodes, inputs, constants: its parts so far, as objects of ONNX.
    """

    def __init__(self, helper: Any) -> None:
        """Start an empty graph; `helper`: the module `onnx.helper`."""
        self._helper = helper
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.constants: list[Any] = []
        # Names of outputs (N, 1): each says whether a row has a refused cell in one column.
        self._refused_row_masks: list[str] = []

    def add_node(
        self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        """Add an operator to the graph, and return the name of its output.

        Args:
            operator: name of the operator.
            inputs, output: names of its inputs and its output.
            domain: name of the operator set; "": ONNX's own.
            attributes: attributes of the operator.
        """
        node = self._helper.make_node(operator, inputs, [output], domain=domain, **attributes)
        self.nodes.append(node)
        return output

    def add_constant(self, name: str, kind: int, values: list[Any]) -> str:
        """Add a constant vector, and return its name; `kind`: ONNX's number of the element type."""
        self.constants.append(self._helper.make_tensor(name, kind, [len(values)], values))
        return name

    def add_column(self, index: int, column: Column, encoding: ColumnEncoding) -> str:
        """Add the input of one raw column, and the nodes that encode it.

        Return the name of their output, the column's features (N, number of features).

        `index`: position of the column in the encoding.
        """
        kind = _TEXT if isinstance(column, CategoricalColumn) else _DOUBLE
        tensor_info = self._helper.make_tensor_value_info(column.name, kind, ["rows", 1])
        self.inputs.append(tensor_info)
        prefix = f"encoding/{index}"
        if isinstance(column, CategoricalColumn):
            return self._add_category(prefix, column, encoding)
        tensor_name = column.name
        mean = self.add_constant(f"{prefix}_mean", _DOUBLE, [column.mean])
        if encoding.missing == "mean":
            is_empty = self.add_node("IsNaN", [tensor_name], f"{prefix}_empty")
            tensor_name = self.add_node("Where", [is_empty, mean, tensor_name], f"{prefix}_filled")
        centred = self.add_node("Sub", [tensor_name, mean], f"{prefix}_centred")
        if column.constant:
            # Times zero, finite values become 0, and others NaN, as for other columns.
            zero = self.add_constant(f"{prefix}_zero", _DOUBLE, [0.0])
            scaled = self.add_node("Mul", [centred, zero], f"{prefix}_scaled")
        else:
            scale = self.add_constant(f"{prefix}_scale", _DOUBLE, [column.scale])
            scaled = self.add_node("Div", [centred, scale], f"{prefix}_scaled")
        return self.add_node("Cast", [scaled], prefix, to=_FLOAT)

    def add_input_checks(self, features: str, output: str) -> str:
        """Add nodes that replace features by NaN in refused rows and where they are infinite.

        Return the name of the result, which is `output`.

        `features`: name of the encoded features.
        """
        nan = self.add_constant("encoding/none", _FLOAT, [math.nan])
        is_refused = self.add_node("IsInf", [features], "encoding/infinite")
        for index, column_mask in enumerate(self._refused_row_masks):
            is_refused = self.add_node("Or", [is_refused, column_mask], f"encoding/refused_{index}")
        return self.add_node("Where", [is_refused, nan, features], output)

    def _add_unknown_mask(self, prefix: str, one_hot: str, is_empty: str) -> str:
        """Add the nodes that tell whether a cell is neither a category nor empty; return the mask.

        `prefix`: first part of the nodes' names. `one_hot`: output with the one-hot categories, all
        zero for no category. `is_empty`: output with the mask of empty cells.
        """
        axis = self.add_constant(f"{prefix}_axis", _INT64, [1])
        is_one_hot = self.add_node("ReduceMax", [one_hot, axis], f"{prefix}_found")
        is_category = self.add_node("Cast", [is_one_hot], f"{prefix}_taken", to=_BOOL)
        is_known = self.add_node("Or", [is_empty, is_category], f"{prefix}_left_out")
        return self.add_node("Not", [is_known], f"{prefix}_other")

    def _add_category(
        self, prefix: str, column: CategoricalColumn, encoding: ColumnEncoding
    ) -> str:
        """Add the nodes that encode a text column one-hot; return the name of the features.

        The graph compares texts exactly. So it refuses an unknown text that the encoding would have
        converted first, since the converted text may be a category.

        `prefix`: first part of the nodes' names.
        """
        blank = _build_blank_pattern()
        empty_cell_texts = (EMPTY_CELL_TEXTS - column.words_that_are_categories) | BLANK
        empty_pattern = "|".join(map(re.escape, sorted(empty_cell_texts)))
        is_empty = self._add_match(column, f"{blank}*({empty_pattern}){blank}*", f"{prefix}_none")
        if encoding.missing != "mean":
            self._refused_row_masks.append(is_empty)
        one_hot = self.add_node(
            "OneHotEncoder",
            [self._replace_spellings(prefix, column)],
            f"{prefix}_hot",
            "ai.onnx.ml",
            cats_strings=[text.encode() for text in column.categories],
            zeros=1,
        )
        known_one_hot = self.add_node("Flatten", [one_hot], f"{prefix}_known", axis=1)
        is_unknown = self._add_unknown_mask(prefix, known_one_hot, is_empty)
        # Texts that the encoding may convert: with outer blanks, not in NFC, or spelt otherwise.
        pattern = f"(?s){blank}.*|.*{blank}|{_build_non_nfc_pattern()}|{RESPELLABLE_PATTERN}"
        may_change = self._add_match(column, pattern, f"{prefix}_odd")
        self._refused_row_masks.append(
            self.add_node("And", [may_change, is_unknown], f"{prefix}_refused")
        )
        if column.constant:
            # The feature is 1 for any cell: each cell equals itself.
            ones = self.add_node("Equal", [column.name, column.name], f"{prefix}_same")
            return self.add_node("Cast", [ones], prefix, to=_FLOAT)
        return known_one_hot

    def _add_match(self, column: CategoricalColumn, pattern: str, output: str) -> str:
        """Add a node that says whether each cell matches a pattern as a whole; return `output`.

        `output`: name of the node's output, (N, 1).
        """
        return self.add_node("RegexFullMatch", [column.name], output, pattern=pattern)

    def _replace_spellings(self, prefix: str, column: CategoricalColumn) -> str:
        """Add a node that replaces each known spelling of a category by the category.

        Return the name of its output. If each category has only one spelling, no node is added, and
        the column's name is returned.

        `prefix`: first part of the node's name.
        """
        if len(column.category_by_spelling) == len(column.categories):
            return column.name
        return self.add_node(
            "LabelEncoder",
            [column.name],
            f"{prefix}_spelled",
            "ai.onnx.ml",
            keys_strings=[text.encode() for text in column.category_by_spelling],
            values_strings=[text.encode() for text in column.category_by_spelling.values()],
            default_string=b"",
        )

    def add_image_input(self, encoding: ImageEncoding) -> None:
        """Add the input of whole images, and the nodes that cut this party's strip and scale it."""
        image_shape = ["rows", encoding.channels, encoding.height, encoding.width]
        self.inputs.append(self._helper.make_tensor_value_info("images", _FLOAT, image_shape))
        first_row = self.add_constant("encoding/first_row", _INT64, [encoding.first_row])
        end_row = self.add_constant("encoding/end_row", _INT64, [encoding.end_row])
        row_axis = self.add_constant("encoding/axis", _INT64, [2])
        column_block = self.add_node(
            "Slice", ["images", first_row, end_row, row_axis], "encoding/strip"
        )
        max_pixel_value = self.add_constant("encoding/maximum", _FLOAT, [float(encoding.maximum)])
        self.add_node("Div", [column_block, max_pixel_value], _FEATURES)


def _name_outputs(helper: Any, joined_model: Any, model: ActiveModel) -> None:
    """Replace the outputs of the joined model by outputs with this module's names.

    If the task has classes, also add nodes that decide each row's class.

    `helper`: the module `onnx.helper`. `joined_model`: the ONNX model, which is changed in place.
    `model`: the model that it computes.
    """
    graph = joined_model.graph
    predictions = graph.output[0].name
    if model.task.tells != Classification.tells:
        number = f"output_{model.task.tells}"
        graph.node.append(helper.make_node("Identity", [predictions], [number]))
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info(number, _DOUBLE, ["rows"]))
        return
    texts = [name.encode() for name in model.classes]
    graph.initializer.extend(
        [
            helper.make_tensor("network/classes", _TEXT, [len(texts) + 1], [*texts, b""]),
            helper.make_tensor("network/first", _INT64, [], [0]),
            # Index of the empty text after the classes, which is the label of a refused row.
            helper.make_tensor("network/nobody", _INT64, [], [len(texts)]),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Identity", [predictions], [_PROBABILITIES]),
            *_make_decision_nodes(helper, graph, predictions, model.threshold),
            # A refused row has NaN for every class, so the first class is enough to notice it.
            helper.make_node("Gather", [predictions, "network/first"], ["network/one"], axis=1),
            helper.make_node("IsNaN", ["network/one"], ["network/refused"]),
            helper.make_node(
                "Where", ["network/refused", "network/nobody", "network/best"], ["network/given"]
            ),
            helper.make_node("Gather", ["network/classes", "network/given"], [_LABEL]),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        [
            helper.make_tensor_value_info(_LABEL, _TEXT, ["rows"]),
            helper.make_tensor_value_info(_PROBABILITIES, _FLOAT, ["rows", len(texts)]),
        ]
    )


def _make_decision_nodes(
    helper: Any, graph: Any, probabilities: str, threshold: float | None
) -> list[Any]:
    """Return the nodes that decide each row's class, as `ActiveModel.decide_classes` does.

    Their output "network/best" is the class's index.

    Args:
        helper: the module `onnx.helper`.
        graph: the graph; the nodes' constants are added to it, but not the nodes.
        probabilities: name of the probabilities (N, K).
        threshold: probability from which the second of two classes is predicted; None: the
            likeliest class.
    """
    if threshold is None:
        return [helper.make_node("ArgMax", [probabilities], ["network/best"], axis=1, keepdims=0)]
    graph.initializer.extend(
        [
            helper.make_tensor("network/second", _INT64, [], [1]),
            helper.make_tensor("network/threshold", _FLOAT, [], [threshold]),
        ]
    )
    second_probability = "network/share"
    is_second = "network/over"
    return [
        helper.make_node("Gather", [probabilities, "network/second"], [second_probability], axis=1),
        helper.make_node("GreaterOrEqual", [second_probability, "network/threshold"], [is_second]),
        helper.make_node("Cast", [is_second], ["network/best"], to=_INT64),
    ]
