"""The public names, and nothing else."""

from rallypoint.errors import EnvironmentProblem, InternalError, RallypointError, UsageError

__version__ = "0.1.0"

__all__ = ["EnvironmentProblem", "InternalError", "RallypointError", "UsageError", "__version__"]
