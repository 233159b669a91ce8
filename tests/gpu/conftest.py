"""These need a GPU: `make test` does not collect them, `make test-gpu` names the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

collect_ignore_glob = ["gpu_*.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out unless it is asked for by name."""
    here = Path(__file__).parent
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == here or here in path.parents for path in named) else True
