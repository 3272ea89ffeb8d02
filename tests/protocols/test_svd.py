"""FedSVD: the singular vectors are those of the whole table, and each party learns what is told."""

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from tests.refusals import list_unrefused

pytest.importorskip("scipy")  # of the extra `svd`
from apfed_protocols import svd

Floats = NDArray[np.float64]

PEOPLE = b"\1" * 32
OTHERS = b"\2" * 32
_SESSIONS = count()
_BODY = 72  # bytes before the body of a frame


def agreement(*features: int, **changes: Any) -> svd.SvdAgreement:
    features = features or (3, 4)
    usual: dict[str, Any] = {
        "session": f"svd {next(_SESSIONS)}",
        "server": "server",
        "dealer": "dealer",
        "owners": ("active", "p1", "p2", "p3")[: len(features)],
        "features": features,
        "receiver": "active",
        "vectors": sum(features),
        "mask_rows": 8,
        "max_rows": 1000,
    }
    return svd.SvdAgreement(**usual | changes)


def table(rows: int, agreed: svd.SvdAgreement, seed: int = 0) -> Floats:
    draw = np.random.default_rng(seed)
    scale_F: Floats = draw.uniform(0.5, 3, agreed.columns)
    return draw.normal(size=(rows, agreed.columns)) * scale_F


class Parties:
    """All roles of one decomposition after the dealer's messages, which are kept."""

    def __init__(self, agreed: svd.SvdAgreement) -> None:
        self.agreed = agreed
        self.server = svd.SvdServer(agreed)
        self.receiver = svd.SvdReceiver(agreed)
        self.owners: dict[str, svd.SvdOwner] = {
            name: self.receiver if name == agreed.receiver else svd.SvdOwner(agreed, name)
            for name in agreed.owners
        }
        self.dealt = {
            message.receiver: message.body for message in svd.SvdDealer(agreed).deal_masks()
        }
        for name, body in self.dealt.items():
            self.owners[name].take_masks(body)

    def mask(self, table_NF: Floats, people: bytes = PEOPLE) -> dict[str, bytes]:
        return {
            name: owner.mask_table(table_NF[:, self.agreed.get_columns(name)].copy(), people)
            for name, owner in self.owners.items()
        }

    def play(self, table_NF: Floats) -> Floats:
        vectors = self.server.factor_tables(self.mask(table_NF))
        return self.receiver.open_vectors(vectors, PEOPLE, row_count=len(table_NF))


def compute_left_vectors(table_NF: Floats, count: int) -> Floats:
    """By numpy, each with the sign by which its largest number is positive."""
    left = np.linalg.svd(table_NF, full_matrices=False)[0][:, :count]
    signs = np.sign(left[np.abs(left).argmax(axis=0), range(count)])
    return np.asarray(left * signs, dtype=np.float64)


@pytest.mark.parametrize(
    ("features", "mask_rows", "rows", "vectors"),
    [
        ((3, 4), 2, 12, 7),
        ((5, 1, 4), 7, 301, 10),
        ((2, 3, 4, 3), 512, 50, 12),
        ((3, 4), 9, 40, 3),
    ],
)
def test_it_opens_the_first_singular_vectors_of_the_whole_table(
    features: tuple[int, ...], mask_rows: int, rows: int, vectors: int
) -> None:
    agreed = agreement(*features, mask_rows=mask_rows, vectors=vectors)
    held = table(rows, agreed)
    found = Parties(agreed).play(held)
    assert found.shape == (rows, vectors)
    assert np.abs(found - compute_left_vectors(held, vectors)).max() < 1e-8


def test_beyond_the_rank_there_are_zeros() -> None:
    agreed = agreement()
    held = table(40, agreed)
    held[:, 5:] = held[:, :2] - held[:, 2:4]
    found = Parties(agreed).play(held)
    assert np.abs(found[:, :5] - compute_left_vectors(held, 5)).max() < 1e-8
    assert not found[:, 5:].any()


def test_masks_are_uniform_among_orthogonal_matrices() -> None:
    """LAPACK's factor alone has a negative first number always: its signs are fixed by R's."""
    key = fresh_key()
    drawn = [svd.draw_orthogonal(5, key, bytes([at])) for at in range(250)]
    assert max(np.abs(one @ one.T - np.eye(5)).max() for one in drawn) < 1e-13
    positive = np.mean([one > 0 for one in drawn], axis=0)
    assert np.abs(positive - 0.5).max() < 5 * 0.5 / np.sqrt(250)
    squares = np.mean([one**2 for one in drawn], axis=0)
    assert np.abs(squares - 0.2).max() < 0.08
    assert 0.75 < np.std([np.trace(one) for one in drawn]) < 1.25  # 1 under the uniform law


@pytest.mark.parametrize(("rows", "maximum"), [(2, 2), (9, 4), (100, 33), (1000, 999), (5, 100)])
def test_blocks_are_of_equal_size(rows: int, maximum: int) -> None:
    sizes = svd.split_rows(rows, maximum)
    assert sum(sizes) == rows
    assert max(sizes) <= maximum
    assert max(sizes) - min(sizes) <= 1


def test_a_mask_is_of_these_people_alone() -> None:
    held = table(20, agreement())
    seed = fresh_key()
    masked = [svd.mask_table_rows(held, seed, people, mask_rows=8) for people in (PEOPLE, OTHERS)]
    assert np.abs(masked[0] - masked[1]).max() > 0.1


# What masks do not hide (docs/papers.md); each of these would be a surprise to a reader.


def parse_frame(frame: bytes, columns: int) -> Floats:
    return np.frombuffer(frame[_BODY:], dtype="<f8").reshape(-1, columns)


def test_the_server_reads_singular_values_of_each_owner_and_of_each_block() -> None:
    parties = Parties(agreement(mask_rows=10))
    held = table(40, parties.agreed)
    masked = parse_frame(parties.mask(held)["p1"], 7)
    parts = (slice(None), slice(0, 10), slice(30, 40))
    told = [np.linalg.svd(masked[rows], compute_uv=False)[:4] for rows in parts]
    own = [np.linalg.svd(held[rows, 3:], compute_uv=False) for rows in parts]
    assert np.allclose(told, own, rtol=1e-10)


def test_the_server_and_an_owner_read_products_of_rows_of_every_other_one() -> None:
    parties = Parties(agreement(3, 4, 2))
    held = table(40, parties.agreed)
    masked = parties.mask(held)["p1"]
    seed = parties.dealt["p2"][_BODY : _BODY + 32]
    mask_NN = svd.mask_table_rows(np.eye(40), seed, PEOPLE, mask_rows=8)
    rotated = mask_NN.T @ parse_frame(masked, 9)
    assert np.allclose(rotated @ rotated.T, held[:, 3:7] @ held[:, 3:7].T, atol=1e-10)
    assert np.abs(rotated[:, :4] - held[:, 3:7]).max() > 0.1  # up to an orthogonal transformation


def test_the_active_computes_every_column_of_which_it_knows_as_many_rows_as_vectors() -> None:
    parties = Parties(agreement())
    held = table(60, parties.agreed)
    vectors = parties.play(held)
    known = slice(0, 7)
    weights = np.linalg.solve(vectors[known], held[known, 3:])
    assert np.allclose(vectors @ weights, held[:, 3:], atol=1e-8)


# Peers' bytes are hostile.


def replace_number(frame: bytes, at: int, value: float) -> bytes:
    return frame[: _BODY + 8 * at] + np.float64(value).tobytes() + frame[_BODY + 8 * at + 8 :]


def test_the_server_refuses_what_does_not_fit() -> None:
    parties = Parties(agreement())
    held = table(20, parties.agreed)
    tables = parties.mask(held)
    foreign = Parties(agreement()).mask(held)
    others = Parties(parties.agreed).mask(held[:-1])
    people = Parties(parties.agreed).mask(held, OTHERS)
    one = tables["p1"]
    cases: list[tuple[dict[str, bytes], str]] = [
        ({"p1": one[:-1]}, "p1 sent a body of .* cut or padded"),
        ({"p1": one + bytes(8)}, "cut or padded"),
        ({"p1": one[:_BODY]}, "expected TABLE of 7 to 1000 rows of 7 numbers"),
        ({"p1": one[: _BODY + 6 * 56]}, "expected TABLE of 7 to 1000 rows"),
        ({"p1": b""}, "p1 sent 0 bytes, too few"),
        ({"p1": b"X" + one[1:]}, "its format differs"),
        ({"p1": one[:4] + b"\2" + one[5:]}, "its version differs"),
        ({"p1": tables["active"]}, "its owner differs"),
        ({"p1": parties.dealt["p1"]}, "its kind differs"),
        ({"p1": foreign["p1"]}, "its agreement differs"),
        ({"p1": others["p1"]}, "active and p1 sent tables of different rows"),
        ({"p1": people["p1"]}, "active and p1 sent tables of different rows"),
        ({"p1": replace_number(one, 0, np.nan)}, "numbers that are none"),
        ({"p1": replace_number(one, 3, -np.inf)}, "numbers that are none"),
        ({"p2": one}, "missing: none; unknown: p2"),
    ]
    wrong = [(message, tables | changed) for changed, message in cases]
    assert list_unrefused(RemoteProtocolError, parties.server.factor_tables, wrong) == []
    with pytest.raises(RemoteProtocolError, match="missing: p1"):
        parties.server.factor_tables({"active": tables["active"]})
    opened = parties.receiver.open_vectors(
        parties.server.factor_tables(tables), PEOPLE, row_count=20
    )
    assert np.abs(opened - compute_left_vectors(held, 7)).max() < 1e-8


def test_numbers_that_would_overflow_are_refused_before_they_are_added() -> None:
    parties = Parties(agreement())
    tables = parties.mask(table(20, parties.agreed))
    with pytest.raises(RemoteProtocolError, match=r"active sent TABLE .* beyond 1e"):
        parties.server.factor_tables(
            {name: replace_number(one, 0, 1e101) for name, one in tables.items()}
        )
    parties.server.factor_tables(
        {name: replace_number(one, 0, 9e99) for name, one in tables.items()}
    )


def test_the_receiver_refuses_what_does_not_fit() -> None:
    parties = Parties(agreement(vectors=2))
    held = table(20, parties.agreed)
    vectors = parties.server.factor_tables(parties.mask(held))
    frames = svd.SvdFrames(parties.agreed)

    def pack_vectors(matrix: Floats, people: bytes = PEOPLE) -> bytes:
        return frames.pack_matrix(
            svd.MessageKind.VECTORS, matrix, owner="active", people_digest=people
        )

    unit = np.eye(20)[:, :2]
    cases = [
        (vectors[:-8], "cut or padded"),
        (replace_number(vectors, 0, np.inf), "numbers that are none"),
        (replace_number(vectors, 0, 1.5), "server sent vectors that are not orthonormal"),
        (pack_vectors(unit[:, [0, 0]]), "not orthonormal"),
        (pack_vectors(unit * 1e99), "not orthonormal"),
        (pack_vectors(unit[:, :1] * [0, 1]), "a vector after one of zeros"),
        (pack_vectors(unit[:19]), "19 rows of vectors, expected 20"),
        (pack_vectors(unit, OTHERS), "expected 20, of the people asked for"),
    ]
    open_vectors = partial(parties.receiver.open_vectors, people_digest=PEOPLE, row_count=20)
    wrong = [(message, body) for body, message in cases]
    assert list_unrefused(RemoteProtocolError, open_vectors, wrong) == []
    opened = parties.receiver.open_vectors(vectors, PEOPLE, row_count=20)
    assert np.abs(opened - compute_left_vectors(held, 2)).max() < 1e-8


def test_an_owner_refuses_masks_that_are_none() -> None:
    agreed = agreement()
    dealt = Parties(agreed).dealt
    cases = [
        ("cut or padded", dealt["p1"][:-8]),
        ("its owner differs", dealt["active"]),
        ("numbers that are none", replace_number(dealt["p1"], 5, np.nan)),
        ("dealer sent vectors that are not orthonormal", replace_number(dealt["p1"], 5, 1.5)),
    ]
    take = lambda body: svd.SvdOwner(agreed, "p1").take_masks(body)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, take, cases) == []


def test_each_part_is_played_once_and_in_order() -> None:
    parties = Parties(agreement())
    held = table(20, parties.agreed)
    fresh = svd.SvdOwner(parties.agreed, "p1")
    with pytest.raises(LocalProtocolError, match="p1 was dealt no masks yet"):
        fresh.mask_table(held[:, 3:].copy(), PEOPLE)
    with pytest.raises(LocalProtocolError, match="sent no table yet"):
        parties.receiver.open_vectors(b"", PEOPLE, row_count=20)
    tables = parties.mask(held)
    with pytest.raises(LocalProtocolError, match="played its part"):
        parties.owners["p1"].mask_table(held[:, 3:].copy(), OTHERS)
    with pytest.raises(LocalProtocolError, match="holds its masks already"):
        parties.owners["p1"].take_masks(parties.dealt["p1"])
    vectors = parties.server.factor_tables(tables)
    with pytest.raises(LocalProtocolError, match="played its part"):
        parties.server.factor_tables(tables)
    parties.receiver.open_vectors(vectors, PEOPLE, row_count=20)
    with pytest.raises(LocalProtocolError, match="or opened its answer"):
        parties.receiver.open_vectors(vectors, PEOPLE, row_count=20)
    dealer = svd.SvdDealer(parties.agreed)
    dealer.deal_masks()
    with pytest.raises(LocalProtocolError, match="masks are used once"):
        dealer.deal_masks()


@pytest.mark.parametrize(
    ("held", "people", "message"),
    [
        pytest.param(np.zeros((20, 4), np.float32), PEOPLE, "got float32", id="another width"),
        pytest.param(np.zeros((20, 3)), PEOPLE, "4 columns, got float64", id="a column less"),
        pytest.param(np.zeros((6, 4)), PEOPLE, "7 to 1000 rows", id="too few rows"),
        pytest.param(np.full((20, 4), np.nan), PEOPLE, "bounded float64", id="nan"),
        pytest.param(
            np.zeros((20, 4)), bytes(32), "people is a digest of 32 bytes", id="a short digest"
        ),
    ],
)
def test_a_table_is_checked(held: Any, people: bytes, message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        Parties(agreement()).owners["p1"].mask_table(held, people)
