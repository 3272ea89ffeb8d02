"""A passive in numpy alone: it reads its own file and answers with gradients.

Secure APFed calls it with the rows of a batch and what the active sent for them. It knows nothing
of PyTorch, sums or other parties. In a run's file: `objective: {name: black_box, code:
"numpy_registry:Registry"}`; between organisations in the registry's own party.yaml: `code:
{gradient: "numpy_registry:Registry"}`.

    python docs/examples/numpy_registry.py   answers on its standard streams, for any other program

Letters: B rows of a batch, D numbers of z, F columns of its own.
"""

import subprocess
import sys

import numpy as np

RATE = 0.05
HEADER = np.dtype("<i8")  # step, B and D, three numbers


class Registry:
    """Reconstructs its own columns from z by a matrix W: the loss of a row is |z W - x|^2 / F."""

    def __init__(self, path="registry.csv"):
        cells = np.loadtxt(path, delimiter=",", dtype=str, skiprows=1)
        columns = cells[:, 1:].astype(np.float64)
        standard = (columns - columns.mean(axis=0)) / columns.std(axis=0)
        self.rows_by_id = dict(zip(cells[:, 0], standard, strict=True))
        self.table = None
        self.weights = None

    def prepare(self, ids):
        """Put its rows into the order of the list of IDs; called once, before the first step."""
        self.table = np.stack([self.rows_by_id[person] for person in ids])

    def __call__(self, step, rows, z):
        """Return the gradient of each row's own loss with respect to z, (B, D); learn from it."""
        x = self.table[rows]
        if self.weights is None:
            draw = np.random.default_rng(0)
            self.weights = draw.normal(size=(z.shape[1], x.shape[1])) / np.sqrt(z.shape[1])
        wrong = 2 * (z @ self.weights - x) / x.shape[1]
        gradient = wrong @ self.weights.T
        self.weights -= RATE * z.T @ wrong / len(z)
        return gradient.astype(z.dtype)


class Piped:
    """The same from a process of its own, in whatever language it is written.

    One question is three whole numbers (step, B, D), then B positions, then B x D numbers of z, all
    of eight bytes, little-endian, by rows. The answer is B x D numbers. A question with B = 0 comes
    first; its D is the number of bytes of the list of IDs that follows, one on a line.
    """

    def __init__(self, *command):
        command = command or (sys.executable, __file__)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def prepare(self, ids):
        text = "\n".join(ids).encode()
        self.send(np.array([0, 0, len(text)], HEADER).tobytes() + text)

    def __call__(self, step, rows, z):
        header = np.array([step, *z.shape], HEADER)
        parts = (header, rows.astype(HEADER), z.astype("<f8"))
        self.send(b"".join(part.tobytes() for part in parts))
        answer = self.process.stdout.read(z.size * 8)
        return np.frombuffer(answer, "<f8").reshape(z.shape)

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def send(self, message):
        self.process.stdin.write(message)
        self.process.stdin.flush()


def serve(asked, answered):
    """Answer questions until they end; see `Piped`."""
    registry = Registry()
    while header := asked.read(24):
        step, rows, numbers = np.frombuffer(header, HEADER).tolist()
        if not rows:
            registry.prepare(asked.read(numbers).decode().split("\n"))
            continue
        positions = np.frombuffer(asked.read(rows * 8), HEADER)
        z = np.frombuffer(asked.read(rows * numbers * 8), "<f8").reshape(rows, numbers)
        answered.write(registry(step, positions, z).tobytes())
        answered.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
