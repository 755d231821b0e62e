"""An observer that keeps what whoever started a run is told."""

from server.observer import LogObserver


class Notes(LogObserver):
    """Keeps the notices of a run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def notice(self, text: str) -> None:
        self.notes.append(text)
