"""Every secret of a sum that lives in this process, found by what holds it."""

import base64
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import tenseal.sealapi as seal

from apfed_protocols.seal import RunKey
from apfed_protocols.sums.crypten_sum import CryptenContributor
from apfed_protocols.sums.masked import PairwiseSeeds
from apfed_protocols.sums.recoverable import StepKeys
from apfed_protocols.sums.seal_cipher import SealForm, scratch_file

__all__ = ["SealKeys", "alive", "secrets_alive", "shown_in"]


def secrets_alive() -> set[bytes]:
    """Private keys, pair seeds, self-mask seeds and share keys of all roles in this process."""
    kinds = RunKey, StepKeys, PairwiseSeeds, CryptenContributor
    return {secret for thing in alive(*kinds) for secret in _secrets_of(thing)}


def alive(*kinds: type) -> list[Any]:
    """All objects of these classes in this process; `isinstance` would wake lazy modules."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _secrets_of(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, RunKey):
        yield vars(thing)["_private"].private_bytes_raw()
    elif isinstance(thing, StepKeys):
        yield thing.seed
    elif isinstance(thing, PairwiseSeeds):
        yield from vars(thing).get("_seeds", {}).values()
    elif isinstance(thing, CryptenContributor):
        yield vars(thing)["_secret"]


class SealKeys:
    """Numbers of every secret key that SEAL makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._generators: list[Any] = []
        self._genuine = seal.KeyGenerator
        monkeypatch.setattr(seal, "KeyGenerator", self._generator)

    def _generator(self, context: Any) -> Any:
        self._generators.append(self._genuine(context))
        return self._generators[-1]

    def numbers(self) -> set[bytes]:
        keys = (made.secret_key() for made in self._generators)
        return {part for key in keys for part in self.numbers_of(key)}

    @staticmethod
    def numbers_of(key: Any) -> list[bytes]:
        """Two runs of four numbers of a public or secret key, as SEAL keeps them."""
        with scratch_file() as scratch:
            content = SealForm.content(scratch.save(key))
        return [content[-32:], content[-32 * 512 :][:32]]


def shown_in(secrets: Iterable[bytes], told: bytes) -> list[bytes]:
    """The secrets that `told` shows: raw, in hexadecimal, in base64, or as Python prints them."""
    return [
        secret
        for secret in secrets
        if any(form in told for form in (
            secret, secret.hex().encode(), base64.b64encode(secret)[:40],
            repr(secret)[2:-1].encode(),
        ))
    ]  # fmt: skip
