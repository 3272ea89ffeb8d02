"""A masked sum over files, a new process for every packet: python docs/examples/hub_over_files.py.

Three hosts count their own patients by diagnosis and mean radius; a registry reads the sums alone.
A host lives for one packet: it takes its role up, answers, and puts it away under its own key. One
that dies in between loses the role, and no step is used twice.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from apfed_protocols import answer_hub, fresh_identity, hub_pump, secure_sum, suspend_role
from apfed_protocols.seal import Identity

HOSTS, RADII = ("clinic", "hospital", "practice"), (10, 15, 20)
SUM = secure_sum("masked", HOSTS, to="registry", clip=1000, bits=24, session="census of march")
X, y = load_breast_cancer(return_X_y=True)
OWN = dict(zip(HOSTS, np.arange(len(y)) % 3 == np.arange(3)[:, None], strict=True))


def counts(rows, question):
    """How many of these patients have a mean radius above what is asked, by diagnosis."""
    return np.bincount(y[rows & (X[:, 0] > json.loads(question))], minlength=2)


def signed_by(me, folder):
    """Who this party is, and by which keys it knows the others."""
    known = {path.parent.name: path.read_bytes() for path in folder.glob("*/public")}
    identity = Identity.from_secret_bytes((folder / me / "identity").read_bytes())
    return {"identity": identity, "peers": known}


def host(me, folder):
    own = folder / me
    key, sealed = (own / "key").read_bytes(), own / "role"
    role = SUM.make_contributor(me)
    if sealed.exists():
        role = SUM.resume_role(me, sealed.read_bytes(), key, role_log=own / "role-log")
    packet = (own / "packet").read_bytes()
    signed = signed_by(me, folder)
    answer = answer_hub(role, packet, lambda question: counts(OWN[me], question), **signed)
    sealed.write_bytes(suspend_role(role, key, role_log=own / "role-log"))
    (own / "answer").write_bytes(answer)


def registry(folder):
    asked = []

    def send(me, packet):
        (folder / me / "packet").write_bytes(packet)
        subprocess.run([sys.executable, __file__, me, str(folder)], check=True)
        asked.append(me)

    def receive():
        me = asked.pop(0)
        return me, (folder / me / "answer").read_bytes()

    signed = signed_by("registry", folder)
    hub = hub_pump({"registry": SUM.make_receiver()}, send, receive, **signed)
    for radius in RADII:
        question = json.dumps(radius).encode()
        total = hub.step(question, like=np.zeros(2, int))
        off = abs(total - counts(np.ones(len(y), bool), question)).max()
        print(f"above {radius}: {total[0]} malignant, {total[1]} benign; counts differ {off}")


if __name__ == "__main__" and sys.argv[1:]:
    host(sys.argv[1], Path(sys.argv[2]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for me in (*HOSTS, "registry"):  # each does so at home, and tells the others `public`
            own, identity = Path(name) / me, fresh_identity()
            own.mkdir()
            (own / "key").write_bytes(secrets.token_bytes(32))
            (own / "identity").write_bytes(identity.secret_bytes())
            (own / "public").write_bytes(identity.public)
        registry(Path(name))
