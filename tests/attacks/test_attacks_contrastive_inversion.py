from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.features.contrastive_inversion import Question, contrastive_sum, explain_sums
from apfed_attacks.recorded import truth_of, view_of
from apfed_attacks.run import mount
from apfed_attacks.view import Agreed, AttackError, Knowledge
from secure_apfed.config import AttackChoice
from secure_apfed.exchange import Kind, TensorSpec, unpack
from secure_apfed.objectives import contrastive_loss
from secure_apfed.settings.training import ContrastiveSettings

PASSIVES = ("passive-1", "passive-2")
SPEC = {
    "rows": TensorSpec(torch.int64, (None,)),
    "z": TensorSpec(torch.float32, (None, None)),
}


def _gradient(h_BD: Tensor, p_BD: Tensor, anchors: str) -> Tensor:
    """Return what a passive contributes: B dL_p/dh."""
    sent = h_BD.clone().requires_grad_()
    loss = contrastive_loss(sent, p_BD, temperature=1.0, anchors=anchors)
    (gradient,) = torch.autograd.grad(loss * len(h_BD), sent)
    return gradient


def _random(draw: torch.Generator, passives: int) -> tuple[Tensor, list[Tensor]]:
    h_BD = torch.randn(64, 32, generator=draw, dtype=torch.float64)
    return h_BD, [torch.randn(64, 32, generator=draw, dtype=torch.float64) for _ in range(passives)]


def _agreed(anchors: Any = "both", *, weight: float = 1.0, clip: float | None = None) -> Agreed:
    return Agreed(objective=ContrastiveSettings(anchors=anchors), weight=weight, clip=clip)


@pytest.mark.parametrize("anchors", ["both", "active"])
def test_one_passives_representations_are_recovered_from_one_step(anchors: str) -> None:
    h_BD, (p_BD,) = _random(torch.Generator().manual_seed(0), 1)
    sum_BD = 0.5 * _gradient(h_BD, p_BD, anchors)
    found = explain_sums([Question.of(h_BD, sum_BD)], [_agreed(anchors, weight=0.5)], 300)
    assert float(F.cosine_similarity(found, p_BD).mean()) > 0.93


def test_clipped_rows_are_matched_as_the_passive_clips_them() -> None:
    h_BD, (p_BD,) = _random(torch.Generator().manual_seed(0), 1)
    real_BD = _gradient(h_BD, p_BD, "both")
    bound = float(real_BD.norm(dim=1).median())
    sent_BD = real_BD * (bound / real_BD.norm(dim=1, keepdim=True)).clamp(max=1)
    agreed = _agreed(clip=bound)
    assert torch.allclose(contrastive_sum(h_BD, p_BD, [agreed]), sent_BD, atol=1e-12)
    found = explain_sums([Question.of(h_BD, sent_BD)], [agreed], 300)
    assert float(F.cosine_similarity(found, p_BD).mean()) > 0.85


def test_a_sum_of_several_passives_gives_a_mixture_only() -> None:
    h_BD, several = _random(torch.Generator().manual_seed(0), 5)
    total = torch.stack([_gradient(h_BD, p_BD, "active") for p_BD in several]).sum(dim=0)
    found = explain_sums([Question.of(h_BD, total)], [_agreed("active")] * 5, 300)
    assert float(F.cosine_similarity(found, several[0]).mean()) < 0.5
    # It explains the sum all the same: leakage is weakened, not absent.
    assert torch.allclose(5 * _gradient(h_BD, found, "active"), total, atol=5e-4)


def test_a_zero_sum_is_refused() -> None:
    with pytest.raises(AttackError, match="the sum is zero everywhere"):
        explain_sums([Question.of(torch.ones(3, 2), torch.zeros(3, 2))], [_agreed()], 1)


def _opened(recording: Any, passives: tuple[str, ...]) -> Mapping[int, Tensor]:
    """Return the sums of real contrastive gradients of fixed encoders of the passives."""
    features = truth_of(recording).features
    draw = torch.Generator().manual_seed(7)
    encoders = [torch.randn(features[name].shape[1], 6, generator=draw) for name in PASSIVES]
    opened = {}
    for epoch in recording.transcript.kept.values():
        for item in epoch:
            if item.kind is Kind.REPRESENTATIONS and item.step not in opened:
                tensors, _ = unpack(item.payload, SPEC, sender=item.sender)
                gradients = [
                    _gradient(tensors["z"], features[name][tensors["rows"]] @ mix, "both")
                    for name, mix in zip(PASSIVES, encoders, strict=True)
                    if name in passives
                ]
                # What is missing of two contributions is the first one again.
                opened[item.step] = torch.stack([*gradients, gradients[0]][:2]).sum(dim=0)
    return opened


def _mount(recording: Any, opened: Any, **options: Any) -> Any:
    choice = AttackChoice(name="contrastive_inversion", options=options)
    return mount(recording, [choice], seed=0, opened=opened)


@pytest.mark.slow
@pytest.mark.planted("contrastive_inversion")
def test_a_single_passives_features_are_rebuilt_from_sums(make_recording: Any) -> None:
    recording = make_recording("nothing")
    first, second = _mount(recording, _opened(recording, ("passive-1",)))
    assert (first.adversary, first.victim) == ("active", "passive-1")
    assert first.score["r2"] > 0.5
    assert first.advantage > 0.3
    # passive-2 contributed nothing.
    assert second.advantage < 0.05


def test_steps_whose_sum_is_zero_hide_no_other_step(make_recording: Any) -> None:
    recording = make_recording("nothing")
    opened = _opened(recording, ("passive-1",))
    (whole, _), last = _mount(recording, opened, iterations=50), max(opened)
    empty = torch.zeros_like(opened[last])
    (first, _) = _mount(recording, {**opened, last: empty}, iterations=50)
    assert first.applicable, first.reason
    # The last batch is missing, and those to whom the decoy attributes it.
    missing = whole.counts["scored"] - first.counts["scored"]
    assert 0 < missing <= 2 * len(empty)
    assert first.advantage > 0.3


def test_an_epoch_without_gradients_does_not_hide_the_one_before(make_recording: Any) -> None:
    recording = make_recording("nothing")
    opened = _opened(recording, ("passive-1",))
    epoch = {item.step for item in recording.transcript.kept[1]}
    opened = {step: one * (step not in epoch) for step, one in opened.items()}
    assert _mount(recording, opened, iterations=50)[0].advantage > 0.3


def test_where_all_sums_are_zero_it_says_so(make_recording: Any) -> None:
    recording = make_recording("nothing")
    opened = {s: torch.zeros_like(one) for s, one in _opened(recording, ("passive-1",)).items()}
    for result in _mount(recording, opened):
        assert result.reason is not None
        assert "zero everywhere" in result.reason


def test_only_a_coalition_with_the_active_gets_opened_sums(make_recording: Any) -> None:
    recording = make_recording("nothing")
    opened = {0: torch.ones(2, 2)}
    for parties, held in ((["passive-1"], False), (["aggregator"], False), (["active"], True)):
        view = view_of(recording, parties, knowledge=Knowledge(classes=3), opened=opened)
        assert bool(view.opened) is held
