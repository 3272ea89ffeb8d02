"""A linear layer over concatenated representations, computed as a secure sum.

Run by: code that trains a split network that merges by `torch.cat`, all parties in one process or
each in its own. Protects from: a receiver that reads single representations; it learns their
weighted sum.

Most split networks hand `torch.cat([z_1, ..., z_M], dim=1)` to a linear layer. Its weight W has a
block of columns for each party, W = [W_1, ..., W_M], so

    W cat(z) + b = W_1 z_1 + ... + W_M z_M + b,

the same function with the same gradients. Each passive multiplies by its own block, and what it
adds to the sum is W_k z_k. What comes back to each of them is the gradient on the sum. Under
`torch.cat` it is that gradient times W_k: a block with fewer columns than rows reveals less of it.

B: rows; D_k: numbers of party k's representation; H: outputs of the layer.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apfed_protocols import SumSession
from apfed_protocols.errors import LocalProtocolError

__all__ = ["SummedLinear"]


class SummedLinear(nn.Module):
    """A linear layer on the concatenation of several parties' features, computed as a secure sum:
    `head[0] = SummedLinear(head[0], sizes, add)`.

    It is called with a mapping in place of the concatenation, and returns the same as the layer for
    the concatenation, up to the rounding of the sum. `parts[name]` is the party's block, a
    `nn.Linear` without bias; among processes each party appends its own to its network, contributes
    what comes out, and gives the gradient on the sum to `backward`. The bias is the receiver's.

    Guarantee: that of the sum (`add.describe()`). A sum of one contributor is its own value, and
    sums of few people with many outputs H are equations in each party's features: docs/leaks. No
    noise is added.

    Args:
        layer: the linear layer that follows the concatenation, whose weight (H, sum of D_k) is
            copied. Optimisers are made after this, for they hold the old one.
        sizes: mapping from party name to D_k, in the order of the concatenation: each contributor
            of the sum, and its receiver if it has a part, which stays out of the sum.
        add: the secure sum, as returned by `secure_sum`. Copies of this layer share it.

    Attributes:
        parts: mapping from party name to its block of W, (H, D_k).
        bias: the layer's bias, (H,), or None.

    Raises:
        LocalProtocolError: `layer` is no linear layer, the sizes do not fill it, or the parties
            differ from the sum's.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from secure_apfed import SummedLinear, secure_sum
        >>> add = secure_sum("masked", ["lab", "shop"], to="clinic", clip=8, bits=24)
        >>> plain = nn.Linear(5, 3)
        >>> summed = SummedLinear(plain, {"clinic": 1, "lab": 2, "shop": 2}, add)
        >>> z = {"clinic": torch.ones(4, 1), "lab": torch.ones(4, 2), "shop": torch.ones(4, 2)}
        >>> torch.allclose(summed(z), plain(torch.cat([*z.values()], dim=1)), atol=1e-5)
        True
    """

    def __init__(self, layer: nn.Linear, sizes: Mapping[str, int], add: SumSession) -> None:
        """Split the layer's weight into one block for each party; check sizes against the sum."""
        super().__init__()
        _check_sizes(layer, sizes, add)
        self.add = add
        self.receiver = add.secure_sum.agreement.receiver
        self.sizes = dict(sizes)
        blocks = layer.weight.detach().split([*sizes.values()], dim=1)
        layers = {name: _make_layer(block) for name, block in zip(sizes, blocks, strict=True)}
        self.parts = nn.ModuleDict(layers)
        bias: Tensor | None = layer.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self._add_outside = torch.compiler.disable(_add_parts)

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's output for the concatenated representations, (B, H): W cat(z) + b.

        `values`: mapping from party name to its representations z_k, D_k numbers for each of B
        rows. Raises LocalProtocolError: `values` has other parties than `sizes`, or other shapes.
        """
        self._check_values(values)
        output_by_party = {name: part(values[name]) for name, part in self.parts.items()}
        receiver_output = output_by_party.pop(self.receiver, None)
        output: Tensor = self._add_outside(self.add, output_by_party)
        if receiver_output is not None:
            output = output + receiver_output
        return output if self.bias is None else output + self.bias

    def to_linear(self) -> nn.Linear:
        """Return an ordinary linear layer over the concatenation, with a copy of these weights."""
        blocks: list[Any] = [self.parts[name] for name in self.sizes]
        weight = torch.cat([block.weight.detach() for block in blocks], dim=1)
        layer = _make_layer(weight, bias=self.bias is not None)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone())
        return layer

    def extra_repr(self) -> str:
        """Return what torch prints in this module's `repr`."""
        return f"receiver={self.receiver!r}, bias={self.bias is not None}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "SummedLinear":
        """Return a copy with weights of its own that shares the secure sum.

        The sum is not copied, since its roles have secret keys.
        """
        memo[id(self.add)] = self.add
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _check_values(self, values: object) -> None:
        """Raise LocalProtocolError unless these are the parties' representations by name.

        Each must have the shape that the layer expects of that party.
        """
        if not isinstance(values, Mapping):
            raise LocalProtocolError(
                f"SummedLinear: give each party's representation by its name, as "
                f"{{{next(iter(self.sizes))!r}: ...}}, in place of torch.cat; got a "
                f"{type(values).__name__}"
            )
        if {*values} != {*self.sizes}:
            raise LocalProtocolError(
                f"SummedLinear: expected the representations of {', '.join(self.sizes)}, got those "
                f"of {', '.join(map(str, values)) or 'nobody'}"
            )
        row_count = len(next(iter(values.values())))
        for name, size in self.sizes.items():
            shape = tuple(getattr(values[name], "shape", ()))
            if shape != (row_count, size):
                raise LocalProtocolError(
                    f"SummedLinear: expected a tensor of shape ({row_count}, {size}) of {name}, "
                    f"got {type(values[name]).__name__} of shape {shape}; flatten it before, and "
                    "give all parties the same rows"
                )


def _check_sizes(layer: object, sizes: Mapping[str, int], add: object) -> None:
    """Raise LocalProtocolError unless layer, sizes by party and the sum `add` fit together."""
    if not isinstance(layer, nn.Linear):
        raise LocalProtocolError(
            "SummedLinear: expected the nn.Linear that follows torch.cat, got "
            f"{type(layer).__name__}; what works on each number alone (ReLU, dropout) may be moved "
            "before the concatenation, to each party"
        )
    if not isinstance(add, SumSession):
        raise LocalProtocolError(
            f"SummedLinear: expected what secure_sum(...) returned, got {type(add).__name__}"
        )
    agreement = add.secure_sum.agreement
    if {*sizes} - {agreement.receiver} != {*agreement.contributors}:
        raise LocalProtocolError(
            f"SummedLinear: the sum adds {', '.join(agreement.contributors)} for "
            f"{agreement.receiver}, and sizes names {', '.join(sizes)}; name each contributor, and "
            "the receiver where it has a part"
        )
    dotted = [name for name in sizes if "." in name]
    if dotted:
        raise LocalProtocolError(
            f"SummedLinear: torch takes no name with a dot for a module, got {dotted[0]!r}; name "
            "the party otherwise in this sum"
        )
    if min(sizes.values()) < 1 or sum(sizes.values()) != layer.in_features:
        raise LocalProtocolError(
            f"SummedLinear: the layer reads {layer.in_features} numbers, and sizes add up to "
            f"{sum(sizes.values())}: {dict(sizes)}; give each party's, from 1 on, in the order of "
            "torch.cat"
        )


def _make_layer(weight: Tensor, *, bias: bool = False) -> nn.Linear:
    """Return a linear layer with a copy of this weight; the caller sets its bias, if it has one.

    It is created on the meta device, without random initial numbers, so that torch's global
    generator does not advance.
    """
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    return layer


def _add_parts(add: Callable[[Mapping[str, Tensor]], Any], terms: Mapping[str, Tensor]) -> Any:
    """Return the secure sum of the parties' tensors.

    It is a function of its own so that `torch.compile` can exclude it: a compiled graph would store
    one sum as a constant.
    """
    return add(terms)
