"""How an active asks about many people among decoys, on a seat that answers what it was sent."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.live.strategy import ask_among_decoys, rows_at_once
from secure_apfed.contract import RepresentationTerms


class Echo:
    """Answers each row with what it was sent and noise of deviation 1; keeps the questions."""

    def __init__(self, rows: int) -> None:
        self.trained = torch.arange(rows)
        self.terms = RepresentationTerms(
            shape=(8,), dtype="float32", minimum_norm=0.0, maximum_norm=1e4
        )
        self.batch_size = 20
        self.asked: list[Tensor] = []
        self.draw = torch.Generator().manual_seed(1)

    def ask(self, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        assert len(rows_B) == len(z_BD) <= self.batch_size
        assert len(rows_B.unique()) == len(rows_B)
        self.asked.append(rows_B)
        return z_BD + torch.randn(z_BD.shape, generator=self.draw, dtype=z_BD.dtype)


def _ask(seat: Any, **options: Any) -> Tensor:
    people = torch.arange(30)
    z = torch.arange(30.0, dtype=torch.float64)[:, None].expand(30, 8).clone()
    draw = torch.Generator().manual_seed(0)
    answers = ask_among_decoys(DecoderExtraction(**options), seat, people, z, draw)
    return answers - z


@pytest.mark.parametrize("decoys", [0.0, 0.5])
def test_repeats_average_noise_and_answers_keep_their_order(decoys: float) -> None:
    once = _ask(Echo(200), decoys=decoys)
    often = _ask(Echo(200), decoys=decoys, repeats=16)
    assert once.square().mean().sqrt() == pytest.approx(1, abs=0.2)
    assert often.square().mean().sqrt() == pytest.approx(1 / 4, abs=0.05)


def test_decoys_are_others_and_take_turns() -> None:
    seat = Echo(200)
    _ask(seat, decoys=0.5, repeats=8)
    assert len(seat.asked) == 8 * 3
    counts = torch.cat(seat.asked).bincount(minlength=200)
    assert counts[:30].tolist() == [8] * 30
    assert counts[30:].sum() == 8 * 30
    assert counts[30:].max() <= 8


def test_without_enough_others_the_people_themselves_are_decoys() -> None:
    seat = Echo(30)
    _ask(seat, decoys=0.5)
    assert [len(rows) for rows in seat.asked] == [20, 20, 20]


def test_a_batch_never_grows_beyond_what_was_agreed() -> None:
    seat: Any = Echo(200)
    assert rows_at_once(DecoderExtraction(decoys=0.99), seat) == 1
    _ask(seat, decoys=0.99)


@pytest.mark.parametrize("repeats", [0, -1, 1.5])
def test_it_is_asked_a_whole_number_of_times(repeats: Any) -> None:
    with pytest.raises(ValidationError, match="repeats"):
        DecoderExtraction(repeats=repeats)
