"""The local model as an ONNX file, which predicts from raw columns without this library.

The encoding is part of the graph: each raw column is an input of its own, (N, 1), numbers as
float64, dates as days since 1970-01-01, durations as days, categories as texts; images are one
input, (N, C, H, W), whole. Outputs: `output_label` (N,), texts, and `output_probability` (N, K); of
a regression `output_prediction` (N,), float64, in the unit of the labels.

An empty number is NaN, an empty category one of the texts that mean so in a file. A graph cannot
refuse a row: if `secure_apfed.data.ColumnEncoding` refuses it, the outputs are NaN and the label is
the empty text. The same holds for a text that a graph cannot convert to the learnt form: one with
blanks at its ends, or an unknown one with a mark that form NFC composes, or whose number, time or
moment `secure_apfed.data.frames.normalise_spelling` may write otherwise.
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

from apfed_protocols.ids import EMPTY
from apfed_protocols.installing import install_extra
from secure_apfed.base.files import write_atomically
from secure_apfed.data import ColumnEncoding, ImageEncoding
from secure_apfed.data.encoding import ArrayEncoding, CategoricalColumn, Column
from secure_apfed.data.frames import BLANK, RESPELT
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.measures.tasks import Classification
from secure_apfed.runs.solo import SoloModel

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
_INSIDE = ("encoding/", "network/")


def write_onnx(model: SoloModel, path: Path) -> None:
    """Write the model, checked by ONNX's own checker.

    Raises:
        ConfigError: the extra `onnx` is not installed.
        ModelError: a column has a name that the graph needs itself.
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
    joined = onnx.compose.merge_models(
        encoding,
        network,
        io_map=[(_FEATURES, _FEATURES)],
        prefix2="network/",
    )
    _name_outputs(onnx.helper, joined, model)
    about = {"classes": "\n".join(model.classes)} if model.classes else {}
    onnx.helper.set_model_props(joined, {**about, "task": model.task.name})
    onnx.checker.check_model(joined, full_check=True)
    write_atomically(path, joined.SerializeToString())


def _check_names(model: SoloModel) -> None:
    """Raise ModelError if a column has a name that the graph uses itself."""
    for column in model.encoding.columns if isinstance(model.encoding, ColumnEncoding) else ():
        if column.name in (_LABEL, _PROBABILITIES, _PREDICTION) or column.name.startswith(_INSIDE):
            raise ModelError(
                f"column {column.name!r} has a name that an ONNX graph of ours needs for itself; "
                "rename it in the table, and train again"
            )


class _Predicting(nn.Module):
    """A module that computes `SoloModel.predict` in the precision of its parameters, for export."""

    def __init__(self, model: SoloModel) -> None:
        """Take network and task of a model, in evaluation mode."""
        super().__init__()
        self.network = model.network
        self.task = model.task
        self.eval()

    def forward(self, features_N: Tensor) -> Tensor:
        """Return predictions for encoded features, probabilities as float32, numbers as float64."""
        typed_N = features_N.to(next(self.network.parameters()).dtype)
        outputs_N = self.task.decode_outputs(self.network(typed_N))
        return outputs_N.double() if outputs_N.ndim == 1 else outputs_N.float()


def _export_network(model: SoloModel) -> Any:
    """Export the network from encoded features to probabilities, by torch's exporter."""
    rows = torch.export.Dim("rows")
    with _silence_exporter():
        program = torch.onnx.export(
            _Predicting(model),
            (torch.zeros(2, *model.encoding.shape),),
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
    """Silence torch's exporter in this block: messages about its internals and optional packages.

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
    """Build the graph from raw values to encoded features.

    `helper`: the module `onnx.helper`.
    """
    graph = _Graph(helper)
    if isinstance(encoding, ColumnEncoding):
        parts = [
            graph.add_column(index, column, encoding)
            for index, column in enumerate(encoding.columns)
        ]
        graph.add_refusals(graph.add_node("Concat", parts, "encoding/joined", axis=1), _FEATURES)
    else:
        graph.add_strip(encoding)
    output = helper.make_tensor_value_info(_FEATURES, _FLOAT, ["rows", *encoding.shape])
    graph_proto = helper.make_graph(
        graph.nodes, "encoding", graph.inputs, [output], graph.constants
    )
    # Version 3 of the operators for machine learning, which encode categories.
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph_proto, opset_imports=opsets)


def _make_character_class(holds: Callable[[str], object]) -> str:
    """Return a character class of RE2 with the characters for which `holds` is true.

    Surrogates (U+D800 to U+DFFF) are no characters and are left out.
    """
    codes = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    matching = [code for code in codes if holds(chr(code))]
    # In a run of consecutive codes, code minus index is constant.
    groups = itertools.groupby(enumerate(matching), lambda pair: pair[1] - pair[0])
    runs = [[code for _, code in group] for _, group in groups]
    return "[" + "".join(f"\\x{{{run[0]:x}}}-\\x{{{run[-1]:x}}}" for run in runs) + "]"


@functools.cache
def _build_blank_pattern() -> str:
    """Return a pattern of the characters that `str.strip` removes."""
    return _make_character_class(str.isspace)


@functools.cache
def _build_non_nfc_pattern() -> str:
    """Return a pattern of texts that may be in another form than NFC.

    These hold characters that NFC replaces, or composes with the one before them.
    """
    decompositions = (unicodedata.decomposition(chr(code)) for code in range(sys.maxunicode + 1))
    canonical = (text.split() for text in decompositions if not text.startswith("<"))
    # The second character of each pair, which NFC may compose with the first.
    composing = {chr(int(codes[1], 16)) for codes in canonical if len(codes) == 2}
    composing.update(map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))))  # Hangul

    def may_change(character: str) -> bool:
        return character in composing or not unicodedata.is_normalized("NFC", character)

    return f"(?s).*{_make_character_class(may_change)}.*"


class _Graph:
    """An ONNX graph under construction: its nodes, inputs and constants.

    `helper`: the module `onnx.helper`.
    """

    def __init__(self, helper: Any) -> None:
        """Start an empty graph."""
        self._helper = helper
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.constants: list[Any] = []
        self._refused: list[str] = []  # outputs (N, 1) that mark rows with a refused cell

    def add_node(
        self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        """Add an operator to the graph, by names of its inputs and output; return the output's
        name.

        `domain`: name of the operator set; "": ONNX's own.
        """
        node = self._helper.make_node(operator, inputs, [output], domain=domain, **attributes)
        self.nodes.append(node)
        return output

    def add_constant(self, name: str, kind: int, values: list[Any]) -> str:
        """Add a constant vector of an ONNX element type; return its name."""
        self.constants.append(self._helper.make_tensor(name, kind, [len(values)], values))
        return name

    def add_column(self, index: int, column: Column, encoding: ColumnEncoding) -> str:
        """Add one column's features; return the name of their output (N, number of features).

        `index`: position of the column in the input.
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
            empty = self.add_node("IsNaN", [tensor_name], f"{prefix}_empty")
            tensor_name = self.add_node("Where", [empty, mean, tensor_name], f"{prefix}_filled")
        centred = self.add_node("Sub", [tensor_name, mean], f"{prefix}_centred")
        if column.constant:  # times zero, a value that is not finite becomes NaN, as elsewhere
            zero = self.add_constant(f"{prefix}_zero", _DOUBLE, [0.0])
            scaled = self.add_node("Mul", [centred, zero], f"{prefix}_scaled")
        else:
            scale = self.add_constant(f"{prefix}_scale", _DOUBLE, [column.scale])
            scaled = self.add_node("Div", [centred, scale], f"{prefix}_scaled")
        return self.add_node("Cast", [scaled], prefix, to=_FLOAT)

    def add_refusals(self, features: str, output: str) -> str:
        """Add the features with NaN in refused rows and in place of infinities; return their name.

        `features`: name of the encoded features. `output`: name for the result.
        """
        nan = self.add_constant("encoding/none", _FLOAT, [math.nan])
        refused = self.add_node("IsInf", [features], "encoding/infinite")
        for index, column in enumerate(self._refused):
            refused = self.add_node("Or", [refused, column], f"encoding/refused_{index}")
        return self.add_node("Where", [refused, nan, features], output)

    def _add_category(
        self, prefix: str, column: CategoricalColumn, encoding: ColumnEncoding
    ) -> str:
        """Add a text column's one-hot features; return their name.

        The graph compares texts exactly. So a text that training would have normalised to another
        form, and which is no known spelling, is refused. `prefix`: first part of the nodes' names.
        """
        blank = _build_blank_pattern()
        words = map(re.escape, sorted((EMPTY - column.texts) | BLANK))
        empty = self._add_match(column, f"{blank}*({'|'.join(words)}){blank}*", f"{prefix}_none")
        if encoding.missing != "mean":
            self._refused.append(empty)
        hot = self.add_node(
            "OneHotEncoder",
            [self._replace_spellings(prefix, column)],
            f"{prefix}_hot",
            "ai.onnx.ml",
            cats_strings=[text.encode() for text in column.categories],
            zeros=1,
        )
        hot_known = self.add_node("Flatten", [hot], f"{prefix}_known", axis=1)
        # Neither a category nor empty.
        axis = self.add_constant(f"{prefix}_axis", _INT64, [1])
        any_known = self.add_node("ReduceMax", [hot_known, axis], f"{prefix}_found")
        is_category = self.add_node("Cast", [any_known], f"{prefix}_taken", to=_BOOL)
        left_out = self.add_node("Or", [empty, is_category], f"{prefix}_left_out")
        is_unknown = self.add_node("Not", [left_out], f"{prefix}_other")
        pattern = f"(?s){blank}.*|.*{blank}|{_build_non_nfc_pattern()}|{RESPELT}"
        odd = self._add_match(column, pattern, f"{prefix}_odd")
        self._refused.append(self.add_node("And", [odd, is_unknown], f"{prefix}_refused"))
        if column.constant:
            ones = self.add_node("Equal", [column.name, column.name], f"{prefix}_same")
            return self.add_node("Cast", [ones], prefix, to=_FLOAT)
        return hot_known

    def _add_match(self, column: CategoricalColumn, pattern: str, output: str) -> str:
        """Add whether each cell matches a pattern as a whole; return the name `output`."""
        return self.add_node("RegexFullMatch", [column.name], output, pattern=pattern)

    def _replace_spellings(self, prefix: str, column: CategoricalColumn) -> str:
        """Add a node that replaces each known spelling of a category by the category; return its
        output's name, or the column's if there is one spelling each.

        `prefix`: first part of the node's name.
        """
        if len(column.spellings) == len(column.categories):
            return column.name
        return self.add_node(
            "LabelEncoder",
            [column.name],
            f"{prefix}_spelled",
            "ai.onnx.ml",
            keys_strings=[text.encode() for text in column.spellings],
            values_strings=[text.encode() for text in column.spellings.values()],
            default_string=b"",
        )

    def add_strip(self, encoding: ImageEncoding) -> None:
        """Add the extraction of this party's strip from whole images, scaled to [0, 1]."""
        image_shape = ["rows", encoding.channels, encoding.height, encoding.width]
        self.inputs.append(self._helper.make_tensor_value_info("images", _FLOAT, image_shape))
        first = self.add_constant("encoding/first_row", _INT64, [encoding.first_row])
        end = self.add_constant("encoding/end_row", _INT64, [encoding.end_row])
        axis = self.add_constant("encoding/axis", _INT64, [2])
        cut = self.add_node("Slice", ["images", first, end, axis], "encoding/strip")
        maximum = self.add_constant("encoding/maximum", _FLOAT, [float(encoding.maximum)])
        self.add_node("Div", [cut, maximum], _FEATURES)


def _name_outputs(helper: Any, joined: Any, model: SoloModel) -> None:
    """Name the outputs of the joined model, and add each row's class if the task has classes.

    `helper`: the module `onnx.helper`. `joined`: the ONNX model, which is changed in place.
    """
    graph = joined.graph
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
            helper.make_tensor("network/nobody", _INT64, [], [len(texts)]),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Identity", [predictions], [_PROBABILITIES]),
            *_make_decision_nodes(helper, graph, predictions, model.threshold),
            # A refused row has NaN for every class, so the first shows it; it gets the class "".
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
    """Return the nodes that decide each row's class, as `SoloModel.decide_classes` does.

    Their output "network/best" is the class's index.

    Args:
        helper: the module `onnx.helper`.
        graph: the graph, which the nodes' constants are added to.
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
    share = "network/share"
    decision = "network/over"
    return [
        helper.make_node("Gather", [probabilities, "network/second"], [share], axis=1),
        helper.make_node("GreaterOrEqual", [share, "network/threshold"], [decision]),
        helper.make_node("Cast", [decision], ["network/best"], to=_INT64),
    ]
