"""Why a bench leaves out what needs CrypTen, an optional extra."""

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError

__all__ = ["why_no_crypten"]


def why_no_crypten() -> str:
    """Return what is wrong with CrypTen here; nothing if it loads."""
    try:
        load_crypten()
    except LocalProtocolError as error:
        return str(error)
    return ""
