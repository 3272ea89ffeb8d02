"""Supplies of triples on the disk: written privately, taken once, by whomever."""

import multiprocessing
import stat
from pathlib import Path

import pytest

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.circuit import CircuitIntersection
from apfed_protocols.psi.interface import IntersectionAgreement, Supply
from secure_apfed.alignment.records import store_supply, take_supply
from secure_apfed.errors import DataError

AGREEMENT = IntersectionAgreement(
    session="s", dealer="d", sizes={"hub": 40, "p": 30}, ahead=True, maximum_ids=100
)


def stock() -> dict[str, Supply]:
    stocking = CircuitIntersection(AGREEMENT)
    hub, member = stocking.stock_hub("hub", ["p"]), stocking.stock_member("p", "hub")
    converse({"hub": hub, "p": member, "d": stocking.stock_dealer("hub", ["p"])})
    return {"hub": hub.supply, "p": member.supply}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    stored = {name: tmp_path / name for name in ("hub", "p")}
    for name, supply in stock().items():
        store_supply(supply, stored[name])
    return stored


def align(supplies: dict[str, Supply]) -> list[int]:
    protocol = CircuitIntersection(AGREEMENT)
    ids = [b"%d" % k for k in range(60)]
    hub = protocol.hub("hub", ["p"], ids[:40], supply=supplies["hub"])
    member = protocol.member("p", "hub", ids[30:], supply=supplies["p"])
    converse({"hub": hub, "p": member, "d": protocol.dealer("hub", ["p"])})
    return sorted(hub.rows.tolist())


def test_what_was_stored_is_its_owners_serves_once_and_is_gone(files: dict[str, Path]) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    copy = files["hub"].read_bytes()
    assert align({name: take_supply(path) for name, path in files.items()}) == list(range(30, 40))
    for path in files.values():
        with pytest.raises(DataError, match="there is no supply in"):
            take_supply(path)
    for name in ("hub", "another name"):  # a copy that is put back is noticed
        (files["hub"].parent / name).write_bytes(copy)
        with pytest.raises(DataError, match=r"was taken before; have another dealt"):
            take_supply(files["hub"].parent / name)


def take(path: Path) -> bool:
    try:
        take_supply(path)
    except DataError:
        return False
    return True


def test_of_several_processes_one_takes_it(files: dict[str, Path]) -> None:
    copies = [files["hub"].with_name(f"copy {k}") for k in range(8)]
    for copy in copies:
        copy.write_bytes(files["hub"].read_bytes())
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        taken = pool.map(take, [files["hub"], *copies, files["hub"]], 1)
    assert sum(taken) == 1


def test_a_file_is_not_written_over_nor_marked_where_damaged(files: dict[str, Path]) -> None:
    whole, supply = files["hub"].read_bytes(), stock()["hub"]
    with pytest.raises(DataError, match="exists already; store each supply in a file of its own"):
        store_supply(supply, files["hub"])
    assert files["hub"].read_bytes() == whole
    free, two = files["hub"].with_name("free"), files["hub"].with_name("two")
    store_supply(supply, free)
    with pytest.raises(LocalProtocolError, match="was stored already"):
        store_supply(supply, two)
    assert not two.exists()
    files["hub"].write_bytes(whole[:-1])
    with pytest.raises(LocalProtocolError, match="a stored supply does not match its checksum"):
        take_supply(files["hub"])
    files["hub"].write_bytes(whole)
    take_supply(files["hub"])
    take_supply(free)  # two supplies share no marker
