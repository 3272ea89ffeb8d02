"""ResNet-18 at the active, a small vision transformer at a passive: networks of torchvision.

    python docs/examples/resnet_and_vit.py

Weights are random, and images are drawn: a disc in each party's image, whose colour the other does
not see. The class is whether both discs have one colour, so the active alone can only guess. Norms
are of groups of channels: under a guard no row of a batch may move another one's representation,
as BatchNorm does. Letters: B batch, N people.
"""

import sys
from functools import partial

import torch
from torch import nn

from apfed_protocols.installing import install_extra
from secure_apfed import Active, Contrastive, FrozenGaussian, Passive, train

try:
    from torchvision.models import VisionTransformer, resnet18
except ModuleNotFoundError:
    sys.exit(f"torchvision is not installed; run: {install_extra('vision')}")

N = 200
SIDE = 32
NUMBERS = 16


def draw_discs(colours, seed):
    """Return images (N, 3, SIDE, SIDE) of grey noise with a disc of this colour (0 to 2) each."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.2 * torch.rand(len(colours), 3, SIDE, SIDE, generator=draw)
    places = torch.arange(SIDE)
    for image, colour in zip(images, colours, strict=True):
        row, column = torch.randint(8, SIDE - 8, (2,), generator=draw)
        inside = (places[:, None] - row) ** 2 + (places[None, :] - column) ** 2 < 36
        image[colour, inside] = 1.0
    return images


draw = torch.Generator().manual_seed(0)
seen = torch.randint(0, 2, (N,), generator=draw)
hidden = torch.randint(0, 2, (N,), generator=draw)
ids = [f"person-{number}" for number in range(N)]

resnet = resnet18(num_classes=NUMBERS, norm_layer=partial(nn.GroupNorm, 8))
transformer = VisionTransformer(
    image_size=SIDE,
    patch_size=8,
    num_layers=2,
    num_heads=2,
    hidden_dim=32,
    mlp_dim=64,
    num_classes=NUMBERS,
)
before = resnet.conv1.weight.clone()
result = train(
    Active("clinic", ids, draw_discs(seen, 1), seen ^ hidden, encoder=resnet),
    [
        Passive("radiology", ids, draw_discs(hidden, 2), loss=Contrastive(encoder=transformer)),
        Passive("registry", ids, hidden[:, None] + torch.randn(N, 40, generator=draw)),
    ],
    guard=FrozenGaussian(epsilon=8),
    secure_sum="masked",
    epochs=2,
    batch_size=40,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    model={"projection": NUMBERS},
    baselines=False,
)
moved = float((resnet.conv1.weight - before).abs().max())
print(result.report)
print(f"ResNet-18 moved by at most {moved:.1e} and is result.model[0]: {result.model[0] is resnet}")
