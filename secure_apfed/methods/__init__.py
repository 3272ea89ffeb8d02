"""The methods: learning procedures by name, each with its settings and the script of every party's
role.

A new method is one file, which declares its settings beside its code, and one line in the table
(docs/add-a-method.md). A method of another package is named as package.module:Name
(docs/plug-ins.md). Code outside of this package does not branch on a method's name, but reads the
facts in `config.method`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError
from secure_apfed.methods.apfed import Apfed, ApfedCSettings, ApfedRSettings, MixedApfedSettings
from secure_apfed.methods.apfed_code import ApfedCode
from secure_apfed.methods.averaging import Averaging, HFedMvSettings, SFedMvSettings
from secure_apfed.methods.distilled import ApcVfl, VFedTrans
from secure_apfed.methods.joint import SplitNn, Tvfl
from secure_apfed.methods.joint_sum import SummedSplitNn
from secure_apfed.methods.joint_teacher import JointTeacher
from secure_apfed.methods.method import ActiveRole, HelperRole, Method, StepCounter
from secure_apfed.methods.multiview import MmvflSettings, Multiview, VFedMvSettings
from secure_apfed.methods.party import (
    PartyCheckpoint,
    PartyContext,
    PartySecrets,
    Role,
    fresh_secrets,
)
from secure_apfed.methods.session import (
    Session,
    Simulation,
    SimulationInputs,
    TrainingLoop,
    assign_roles,
    new_session,
    run_helper,
    start_active,
    train_epochs,
)
from secure_apfed.methods.single_view import SingleView
from secure_apfed.methods.votes import SummedVotes
from secure_apfed.methods.votes_encrypted import EncryptedVotes
from secure_apfed.methods.votes_randomised import RandomisedVotes
from secure_apfed.methods.votes_rehearsal import Rehearsal
from secure_apfed.settings import MethodSettings, RunSettings
from secure_apfed.settings.plugins import PluginTable, require_class

__all__ = [
    "ALONE",
    "METHODS",
    "ActiveRole",
    "HelperRole",
    "Method",
    "PartyCheckpoint",
    "PartyContext",
    "PartySecrets",
    "Role",
    "Session",
    "Simulation",
    "SimulationInputs",
    "StepCounter",
    "TrainingLoop",
    "assign_roles",
    "fresh_secrets",
    "method_settings",
    "new_session",
    "open_session",
    "run_helper",
    "start_active",
    "train_epochs",
]

_OURS: Mapping[str, Method] = {
    "apfed": Apfed(MixedApfedSettings),
    "apfed_r": Apfed(ApfedRSettings),
    "apfed_c": Apfed(ApfedCSettings),
    "apfed_code": ApfedCode(),
    "tvfl": Tvfl(),
    "single_view": SingleView(),
    "votes": SummedVotes(),
    "votes_randomised": RandomisedVotes(),
    "votes_encrypted": EncryptedVotes(),
    "votes_rehearsal": Rehearsal(),
    "joint_teacher_sum": JointTeacher(),
    "apc_vfl": ApcVfl(),
    "vfedtrans": VFedTrans(),
    "split_nn": SplitNn(),
    "split_nn_sum": SummedSplitNn(),
    "mmvfl": Multiview(MmvflSettings),
    "v_fedmv": Multiview(VFedMvSettings),
    "h_fedmv": Averaging(HFedMvSettings),
    "s_fedmv": Averaging(SFedMvSettings),
}


def _require_method(candidate: Any, import_path: str) -> Method:
    """Return the method of a plug-in, and store its import path in its settings class.

    Settings files name the method by this path, so its settings class must not declare a `name`.

    `candidate`: the imported object, a Method or a subclass of it. `import_path`: where it was
    imported from, as `package.module:Name`. Raises TypeError: the object is no Method, or its
    settings declare a name.
    """
    method = require_class(candidate, Method)() if isinstance(candidate, type) else candidate
    if not isinstance(method, Method):
        raise TypeError(
            f"expected a secure_apfed.methods.Method, or a subclass, got {type(candidate).__name__}"
        )
    settings_class = method.settings
    if settings_class.model_fields["name"].annotation is not str:
        raise TypeError(
            f"leave `name` out of {settings_class.__name__}: a run calls the method {import_path}"
        )
    settings_class.import_path = import_path
    return method


METHODS: PluginTable[Method] = PluginTable(_OURS, plugin_kind="methods", make_entry=_require_method)


# The first method without passives is single_view.
ALONE: MethodSettings = next(
    method.public_facts for method in METHODS.values() if not method.settings.has_passives
)
"""The method in which the active trains by itself."""


def method_settings(choice: Any, *, as_json: bool = False) -> MethodSettings:
    """Return the settings of a method from the `method` entry of a run's configuration.

    `choice`: a key of `METHODS`; or a mapping with that key as `name`, beside the method's
    settings; or a settings object, which is returned. `as_json`: accept a list where a tuple is
    declared, and convert no other type. Raises ValueError: no method has that name, or a setting
    does not fit it.
    """
    if isinstance(choice, MethodSettings):
        return choice
    content = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
        raise ValueError(
            f"expected the name of a method, or {{name: ..., and its settings}}, got {choice!r:.60}"
        )
    try:
        name = METHODS.import_entry(content["name"], setting="method")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    content = {**content, "name": name}
    settings_class = METHODS[name].settings
    if as_json:
        return settings_class.model_validate_json(json.dumps(content), strict=True)
    return settings_class.model_validate(content)


def open_session(
    config: RunSettings,
    data: VerticalData,
    *,
    alignment: Mapping[str, Tensor] | None = None,
    logs: Path | None = None,
) -> Simulation:
    """Start all parties of a run in this process, with new secrets, ready for the first step.

    Args:
        config: the run's settings.
        data: the tables of all parties.
        alignment: mapping from party name to the row of that party's table at each alignment
            position, from an earlier session with the same data; None: intersect the IDs now.
        logs: folder of privacy ledgers and answer counters, which then outlast the session; None:
            they are in memory only.
    """
    # Without logs, the simulation makes every party's secrets itself.
    names = [] if logs is None else [table.name for table in data.tables]
    secrets = {name: fresh_secrets(config, name, log_folder=logs) for name in names}
    start = SimulationInputs(config=config, data=data, secrets=secrets, alignment=alignment)
    return Simulation(METHODS[config.method.name], start)
