"""A run under several seeds: what `secure-apfed run CONFIG --seeds N` says of all of them.

Each seed draws another split of the data and is a run folder of its own; those that lie there
already are not run again. Initial weights and dropout come from what `party_seeds` says: a secret
seed of each party, so that no run repeats figure for figure, or the run's, so that all do.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apfed_experiments.columns import write_text
from apfed_experiments.study import OnDone, Point, Study
from apfed_experiments.summary import Summary, accuracy_of
from apfed_experiments.words import epsilon
from secure_apfed.config import Config
from secure_apfed.files import to_json
from secure_apfed.measures import MEASURES

__all__ = ["SeveralSeeds", "run_seeds"]

_KINDS = {
    "secret": "each party drew a secret seed of its own for its initial weights and dropout, so "
    "that the same seeds give somewhat other figures next time",
    "shared_for_comparison": "initial weights and dropout came from the run's seed at all parties, "
    "so that the same seeds give the same figures",
}


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds:
    """What the runs of one configuration found; `reached`: the run's own measure, by seed."""

    config: Config
    folders: dict[int, Path]
    reached: dict[int, float]
    summary: Summary

    @property
    def note(self) -> str:
        """What the seeds drew, and what the intervals are."""
        return (
            f"Each seed draws its rows anew; {_KINDS[self.config.party_seeds]} (party_seeds: "
            f"{self.config.party_seeds}). Intervals: 95 %, over the seeds, corrected for the "
            "people that splits of one table share (Nadeau and Bengio 2003); the gain is paired by "
            "seed."
        )

    def rows(self) -> list[tuple[str, str]]:
        measure, found = MEASURES[self.config.measure], self.summary
        form = {"scale": 100.0, "form": ".2f"} if measure.share else {"form": ".4f"}
        rows = [(f"seed {seed}", measure.text(value)) for seed, value in self.reached.items()]
        rows += [
            (f"{measure.title}, {name}", of.text(**form) + (" %" if measure.share else ""))
            for name, of in found.accuracies.items()
        ]
        if found.gain is not None:
            rows.append(("help", found.gain.sentence))
        rows.append(("largest epsilon", epsilon(found.epsilon_of(self.config.method))))
        rows += [
            (f"worst attack on {target}", f"{leak.advantage.text(form='+.3f')} ({leak.name})")
            for target, leak in found.leakage.items()
        ]
        return rows

    def as_json(self) -> dict[str, Any]:
        found = self.summary
        return {
            "seeds": list(self.reached), "party_seeds": self.config.party_seeds,
            "measure": self.config.measure, "reached": {
                str(seed): value for seed, value in self.reached.items()
            },
            "intervals": {name: asdict(one) for name, one in found.accuracies.items()},
            "gain": None if found.gain is None else asdict(found.gain),
            "epsilon": found.epsilon_of(self.config.method), "wire_bytes": found.wire_bytes,
            "leakage": {target: leak.as_json() for target, leak in found.leakage.items()},
            "folders": {str(seed): str(path) for seed, path in self.folders.items()},
        }  # fmt: skip


def run_seeds(
    config: Config, folder: Path, *, seeds: int, jobs: int = 1, baselines: bool = True,
    on_done: OnDone = lambda done, total: None,
) -> SeveralSeeds:  # fmt: skip
    """Run what is missing under `config.seed` and the seeds after it; write `several.json` of all.

    `config.party_seeds` holds; without `baselines` of what the active does alone there is no gain.
    Raises CheckpointError where the folder holds runs with other settings, and as a run does.
    """
    point = Point(config=config, folder=folder, party_seeds=config.party_seeds)
    study = Study(points=[point], seeds=range(config.seed, config.seed + seeds))
    table = study.run(jobs=jobs, on_done=on_done, solo=baselines).table
    folders = {trial.seed: trial.path for trial in study.trials}
    reached = {int(str(seed)): float(of) for seed, of in accuracy_of(table).items()}
    found = SeveralSeeds(config=config, folders=folders, reached=reached, summary=Summary.of(table))
    write_text(folder / "several.json", to_json(found.as_json(), indent=1))
    return found
