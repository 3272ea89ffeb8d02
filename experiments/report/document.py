"""privacy.json: the privacy report for programs, with all that the page says in words.

Plain values only, from the run's folder; infinity is the text "inf".
"""

from dataclasses import asdict
from typing import Any

from experiments.report import contents
from experiments.report.audited import Audited
from experiments.report.folder import RunFolder

__all__ = ["privacy_document"]


def privacy_document(run: RunFolder, audited: Audited | None = None) -> dict[str, Any]:
    """Return the threat model, the inventory, the accounting, the attacks and the limits.

    "inventory" counts what each party received; "who_learns_what" says what it can read of it;
    an attack that was not applicable says why. "audit" is null where no guard released anything.
    """
    return {
        "schema_version": 1,
        "run": run.config.name,
        "method": run.config.method,
        "contract_sha256": run.contract_sha256,
        "warnings": contents.warnings_of(run),
        "threat_model": {
            "parties": dict(run.roles),
            "who_learns_what": {
                party: [asdict(row) for row in rows]
                for party, rows in contents.learned_by(run).items()
            },
            "alignment": list(contents.alignment_leaks_of(run)),
            "coalitions": {one.who: one.learns for one in contents.coalitions_of(run)},
        },
        "inventory": [
            {
                "receiver": flow.receiver,
                "sender": flow.sender,
                "kind": str(flow.kind),
                "messages": flow.messages,
                "payload_bytes": flow.payload_bytes,
                "steps": [flow.first_step, flow.last_step],
            }
            for flow in run.flows
        ],
        "accounting": _accounting(run, audited),
        "attacks": [result.as_json() for result in run.attacks or ()],
        "not_guaranteed": list(contents.limits_of(run)),
    }


def _accounting(run: RunFolder, audited: Audited | None) -> dict[str, Any]:
    privacy, contributions = run.outcome.privacy, run.outcome.contributions
    return {
        "guarantee": run.outcome.guarantee,
        "figures": privacy.model_dump(exclude={"trace"}),
        "trace": list(privacy.trace),
        "charges": dict(run.charges),
        "audit": asdict(audited) | {"contradicted": audited.contradicted} if audited else None,
        "contributions": {name: one.model_dump() for name, one in contributions.items()},
    }
