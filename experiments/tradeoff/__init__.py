"""Trade-off studies: accuracy against leakage over defences and their strengths.

One YAML file describes a study; `run_study` runs its trials, resumes a stopped one, and writes
a leaderboard (CSV, Markdown), pictures and one self-contained page.
"""

from experiments.tradeoff.board import Board
from experiments.tradeoff.run import run_study
from experiments.tradeoff.study import Study, StudyError, load_study

__all__ = ["Board", "Study", "StudyError", "load_study", "run_study"]
