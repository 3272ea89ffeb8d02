"""Three parties' CSV files of the same people, and the settings of data that name them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["own_tables"]


def own_tables(folder: Path) -> dict[str, Any]:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(150, 4)), columns=list("abcd"))
    frame.insert(0, "id", [f"p{row}" for row in range(150)])
    frame["label"] = np.where(frame["a"] + frame["c"] > 0, "yes", "no")
    for name, columns in (("active", "ab"), ("shop", "c"), ("post", "d")):
        more = ["label"] if name == "active" else []
        frame[["id", *columns, *more]].to_csv(folder / f"{name}.csv", index=False)
    parties = {name: {"file": f"{name}.csv"} for name in ("active", "shop", "post")}
    return {"dataset": "tables", "folder": str(folder), "parties": parties}
