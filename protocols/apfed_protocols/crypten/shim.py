"""The one place that imports CrypTen, which is an optional extra.

Run by: whoever computes on CrypTen's shared tensors, through `load_crypten`. CrypTen 0.4.1
imports a converter of ONNX models whose parts torch 2.9 dropped, and names a dead package
among its requirements. So an empty converter stands in for its own before the import, and the
pip command leaves the requirements out. Everything but ONNX conversion works.

What CrypTen asks of the world around it (who am I, who carries my messages, who deals my
triples) it looks up in global variables. `apfed_protocols.crypten.party` answers these questions
for each thread, and the lookups are turned there once, here.
"""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn

from apfed_protocols.errors import LocalProtocolError

__all__ = ["INSTALL", "load_crypten"]

INSTALL = "pip install --no-deps crypten==0.4.1"
_CRYPTEN = "crypten"
_CONVERTER = "crypten.nn.onnx_converter"


def load_crypten() -> Any:
    """Import CrypTen, once, and return its module.

    Raises:
        LocalProtocolError: it is not installed, or does not load; says what to do. Nothing of it
            stays among the loaded modules then.
    """
    from apfed_protocols.crypten.party import turn_lookups

    known = sys.modules.get(_CRYPTEN)
    crypten = _import_with_stand_in() if known is None else known
    turn_lookups(crypten)
    return crypten


def _import_with_stand_in() -> ModuleType:
    before = set(sys.modules)
    sys.modules[_CONVERTER] = _stand_in()
    try:
        with warnings.catch_warnings():
            # its sources have backslashes that today's Python complains about when it compiles them
            warnings.simplefilter("ignore")
            return importlib.import_module(_CRYPTEN)
    except ModuleNotFoundError as error:
        _forget(before)
        missing = error.name or _CRYPTEN
        extra = "" if missing == _CRYPTEN else f", and its requirement {missing} with pip"
        raise LocalProtocolError(
            f"the module {missing} is missing; install CrypTen, the optional extra `mpc`, by "
            f"`{INSTALL}`{extra}"
        ) from error
    except (ImportError, AttributeError) as error:
        _forget(before)
        raise LocalProtocolError(
            f"CrypTen does not load beside this torch ({error}); the release that works is "
            f"installed by `{INSTALL}`"
        ) from error


def _forget(before: set[str]) -> None:
    """Remove what a failed import left behind, the stand-in too."""
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == _CRYPTEN:
            del sys.modules[name]


def _stand_in() -> ModuleType:
    converter = ModuleType(_CONVERTER, "Stands in for CrypTen's converter of ONNX models.")
    for name in ("from_onnx", "from_pytorch", "from_tensorflow"):
        setattr(converter, name, _refuse_conversion)
    vars(converter)["TF_AND_TF2ONNX"] = False
    return converter


def _refuse_conversion(*_args: object, **_options: object) -> NoReturn:
    raise LocalProtocolError(
        "CrypTen 0.4.1 cannot convert models with this torch; build the model from crypten.nn"
    )
