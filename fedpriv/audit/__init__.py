"""Audits: lower bounds of epsilon from what an attacker finds, to hold against the upper bounds of the accounting."""
