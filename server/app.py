"""The Flower ServerApp of the coordinator."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedpriv
from fedpriv.config import parse
from fedpriv.errors import InputError
from server.coordinator import run
from server.observer import LogObserver, Observer

log = logging.getLogger("flwr")


def make_app(observer: Observer) -> ServerApp:
    """The ServerApp whose run reports to the observer."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log.info("server uses %s", fedpriv.__file__)
        config = parse(context.run_config)
        for key, path in (("out", config.out or "."), ("ledger", config.ledger), ("resume", config.resume)):
            if path and not Path(path).is_absolute():
                raise InputError(
                    f"{key} = {path!r}: must be an absolute path, since Flower runs in a folder of its own"
                )
        run(grid, config, observer)

    return app


app = make_app(LogObserver())
