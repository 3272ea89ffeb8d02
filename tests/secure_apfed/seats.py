"""A contract, links, a sum and envelopes for tests of single parties."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from apfed_protocols.seal import RunKey, fresh_run_key
from apfed_protocols.sums import PlainSum, SumAgreement
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, InMemory, Kind, pack
from secure_apfed.parties import Compute
from secure_apfed.settings.training import TrainSettings

Network = TypeVar("Network", bound=InMemory)

SESSION = "session"
PASSIVES = ("p1", "p2")
COMPUTE = Compute(torch.device("cpu"), torch.float64)
TRAIN = TrainSettings(learning_rate=0.1, precision="float64", device="cpu")


def contract(
    *,
    shape: Sequence[int] = (3,),
    dtype: str = "float64",
    minimum_batch: int = 2,
    norms: tuple[float, float] = (1e-6, 100.0),
    weights: Mapping[str, float] | None = None,
    spread: float = 0.0,
) -> Contract:
    """An active, two passives and an aggregator."""
    roles = {"active": "active", "p1": "passive", "p2": "passive", "aggregator": "aggregator"}
    representation = {
        "shape": tuple(shape),
        "dtype": dtype,
        "minimum_norm": norms[0],
        "maximum_norm": norms[1],
        "minimum_spread": spread,
    }
    return Contract.model_validate(
        {
            "session": SESSION,
            "settings": {"guard": {"mechanism": "gaussian"}},
            "participants": [
                {"name": name, "role": role, "identity": "00" * 32, "public_key": "00" * 32}
                for name, role in roles.items()
            ],
            "passives": {
                name: {
                    "objective": {"name": "reconstruction"},
                    "weight": (weights or {}).get(name, 1.0),
                    "representation": representation,
                }
                for name in PASSIVES
            },
            "secure_sum": {},
            "minimum_batch": minimum_batch,
            "epochs": 100,
            "batch_size": 8,
        }
    )


def plain_sum(*, noise: int | None = None) -> PlainSum:
    """Of both passives, without a clip, but where there is noise under it."""
    agreement = SumAgreement(
        session=SESSION, receiver="active", combiner="aggregator", contributors=PASSIVES,
        clip_norm=1.0, noise=noise,
    )  # fmt: skip
    return PlainSum(agreement, clip=noise is not None, quantise=noise is not None)


def network(
    kind: type[Network],
    *names: str,
    run_keys: Mapping[str, RunKey] | None = None,
    record: Callable[[Envelope, int], None] = lambda envelope, wire_bytes: None,
) -> Network:
    """Sealed links of parties of these names, under one contract."""
    return kind.sealed(
        session=SESSION,
        contract_hash=bytes(32),
        run_keys=run_keys or {name: fresh_run_key() for name in names},
        record=record,
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def envelope(payload: bytes, *, kind: Kind, step: int = 0, **changes: Any) -> Envelope:
    """From the active to p1, unless changed."""
    usual: dict[str, Any] = {
        "session": SESSION,
        "step": step,
        "kind": kind,
        "sender": "active",
        "receiver": "p1",
        "sequence": 0,
        "payload": payload,
    }
    return Envelope(**{**usual, **changes})


def representations(rows: Tensor, z: Tensor, *, step: int = 0, **changes: Any) -> Envelope:
    """A batch as the active sends it."""
    payload = pack({"rows": rows, "z": z})
    return envelope(payload, kind=Kind.REPRESENTATIONS, step=step, **changes)


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a party's state that training cannot reach."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
