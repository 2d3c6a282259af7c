"""The digits of scikit-learn's datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_FILE = "sklearn/datasets/data/digits.csv.gz"


def load_digits() -> SimpleNamespace:
    """Return the images and what they show, as scikit-learn does."""
    path = next(path for folder in sys.path if (path := Path(folder) / _FILE).exists())
    data = np.loadtxt(path, delimiter=",")
    return SimpleNamespace(images=data[:, :-1].reshape(-1, 8, 8), target=data[:, -1].astype(int))
