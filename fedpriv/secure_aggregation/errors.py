"""Refusals of the protocol: one line with the name, the value and what would be right."""


class ProtocolError(ValueError):
    """A message, or an order of messages, that the protocol refuses; it names the client or the field."""


class TooFewError(ProtocolError):
    """Fewer clients than the threshold are left, so no sum is made and nothing is unmasked."""
