"""The files that a party writes in its folder: checkpoints, contract, and the end of its part."""

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
from secure_apfed.runs.outcome import Contributions, PartyCoefficients, Privacy, StoredResult
from secure_apfed.runs.spending import ReleaseMeter, find_worst_spent
from secure_apfed.settings import Settings
from secure_apfed.settings.protection import list_keys

_CARD_KEY = "joint"  # key of the card in the metadata of a file of networks
_MAX_NETWORKS_BYTES = 2**30  # largest size of a file of networks
_IDS_AT_ONCE = 2**16
# Starts of the names of tensors that have a row for each alignment position.
_ROW_TENSOR_PREFIXES = ("allowance.", "guard.", "pseudo_labels.")


class PartyEnd(StoredResult):
    """The contents of `ended.json`, which a party writes when its part of a run ends.

    Attributes:
        party: the party's name.
        contract: SHA-256 (hex) of the last session's contract.
        model_sha256: SHA-256 (hex) of the party's parameters.
        privacy: the privacy cost of its released representations; None: it releases none.
        contributions: the privacy cost of its votes or contributions; None: they have no noise.
        coefficients: coefficients of a generalised linear model; None: none was trained.
    """

    party: str
    contract: str
    model_sha256: str
    privacy: Privacy | None
    contributions: Contributions | None
    coefficients: PartyCoefficients | None = None


class JointNetworkCard(BaseModel):
    """The card in a party's file of networks for joint prediction, with all that it needs to use
    them.

    Attributes:
        format: number of the file's format.
        party: the party's name.
        encoding: how its columns became features.
        classes: names of the classes; empty at a party without labels.
        targets: mean and scale by which the active standardised labels that are numbers.
    """

    format: int = JOINT_NETWORK.current_number
    party: str
    encoding: FeatureEncoding
    classes: tuple[str, ...] = ()
    targets: TargetScale | None = None


def save_joint_network(folder: PartyFolder, name: str, data: OwnData, role: Role) -> None:
    """Write the networks that this party needs to predict jointly after the run.

    Nothing is written if the method has no such networks.

    `name`: the party's name. `data`: its data. `role`: its trained role in the method.
    """
    if tensors := collect_network_states(role):
        card = JointNetworkCard(
            party=name,
            encoding=data.table.encoding,
            classes=data.classes,
            targets=data.targets,
        )
        content = save_tensors(tensors, {_CARD_KEY: card.model_dump_json()})
        write_atomically(folder.joint_networks, content, private=True)


def load_joint_network(
    folder: PartyFolder, name: str
) -> tuple[JointNetworkCard, dict[str, Tensor]]:
    """Read this party's networks for joint prediction, with their card.

    Raises:
        ModelError: no networks are stored, the file is damaged, or it belongs to another party.
        CheckpointError: this version cannot read the file's format.
    """
    if not folder.joint_networks.exists():
        raise ModelError(
            f"{folder.joint_networks} is missing: {name} has finished no training whose model "
            "predicts together (tvfl, split_nn, split_nn_sum or joint_teacher_sum)"
        )
    try:
        content = load_bytes(folder.joint_networks, max_bytes=_MAX_NETWORKS_BYTES)
        # The safetensors format: the header's length in 8 bytes, then the header as JSON.
        header_size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_size])
        card_text = header["__metadata__"][_CARD_KEY]
        # Raises CheckpointError if this version cannot read the format.
        JOINT_NETWORK.parse_format_number(folder.joint_networks, json.loads(card_text))
        card = JointNetworkCard.model_validate_json(card_text)
        tensors = load(content)
    except (ValueError, KeyError, TypeError, ValidationError, safetensors.SafetensorError) as error:
        raise ModelError(f"{folder.joint_networks} holds no kept model: {error}") from error
    if card.party != name:
        raise ModelError(f"{folder.joint_networks} is of {card.party}, this party is {name}")
    return card, tensors


class PartyCheckpointStore:
    """A party's checkpoints in its folder (a `secure_apfed.methods.method.CheckpointStore`).

    A checkpoint is all that a party needs to resume exactly, and contains nothing of another party.
    It has private state (model, momenta, noise key, seed), so only its owner may read the file.
    Random generators need no state (see `secure_apfed.base.seeds`). Keys of links and sums are not
    stored: a resumed run is a new session under a new contract. The active saves last, so the other
    parties have a checkpoint of the same step as the active's newest one; they also keep the
    checkpoint before. A party without data needs no checkpoint. Layout: msgpack, tensors as
    safetensors inside, and a SHA-256 of it all at the end.

    Attributes:
        secrets: the party's identity, noise key and seed.
        before_save: called with the step before each checkpoint; the caller may replace it.
        meter: the privacy cost of all that the party released.
        audit: the party's audit log; None: it has none.
    """

    def __init__(
        self, folder: PartyFolder, name: str, config: Config, data: OwnData | None, *, role: str
    ) -> None:
        """Load the party's identity, and load its secrets from a checkpoint or draw new ones.

        Args:
            folder: the party's folder.
            name: the party's name.
            config: settings of the run.
            data: the party's data; None: it has none.
            role: "active", "passive", "aggregator" or "dealer".

        Raises CheckpointError: the newest checkpoint is damaged, or belongs to another run.
        """
        self._folder = folder
        identity = folder.load_identity()
        # Values that a checkpoint must have to belong to this run; None: the party saves none.
        self._expected_fields: dict[str, Any] | None = None
        if data:
            self._expected_fields = {
                "party": name,
                "identity": identity.public,
                "config": config_digest(config),
                "keys": keys_digest(type(config), type(config.method)),
                "table": table_digest(data),
            }
        self._name = name
        self._config = config
        self._data = data
        secrets = fresh_secrets(
            config, name, identity=identity, checkpoint_store=self, log_folder=folder.path
        )
        if content := self._load_newest_fields(None):
            secrets = replace(secrets, noise_key=content["noise_key"], seed=content["seed"])
        self.secrets: PartySecrets = secrets
        self.before_save: Callable[[int], None] = lambda step: None
        self.meter = ReleaseMeter(config, role)
        self.audit: AuditLog | None = None

    def register_ledger(self, name: str, ledger: PrivacyLedger) -> None:
        """Include a ledger in the privacy cost that the party reports.

        `name`: name of the ledger, which says what it counts.
        """
        self.meter.add_ledger(name, ledger)

    def save_contract(self, contract: Contract, signatures: Mapping[str, bytes]) -> None:
        """Store the contract of a session with all parties' signatures; log it in the audit log."""
        if self.audit:
            self.audit.note_contract(contract)
        self._folder.write_json(self._folder.contract, describe_contract(contract, signatures))

    def load_latest(self, max_step: int | None = None) -> PartyCheckpoint | None:
        """Return the newest checkpoint; None: there is none.

        `max_step`: the latest step that the checkpoint may have; None: any.
        """
        content = self._load_newest_fields(max_step)
        if content is None:
            return None
        return PartyCheckpoint(
            **{field.name: content[field.name] for field in fields(PartyCheckpoint)}
        )

    def list_steps(self) -> tuple[int, ...]:
        """Return the steps of the stored checkpoints, ascending."""
        return tuple(self._folder.checkpoints.list_steps())

    def save(self, state: PartyCheckpoint) -> None:
        """Sync the audit log, then write a checkpoint with the party's secrets.

        A party without data only syncs. The stored alignment is deleted once training has begun.
        """
        self.before_save(state.step)
        if self.audit:
            self.audit.sync()
        if self._expected_fields:
            content = {
                CHECKPOINT.number_key: CHECKPOINT.current_number,
                "party": self._expected_fields["party"],
                "identity": self._expected_fields["identity"],
                "run": state.run,
                "config": self._expected_fields["config"],
                "keys": self._expected_fields["keys"],
                "table": self._expected_fields["table"],
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
                self._folder.checkpoints.write_step(state.step, packed)
        if state.step > 0:  # all parties have reached training, and resume from checkpoints
            delete_unfinished_alignment(self._folder.path)

    def finish_part(self, contract: Contract, role: Role) -> None:
        """Write the files that stay of this party's run, and delete its checkpoints.

        The files are `ended.json` with the privacy costs, networks for joint prediction, and column
        scores. Checkpoints are deleted, since their secrets should not outlive the run.

        `contract`: the last session's. `role`: the party's trained role in the method.
        """
        contribution_ledger = role.contribution_ledger
        privacy = find_worst_spent(
            ledger for ledger in role.ledgers.values() if ledger is not contribution_ledger
        )
        contributions = None
        if contribution_ledger:
            contributions = Contributions.model_validate(contribution_ledger.summarise_cost())
        if self._data:
            save_joint_network(self._folder, self._name, self._data, role)
            save_column_scores(self._folder, self._name, self._data, role)
        party_end = PartyEnd(
            party=self._name,
            contract=contract.digest.hex(),
            model_sha256=_hash_model(role.tensors()),
            privacy=Privacy.from_spent(privacy) if privacy else None,
            contributions=contributions,
            coefficients=self._list_coefficients(role),
        )
        self._folder.write_json(self._folder.party_end, party_end.model_dump(mode="python"))
        self._folder.checkpoints.clear()
        delete_unfinished_alignment(self._folder.path)

    def _list_coefficients(self, role: Role) -> PartyCoefficients | None:
        """Return this party's coefficients, if it trained a generalised linear model."""
        if self._data is None:
            return None
        return list_party_coefficients(self._config, self._data, role.prediction_networks)

    def _load_newest_fields(self, last_step: int | None) -> dict[str, Any] | None:
        """Return the fields of the newest checkpoint; None: a new run, or there is no checkpoint.

        `last_step`: the latest step that the checkpoint may have; None: any.
        """
        is_new_run = self._expected_fields is None
        files = self._folder.checkpoints
        steps = [step for step in files.list_steps() if last_step is None or step <= last_step]
        if is_new_run or not steps:
            return None
        newest_step = steps[-1]
        with working_on("resuming", f"step {newest_step}"):
            return self._load_step(files.get_path(newest_step))

    def _load_step(self, path: Path) -> dict[str, Any]:
        """Return the fields of one checkpoint, with tensors decoded.

        Raises CheckpointError: malformed, or not of this party's run.
        """
        assert self._expected_fields is not None
        try:
            content = _check_format(path)
            content["rows"] = load(content["rows"])["rows"]
            content["tensors"] = load(content["tensors"])
            content["ledgers"] = {
                field_name: load(state) for field_name, state in content["ledgers"].items()
            }
            for field_name in ("noise_key", "seed", "step", "run", "notes"):
                content[field_name]  # raises a KeyError if the field is missing
            _check_content(path, content, self._expected_fields)
        except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a run: {error}") from error
        return content


def _check_format(path: Path) -> dict[str, Any]:
    """Return a checkpoint's fields, as stored.

    Raises:
        CheckpointError: the file is damaged, or of an unsupported format.
        TypeError: the file has no fields.
    """
    content: dict[str, Any] = msgpack.unpackb(load_with_checksum(path), strict_map_key=False)
    if not isinstance(content, dict):
        raise TypeError(f"it holds {type(content).__name__} in place of fields")
    # Raises CheckpointError if this version cannot read the format.
    CHECKPOINT.parse_format_number(path, content)
    return content


def _check_content(path: Path, content: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a checkpoint of another party, version, configuration or table.

    The table matters because alignment, ledgers and noise that is drawn once for a row refer to
    positions of rows. In another table these would be other people, whose releases nobody counted.

    `content`: the checkpoint's fields. `expected`: the values that a checkpoint of this run has.
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
    """Return the SHA-256 (hex) of a party's IDs in order, and of its labels and split, if any.

    Features are excluded: their last bits may differ on another machine. This is safe, since a
    repeated step with other features is charged to the privacy ledger again.
    """
    label_contents: list[bytes] = []  # labels, split, and the scale of labels that are numbers
    if data.table.labels is not None:
        split = {"train": data.train_rows, "test": data.test_rows}
        if data.labelled is not None:
            split["labelled"] = data.labelled
        dtype = "<f4" if data.targets else "<i8"
        label_bytes = data.table.labels.numpy().astype(dtype).tobytes()
        label_contents = [label_bytes, save_tensors(split)]
    if data.targets is not None:
        label_contents.append(data.targets.model_dump_json().encode())
    # The digest of the msgpack list [IDs, *label_contents]. It is packed piece by piece, so that
    # all IDs are never in memory.
    packer = msgpack.Packer()
    ids = data.table.ids
    digest = hashlib.sha256(packer.pack_array_header(1 + len(label_contents)))
    digest.update(packer.pack_array_header(len(ids)))
    for start in range(0, len(ids), _IDS_AT_ONCE):
        digest.update(b"".join(map(packer.pack, ids[start : start + _IDS_AT_ONCE])))
    for content in label_contents:
        digest.update(packer.pack(content))
    return digest.hexdigest()


@cache
def keys_digest(*settings_classes: type[Settings]) -> str:
    """Return the SHA-256 (hex) of the keys that these classes of settings have.

    It differs between versions of this library with different keys. Their digests of settings
    cannot be compared, so a checkpoint of such a version gets an error of its own.
    """
    return hashlib.sha256(
        msgpack.packb([[*list_keys(settings_class)] for settings_class in settings_classes])
    ).hexdigest()


def config_digest(config: Config) -> str:
    """Return the SHA-256 (hex) of all settings that must not change when a run is resumed."""
    # The others: they change no result, and no other checkpoint or guarantee.
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
    """Return the SHA-256 (hex) of a party's model.

    Tensors with a row for each aligned person are excluded, since the order of people is random in
    each run.

    `tensors`: state of the party's role, by name.
    """
    model_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_ROW_TENSOR_PREFIXES)
    }
    return hashlib.sha256(save_tensors(model_tensors)).hexdigest()
