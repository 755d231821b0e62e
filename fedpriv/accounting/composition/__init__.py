"""The interface of privacy events."""
