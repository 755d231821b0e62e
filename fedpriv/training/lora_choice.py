"""Whether a run whose `train` is `auto` trains A and B: decided by public numbers, before anything is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedpriv.accounting.recipe import LORA_ADAM_NOISE, LORA_PAYS, LORA_PROBABILITY, LORA_ROUNDS, LORA_SHARE, lora_noise
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.training.noise_plan import calibrated, federation_of, num_lora_values


def decided(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> tuple[RunConfig, str]:
    """The configuration with the rounds that `train = auto` stands for, and why; as it is, and "", with any other.

    Where noise leaves LoRA enough signal, most rounds train A, B and head with most of the budget; elsewhere all rounds
    train the head alone. docs/recipes.md says how the bound was found.

    Args:
        config: of the run; its noise may be still to be calibrated.
        sizes: N_k of all clients.
        initial: the adapter.

    Raises:
        InputError: no noise meets the target.
    """
    if config.train != "auto":
        return config, ""
    num_rounds = round(LORA_ROUNDS * (config.rounds - config.head_start))
    with_lora = replace(
        config,
        lora_rounds=num_rounds,
        lora_share=LORA_SHARE,
        lora_sampling_probability=LORA_PROBABILITY,
        lora_server_optimizer="adam",
    )
    found = calibrated(with_lora, sizes, initial)
    num_values = num_lora_values(config, initial)
    # In units of the clip norm, whatever it is: the bound was found so.
    noise = lora_noise(
        federation_of(config, sizes),
        noise_stddev=found.noise_multiplier if found.lora_noise_multiplier is None else found.lora_noise_multiplier,
        sampling_probability=LORA_PROBABILITY,
        num_steps=num_rounds,
        num_values=num_values,
    )
    # Adam steps by its rate whatever the gradient's size is, so the rate follows the noise of a round.
    of_round = math.sqrt(noise / num_values * num_rounds)
    rate = min(config.lora_server_learning_rate, LORA_ADAM_NOISE / (of_round * num_values) if noise else math.inf)
    with_lora = replace(with_lora, lora_server_learning_rate=rate)
    pays = noise <= LORA_PAYS
    reason = (
        f"train = auto: {'A, B and head' if pays else 'the head alone'}, since nu^2 d, the noise in A and B, would be "
        f"{noise:.2g} with {sum(sizes)} records of {len(sizes)} clients; LoRA pays up to {LORA_PAYS:g}"
    )
    return (with_lora if pays else replace(config, lora_rounds=0)), reason
