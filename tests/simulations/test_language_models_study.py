"""The study of language models: what its cells run is what its page says they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv import config as configuration
from simulations.studies.language_models import (
    ANSWERS,
    DELTA,
    GRID,
    MESSAGES,
    PLAIN,
    PRIVATE,
    REVIEWS,
    LanguageCell,
    cells,
    configured,
    values_of,
)
from simulations.studies.plain_lora import configured as plain_configured

DATA = Path("data")


def config_of(cell: LanguageCell, tmp_path: Path) -> configuration.RunConfig:
    return configured(cell, values_of(cell, DATA, tmp_path), tmp_path / "run")


def test_every_cell_has_a_key_of_its_own_and_a_configuration(tmp_path):
    planned = list(cells())
    assert len({cell.key for cell in planned}) == len(planned)
    # Cells that differ in their seed alone have one configuration, but for that seed.
    for cell in {replace(cell, seed=0): cell for cell in planned if cell.method == PRIVATE}.values():
        config = config_of(cell, tmp_path)
        assert config.seed == cell.seed
        assert (config.target_epsilon or None, config.delta) == (cell.epsilon, cell.delta)
        assert cell.epsilon or config.noise_multiplier == 0


@pytest.mark.parametrize("task", [REVIEWS, MESSAGES])
def test_questions_with_answers_name_columns_answers_and_epsilon_alone(task, tmp_path):
    cell = LanguageCell(task=task, epsilon=8.0)
    config = config_of(cell, tmp_path)
    assert (config.factors, config.aggregation, config.train) == ("answers", "fed-sb", "all")
    of_recipe = {"learning_rate", "clip_norm", "rounds", "rank", "alpha", "layers", "target_modules", "prompt_template"}
    assert of_recipe.isdisjoint(values_of(cell, DATA, tmp_path))


def test_the_grids_differ_in_what_they_vary_alone(tmp_path):
    base = LanguageCell(task=GRID, epsilon=2.0)
    one = config_of(base, tmp_path)
    assert config_of(replace(base, delta=1e-3), tmp_path) == replace(one, delta=1e-3)
    assert config_of(replace(base, rank=16), tmp_path) == replace(one, rank=16)
    assert config_of(replace(base, epsilon=4.0), tmp_path) == replace(one, target_epsilon=4.0)
    assert (one.delta, one.max_records) == (DELTA, 150)


def test_training_in_one_place_reads_the_prompts_of_the_federation(tmp_path):
    cell = LanguageCell(task=MESSAGES, method=PLAIN)
    plain = plain_configured(values_of(cell, DATA, tmp_path), weights=False)
    private = config_of(replace(cell, method=PRIVATE, epsilon=8.0), tmp_path)
    assert plain.prompt_template == private.prompt_template != "{}"
    assert (plain.aggregation, plain.factors, plain.answers) == ("dp-lora", "weights", private.answers)


def test_free_answers_keep_the_recipe_of_free_answers(tmp_path):
    config = config_of(LanguageCell(task=ANSWERS, epsilon=8.0), tmp_path)
    assert (config.aggregation, config.factors, config.max_records) == ("ffa-lora", "inputs", 500)
    grid = config_of(LanguageCell(task=GRID, epsilon=8.0), tmp_path)
    assert (grid.aggregation, grid.factors, grid.sampling_probability) == ("ffa-lora", "weights", 0.15)
