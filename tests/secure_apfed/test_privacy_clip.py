from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ModelError
from secure_apfed.privacy.noise import clip_rows

TYPES = [torch.float32, torch.float64]
HOSTILE = {
    "zeros": [0.0] * 8,
    "one-hot": [0.0] * 7 + [1e3],
    "huge": [1e30] * 8,
    "largest float32": [3.4e38] * 8,
    "huge and tiny": [1e30, 1e-30, -1e30, 0, 1e-45, 1, -1, 5],
    "subnormal": [1e-45] * 8,
    "on the sphere": [1 / 8**0.5] * 8,
    "just outside": [1.0000001 / 8**0.5] * 8,
    "negative": [-7.0] * 8,
}


def exact_square(row: torch.Tensor) -> Fraction:
    """The squared norm without any rounding."""
    return sum((Fraction(value) ** 2 for value in row.tolist()), Fraction(0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("bound", [1e-6, 0.3, 1.0, 1e6])
def test_hostile_rows_stay_within_the_bound(name: str, bound: float, dtype: torch.dtype) -> None:
    h_BD = torch.tensor([HOSTILE[name], [0.1] * 8], dtype=dtype)
    rounded = clip_rows(h_BD, bound).to(dtype)
    assert all(exact_square(row) <= Fraction(bound) ** 2 for row in rounded)


@settings(max_examples=60, deadline=None)
@given(
    arrays("float32", (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from([1e-6, 0.7, 1.0, 3e5]),
)
def test_any_finite_row_stays_within_the_bound(values, bound: float) -> None:  # type: ignore[no-untyped-def]  # hypothesis' arrays carry no useful type
    rounded = clip_rows(torch.from_numpy(values), bound).float()
    assert all(exact_square(row) <= Fraction(bound) ** 2 for row in rounded)


def test_a_double_beyond_any_square_stays_within_the_bound() -> None:
    rounded = clip_rows(torch.full((2, 300), 1e300, dtype=torch.float64), 1.0)
    assert all(exact_square(row) <= 1 for row in rounded)


def test_a_long_row_keeps_nearly_the_whole_bound_and_its_direction() -> None:
    h_BD = torch.tensor([[3.0, 4.0]])
    clipped = clip_rows(h_BD, 1.0)
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.8]], dtype=torch.float64), rtol=1e-6)
    assert clipped.norm() > 1 - 1e-6


def test_rows_within_the_bound_come_back_unchanged() -> None:
    h_BD = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    h_BD = h_BD / h_BD.norm(dim=1, keepdim=True) * 0.99
    assert torch.equal(clip_rows(h_BD, 1.0).float(), h_BD)


def test_the_gradient_is_that_of_the_projection_onto_the_ball() -> None:
    h_BD = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h_BD[0] *= 0.01
    h_BD.requires_grad_()
    assert torch.autograd.gradcheck(lambda h: clip_rows(h, 1.0), (h_BD,))


def test_the_gradient_is_finite_for_hostile_rows() -> None:
    h_BD = torch.tensor(list(HOSTILE.values()), requires_grad=True)
    clip_rows(h_BD, 1.0).sum().backward()
    assert h_BD.grad is not None
    assert torch.isfinite(h_BD.grad).all()
    assert torch.equal(h_BD.grad[0], torch.ones(8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_refused_by_number(bad: float) -> None:
    h_BD = torch.zeros(4, 3)
    h_BD[2, 1] = bad
    with pytest.raises(ModelError, match="row 2 of the representations is not finite"):
        clip_rows(h_BD, 1.0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batches_pass(shape: tuple[int, int]) -> None:
    assert clip_rows(torch.zeros(shape), 1.0).shape == shape


@pytest.mark.parametrize(
    "h",
    [
        torch.zeros(3),
        torch.zeros(2, 2, 2),
        torch.zeros(2, 2, dtype=torch.float16),
        torch.zeros(2, 2, dtype=torch.bfloat16),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.complex64),
    ],
)
def test_other_shapes_and_types_are_refused(h: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="float32 or float64 matrix"):
        clip_rows(h, 1.0)
