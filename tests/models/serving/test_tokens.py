"""Who may use what."""

import hashlib
import hmac

import pytest

from fedpriv.errors import InputError
from fedpriv.models.serving.http import tokens
from fedpriv.models.serving.http.tokens import Tokens, add_new, read


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens.toml"


def test_the_file_holds_the_digest_and_never_the_token_and_a_second_token_leaves_the_rest_as_it_is(file):
    first = add_new(file, "clinic", ["global"])
    assert first not in file.read_text()
    assert hashlib.sha256(first.encode()).hexdigest() in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(f"# of the clinic\n{file.read_text()}")
    second = add_new(file, "lab", ["*"], metrics=True)
    assert file.read_text().startswith("# of the clinic\n")
    found = Tokens(file)
    assert found.bearer([f"Bearer {first}".encode()]).name == "clinic"
    assert found.bearer([f"bearer  {second}".encode()]).metrics
    with pytest.raises(InputError, match="a token of that name"):
        add_new(file, "lab", ["*"])


def test_a_token_allows_what_its_patterns_name_and_nothing_else(file):
    add_new(file, "clinic", ["global", "round-*"])
    (token,) = read(file)
    names = ("global", "round-3", "round", "Global", "client-0", "xglobal", "global\n")
    assert [name for name in names if token.allows(name)] == ["global", "round-3"]


def test_anything_but_one_valid_token_is_nobody(file):
    secret = add_new(file, "clinic", ["*"]).encode()
    headers = b"", b"Bearer", b"Bearer ", b"Bearer x", b"Basic " + secret, secret
    for given in ([], *([each] for each in headers), [b"Bearer " + secret] * 2):
        assert Tokens(file).bearer(given) is None


def test_every_digest_is_compared_in_constant_time(file, monkeypatch):
    secrets = [add_new(file, name, ["*"]) for name in ("a", "b", "c")]
    found, compared = Tokens(file), []

    def compare(left, right):
        compared.append(left)
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(tokens, "hmac", type("Spy", (), {"compare_digest": staticmethod(compare)}))
    assert found.bearer([f"Bearer {secrets[0]}".encode()]).name == "a"
    assert len(compared) == 3


def test_a_file_that_others_can_open_is_refused(file):
    add_new(file, "clinic", ["*"])
    for mode in (0o640, 0o604, 0o622, 0o644):
        file.chmod(mode)
        with pytest.raises(InputError, match="chmod 600"):
            read(file)


DIGEST = "0" * 64


def test_a_file_that_is_wrong_is_refused_in_one_line(file):
    for text, says in (
        ("[[token]", "not valid TOML"),
        ("token = 7", "tables and nothing else"),
        ("[[tokens]]", "tables and nothing else"),
        ("[[token]]\nname='a'\nvariants=['*']", "sha256 of a token must be a str"),
        (f"[[token]]\nname='a'\nsha256='{DIGEST}'\nvariants='*'", "variants of a token must be a list"),
        (f"[[token]]\nname='a'\nsha256='{DIGEST}'\nvariants=[7]", "must be names"),
        (f"[[token]]\nname='a'\nsha256='{DIGEST}'\nvariants=['../x']", "must be a variant's name"),
        (f"[[token]]\nname='a'\nsha256='{DIGEST}'\nvariants=['*']\nsecret='x'", "'secret'"),
        ("[[token]]\nname='a'\nsha256='abc'\nvariants=['*']", "64 hexadecimal digits"),
        (f"[[token]]\nname='a b'\nsha256='{DIGEST}'\nvariants=['*']", "must be letters"),
        (f"[[token]]\nname='a'\nsha256='{DIGEST}'\nvariants=[]\n" * 2, "two tokens have 'a'"),
    ):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(InputError, match=says) as refused:
            read(file)
        assert "\n" not in str(refused.value)


def test_tokens_are_read_again_and_a_wrong_file_changes_nothing(file):
    first = f"Bearer {add_new(file, 'clinic', ['*'])}".encode()
    found = Tokens(file)
    second = f"Bearer {add_new(file, 'lab', ['*'])}".encode()
    assert found.bearer([second]) is None
    assert found.reload() == 2
    assert found.bearer([second]).name == "lab"
    file.write_text("[[")
    with pytest.raises(InputError):
        found.reload()
    assert found.bearer([first]).name == "clinic"
