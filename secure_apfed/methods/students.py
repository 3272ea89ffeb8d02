"""The active's student as methods build and train it, once the rows to learn from have labels.

Run by: the active, alone: nothing is sent.
"""

import torch
from torch import Tensor

from secure_apfed.learning.student import Student
from secure_apfed.methods.method import Own
from secure_apfed.models import encoder_and_head
from secure_apfed.parties import ActiveNetworks, Compute
from secure_apfed.seeds import seeded, shuffled
from secure_apfed.settings.run import RunSettings

__all__ = ["student_of", "train_student"]


def student_of(own: Own, aligned: Tensor) -> Student:
    """The student at its reproducible start, which learns from the aligned training rows.

    Args:
        own: what the active brings.
        aligned: its row at each position of the alignment.
    """
    config = own.config
    with seeded(own.seed, own.name, "student"):
        encoder, head = encoder_and_head(config.model, own.features, len(own.classes))
    return Student(
        own.name,
        data=own.held,
        rows_U=own.train_rows[torch.isin(own.train_rows, aligned)],
        networks=ActiveNetworks(encoder, head),
        classes=len(own.classes),
        train=config.train,
        compute=Compute.of(config.train),
        seed=own.seed,
    )


def train_student(student: Student, config: RunSettings) -> None:
    """Let a student that descends go through its rows as often as the run has epochs."""
    if student.in_one_go:
        return
    step = 0
    for epoch in range(config.train.epochs):
        order = shuffled(student.rows_U, config.seed, "student", epoch)
        for rows_B in order.split(config.train.batch_size):
            student.learn(step, rows_B)
            step += 1
