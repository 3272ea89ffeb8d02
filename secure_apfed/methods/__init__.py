"""Methods: facts and roles, one script a party.

A new method is one file, which declares its facts beside its code, and one line in the table.
Outside of this package nobody asks for a method's name: whoever has a run's configuration asks
`config.facts`.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from secure_apfed.data import VerticalData
from secure_apfed.methods.accounts import freshly_brought
from secure_apfed.methods.apc_vfl import ApcVfl
from secure_apfed.methods.apfed import APFED, APFED_C, APFED_R, Apfed, SingleView
from secure_apfed.methods.averaging import H_FEDMV, S_FEDMV
from secure_apfed.methods.entering import roles_of
from secure_apfed.methods.imputation import Imputation
from secure_apfed.methods.joint_teacher import JointTeacher
from secure_apfed.methods.method import (
    Brought,
    Course,
    Helper,
    Keeper,
    Learner,
    Method,
    Own,
    PartyState,
    Role,
)
from secure_apfed.methods.pseudo_labels import MMVFL, V_FEDMV
from secure_apfed.methods.session import (
    Entered,
    PartyTensors,
    Session,
    Simulation,
    Start,
    assist,
    lead,
    new_session,
)
from secure_apfed.methods.split_nn import SplitNn, SummedSplitNn
from secure_apfed.methods.tvfl import Tvfl
from secure_apfed.methods.vfedtrans import VFedTrans
from secure_apfed.methods.votes import RandomisedVotes, SummedVotes
from secure_apfed.methods.votes_encrypted import EncryptedVotes
from secure_apfed.methods.votes_moment import MomentVotes
from secure_apfed.settings.run import RunSettings

__all__ = [
    "METHODS",
    "Apfed",
    "Brought",
    "Course",
    "Entered",
    "Helper",
    "Keeper",
    "Learner",
    "Method",
    "Own",
    "PartyState",
    "PartyTensors",
    "Role",
    "Session",
    "Simulation",
    "SingleView",
    "Start",
    "Tvfl",
    "assist",
    "freshly_brought",
    "lead",
    "new_session",
    "open_session",
    "roles_of",
]

METHODS: Mapping[str, Method] = {
    "apfed": Apfed("apfed", APFED),
    "apfed_r": Apfed("apfed_r", APFED_R),
    "apfed_c": Apfed("apfed_c", APFED_C),
    "tvfl": Tvfl(),
    "single_view": SingleView(),
    "votes": SummedVotes(),
    "votes_randomised": RandomisedVotes(),
    "votes_encrypted": EncryptedVotes(),
    "votes_moment": MomentVotes(),
    "joint_teacher": JointTeacher(),
    "imputation": Imputation(),
    "apc_vfl": ApcVfl(),
    "vfedtrans": VFedTrans(),
    "split_nn": SplitNn(),
    "split_nn_sum": SummedSplitNn(),
    "mmvfl": MMVFL,
    "v_fedmv": V_FEDMV,
    "h_fedmv": H_FEDMV,
    "s_fedmv": S_FEDMV,
}


def open_session(
    config: RunSettings, data: VerticalData, *, alignment: Mapping[str, Tensor] | None = None,
    logs: Path | None = None,
) -> Simulation:  # fmt: skip
    """Open a session of the config's method with new secrets.

    Args:
        config: of the run.
        data: of the run.
        alignment: of an earlier session with the same data; None: intersect now.
        logs: folder of ledgers and of counted answers, which outlast a session; None: memory.
    """
    names = [] if logs is None else [table.name for table in data.tables]
    brought = {name: freshly_brought(config, name, logs=logs) for name in names}
    start = Start(config=config, data=data, brought=brought, alignment=alignment)
    return Simulation(METHODS[config.method], start)
