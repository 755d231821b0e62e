"""Refusals of the protocol: one line with the name, the value and what would be right."""


class ProtocolError(ValueError):
    """A message, or an order of messages, that the protocol refuses; it names the client or the field."""


class DealerError(ProtocolError):
    """A client dealt shares that give another seed than it advertised; what it masked cannot be unmasked.

    Attributes:
        client: the dealer.
    """

    def __init__(self, client: int, what: str) -> None:
        super().__init__(f"client {client}: the shares that it dealt do not give the {what} that it advertised")
        self.client = client


class TooFewError(ProtocolError):
    """Fewer clients than the threshold are left, so no sum is made and nothing is unmasked."""
