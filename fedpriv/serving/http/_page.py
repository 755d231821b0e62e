"""The page at `/`: one file that needs no network, under a policy by which a browser runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def page_content() -> bytes:
    """The page; the same for everybody, so it tells a stranger nothing about the variants."""
    return (resources.files("fedpriv.serving.http") / "page.html").read_bytes()


@cache
def page_policy() -> str:
    """The Content-Security-Policy of the page: its own style and script, by digest, and requests to this server."""
    text = page_content().decode()
    style, script = (_digests(text, tag) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(text: str, tag: str) -> str:
    """The digests of what stands between the tags, as the policy writes them."""
    inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inner)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
