"""Every channel that takes tensors: a parameter above it moves as without it, or it is refused."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import apfed_protocols as ap
import secure_apfed
from apfed_attacks import Recorder
from secure_apfed import secure_sum
from secure_apfed.errors import LocalProtocolError
from secure_apfed.privacy.defences import DEFENCES, Leaving
from secure_apfed.privacy.guard import FrozenGaussianGuard, GaussianGuard, NoGuard
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.settings.privacy import CompressionSettings
from tests.public_names import load_public_names
from tests.with_crypten import usable

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
NAMES = ("a", "b", "c")
ROWS = 6
WIDTH = 4
KEY = bytes(range(32))
SUMS: list[Any] = usable(ap.SECURE_SUMS)  # of `SumName`
Channel = Callable[[Tensor], Tensor]


def session_of(name: ap.SumName, clip: float = 64.0, **settings: Any) -> ap.SumSession:
    by = None if ap.SECURE_SUMS[name].masks != "none" else "notary"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ap.UnsafeChoiceWarning)
        return secure_sum(name, NAMES, to="active", by=by, clip=clip, **settings)


def add_constants(name: ap.SumName) -> Channel:
    """Add h of one contributor and constants of the others, without and with a graph."""
    rest = torch.ones(ROWS, WIDTH)
    return lambda h: session_of(name)({"a": h, "b": rest, "c": rest})


def average_parts(h: Tensor) -> Tensor:
    """Average parts of one graph, one of each contributor, by weight."""
    total: Tensor = session_of("plain + pairwise masks")({"a": 0.5 * h, "b": 2 * h, "c": 0.5 * h})
    return total / len(NAMES)


def sum_trees(h: Tensor) -> Tensor:
    """Add trees: some leaves require a gradient, some do not, and one is of integers."""
    tree = {"w": [h[:2], (h[2:].double(), torch.ones(2))], "n": torch.ones(3, dtype=torch.int64)}
    rest = {
        "w": [torch.ones(2, WIDTH), (torch.ones(ROWS - 2, WIDTH).double(), torch.ones(2))],
        "n": torch.ones(3, dtype=torch.int64),
    }
    trees: dict[str, dict[str, Any]] = {"a": tree, "b": rest, "c": rest}
    total = session_of("plain + pairwise masks", bits=24)(trees)
    assert total["n"].tolist() == [3, 3, 3]
    assert not total["w"][1][1].requires_grad
    return torch.cat([total["w"][0], total["w"][1][0].float()])


def release_rows(h: Tensor) -> Tensor:
    guard = secure_apfed.PrivateRelease(clip=64, epsilon=8, delta=1e-5, epochs=1, rows=ROWS)
    return guard(h, rows=range(ROWS))


def release_without_noise(h: Tensor) -> Tensor:
    guard = secure_apfed.PrivateRelease(clip=64, epsilon=8, delta=1e-5, epochs=1, rows=ROWS)
    with guard.disable_noise():
        return guard(h)


def sum_linear(h: Tensor) -> Tensor:
    """Compute the layer over a concatenation of identity blocks: h, and two ones."""
    layer = nn.Linear(3 * WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH).repeat(1, 3))
    add = session_of("plain + pairwise masks")
    rest = torch.ones(ROWS, WIDTH)
    found: Tensor = secure_apfed.SummedLinear(layer, dict.fromkeys(NAMES, WIDTH), add)(
        {"a": h, "b": rest, "c": rest}
    )
    return found


def release_by(guard: Any) -> Channel:
    return lambda h: guard.release(h, step=0, rows=torch.arange(ROWS))


def record_module(h: Tensor) -> Tensor:
    record = Recorder()
    module = nn.Identity()
    with record.watch(module):
        record.step(range(ROWS))
        found: Tensor = module(h)
    return found


def compress_gradient(h: Tensor) -> Tensor:
    settings = CompressionSettings(kind="compression", keep=1.0)
    defence = DEFENCES["compression"](settings, noise=NoiseSource(KEY), classes=2)
    return defence.protect_gradient(h, Leaving(step=0, receiver="active"))


TRAINED: dict[str, Channel] = {
    **{f"secure_sum of {name}": add_constants(name) for name in SUMS},
    "a weighted mean": average_parts,
    "a tree": sum_trees,
    "SummedLinear": sum_linear,
    "PrivateRelease": release_rows,
    "PrivateRelease.disable_noise": release_without_noise,
    "NoGuard": release_by(NoGuard()),
    "GaussianGuard": release_by(GaussianGuard(clip=64, sigma=1, key=KEY)),
    "FrozenGaussianGuard": release_by(FrozenGaussianGuard(clip=64, sigma=1, key=KEY)),
    "Recorder.watch": record_module,
    "a defence": compress_gradient,
}


def gradient_above(channel: Channel) -> Tensor:
    """The gradient of a layer above a channel under a loss that is linear in what comes out."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, WIDTH)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(WIDTH, 3, generator=generator))
    out = channel(layer(torch.randn(ROWS, 3, generator=generator)))
    (out * torch.randn(ROWS, WIDTH, generator=generator)).sum().backward()
    assert layer.weight.grad is not None, "the channel cut the graph"
    return layer.weight.grad


@pytest.mark.parametrize("channel", TRAINED)
def test_a_parameter_above_moves_as_without_the_channel(channel: str) -> None:
    torch.testing.assert_close(gradient_above(TRAINED[channel]), gradient_above(lambda h: h))


def contributing(name: ap.SumName) -> Callable[[Tensor], object]:
    return lambda h: session_of(name, session="s").make_contributor("a").contribute({"w": [h]})


def through_a_hub(h: Tensor) -> object:
    packet = b"".join(
        len(part).to_bytes(4, "big") + part for part in (b"step", bytes(8), b"question")
    )
    role = session_of("plain + pairwise masks", session="s").make_contributor("a")
    return ap.answer_hub(role, packet, lambda question: h)


def summing_under(transform: Callable[..., Any]) -> Callable[[Tensor], object]:
    add = session_of("plain + pairwise masks")

    def add_up(value: Tensor) -> Tensor:
        return add(dict.fromkeys(NAMES, value)).sum()

    return lambda h: transform(add_up)(h.detach())


def forward_mode(h: Tensor) -> object:
    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        dual = torch.autograd.forward_ad.make_dual(h.detach(), h.detach())
        return session_of("plain + pairwise masks")(dict.fromkeys(NAMES, dual))


def add_form(other: Any) -> Callable[[Tensor], object]:
    """Add a form of the first contributor that carries no gradient."""
    return lambda h: session_of("plain + pairwise masks")({"a": other, "b": h, "c": h})


NO_WAY = "requires a gradient, and a contribution leaves this process"
REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    **{f"contributor of {name}": (contributing(name), f"a: leaf .*{NO_WAY}") for name in SUMS},
    "answer_hub": (through_a_hub, f"a: a contribution {NO_WAY}"),
    "torch.func.grad": (summing_under(torch.func.grad), r"inside torch\.func"),
    "torch.vmap": (summing_under(torch.vmap), r"inside torch\.func"),
    "forward mode": (forward_mode, "forward-mode"),
    "the meta device": (
        lambda h: session_of("plain + pairwise masks")(dict.fromkeys(NAMES, h.to("meta"))),
        "meta device and has no numbers",
    ),
    "into an array": (add_form(np.ones((ROWS, WIDTH))), "form that a gives, a ndarray, .* none"),
    "into integers": (
        add_form(torch.ones(ROWS, WIDTH, dtype=torch.int32)),
        r"b: a contribution requires .* a tensor of torch.int32, which carries none",
    ),
    "PrivateLabels": (
        lambda h: secure_apfed.PrivateLabels(epsilon=1, classes=2)(h),
        "labels are a tensor",
    ),
}


@pytest.mark.parametrize("channel", REFUSED)
def test_what_cannot_train_through_a_channel_is_refused(channel: str) -> None:
    call, sentence = REFUSED[channel]
    h = torch.full((ROWS, WIDTH), 0.5, requires_grad=True)
    with pytest.raises(LocalProtocolError, match=sentence):
        call(h * 1)


NO_CHANNEL = {
    "measures a function of its caller, and returns no tensor": "check_row_wise",
    "trains whole runs": (
        "Active Contrastive FrozenGaussian Gaussian Passive Reconstruction TrainingResult train"
    ),
    "describes": (
        "SumName IntersectionName "
        "BfvSum CkksSum CryptenSum MaskedBfvSum MaskedSum PlainSum RecoverableSum SecureSum "
        "SECURE_SUMS SET_INTERSECTIONS StepBinding SumAgreement IntersectionAgreement Output "
        "Config AlignmentSettings load_config SumAggregator SumReceiver ReceivingAggregator "
        "join_sum hub_pump Hub ClipAgreement resume_role suspend_role LocalEnd calibrate_sigma "
        "make_guard RepresentationGuard ImageFiles"
    ),
    "attacks what was recorded": "ATTACKS AdversaryView evaluate",
    "errors": (
        "AttackError PromiseError ApfedError BudgetExhaustedError CheckpointError ClippingWarning "
        "ConfigError DataError FewRowsWarning LocalProtocolError ModelError NarrowTableWarning "
        "NoHelpWarning PartyLeftError RemoteProtocolError UnsafeChoiceWarning"
    ),
    "carries bytes": (
        "Conversation Envelope Identity InMemoryNetwork LinkTransport Links Outgoing "
        "ResumableLink SealedLink "
        "Transcript converse fresh_identity fresh_run_key open_link take_part"
    ),
    "takes IDs or counts": (
        "InMemoryRoleLog AlignmentHistory IdNormalisation PrivacyLedger align align_with "
        "canonical_ids count_common discrete_gaussian encode_ids make_intersection "
        "share_membership "
        "PrivateContributions __version__"
    ),
    "takes integers": ("LabelResponse"),
    "trains by itself": (
        "VerticalClassifier VerticalRegressor load_model load_recording load_training_recording "
        "measure_worth "
        "predict_jointly run run_frames serve_party"
    ),
}
COVERED = "secure_sum SumSession SumContributor answer_hub PrivateRelease PrivateLabels NoGuard "
COVERED += "GaussianGuard SummedLinear Recorder"


def test_every_public_name_is_tried_here_or_takes_no_graph() -> None:
    """A new name says where it stands."""
    stated = [*COVERED.split(), *(name for names in NO_CHANNEL.values() for name in names.split())]
    assert len(stated) == len(set(stated))
    assert {*load_public_names()} == set(stated)


def test_the_advice_of_the_refusal_trains() -> None:
    """Detached values out, the sum's gradient back: two parties' layers move as in one graph."""
    layers = {me: nn.Linear(3, WIDTH, bias=False) for me in NAMES}
    x = torch.randn(ROWS, 3)
    target = torch.randn(ROWS, WIDTH)
    session = session_of("plain + pairwise masks", bits=24, session="s")
    roles: dict[str, Any] = {me: session.make_contributor(me) for me in NAMES}
    receiver: Any = session.make_receiver()
    ap.converse({**roles, "active": receiver})
    own = {me: layer(x) for me, layer in layers.items()}
    sent = {me: roles[me].contribute(own[me].detach()) for me in NAMES}
    total = receiver.decode(receiver.combine(sent), target).requires_grad_()
    (total - target).square().sum().backward()
    for me in NAMES:
        own[me].backward(total.grad)
    expected = {me: nn.Linear(3, WIDTH, bias=False) for me in NAMES}
    for me, layer in expected.items():
        layer.load_state_dict(layers[me].state_dict())
    loss = sum((layer(x) for layer in expected.values()), torch.zeros(())) - target
    loss.square().sum().backward()
    for me in NAMES:
        grads = layers[me].weight.grad, expected[me].weight.grad
        torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)


def sum_clipped(h: Tensor, clip: float) -> Tensor:
    norm = h.norm(dim=1, keepdim=True)
    return torch.where(norm > clip, h * (clip / norm), h) * len(NAMES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_value_and_gradient_are_those_of_adding_the_clipped_rows(
    clip: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    h[0] = 0
    add = session_of("plain + pairwise masks", clip=clip, bits=24)
    weights = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    found, expected = (h.clone().to(dtype).requires_grad_() for _ in range(2))
    total = add(dict.fromkeys(NAMES, found))
    reference = sum_clipped(expected, clip)
    assert total.dtype is dtype
    (total * weights).sum().backward()
    (reference * weights).sum().backward()
    atol = 1e-4 if dtype.itemsize > 2 else 0.1
    rtol = 1e-4 if dtype.itemsize > 2 else 0.05
    torch.testing.assert_close(total, reference, atol=atol, rtol=rtol)
    expected_gradient = expected.grad
    assert found.grad is not None
    assert expected_gradient is not None
    known = ~expected_gradient.isnan()
    torch.testing.assert_close(found.grad[known], expected_gradient[known], atol=atol, rtol=rtol)
    assert torch.equal(found.grad[0], (weights * len(NAMES))[0])


def test_the_numbers_are_those_of_the_sum_without_a_graph() -> None:
    h = torch.randn(ROWS, WIDTH)
    add = session_of("plain + pairwise masks", clip=1.0)
    plain = add(dict.fromkeys(NAMES, h))
    with_graph = add(dict.fromkeys(NAMES, h.clone().requires_grad_()))
    assert torch.equal(plain, with_graph)
    with torch.no_grad():
        assert not add(dict.fromkeys(NAMES, h.clone().requires_grad_())).requires_grad


@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_a_second_derivative_is_that_of_adding_the_clipped_rows(clip: float) -> None:
    add = session_of("plain + pairwise masks", clip=clip, bits=24)
    h = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    second = []
    channels: tuple[Channel, ...] = (
        lambda v: add(dict.fromkeys(NAMES, v)),
        lambda v: sum_clipped(v, clip),
    )
    for channel in channels:
        own = h.clone().requires_grad_()
        (first,) = torch.autograd.grad(channel(own * own).square().sum(), own, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), own)[0])
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-3)


def tensors_of_parameters() -> Iterator[nn.Parameter]:
    yield from nn.Linear(2, 2).parameters()


def test_parameters_and_their_gradients_can_be_contributed_without_a_graph() -> None:
    """Averages of weights, and sums of gradients, as loops elsewhere write them."""
    parameters = [*tensors_of_parameters()]
    session = session_of("plain + pairwise masks", session="s")
    roles: dict[str, Any] = {me: session.make_contributor(me) for me in NAMES}
    ap.converse({**roles, "active": session.make_receiver()})
    with torch.no_grad():
        roles["a"].contribute(parameters)
    roles["b"].contribute([parameter.detach() for parameter in parameters])
    with pytest.raises(LocalProtocolError, match=NO_WAY):
        roles["c"].contribute(parameters)
    roles["c"].contribute([np.zeros((2, 2)), np.zeros(2)])
