"""The one place that starts Ray on this machine or joins a cluster."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError

ROOT = Path(__file__).resolve().parents[2]

# Ray sets it for what runs as a submitted job.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Otherwise Ray hides the devices from a worker without a GPU, and warns that it will stop doing so.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def connect(address: str = "", *, num_cpus: int | None = None) -> Any:
    """The module `ray`, connected; the caller ends with `ray.shutdown()`.

    Args:
        address: of an existing cluster, which gets this project's code; empty takes RAY_ADDRESS, which Ray sets in a
            submitted job, and without it (or with `local`) starts Ray on this machine.
        num_cpus: cores to offer where Ray is started; None offers all.

    Raises:
        InputError: Ray is not installed, or no cluster answers.
    """
    os.environ.update(_ENVIRONMENT)
    address = address or os.environ.get("RAY_ADDRESS", "").removeprefix("local")
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("Ray is not installed: pip install -e '.[federation,ray]'; or use one process") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            _check_reachable(address)
            # A submitted job has brought its code, and may not bring it twice.
            is_job = _JOB in os.environ
            code = {} if is_job else {"working_dir": str(ROOT), "excludes": [".venv", ".git", "results"]}
            ray.init(address=address, runtime_env=code, **quiet)
        else:
            environment = {"env_vars": {"PYTHONPATH": str(ROOT), **_ENVIRONMENT}}
            # `local`, since without an address Ray would join any cluster that it finds on this machine.
            ray.init("local", num_cpus=num_cpus, include_dashboard=False, runtime_env=environment, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"ray_address = {address!r}: no Ray cluster to join ({str(error).splitlines()[0]})") from None
    return ray


def _check_reachable(address: str) -> None:
    """Refuse at once an address where nothing listens: Ray itself would try for minutes."""
    host, sign, port = address.removeprefix("ray://").rpartition(":")
    if sign and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
