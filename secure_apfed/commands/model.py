"""The commands `secure-apfed predict` and `export`: the model that the active keeps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson, RunFolder

if TYPE_CHECKING:
    from secure_apfed.runs.solo import Compared

__all__ = ["export", "predict"]


def predict(
    model: Annotated[Path, typer.Option(metavar="RUN", help="Folder of a finished run.")],
    data: Annotated[Path, typer.Option(metavar="FILE", help="CSV, Parquet, .npy or IDX.")],
    output: Annotated[
        Path | None, typer.Option(help="Write to .csv, .parquet or .json instead.")
    ] = None,
    id_column: Annotated[
        list[str] | None, typer.Option(help="Column that names a row; as in training unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the active's own rows, with no other party present."""
    from secure_apfed.runs.solo import predict_file, predict_into

    if output is None:
        predictions = predict_file(model, data, id_columns=id_column)
        compared, shown = predictions.compared, predictions.as_json()
    else:
        predictions, compared = None, predict_into(model, data, output, id_columns=id_column)
        shown = {"rows": compared.rows, **compared.as_json()}
    if as_json:
        terminal.print_json({**shown, "output": output})
    elif predictions is None:
        terminal.show_note(f"{compared.rows} rows written to {output}")
    else:
        rows = [
            tuple(cell if isinstance(cell, str) else f"{cell:.4f}" for cell in row)
            for row in predictions.cells()
        ]
        terminal.show_rows("Predictions", predictions.columns(), rows)
    if not as_json:
        _show_differences(compared)


def _show_differences(compared: "Compared") -> None:
    for column in compared.drift:
        if column.notable:
            terminal.show_note(f"column {column.name!r}: {column.notable}")
    if compared.stability is None and compared.stability_needs:
        terminal.show_note(
            f"no score stability index: of {compared.rows} rows it would be high by chance, of "
            f"{compared.stability_needs} or more it says something"
        )
    if compared.stability is not None:
        terminal.show_note(
            f"score stability index against the training rows: {compared.stability:.3f} (below "
            "0.1: alike; above 0.25: these rows are scored otherwise)"
        )


def export(
    folder: RunFolder,
    onnx: Annotated[Path, typer.Option(metavar="FILE", help="Written, or replaced.")],
    as_json: AsJson = False,
) -> None:
    """Write the active's model with its encoding as ONNX, to predict without this library."""
    from secure_apfed.contrib.onnx_file import write_onnx
    from secure_apfed.runs.solo import load_model

    write_onnx(load_model(folder), onnx)
    if as_json:
        terminal.print_json({"onnx": onnx, "bytes": onnx.stat().st_size})
    else:
        terminal.show_note(f"{onnx} holds the model; see docs/onnx.md for its inputs and outputs")
