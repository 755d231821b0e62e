"""Tab completion of `python -m simulations`, in a real bash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.config import KEYS
from simulations.__main__ import _engine_names, _override_names, _recipe_names

ROOT = Path(__file__).resolve().parents[2]

ASK = """
eval "$({python} -m simulations --show-completion)"
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
_simulations_completion
echo "${{COMPREPLY[*]}}"
"""


def test_keys_their_values_engines_and_recipes_are_completed():
    assert _override_names("target_") == ["target_modules=", "target_epsilon=", "target_risk="]
    assert _override_names("") == [f"{key}=" for key in KEYS]
    assert _override_names("simulate=") == ["simulate=true", "simulate=false"]
    assert _override_names("mechanism=l") == ["mechanism=lmo"]
    assert _override_names("rank=") == _override_names("none=") == []
    assert _engine_names("") == ["stacked", "in-process", "ray"]
    assert _recipe_names("dp") == ["dp-lora-paper"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("-m simulations ru", "run"),
        ("-m simulations run --recipe d", "dp-lora-paper"),
        ("-m simulations run -c rounds=3 -c engine=st", "stacked"),
        ("-m simulations run -c target_e", "target_epsilon="),
        ("-m simulations run simulations/conf", ""),
        ("script.py ", ""),
    ],
)
def test_bash_asks_and_gets_what_it_can_put_in_place(line, answers):
    script = ASK.format(python=sys.executable, line=f"{sys.executable} {line}")
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (answers, "")
