"""Training: `Trainer(model, dataset, run_config).fit()`."""

from oqc.train.environment import find_device
from oqc.train.evaluation import Evaluator
from oqc.train.folder import Row, RunFolder, seeds_in
from oqc.train.many import replay_rate, train_many
from oqc.train.progress import Display, Progress, Silent, Status
from oqc.train.recorder import load_weights, read_weights
from oqc.train.stopping import Diverged, Stopped
from oqc.train.summary import Summary
from oqc.train.trainer import Trainer

__all__ = [
    "Display",
    "Diverged",
    "Evaluator",
    "Progress",
    "Row",
    "RunFolder",
    "Silent",
    "Status",
    "Stopped",
    "Summary",
    "Trainer",
    "find_device",
    "load_weights",
    "read_weights",
    "replay_rate",
    "seeds_in",
    "train_many",
]
