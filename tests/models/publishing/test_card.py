"""A model card says what a run cost, in the Hub's format, and nothing that data or their holders put into it."""

import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from fedpriv.models.publishing import card, find, markdown
from fedpriv.runs import RunFolder
from tests.chats import chat_model
from tests.cli.command_line import as_json, fedpriv
from tests.models.publishing.runs import CHAT, finished

ATTACK = "---\nlicense: mit\n---\n# Private <script>x</script> [a](http://b) | `c`"


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory):
    return finished(tmp_path_factory.mktemp("runs") / "run", tiny_bert)


def with_summary(folder, tmp_path, **changes):
    """A saved variant whose run's summary is another."""
    for name in ("summary.json", "config.toml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    values = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(values | changes))
    return replace(find(folder), run=RunFolder(tmp_path))


def test_it_states_epsilon_delta_unit_adjacency_views_accountant_noise_and_ledger_and_no_holder(
    run, tiny_bert, tmp_path
):
    text = card.text(find(run))
    head = json.loads((run / "summary.json").read_text())["ledger_head"]
    for part in (
        "| local | 1.235 | 1e-5 |",  # rounded up
        "| rho | 2.5 | 1e-5 |",
        "| aggregate | does not hold |",
        "one record of the client added or removed",
        "accountant: pld",
        "noise source: secure",
        head,
        "Plain peft loads the tensors and gives other probabilities",
    ):
        assert part in text
    for secret in ("NOT PRIVATE", "Anna", str(tiny_bert.parent), str(run.parent), "hospital", "letters.csv"):
        assert secret not in text
    text = card.text(with_summary(run, tmp_path, epsilon_local_max=12345.6441, delta_max=1 / 300_000))
    assert "| local | 12345.645 | 3.4e-6 |" in text, "no figure of the guarantee is rounded down"


def test_it_says_what_an_attacker_finds(run, tmp_path):
    found = {"0.001": 0.0048, "0.01": 0.0339, "0.05": 0.1261}
    text = card.text(with_summary(run, tmp_path, tpr_at_fpr=found, mu=0.5, advantage=0.197))
    assert (
        "identifies at most 3.4 % of the records, on the local view, for releases fixed in advance. Delta, 1e-5" in text
    )
    assert "Found at most, on the local view: 0.5 % at 0.1 %, 3.4 % at 1 %, 12.7 % at 5 % wrongly accused" in text
    assert "identifies" not in card.text(find(run)), "an earlier version did not know"


def test_its_metadata_are_the_hubs(run):
    data = ModelCard(card.text(find(run), license="apache-2.0")).data
    # A pipeline would pool otherwise.
    assert (data.library_name, data.pipeline_tag, data.license) == ("peft", None, "apache-2.0")
    assert "differential-privacy" in data.tags
    assert data.eval_results[0].metric_value == 0.81234
    assert data.base_model is None, "the name of a folder is none of the Hub"


def test_a_run_that_protects_nobody_says_so_first(run, tmp_path):
    for changes, reason in (
        ({"noise_source": "seeded"}, "came from a seeded generator"),
        ({"epsilon_local_max": None}, "it had no noise"),
        ({"caveat": "its proof has a gap"}, "its proof has a gap"),
    ):
        found = ModelCard(card.text(with_summary(run, tmp_path, private=False, **changes)))
        assert found.text.lstrip().startswith("> **NOT PRIVATE**")
        assert reason in found.text.replace("\\", "")
        assert "not-private" in found.data.tags


def test_no_text_of_the_data_becomes_metadata_or_markup(run, tmp_path):
    saved = with_summary(run, tmp_path, ledger_head=ATTACK, caveat=ATTACK)
    found = ModelCard(
        card.text(replace(saved, convention={**saved.convention, "labels": [ATTACK], "base_model": ATTACK}))
    )
    assert found.data.license is None
    for markup in ("<script>", "[a](", "http://", "\n---", "\n# Private"):
        assert markup not in found.text
    assert markdown("1. item") == "1\\. item"
    assert markdown("all-MiniLM-L6-v2") == "all-MiniLM-L6-v2"


def test_the_card_of_a_language_model_serves_it_with_vllm(tmp_path):
    saved = find(finished(tmp_path / "run", chat_model(tmp_path / "it's"), ("global",), values=CHAT))
    for rank, shown in ((3, 8), (16, 16), (300, 320), (513, None)):
        text = card.text(replace(saved, settings={**saved.settings, "r": rank}))
        line = f"vllm serve 'it'\"'\"'s' --enable-lora --max-lora-rank {shown} --lora-modules global=.\n"
        assert (line in text) == (shown is not None)
        assert ("vLLM takes no adapter" in text) == (shown is None)


def test_a_system_prompt_stays_within_its_block(tmp_path):
    values = {**CHAT, "system_prompt": "```\n# Private\n````\n"}
    saved = find(finished(tmp_path / "run", chat_model(tmp_path / "model"), ("global",), values=values))
    for form in ("transformers", "gguf", "gguf-adapter"):
        text = card.text(saved, form=form)
        for fence, block in re.findall(r"^(`{3,})\w+\n(.*?)^\1$", text, re.M | re.S):
            assert fence not in block
        assert "Private" not in re.sub(r"^(`{3,})\w+\n(.*?)^\1$", "", text, flags=re.M | re.S)


def test_the_command_prints_it_or_writes_it_anew(run):
    path = run / "variants" / "client-0" / "README.md"
    assert as_json("card", run)["card"] == card.text(find(run))
    fedpriv("card", run, "--variant", "client-0", "--write")
    text = path.read_text()
    assert "What one data holder uploaded" in text
    assert "| rho |" not in text, "an upload is seen by itself"
    fedpriv("card", run / "variants", code=2)


def test_it_says_against_whom_sums_hold_and_of_older_runs_no_more_than_was_counted(run, tmp_path):
    for said, against in (({"num_readers": 1}, "the server and any one participant"), ({}, "the server alone")):
        text = card.text(with_summary(run, tmp_path, epsilon_aggregate_max=1.0, **said))
        assert f"| aggregate | 1 | 1e-5 | {against}, who saw sums of uploads alone |" in text
