"""A party in its folder: its checkpoints, what it agreed to, and how its part ended."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import safetensors
from pydantic import BaseModel, ValidationError
from safetensors.torch import load
from torch import Tensor

from secure_apfed.base.files import load_bytes, write_atomically
from secure_apfed.base.formats import CHECKPOINT, JOINT_NETWORK, find_installed_version
from secure_apfed.base.working import working_on
from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.data import OwnData, TargetScale
from secure_apfed.data.encoding import FeatureEncoding
from secure_apfed.errors import CheckpointError, ModelError
from secure_apfed.methods import PartyCheckpoint, PartySecrets, Role, fresh_secrets
from secure_apfed.methods.alignment import delete_unfinished_alignment
from secure_apfed.methods.serving import collect_network_states
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.runs.audit_log import AuditLog
from secure_apfed.runs.coefficients import list_party_coefficients
from secure_apfed.runs.columns import save_column_scores
from secure_apfed.runs.folder import (
    PartyFolder,
    describe_contract,
    load_with_checksum,
    save_tensors,
)
from secure_apfed.runs.outcome import Contributions, PartyCoefficients, Privacy, Written
from secure_apfed.runs.spending import ReleaseMeter, find_worst_spent
from secure_apfed.settings import Settings
from secure_apfed.settings.protection import list_keys

_CARD_KEY = "joint"  # of the metadata in a file of networks
_MAX_BYTES = 2**30  # of that file
_IDS_AT_ONCE = 2**16
# Starts of the names of tensors that have a row for each alignment position.
_BY_POSITION = ("allowance.", "guard.", "pseudo_labels.")


class PartyEnd(Written):
    """The contents of `ended.json`: how a party's part of a run ended.

    Attributes:
        contract: SHA-256 (hex) of the last session's contract.
        model_sha256: SHA-256 (hex) of the party's parameters.
        privacy: the cost of its releases; None: it releases no representation.
        contributions: the cost of its votes or contributions; None: without noise.
        coefficients: coefficients of a generalised linear model; None: none was trained.
    """

    party: str
    contract: str
    model_sha256: str
    privacy: Privacy | None
    contributions: Contributions | None
    coefficients: PartyCoefficients | None = None


class JointNetworkCard(BaseModel):
    """The card that a party keeps with its networks.

    Attributes:
        format: number of the file's format.
        encoding: how its columns became features.
        targets: mean and scale by which the active standardised labels that are numbers.
    """

    format: int = JOINT_NETWORK.number
    party: str
    encoding: FeatureEncoding
    classes: tuple[str, ...] = ()
    targets: TargetScale | None = None


def save_joint_network(folder: PartyFolder, name: str, data: OwnData, role: Role) -> None:
    """Write the networks that this party needs to predict jointly after the run, if it has any.

    `name`: the party's name. `role`: its trained role.
    """
    if tensors := collect_network_states(role):
        card = JointNetworkCard(
            party=name,
            encoding=data.table.encoding,
            classes=data.classes,
            targets=data.targets,
        )
        content = save_tensors(tensors, {_CARD_KEY: card.model_dump_json()})
        write_atomically(folder.joint, content, private=True)


def load_joint_network(
    folder: PartyFolder, name: str
) -> tuple[JointNetworkCard, dict[str, Tensor]]:
    """Read this party's networks for joint prediction, with their card.

    Raises ModelError: no networks are stored, or they are another party's.
    """
    if not folder.joint.exists():
        raise ModelError(
            f"{folder.joint} is missing: {name} has finished no training whose model predicts "
            "together (tvfl, split_nn, split_nn_sum or joint_teacher_sum)"
        )
    try:
        content = load_bytes(folder.joint, maximum=_MAX_BYTES)
        # The safetensors format: the header's length in 8 bytes, then the header as JSON.
        header_bytes = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_bytes])
        card_text = header["__metadata__"][_CARD_KEY]
        # Raises CheckpointError if this version cannot read the format.
        JOINT_NETWORK.parse_format_number(folder.joint, json.loads(card_text))
        card = JointNetworkCard.model_validate_json(card_text)
        tensors = load(content)
    except (ValueError, KeyError, TypeError, ValidationError, safetensors.SafetensorError) as error:
        raise ModelError(f"{folder.joint} holds no kept model: {error}") from error
    if card.party != name:
        raise ModelError(f"{folder.joint} is of {card.party}, this party is {name}")
    return card, tensors


class PartyCheckpointStore:
    """A party's checkpoints in its folder; see `secure_apfed.methods.method.CheckpointStore`.

    Its checkpoints are all that it needs to resume exactly, and they hold nothing of another party.
    They have private state (model, momenta, noise key, seed), so only their owner may read them.
    Random generators need no state (see `secure_apfed.base.seeds`). Keys of links and sums are not
    kept: a resumed run is a new session under a new contract. The active saves last, so the others
    hold a checkpoint of the same step as its newest one; they keep the one before, too. A party
    without data needs no checkpoint. Layout: msgpack, tensors as safetensors inside, and a SHA-256
    of it all at the end.
    """

    def __init__(
        self, folder: PartyFolder, name: str, config: Config, data: OwnData | None, *, role: str
    ) -> None:
        """Load the party's identity and, if a checkpoint has them, its secrets; else draw new ones.

        `name`: the party's name. `data`: its table; None: it has none. `role`: active, passive,
        aggregator or dealer.
        """
        self._folder = folder
        identity = folder.load_identity()
        # The fields that a checkpoint must have to be resumed; None: this party has none.
        self._expected: dict[str, Any] | None = None
        if data:
            self._expected = {
                "party": name,
                "identity": identity.public,
                "config": config_digest(config),
                "keys": keys_digest(type(config), type(config.method)),
                "table": table_digest(data),
            }
        self._name = name
        self._config = config
        self._data = data
        secrets = fresh_secrets(config, name, identity=identity, checkpoints=self, logs=folder.path)
        if content := self._load_content(None):
            secrets = replace(secrets, noise_key=content["noise_key"], seed=content["seed"])
        self.secrets: PartySecrets = secrets
        self.before_save: Callable[[int], None] = lambda step: None
        self.meter = ReleaseMeter(config, role)
        self.audit: AuditLog | None = None

    def register_ledger(self, name: str, ledger: PrivacyLedger) -> None:
        """Include this ledger in the privacy cost that the party reports."""
        self.meter.add_ledger(name, ledger)

    def save_contract(self, contract: Contract, signatures: Mapping[str, bytes]) -> None:
        """Store the contract, and log it in the audit log."""
        if self.audit:
            self.audit.note_contract(contract)
        self._folder.write_json(self._folder.contract, describe_contract(contract, signatures))

    def load_latest(self, until: int | None = None) -> PartyCheckpoint | None:
        """Return the newest checkpoint, at most of step `until`; None: there is none."""
        content = self._load_content(until)
        if content is None:
            return None
        return PartyCheckpoint(
            **{field.name: content[field.name] for field in fields(PartyCheckpoint)}
        )

    def list_steps(self) -> tuple[int, ...]:
        return tuple(self._folder.steps.list_steps())

    def save(self, state: PartyCheckpoint) -> None:
        """Sync the audit log, then write the checkpoint with the party's secrets.

        A party without data writes none.
        """
        self.before_save(state.step)
        if self.audit:
            self.audit.sync()
        if self._expected:
            content = {
                CHECKPOINT.key: CHECKPOINT.number,
                "party": self._expected["party"],
                "identity": self._expected["identity"],
                "run": state.run,
                "config": self._expected["config"],
                "keys": self._expected["keys"],
                "table": self._expected["table"],
                "noise_key": self.secrets.noise_key,
                "seed": self.secrets.seed,
                "step": state.step,
                "rows": save_tensors({"rows": state.rows}),
                "tensors": save_tensors(state.tensors),
                "ledgers": {name: save_tensors(ledger) for name, ledger in state.ledgers.items()},
                "notes": dict(state.notes),
            }
            with working_on("checkpoint", f"step {state.step}"):
                packed = msgpack.packb(content)
                content.clear()  # as large as the checkpoint itself, which may be hundreds of MB
                self._folder.steps.write_step(state.step, packed)
        if state.step > 0:  # all others have reached this step
            delete_unfinished_alignment(self._folder.path)

    def finish_part(self, contract: Contract, role: Role) -> None:
        """Write what stays of this party's run: `ended.json` with the privacy costs, networks for
        joint prediction, and column scores.

        Checkpoints are deleted, since their secrets should not outlive the run.
        """
        privacy = find_worst_spent(
            ledger for ledger in role.ledgers.values() if ledger is not role.contribution_ledger
        )
        account = role.contribution_ledger
        if self._data:
            save_joint_network(self._folder, self._name, self._data, role)
            save_column_scores(self._folder, self._name, self._data, role)
        end = PartyEnd(
            party=self._name,
            contract=contract.digest.hex(),
            model_sha256=_hash_model(role.tensors()),
            privacy=Privacy.from_spent(privacy) if privacy else None,
            contributions=(
                Contributions.model_validate(account.summarise_cost()) if account else None
            ),
            coefficients=self._list_coefficients(role),
        )
        self._folder.write_json(self._folder.ended, end.model_dump(mode="python"))
        self._folder.steps.clear()
        delete_unfinished_alignment(self._folder.path)

    def _list_coefficients(self, role: Role) -> PartyCoefficients | None:
        """Return this party's coefficients, if it trained a generalised linear model."""
        if self._data is None:
            return None
        return list_party_coefficients(self._config, self._data, role.predicts_with)

    def _load_content(self, last_step: int | None) -> dict[str, Any] | None:
        """Return the newest checkpoint's fields, at most of step `last_step` (None: any); None:
        there is none.
        """
        files = self._folder.steps
        steps = [step for step in files.list_steps() if last_step is None or step <= last_step]
        if self._expected is None or not steps:
            return None
        path = files.get_path(steps[-1])
        with working_on("resuming", f"step {steps[-1]}"):
            return self._load_step(path)

    def _load_step(self, path: Path) -> dict[str, Any]:
        """Return the fields of one checkpoint, with tensors decoded.

        Raises CheckpointError: malformed, or not of this party's run.
        """
        assert self._expected is not None
        try:
            content = _check_format(path)
            content["rows"] = load(content["rows"])["rows"]
            content["tensors"] = load(content["tensors"])
            content["ledgers"] = {name: load(state) for name, state in content["ledgers"].items()}
            for name in ("noise_key", "seed", "step", "run", "notes"):
                content[name]  # a KeyError if it is missing
            _check_content(path, content, self._expected)
        except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a run: {error}") from error
        return content


def _check_format(path: Path) -> dict[str, Any]:
    """Return a checkpoint's fields, as stored.

    Raises CheckpointError: damaged, or of an unsupported format; TypeError: it has no fields.
    """
    content: dict[str, Any] = msgpack.unpackb(load_with_checksum(path), strict_map_key=False)
    if not isinstance(content, dict):
        raise TypeError(f"it holds {type(content).__name__} in place of fields")
    # Raises CheckpointError if this version cannot read the format.
    CHECKPOINT.parse_format_number(path, content)
    return content


def _check_content(path: Path, content: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a checkpoint of another party, version, configuration or table.

    Alignment, ledgers and frozen rows refer to positions: in another table these would be other
    people, whose releases nobody counted.

    `content`: the checkpoint's fields. `expected`: the fields that one of this run has.
    """
    name = expected["party"]
    if any(content[key] != expected[key] for key in ("party", "identity")):
        raise CheckpointError(
            f"put the own checkpoint and identity.pem of {name} back: {path} is of "
            f"{content['party']!r} with another identity than that of {name} here"
        )
    if content["keys"] != expected["keys"]:
        raise CheckpointError(
            f"{CHECKPOINT.remedy}: {path} is a {CHECKPOINT.title} of another version of "
            f"secure-apfed than this one ({find_installed_version()}), whose settings have other "
            "keys"
        )
    if content["config"] != expected["config"]:
        raise CheckpointError(
            f"resume with the config.yaml of that run: {path} belongs to a run with another "
            "configuration"
        )
    if content["table"] != expected["table"]:
        raise CheckpointError(
            f"put the table of {name} back, or begin a new run: it is not the one that the run "
            "began with; its IDs, their order, its labels or the split into training and test rows "
            "are others, and the run counts by positions"
        )


def table_digest(data: OwnData) -> str:
    """Return the SHA-256 (hex) of a party's IDs in order and, at the active, of labels and split.

    Features are excluded: their last bits may differ on another machine, and repeated steps with
    other features cost again.
    """
    labels: list[bytes] = []
    if data.table.labels is not None:
        split = {"train": data.train_rows, "test": data.test_rows}
        if data.labelled is not None:
            split["labelled"] = data.labelled
        dtype = "<f4" if data.targets else "<i8"
        labels = [data.table.labels.numpy().astype(dtype).tobytes(), save_tensors(split)]
    if data.targets is not None:
        labels.append(data.targets.model_dump_json().encode())
    # The digest of the msgpack list [IDs, *labels], packed in parts to bound memory.
    packer = msgpack.Packer()
    ids = data.table.ids
    digest = hashlib.sha256(packer.pack_array_header(1 + len(labels)))
    digest.update(packer.pack_array_header(len(ids)))
    for start in range(0, len(ids), _IDS_AT_ONCE):
        digest.update(b"".join(map(packer.pack, ids[start : start + _IDS_AT_ONCE])))
    for part in labels:
        digest.update(packer.pack(part))
    return digest.hexdigest()


@cache
def keys_digest(*kinds: type[Settings]) -> str:
    """Return the SHA-256 (hex) of the keys that these classes of settings have.

    It detects a version with other keys, whose digests of values cannot be compared.
    """
    return hashlib.sha256(msgpack.packb([[*list_keys(kind)] for kind in kinds])).hexdigest()


def config_digest(config: Config) -> str:
    """Return the SHA-256 (hex) of everything that the run's result depends on."""
    # Settings that may change when the run is resumed are left out.
    excluded: dict[str, bool | dict[str, bool]] = {
        "attacks": True,
        "data": {"memory_map": True},
        "tradeoff": True,
        "checkpoint_every": True,
        "rules": {"refused_sums": True, "patience_s": True, "restarts": True},
    }
    content = config.model_dump_json(exclude=excluded)
    return hashlib.sha256(content.encode()).hexdigest()


def _hash_model(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of a role's parameters by name.

    Tensors with a row for each alignment position are excluded: each run has another order.
    """
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BY_POSITION)}
    return hashlib.sha256(save_tensors(model)).hexdigest()
