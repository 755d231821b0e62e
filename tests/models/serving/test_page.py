"""The page: it needs no network, runs nothing but itself, and takes names and answers for what they are, text."""

import base64
import hashlib
import itertools
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedpriv.models.serving.http.app import page_content, page_policy
from tests.models.serving.running import client_of

HERE = Path(__file__).parent
VOID = {"meta", "link", "input", "br"}


class Markup(HTMLParser):
    """Tags with their attributes; checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inner: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.inner.setdefault(self._open[-1] if self._open else "", []).append(data)


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup(page_content().decode())


def script() -> str:
    (found,) = re.findall(r"<script>(.*?)</script>", page_content().decode(), re.DOTALL)
    return found


def test_the_policy_lets_run_what_the_page_holds_and_nothing_else_and_everybody_gets_both_alike(markup):
    policy = dict(part.strip().split(" ", 1) for part in page_policy().split(";"))
    for tag in ("style", "script"):
        (inner,) = markup.inner[tag]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in page_policy()
    answer = client_of().get("/")
    assert answer.headers["content-security-policy"] == page_policy()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.content == page_content()
    assert answer.headers["content-type"].startswith("text/html")


def test_it_loads_nothing_and_has_no_code_or_style_in_attributes(markup):
    for tag, attributes in markup.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "action")], tag
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"^\s*// .*$", "", page_content().decode(), flags=re.M))


def test_untrusted_text_is_only_ever_text_and_the_token_is_kept_nowhere_but_in_memory(markup):
    for way in (
        *("innerHTML", "outerHTML", "insertAdjacent", "document.write", "setAttribute", "srcdoc"),
        *("eval(", "Function(", "localStorage", "sessionStorage", "cookie", "indexedDB", "location", "history"),
    ):
        assert way not in script()
    (token,) = [attributes for tag, attributes in markup.tags if attributes.get("id") == "token"]
    assert (token["type"], token["autocomplete"]) == ("password", "off")
    assert "name" not in token


def test_everything_that_the_script_names_is_there_and_only_once(markup):
    ids = [attributes["id"] for _, attributes in markup.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'(?:byId|show)\("([\w-]+)"[,)]', script()))
    assert len(named) > 10
    assert named <= set(ids)


def test_every_control_has_a_label_and_is_a_control(markup):
    labels = {attributes.get("for") for tag, attributes in markup.tags if tag == "label"}
    for tag, attributes in markup.tags:
        if tag in ("input", "select", "textarea") and attributes.get("type") != "checkbox":
            assert attributes["id"] in labels
    assert ("html", {"lang": "en"}) in markup.tags
    assert any(attributes.get("name") == "viewport" for _, attributes in markup.tags)
    assert not [tag for tag, attributes in markup.tags if "tabindex" in attributes and attributes["tabindex"] != "0"]


def luminance(colour: str) -> float:
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_what_is_read_stands_out_in_light_and_dark(markup):
    """WCAG 2.2: 4.5 for text, 3 for the edges of controls."""
    (style,) = markup.inner["style"]
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6})", own)) for own in re.findall(r":root \{(.*?)\}", style, re.S)]
    pairs = [(front, back, 4.5) for front in ("ink", "soft") for back in ("page", "card")]
    pairs += [("alarm-ink", "alarm", 4.5), ("on-series", "series-1", 4.5), ("series-2", "page", 3), ("edge", "page", 3)]
    for colours, (front, back, least) in itertools.product(schemes[:2], pairs):
        light, dark = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, (front, back)


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine on this machine")
def test_a_name_and_an_answer_full_of_markup_end_as_text(tmp_path):
    (tmp_path / "page.js").write_text(script())
    done = subprocess.run(["node", HERE / "page_in_node.js", tmp_path / "page.js"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
