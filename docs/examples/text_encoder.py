"""A text encoder at the active: its notes are texts, a passive has a table.

    python docs/examples/text_encoder.py

Texts become numbers in front of the network: a row is the places of its words in a vocabulary, 0
where it has ended. Rows are float32, so the encoder makes whole numbers of them again.

Letters: B batch, T words, D numbers of a word.
"""

from functools import partial

import torch
from torch import nn

from secure_apfed import Active, FrozenGaussian, Passive, train

N = 240
COMPLAINTS = ("cough", "fever", "headache", "rash")
ABSENT = ("dizziness", "nausea", "pain")
NOTES = (
    "patient reports {0} since two days and no {1}",
    "{0} at night the patient says but {1} is gone",
    "no {1} today only {0}",
)


class TextEncoder(nn.Module):
    """Two layers of attention over words (B, T), then the mean over those of a text, (B, 2 D)."""

    def __init__(self, words, length, numbers=16):
        super().__init__()
        self.words = nn.Embedding(words, numbers, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(length, numbers))
        layer = partial(nn.TransformerEncoderLayer, numbers, nhead=2, dim_feedforward=32)
        self.layers = nn.ModuleList([layer(batch_first=True, dropout=0.0) for _ in range(2)])
        self.last = nn.Linear(numbers, 2 * numbers)

    def forward(self, rows_BT):
        tokens_BT = rows_BT.long()
        is_empty_BT = tokens_BT == 0
        h_BTD = self.words(tokens_BT) + self.places
        for layer in self.layers:
            h_BTD = layer(h_BTD, src_key_padding_mask=is_empty_BT)
        h_BTD = h_BTD.masked_fill(is_empty_BT[..., None], 0)
        return self.last(h_BTD.sum(1) / (~is_empty_BT).sum(1, keepdim=True))


def write_notes(complaints, seed):
    draw = torch.Generator().manual_seed(seed)
    notes = []
    for complaint in complaints.tolist():
        form, other = torch.randint(0, 3, (2,), generator=draw).tolist()
        notes.append(NOTES[form].format(COMPLAINTS[complaint], ABSENT[other]))
    return notes


def number_words(notes):
    """Return the rows (N, T) of these notes, and the number of words in the vocabulary."""
    split = [note.split() for note in notes]
    places = {word: place for place, word in enumerate(sorted({*" ".join(notes).split()}), 1)}
    length = max(map(len, split))
    rows = [[places[word] for word in words] + [0] * (length - len(words)) for words in split]
    return torch.tensor(rows, dtype=torch.float32), len(places) + 1


draw = torch.Generator().manual_seed(0)
complaints = torch.randint(0, 4, (N,), generator=draw)
table = torch.randn(N, 8, generator=draw)
labels = (2.0 * (complaints < 2) - 1 + table[:, 0] > 0).long()  # both matter
ids = [f"person-{number}" for number in range(N)]
notes, words = number_words(write_notes(complaints, 1))

encoder = TextEncoder(words, notes.shape[1])
result = train(
    Active("clinic", ids, notes, labels, encoder=encoder),
    [Passive("pharmacy", ids, table), Passive("insurer", ids, table.square())],
    guard=FrozenGaussian(epsilon=8),
    secure_sum="masked",
    epochs=20,
    batch_size=50,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    model={"projection": 4},
    baselines=False,
)
print(result.report)
